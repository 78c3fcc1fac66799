"""ld, st, atom, red and matrix moves of a warp: 32 addresses at a time, checked against the ranges
that exist.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim.alu import decode, encode
from cute_kernels.sim.checks import (
    IllegalInstruction,
    Misaligned,
    OutOfBounds,
    SharedOverwrite,
    SharedRace,
    UninitialisedRead,
    UnsupportedInstruction,
    pack_writer,
)
from cute_kernels.sim.memory import LOCAL_BASE, OFFSET_MASK, RANK_SHIFT, SHARED_BASE
from cute_kernels.sim.operands import TYPES, Closure, getter, putter, type_of, width
from cute_kernels.sim.ptx import Addr, Imm, Sym, Vec

_SPACES = ("param", "global", "shared", "local", "const")
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_LANES = np.arange(32)


def space_of(instr: Any) -> str:
    for mod in instr.mods:
        if mod.split("::")[0] in _SPACES:
            return str(mod.split("::")[0])
    return "generic"


def _count(instr: Any) -> int:
    return next((int(m[1]) for m in instr.mods if m in ("v2", "v4", "v8")), 1)


def address_getter(operand: Any, space: str) -> Callable[[Any], np.ndarray]:
    """Row of 64-bit addresses of `[base + offset]`."""
    if not isinstance(operand, Addr):
        raise UnsupportedInstruction(f"{operand} is not an address")
    offset = np.uint64(operand.offset & (2**64 - 1))
    base = operand.base
    if isinstance(base, Imm):
        fixed = np.full(32, np.uint64(base.bits) + offset)
        return lambda w: fixed
    if isinstance(base, Sym):
        name = base.name
        return lambda w: np.full(32, np.uint64(w.symbol(name)) + offset)
    if width(base.type) == 4:  # 32-bit shared and local addresses wrap in 32 bits
        narrow = np.uint32(operand.offset & 0xFFFFFFFF)
        index = base.id
        return lambda w: (w.regs.u32[index] + narrow).astype(np.uint64)
    index = base.id
    return lambda w: w.regs.u64[index] + offset


class Access:
    """The elements that the active lanes touch: groups of lanes that share one memory.

    ``groups`` holds (element view of the memory, index of each lane's first element, lanes,
    memory).
    """

    def __init__(
        self, w: Any, instr: Any, space: str, address: np.ndarray, lanes: np.ndarray
    ) -> None:
        self.w, self.instr, self.lanes = w, instr, lanes
        size = width(type_of(instr))
        self.size, self.total = size, size * _count(instr)
        where = address[lanes]
        if len(where) and (where & np.uint64(self.total - 1)).any():
            lane = int(_LANES[lanes][((where & np.uint64(self.total - 1)) != 0).argmax()])
            raise self._at(
                Misaligned(f"address {int(address[lane]):#x} must be a multiple of {self.total}"),
                lane,
            )
        self.groups: list[tuple[np.ndarray, np.ndarray, np.ndarray, Any]] = []
        if space == "generic":
            shared = (address & np.uint64(SHARED_BASE)) != 0
            local = (address & np.uint64(LOCAL_BASE)) != 0
            plain = address & np.uint64(SHARED_BASE - 1)
            self._add("shared", plain, lanes & shared)
            self._add("local", plain, lanes & local)
            self._add("global", address, lanes & ~shared & ~local)
        else:
            self._add(space, address, lanes)

    def _at(self, error: Any, lane: int | None = None) -> Any:
        return error.at(self.w, self.instr, lane)

    def _add(self, space: str, address: np.ndarray, lanes: np.ndarray) -> None:
        if not lanes.any():
            return
        if space == "shared":
            self._add_shared(address, lanes)
        elif space == "local":
            self._add_local(address, lanes)
        else:
            self._add_global(address, lanes)

    def _add_shared(self, address: np.ndarray, lanes: np.ndarray) -> None:
        ranks = (address >> np.uint64(RANK_SHIFT)).astype(np.int64) & 0xFF
        offsets = (address & np.uint64(OFFSET_MASK)).astype(np.int64)
        ctas = self.w.cta.cluster.ctas
        for rank in np.unique(ranks[lanes]):
            mine = lanes & (ranks == rank)
            if rank >= len(ctas):
                message = f"shared address names rank {rank} of a cluster of {len(ctas)}"
                raise self._at(OutOfBounds(message), int(mine.argmax()))
            cta = ctas[rank]
            high = int(offsets[mine].max())
            if high + self.total > cta.shared.size or int(offsets[mine].min()) < 0:
                message = (
                    f"shared address {high:#x} leaves the window of {cta.shared.size:#x} bytes"
                )
                raise self._at(
                    OutOfBounds(message), int(np.flatnonzero(mine)[offsets[mine].argmax()])
                )
            if cta is not self.w.cta and cta.warps_left == 0:
                raise self._at(SharedRace(f"shared memory of rank {rank}, whose CTA has ended"))
            view = cta.shared.data.view(_UNSIGNED[self.size])
            self.groups.append((view, offsets[mine] // self.size, mine, cta))

    def _add_local(self, address: np.ndarray, lanes: np.ndarray) -> None:
        memory = self.w.local  # (32, bytes)
        offsets = address.astype(np.int64)
        if int(offsets[lanes].max()) + self.total > memory.shape[1]:
            raise self._at(OutOfBounds("local memory access outside the stack frame"))
        flat = memory.reshape(-1).view(_UNSIGNED[self.size])
        index = (_LANES * memory.shape[1] + offsets) // self.size
        self.groups.append((flat, index[lanes], lanes, None))

    def _add_global(self, address: np.ndarray, lanes: np.ndarray) -> None:
        left = lanes.copy()
        while left.any():
            first = int(address[left].min())
            base, raw = self.w.find_global(first, self.total, self.instr)
            inside = left & (address >= np.uint64(base))
            inside &= address <= np.uint64(base + len(raw) - self.total)
            shift = base % self.size  # align the element view to the addresses
            lead = (self.size - shift) % self.size
            usable = (len(raw) - lead) // self.size * self.size
            view = raw[lead : lead + usable].view(_UNSIGNED[self.size])
            index = (address[inside] - np.uint64(base + lead)).astype(np.int64) // self.size
            self.groups.append((view, index, inside, None))
            left &= ~inside

    def check_shared(self, write: bool) -> None:
        """Shadow state of shared memory: initialisation and races with asynchronous operations."""
        sim, elements = self.w.sim, self.total // self.size
        for _, index, _, cta in self.groups:
            if cta is None:
                continue
            shared = cta.shared
            spans = (index * self.size)[:, None] + np.arange(elements * self.size)
            if not write and sim.checks.uninitialised:
                fresh = shared.init[spans] == 0
                if fresh.any():
                    at = int(spans[fresh][0])
                    raise self._at(UninitialisedRead(f"shared byte {at:#x} was never written"))
            if sim.checks.shared_race and shared.async_writes[spans].any():
                at = int(spans[shared.async_writes[spans] != 0][0])
                raise self._at(SharedRace(f"shared byte {at:#x} is being written by a bulk copy"))
            if write and sim.checks.shared_overwrite and shared.async_reads[spans].any():
                at = int(spans[shared.async_reads[spans] != 0][0])
                message = f"shared byte {at:#x} may still be read by an asynchronous operation"
                raise self._at(SharedOverwrite(message))

    def mark_written(self) -> None:
        """Remember who wrote shared memory, for initialisation and proxy fences."""
        elements = self.total // self.size
        for _, index, lanes, cta in self.groups:
            if cta is None:
                continue
            spans = (index * self.size)[:, None] + np.arange(elements * self.size)
            cta.shared.init[spans] = 1
            thread = 1 + 32 * self.w.warp_id + _LANES[lanes]
            if cta is not self.w.cta:
                thread = np.full(len(thread), 2047)
            epoch = self.w.cta.launch.epoch
            cta.shared.writer[spans] = pack_writer(self.instr.index, epoch, thread)[:, None]


def _ld(instr: Any) -> Closure:
    space, t, count = space_of(instr), type_of(instr), _count(instr)
    destination, source = instr.operands[:2]
    items = destination.items if isinstance(destination, Vec) else (destination,)
    puts = [putter(i, t) for i in items]
    address, dtype = address_getter(source, space), TYPES[t][1]
    if t == "b128":
        raise UnsupportedInstruction(f"{instr.opcode} is not modelled")

    def ld(w: Any, m: Any) -> None:
        lanes = w.live if m is None else m
        access = Access(w, instr, space, address(w), lanes)
        access.check_shared(write=False)
        w.count_load(space, int(lanes.sum()) * access.total)
        for j in range(count):
            row = np.zeros(32, _UNSIGNED[access.size])
            for view, index, mine, _ in access.groups:
                row[mine] = view[index + j]
            puts[j](w, lanes if m is not None else m, row.view(dtype))

    return ld


def _st(instr: Any) -> Closure:
    space, t = space_of(instr), type_of(instr)
    target, source = instr.operands[:2]
    items = source.items if isinstance(source, Vec) else (source,)
    gets = [getter(i, t) for i in items]
    address = address_getter(target, space)

    def st(w: Any, m: Any) -> None:
        lanes = w.live if m is None else m
        access = Access(w, instr, space, address(w), lanes)
        access.check_shared(write=True)
        w.count_store(space, int(lanes.sum()) * access.total)
        for j, get in enumerate(gets):
            row = np.broadcast_to(np.asarray(get(w)), 32)
            row = np.ascontiguousarray(row).view(_UNSIGNED[access.size])
            for view, index, mine, _ in access.groups:
                view[index + j] = row[mine]
        access.mark_written()

    return st


_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b, "min": min, "max": max, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "exch": lambda a, b: b,
    "inc": lambda a, b: a * 0 if a >= b else a + a.dtype.type(1),
    "dec": lambda a, b: b if a == 0 or a > b else a - a.dtype.type(1),
}  # fmt: skip


def _atomic(instr: Any) -> Closure:
    """atom and red: one lane after another, the lowest first; the order among lanes is not
    promised.
    """
    space, t, count = space_of(instr), type_of(instr), _count(instr)
    op = next(m for m in instr.mods if m in _COMBINE or m == "cas")
    operands = list(instr.operands)
    destination = operands.pop(0) if instr.base == "atom" else None
    address = address_getter(operands[0], space)
    values = [o.items if isinstance(o, Vec) else (o,) for o in operands[1:]]
    gets = [[getter(i, t) for i in v] for v in values]
    outs = (
        []
        if destination is None
        else (destination.items if isinstance(destination, Vec) else (destination,))
    )
    puts = [putter(o, t) for o in outs]
    dtype = TYPES[t][1]

    def update(old: Any, operand: Any) -> Any:
        if t in ("f16x2", "bf16x2", "f16", "bf16"):
            parts = zip(decode(old, t), decode(operand, t))
            return encode([np.asarray(_COMBINE[op](a, b)) for a, b in parts], t)
        return _COMBINE[op](old, operand)

    def atomic(w: Any, m: Any) -> None:
        lanes = w.live if m is None else m
        access = Access(w, instr, space, address(w), lanes)
        access.check_shared(write=False)
        access.check_shared(write=True)
        w.count_store(space, int(lanes.sum()) * access.total)
        rows = [np.zeros(32, dtype) for _ in range(count)]
        for view, index, mine, _ in access.groups:
            typed = view.view(dtype)
            for lane, first in zip(np.flatnonzero(mine), index):
                for j in range(count):
                    old = typed[first + j].copy()
                    rows[j][lane] = old
                    args = [np.broadcast_to(g[j](w), 32)[lane] for g in gets]
                    if op == "cas":
                        new = args[1] if old == args[0] else old
                    else:
                        with np.errstate(over="ignore"):
                            new = update(old, args[0])
                    typed[first + j] = np.asarray(new).reshape(-1)[0]
        access.mark_written()
        for put, row in zip(puts, rows):
            put(w, m, row)

    return atomic


def _matrix(instr: Any) -> Closure:
    """ldmatrix and stmatrix, m8n8 of 16-bit elements: lane i of matrix j gives the address of its
    row i.
    """
    if not instr.has("m8n8") or not instr.has("b16"):
        raise UnsupportedInstruction(f"{instr.opcode}: only m8n8.b16 is modelled")
    load, transposed = instr.base == "ldmatrix", instr.has("trans")
    registers, target = instr.operands if load else reversed(instr.operands)
    items = registers.items if isinstance(registers, Vec) else (registers,)
    address = address_getter(target, "shared")
    row, pair = _LANES // 4, _LANES % 4 * 2

    def matrix(w: Any, m: Any) -> None:
        if m is not None and not m.all():
            raise IllegalInstruction(f"{instr.opcode} needs all 32 lanes")
        where = address(w)
        for j, item in enumerate(items):
            starts = (where[8 * j : 8 * j + 8] & np.uint64(OFFSET_MASK)).astype(np.int64)
            elements = starts[:, None] // 2 + np.arange(8)  # (8 rows, 8 columns)
            elements = elements.T if transposed else elements
            low, high = elements[row, pair], elements[row, pair + 1]
            memory = w.cta.shared.data.view(np.uint16)
            register = w.regs.u32[item.id]
            spans = (np.stack((low, high)) * 2)[..., None] + np.arange(2)
            if load:
                register[...] = memory[low].astype(np.uint32) | (
                    memory[high].astype(np.uint32) << 16
                )
                continue
            memory[low], memory[high] = register & 0xFFFF, register >> 16
            thread = 1 + 32 * w.warp_id + _LANES
            w.cta.shared.init[spans] = 1
            writer = pack_writer(instr.index, w.cta.launch.epoch, thread)
            w.cta.shared.writer[spans] = writer[None, :, None]

    return matrix


BUILDERS: dict[str, Callable[[Any], Closure]] = {
    "ld": _ld,
    "ldu": _ld,
    "st": _st,
    "atom": _atomic,
    "red": _atomic,
    "ldmatrix": _matrix,
    "stmatrix": _matrix,
}
