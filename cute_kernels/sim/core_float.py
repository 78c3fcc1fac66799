"""Floating-point arithmetic of the compiled core, on raw bits, rounded as the PTX manual says.

Every operation is IEEE with one rounding. The `.approx` forms (ex2, lg2, rcp, rsqrt, tanh, sin,
cos,
div, sqrt) are computed in double precision and rounded once: correctly rounded but for rare double
rounding, which a GPU is not (simulator.md gives the measured differences).
"""

# ruff: noqa: SIM109 (plain loops and comparisons are what numba compiles best)
from __future__ import annotations

import math

import numpy as np

from cute_kernels.sim.core_bits import (
    bits_of_f32,
    bits_of_f64,
    f32_of,
    f64_of,
    fma_f32,
    fma_f64,
    jit,
    low_mask,
    lsr,
)

# operations
ADD, SUB, MUL, FMA, MIN, MAX, DIV, RCP, SQRT, RSQRT = range(10)
EX2, LG2, SIN, COS, TANH, NEG, ABS, COPYSIGN = range(10, 18)
# flags; bits 8 and up hold the rounding mode
FTZ, SAT, NAN, ABSOLUTE, XORSIGN, RELU, THREE, APPROX = 1, 2, 4, 8, 16, 32, 64, 128
MODE_SHIFT = 8
RN, RZ, RM, RP, RNA = range(5)
# formats: name -> (mantissa bits, exponent bias, largest finite code, infinity code or -1, NaN
# code)
F32_FORMAT, F16_FORMAT, BF16_FORMAT, E4M3_FORMAT, E5M2_FORMAT, E2M1_FORMAT, E2M3_FORMAT = range(7)
E3M2_FORMAT, TF32_FORMAT = 7, 8
FORMATS = np.array(
    [
        (23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF, 31),
        (10, 15, 0x7BFF, 0x7C00, 0x7FFF, 15),
        (7, 127, 0x7F7F, 0x7F80, 0x7FFF, 15),
        (3, 7, 0x7E, -1, 0x7F, 7),
        (2, 15, 0x7B, 0x7C, 0x7F, 7),
        (1, 1, 0x7, -1, 0x7, 3),  # no NaN: cvt gives the largest value with a positive sign
        (3, 1, 0x1F, -1, 0x1F, 5),
        (2, 3, 0x1F, -1, 0x1F, 5),
        (10, 127, 0x3FBFF, 0x3FC00, 0x3FFFF, 18),  # tf32, before its shift by 13
    ],
    np.int64,
)
_MANTISSA, _BIAS, _LARGEST, _INFINITY, _NAN, _SIGN = range(6)
NAN32, NAN64 = 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF
INFINITY32 = 0x7F800000


@jit
def round_to(bits, fmt, mode, satfinite):
    """The code of a double (given by its bits) in a format, rounded once. Subnormals are kept."""
    mantissa_bits, bias = FORMATS[fmt, _MANTISSA], FORMATS[fmt, _BIAS]
    sign = lsr(bits, 63)
    exponent = lsr(bits, 52) & 0x7FF
    fraction = bits & 0xFFFFFFFFFFFFF
    signed = sign << FORMATS[fmt, _SIGN]
    if exponent == 0x7FF and fraction != 0:
        return FORMATS[fmt, _NAN]
    largest = FORMATS[fmt, _LARGEST]
    if exponent == 0x7FF:
        code = largest + 1
    else:
        if exponent == 0:
            e = -1022
        else:
            fraction |= 1 << 52
            e = exponent - 1023
        low = 1 - bias  # exponent of the smallest normal
        unit = max(e, low) - mantissa_bits  # exponent of the last place kept
        drop = unit - (e - 52)
        if drop > 54:
            drop = 54
        kept = lsr(fraction, drop)
        rest = fraction & ((1 << drop) - 1)
        half = (1 << drop) >> 1
        up = False
        if mode == RN:
            up = rest > half or (rest == half and (kept & 1) == 1 and rest != 0)
        elif mode == RNA:
            up = rest >= half and rest != 0
        elif mode == RM:
            up = rest != 0 and sign == 1
        elif mode == RP:
            up = rest != 0 and sign == 0
        if up:
            kept += 1
        code = ((max(e, low) - low) << mantissa_bits) + kept
    if code > largest:
        if (
            satfinite
            or FORMATS[fmt, _INFINITY] < 0
            or (
                (exponent != 0x7FF)
                and (mode == RZ or (mode == RM and sign == 0) or (mode == RP and sign == 1))
            )
        ):
            code = largest
        else:
            code = FORMATS[fmt, _INFINITY]
    return signed | code


