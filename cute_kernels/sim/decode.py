"""Lowers parsed PTX to the arrays that the compiled core runs.

Every operand becomes a row of the register file: behind the registers of the kernel lie rows that hold
its literals, special registers and symbol addresses, filled in when a warp starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim import core as k
from cute_kernels.sim import core_float as f
from cute_kernels.sim import core_int as i
from cute_kernels.sim import core_lanes as x
from cute_kernels.sim import core_memory as m
from cute_kernels.sim.checks import SimError, UnsupportedInstruction
from cute_kernels.sim.handlers import is_host
from cute_kernels.sim.ptx import (
    Addr,
    Function,
    Imm,
    Instr,
    Not,
    Pair,
    Reg,
    Sink,
    Special,
    Sym,
    Vec,
)

BITS = {
    "pred": 1, "b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16,
    "b32": 32, "u32": 32, "s32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "u16x2": 32,
    "s16x2": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f32x2": 64, "b128": 128,
}  # fmt: skip
KINDS = {
    "f32": f.K_F32, "f64": f.K_F64, "f16": f.K_F16, "bf16": f.K_BF16, "f32x2": f.K_F32X2,
    "f16x2": f.K_F16X2, "bf16x2": f.K_BF16X2,
}  # fmt: skip
FORMATS = {
    "f32": f.F32_FORMAT, "f16": f.F16_FORMAT, "bf16": f.BF16_FORMAT, "e4m3x2": f.E4M3_FORMAT,
    "e5m2x2": f.E5M2_FORMAT, "e2m1x2": f.E2M1_FORMAT, "e2m3x2": f.E2M3_FORMAT,
    "e3m2x2": f.E3M2_FORMAT, "ue8m0x2": i.UE8M0_FORMAT, "f64": -1, "tf32": f.TF32_FORMAT,
    "f16x2": f.F16_FORMAT, "bf16x2": f.BF16_FORMAT,
}  # fmt: skip
NARROW = ("e4m3x2", "e5m2x2", "e2m1x2", "e2m3x2", "e3m2x2", "ue8m0x2")
ROUNDING = {
    "rn": f.RN, "rz": f.RZ, "rm": f.RM, "rp": f.RP, "rna": f.RNA,
    "rni": f.RN, "rzi": f.RZ, "rmi": f.RM, "rpi": f.RP,
}  # fmt: skip
CLOCKS = ("clock", "clock64", "clock_hi", "globaltimer", "globaltimer_lo", "globaltimer_hi")


def type_of(instr: Instr) -> str:
    """The last modifier that is a type."""
    for mod in reversed(instr.mods):
        if mod in BITS:
            return mod
    raise UnsupportedInstruction(f"{instr.opcode} has no known type")


def is_signed(t: str) -> int:
    return int(t[0] == "s")


def mask_of(operand: Any) -> int:
    """Width of a destination register."""
    return BITS[operand.type] if isinstance(operand, Reg) else 64


class Code:
    """The lowered kernel.

    code    (instructions, core_memory.COLUMNS) int64
    vec     (n,) int64, the register lists and branch tables that instructions point into
    rows    number of rows of a register file: registers first, then constants
    fixed   (constants, 32) uint64, what constant rows hold; special and symbol rows are filled per warp
    specials, symbols   [(row, name)] of the rows to fill

    Raises UnsupportedInstruction, with the PTX line, for an instruction that is not modelled.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.first = function.num_regs + 1  # one row that nothing reads absorbs discarded results
        self.sink = function.num_regs
        self._constants: dict[Any, int] = {}
        self._vec: list[int] = []
        self.specials: list[tuple[int, str]] = []
        self.symbols: list[tuple[int, str]] = []
        self._fixed: list[int] = []
        self.zero = self.literal(0)
        self.code = np.zeros((len(function.instrs) + 1, m.COLUMNS), np.int64)
        self.code[:, m.GUARD] = -1
        for instr in function.instrs:
            self._lower(instr)
        self.code[-1, m.KIND] = k.EXIT  # a kernel that runs off its end has returned
        self.rows = self.first + len(self._fixed)
        self.vec = np.array(self._vec or [0], np.int64)
        self.fixed = np.repeat(np.array(self._fixed, np.uint64)[:, None], 32, axis=1)

    # ---- operands

    def _row(self, key: Any, bits: int) -> int:
        if key not in self._constants:
            self._constants[key] = self.first + len(self._fixed)
            self._fixed.append(bits & 0xFFFFFFFFFFFFFFFF)
        return self._constants[key]

    def literal(self, bits: int) -> int:
        return self._row(("literal", bits & 0xFFFFFFFFFFFFFFFF), bits)

    def symbol(self, name: str) -> int:
        row = self._row(("symbol", name), 0)
        if (row, name) not in self.symbols:
            self.symbols.append((row, name))
        return row

    def special(self, name: str) -> int:
        row = self._row(("special", name), 0)
        if (row, name) not in self.specials:
            self.specials.append((row, name))
        return row

    def source(self, operand: Any, t: str = "b64") -> int:
        """Row of a source operand; literals are cut to the type."""
        if isinstance(operand, Reg):
            return operand.id
        if isinstance(operand, Imm):
            bits = BITS.get(t, 64)
            if t == "f64" or bits >= 64:
                return self.literal(operand.bits)
            return self.literal(operand.bits & ((1 << bits) - 1))
        if isinstance(operand, Sym):
            return self.symbol(operand.name)
        if isinstance(operand, Special):
            if operand.name in CLOCKS:
                raise UnsupportedInstruction(f"%{operand.name} can only be moved to a register")
            return self.special(operand.name)
        raise UnsupportedInstruction(f"operand {operand} cannot be read")

    def target(self, operand: Any) -> int:
        if isinstance(operand, Sink):
            return self.sink
        if isinstance(operand, Reg):
            return operand.id
        raise UnsupportedInstruction(f"operand {operand} cannot be written")

    def list_of(self, rows: list[int]) -> int:
        self._vec.extend(rows)
        return len(self._vec) - len(rows)

    # ---- instructions

    def _lower(self, instr: Instr) -> None:
        row = self.code[instr.index]
        if instr.guard is not None:
            row[m.GUARD], row[m.NEGATED] = instr.guard[0], int(instr.guard[1])
        row[[m.A, m.B, m.C, m.D]] = self.zero
        row[m.CUT] = 64
        row[m.DST2] = -1
        try:
            if is_host(instr.base, instr.mods):
                row[m.KIND] = k.HOST
                row[m.MEETS] = int(meets(instr))
                return
            builder = BUILDERS.get(instr.base)
            if builder is None:
                raise UnsupportedInstruction(f"instruction {instr.opcode} is not modelled")
            builder(self, instr, row)
        except SimError as error:
            raise error.at(None, instr) from None
        except (KeyError, ValueError, IndexError, TypeError, StopIteration) as error:
            raise UnsupportedInstruction(
                f"instruction {instr.opcode} with operands {instr.operands} is not modelled ({error!r})"
            ).at(None, instr) from error


