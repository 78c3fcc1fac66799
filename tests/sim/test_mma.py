"""tcgen05.mma against exact integer arithmetic, for every kind, size, layout and flag that the
simulator models.

Operands are small integers (or powers of two), so that float64, fp32 and any order of summation
agree exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.sim import descriptors
from cute_kernels.sim.checks import (
    Checks,
)  # fmt: skip
from tests.sim.fakes import LANE0, Machine

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
A_AT, B_AT = 8192, 65536
SFA, SFB, D = 256, 272, 0
SPAN = {0: 16, 1: 128, 2: 128, 4: 64, 6: 32}


# ---- an independent model of the memory images ---------------------------------------------------


def swizzle_byte(addr: int, layout: int) -> int:
    if layout == 1:
        return addr ^ (addr >> 7 & 3) << 5
    bits = {0: 0, 2: 3, 4: 2, 6: 1}[layout]
    return addr ^ (addr >> 7 & ((1 << bits) - 1)) << 4


def k_major_image(rows: np.ndarray, layout: int, base: int, lbo: int, sbo: int) -> dict[int, int]:
    """rows uint8 (R, bytes of K) -> {address: byte}."""
    out, pitch = {}, SPAN[layout]
    for r in range(rows.shape[0]):
        for i in range(rows.shape[1]):
            at = base + r % 8 * pitch + r // 8 * sbo
            at += i if layout else i // 16 * lbo + i % 16
            out[swizzle_byte(at, layout)] = int(rows[r, i])
    return out


def mn_major_image(
    columns: np.ndarray, layout: int, base: int, lbo: int, sbo: int
) -> dict[int, int]:
    """columns uint8 (K, bytes along MN)."""
    out, span = {}, SPAN[layout]
    group = 4 if layout == 1 else 8
    for k in range(columns.shape[0]):
        for m in range(columns.shape[1]):
            if layout == 0:
                at = base + m % 16 + m // 16 * sbo + k % 8 * 16 + k // 8 * lbo
            else:
                at = base + m % span + m // span * lbo + k % group * span + k // group * sbo
            out[swizzle_byte(at, layout)] = int(columns[k, m])
    return out


def put(m: Machine, rank: int, image: dict[int, int]) -> None:
    at = np.array(list(image))
    shared = m.shared(rank)
    shared.data[at] = list(image.values())
    shared.init[at] = 1


def encode(values: np.ndarray, fmt: str) -> np.ndarray:
    """float (R, K) -> uint8 (R, bytes)."""
    if fmt in ("e2m1", "e2m1_p64"):
        code = (
            np.searchsorted(E2M1_VALUES, np.abs(values)) | (np.signbit(values).astype(int) << 3)
        ).astype(np.uint8)
        packed = code[:, 0::2] | code[:, 1::2] << 4
        if fmt == "e2m1":
            return packed
        out = np.zeros((values.shape[0], values.shape[1] // 16, 16), np.uint8)
        out[:, :, :8] = packed.reshape(values.shape[0], -1, 8)
        return out.reshape(values.shape[0], -1)
    types = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
             "tf32": np.float32}  # fmt: skip
    return np.ascontiguousarray(values.astype(types[fmt])).view(np.uint8)


def draw(rng, shape, fmt):
    if fmt.startswith("e2m1"):
        return rng.choice(np.concatenate([E2M1_VALUES, -E2M1_VALUES]), shape)
    return rng.integers(-8, 9, shape).astype(float)


CODES = {
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "mxf4nvf4": {"e2m1": 1},
    "mxf4": {"e2m1": 1},
}
CODES["f8f6f4"] = CODES["mxf8f6f4"] = {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1_p64": 5}
K_OF = {"f16": 16, "tf32": 8, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


@dataclass
class Case:
    kind: str = "mxf4nvf4"
    m: int = 128
    n: int = 64
    group: int = 1
    fmt: str = "e2m1"
    block: int = 16
    layout: int = 2
    scale: str = "ue4m3"
    ids: tuple[int, int] = (0, 0)
    negate: tuple[int, int] = (0, 0)
    mn_major: bool = False
    a_tmem: bool = False
    accumulate: bool = False
    schedule: str = "random"
    seed: int = 0
    scale_name: str = ""

    @property
    def scaled(self) -> bool:
        return self.kind.startswith("mx")

    @property
    def k(self) -> int:
        return K_OF[self.kind]

    def idesc(self) -> int:
        code = CODES[self.kind][self.fmt]
        bits = (
            code << 7 | code << 10 | self.negate[0] << 13 | self.negate[1] << 14 | self.n >> 3 << 17
        )
        bits |= (1 << 15 | 1 << 16) if self.mn_major else 0
        if self.scaled:
            bits |= (
                self.ids[1] << 4
                | self.ids[0] << 29
                | self.m >> 7 << 27
                | (self.scale == "ue8m0") << 23
            )
        else:
            bits |= 1 << 4 | self.m >> 4 << 24
        return bits

    def instruction(self) -> str:
        a = "[%ta]" if self.a_tmem else "%da"
        if self.scaled:
            how = self.scale_name or f"block{self.block}"
            return (
                f"tcgen05.mma.cta_group::{self.group}.kind::{self.kind}.block_scale.{how} "
                f"[%d], {a}, %db, %i, [%sfa], [%sfb], %pe;"
            )
        return (
            f"tcgen05.mma.cta_group::{self.group}.kind::{self.kind}.collector::a::discard "
            f"[%d], {a}, %db, %i, %pe;"
        )


COMMIT = (
    "mbarrier.init.shared.b64 [1024], 1; "
    "tcgen05.commit.cta_group::{g}.mbarrier::arrive::one.shared::cluster.b64 [1024];"
    "mbarrier.try_wait.parity.shared.b64 %p, [1024], 0;"
)


def smem_desc(base: int, layout: int, lbo: int, sbo: int) -> int:
    return base >> 4 | lbo >> 4 << 16 | sbo >> 4 << 32 | 1 << 46 | layout << 61


class Bench:
    """Operands of one case placed in a machine; `run` returns D of each CTA as (rows, n) and the
    exact result."""

    def __init__(self, case: Case, checks: Checks | None = None) -> None:
        self.case, self.m = (
            case,
            Machine(case.group, case.schedule, case.seed, checks or Checks(tmem_leak=False)),
        )
        rng = np.random.default_rng(case.seed)
        c = case
        self.a, self.b = draw(rng, (c.m, c.k), c.fmt), draw(rng, (c.n, c.k), c.fmt)
        self.acc = rng.integers(-50, 50, (c.m, c.n)).astype(np.float32)
        count = c.k // c.block if c.scaled else 0
        self.sa, self.sb = (rng.integers(0, 4, (n, count)) for n in (c.m, c.n))  # exponents
        rows = c.m // c.group
        self.lbo, self.sbo = self._offsets(rows)
        for rank in range(c.group):
            self._operand(rank, A_AT, self.a[rank * rows : (rank + 1) * rows])
            self._operand(rank, B_AT, self.b[rank * c.n // c.group : (rank + 1) * c.n // c.group])
        self._spy()

    def _offsets(self, rows: int) -> tuple[int, int]:
        span = SPAN[self.case.layout]
        if self.case.mn_major:
            return (16 * 1024, 8 * span) if self.case.layout else (4096, 128)
        return 4096, 8 * span

    def _operand(self, rank: int, base: int, values: np.ndarray) -> None:
        c = self.case
        raw = encode(values, c.fmt)
        if c.mn_major:
            size = raw.shape[1] // c.k
            columns = raw.reshape(raw.shape[0], c.k, size).transpose(1, 0, 2).reshape(c.k, -1)
            put(self.m, rank, mn_major_image(columns, c.layout, base, self.lbo, self.sbo))
        else:
            put(self.m, rank, k_major_image(raw, c.layout, base, self.lbo, self.sbo))

    def _spy(self) -> None:
        """Fills TMEM when the first instruction executes (the scheduler makes the TMEM objects)."""
        original = self.m.find_handler
        ready = []

        def prepare(instr):
            if not ready:
                ready.append(1)
                for rank in range(self.case.group):
                    self._tmem(rank)
            return original(instr)

        self.m.find_handler = prepare

    def d_cells(self, rank: int, row: int, col: int) -> tuple[int, int]:
        """(lane, column) of D[row, col] in the CTA that holds the row; simulator.md, TMEM."""
        c = self.case
        if c.group == 1 and c.m == 64:
            return row // 16 * 32 + row % 16, D + col
        if c.group == 2 and c.m == 128:
            return (row, D + col) if col < c.n // 2 else (64 + row, D + col - c.n // 2)
        return row, D + col

    def _tmem(self, rank: int) -> None:
        c, t = self.case, self.m.cluster.ctas[rank].tmem
        t.take(0, 512, c.group, True)
        rows = c.m // c.group
        if c.accumulate:
            for r in range(rows):
                for col in range(c.n):
                    lane, column = self.d_cells(rank, r, col)
                    t.data[lane, column] = self.acc[rank * rows + r, col].view(np.uint32)
                    t.written[lane, column] = True
        for column, exps, first in ((SFA, self.sa, rank * rows), (SFB, self.sb, 0)):
            for row in range(min(len(exps), rows if column == SFA else len(exps))):
                self._scale(t, column, row, exps[first + row] if len(exps) else [])
        if c.a_tmem:
            raw = encode(self.a[rank * rows : (rank + 1) * rows], c.fmt).view(np.uint32)
            lanes = [self.d_cells(rank, r, 0)[0] if c.m == 64 else r for r in range(rows)]
            t.data[lanes, 300:308] = raw
            t.written[lanes, 300:308] = True

    def _scale(self, t, column: int, row: int, exps) -> None:
        c = self.case
        sid = c.ids[0] if column == SFA else c.ids[1]
        for part in range(4):
            lane, col = 32 * part + row % 32, column + row // 32
            cell = t.data[lane : lane + 1, col].view(np.uint8)
            if not t.written[lane, col]:
                cell[:] = 0x7F if c.scale == "ue4m3" else 0xFF  # NaN: bytes that must not be read
            for j, e in enumerate(exps):
                cell[sid + j] = (7 + e) << 3 if c.scale == "ue4m3" else 127 + e
            t.written[lane, col] = True

    def text(self) -> str:
        return self.case.instruction() + COMMIT.format(g=self.case.group)

    def registers(self) -> dict[str, int]:
        c = self.case
        return {
            "d": D, "da": smem_desc(A_AT, c.layout, self.lbo, self.sbo), "i": c.idesc(),
            "db": smem_desc(B_AT, c.layout, self.lbo, self.sbo), "sfa": SFA, "sfb": SFB,
            "pe": int(c.accumulate), "ta": 300,
        }  # fmt: skip

    def run(self, text: str | None = None, **more) -> tuple[np.ndarray, np.ndarray]:
        self.m.add(0, text or self.text(), LANE0, **{**self.registers(), **more})
        for rank in range(1, self.case.group):
            self.m.add(rank, "barrier.cluster.arrive; barrier.cluster.wait;")
        if self.case.group == 2:
            w = self.m.cluster.ctas[0].warps[0]
            w.instrs += (
                Machine(2).add(0, "barrier.cluster.arrive; barrier.cluster.wait;", LANE0).instrs
            )
        self.m.run()
        return self.result(), self.exact()

    def result(self) -> np.ndarray:
        c = self.case
        rows = c.m // c.group
        out = np.zeros((c.m, c.n), np.float32)
        for rank in range(c.group):
            data = self.m.cluster.ctas[rank].tmem.data.view(np.float32)
            for r in range(rows):
                for col in range(c.n):
                    out[rank * rows + r, col] = data[self.d_cells(rank, r, col)]
        return out

    def exact(self) -> np.ndarray:
        c = self.case
        a, b = self.a * (-1 if c.negate[0] else 1), self.b * (-1 if c.negate[1] else 1)
        if c.scaled:
            a = a * np.repeat(2.0**self.sa, c.block, 1)
            b = b * np.repeat(2.0**self.sb, c.block, 1)
        a4, b4 = (4 * a).astype(np.int64), (4 * b).astype(np.int64)  # quarters: exact integers
        assert (a4 == 4 * a).all() and (b4 == 4 * b).all()
        out = (a4 @ b4.T) / 16
        return (out + (self.acc if c.accumulate else 0)).astype(np.float32)


CASES = {
    "nvfp4": Case(),
    "nvfp4 n8": Case(n=8),
    "nvfp4 n256 accumulate": Case(n=256, accumulate=True),
    "nvfp4 scale_vec::4X": Case(scale_name="scale_vec::4X"),
    "nvfp4 ue8m0 blocks of 32": Case(block=32, scale="ue8m0"),
    "nvfp4 ue8m0 blocks of 16": Case(scale="ue8m0"),
    "nvfp4 64B swizzle": Case(layout=4),
    "nvfp4 32B swizzle": Case(layout=6),
    "nvfp4 no swizzle": Case(layout=0),
    "nvfp4 negate": Case(negate=(1, 0), accumulate=True),
    "nvfp4 negate both": Case(negate=(1, 1)),
    "nvfp4 A in TMEM": Case(a_tmem=True),
    "nvfp4 pair": Case(m=256, n=128, group=2),
    "nvfp4 pair n256 accumulate": Case(m=256, n=256, group=2, accumulate=True),
    "nvfp4 pair m128": Case(m=128, n=64, group=2),
    "nvfp4 pair A in TMEM": Case(m=256, n=32, group=2, a_tmem=True),
    "mxf4": Case(kind="mxf4", block=32, scale="ue8m0"),
    "mxf4 id 2": Case(kind="mxf4", block=32, scale="ue8m0", ids=(2, 0)),
    "mxf8 e4m3": Case(kind="mxf8f6f4", fmt="e4m3", block=32, scale="ue8m0"),
    "mxf8 e5m2 ids": Case(kind="mxf8f6f4", fmt="e5m2", block=32, scale="ue8m0", ids=(3, 1)),
    "mxf8 e2m1 padded": Case(kind="mxf8f6f4", fmt="e2m1_p64", block=32, scale="ue8m0"),
    "mxf8 pair": Case(kind="mxf8f6f4", fmt="e4m3", block=32, scale="ue8m0", m=256, group=2),
    "mxf8 mn-major": Case(
        kind="mxf8f6f4", fmt="e4m3", block=32, scale="ue8m0", mn_major=True, n=128
    ),
    "f8": Case(kind="f8f6f4", fmt="e4m3", accumulate=True),
    "f16": Case(kind="f16", fmt="f16", accumulate=True),
    "f16 m64": Case(kind="f16", fmt="f16", m=64, accumulate=True),
    "f16 m64 A in TMEM": Case(kind="f16", fmt="f16", m=64, a_tmem=True),
    "bf16": Case(kind="f16", fmt="bf16", layout=4),
    "bf16 no swizzle": Case(kind="f16", fmt="bf16", layout=0),
    "bf16 A in TMEM": Case(kind="f16", fmt="bf16", a_tmem=True),
    "bf16 mn-major": Case(kind="f16", fmt="bf16", mn_major=True),
    "bf16 mn-major 64B": Case(kind="f16", fmt="bf16", mn_major=True, layout=4),
    "bf16 mn-major none": Case(kind="f16", fmt="bf16", mn_major=True, layout=0),
    "bf16 mn-major 32B atoms": Case(kind="f16", fmt="bf16", mn_major=True, layout=1),
    "bf16 pair": Case(kind="f16", fmt="bf16", m=256, n=128, group=2),
    "bf16 pair m128": Case(kind="f16", fmt="bf16", m=128, n=128, group=2, accumulate=True),
    "tf32": Case(kind="tf32", fmt="tf32"),
}


@pytest.mark.parametrize("name", CASES)
def test_exact(name):
    got, want = Bench(CASES[name]).run()
    assert (got == want).all()


def test_the_comparison_can_fail():
    bench = Bench(CASES["nvfp4"])
    got, want = bench.run()
    bench.m.cluster.ctas[0].tmem.data[3, 5] ^= 0x00400000
    assert not (bench.result() == want).all()
    assert (got == want).all()


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(1, 16),
    seed=st.integers(0, 99),
    layout=st.sampled_from([2, 4, 6, 0]),
    accumulate=st.booleans(),
)
def test_nvfp4_any_n(n, seed, layout, accumulate):
    got, want = Bench(Case(n=16 * n, seed=seed, layout=layout, accumulate=accumulate)).run()
    assert (got == want).all()


def test_k_steps_advance_inside_the_swizzle_span():
    """+32 bytes on the start address selects the next K = 64 of a 128-byte row."""
    bench = Bench(CASES["nvfp4"])
    rng = np.random.default_rng(9)
    full_a, full_b = draw(rng, (128, 256), "e2m1"), draw(rng, (64, 256), "e2m1")
    put(bench.m, 0, k_major_image(encode(full_a, "e2m1"), 2, A_AT, 0, 1024))
    put(bench.m, 0, k_major_image(encode(full_b, "e2m1"), 2, B_AT, 0, 1024))
    bench.a, bench.b = full_a[:, 128:192], full_b[:, 128:192]
    r = bench.registers()
    got, want = bench.run(da=r["da"] + 4, db=r["db"] + 4)
    assert (got == want).all()


def test_scales_and_subnormals():
    """UE4M3 subnormals, bit 7 ignored, NaN."""
    assert (
        descriptors.UE4M3[1] == 2.0**-9
        and descriptors.UE4M3[0x7E] == 448
        and np.isnan(descriptors.UE4M3[0x7F])
    )
    assert (descriptors.UE4M3[128:255] == descriptors.UE4M3[:127]).all()
    codes = np.arange(256).astype(np.uint8)
    for name, dtype in (
        ("E4M3", ml_dtypes.float8_e4m3fn),
        ("E5M2", ml_dtypes.float8_e5m2),
        ("UE8M0", ml_dtypes.float8_e8m0fnu),
    ):
        want = codes.view(dtype).astype(np.float64)
        np.testing.assert_array_equal(getattr(descriptors, name), want)
    for name, dtype, n in (
        ("E2M1", ml_dtypes.float4_e2m1fn, 16), ("E2M3", ml_dtypes.float6_e2m3fn, 64), ("E3M2",
        ml_dtypes.float6_e3m2fn, 64),
    ):  # fmt: skip
        np.testing.assert_array_equal(
            getattr(descriptors, name), codes[:n].view(dtype).astype(np.float64)
        )


def test_six_bit_rows():
    codes = np.random.default_rng(0).integers(0, 64, (4, 32)).astype(np.uint8)
    raw = np.zeros((4, 2, 16), np.uint8)
    bits = np.unpackbits(codes[:, :, None], axis=2, bitorder="little")[:, :, :6].reshape(4, 2, 96)
    raw[:, :, :12] = np.packbits(bits, axis=2, bitorder="little")
    got = descriptors.decode_rows(raw.reshape(4, 32), "e2m3")
    np.testing.assert_array_equal(got, descriptors.E2M3[codes])


def test_disabled_lanes_and_scaled_accumulator():
    case = Case(kind="f16", fmt="f16", accumulate=True)
    bench = Bench(case)
    text = (
        "tcgen05.mma.cta_group::1.kind::f16 [%d], %da, %db, %i, {%o, %o, %o, %z}, %pe, 2;"
        + COMMIT.format(g=1)
    )
    bench.acc *= 4
    got, _ = bench.run(text, o=0x80000001, z=0)
    bench.acc /= 4
    want = bench.exact()
    off = np.zeros(128, bool)
    off[[0, 31, 32, 63, 64, 95]] = True
    assert (got[~off] == want[~off]).all()
    assert (got[off] == 4 * bench.acc[off]).all()


# ---- misuse --------------------------------------------------------------------------------------


def expect(error, match, case: Case | None = None, text=None, prepare=None, checks=None, **regs):
    bench = Bench(case or Case(), checks)
    if prepare:
        prepare(bench)
    with pytest.raises(error, match=match) as caught:
        bench.run(text, **regs)
    assert caught.value.line is not None and caught.value.kernel == "fake"
