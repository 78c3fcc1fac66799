"""Activation formulas, and the fma they are written with."""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_kernels.activations import (
    BUILT_IN,
    Activation,
    GeGLU,
    MathNamespace,
    ReLU2,
    SwiGLU,
    SwiGLUOAI,
)
from cute_kernels.torch_math import TORCH_MATH
from moe import MoEConfig
from tests import oracle
from tests.check import assert_bytes_equal

F32_MAX = float(np.finfo(np.float32).max)
quick = settings(deadline=None, max_examples=400, derandomize=True)

# (activation, formula in fp64 from the table of docs/numerics.md section 4)
FORMULAS: list[tuple[Activation, Callable]] = [
    (SwiGLU(), oracle.swiglu),
    (SwiGLU(limit=10.0), oracle.swiglu_limit(10.0)),
    (SwiGLU(limit=0.5), oracle.swiglu_limit(0.5)),
    (SwiGLUOAI(), oracle.swiglu_oai),
    (GeGLU(), oracle.geglu),
    (ReLU2(), oracle.relu2),
]


def apply(act: Activation, gate: Tensor, up: Tensor) -> Tensor:
    return act(TORCH_MATH, gate, up) if act.gated else act(TORCH_MATH, gate)


# ---- formulas ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("act", "formula"), FORMULAS, ids=[repr(a) for a, _ in FORMULAS])
def test_formula_against_fp64(act: Activation, formula: Callable) -> None:
    """1e-6 of the value, or of the terms that cancel in it (1 + tanh near -1, up + 1 near -1)."""
    gen = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(20000, generator=gen) * s for s in (6.0, 8.0))
    gate[:4000] /= 100
    got = apply(act, gate, up)
    want = torch.from_numpy(np.asarray(formula(gate.double().numpy(), up.double().numpy())))
    assert got.dtype == torch.float32
    terms = want.abs()
    if isinstance(act, GeGLU):
        terms = terms + (gate * up).abs().double()
    if isinstance(act, SwiGLUOAI):
        terms = terms + gate.abs().clamp(max=7).double()
    assert ((got.double() - want).abs() <= 1e-6 * terms + 2e-38).all()


def test_clamp_of_deepseek_v4() -> None:
    """H58: limit 10; the gate from above only, up on both sides, before the product."""
    gate = torch.tensor([20.0, -50.0, 3.0, 20.0, -50.0])
    up = torch.tensor([-30.0, 5.0, 12.0, 30.0, -30.0])
    got = apply(SwiGLU(limit=10.0), gate, up).tolist()
    silu50 = -50 / (1 + math.exp(50))
    want = [-99.99546, silu50 * 5, 28.57722, 99.99546, silu50 * -10]
    assert got == pytest.approx(want, rel=1e-6)
    free = apply(SwiGLU(), gate, up).tolist()
    assert free[0] == pytest.approx(-600, rel=1e-6) and free[3] == pytest.approx(600, rel=1e-6)


def test_values_known_by_hand() -> None:
    one = torch.ones(1)
    silu1 = 1 / (1 + math.exp(-1))
    assert apply(SwiGLU(), one, 2 * one).item() == pytest.approx(2 * silu1, rel=1e-6)
    sigmoid = 1 / (1 + math.exp(-1.702))
    assert apply(SwiGLUOAI(), one, 2 * one).item() == pytest.approx(3 * sigmoid, rel=1e-6)
    assert apply(SwiGLUOAI(), 9 * one, -9 * one).item() == pytest.approx(
        -6 * 7 / (1 + math.exp(-1.702 * 7)), rel=1e-6
    )
    assert apply(GeGLU(), one, 2 * one).item() == pytest.approx(2 * 0.841192, rel=1e-5)
    assert apply(ReLU2(), torch.tensor([-3.0, 0.0, 3.0]), one).tolist() == [0.0, 0.0, 9.0]


@pytest.mark.parametrize("act", [a for a, _ in FORMULAS], ids=repr)
def test_nan_stays_nan(act: Activation) -> None:
    """Clamps with minimum and maximum must not turn NaN into a number."""
    nan, one = torch.tensor([math.nan]), torch.ones(1)
    assert apply(act, nan, one).isnan().all()
    if act.gated:
        assert apply(act, one, nan).isnan().all()
        assert apply(act, nan, nan).isnan().all()


def test_large_values_do_not_overflow_inside() -> None:
    """exp(-gate) is Inf for gate = -200: silu is -0, not NaN."""
    gate = torch.tensor([-200.0, 200.0])
    assert apply(SwiGLU(), gate, torch.ones(2)).tolist() == [-0.0, 200.0]
    for act, _ in FORMULAS:
        assert torch.isfinite(apply(act, gate, torch.ones(2))).all()


