"""mma.sync.m16n8k16 of bf16 with fp32 accumulators: the matrix product of one warp.

Fragments (PTX ISA, "Matrix fragments for mma.m16n8k16"), lane = 4 g + t: A registers hold rows g,
g + 8, g, g + 8 and columns 2t, 2t + 1, the last two 8 columns on; B registers rows 2t, 2t + 1 and 8
rows on, column g; C and D rows g, g, g + 8, g + 8 and columns 2t, 2t + 1. Products are summed in
fp64 and rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .access import need
from .checks import UnsupportedInstruction

_SHAPE = ("sync", "aligned", "m16n8k16", "row", "col", "f32", "bf16", "bf16", "f32")
_G, _T = np.arange(32) // 4, np.arange(32) % 4


def _pairs(warp: Any, operand: Any) -> np.ndarray:
    """fp64 (registers, 32 lanes, 2): bf16 pairs."""
    words = np.stack([np.asarray(warp.read(item)) for item in operand.items]).astype(np.uint32)
    halves = np.stack((words << np.uint32(16), words & np.uint32(0xFFFF0000)), -1)
    return halves.view(np.float32).astype(np.float64)


def warp_mma(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    if tuple(instr.mods) != _SHAPE:
        raise UnsupportedInstruction(f"{instr.opcode}: only m16n8k16 of bf16 is modelled")
    need(bool(mask.all()), f"{instr.opcode} needs all 32 lanes")
    d, a_regs, b_regs, c_regs = instr.operands
    a, b = np.empty((16, 16)), np.empty((16, 8))
    for i, pair in enumerate(_pairs(warp, a_regs)):
        for j in range(2):
            a[_G + 8 * (i % 2), 2 * _T + j + 8 * (i // 2)] = pair[:, j]
    for i, pair in enumerate(_pairs(warp, b_regs)):
        for j in range(2):
            b[2 * _T + j + 8 * i, _G] = pair[:, j]
    with np.errstate(invalid="ignore", over="ignore"):
        product = a @ b
        for i, (out, add) in enumerate(zip(d.items, c_regs.items)):
            c = np.asarray(warp.read(add)).astype(np.uint32).view(np.float32)
            total = product[_G + 8 * (i // 2), 2 * _T + i % 2] + c.astype(np.float64)
            warp.write(out, total.astype(np.float32).view(np.uint32), mask)


HANDLERS = {"mma.sync": warp_mma}
