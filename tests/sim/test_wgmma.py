"""wgmma against exact sums, on operands as the PTX ISA lays them out, and what a kernel may not do
while it is in flight."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.sim.checks import (
    Checks,
    IllegalInstruction,
    MissingProxyFence,
    RegisterRace,
    SharedOverwrite,
    SimError,
    UninitialisedRead,
    UnsupportedInstruction,
)
from tests.sim.onewarp import CORES, launch
from tests.sim.test_mma import SPAN, k_major_image

THREADS = 128
SWIZZLE = {0: 0, 1: 2, 2: 4, 3: 6}  # two bits of the descriptor -> layout code of sm_100's


@dataclasses.dataclass(frozen=True)
class Program:
    """A warpgroup loads A and D into registers, operands in shared memory, and multiplies; each
    field is PTX at that place, "" leaves it out."""

    n: int = 16
    swizzle: int = 1
    a_shared: bool = False
    proxy_fence: str = "fence.proxy.async.shared::cta;"
    before: str = "wgmma.fence.sync.aligned;"
    more: str = ""  # behind the first wgmma
    commit: str = "wgmma.commit_group.sync.aligned;"
    flight: str = ""
    wait: str = "wgmma.wait_group.sync.aligned 0;"
    add: int = 1
    scale_b: int = 1

    def multiply(self, d: str = "d", a: str = "a", first: int = 0) -> str:
        """The instruction on registers d and a; ``first``: register of D it starts with."""
        left = "%da" if self.a_shared else "{" + ", ".join(f"%{a}{i}" for i in range(4)) + "}"
        regs = ", ".join(f"%{d}{first + i}" for i in range(self.n // 2))
        trans = ", 0, 0" if self.a_shared else ", 0"
        return (
            f"wgmma.mma_async.sync.aligned.m64n{self.n}k16.f32.bf16.bf16 {{{regs}}}, {left}, "
            f"%db, %p, 1, {self.scale_b}{trans};"
        )

    def descriptor(self, name: str, at: int) -> list[str]:
        """Groups of 8 rows follow each other; without swizzle the two halves of K do."""
        span = SPAN[SWIZZLE[self.swizzle]]
        lbo, sbo = (128, 256) if not self.swizzle else (0, 8 * span)
        high = lbo >> 4 << 16 | sbo >> 4 << 32 | self.swizzle << 62
        return [
            f"add.u32 %t0, %s, {at}; shr.u32 %t0, %t0, 4; and.b32 %t0, %t0, 16383;",
            f"cvt.u64.u32 %{name}, %t0; or.b64 %{name}, %{name}, {high};",
        ]

    @property
    def text(self) -> str:
        regs = [*(f"%a{i}" for i in range(4)), *(f"%d{i}" for i in range(self.n // 2))]
        lines = [
            ".version 9.0\n.target sm_90a\n.address_size 64",
            ".visible .entry k(.param .u64 out, .param .u64 words, .param .u64 image)\n{",
            f".shared .align 1024 .b8 smem[{BYTES}];",
            f".reg .b32 %a<4>, %e<4>, %v<4>, %t, %t0, %s; .reg .f32 %d<{self.n}>, %x<8>;",
            ".reg .b64 %w, %out, %image, %da, %db; .reg .pred %p;",
            "ld.param.u64 %w, [words]; ld.param.u64 %out, [out]; ld.param.u64 %image, [image];",
            "mov.u32 %t, %tid.x; mad.wide.u32 %w, %t, 4, %w; mad.wide.u32 %out, %t, 4, %out;",
            "mad.wide.u32 %image, %t, 16, %image; mov.u32 %s, smem; shl.b32 %t0, %t, 4;",
            "add.u32 %s, %s, %t0;",
        ]
        for at in range(0, BYTES, 16 * THREADS):
            lines.append(f"ld.global.v4.b32 {{%v0, %v1, %v2, %v3}}, [%image+{at}];")
            lines.append(f"st.shared.v4.b32 [%s+{at}], {{%v0, %v1, %v2, %v3}};")
        lines += [self.proxy_fence, "bar.sync 0;", "mov.u32 %s, smem;"]
        lines += [*self.descriptor("da", A_AT), *self.descriptor("db", 0)]
        lines += [f"ld.global.b32 {r}, [%w+{4 * THREADS * i}];" for i, r in enumerate(regs)]
        lines += [f"setp.ne.b32 %p, {self.add}, 0;", self.before, self.multiply(), self.more]
        lines += [self.commit, self.flight, self.wait]
        stores = enumerate(regs[4:])
        lines += [f"st.global.b32 [%out+{4 * THREADS * i}], {r};" for i, r in stores]
        return "\n".join([*lines, "ret;\n}\n"])


A_AT, BYTES = 32768, 49152


def bf16(values: np.ndarray) -> np.ndarray:
    """Integers as bits of bf16 (exact up to 256)."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def operands(n: int) -> tuple[np.ndarray, ...]:
    """A (64, 16), B (n, 16), D (64, n): small integers."""
    rng = np.random.default_rng(n)
    return tuple(rng.integers(-9, 10, shape) for shape in ((64, 16), (n, 16), (64, n)))