@pytest.mark.parametrize("build", [SwiGLU, lambda limit: SwiGLUOAI(limit=limit)])
@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf, math.nan])
def test_limits_must_be_positive(build: Callable, limit: float) -> None:
    with pytest.raises(ValueError, match="limit must be positive and finite"):
        build(limit)


# ---- objects -------------------------------------------------------------------------------------


def test_objects_are_frozen_equal_by_value_and_named() -> None:
    """The repr is part of a kernel's cache key: it must tell parameters apart."""
    acts = [a for a, _ in FORMULAS] + [SwiGLUOAI(alpha=1.0), SwiGLUOAI(limit=3.0)]
    assert len({repr(a) for a in acts}) == len(acts) == len(set(acts))
    assert SwiGLU(limit=10.0) == SwiGLU(limit=10.0) and SwiGLU() != SwiGLU(limit=10.0)
    assert repr(SwiGLU(limit=10.0)) == "SwiGLU(limit=10.0)"
    assert repr(SwiGLUOAI()) == "SwiGLUOAI(alpha=1.702, limit=7.0)"
    for act in acts:
        assert eval(repr(act), dict(BUILT_IN)) == act
        with pytest.raises(dataclasses.FrozenInstanceError):
            act.limit = 1.0  # type: ignore[attr-defined]
    assert [c.gated for c in (SwiGLU, SwiGLUOAI, GeGLU, ReLU2)] == [True, True, True, False]


@dataclasses.dataclass(frozen=True)
class GELU(Activation):
    """A user's activation: exact GELU times a parameter, no gate."""

    slope: float = 1.0
    gated = False

    def __call__(self, m: MathNamespace, gate: Tensor, up: Tensor | None = None) -> Tensor:
        half = 0.5 * gate
        return m.fma(half, m.erf(gate * 0.70710678), half) * self.slope


def test_a_users_activation() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 3
    got = apply(GELU(slope=2.0), x, x)
    want = 2 * torch.nn.functional.gelu(x.double())
    assert ((got - want).abs() <= 1e-6 * x.abs()).all()
    assert repr(GELU(slope=2.0)) == "GELU(slope=2.0)" != repr(GELU())
    cfg = MoEConfig(32, 32, 2, 1, activation=GELU())
    assert cfg.projections == 1 and not cfg.activation.gated


def test_an_activation_without_a_formula_says_so() -> None:
    with pytest.raises(NotImplementedError, match="Activation has no formula"):
        Activation()(TORCH_MATH, torch.ones(1))
    with pytest.raises(ValueError, match="activation must be"):
        MoEConfig(32, 32, 2, 1, activation="swiglu")  # type: ignore[arg-type]


# ---- fma -----------------------------------------------------------------------------------------


def round_to_fp32(x: Fraction) -> float:
    """Nearest fp32, ties to even, by exact arithmetic; overflow to Inf as IEEE 754 has it."""
    if x == 0:
        return 0.0
    sign, magnitude = (-1 if x < 0 else 1), abs(x)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if Fraction(2) ** exponent > magnitude:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, -126) - 23)
    low = magnitude // step  # exact integer
    rest = magnitude - low * step
    up = 2 * rest > step or (2 * rest == step and low % 2 == 1)
    value = (low + up) * step
    return sign * (math.inf if value > Fraction(F32_MAX) else float(value))


def fp32(bits: int) -> float:
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])


finite = st.integers(0, 2**32 - 1).map(fp32).filter(math.isfinite)
near_one = st.integers(0x3F000000, 0x40800000).map(fp32)  # 0.5 .. 4: sums that overlap


def check_fma(a: float, b: float, c: float) -> None:
    got = TORCH_MATH.fma(*(torch.tensor([v], dtype=torch.float32) for v in (a, b, c)))
    want = round_to_fp32(Fraction(a) * Fraction(b) + Fraction(c))
    assert got.dtype == torch.float32
    assert got.item() == want, (a.hex(), b.hex(), c.hex(), got.item().hex(), want.hex())


@quick
@given(finite, finite, finite)
@example(F32_MAX, 2.0, -F32_MAX)
@example(F32_MAX, F32_MAX, 1.0)
@example(2.0**-149, 2.0**-149, 2.0**-149)
@example(2.0**-149, 0.5, 2.0**-149)  # halfway between two subnormals
@example(2.0**-126, 0.5, -(2.0**-149))
@example(0.0, 5.0, -1.0)
def test_fma_of_any_finite_numbers(a: float, b: float, c: float) -> None:
    check_fma(a, b, c)


