"""mbarrier objects and their instructions, named barriers (bar, barrier) and the cluster
barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .access import lead, need, target, threads, value
from .checks import BarrierError, UnsupportedInstruction
from .clocks import Memory
from .wait import Blocked, Signal

TX_LIMIT = (1 << 20) - 1
COUNT_LIMIT = (1 << 20) - 1
# stands in shared memory for the opaque object, so that a stray store over a live barrier is
# noticed
_MAGIC = np.frombuffer(b"\x9dmbarr\xe7\x5a", np.uint8)


class MBarrier:
    """State of one mbarrier: phase number, arrivals and transaction bytes still missing in the
    current phase."""

    def __init__(self, cta: Any, offset: int, count: int) -> None:
        self.cta, self.offset = cta, offset
        self.expected = self.pending = count
        self.tx = 0
        self.generation = 0  # phases completed
        self.memory = Memory()
        self.born = -1  # epoch of its initialisation
        self.maker: Any = None  # warp that did it
        self.published = False  # that warp has put a fence behind it
        self.signal = Signal()

    def __str__(self) -> str:
        return (
            f"mbarrier {self.offset:#x} of cta {tuple(int(c) for c in self.cta.coords)}: phase "
            f"{self.generation} "
            f"(parity {self.generation & 1}), {self.pending} of {self.expected} arrivals and "
            f"{self.tx} bytes missing"
        )

    def fault(self, text: str) -> None:
        if self.cta.launch.sim.checks.mbarrier:
            raise BarrierError(f"{text}\n  {self}")

    def reach(self, who: str) -> None:
        """`who`, another CTA or an asynchronous operation, uses the barrier."""
        checked = self.cta.launch.sim.checks.mbarrier_init_fence
        if checked and self.maker and not self.published:
            raise BarrierError(
                f"used by {who}, but warp {self.maker.warp_id} of its CTA has put no "
                f"fence.mbarrier_init (or fence.proxy.async) behind its initialisation\n  {self}"
            )

    def expect(self, tx: int) -> None:
        """expect-tx: the phase needs `tx` more bytes."""
        self.tx += tx
        if abs(self.tx) > TX_LIMIT:
            raise BarrierError(
                f"transaction count {self.tx} exceeds the range of +-{TX_LIMIT}\n  {self}"
            )

    def complete_tx(self, tx: int) -> None:
        """complete-tx: `tx` bytes have arrived."""
        self.reach("a copy")
        self._traced()
        self.memory.arrive(self.cta.launch)
        self.expect(-tx)
        self._advance()

    def arrive(self, count: int = 1, drop: int = 0) -> None:
        """`count` arrivals; `drop` of them also leave the expected count of later phases."""
        if count > self.pending:
            self.fault(
                f"{count} arrivals where the phase needs only {self.pending}: too many arrivals or "
                "a wrong count at init"
            )
            count = self.pending
        self._traced()
        self.memory.arrive(self.cta.launch)
        self.expected -= drop
        self.pending -= count
        self._advance()

    def _traced(self) -> None:
        trace = self.cta.launch.sim.trace
        if trace is not None:
            trace.arrival(self)

    def _advance(self) -> None:
        if self.pending or self.tx > 0:
            return
        if self.tx < 0:
            self.fault(
                f"{-self.tx} more bytes arrived than the phase expects: transaction underflow"
            )
            return
        self.generation += 1
        self.memory.advance()
        self.pending = self.expected
        self.signal.notify()


def find_barrier(warp: Any, addr: int) -> MBarrier:
    """The live mbarrier at a shared address.

    Raises:
        BarrierError: none was initialised there, it was invalidated, or a store destroyed it.
    """
    cta, offset = target(warp, addr, 8, 8)
    barrier = barrier_at(cta, offset, warp)
    if cta is not warp.cta:
        barrier.reach(f"a warp of cluster rank {warp.cta.rank}")
    return barrier


def barrier_at(cta: Any, offset: int, warp: Any = None) -> MBarrier:
    """The live mbarrier at an offset; with `warp`, its initialisation must be ordered before what
    that warp does now."""
    barrier = cta.barriers.get(offset)
    if barrier is None:
        raise BarrierError(
            f"no mbarrier is initialised at {offset:#x} of cluster rank {cta.rank}: mbarrier.init "
            "is missing, or has not happened "
            "yet (cluster or CTA synchronisation after init)"
        )
    if not (cta.shared.data[offset : offset + 8] == _MAGIC).all():
        raise BarrierError(f"the mbarrier object was overwritten by an ordinary store\n  {barrier}")
    maker = barrier.maker
    if warp and maker and not warp.agent.clock.knows(maker.agent.clock.slot, barrier.born):
        barrier.fault(
            f"used by warp {warp.warp_id}, but nothing orders its initialisation by warp "
            f"{maker.warp_id} before: a CTA or cluster barrier is missing"
        )
    return barrier


# ---- mbarrier instructions
# ------------------------------------------------------------------------------------------


def _groups(warp: Any, mask: np.ndarray, *operands: Any) -> list[tuple[np.ndarray, list[int]]]:
    """Active lanes grouped by equal operands: [(lanes, values), ...]."""
    lanes = np.flatnonzero(mask)
    columns = [np.asarray(warp.read(o), np.uint64)[lanes] for o in operands]
    keys: dict[tuple[int, ...], list[int]] = {}
    for row, lane in zip(zip(*columns, strict=True), lanes, strict=True):
        keys.setdefault(tuple(int(x) for x in row), []).append(int(lane))
    return [(np.array(group), list(key)) for key, group in keys.items()]


def mbarrier_init(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    addr, count = instr.operands
    for _, (where, n) in _groups(warp, mask, addr, count):
        cta, offset = target(warp, where, 8, 8)
        need(1 <= n <= COUNT_LIMIT, f"the arrival count must be 1..{COUNT_LIMIT}, got {n}")
        old = cta.barriers.get(offset)
        if old is not None and sim.checks.mbarrier:
            raise BarrierError(
                f"mbarrier.init of a live mbarrier (no mbarrier.inval before)\n  {old}"
            )
        barrier = cta.barriers[offset] = MBarrier(cta, offset, n)
        barrier.born, barrier.maker = warp.cta.launch.epoch, warp
        shared = cta.shared
        shared.data[offset : offset + 8] = _MAGIC
        shared.init[offset : offset + 8] = 1
        shared.writer[offset : offset + 8] = 0


def publish_barriers(warp: Any) -> None:
    """A fence behind the initialisations by this warp."""
    for barrier in warp.cta.barriers.values():
        if barrier.maker is warp:
            barrier.published = True


def mbarrier_inval(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    for _, (where,) in _groups(warp, mask, instr.operands[0]):
        barrier = find_barrier(warp, where)
        if barrier.signal.waiting:
            raise BarrierError(f"mbarrier.inval while a warp waits on it\n  {barrier}")
        del barrier.cta.barriers[barrier.offset]


def mbarrier_expect_tx(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    addr, tx = instr.operands
    for lanes, (where, n) in _groups(warp, mask, addr, tx):
        find_barrier(warp, where).expect(n * len(lanes))


def mbarrier_complete_tx(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    addr, tx = instr.operands
    for lanes, (where, n) in _groups(warp, mask, addr, tx):
        find_barrier(warp, where).complete_tx(n * len(lanes))


def token(barrier: MBarrier) -> int:
    """The opaque state that an arrive returns: phase and missing arrivals before it."""
    return (barrier.generation << 24 | barrier.pending) & 0xFFFFFFFFFFFFFFFF


def mbarrier_arrive(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    operands = list(instr.operands)
    result = None if _is_address(operands[0]) else operands.pop(0)
    expect, drop = "expect_tx" in instr.mods, instr.mods[0] == "arrive_drop"
    extra = operands[1:2]
    for lanes, found in _groups(warp, mask, operands[0], *extra):
        barrier = find_barrier(warp, found[0])
        count = 1
        if expect:
            barrier.expect(found[1] * len(lanes))
        elif extra:
            count = found[1]
            need(
                1 <= count <= COUNT_LIMIT,
                f"the arrival count must be 1..{COUNT_LIMIT}, got {count}",
            )
        states = []
        for _ in lanes:  # one by one: each lane gets the state before its own arrival
            states.append(token(barrier))
            if "noComplete" in instr.mods and count >= barrier.pending:
                raise BarrierError(
                    f"mbarrier.arrive.noComplete would complete the phase\n  {barrier}"
                )
            barrier.arrive(count, count if drop else 0)
        if result is not None and not _is_sink(result):
            values = np.zeros(32, np.uint64)
            values[lanes] = states
            where = np.zeros(32, bool)
            where[lanes] = True
            warp.write(result, values, where)


def mbarrier_pending_count(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    result, state = instr.operands
    warp.write(result, warp.read(state) & np.uint64(0xFFFFFF), mask)


def mbarrier_wait(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    """test_wait and try_wait. A try_wait that fails blocks; the scheduler may make it give up and
    return false."""
    result, addr, wanted = instr.operands[:3]
    parity, agent = "parity" in instr.mods, warp.agent
    done = np.zeros(32, np.uint64)
    missing: list[MBarrier] = []
    for lanes, (where, want) in _groups(warp, mask, addr, wanted):
        barrier = find_barrier(warp, where)
        if parity:
            complete = (barrier.generation & 1) != (want & 1)
        else:
            complete = barrier.generation != want >> 24
        done[lanes] = complete
        if complete:
            agent.clock.learn(barrier.memory.done)
        else:
            missing.append(barrier)
        _check_missed(sim, agent, instr, barrier, complete)
    if missing and instr.mods[0] == "try_wait" and instr.index not in agent.timed_out:
        barrier = missing[0]
        generation = barrier.generation
        agent.waits[instr.index] = (barrier, generation)
        return Blocked(
            lambda: barrier.generation != generation, str(barrier), barrier.signal, timeout=True
        )
    agent.timed_out.discard(instr.index)
    agent.yielded = bool(missing)
    finished = mask & (done != 0)
    if finished.any():
        warp.cta.fences.sync(threads(warp, finished), warp.cta.launch.epoch)
    warp.write(result, done, mask)
    return None


def _check_missed(sim: Any, agent: Any, instr: Any, barrier: MBarrier, complete: bool) -> None:
    """A waiter that slept through a whole phase would wait for ever on hardware, or take a later
    phase for its own."""
    before = agent.waits.get(instr.index)
    if before is None or before[0] is not barrier:
        return
    if complete or barrier.generation > before[1]:
        del agent.waits[instr.index]
    if sim.checks.mbarrier and barrier.generation >= before[1] + 2:
        raise BarrierError(
            f"a waiter missed a phase: the barrier went from phase {before[1]} to "
            f"{barrier.generation} before the warp looked again; "
            f"the pipeline does not wait for this consumer\n  {barrier}"
        )


def _is_address(operand: Any) -> bool:
    return type(operand).__name__ == "Addr"


def _is_sink(operand: Any) -> bool:
    return type(operand).__name__ == "Sink"


# ---- named barriers
# -------------------------------------------------------------------------------------------------


class NamedBarrier:
    """One of the 16 barriers of a CTA. Arrivals count in warps of 32 threads."""

    def __init__(self, cta: Any, number: int) -> None:
        self.cta, self.number = cta, number
        self.generation = 0
        self.memory = Memory()
        self.need: int | None = None  # threads, 0 for "all that have not exited"
        self.arrived: list[tuple[int, bool]] = []  # (warp id, waits)
        self.votes: list[int] = []
        self.results: dict[int, list[int]] = {}
        self.signal = Signal()

    def __str__(self) -> str:
        size = self.threads()
        who = ", ".join(f"warp {w}" + ("" if waits else " (arrive)") for w, waits in self.arrived)
        return (
            f"named barrier {self.number}: {32 * len(self.arrived)} of {size} threads "
            f"({who or 'none'})"
        )

    def threads(self) -> int:
        return self.need or 32 * sum(not w.agent.done for w in self.cta.warps)

    def join(self, warp: Any, count: int, waits: bool, votes: list[int]) -> None:
        """One warp arrives; `count` 0 means all threads of the CTA."""
        if not self.arrived:
            self.need = count
        elif self.need != count:
            raise BarrierError(
                f"thread count {count or 'all'} does not match the {self.need or 'all'} of earlier "
                f"arrivals\n  {self}"
            )
        own = [waited for w, waited in self.arrived if w == warp.warp_id]
        # a phase counts threads: those that wait for a phase they have arrived at count twice
        if own and (own != [False] or not waits or self.cta.launch.sim.checks.barrier_self):
            raise BarrierError(f"warp {warp.warp_id} arrives twice in one phase\n  {self}")
        self.memory.arrive(self.cta.launch)
        self.arrived.append((warp.warp_id, waits))
        self.votes += votes
        self._advance()

    def _advance(self) -> None:
        if not self.arrived or 32 * len(self.arrived) < self.threads():
            return
        self.results = {self.generation: self.votes}
        self.generation += 1
        self.memory.advance()
        self.arrived, self.votes, self.need = [], [], None
        self.signal.notify()

    def warp_exited(self, cta: Any) -> None:
        """An exited warp no longer counts for barriers without a thread count."""
        if self.need == 0:
            self._advance()


def named_barrier(cta: Any, number: int) -> NamedBarrier:
    need(0 <= number < 16, f"barrier number must be 0..15, got {number}")
    return cta.named.setdefault(number, NamedBarrier(cta, number))


def _count(warp: Any, operand: Any, lane: int) -> int:
    count = value(warp, operand, lane)
    size = -(-warp.cta.num_threads // 32) * 32
    need(
        count % 32 == 0 and count > 0,
        f"the thread count must be a positive multiple of 32, got {count}",
    )
    need(count <= size, f"the thread count {count} exceeds the {size} threads of the CTA")
    return count


def bar_arrive(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    lane = lead(mask)
    need(len(instr.operands) == 2, "bar.arrive needs a thread count")
    barrier = named_barrier(warp.cta, value(warp, instr.operands[0], lane))
    barrier.join(warp, _count(warp, instr.operands[1], lane), False, [])


def bar_sync(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    lane = lead(mask)
    count = _count(warp, instr.operands[1], lane) if len(instr.operands) > 1 else 0
    barrier = named_barrier(warp.cta, value(warp, instr.operands[0], lane))
    return _sync(warp, instr, mask, barrier, (count, []))[0]


def bar_red(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    """bar.red.{popc,and,or}: result, barrier {, count}, predicate."""
    lane = lead(mask)
    result, number, *rest = instr.operands
    count = _count(warp, rest[0], lane) if len(rest) == 2 else 0
    votes = [int(v) for v in (np.asarray(warp.read(rest[-1]))[mask] != 0)]
    blocked, all_votes = _sync(
        warp, instr, mask, named_barrier(warp.cta, value(warp, number, lane)), (count, votes)
    )
    if blocked is None:
        how: dict[str, Callable[[list[int]], int]] = {"popc": sum, "and": min, "or": max}
        op = next(m for m in instr.mods if m in how)
        warp.write(result, np.full(32, how[op](all_votes), np.uint64), mask)
    return blocked


def _sync(
    warp: Any, instr: Any, mask: np.ndarray, barrier: NamedBarrier, arrival: tuple[int, list[int]]
) -> tuple[Any, list[int]]:
    joined = warp.agent.joined
    if instr.index not in joined:
        joined[instr.index] = barrier.generation
        barrier.join(warp, arrival[0], True, arrival[1])
    generation = joined[instr.index]
    if barrier.generation == generation:
        return Blocked(lambda: barrier.generation != generation, str(barrier), barrier.signal), []
    del joined[instr.index]
    warp.agent.clock.learn(barrier.memory.done)
    warp.cta.fences.sync(threads(warp, mask), warp.cta.launch.epoch)
    return None, barrier.results.get(generation, [])


# ---- barrier.cluster
# ------------------------------------------------------------------------------------------------


class ClusterBarrier:
    """barrier.cluster.arrive / wait over all threads of all CTAs of a cluster that have not
    exited."""

    def __init__(self, launch: Any = None) -> None:
        self.launch = launch
        self.memory = Memory()
        self.phase = 0
        self.expected = 0
        self.arrived = 0
        self.signal = Signal()

    def __str__(self) -> str:
        return f"cluster barrier: phase {self.phase}, {self.arrived} of {self.expected} threads"

    def expect(self, cluster: Any) -> None:
        for cta in cluster.ctas:
            for warp in cta.warps:
                warp.agent.lanes = int(warp.live.sum())
                self.expected += warp.agent.lanes

    def arrive(self, lanes: int) -> None:
        self.memory.arrive(self.launch)
        self.arrived += lanes
        self._advance()

    def warp_exited(self, warp: Any) -> None:
        """Exited threads count as arrived in every later phase."""
        if warp.agent.cluster_phase == self.phase:
            self.arrived -= warp.agent.cluster_lanes
        self.expected -= warp.agent.lanes
        self._advance()

    def _advance(self) -> None:
        if self.expected and self.arrived >= self.expected:
            self.phase += 1
            self.memory.advance()
            self.arrived = 0
            self.signal.notify()


def cluster_arrive(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    barrier, agent = warp.cta.cluster.barrier, warp.agent
    lanes = int(mask.sum())
    if agent.cluster_phase == barrier.phase and agent.cluster_lanes + lanes > 32:
        raise BarrierError(
            f"barrier.cluster.arrive twice without barrier.cluster.wait\n  {barrier}"
        )
    if 0 <= agent.cluster_phase < barrier.phase:
        raise BarrierError(
            f"barrier.cluster.arrive while the wait of the phase before is missing\n  {barrier}"
        )
    agent.cluster_lanes = lanes + (
        agent.cluster_lanes if agent.cluster_phase == barrier.phase else 0
    )
    agent.cluster_phase = barrier.phase
    barrier.arrive(lanes)


def cluster_wait(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    barrier, agent = warp.cta.cluster.barrier, warp.agent
    if agent.cluster_phase < 0:
        raise BarrierError(f"barrier.cluster.wait without barrier.cluster.arrive\n  {barrier}")
    phase = agent.cluster_phase
    if barrier.phase == phase:
        return Blocked(lambda: barrier.phase != phase, str(barrier), barrier.signal)
    agent.clock.learn(barrier.memory.done)
    agent.cluster_lanes -= int(mask.sum())
    if agent.cluster_lanes <= 0:
        agent.cluster_phase = -1
    warp.cta.fences.sync(threads(warp, mask), warp.cta.launch.epoch)
    return None


def barrier_cluster(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    """`barrier.cluster.*`: chooses arrive or wait by the modifier."""
    if "arrive" in instr.mods:
        return cluster_arrive(sim, warp, instr, mask)
    if "wait" in instr.mods:
        return cluster_wait(sim, warp, instr, mask)
    raise UnsupportedInstruction(f"unknown form {instr.opcode}")


HANDLERS = {
    "mbarrier.init": mbarrier_init,
    "mbarrier.inval": mbarrier_inval,
    "mbarrier.expect_tx": mbarrier_expect_tx,
    "mbarrier.complete_tx": mbarrier_complete_tx,
    "mbarrier.arrive": mbarrier_arrive,
    "mbarrier.arrive_drop": mbarrier_arrive,
    "mbarrier.pending_count": mbarrier_pending_count,
    "mbarrier.test_wait": mbarrier_wait,
    "mbarrier.try_wait": mbarrier_wait,
    "bar.sync": bar_sync,
    "bar.cta.sync": bar_sync,
    "barrier.sync": bar_sync,
    "barrier.cta.sync": bar_sync,
    "bar.arrive": bar_arrive,
    "bar.cta.arrive": bar_arrive,
    "barrier.arrive": bar_arrive,
    "barrier.cta.arrive": bar_arrive,
    "bar.red": bar_red,
    "bar.cta.red": bar_red,
    "barrier.red": bar_red,
    "barrier.cta.red": bar_red,
    "barrier.cluster": barrier_cluster,
}
