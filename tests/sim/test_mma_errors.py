"""Misuse of tcgen05.mma that the simulator reports; operands stay busy until the commit."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.sim.checks import (
    Checks,
    IllegalInstruction,
    MissingProxyFence,
    ScaleFactorError,
    SharedOverwrite,
    SharedRace,
    TmemError,
    TmemRace,
    UninitialisedRead,
    UnsupportedInstruction,
)
from tests.sim.fakes import LANE0
from tests.sim.test_mma import A_AT, B_AT, COMMIT, SFB, Bench, Case, expect, smem_desc


def test_shape_and_descriptor_errors():
    idesc = Case().idesc()
    expect(IllegalInstruction, "M must be", i=Case(m=256).idesc())
    expect(IllegalInstruction, "N must be", i=idesc & ~(63 << 17))
    expect(
        IllegalInstruction, "N must be", Case(m=256, n=128, group=2), i=Case(m=256, n=120).idesc()
    )
    expect(IllegalInstruction, "element types", i=idesc & ~(7 << 7))
    expect(IllegalInstruction, "K-major", i=idesc | 1 << 15)
    expect(IllegalInstruction, "sparsity", i=idesc | 4)
    expect(IllegalInstruction, "sm_103a", i=idesc | 1 << 31)
    expect(IllegalInstruction, "scale factor id", i=idesc | 2 << 29)
    expect(IllegalInstruction, "blocks of 32", text=Case(block=32).instruction())
    expect(IllegalInstruction, "46-48", db=1)
    expect(IllegalInstruction, "swizzle code", db=smem_desc(B_AT, 3, 0, 0))
    expect(IllegalInstruction, "base offset", db=smem_desc(B_AT, 2, 0, 1024) | 1 << 49)
    mx = Case(kind="mxf4", block=32, scale="ue8m0")
    expect(
        IllegalInstruction,
        "needs .block_scale",
        mx,
        text="tcgen05.mma.cta_group::1.kind::mxf4 [%d], %da, %db, %i, %pe;",
    )
    for form in ("sp.cta_group::1.kind::f16", "ws.cta_group::1.kind::f16", "cta_group::1.kind::i8"):
        expect(
            UnsupportedInstruction,
            "not modelled",
            text=f"tcgen05.mma.{form} [%d], %da, %db, %i, %pe;",
        )


def test_tmem_errors():
    expect(TmemError, "beyond", d=480)
    expect(UninitialisedRead, "accumulator", Case(), pe=1)

    def forget(bench):
        original = bench._scale
        bench._scale = lambda t, column, row, exps: (
            original(t, column, row, exps) if row != 5 else None
        )

    expect(UninitialisedRead, "scale factors", prepare=forget)

    def spoil(bench):
        original = bench._tmem

        def changed(rank):
            original(rank)
            bench.m.cluster.ctas[rank].tmem.data[64 + 7, SFB] ^= 0x10

        bench._tmem = changed

    expect(ScaleFactorError, "four 32-lane", prepare=spoil)
    bench = Bench(Case(), Checks(scale_duplication=False, tmem_leak=False))
    spoil(bench)
    got, want = bench.run()
    assert (got == want).all()


def test_shared_memory_errors():
    def dirty(bench):
        bench.m.store(0, A_AT, np.zeros(16, np.uint8), thread=70)

    expect(MissingProxyFence, "thread 70", prepare=dirty)

    def blank(bench):
        bench.m.shared().init[B_AT + 8] = 0

    expect(UninitialisedRead, "operand B", prepare=blank)

    def in_flight(bench):
        bench.m.shared().async_writes[A_AT + 16] = 1

    expect(SharedRace, "wrong parity", prepare=in_flight)
    expect(IllegalInstruction, "leaves shared memory", db=smem_desc(0x3FF00, 2, 0, 16 * 1024))


def test_operands_stay_busy_until_the_commit():
    """Without waiting for a commit, nothing may write what the MMA reads, even if it happens to
    have run."""
    case = Case(schedule="eager")
    bench = Bench(case)
    src = bench.m.global_memory.place(np.zeros(512, np.uint8))
    overwrite = f"cp.async.cg.shared.global [{B_AT}], [%s], 16;"
    with pytest.raises(SharedOverwrite):
        bench.run(case.instruction() + overwrite, s=src)
    bench = Bench(case)
    src = bench.m.global_memory.place(np.zeros(512, np.uint8))
    got, want = bench.run(bench.text() + overwrite, s=src)
    assert (got == want).all()


def test_accumulator_must_not_be_read_before_the_commit():
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r}, [%d];"
    expect(
        TmemRace,
        "nothing waited for a commit",
        Case(schedule="eager"),
        text=Case().instruction() + load,
    )
    bench = Bench(Case())
    bench.run(bench.text() + load + "tcgen05.wait::ld.sync.aligned;")


def test_mma_over_an_unfinished_load():
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r}, [%d];"
    expect(TmemRace, "wait::ld is missing", Case(accumulate=True), text=load + Case().instruction())
    bench = Bench(Case(accumulate=True))
    bench.run(load + "tcgen05.wait::ld.sync.aligned;" + bench.text())


def test_commit_of_another_thread_covers_nothing():
    case = Case(schedule="eager")
    bench = Bench(case)
    bench.m.add(
        0, case.instruction() + "bar.sync 1, 64; bar.sync 2, 64;", LANE0, **bench.registers()
    )
    load = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r}, [%d];"
    bench.m.add(0, "bar.sync 1, 64;" + COMMIT.format(g=1) + load + "bar.sync 2, 64;", d=32 << 16)
    with pytest.raises(TmemRace):
        bench.m.run()


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_commit_multicast(schedule):
    case = Case(m=256, n=32, group=2, schedule=schedule)
    bench = Bench(case)
    sync = "barrier.cluster.arrive; barrier.cluster.wait;"
    init, wait = (
        "mbarrier.init.shared.b64 [%b], 1;",
        "mbarrier.try_wait.parity.shared.b64 %p, [%b], 0;",
    )
    commit = (
        "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster"
        ".multicast::cluster.b64 [%b], 3;"
    )
    w = bench.m.add(
        0,
        init + sync + case.instruction() + commit + wait + sync,
        LANE0,
        b=1024,
        **bench.registers(),
    )
    v = bench.m.add(1, init + sync + wait + sync, LANE0, b=1 << 24 | 1024)
    bench.m.run()
    assert w.values["%p"][0] == v.values["%p"][0] == 1
    assert (bench.result() == bench.exact()).all()
    assert bench.m.counters.total()["macs"] == 256 * 32 * 64
