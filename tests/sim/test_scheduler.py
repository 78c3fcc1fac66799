"""Schedules: legal orders only, determinism per seed, different orders over seeds, livelock and
refill."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cute_kernels.sim.asyncops import AsyncOp, AsyncOps
from cute_kernels.sim.checks import Checks, Deadlock, Livelock
from cute_kernels.sim.scheduler import QUANTUM, Policy, first_use
from tests.sim.fakes import LANE0, Cluster, Cta, Machine

BAR = 1024


def op(log: list, name: str, pipe=None) -> AsyncOp:
    return AsyncOp("x", lambda: log.append(name), (None, None), pipe)


def test_pipes_keep_their_order_and_others_do_not():
    seen = set()
    for seed in range(40):
        log: list[str] = []
        ops, rng = AsyncOps(), random.Random(seed)
        for i in range(3):
            ops.add(op(log, f"p{i}", "pipe"))
            ops.add(op(log, f"f{i}"))
        while len(ops):
            ops.pick(rng).run()
        assert [x for x in log if x[0] == "p"] == ["p0", "p1", "p2"]
        seen.add(tuple(log))
    assert len(seen) > 20


def test_oldest_first():
    log: list[str] = []
    ops = AsyncOps()
    for i in range(6):
        ops.add(op(log, str(i), "pipe" if i % 2 else None))
    while len(ops):
        ops.oldest().run()
    assert log == list("012345")


def test_add_after_waits_for_its_condition():
    log: list[str] = []
    ops = AsyncOps()
    ops.add(op(log, "first"))
    ops.add_after(op(log, "second"), lambda: bool(log))
    assert len(ops) == 2
    ops.oldest().run()
    ops.oldest().run()
    assert log == ["first", "second"]


def test_policy_names_and_reproducibility():
    with pytest.raises(ValueError, match="lazy"):
        Policy("sometimes")
    a, b = Policy("random", 5), Policy("random", 5)
    assert [a.pieces(8) for _ in range(20)] == [b.pieces(8) for _ in range(20)]
    assert Policy("lazy").pieces(8) == 1
    assert len({Policy("random", s).eagerness for s in range(30)}) == 4


def racy(schedule: str, seed: int) -> int:
    """A load whose consumer does not wait, reading with the checks off: the value depends on the
    schedule."""
    m = Machine(schedule=schedule, seed=seed, checks=Checks.none())
    data = np.full(64, 7, np.uint8)
    src = m.global_memory.place(data)
    out = np.zeros(64, np.uint8)
    dst = m.global_memory.place(out)
    m.fill(0, 4096, np.full(64, 1, np.uint8))
    text = (
        f"mbarrier.init.shared.b64 [{BAR}], 1; mbarrier.arrive.expect_tx.shared.b64 _, [{BAR}], 64;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [4096], [%s], 64, "
        f"[{BAR}];"
        "cp.async.bulk.global.shared::cta.bulk_group [%d], [4096], 64;"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
        f"mbarrier.try_wait.parity.shared.b64 %p, [{BAR}], 0;"
    )
    m.add(0, text, LANE0, s=src, d=dst)
    m.run()
    return int(out.sum())


def test_missing_wait_shows_as_differing_results():
    assert racy("lazy", 0) == 64 * 7, "oldest first: the load happens to be early enough"
    assert racy("eager", 0) == 64 * 7
    results = {racy("random", seed) for seed in range(30)}
    assert len(results) > 2, "some seeds read old bytes, some a mixture of pieces"


def test_same_seed_same_run():
    assert [racy("random", s) for s in range(10)] == [racy("random", s) for s in range(10)]


def logs(schedule: str, seed: int) -> list[tuple[int, int]]:
    m = Machine(schedule=schedule, seed=seed)
    order: list[tuple[int, int]] = []
    for i in range(4):
        w = m.add(0, "nanosleep.u32 1;" * 3)
        w.retire_original = w.retire
        w.retire = lambda w=w, i=i: (order.append((i, w.pc)), w.retire_original())[1]
    m.run()
    return order


def test_orders_of_warps_vary_with_the_seed():
    assert logs("lazy", 0) == logs("lazy", 1)
    assert len({tuple(logs("random", s)) for s in range(12)}) > 6
    for s in range(6):
        for i in range(4):
            assert [pc for w, pc in logs("random", s) if w == i] == [0, 1, 2]


class Spinner:
    """A warp that loops for ever without reaching a host instruction, until `stop()`."""

    def __init__(self, warp, stop) -> None:
        self.warp, self.stop = warp, stop
        self.plain = warp.run
        warp.run = self.run

    def run(self, quantum: int) -> int:
        return self.plain(quantum) if self.stop() else QUANTUM


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_a_spinning_warp_does_not_starve_copies(schedule):
    """A warp polls memory that an asynchronous copy will fill: the copy must complete in every
    policy."""
    m = Machine(schedule=schedule)
    src = m.global_memory.place(np.full(64, 7, np.uint8))
    text = (
        f"mbarrier.init.shared.b64 [{BAR}], 1; mbarrier.arrive.expect_tx.shared.b64 _, [{BAR}], 64;"
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [4096], [%s], 64, "
        f"[{BAR}];"
    )
    m.add(0, text, LANE0, s=src)
    Spinner(m.add(0, "nanosleep.u32 1;"), lambda: m.shared().data[4096] == 7)
    m.run()


@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_endless_loop_is_a_livelock(schedule):
    m = Machine(schedule=schedule)
    m.max_idle_quanta = 200
    Spinner(m.add(0, "nanosleep.u32 1;"), lambda: False)
    with pytest.raises(Livelock, match="endless loop"):
        m.run()


def test_clusters_start_when_others_end():
    m = Machine()
    for _ in range(3):
        cluster = Cluster()
        cta = Cta(cluster, 0, m, num_threads=32)
        cluster.ctas = [cta]
        warp = Machine().add(0, "nanosleep.u32 1;")
        warp.cta = cta
        cta.warps.append(warp)
        m.todo.append(cluster)
    m.add(0, "nanosleep.u32 1;")
    clusters = list(m.todo)
    m.run()
    assert all(c.ctas[0].warps[0].pc == 1 for c in clusters)
    assert m.scheduler.clusters == []


def test_deadlock_reports_operations_in_flight_and_source_lines():
    m = Machine()
    w = m.add(0, "bar.sync 1, 64;")
    m.add(0, "bar.sync 2, 64;")
    w.instrs[0].source = ("kernel.py", 17)
    with pytest.raises(Deadlock) as caught:
        m.run()
    assert "kernel.py:17" in str(caught.value)
    assert "operations in flight: 0" in str(caught.value)
    assert caught.value.kernel == "fake"


def test_first_use_of_loaded_registers():
    """A plain use of a register of tcgen05.ld orders the load: found in the text, destinations do
    not count."""
    w = Machine().add(
        0,
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%a, %b}, [%t]; mbarrier.arrive.shared.b64 %a, "
        "[1024];"
        "mbarrier.arrive.shared.b64 _, [1024]; "
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%t], %b, [%t];",
        t=0,
    )
    assert first_use(w.instrs, w.instrs[0]) == 3
    assert first_use(w.instrs[:3], w.instrs[0]) == -1
