"""Lowers parsed PTX to the arrays that the compiled core runs: one builder per instruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim import core as k
from cute_kernels.sim import core_float as f
from cute_kernels.sim import core_int as i
from cute_kernels.sim import core_memory as m
from cute_kernels.sim import decode_memory
from cute_kernels.sim.checks import UnsupportedInstruction
from cute_kernels.sim.decode_operands import (
    BITS,
    CLOCKS,
    FORMATS,
    KINDS,
    NARROW,
    ROUNDING,
    Code,
    float_flags,
    floating,
    integer,
    is_signed,
    mask_of,
    refuse,
    set_sources,
    type_of,
)
from cute_kernels.sim.ptx import Addr, Function, Imm, Instr, Not, Pair, Sink, Special, Vec


def either(int_op: int, float_op: int) -> Callable[[Code, Instr, np.ndarray], None]:
    """An instruction that exists for integers and for floats."""

    def build(code: Code, instr: Instr, row: np.ndarray) -> None:
        t = type_of(instr)
        if t in KINDS:
            floating(code, instr, row, float_op)
        elif t in ("u16x2", "s16x2"):
            integer(code, instr, row, int_op, int("relu" in instr.mods))
            row[m.KIND] = k.HALVES
        elif t == "s32" and "sat" in instr.mods:
            integer(code, instr, row, i.ADD_SAT if instr.base == "add" else i.SUB_SAT)
        else:
            refuse(instr, "sat", "cc")
            integer(code, instr, row, int_op, int("relu" in instr.mods))

    return build


def plain(op: int) -> Callable[[Code, Instr, np.ndarray], None]:
    return lambda code, instr, row: integer(code, instr, row, op)


def float_only(op: int) -> Callable[[Code, Instr, np.ndarray], None]:
    return lambda code, instr, row: floating(code, instr, row, op)


def build_multiply(code: Code, instr: Instr, row: np.ndarray) -> None:
    t, mad = type_of(instr), instr.base == "mad"
    if t in KINDS:
        floating(code, instr, row, f.FMA if mad else f.MUL)
        return
    refuse(instr, "cc", "sat")
    if "wide" in instr.mods:
        wide = t[0] + str(2 * BITS[t])
        integer(code, instr, row, i.MAD_WIDE if mad else i.MUL_WIDE, 0, (t, t, wide), wide)
    elif "hi" in instr.mods:
        integer(code, instr, row, i.MAD_HI if mad else i.MUL_HI)
    else:
        integer(code, instr, row, i.MAD_LO if mad else i.MUL_LO)


def build_shift(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    integer(code, instr, row, i.SHL if instr.base == "shl" else i.SHR, 0, (t, "u32"))


def build_shf(code: Code, instr: Instr, row: np.ndarray) -> None:
    integer(code, instr, row, i.SHF, int("l" in instr.mods) | 2 * int("clamp" in instr.mods))


def build_lop3(code: Code, instr: Instr, row: np.ndarray) -> None:
    if len(instr.operands) != 5 or not isinstance(instr.operands[4], Imm):
        raise UnsupportedInstruction(f"{instr.opcode}: only the form with four sources is modelled")
    integer(code, instr, row, i.LOP3, instr.operands[4].bits & 255)


def build_prmt(code: Code, instr: Instr, row: np.ndarray) -> None:
    modes = {"f4e": 1, "b4e": 2, "rc8": 3, "ecl": 4, "ecr": 5, "rc16": 6}
    integer(code, instr, row, i.PRMT, next((modes[x] for x in instr.mods if x in modes), 0))


def build_counting(op: int) -> Callable[[Code, Instr, np.ndarray], None]:
    def build(code: Code, instr: Instr, row: np.ndarray) -> None:
        integer(code, instr, row, op, int("shiftamt" in instr.mods), None, "u32")

    return build


def build_field(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    if instr.base == "bfe":
        integer(code, instr, row, i.BFE, 0, (t, "u32", "u32"))
    else:
        integer(code, instr, row, i.BFI, 0, (t, t, "u32", "u32"))


def build_mask(code: Code, instr: Instr, row: np.ndarray) -> None:
    op = i.BMSK if instr.base == "bmsk" else i.SZEXT
    integer(code, instr, row, op, int("clamp" in instr.mods), (type_of(instr), "u32"))


def build_dp4a(code: Code, instr: Instr, row: np.ndarray) -> None:
    a_type, b_type = instr.mods[-2:]
    integer(code, instr, row, i.DP4A, is_signed(a_type) | 2 * is_signed(b_type), ("b32",) * 3)


def build_selp(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    predicate = instr.operands[3]
    if isinstance(predicate, Not):
        d, a, b, _ = instr.operands
        row[m.KIND], row[m.OP], row[m.DST], row[m.CUT] = k.INT, i.SELP, code.target(d), BITS[t]
        set_sources(code, row, (b, a, predicate.reg), (t, t, "pred"))
        return
    integer(code, instr, row, i.SELP, 0, (t, t, "pred"))


def build_mov(code: Code, instr: Instr, row: np.ndarray) -> None:
    d, s = instr.operands
    t = type_of(instr)
    if t == "b128":
        build_mov128(code, d, s, row)
    elif isinstance(s, Vec) or isinstance(d, Vec):
        vector = s if isinstance(s, Vec) else d
        assert isinstance(vector, Vec)
        part = BITS[t] // len(vector.items)
        row[m.BITS], row[m.COUNT] = part, len(vector.items)
        if isinstance(s, Vec):
            row[m.KIND], row[m.DST] = k.PACK, code.target(d)
            row[m.FIRST] = code.list_of([code.source(o, f"b{part}") for o in s.items])
        else:
            row[m.KIND], row[m.A] = k.UNPACK, code.source(s, t)
            row[m.FIRST] = code.list_of(
                [-1 if isinstance(o, Sink) else code.target(o) for o in vector.items]
            )
    elif isinstance(s, Special) and s.name in CLOCKS:
        row[m.KIND], row[m.DST], row[m.CUT] = k.READ_CLOCK, code.target(d), BITS[t]
    elif isinstance(s, Addr):
        row[m.KIND], row[m.OP], row[m.DST] = k.INT, i.IADD, code.target(d)
        row[m.A], row[m.B], row[m.CUT] = (
            code.source(s.base), code.literal(s.offset), BITS[t])  # fmt: skip
    else:
        integer(code, instr, row, i.MOV)


def build_mov128(code: Code, d: Any, s: Any, row: np.ndarray) -> None:
    """A b128 register is two rows: moves are packs of 64-bit parts into consecutive rows."""
    source = [code.source(o) for o in s.items] if isinstance(s, Vec) else [s.id, s.id + 1]
    target = [code.target(o) for o in d.items] if isinstance(d, Vec) else [d.id, d.id + 1]
    if len(source) != 2 or len(target) != 2:
        raise UnsupportedInstruction("mov.b128 takes two 64-bit halves")
    row[m.KIND], row[m.FIRST] = k.PACK_ROWS, code.list_of([*target, *source])
    row[m.COUNT] = 2


_RELATION = {
    "eq": i.EQ, "ne": i.NE, "lt": i.LT, "le": i.LE, "gt": i.GT, "ge": i.GE, "lo": i.LT, "ls": i.LE,
    "hi": i.GT, "hs": i.GE, "equ": i.EQ | 8, "neu": i.NE | 8, "ltu": i.LT | 8, "leu": i.LE | 8,
    "gtu": i.GT | 8, "geu": i.GE | 8, "num": i.NUM, "nan": i.ISNAN,
}  # fmt: skip
_COMBINE = {"and": k.WITH_AND, "or": k.WITH_OR, "xor": k.WITH_XOR}


def build_setp(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    if t in ("f16x2", "bf16x2"):
        raise UnsupportedInstruction(f"{instr.opcode} is not modelled")
    destination, a, b, *third = instr.operands
    row[m.OP] = _RELATION[instr.mods[0]]
    row[m.CUT] = 1
    if t in KINDS:
        row[m.KIND], row[m.BITS] = k.COMPARE_FLOAT, KINDS[t]
        row[m.SIGNED] = int("ftz" in instr.mods)
    else:
        row[m.KIND], row[m.BITS], row[m.SIGNED] = k.COMPARE_INT, BITS[t], is_signed(t)
    row[m.MODE] = next((_COMBINE[x] for x in instr.mods[1:] if x in _COMBINE), k.ALONE)
    set_sources(code, row, (a, b), (t, t))
    if third:
        negated = isinstance(third[0], Not)
        row[m.C] = third[0].reg.id if isinstance(third[0], Not) else code.source(third[0], "pred")
        row[m.EXTRA] = int(negated)
    row[m.DST] = row[m.DST2] = -1
    if isinstance(destination, Pair):
        if not isinstance(destination.second, Sink):
            row[m.DST2] = code.target(destination.second)
        destination = destination.first
    if not isinstance(destination, Sink):
        row[m.DST] = code.target(destination)


def build_set(code: Code, instr: Instr, row: np.ndarray) -> None:
    out, _ = (mod for mod in instr.mods if mod in BITS)
    if out not in ("u32", "s32", "f32", "b32"):
        raise UnsupportedInstruction(f"{instr.opcode} is not modelled")
    build_setp(code, instr, row)
    row[m.CUT] = 0x3F800000 if out == "f32" else 0xFFFFFFFF


# ---- conversions


def build_cvt(code: Code, instr: Instr, row: np.ndarray) -> None:
    known = [mod for mod in instr.mods if mod in BITS or mod in FORMATS]
    if len(known) != 2:
        raise UnsupportedInstruction(f"{instr.opcode}: two types expected, found {known}")
    refuse(instr, "rs", "scaled::n2::ue8m0", "pack")
    out, source = known
    d, *sources = instr.operands
    row[m.KIND], row[m.DST] = k.CONVERT, code.target(d)
    row[m.CUT] = mask_of(d)
    row[m.MODE] = float_flags(instr) & ((1 << f.MODE_SHIFT) - 1)
    row[m.AUX] = next((ROUNDING[mod] for mod in instr.mods if mod in ROUNDING), f.RN)
    if out in NARROW or source in NARROW or out in ("f16x2", "bf16x2"):
        _packed(code, instr, row, out, source)
        return
    set_sources(code, row, sources, (source,))
    integral = any(mod in instr.mods for mod in ("rni", "rzi", "rmi", "rpi"))
    if out in FORMATS and source in FORMATS:
        row[m.OP] = k.INTEGRAL if integral else k.FLOAT_FLOAT
        row[m.FIRST], row[m.COUNT] = KINDS[source], FORMATS[out]
        row[m.EXTRA] = 13 if out == "tf32" else 0
    elif source in FORMATS:
        row[m.OP], row[m.FIRST] = k.TO_INT, KINDS[source]
        row[m.BITS], row[m.SIGNED] = BITS[out], is_signed(out)
    elif out in FORMATS:
        row[m.OP], row[m.FIRST], row[m.COUNT] = k.TO_FLOAT, KINDS[out], FORMATS[out]
        row[m.BITS], row[m.SIGNED] = BITS[source], is_signed(source)
    else:
        row[m.OP] = k.INT_INT
        row[m.BITS], row[m.SIGNED] = BITS[source], is_signed(source)
        row[m.FIRST], row[m.COUNT] = BITS[out], is_signed(out)


def _packed(code: Code, instr: Instr, row: np.ndarray, out: str, source: str) -> None:
    sources = instr.operands[1:]
    row[m.COUNT] = FORMATS[out]
    if source in NARROW:
        row[m.OP], row[m.FIRST] = k.FROM_PACKED, FORMATS[source]
        set_sources(code, row, sources, ("b16",))
    elif source in ("f16x2", "bf16x2"):
        row[m.OP] = k.REPACK
        row[m.FIRST] = f.K_F16 if source == "f16x2" else f.K_BF16
        set_sources(code, row, sources, ("b32",))
    elif source == "f32" and len(sources) == 2:
        row[m.OP], row[m.FIRST] = k.TO_PACKED, f.K_F32
        row[m.BITS] = 16 if out in ("f16x2", "bf16x2") else (4 if out == "e2m1x2" else 8)
        row[m.EXTRA] = int("satfinite" in instr.mods)
        set_sources(code, row, sources, ("f32", "f32"))
    else:
        raise UnsupportedInstruction(f"{instr.opcode} with {len(sources)} sources is not modelled")


# ---- control


def build_branch(code: Code, instr: Instr, row: np.ndarray) -> None:
    row[m.KIND], row[m.AUX] = k.BRANCH, instr.target


def build_branch_table(code: Code, instr: Instr, row: np.ndarray) -> None:
    row[m.KIND], row[m.A] = k.BRANCH_TABLE, code.source(instr.operands[0], "u32")
    row[m.FIRST], row[m.COUNT] = code.list_of(list(instr.targets)), len(instr.targets)


def kind_only(kind: int) -> Callable[[Code, Instr, np.ndarray], None]:
    def build(code: Code, instr: Instr, row: np.ndarray) -> None:
        row[m.KIND] = kind

    return build


BUILDERS: dict[str, Callable[[Code, Instr, np.ndarray], None]] = {
    "add": either(i.IADD, f.ADD), "sub": either(i.ISUB, f.SUB), "mul": build_multiply,
    "mad": build_multiply, "fma": float_only(f.FMA), "div": either(i.IDIV, f.DIV),
    "rem": plain(i.IREM), "abs": either(i.IABS, f.ABS), "neg": either(i.INEG, f.NEG),
    "min": either(i.IMIN, f.MIN), "max": either(i.IMAX, f.MAX), "and": plain(i.AND),
    "or": plain(i.OR), "xor": plain(i.XOR), "not": plain(i.NOT), "cnot": plain(i.CNOT),
    "shl": build_shift, "shr": build_shift, "shf": build_shf, "lop3": build_lop3,
    "prmt": build_prmt, "popc": build_counting(i.POPC), "clz": build_counting(i.CLZ),
    "bfind": build_counting(i.BFIND), "brev": plain(i.BREV), "bfe": build_field,
    "bfi": build_field, "bmsk": build_mask, "szext": build_mask, "dp4a": build_dp4a,
    "sad": plain(i.SAD), "selp": build_selp, "mov": build_mov, "setp": build_setp,
    "set": build_set, "cvt": build_cvt, "copysign": float_only(f.COPYSIGN),
    "rcp": float_only(f.RCP), "sqrt": float_only(f.SQRT), "rsqrt": float_only(f.RSQRT),
    "ex2": float_only(f.EX2), "lg2": float_only(f.LG2), "sin": float_only(f.SIN),
    "cos": float_only(f.COS), "tanh": float_only(f.TANH),
    "bra": build_branch, "brx": build_branch_table, "exit": kind_only(k.EXIT),
    "ret": kind_only(k.EXIT), "trap": kind_only(k.TRAP), "brkpt": kind_only(k.TRAP),
    "call": kind_only(k.HOST), "pmevent": kind_only(k.NOTHING),
    **decode_memory.BUILDERS,
}  # fmt: skip


def lower(function: Function) -> Code:
    """The kernel as the compiled core runs it."""
    return Code(function, BUILDERS)