@jit
def widen(code, fmt):
    """A code of a format as a double."""
    mantissa_bits, bias = FORMATS[fmt, _MANTISSA], FORMATS[fmt, _BIAS]
    sign_at = FORMATS[fmt, _SIGN]
    magnitude = code & ((1 << sign_at) - 1)
    negative = (code >> sign_at) & 1
    largest = FORMATS[fmt, _LARGEST]
    if magnitude > largest:
        if magnitude == FORMATS[fmt, _INFINITY]:
            value = math.inf
        else:
            return math.nan
    else:
        exponent = magnitude >> mantissa_bits
        fraction = magnitude & ((1 << mantissa_bits) - 1)
        if exponent == 0:
            exponent = 1
        else:
            fraction |= 1 << mantissa_bits
        # both factors are exact, so is the product (fraction < 2^24, exponent > -1022)
        scale = f64_of((exponent - bias - mantissa_bits + 1023) << 52)
        value = np.float64(fraction) * scale
    return -value if negative else value


@jit
def to_odd(high, low):
    """The double nearest to high + low with its last bit set when inexact: safe to round again."""
    if low == 0.0 or not math.isfinite(high):
        return high
    bits = bits_of_f64(high)
    if bits & 1:
        return high
    if high == 0.0:
        return low
    if (low > 0.0) == (high > 0.0):
        return f64_of(bits + 1)
    return f64_of(bits - 1)


@jit
def add_odd(x, y):
    """x + y in doubles, rounded to odd."""
    s = x + y
    if not math.isfinite(s):
        return s
    back = s - x
    return to_odd(s, (x - (s - back)) + (y - back))


@jit
def flush32(bits):
    """Subnormals to zero, sign kept."""
    if (bits & 0x7F800000) == 0:
        return bits & 0x80000000
    return bits & 0xFFFFFFFF


@jit
def unary(op, x):
    """The function of one double that stands behind the approximate instructions."""
    if op == EX2:
        return np.exp2(x)
    if op == RCP:
        return 1.0 / x
    if op == LG2:
        return np.log2(x) if x >= 0.0 else math.nan
    if op == TANH:
        return math.tanh(x)
    if op == SQRT:
        return math.sqrt(x) if x >= 0.0 else (x if x == 0.0 else math.nan)
    if op == RSQRT:
        return 1.0 / math.sqrt(x) if x >= 0.0 else (-math.inf if x == 0.0 else math.nan)
    if not math.isfinite(x):
        return math.nan
    if op == SIN:
        return math.sin(x)
    return math.cos(x)


@jit
def pick32(a, b, want_min, flags):
    """min or max of two fp32 bit patterns; NaN loses unless the NAN flag is set."""
    nan_a, nan_b = (a & 0x7FFFFFFF) > INFINITY32, (b & 0x7FFFFFFF) > INFINITY32
    if nan_a or nan_b:
        if flags & NAN or (nan_a and nan_b):
            return NAN32
        return b if nan_a else a
    x, y = f32_of(a), f32_of(b)
    if x == y:  # -0 is less than +0
        return (a | b) if want_min else (a & b)
    return a if (x < y) == want_min else b


@jit
def minmax32(op, flags, a, b, c):
    if flags & ABSOLUTE and not flags & XORSIGN:
        a, b, c = a & 0x7FFFFFFF, b & 0x7FFFFFFF, c & 0x7FFFFFFF
    sign = 0
    if flags & XORSIGN:
        sign = (a ^ b) & 0x80000000
        a, b = a & 0x7FFFFFFF, b & 0x7FFFFFFF
        r = pick32(a, b, op == MIN, flags)
        return r if (r & 0x7FFFFFFF) > INFINITY32 else r | sign
    r = pick32(a, b, op == MIN, flags)
    if flags & THREE:
        r = pick32(r, c, op == MIN, flags)
    return r


@jit
def exact32(op, a, b, c):
    """add, sub, mul, fma of fp32 as a double rounded to odd."""
    x, y = np.float64(f32_of(a)), np.float64(f32_of(b))
    if op == ADD:
        return add_odd(x, y)
    if op == SUB:
        return add_odd(x, -y)
    if op == MUL:
        return x * y
    return add_odd(x * y, np.float64(f32_of(c)))


@jit
def f32_op(op, flags, a, b, c):
    """One fp32 operation on bits. Arithmetic NaNs come out as 0x7fffffff."""
    if flags & FTZ:
        a, b, c = flush32(a), flush32(b), flush32(c)
    if op == NEG:
        return (a ^ 0x80000000) & 0xFFFFFFFF
    if op == ABS:
        return a & 0x7FFFFFFF
    if op == COPYSIGN:
        return (a & 0x80000000) | (b & 0x7FFFFFFF)
    mode = flags >> MODE_SHIFT
    if op == MIN or op == MAX:
        return minmax32(op, flags, a, b, c)
    if op >= RCP and mode == RN:
        r = bits_of_f32(np.float32(unary(op, np.float64(f32_of(a)))))
    elif op >= RCP or op == DIV:
        x, y = np.float64(f32_of(a)), np.float64(f32_of(b))
        if mode == RN:
            r = bits_of_f32(f32_of(a) / f32_of(b))
        elif op == DIV:
            r = round_to(bits_of_f64(x / y), F32_FORMAT, mode, False)
        else:
            r = round_to(bits_of_f64(unary(op, x)), F32_FORMAT, mode, False)
    elif mode != RN:
        r = round_to(bits_of_f64(exact32(op, a, b, c)), F32_FORMAT, mode, False)
    elif op == ADD:
        r = bits_of_f32(f32_of(a) + f32_of(b))
    elif op == SUB:
        r = bits_of_f32(f32_of(a) - f32_of(b))
    elif op == MUL:
        r = bits_of_f32(f32_of(a) * f32_of(b))
    else:
        r = bits_of_f32(fma_f32(f32_of(a), f32_of(b), f32_of(c)))
    if (r & 0x7FFFFFFF) > INFINITY32:
        r = NAN32
    if flags & FTZ:
        r = flush32(r)
    if flags & SAT:
        if (r & 0x7FFFFFFF) > INFINITY32 or r >= 0x80000000:
            r = 0
        elif r > 0x3F800000:
            r = 0x3F800000
    return r


