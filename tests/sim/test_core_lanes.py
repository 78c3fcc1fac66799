"""Instructions between lanes, divergence, and control flow, on both cores."""

# ruff: noqa: E501 (PTX and tables)
from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.sim.checks import IllegalInstruction, SimError, UnsupportedInstruction
from tests.sim.onewarp import CORES, evaluate, launch, u32

LANE = np.arange(32)
VALUES = ((LANE * 37 + 5) % 101).astype(np.uint32)
ALL = "0xffffffff"


def shuffled(mode: str, distance: int, clamp: int) -> list[int]:
    """The definition in the PTX manual, lane by lane."""
    out = []
    for lane in range(32):
        segment, bound = clamp >> 8 & 31, clamp & 31
        top, low = (lane & segment) | (bound & ~segment & 31), lane & segment
        source = {
            "up": lane - distance, "down": lane + distance, "bfly": lane ^ distance,
            "idx": low | (distance & ~segment & 31),
        }[mode]  # fmt: skip
        inside = source >= top if mode == "up" else source <= top
        out.append(int(VALUES[source if inside else lane]) | (int(inside) << 16))
    return out


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("mode", "distance", "clamp"),
    [("up", 1, 0), ("up", 7, 0x1800), ("down", 3, 31), ("down", 2, 0x1C1F), ("bfly", 16, 31),
     ("bfly", 1, 31), ("idx", 0, 31), ("idx", 5, 0x181F)],
)  # fmt: skip
def test_shfl(core: str, mode: str, distance: int, clamp: int) -> None:
    body = (
        f"shfl.sync.{mode}.b32 %r1|%p1, %a0, {distance}, {clamp}, {ALL};"
        "selp.b32 %r2, 0x10000, 0, %p1; or.b32 %d, %r1, %r2;"
    )
    assert evaluate(core, body, [VALUES], np.uint32).tolist() == shuffled(mode, distance, clamp)


@pytest.mark.parametrize("core", CORES)
def test_votes(core: str) -> None:
    flags = (LANE % 3 == 0).astype(np.uint32)
    ballot = int(sum(1 << i for i in range(32) if flags[i]))
    head = "setp.ne.b32 %p1, %a0, 0;"
    got = evaluate(core, f"{head} vote.sync.ballot.b32 %d, %p1, {ALL};", [flags], np.uint32)
    assert set(got.tolist()) == {ballot}
    for mode, source, want in (("any", flags, 1), ("all", flags, 0), ("uni", flags, 0),
                               ("all", np.ones(32, np.uint32), 1), ("any", 0 * flags, 0),
                               ("uni", 0 * flags, 1)):  # fmt: skip
        body = f"{head} vote.sync.{mode}.pred %p2, %p1, {ALL}; selp.b32 %d, 1, 0, %p2;"
        assert set(evaluate(core, body, [source], np.uint32).tolist()) == {want}, mode


@pytest.mark.parametrize("core", CORES)
def test_elect_is_the_lowest_lane_of_those_that_are_there(core: str) -> None:
    body = (
        "setp.ge.u32 %p1, %a0, 10; mov.b32 %d, 7; @!%p1 bra DONE;"
        "elect.sync %r1|%p2, 0xfffffc00; selp.b32 %r2, 256, 0, %p2; or.b32 %d, %r1, %r2; DONE:"
    )
    got = evaluate(core, body, [u32(*range(32))], np.uint32)
    assert got.tolist() == [7] * 10 + [10 | 256] + [10] * 21


@pytest.mark.parametrize("core", CORES)
def test_match(core: str) -> None:
    values = (LANE % 5).astype(np.uint32)
    got = evaluate(core, f"match.any.sync.b32 %d, %a0, {ALL};", [values], np.uint32)
    want = [sum(1 << j for j in range(32) if j % 5 == i % 5) for i in range(32)]
    assert got.tolist() == want
    body = f"match.all.sync.b32 %r1|%p1, %a0, {ALL}; selp.b32 %d, %r1, 1, %p1;"
    assert set(evaluate(core, body, [0 * values + 9], np.uint32).tolist()) == {0xFFFFFFFF}
    assert set(evaluate(core, body, [values], np.uint32).tolist()) == {1}


