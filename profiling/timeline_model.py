"""Timelines of our SM100 kernel in modelled clocks of a B200.

The event stream of a simulated launch is replayed under the constants of
`profiling.model_constants` as `profiling.replay` does it for forecasts; here every step leaves a
slice. All SMs are taken to be busy: a CTA gets its share of the fabric between L2 and SMs. A
forecast, not a measurement.
"""

from __future__ import annotations

from typing import Any

from cute_kernels import compile as compiler
from profiling.events import Arrival, Op, Recorder, Stream
from profiling.model_constants import Machine
from profiling.replay import _Replay, mma_clocks
from profiling.timeline import Slice, Timeline
from profiling.timeline_sim import Specimen, barrier_name, prepare, roles, title_of

ROWS = {"load": "tma", "store": "store", "cp": "cp", "mma": "tensor", "commit": "commit",
        "cp.async": "tma"}  # fmt: skip


class NamedRecorder(Recorder):
    """Keeps where each numbered barrier lies: (CTA, offset in shared memory), or a named barrier
    at a negative offset."""

    def __init__(self, simulator: Any) -> None:
        super().__init__(simulator)
        self.where: dict[int, tuple[int, int]] = {}

    def _barrier(self, cta: Any, key: int) -> int:
        number = super()._barrier(cta, key)
        self.where[number] = (self._cta(cta), key)
        return number


class DrawnReplay(_Replay):
    """A replay that leaves a slice per stretch of instructions, wait and asynchronous operation."""

    def __init__(
        self, stream: Stream, machine: Machine, rate: float, names: dict[int, str],
        rows: dict[int, str],
    ) -> None:  # fmt: skip
        super().__init__(stream, machine, rate, machine.clk(machine.l2_latency))
        self.names, self.rows = names, rows
        self.slices: list[Slice] = []
        self._issuing: tuple[int, Op, float] | None = None

    def _add(self, i: int, kind: str, name: str, start: float, end: float, row: str = "") -> None:
        if end > start:
            cta, warp = self.stream.places[i]
            self.slices.append(
                Slice(
                    cta, row or self.rows.get(warp, f"warp {warp}"), kind, name, start, end - start
                )
            )

    def _step(self, i: int, time: float) -> None:
        warp = self.warps[i]
        event = warp.events[warp.at]
        self._add(i, "run", "run", warp.time, time)
        super()._step(i, time)
        if event.kind == "ld":
            self._add(i, "run", "tmem load", time, warp.time)
        elif event.kind == "wait_group":
            self._add(i, "wait", "bulk group", time, warp.time)

    def _resume(self, i: int, key: tuple[int, int], hop: float) -> None:
        start = self.warps[i].time
        super()._resume(i, key, hop)
        number = key[0]
        name = "cluster" if number <= -(10**6) else self.names.get(number, "bar")
        self._add(i, "wait", name, start, self.warps[i].time)

    def _issue(self, i: int, op: Op) -> None:
        self._issuing = (i, op, self.warps[i].time)
        super()._issue(i, op)
        self._issuing = None

    def _arrive(self, arrivals: list[Arrival], time: float) -> None:
        if self._issuing is not None:
            (i, op, start), self._issuing = self._issuing, None
            if op.unit == "mma":  # when it occupies the pipe, not since it was issued
                start = time - mma_clocks(op, self.m)
            elif op.unit == "cp":
                start = time - self.m.scale_copy * op.size / 512
            self._add(i, "async", op.unit, start, time, ROWS.get(op.unit, "items"))
        super()._arrive(arrivals, time)


def modelled(specimen: Specimen, machine: Machine | None = None) -> Timeline:
    """One simulated run, replayed; ``machine`` None: the constants as they stand in the table."""
    from cute_kernels import sim

    compiler.enable_simulator()
    kernel, launch = prepare(specimen)
    with sim.Simulator(schedule="lazy", resident=specimen.clusters) as s:
        recorder = NamedRecorder(s)
        launch()
    stream = recorder.finish()[-1]
    machine = machine or Machine()
    rate = machine.share(machine.usable_sms(stream.cluster))
    first = min((key for _, key in recorder.where.values() if key >= 0), default=0)
    names = {
        number: barrier_name(kernel, (key - first) // 8)
        for number, (_, key) in recorder.where.items()
        if key >= 0
    }
    replay = DrawnReplay(stream, machine, rate, names, roles(kernel))
    replay.run()
    return Timeline(title_of(specimen, kernel), "clk", tuple(replay.slices))
