"""Helpers that all handlers share: addresses, leading lanes, thread ids."""

from __future__ import annotations

from typing import Any

import numpy as np

from .checks import IllegalInstruction, Misaligned, OutOfBounds, SharedRace

RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1
_RANK_MASK = 0xFF
SHARED_BASE = 1 << 56  # generic address of shared memory (memory.py)


def lead(mask: np.ndarray) -> int:
    """The lowest active lane."""
    return int(mask.argmax())


def value(warp: Any, operand: Any, lane: int) -> int:
    """An operand of one lane as an unsigned integer."""
    return int(warp.read(operand)[lane])


def address(warp: Any, operand: Any, lane: int) -> int:
    """The address that `[operand]` denotes in one lane."""
    return int(warp.read(operand)[lane])


def signed32(bits: int) -> int:
    bits &= 0xFFFFFFFF
    return bits - (1 << 32) if bits & 0x80000000 else bits


def threads(warp: Any, mask: np.ndarray) -> np.ndarray:
    """1 + thread id in the CTA of the active lanes."""
    return 1 + 32 * warp.warp_id + np.flatnonzero(mask)


def target(warp: Any, addr: int, size: int = 1, align: int = 1) -> tuple[Any, int]:
    """(CTA, offset) of a shared address, which carries the cluster rank in its upper bits.

    Raises:
        OutOfBounds: no such rank, or [addr, addr + size) leaves the window.
        Misaligned: the offset is no multiple of `align`.
        SharedRace: that CTA has ended already.
    """
    rank, offset = (addr >> RANK_SHIFT) & _RANK_MASK, addr & OFFSET_MASK
    ctas = warp.cta.cluster.ctas
    if rank >= len(ctas):
        raise OutOfBounds(f"shared address {addr:#x} names rank {rank} of a cluster of {len(ctas)}")
    cta = ctas[rank]
    if offset + size > cta.shared.size:
        raise OutOfBounds(
            f"shared [{offset:#x}, {offset + size:#x}) of rank {rank} leaves the window of "
            f"{cta.shared.size:#x} bytes"
        )
    if offset % align:
        raise Misaligned(f"shared address {offset:#x} must be a multiple of {align}")
    if cta.warps_left == 0:
        raise SharedRace(
            f"access to shared memory of cluster rank {rank}, whose CTA has ended: the cluster "
            "synchronisation before exit is missing"
        )
    return cta, offset


def once(warp: Any, operands: list[Any], mask: np.ndarray) -> list[int]:
    """Lanes that stand for the operation: one per distinct tuple of operands.

    Bulk copies and tcgen05 operations are issued through the uniform data path: a warp whose
    active lanes agree
    issues one operation.
    """
    lanes = np.flatnonzero(mask)
    if len(lanes) == 1:
        return [int(lanes[0])]
    columns = np.stack([np.asarray(warp.read(o), np.uint64)[lanes] for o in operands], 1)
    _, first = np.unique(columns, axis=0, return_index=True)
    return [int(lanes[i]) for i in sorted(first)]


def need(condition: bool, message: str) -> None:
    """IllegalInstruction unless `condition`."""
    if not condition:
        raise IllegalInstruction(message)
