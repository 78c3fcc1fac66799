"""Which experts a token goes to, and with what weight: numerics.md section 5.

Every function is a few torch operations and does not depend on the batch: the same token gets the
same bits alone and among others. Kernels with these bits: `cute_kernels.router_ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.torch_router import Selection, scores, select
from moe.config import MoEConfig

__all__ = ["route", "router_logits", "scores", "selection"]

# Bits of an activation relative to the largest of its row, in two parts: together with the sign they
# are an int32, whose bytes the kernels multiply.
_HIGH_BITS, _LOW_BITS = 16, 15
# bits of a router weight relative to the largest of its row; 2^16 * 2^22 * 2^14 terms < 2^53
_W_BITS = 22


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, H) float, weight (E, H) float, bias (E,) or None -> fp32 logits (T, E), the same bits
    in any batch.

    A matrix product sums in an order that depends on the shape. Here the order cannot matter: both
    operands are rounded to fixed point relative to the largest element of their row (x 31 bits,
    in two parts, weights 22 bits), so that every partial sum is an integer below 2^53 and exact in
    fp64. The rounding is below that of an fp32 product. A NaN or Inf in a row of x makes that row
    NaN and no other.

    Raises ValueError when shapes disagree.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"router needs x (T, H) and weight (E, H), got {tuple(x.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if x.shape[1] > 2**14:
        raise ValueError(f"hidden up to {2**14} keeps the router's sums exact, got {x.shape[1]}")
    wide, step = x.double(), _grid(x, _HIGH_BITS)
    high = (wide / step).round()  # (T, H) integers, |.| <= 2^16
    low = ((wide / step - high) * 2.0**_LOW_BITS).round()  # what was lost, |.| <= 2^14
    w_step = _grid(weight, _W_BITS)
    w = (weight.double() / w_step).round().t()  # (H, E)
    total = high @ w + (low @ w) * 2.0**-_LOW_BITS  # each product exact; one rounding in the sum
    logits = (total * step * w_step.t()).float()
    return logits if bias is None else logits + bias.float()


def _grid(x: Tensor, bits: int) -> Tensor:
    """fp64 (rows, 1): the power of two p with max|x| / p in [2^(bits-1), 2^bits); 1 for a zero row,
    NaN for NaN or Inf.
    """
    amax = x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros(x.shape[0], 1)
    exponent = (amax.float().view(torch.int32) >> 23) - 127  # exact, unlike log2
    step = ((exponent.long() + (1 - bits + 1023)) << 52).view(
        torch.float64
    )  # 2^(exponent + 1 - bits)
    return torch.where(torch.isfinite(amax), step, torch.nan)


def route(
    logits: Tensor,
    cfg: MoEConfig,
    selection_bias: Tensor | None = None,
    tid2eid: Tensor | None = None,
    input_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Logits (T, num_experts) -> topk_ids int32 (T, top_k), topk_weights fp32 (T, top_k).

    selection_bias  (num_experts,): added to the scores that *choose*; the weights are the unbiased
                    scores
    tid2eid         (vocabulary, top_k) int: hash routing, ids = tid2eid[input_ids]; weights from
                    the scores. A token with a negative input id is padding: its ids are -1 and its
                    weights 0, so that it reaches no expert

    The weights do not contain ``routed_scaling_factor``: `MoE.forward` applies it. Zero tokens are
    valid.
    Raises ValueError when shapes disagree or hash routing lacks input_ids.
    """
    if logits.dim() != 2 or logits.shape[1] != cfg.num_experts:
        raise ValueError(f"logits must be (T, {cfg.num_experts}), got {tuple(logits.shape)}")
    if tid2eid is not None:
        if input_ids is None:
            raise ValueError("this layer routes by token id (tid2eid): pass input_ids to forward")
        if input_ids.numel() != logits.shape[0]:
            raise ValueError(
                f"input_ids must hold one id per token, got {input_ids.numel()} for "
                f"{logits.shape[0]}"
            )
        if input_ids.is_floating_point():
            raise TypeError(f"input_ids must be integers, got {input_ids.dtype}")
    return select(logits, selection(cfg), selection_bias, tid2eid, input_ids)


def selection(cfg: MoEConfig, factor: float = 1.0) -> Selection:
    """How the config chooses experts."""
    groups = (cfg.num_groups, cfg.top_groups)
    return Selection(cfg.top_k, cfg.scoring, *groups, cfg.renormalize, factor)
