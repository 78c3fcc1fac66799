"""cp.async and its groups, cp.async.bulk, cp.reduce.async.bulk, st.async: one test per form."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cute_kernels.sim.bulk import reduce_into
from cute_kernels.sim.checks import (
    Checks,
    Deadlock,
    IllegalInstruction,
    Misaligned,
    MissingProxyFence,
    OutOfBounds,
    SharedOverwrite,
    UnsupportedInstruction,
)  # fmt: skip
from tests.sim.fakes import LANE0, Machine

BAR = 1024
ARM = "mbarrier.init.shared.b64 [%b], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%b], %bytes;"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p, [%b], 0;"
SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
LANES = np.arange(32)


def some_bytes(n: int) -> np.ndarray:
    return np.random.default_rng(n).integers(0, 256, n).astype(np.uint8)


@pytest.mark.parametrize("schedule,seed", [("lazy", 0), ("eager", 0), ("random", 1), ("random", 2)])
def test_bulk_load(schedule, seed):
    m = Machine(schedule=schedule, seed=seed)
    data = some_bytes(4096)
    src = m.global_memory.place(data)
    text = (
        ARM + "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [4096], "
        "[%s+64], 1024, [%b];" + WAIT
    )
    m.add(0, text, LANE0, b=BAR, bytes=1024, s=src)
    m.run()
    assert (m.shared().data[4096:5120] == data[64:1088]).all()
    assert m.shared().init[4096:5120].all() and not m.shared().init[5120]
    assert m.counters.total()["bulk_load_bytes"] == 1024


def test_bulk_load_multicast():
    m = Machine(ctas=2)
    data = some_bytes(256)
    src = m.global_memory.place(data)
    copy = (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%d], [%s], 256, [%b], 3;"
    )
    for rank in range(2):
        text = ARM + SYNC + (copy if rank == 0 else "") + WAIT + SYNC
        m.add(rank, text, LANE0, b=rank << 24 | BAR, d=4096, bytes=256, s=src)
    m.run()
    for rank in range(2):
        assert (m.shared(rank).data[4096:4352] == data).all()


def test_bulk_store_and_shared_to_shared():
    m = Machine(ctas=2)
    data, out = some_bytes(512), np.zeros(512, np.uint8)
    dst = m.global_memory.place(out)
    m.fill(0, 4096, data)
    m.add(
        0,
        SYNC + "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r], "
            "[4096], 512, [%rb];" + SYNC,
        LANE0, r=1 << 24 | 8192, rb=1 << 24 | BAR,
    )  # fmt: skip
    store = "cp.async.bulk.global.shared::cta.bulk_group [%d], [%mine], 512;"
    m.add(
        1,
        ARM + SYNC + WAIT + store + DONE + SYNC,
        LANE0,
        b=1 << 24 | BAR,
        bytes=512,
        d=dst,
        mine=1 << 24 | 8192,
    )
    m.run()
    assert (out == data).all()


@pytest.mark.parametrize(
    "suffix,dtype,op",
    [
        ("add.f32", np.float32, np.add), ("add.f16", np.float16, np.add), ("add.noftz.f16",
        np.float16, np.add),
        ("add.noftz.bf16", ml_dtypes.bfloat16, np.add), ("min.s32", np.int32, np.minimum),
        ("max.u32", np.uint32, np.maximum),
        ("add.u64", np.uint64, np.add), ("xor.b32", np.uint32, np.bitwise_xor), ("max.f16",
        np.float16, np.maximum),
        ("min.bf16", ml_dtypes.bfloat16, np.minimum), ("add.f64", np.float64, np.add),
    ],
)  # fmt: skip
def test_bulk_reduce(suffix, dtype, op):
    m = Machine()
    rng = np.random.default_rng(0)
    kind = np.dtype(dtype)
    draw = (
        (lambda: rng.standard_normal(64))
        if suffix[-3:] in ("f32", "f16", "f64")
        else (lambda: rng.integers(0, 999, 64))
    )
    a, b = draw().astype(kind), draw().astype(kind)
    out = a.copy()
    dst = m.global_memory.place(out)
    m.fill(0, 4096, b)
    m.add(
        0,
        f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{suffix} [%d], [4096], %n;" + DONE,
        LANE0,
        d=dst,
        n=out.nbytes,
    )
    m.run()
    assert (out == op(a, b).astype(kind)).all() or np.allclose(
        out.astype(float), op(a, b).astype(float), rtol=0
    )


def test_bulk_reduce_rows_differ_per_lane():
    """Lanes with different operands issue one operation each."""
    m = Machine()
    out = np.zeros((32, 16), np.float32)
    dst = m.global_memory.place(out)
    rows = np.arange(512, dtype=np.float32).reshape(32, 16)
    m.fill(0, 4096, rows)
    m.add(
        0, "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%d], [%s], 64;" + DONE,
        d=dst + 64 * (31 - LANES),
        s=4096 + 64 * LANES,
    )  # fmt: skip
    m.run()
    assert (out == rows[::-1]).all()


def test_bf16_add_rounds_once_to_nearest_even():
    values = np.array([1.0, 1.0, 256.0, -3.0, np.inf], ml_dtypes.bfloat16)
    adds = np.array([2**-8, 2**-7 * 1.5, 1.0, 3.0, -np.inf], ml_dtypes.bfloat16)
    out = values.copy()
    reduce_into(out.view(np.uint8), adds.view(np.uint8), "add", "bf16")
    want = (values.astype(np.float32) + adds.astype(np.float32)).astype(ml_dtypes.bfloat16)
    assert (out[:4] == want[:4]).all() and np.isnan(out[4])


def test_reduce_to_shared_of_another_cta():
    m = Machine(ctas=2)
    m.fill(0, 4096, np.full(16, 5, np.uint32))
    m.fill(1, 8192, np.full(16, 2, np.uint32))
    m.add(
        0,
        SYNC +
                "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32"
        " [%r], [4096], 64, [%rb];"
        + SYNC, LANE0, r=1 << 24 | 8192, rb=1 << 24 | BAR,
    )  # fmt: skip
    m.add(1, ARM + SYNC + WAIT + SYNC, LANE0, b=1 << 24 | BAR, bytes=64)
    m.run()
    assert (m.shared(1).data[8192:8256].view(np.uint32) == 7).all()


def test_wait_group_counts_groups():
    m = Machine()
    m.fill(0, 4096, some_bytes(64))
    out = np.zeros(64, np.uint8)
    dst = m.global_memory.place(out)
    one = (
        "cp.async.bulk.global.shared::cta.bulk_group [%d], [4096], 16; cp.async.bulk.commit_group;"
    )
    text = (
        one * 3
        + "cp.async.bulk.wait_group.read 1; bar.sync 1, 64;"
        + "cp.async.bulk.wait_group.read 0;"
    )
    m.add(0, text, LANE0, d=dst)
    left: list[int] = []
    original = m.find_handler

    def watch(instr):
        if instr.base == "setmaxnreg":
            left.append(int(m.shared().async_reads[4096]))
        return original(instr)

    m.find_handler = watch
    m.add(0, "bar.sync 1, 64; setmaxnreg.dec.sync.aligned.u32 40;")
    m.run()
    assert left == [1]


def test_illegal_bulk():
    for text, error in (
        ("cp.async.bulk.global.shared::cta.bulk_group [%d], [4096], 24;", IllegalInstruction),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d+8], [4096], 16;", IllegalInstruction),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d], [4100], 16;", Misaligned),
        ("cp.async.bulk.global.shared::cta.bulk_group [%d+64], [4096], 16;", OutOfBounds),
        (
            "cp.async.bulk.global.shared::cta.bulk_group.cp_mask [%d], [4096], 16, 3;",
            UnsupportedInstruction,
        ),
    ):
        m = Machine()
        m.fill(0, 4096, some_bytes(64))
        m.add(0, text + DONE, LANE0, d=m.global_memory.place(np.zeros(64, np.uint8)))
        with pytest.raises(error):
            m.run()


def test_prefetches():
    m = Machine()
    m.add(
        0,
        "cp.async.bulk.prefetch.L2.global [%d], 64; "
        "cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%d, {0, 0}];",
        LANE0,
        d=0,
    )
    m.run()


# ---- cp.async ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_cp_async_sizes(size, schedule):
    m = Machine(schedule=schedule)
    data = some_bytes(1024)
    src = m.global_memory.place(data)
    kind = "cg" if size == 16 else "ca"
    m.add(
        0, f"cp.async.{kind}.shared.global [%d], [%s], {size}; cp.async.commit_group; "
            "cp.async.wait_group 0;",
        d=4096 + size * LANES, s=src + size * (31 - LANES),
    )  # fmt: skip
    m.run()
    got = m.shared().data[4096 : 4096 + 32 * size].reshape(32, size)
    assert (got == data[: 32 * size].reshape(32, size)[::-1]).all()


def test_cp_async_zero_fill_and_ignore_src():
    m = Machine()
    data = some_bytes(1024)
    src = m.global_memory.place(data)
    take = np.where(LANES % 2, 16, LANES % 16)
    m.add(
        0,
        "cp.async.cg.shared.global [%d], [%s], 16, %n; cp.async.ca.shared::cta.global.L2::128B "
        "[%d+2048], [%s], 8, %pi;"
        "cp.async.wait_all;", d=4096 + 16 * LANES, s=src + 16 * LANES, n=take, pi=LANES % 3 == 0,
    )  # fmt: skip
    w = m.cluster.ctas[0].warps[0]
    w.instrs[1].operands = (
        *w.instrs[1].operands[:3],
        type(w.instrs[1].operands[3])(w.ids["%pi"], "pred", "%pi"),
    )
    m.run()
    rows = data[:512].reshape(32, 16)
    want = np.where(np.arange(16)[None] < take[:, None], rows, 0)
    assert (m.shared().data[4096:4608].reshape(32, 16) == want).all()
    got = m.shared().data[6144 : 6144 + 512].reshape(32, 16)[:, :8]
    assert (got == np.where((LANES % 3 == 0)[:, None], 0, rows[:, :8])).all()


def test_cp_async_zero_bytes_never_reads_memory():
    """src-size 0 is how kernels mask a lane: its address may be anything."""
    m = Machine()
    m.add(
        0,
        "cp.async.cg.shared.global [%d], [%s], 16, 0; cp.async.wait_all;",
        d=4096 + 16 * LANES,
        s=0,
    )
    m.run()
    assert not m.shared().data[4096:4608].any()


@pytest.mark.parametrize("noinc", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_cp_async_mbarrier_arrive(noinc, seed):
    """.noinc: the arrivals count against the init count; otherwise they are neutral."""
    m = Machine(schedule="random", seed=seed)
    data = some_bytes(512)
    src = m.global_memory.place(data)
    suffix = ".noinc" if noinc else ""
    text = (
        "bar.sync 1, 64; cp.async.cg.shared.global [%d], [%s], 16;"
        f"cp.async.mbarrier.arrive{suffix}.shared.b64 [{BAR}];"
    )
    if not noinc:
        text += f"mbarrier.arrive.shared.b64 _, [{BAR}];"
    m.add(0, text + "bar.sync 2, 64;", d=4096 + 16 * LANES, s=src + 16 * LANES)
    w = m.add(
        0, f"mbarrier.init.shared.b64 [{BAR}], 32; bar.sync 1, 64; "
            f"mbarrier.try_wait.parity.shared.b64 %p, [{BAR}], 0; bar.sync 2, 64;",
        LANE0,
    )  # fmt: skip
    m.run()
    assert w.values["%p"][0] == 1
    assert (m.shared().data[4096:4608] == data).all()


def test_cp_async_needs_a_proxy_fence_before_the_async_proxy():
    def machine(fence: str, check: bool = True) -> tuple[Machine, np.ndarray, np.ndarray]:
        m = Machine(checks=Checks(cp_async_fence=check))
        data, out = some_bytes(512), np.zeros(512, np.uint8)
        src, dst = m.global_memory.place(data), m.global_memory.place(out)
        text = "cp.async.cg.shared.global [%d], [%s], 16; cp.async.wait_all;" + fence
        store = "cp.async.bulk.global.shared::cta.bulk_group [%g], [4096], 512;" + DONE
        m.add(0, text + store, d=4096 + 16 * LANES, s=src + 16 * LANES, g=dst)
        return m, data, out

    m, data, out = machine("fence.proxy.async.shared::cta;")
    m.run()
    assert (out == data).all()
    m, _, _ = machine("")
    with pytest.raises(MissingProxyFence):
        m.run()
    m, data, out = machine("", check=False)
    m.run()
    assert (out == data).all()


def test_cp_async_over_a_busy_source():
    m = Machine()
    m.fill(0, 4096, some_bytes(512))
    out, src = np.zeros(512, np.uint8), m.global_memory.place(some_bytes(512))
    text = "cp.async.bulk.global.shared::cta.bulk_group [%g], [4096], 512;"
    text += "cp.async.cg.shared.global [%d], [%s], 16;" + DONE
    m.add(0, text, d=4096 + 16 * LANES, s=src + 16 * LANES, g=m.global_memory.place(out))
    with pytest.raises(SharedOverwrite):
        m.run()


def test_cp_async_misuse():
    for text, error in (
        ("cp.async.cg.shared.global [4096], [%s], 8;", IllegalInstruction),
        ("cp.async.ca.shared.global [4096], [%s], 4, 8;", IllegalInstruction),
        ("cp.async.cg.shared.global [4104], [%s], 16;", Misaligned),
        ("cp.async.cg.shared.global [4096], [%s+8], 16;", IllegalInstruction),
        ("cp.async.cg.shared.global [4096], [%s+512], 16; cp.async.wait_all;", OutOfBounds),
    ):
        m = Machine()
        m.add(0, text, LANE0, s=m.global_memory.place(some_bytes(512)))
        with pytest.raises(error):
            m.run()


# ---- st.async ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind,n", [("u32", 1), ("b64", 1), ("v4.b32", 4)])
def test_st_async(kind, n):
    m = Machine(ctas=2)
    values = "{%v, %v, %v, %v}" if n == 4 else "%v"
    size = {"u32": 4, "b64": 8, "v4.b32": 16}[kind]
    m.add(
        0, SYNC + f"st.async.shared::cluster.mbarrier::complete_tx::bytes.{kind} [%d], "
            f"{values}, [%rb];" + SYNC, LANE0,
        d=1 << 24 | 4096, rb=1 << 24 | BAR, v=0x1122334455667788,
    )  # fmt: skip
    w = m.add(1, ARM + SYNC + WAIT + SYNC, LANE0, b=1 << 24 | BAR, bytes=size)
    m.run()
    raw = (0x1122334455667788).to_bytes(8, "little")
    want = raw if kind == "b64" else raw[:4] * n
    assert m.shared(1).data[4096 : 4096 + size].tobytes() == want
    assert w.values["%p"][0] == 1


def test_red_async_add():
    m = Machine(ctas=2)
    m.fill(1, 4096, np.array([40], np.uint32))
    m.add(
        0, SYNC +
            "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 "
                "[%d], %v, [%rb];" + SYNC, LANE0,
        d=1 << 24 | 4096, rb=1 << 24 | BAR, v=2,
    )  # fmt: skip
    m.add(1, ARM + SYNC + WAIT + SYNC, LANE0, b=1 << 24 | BAR, bytes=4)
    m.run()
    assert m.shared(1).data[4096:4100].view(np.uint32)[0] == 42


def test_missing_bytes_deadlock_with_the_barrier_in_the_report():
    m = Machine()
    m.add(0, ARM + WAIT + "bar.sync 1, 64;", LANE0, b=BAR, bytes=64)
    m.add(0, "bar.sync 1, 64;")
    m.cluster.ctas[0].warps[0].instrs.insert(3, m.cluster.ctas[0].warps[0].instrs[2])
    with pytest.raises(Deadlock, match="64 bytes missing"):
        m.run()
