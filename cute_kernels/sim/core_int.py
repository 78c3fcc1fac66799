"""Integer arithmetic and conversions of the compiled core: one lane at a time, on raw bits in
int64.

`bits` is the width of the instruction's type (8, 16, 32, 64), `signed` whether it is an s type.
Results
are cut to the destination by the caller.
"""

# ruff: noqa: SIM109 (plain loops and comparisons are what numba compiles best)
from __future__ import annotations

import math

import numpy as np

from cute_kernels.sim.core_bits import (
    bits_of_f32,
    bits_of_f64,
    jit,
    leading_zeros,
    low_mask,
    lsr,
    popcount,
    reverse_bits,
    sign_extend,
    signed_to_f32,
    signed_to_f64,
    smulh,
    udiv,
    ult,
    umulh,
    unsigned_to_f32,
    unsigned_to_f64,
    urem,
)
from cute_kernels.sim.core_float import (
    E2M1_FORMAT,
    F32_FORMAT,
    FTZ,
    K_F32,
    K_F64,
    NAN32,
    NAN64,
    RELU,
    RM,
    RN,
    RP,
    RZ,
    SAT,
    as_double,
    flush32,
    round_to,
    widen,
)

# operations
IADD, ISUB, MUL_LO, MUL_HI, MUL_WIDE, MAD_LO, MAD_HI, MAD_WIDE, IDIV, IREM = range(10)
IABS, INEG, IMIN, IMAX, AND, OR, XOR, NOT, CNOT, SHL = range(10, 20)
SHR, POPC, CLZ, BFIND, BREV, BFE, BFI, PRMT, LOP3, SHF = range(20, 30)
SELP, MOV, SAD, DP4A, MAPA, CVTA_TO, CVTA_FROM, ISSPACE, GETRANK, SLCT = range(30, 40)
BMSK, SZEXT, ADD_SAT, SUB_SAT = range(40, 44)


@jit
def extend(value, bits, signed):
    """The value of the low `bits` bits."""
    if signed:
        return sign_extend(value, bits)
    return value & low_mask(bits)


@jit
def multiply_high(a, b, bits, signed):
    if bits == 64:
        return smulh(a, b) if signed else umulh(a, b)
    product = a * b  # exact: both factors have at most 32 bits
    return (product >> bits) if signed else lsr(product, bits)


@jit
def divide(a, b, bits, signed, remainder):
    if b == 0:
        return a if remainder else -1
    if not signed:
        return urem(a, b) if remainder else udiv(a, b)
    if b == -1:
        return 0 if remainder else -a
    quotient = udiv(abs(a), abs(b))
    if (a < 0) != (b < 0):
        quotient = -quotient
    return a - quotient * b if remainder else quotient


@jit
def permute_bytes(a, b, selector, mode):
    """prmt.b32; mode 0 default, 1 f4e, 2 b4e, 3 rc8, 4 ecl, 5 ecr, 6 rc16."""
    both = (a & 0xFFFFFFFF) | (b << 32)
    out = 0
    s = selector & 3
    for i in range(4):
        if mode == 0:
            pick = (selector >> (4 * i)) & 15
        elif mode == 1:
            pick = s + i
        elif mode == 2:
            pick = (s - i) & 7
        elif mode == 3:
            pick = s
        elif mode == 4:
            pick = max(i, s)
        elif mode == 5:
            pick = min(i, s)
        else:
            pick = (2 * (s & 1)) + (i & 1)
        byte = lsr(both, 8 * (pick & 7)) & 255
        if pick & 8:
            byte = 255 if byte & 128 else 0
        out |= byte << (8 * i)
    return out


@jit
def field_extract(a, b, c, bits, signed):
    position, length = b & 255, c & 255
    value = a & low_mask(bits)
    top = min(position + length - 1, bits - 1)
    sign = signed and length > 0 and lsr(value, top) & 1 == 1
    field = lsr(value, position) & low_mask(min(length, 64)) if position < bits else 0
    if sign:
        have = max(min(length, bits - position), 0)
        field |= -1 if have == 0 else ~low_mask(have)
    return field


