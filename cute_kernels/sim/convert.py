"""cvt and its relatives: cvta, isspacep, mapa."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim import numerics
from cute_kernels.sim.alu import closure, decode, encode
from cute_kernels.sim.checks import UnsupportedInstruction
from cute_kernels.sim.memory import LOCAL_BASE, SHARED_BASE
from cute_kernels.sim.operands import TYPES, Closure, getter, putter

_ROUND_INT = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_NARROW = ("e4m3x2", "e5m2x2", "e2m1x2", "ue8m0x2")
_FLOAT = ("f16", "bf16", "f32", "f64")


def _types(instr: Any) -> tuple[str, str]:
    known = [m for m in instr.mods if m in TYPES or m in _NARROW]
    if len(known) != 2:
        raise UnsupportedInstruction(f"{instr.opcode}: two types expected, found {known}")
    return known[0], known[1]


def _cvt(instr: Any) -> Closure:
    out, source = _types(instr)
    if out in _NARROW:
        return _to_narrow(instr, out, source)
    if source in _NARROW:
        return _from_narrow(instr, out, source)
    if out in ("f16x2", "bf16x2"):
        return _pair(instr, out, source)
    d, a = instr.operands
    if out in _FLOAT and source in _FLOAT:
        return closure(_float_to_float(instr, out, source), d, out, (a,), (source,))
    if out in _FLOAT:
        wide = np.float64 if out == "f64" else np.float32
        return closure(lambda x: encode([x.astype(wide)], out), d, out, (a,), (source,))
    if source in _FLOAT:
        return closure(_float_to_int(instr, out, source), d, out, (a,), (source,))
    dtype, sat = TYPES[out][1], instr.has("sat")

    def convert(x: Any) -> Any:
        if sat:
            info = np.iinfo(dtype)
            x = np.clip(x.astype(object), info.min, info.max)
        return np.asarray(x).astype(dtype)

    return closure(convert, d, out, (a,), (source,))


def _float_to_float(instr: Any, out: str, source: str) -> Callable[[Any], Any]:
    integral = next((_ROUND_INT[m] for m in instr.mods if m in _ROUND_INT), None)
    mode = next((m for m in instr.mods if m in ("rn", "rz", "rna")), "rn")
    if any(instr.has(m) for m in ("rm", "rp", "rs")):
        raise UnsupportedInstruction(f"{instr.opcode}: this rounding is not modelled")
    ftz, relu, sat = instr.has("ftz"), instr.has("relu"), instr.has("sat")

    def convert(bits: Any) -> Any:
        (x,) = decode(bits, source)
        x = numerics.flush(x) if ftz and source == "f32" else x
        x = integral(x) if integral is not None else x
        x = np.maximum(x, 0) if relu else x
        x = np.clip(x, 0, 1) if sat else x
        if out == "bf16":
            return numerics.f32_to_bf16(np.asarray(x, np.float32), mode)
        if out == "f16":
            return numerics.f32_to_f16(np.asarray(x, np.float32), mode)
        return np.asarray(x).astype(TYPES[out][1])

    return convert


def _float_to_int(instr: Any, out: str, source: str) -> Callable[[Any], Any]:
    integral = next((_ROUND_INT[m] for m in instr.mods if m in _ROUND_INT), np.trunc)
    info, dtype = np.iinfo(TYPES[out][1]), TYPES[out][1]

    def convert(bits: Any) -> Any:
        x = integral(np.asarray(decode(bits, source)[0], np.float64))
        x = np.where(np.isnan(x), 0.0, x)  # NaN becomes 0 for 32 bits and less (PTX ISA, cvt)
        low, high = float(info.min), float(info.max)
        inside = np.clip(x, low, np.nextafter(high, 0) if high >= 2**53 else high).astype(dtype)
        return np.where(x >= high, info.max, inside).astype(dtype)

    return convert


def _pair(instr: Any, out: str, source: str) -> Closure:
    """cvt.rn.bf16x2.f32 d, a, b: a becomes the upper half."""
    if source != "f32" or len(instr.operands) != 3:
        raise UnsupportedInstruction(f"{instr.opcode} is not modelled")
    mode = next((m for m in instr.mods if m in ("rn", "rz")), "rn")
    to_bits = numerics.f32_to_f16 if out == "f16x2" else numerics.f32_to_bf16
    relu = instr.has("relu")

    def convert(high: Any, low: Any) -> Any:
        if relu:
            high, low = np.maximum(high, 0), np.maximum(low, 0)
        halves = [to_bits(np.asarray(v, np.float32), mode).astype(np.uint32) for v in (low, high)]
        return halves[0] | (halves[1] << np.uint32(16))

    d, *s = instr.operands
    return closure(convert, d, out, s, ("f32", "f32"))


def _to_narrow(instr: Any, out: str, source: str) -> Closure:
    """Two values into two 8-bit codes (16 bits), or two 4-bit codes (8 bits); the first is the
    upper one.
    """
    fn: Callable[[Any], Any]
    if out == "ue8m0x2":
        mode = next(m for m in instr.mods if m in ("rz", "rp"))
        fn = lambda x: numerics.f32_to_ue8m0(x, mode)  # noqa: E731
    else:
        fn = {
            "e4m3x2": numerics.f32_to_e4m3,
            "e5m2x2": numerics.f32_to_e5m2,
            "e2m1x2": numerics.f32_to_e2m1,
        }[out]
    bits, register = (4, "b8") if out == "e2m1x2" else (8, "b16")
    dtype, relu = TYPES[register][1], instr.has("relu")

    def join(low: Any, high: Any) -> Any:
        if relu:
            low, high = np.maximum(low, 0), np.maximum(high, 0)
        codes = [
            fn(np.broadcast_to(np.asarray(v, np.float32), 32)).astype(dtype) for v in (low, high)
        ]
        return codes[0] | (codes[1] << dtype(bits))

    d, *s = instr.operands
    if source == "f32":
        return closure(lambda high, low: join(low, high), d, register, s, ("f32", "f32"))
    return closure(lambda pair: join(*decode(pair, source)), d, register, s, (source,))


def _from_narrow(instr: Any, out: str, source: str) -> Closure:
    table = {
        "e4m3x2": numerics.E4M3_VALUES,
        "e5m2x2": numerics.E5M2_VALUES,
        "e2m1x2": numerics.E2M1_VALUES,
    }.get(source)
    bits, register = (4, "b8") if source == "e2m1x2" else (8, "b16")
    if source == "ue8m0x2":
        table = np.ldexp(np.float32(1), np.arange(256) - 127).astype(np.float32)
        table[255] = np.nan
    if table is None or out not in ("f16x2", "bf16x2"):
        raise UnsupportedInstruction(f"{instr.opcode} is not modelled")

    def split(x: Any) -> Any:
        x = np.asarray(x, np.int64)
        return encode([table[x & ((1 << bits) - 1)], table[x >> bits & ((1 << bits) - 1)]], out)

    d, a = instr.operands
    return closure(split, d, out, (a,), (register,))


def _cvta(instr: Any) -> Closure:
    """Between a state space and the generic one: shared and local have their own ranges, the rest
    is equal.
    """
    base = {"shared": SHARED_BASE, "local": LOCAL_BASE}.get(
        next((m.split("::")[0] for m in instr.mods if m not in ("to", "u64", "u32")), ""), 0
    )
    offset = np.uint64(base)
    t = "u64" if "u64" in instr.mods else "u32"
    d, a = instr.operands
    if t == "u32" or not base:
        return closure(lambda x: x, d, t, (a,), (t,))
    if instr.has("to"):
        return closure(lambda x: x & ~offset, d, t, (a,), (t,))
    return closure(lambda x: x | offset, d, t, (a,), (t,))


def _isspacep(instr: Any) -> Closure:
    space = instr.mods[0].split("::")[0]
    d, a = instr.operands

    def test(x: Any) -> Any:
        if space == "shared":
            return (x & np.uint64(SHARED_BASE)) != 0
        if space == "local":
            return (x & np.uint64(LOCAL_BASE)) != 0
        return (x & np.uint64(SHARED_BASE | LOCAL_BASE)) == 0

    return closure(test, d, "pred", (a,), ("u64",))


def _mapa(instr: Any) -> Closure:
    """The address of the same variable in CTA ``rank`` of the cluster."""
    t = "u64" if "u64" in instr.mods else "u32"
    d, a, rank = instr.operands
    dtype = TYPES[t][1]

    def mapa(address: Any, r: Any) -> Any:
        kept = address & ~dtype(0xFF << 24)
        return kept | (np.asarray(r).astype(dtype) << dtype(24))

    return closure(mapa, d, t, (a, rank), (t, "u32"))


def _getctarank(instr: Any) -> Closure:
    t = "u64" if "u64" in instr.mods else "u32"
    d, a = instr.operands
    put, get = putter(d, "u32"), getter(a, t)
    return lambda w, m: put(
        w, m, (np.asarray(get(w), np.uint64) >> np.uint64(24)) & np.uint64(0xFF)
    )


BUILDERS: dict[str, Callable[[Any], Closure]] = {
    "cvt": _cvt,
    "cvta": _cvta,
    "isspacep": _isspacep,
    "mapa": _mapa,
    "getctarank": _getctarank,
}
