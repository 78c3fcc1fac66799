"""Operands of the compiled core: rows of the register file; what all builders of `decode` share.

Every operand becomes a row: behind the registers of the kernel lie rows that hold its literals,
special registers and symbol addresses, filled in when a warp starts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim import core as k
from cute_kernels.sim import core_float as f
from cute_kernels.sim import core_int as i
from cute_kernels.sim import core_memory as m
from cute_kernels.sim.checks import SimError, UnsupportedInstruction
from cute_kernels.sim.handlers import is_host
from cute_kernels.sim.ptx import (
    Function,
    Imm,
    Instr,
    Reg,
    Sink,
    Special,
    Sym,
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


Builder = Callable[["Code", Instr, np.ndarray], None]


class Code:
    """The lowered kernel.

    code    (instructions, core_memory.COLUMNS) int64
    vec     (n,) int64, the register lists and branch tables that instructions point into
    rows    number of rows of a register file: registers first, then constants
    fixed   (constants, 32) uint64, what constant rows hold; special and symbol rows are filled
    per warp
    specials, symbols   [(row, name)] of the rows to fill

    Raises UnsupportedInstruction, with the PTX line, for an instruction that is not modelled.
    """

    def __init__(self, function: Function, builders: dict[str, Builder]) -> None:
        self.function = function
        self._builders = builders
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
            builder = self._builders.get(instr.base)
            if builder is None:
                raise UnsupportedInstruction(f"instruction {instr.opcode} is not modelled")
            builder(self, instr, row)
        except SimError as error:
            raise error.at(None, instr) from None
        except (KeyError, ValueError, IndexError, TypeError, StopIteration) as error:
            raise UnsupportedInstruction(
                f"instruction {instr.opcode} with operands {instr.operands} is not modelled "
                f"({error!r})"
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