@pytest.mark.parametrize("core", CORES)
def test_redux(core: str) -> None:
    v = u32(*(int(x) * 0x01234567 for x in VALUES))
    signed = v.view(np.int32)
    table = {
        "add.s32": int(signed.sum()), "min.s32": int(signed.min()), "max.s32": int(signed.max()),
        "min.u32": int(v.min()), "max.u32": int(v.max()), "and.b32": int(np.bitwise_and.reduce(v)),
        "or.b32": int(np.bitwise_or.reduce(v)), "xor.b32": int(np.bitwise_xor.reduce(v)),
    }  # fmt: skip
    for form, want in table.items():
        got = evaluate(core, f"redux.sync.{form} %d, %a0, {ALL};", [v], np.uint32)
        assert set(got.tolist()) == {want & 0xFFFFFFFF}, form
    x = np.linspace(-4, 3, 32, dtype=np.float32)
    bits = x.view(np.uint32)
    for form, expected in (("min.f32", -4.0), ("max.f32", 3.0), ("max.abs.f32", 4.0)):
        got = evaluate(core, f"redux.sync.{form} %d, %a0, {ALL};", [bits], np.float32)
        assert set(got.tolist()) == {expected}, form
    with_nan = x.copy()
    with_nan[3] = np.nan
    got = evaluate(
        core, f"redux.sync.max.f32 %d, %a0, {ALL};", [with_nan.view(np.uint32)], np.float32
    )
    assert set(got.tolist()) == {3.0}
    got = evaluate(
        core, f"redux.sync.max.NaN.f32 %d, %a0, {ALL};", [with_nan.view(np.uint32)], np.float32
    )
    assert np.isnan(got).all()


@pytest.mark.parametrize("core", CORES)
def test_lanes_that_diverge_meet_again(core: str) -> None:
    """Each lane loops its own number of times; the shuffle behind the loop sees all of them."""
    body = (
        "mov.b32 %r1, 0; LOOP: setp.ge.u32 %p1, %r1, %a0; @%p1 bra END; add.s32 %r1, %r1, 1; bra LOOP;"
        f"END: shfl.sync.bfly.b32 %r2, %r1, 31, 31, {ALL}; shl.b32 %r2, %r2, 8; or.b32 %d, %r1, %r2;"
    )
    got = evaluate(core, body, [VALUES], np.uint32)
    assert got.tolist() == [int(VALUES[i]) | int(VALUES[31 - i]) << 8 for i in range(32)]


@pytest.mark.parametrize("core", CORES)
def test_a_branch_table(core: str) -> None:
    body = (
        "T: .branchtargets L0, L1, L2; rem.u32 %r1, %a0, 3; brx.idx %r1, T;"
        "L0: mov.b32 %d, 100; bra E; L1: mov.b32 %d, 200; bra E; L2: mov.b32 %d, 300; E:"
    )
    got = evaluate(core, body, [u32(*range(32))], np.uint32)
    assert got.tolist() == [(1 + i % 3) * 100 for i in range(32)]


@pytest.mark.parametrize("core", CORES)
def test_activemask_and_guards(core: str) -> None:
    body = "mov.b32 %d, 0; setp.lt.u32 %p1, %a0, 4; @%p1 activemask.b32 %d;"
    got = evaluate(core, body, [u32(*range(32))], np.uint32)
    assert got.tolist()[4:] == [0] * 28
    assert got.tolist()[:4] == [15] * 4


@pytest.mark.parametrize("core", CORES)
def test_special_registers(core: str) -> None:
    names = {"laneid": LANE, "tid.x": LANE, "ntid.x": 0 * LANE + 32, "ctaid.y": 0 * LANE,
             "lanemask_lt": (1 << LANE) - 1, "warpid": 0 * LANE, "cluster_nctarank": 0 * LANE + 1}  # fmt: skip
    for name, want in names.items():
        got = evaluate(core, f"mov.u32 %d, %{name};", [VALUES], np.uint32)
        assert got.tolist() == want.tolist(), name
    body = "mov.u64 %rd2, %globaltimer; mov.u64 %rd3, %globaltimer; sub.s64 %d, %rd3, %rd2;"
    assert (evaluate(core, body, [VALUES], np.int64) > 0).all()


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(
    ("body", "error", "text"),
    [("trap;", IllegalInstruction, "trap"),
     ("shfl.sync.idx.b32 %d, %a0, 0, 31, 0xff;", IllegalInstruction, "membermask"),
     ("frobnicate.b32 %d, %a0;", UnsupportedInstruction, "frobnicate.b32"),
     ("add.q7 %d, %a0, %a0;", UnsupportedInstruction, "add.q7")],
)  # fmt: skip
def test_faults_name_the_ptx_line(core: str, body: str, error: type[SimError], text: str) -> None:
    with pytest.raises(error) as caught:
        evaluate(core, body, [VALUES], np.uint32)
    assert text in str(caught.value)
    assert "at PTX line" in str(caught.value)


@pytest.mark.parametrize("core", CORES)
def test_a_kernel_without_threads_left_over_ends(core: str) -> None:
    """A block that is no multiple of 32: the missing lanes take no part in collectives."""
    text = (
        ".version 9.0\n.target sm_100a\n.address_size 64\n.visible .entry k()\n{\n.reg .b32 %r<4>;\n"
        f"mov.u32 %r1, %tid.x;\nshfl.sync.idx.b32 %r2, %r1, 0, 31, {ALL};\nbar.sync 0;\nret;\n}}\n"
    )
    result = launch(text, b"", core=core, block=(40, 1, 1))
    assert result.counters is not None