@jit
def field_insert(a, b, c, d, bits):
    position, length = c & 255, d & 255
    if position >= bits:
        return b
    window = low_mask(min(length, 64)) << position
    return (b & ~window) | ((a << position) & window)


@jit
def find_leading(a, bits, signed, shift_amount):
    value = extend(a, bits, signed)
    if signed and value < 0:
        value = ~value
    if value == 0:
        return 0xFFFFFFFF
    top = 63 - leading_zeros(value)
    return bits - 1 - top if shift_amount else top


@jit
def funnel_shift(a, b, amount, left, clamp):
    n = min(amount & 0xFFFFFFFF, 32) if clamp else amount & 31
    both = (a & 0xFFFFFFFF) | (b << 32)
    if left:
        return lsr(both << n, 32) if n < 32 else a & 0xFFFFFFFF
    return lsr(both, n)


@jit
def logic3(a, b, c, table):
    out = 0
    for i in range(8):
        if (table >> i) & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


@jit
def dot4(a, b, c, mode):
    """dp4a: bit 0 of mode = a signed, bit 1 = b signed."""
    total = c
    for i in range(4):
        total += extend(a >> (8 * i), 8, mode & 1) * extend(b >> (8 * i), 8, mode & 2)
    return total


@jit
def shift(op, a, b, bits, signed):
    n = b & 0xFFFFFFFF
    if op == SHL:
        return a << n if n < bits else 0
    if signed:
        return sign_extend(a, bits) >> min(n, bits - 1)
    return lsr(a & low_mask(bits), n) if n < bits else 0


@jit
def rare_op(op, mode, a, b, c, d, bits, signed):
    """Integer operations outside the inner loops of kernels."""
    if op == IDIV or op == IREM:
        return divide(extend(a, bits, signed), extend(b, bits, signed), bits, signed, op == IREM)
    if op == POPC:
        return popcount(a & low_mask(bits))
    if op == CLZ:
        return leading_zeros(a & low_mask(bits)) - (64 - bits)
    if op == BFIND:
        return find_leading(a, bits, signed, mode)
    if op == BREV:
        return lsr(reverse_bits(a), 64 - bits)
    if op == BFE:
        return field_extract(a, b, c, bits, signed)
    if op == BFI:
        return field_insert(a, b, c, d, bits)
    if op == DP4A:
        return dot4(a, b, c, mode)
    if op == SAD:
        return c + abs(extend(a, bits, signed) - extend(b, bits, signed))
    if op == SLCT:
        return a if sign_extend(c, 32) >= 0 else b
    if op == BMSK:
        start, length = a, b
        if mode:  # clamp
            start, length = min(start & 0xFFFFFFFF, 32), min(length & 0xFFFFFFFF, 32)
        else:
            start, length = start & 31, length & 31
        return low_mask(length) << start
    if op == SZEXT:
        n = b & 31 if not mode else min(b & 0xFFFFFFFF, 32)
        return 0 if n == 0 else extend(a, n, signed)
    if op == ADD_SAT or op == SUB_SAT:
        x, y = sign_extend(a, 32), sign_extend(b, 32)
        return min(max(x + y if op == ADD_SAT else x - y, -(1 << 31)), (1 << 31) - 1)
    if op == CNOT:
        return 1 if (a & low_mask(bits)) == 0 else 0
    if op == MAPA:
        return (a & ~(255 << 24)) | ((b & 255) << 24)
    if op == GETRANK:
        return (a >> 24) & 255
    if op == CVTA_TO:  # generic to a space whose generic base is in the top byte
        return a & ((1 << 56) - 1)
    if op == CVTA_FROM:
        return (a & ((1 << 56) - 1)) | (mode << 56)
    if op == ISSPACE:
        top = lsr(a, 56)
        return 1 if (top == mode or (mode == 0 and top > 2)) else 0
    return 0


