"""Which experts a token goes to, in plain PyTorch: what the kernel of `cute_kernels.router_ops`
equals bit for bit, and what CPU tensors get.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cute_kernels import scoring

LANES = 32  # the softmax adds experts 32 apart first, then folds: see `softmax`


@dataclasses.dataclass(frozen=True)
class Selection:
    """How experts are chosen from scores.

    scoring      one of `scoring.SCORINGS`
    num_groups   groups of neighbouring experts, of which the best ``top_groups`` stay
    renormalize  weights are divided by their sum (0 / 0 -> 0)
    factor       then multiplied by this
    """

    top_k: int
    scoring: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    factor: float = 1.0


class TorchScores:
    """The namespace of `cute_kernels.scoring` on fp32 tensors; scalars may be Python floats."""

    def add(self, a: Tensor, b: Tensor | float) -> Tensor:
        return a + b

    def mul(self, a: Tensor, b: Tensor | float) -> Tensor:
        return a * b

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        return a / b

    def sqrt(self, a: Tensor) -> Tensor:
        """Through fp64: that of fp32 is not rounded correctly on every CPU. A root of 24 bits is no
        nearer to the middle of two fp32 numbers than 2^-50, so the second rounding does no harm."""
        return a.double().sqrt().float()

    def maximum(self, a: Tensor, b: float) -> Tensor:
        return a.clamp(min=b)  # keeps NaN

    def minus_abs(self, a: Tensor) -> Tensor:
        return -a.abs()

    def where_negative(self, a: Tensor, yes: Tensor, no: float) -> Tensor:
        return torch.where(a < 0, yes, no)

    def scale(self, a: Tensor, t: Tensor) -> Tensor:
        """In two steps: 2^k alone may be below the normal numbers, and one rounding must do."""
        k = t.view(torch.int32) - scoring.ROUNDER_BITS
        half = k >> 1
        for exponent in (half, k - half):
            a = a * ((exponent + 127) << 23).view(torch.float32)
        return a


def scores(logits: Tensor, kind: str) -> Tensor:
    """fp32 (T, E) -> fp32 scores: softmax over experts, sigmoid, or sqrt(softplus).

    Raises ValueError for another ``kind``.
    """
    m, logits = TorchScores(), logits.float()
    if kind == "softmax":
        return softmax(m, logits)
    if kind == "sigmoid":
        return scoring.sigmoid(m, logits)
    if kind == "sqrtsoftplus":
        return scoring.sqrtsoftplus(m, logits)
    raise ValueError(f"scoring must be softmax, sigmoid or sqrtsoftplus, got {kind!r}")


def softmax(m: TorchScores, logits: Tensor) -> Tensor:
    """exp(x - max) over its sum. The order of the sum is that of a warp: lane l adds experts l,
    l + 32, ... in order, then lanes 16, 8, 4, 2, 1 apart are added."""
    if logits.shape[0] == 0:
        return logits
    e = scoring.exp(m, logits - logits.amax(dim=-1, keepdim=True))
    lanes = torch.nn.functional.pad(e, (0, -e.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    total = lanes[:, 0]
    for i in range(1, lanes.shape[1]):
        total = total + lanes[:, i]
    width = LANES
    while width > 1:
        width //= 2
        total = total[:, :width] + total[:, width:]
    return e / total


def stable_top(values: Tensor, k: int) -> Tensor:
    """int64 (T, k) indices of the largest, ties to the lower index (torch.topk gives no such
    promise); NaN is the largest."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :k]


def keep_best_groups(biased: Tensor, num_groups: int, top_groups: int) -> Tensor:
    """Scores of the experts outside the best groups become -inf (DeepSeek-V3 section 2.1.2)."""
    grouped = biased.unflatten(-1, (num_groups, -1))  # (T, groups, experts per group)
    best_two = grouped.sort(dim=-1, descending=True).values[..., :2]
    group_score = (
        best_two[..., 0] if best_two.shape[-1] == 1 else best_two[..., 0] + best_two[..., 1]
    )
    chosen = stable_top(group_score, top_groups)  # (T, top_groups)
    kept = torch.zeros_like(group_score, dtype=torch.bool).scatter(-1, chosen, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(-2)


def select(
    logits: Tensor,
    how: Selection,
    selection_bias: Tensor | None = None,
    tid2eid: Tensor | None = None,
    input_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 logits (T, E) -> ids int32 (T, k), weights fp32 (T, k); arguments as in
    `cute_kernels.router_ops.router_topk`, checked there or in `moe.router.route`."""
    s = scores(logits, how.scoring)
    padding = None
    if tid2eid is not None:
        assert input_ids is not None
        token_ids = input_ids.reshape(-1).long()
        padding = (token_ids < 0).unsqueeze(-1)  # (T, 1); as an index -1 would be the last row
        ids = tid2eid[token_ids.clamp(min=0)].long()
    else:
        choose = s if selection_bias is None else s + selection_bias.float()
        if how.num_groups > 1:
            choose = keep_best_groups(choose, how.num_groups, how.top_groups)
        ids = stable_top(choose, how.top_k)
    weights = s.gather(-1, ids)
    if how.renormalize:
        total = weights[:, 0]
        for slot in range(1, how.top_k):  # in order: a sum that does not depend on the batch
            total = total + weights[:, slot]
        total = total.unsqueeze(-1)
        weights = torch.where(total == 0, 0.0, weights / total)
    if padding is not None:
        ids, weights = torch.where(padding, -1, ids), torch.where(padding, 0.0, weights)
    return ids.int(), weights * how.factor


def row_scale(x: Tensor, bits: int) -> Tensor:
    """fp64 (rows, 1): the power of two p with max|x| / p in [2^(bits-1), 2^bits), the smallest one
    for a zero row, NaN for a row with NaN or Inf.
    """
    amax = x.abs().amax(dim=-1, keepdim=True) if x.shape[-1] else x.new_zeros(x.shape[0], 1)
    exponent = (amax.float().view(torch.int32) >> 23) - 127  # exact, unlike log2
    step = ((exponent.long() + (1 - bits + 1023)) << 52).view(torch.float64)
    return torch.where(torch.isfinite(amax), step, torch.nan)