@jit
def f64_op(op, flags, a, b, c):
    """One fp64 operation on bits, rounding to nearest."""
    if op == NEG:
        return a ^ (-(1 << 63))
    if op == ABS:
        return a & NAN64
    if op == COPYSIGN:
        return (a & (-(1 << 63))) | (b & NAN64)
    x, y = f64_of(a), f64_of(b)
    if op == MIN or op == MAX:
        if math.isnan(x):
            return b
        if math.isnan(y):
            return a
        if x == y:
            return (a | b) if op == MIN else (a & b)
        return a if (x < y) == (op == MIN) else b
    if op == ADD:
        r = x + y
    elif op == SUB:
        r = x - y
    elif op == MUL:
        r = x * y
    elif op == FMA:
        r = fma_f64(x, y, f64_of(c))
    elif op == DIV:
        r = x / y
    else:
        r = unary(op, x)
    return bits_of_f64(r)


@jit
def f16_op(op, flags, fmt, a, b, c):
    """One operation on fp16 or bf16 codes."""
    if op == NEG:
        return (a ^ 0x8000) & 0xFFFF
    if op == ABS:
        return a & 0x7FFF
    if op == COPYSIGN:
        return (a & 0x8000) | (b & 0x7FFF)
    if op == MIN or op == MAX:
        # the order of the codes' fp32 images is their order; NaN becomes NaN
        x = bits_of_f32(np.float32(widen(a, fmt)))
        y = bits_of_f32(np.float32(widen(b, fmt)))
        z = bits_of_f32(np.float32(widen(c, fmt)))
        best = minmax32(op, flags, x, y, z)
        return round_to(bits_of_f64(np.float64(f32_of(best))), fmt, RN, False)
    u, v = widen(a, fmt), widen(b, fmt)
    if op == ADD:
        r = add_odd(u, v)
    elif op == SUB:
        r = add_odd(u, -v)
    elif op == MUL:
        r = u * v
    elif op == FMA:
        r = add_odd(u * v, widen(c, fmt))
    elif op == DIV:
        r = u / v
    else:
        r = unary(op, u)
    code = round_to(bits_of_f64(r), fmt, flags >> MODE_SHIFT, False)
    if flags & FTZ and (code & 0x7FFF) <= low_mask(FORMATS[fmt, _MANTISSA]):
        code &= 0x8000
    if math.isnan(r):
        code = 0 if flags & SAT else 0x7FFF
    elif (flags & (RELU | SAT)) and code & 0x8000:
        code = 0
    if flags & SAT and r > 1.0:
        code = round_to(bits_of_f64(1.0), fmt, RN, False)
    return code


# kinds of operands: how a register is cut into values
K_F32, K_F64, K_F16, K_BF16, K_F32X2, K_F16X2, K_BF16X2 = range(7)


@jit
def float_op(kind, op, flags, a, b, c):
    """One lane of a floating-point instruction."""
    if kind == K_F32:
        return f32_op(op, flags, a, b, c)
    if kind == K_F64:
        return f64_op(op, flags, a, b, c)
    if kind == K_F32X2:
        m = 0xFFFFFFFF
        low = f32_op(op, flags, a & m, b & m, c & m)
        return low | (f32_op(op, flags, lsr(a, 32), lsr(b, 32), lsr(c, 32)) << 32)
    fmt = F16_FORMAT if kind == K_F16 or kind == K_F16X2 else BF16_FORMAT
    low = f16_op(op, flags, fmt, a & 0xFFFF, b & 0xFFFF, c & 0xFFFF)
    if kind == K_F16 or kind == K_BF16:
        return low
    high = f16_op(op, flags, fmt, (a >> 16) & 0xFFFF, (b >> 16) & 0xFFFF, (c >> 16) & 0xFFFF)
    return low | (high << 16)


@jit
def as_double(kind, bits):
    """A float operand of any kind of one value as a double (for comparisons and conversions)."""
    if kind == K_F32:
        return np.float64(f32_of(bits))
    if kind == K_F64:
        return f64_of(bits)
    return widen(bits & 0xFFFF, F16_FORMAT if kind == K_F16 else BF16_FORMAT)
