"""Programmatic dependent launch: what a launch may see of the one before it.

A launch with the programmatic attribute may start once every CTA of its predecessor has executed
griddepcontrol.launch_dependents; what the predecessor writes is certain to be visible only behind
griddepcontrol.wait. Launches run one after the other here, so the lateness is made by hand: the
second launch begins with the memory as it was before the first one. Its first griddepcontrol.wait
starts an asynchronous operation, the end of the first launch, at which that one's writes appear;
every griddepcontrol.wait blocks until then, in some schedules as long as anything else can happen.
A warp that neither waits nor synchronises with one that has waited reads old bytes, and what it
writes there is overwritten. Of a launch that never waits nothing says that it ends after its
predecessor, so that the next one, which waits for it alone, does not see what that one wrote.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_kernels.sim.asyncops import AsyncOp
from cute_kernels.sim.checks import OutOfBounds
from cute_kernels.sim.wait import Blocked, Signal

_LOWEST, _HIGHEST = 1 << 32, 1 << 47  # addresses of a 64-bit process
_Bytes = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
MOST_BYTES = 1 << 28  # larger predecessors are not kept: their writes are visible at once


class Overlap:
    """One per Simulator. Order of calls per launch: `begin`, (`wait`, ...), `end`."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        # (view of an allocation, its contents before and after the last launch)
        self._old: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._next: list[tuple[np.ndarray, np.ndarray]] = []
        # (view, offsets, bytes the predecessor wrote there, bytes before)
        self._hidden: list[_Bytes] = []
        self._unordered: list[_Bytes] = []  # written before a launch that did not wait for it
        self._ending = False  # the operation that reveals them is in flight
        self._revealed = Signal()

    def begin(self, instrs: list[Any], params: bytes, late: bool) -> None:
        """Before a launch. `late`: it has the programmatic attribute, and the schedule says that
        what its predecessor wrote comes late."""
        triggers = any(i.base == "griddepcontrol" and "launch_dependents" in i.mods for i in instrs)
        self._next = self._snapshot(params) if triggers else []
        if late:
            self._hide_again()
            self._hide()
        else:
            self._unordered = []
        self._old = []

    def wait(self, sim: Any, warp: Any, instr: Any) -> Blocked | None:
        """griddepcontrol.wait of a warp: None when the predecessor is complete."""
        if not self._hidden:
            return None
        if not self._ending:
            self._ending = True
            op = AsyncOp("grid", self.reveal, (warp, instr), label="end of the launch before")
            sim.async_ops.add_after(op, lambda: not sim.policy.late or sim.scheduler.idle)
        return Blocked(
            lambda: not self._hidden, "griddepcontrol.wait: the launch before", self._revealed
        )

    def reveal(self) -> None:
        """The predecessor is complete: its writes appear, also over what others wrote since."""
        _write(self._hidden)
        self._hidden, self._ending = [], False
        self._revealed.notify()

    def end(self) -> None:
        """After a launch. The host sees everything."""
        _write(self._unordered)
        self._unordered = self._unordered + self._hidden if self._hidden else []
        self.reveal()
        self._old = [(view, before, view.copy()) for view, before in self._next]
        self._next = []

    def _hide_again(self) -> None:
        """What came before a launch that did not wait, where nothing has changed it since."""
        again, self._unordered = self._unordered, []
        for view, where, new, old in again:
            if self._memory.search(view.ctypes.data, len(view)):
                same = view[where] == new
                self._unordered.append((view, where[same], new[same], old[same]))

    def _hide(self) -> None:
        if self._old:
            self._memory.refresh()
        for view, before, after in self._old:
            # freed since, or written by the host: not the predecessor's work any more
            address = view.ctypes.data
            if not self._memory.search(address, len(view)) or not np.array_equal(view, after):
                continue
            where = np.flatnonzero(view != before)
            if len(where):
                self._hidden.append((view, where, view[where].copy(), before[where]))
                view[where] = before[where]
        for view, where, _, old in self._unordered:
            view[where] = old

    def _snapshot(self, params: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
        """Copies of the allocations that the parameters point into, tensor maps included."""
        words = np.frombuffer(params[: len(params) // 8 * 8], np.uint64)
        found: dict[int, int] = {}
        addresses = {w for w in map(int, words) if _LOWEST <= w < _HIGHEST}
        self._memory.look_for(addresses)
        for word in addresses:
            if self._memory.contains(word, 1):
                try:
                    first, end = self._memory.range_of(word, 1)
                except OutOfBounds:
                    continue
                found[first] = end - first
        if sum(found.values()) > MOST_BYTES:
            return []
        views = [self._memory.find(first, size) for first, size in found.items()]
        return [(view, view.copy()) for view in views]


def _write(hidden: list[_Bytes]) -> None:
    for view, where, new, _ in hidden:
        view[where] = new
