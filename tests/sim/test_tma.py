"""Tensor copies against numpy slicing: ranks, element types, swizzles, out-of-bounds, multicast,
gather4, stores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cute_kernels.sim.checks import (
    BarrierError,
    Checks,
    IllegalInstruction,
    MissingProxyFence,
    OutOfBounds,
    SharedOverwrite,
    SharedRace,
    UninitialisedRead,
    UnsupportedInstruction,
)  # fmt: skip
from cute_kernels.sim.tensormap import TensorMap
from tests.sim.fakes import LANE0, Machine

BAR = 1024
SPAN = {"none": 0, "32B": 32, "64B": 64, "128B": 128}


def swizzled(offset: int, mode: str, atom32: bool = False) -> int:
    """Formula of PTX 5.5.7 written out: chunk bits ^= row bits."""
    if mode == "128B" and atom32:
        return offset ^ (offset >> 7 & 3) << 5
    bits = {"none": 0, "32B": 1, "64B": 2, "128B": 3}[mode]
    return offset ^ (offset >> 7 & ((1 << bits) - 1)) << 4


def shared_box(
    data: np.ndarray, offset: int, shape: tuple[int, ...], dtype, mode: str, atom32: bool = False
):
    """The box as the kernel sees it: row-major elements at swizzled addresses."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = bytes(data[swizzled(offset + i, mode, atom32)] for i in range(size))
    return np.frombuffer(raw, dtype).reshape(shape)


