"""mma.sync: the matrix product of one warp, m16n8k16 of bf16 with fp32 accumulators and m16n8k32 of
bytes with int32 accumulators.

Fragments (PTX ISA, "Matrix fragments for mma.m16n8k16"), lane = 4 g + t: A registers hold rows g,
g + 8, g, g + 8 and columns 2t, 2t + 1, the last two 8 columns on; B registers rows 2t, 2t + 1 and 8
rows on, column g; C and D rows g, g, g + 8, g + 8 and columns 2t, 2t + 1. Products are summed in
fp64 and rounded once.

Bytes ("Matrix fragments for mma.m16n8k32"): an A register holds columns 4t .. 4t + 3 of its row,
the last two 16 columns on; a B register rows 4t .. 4t + 3 and 16 rows on, column g. Sums are exact
and wrap around at 32 bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .access import need
from .checks import UnsupportedInstruction

_SHAPE = ("sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32")
_BYTE_SHAPE = ("sync", "aligned", "m16n8k32", "row", "col", "s32")
_BYTES = {"u8": np.uint8, "s8": np.int8}
_G, _T = np.arange(32) // 4, np.arange(32) % 4
# of row r and column c: byte c % 4 of lane 4 (r % 8) + c % 16 / 4, in the register of its half
_ROW, _COLUMN = np.arange(16)[:, None], np.arange(32)
_A_BYTES = (_ROW // 8 + _COLUMN // 16 * 2) * 128 + _ROW % 8 * 16 + _COLUMN % 16
_B_BYTES = (_COLUMN[:, None] // 16) * 128 + np.arange(8) * 16 + _COLUMN[:, None] % 16


def _words(warp: Any, operand: Any) -> np.ndarray:
    """uint32 (registers, 32 lanes)."""
    return np.stack([np.asarray(warp.read(item)) for item in operand.items]).astype(np.uint32)


def a_fragment(words: np.ndarray) -> np.ndarray:
    """Four registers (4, 32 lanes) of bf16 pairs -> fp64 (16, 16)."""
    a = np.empty((16, 16))
    for i, pair in enumerate(_pairs(words)):
        for j in range(2):
            a[_G + 8 * (i % 2), 2 * _T + j + 8 * (i // 2)] = pair[:, j]
    return a


def _pairs(words: np.ndarray) -> np.ndarray:
    """fp64 (registers, 32 lanes, 2): bf16 pairs."""
    words = words.astype(np.uint32)  # a row of a register file may have more bits
    halves = np.stack((words << np.uint32(16), words & np.uint32(0xFFFF0000)), -1)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return halves.view(np.float32).astype(np.float64)


def _bytes(warp: Any, operand: Any, kind: str, place: np.ndarray) -> np.ndarray:
    """int64 matrix of the bytes of type ``kind`` in the registers, byte place[r, c] at (r, c)."""
    return _words(warp, operand).view(_BYTES[kind]).reshape(-1)[place].astype(np.int64)


def warp_mma(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    mods = tuple(instr.mods)
    need(bool(mask.all()), f"{instr.opcode} needs all 32 lanes")
    if mods[:6] == _BYTE_SHAPE and mods[6] in _BYTES and mods[7] in _BYTES and mods[8:] == ("s32",):
        _byte_mma(warp, instr, mask)
        return
    if mods != _SHAPE:
        raise UnsupportedInstruction(
            f"{instr.opcode}: only m16n8k16 of bf16 and m16n8k32 of bytes are modelled"
        )
    d, a_regs, b_regs, c_regs = instr.operands
    a, b = a_fragment(_words(warp, a_regs)), np.empty((16, 8))
    for i, pair in enumerate(_pairs(_words(warp, b_regs))):
        for j in range(2):
            b[2 * _T + j + 8 * i, _G] = pair[:, j]
    with np.errstate(invalid="ignore", over="ignore"):
        product = a @ b
        for i, (out, add) in enumerate(zip(d.items, c_regs.items)):
            c = np.asarray(warp.read(add)).astype(np.uint32).view(np.float32)
            total = product[_G + 8 * (i // 2), 2 * _T + i % 2] + c.astype(np.float64)
            warp.write(out, total.astype(np.float32).view(np.uint32), mask)


def _byte_mma(warp: Any, instr: Any, mask: np.ndarray) -> None:
    d, a_regs, b_regs, c_regs = instr.operands
    a = _bytes(warp, a_regs, instr.mods[6], _A_BYTES)
    b = _bytes(warp, b_regs, instr.mods[7], _B_BYTES)
    product = a @ b
    for i, (out, add) in enumerate(zip(d.items, c_regs.items)):
        c = np.asarray(warp.read(add)).astype(np.uint32).view(np.int32)
        total = product[_G + 8 * (i // 2), 2 * _T + i % 2] + c.astype(np.int64)
        warp.write(out, (total & 0xFFFFFFFF).astype(np.uint32), mask)


HANDLERS = {"mma.sync": warp_mma}