def meets(instr: Instr) -> bool:
    """Do all live lanes of the warp have to stand at this host instruction?"""
    if "aligned" in instr.mods or instr.base in ("bar", "setmaxnreg"):
        return True
    return instr.base == "barrier" and instr.mods[:1] != ("arrive",)


def refuse(instr: Instr, *mods: str) -> None:
    for mod in mods:
        if mod in instr.mods:
            raise UnsupportedInstruction(f"{instr.opcode}: .{mod} is not modelled")


def set_sources(code: Code, row: np.ndarray, operands: Any, types: Any) -> None:
    for column, operand, t in zip((m.A, m.B, m.C, m.D), operands, types):
        row[column] = code.source(operand, t)


def integer(code: Code, instr: Instr, row: np.ndarray, op: int, mode: int = 0,
            types: tuple[str, ...] | None = None, out: str | None = None) -> None:  # fmt: skip
    """dst = op(sources), all in the instruction's type unless `types` says otherwise."""
    t = type_of(instr)
    destination, *sources = instr.operands
    row[m.KIND], row[m.OP], row[m.MODE] = k.INT, op, mode
    row[m.DST] = code.target(destination)
    row[m.BITS], row[m.SIGNED] = BITS[t], is_signed(t)
    row[m.CUT] = BITS[out or t] if t != "pred" else 1
    set_sources(code, row, sources, types or (t,) * 4)