def expected(
    array: np.ndarray, coords: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...], fill=0
):
    """numpy slicing with out-of-bounds elements = fill; array, coords outermost first."""
    shape = tuple(-(-b // s) for b, s in zip(box, steps))
    out = np.full(shape, fill, array.dtype)
    for index in np.ndindex(*shape):
        at = tuple(c + i * s for c, i, s in zip(coords, index, steps))
        if all(0 <= a < n for a, n in zip(at, array.shape)):
            out[index] = array[at]
    return out


LOAD = (
    "mbarrier.init.shared.b64 [1024], 1; mbarrier.arrive.expect_tx.shared.b64 _, [1024], %bytes;"
    "cp.async.bulk.tensor.{d}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
    " [%dst], [%map, {{{coords}}}], [1024], %hint;"
    "mbarrier.try_wait.parity.shared.b64 %p, [1024], 0;"
)


def load(
    array,
    box,
    coords,
    *,
    element,
    mode="none",
    schedule="lazy",
    seed=0,
    steps=None,
    dst=8192,
    **more,
):
    """Runs one load; array, box and coords outermost first."""
    m = Machine(schedule=schedule, seed=seed)
    base = m.global_memory.place(array)
    rank = array.ndim
    steps = steps or (1,) * rank
    tensor = TensorMap(base, element, array.shape[::-1], array.strides[-2::-1] if rank > 1 else (),
    box[::-1],
                       steps[::-1], mode, **more)  # fmt: skip
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    count = int(np.prod([-(-b // s) for b, s in zip(box, steps)]))
    names = ", ".join(f"%c{i}" for i in range(rank))
    m.add(
        0, LOAD.format(d=rank, coords=names), LANE0, dst=dst, map=where, hint=0,
        bytes=count * array.itemsize,
        **{f"c{i}": c for i, c in enumerate(coords[::-1])},
    )  # fmt: skip
    return m.run()


CASES = [
    # array shape, box, coords (outermost first), element, dtype, swizzle
    ((64,), (16,), (8,), "u32", np.uint32, "none"),
    ((40, 64), (8, 64), (16, 0), "bf16", np.uint16, "128B"),
    ((40, 64), (8, 32), (16, 32), "f16", np.uint16, "64B"),
    ((40, 64), (16, 16), (-5, 48), "u16", np.uint16, "32B"),
    ((40, 80), (16, 64), (33, 40), "u16", np.uint16, "128B"),
    ((5, 12, 48), (2, 4, 32), (1, 10, 32), "u32", np.uint32, "128B"),
    ((5, 12, 48), (2, 4, 32), (-1, -2, -16), "f32", np.uint32, "128B"),
    ((3, 4, 5, 64), (2, 2, 3, 16), (2, 1, 3, 0), "u8", np.uint8, "none"),
    ((2, 3, 4, 5, 32), (2, 1, 2, 2, 16), (0, 2, 1, 4, 16), "u8", np.uint8, "none"),
    ((20, 16), (4, 2), (18, 14), "u64", np.uint64, "none"),
]


@pytest.mark.parametrize("schedule", ["lazy", "random"])
@pytest.mark.parametrize("shape,box,coords,element,dtype,mode", CASES)
def test_load_is_slicing(shape, box, coords, element, dtype, mode, schedule):
    rng = np.random.default_rng(1)
    array = rng.integers(1, 250, shape).astype(dtype)
    m = load(array, box, coords, element=element, mode=mode, schedule=schedule, seed=7)
    got = shared_box(m.shared().data, 8192, box, dtype, mode)
    assert (got == expected(array, coords, box, (1,) * len(shape))).all()
    assert m.counters.total()["tma_loads"] == 1


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 40), cols=st.integers(1, 6), box_rows=st.integers(1, 20),
    r=st.integers(-25, 45),
    c=st.integers(-40, 60), mode=st.sampled_from(["none", "32B", "64B", "128B"]),
    seed=st.integers(0, 9),
)  # fmt: skip
def test_load_any_box(rows, cols, box_rows, r, c, mode, seed):
    array = np.random.default_rng(rows).integers(1, 9, (rows, 8 * cols)).astype(np.uint16)
    width = (SPAN[mode] or 64) // 2
    m = load(
        array, (box_rows, width), (r, c), element="u16", mode=mode, schedule="random", seed=seed
    )
    got = shared_box(m.shared().data, 8192, (box_rows, width), np.uint16, mode)
    assert (got == expected(array, (r, c), (box_rows, width), (1, 1))).all()


def test_traversal_stride():
    array = np.arange(40 * 32, dtype=np.uint16).reshape(40, 32)
    m = load(array, (9, 32), (3, 0), element="u16", steps=(4, 1))
    got = shared_box(m.shared().data, 8192, (3, 32), np.uint16, "none")
    assert (got == array[3:12:4]).all()


def test_nan_fill():
    array = np.zeros((4, 8), np.uint32)
    m = load(array, (4, 8), (2, 4), element="f32", nan_fill=True)
    got = shared_box(m.shared().data, 8192, (4, 8), np.float32, "none")
    assert not np.isnan(got[:2, :4]).any()
    assert np.isnan(got[2:]).all() and np.isnan(got[:, 4:]).all()


def test_32_byte_atoms():
    array = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    m = load(array, (16, 64), (0, 0), element="u16", mode="128B", atom32=True)
    assert (shared_box(m.shared().data, 8192, (16, 64), np.uint16, "128B", True) == array).all()


def four_bit(padded: bool, coords=(4, 128), schedule="random"):
    """A (rows, 256) 4-bit tensor, two codes per byte."""
    m = Machine(schedule=schedule, seed=2)
    packed = np.random.default_rng(0).integers(0, 256, (12, 128)).astype(np.uint8)
    base = m.global_memory.place(packed)
    element = "b4x16_p64" if padded else "b4x16"
    tensor = TensorMap(
        base, element, (256, 12), (128,), (128, 8), (1, 1), "128B" if padded else "64B"
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    m.add(
        0,
        LOAD.format(d=2, coords="%c0, %c1"),
        LANE0,
        dst=8192,
        map=where,
        hint=0,
        bytes=8 * 64,
        c0=coords[1],
        c1=coords[0],
    )
    m.run()
    want = np.zeros((8, 64), np.uint8)
    hi = min(12, coords[0] + 8) - coords[0]
    want[:hi] = packed[coords[0] : coords[0] + hi, coords[1] // 2 : coords[1] // 2 + 64]
    return m, want


def test_packed_four_bit():
    m, want = four_bit(False)
    assert (shared_box(m.shared().data, 8192, (8, 64), np.uint8, "64B") == want).all()


def test_padded_four_bit():
    """16 codes take 16 bytes, 8 of them padding; the mbarrier counts the packed bytes."""
    m, want = four_bit(True)
    got = shared_box(m.shared().data, 8192, (8, 8, 16), np.uint8, "128B")
    assert (got[:, :, :8].reshape(8, 64) == want).all()


# ---- multicast, pairs, gather4 -------------------------------------------------------------------

SYNC = "barrier.cluster.arrive; barrier.cluster.wait;"
ARM = "mbarrier.init.shared.b64 [%b], 1; mbarrier.arrive.expect_tx.shared.b64 _, [%b], %bytes;"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p, [%b], 0;"


def test_multicast_signals_every_destination():
    m = Machine(ctas=4, schedule="random", seed=1)
    array = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
    tensor = TensorMap(
        m.global_memory.place(array), "u16", (64, 8), (128,), (64, 8), (1, 1), "128B"
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    copy = (
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%dst], [%map, {0, 0}], [%b], 11;"
    )
    for rank in range(4):
        body = WAIT if rank in (0, 1, 3) else ""
        m.add(
            rank, ARM + SYNC + (copy if rank == 1 else "") + body + SYNC, LANE0,
            b=rank << 24 | BAR, bytes=1024,
            dst=rank << 24 | 8192, map=where,
        )  # fmt: skip
    m.run()
    for rank in (0, 1, 3):
        assert (shared_box(m.shared(rank).data, 8192, (8, 64), np.uint16, "128B") == array).all()
    assert not m.shared(2).init[8192]
    assert m.cluster.ctas[2].barriers[BAR].generation == 0


@pytest.mark.parametrize("multicast", [False, True])
def test_pair_loads_signal_the_leader(multicast):
    """.cta_group::2: a mbarrier address with bit 24 cleared is the even CTA's, for each
    destination's own pair."""
    m = Machine(ctas=4, schedule="random", seed=1)
    array = np.arange(8 * 64, dtype=np.uint16).reshape(8, 64)
    tensor = TensorMap(
        m.global_memory.place(array), "u16", (64, 8), (128,), (64, 8), (1, 1), "128B"
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    suffix, mask = (".multicast::cluster", ", 10") if multicast else ("", "")
    copy = (
        f"cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes{suffix}.cta_group::2"
        f" [%dst], [%map, {{0, 0}}], [%lead]{mask};"
    )
    for rank in range(4):
        own = rank << 24 | BAR
        wait = WAIT if rank == 0 or (rank == 2 and multicast) else ""
        m.add(
            rank, ARM + SYNC + (copy if rank == 1 else "") + wait + SYNC, LANE0, b=own,
            lead=own & 0xFEFFFFFF, bytes=1024,
            dst=rank << 24 | 8192, map=where,
        )  # fmt: skip
    m.run()
    generations = [m.cluster.ctas[r].barriers[BAR].generation for r in range(4)]
    assert generations == ([1, 0, 1, 0] if multicast else [1, 0, 0, 0])
    assert (shared_box(m.shared(1).data, 8192, (8, 64), np.uint16, "128B") == array).all()
    assert bool(m.shared(3).init[8192]) == multicast


def test_gather4():
    m = Machine()
    array = np.arange(32 * 64, dtype=np.uint16).reshape(32, 64)
    tensor = TensorMap(
        m.global_memory.place(array), "u16", (64, 32), (128,), (64, 1), (1, 1), "128B"
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    m.add(
        0,
        ARM +
            "cp.async.bulk.tensor.2d.shared::cta.global.tile::gather4.mbarrier::complete_tx::bytes"
        " [8192], [%map, {0, %r0, %r1, %r2, %r3}], [%b];" + WAIT,
        LANE0, b=BAR, bytes=512, map=where, r0=31, r1=-1, r2=5, r3=32,
    )  # fmt: skip
    m.run()
    got = shared_box(m.shared().data, 8192, (4, 64), np.uint16, "128B")
    assert (got[[0, 2]] == array[[31, 5]]).all()
    assert not got[[1, 3]].any(), "a bad row index loads zeros and still counts its bytes"


# ---- stores --------------------------------------------------------------------------------------

STORE = (
    "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group.L2::cache_hint [%map, "
    "{%c0, %c1}], [8192], 0;"
)
DONE = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"


def swizzle_image(tile: np.ndarray, mode: str, offset: int = 8192) -> np.ndarray:
    raw, out = tile.tobytes(), np.zeros(tile.nbytes, np.uint8)
    for i, byte in enumerate(raw):
        out[swizzled(offset + i, mode) - offset] = byte
    return out


def store_machine(
    text=STORE + DONE, coords=(10, 32), mode="128B", lanes=LANE0, element="u16", fill=True, **kw
):
    m = Machine(**kw)
    array = np.full((14, 80), 7, np.uint16)
    tile = np.random.default_rng(3).integers(0, 1000, (8, 64)).astype(np.uint16)
    tensor = TensorMap(
        m.global_memory.place(array), element, (80, 14), (160,), (64, 8), (1, 1), mode
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    if fill:
        m.fill(0, 8192, swizzle_image(tile, mode))
    m.add(0, text, lanes, map=where, c0=coords[1], c1=coords[0])
    return m, array, tile


@pytest.mark.parametrize("mode", ["128B", "none"])
def test_store_clips(mode):
    m, array, tile = store_machine(mode=mode)
    m.run()
    assert (array[10:14, 32:80] == tile[:4, :48]).all()
    assert (array[:10] == 7).all() and (array[:, :32] == 7).all()


def reduce_machine(op: str, lanes=LANE0):
    m = Machine()
    array = np.full((10, 40), 7, np.uint32)
    tile = np.random.default_rng(3).integers(0, 1000, (8, 32)).astype(np.uint32)
    tensor = TensorMap(
        m.global_memory.place(array), "u32", (40, 10), (160,), (32, 8), (1, 1), "128B"
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    m.fill(0, 8192, swizzle_image(tile, "128B"))
    text = (
        f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{op}.tile.bulk_group [%map, "
        f"{{8, 2}}], [8192];"
    )
    m.add(0, text + DONE, lanes, map=where)
    return m.run(), array, tile


def test_uniform_store_of_a_whole_warp_happens_once():
    m, array, tile = reduce_machine("add", np.ones(32, bool))
    assert (array[2:10, 8:40] == tile + 7).all()
    assert m.counters.total()["tma_stores"] == 1


@pytest.mark.parametrize("op", ["add", "min", "max", "and", "or", "xor", "inc", "dec"])
def test_reduce_operators(op):
    functions = {
        "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
        "inc": lambda t, old: np.where(old >= t, 0, old + 1), "dec": lambda t,
        old: np.where((old == 0) | (old > t), t, old - 1),
    }  # fmt: skip
    _, array, tile = reduce_machine(op)
    assert (array[2:10, 8:40] == functions[op](tile, np.uint32(7))).all()
    assert (array[:2] == 7).all() and (array[:, :8] == 7).all()


def test_scatter4():
    m = Machine()
    array = np.zeros((16, 64), np.uint16)
    tile = np.arange(1, 257, dtype=np.uint16).reshape(4, 64)
    tensor = TensorMap(
        m.global_memory.place(array), "u16", (64, 16), (128,), (64, 1), (1, 1), "128B"
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    m.fill(0, 8192, swizzle_image(tile, "128B"))
    m.add(0,
    "cp.async.bulk.tensor.2d.global.shared::cta.tile::scatter4.bulk_group [%map, "
        "{0, 3, 9, 1, 15}], [8192];" + DONE,
          LANE0, map=where)  # fmt: skip
    m.run()
    assert (array[[3, 9, 1, 15]] == tile).all()
    assert np.count_nonzero(array.any(1)) == 4


# ---- misuse --------------------------------------------------------------------------------------


def test_store_without_proxy_fence_names_the_writer():
    m, _, tile = store_machine(fill=False)
    m.store(0, 8192, swizzle_image(tile, "128B"), thread=5)
    with pytest.raises(MissingProxyFence, match="thread 5"):
        m.run()


def test_fence_by_another_thread_does_not_help_without_synchronisation():
    m, _, tile = store_machine(
        text="nanosleep.u32 1; fence.proxy.async.shared::cta;" + STORE + DONE, fill=False
    )
    m.add(0, "nanosleep.u32 1;")
    m.store(0, 8192, swizzle_image(tile, "128B"), thread=40)
    with pytest.raises(MissingProxyFence, match="thread 40"):
        m.run()


@pytest.mark.parametrize("where", ["writer", "issuer after the barrier"])
def test_fence_by_writer_or_after_the_barrier(where):
    fence = "fence.proxy.async.shared::cta;"
    first, second = (fence, "") if where == "writer" else ("", fence)
    m, array, tile = store_machine(
        text="bar.sync 1, 64;" + second + STORE + DONE, fill=False, coords=(0, 0)
    )
    m.add(0, first + "bar.sync 1, 64;")
    m.store(0, 8192, swizzle_image(tile, "128B"), thread=40)
    m.run()
    assert (array[:8, :64] == tile).all()


def test_uninitialised_store_source():
    m, _, _ = store_machine(fill=False)
    with pytest.raises(UninitialisedRead):
        m.run()


def test_store_source_is_busy_until_the_wait():
    m, _, _ = store_machine(text=STORE + "cp.async.bulk.commit_group; nanosleep.u32 1; "
        "bar.sync 1, 64;"
                            "cp.async.bulk.wait_group.read 0; bar.sync 2, 64;")  # fmt: skip
    busy: list[int] = []
    original = m.find_handler

    def watch(instr):
        if instr.base == "setmaxnreg":
            busy.append(int(m.shared().async_reads[8192]))
        return original(instr)

    m.find_handler = watch
    note = "setmaxnreg.dec.sync.aligned.u32 40;"
    m.add(0, "bar.sync 1, 64;" + note + "bar.sync 2, 64;" + note)
    m.run()
    assert busy == [1, 0]


def test_load_over_a_store_in_flight():
    load_text = (
        ARM + "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[8192], [%map, {%c0, %c1}], [%b];"
    )
    m, _, _ = store_machine(text=STORE + load_text + WAIT + DONE, coords=(0, 0))
    m.cluster.ctas[0].warps[0].values.update(
        {"%b": np.full(32, BAR, np.uint64), "%bytes": np.full(32, 1024, np.uint64)}
    )
    with pytest.raises(SharedOverwrite):
        m.run()


def test_exit_with_unread_store():
    m, _, _ = store_machine(text=STORE + "cp.async.bulk.commit_group;")
    with pytest.raises(SharedOverwrite, match="ends while a bulk store"):
        m.run()
    m, array, tile = store_machine(text=STORE, checks=Checks(bulk_exit=False), coords=(0, 0))
    m.run()
    assert (array[:8, :64] == tile).all(), "it completes all the same"


@pytest.mark.parametrize("bytes_", [1008, 1040])
def test_wrong_transaction_bytes(bytes_):
    m = Machine()
    array = np.zeros((8, 64), np.uint16)
    tensor = TensorMap(
        m.global_memory.place(array), "u16", (64, 8), (128,), (64, 8), (1, 1), "128B"
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    copy = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[8192], [%map, {0, 0}], [%b];"
    )
    w = m.add(0, ARM + copy + WAIT, LANE0, b=BAR, bytes=bytes_, map=where)
    if bytes_ < 1024:
        with pytest.raises(BarrierError, match="16 more bytes"):
            m.run()
    else:  # the phase never completes: a loop around the wait would deadlock
        m.run()
        assert w.values["%p"][0] == 0 and m.cluster.ctas[0].barriers[BAR].tx == 16


def test_two_loads_into_one_place():
    m = Machine()
    array = np.zeros((8, 64), np.uint16)
    tensor = TensorMap(
        m.global_memory.place(array), "u16", (64, 8), (128,), (64, 8), (1, 1), "128B"
    )
    where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
    copy = (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes "
        "[8192], [%map, {0, 0}], [%b];"
    )
    m.add(0, ARM + copy * 2 + WAIT, LANE0, b=BAR, bytes=2048, map=where)
    with pytest.raises(SharedRace):
        m.run()


def test_illegal_forms():
    array = np.zeros((8, 64), np.uint16)

    def attempt(text, error, match, shape=(64, 8), box=(64, 8)):
        m = Machine()
        tensor = TensorMap(m.global_memory.place(array), "u16", shape, (128,), box, (1, 1), "128B")
        where = m.global_memory.place(np.frombuffer(tensor.encode(), np.uint8).copy())
        m.add(0, ARM + text, LANE0, b=BAR, bytes=1024, map=where)
        with pytest.raises(error, match=match) as caught:
            m.run()
        assert caught.value.line is not None

    base = (
        "cp.async.bulk.tensor.{}d.shared::cta.global.{}.mbarrier::complete_tx::bytes "
        "[{}], [%map, {{{}}}], [%b];"
    )
    attempt(base.format(3, "tile", 8192, "0, 0, 0"), IllegalInstruction, "rank 2")
    attempt(base.format(2, "im2col", 8192, "0, 0"), UnsupportedInstruction, "im2col")
    attempt(base.format(2, "tile", 8200, "0, 0"), Exception, "multiple of 128")
    attempt(base.format(2, "tile", 232320, "0, 0"), OutOfBounds, "leaves the window")
    attempt(
        base.format(2, "tile::gather4", 8192, "0, 0, 1, 2, 3"), IllegalInstruction, "box of one row"
    )
    attempt(
        base.format(2, "tile", 8192, "0, 0"), OutOfBounds, "0x100480", shape=(64, 9), box=(64, 9)
    )
