"""The comparisons of tests/check.py see every corruption they are for, and pass a right output."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.check import (
    assert_blocks_close,
    assert_bytes_equal,
    assert_gemm_close,
    assert_slopes,
    gemm_bound,
    half_ulp,
)

ROWS, N, K = 96, 64, 256
OFFSETS = torch.tensor([0, 40, 40, 96], dtype=torch.int32)
ALPHA = 0.37


class Product:
    """A small matrix product whose fp32 accumulation is inside the bound: out in bf16."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        gen = torch.Generator().manual_seed(0)
        a = torch.randn(ROWS, K, generator=gen, dtype=torch.float64)
        b = torch.randn(N, K, generator=gen, dtype=torch.float64)
        a, b = a.float().double(), b.float().double()
        self.ref = (a @ b.t()) * ALPHA
        self.abs_sum = a.abs() @ b.abs().t()
        self.out = ((a.float() @ b.float().t()) * ALPHA).to(dtype)


def zero_block(out: Tensor) -> None:
    out[:, 16:32] = 0


def zero_block_of_a_tile(out: Tensor) -> None:
    out[32:64, 48:64] = 0


def zero_block_of_a_row(out: Tensor) -> None:
    out[7, 16:32] = 0


def scale(out: Tensor) -> None:
    out.mul_(0.98)


def scale_one_expert(out: Tensor) -> None:
    out[40:96].mul_(0.98)


def drop_row(out: Tensor) -> None:
    out[95] = 0


def swap_rows(out: Tensor) -> None:
    out[[3, 77]] = out[[77, 3]]


def one_nan(out: Tensor) -> None:
    out[50, 60] = torch.nan


def one_inf(out: Tensor) -> None:
    out[0, 0] = torch.inf


CORRUPTIONS = [
    zero_block, zero_block_of_a_tile, zero_block_of_a_row, scale, scale_one_expert, drop_row,
    swap_rows, one_nan, one_inf,
]  # fmt: skip


def gemm(p: Product) -> None:
    assert_gemm_close(p.out, p.ref, p.abs_sum, K, ALPHA, p.out.dtype)


def slopes(p: Product) -> None:
    assert_slopes(p.out, p.ref, OFFSETS)


def blocks(p: Product) -> None:
    assert_blocks_close(p.out, p.ref)


def same_bytes(p: Product) -> None:
    assert_bytes_equal(p.out, Product(p.out.dtype).out)


ALL = [gemm, slopes, blocks, same_bytes]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("check", ALL)
def test_a_right_output_passes(check: Callable, dtype: torch.dtype) -> None:
    check(Product(dtype))


@pytest.mark.parametrize("corrupt", CORRUPTIONS)
@pytest.mark.parametrize("check", [gemm, blocks, same_bytes])
def test_every_corruption_is_seen(check: Callable, corrupt: Callable) -> None:
    p = Product()
    corrupt(p.out)
    with pytest.raises(AssertionError):
        check(p)


@pytest.mark.parametrize(
    "corrupt", [c for c in CORRUPTIONS if c is not zero_block_of_a_row]
)  # one block of one row moves the slope of 56 rows by less than 1e-2 / 2
def test_slopes_see_what_changes_an_expert(corrupt: Callable) -> None:
    p = Product()
    corrupt(p.out)
    with pytest.raises(AssertionError):
        slopes(p)


def test_dtypes_and_shapes_are_part_of_the_comparison() -> None:
    p = Product()
    for out, ref, abs_sum in (
        (p.out.float(), p.ref, p.abs_sum),
        (p.out, p.ref.float(), p.abs_sum),
        (p.out[:-1], p.ref, p.abs_sum),
        (p.out, p.ref, p.abs_sum[:, :1]),
    ):
        with pytest.raises(AssertionError, match="must"):
            assert_gemm_close(out, ref, abs_sum, K, ALPHA)
    for check in (
        lambda o: assert_slopes(o, p.ref, OFFSETS),
        lambda o: assert_blocks_close(o, p.ref),
    ):
        with pytest.raises(AssertionError, match="must be"):
            check(p.out[:, :-1])
    for other in (p.out.half(), p.out[:-1], p.out.view(torch.int16)):
        with pytest.raises(AssertionError, match="want"):
            assert_bytes_equal(other, p.out)


def test_the_gemm_bound_is_tight() -> None:
    """One ulp of bf16 off is seen, half an ulp is not."""
    p = Product()
    p.out.view(torch.int16)[10, 10] += 1
    with pytest.raises(AssertionError, match=r"1 of 6144 elements are off, first at \(10, 10\)"):
        gemm(p)


def test_half_ulp() -> None:
    """Powers of two start a binade; below the smallest normal the spacing is constant."""
    at = torch.tensor([1.0, 1.99, 2.0, 0.75, 0.0, 2.0**-140], dtype=torch.float64)
    want = torch.tensor([2**-8, 2**-8, 2**-7, 2**-9, 2**-134, 2**-134], dtype=torch.float64)
    assert torch.equal(half_ulp(at, torch.bfloat16), want)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        wide = torch.float64 if dtype == torch.float32 else torch.float32
        x = torch.rand(4096, dtype=wide, generator=torch.Generator().manual_seed(0)) * 8
        error = (x.to(dtype).double() - x.double()).abs()
        assert bool((error <= half_ulp(x, dtype)).all())
        assert float((error / half_ulp(x, dtype)).max()) > 0.95


def test_gemm_bound_is_the_formula() -> None:
    got = gemm_bound(torch.tensor([3.0]), 128, torch.tensor([-2.0]))
    assert got.item() == 4 * 3 * 2.0**-24 * 3 * 2


def test_bytes_name_the_first_difference() -> None:
    want = torch.zeros(3, 4, dtype=torch.uint8)
    out = want.clone()
    out[1, 2], out[2, 0] = 7, 1
    with pytest.raises(AssertionError, match=r"2 of 12 bytes .*\(1, 2\).*0x07, want 0x00"):
        assert_bytes_equal(out, want)
    with pytest.raises(AssertionError, match="1 of 4 bytes"):
        assert_bytes_equal(torch.tensor(-0.0), torch.tensor(0.0))
    assert_bytes_equal(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert_bytes_equal(torch.zeros(0, 4), torch.zeros(0, 4))


def test_references_of_zero() -> None:
    """An expert, a row or a block that must be 0 has no relative error: it must be 0."""
    out, offsets = torch.zeros(4, 32), torch.tensor([0, 2, 4])
    assert_slopes(out, torch.zeros(4, 32), offsets)
    assert_blocks_close(out, torch.zeros(4, 32))
    assert_blocks_close(out[:0], torch.zeros(0, 32))
    out[3, 20] = 1e-30
    with pytest.raises(AssertionError, match="expert 1: the reference is 0"):
        assert_slopes(out, torch.zeros(4, 32), offsets)
    with pytest.raises(AssertionError, match="row 3: inf"):
        assert_blocks_close(out, torch.zeros(4, 32))


def test_offsets_must_fit() -> None:
    for bad in ([0, 5], [1, 4], [0, 3, 2]):
        with pytest.raises(AssertionError, match="do not fit"):
            assert_slopes(torch.zeros(4, 32), torch.zeros(4, 32), torch.tensor(bad))


def test_a_spoilt_reference_is_no_pass() -> None:
    p = Product()
    p.ref[0, 0] = torch.nan
    for check in (gemm, slopes, blocks):
        with pytest.raises(AssertionError, match="the reference holds"):
            check(p)
