"""Which experts a token goes to, and with what weight: numerics.md section 5.

Every function is a few torch operations and does not depend on the batch: the same token gets the
same bits alone and among others. Kernels with these bits: `cute_kernels.router_ops`.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from cute_kernels import router_ops
from cute_kernels.gemm_ops import kernels_on, without_launches
from cute_kernels.router_ops import RouterWeights
from cute_kernels.torch_router import Selection, row_scale, scores, select
from moe.config import MoEConfig
from moe.kernels import ALL_KERNEL_BACKENDS

__all__ = ["RouterKernels", "route", "route_tokens", "router_logits", "scores", "selection"]

# Bits of an activation relative to the largest of its row, in two parts; with the sign they are an
# int32, whose bytes the kernels multiply.
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
    wide, step = x.double(), row_scale(x, _HIGH_BITS)
    high = (wide / step).round()  # (T, H) integers, |.| <= 2^16
    low = ((wide / step - high) * 2.0**_LOW_BITS).round()  # what was lost, |.| <= 2^14
    w_step = row_scale(weight, _W_BITS)
    w = (weight.double() / w_step).round().t()  # (H, E)
    total = high @ w + (low @ w) * 2.0**-_LOW_BITS  # each product exact; one rounding in the sum
    logits = (total * step * w_step.t()).float()
    return logits if bias is None else logits + bias.float()


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
        input_ids = check_input_ids(input_ids, logits)
    return select(logits, selection(cfg), selection_bias, tid2eid, input_ids)


def route_tokens(
    x: Tensor, router: tuple[Tensor | None, ...], input_ids: Tensor | None, cfg: MoEConfig
) -> tuple[Tensor, Tensor]:
    """x (T, H) -> topk_ids, topk_weights (T, k) times ``routed_scaling_factor``.

    router  weight, bias, selection bias and tid2eid of a layer
    """
    weight, bias, selection_bias, tid2eid = router
    assert weight is not None  # the layer has checked
    logits = router_logits(x, weight, bias)
    ids, weights = route(logits, cfg, selection_bias, tid2eid, input_ids)
    return ids, weights * cfg.routed_scaling_factor


def check_input_ids(input_ids: Tensor | None, rows: Tensor) -> Tensor:
    """Flat token ids of a layer that routes by them, one for each of ``rows``, or an error."""
    if input_ids is None:
        raise ValueError("this layer routes by token id (tid2eid): pass input_ids to forward")
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids must be a tensor, got {type(input_ids).__name__}")
    if input_ids.numel() != rows.shape[0]:
        raise ValueError(
            f"input_ids must hold one id per token, got {input_ids.numel()} for {rows.shape[0]}"
        )
    if input_ids.device != rows.device:
        raise ValueError(f"input_ids are on {input_ids.device}, the tokens on {rows.device}")
    if input_ids.is_floating_point() or input_ids.dtype == torch.bool:
        raise TypeError(f"input_ids must be integers, got {input_ids.dtype}")
    return input_ids.reshape(-1)


def selection(cfg: MoEConfig, factor: float = 1.0) -> Selection:
    """How the config chooses experts."""
    groups = (cfg.num_groups, cfg.top_groups)
    return Selection(cfg.top_k, cfg.scoring, *groups, cfg.renormalize, factor)


class RouterKernels:
    """The router of a layer on kernels: the bits of `router_logits` and `route`, the weights times
    ``routed_scaling_factor``.

    The digits of the router's weight follow it: made at the first call, and anew, in the same
    memory, when the weight is another tensor or was written to. Writes through ``.data``, to a
    weight made in torch.inference_mode, and those that code of torch.compile should see, do not
    show: `load_state_dict` and `warmup` make the digits anew in any case.
    """

    def __init__(self, cfg: MoEConfig, simulated: bool = False) -> None:
        self.simulated = simulated  # CPU tensors run the kernels in the simulator
        self.cfg, self.how = cfg, selection(cfg, cfg.routed_scaling_factor)
        self._source: Tensor | None = None  # kept: its address cannot become another weight's
        self._version = (0, 0)
        self._weights: RouterWeights | None = None

    @classmethod
    def of(cls, backend: str, cfg: MoEConfig) -> RouterKernels | None:
        """None for a backend, or sizes, without these kernels."""
        fits = cfg.hidden % 8 == 0 and cfg.hidden <= router_ops.MAX_HIDDEN
        fits = fits and not router_ops.unsupported(cfg.num_experts, selection(cfg))
        return cls(cfg, backend == "sim") if backend in ALL_KERNEL_BACKENDS and fits else None

    def refresh(self, weight: Tensor | None) -> None:
        """The weight was written to: so are its digits, if there are any."""
        if self._weights is not None and weight is not None:
            self._source = None
            self.weights(weight)

    def weights(self, weight: Tensor) -> RouterWeights:
        """``weight`` (E, H) as the kernels read it."""
        if torch.compiler.is_compiling():
            return self._weights or self._pack(weight)
        # an inference tensor counts no writes; a new .data counts none either, but moves
        version = (0 if weight.is_inference() else weight._version, weight.data_ptr())
        old = self._weights
        if old is None or weight is not self._source or version != self._version:
            new = self._pack(weight)
            if old is not None and old.scale.device == weight.device:
                for memory, tensor in zip(old, new):  # a CUDA graph may hold the address
                    memory.copy_(tensor)
                new = old
            self._source, self._version, self._weights = weight, version, new
        assert self._weights is not None
        return self._weights

    def _pack(self, weight: Tensor) -> RouterWeights:
        shape = (self.cfg.num_experts, self.cfg.hidden)
        if tuple(weight.shape) != shape:  # a layer's tensors may be replaced after construction
            raise ValueError(f"router_weight must be {shape}, got {tuple(weight.shape)}")
        return router_ops.pack_weights(weight)

    def __call__(
        self, x: Tensor, router: tuple[Tensor | None, ...], input_ids: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """x (T, H) -> topk_ids, topk_weights (T, k). ``router``: weight, bias, selection bias and
        tid2eid of the layer."""
        weight, bias, selection_bias, tid2eid = router
        assert weight is not None  # the layer has checked
        if tid2eid is None:
            input_ids = None
        else:
            input_ids = check_input_ids(input_ids, x)
            if input_ids.dtype not in router_ops.INTEGERS:
                input_ids = input_ids.long()
        with kernels_on(x.device) if self.simulated else contextlib.nullcontext():
            linear = None if bias is None else bias.float()
            logits = router_ops.router_logits(x, self.weights(weight), linear)
            chooses = None if selection_bias is None else selection_bias.float()
            return router_ops.router_topk(logits, self.how, chooses, tid2eid, input_ids)

    def warmup(self, max_tokens: int, router: tuple[Tensor | None, ...]) -> None:
        """Compile and load every kernel of every call with up to ``max_tokens`` tokens; the digits
        are made anew, whatever their weight shows."""
        weight, _, _, tid2eid = router
        if weight is None:
            return
        self._source = None
        self.weights(weight)
        kinds = router_ops.INTEGERS if tid2eid is not None else (torch.int64,)
        with without_launches():
            for count in router_ops.kernel_sizes(max_tokens, weight.shape[0], weight.device):
                for dtype in (torch.bfloat16, torch.float16, torch.float32):
                    x = weight.new_empty((count, self.cfg.hidden), dtype=dtype)
                    for kind in kinds:
                        self(x, router, x.new_empty(count, dtype=kind))