def fragment_words(a: np.ndarray, d: np.ndarray) -> np.ndarray:
    """uint32 (4 + n / 2, 128): the registers of every thread, from the tables of the PTX ISA."""
    n = d.shape[1]
    words = np.zeros((4 + n // 2, THREADS), np.uint32)
    bits = bf16(a).astype(np.uint32)
    for thread in range(THREADS):
        row, t = thread // 32 * 16 + thread % 32 // 4, thread % 4
        for i in range(4):
            r, k = row + 8 * (i % 2), 2 * t + 8 * (i // 2)
            words[i, thread] = bits[r, k] | bits[r, k + 1] << 16
        for i in range(n // 2):
            value = np.float32(d[row + 8 * (i // 2 % 2), i // 4 * 8 + 2 * t + i % 2])
            words[4 + i, thread] = value.view(np.uint32)
    return words


def run(program: Program, core: str = "compiled", given: Any = None, **options: Any) -> np.ndarray:
    """D (64, n) as the kernel stores it."""
    n = program.n
    a, b, d = operands(n) if given is None else given
    span = SPAN[SWIZZLE[program.swizzle]]
    lbo, sbo = (128, 256) if not program.swizzle else (0, 8 * span)
    image = torch.zeros(BYTES, dtype=torch.uint8)
    for values, at in ((b, 0), (a, A_AT)):
        rows = bf16(values).view(np.uint8).reshape(len(values), 32)
        for where, byte in k_major_image(rows, SWIZZLE[program.swizzle], at, lbo, sbo).items():
            image[where] = byte
    words = torch.from_numpy(fragment_words(a, d).view(np.int32))
    out = torch.full((n // 2, THREADS), float("nan"))
    params = struct.pack("<QQQ", out.data_ptr(), words.data_ptr(), image.data_ptr())
    launch(program.text, params, core=core, block=(THREADS, 1, 1), **options)
    got = np.empty((64, n), np.float32)
    for thread in range(THREADS):
        row, t = thread // 32 * 16 + thread % 32 // 4, thread % 4
        for i in range(n // 2):
            got[row + 8 * (i // 2 % 2), i // 4 * 8 + 2 * t + i % 2] = out[i, thread]
    return got


def want(n: int, times: int = 1, add: bool = True) -> np.ndarray:
    a, b, d = operands(n)
    return (times * (a @ b.T) + d * add).astype(np.float32)


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("a_shared", [False, True], ids=["registers", "shared"])
@pytest.mark.parametrize("swizzle", SWIZZLE)
def test_product(swizzle: int, a_shared: bool, core: str) -> None:
    got = run(Program(24, swizzle, a_shared), core)
    np.testing.assert_array_equal(got, want(24))


@pytest.mark.parametrize("n", [8, 64, 136, 256])
def test_columns(n: int) -> None:
    np.testing.assert_array_equal(run(Program(n)), want(n))


def test_scales() -> None:
    """scale-d 0 drops what was there, imm-scale -1 negates."""
    np.testing.assert_array_equal(run(Program(add=0)), want(16, add=False))
    np.testing.assert_array_equal(run(Program(scale_b=-1)), want(16, -1))


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_in_a_row(schedule: str) -> None:
    """Onto one accumulator no fence is needed, neither in flight nor after the wait."""
    one = Program()
    program = dataclasses.replace(
        one,
        more=one.multiply(),
        flight=one.multiply() + one.commit + one.wait + one.multiply() + one.commit,
    )
    np.testing.assert_array_equal(run(program, schedule=schedule, seed=3), want(16, 4))


def test_groups_are_waited_for_one_by_one() -> None:
    """wait_group 1: the older group's accumulators are there, the younger one's are not."""
    one = Program()
    zeros = "".join(f"mov.b32 %d{8 + i}, 0;" for i in range(8))
    second = one.multiply(first=8) + one.commit
    wait = "wgmma.wait_group.sync.aligned 1; mov.b32 %x0, {}; " + one.wait + " mov.b32 %d0, %x0;"
    program = dataclasses.replace(one, before=zeros + one.before, flight=second)
    older = run(dataclasses.replace(program, wait=wait.format("%d0")))
    np.testing.assert_array_equal(older, want(16))
    younger = run(dataclasses.replace(program, wait=wait.format("%d8")))
    replaced = np.zeros((64, 16), bool)  # where %d0 is: rows 0..7 of a warp, even columns below 8
    replaced.reshape(4, 2, 8, 16)[:, 0, :, :8:2] = True
    assert np.isnan(younger[replaced]).all()
    np.testing.assert_array_equal(younger[~replaced], want(16)[~replaced])
    # registers that nobody has in flight may be written behind the first, with a fence of their own
    late = dataclasses.replace(one, flight=zeros + one.before + second)
    np.testing.assert_array_equal(run(late), want(16))


CHANGED = "add.u32 %a0, %a0, 65536;"
WRONG: dict[str, tuple[dict[str, str], type[SimError]]] = {
    "no wgmma.fence": ({"before": ""}, RegisterRace),
    "A written behind the fence": (
        {"before": "wgmma.fence.sync.aligned; " + CHANGED},
        RegisterRace,
    ),
    "D written behind the fence": (
        {"before": "wgmma.fence.sync.aligned; mov.b32 %d3, 1;"},
        RegisterRace,
    ),
    "A written in flight": ({"flight": CHANGED}, RegisterRace),
    "D written in flight": ({"flight": "mov.b32 %d3, 1;"}, RegisterRace),
    "D of another shape in flight": ({"more": Program(8).multiply()}, RegisterRace),
    "no commit": ({"commit": ""}, RegisterRace),
    "no wait": ({"wait": ""}, RegisterRace),
    "a wait for too little": ({"wait": "wgmma.wait_group.sync.aligned 1;"}, RegisterRace),
    "B overwritten in flight": ({"flight": "st.shared.b32 [%s], %a0;"}, SharedOverwrite),
    "no proxy fence": ({"proxy_fence": ""}, MissingProxyFence),
}


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
@pytest.mark.parametrize("name", WRONG)
def test_misuse_is_seen_in_every_order(name: str, schedule: str, core: str) -> None:
    changes, error = WRONG[name]
    with pytest.raises(error) as raised:
        run(dataclasses.replace(Program(), **changes), core, schedule=schedule, seed=5)
    assert "wgmma" in str(raised.value) or error is SharedOverwrite
    assert raised.value.line is not None


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
def test_accumulators_read_in_flight_are_no_numbers(schedule: str) -> None:
    """Whatever the order: the result is not there before the wait."""
    moves = "".join(f"mov.b32 %d{8 + i}, %d{i};" for i in range(8))
    back = "".join(f"mov.b32 %d{i}, %d{8 + i};" for i in range(8))
    one = Program()
    got = run(
        dataclasses.replace(one, flight=moves, wait=one.wait + back), schedule=schedule, seed=1
    )
    assert np.isnan(got).all()


def test_checks_can_be_turned_off() -> None:
    for name in ("no wgmma.fence", "A written in flight", "no wait"):
        program = dataclasses.replace(Program(), **WRONG[name][0])
        run(program, checks=Checks(wgmma_registers=False))


def test_memory_that_was_never_written() -> None:
    base = Program()
    assert base.text.count("st.shared.v4") == BYTES // (16 * THREADS)

    class Bare(Program):
        @property
        def text(self) -> str:
            lines = super().text.splitlines()
            return "\n".join(x for x in lines if not x.startswith("st.shared.v4"))

    with pytest.raises(UninitialisedRead, match="operand B"):
        run(Bare())


def test_what_is_not_modelled_is_said() -> None:
    class Other(Program):
        def multiply(self, *where: Any, **named: Any) -> str:
            return super().multiply(*where, **named).replace("bf16.bf16", "f16.f16")

    with pytest.raises(UnsupportedInstruction, match="only m64nNk16 of bf16"):
        run(Other())

    class Transposed(Program):
        def multiply(self, *where: Any, **named: Any) -> str:
            return super().multiply(*where, **named).replace(", 0;", ", 1;")

    with pytest.raises(UnsupportedInstruction, match="not K-major"):
        run(Transposed())
    with pytest.raises(IllegalInstruction, match="imm-scale"):
        run(Program(scale_b=2))
