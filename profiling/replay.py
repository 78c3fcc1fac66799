"""Replays the event stream of one cluster under the constants of a `Machine`, event by event.

    replay(stream, machine, rate) -> Timing

Every warp goes through its events in order. Ordinary instructions take ``issue`` clocks each; a
wait ends when the arrivals that complete its phase have happened; tensor copies queue for the issue
unit of their CTA and for the cluster's share of the fabric, ``rate`` bytes per clock and SM, then
take the L2 latency; MMAs and scale copies queue for the tensor pipe of the warp that issues them.
Stored bytes use the same share, ``store_weight`` times. A box that the other CTA of a TPC has in
flight is not loaded again. The result is in clocks.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from profiling.events import Arrival, Event, Op, Stream
from profiling.model_constants import Machine


@dataclass(frozen=True)
class Timing:
    """Clocks of a replay.

    end       when the last warp exits
    mma_ends  end of each MMA of the first issuing warp, in order
    mma_busy  clocks that its tensor pipe worked
    fabric    bytes that crossed the fabric, stores weighted
    """

    end: float
    mma_ends: tuple[float, ...]
    mma_busy: float
    fabric: float

    def tile_ends(self, tiles: int) -> list[float]:
        """End of the last MMA of each of ``tiles`` equal tiles. Raises ValueError when the MMAs do
        not divide into them."""
        count = len(self.mma_ends)
        if count == 0 or count % tiles:
            raise ValueError(f"{count} MMAs are no {tiles} equal tiles")
        return [self.mma_ends[count * (i + 1) // tiles - 1] for i in range(tiles)]


_BLOCK = 64  # instructions of a block that processes what a tcgen05.ld has read


@dataclass
class _Warp:
    events: list[Event]
    cta: int
    at: int = 0
    time: float = 0.0
    work: float = (
        0.0  # clocks that special functions keep the coming instructions from being faster
    )
    mma_free: float = 0.0
    cp_free: float = 0.0
    copied: float = 0.0  # the latest cp.async lands
    open: float = 0.0  # bulk stores since the last commit_group have been read by then
    groups: list[float] = field(default_factory=list)
    arrivals: int = 0  # cluster barrier phases


class _Replay:
    def __init__(self, stream: Stream, machine: Machine, rate: float, latency: float) -> None:
        self.stream, self.m, self.rate, self.latency = stream, machine, rate, latency
        self.warps = [
            _Warp(events, place[0])
            for events, place in zip(stream.warps, stream.places, strict=True)
        ]
        self.heap: list[tuple[float, int]] = []
        self.due: Counter[tuple[int, int]] = Counter()  # arrivals still to come, by phase
        self.ready: dict[
            tuple[int, int], float
        ] = {}  # completion time, or the latest arrival so far
        self.waiters: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        self.members: Counter[tuple[int, int]] = Counter()  # of named barriers, by phase
        self.tma_free: dict[int, float] = defaultdict(float)
        self.fabric_free: dict[int, float] = defaultdict(float)
        self.in_flight: dict[tuple[int, ...], tuple[float, int]] = {}
        self.crossed = 0.0
        self.mma_ends: dict[int, list[float]] = defaultdict(list)
        self.mma_busy: dict[int, float] = defaultdict(float)
        for warp in self.warps:
            for event in warp.events:
                if event.kind == "sync":
                    self.due[self._named(event)] += 1
                if event.kind == "cluster_arrive":
                    self.due[self._cluster(warp)] += 1
                    warp.arrivals += 1
                for barrier, phase, count in event.arrivals:
                    self.due[barrier, phase] += count
            warp.arrivals = 0
        for op in stream.ops:
            for barrier, phase, count in op.arrivals:
                self.due[barrier, phase] += count

    @staticmethod
    def _named(event: Event) -> tuple[int, int]:
        return -1 - event.args[0], event.args[1]

    def _cluster(self, warp: _Warp) -> tuple[int, int]:
        return -(10**6) - warp.cta // self.stream.cluster, warp.arrivals

    def run(self) -> Timing:
        for i in range(len(self.warps)):
            self._schedule(i)
        end = 0.0
        while self.heap:
            time, i = heapq.heappop(self.heap)
            self._step(i, time)
            end = max(end, time)
        first = min(self.mma_ends, default=0)
        return Timing(
            max(end, *self.fabric_free.values()) if self.fabric_free else end,
            tuple(self.mma_ends[first]),
            self.mma_busy[first],
            self.crossed,
        )

    def _schedule(self, i: int) -> None:
        """Puts the next event of warp i on the heap, after its ordinary instructions."""
        warp = self.warps[i]
        if warp.at < len(warp.events):
            instructions = warp.events[warp.at].instructions
            cost = instructions * self.m.issue
            if instructions >= _BLOCK:  # not the few that free the accumulator
                cost, warp.work = max(cost, warp.work), 0.0
            heapq.heappush(self.heap, (warp.time + cost, i))

    def _step(self, i: int, time: float) -> None:
        warp = self.warps[i]
        event = warp.events[warp.at]
        warp.at += 1
        warp.time = time
        if event.stored:
            self._cross(warp.cta, time, event.stored * self.m.store_weight)
        self._arrive(event.arrivals, time)
        for number in event.ops:
            self._issue(i, self.stream.ops[number])
        if event.kind == "wait":
            self._wait(i, (event.args[0], event.args[1]), self.m.hop)
            return
        if event.kind == "sync":
            key = self._named(event)
            self._arrive([(*key, 1)], time)
            self._wait(i, key, self.m.named_barrier)
            return
        if event.kind == "cluster_arrive":
            self._arrive([(*self._cluster(warp), 1)], time)
            warp.arrivals += 1
        elif event.kind == "cluster_wait":
            barrier, phase = self._cluster(warp)
            self._wait(i, (barrier, phase - 1), self.m.cluster_hop)
            return
        elif event.kind == "ld":
            warp.time += self.m.tmem_latency + event.args[0] / self.m.tmem_load
            warp.work += event.args[0] / 1024 * self.stream.mufu_per_kb * self.m.mufu
        elif event.kind == "commit_group":
            warp.groups.append(warp.open)
            warp.open = 0.0
        elif event.kind == "wait_group" and len(warp.groups) > event.args[0]:
            done = warp.groups[: len(warp.groups) - event.args[0]]
            warp.time = max(warp.time, *done)
        self._schedule(i)

    # ---- barriers

    def _arrive(self, arrivals: list[Arrival], time: float) -> None:
        for barrier, phase, count in arrivals:
            key = barrier, phase
            self.due[key] -= count
            self.ready[key] = max(self.ready.get(key, 0.0), time)
            if self.due[key] == 0:
                for i, hop in self.waiters.pop(key, ()):
                    self._resume(i, key, hop)

    def _wait(self, i: int, key: tuple[int, int], hop: float) -> None:
        if self.due[key] > 0:
            self.waiters[key].append((i, hop))
        else:
            self._resume(i, key, hop)

    def _resume(self, i: int, key: tuple[int, int], hop: float) -> None:
        warp = self.warps[i]
        warp.time = max(warp.time + self.m.wait, self.ready.get(key, 0.0) + hop)
        self._schedule(i)

    # ---- asynchronous operations

    def _cross(self, cta: int, time: float, size: float) -> float:
        """Time at which ``size`` bytes have crossed the share of the cluster, at least of a TPC."""
        ctas = max(self.stream.cluster, min(2, self.stream.ctas))  # a TPC has one port
        port = cta // ctas
        done = max(time, self.fabric_free[port]) + size / (self.rate * ctas)
        self.fabric_free[port] = done
        self.crossed += size
        return done

    def _issue(self, i: int, op: Op) -> None:
        warp = self.warps[i]
        time = warp.time
        if op.unit == "load":
            done = self._load(warp, op)
        elif op.unit == "store":
            sent = self.tma_free[warp.cta] = max(time, self.tma_free[warp.cta]) + self.m.tma_issue
            done = self._cross(warp.cta, sent, op.size * self.m.store_weight)
            warp.open = max(warp.open, done)
        elif op.unit == "mma":
            start = max(time, warp.mma_free, warp.cp_free)
            clocks = mma_clocks(op, self.m)
            done = warp.mma_free = start + clocks
            self.mma_ends[i].append(done)
            self.mma_busy[i] += clocks
        elif op.unit == "cp":
            done = warp.cp_free = max(time, warp.cp_free) + self.m.scale_copy * op.size / 512
        elif op.unit == "commit":
            pair = self.stream.cluster > 1
            tail = self.m.mma_latency_pair if pair else self.m.mma_latency
            done = max(time, warp.mma_free, warp.cp_free) + tail - self.m.hop
        elif op.unit == "cp.async":
            done = self._cross(warp.cta, time, op.size) + self.latency
            warp.copied = max(warp.copied, done)
        elif op.unit == "cp.arrive":
            done = max(time, warp.copied)
        else:  # st.async and the like
            done = time + self.m.cluster_hop
        self._arrive(op.arrivals, done)

    def _load(self, warp: _Warp, op: Op) -> float:
        issued = self.tma_free[warp.cta] = (
            max(warp.time, self.tma_free[warp.cta]) + self.m.tma_issue
        )
        box = (warp.cta // 2, *op.box)
        earlier, owner = self.in_flight.get(box, (0.0, warp.cta))
        if op.box and earlier > issued and owner != warp.cta:
            return earlier
        done = self._cross(warp.cta, issued, op.size) + self.latency
        self.in_flight[box] = done, warp.cta
        return done


def mma_clocks(op: Op, m: Machine) -> float:
    """Interval of one K64 MMA: max(N / 2, operand bytes of one SM / port). A pair splits B."""
    n, pair = op.size, op.copies
    return max(n / 2, (128 * 32 + n * 32 / pair) / m.smem_port)


def replay(stream: Stream, machine: Machine, rate: float, latency: float | None = None) -> Timing:
    """``rate`` fabric bytes per clock and SM; ``latency`` of a load in clocks, L2's by default."""
    if latency is None:
        latency = machine.clk(machine.l2_latency)
    return _Replay(stream, machine, rate, latency).run()
