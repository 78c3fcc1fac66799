"""Error messages, shadow rules, and the sabotage of a hand-written pipeline: every missing piece
must show."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cute_kernels.sim.checks import ByteSet, Checks, FenceState, SimError, pack_writer
from cute_kernels.sim.tensormap import TensorMap
from tests.sim.fakes import LANE0, Machine
from tests.sim.test_mma import Case, encode, k_major_image, smem_desc


def test_message_names_the_place():
    class Where:
        warp_id = 3

        class cta:
            coords = (1, 2, 0)

            class launch:
                name = "gemm"

    class I:  # noqa: E742
        line, text, source = 77, "bar.sync 0", ("k.py", 5)

    error = SimError("wrong").at(Where, I, 4)
    for piece in (
        "wrong",
        "kernel gemm",
        "cta (1, 2, 0)",
        "warp 3 lane 4",
        "PTX line 77: bar.sync 0",
        "k.py:5",
    ):
        assert piece in str(error)
    assert error.at(None, None) is error


def test_all_checks_can_be_turned_off():
    assert not any(dataclasses.asdict(Checks.none()).values())
    on = dataclasses.asdict(Checks())
    off = {name for name, value in on.items() if not value}
    assert off == {"cp_async_fence", "barrier_self", "mbarrier_init_fence", "tcgen05_fence"}


def test_byte_sets():
    array = np.zeros(256, np.uint16)
    ByteSet(8, 40).add(array, 1)
    ByteSet(8, 40).add(array, -1)
    assert not array.any()
    chunks = np.array([[3, 1]])
    part = ByteSet(chunks=chunks)
    part.put(array, 5)
    assert np.flatnonzero(array).tolist() == [*range(16, 32), *range(48, 64)]
    assert part.first(part.get(array) == 5) == 48


def test_fence_state():
    state = FenceState(64)
    entry = np.array([pack_writer(9, 10, 1 + 40), 0, pack_writer(9, 12, 1 + 5)], np.uint64)
    assert state.dirty(entry).tolist() == [True, False, True]
    state.fence(np.array([1 + 40]), 11)
    assert state.dirty(entry).tolist() == [False, False, True]
    state.sync(np.array([1 + 50]), 13)
    state.fence(np.array([1 + 50]), 14)  # synchronised after the write: covers it
    assert not state.dirty(entry).any()
    late = np.array([pack_writer(9, 15, 1 + 40)], np.uint64)
    assert state.dirty(late).all()


# ---- a two-stage pipeline written by hand
# -----------------------------------------------------------------------------

FULL, EMPTY, DONE = 1024, 1040, 1056
STAGES, STEPS = 2, 5
A, B = 8192, 49152
TILE_A, TILE_B = 128 * 128, 32 * 128


class Pipeline:
    """load -> MMA -> tcgen05.ld with full/empty barriers, K steps of one 128-byte row, A reused by
    hand-made loads.

    `drop` names the piece to leave out or to spoil. The program is unrolled; waits loop.
    """

    def __init__(self, drop: str = "", seed: int = 0, schedule: str = "random") -> None:
        self.drop, self.m = drop, Machine(schedule=schedule, seed=seed)
        rng = np.random.default_rng(1)
        self.a = rng.integers(-3, 4, (128, 64 * STEPS)).astype(float)
        self.b = rng.integers(-3, 4, (32, 64 * STEPS)).astype(float)
        m = self.m
        maps = {}
        for name, x in (("ma", self.a), ("mb", self.b)):
            packed = encode(x, "bf16").view(np.uint16)
            tensor = TensorMap(
                m.global_memory.place(packed),
                "bf16",
                packed.shape[::-1],
                (packed.strides[0],),
                (64, packed.shape[0]),
                (1, 1),
                "128B",
            )
            maps[name] = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
        self.out = np.zeros((128, 32), np.float32)
        m.add(0, self.setup() + self.producer(), LANE0, **maps)
        idesc = Case(kind="f16", fmt="bf16", n=32).idesc()
        m.add(0, self.consumer(), LANE0, i=idesc, off=0, on=1)
        for w in range(2, 6):
            m.add(0, self.epilogue(w), a=(32 * (w % 4)) << 16, n=32)
        for warp in m.cluster.ctas[0].warps:
            warp.loops = True

    def setup(self) -> str:
        text = ""
        for s in range(STAGES):
            text += (
                f"mbarrier.init.shared.b64 [{FULL + 8 * s}], 1; mbarrier.init.shared.b64 "
                f"[{EMPTY + 8 * s}], 1;"
            )
        return text + f"mbarrier.init.shared.b64 [{DONE}], 1; bar.sync 1, 192;"

    def producer(self) -> str:
        size = (
            TILE_A
            + TILE_B
            - (16 if self.drop == "few bytes" else 0)
            + (16 if self.drop == "many bytes" else 0)
        )
        text = "bar.sync 2, 192;"
        for k in range(STEPS):
            s, phase = k % STAGES, k // STAGES
            if k >= STAGES and self.drop != "producer wait":
                text += self.wait(EMPTY + 8 * s, (phase - 1) & 1)
            text += f"mbarrier.arrive.expect_tx.shared.b64 _, [{FULL + 8 * s}], {size};"
            for name, at in (("ma", A + s * TILE_A), ("mb", B + s * TILE_B)):
                text += (
                    "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes"
                    f" [{at}], [%{name}, {{{64 * k}, 0}}], [{FULL + 8 * s}];"
                )
        return text + "bar.sync 3, 192; bar.sync 4, 192;"

    def wait(self, bar: int, parity: int) -> str:
        return f"mbarrier.try_wait.parity.shared.b64 %p, [{bar}], {parity};"

    def consumer(self) -> str:
        text = "bar.sync 1, 192;" + "bar.sync 2, 192;"
        commit = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [{}];"
        for k in range(STEPS):
            s, phase = k % STAGES, k // STAGES
            if self.drop != "consumer wait":
                text += self.wait(FULL + 8 * s, (phase & 1) ^ (self.drop == "wrong parity"))
            for j in range(4):
                da = smem_desc(A + s * TILE_A + 32 * j, 2, 16, 1024)
                db = smem_desc(B + s * TILE_B + 32 * j, 2, 16, 1024)
                enable = "%on" if k or j else "%off"
                text += f"tcgen05.mma.cta_group::1.kind::f16 [0], {da}, {db}, %i, {enable};"
            if self.drop == "release before the MMA is done":
                text += f"mbarrier.arrive.shared.b64 _, [{EMPTY + 8 * s}];"
            elif self.drop != "consumer release":
                text += commit.format(EMPTY + 8 * s)
        if self.drop != "last commit":
            text += commit.format(DONE)
        return text + "bar.sync 3, 192; bar.sync 4, 192;"

    def epilogue(self, w: int) -> str:
        text = "bar.sync 1, 192;"
        if w == 2:
            text += "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [2048], %n;"
        text += "bar.sync 2, 192;"
        if self.drop != "accumulator wait":
            text += self.wait(DONE, 0)
        regs = ", ".join(f"%r{i}" for i in range(32))
        text += f"tcgen05.ld.sync.aligned.32x32b.x32.b32 {{{regs}}}, [%a];"
        if self.drop != "tmem wait":
            text += "tcgen05.wait::ld.sync.aligned;"
        text += "bar.sync 3, 192;"
        if w == 2 and self.drop != "dealloc":
            text += "tcgen05.dealloc.cta_group::1.sync.aligned.b32 0, %n;"
        return text + "bar.sync 4, 192;"

    def run(self) -> np.ndarray:
        self.m.run()
        for w in self.m.cluster.ctas[0].warps[2:]:
            lanes = slice(32 * (w.warp_id % 4), 32 * (w.warp_id % 4) + 32)
            for i in range(32):
                self.out[lanes, i] = w.values[f"%r{i}"].astype(np.uint32).view(np.float32)
        return self.out

    @property
    def want(self) -> np.ndarray:
        return (self.a @ self.b.T).astype(np.float32)


@pytest.mark.parametrize("schedule", ["lazy", "eager", "random"])
@pytest.mark.parametrize("seed", range(4))
def test_the_pipeline_is_right(schedule, seed):
    p = Pipeline(seed=seed, schedule=schedule)
    assert (p.run() == p.want).all()


SABOTAGE = [
    "producer wait", "consumer wait", "consumer release", "release before the MMA is done",
    "last commit", "accumulator wait",
    "tmem wait", "few bytes", "many bytes", "wrong parity", "dealloc",
]  # fmt: skip


@pytest.mark.parametrize("drop", SABOTAGE)
def test_sabotage_is_reported(drop):
    """An error, or a result that is wrong, in at least one of 12 schedules."""
    reports = []
    for seed in range(12):
        p = Pipeline(drop, seed)
        try:
            if not (p.run() == p.want).all():
                reports.append("wrong result")
        except SimError as error:
            reports.append(type(error).__name__)
    assert reports, f"{drop}: nothing noticed"
    if drop in (
        "last commit",
        "consumer release",
        "dealloc",
        "tmem wait",
        "few bytes",
        "accumulator wait",
    ):
        assert len(reports) == 12, reports


def test_images_agree_with_tensor_loads():
    """The K-major image of the MMA tests and the image that a swizzled load writes are the same
    bytes."""
    p = Pipeline(schedule="lazy")
    p.run()
    last = STEPS - 1
    s = last % STAGES
    tile = encode(p.a[:, 64 * last :], "bf16")
    data = p.m.shared().data
    for at, byte in k_major_image(tile, 2, A + s * TILE_A, 16, 1024).items():
        assert data[at] == byte
