"""Router scores written once, over a math namespace: the same bits from torch and from a kernel.

Only operations that IEEE 754 rounds in one way (+, *, /, sqrt and powers of two) are used, and none
is fused, so a score depends on its logits alone: not on the machine, its mathematical library, the
batch, or whether a kernel or torch computes it. ``m`` offers, on fp32 values,

    m.add(a, b) m.mul(a, b) m.div(a, b) m.sqrt(a) m.maximum(a, b) m.minus_abs(a) = -|a|
    m.where_negative(a, yes, no)                      yes where a < 0
    m.scale(a, t) = a * 2^k                           k the integer of t = k + ROUNDER

with NaN kept by maximum.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Protocol

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")


def _fp32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


ROUNDER = 1.5 * 2.0**23  # its sum with a small number is that number rounded to an integer
ROUNDER_BITS = 0x4B400000
LEAST = -104.0  # exp of it is below half of the smallest subnormal number
LOG2_E = _fp32(math.log2(math.e))
LN2_HIGH = 0.693359375  # 10 bits: its products with |k| < 2^8 are exact (Cody and Waite 1980)
LN2_LOW = _fp32(math.log(2.0) - LN2_HIGH)
EXP_TERMS = tuple(_fp32(1.0 / math.factorial(n)) for n in range(7, -1, -1))  # |r| <= ln 2 / 2
ATANH_TERMS = tuple(_fp32(1.0 / n) for n in range(15, 1, -2))  # z <= 1/9: the next is 2^-29


class ScoreMath(Protocol):
    """See the module."""

    def add(self, a: Any, b: Any) -> Any: ...
    def mul(self, a: Any, b: Any) -> Any: ...
    def div(self, a: Any, b: Any) -> Any: ...
    def sqrt(self, a: Any) -> Any: ...
    def maximum(self, a: Any, b: Any) -> Any: ...
    def minus_abs(self, a: Any) -> Any: ...
    def where_negative(self, a: Any, yes: Any, no: Any) -> Any: ...
    def scale(self, a: Any, t: Any) -> Any: ...


def polynomial(m: ScoreMath, x: Any, terms: tuple[float, ...]) -> Any:
    """Horner's scheme, the highest power first."""
    value = m.add(m.mul(x, terms[0]), terms[1])
    for term in terms[2:]:
        value = m.add(m.mul(value, x), term)
    return value


def exp(m: ScoreMath, x: Any) -> Any:
    """exp(x) of x <= 0: 2^k exp(r) with x = k ln 2 + r; subnormal results too. Within 2 ulp."""
    x = m.maximum(x, LEAST)
    t = m.add(m.mul(x, LOG2_E), ROUNDER)
    k = m.add(t, -ROUNDER)
    r = m.add(m.add(x, m.mul(k, -LN2_HIGH)), m.mul(k, -LN2_LOW))
    return m.scale(polynomial(m, r, EXP_TERMS), t)


def log1p(m: ScoreMath, e: Any) -> Any:
    """log(1 + e) of 0 <= e <= 1 as 2 atanh(s), s = e / (2 + e) (the series of atanh). Within 3
    ulp."""
    s = m.div(e, m.add(e, 2.0))
    z = m.mul(s, s)
    twice = m.add(s, s)
    return m.add(twice, m.mul(m.mul(twice, z), polynomial(m, z, ATANH_TERMS)))


def sigmoid(m: ScoreMath, x: Any) -> Any:
    """1 / (1 + exp(-x)), as exp(x) / (1 + exp(x)) of a negative x: exp never overflows."""
    e = exp(m, m.minus_abs(x))
    return m.div(m.where_negative(x, e, 1.0), m.add(e, 1.0))


def sqrtsoftplus(m: ScoreMath, x: Any) -> Any:
    """sqrt(log(1 + exp(x)))."""
    return m.sqrt(m.add(m.maximum(x, 0.0), log1p(m, exp(m, m.minus_abs(x)))))
