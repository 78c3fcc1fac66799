"""Floating-point instructions and conversions on both cores, against exact arithmetic, torch and ml_dtypes."""

# ruff: noqa: E501 (PTX and tables)
from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.onewarp import CORES, evaluate, f32, u16, u32, u64

ml_dtypes = pytest.importorskip("ml_dtypes", reason="the references of the narrow formats")
BOTH, COMPILED = CORES, ("compiled",)
ONE, TWO, THREE, HALF = 0x3F800000, 0x40000000, 0x40400000, 0x3F000000
INF, NINF, NAN, CANONICAL, NZERO = 0x7F800000, 0xFF800000, 0x7FC00001, 0x7FFFFFFF, 0x80000000
TINY = 0x00000001  # the smallest subnormal
CASES: list[tuple[str, list[Any], Any, tuple[str, ...]]] = [
    ("add.f32 %d, %a0, %a1;", [u32(ONE, INF), u32(TWO, NINF)], u32(THREE, CANONICAL), COMPILED),
    ("add.ftz.f32 %d, %a0, %a1;", [u32(TINY, 0x80000001), u32(0, 0)], u32(0, 0), BOTH),
    ("add.rz.f32 %d, %a0, %a1;", [u32(ONE), u32(0x33FFFFFF)], u32(ONE), COMPILED),
    ("add.rp.f32 %d, %a0, %a1;", [u32(ONE), u32(TINY)], u32(ONE + 1), COMPILED),
    ("add.rm.f32 %d, %a0, %a1;", [u32(0xBF800000), u32(0x80000001)], u32(0xBF800001), COMPILED),
    ("sub.f32 %d, %a0, %a1;", [u32(THREE), u32(TWO)], u32(ONE), BOTH),
    ("mul.f32 %d, %a0, %a1;", [u32(TWO, INF), u32(HALF, 0)], u32(ONE, CANONICAL), COMPILED),
    ("mul.sat.f32 %d, %a0, %a1;", [u32(TWO, 0xC0000000), u32(TWO, TWO)], u32(ONE, 0), BOTH),
    ("fma.rn.f32 %d, %a0, %a1, %a2;", [u32(TWO), u32(TWO), u32(0xC0400000)], u32(ONE), BOTH),
    ("fma.rz.f32 %d, %a0, %a1, %a2;", [u32(ONE), u32(ONE), u32(0xB3000000)], u32(ONE - 1), COMPILED),
    ("div.rn.f32 %d, %a0, %a1;", [u32(ONE, ONE), u32(THREE, 0)], u32(0x3EAAAAAB, INF), BOTH),
    ("rcp.rn.f32 %d, %a0;", [u32(THREE)], u32(0x3EAAAAAB), BOTH),
    ("sqrt.rn.f32 %d, %a0;", [u32(TWO)], u32(0x3FB504F3), BOTH),
    ("rsqrt.approx.f32 %d, %a0;", [u32(0x40800000)], u32(HALF), BOTH),
    ("ex2.approx.ftz.f32 %d, %a0;", [u32(THREE, NINF, 0xC3000000)], u32(0x41000000, 0, 0), BOTH),
    ("lg2.approx.f32 %d, %a0;", [u32(0x41000000, 0)], u32(THREE, NINF), BOTH),
    ("tanh.approx.f32 %d, %a0;", [u32(0, INF)], u32(0, ONE), BOTH),
    ("neg.f32 %d, %a0;", [u32(ONE)], u32(0xBF800000), BOTH),
    ("abs.f32 %d, %a0;", [u32(0xBF800000)], u32(ONE), BOTH),
    ("copysign.f32 %d, %a0, %a1;", [u32(0x80000000), u32(ONE)], u32(0xBF800000), COMPILED),
    ("min.f32 %d, %a0, %a1;", [u32(ONE, NAN, 0), u32(TWO, TWO, NZERO)], u32(ONE, TWO, NZERO), COMPILED),
    ("max.f32 %d, %a0, %a1;", [u32(ONE, NAN, NZERO), u32(TWO, TWO, 0)], u32(TWO, TWO, 0), COMPILED),
    ("max.NaN.f32 %d, %a0, %a1;", [u32(ONE, NAN), u32(TWO, TWO)], u32(TWO, CANONICAL), COMPILED),
    ("max.f32 %d, %a0, %a1, %a2;", [u32(ONE), u32(THREE), u32(TWO)], u32(THREE), BOTH),
    ("max.abs.f32 %d, %a0, %a1;", [u32(0xC0400000), u32(TWO)], u32(THREE), BOTH),
    (
        "max.NaN.abs.f32 %d, %a0, %a1, %a2;",
        [u32(0xC0400000, NAN, NZERO), u32(TWO, TWO, NZERO), u32(ONE, TWO, NZERO)],
        u32(THREE, CANONICAL, 0),
        COMPILED,
    ),
    ("min.xorsign.abs.f32 %d, %a0, %a1;", [u32(0xC0400000), u32(TWO)], u32(0xC0000000), COMPILED),
    ("add.f64 %d, %a0, %a1;", [np.array([0.1]).view(np.uint64), np.array([0.2]).view(np.uint64)],
     np.array([0.1 + 0.2]).view(np.uint64), BOTH),
    ("add.rn.f32x2 %d, %a0, %a1;", [u64(ONE << 32 | TWO), u64(TWO << 32 | ONE)],
     u64(THREE << 32 | THREE), BOTH),
    ("mul.f32x2 %d, %a0, %a1;", [u64(TWO << 32 | TWO), u64(HALF << 32 | ONE)],
     u64(ONE << 32 | TWO), BOTH),
    ("fma.rn.f32x2 %d, %a0, %a1, %a2;", [u64(TWO << 32 | ONE), u64(ONE << 32 | TWO), u64(ONE << 32)],
     u64(THREE << 32 | TWO), BOTH),
    ("mul.rn.f16x2 %d, %a0, %a1;", [u32(0x40003C00), u32(0x38003C00)], u32(0x3C003C00), BOTH),
    ("fma.rn.bf16x2 %d, %a0, %a1, %a2;", [u32(0x40003F80), u32(0x3F804000), u32(0x3F800000)],
     u32(0x40404000), BOTH),
    ("fma.rn.relu.bf16x2 %d, %a0, %a1, %a2;", [u32(0xC0003F80), u32(0x3F804000), u32(0)],
     u32(0x00004000), BOTH),
    ("max.bf16x2 %d, %a0, %a1;", [u32(0x3F804000), u32(0x40003F80)], u32(0x40004000), BOTH),
    ("setp.lt.f32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u32(ONE, NAN), u32(TWO, ONE)], u32(1, 0), BOTH),
    ("setp.ltu.f32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u32(ONE, NAN, TWO), u32(TWO, ONE, ONE)],
     u32(1, 1, 0), BOTH),
    ("setp.neu.f32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u32(0, NAN), u32(NZERO, NAN)], u32(0, 1), BOTH),
    ("setp.nan.f32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u32(0, NAN), u32(0, 0)], u32(0, 1), BOTH),
    ("setp.num.f32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u32(0, NAN), u32(0, 0)], u32(1, 0), BOTH),
    ("cvt.rzi.s32.f32 %d, %a0;", [f32(0x40300000, 0xC0300000, NAN, 0x4F800000, 0xCF800001).view(np.uint32)],
     u32(2, -2, 0, 0x7FFFFFFF, 0x80000000), BOTH),
    ("cvt.rni.s32.f32 %d, %a0;", [u32(0x40200000, 0x40600000)], u32(2, 4), BOTH),
    ("cvt.rmi.s32.f32 %d, %a0;", [u32(0xBFC00000)], u32(-2), BOTH),
    ("cvt.rpi.u32.f32 %d, %a0;", [u32(0x3F800001, 0xBF800000)], u32(2, 0), BOTH),
    ("cvt.rzi.u64.f32 %d, %a0;", [u32(0x5F000000)], u64(1 << 63), COMPILED),
    ("cvt.rn.f32.s32 %d, %a0;", [u32(-3, 16777217)], u32(0xC0400000, 0x4B800000), BOTH),
    ("cvt.rn.f32.u32 %d, %a0;", [u32(0xFFFFFFFF)], u32(0x4F800000), BOTH),
    ("cvt.rz.f32.u32 %d, %a0;", [u32(0xFFFFFFFF)], u32(0x4F7FFFFF), COMPILED),
    ("cvt.rn.f32.u64 %d, %a0;", [u64(2**63 + 2**39 + 1)], u32(0x5F000001), COMPILED),
    ("cvt.rni.f32.f32 %d, %a0;", [u32(0x40200000)], u32(0x40000000), BOTH),
    ("cvt.sat.f32.f32 %d, %a0;", [u32(TWO, 0xBF800000, HALF)], u32(ONE, 0, HALF), BOTH),
    ("cvt.f32.f16 %d, %a0;", [u16(0x3C00, 0x7C00, 0x0001)], u32(ONE, INF, 0x33800000), BOTH),
    ("cvt.f32.bf16 %d, %a0;", [u16(0x3F80, 0x8000)], u32(ONE, NZERO), BOTH),
    ("cvt.f64.f32 %d, %a0;", [u32(ONE)], np.array([1.0]).view(np.uint64), BOTH),
    ("cvt.rn.f16.f32 %d, %a0;", [u32(ONE, 0x477FF000, 0x33000000)], u16(0x3C00, 0x7C00, 0), BOTH),
    ("cvt.rz.f16.f32 %d, %a0;", [u32(0x477FF000)], u16(0x7BFF), COMPILED),
    ("cvt.rn.relu.bf16x2.f32 %d, %a0, %a1;", [u32(0xBF800000), u32(ONE)], u32(0x00003F80), BOTH),
    ("cvt.rna.tf32.f32 %d, %a0;", [u32(0x3F801000, 0x3F800FFF)], u32(0x3F802000, 0x3F800000), COMPILED),
    ("cvt.rn.satfinite.e4m3x2.f32 %h1, %a0, %a1; mov.b16 %d, %h1;",
     [u32(ONE, 0x7F800000, NAN), u32(0x44000000, NINF, 0)], u16(0x387E, 0x7EFE, 0x7F00), BOTH),
    ("cvt.rn.satfinite.e5m2x2.f32 %h1, %a0, %a1; mov.b16 %d, %h1;", [u32(ONE), u32(INF)],
     u16(0x3C7B), BOTH),
    ("cvt.rn.satfinite.relu.e4m3x2.f32 %h1, %a0, %a1; mov.b16 %d, %h1;", [u32(0xBF800000), u32(ONE)],
     u16(0x0038), COMPILED),
    ("cvt.rn.f16x2.e4m3x2 %d, %a0;", [u16(0x7E38)], u32(0x5F003C00), BOTH),
    ("cvt.rn.f16x2.e5m2x2 %d, %a0;", [u16(0x3C38)], u32(0x3C003800), BOTH),
    ("cvt.rp.satfinite.ue8m0x2.f32 %h1, %a0, %a1; mov.b16 %d, %h1;",
     [u32(0x3F800001, NAN, TINY), u32(ONE, 0, 0x7F7FFFFF)], u16(0x807F, 0xFF00, 0x00FE), BOTH),
    ("cvt.rz.satfinite.ue8m0x2.f32 %h1, %a0, %a1; mov.b16 %d, %h1;",
     [u32(0x3FFFFFFF), u32(0x7F7FFFFF)], u16(0x7FFE), BOTH),
    ("cvt.rn.bf16x2.ue8m0x2 %d, %a0;", [u16(0x807F)], u32(0x40003F80), BOTH),
]  # fmt: skip


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0].split(";")[0])
def test_instruction(case: tuple[str, list[Any], Any, tuple[str, ...]], core: str) -> None:
    body, sources, want, cores = case
    if core not in cores:
        pytest.skip("only the compiled core models this form")
    got = evaluate(core, body, sources, want.dtype)
    assert [hex(v) for v in got.tolist()] == [hex(v) for v in want.tolist()]


# ---- exact rounding


def nearest_f32(value: Fraction) -> np.float32:
    """The fp32 nearest to a rational, ties to even; finite results only."""
    guess = np.float32(float(value))
    around = (np.nextafter(guess, -np.inf), guess, np.nextafter(guess, np.float32(np.inf)))
    best = [c for c in map(np.float32, around) if np.isfinite(c)]
    gap = min(abs(Fraction(float(c)) - value) for c in best)
    ties = [c for c in best if abs(Fraction(float(c)) - value) == gap]
    return min(ties, key=lambda c: int(c.view(np.uint32)) & 1)


MODERATE = st.integers(0, 2**32 - 1).map(
    lambda b: b & 0x8FFFFFFF | 0x38000000
)  # about 2^-15 .. 2^17


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=12, deadline=None)
@given(bits=st.lists(st.tuples(MODERATE, MODERATE, MODERATE), min_size=32, max_size=32))
def test_fma_rounds_once(core: str, bits: list[tuple[int, int, int]]) -> None:
    a, b, c = (np.array(column, np.uint32) for column in zip(*bits))
    # make cancellation and near-ties frequent: c close to -a*b in half of the lanes
    with np.errstate(all="ignore"):
        close = -(a.view(np.float32) * b.view(np.float32))
    c[::2] = close[::2].view(np.uint32)
    got = evaluate(core, "fma.rn.f32 %d, %a0, %a1, %a2;", [a, b, c], np.float32)
    for i in range(32):
        x, y, z = (Fraction(float(v.view(np.float32)[i])) for v in (a, b, c))
        assert got[i] == nearest_f32(x * y + z)


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=12, deadline=None)
@given(bits=st.lists(st.tuples(MODERATE, MODERATE), min_size=32, max_size=32))
def test_division_and_reciprocal_round_once(core: str, bits: list[tuple[int, int]]) -> None:
    a, b = (np.array(column, np.uint32) for column in zip(*bits))
    quotient = evaluate(core, "div.rn.f32 %d, %a0, %a1;", [a, b], np.float32)
    reciprocal = evaluate(core, "rcp.rn.f32 %d, %a0;", [b], np.float32)
    for i in range(32):
        x, y = (Fraction(float(v.view(np.float32)[i])) for v in (a, b))
        assert quotient[i] == nearest_f32(x / y)
        assert reciprocal[i] == nearest_f32(1 / y)


