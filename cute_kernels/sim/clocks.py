"""What happened before what among the warps of a cluster, whatever the schedule: vector clocks.

Every warp has a slot. Time is the epoch of the launch, which grows with every host instruction.
`known[s]` of a warp is the epoch up to which the actions of slot s happened before what the warp
does now; it learns from the barriers it waits for, and a barrier from those who arrive at it. An
asynchronous operation carries what its issuer knew.

So "the initialisation of this mbarrier" or "the tcgen05.ld of these cells" is ordered before a use
only if a chain of arrivals and waits leads from one to the other: being earlier in the schedule
that happened to run is not enough.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_ITSELF = 1 << 60  # a warp knows all of its own past


class Clock:
    """The knowledge of one warp, which has `slot` among the `size` warps of its cluster."""

    def __init__(self, size: int, slot: int) -> None:
        self.slot = slot
        self.known = np.full(size, -1, np.int64)
        self.known[slot] = _ITSELF

    def stamp(self, epoch: int) -> np.ndarray:
        """What others learn from this warp at `epoch`."""
        stamp = self.known.copy()
        stamp[self.slot] = epoch
        return stamp

    def learn(self, stamp: np.ndarray | None) -> None:
        """A wait is over: what the barrier knew is known now."""
        if stamp is not None:
            own = self.known[self.slot]
            np.maximum(self.known, stamp, out=self.known)
            self.known[self.slot] = own

    def knows(self, slot: int, epoch: int) -> bool:
        """Did what slot `slot` did at `epoch` happen before?"""
        return bool(self.known[slot] >= epoch)


class Memory:
    """What a barrier has learned: `seen` so far, `done` when its last phase ended."""

    __slots__ = ("done", "seen")

    def __init__(self) -> None:
        self.seen: np.ndarray | None = None
        self.done: np.ndarray | None = None

    def arrive(self, launch: Any) -> None:
        """Somebody arrives: the warp at a host instruction, or an operation that completes."""
        actor = getattr(launch, "actor", None)
        if actor is None:
            return
        stamp = actor.stamp(launch.epoch) if isinstance(actor, Clock) else actor
        self.seen = stamp if self.seen is None else np.maximum(self.seen, stamp)

    def advance(self) -> None:
        self.done = self.seen
