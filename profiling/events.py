"""The event stream of a simulated launch: what each warp did, in order, and what waited for what.

A `Recorder` stands in for the simulator's trace and keeps, per warp, its synchronising and
asynchronous instructions with the number of ordinary instructions before each. A wait names the
barrier phase that it passed, an arrival the phase that it counts for: a timing model can replay the
stream under other latencies without executing the kernel again. Times are no part of it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cute_kernels.sim.access import address, lead, signed32, target, value
from cute_kernels.sim.trace import Trace

Arrival = tuple[int, int, int]  # barrier, phase, count


@dataclass
class Op:
    """One asynchronous operation.

    unit      load, store, mma, cp, commit, cp.async, cp.arrive
    size      bytes of global memory; for an MMA its N, for cp the bytes of one CTA
    copies    destination CTAs of a load, CTAs of an MMA
    box       identity of what a load reads, equal for equal boxes
    arrivals  what its completion signals
    """

    unit: str
    size: int = 0
    copies: int = 1
    box: tuple[int, ...] = ()
    arrivals: list[Arrival] = field(default_factory=list)


@dataclass
class Event:
    """One instruction of a warp that the interpreter hands to the host.

    instructions  ordinary warp instructions since the event before
    kind          wait, arrive, issue, ld, wait_ld, sync, join, cluster_arrive, cluster_wait,
                  commit_group, wait_group, other, exit
    args          wait: (barrier, phase); sync and join: (barrier, phase) of a named barrier;
                  ld: (bytes,); wait_group: (groups that may stay,)
    stored        bytes that the ordinary instructions wrote to global memory
    """

    instructions: int
    kind: str
    args: tuple[int, ...] = ()
    ops: list[int] = field(default_factory=list)
    arrivals: list[Arrival] = field(default_factory=list)
    stored: int = 0


@dataclass
class Stream:
    """One launch: ``warps[i]`` are the events of warp i, which is (CTA, warp id) ``places[i]``."""

    name: str = ""
    cluster: int = 1
    ctas: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    warps: list[list[Event]] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    totals: dict[str, int] = field(default_factory=dict)
    mufu_per_kb: float = 0.0  # special-function warp instructions per 1024 bytes of tcgen05.ld

    def save(self, path: str | Path) -> None:
        """Writes gzipped JSON."""
        Path(path).write_bytes(gzip.compress(json.dumps(asdict(self)).encode(), 1, mtime=0))

    @staticmethod
    def load(path: str | Path) -> Stream:
        """Reads what `save` wrote."""
        raw = json.loads(gzip.decompress(Path(path).read_bytes()))
        raw["ops"] = [Op(**op) for op in raw["ops"]]
        raw["warps"] = [[Event(**event) for event in warp] for warp in raw["warps"]]
        raw["places"] = [tuple(place) for place in raw["places"]]
        for op in raw["ops"]:
            op.box = tuple(op.box)
            op.arrivals = [tuple(a) for a in op.arrivals]
        for event in (event for warp in raw["warps"] for event in warp):
            event.args = tuple(event.args)
            event.arrivals = [tuple(a) for a in event.arrivals]
        return Stream(**raw)


_GROUP_OPS = {
    "cp.async.bulk.commit_group": "commit_group",
    "cp.async.bulk.wait_group": "wait_group",
}


class Recorder(Trace):
    """Records every launch of a simulator into ``streams``.

        with sim.Simulator(schedule="lazy") as s:
            recorder = Recorder(s)
            kernel(...)
        recorder.finish()[-1]                       # the `Stream` of the last launch

    The schedule must be lazy: copies then complete in one piece.
    """

    def __init__(self, simulator: Any) -> None:
        super().__init__()
        if simulator.schedule == "random":
            raise ValueError("record a lazy or eager schedule: a random one splits copies")
        self.simulator = simulator
        simulator.trace = self
        self.streams: list[Stream] = []
        self._launch: Any = None

    # ---- hooks of the simulator

    def run(self, warp: Any, start: int, end: int) -> None:
        if warp.cta.launch is not self._launch:
            self._begin(warp)
        self._actor = None
        self._index_of(warp)
        self._instructions[warp] += end - start

    def issue(self, op: Any) -> None:
        stream = self.streams[-1]
        self._numbers[id(op)] = len(stream.ops)
        self._keep.append(op)  # its id must stay its own
        stream.ops.append(Op(op.label or op.agent))
        self._issued.append(len(stream.ops) - 1)

    def async_op(self, op: Any) -> None:
        self._actor = self.streams[-1].ops[self._numbers[id(op)]]

    def arrival(self, barrier: Any) -> None:
        where = (self._barrier(barrier.cta, barrier.offset), barrier.generation)
        arrivals = self._arrivals if self._actor is None else self._actor.arrivals
        for i, (number, phase, count) in enumerate(arrivals):
            if (number, phase) == where:
                arrivals[i] = (number, phase, count + 1)
                return
        arrivals.append((*where, 1))

    def host(self, warp: Any, instr: Any) -> None:
        kind, args = self._classify(warp, instr)
        grown = self._grown(warp)
        ops = [self.streams[-1].ops[i] for i in self._issued]
        _describe(ops, warp, instr, grown)
        if kind == "ld":
            args = (grown["tmem_load_bytes"],)
        self._add(warp, kind, args)

    def block(self, warp: Any, instr: Any, why: str) -> None:
        """A blocked instruction runs again when it is woken: nothing has happened yet."""

    def wake(self, warp: Any) -> None:
        pass

    # ---- the stream

    def finish(self) -> list[Stream]:
        """Closes the last stream and returns all of them."""
        if self._launch is not None:
            self._close()
        return self.streams

    def _begin(self, warp: Any) -> None:
        if self._launch is not None:
            self._close()
        launch = self._launch = warp.cta.launch
        dims = launch.cluster_dims
        self.streams.append(Stream(str(launch.name), dims[0] * dims[1] * dims[2]))
        self._counters = self.simulator.counters
        self.streams[-1].mufu_per_kb = mufu_per_kb(launch.instrs)
        self._numbers: dict[int, int] = {}
        self._keep: list[Any] = []
        self._indices: dict[Any, int] = {}
        self._ctas: dict[Any, int] = {}
        self._barriers: dict[tuple[int, int], int] = {}
        self._instructions: Counter[Any] = Counter()
        self._seen: dict[Any, Counter[str]] = {}
        self._stored: Counter[Any] = Counter()
        self._issued: list[int] = []
        self._arrivals: list[Arrival] = []

    def _close(self) -> None:
        stream = self.streams[-1]
        for warp in list(self._indices):
            self._add(warp, "exit", ())
        stream.ctas = len(self._ctas)
        stream.totals = self._counters.total()
        self._launch = None

    def _cta(self, cta: Any) -> int:
        return self._ctas.setdefault(cta, len(self._ctas))

    def _barrier(self, cta: Any, key: int) -> int:
        return self._barriers.setdefault((self._cta(cta), key), len(self._barriers))

    def _index_of(self, warp: Any) -> int:
        if warp not in self._indices:
            for cta in warp.cta.cluster.ctas:
                self._cta(cta)  # ranks of a cluster are neighbours
            stream = self.streams[-1]
            self._indices[warp] = len(stream.warps)
            stream.warps.append([])
            stream.places.append((self._cta(warp.cta), warp.warp_id))
            self._seen[warp] = Counter()
        return self._indices[warp]

    def _grown(self, warp: Any) -> Counter[str]:
        """What the counters of this warp gained since its last event."""
        mine = self._counters.warps[(tuple(int(c) for c in warp.cta.coords), warp.warp_id)]
        gained = mine - self._seen[warp]
        self._seen[warp] = Counter(mine)
        return gained

    def _add(self, warp: Any, kind: str, args: tuple[int, ...]) -> None:
        stored = int(getattr(warp, "global_store_bytes", 0))
        event = Event(self._instructions[warp], kind, args, self._issued, self._arrivals)
        event.stored = stored - self._stored[warp]
        self._stored[warp] = stored
        self._instructions[warp] = 0
        self._issued, self._arrivals = [], []
        self.streams[-1].warps[self._index_of(warp)].append(event)

    def _classify(self, warp: Any, instr: Any) -> tuple[str, tuple[int, ...]]:
        name = ".".join((instr.base, *instr.mods[:3]))
        if name.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
            return self._passed(warp, instr)
        for prefix, kind in _GROUP_OPS.items():
            if name.startswith(prefix):
                groups = instr.operands[0] if instr.operands else None
                return kind, (value(warp, groups, lead(warp.host_mask)),) if groups else ()
        if name.startswith("barrier.cluster"):
            return ("cluster_arrive" if "arrive" in instr.mods else "cluster_wait"), ()
        if instr.base in ("bar", "barrier") and "warp" not in instr.mods:
            number = value(warp, instr.operands[0], lead(warp.host_mask))
            barrier = warp.cta.named[number]
            if "arrive" in instr.mods:
                raise NotImplementedError("bar.arrive is not recorded: no kernel modelled uses it")
            return "sync", (self._barrier(warp.cta, -1 - number), barrier.generation - 1)
        if name.startswith("tcgen05.ld"):
            return "ld", ()
        if name.startswith("tcgen05.wait::ld"):
            return "wait_ld", ()
        return ("issue" if self._issued else "arrive" if self._arrivals else "other"), ()

    def _passed(self, warp: Any, instr: Any) -> tuple[str, tuple[int, ...]]:
        """The phase that a successful wait has seen complete."""
        lane = lead(warp.host_mask)
        done = value(warp, instr.operands[0], lane)
        if not done:
            return "other", ()
        cta, offset = target(warp, address(warp, instr.operands[1], lane), 8, 8)
        return "wait", (self._barrier(cta, offset), cta.barriers[offset].generation - 1)


def mufu_per_kb(instrs: list[Any]) -> float:
    """ex2, rcp, ... in the text of a kernel per 1024 bytes that its tcgen05.ld read: what executes
    when both stand in the same loop."""
    special = sum(i.base in _MUFU and "f32" in i.mods for i in instrs)
    read = 0
    for i in instrs:
        if i.base == "tcgen05" and i.mods[0] == "ld":
            repeat = next(int(m[1:]) for m in i.mods if m[0] == "x" and m[1:].isdigit())
            read += repeat * _LD_BYTES[next(m for m in i.mods if m in _LD_BYTES)]
    return 1024 * special / read if read else 0.0


_MUFU = {"ex2", "rcp", "lg2", "rsqrt", "sqrt", "tanh", "sin", "cos"}
_LD_BYTES = {"32x32b": 128, "16x64b": 128, "16x128b": 256, "16x256b": 512, "16x32bx2": 128}

_UNITS = {"load": "load", "bulk load": "load", "store": "store", "reduce": "store"}
_UNITS |= {"bulk store": "store", "bulk reduce": "store", "cp.async arrive": "cp.arrive"}


def _describe(ops: list[Op], warp: Any, instr: Any, grown: Counter[str]) -> None:
    """Fills in what the counters tell about the operations that one instruction issued."""
    pair = 2 if "cta_group::2" in instr.mods else 1
    loaded = grown["tma_load_bytes"] + grown["bulk_load_bytes"]
    stored = grown["tma_store_bytes"] + grown["bulk_store_bytes"]
    for op in ops:
        op.unit = _UNITS.get(op.unit, op.unit)
        if op.unit == "load":
            op.size = loaded // len(ops)
            op.copies = max(1, grown["tma_fill_bytes"] // max(loaded, 1))
            op.box = _box(warp, instr)
        elif op.unit == "store":
            op.size = stored // len(ops)
        elif op.unit == "mma":
            op.size, op.copies = grown["macs"] // (128 * pair * 64), pair
        elif op.unit == "cp":
            op.size, op.copies = grown["tmem_copy_bytes"] // pair, pair
        elif op.unit == "cp.async":
            op.size = grown["cp_async_bytes"]


def _box(warp: Any, instr: Any) -> tuple[int, ...]:
    lane = lead(warp.host_mask)
    for operand in instr.operands:
        if hasattr(operand, "coords"):
            coords = (signed32(value(warp, c, lane)) for c in operand.coords)
            return address(warp, operand.map, lane), *coords
    return ()
