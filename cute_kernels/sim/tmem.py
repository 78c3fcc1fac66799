"""Tensor memory of one CTA: 128 lanes x 512 columns of 32 bits, its allocator and its hazards.

Every cell knows whether it was written, which tcgen05 pipe may still write or read it
(`busy_write`, `busy_read`: marks
of operations that no completed commit covers), and how many tcgen05.ld of it have been issued and
not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .checks import Checks, TmemError, TmemLeak, TmemRace, UninitialisedRead
from .wait import Signal

LANES, COLUMNS = 128, 512
UNFENCED = 1 << 59  # a load is over, and no tcgen05.fence::before_thread_sync has followed
PIPE_BITS = 12  # a busy mark is sequence << PIPE_BITS | pipe


@dataclass(frozen=True)
class Region:
    """Rectangle of cells: lanes [lane, lane + lanes), columns [column, column + columns)."""

    lane: int
    lanes: int
    column: int
    columns: int

    @property
    def index(self) -> tuple[slice, slice]:
        return slice(self.lane, self.lane + self.lanes), slice(
            self.column, self.column + self.columns
        )

    def __str__(self) -> str:
        return (
            f"lanes {self.lane}..{self.lane + self.lanes - 1}, columns "
            f"{self.column}..{self.column + self.columns - 1}"
        )


@dataclass
class Allocation:
    """`columns` columns from `column` on; `claimed` once a warp of this CTA has executed the alloc
    itself."""

    column: int
    columns: int
    group: int
    claimed: bool


def split(addr: int) -> tuple[int, int]:
    """(lane, column) of a TMEM address; bits 30-31 carry a scale id in some uses and are
    dropped."""
    return (addr >> 16) & 0x3FFF, addr & 0xFFFF


class Tmem:
    """See the module text. `data` is uint32 (lanes, columns)."""

    def __init__(self, cta: Any) -> None:
        self.cta = cta
        self.data = np.full((LANES, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.written = np.zeros((LANES, COLUMNS), bool)
        self.busy_write = np.zeros((LANES, COLUMNS), np.int64)
        self.busy_read = np.zeros((LANES, COLUMNS), np.int64)
        self.loads = np.zeros((LANES, COLUMNS), np.uint8)
        # epoch at which the last tcgen05.ld of a cell was over, and the clock slot of its warp
        self.read_done = np.full((LANES, COLUMNS), -1, np.int64)
        self.reader = np.full((LANES, COLUMNS), -1, np.int16)
        self.readers: dict[int, int] = {}  # slot -> warp
        # epoch at which the last MMA or copy into a cell was issued, and the slot of its warp
        self.written_at = np.full((LANES, COLUMNS), -1, np.int64)
        self.writer = np.zeros((LANES, COLUMNS), np.int16)
        self.owned = np.zeros(COLUMNS, bool)
        self.allocations: list[Allocation] = []
        self.relinquished = False
        self.freed = Signal()
        self.peak = 0

    # ---- allocation ------------------------------------------------------------------------------

    def take(self, column: int, columns: int, group: int, claimed: bool) -> None:
        self.owned[column : column + columns] = True
        self.allocations.append(Allocation(column, columns, group, claimed))
        self.peak = max(self.peak, int(self.owned.sum()))

    def finish_load(self, area: Region, warp: Any) -> None:
        """A tcgen05.ld of this warp is over: its registers were used, or waited for."""
        self.loads[area.index] -= 1
        self.read_done[area.index] = warp.cta.launch.epoch
        if warp.cta.launch.sim.checks.tcgen05_fence:
            self.read_done[area.index] = UNFENCED
            warp.agent.tmem_unfenced.append((self, area))
        self.reader[area.index] = warp.agent.clock.slot
        self.readers |= {warp.agent.clock.slot: warp.warp_id}

    def issued(self, area: Region, warp: Any) -> None:
        """`warp` has issued an operation that will write the cells."""
        self.written_at[area.index] = warp.cta.launch.epoch
        self.writer[area.index] = warp.agent.clock.slot

    def check_fenced(self, area: Region, what: str, warp: Any) -> None:
        """A load by `warp`: it has fenced behind the wait that orders what others wrote."""
        known = self._known(warp)
        if (self.written_at[area.index] > known[self.writer[area.index]]).any():
            raise TmemRace(
                f"{what} reads {area}, which another warp wrote: tcgen05.fence::after_thread_sync "
                "is missing behind the wait for it"
            )

    @staticmethod
    def _known(warp: Any) -> np.ndarray:
        """What the warp knew at its last tcgen05.fence::after_thread_sync."""
        clock = warp.agent.clock
        known = np.full_like(clock.known, -1)
        if warp.agent.tmem_known is not None:
            known = warp.agent.tmem_known.copy()
        known[clock.slot] = clock.known[clock.slot]
        return known

    def check_ordered(self, area: Region, what: str, warp: Any) -> None:
        """A write by `warp`: whoever read the cells has told it so afterwards, through barriers."""
        if not self.readers:
            return
        heard = warp.agent.clock.known
        known = self._known(warp) if warp.cta.launch.sim.checks.tcgen05_fence else heard
        done, reader = self.read_done[area.index], self.reader[area.index]
        late = done > known[reader]
        if not late.any():
            return
        number = self.readers[int(reader[tuple(np.argwhere(late)[0])])]
        which = f"{what} overwrites or frees {area}, which a tcgen05.ld of warp {number}"
        if not (done > heard[reader]).any():
            raise TmemRace(
                f"{which} has read: tcgen05.fence::after_thread_sync is missing behind the wait "
                "for it"
            )
        if (done == UNFENCED).any():
            raise TmemRace(
                f"{which} has read: tcgen05.fence::before_thread_sync is missing before its signal"
            )
        raise TmemRace(
            f"{which} may still read: that warp signalled before its load was over "
            "(tcgen05.wait::ld is missing before the release), or the release is missing"
        )

    def release(self, column: int, allocated: tuple[int, int], checks: Checks, warp: Any) -> None:
        """dealloc of `allocated` = (columns, cta_group).

        Raises:
            TmemError: no such allocation, or TmemRace if the columns are still in use.
        """
        columns, group = allocated
        found = next((a for a in self.allocations if a.column == column and a.claimed), None)
        if found is None:
            raise TmemError(f"dealloc of column {column}, which starts no allocation\n  {self}")
        if found.columns != columns or found.group != group:
            raise TmemError(
                f"dealloc of {columns} columns with cta_group::{group} where {found.columns} were "
                f"allocated with cta_group::{found.group}"
            )
        area = Region(0, LANES, column, columns)
        if checks.tmem_pending_load and self.loads[area.index].any():
            raise TmemRace(
                f"dealloc of {area} under a tcgen05.ld that was not waited for (tcgen05.wait::ld "
                "is missing)"
            )
        if checks.tmem_race and (
            self.busy_write[area.index].any() or self.busy_read[area.index].any()
        ):
            raise TmemRace(
                f"dealloc of {area} while an MMA or copy that no completed commit covers may still "
                "use it"
            )
        if checks.tmem_pending_load:
            self.check_ordered(area, "dealloc", warp)
        self.allocations.remove(found)
        self.owned[column : column + columns] = False
        self.written[area.index] = False
        self.data[area.index] = 0xFFFFFFFF
        self.freed.notify()

    def end(self, checks: Checks) -> None:
        """The CTA ends: everything must have been given back."""
        if self.allocations and checks.tmem_leak:
            raise TmemLeak(
                f"the CTA ends with TMEM still allocated (tcgen05.dealloc is missing): {self}"
            )

    def __str__(self) -> str:
        held = ", ".join(f"[{a.column}, {a.column + a.columns})" for a in self.allocations)
        return f"TMEM columns allocated: {held or 'none'}"

    # ---- access ----------------------------------------------------------------------------------

    def check_allocated(self, area: Region, what: str) -> None:
        if area.lane + area.lanes > LANES or area.column + area.columns > COLUMNS:
            raise TmemError(f"{what} touches {area}, beyond {LANES} lanes x {COLUMNS} columns")
        if not self.owned[area.column : area.column + area.columns].all():
            raise TmemError(
                f"{what} touches {area} outside every allocation of cluster rank {self.cta.rank}\n "
                f" {self}"
            )

    def check_read(self, area: Region, what: str, checks: Checks, pipe: int = 0) -> None:
        """A read at its issue, by tcgen05 pipe `pipe` (0: a warp)."""
        self.check_allocated(area, what)
        if checks.tmem_race:
            busy = self.busy_write[area.index]
            if busy.any() and ((busy != 0) & (busy & ((1 << PIPE_BITS) - 1) != pipe)).any():
                raise TmemRace(
                    f"{what} reads {area} while an MMA or copy may be writing it: nothing waited "
                    "for a commit of that operation"
                )

    def check_written(self, area: Region, what: str, checks: Checks) -> None:
        if checks.uninitialised and not self.written[area.index].all():
            lane, column = np.argwhere(~self.written[area.index])[0]
            raise UninitialisedRead(
                f"{what} reads TMEM lane {area.lane + lane}, column {area.column + column}, which "
                "was never written"
            )

    def check_write(
        self, area: Region, what: str, checks: Checks, pipe: int = 0, warp: Any = None
    ) -> None:
        """A write at its issue, by tcgen05 pipe `pipe` of `warp` (0: the warp itself)."""
        self.check_allocated(area, what)
        if checks.tmem_pending_load and self.loads[area.index].any():
            raise TmemRace(
                f"{what} overwrites {area} under a tcgen05.ld that was not waited for: "
                "tcgen05.wait::ld is missing before the release, "
                "or the release itself is"
            )
        if checks.tmem_pending_load and warp is not None:
            self.check_ordered(area, what, warp)
        if checks.tmem_race:
            for busy in (self.busy_write[area.index], self.busy_read[area.index]):
                if busy.any() and ((busy != 0) & (busy & ((1 << PIPE_BITS) - 1) != pipe)).any():
                    raise TmemRace(
                        f"{what} overwrites {area} while an MMA or copy that nothing waited for "
                        "may use it"
                    )

    def mark(self, area: Region, write: bool, stamp: int) -> None:
        """Notes an operation in flight; `stamp` is sequence << PIPE_BITS | pipe."""
        (self.busy_write if write else self.busy_read)[area.index] = stamp

    def unmark(self, area: Region, write: bool, stamp: int) -> None:
        """The operation `stamp` has completed; later marks of its pipe stay."""
        busy = (self.busy_write if write else self.busy_read)[area.index]
        pipe = stamp & ((1 << PIPE_BITS) - 1)
        busy[(busy <= stamp) & (busy & ((1 << PIPE_BITS) - 1) == pipe)] = 0
