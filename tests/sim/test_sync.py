"""mbarrier, named barriers, cluster barrier, fences, cluster launch control: one test per
instruction form."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.sim.checks import BarrierError, Checks, Deadlock, IllegalInstruction
from tests.sim.fakes import LANE0, Machine

BAR = 1024
INIT = f"mbarrier.init.shared.b64 [{BAR}], %n;"


def pred(warp, name: str, lane: int = 0) -> int:
    return int(warp.values["%" + name][lane])


def barrier(machine: Machine, rank: int = 0, offset: int = BAR):
    return machine.cluster.ctas[rank].barriers[offset]


def test_init_arrive_completes_phase():
    m = Machine()
    m.add(0, INIT + f"mbarrier.arrive.shared.b64 %s, [{BAR}];" * 2, LANE0, n=2)
    m.run()
    assert (barrier(m).generation, barrier(m).pending) == (1, 2)


def test_arrive_counts_every_lane():
    m = Machine()
    m.add(0, INIT + "bar.sync 1, 64;", LANE0, n=32)
    m.add(0, f"bar.sync 1, 64; mbarrier.arrive.shared::cta.b64 _, [{BAR}];")
    m.run()
    assert barrier(m).generation == 1


def test_arrive_with_count_and_state_wait():
    m = Machine()
    w = m.add(
        0,
        INIT
        + f"mbarrier.arrive.release.cta.shared::cta.b64 %s, [{BAR}], 3;"
        + f"mbarrier.test_wait.shared.b64 %pa, [{BAR}], %s;"
        + f"mbarrier.arrive.shared.b64 %t, [{BAR}];"
        + f"mbarrier.test_wait.shared.b64 %pb, [{BAR}], %s;"
        + "mbarrier.pending_count.b64 %c, %t;",
        LANE0,
        n=4,
    )
    m.run()
    assert (pred(w, "pa"), pred(w, "pb"), pred(w, "c")) == (0, 1, 1)


@pytest.mark.parametrize("kind", ["test_wait", "try_wait"])
def test_parity_of_a_fresh_barrier(kind):
    """PTX: waiting for the parity of the phase before the current one succeeds at once."""
    m = Machine()
    w = m.add(0, INIT + f"mbarrier.{kind}.parity.shared.b64 %p, [{BAR}], 1;", LANE0, n=1)
    m.run()
    assert pred(w, "p") == 1


def test_test_wait_does_not_block():
    m = Machine()
    w = m.add(0, INIT + f"mbarrier.test_wait.parity.shared.b64 %p, [{BAR}], 0;", LANE0, n=1)
    m.run()
    assert pred(w, "p") == 0


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_try_wait_blocks_until_the_phase_completes(schedule):
    m = Machine(schedule=schedule, seed=3)
    m.add(
        0,
        INIT
        + "bar.sync 1, 64;"
        + "nanosleep.u32 20;" * 5
        + f"mbarrier.arrive.shared.b64 _, [{BAR}];",
        LANE0,
        n=1,
    )
    w = m.add(
        0, f"bar.sync 1, 64; mbarrier.try_wait.parity.shared.b64 %p, [{BAR}], 0, 1000;", LANE0
    )
    m.run()
    assert pred(w, "p") == 1
    assert w.agent.waits == {}


def test_try_wait_gives_up_when_the_machine_is_stuck():
    """A try_wait has a time limit: code that only peeks must not hang for ever."""
    m = Machine()
    w = m.add(
        0,
        INIT
        + f"mbarrier.try_wait.parity.shared.b64 %p, [{BAR}], 0;"
        + f"mbarrier.arrive.shared.b64 _, [{BAR}];"
        + f"mbarrier.try_wait.parity.shared.b64 %q, [{BAR}], 0;",
        LANE0,
        n=1,
    )
    m.run()
    assert (pred(w, "p"), pred(w, "q")) == (0, 1)


def test_expect_tx_and_complete_tx():
    m = Machine()
    w = m.add(
        0,
        INIT
        # bytes may land before the arming
        + f"mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [{BAR}], 64;"
        + f"mbarrier.arrive.expect_tx.shared.b64 _, [{BAR}], 128;"
        + f"mbarrier.test_wait.parity.shared.b64 %pa, [{BAR}], 0;"
        + f"mbarrier.complete_tx.shared::cta.b64 [{BAR}], 64;"
        + f"mbarrier.test_wait.parity.shared.b64 %pb, [{BAR}], 0;",
        LANE0,
        n=1,
    )
    m.run()
    assert (pred(w, "pa"), pred(w, "pb")) == (0, 1)


def test_expect_tx_alone_does_not_arrive():
    m = Machine()
    m.add(0, INIT + f"mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [{BAR}], 16;", LANE0, n=1)
    m.run()
    assert (barrier(m).pending, barrier(m).tx, barrier(m).generation) == (1, 16, 0)


def test_too_many_bytes_are_reported():
    m = Machine()
    m.add(
        0,
        INIT
        + f"mbarrier.arrive.expect_tx.shared.b64 _, [{BAR}], 64;"
        + f"mbarrier.complete_tx.shared.b64 [{BAR}], 80;",
        LANE0,
        n=1,
    )
    with pytest.raises(BarrierError, match="16 more bytes"):
        m.run()


def test_transaction_count_range():
    m = Machine()
    m.add(0, INIT + f"mbarrier.expect_tx.shared.b64 [{BAR}], 1048576;", LANE0, n=1)
    with pytest.raises(BarrierError, match="range"):
        m.run()


def test_too_many_arrivals_are_reported():
    m = Machine()
    text = (
        INIT
        + f"mbarrier.expect_tx.shared.b64 [{BAR}], 16;"
        + f"mbarrier.arrive.shared.b64 _, [{BAR}];" * 2
    )
    m.add(0, text, LANE0, n=1)
    with pytest.raises(BarrierError, match="too many arrivals") as caught:
        m.run()
    assert caught.value.line is not None and "mbarrier.arrive" in caught.value.text
    assert "kernel fake" in str(caught.value)
    m = Machine(checks=Checks.none())
    m.add(0, text, LANE0, n=1)
    m.run()


def test_arrive_drop_lowers_later_phases():
    m = Machine()
    m.add(
        0,
        INIT
        + f"mbarrier.arrive_drop.shared.b64 _, [{BAR}];"
        + f"mbarrier.arrive.shared.b64 _, [{BAR}];",
        LANE0,
        n=2,
    )
    m.run()
    assert (barrier(m).generation, barrier(m).expected, barrier(m).pending) == (1, 1, 1)


def test_no_complete_must_not_complete():
    m = Machine()
    m.add(
        0, INIT + f"mbarrier.arrive.noComplete.release.cta.shared.b64 %s, [{BAR}], 1;", LANE0, n=1
    )
    with pytest.raises(BarrierError, match="noComplete"):
        m.run()


def test_inval_then_init_again():
    m = Machine()
    m.add(0, INIT + f"mbarrier.inval.shared.b64 [{BAR}];" + INIT, LANE0, n=1)
    m.run()


def test_second_init_is_reported():
    m = Machine()
    m.add(0, INIT * 2, LANE0, n=1)
    with pytest.raises(BarrierError, match=r"init of a live"):
        m.run()


def test_use_without_init_and_after_a_stray_store():
    m = Machine()
    m.add(0, f"mbarrier.arrive.shared.b64 _, [{BAR}];", LANE0)
    with pytest.raises(BarrierError, match="no mbarrier is initialised"):
        m.run()
    m = Machine()
    m.add(0, INIT + "bar.sync 0;" + f"mbarrier.arrive.shared.b64 _, [{BAR}];", LANE0, n=1)
    m.add(0, "bar.sync 0;")
    machine_data = m.shared().data
    original = m.find_handler

    def spoil(instr):
        if instr.base == "bar":
            machine_data[BAR] = 0
        return original(instr)

    m.find_handler = spoil
    with pytest.raises(BarrierError, match="overwritten"):
        m.run()


def test_misplaced_and_zero_count():
    m = Machine()
    m.add(0, INIT, LANE0, n=0)
    with pytest.raises(IllegalInstruction, match="arrival count"):
        m.run()


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_remote_arrive(schedule):
    m = Machine(ctas=2, schedule=schedule, seed=1)
    sync = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    w = m.add(0, INIT + sync + f"mbarrier.try_wait.parity.shared.b64 %p, [{BAR}], 0;" + sync, n=32)
    w.lanes = np.ones(32, bool)
    m.add(1, sync + "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r];" + sync, r=BAR)
    w.values["%n"] = np.full(32, 32, np.uint64)
    # only lane 0 may initialise
    w.instrs[0].guard = (w.ids.setdefault("%pz", 99), False)
    w.values["%pz"] = LANE0.astype(np.uint64)
    m.run()
    assert pred(w, "p") == 1


def test_arrive_at_ended_cta_is_reported():
    m = Machine(ctas=2)
    m.add(0, INIT, LANE0, n=1)
    m.add(1, "nanosleep.u32 1;" * 3 + "mbarrier.arrive.shared::cluster.b64 _, [%r];", LANE0, r=BAR)
    with pytest.raises(Exception, match="has ended"):
        m.run()


def test_missed_phase_is_reported():
    """A waiter that sleeps through two phases is not part of the pipeline's flow control."""
    m = Machine(schedule="lazy")
    m.add(
        0,
        INIT
        + "bar.sync 1, 64;"
        + "nanosleep.u32 1;" * 2
        + f"mbarrier.arrive.shared.b64 _, [{BAR}];" * 2,
        LANE0,
        n=1,
    )
    m.add(0, f"bar.sync 1, 64; mbarrier.try_wait.parity.shared.b64 %p, [{BAR}], 0;", LANE0)
    with pytest.raises(BarrierError, match="missed a phase"):
        m.run()


