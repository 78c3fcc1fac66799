"""Asynchronous operations between issue and completion."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any


@dataclass
class AsyncOp:
    """One asynchronous operation between issue and completion.

    `agent` names the unit for traces; ops with the same `pipe` complete in order, those without
    one in any order.
    `run` performs the effect and the completion. `origin` is (warp, instr) for error messages.
    """

    agent: str
    run: Callable[[], None]
    origin: tuple[Any, Any]
    pipe: Hashable | None = None
    label: str = ""
    order: int = 0
    issued: int = 0
    clock: Any = None  # what the issuing warp knew (clocks)


class AsyncOps:
    """All operations in flight."""

    def __init__(self, trace: Any = None) -> None:
        self.trace = trace
        self.free: list[AsyncOp] = []
        self.pipes: dict[Hashable, deque[AsyncOp]] = {}
        self.later: list[tuple[AsyncOp, Callable[[], bool]]] = []
        self._count = 0

    def add(self, op: AsyncOp) -> None:
        self._stamp(op)
        op.order = self._count
        self._count += 1
        if self.trace is not None:
            self.trace.issue(op)
        if op.pipe is None:
            self.free.append(op)
        else:
            self.pipes.setdefault(op.pipe, deque()).append(op)

    @staticmethod
    def _stamp(op: AsyncOp) -> None:
        warp = op.origin[0]
        if op.clock is None and getattr(warp, "agent", None) is not None:
            op.clock = warp.agent.clock.stamp(warp.cta.launch.epoch)

    def add_after(self, op: AsyncOp, ready: Callable[[], bool]) -> None:
        """Adds an operation that may complete only once `ready()`."""
        self._stamp(op)
        if ready():
            self.add(op)
        else:
            self.later.append((op, ready))

    def _promote(self) -> None:
        ready = [op for op, test in self.later if test()]
        if ready:
            self.later = [(op, test) for op, test in self.later if all(op is not r for r in ready)]
            for op in ready:
                self.add(op)

    def __len__(self) -> int:
        return len(self.free) + sum(map(len, self.pipes.values())) + len(self.later)

    def oldest(self) -> AsyncOp | None:
        """Removes and returns the operation issued first."""
        if self.later:
            self._promote()
        best = self.free[0] if self.free else None
        key = None
        for pipe, queue in self.pipes.items():
            if best is None or queue[0].order < best.order:
                best, key = queue[0], pipe
        if best is None:
            return None
        if best.pipe is None:
            self.free.pop(0)
        else:
            self._pop(key)
        return best

    def pick(self, rng: random.Random) -> AsyncOp | None:
        """Removes and returns any operation that may complete next."""
        if self.later:
            self._promote()
        total = len(self.free) + len(self.pipes)
        if not total:
            return None
        at = rng.randrange(total)
        if at < len(self.free):
            self.free[at], self.free[-1] = self.free[-1], self.free[at]
            return self.free.pop()
        key = list(self.pipes)[at - len(self.free)]
        op = self.pipes[key][0]
        self._pop(key)
        return op

    def _pop(self, key: Hashable) -> None:
        queue = self.pipes[key]
        queue.popleft()
        if not queue:
            del self.pipes[key]

    def pending(self) -> list[AsyncOp]:
        queued = [op for q in self.pipes.values() for op in q]
        return sorted([*self.free, *queued, *(op for op, _ in self.later)], key=lambda o: o.order)
