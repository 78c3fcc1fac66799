"""cp.async with its groups, cp.async.bulk and cp.reduce.async.bulk with bulk groups, st.async and
red.async."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .access import address, lead, need, once, target, threads, value
from .asyncops import AsyncOp
from .checks import (
    ByteSet,
    OutOfBounds,
    SharedOverwrite,
    UnsupportedInstruction,
    check_async_access,
    check_initialised,
    pack_writer,
)  # fmt: skip
from .sync import barrier_at, find_barrier
from .wait import Blocked, Signal

GENERIC_SHARED_TAG = 1 << 56


@dataclass(eq=False)
class Transfer:
    """One bulk copy of a bulk group; `release` gives its source bytes back to the program."""

    origin: Any
    release: Callable[[], None] | None = None
    done: bool = False


@dataclass
class BulkGroups:
    """cp.async.bulk groups of one thread: transfers not yet committed, and the committed groups in
    order."""

    open: list[Transfer] = field(default_factory=list)
    groups: list[list[Transfer]] = field(default_factory=list)
    signal: Signal = field(default_factory=Signal)

    def pending(self, allowed: int) -> list[list[Transfer]]:
        """The groups that wait_group `allowed` waits for."""
        return self.groups[: max(0, len(self.groups) - allowed)]

    def complete(self, allowed: int) -> bool:
        return all(t.done for group in self.pending(allowed) for t in group)

    def observe(self, allowed: int) -> None:
        """The thread has waited: it may write the sources again."""
        for group in self.pending(allowed):
            for transfer in group:
                if transfer.release is not None:
                    transfer.release()
                    transfer.release = None
        self.groups = self.groups[max(0, len(self.groups) - allowed) :] if allowed else []

    def unread(self) -> Any:
        """The instruction of a transfer whose source nobody waited for, or None."""
        for transfer in [*self.open, *(t for g in self.groups for t in g)]:
            if transfer.release is not None:
                return transfer.origin
        return None


def groups_of(warp: Any, lane: int) -> BulkGroups:
    return warp.agent.bulk.setdefault(lane, BulkGroups())


def find_global(sim: Any, addr: int, size: int, write: bool, what: str) -> np.ndarray:
    """View of global memory.

    Raises:
        OutOfBounds: not inside one live allocation.
    """
    try:
        return sim.global_memory.find(addr, size, write)
    except OutOfBounds:
        raise
    except Exception as error:
        raise OutOfBounds(
            f"{what} touches global memory [{addr:#x}, {addr + size:#x}), which is in no live "
            f"allocation: {error}"
        ) from None


# ---- bulk groups ---------------------------------------------------------------------------------


def commit_group(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    for lane in np.flatnonzero(mask):
        groups = groups_of(warp, int(lane))
        groups.groups.append(groups.open)
        groups.open = []


def wait_group(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    allowed = value(warp, instr.operands[0], lead(mask))
    mine = [
        groups_of(warp, int(lane)) for lane in np.flatnonzero(mask) if int(lane) in warp.agent.bulk
    ]
    for groups in mine:
        if not groups.complete(allowed):
            return Blocked(
                partial(groups.complete, allowed),
                f"cp.async.bulk.wait_group {allowed}",
                groups.signal,
            )
    for groups in mine:
        groups.observe(allowed)
    warp.cta.fences.sync(threads(warp, mask), warp.cta.launch.epoch)
    return None


def reading(sim: Any, warp: Any, instr: Any, lane: int, source: ByteSet, what: str) -> Transfer:
    """Marks shared bytes as read by a new bulk-group transfer of `lane`, which stays until the
    thread waits."""
    cta = warp.cta
    check_async_access(sim, cta, source, what, False)
    source.add(cta.shared.async_reads, 1)
    transfer = Transfer(instr, lambda: source.add(cta.shared.async_reads, -1))
    groups_of(warp, lane).open.append(transfer)
    return transfer


def finished(warp: Any, lane: int, transfer: Transfer) -> None:
    transfer.done = True
    groups_of(warp, lane).signal.notify()


# ---- reductions ----------------------------------------------------------------------------------

_REDUCE_TYPES = {
    "f16": np.float16, "f32": np.float32, "f64": np.float64, "u32": np.uint32, "s32": np.int32,
    "u64": np.uint64, "s64": np.int64,
    "b32": np.uint32, "b64": np.uint64,
}  # fmt: skip


def _to_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def reduce_into(dest: np.ndarray, source: np.ndarray, op: str, kind: str) -> None:
    """dest = op(dest, source), both uint8, elements of `kind`; floats round to nearest even once
    per element."""
    source = np.ascontiguousarray(source).reshape(-1)
    if kind == "bf16":
        a = (dest.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        b = (source.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        dest.view(np.uint16)[:] = _to_bf16(_combine(a, b, op))
        return
    dtype = _REDUCE_TYPES.get(kind)
    if dtype is None:
        raise UnsupportedInstruction(f"bulk reduction on .{kind} is not modelled")
    view = dest.view(dtype)
    view[:] = _combine(view, source.view(dtype), op).astype(dtype)


def _combine(a: np.ndarray, b: np.ndarray, op: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        if op == "add":
            return a + b
        if op == "min":
            return np.fmin(a, b)
        if op == "max":
            return np.fmax(a, b)
        if op == "inc":
            return np.where(a >= b, 0, a + 1)
        if op == "dec":
            return np.where((a == 0) | (a > b), b, a - 1)
        bitwise = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
        if op not in bitwise:
            raise UnsupportedInstruction(f"bulk reduction .{op} is not modelled")
        return bitwise[op](a, b)


def reduction_of(instr: Any) -> str:
    ops = ("add", "min", "max", "inc", "dec", "and", "or", "xor")
    found = next((m for m in instr.mods if m in ops), None)
    if found is None:
        raise UnsupportedInstruction(f"{instr.opcode}: no reduction operator")
    return found


# ---- cp.async.bulk -------------------------------------------------------------------------------


def _shared(addr: int) -> int:
    return addr & (GENERIC_SHARED_TAG - 1)


def bulk_copy(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Chooses by destination and source state space."""
    spaces = [m for m in instr.mods if m in ("global", "shared::cta", "shared::cluster")]
    if len(spaces) != 2 or "cp_mask" in instr.mods:
        raise UnsupportedInstruction(f"form of {instr.opcode} is not modelled")
    handler = (
        _to_global if spaces[0] == "global" else (_load if spaces[1] == "global" else _to_shared)
    )
    for lane in once(warp, list(instr.operands), mask):
        size = value(warp, instr.operands[2], lane) & 0xFFFFFFFF
        need(size % 16 == 0, f"the size of a bulk copy must be a multiple of 16, got {size}")
        if size:
            handler(sim, warp, instr, lane, size)


