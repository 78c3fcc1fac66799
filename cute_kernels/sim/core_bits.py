"""Bit-level primitives of the compiled core: reinterpretation, unsigned arithmetic, raw memory.

The core keeps every 64-bit value as int64 (numba turns int64 mixed with uint64 into float64), so
what
needs an unsigned view of the bits is an LLVM instruction here.
"""

# ruff: noqa: SIM110 (plain loops and comparisons are what numba compiles best)
from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I64, F32, F64 = types.int64, types.float32, types.float64
_I8, _I32, _I64, _I128 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.IntType(128)
_FLOAT, _DOUBLE = ir.FloatType(), ir.DoubleType()


def _fingerprint() -> str:
    """Hash of the sources of the compiled core."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("core*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES = _fingerprint()


def jit(function: Callable[..., Any]) -> Any:
    """Compile for the types of the first call, and cache on disk.

    numba takes a cached function for fresh while its own file is unchanged, although it holds
    copies of
    what it calls: here it is fresh while no file of the core has changed.
    """
    dispatcher = numba.njit(cache=True, error_model="numpy", boundscheck=False)(function)
    file = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if file is not None:
        file._source_stamp = (file._source_stamp, _SOURCES)
    return dispatcher


def _make(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """An intrinsic of fixed types; `emit(builder, *values)` returns its LLVM value."""
    signature = result(*arguments)

    def codegen(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        value = emit(builder, *args)
        return context.get_dummy_value() if value is None else value

    if len(arguments) == 1:

        @intrinsic
        def one(typingctx: Any, a: Any) -> Any:
            return signature, codegen

        return one
    if len(arguments) == 2:

        @intrinsic
        def two(typingctx: Any, a: Any, b: Any) -> Any:
            return signature, codegen

        return two

    @intrinsic
    def three(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
        return signature, codegen

    return three


def _high(extend: str) -> Callable[..., Any]:
    def emit(b: Any, x: Any, y: Any) -> Any:
        wide = b.mul(getattr(b, extend)(x, _I128), getattr(b, extend)(y, _I128))
        return b.trunc(b.lshr(wide, ir.Constant(_I128, 64)), _I64)

    return emit


def _load(bits: int) -> Callable[..., Any]:
    def emit(b: Any, address: Any) -> Any:
        kind = ir.IntType(bits)
        value = b.load(b.inttoptr(address, kind.as_pointer()), align=1)
        return value if bits == 64 else b.zext(value, _I64)

    return emit


def _store(bits: int) -> Callable[..., Any]:
    def emit(b: Any, address: Any, value: Any) -> Any:
        kind = ir.IntType(bits)
        cut = value if bits == 64 else b.trunc(value, kind)
        b.store(cut, b.inttoptr(address, kind.as_pointer()), align=1)
        return ir.Constant(_I64, 0)

    return emit


lsr = _make(I64, (I64, I64), lambda b, x, n: b.lshr(x, n))
udiv = _make(I64, (I64, I64), lambda b, x, y: b.udiv(x, y))
urem = _make(I64, (I64, I64), lambda b, x, y: b.urem(x, y))
ult = _make(types.boolean, (I64, I64), lambda b, x, y: b.icmp_unsigned("<", x, y))
umulh = _make(I64, (I64, I64), _high("zext"))
smulh = _make(I64, (I64, I64), _high("sext"))
popcount = _make(I64, (I64,), lambda b, x: b.ctpop(x))
leading_zeros = _make(I64, (I64,), lambda b, x: b.ctlz(x, cgutils.false_bit))
reverse_bits = _make(I64, (I64,), lambda b, x: b.bitreverse(x))
f32_of = _make(F32, (I64,), lambda b, x: b.bitcast(b.trunc(x, _I32), _FLOAT))
bits_of_f32 = _make(I64, (F32,), lambda b, x: b.zext(b.bitcast(x, _I32), _I64))
f64_of = _make(F64, (I64,), lambda b, x: b.bitcast(x, _DOUBLE))
bits_of_f64 = _make(I64, (F64,), lambda b, x: b.bitcast(x, _I64))
fma_f32 = _make(F32, (F32, F32, F32), lambda b, x, y, z: b.fma(x, y, z))
fma_f64 = _make(F64, (F64, F64, F64), lambda b, x, y, z: b.fma(x, y, z))
signed_to_f32 = _make(F32, (I64,), lambda b, x: b.sitofp(x, _FLOAT))
unsigned_to_f32 = _make(F32, (I64,), lambda b, x: b.uitofp(x, _FLOAT))
signed_to_f64 = _make(F64, (I64,), lambda b, x: b.sitofp(x, _DOUBLE))
unsigned_to_f64 = _make(F64, (I64,), lambda b, x: b.uitofp(x, _DOUBLE))
load8 = _make(I64, (I64,), _load(8))
load16 = _make(I64, (I64,), _load(16))
load32 = _make(I64, (I64,), _load(32))
load64 = _make(I64, (I64,), _load(64))
store8 = _make(I64, (I64, I64), _store(8))
store16 = _make(I64, (I64, I64), _store(16))
store32 = _make(I64, (I64, I64), _store(32))
store64 = _make(I64, (I64, I64), _store(64))


@jit
def load(address, size):
    """The `size` (1, 2, 4, 8) bytes at a process address, zero-extended."""
    if size == 4:
        return load32(address)
    if size == 8:
        return load64(address)
    if size == 2:
        return load16(address)
    return load8(address)


@jit
def store(address, size, value):
    """Stores the low `size` bytes."""
    if size == 4:
        store32(address, value)
    elif size == 8:
        store64(address, value)
    elif size == 2:
        store16(address, value)
    else:
        store8(address, value)


@jit
def any_set(address, size):
    """True if one of `size` bytes is not zero; `size` is a power of two."""
    if size < 8:
        return load(address, size) != 0
    for i in range(0, size, 8):
        if load64(address + i) != 0:
            return True
    return False


@jit
def all_ones(address, size):
    """True if each of `size` (1, 2, 4, 8) bytes is exactly 1."""
    if size == 4:
        return load32(address) == 0x01010101
    if size == 8:
        return load64(address) == 0x0101010101010101
    if size == 2:
        return load16(address) == 0x0101
    return load8(address) == 1


@jit
def low_mask(bits):
    """The lowest `bits` bits set; 0 <= bits <= 64."""
    if bits >= 64:
        return -1
    return (1 << bits) - 1


@jit
def sign_extend(value, bits):
    shift = 64 - bits
    return (value << shift) >> shift
