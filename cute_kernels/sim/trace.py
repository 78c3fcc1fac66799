"""Timeline of a launch as Chrome trace JSON (chrome://tracing, ui.perfetto.dev).

Time is the scheduler's clock: the warp instructions executed so far by all warps, plus one per
completed operation. It
orders events truly but says nothing about nanoseconds. One process per CTA; a thread per warp, and
one per agent
(tma, tensor, cp.async, clc) with a slice from issue to completion of every asynchronous operation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_AGENT_TIDS = {"tma": 1000, "tensor": 1100, "cp.async": 1200, "clc": 1300, "st.async": 1400}


class Trace:
    """Collects events; `save` writes them. `limit` bounds the number kept, later ones are counted
    in `dropped`."""

    def __init__(self, limit: int = 2_000_000) -> None:
        self.events: list[dict[str, Any]] = []
        self.clock = 0
        self.limit = limit
        self.dropped = 0
        self._pids: dict[tuple[str, tuple[int, ...]], int] = {}
        self._blocked: dict[tuple[int, int], tuple[int, str, str]] = {}
        self._lanes: dict[tuple[int, str], list[int]] = {}

    def tick(self, amount: int = 1) -> None:
        self.clock += amount

    def _pid(self, cta: Any) -> int:
        coords = tuple(int(c) for c in cta.coords)
        key = (str(getattr(cta.launch, "label", cta.launch.name)), coords)
        pid = self._pids.get(key)
        if pid is None:
            pid = self._pids[key] = len(self._pids) + 1
            self._meta("process_name", pid, 0, f"{key[0][:60]} cta {coords}")
            for warp in cta.warps:
                self._meta(
                    "thread_name",
                    pid,
                    warp.warp_id,
                    f"warp {warp.warp_id} {getattr(warp, 'name', '') or ''}".strip(),
                )
            for agent, tid in _AGENT_TIDS.items():
                self._meta("thread_name", pid, tid, agent)
        return pid

    def _meta(self, kind: str, pid: int, tid: int, name: str) -> None:
        self.events.append(
            {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        )

    def _add(self, event: dict[str, Any]) -> None:
        if len(self.events) < self.limit:
            self.events.append(event)
        else:
            self.dropped += 1

    def run(self, warp: Any, start: int, end: int) -> None:
        """A stretch of ordinary instructions."""
        if end > start:
            self._add(
                {
                    "name": "run",
                    "cat": "alu",
                    "ph": "X",
                    "ts": start,
                    "dur": end - start,
                    "pid": self._pid(warp.cta),
                    "tid": warp.warp_id,
                }
            )

    def host(self, warp: Any, instr: Any) -> None:
        """A synchronising or asynchronous instruction was executed."""
        self._add(
            {"name": ".".join((instr.base, *instr.mods[:2])), "cat": "host", "ph": "i", "s": "t",
            "ts": self.clock,
             "pid": self._pid(warp.cta), "tid": warp.warp_id, "args": {"line": instr.line,
             "text": instr.text[:160]}}
        )  # fmt: skip

    def arrival(self, barrier: Any) -> None:
        """Arrivals or bytes reach an mbarrier, in its phase ``barrier.generation``. The cause is
        the operation of the last `async_op`, or the warp of the last `run` if that came later."""

    def block(self, warp: Any, instr: Any, why: str) -> None:
        self._blocked.setdefault(
            (self._pid(warp.cta), warp.warp_id), (self.clock, f"wait {instr.base}", why)
        )

    def wake(self, warp: Any) -> None:
        key = (self._pid(warp.cta), warp.warp_id)
        start = self._blocked.pop(key, None)
        if start is not None:
            self._add(
                {"name": start[1], "cat": "wait", "ph": "X", "ts": start[0], "dur": max(1,
                self.clock - start[0]), "pid": key[0],
                 "tid": key[1], "args": {"for": start[2]}}
            )  # fmt: skip

    def issue(self, op: Any) -> None:
        op.issued = self.clock

    def async_op(self, op: Any) -> None:
        """An operation completes now."""
        self.clock += 1
        warp, instr = op.origin
        pid = self._pid(warp.cta)
        tid = self._lane(pid, op.agent, op.issued)
        self._add(
            {"name": op.label or op.agent, "cat": "async", "ph": "X", "ts": op.issued,
            "dur": max(1, self.clock - op.issued), "pid": pid,
             "tid": tid, "args": {"warp": warp.warp_id, "line": instr.line,
             "text": instr.text[:160]}}
        )  # fmt: skip

    def _lane(self, pid: int, agent: str, start: int) -> int:
        """Overlapping operations of one agent go to separate rows: slices of a row must nest."""
        ends = self._lanes.setdefault((pid, agent), [])
        for i, end in enumerate(ends):
            if end <= start:
                ends[i] = self.clock
                return _AGENT_TIDS.get(agent, 1900) + i
        if len(ends) < 90:
            ends.append(self.clock)
        return _AGENT_TIDS.get(agent, 1900) + len(ends) - 1

    def as_json(self) -> dict[str, Any]:
        return {
            "traceEvents": self.events,
            "displayTimeUnit": "ns",
            "otherData": {"dropped": self.dropped},
        }

    def save(self, path: str | Path) -> None:
        """Writes the JSON file."""
        Path(path).write_text(json.dumps(self.as_json()))