@jit
def int_op(op, mode, a, b, c, d, bits, signed):
    """One lane of an integer instruction; `mode` is its immediate or variant."""
    if op == MOV:
        return a
    if op == IADD:
        return a + b
    if op == ISUB:
        return a - b
    if op == MUL_LO:
        return a * b
    if op == MAD_LO:
        return a * b + c
    if op == AND:
        return a & b
    if op == OR:
        return a | b
    if op == XOR:
        return a ^ b
    if op == NOT:
        return ~a
    if op == SHL or op == SHR:
        return shift(op, a, b, bits, signed)
    if op == SELP:
        return a if c & 1 else b
    if op == MUL_WIDE:
        return extend(a, bits, signed) * extend(b, bits, signed)
    if op == MAD_WIDE:
        return extend(a, bits, signed) * extend(b, bits, signed) + c
    if op == MUL_HI or op == MAD_HI:
        high = multiply_high(extend(a, bits, signed), extend(b, bits, signed), bits, signed)
        return high + c if op == MAD_HI else high
    if op == IMIN or op == IMAX:
        x, y = extend(a, bits, signed), extend(b, bits, signed)
        less = x < y if signed else ult(x, y)
        best = x if less == (op == IMIN) else y
        return 0 if mode and best < 0 else best  # .relu
    if op == INEG:
        return -a
    if op == IABS:
        return abs(extend(a, bits, signed))
    if op == PRMT:
        return permute_bytes(a, b, c, mode)
    if op == LOP3:
        return logic3(a, b, c, mode)
    if op == SHF:
        return funnel_shift(a, b, c, mode & 1, mode & 2)
    return rare_op(op, mode, a, b, c, d, bits, signed)


@jit
def halves(op, mode, a, b, signed):
    """add, min, max of u16x2 and s16x2."""
    out = 0
    for i in range(0, 32, 16):
        part = int_op(op, mode, (a >> i) & 0xFFFF, (b >> i) & 0xFFFF, 0, 0, 16, signed)
        out |= (part & 0xFFFF) << i
    return out


# comparisons: the code of the relation, plus UNORDERED for the forms that are true on NaN
EQ, NE, LT, LE, GT, GE, NUM, ISNAN = range(8)
UNORDERED = 8


@jit
def relation(code, less, equal):
    if code == EQ:
        return equal
    if code == NE:
        return not equal
    if code == LT:
        return less
    if code == LE:
        return less or equal
    if code == GT:
        return not (less or equal)
    return not less


@jit
def compare_int(code, a, b, bits, signed):
    x, y = extend(a, bits, signed), extend(b, bits, signed)
    return relation(code, x < y if signed else ult(x, y), x == y)


@jit
def compare_float(code, kind, ftz, a, b):
    if ftz and kind == K_F32:
        a, b = flush32(a), flush32(b)
    x, y = as_double(kind, a), as_double(kind, b)
    if math.isnan(x) or math.isnan(y):
        return code == ISNAN or (code & UNORDERED) != 0
    if code == NUM:
        return True
    if code == ISNAN:
        return False
    return relation(code & 7, x < y, x == y)


@jit
def round_double(x, mode):
    """To an integral double."""
    if mode == RN:
        return np.rint(x)
    if mode == RZ:
        return np.trunc(x)
    if mode == RM:
        return np.floor(x)
    return np.ceil(x)


@jit
def float_to_int(kind, a, flags, mode, bits, signed):
    """cvt to an integer type: rounds, then saturates; NaN becomes 0 (the top bit for 64 bits)."""
    if kind == K_F32 and flags & FTZ:
        a = flush32(a)
    x = as_double(kind, a)
    if math.isnan(x):
        return 0 if bits < 64 else -(1 << 63)
    x = round_double(x, mode)
    if signed:
        limit = 2.0 ** (bits - 1)
        if x >= limit:
            return low_mask(bits - 1)
        if x <= -limit:
            return ~low_mask(bits - 1)
        return np.int64(x)
    if x <= 0.0:
        return 0
    if x >= 2.0**bits:
        return low_mask(bits)
    if x >= 9223372036854775808.0:
        return np.int64(x - 9223372036854775808.0) ^ (-(1 << 63))
    return np.int64(x)