def floating(code: Code, instr: Instr, row: np.ndarray, op: int) -> None:
    t = type_of(instr)
    destination, *sources = instr.operands
    row[m.KIND], row[m.OP], row[m.BITS] = k.FLOAT, op, KINDS[t]
    row[m.DST] = code.target(destination)
    row[m.MODE] = float_flags(instr, len(sources))
    if row[m.MODE] >> f.MODE_SHIFT and t == "f64":
        raise UnsupportedInstruction(f"{instr.opcode}: only rounding to nearest is modelled")
    set_sources(code, row, sources, (t,) * 3)


def float_flags(instr: Instr, sources: int = 0) -> int:
    flags = 0
    for mod, flag in (("ftz", f.FTZ), ("sat", f.SAT), ("NaN", f.NAN), ("abs", f.ABSOLUTE),
                      ("relu", f.RELU)):  # fmt: skip
        if mod in instr.mods:
            flags |= flag
    if "xorsign" in instr.mods:
        flags |= f.XORSIGN | f.ABSOLUTE
    if instr.base in ("min", "max") and sources == 3:
        flags |= f.THREE
    mode = next((ROUNDING[mod] for mod in instr.mods if mod in ("rn", "rz", "rm", "rp")), f.RN)
    return flags | mode << f.MODE_SHIFT


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
    row[m.KIND], row[m.OP], row[m.FIRST], row[m.COUNT] = k.PACK_ROWS, 0, code.list_of([*target, *source]), 2  # fmt: skip


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


# ---- addresses and memory

_SPACES = {"shared": m.SHARED, "global": m.GLOBAL, "local": m.LOCAL_SPACE, "param": m.GLOBAL,
           "const": m.GLOBAL}  # fmt: skip


def _space(instr: Instr) -> str:
    return next((x for x in (mod.split("::")[0] for mod in instr.mods) if x in _SPACES), "generic")


def build_cvta(code: Code, instr: Instr, row: np.ndarray) -> None:
    space = _space(instr)
    if space in ("global", "param", "const"):
        integer(code, instr, row, i.MOV)
    elif "to" in instr.mods:
        integer(code, instr, row, i.CVTA_TO)
    else:
        integer(code, instr, row, i.CVTA_FROM, 1 if space == "shared" else 2)


def build_isspacep(code: Code, instr: Instr, row: np.ndarray) -> None:
    d, a = instr.operands
    space = _space(instr)
    row[m.KIND], row[m.OP], row[m.DST], row[m.CUT] = k.INT, i.ISSPACE, code.target(d), 1
    row[m.MODE] = {"shared": 1, "local": 2}.get(space, 0)
    row[m.A] = code.source(a)