@pytest.mark.parametrize("core", CORES)
def test_approximations_are_rounded_from_double(core: str) -> None:
    """The model: computed in fp64 and rounded once. 2 ulp on ex2 allow for the libraries' own error."""
    x = np.linspace(-8, 8, 4096, dtype=np.float32)
    got = evaluate(core, "ex2.approx.ftz.f32 %d, %a0;", [x.view(np.uint32)], np.float32)
    assert (got == np.exp2(x.astype(np.float64)).astype(np.float32)).all()
    positive = np.abs(x) + np.float32(0.01)
    got = evaluate(core, "rsqrt.approx.f32 %d, %a0;", [positive.view(np.uint32)], np.float32)
    assert (got == (1 / np.sqrt(positive.astype(np.float64))).astype(np.float32)).all()


# ---- conversions against ml_dtypes and torch

ANY_FLOAT = st.integers(0, 2**32 - 1)
FLOATS = st.lists(ANY_FLOAT, min_size=32, max_size=32)


def around_ties(dtype: Any, limit: float) -> np.ndarray:
    """Every value of a format, the midpoints between neighbours, and what lies just beside them; both signs."""
    codes = np.arange(2 ** (8 * np.dtype(np.uint8).itemsize), dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    middle = (values[1:] + values[:-1]) / 2
    points = np.concatenate([values, middle, [limit * 1.01, limit * 2, 1e30]]).astype(np.float32)
    beside = [np.nextafter(points, np.float32(d)) for d in (-np.inf, np.inf)]
    both = np.concatenate([points, *beside])
    return np.concatenate([both, -both]).astype(np.float32)


NARROW = {
    "e4m3x2": (ml_dtypes.float8_e4m3fn, 448.0, 0x7F), "e5m2x2": (ml_dtypes.float8_e5m2, 57344.0, 0x7F),
}  # fmt: skip


def narrow_reference(x: np.ndarray, name: str) -> np.ndarray:
    """cvt.rn.satfinite: clipped to the largest finite value, NaN to the canonical NaN."""
    dtype, limit, nan = NARROW[name]
    with np.errstate(all="ignore"):
        code = np.clip(x, -limit, limit).astype(dtype).view(np.uint8)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


def e2m1_reference(x: np.ndarray) -> np.ndarray:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with ties to the even code; NaN is +6."""
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    size = np.minimum(np.abs(np.nan_to_num(x.astype(np.float64), nan=6, posinf=6, neginf=6)), 6)
    gap = np.abs(size[:, None] - table)
    tied = gap == gap.min(1, keepdims=True)
    order = np.where(tied, np.arange(8) % 2, 9)  # among ties the even code
    code = order.argmin(1)
    return np.where(np.isnan(x), 7, code | np.signbit(x) * 8).astype(np.uint8)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("name", NARROW)
def test_fp8_around_every_tie(core: str, name: str) -> None:
    dtype, limit, _ = NARROW[name]
    x = around_ties(dtype, limit)
    x = np.concatenate([x, np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40], np.float32)])
    body = f"cvt.rn.satfinite.{name}.f32 %h1, 0f00000000, %a0; mov.b16 %d, %h1;"
    got = evaluate(core, body, [x.view(np.uint32)], np.uint16)
    want = narrow_reference(x, name)
    bad = np.flatnonzero(got != want)
    assert not len(bad), (x[bad[:4]], got[bad[:4]], want[bad[:4]])


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=10, deadline=None)
@given(low=FLOATS, high=FLOATS)
def test_packed_narrow_conversions(core: str, low: list[int], high: list[int]) -> None:
    x, y = (np.array(v, np.uint32) for v in (low, high))
    for name in NARROW:
        body = f"cvt.rn.satfinite.{name}.f32 %h1, %a1, %a0; mov.b16 %d, %h1;"
        got = evaluate(core, body, [x, y], np.uint16)
        want = narrow_reference(x.view(np.float32), name).astype(np.uint16)
        want |= narrow_reference(y.view(np.float32), name).astype(np.uint16) << 8
        assert (got == want).all()


E2M1_BODY = (
    "cvt.rn.satfinite.e2m1x2.f32 %b1, %a1, %a0; mov.b32 %d, {%b1, %b2, %b2, %b2};",
    ".reg .b8 %b<4>; mov.b16 %h2, 0; cvt.u8.u16 %b2, %h2;",
)


@pytest.mark.parametrize("core", CORES)
def test_e2m1_around_every_tie(core: str) -> None:
    table = np.array(
        [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7], np.float32
    )
    beside = [np.nextafter(table, np.float32(d)) for d in (-np.inf, np.inf)]
    x = np.concatenate([table, *beside])
    x = np.concatenate([x, -x, np.array([np.nan, np.inf, -np.inf, -0.0, 1e-40], np.float32)])
    y = x[::-1].copy()
    body, declarations = E2M1_BODY
    got = evaluate(core, body, [x.view(np.uint32), y.view(np.uint32)], np.uint32, declarations)
    want = e2m1_reference(x) | e2m1_reference(y) << 4
    assert (got == want).all()


@pytest.mark.parametrize("core", CORES)
@settings(max_examples=10, deadline=None)
@given(low=FLOATS, high=FLOATS)
def test_half_conversions(core: str, low: list[int], high: list[int]) -> None:
    x, y = (np.array(v, np.uint32) for v in (low, high))
    for name, dtype in (("bf16x2", torch.bfloat16), ("f16x2", torch.float16)):
        got = evaluate(core, f"cvt.rn.{name}.f32 %d, %a1, %a0;", [x, y], np.uint32)
        for values, part in ((x, got & 0xFFFF), (y, got >> 16)):
            number = torch.from_numpy(values.view(np.float32).copy())
            want = number.to(dtype).view(torch.int16).numpy().view(np.uint16)
            want = np.where(np.isnan(values.view(np.float32)), 0x7FFF, want)
            assert (part == want).all()


@pytest.mark.parametrize("core", CORES)
def test_every_code_of_the_narrow_formats_widens_exactly(core: str) -> None:
    codes = np.arange(256, dtype=np.uint16)
    for name, dtype in (("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)):
        got = evaluate(core, f"cvt.rn.f16x2.{name} %d, %a0;", [codes | codes[::-1] << 8], np.uint32)
        low = (got & 0xFFFF).astype(np.uint16).view(np.float16)
        want = codes.astype(np.uint8).view(dtype).astype(np.float16)
        assert np.array_equal(low, want, equal_nan=True)
    body = "cvt.u8.u16 %b1, %a0; cvt.rn.f16x2.e2m1x2 %d, %b1;"
    got = evaluate(core, body, [codes], np.uint32, ".reg .b8 %b<4>;")
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float16)
    signed = np.concatenate([table, -table])
    assert ((got & 0xFFFF).astype(np.uint16).view(np.float16) == signed[codes & 15]).all()
    assert ((got >> 16).astype(np.uint16).view(np.float16) == signed[codes >> 4]).all()


@pytest.mark.parametrize("core", CORES)
def test_integers_from_floats_saturate(core: str) -> None:
    rng = np.random.default_rng(5)
    x = (rng.standard_normal(2048) * 2.0 ** rng.integers(-4, 40, 2048)).astype(np.float32)
    x = np.concatenate([x, np.array([0.5, 1.5, 2.5, -0.5, np.inf, -np.inf, np.nan], np.float32)])
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    for mode, function in rounded.items():
        for t, low, high in (("s32", -(2**31), 2**31 - 1), ("u32", 0, 2**32 - 1)):
            got = evaluate(core, f"cvt.{mode}.{t}.f32 %d, %a0;", [x.view(np.uint32)], np.uint32)
            want = [0 if math.isnan(v) else int(min(max(v, low), high))
                    for v in function(x.astype(np.float64))]  # fmt: skip
            assert got.tolist() == [v & 0xFFFFFFFF for v in want]
