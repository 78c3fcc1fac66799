"""Inputs of the router that break what is not exact; for CPU, simulator and GPU tests."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels.scoring import SCORINGS
from cute_kernels.torch_router import Selection

HOSTILE = 10  # rows of `hostile` that differ in kind


def hostile(tokens: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """x (T, H): elements over many binades; rows of zeros, NaN, Inf, -Inf, subnormal numbers, one
    giant, one value, near the largest number, alternating signs."""
    g = torch.Generator().manual_seed(seed + 31 * tokens + hidden)
    x = torch.randn(tokens, hidden, generator=g)
    x = x * 2.0 ** torch.randint(-30, 3, (tokens, hidden), generator=g)
    x = (x * 2.0 ** torch.randint(-8, 8, (tokens, 1), generator=g)).to(dtype)
    info, middle = torch.finfo(dtype), hidden // 2
    for row in range(tokens):
        kind = row % (2 * HOSTILE)
        if kind == 1:
            x[row] = 0.0
        elif kind in (2, 3, 4):
            x[row, middle] = (torch.nan, torch.inf, -torch.inf)[kind - 2]
        elif kind == 5:
            x[row] = torch.randint(-9, 9, (hidden,), generator=g).to(dtype) * info.smallest_normal
            x[row] /= 64
        elif kind == 6:
            x[row, hidden - 1] = info.max
        elif kind == 7:
            x[row] = 0.7
        elif kind == 8:
            x[row] = (torch.rand(hidden, generator=g) - 0.5).to(dtype) * info.max
        elif kind == 9:
            x[row] = info.max * (1 - 2 * (torch.arange(hidden) % 2)).to(dtype)
    return x


def router_weight(experts: int, hidden: int, seed: int = 1) -> Tensor:
    """fp32 (E, H): all bits in use, every third row with values of many sizes; the last but one
    rows are zero and NaN where there are enough."""
    g = torch.Generator().manual_seed(seed + experts)
    w = torch.randn(experts, hidden, generator=g)
    w[::3] *= 2.0 ** torch.randint(-24, 1, (len(w[::3]), hidden), generator=g)
    if experts > 6:
        w[-2], w[-3, hidden // 3] = 0.0, torch.nan
    return w


def hostile_logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    """fp32 (T, E): random rows, and rows of ties, zeros of both signs, NaN, infinities, large and
    tiny numbers."""
    g = torch.Generator().manual_seed(seed + experts)
    logits = torch.randn(tokens, experts, generator=g) * 4
    for row in range(tokens):
        kind = row % 16
        if kind == 1:
            logits[row] = logits[row].round()
        elif kind == 2:
            logits[row] = torch.tensor([0.0, -0.0]).repeat(experts)[:experts]
        elif kind == 3:
            logits[row, ::3] = torch.nan
        elif kind == 4:
            logits[row] -= 200.0
        elif kind == 5:
            logits[row, experts // 2] = torch.inf
        elif kind == 6:
            logits[row, : experts // 2] = -torch.inf
        elif kind == 7:
            logits[row] *= 30.0
        elif kind == 8:
            logits[row] = -torch.inf
        elif kind == 9:
            logits[row] *= 1e-30
    return logits


def selections(experts: int, top_k: int) -> list[Selection]:
    """Every scoring, with and without what else changes the choice."""
    some = [Selection(top_k, kind, factor=2.5) for kind in SCORINGS]
    some.append(Selection(top_k, "sigmoid", renormalize=False))
    for groups, kept in ((8, 4), (4, 2)):
        if experts % groups == 0 and experts // groups * kept >= top_k:
            some += [Selection(top_k, kind, groups, kept) for kind in SCORINGS]
    return some