def test_deadlock_report_names_everything():
    m = Machine()
    m.add(
        0,
        f"{INIT} bar.sync 1, 64; mbarrier.arrive.expect_tx.shared.b64 _, [{BAR}], 4096; "
        "bar.sync 3, 64;",
        LANE0,
        n=1,
    )
    m.add(
        0,
        f"bar.sync 1, 64; mbarrier.try_wait.parity.shared.b64 %p, [{BAR}], 0; bar.sync 4, 64;",
        LANE0,
    )
    with pytest.raises(Deadlock) as caught:
        m.run()
    text = str(caught.value)
    assert "4096 bytes missing" in text and "named barrier 3: 32 of 64" in text and "warp 1" in text


# ---- named barriers ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bar.sync", "barrier.sync", "bar.cta.sync"])
@pytest.mark.parametrize("schedule", ["lazy", "random"])
def test_bar_sync_all(name, schedule):
    m = Machine(schedule=schedule)
    order: list[int] = []
    original = m.find_handler

    def watch(instr):
        if instr.base == "nanosleep":
            order.append(0)
        if instr.base == "setmaxnreg":
            order.append(1)
        return original(instr)

    m.find_handler = watch
    for _ in range(3):
        m.add(0, f"nanosleep.u32 1; {name} 0; setmaxnreg.dec.sync.aligned.u32 40;")
    m.run()
    assert order == [0, 0, 0, 1, 1, 1]


