"""Blocking: what a handler returns when it cannot go on, and the signals that wake it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


class Signal:
    """Something that blocked warps wait for."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Parked] = []

    def notify(self) -> None:
        """Wakes every waiter whose predicate holds now."""
        if self.waiting:
            old, self.waiting = self.waiting, []
            self.waiting += [entry for entry in old if not entry.recheck()]


@dataclass
class Blocked:
    """Result of a handler that cannot proceed: executed again once `predicate()` holds.

    `signal` is notified whenever the predicate may have changed; without one it is polled.
    `timeout` marks a try_wait:
    when the whole machine is stuck, it may give up and return false, as the hardware's does after
    its time limit.
    """

    predicate: Callable[[], bool]
    why: str
    signal: Signal | None = None
    timeout: bool = False


@dataclass(eq=False)
class Parked:
    """Lanes of a warp that wait; `instr` is the instruction they will execute again."""

    warp: Any
    mask: np.ndarray
    instr: Any
    blocked: Blocked
    wake: Callable[[Parked], None]

    def recheck(self) -> bool:
        """Wakes the lanes if they can go on; True if so."""
        if not self.blocked.predicate():
            return False
        self.wake(self)
        return True
