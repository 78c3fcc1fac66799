"""Arithmetic: each instruction becomes a closure over rows of 32 lanes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim import numerics
from cute_kernels.sim.checks import UnsupportedInstruction
from cute_kernels.sim.operands import TYPES, Closure, getter, putter, type_of, width
from cute_kernels.sim.ptx import Pair, Vec

Function = Callable[..., Any]
_U64 = np.uint64


def closure(fn: Function, destination: Any, out: str, sources: Any, types: Any) -> Closure:
    """destination = fn(*sources), the sources read in ``types``."""
    put = putter(destination, out)
    gets = [getter(s, t) for s, t in zip(sources, types)]
    if len(gets) == 1:
        (a,) = gets
        return lambda w, m: put(w, m, fn(a(w)))
    if len(gets) == 2:
        a, b = gets
        return lambda w, m: put(w, m, fn(a(w), b(w)))
    return lambda w, m: put(w, m, fn(*[g(w) for g in gets]))


def uniform(fn: Function) -> Callable[[Any], Closure]:
    """Builder of an instruction whose operands all have its type."""

    def build(instr: Any) -> Closure:
        t = type_of(instr)
        destination, *sources = instr.operands
        return closure(fn, destination, t, sources, [t] * len(sources))

    return build


# ---- integers


def _mul(instr: Any) -> Closure:
    t = type_of(instr)
    d, a, b = instr.operands
    if t in FLOATS:
        return _float(instr)
    if instr.has("wide"):
        wide = t[0] + str(16 * width(t))
        dtype = TYPES[wide][1]
        return closure(lambda x, y: dtype_mul(x, y, dtype), d, wide, (a, b), (t, t))
    if instr.has("hi"):
        return closure(lambda x, y: mul_hi(x, y, t), d, t, (a, b), (t, t))
    return closure(operator.mul, d, t, (a, b), (t, t))


def dtype_mul(x: Any, y: Any, dtype: Any) -> Any:
    return np.asarray(x, dtype) * np.asarray(y, dtype)


def mul_hi(x: Any, y: Any, t: str) -> Any:
    bits = 8 * width(t)
    if bits <= 32:
        wide = np.int64 if t[0] == "s" else np.uint64
        return (np.asarray(x, wide) * np.asarray(y, wide) >> wide(bits)).astype(TYPES[t][1])
    a, b = np.broadcast_arrays(np.asarray(x), np.asarray(y))
    high = [(int(i) * int(j) >> 64) & ((1 << 64) - 1) for i, j in zip(a.flat, b.flat)]
    return np.array(high, np.uint64).view(TYPES[t][1]).reshape(a.shape)


def _mad(instr: Any) -> Closure:
    t = type_of(instr)
    d, a, b, c = instr.operands
    if t in FLOATS:
        return _float(instr)
    if instr.has("wide"):
        wide = t[0] + str(16 * width(t))
        dtype = TYPES[wide][1]
        return closure(lambda x, y, z: dtype_mul(x, y, dtype) + z, d, wide, (a, b, c), (t, t, wide))
    if instr.has("hi"):
        return closure(lambda x, y, z: mul_hi(x, y, t) + z, d, t, (a, b, c), (t, t, t))
    return closure(lambda x, y, z: x * y + z, d, t, (a, b, c), (t, t, t))


def divide(x: Any, y: Any) -> Any:
    """Integer division towards zero; a division by zero gives all ones."""
    safe = np.where(y == 0, np.asarray(y).dtype.type(1), y)
    quotient = x // safe
    if np.asarray(x).dtype.kind == "i":  # numpy rounds down
        quotient = quotient + ((quotient * safe != x) & ((x < 0) != (safe < 0)))
    return np.where(y == 0, ~np.zeros_like(quotient), quotient)


def _div(instr: Any) -> Closure:
    return _float(instr) if type_of(instr) in FLOATS else uniform(divide)(instr)


def _shift(left: bool) -> Callable[[Any], Closure]:
    def build(instr: Any) -> Closure:
        t = type_of(instr)
        d, a, n = instr.operands
        bits, dtype = 8 * width(t), TYPES[t][1]

        def shift(x: Any, amount: Any) -> Any:
            if t[0] == "s" and not left:
                return x >> np.minimum(amount, bits - 1).astype(dtype)
            clamped = np.minimum(amount, bits - 1).astype(dtype)
            moved = x << clamped if left else x >> clamped
            return np.where(np.asarray(amount) >= bits, dtype(0), moved)

        return closure(shift, d, t, (a, n), (t, "u32"))

    return build


def _shf(instr: Any) -> Closure:
    left, wrap = instr.has("l"), instr.has("wrap")

    def shf(low: Any, high: Any, n: Any) -> Any:
        both = (np.asarray(high, _U64) << _U64(32)) | low
        n = (n & np.uint32(31)) if wrap else np.minimum(n, np.uint32(32))
        n = np.asarray(n, _U64)
        if left:
            return ((both << n) >> _U64(32)).astype(np.uint32)
        return (both >> n).astype(np.uint32)

    d, *s = instr.operands
    return closure(shf, d, "b32", s, ("b32", "b32", "u32"))


def _lop3(instr: Any) -> Closure:
    d, a, b, c, table = instr.operands
    lut = table.bits & 0xFF

    def lop3(x: Any, y: Any, z: Any) -> Any:
        out = np.zeros(32, np.uint32)
        for i in range(8):
            if lut >> i & 1:
                out |= (x if i & 4 else ~x) & (y if i & 2 else ~y) & (z if i & 1 else ~z)
        return out

    return closure(lop3, d, "b32", (a, b, c), ("b32",) * 3)


def prmt(a: Any, b: Any, selector: Any) -> Any:
    """Default mode: each nibble of the selector picks a byte, bit 3 replicates its sign."""
    both = np.asarray(a, _U64) | (np.asarray(b, _U64) << _U64(32))
    out = np.zeros(32, np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (np.asarray(nibble & np.uint32(7), _U64) * _U64(8))).astype(np.uint32)
        byte = byte & np.uint32(0xFF)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        out |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return out


def _prmt(instr: Any) -> Closure:
    if instr.mods != ("b32",):
        raise UnsupportedInstruction(f"{instr.opcode}: only the default mode of prmt is modelled")
    d, *s = instr.operands
    return closure(prmt, d, "b32", s, ("b32",) * 3)


def _bfe(instr: Any) -> Closure:
    t = type_of(instr)
    bits, dtype = 8 * width(t), TYPES[t][1]

    def bfe(x: Any, position: Any, length: Any) -> Any:
        position, length = (np.asarray(v & np.uint32(0xFF), np.int64) for v in (position, length))
        out = []
        for value, p, n in zip(*(np.broadcast_to(v, 32).tolist() for v in (x, position, length))):
            top = min(p + n - 1, bits - 1)
            sign = t[0] == "s" and n > 0 and (value & ((1 << bits) - 1)) >> top & 1
            field = ((value & ((1 << bits) - 1)) >> p) & ((1 << n) - 1) if p < bits else 0
            have = max(min(n, bits - p), 0)
            out.append((field | (-1 << have)) if sign else field)
        return np.array([v & ((1 << bits) - 1) for v in out], np.uint64).astype(dtype)

    d, *s = instr.operands
    return closure(bfe, d, t, s, (t, "u32", "u32"))


def _bfi(instr: Any) -> Closure:
    t = type_of(instr)
    bits, dtype = 8 * width(t), TYPES[t][1]

    def bfi(field: Any, base: Any, position: Any, length: Any) -> Any:
        rows = (np.broadcast_to(v, 32).tolist() for v in (field, base, position, length))
        out = []
        for f, b, p, n in zip(*rows):
            mask = (((1 << (n & 0xFF)) - 1) << (p & 0xFF)) & ((1 << bits) - 1)
            out.append((b & ~mask) | ((f << (p & 0xFF)) & mask))
        return np.array(out, np.uint64).astype(dtype)

    d, *s = instr.operands
    return closure(bfi, d, t, s, (t, t, "u32", "u32"))


def popc(x: Any) -> Any:
    return np.bitwise_count(x).astype(np.uint32)


def clz(x: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    return np.array([bits - int(v).bit_length() for v in np.broadcast_to(x, 32)], np.uint32)


def brev(x: Any) -> Any:
    bits = 8 * x.dtype.itemsize
    return np.array([int(f"{int(v):0{bits}b}"[::-1], 2) for v in np.broadcast_to(x, 32)], x.dtype)


def _bfind(instr: Any) -> Closure:
    t = type_of(instr)

    def bfind(x: Any) -> Any:
        out = []
        for v in np.broadcast_to(x, 32).tolist():
            v = ~v if v < 0 else v
            top = v.bit_length() - 1
            top = 8 * width(t) - 1 - top if instr.has("shiftamt") and top >= 0 else top
            out.append(top & 0xFFFFFFFF)
        return np.array(out, np.uint32)

    d, a = instr.operands
    return closure(bfind, d, "u32", (a,), (t,))


def _counting(fn: Function) -> Callable[[Any], Closure]:
    def build(instr: Any) -> Closure:
        d, a = instr.operands
        return closure(lambda x: fn(np.asarray(x)), d, "u32", (a,), (type_of(instr),))

    return build


# ---- floats


FLOATS = ("f32", "f32x2", "f64", "f16", "f16x2", "bf16", "bf16x2")


def decode(bits: Any, t: str) -> list[Any]:
    """The one or two fp32 (fp64 for f64) values of a register of float type ``t``."""
    if t in ("f32", "f64"):
        return [bits]
    if t == "f32x2":
        low = (bits & _U64(0xFFFFFFFF)).astype(np.uint32).view(np.float32)
        return [low, (bits >> _U64(32)).astype(np.uint32).view(np.float32)]
    to_f32 = numerics.f16_to_f32 if t.startswith("f16") else numerics.bf16_to_f32
    if t in ("f16", "bf16"):
        return [to_f32(np.asarray(bits, np.uint16))]
    low = np.asarray(bits & np.uint32(0xFFFF)).astype(np.uint16)
    return [to_f32(low), to_f32(np.asarray(bits >> np.uint32(16)).astype(np.uint16))]


def encode(values: list[Any], t: str) -> Any:
    """Inverse of `decode`, rounding to nearest even."""
    if t in ("f32", "f64"):
        return values[0]
    if t == "f32x2":
        raw = [
            np.ascontiguousarray(v, np.float32).view(np.uint32).astype(np.uint64) for v in values
        ]
        return raw[0] | (raw[1] << _U64(32))
    to_bits = numerics.f32_to_f16 if t.startswith("f16") else numerics.f32_to_bf16
    raw = [to_bits(np.asarray(v, np.float32)) for v in values]
    if len(raw) == 1:
        return raw[0]
    return raw[0].astype(np.uint32) | (raw[1].astype(np.uint32) << np.uint32(16))


def _arith(base: str, instr: Any) -> Function:
    """The scalar function of a float instruction, on fp32 (or fp64) values."""
    nan = instr.has("NaN")
    if instr.has("xorsign"):
        raise UnsupportedInstruction(f"{instr.opcode} is not modelled")
    narrow = type_of(instr) not in ("f32", "f32x2", "f64")
    table: dict[str, Function] = {
        "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
        "neg": operator.neg, "abs": np.abs, "sqrt": np.sqrt,
        "min": _both_nan(np.minimum) if nan else np.fmin,
        "max": _both_nan(np.maximum) if nan else np.fmax,
        "fma": fma_f64 if type_of(instr) == "f64" else (fma_wide if narrow else numerics.fma_f32),
    }  # fmt: skip
    table["mad"] = table["fma"]
    if instr.has("abs") and base in ("min", "max"):
        return lambda *values: table[base](*(np.abs(v) for v in values))
    return table[base]


def _both_nan(fn: Function) -> Function:
    return lambda *values: fn(*values) if len(values) == 2 else fn(fn(*values[:2]), values[2])


def fma_wide(a: Any, b: Any, c: Any) -> Any:
    """Narrow types: the product and the sum of two fp16 or bf16 values lose nothing that the final
    rounding sees.
    """
    return a.astype(np.float64) * b + c


def fma_f64(a: Any, b: Any, c: Any) -> Any:
    raise UnsupportedInstruction("fma.f64 is not modelled")


def _float(instr: Any) -> Closure:
    t = type_of(instr)
    if t not in FLOATS:
        return uniform({"neg": operator.neg, "abs": np.abs}[instr.base])(instr)
    for mode in ("rz", "rm", "rp"):
        if instr.has(mode) and instr.base not in ("rcp", "sqrt"):
            raise UnsupportedInstruction(f"{instr.opcode}: only rounding to nearest is modelled")
    scalar, ftz = _arith(instr.base, instr), instr.has("ftz")
    relu, sat = instr.has("relu"), instr.has("sat")

    def apply(*bits: Any) -> Any:
        parts = [decode(b, t) for b in bits]
        out = []
        for values in zip(*parts):
            if ftz:
                values = tuple(numerics.flush(v) for v in values)
            v = scalar(*values) if len(values) < 3 or instr.base in ("fma", "mad") else None
            if v is None:
                v = scalar(scalar(values[0], values[1]), values[2])
            v = numerics.flush(v) if ftz else v
            v = np.clip(v, 0, 1) if sat else v
            out.append(np.maximum(v, 0) if relu else v)
        return encode(out, t)

    if t == "f32" and not (ftz or relu or sat):
        apply = scalar if len(instr.operands) < 4 or instr.base in ("fma", "mad") else apply
    d, *s = instr.operands
    return closure(apply, d, t, s, [t] * len(s))


_APPROXIMATE: dict[str, Function] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1.0 / x, "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x), "tanh": np.tanh, "sin": np.sin, "cos": np.cos,
}  # fmt: skip


def _approximate(instr: Any) -> Closure:
    """ex2, lg2, rcp, ... in fp64, rounded to the type: also what rcp.rn and sqrt.rn are."""
    t, fn, ftz = type_of(instr), _APPROXIMATE[instr.base], instr.has("ftz")

    def apply(bits: Any) -> Any:
        out = []
        for v in decode(bits, t):
            v = numerics.flush(v) if ftz else v
            r = fn(np.asarray(v, np.float64)).astype(np.float64 if t == "f64" else np.float32)
            out.append(numerics.flush(r) if ftz else r)
        return encode(out, t)

    d, a = instr.operands
    return closure(apply, d, t, (a,), (t,))


def _minmax(instr: Any) -> Closure:
    choose = np.minimum if instr.base == "min" else np.maximum
    relu = instr.has("relu")
    half: Any = {"u16x2": np.uint16, "s16x2": np.int16}.get(instr.mods[-1])
    if half is not None:

        def both(x: Any, y: Any) -> Any:
            x, y = (np.array(v, np.uint32).view(half) for v in (x, y))
            best = choose(x, y)
            return (np.maximum(best, half(0)) if relu else best).view(np.uint32)

        return closure(both, instr.operands[0], "u32", instr.operands[1:], ("u32", "u32"))
    t = type_of(instr)
    if t in FLOATS:
        return _float(instr)
    if relu:
        return uniform(lambda x, y: np.maximum(choose(x, y), TYPES[t][1](0)))(instr)
    return uniform(choose)(instr)


# ---- comparisons and choice


_COMPARE: dict[str, Function] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
    "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
_COMBINE: dict[str, Function] = {
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip


def comparison(name: str, t: str) -> Function:
    """Ordered forms are false for NaN, the forms that end in u are true."""
    if name in ("num", "nan"):
        want = name == "nan"
        return lambda a, b: (np.isnan(a) | np.isnan(b)) == want
    if t in ("f32", "f64", "f16", "bf16"):
        unordered = name.endswith("u") and name[:-1] in _COMPARE
        fn = _COMPARE[name[:-1] if unordered else name]
        if unordered:
            return lambda a, b: fn(a, b) | np.isnan(a) | np.isnan(b)
        return lambda a, b: fn(a, b) & ~(np.isnan(a) | np.isnan(b))
    return _COMPARE[name]


def _setp(instr: Any) -> Closure:
    t, name = type_of(instr), instr.mods[0]
    compare = comparison(name, t)
    combine = next((_COMBINE[m] for m in instr.mods[1:] if m in _COMBINE), None)
    destination, a, b, *third = instr.operands
    ga, gb = getter(a, t), getter(b, t)
    gc = getter(third[0], "pred") if third else None
    first = destination.first if isinstance(destination, Pair) else destination
    put = putter(first, "pred")
    put_not = putter(destination.second, "pred") if isinstance(destination, Pair) else None
    narrow = t in ("f16", "bf16")

    def setp(w: Any, m: Any) -> None:
        x, y = ga(w), gb(w)
        if narrow:
            x, y = decode(x, t)[0], decode(y, t)[0]
        r = compare(x, y)
        other = gc(w) if gc is not None else True
        put(w, m, combine(r, other) if combine else r)
        if put_not is not None:
            put_not(w, m, combine(~r, other) if combine else ~r)

    return setp


def _set(instr: Any) -> Closure:
    t, out = type_of(instr), next(m for m in instr.mods[1:] if m in TYPES)
    compare = comparison(instr.mods[0], t)
    one = TYPES[out][1](1.0) if out == "f32" else ~TYPES[out][1](0)
    d, *s = instr.operands
    return closure(lambda a, b: np.where(compare(a, b), one, TYPES[out][1](0)), d, out, s, (t, t))


def _selp(instr: Any) -> Closure:
    t = type_of(instr)
    d, a, b, p = instr.operands
    return closure(lambda x, y, c: np.where(c, x, y), d, t, (a, b, p), (t, t, "pred"))


def _logic(fn: Function) -> Callable[[Any], Closure]:
    return uniform(fn)


def invert(x: Any) -> Any:
    return ~x


# ---- moves


def _mov(instr: Any) -> Closure:
    t = type_of(instr)
    d, a = instr.operands
    if isinstance(d, Vec):
        return _unpack(d.items, a, t)
    if isinstance(a, Vec):
        return _pack(d, a.items, t)
    if t == "b128":
        low = getattr(a, "id", None)
        if low is None:
            raise UnsupportedInstruction(f"{instr.opcode} from {a} is not modelled")

        def copy(w: Any, m: Any) -> None:
            for i in range(2):
                row = w.regs.u64[d.id + i]
                row[...] = np.where(True if m is None else m, w.regs.u64[low + i], row)

        return copy
    return closure(lambda x: x, d, t, (a,), (t,))


def _pack(d: Any, items: Any, t: str) -> Closure:
    """mov.b64 %d, {%lo, %hi} and the like; b128 fills two rows."""
    bits = 8 * width(t) // len(items)
    gets = [getter(i, f"u{bits}") for i in items]
    if t == "b128":
        puts = [lambda w, m, v, i=i: _store_row(w, d.id + i, m, v) for i in range(2)]

        def both(w: Any, m: Any) -> None:
            for put, get in zip(puts, gets):
                put(w, m, get(w))

        return both
    put = putter(d, t)
    dtype = TYPES[t][1]

    def pack(w: Any, m: Any) -> None:
        total: Any = dtype(0)
        for i, get in enumerate(gets):
            total = total | (np.asarray(get(w)).astype(dtype) << dtype(bits * i))
        put(w, m, total)

    return pack


def _store_row(w: Any, index: int, m: Any, v: Any) -> None:
    np.copyto(w.regs.u64[index], v, where=True if m is None else m)


def _unpack(items: Any, a: Any, t: str) -> Closure:
    bits = 8 * width(t) // len(items)
    puts = [putter(i, f"u{bits}") for i in items]
    if t == "b128":

        def rows(w: Any, m: Any) -> None:
            values = [w.regs.u64[a.id + i].copy() for i in range(2)]
            for put, v in zip(puts, values):
                put(w, m, v)

        return rows
    get, dtype, out = getter(a, t), TYPES[t][1], TYPES[f"u{bits}"][1]

    def unpack(w: Any, m: Any) -> None:
        value = np.array(get(w), dtype)
        for i, put in enumerate(puts):
            put(w, m, (value >> dtype(bits * i)).astype(out))

    return unpack


BUILDERS: dict[str, Callable[[Any], Closure]] = {
    "add": lambda i: _float(i) if type_of(i) in FLOATS else uniform(operator.add)(i),
    "sub": lambda i: _float(i) if type_of(i) in FLOATS else uniform(operator.sub)(i),
    "mul": _mul, "mul24": _mul, "mad": _mad, "fma": _float, "div": _div,
    "rem": uniform(lambda a, b: a - divide(a, b) * b),
    "neg": _float, "abs": _float, "min": _minmax, "max": _minmax,
    "and": _logic(operator.and_), "or": _logic(operator.or_), "xor": _logic(operator.xor),
    "not": _logic(invert), "cnot": uniform(lambda x: (x == 0).astype(x.dtype)),
    "shl": _shift(True), "shr": _shift(False), "shf": _shf, "lop3": _lop3, "prmt": _prmt,
    "bfe": _bfe, "bfi": _bfi, "bfind": _bfind, "popc": _counting(popc), "clz": _counting(clz),
    "brev": uniform(lambda x: brev(np.asarray(x))),
    "ex2": _approximate, "lg2": _approximate, "rcp": _approximate, "rsqrt": _approximate,
    "tanh": _approximate, "sin": _approximate, "cos": _approximate, "sqrt": _approximate,
    "setp": _setp, "set": _set, "selp": _selp, "mov": _mov,
}  # fmt: skip
