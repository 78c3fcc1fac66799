"""TMEM: allocation, ld/st of every shape, waits, cp of every shape, hazards."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.sim.checks import (
    BarrierError,
    Checks,
    Deadlock,
    IllegalInstruction,
    MissingProxyFence,
    SharedOverwrite,
    TmemError,
    TmemLeak,
    TmemRace,
    UninitialisedRead,
    UnsupportedInstruction,
)  # fmt: skip
from tests.sim.fakes import LANE0, Machine

ALL = np.ones(32, bool)
ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [2048], %n;"
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 %t, %n;"
LANE = np.arange(32)


def tmem(m: Machine, rank: int = 0):
    return m.cluster.ctas[rank].tmem


def prepared(columns: int = 64, **kw) -> tuple[Machine, np.ndarray]:
    """A machine whose first run step gives the CTA `columns` columns full of distinct values."""
    m = Machine(**kw)
    values = np.arange(128 * 512, dtype=np.uint32).reshape(128, 512) * 7 + 1

    original = m.find_handler

    def fill(instr):
        t = tmem(m)
        if not t.allocations:
            t.take(0, columns, 1, True)
            t.data[:, :columns] = values[:, :columns]
            t.written[:, :columns] = True
        return original(instr)

    m.find_handler = fill
    return m, values


# ---- allocation ----------------------------------------------------------------------------------


def test_alloc_writes_the_address_and_dealloc_frees():
    m = Machine()
    m.add(
        0, ALLOC + "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + FREE, n=128, t=0
    )
    m.run()
    assert m.shared().data[2048:2052].view(np.uint32)[0] == 0
    assert tmem(m).peak == 128 and not tmem(m).owned.any()


def test_two_allocations_do_not_overlap():
    m = Machine()
    m.add(
        0, ALLOC + ALLOC.replace("2048", "2052") + FREE + FREE.replace("%t", "%u"), n=64, t=0, u=64
    )
    m.run()
    assert m.shared().data[2048:2056].view(np.uint32).tolist() == [0, 64]


@pytest.mark.parametrize("n", [0, 16, 48, 1024])
def test_alloc_sizes(n):
    m = Machine()
    m.add(0, ALLOC, n=n)
    with pytest.raises(IllegalInstruction, match="columns"):
        m.run()


def test_leak():
    m = Machine()
    m.add(0, ALLOC, n=32)
    with pytest.raises(TmemLeak, match=r"\[0, 32\)"):
        m.run()


def test_alloc_after_relinquish_and_double_free():
    m = Machine()
    m.add(0, "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" + ALLOC, n=32)
    with pytest.raises(TmemError, match="relinquish"):
        m.run()
    m = Machine()
    m.add(0, ALLOC + FREE * 2, n=32, t=0)
    with pytest.raises(TmemError, match="starts no allocation"):
        m.run()
    m = Machine()
    m.add(0, ALLOC + FREE.replace("%n", "64"), n=32, t=0)
    with pytest.raises(TmemError, match="32 were allocated"):
        m.run()


def test_contention_blocks_and_shows_in_the_deadlock():
    m = Machine()
    m.add(0, ALLOC + "bar.sync 1, 64;" + FREE, n=512, t=0)
    m.add(0, "nanosleep.u32 1;" + ALLOC.replace("2048", "2056") + "bar.sync 1, 64;", n=32)
    with pytest.raises(Deadlock, match=r"tcgen05\.alloc of 32 columns"):
        m.run()
    m = Machine()
    m.add(0, ALLOC + "nanosleep.u32 1;" * 3 + FREE, n=512, t=0)
    m.add(0, "nanosleep.u32 1;" + ALLOC.replace("2048", "2056") + FREE, n=32, t=0)
    m.run()


@pytest.mark.parametrize("seed", range(4))
def test_pair_allocates_together(seed):
    """Whichever CTA of a pair comes first, both get the same columns, in both."""
    m = Machine(ctas=2, schedule="random", seed=seed)
    a, f = ALLOC.replace("group::1", "group::2"), FREE.replace("group::1", "group::2")
    for rank in range(2):
        m.add(rank, a + "barrier.cluster.arrive; barrier.cluster.wait;" + f, n=256, t=0)
    m.run()
    assert tmem(m, 0).peak == tmem(m, 1).peak == 256


def test_pair_leak_of_the_silent_partner():
    m = Machine(ctas=2)
    m.add(0, (ALLOC + FREE).replace("group::1", "group::2"), n=32, t=0)
    m.add(1, "nanosleep.u32 1;" * 5)
    with pytest.raises(TmemLeak):
        m.run()


# ---- ld / st -------------------------------------------------------------------------------------


def cells(shape: str, num: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """[(lane, column) of register i for all threads], from figures 184-190 of the PTX manual,
    written as loops."""
    out = []
    for rep in range(num):
        if shape == "32x32b":
            out.append((LANE, np.full(32, rep)))
        elif shape == "16x64b":
            out.append((LANE // 4 + LANE % 2 * 8, rep * 2 + LANE // 2 % 2))
        elif shape == "16x128b":
            for half in range(2):
                out.append((LANE // 4 + 8 * half, rep * 4 + LANE % 4))
        elif shape == "16x256b":
            for half in range(2):
                for pair in range(2):
                    out.append((LANE // 4 + 8 * half, rep * 8 + LANE % 4 * 2 + pair))
    return out


LDST = [("32x32b", n) for n in (1, 2, 4, 8, 16, 32, 64, 128)]
LDST += (
    [("16x64b", n) for n in (1, 2, 16)]
    + [("16x128b", n) for n in (1, 4, 16)]
    + [("16x256b", n) for n in (1, 2, 4, 8)]
)


@pytest.mark.parametrize("shape,num", LDST)
@pytest.mark.parametrize("warp", [0, 3])
def test_ld(shape, num, warp):
    m, values = prepared(256)
    want = cells(shape, num)
    regs = ", ".join(f"%r{i}" for i in range(len(want)))
    for w in range(warp + 1):
        text = (
            f"tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {{{regs}}}, [%a]; "
            "tcgen05.wait::ld.sync.aligned;"
        )
        m.add(0, (text if w == warp else "nanosleep.u32 1;"), a=(32 * w) << 16 | 32)
    m.checks = m.checks.__class__(tmem_leak=False)
    m.run()
    got = m.cluster.ctas[0].warps[warp].values
    for i, (lane, column) in enumerate(want):
        assert (got[f"%r{i}"] == values[32 * warp + lane, 32 + column]).all(), i
    assert not tmem(m).loads.any()


@pytest.mark.parametrize("shape,num", LDST)
def test_st_then_ld(shape, num):
    m, _ = prepared(256)
    want = cells(shape, num)
    regs = {f"r{i}": np.arange(32) * 1000 + i for i in range(len(want))}
    names = ", ".join("%" + k for k in regs)
    m.add(
        0,
        f"tcgen05.st.sync.aligned.{shape}.x{num}.b32 [%a], {{{names}}}; "
        "tcgen05.wait::st.sync.aligned;",
        a=64,
        **regs,
    )
    m.checks = m.checks.__class__(tmem_leak=False)
    m.run()
    for i, (lane, column) in enumerate(want):
        assert (tmem(m).data[lane, 64 + column] == np.arange(32) * 1000 + i).all()


def test_16x32bx2():
    m, values = prepared(64)
    text = (
        "tcgen05.ld.sync.aligned.16x32bx2.x2.b32 {%x, %y}, [%a], 16; tcgen05.wait::ld.sync.aligned;"
    )
    w = m.add(0, text, a=16 << 16 | 4)
    m.checks = m.checks.__class__(tmem_leak=False)
    m.run()
    column = np.where(LANE < 16, 4, 20)
    assert (w.values["%x"] == values[16 + LANE % 16, column]).all()
    assert (w.values["%y"] == values[16 + LANE % 16, column + 1]).all()


def test_pack_and_unpack():
    m, values = prepared(64)
    text = (
        "tcgen05.ld.sync.aligned.32x32b.x2.pack::16b.b32 {%x, %y}, [%a]; "
        "tcgen05.wait::ld.sync.aligned;"
        "tcgen05.st.sync.aligned.32x32b.x2.unpack::16b.b32 [%b], {%x, %y}; "
        "tcgen05.wait::st.sync.aligned;"
    )
    w = m.add(0, text, a=0, b=32)
    m.checks = m.checks.__class__(tmem_leak=False)
    m.run()
    low = values[:32, :4] & 0xFFFF
    assert (w.values["%x"] == (low[:, 0] | low[:, 1] << 16)).all()
    assert (w.values["%y"] == (low[:, 2] | low[:, 3] << 16)).all()
    assert (tmem(m).data[:32, 32:36] == low).all()


def run_error(text, error, match, columns=64, warps=1, written=True, **regs):
    m, _ = prepared(columns)
    for _ in range(warps - 1):
        m.add(0, "bar.sync 9, 32;")
    m.add(0, text, **regs)
    if not written:
        original = m.find_handler

        def blank(instr):
            handler = original(instr)
            tmem(m).written[:] = False
            return handler

        m.find_handler = blank
    with pytest.raises(error, match=match) as caught:
        m.run()
    assert caught.value.line is not None and caught.value.warp == warps - 1


LD1 = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {%r}, [%a];"


def test_ld_misuse():
    run_error(LD1, TmemError, "outside every allocation", a=64)
    run_error(LD1, TmemError, "beyond", a=600)
    run_error(LD1, TmemError, "lanes 0..31 only", a=32 << 16)
    run_error(LD1, TmemError, "lanes 32..63 only", a=0, warps=2)
    run_error(LD1, UninitialisedRead, "never written", a=0, written=False)
    run_error(LD1, IllegalInstruction, "same address", a=LANE)
    run_error(
        "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r}, [%a];", IllegalInstruction, "2 registers", a=0
    )
    run_error("tcgen05.shift.cta_group::1.down [%a];", UnsupportedInstruction, "not modelled", a=0)
    run_error(
        "tcgen05.ld.red.sync.aligned.32x32b.x2.max.f32 {%r, %s}, %q, [%a];",
        UnsupportedInstruction,
        "sm_100",
        a=0,
    )


def test_dealloc_under_a_load():
    run_error(
        LD1 + "tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, 64;",
        TmemRace,
        "wait::ld is missing",
        a=0,
    )


def test_store_without_wait_is_seen_by_others():
    m, _ = prepared(64)
    m.add(
        0,
        "tcgen05.st.sync.aligned.32x32b.x1.b32 [%a], {%r}; bar.sync 1, 64; bar.sync 2, 64;",
        a=0,
        r=1,
    )
    m.add(0, "bar.sync 1, 64; bar.sync 2, 64;")
    original = m.find_handler
    seen: list[bool] = []

    def watch(instr):
        if instr.operands and getattr(instr.operands[0], "bits", 0) == 2:
            seen.append(bool(tmem(m).busy_write.any()))
        return original(instr)

    m.find_handler = watch
    m.checks = m.checks.__class__(tmem_leak=False)
    m.run()
    assert seen[0]


# ---- cp ------------------------------------------------------------------------------------------


def descriptor(addr: int, sbo: int, lbo: int = 16, layout: int = 0) -> int:
    return addr >> 4 | (lbo >> 4) << 16 | (sbo >> 4) << 32 | 1 << 46 | layout << 61


COMMIT = (
    "mbarrier.init.shared.b64 [1024], 1; "
    "tcgen05.commit.cta_group::{g}.mbarrier::arrive::one.shared::cluster.b64 [1024];"
    "mbarrier.try_wait.parity.shared.b64 %p, [1024], 0;"
)


def copied(
    shape: str, mods: str, rows: int, row_bytes: int, lbo: int = 1024, schedule="random", seed=0
):
    m, _ = prepared(64, schedule=schedule, seed=seed)
    data = np.random.default_rng(1).integers(0, 256, (rows, row_bytes)).astype(np.uint8)
    image = np.zeros(16384, np.uint8)
    for r in range(rows):
        for c in range(row_bytes // 16):
            at = r % 8 * 16 + r // 8 * 128 + c * lbo
            image[at : at + 16] = data[r, 16 * c : 16 * c + 16]
    m.fill(0, 4096, image)
    m.add(
        0,
        f"tcgen05.cp.cta_group::1.{shape}{mods} [%a], %d;" + COMMIT.format(g=1),
        LANE0,
        a=8,
        d=descriptor(4096, 128, lbo),
    )
    m.checks = m.checks.__class__(tmem_leak=False)
    m.run()
    return tmem(m).data[:, 8 : 8 + row_bytes // 4], data.view(np.uint32), m


def test_cp_scale_tile():
    """32x128b.warpx4: row r -> lane r of all four partitions."""
    got, want, m = copied("32x128b", ".warpx4", 32, 16)
    assert (got.reshape(4, 32, 4) == want).all()
    assert not m.shared().async_reads.any() and not tmem(m).busy_write.any()


def test_cp_warpx2():
    got, want, _ = copied("64x128b", ".warpx2::02_13", 64, 16)
    assert (got == np.concatenate([want, want])).all()
    got, want, _ = copied("64x128b", ".warpx2::01_23", 64, 16)
    assert (got == np.concatenate([want[:32], want[:32], want[32:], want[32:]])).all()


@pytest.mark.parametrize("shape,row_bytes", [("128x128b", 16), ("128x256b", 32)])
def test_cp_full(shape, row_bytes):
    got, want, _ = copied(shape, "", 128, row_bytes, lbo=4096)
    assert (got == want).all()


def test_cp_4x256b():
    got, want, _ = copied("4x256b", "", 4, 32)
    assert (got[[0, 32, 64, 96]] == want).all()


def test_cp_pair_copies_from_each_own_shared_memory():
    m = Machine(ctas=2)
    for rank in range(2):
        m.fill(rank, 4096, np.full(512, 5 + rank, np.uint8))
    a, f = ALLOC.replace("group::1", "group::2"), FREE.replace("group::1", "group::2")
    sync = "barrier.cluster.arrive; barrier.cluster.wait;"
    text = (
        a
        + sync
        + "tcgen05.cp.cta_group::2.32x128b.warpx4 [%a], %d;"
        + COMMIT.format(g=2)
        + sync
        + f
    )
    m.add(0, text, LANE0, n=32, t=0, a=0, d=descriptor(4096, 128))
    m.add(1, a + sync + sync + f, n=32, t=0)
    seen = {}
    original = m.find_handler

    def watch(instr):
        if "dealloc" in instr.mods:
            for rank in range(2):
                seen.setdefault(rank, tmem(m, rank).data[:, :4].copy())
        return original(instr)

    m.find_handler = watch
    m.run()
    assert (seen[0] == 0x05050505).all() and (seen[1] == 0x06060606).all()


def test_cp_misuse():
    for mods, error, match in (
        ("32x128b.warpx4.b8x16.b4x16_p64", UnsupportedInstruction, "decompress"),
        ("8x128b", UnsupportedInstruction, "shape"),
    ):
        m, _ = prepared(64)
        m.add(0, f"tcgen05.cp.cta_group::1.{mods} [%a], %d;", LANE0, a=0, d=descriptor(4096, 128))
        with pytest.raises(error, match=match):
            m.run()
    m, _ = prepared(64)
    m.store(0, 4096, np.zeros(512, np.uint8), thread=3)
    m.add(
        0, "tcgen05.cp.cta_group::1.32x128b.warpx4 [%a], %d;", LANE0, a=0, d=descriptor(4096, 128)
    )
    with pytest.raises(MissingProxyFence, match="thread 3"):
        m.run()
    m, _ = prepared(64)
    m.add(
        0,
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%a], %d;" + COMMIT.format(g=1),
        LANE0,
        a=0,
        d=descriptor(4096, 128),
    )
    with pytest.raises(UninitialisedRead):
        m.run()
    m, _ = prepared(64)
    m.add(0, "tcgen05.cp.cta_group::1.32x128b.warpx4 [%a], %d;", LANE0, a=0, d=1)
    with pytest.raises(IllegalInstruction, match="46-48"):
        m.run()


def test_cp_source_is_busy_until_the_commit_arrives():
    m, _ = prepared(64)
    m.fill(0, 4096, np.zeros(512, np.uint8))
    src = m.global_memory.place(np.zeros(512, np.uint8))
    text = (
        "tcgen05.cp.cta_group::1.32x128b.warpx4 [%a], %d; cp.async.cg.shared.global "
        "[4096], [%s], 16;"
    )
    m.add(0, text, LANE0, a=0, d=descriptor(4096, 128), s=src)
    with pytest.raises(SharedOverwrite):
        m.run()


@pytest.mark.parametrize("fence", ["mbarrier_init.release.cluster", "proxy.async", ""])
def test_a_commit_needs_a_fence_behind_the_initialisation_of_its_barrier(fence):
    m = Machine(checks=Checks(mbarrier_init_fence=True))
    init, rest = COMMIT.format(g=1).split("; ", 1)
    m.add(0, f"{init}; " + (f"fence.{fence}; " if fence else "") + rest, LANE0)
    if fence:
        m.run()
    else:
        with pytest.raises(BarrierError, match=r"used by a commit, but warp 0 .* no fence"):
            m.run()
