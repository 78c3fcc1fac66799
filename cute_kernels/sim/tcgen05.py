"""tcgen05 instructions other than the MMA: allocation, copies from shared memory, loads and
stores, waits, commits.

Operations that one thread issues (mma, cp, commit) go through that thread's pipe and complete in
its order; their marks
on shared memory and TMEM stay until a commit of the same thread has arrived, because nothing else
tells others that
they are done.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .access import address, lead, need, target, value
from .asyncops import AsyncOp
from .checks import (
    ByteSet,
    TmemError,
    UnsupportedInstruction,
    check_async_access,
    check_initialised,
)
from .descriptors import SmemDescriptor
from .sync import barrier_at
from .tmem import LANES, PIPE_BITS, UNFENCED, Region, Tmem, split
from .wait import Blocked


class Pipe:
    """The tcgen05 operations of one thread."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = 0
        self.uncommitted: list[
            Callable[[], None]
        ] = []  # releases of operations no commit covers yet

    def stamp(self) -> int:
        self.sequence += 1
        return self.sequence << PIPE_BITS | self.number


def pipe_of(sim: Any, warp: Any, lane: int) -> Pipe:
    key = ("tc", id(warp), lane)
    pipe = sim.tc_pipes.get(key)
    if pipe is None:
        pipe = sim.tc_pipes[key] = Pipe(len(sim.tc_pipes) + 1)
        need(
            pipe.number < 1 << PIPE_BITS, "too many threads issue tcgen05 operations in one launch"
        )
    return pipe


def group_of(instr: Any) -> int:
    """1 or 2: the .cta_group of the instruction."""
    return 2 if "cta_group::2" in instr.mods else 1


def pair(cta: Any, group: int) -> list[Any]:
    """The CTAs that a cta_group addresses: [own], or [even, odd] of the pair."""
    if group == 1:
        return [cta]
    ctas = cta.cluster.ctas
    need(len(ctas) % 2 == 0, f"cta_group::2 in a cluster of {len(ctas)} CTAs")
    even = cta.rank & ~1
    return [ctas[even], ctas[even + 1]]


# ---- allocation ----------------------------------------------------------------------------------