@quick
@given(near_one, near_one, near_one, st.sampled_from([1.0, -1.0]))
def test_fma_of_numbers_of_like_size(a: float, b: float, c: float, sign: float) -> None:
    check_fma(a, b, sign * c)


@quick
@given(near_one, near_one, st.integers(-2, 2))
def test_fma_where_the_sum_cancels(a: float, b: float, ulps: int) -> None:
    """c is the rounded product, or a neighbour of it: what is left is the product's tail."""
    product = np.float32(a * b)
    for _ in range(abs(ulps)):
        product = np.nextafter(product, np.float32(math.copysign(math.inf, ulps)))
    check_fma(a, b, -float(product))


@quick
@given(st.integers(2**23, 2**24 - 1), st.integers(-30, 30), st.integers(1, 23))
def test_fma_just_off_a_halfway_point(mantissa: int, exponent: int, distance: int) -> None:
    """c plus half its ulp, minus 4^-distance of that: for distance > 14 fp64 rounds the sum to the
    tie, and rounding again to fp32 would go to the even neighbour, which may be the wrong one."""
    ulp = 2.0**exponent
    c, half = mantissa * ulp, ulp / 2
    near = 2.0**-distance
    for sign in (1.0, -1.0):
        check_fma(half * (1 + near), sign * (1 - near), sign * c)
        check_fma(half, sign, sign * c)


@quick
@given(st.integers(2**23, 2**24 - 1), st.integers(10, 12))
def test_fma_just_above_a_halfway_point(mantissa: int, k: int) -> None:
    """(2^k + 1)(2^2k - 2^k + 1) = 2^3k + 1, half an ulp of c and a little more: fp64 rounds the sum
    down to the tie, and what was lost must still decide."""
    a, b = 2.0**k + 1, 2.0 ** (2 * k) - 2.0**k + 1
    for sign in (1.0, -1.0):
        check_fma(a, sign * b, sign * mantissa * 2.0 ** (3 * k + 1))


def test_fma_is_neither_two_roundings_nor_one_through_fp64() -> None:
    """2^24 + 2 + 1 - 2^-46: fp64 makes it the tie 2^24 + 3, which rounds to 2^24 + 4."""
    a, b, c = 1 + 2.0**-23, 1 - 2.0**-23, 2.0**24 + 2
    check_fma(a, b, c)
    assert np.float32(a * b + c) == 2.0**24 + 4
    assert round_to_fp32(Fraction(a) * Fraction(b) + Fraction(c)) == c
    two = np.float32(np.float32(a * a) - np.float32(1 + 2.0**-22))
    assert two == 0  # the product's tail is lost
    check_fma(a, a, -(1 + 2.0**-22))


def test_fma_special_values() -> None:
    inf, nan, one = math.inf, math.nan, torch.ones(1)
    fma = TORCH_MATH.fma
    assert fma(one * inf, one, one).item() == inf
    assert fma(one * inf, one, one * -inf).isnan().all()
    assert fma(one * inf, 0 * one, one).isnan().all()
    for args in ((nan, 1, 1), (1, nan, 1), (1, 1, nan)):
        assert fma(*(one * v for v in args)).isnan().all()
    assert fma(one, one, one * -inf).item() == -inf
    zero = torch.zeros(1)
    assert_bytes_equal(fma(-zero, one, -zero), -zero)
    assert_bytes_equal(fma(one, one, -one), zero)


def test_fma_takes_numbers_as_fp32_and_broadcasts() -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    third = torch.full((3, 4), 1 / 3)
    assert torch.equal(TORCH_MATH.fma(x, 1 / 3, 0.1), TORCH_MATH.fma(x, third, third * 0 + 0.1))
    assert TORCH_MATH.fma(x, 2.0, torch.ones(4)).shape == (3, 4)


@quick
@given(finite, finite)
def test_minimum_and_maximum(a: float, b: float) -> None:
    x = torch.tensor([a], dtype=torch.float32)
    for other in (b, torch.tensor([b], dtype=torch.float32)):
        assert TORCH_MATH.minimum(x, other).item() == min(a, b)
        assert TORCH_MATH.maximum(x, other).item() == max(a, b)
    nan = torch.tensor([math.nan])
    assert TORCH_MATH.minimum(nan, b).isnan() and TORCH_MATH.maximum(nan, b).isnan()