@jit
def int_to_float(kind, fmt, a, mode, bits, signed):
    """cvt from an integer type."""
    x = extend(a, bits, signed)
    if kind == K_F64:
        return bits_of_f64(signed_to_f64(x) if signed else unsigned_to_f64(x))
    if kind == K_F32 and mode == RN:
        return bits_of_f32(signed_to_f32(x) if signed else unsigned_to_f32(x))
    if bits == 64:  # more bits than a double holds: round to odd first
        magnitude = abs(x) if signed else x
        spare = 64 - leading_zeros(magnitude) - 53
        if spare > 0:
            sticky = 1 if (magnitude & low_mask(spare)) != 0 else 0
            value = unsigned_to_f64(lsr(magnitude, spare) | sticky) * 2.0**spare
            if signed and x < 0:
                value = -value
            return round_to(bits_of_f64(value), fmt, mode, False)
    value = signed_to_f64(x) if signed else unsigned_to_f64(x)
    return round_to(bits_of_f64(value), fmt, mode, False)


@jit
def float_to_float(kind, fmt, a, flags, mode):
    """cvt between f16, bf16, f32, f64 and tf32. `fmt` -1 means f64."""
    if kind == K_F32 and flags & FTZ:
        a = flush32(a)
    x = as_double(kind, a)
    if fmt < 0:
        return NAN64 if math.isnan(x) else bits_of_f64(x)
    code = round_to(bits_of_f64(x), fmt, mode, False)
    if fmt == F32_FORMAT:
        if math.isnan(x):
            code = NAN32
        if flags & FTZ:
            code = flush32(code)
    if flags & (SAT | RELU) and (x < 0.0 or x == 0.0 or math.isnan(x)):
        code = 0 if not (math.isnan(x) and flags & RELU and not flags & SAT) else code
    if flags & SAT and x > 1.0:
        code = round_to(bits_of_f64(1.0), fmt, RN, False)
    return code


@jit
def integral_float(kind, fmt, a, mode):
    """cvt.rni.f32.f32 and the like."""
    x = round_double(as_double(kind, a), mode)
    return bits_of_f64(x) if fmt < 0 else round_to(bits_of_f64(x), fmt, RN, False)


@jit
def to_ue8m0(x, mode, satfinite):
    """Power-of-two scale of a double: the exponent, biased by 127; NaN is 0xFF; the sign is
    ignored."""
    if math.isnan(x):
        return 0xFF
    bits = bits_of_f64(abs(x))
    exponent = lsr(bits, 52) - 1023
    if mode == RP and (bits & 0xFFFFFFFFFFFFF) != 0:
        exponent += 1
    if x == 0.0 or exponent < -127:
        return 0
    if exponent > 127:
        return 0xFE if satfinite or mode == RZ else 0xFF
    return exponent + 127


UE8M0_FORMAT = 9


@jit
def narrow_one(fmt, x, flags, mode):
    """One element of a packed narrow cvt, always satfinite."""
    if fmt == UE8M0_FORMAT:
        return to_ue8m0(x, mode, True)
    code = round_to(bits_of_f64(x), fmt, mode, True)
    if flags & RELU and x <= 0.0:
        code = 0
    return code


@jit
def from_narrow(fmt, code):
    """One element of a packed narrow format as a double."""
    if fmt == UE8M0_FORMAT:
        return math.nan if code == 0xFF else 2.0 ** np.float64(code - 127)
    return widen(code, fmt)


@jit
def element_bits(fmt):
    return 4 if fmt == E2M1_FORMAT else 8
