"""Reading and writing operands of one warp: rows of 32 lanes in the type an instruction asks
for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim.checks import UnsupportedInstruction
from cute_kernels.sim.ptx import Imm, Not, Reg, Sink, Special, Sym

# PTX type -> (view of the register file, numpy type); formats without a numpy type are read as
# their bits
TYPES: dict[str, tuple[str, Any]] = {
    "pred": ("pred", np.bool_),
    "b8": ("u8", np.uint8), "u8": ("u8", np.uint8), "s8": ("s8", np.int8),
    "b16": ("u16", np.uint16), "u16": ("u16", np.uint16), "s16": ("s16", np.int16),
    "f16": ("u16", np.uint16), "bf16": ("u16", np.uint16),
    "b32": ("u32", np.uint32), "u32": ("u32", np.uint32), "s32": ("s32", np.int32),
    "f16x2": ("u32", np.uint32), "bf16x2": ("u32", np.uint32), "f32": ("f32", np.float32),
    "b64": ("u64", np.uint64), "u64": ("u64", np.uint64), "s64": ("s64", np.int64),
    "f32x2": ("u64", np.uint64), "f64": ("f64", np.float64), "b128": ("u64", np.uint64),
}  # fmt: skip
_VIEWS = {"u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32,
          "s32": np.int32, "f32": np.float32, "u64": np.uint64, "s64": np.int64, "f64": np.float64,
          "pred": np.bool_}  # fmt: skip

Getter = Callable[[Any], Any]
Closure = Callable[[Any, Any], None]  # (warp, mask): mask None when every live lane takes part


class Registers:
    """The register file of a warp: one 64-bit row of 32 lanes per register, and a view per type."""

    __slots__ = ("raw", *_VIEWS)

    def __init__(self, count: int) -> None:
        self.raw = np.zeros((max(count, 1), 32), np.uint64)
        for name, dtype in _VIEWS.items():
            wide = self.raw.view(dtype).reshape(self.raw.shape[0], 32, -1)
            setattr(self, name, wide[:, :, 0])  # little endian: the low part comes first


def width(ptx_type: str) -> int:
    """Bytes of a value."""
    return int(np.dtype(TYPES[ptx_type][1]).itemsize) * (2 if ptx_type == "b128" else 1)


def type_of(instr: Any) -> str:
    """The last modifier that is a type."""
    for mod in reversed(instr.mods):
        if mod in TYPES:
            return str(mod)
    raise UnsupportedInstruction(f"{instr.opcode} has no known type")


def constant(bits: int, ptx_type: str) -> Any:
    """A literal in a type; integers are cut to its width."""
    dtype = np.dtype(TYPES[ptx_type][1])
    if dtype == np.bool_:
        return np.bool_(bits & 1)
    raw = (bits & ((1 << 8 * dtype.itemsize) - 1)).to_bytes(dtype.itemsize, "little")
    return np.frombuffer(raw, dtype)[0]


def getter(operand: Any, ptx_type: str) -> Getter:
    """Function of the warp that returns the operand as a row (or a scalar) of ``ptx_type``."""
    view, dtype = TYPES[ptx_type]
    if isinstance(operand, Reg):
        index = operand.id
        return {
            "u32": lambda w: w.regs.u32[index], "s32": lambda w: w.regs.s32[index],
            "f32": lambda w: w.regs.f32[index], "u64": lambda w: w.regs.u64[index],
            "s64": lambda w: w.regs.s64[index], "f64": lambda w: w.regs.f64[index],
            "u16": lambda w: w.regs.u16[index], "s16": lambda w: w.regs.s16[index],
            "u8": lambda w: w.regs.u8[index], "s8": lambda w: w.regs.s8[index],
            "pred": lambda w: w.regs.pred[index],
        }[view]  # fmt: skip
    if isinstance(operand, Imm):
        value = constant(operand.bits, ptx_type)
        return lambda w: value
    if isinstance(operand, Not):
        negated = operand.reg.id
        return lambda w: ~w.regs.pred[negated]
    if isinstance(operand, Special):
        name = operand.name
        return lambda w: w.special(name).astype(dtype)
    if isinstance(operand, Sym):
        symbol = operand.name
        return lambda w: dtype(w.symbol(symbol))
    raise UnsupportedInstruction(f"operand {operand} cannot be read as {ptx_type}")


def putter(operand: Any, ptx_type: str) -> Callable[[Any, Any, Any], None]:
    """Function (warp, mask, values): write a destination; a wider register is extended as the type
    says.
    """
    if isinstance(operand, Sink):
        return lambda w, m, v: None
    if not isinstance(operand, Reg):
        raise UnsupportedInstruction(f"operand {operand} cannot be written")
    index, view = operand.id, TYPES[ptx_type][0]
    if width(operand.type) > width(ptx_type) and ptx_type != "pred":
        signed = ptx_type[0] == "s"
        wide, view = (np.int64, "s64") if signed else (np.uint64, "u64")

        def extend(w: Any, m: Any, v: Any) -> None:
            store(getattr(w.regs, view)[index], m, np.asarray(v).astype(wide))

        return extend

    def put(w: Any, m: Any, v: Any) -> None:
        store(getattr(w.regs, view)[index], m, v)

    return put


def store(row: np.ndarray, mask: Any, values: Any) -> None:
    if mask is None:
        row[...] = values
    else:
        np.copyto(row, values, where=mask)