def alloc(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    lane, group, cta = lead(mask), group_of(instr), warp.cta
    where, columns = address(warp, instr.operands[0], lane), value(warp, instr.operands[1], lane)
    need(
        columns in (32, 64, 128, 256, 512),
        f"tcgen05.alloc takes 32, 64, 128, 256 or 512 columns, got {columns}",
    )
    if cta.tmem.relinquished:
        raise TmemError("tcgen05.alloc after tcgen05.relinquish_alloc_permit")
    dest, offset = target(warp, where, 4, 4)
    if any(a.group != group for a in cta.tmem.allocations):
        raise TmemError("all tcgen05 instructions of a kernel must use one cta_group")
    column = _claim(cta, columns, group)
    if column is None:
        return Blocked(
            lambda: _room(cta, columns, group) is not None,
            f"tcgen05.alloc of {columns} columns; {cta.tmem}",
            cta.tmem.freed,
        )
    shared = dest.shared
    shared.data[offset : offset + 4] = np.frombuffer(int(column).to_bytes(4, "little"), np.uint8)
    shared.init[offset : offset + 4] = 1
    return None


def _room(cta: Any, columns: int, group: int) -> int | None:
    mine, *other = sorted(pair(cta, group), key=lambda c: c is not cta)
    for start in range(0, 512 - columns + 1, 32):
        if not any(c.tmem.owned[start : start + columns].any() for c in (mine, *other)):
            return start
    return None


def _claim(cta: Any, columns: int, group: int) -> int | None:
    """The pair allocates together: whoever comes first reserves the columns in both, the other
    claims them."""
    for waiting in cta.tmem.allocations:
        if not waiting.claimed:
            if waiting.columns != columns:
                raise TmemError(
                    f"the CTAs of a pair allocate different sizes: {columns} and {waiting.columns} "
                    "columns"
                )
            waiting.claimed = True
            return waiting.column
    column = _room(cta, columns, group)
    if column is not None:
        for each in pair(cta, group):
            each.tmem.take(column, columns, group, each is cta)
    return column


def dealloc(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    lane = lead(mask)
    row, column = split(value(warp, instr.operands[0], lane))
    need(row == 0, f"tcgen05.dealloc needs the address that alloc returned, got lane {row}")
    group = group_of(instr)
    columns = value(warp, instr.operands[1], lane)
    warp.cta.tmem.release(column, (columns, group), sim.checks, warp)
    for other in pair(warp.cta, group):
        other.tmem.freed.notify()


def relinquish(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    warp.cta.tmem.relinquished = True


# ---- loads and stores ----------------------------------------------------------------------------

_ROW = np.arange(32)
# shape -> (lanes, columns per repetition, registers per repetition, lane of (register, thread),
# column of the same)
_SHAPES: dict[str, tuple[int, int, np.ndarray, np.ndarray]] = {
    "32x32b": (32, 1, _ROW[None], np.zeros((1, 32), int)),
    "16x64b": (16, 2, (_ROW // 4 + 8 * (_ROW % 2))[None], (_ROW // 2 % 2)[None]),
    "16x128b": (16, 4, np.stack([_ROW // 4, _ROW // 4 + 8]), np.stack([_ROW % 4] * 2)),
    "16x256b": (
        16, 8, np.stack([_ROW // 4, _ROW // 4, _ROW // 4 + 8, _ROW // 4 + 8]),
        np.stack([_ROW % 4 * 2, _ROW % 4 * 2 + 1] * 2),
    ),
}  # fmt: skip


def _layout(instr: Any) -> tuple[int, int, np.ndarray, np.ndarray]:
    """(lanes, columns, lane index, column index) of a ld or st; the indices are (registers, 32)."""
    repeat = next((int(m[1:]) for m in instr.mods if m[0] == "x" and m[1:].isdigit()), 0)
    shape = next((m for m in instr.mods if m in _SHAPES), None)
    if shape is None or not repeat:
        raise UnsupportedInstruction(f"tcgen05 shape of {instr.opcode} is not modelled")
    lanes, columns, row, column = _SHAPES[shape]
    rows = np.concatenate([row] * repeat)
    cols = np.concatenate([column + i * columns for i in range(repeat)])
    return lanes, columns * repeat, rows, cols


def _area(warp: Any, taddr: int, lanes: int, columns: int) -> Region:
    lane, column = split(taddr)
    first = 32 * (warp.warp_id % 4)
    if not (first <= lane and lane + lanes <= first + 32):
        raise TmemError(
            f"warp {warp.warp_id} may access TMEM lanes {first}..{first + 31} only, the address "
            f"{taddr:#x} names lanes {lane}..{lane + lanes - 1}"
        )
    need(
        lane % 16 == 0,
        f"the lane of a tcgen05.ld/st address must be a multiple of {lanes}, got {lane}",
    )
    return Region(lane, lanes, column, columns)


def _bx2(
    warp: Any, instr: Any, mask: np.ndarray, taddr: int, count: int, pack: int
) -> tuple[list[Region], np.ndarray, np.ndarray]:
    """16x32bx2: lanes 0-15 and 16-31 of the warp access columns `taddr` and `taddr +
    immHalfSplitoff`."""
    half = value(warp, instr.operands[-1], lead(mask))
    areas = [_area(warp, taddr, 16, count * pack), _area(warp, taddr + half, 16, count * pack)]
    rows = np.broadcast_to(_ROW % 16, (count, 32))
    cols = np.arange(count)[:, None] + np.where(_ROW < 16, 0, half)[None] // pack
    return areas, rows, cols


def _geometry(
    warp: Any, instr: Any, mask: np.ndarray, taddr_op: Any
) -> tuple[list[Region], np.ndarray, np.ndarray, int]:
    """Regions touched, and (registers, 32) cells relative to the first one (columns in units of
    `pack`)."""
    taddrs = np.asarray(warp.read(taddr_op))[mask]
    need(bool((taddrs == taddrs[0]).all()), "all lanes of tcgen05.ld/st must give the same address")
    taddr, pack = int(taddrs[0]), 2 if any("pack::16b" in m for m in instr.mods) else 1
    if "16x32bx2" in instr.mods:
        repeat = next(int(m[1:]) for m in instr.mods if m[0] == "x" and m[1:].isdigit())
        areas, rows, cols = _bx2(warp, instr, mask, taddr, repeat, pack)
        return areas, rows, cols, pack
    lanes, columns, rows, cols = _layout(instr)
    return [_area(warp, taddr, lanes, columns * pack)], rows, cols, pack


def load(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    if "red" in instr.mods:
        raise UnsupportedInstruction("tcgen05.ld.red does not exist on sm_100")
    result, taddr = instr.operands[:2]
    areas, rows, cols, pack = _geometry(warp, instr, mask, taddr)
    tmem: Tmem = warp.cta.tmem
    for area in areas:
        tmem.check_read(area, "tcgen05.ld", sim.checks)
        tmem.check_written(area, "tcgen05.ld", sim.checks)
        if sim.checks.tcgen05_fence:
            tmem.check_fenced(area, "tcgen05.ld", warp)
    lane, column = areas[0].lane, areas[0].column
    if pack == 2:
        cells = (
            tmem.data[lane + rows, column + 2 * cols] & 0xFFFF
            | tmem.data[lane + rows, column + 2 * cols + 1] << 16
        )
    else:
        cells = tmem.data[lane + rows, column + cols]
    items = result.items if hasattr(result, "items") else (result,)
    need(len(items) == len(rows), f"{instr.opcode} needs {len(rows)} registers, got {len(items)}")
    for item, row in zip(items, cells.astype(np.uint64), strict=True):
        warp.write(item, row, mask)
    for area in areas:
        tmem.loads[area.index] += 1
    warp.agent.tmem_loads.append((instr, areas))
    sim.counters.add(warp, "tmem_load_bytes", 4 * rows.size * pack)


def store(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    taddr, source = instr.operands[:2]
    areas, rows, cols, pack = _geometry(warp, instr, mask, taddr)
    tmem: Tmem = warp.cta.tmem
    items = source.items if hasattr(source, "items") else (source,)
    need(len(items) == len(rows), f"{instr.opcode} needs {len(rows)} registers, got {len(items)}")
    values = np.stack([np.asarray(warp.read(i)) for i in items]).astype(np.uint32)
    pipe = pipe_of(sim, warp, 32)  # lane 32: the stores of the whole warp
    for area in areas:
        tmem.check_write(area, "tcgen05.st", sim.checks, pipe.number, warp)
    lane, column = areas[0].lane, areas[0].column
    if pack == 2:
        tmem.data[lane + rows, column + 2 * cols] = values & 0xFFFF
        tmem.data[lane + rows, column + 2 * cols + 1] = values >> 16
    else:
        tmem.data[lane + rows, column + cols] = values
    stamp = pipe.stamp()  # the marks stay until tcgen05.wait::st
    for area in areas:
        tmem.written[area.index] = True
        tmem.mark(area, True, stamp)
    warp.agent.tmem_stores.append((stamp, areas))


def wait(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    if "wait::ld" in instr.mods:
        finish_loads(warp, None)
        return
    for stamp, areas in warp.agent.tmem_stores:
        for area in areas:
            warp.cta.tmem.unmark(area, True, stamp)
    warp.agent.tmem_stores.clear()


def finish_loads(warp: Any, used: Callable[[Any], bool] | None) -> None:
    """Loads of this warp have completed: all of them (wait::ld), or those whose registers were
    used (`used(instr)`)."""
    left = []
    for instr, areas in warp.agent.tmem_loads:
        if used is not None and not used(instr):
            left.append((instr, areas))
            continue
        for area in areas:
            warp.cta.tmem.finish_load(area, warp)
    warp.agent.tmem_loads = left


# ---- commit, copies ------------------------------------------------------------------------------


def commit(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Arrives on one mbarrier, or on the same offset in every CTA of a mask, when all earlier
    operations are done. In a random schedule the arrivals at other CTAs come one by one, after
    that: nothing orders them with a later commit to this CTA."""
    lane = lead(mask)
    cta, offset = target(warp, address(warp, instr.operands[0], lane), 8, 8)
    if "multicast::cluster" in instr.mods:
        bits = value(warp, instr.operands[1], lane) & 0xFFFF
        ctas = [c for c in cta.cluster.ctas if bits >> c.rank & 1]
        need(
            bits >> len(cta.cluster.ctas) == 0,
            f"the CTA mask {bits:#x} names CTAs beyond the cluster",
        )
    else:
        ctas = [cta]
    for dest in ctas:
        barrier_at(dest, offset, warp)
    pipe = pipe_of(sim, warp, lane)
    releases, pipe.uncommitted = pipe.uncommitted, []

    def arrive(dest: Any) -> None:
        target(warp, dest.rank << 24 | offset, 8, 8)
        barrier = barrier_at(dest, offset)
        barrier.reach("a commit")
        barrier.arrive()

    def run() -> None:
        for release in releases:
            release()
        for dest in ctas:
            if dest is cta or not sim.policy.random:
                arrive(dest)
            else:  # on its own way: in order with other arrivals there, with nothing elsewhere
                way = ("tc", pipe.number, dest.rank)
                later = AsyncOp("tensor", partial(arrive, dest), (warp, instr), way, "arrival")
                later.clock = op.clock
                sim.async_ops.add_after(later, partial(may_arrive, dest))

    def may_arrive(dest: Any) -> bool:
        far = sim.policy.far(len(cta.cluster.ctas))
        return dest.rank != far or dest.warps_left == 0 or sim.scheduler.idle

    op = AsyncOp("tensor", run, (warp, instr), pipe=("tc", pipe.number), label="commit")
    sim.async_ops.add(op)


def copy(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """tcgen05.cp: a shared-memory matrix into TMEM, of this CTA or (cta_group::2) of both CTAs,
    each from its own."""
    if any(m.startswith(("b8x16", "b6x16", "b4x16")) for m in instr.mods):
        raise UnsupportedInstruction(f"decompressing copy {instr.opcode} is not modelled")
    lane = lead(mask)
    taddr, raw = value(warp, instr.operands[0], lane), value(warp, instr.operands[1], lane)
    shape = next((m for m in instr.mods if m in _COPIES), None)
    if shape is None:
        raise UnsupportedInstruction(f"unknown copy shape in {instr.opcode}")
    rows, chunks_per_row, lane_maps = _COPIES[shape]
    if shape == "64x128b":
        lane_maps = _WARPX2["warpx2::01_23" if "warpx2::01_23" in instr.mods else "warpx2::02_13"]
    desc = SmemDescriptor.decode(raw)
    first_lane, column = split(taddr)
    need(first_lane == 0, f"tcgen05.cp needs TMEM lane 0, got {first_lane}")
    chunks = desc.rows(rows, chunks_per_row)
    pipe = pipe_of(sim, warp, lane)
    stamp = pipe.stamp()
    area = Region(0, LANES if shape != "4x256b" else 97, column, 4 * chunks_per_row)
    bytes_ = ByteSet(chunks=chunks)
    ctas = pair(warp.cta, group_of(instr))
    for cta in ctas:
        need(
            int(chunks.max()) * 16 + 16 <= cta.shared.size,
            "the descriptor of tcgen05.cp leaves shared memory",
        )
        check_async_access(sim, cta, bytes_, "tcgen05.cp", False)
        cta.tmem.check_write(area, "tcgen05.cp", sim.checks, pipe.number, warp)
        bytes_.add(cta.shared.async_reads, 1)
        cta.tmem.mark(area, True, stamp)

    def run() -> None:
        for cta in ctas:
            check_initialised(sim, cta, bytes_, "tcgen05.cp")
            cells = bytes_.get(cta.shared.data).reshape(rows, 16 * chunks_per_row).view(np.uint32)
            for lanes, source in lane_maps:
                cta.tmem.data[lanes, column : column + 4 * chunks_per_row] = cells[source]
                cta.tmem.written[lanes, column : column + 4 * chunks_per_row] = True

    def release() -> None:
        for cta in ctas:
            bytes_.add(cta.shared.async_reads, -1)
            cta.tmem.unmark(area, True, stamp)

    pipe.uncommitted.append(release)
    sim.counters.add(warp, "tmem_copy_bytes", 16 * chunks.size * len(ctas))
    sim.async_ops.add(AsyncOp("tensor", run, (warp, instr), pipe=("tc", pipe.number), label="cp"))


def _span(first: int, count: int) -> np.ndarray:
    return np.arange(first, first + count)


# shape -> (rows, 16-byte chunks per row, [(TMEM lanes, rows that go there), ...])
_COPIES: dict[str, tuple[int, int, list[tuple[np.ndarray, np.ndarray]]]] = {
    "128x256b": (128, 2, [(_span(0, 128), _span(0, 128))]),
    "128x128b": (128, 1, [(_span(0, 128), _span(0, 128))]),
    "4x256b": (4, 2, [(32 * _span(0, 4), _span(0, 4))]),
    "64x128b": (64, 1, []),
    "32x128b": (32, 1, [(_span(32 * w, 32), _span(0, 32)) for w in range(4)]),
}
_WARPX2 = {
    "warpx2::02_13": [(_span(32 * w, 32), _span(32 * (w % 2), 32)) for w in range(4)],
    "warpx2::01_23": [(_span(32 * w, 32), _span(32 * (w // 2), 32)) for w in range(4)],
}


def order_fence(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """tcgen05.fence::{before,after}_thread_sync: the machine is sequential, so they only mark what
    `Checks.tcgen05_fence` asks for."""
    agent = warp.agent
    if "fence::after_thread_sync" in instr.mods:
        agent.tmem_known = agent.clock.known.copy()
        return
    for tmem, area in agent.tmem_unfenced:
        done = tmem.read_done[area.index]
        done[done == UNFENCED] = warp.cta.launch.epoch
    agent.tmem_unfenced = []


def unsupported(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    raise UnsupportedInstruction(f"{instr.opcode} is not modelled")


HANDLERS = {
    "tcgen05.alloc": alloc,
    "tcgen05.dealloc": dealloc,
    "tcgen05.relinquish_alloc_permit": relinquish,
    "tcgen05.ld": load,
    "tcgen05.st": store,
    "tcgen05.wait::ld": wait,
    "tcgen05.wait::st": wait,
    "tcgen05.commit": commit,
    "tcgen05.cp": copy,
    "tcgen05.fence::before_thread_sync": order_fence,
    "tcgen05.fence::after_thread_sync": order_fence,
    "tcgen05.shift": unsupported,
}
