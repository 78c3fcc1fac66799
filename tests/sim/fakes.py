"""A machine without an interpreter: warps that execute straight-line host instructions on given
register values.

The unit tests of the simulator's agents run on it, so that they need neither the DSL nor numba. It
follows the
interface that the scheduler expects of the real warps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cute_kernels.sim import ptx
from cute_kernels.sim.asyncops import AsyncOps
from cute_kernels.sim.checks import Checks, OutOfBounds
from cute_kernels.sim.counters import Counters
from cute_kernels.sim.handlers import find_handler
from cute_kernels.sim.overlap import Overlap
from cute_kernels.sim.scheduler import EXITED, HOST, STALLED, Policy, Scheduler
from cute_kernels.sim.tensormap import MapCache

WINDOW = 232448


class Shared:
    def __init__(self, size: int = WINDOW) -> None:
        self.size = size
        self.data = np.full(size, 0xFF, np.uint8)
        self.init = np.zeros(size, np.uint8)
        self.writer = np.zeros(size, np.uint64)
        self.async_reads = np.zeros(size, np.uint16)
        self.async_writes = np.zeros(size, np.uint16)


class Global:
    """Named numpy arrays at made-up addresses 1 MiB apart."""

    def __init__(self) -> None:
        self.arrays: dict[int, np.ndarray] = {}

    def place(self, array: np.ndarray) -> int:
        addr = (len(self.arrays) + 1) << 20
        flat = np.ascontiguousarray(array)
        assert flat is array, "place contiguous arrays"
        self.arrays[addr] = array.reshape(-1).view(np.uint8)
        return addr

    def find(self, addr: int, size: int, write: bool) -> np.ndarray:
        for base, raw in self.arrays.items():
            if base <= addr and addr + size <= base + len(raw):
                return raw[addr - base : addr - base + size]
        raise OutOfBounds(f"[{addr:#x}, {addr + size:#x})")


class Warp:
    """`text` is PTX of host instructions only; `regs` maps names to values (a scalar or 32 of
    them)."""

    def __init__(
        self, cta: Any, warp_id: int, text: str, regs: dict[str, Any], mask: Any = None
    ) -> None:
        self.cta, self.warp_id, self.name = cta, warp_id, ""
        self.executed = 0
        self.lanes = np.ones(32, bool) if mask is None else np.asarray(mask, bool)
        self.live = self.lanes.copy()
        self.waiting = False
        self.pc = 0
        self.regs: dict[str, np.ndarray] = {}
        self.values = {k: self._wide(v) for k, v in regs.items()}
        function = _parse(text)
        self.instrs = function.instrs
        self.ids = {r.name: r.id for r in function.regs}
        self.log: list[str] = []
        self.loops = False

    @staticmethod
    def _wide(value: Any) -> np.ndarray:
        if np.ndim(value) == 0:
            return np.full(32, int(value) & 0xFFFFFFFFFFFFFFFF, np.uint64)
        return np.asarray(value).astype(np.int64).view(np.uint64)

    # -- the interface of the interpreter's warps
    @property
    def host_instr(self) -> Any:
        return self.instrs[self.pc]

    @property
    def host_mask(self) -> np.ndarray:
        guard = self.host_instr.guard
        if guard is None:
            return self.lanes.copy()
        name = next(n for n, i in self.ids.items() if i == guard[0])
        values = self.values.get(name, np.zeros(32, np.uint64)) != 0
        return self.lanes & (values ^ guard[1])

    @property
    def host_lanes(self) -> np.ndarray:
        return self.lanes.copy()

    def run(self, quantum: int) -> int:
        if self.waiting:
            return STALLED
        if self.pc >= len(self.instrs):
            self.live[:] = False
            return EXITED
        return HOST

    def retire(self) -> None:
        self.executed += 1
        instr = self.host_instr
        if self.loops and "try_wait" in instr.mods and not self.values[instr.operands[0].name][0]:
            return  # the loop around a try_wait: execute it again
        self.log.append(instr.text)
        self.pc += 1

    def park(self, lanes: np.ndarray) -> None:
        self.waiting = True

    def unpark(self, lanes: np.ndarray) -> None:
        self.waiting = False

    def read(self, operand: Any) -> np.ndarray:
        kind = type(operand).__name__
        if kind == "Reg":
            return self.values[operand.name].copy()
        if kind == "Imm":
            return np.full(32, operand.bits & 0xFFFFFFFFFFFFFFFF, np.uint64)
        if kind == "Addr":
            return self.read(operand.base) + np.uint64(operand.offset & 0xFFFFFFFFFFFFFFFF)
        raise AssertionError(kind)

    def write(self, operand: Any, values: Any, mask: np.ndarray) -> None:
        old = self.values.setdefault(operand.name, np.zeros(32, np.uint64))
        self.values[operand.name] = np.where(mask, np.asarray(values, np.uint64), old)


def _parse(text: str) -> Any:
    names = sorted(set(re.findall(r"%[A-Za-z_]\w*", text)))
    decls = "\n".join(f".reg .{'pred' if n.startswith('%p') else 'b64'} {n};" for n in names)
    body = "\n".join(line.strip() + ";" for line in text.split(";") if line.strip())
    module = ptx.parse(
        ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\n"
        + decls
        + "\n"
        + body
        + "\n}\n"
    )
    return module.functions["k"]


@dataclass
class Cta:
    cluster: Any
    rank: int
    launch: Any
    num_threads: int = 128
    shared: Shared = field(default_factory=Shared)
    warps: list[Warp] = field(default_factory=list)

    @property
    def coords(self) -> tuple[int, int, int]:
        return (self.rank, 0, 0)


@dataclass
class Cluster:
    ctas: list[Cta] = field(default_factory=list)
    first_ctaid: tuple[int, int, int] = (0, 0, 0)

    def end(self) -> None:
        """Tests look at what a machine is left with."""


class Machine:
    """One launch of one cluster. `add(rank, text, **regs)` appends a warp; `run()` executes all of
    them."""

    def __init__(
        self, ctas: int = 1, schedule: str = "lazy", seed: int = 0, checks: Checks | None = None
    ) -> None:
        self.sim = self
        self.policy = Policy(schedule, seed)
        self.async_ops = AsyncOps()
        self.checks = checks or Checks()
        self.counters = Counters()
        self.trace = None
        self.maps = MapCache()
        self.changed_maps: dict[int, int] = {}
        self.tc_pipes: dict[Any, Any] = {}
        self.max_resident = 1
        self.overlap = Overlap(None)
        self.global_memory = Global()
        self.find_handler = find_handler
        # launch
        self.name, self.epoch, self.instrs = "fake", 1, []
        self.cluster = Cluster()
        self.cluster.ctas = [Cta(self.cluster, r, self, num_threads=0) for r in range(ctas)]
        self.todo = [self.cluster]
        self.unstarted: list[tuple[int, int, int]] = []
        self.scheduler: Any = None

    def add(self, rank: int, text: str, mask: Any = None, **regs: Any) -> Warp:
        cta = self.cluster.ctas[rank]
        warp = Warp(cta, len(cta.warps), text, {"%" + k: v for k, v in regs.items()}, mask)
        cta.warps.append(warp)
        cta.num_threads = 32 * len(cta.warps)
        return warp

    def next_cluster(self) -> Any:
        return self.todo.pop(0) if self.todo else None

    def cancel_cluster(self) -> Any:
        return self.unstarted.pop(0) if self.unstarted else None

    def run(self) -> Machine:
        Scheduler(self, self).run()
        return self

    def shared(self, rank: int = 0) -> Shared:
        return self.cluster.ctas[rank].shared

    def fill(self, rank: int, offset: int, data: np.ndarray) -> None:
        """Puts bytes into shared memory as if an asynchronous copy had written them."""
        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        shared = self.shared(rank)
        shared.data[offset : offset + len(raw)] = raw
        shared.init[offset : offset + len(raw)] = 1

    def store(self, rank: int, offset: int, data: np.ndarray, thread: int = 0) -> None:
        """A generic-proxy store of `thread` before the launch's first instruction."""
        from cute_kernels.sim.checks import pack_writer

        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        self.fill(rank, offset, raw)
        self.shared(rank).writer[offset : offset + len(raw)] = pack_writer(
            0, self.epoch, thread + 1
        )


LANE0 = np.arange(32) == 0
