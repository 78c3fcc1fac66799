"""Number formats of PTX on numpy rows of 32 lanes. Every conversion rounds once.

The approximate instructions (ex2, lg2, rcp, rsqrt, sqrt, tanh, sin, cos) are evaluated in fp64 and
rounded to fp32:
correctly rounded but for ties that fp64 cannot see. Hardware is 1 to 2 ulp off (tanh more), so a
result that went through one of them need not have the hardware's last bit.
"""

from __future__ import annotations

import numpy as np

F32_TINY = np.float32(2.0**-126)


def flush(x: np.ndarray) -> np.ndarray:
    """Subnormal fp32 values become zero of their sign (.ftz)."""
    return np.where(np.abs(x) < F32_TINY, np.copysign(np.float32(0), x), x)


def fma_f32(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once. The product is exact in fp64; the sum is rounded to odd there, which
    makes the final rounding the only one that shows (Boldo and Melquiond 2008)."""
    product = a.astype(np.float64) * b
    addend = np.asarray(c, np.float64)
    total = product + addend
    virtual = total - product
    error = (product - (total - virtual)) + (addend - virtual)
    inexact = (error != 0) & np.isfinite(error) & np.isfinite(total)
    if not inexact.any():
        return total.astype(np.float32)
    bits = total.view(np.int64)
    nearer_zero = (error > 0) != (total > 0)
    odd = np.where(nearer_zero, bits - 1, bits) | 1
    return np.where(inexact, odd, bits).view(np.float64).astype(np.float32)


def f32_to_bf16(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """fp32 -> bf16 bits (uint16): rn (even), rz, or rna (ties away)."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    if mode == "rn":
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    elif mode == "rna":
        rounded = bits + np.uint32(0x8000)
    else:
        rounded = bits
    out = (rounded >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), out)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def f32_to_f16(x: np.ndarray, mode: str = "rn") -> np.ndarray:
    """fp32 -> fp16 bits (uint16), rn or rz."""
    half = np.asarray(x, np.float32).astype(np.float16)
    if mode == "rz":
        over = np.abs(half.astype(np.float32)) > np.abs(x)
        half = np.where(over, (half.view(np.uint16) - np.uint16(1)).view(np.float16), half)
    return np.where(np.isnan(x), np.uint16(0x7FFF), half.view(np.uint16))


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)


_E2M1_MIDPOINTS = ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0))


def f32_to_e2m1(x: np.ndarray) -> np.ndarray:
    """fp32 -> E2M1 code (uint8), rn.satfinite; NaN becomes +6 (PTX ISA 9.1, cvt)."""
    magnitude = np.abs(x)
    code = np.zeros(x.shape, np.uint8)
    for midpoint, up in _E2M1_MIDPOINTS:
        code += (magnitude >= midpoint) if up else (magnitude > midpoint)
    code |= np.signbit(x).astype(np.uint8) << 3
    return np.where(np.isnan(x), np.uint8(7), code)


E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E2M1_VALUES = np.concatenate((E2M1_VALUES, -E2M1_VALUES))


def minifloat_table(exponent_bits: int, mantissa_bits: int, bias: int) -> np.ndarray:
    """fp32 value of each of the 256 codes of an IEEE-like 8-bit float; specials are left to the
    caller.
    """
    code = np.arange(256)
    mantissa = code & ((1 << mantissa_bits) - 1)
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    fraction = np.where(exponent > 0, (1 << mantissa_bits) + mantissa, mantissa)
    value = np.ldexp(fraction.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    return np.where(code & 0x80, -value, value).astype(np.float32)


E4M3_VALUES = minifloat_table(4, 3, 7)
E4M3_VALUES[[0x7F, 0xFF]] = np.nan
E5M2_VALUES = minifloat_table(5, 2, 15)
E5M2_VALUES[[0x7C, 0xFC]] = np.inf, -np.inf
E5M2_VALUES[[0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF]] = np.nan


def f32_to_fp8(x: np.ndarray, mantissa_bits: int, bias: int, largest: float) -> np.ndarray:
    """fp32 -> 8-bit float code, rn.satfinite; NaN becomes 0x7F."""
    magnitude = np.fmin(np.abs(np.asarray(x, np.float32)), np.float32(largest))  # NaN: largest
    exponent = np.frexp(np.where(magnitude > 0, magnitude, 1))[1] - 1
    step = np.ldexp(1.0, np.maximum(exponent, 1 - bias) - mantissa_bits)
    units = np.rint(
        magnitude / step
    )  # half to even; may reach the next binade, which the sum below carries
    field = np.maximum(exponent, 1 - bias) + bias - 1
    code = (field.astype(np.int64) << mantissa_bits) + units.astype(np.int64)
    code = np.where(magnitude == 0, 0, code) | (np.signbit(x).astype(np.int64) << 7)
    return np.where(np.isnan(x), 0x7F, code).astype(np.uint8)


def f32_to_e4m3(x: np.ndarray) -> np.ndarray:
    return f32_to_fp8(x, 3, 7, 448.0)


def f32_to_e5m2(x: np.ndarray) -> np.ndarray:
    return f32_to_fp8(x, 2, 15, 57344.0)


def f32_to_ue8m0(x: np.ndarray, mode: str) -> np.ndarray:
    """fp32 -> UE8M0 code: the exponent, rounded to zero (rz) or up (rp), saturating; NaN becomes
    0xFF.
    """
    bits = np.ascontiguousarray(np.abs(x), np.float32).view(np.uint32)
    exponent, fraction = bits >> np.uint32(23), bits & np.uint32(0x7FFFFF)
    up = (fraction != 0) if mode == "rp" else np.zeros(bits.shape, bool)
    up &= ~(
        (exponent == 0) & (fraction <= np.uint32(0x400000))
    )  # subnormals up to 2^-127 are code 0
    return np.where(np.isnan(x), 0xFF, np.minimum(exponent + up, 254)).astype(np.uint8)