def test_bar_arrive_and_sync_with_counts():
    m = Machine()
    m.add(0, "bar.arrive 2, 64; nanosleep.u32 1;")
    m.add(0, "bar.sync 2, 64;")
    m.run()
    assert m.cluster.ctas[0].named[2].generation == 1


def test_bar_sync_repeats():
    m = Machine(schedule="random", seed=5)
    for _ in range(2):
        m.add(0, "bar.sync 1, 64;" * 5)
    m.run()
    assert m.cluster.ctas[0].named[1].generation == 5


@pytest.mark.parametrize("op,want", [("popc", 20), ("and", 0), ("or", 1)])
def test_bar_red(op, want):
    m = Machine()
    votes = (np.arange(32) < 20).astype(int)
    result = "%pr" if op != "popc" else "%r"
    kind = "pred" if op != "popc" else "u32"
    w = m.add(0, f"bar.red.{op}.{kind} {result}, 0, %pv;", pv=votes)
    v = m.add(0, f"bar.red.{op}.{kind} {result}, 0, %pv;", pv=0)
    m.run()
    assert w.values[result][0] == v.values[result][31] == want


def test_exited_warps_do_not_hold_up_bar_sync_0():
    m = Machine()
    m.add(0, "nanosleep.u32 1; bar.sync 0;")
    m.add(0, "nanosleep.u32 1;")
    m.run()