def _aligned(addr: int, what: str) -> None:
    need(
        addr % 16 == 0, f"the {what} address of a bulk copy must be 16-byte aligned, got {addr:#x}"
    )


def _load(sim: Any, warp: Any, instr: Any, lane: int, size: int) -> None:
    dst, src, _, bar = (
        address(warp, o, lane) if i != 2 else 0 for i, o in enumerate(instr.operands[:4])
    )
    cta, offset = target(warp, _shared(dst), size, 16)
    bar_cta, bar_offset = target(warp, _shared(bar), 8, 8)
    _aligned(src, "global")
    ctas, barriers = [cta], [bar_cta]
    if "multicast::cluster" in instr.mods:
        bits = value(warp, instr.operands[4], lane) & 0xFFFF
        ctas = barriers = [c for c in cta.cluster.ctas if bits >> c.rank & 1]
    find_global(sim, src, size, False, "cp.async.bulk")
    where = ByteSet(offset, offset + size)
    for dest in ctas:
        check_async_access(sim, dest, where, "cp.async.bulk", True)
        where.add(dest.shared.async_writes, 1)
    parts = _cuts(sim, size)

    def run(lo: int, hi: int) -> None:
        data = find_global(sim, src + lo, hi - lo, False, "cp.async.bulk")
        part = ByteSet(offset + lo, offset + hi)
        for dest, owner in zip(ctas, barriers, strict=True):
            put_async(dest, part, data)
            barrier_at(owner, bar_offset).complete_tx(hi - lo)

    sim.counters.add(warp, "bulk_load_bytes", size)
    for lo, hi in parts:
        sim.async_ops.add(AsyncOp("tma", partial(run, lo, hi), (warp, instr), label="bulk load"))


