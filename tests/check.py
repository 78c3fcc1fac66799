"""Comparisons for kernels: each names the first element that is wrong, and none lets NaN pass.

A whole-tensor norm or cosine is not here on purpose: it passes an output that is scaled by a
constant, and one that has lost a tile. tests/test_check.py corrupts outputs and shows that these
see it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 16  # columns of one block of `assert_blocks_close`


def assert_bytes_equal(out: Tensor, want: Tensor, what: str = "bytes") -> None:
    """Same shape, dtype and bits (so NaN equals itself and -0.0 differs from 0.0)."""
    _assert_alike(out, want, what)
    if want.dim() == 0:
        out, want = out.reshape(1), want.reshape(1)
    a, b = (t.detach().cpu().contiguous().view(torch.uint8) for t in (out, want))
    wrong = a != b
    if bool(wrong.any()):
        index = tuple(int(i) for i in wrong.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} bytes differ, first at byte {index} of "
            f"{tuple(a.shape)}: got {int(a[index]):#04x}, want {int(b[index]):#04x}"
        )


def gemm_bound(abs_sum: Tensor, k: int, alpha: Tensor | float = 1.0) -> Tensor:
    """fp64: 4 (K/64 + 1) 2^-24 sum|a_i b_i| |alpha|, how far an fp32 accumulation may be off
    (docs/numerics.md, section 6)."""
    scale = alpha.double().abs() if isinstance(alpha, Tensor) else abs(float(alpha))
    return 4.0 * (k / 64 + 1) * 2.0**-24 * abs_sum.double() * scale


def half_ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64: half the distance between the two values of ``dtype`` around ``magnitude`` (>= 0)."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(magnitude.double().clamp(min=info.smallest_normal))
    eps = torch.full_like(exponent, info.eps / 2, dtype=torch.float64)
    return torch.ldexp(eps, exponent - 1)


def assert_gemm_close(
    out: Tensor,
    ref64: Tensor,
    abs_sum: Tensor,
    k: int,
    alpha: Tensor | float = 1.0,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Every element of ``out`` within the bound of an fp32 accumulation over ``k`` and half an ulp
    of ``dtype``, which must be the dtype of ``out``.

    ref64    fp64, shape of out: the exact sums, alpha included
    abs_sum  sum |a_i b_i| without alpha, shape of out; alpha broadcasts against it
    """
    if out.dtype != dtype or ref64.dtype != torch.float64:
        raise AssertionError(
            f"out must be {dtype} and ref64 float64, got {out.dtype} and {ref64.dtype}"
        )
    if not out.shape == ref64.shape == abs_sum.shape:
        raise AssertionError(
            f"out, ref64 and abs_sum must have one shape, got {tuple(out.shape)}, "
            f"{tuple(ref64.shape)}, {tuple(abs_sum.shape)}"
        )
    _assert_finite(out, ref64)
    bound = gemm_bound(abs_sum, k, alpha)
    bound = bound + half_ulp(ref64.abs() + bound, dtype)
    error = (out.double() - ref64).abs()
    _raise_at(~(error <= bound), out, ref64, lambda i: f"error {error[i]:.3e} > {bound[i]:.3e}")


def assert_slopes(out: Tensor, ref: Tensor, expert_offsets: Tensor, rtol: float = 1e-3) -> None:
    """Per expert, the least-squares slope of ``out`` on ``ref``, <out, ref> / <ref, ref>, is 1
    within ``rtol``. Rows of expert e are expert_offsets[e] : expert_offsets[e + 1]; an expert whose
    reference is 0 must have an output of 0.

    Half an ulp of bf16 is 2^-9 of a value: experts with a handful of elements need a larger rtol.
    """
    if out.shape != ref.shape or out.dim() != 2:
        raise AssertionError(f"out {tuple(out.shape)} and ref {tuple(ref.shape)} must be (rows, N)")
    bounds = expert_offsets.tolist()
    if bounds[0] != 0 or bounds[-1] > out.shape[0] or bounds != sorted(bounds):
        raise AssertionError(f"expert_offsets {bounds} do not fit {out.shape[0]} rows")
    for e, (first, end) in enumerate(itertools.pairwise(bounds)):
        if first == end:
            continue
        a, b = out[first:end].double(), ref[first:end].double()
        _assert_finite(a, b)
        square = float((b * b).sum())
        if square == 0.0:
            if bool(a.any()):
                raise AssertionError(f"expert {e}: the reference is 0, the output is not")
            continue
        slope = float((a * b).sum()) / square
        if not abs(slope - 1.0) <= rtol:
            raise AssertionError(f"expert {e} (rows {first}:{end}): slope {slope:.6f}, not 1")


def assert_blocks_close(out: Tensor, ref: Tensor, rtol: float = 1e-2) -> None:
    """Relative L2 error of every row, and of every block of 16 columns (over all rows, and over
    every 32 of them), at most ``rtol``. Where the reference is 0 the output must be 0.
    """
    if out.shape != ref.shape or out.dim() != 2:
        raise AssertionError(f"out {tuple(out.shape)} and ref {tuple(ref.shape)} must be (rows, N)")
    _assert_finite(out, ref)
    error, scale = (out.double() - ref.double()).square(), ref.double().square()
    _assert_ratio(error.sum(1), scale.sum(1), rtol, "row")
    if not out.numel():
        return
    blocks = [
        torch.stack([c.sum(1) for c in t.split(BLOCK, dim=1)], dim=1) for t in (error, scale)
    ]  # (rows, N/16)
    _assert_ratio(blocks[0].sum(0), blocks[1].sum(0), rtol, f"block of {BLOCK} columns")
    for first in range(0, out.shape[0], 32):
        part = [b[first : first + 32].sum(0) for b in blocks]
        where = f"rows {first}..{min(first + 32, out.shape[0]) - 1}, block of {BLOCK} columns"
        _assert_ratio(part[0], part[1], rtol, where)


def _assert_ratio(error: Tensor, scale: Tensor, rtol: float, what: str) -> None:
    wrong = ~(error <= rtol * rtol * scale)  # 0 <= 0 where both are 0
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        ratio = math.sqrt(float(error[i] / scale[i])) if scale[i] > 0 else math.inf
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()}: relative L2 error above {rtol}, first in "
            f"{what} {i}: {ratio:.3e}"
        )


def _assert_alike(out: Tensor, want: Tensor, what: str) -> None:
    if out.shape != want.shape or out.dtype != want.dtype:
        raise AssertionError(
            f"{what}: want {tuple(want.shape)} {want.dtype}, got {tuple(out.shape)} {out.dtype}"
        )


def _assert_finite(out: Tensor, ref: Tensor) -> None:
    for name, t in (("the reference", ref), ("the output", out)):
        bad = ~torch.isfinite(t)
        if bool(bad.any()):
            index = tuple(int(i) for i in bad.nonzero()[0])
            raise AssertionError(f"{name} holds {int(bad.sum())} NaN or Inf, first at {index}")


def _raise_at(
    wrong: Tensor, out: Tensor, ref: Tensor, detail: Callable[[tuple[int, ...]], str]
) -> None:
    if bool(wrong.any()):
        i = tuple(int(n) for n in wrong.nonzero()[0])
        raise AssertionError(
            f"{int(wrong.sum())} of {wrong.numel()} elements are off, first at {i}: got "
            f"{float(out[i])!r}, want {float(ref[i])!r}, {detail(i)}"
        )