@pytest.mark.parametrize("strict", [False, True])
def test_a_warp_that_waits_for_its_own_arrival(strict):
    """Hardware counts threads: the warp goes on alone; a check for those who do not mean it."""
    m = Machine(checks=Checks(barrier_self=strict))
    m.add(0, "bar.arrive 1, 64; bar.sync 1, 64;")
    m.add(0, "nanosleep.u32 1;" * 4)
    if strict:
        with pytest.raises(BarrierError, match="twice"):
            m.run()
    else:
        m.run()


def test_named_barrier_misuse():
    m = Machine()
    m.add(0, "bar.sync 1, 64;")
    m.add(0, "bar.sync 1, 96;")
    m.add(0, "nanosleep.u32 1;")
    with pytest.raises(BarrierError, match="does not match"):
        m.run()
    m = Machine()
    m.add(0, "bar.arrive 1, 96; bar.arrive 1, 96;")
    for _ in range(2):
        m.add(0, "nanosleep.u32 1;" * 4)
    with pytest.raises(BarrierError, match="twice"):
        m.run()
    m = Machine()
    m.add(0, "bar.sync 1, 48;")
    with pytest.raises(IllegalInstruction, match="multiple of 32"):
        m.run()
    m = Machine()
    m.add(0, "bar.sync 16;")
    with pytest.raises(IllegalInstruction, match="barrier number"):
        m.run()


# ---- barrier.cluster -----------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_cluster_barrier(seed):
    m = Machine(ctas=4, schedule="random", seed=seed)
    for rank in range(4):
        for _ in range(2):
            m.add(
                rank,
                "barrier.cluster.arrive.relaxed.aligned; nanosleep.u32 1; "
                "barrier.cluster.wait.acquire.aligned;" * 3,
            )
    m.run()
    assert m.cluster.barrier.phase == 3


def test_cluster_barrier_misuse():
    m = Machine()
    m.add(0, "barrier.cluster.wait.acquire.aligned;")
    with pytest.raises(BarrierError, match=r"without barrier\.cluster\.arrive"):
        m.run()
    m = Machine(ctas=2)
    m.add(0, "barrier.cluster.arrive.aligned; barrier.cluster.arrive.aligned;")
    m.add(1, "nanosleep.u32 1;")
    with pytest.raises(BarrierError, match="twice"):
        m.run()


def test_missing_cluster_arrive_deadlocks():
    m = Machine(ctas=2)
    m.add(0, "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;")
    m.add(1, "bar.sync 1, 64;")
    m.add(1, "bar.sync 2, 64;")
    with pytest.raises(Deadlock, match="cluster barrier: phase 0, 32 of 96"):
        m.run()


# ---- cluster launch control, small instructions --------------------------------------------------

_CLC = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"


