"""Integer instructions, one by one, on both cores; the values follow the definitions of the PTX manual."""

# ruff: noqa: E501 (PTX and tables)
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.sim.onewarp import CORES, evaluate, u16, u32, u64

BOTH, COMPILED = CORES, ("compiled",)
M32, M64 = 0xFFFFFFFF, 2**64 - 1
# (instruction, sources, expected, cores)
CASES: list[tuple[str, list[Any], Any, tuple[str, ...]]] = [
    ("add.s32 %d, %a0, %a1;", [u32(1, M32, 0x7FFFFFFF), u32(2, 1, 1)], u32(3, 0, 0x80000000), BOTH),
    ("add.s16 %d, %a0, %a1;", [u16(0xFFFF, 5), u16(1, 6)], u16(0, 11), BOTH),
    ("add.u64 %d, %a0, %a1;", [u64(M32, M64), u64(1, 1)], u64(1 << 32, 0), BOTH),
    ("add.sat.s32 %d, %a0, %a1;", [u32(0x7FFFFFFF, 1, 0x80000000), u32(1, 2, M32)],
     u32(0x7FFFFFFF, 3, 0x80000000), COMPILED),
    ("sub.sat.s32 %d, %a0, %a1;", [u32(0x80000000, 7), u32(1, 9)], u32(0x80000000, -2), COMPILED),
    ("sub.s32 %d, %a0, %a1;", [u32(1, 0), u32(2, 0x80000000)], u32(M32, 0x80000000), BOTH),
    ("mul.lo.s32 %d, %a0, %a1;", [u32(-3, 0x10000), u32(5, 0x10000)], u32(-15, 0), BOTH),
    ("mul.hi.s32 %d, %a0, %a1;", [u32(-1, 0x40000000), u32(1, 8)], u32(-1, 2), BOTH),
    ("mul.hi.u32 %d, %a0, %a1;", [u32(M32, 0x40000000), u32(M32, 8)], u32(M32 - 1, 2), BOTH),
    ("mul.hi.u64 %d, %a0, %a1;", [u64(M64, 1 << 63), u64(M64, 4)], u64(M64 - 1, 2), BOTH),
    ("mul.hi.s64 %d, %a0, %a1;", [u64(-1, 1 << 62), u64(1, 8)], u64(-1, 2), BOTH),
    ("mul.wide.s32 %d, %a0, %a1;", [u32(-2, 0x7FFFFFFF), u32(3, 2)], u64(-6, 0xFFFFFFFE), BOTH),
    ("mul.wide.u32 %d, %a0, %a1;", [u32(M32), u32(M32)], u64(M32 * M32), BOTH),
    ("mul.wide.s16 %d, %a0, %a1;", [u16(-2), u16(3)], u32(-6), BOTH),
    ("mad.lo.s32 %d, %a0, %a1, %a2;", [u32(3, -1), u32(4, 5), u32(5, 6)], u32(17, 1), BOTH),
    ("mad.hi.u32 %d, %a0, %a1, %a2;", [u32(1 << 31), u32(6), u32(5)], u32(8), BOTH),
    ("mad.wide.s32 %d, %a0, %a1, %a2;", [u32(-1), u32(7), u64(3)], u64(-4), BOTH),
    ("div.s32 %d, %a0, %a1;", [u32(7, -7, 7, -7), u32(2, 2, -2, -2)], u32(3, -3, -3, 3), BOTH),
    ("div.u32 %d, %a0, %a1;", [u32(M32, 9), u32(2, 10)], u32(0x7FFFFFFF, 0), BOTH),
    ("rem.s32 %d, %a0, %a1;", [u32(7, -7, 7), u32(3, 3, -3)], u32(1, -1, 1), BOTH),
    ("rem.u64 %d, %a0, %a1;", [u64(M64), u64(10)], u64(M64 % 10), BOTH),
    ("abs.s32 %d, %a0;", [u32(-5, 5)], u32(5, 5), BOTH),
    ("neg.s32 %d, %a0;", [u32(5, 0)], u32(-5, 0), BOTH),
    ("min.s32 %d, %a0, %a1;", [u32(-1, 2), u32(1, 1)], u32(-1, 1), BOTH),
    ("min.u32 %d, %a0, %a1;", [u32(-1, 2), u32(1, 1)], u32(1, 1), BOTH),
    ("max.s64 %d, %a0, %a1;", [u64(-1, 2), u64(1, 1)], u64(1, 2), BOTH),
    ("max.u64 %d, %a0, %a1;", [u64(-1, 2), u64(1, 1)], u64(-1, 2), BOTH),
    ("min.relu.s32 %d, %a0, %a1;", [u32(-4, 4), u32(9, 3)], u32(0, 3), BOTH),
    ("max.u16x2 %d, %a0, %a1;", [u32(0x0001FFFF), u32(0x00020001)], u32(0x0002FFFF), BOTH),
    ("max.s16x2 %d, %a0, %a1;", [u32(0x0001FFFF), u32(0x00020001)], u32(0x00020001), BOTH),
    ("and.b32 %d, %a0, %a1;", [u32(0xF0F0), u32(0xFF00)], u32(0xF000), BOTH),
    ("or.b64 %d, %a0, %a1;", [u64(1 << 40), u64(1)], u64(1 << 40 | 1), BOTH),
    ("xor.b32 %d, %a0, %a1;", [u32(0xFF), u32(0x0F)], u32(0xF0), BOTH),
    ("not.b32 %d, %a0;", [u32(0)], u32(M32), BOTH),
    ("cnot.b32 %d, %a0;", [u32(0, 7)], u32(1, 0), BOTH),
    ("shl.b32 %d, %a0, %a1;", [u32(1, 1, 1), u32(4, 31, 32)], u32(16, 1 << 31, 0), BOTH),
    ("shr.u32 %d, %a0, %a1;", [u32(M32, M32), u32(4, 40)], u32(0x0FFFFFFF, 0), BOTH),
    ("shr.s32 %d, %a0, %a1;", [u32(-16, -1), u32(2, 99)], u32(-4, -1), BOTH),
    ("shr.u64 %d, %a0, %a1;", [u64(M64), u32(60)], u64(15), BOTH),
    ("shf.l.wrap.b32 %d, %a0, %a1, %a2;", [u32(0x80000000), u32(1), u32(33)], u32(3), BOTH),
    ("shf.r.clamp.b32 %d, %a0, %a1, %a2;", [u32(5), u32(7), u32(40)], u32(7), BOTH),
    ("shf.r.wrap.b32 %d, %a0, %a1, %a2;", [u32(2), u32(1), u32(1)], u32(0x80000001), BOTH),
    ("lop3.b32 %d, %a0, %a1, %a2, 0xE8;", [u32(0xF0), u32(0xCC), u32(0xAA)], u32(0xE8), BOTH),
    ("prmt.b32 %d, %a0, %a1, %a2;", [u32(0x33221100), u32(0x77665584), u32(0xC710)],
     u32(0xFF771100), BOTH),
    ("prmt.b32.f4e %d, %a0, %a1, %a2;", [u32(0x33221100), u32(0x77665544), u32(1)],
     u32(0x44332211), COMPILED),
    ("prmt.b32.rc8 %d, %a0, %a1, %a2;", [u32(0x33221100), u32(0), u32(2)], u32(0x22222222), COMPILED),
    ("bfe.u32 %d, %a0, %a1, %a2;", [u32(0xABCD), u32(4), u32(8)], u32(0xBC), BOTH),
    ("bfe.s32 %d, %a0, %a1, %a2;", [u32(0xABCD, 0x80000000), u32(4, 28), u32(8, 8)],
     u32(0xFFFFFFBC, 0xFFFFFFF8), BOTH),
    ("bfi.b32 %d, %a0, %a1, %a2, %a3;", [u32(0xF), u32(0), u32(8), u32(4)], u32(0xF00), BOTH),
    ("popc.b32 %d, %a0;", [u32(0xFF, 0)], u32(8, 0), BOTH),
    ("popc.b64 %d, %a0;", [u64(M64)], u32(64), BOTH),
    ("clz.b32 %d, %a0;", [u32(1, 0)], u32(31, 32), BOTH),
    ("bfind.u32 %d, %a0;", [u32(0x100, 0)], u32(8, M32), BOTH),
    ("bfind.s32 %d, %a0;", [u32(-2, -1)], u32(0, M32), BOTH),
    ("bfind.shiftamt.u32 %d, %a0;", [u32(0x100)], u32(23), BOTH),
    ("brev.b32 %d, %a0;", [u32(1, 0xF0000000)], u32(1 << 31, 0xF), BOTH),
    ("dp4a.s32.s32 %d, %a0, %a1, %a2;", [u32(0xFF020304), u32(0x01010101), u32(10)], u32(18), COMPILED),
    ("dp4a.u32.u32 %d, %a0, %a1, %a2;", [u32(0xFF020304), u32(0x01010101), u32(10)], u32(274), COMPILED),
    ("sad.s32 %d, %a0, %a1, %a2;", [u32(-3), u32(4), u32(10)], u32(17), COMPILED),
    ("mov.b32 %d, {%a0, %a1};", [u16(0x1234), u16(0xABCD)], u32(0xABCD1234), BOTH),
    ("mov.b64 {%r1, %r2}, %a0; mov.b32 %d, %r2;", [u64(0x1_00000002)], u32(1), BOTH),
    ("mov.b32 {_, %h1}, %a0; mov.b16 %d, %h1;", [u32(0x12345678)], u16(0x1234), BOTH),
    ("setp.lt.s32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u32(-1, 1), u32(0, 0)], u32(1, 0), BOTH),
    ("setp.lt.u32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u32(-1, 1), u32(0, 2)], u32(0, 1), BOTH),
    ("setp.hs.u32 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u32(2, 1), u32(2, 2)], u32(1, 0), BOTH),
    ("setp.ge.u64 %p1, %a0, %a1; selp.b32 %d, 1, 0, %p1;", [u64(M64), u64(1)], u32(1), BOTH),
    # the second predicate is the complement of the comparison, combined with the same third one
    ("setp.ne.b32 %p0, %a2, 0; setp.eq.and.s32 %p1|%p2, %a0, %a1, %p0;"
     "selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; or.b32 %d, %r1, %r2;",
     [u32(5, 5, 5, 5), u32(5, 4, 5, 4), u32(1, 1, 0, 0)], u32(1, 2, 0, 0), BOTH),
    ("setp.ne.b32 %p0, %a1, 0; setp.gt.or.s32 %p1, %a0, 3, !%p0; selp.b32 %d, 1, 0, %p1;",
     [u32(4, 2, 2), u32(1, 1, 0)], u32(1, 0, 1), BOTH),
    ("cvt.u32.u16 %d, %a0;", [u16(0xFFFF)], u32(0xFFFF), BOTH),
    ("cvt.s32.s16 %d, %a0;", [u16(0xFFFF)], u32(M32), BOTH),
    ("cvt.s64.s32 %d, %a0;", [u32(-7)], u64(-7), BOTH),
    ("cvt.u64.u32 %d, %a0;", [u32(-7)], u64(2**32 - 7), BOTH),
    ("cvt.u32.u64 %d, %a0;", [u64(1 << 32 | 5)], u32(5), BOTH),
    ("cvt.s32.s8 %d, %a0;", [u32(0x80, 0x17F)], u32(-128, 127), BOTH),
    ("cvt.sat.u8.s32 %d, %a0;", [u32(-5, 300, 7)], u32(0, 255, 7), BOTH),
    ("cvt.sat.s32.s64 %d, %a0;", [u64(1 << 40, -(1 << 40))], u32(0x7FFFFFFF, 0x80000000), BOTH),
    ("mapa.shared::cluster.u32 %d, %a0, %a1;", [u32(0x1400), u32(3)], u32(0x03001400), BOTH),
    ("getctarank.shared::cluster.u32 %d, %a0;", [u32(0x05001400)], u32(5), COMPILED),
    ("cvta.shared.u64 %rd2, %a0; cvta.to.shared.u64 %d, %rd2;", [u64(0x1400)], u64(0x1400), BOTH),
    ("cvta.shared.u64 %rd2, %a0; isspacep.shared %p1, %rd2; isspacep.global %p2, %rd2;"
     "selp.b32 %r1, 1, 0, %p1; selp.b32 %r2, 2, 0, %p2; or.b32 %d, %r1, %r2;", [u64(64)], u32(1), BOTH),
]  # fmt: skip


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c[0].split(";")[0])
def test_instruction(case: tuple[str, list[Any], Any, tuple[str, ...]], core: str) -> None:
    body, sources, want, cores = case
    if core not in cores:
        pytest.skip("only the compiled core models this form")
    got = evaluate(core, body, sources, want.dtype)
    assert [hex(v) for v in got.tolist()] == [hex(v) for v in want.tolist()]


def test_a_wrong_expectation_is_seen() -> None:
    got = evaluate("numpy", "add.s32 %d, %a0, %a1;", [u32(1), u32(2)], np.uint32)
    assert got.tolist() != [4]


FORMS = [
    "add.s32 %d, %a0, %a1;", "sub.s32 %d, %a0, %a1;", "mul.lo.s32 %d, %a0, %a1;",
    "mul.hi.s32 %d, %a0, %a1;", "mul.hi.u32 %d, %a0, %a1;", "div.s32 %d, %a0, %a1;",
    "div.u32 %d, %a0, %a1;", "rem.s32 %d, %a0, %a1;", "min.s32 %d, %a0, %a1;",
    "max.u32 %d, %a0, %a1;", "shl.b32 %d, %a0, %a1;", "shr.s32 %d, %a0, %a1;",
    "shr.u32 %d, %a0, %a1;", "prmt.b32 %d, %a0, %a1, %a2;", "lop3.b32 %d, %a0, %a1, %a2, 0x5A;",
    "shf.l.wrap.b32 %d, %a0, %a1, %a2;", "shf.r.clamp.b32 %d, %a0, %a1, %a2;",
    "bfe.s32 %d, %a0, %a1, %a2;", "bfe.u32 %d, %a0, %a1, %a2;",
    "bfi.b32 %d, %a0, %a1, %a2, %a1;", "bfind.s32 %d, %a0;", "popc.b32 %d, %a0;", "clz.b32 %d, %a0;",
]  # fmt: skip


@pytest.mark.parametrize("body", FORMS)
def test_both_cores_agree_on_any_bits(body: str) -> None:
    """The cores are two independent implementations: on random and extreme operands they agree."""
    rng = np.random.default_rng(11)
    pool = u32(0, 1, 2, 31, 32, 33, 63, 255, 0x7FFFFFFF, 0x80000000, M32, M32 - 1)
    sources = [
        np.where(rng.random(1024) < 0.5, rng.choice(pool, 1024), rng.integers(0, 2**32, 1024))
        for _ in range(3)
    ]
    sources = [s.astype(np.uint32) for s in sources]
    if body.startswith(("div", "rem")):  # division by zero and overflow are undefined
        sources[1] = np.where(sources[1] == 0, 1, sources[1]).astype(np.uint32)
        sources[0] = np.where(sources[0] == 0x80000000, 5, sources[0]).astype(np.uint32)
    used = sources[: 1 + max(i for i in range(3) if f"%a{i}" in body)]
    first, second = (evaluate(core, body, used, np.uint32) for core in CORES)
    bad = np.flatnonzero(first != second)
    assert not len(bad), [(hex(s[bad[0]]) for s in used), hex(first[bad[0]]), hex(second[bad[0]])]
