"""Packing, scale layouts and `Nvfp4Tensor`: against byte formulas written as Python loops."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import ROW_MAJOR, SWIZZLE_32_4_4, SWIZZLE_32_4_4_GROUPED, Nvfp4Tensor
from tests.check import assert_bytes_equal
from tests.test_layer_compile import HostRead, NoPythonReads, NoSyncingOps

quick = settings(deadline=None, max_examples=25, derandomize=True)


def round_up(n: int, multiple: int) -> int:
    return (n + multiple - 1) // multiple * multiple


def random_bytes(*shape: int, seed: int, low: int = 1, high: int = 0x7F) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=gen, dtype=torch.uint8)


def tile_byte(r: int, c: int, groups: int) -> int:
    """Byte of (row r, group c) in SWIZZLE_32_4_4, docs/numerics.md section 1."""
    gp = round_up(groups, 4)
    return r // 128 * 128 * gp + c // 4 * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4


def swizzle_by_loop(scale: Tensor) -> Tensor:
    rows, groups = scale.shape
    out = [0] * (round_up(rows, 128) * round_up(groups, 4))
    for r, row in enumerate(scale.tolist()):
        for c, byte in enumerate(row):
            out[tile_byte(r, c, groups)] = byte
    return torch.tensor(out, dtype=torch.uint8).view(round_up(rows, 128), round_up(groups, 4))


def group_by_loop(scale: Tensor, offsets: list[int]) -> Tensor:
    """Every expert's rows from a multiple of 128; the buffer fits any split of the rows."""
    rows, groups = scale.shape
    total = nvfp4.grouped_scale_rows(rows, len(offsets) - 1)
    out = [0] * (total * round_up(groups, 4))
    base = 0
    for first, end in itertools.pairwise(offsets):
        for r in range(first, end):
            for c in range(groups):
                out[tile_byte(base + r - first, c, groups)] = int(scale[r, c])
        base += round_up(end - first, 128)
    return torch.tensor(out, dtype=torch.uint8).view(total, round_up(groups, 4))


# ---- packing -------------------------------------------------------------------------------------


@quick
@given(st.lists(st.integers(0, 15), max_size=64).filter(lambda c: len(c) % 2 == 0))
def test_pack_and_unpack_are_inverse_and_low_nibble_first(codes: list[int]) -> None:
    packed = nvfp4.pack(torch.tensor(codes, dtype=torch.uint8))
    assert packed.tolist() == [a | b << 4 for a, b in zip(codes[0::2], codes[1::2])]
    assert nvfp4.unpack(packed).tolist() == codes


def test_unpack_and_pack_keep_all_bytes_and_leading_shapes() -> None:
    data = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(4, 2, 32)
    assert nvfp4.unpack(data).shape == (4, 2, 64)
    assert torch.equal(nvfp4.pack(nvfp4.unpack(data)), data)
    assert nvfp4.pack(torch.zeros(0, 6, dtype=torch.uint8)).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nvfp4.pack(torch.zeros(3, 5, dtype=torch.uint8)), r"even K.*got \(3, 5\)"),
        (lambda: nvfp4.pack(torch.zeros(4, dtype=torch.int32)), "int32"),
        (lambda: nvfp4.unpack(torch.zeros(4, dtype=torch.int8)), "int8"),
        (lambda: nvfp4.unpack(torch.zeros((), dtype=torch.uint8)), "data must be uint8"),
        (lambda: nvfp4.unswizzle(torch.zeros(128, 6, dtype=torch.uint8), 5, 6), r"128, 8"),
        (lambda: nvfp4.unswizzle(torch.zeros(128, 4, dtype=torch.uint8), 129, 4), r"256, 4"),
    ],
)
def test_packing_and_swizzling_refuse(call: Callable, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---- SWIZZLE_32_4_4 ------------------------------------------------------------------------------


@quick
@given(st.integers(0, 300), st.integers(1, 9), st.integers(0, 1000))
def test_swizzle_is_the_byte_formula(rows: int, groups: int, seed: int) -> None:
    """And padding bytes are 0, unswizzle is its inverse."""
    scale = random_bytes(rows, groups, seed=seed)
    got = nvfp4.swizzle(scale)
    assert_bytes_equal(got, swizzle_by_loop(scale))
    plain = nvfp4.unswizzle(got, rows, groups)
    assert_bytes_equal(plain, scale)
    assert got.is_contiguous() and plain.is_contiguous()


def test_swizzle_keeps_leading_dimensions_and_dtype() -> None:
    scale = random_bytes(2, 3, 130, 5, seed=1).view(torch.float8_e4m3fn)
    got = nvfp4.swizzle(scale)
    assert got.shape == (2, 3, 256, 8) and got.dtype == torch.float8_e4m3fn
    for i in range(2):
        for j in range(3):
            want = swizzle_by_loop(scale[i, j].view(torch.uint8))
            assert_bytes_equal(got[i, j].view(torch.uint8), want)
    assert_bytes_equal(nvfp4.unswizzle(got, 130, 5), scale)


def test_unswizzle_ignores_padding() -> None:
    scale = random_bytes(5, 3, seed=2)
    got = nvfp4.swizzle(scale)
    got[nvfp4.swizzle(torch.ones_like(scale)) == 0] = 0x7F
    assert_bytes_equal(nvfp4.unswizzle(got, 5, 3), scale)


# ---- SWIZZLE_32_4_4_GROUPED ----------------------------------------------------------------------


@quick
@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 31, 127, 128, 129, 260]), min_size=1, max_size=5),
    st.integers(0, 40),
    st.integers(1, 6),
)
def test_grouped_layout_is_a_loop_over_experts(counts: list[int], spare: int, groups: int) -> None:
    """``spare`` rows behind the last expert have no place and change nothing."""
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    rows = offsets[-1] + spare
    scale = random_bytes(rows, groups, seed=rows)
    expert_offsets = torch.tensor(offsets, dtype=torch.int32)
    got = nvfp4.group_scales(scale, expert_offsets)
    assert_bytes_equal(got, group_by_loop(scale, offsets))
    starts = [sum(round_up(c, 128) for c in counts[:i]) for i in range(len(counts) + 1)]
    assert nvfp4.grouped_scale_offsets(expert_offsets).tolist() == starts
    place = nvfp4.grouped_rows(expert_offsets, rows).tolist()
    want = [starts[e] + r for e, c in enumerate(counts) for r in range(c)]
    assert place == want + [0] * spare
    assert starts[-1] <= nvfp4.grouped_scale_rows(rows, len(counts))