@pytest.mark.parametrize("multicast", [False, True])
def test_try_cancel_and_query(multicast):
    m = Machine(ctas=2 if multicast else 1)
    m.unstarted = [(6, 1, 2)]
    suffix = ".multicast::cluster::all.b128" if multicast else ".b128"
    text = "mbarrier.init.shared.b64 [%b], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%b], 32;"
    ask = f"{_CLC}{suffix} [%b+1024], [%b];"
    wait = "mbarrier.try_wait.parity.shared.b64 %p, [%b], 0;"
    sync = "barrier.cluster.arrive; barrier.cluster.wait;"
    # two requests per phase: the second one finds nothing left
    second = f"{_CLC}{suffix} [%b+1040], [%b];"
    for rank in range(2 if multicast else 1):
        own = (ask + second) if rank == 0 else ""
        m.add(rank, text + sync + own + wait + sync, LANE0, b=rank << 24 | BAR)
    m.run()
    for rank in range(2 if multicast else 1):
        words = m.shared(rank).data[2048:2080].view(np.uint32)
        assert sorted(words[[0, 4]].tolist()) == [0, 7]


def test_query_cancel_decodes():
    from cute_kernels.sim import control
    from cute_kernels.sim.ptx import Reg, Vec

    class Stub:
        def __init__(self):
            self.out = {}

        def read(self, op):
            return np.stack(
                [
                    np.full(32, 7 | 1 << 32, np.uint64),
                    np.full(32, 2 | control._ANSWER_MARK << 32, np.uint64),
                ]
            )

        def write(self, op, values, mask):
            self.out[op.name] = int(values[0])

    class I:  # noqa: E742
        def __init__(self, mods, operands):
            self.mods, self.operands = mods, operands

    handle, stub, mask = Reg(0, "b128"), Stub(), np.ones(32, bool)
    control.query_cancel(
        None,
        stub,
        I(("query_cancel", "is_canceled", "pred", "b128"), (Reg(1, "pred", "p"), handle)),
        mask,
    )
    control.query_cancel(
        None,
        stub,
        I(("query_cancel", "get_first_ctaid::y", "b32", "b128"), (Reg(1, "b32", "y"), handle)),
        mask,
    )
    vector = Vec((Reg(1, "b32", "a"), Reg(1, "b32", "b"), Reg(1, "b32", "c")))
    control.query_cancel(
        None,
        stub,
        I(("query_cancel", "get_first_ctaid", "v4", "b32", "b128"), (vector, handle)),
        mask,
    )
    assert stub.out == {"p": 1, "y": 1, "a": 6, "b": 1, "c": 2}


@pytest.mark.parametrize(
    "text",
    [
        "griddepcontrol.wait;", "griddepcontrol.launch_dependents;", "membar.gl;",
        "fence.acq_rel.gpu;", "fence.sc.cta;",
        "fence.mbarrier_init.release.cluster;", "fence.proxy.alias;", "fence.proxy.async.global;",
        "fence.proxy.async;",
        "fence.proxy.tensormap::generic.release.gpu;", "nanosleep.u32 100;",
        "setmaxnreg.inc.sync.aligned.u32 232;",
        "prefetch.global.L2 [%r];", "prefetch.tensormap [%r];",
        "fence.release.sync_restrict::shared::cta.cluster;",
    ],
)  # fmt: skip
def test_small_instructions_run(text):
    m = Machine()
    w = m.add(0, text, r=0)
    m.run()
    assert w.pc == 1


def test_unknown_fence_and_instruction():
    for text in ("fence.proxy.strange;", "fence.strange;", "tcgen05.strange;"):
        m = Machine()
        m.add(0, text)
        with pytest.raises(Exception, match=r"unknown|not modelled"):
            m.run()


def test_setmaxnreg_range():
    m = Machine()
    m.add(0, "setmaxnreg.inc.sync.aligned.u32 100;")
    with pytest.raises(IllegalInstruction, match="multiple of 8"):
        m.run()
