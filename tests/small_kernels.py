"""Inputs and comparisons for the small kernels: shared by the CPU, simulator and GPU tests."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cute_kernels import nvfp4, torch_ops

GUARD = 0x7FFFFFFF


@dataclasses.dataclass(frozen=True)
class Case:
    """``routing``: 'random', 'one' (everything to one expert), 'holes' (ids < 0, foreign and too
    large, also by 2^32), 'nowhere' (no slot has a row). ``first`` is the global id of local expert
    0 of 3 * experts."""

    tokens: int
    hidden: int = 64
    experts: int = 8
    top_k: int = 2
    dtype: torch.dtype = torch.bfloat16
    routing: str = "random"
    ids: torch.dtype = torch.int64
    first: int = 0
    special: bool = True  # NaN, Inf, zero, tiny and tie rows
    seed: int = 0

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 7919 * self.tokens)

    @property
    def all_experts(self) -> int:
        return self.first + 3 * self.experts

    def routes(self) -> tuple[Tensor, Tensor]:
        """topk_ids (T, K) global ids, topk_weights fp32 (T, K)."""
        g = self.generator()
        shape = (self.tokens, self.top_k)
        ids = torch.randint(0, self.experts, shape, generator=g) + self.first
        if self.routing == "one":
            ids = torch.full(shape, self.first + self.experts - 1)
        elif self.routing == "holes":
            wild = [-1, -(2**31), self.all_experts, 2**31 - 1, self.first - 1]
            if self.ids == torch.int64:  # the low words are ids of local experts
                wild += [2**32 + self.first, self.first - 2**32]
            pick = torch.randint(0, len(wild), shape, generator=g)
            ids = torch.where(torch.rand(shape, generator=g) < 0.4, torch.tensor(wild)[pick], ids)
        elif self.routing == "nowhere":
            ids = torch.full(shape, -1)
        return ids.to(self.ids), torch.rand(shape, generator=g)

    def x(self) -> Tensor:
        """(T, hidden), rows of very different sizes; some rows hold what breaks quantisers."""
        g = self.generator()
        x = torch.randn((self.tokens, self.hidden), generator=g)
        x *= 2.0 ** torch.randint(-12, 12, (self.tokens, 1), generator=g)
        if self.special:
            ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
            ties = torch.cat((ties, -ties)).repeat(self.hidden // 16)
            rows = [torch.zeros(self.hidden), ties, x[:1].squeeze(0) * 1e-38, -ties * 448]
            rows += [x[0] * torch.where(torch.arange(self.hidden) < 16, 1.0, 1e-4)]
            rows += [ties.clone().index_fill_(0, torch.tensor([3]), float("nan"))]
            rows += [ties.clone().index_fill_(0, torch.tensor([5]), -float("inf"))]
            for i, row in enumerate(rows):
                if 2 * i + 1 < self.tokens:
                    x[2 * i + 1] = row
        return x.to(self.dtype)


def guarded(values: Tensor) -> Tensor:
    """The same int32 values in a buffer whose next entries hold GUARD: reading past the end
    shows."""
    buffer = torch.full((values.numel() + 64,), GUARD, dtype=torch.int32, device=values.device)
    buffer[: values.numel()] = values
    return buffer[: values.numel()]


def plan(case: Case, pad: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Offsets, row_token, row_weight and token_rows of the case in plain PyTorch."""
    ids, weights = case.routes()
    rows = ids.numel() + pad
    return torch_ops.sort_routes(ids, weights, case.all_experts, case.first, case.experts, rows)


def assert_same(got: Tensor, want: Tensor, what: str) -> None:
    """Same dtype, shape and bits; any NaN equals any NaN."""
    assert got.dtype == want.dtype and got.shape == want.shape, (
        f"{what}: {got.dtype} {tuple(got.shape)}, expected {want.dtype} {tuple(want.shape)}"
    )
    got, want = got.cpu(), want.cpu()
    if got.dtype.is_floating_point:
        integer = {2: torch.int16, 4: torch.int32}[got.element_size()]
        bad = (got.view(integer) != want.view(integer)) & ~(got.isnan() & want.isnan())
    else:
        bad = got != want
    if bad.any():
        where = bad.nonzero()[0].tolist()
        raise AssertionError(
            f"{what}: {int(bad.sum())} of {bad.numel()} entries differ, first at {where}: "
            f"got {got[tuple(where)]}, expected {want[tuple(where)]}"
        )


def used_scales(scale: Tensor, expert_offsets: Tensor) -> Tensor:
    """Grouped scale rows that belong to an expert: the rest of the buffer is not written."""
    return scale[: int(nvfp4.grouped_scale_offsets(expert_offsets)[-1])]


def assert_quantized(got: tuple[Tensor, ...], want: tuple[Tensor, ...], offsets: Tensor) -> None:
    assert_same(got[0], want[0], "codes")
    assert_same(got[2], want[2], "gx")
    assert got[1].shape == want[1].shape
    assert_same(used_scales(got[1], offsets), used_scales(want[1], offsets), "scales")