def _cuts(sim: Any, size: int) -> list[tuple[int, int]]:
    pieces = sim.policy.pieces(size // 16)
    edges = [size // 16 * i // pieces * 16 for i in range(pieces + 1)]
    return [(lo, hi) for lo, hi in itertools.pairwise(edges) if lo < hi]


def put_async(cta: Any, part: ByteSet, data: np.ndarray) -> None:
    """The write of an asynchronous copy lands: data, shadow state, end of the in-flight mark."""
    shared = cta.shared
    if cta.warps_left == 0:
        raise OutOfBounds(
            f"an asynchronous copy writes into the shared memory of cluster rank {cta.rank}, whose "
            "CTA has ended"
        )
    part.put(shared.data, data)
    part.put(shared.init, 1)
    part.put(shared.writer, 0)
    part.add(shared.async_writes, -1)


def _to_global(sim: Any, warp: Any, instr: Any, lane: int, size: int) -> None:
    dst, src = (address(warp, o, lane) for o in instr.operands[:2])
    _aligned(dst, "global")
    cta, offset = target(warp, _shared(src), size, 16)
    need(cta is warp.cta, "a bulk store must read the CTA's own shared memory")
    find_global(sim, dst, size, True, instr.base)
    source = ByteSet(offset, offset + size)
    transfer = reading(sim, warp, instr, lane, source, instr.base)
    op = reduction_of(instr) if "reduce" in instr.mods else ""
    kind = instr.mods[-1]

    def run() -> None:
        check_initialised(sim, cta, source, instr.base)
        data = source.get(cta.shared.data)
        dest = find_global(sim, dst, size, True, instr.base)
        if op:
            reduce_into(dest, data, op, kind)
        else:
            dest[:] = data
        finished(warp, lane, transfer)

    sim.counters.add(warp, "bulk_store_bytes", size)
    sim.async_ops.add(
        AsyncOp("tma", run, (warp, instr), label="bulk reduce" if op else "bulk store")
    )


def _to_shared(sim: Any, warp: Any, instr: Any, lane: int, size: int) -> None:
    """Shared memory of this CTA to that of any CTA of the cluster, signalled on an mbarrier next
    to the destination."""
    dst, src, _, bar = (
        address(warp, o, lane) if i != 2 else 0 for i, o in enumerate(instr.operands[:4])
    )
    dest, offset = target(warp, _shared(dst), size, 16)
    cta, start = target(warp, _shared(src), size, 16)
    owner, bar_offset = target(warp, _shared(bar), 8, 8)
    need(
        owner is dest,
        "the mbarrier of a shared-to-shared copy must be in the CTA of the destination",
    )
    source, where = ByteSet(start, start + size), ByteSet(offset, offset + size)
    check_async_access(sim, cta, source, instr.base, False)
    check_async_access(sim, dest, where, instr.base, True)
    source.add(cta.shared.async_reads, 1)
    where.add(dest.shared.async_writes, 1)
    op = reduction_of(instr) if "reduce" in instr.mods else ""

    def run() -> None:
        check_initialised(sim, cta, source, instr.base)
        data = source.get(cta.shared.data).copy()
        source.add(cta.shared.async_reads, -1)
        if op:
            mixed = where.get(dest.shared.data).copy()
            reduce_into(mixed, data, op, instr.mods[-1])
            data = mixed
        put_async(dest, where, data)
        barrier_at(dest, bar_offset).complete_tx(size)

    sim.async_ops.add(AsyncOp("tma", run, (warp, instr), label="bulk shared"))


# ---- cp.async ------------------------------------------------------------------------------------


@dataclass
class CopyGroups:
    """cp.async operations of a warp, in issue order: [(lanes, operation), ...], and the committed
    groups."""

    open: list[tuple[np.ndarray, Transfer]] = field(default_factory=list)
    groups: list[tuple[np.ndarray, list[Transfer]]] = field(default_factory=list)
    signal: Signal = field(default_factory=Signal)

    def waited(self, mask: np.ndarray, allowed: int | None) -> list[Transfer]:
        """What `mask` waits for: all but the last `allowed` groups, or everything (None)."""
        mine = [ts for lanes, ts in self.groups if (lanes & mask).any()]
        if allowed is not None:
            return [t for ts in mine[: max(0, len(mine) - allowed)] for t in ts]
        return [t for ts in mine for t in ts] + [
            t for lanes, t in self.open if (lanes & mask).any()
        ]

    def forget(self) -> None:
        self.groups = [
            (lanes, ts) for lanes, ts in self.groups if not all(t.done for t in ts)
        ] or self.groups[-1:]


def copies_of(warp: Any) -> CopyGroups:
    if warp.agent.copies is None:
        warp.agent.copies = CopyGroups()
    return warp.agent.copies


def cp_async(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Per-lane copy of 4, 8 or 16 bytes; the part beyond src-size, or all of it with ignore-src,
    becomes zeros."""
    dst_op, src_op, size_op, *rest = instr.operands
    if "L2::cache_hint" in instr.mods:
        rest = rest[:-1]
    lanes = np.flatnonzero(mask)
    size = value(warp, size_op, int(lanes[0]))
    need(
        size in (4, 8, 16) and not ("cg" in instr.mods and size != 16),
        f"cp.async cannot copy {size} bytes here",
    )
    dst, src = (np.asarray(warp.read(o))[lanes] for o in (dst_op, src_op))
    take = np.full(len(lanes), size)
    if rest:
        extra = np.asarray(warp.read(rest[0]))[lanes].astype(np.int64)
        predicate = getattr(rest[0], "type", "") == "pred"
        take = np.where(extra != 0, 0, size) if predicate else extra & 0xFFFFFFFF
        need(
            bool((take <= size).all()),
            f"cp.async: src-size {int(take.max())} exceeds cp-size {size}",
        )
    shared = warp.cta.shared
    offsets = []
    for lane, where, frm in zip(lanes, dst, src, strict=True):
        cta, offset = target(warp, _shared(int(where)), size, size)
        need(cta is warp.cta, "cp.async writes the CTA's own shared memory only")
        need(
            int(frm) % size == 0,
            f"cp.async: global address {int(frm):#x} of lane {int(lane)} is not a multiple of "
            f"{size}",
        )
        offsets.append(offset)
    index = np.array(offsets)[:, None] + np.arange(size)[None]
    if sim.checks.shared_overwrite and shared.async_reads[index].any():
        raise SharedOverwrite(
            "cp.async overwrites shared memory that an MMA or bulk store in flight may still read"
        )
    shared.async_writes[index.reshape(-1)] += 1
    transfer = Transfer(instr)
    tids = 1 + 32 * warp.warp_id + lanes
    launch = warp.cta.launch

    def run() -> None:
        data = np.zeros((len(lanes), size), np.uint8)
        for i, (frm, count) in enumerate(zip(src, take, strict=True)):
            if count:
                data[i, :count] = find_global(sim, int(frm), int(count), False, "cp.async")
        shared.data[index] = data
        shared.init[index] = 1
        launch.epoch += 1
        writer = pack_writer(instr.index, launch.epoch, tids)[:, None]
        shared.writer[index] = writer if sim.checks.cp_async_fence else 0
        shared.async_writes[index.reshape(-1)] -= 1
        transfer.done = True
        groups = copies_of(warp)
        groups.signal.notify()

    copies_of(warp).open.append((mask.copy(), transfer))
    sim.counters.add(warp, "cp_async_bytes", int(take.sum()))
    sim.async_ops.add(AsyncOp("cp.async", run, (warp, instr), label="cp.async"))


def cp_commit(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    groups = copies_of(warp)
    mine = [t for lanes, t in groups.open if (lanes & mask).any()]
    groups.open = [(lanes & ~mask, t) for lanes, t in groups.open if (lanes & ~mask).any()]
    groups.groups.append((mask.copy(), mine))


def cp_wait(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    groups = copies_of(warp)
    allowed = value(warp, instr.operands[0], lead(mask)) if "wait_group" in instr.mods else None
    waiting = groups.waited(mask, allowed)
    if not all(t.done for t in waiting):
        return Blocked(lambda: all(t.done for t in waiting), f"{instr.opcode}", groups.signal)
    groups.forget()
    warp.cta.fences.sync(threads(warp, mask), warp.cta.launch.epoch)
    return None


def cp_arrive(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """cp.async.mbarrier.arrive{.noinc}: every lane arrives when all its earlier cp.async are done.

    Without .noinc the pending count first grows by one, so that the arrival has no net effect on
    the count.
    """
    lanes = np.flatnonzero(mask)
    addresses = np.asarray(warp.read(instr.operands[0]))[lanes]
    barriers = [find_barrier(warp, _shared(int(a))) for a in addresses]
    if "noinc" not in instr.mods:
        for barrier in barriers:
            barrier.pending += 1
    groups = copies_of(warp)
    groups.open = [(lanes_, t) for lanes_, t in groups.open if not t.done]
    before = groups.waited(mask, None)

    def run() -> None:
        for barrier in barriers:
            barrier.arrive()

    op = AsyncOp("cp.async", run, (warp, instr), label="cp.async arrive")
    sim.async_ops.add_after(op, lambda: all(t.done for t in before))


# ---- st.async, red.async -------------------------------------------------------------------------

_BYTES = {
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "b8": 1,
    "b16": 2,
}


def st_async(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """One small asynchronous store per lane, signalled with its bytes on an mbarrier of the
    destination CTA."""
    if "mbarrier::complete_tx::bytes" not in instr.mods:
        raise UnsupportedInstruction(f"form of {instr.opcode} is not modelled")
    dst_op, value_op, bar_op = instr.operands
    width = _BYTES[instr.mods[-1]]
    items = value_op.items if hasattr(value_op, "items") else (value_op,)
    for lane in map(int, np.flatnonzero(mask)):
        dest, offset = target(
            warp, _shared(address(warp, dst_op, lane)), width * len(items), width * len(items)
        )
        owner, bar_offset = target(warp, _shared(address(warp, bar_op, lane)), 8, 8)
        need(owner is dest, "the mbarrier of st.async must be in the CTA of the destination")
        raw = b"".join(
            (value(warp, i, lane) & ((1 << 8 * width) - 1)).to_bytes(width, "little") for i in items
        )
        _store_later(sim, (warp, instr), (dest, offset, bar_offset), np.frombuffer(raw, np.uint8))


def _store_later(
    sim: Any, origin: tuple[Any, Any], place: tuple[Any, int, int], data: np.ndarray
) -> None:
    dest, offset, bar_offset = place
    where = ByteSet(offset, offset + len(data))
    instr = origin[1]
    check_async_access(sim, dest, where, instr.opcode, True)
    where.add(dest.shared.async_writes, 1)
    op = reduction_of(instr) if instr.base == "red" else ""

    def run() -> None:
        result = data
        if op:
            result = where.get(dest.shared.data).copy()
            reduce_into(result, data, op, instr.mods[-1])
        put_async(dest, where, result)
        barrier_at(dest, bar_offset).complete_tx(len(data))

    sim.async_ops.add(AsyncOp("st.async", run, origin, label=instr.base))


def no_effect(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Prefetches into L2."""


HANDLERS = {
    "cp.async.ca": cp_async,
    "cp.async.cg": cp_async,
    "cp.async.commit_group": cp_commit,
    "cp.async.wait_group": cp_wait,
    "cp.async.wait_all": cp_wait,
    "cp.async.mbarrier": cp_arrive,
    "cp.async.bulk": bulk_copy,
    "cp.reduce.async.bulk": bulk_copy,
    "cp.async.bulk.commit_group": commit_group,
    "cp.async.bulk.wait_group": wait_group,
    "cp.async.bulk.prefetch": no_effect,
    "st.async": st_async,
    "red.async": st_async,
}