@quick
@given(st.integers(0, 500), st.integers(1, 6))
def test_grouped_buffer_is_the_smallest_that_fits_every_split(rows: int, experts: int) -> None:
    """The worst split: one row for as many experts as possible, the rest for one of them."""
    used = min(rows, experts)
    counts = [0] if not used else [rows - used + 1] + [1] * (used - 1)
    largest = sum(round_up(c, 128) for c in counts)
    for first in range(1, min(rows, 260)):
        if experts > 1:
            rest = rows - first
            spread = min(rest, experts - 1)
            split = [first, rest - spread + 1] + [1] * (spread - 1)
            largest = max(largest, sum(round_up(c, 128) for c in split))
    assert nvfp4.grouped_scale_rows(rows, experts) >= largest
    assert nvfp4.grouped_scale_rows(rows, experts) - largest < 256


def test_quantize_grouped_has_the_codes_of_quantize() -> None:
    x = torch.randn(20, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    offsets = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    plain, grouped = nvfp4.quantize(x), nvfp4.quantize_grouped(x, offsets)
    assert grouped.scale_layout is SWIZZLE_32_4_4_GROUPED
    assert torch.equal(grouped.data, plain.data)
    assert torch.equal(grouped.global_scale, plain.global_scale)
    assert_bytes_equal(
        grouped.scale.view(torch.uint8), group_by_loop(plain.scale.view(torch.uint8), [0, 7, 7, 20])
    )
    assert_bytes_equal(grouped.row_major_scale(), plain.scale)
    assert torch.equal(grouped.dequantize(), plain.dequantize())
    exact = nvfp4.quantize_grouped(x, offsets, 0.01, exact_division=True)
    assert torch.equal(exact.data, nvfp4.quantize(x, 0.01, exact_division=True).data)


def test_quantize_grouped_without_rows() -> None:
    q = nvfp4.quantize_grouped(torch.zeros(0, 32), torch.zeros(5, dtype=torch.int32))
    assert q.shape == (0, 32) and q.scale.shape == (0, 4) and q.dequantize().shape == (0, 32)


@pytest.mark.parametrize(
    ("x", "offsets", "message"),
    [
        (torch.zeros(4, 16), torch.zeros(3), "int32 .*float32"),
        (torch.zeros(4, 16), torch.zeros(1, dtype=torch.int32), r"num_experts \+ 1.*\(1,\)"),
        (torch.zeros(4, 16), torch.zeros(3, dtype=torch.int64), "int64"),
        (torch.zeros(4, 16), torch.zeros((3, 1), dtype=torch.int32), r"\(3, 1\)"),
        (torch.zeros(2, 2, 16), torch.zeros(3, dtype=torch.int32), r"\(rows, K\)"),
    ],
)
def test_quantize_grouped_refuses(x: Tensor, offsets: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nvfp4.quantize_grouped(x, offsets)


# ---- Nvfp4Tensor ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (5, 64), (3, 130, 80), (2, 2, 33, 16)])
def test_layouts_convert_both_ways(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plain = nvfp4.quantize(x)
    swizzled = nvfp4.quantize(x, scale_layout=SWIZZLE_32_4_4)
    assert plain.with_layout(ROW_MAJOR) is plain
    for a, b in ((plain.with_layout(SWIZZLE_32_4_4), swizzled), (swizzled, swizzled)):
        assert_bytes_equal(a.scale, b.scale)
        assert a.shape == b.shape == shape
    back = swizzled.with_layout(ROW_MAJOR)
    assert_bytes_equal(back.scale, plain.scale)
    assert torch.equal(swizzled.dequantize(), plain.dequantize())
    with pytest.raises(ValueError, match="needs expert_offsets"):
        plain.with_layout(SWIZZLE_32_4_4_GROUPED)


def test_scales_may_be_given_as_bytes() -> None:
    scale = random_bytes(2, 2, seed=3)
    q = Nvfp4Tensor(torch.zeros(2, 16, dtype=torch.uint8), scale, torch.ones(()))
    assert q.scale.dtype == torch.float8_e4m3fn
    assert_bytes_equal(q.scale.view(torch.uint8), scale)
    moved = q.to("cpu")
    assert moved.device == torch.device("cpu") and torch.equal(moved.data, q.data)


CODES = torch.zeros(4, 16, dtype=torch.uint8)
SCALE = torch.ones(4, 2, dtype=torch.uint8)
ONE = torch.ones(())
OFFSETS = torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((CODES.int(), SCALE, ONE), r"data must be uint8 .* got \(4, 16\) torch.int32"),
        ((CODES, SCALE.float(), ONE), "scale must be float8_e4m3fn or uint8, got torch.float32"),
        ((CODES, SCALE[:, :1], ONE), r"must have shape \(4, 2\), got \(4, 1\)"),
        ((CODES, SCALE, ONE, SWIZZLE_32_4_4), r"must have shape \(128, 4\)"),
        ((CODES, SCALE, ONE.double()), "global_scale must be float32"),
        ((CODES, SCALE, torch.ones(3)), r"prefix of \(4,\).*got \(3,\)"),
        ((CODES, SCALE, ONE, SWIZZLE_32_4_4_GROUPED), "expert_offsets go with"),
        ((CODES, SCALE, ONE, ROW_MAJOR, OFFSETS), "expert_offsets go with"),
        (
            (CODES.view(2, 2, 16), SCALE, ONE, SWIZZLE_32_4_4_GROUPED, OFFSETS),
            r"grouped data must be \(rows, K/2\)",
        ),
    ],
)
def test_a_tensor_that_cannot_be_says_why(fields: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Nvfp4Tensor(*fields)


def test_gate_and_up_scales_are_accepted_but_not_dequantised_together() -> None:
    data, scale = CODES.view(2, 2, 16), SCALE.view(2, 2, 2)
    for rows in (4, 6):
        wide = torch.zeros(3, rows, 16, dtype=torch.uint8)
        q = Nvfp4Tensor(wide, torch.ones(3, rows, 2, dtype=torch.uint8), torch.ones(3, 2))
        with pytest.raises(ValueError, match="dequantise the projections apart"):
            q.dequantize()
    assert Nvfp4Tensor(data, scale, torch.ones(2, 2)).dequantize().shape == (2, 2, 32)


# ---- nothing waits for the device ----------------------------------------------------------------

X = torch.randn(9, 80, generator=torch.Generator().manual_seed(4)).bfloat16()
SPLIT = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
PLAIN = nvfp4.quantize(X)


@pytest.mark.parametrize(
    "call",
    [
        lambda: nvfp4.quantize(X, "per_token"),
        lambda: nvfp4.quantize(X, "per_tensor", SWIZZLE_32_4_4),
        lambda: nvfp4.quantize(X, 0.01),
        lambda: nvfp4.quantize(X, torch.tensor([0.01])),
        lambda: nvfp4.quantize(X, torch.full((9,), 0.01), exact_division=True),
        lambda: nvfp4.quantize(X[:0]),
        lambda: nvfp4.quantize_grouped(X, SPLIT),
        lambda: nvfp4.group_rows(PLAIN, SPLIT).dequantize(torch.bfloat16),
        lambda: PLAIN.with_layout(SWIZZLE_32_4_4).with_layout(ROW_MAJOR),
        lambda: nvfp4.decode(PLAIN, torch.bfloat16),
        lambda: nvfp4.grouped_scale_offsets(SPLIT),
        lambda: nvfp4.invalid_scales(PLAIN.scale),
        lambda: nvfp4.pack(nvfp4.unpack(PLAIN.data)),
    ],
)
def test_nothing_reads_the_device(call: Callable) -> None:
    with NoSyncingOps(), NoPythonReads():
        call()


def test_the_guard_sees_a_read_inside_the_quantiser(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nvfp4.encode_ue4m3
    monkeypatch.setattr(nvfp4, "encode_ue4m3", lambda x: original(x) if x.max() > 0 else None)
    with pytest.raises(HostRead), NoSyncingOps(), NoPythonReads():
        nvfp4.quantize(X)
