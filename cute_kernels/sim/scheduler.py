"""Decides what happens next: which warp runs for how long, which asynchronous operation completes.

Three policies. `lazy`: warps run as long as any can, an asynchronous operation only when nothing
else can go on
(deterministic, oldest first). `eager`: operations complete as soon as they are issued. `random`: a
seeded mix of both,
with random quanta and unequal warp speeds. Blocked warps are scheduler states; nothing ever spins
on a barrier.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import report, wgmma
from .asyncops import AsyncOps
from .checks import (
    BarrierError,
    Deadlock,
    FenceState,
    Livelock,
    RegisterRace,
    SharedOverwrite,
    SimError,
)
from .clocks import Clock
from .sync import ClusterBarrier
from .tcgen05 import finish_loads
from .tmem import Tmem
from .wait import Blocked, Parked

QUANTUM, HOST, EXITED, STALLED = 0, 1, 2, 3  # results of Warp.run


@dataclass
class Policy:
    """Schedule by name ("lazy", "eager", "random") and seed.

    `random` draws a temperament from the seed: how often asynchronous work goes first, the speed or
    the priority of each warp, and which CTA of a cluster hears last of the commits of the others
    (`far`) or else that the launch before takes as long as it can (`late`), so that some seeds
    starve the copies, others a warp role, a CTA or the whole launch.
    """

    name: str = "lazy"
    seed: int = 0
    quantum: int = 4096
    rng: random.Random = field(init=False)
    eagerness: float = field(init=False)
    ranked: bool = field(init=False)
    _far: int = field(init=False)

    def __post_init__(self) -> None:
        if self.name not in ("lazy", "eager", "random"):
            raise ValueError(f'schedule must be "lazy", "eager" or "random", got {self.name!r}')
        self.rng = random.Random(self.seed)
        self.eagerness = self.rng.choice((0.05, 0.3, 0.6, 0.95))
        self.ranked = self.rng.random() < 0.5
        self._far = random.Random(~self.seed).randrange(16)

    @property
    def random(self) -> bool:
        return self.name == "random"

    def pieces(self, most: int) -> int:
        """Into how many parts a bulk copy splits (each completes on its own)."""
        return self.rng.randint(1, min(most, 4)) if self.random and most > 1 else 1

    def far(self, ctas: int) -> int | None:
        """Rank in a cluster of that size to which commits take as long as they can, or None."""
        return None if self.late else self._far % ctas

    @property
    def late(self) -> bool:
        """Whether the end of the launch before comes after all that does not wait for it."""
        return not self.random or self._far >= 8

    def speed(self) -> float:
        """Of a new warp: its priority, or the share of its turns that it takes."""
        if not self.random:
            return 1.0
        return self.rng.random() if self.ranked else self.rng.choice((1.0, 1.0, 0.3, 0.05))


@dataclass
class WarpAgent:
    """What the agents remember per warp; see the modules that use the fields."""

    speed: float = 1.0
    parked: list[Parked] = field(default_factory=list)
    runnable: bool = True
    done: bool = False
    yielded: bool = False
    timed_out: set[int] = field(
        default_factory=set
    )  # instruction indices of try_waits that gave up
    waits: dict[int, tuple[Any, int]] = field(
        default_factory=dict
    )  # instruction -> (mbarrier, generation)
    bulk: dict[int, Any] = field(default_factory=dict)  # lane -> bulk.BulkGroups
    copies: Any = None  # bulk.CopyGroups of cp.async
    wgmma: Any = None  # wgmma.Warpgroup
    tmem_loads: list[Any] = field(
        default_factory=list
    )  # regions read by tcgen05.ld and not waited for
    tmem_stores: list[Any] = field(default_factory=list)
    tmem_unfenced: list[Any] = field(default_factory=list)  # loads over, no fence since
    tmem_known: Any = None  # clock at the last tcgen05.fence::after_thread_sync
    joined: dict[int, Any] = field(
        default_factory=dict
    )  # instruction -> named barrier generation it arrived at
    cluster_phase: int = (
        -1
    )  # phase of the cluster barrier this warp has arrived at and not waited for
    cluster_lanes: int = 0
    clock: Any = None  # clocks.Clock
    lanes: int = 32  # threads of the warp


def first_use(instrs: list[Any], load: Any) -> int:
    """Index of the first instruction after `load` in the text that reads one of its result
    registers, or -1."""
    result = load.operands[0]
    names = {r.id for r in getattr(result, "items", (result,)) if hasattr(r, "id")}
    for instr in instrs[load.index + 1 :]:
        if instr.base == "mov":  # only a new name: ptxas need not wait for the load there
            if any(r in names for o in instr.operands[1:] for r in _registers(o)):
                names.update(_registers(instr.operands[0]))
            continue
        for position, operand in enumerate(instr.operands):
            if (
                position == 0
                and type(operand).__name__ in ("Reg", "Vec", "Pair")
                and instr.base not in ("st", "red", "bra")
            ):
                continue  # a destination
            if any(r in names for r in _registers(operand)):
                return int(instr.index)
    return -1


def _registers(operand: Any) -> list[int]:
    kind = type(operand).__name__
    if kind == "Reg":
        return [operand.id]
    if kind == "Vec":
        return [i for item in operand.items for i in _registers(item)]
    if kind == "Addr":
        return _registers(operand.base)
    if kind == "Not":
        return [operand.reg.id]
    if kind == "TensorAddr":
        return [*_registers(operand.map), *(i for c in operand.coords for i in _registers(c))]
    return []


class Scheduler:
    """Runs one launch to its end. `sim` gives policy, checks, counters, trace; `launch` the
    clusters."""

    def __init__(self, sim: Any, launch: Any) -> None:
        self.sim, self.launch = sim, launch
        self.policy: Policy = sim.policy
        self.ops: AsyncOps = sim.async_ops
        self.clusters: list[Any] = []
        self.runnable: list[Any] = []
        self.polled: list[Parked] = []
        self.live_warps = 0
        self.progress = 0  # counts whatever can change the fate of a blocked warp
        self._timeout_mark = -1
        self._idle_quanta = 0
        self._cursor = 0
        self.max_idle_quanta = getattr(sim, "max_idle_quanta", 50_000)
        launch.epoch = getattr(launch, "epoch", 0)
        launch.load_uses = {}

    @property
    def idle(self) -> bool:
        """No warp can run, and no operation is in flight that may complete by itself."""
        return not self.runnable and not self.ops.free and not self.ops.pipes

    # ---- setting up ------------------------------------------------------------------------------

    def add_cluster(self, cluster: Any) -> None:
        """Gives a new cluster its barriers, TMEM and per-warp state, and makes its warps
        runnable."""
        cluster.barrier = ClusterBarrier(self.launch)
        size, slot = sum(len(cta.warps) for cta in cluster.ctas), 0
        self.clusters.append(cluster)
        for cta in cluster.ctas:
            cta.barriers, cta.named = {}, {}
            cta.tmem = Tmem(cta)
            cta.fences = FenceState(cta.num_threads)
            cta.acquired_maps = {}
            cta.waited_grid = False
            cta.warps_left = len(cta.warps)
            for warp in cta.warps:
                warp.agent = WarpAgent(speed=self.policy.speed(), clock=Clock(size, slot))
                slot += 1
                self.runnable.append(warp)
                self.live_warps += 1
        cluster.barrier.expect(cluster)

    def _refill(self) -> bool:
        """Starts clusters while there is room; True if one was started."""
        started = False
        while len(self.clusters) < self.sim.max_resident:
            cluster = self.launch.next_cluster()
            if cluster is None:
                break
            self.add_cluster(cluster)
            started = True
        return started

    # ---- the loop --------------------------------------------------------------------------------

    def run(self) -> None:
        """Runs until every warp has exited and every operation has completed.

        Raises:
            SimError: whatever the kernel did wrong, with its place; Deadlock and Livelock with a
            full report.
        """
        self.sim.scheduler = self
        self._refill()
        while self.live_warps or len(self.ops):
            if not self._step():
                self._stuck()

    def _step(self) -> bool:
        """Does one thing; False if nothing can be done."""
        policy = self.policy
        if self.polled:
            self.polled = [p for p in self.polled if not p.recheck()]
        if policy.name == "random":
            return self._random_step()
        if policy.name == "eager" and self.complete_one():
            return True
        if not self.runnable:
            return self.complete_one()
        if self._idle_quanta >= 2 * len(self.runnable) and self.complete_one():
            return True  # every runnable warp merely spins: let the asynchronous world move
        self._cursor %= len(self.runnable)
        warp = self.runnable[self._cursor]
        self.run_warp(warp, policy.quantum)
        if warp.agent.runnable and not warp.agent.done:
            self._cursor += 1
        return True

    def _random_step(self) -> bool:
        rng = self.policy.rng
        if not self.runnable:
            return self.complete_one()
        spinning = self._idle_quanta >= 4 * len(self.runnable)
        if (spinning or rng.random() < self.policy.eagerness) and self.complete_one():
            return True
        if self.policy.ranked:
            # the first warp by priority as long as it can run, with few changes of mind: a warp may
            # starve for long, which is how orders that nothing enforces come apart
            warp = max(self.runnable, key=lambda w: w.agent.speed)
            idle = self._idle_quanta
            self.run_warp(warp, 1 << rng.randint(3, 11))
            if self._idle_quanta > idle or rng.random() < 0.02:
                warp.agent.speed = rng.random() * (0.01 if self._idle_quanta > idle else 1.0)
            return True
        warp = rng.choice(self.runnable)
        if warp.agent.speed < rng.random():
            warp = rng.choice(self.runnable)
        self.run_warp(warp, 1 << rng.randint(3, 11))
        return True

    def complete_one(self) -> bool:
        """Completes one asynchronous operation; False if none can complete."""
        op = self.ops.pick(self.policy.rng) if self.policy.random else self.ops.oldest()
        if op is None:
            return False
        self.progress += 1
        self._idle_quanta = 0
        if self.sim.trace is not None:
            self.sim.trace.async_op(op)
        self.launch.actor = op.clock
        try:
            op.run()
        except SimError as error:
            raise error.at(*op.origin) from None
        return True

    def run_warp(self, warp: Any, quantum: int) -> None:
        """Runs a warp until its quantum ends, it blocks or exits; host instructions are executed
        on the way."""
        agent = warp.agent
        stop_at_host = self.policy.name != "lazy"
        trace = self.sim.trace
        while True:
            before = warp.executed
            status = warp.run(quantum)
            if trace is not None:
                start = trace.clock
                trace.tick(int(warp.executed - before))
                trace.run(warp, start, trace.clock)
            if status == HOST:
                blocked = self._host(warp)
                if not agent.runnable or (blocked and stop_at_host):
                    return
                if agent.yielded:
                    agent.yielded = False
                    self._spin()
                    return
                if stop_at_host:
                    return
            elif status == EXITED:
                self.warp_exited(warp)
                return
            elif status == STALLED:
                self._sleep(warp)
                return
            else:
                self._spin()
                return

    def _used(self, load: Any, now: Any) -> bool:
        """True if a register that the tcgen05.ld `load` wrote is read between it and `now` in the
        text.

        ptxas makes that read wait for the whole load, so the load is over even without
        tcgen05.wait::ld.
        """
        uses = self.launch.load_uses
        first = uses.get(load.index)
        if first is None:
            first = uses[load.index] = first_use(self.launch.instrs, load)
        return load.index < first and (first < now.index or now.index < load.index)

    def _spin(self) -> None:
        self._idle_quanta += 1
        if self._idle_quanta > self.max_idle_quanta:
            raise Livelock(
                f"no warp reached a barrier, copy or exit in {self._idle_quanta} quanta: endless "
                "loop\n" + report.describe(self)
            )

    def _host(self, warp: Any) -> bool:
        """Executes the host instruction a warp stands at; True if it blocked."""
        instr, mask, agent = warp.host_instr, warp.host_mask, warp.agent
        result = None
        self.launch.actor = agent.clock
        if agent.tmem_loads and instr.base != "tcgen05":
            finish_loads(warp, lambda load: self._used(load, instr))
        if mask.any():
            try:
                result = self.sim.find_handler(instr)(self.sim, warp, instr, mask)
            except SimError as error:
                raise error.at(warp, instr) from None
        if result is None:
            self.launch.epoch += 1
            if not agent.yielded:
                self.progress += 1
                self._idle_quanta = 0
            if self.sim.trace is not None:
                self.sim.trace.host(warp, instr)
            warp.retire()
            return False
        self.park(warp, mask, instr, result)
        return True

    # ---- blocking --------------------------------------------------------------------------------

    def park(self, warp: Any, mask: np.ndarray, instr: Any, blocked: Blocked) -> None:
        """Takes lanes out of the race until `blocked.predicate()`."""
        # lanes whose guard is false stand at the same pc and go on with the others
        stay = warp.host_lanes
        entry = Parked(warp, stay, instr, blocked, self._wake)
        warp.agent.parked.append(entry)
        warp.park(stay)
        if blocked.signal is not None:
            blocked.signal.waiting.append(entry)
        else:
            self.polled.append(entry)
        self.sim.counters.wait(warp, instr)
        if self.sim.trace is not None:
            self.sim.trace.block(warp, instr, blocked.why)

    def _sleep(self, warp: Any) -> None:
        if warp.agent.runnable:
            warp.agent.runnable = False
            self.runnable.remove(warp)

    def _wake(self, entry: Parked) -> None:
        warp = entry.warp
        agent = warp.agent
        agent.parked = [p for p in agent.parked if p is not entry]
        warp.unpark(entry.mask)
        if not agent.runnable and not agent.done:
            agent.runnable = True
            self.runnable.append(warp)
        if self.sim.trace is not None:
            self.sim.trace.wake(warp)

    def _stuck(self) -> None:
        """Nothing can run: let try_waits time out if that may help, start another cluster, or
        report a deadlock."""
        if self._refill():
            return
        waiting = [
            p
            for c in self.clusters
            for cta in c.ctas
            for w in cta.warps
            for p in w.agent.parked
            if p.blocked.timeout
        ]
        if waiting and self._timeout_mark != self.progress:
            self._timeout_mark = self.progress
            for entry in waiting:
                entry.warp.agent.timed_out.add(entry.instr.index)
                if entry.blocked.signal is not None:
                    entry.blocked.signal.waiting = [
                        e for e in entry.blocked.signal.waiting if e is not entry
                    ]
                self._wake(entry)
            return
        raise self._deadlock()

    def _deadlock(self) -> SimError:
        error = Deadlock(
            "deadlock: no warp can run and nothing is in flight\n" + report.describe(self)
        )
        error.kernel = getattr(self.launch, "name", None)
        for cluster in self.clusters:
            for cta in cluster.ctas:
                for warp in cta.warps:
                    if warp.agent.parked:
                        return error.at(warp, warp.agent.parked[0].instr)
        return error

    # ---- ends ------------------------------------------------------------------------------------

    def warp_exited(self, warp: Any) -> None:
        """Bookkeeping when the last lane of a warp has exited; the CTA's checks when it was the
        last warp."""
        agent = warp.agent
        self._sleep(warp)
        agent.done = True
        self.sim.counters.finish(warp)
        self.live_warps -= 1
        self.progress += 1
        self._idle_quanta = 0
        cta = warp.cta
        cta.warps_left -= 1
        if agent.parked:
            raise BarrierError("a warp exited while some of its lanes were blocked").at(
                warp, agent.parked[0].instr
            )
        for named in cta.named.values():
            named.warp_exited(cta)
        cta.cluster.barrier.warp_exited(warp)
        if cta.warps_left == 0:
            self._cta_ended(cta, warp)

    def _cta_ended(self, cta: Any, warp: Any) -> None:
        try:
            cta.tmem.end(self.sim.checks)
            if self.sim.checks.bulk_exit:
                self._check_bulk_reads(cta)
            if self.sim.checks.wgmma_registers:
                self._check_wgmma(cta)
        except SimError as error:
            raise error.at(warp, None) from None
        cluster = cta.cluster
        if all(c.warps_left == 0 for c in cluster.ctas):
            # operations of the cluster that nobody waited for still complete, and must find their
            # memory
            self._drain(cluster)
            self.clusters.remove(cluster)
            cluster.end()
            self._refill()

    def _drain(self, cluster: Any) -> None:
        ctas = {id(c) for c in cluster.ctas}
        while any(id(op.origin[0].cta) in ctas for op in self.ops.pending()):
            self.complete_one()

    def _check_wgmma(self, cta: Any) -> None:
        for warp in cta.warps:
            origin = wgmma.unfinished(warp)
            if origin is not None:
                raise RegisterRace(
                    "the CTA ends with a wgmma that nobody waited for: wgmma.commit_group and "
                    "wait_group are missing at the end"
                ).at(warp, origin)

    def _check_bulk_reads(self, cta: Any) -> None:
        for warp in cta.warps:
            for lane, groups in warp.agent.bulk.items():
                origin = groups.unread()
                if origin is not None:
                    raise SharedOverwrite(
                        "the CTA ends while a bulk store may still read its shared memory: "
                        "cp.async.bulk.commit_group and wait_group are missing at the end"
                    ).at(warp, origin, lane)