def build_mapa(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    integer(code, instr, row, i.MAPA, 0, (t, "u32"))


def build_getctarank(code: Code, instr: Instr, row: np.ndarray) -> None:
    integer(code, instr, row, i.GETRANK, 0, None, "u32")


def set_address(code: Code, instr: Instr, row: np.ndarray, operand: Any) -> None:
    if not isinstance(operand, Addr):
        raise UnsupportedInstruction(f"{operand} is not an address")
    space = _space(instr)
    row[m.OP] = _SPACES.get(space, m.GENERIC)
    row[m.A] = code.source(operand.base)
    row[m.AUX] = operand.offset
    narrow = isinstance(operand.base, Reg) and BITS[operand.base.type] == 32
    row[m.EXTRA] = int(narrow)
    if space == "param" and _is_call_param(code, operand):
        row[m.OP] = m.LOCAL_SPACE


def _is_call_param(code: Code, operand: Addr) -> bool:
    """A .param variable declared inside the body, for a call."""
    return isinstance(operand.base, Sym) and any(
        v.name == operand.base.name and v.space == "param" for v in code.function.variables
    )


def _items(operand: Any) -> list[Any]:
    return list(operand.items) if isinstance(operand, Vec) else [operand]


def _spread(t: str, rows: list[int]) -> tuple[int, list[int]]:
    """b128 elements are pairs of 64-bit rows."""
    if t != "b128":
        return BITS[t], rows
    return 64, [r for row in rows for r in (row, row + 1)]


def build_load(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    destination, address = instr.operands[:2]
    set_address(code, instr, row, address)
    items = _items(destination)
    bits, rows = _spread(t, [code.target(o) for o in items])
    row[m.KIND], row[m.BITS], row[m.SIGNED] = k.LOAD, bits, is_signed(t)
    row[m.CUT] = max((mask_of(o) for o in items if isinstance(o, Reg)), default=64)
    row[m.FIRST], row[m.COUNT] = code.list_of(rows), len(rows)
    row[m.MODE] = int(any(x in instr.mods for x in ("param", "const")))  # not counted as global


def build_store(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    address, source = instr.operands[:2]
    set_address(code, instr, row, address)
    bits, rows = _spread(t, [code.source(o, t) for o in _items(source)])
    row[m.KIND], row[m.BITS] = k.STORE, bits
    row[m.FIRST], row[m.COUNT] = code.list_of(rows), len(rows)
    row[m.MODE] = int("param" in instr.mods)


_ATOMIC = {
    "add": m.A_ADD, "min": m.A_MIN, "max": m.A_MAX, "and": m.A_AND, "or": m.A_OR, "xor": m.A_XOR,
    "exch": m.A_EXCH, "cas": m.A_CAS, "inc": m.A_INC, "dec": m.A_DEC,
}  # fmt: skip


def build_atomic(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    if t == "b128":
        raise UnsupportedInstruction(f"{instr.opcode} is not modelled")
    operands = list(instr.operands)
    destination = operands.pop(0) if instr.base == "atom" else Sink()
    set_address(code, instr, row, operands[0])
    row[m.KIND], row[m.BITS], row[m.SIGNED] = k.ATOMIC, BITS[t], is_signed(t)
    row[m.C] = next(_ATOMIC[x] for x in instr.mods if x in _ATOMIC)
    row[m.D] = KINDS.get(t, -1)
    row[m.DST] = int(t == "f32")  # fp32 in global memory flushes subnormals
    values = _items(operands[1])
    rows = [code.source(o, t) for o in values]
    if instr.has("cas"):
        rows += [code.source(o, t) for o in _items(operands[2])]
    row[m.FIRST], row[m.COUNT] = code.list_of(rows), len(values)
    if not isinstance(destination, Sink):
        row[m.DST2] = code.list_of([code.target(o) for o in _items(destination)])


def build_matrix(code: Code, instr: Instr, row: np.ndarray) -> None:
    if not instr.has("m8n8", "b16"):
        raise UnsupportedInstruction(f"{instr.opcode}: only m8n8.b16 is modelled")
    store = instr.base == "stmatrix"
    registers, address = reversed(instr.operands) if store else instr.operands
    set_address(code, instr, row, address)
    row[m.OP] = m.SHARED if "shared" in _space(instr) else m.GENERIC
    row[m.KIND], row[m.MEETS] = k.MATRIX, 1
    row[m.MODE] = int(store) | 2 * int("trans" in instr.mods)
    items = _items(registers)
    rows = [code.source(o) if store else code.target(o) for o in items]
    row[m.FIRST], row[m.COUNT] = code.list_of(rows), len(rows)


# ---- lanes


def cross(code: Code, row: np.ndarray, op: int, member: Any) -> None:
    row[m.KIND], row[m.OP] = k.CROSS, op
    row[m.DST] = row[m.DST2] = -1
    if member is not None:
        row[m.MEETS], row[m.MEMBER] = 2, code.source(member, "b32")


def two_targets(code: Code, row: np.ndarray, destination: Any) -> None:
    first = destination.first if isinstance(destination, Pair) else destination
    if not isinstance(first, Sink):
        row[m.DST] = code.target(first)
    if isinstance(destination, Pair) and not isinstance(destination.second, Sink):
        row[m.DST2] = code.target(destination.second)


def build_shfl(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, a, b, c, member = instr.operands
    cross(code, row, x.SHFL, member)
    row[m.MODE] = {"up": x.UP, "down": x.DOWN, "bfly": x.BUTTERFLY, "idx": x.INDEX}[instr.mods[1]]
    two_targets(code, row, destination)
    set_sources(code, row, (a, b, c), ("b32",) * 3)


def build_vote(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, predicate, member = instr.operands
    cross(code, row, x.VOTE, member)
    row[m.MODE] = {"ballot": x.BALLOT, "all": x.ALL, "any": x.ANY, "uni": x.UNIFORM}[instr.mods[1]]
    row[m.EXTRA] = int(isinstance(predicate, Not))
    source = predicate.reg if isinstance(predicate, Not) else predicate
    row[m.A] = code.source(source, "pred")
    two_targets(code, row, destination)


def build_elect(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, member = instr.operands
    cross(code, row, x.ELECT, member)
    if not isinstance(destination, Pair):
        destination = Pair(Sink(), destination)
    two_targets(code, row, destination)


def build_match(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, a, member = instr.operands
    cross(code, row, x.MATCH, member)
    row[m.MODE] = x.MATCH_ANY if "any" in instr.mods else x.MATCH_ALL
    row[m.BITS] = BITS[type_of(instr)]
    row[m.A] = code.source(a, type_of(instr))
    two_targets(code, row, destination)


def build_redux(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, a, member = instr.operands
    t = type_of(instr)
    cross(code, row, x.REDUX, member)
    ops = {"add": x.R_ADD, "min": x.R_MIN, "max": x.R_MAX, "and": x.R_AND, "or": x.R_OR,
           "xor": x.R_XOR}  # fmt: skip
    row[m.MODE] = ops[instr.mods[1]]
    row[m.SIGNED], row[m.CUT] = is_signed(t), 32
    row[m.EXTRA] = float_flags(instr) if t == "f32" else -1
    row[m.A] = code.source(a, t)
    two_targets(code, row, destination)


def build_activemask(code: Code, instr: Instr, row: np.ndarray) -> None:
    cross(code, row, x.ACTIVE_MASK, None)
    two_targets(code, row, instr.operands[0])


def build_bar_warp(code: Code, instr: Instr, row: np.ndarray) -> None:
    row[m.KIND] = k.NOTHING
    row[m.MEETS], row[m.MEMBER] = 2, code.source(instr.operands[0], "b32")


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
    "cvta": build_cvta, "isspacep": build_isspacep, "mapa": build_mapa,
    "getctarank": build_getctarank,
    "ld": build_load, "ldu": build_load, "st": build_store, "atom": build_atomic,
    "red": build_atomic, "ldmatrix": build_matrix, "stmatrix": build_matrix,
    "shfl": build_shfl, "vote": build_vote, "elect": build_elect, "match": build_match,
    "redux": build_redux, "activemask": build_activemask, "bar": build_bar_warp,
    "bra": build_branch, "brx": build_branch_table, "exit": kind_only(k.EXIT),
    "ret": kind_only(k.EXIT), "trap": kind_only(k.TRAP), "brkpt": kind_only(k.TRAP),
    "call": kind_only(k.HOST), "pmevent": kind_only(k.NOTHING),
}  # fmt: skip
