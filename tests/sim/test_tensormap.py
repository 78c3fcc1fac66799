"""Tensor maps: the bit layout, the rules, tensormap.replace and the tensormap proxy."""

from __future__ import annotations

import numpy as np
import pytest

from cute_kernels.sim.checks import MissingProxyFence, TensorMapError
from cute_kernels.sim.tensormap import TensorMap
from tests.sim.fakes import LANE0, Machine

EXAMPLE = TensorMap(
    address=0x7F0012345600, element="bf16", sizes=(320, 17, 5), strides=(640, 640 * 17), box=(64,
    8, 1),
    steps=(1, 1, 1), swizzle="128B",
)  # fmt: skip


def test_known_bits():
    """Fields at the positions of simulator.md, spelled out for one map."""
    raw = EXAMPLE.encode()
    assert raw[0:8] == (0x7F0012345600).to_bytes(8, "little")
    word = int.from_bytes(raw[8:12], "little")
    assert (word >> 4 & 7, word >> 7 & 15, word >> 13 & 3) == (2, 10, 3)
    assert int.from_bytes(raw[12:16], "little") == 640 >> 4
    assert int.from_bytes(raw[16:20], "little") == 640 * 17 >> 4
    assert [int.from_bytes(raw[32 + 4 * i : 36 + 4 * i], "little") for i in range(3)] == [
        319,
        16,
        4,
    ]
    assert list(raw[55:58]) == [63, 7, 0]


@pytest.mark.parametrize(
    "tensor",
    [
        EXAMPLE,
        TensorMap(1 << 20, "b4x16", (512, 128), (256,), (256, 128), (1, 1), "128B"),
        TensorMap(1 << 20, "b4x16_p64", (512, 128), (256,), (128, 128), (1, 1), "128B"),
        TensorMap(1 << 20, "f32", (64, 3, 3, 3, 3), (256, 768, 1 << 37, 32), (32, 1, 1, 2, 3), (1,
        2, 1, 1, 3),
                  "64B", nan_fill=True),
        TensorMap(1 << 20, "u8", (4096,), (), (256,), (1,)),
    ],
)  # fmt: skip
def test_round_trip(tensor):
    raw = tensor.encode()
    assert len(raw) == 128 and not any(raw[64:])
    assert TensorMap.decode(raw) == tensor


def test_rules():
    for change, message in (
        ({"box": (128, 8, 1)}, "swizzle span"),
        ({"box": (4, 8, 1)}, "multiple of 16"),
        ({"address": 0x1008}, "multiple of 16"),
        ({"interleave": 1}, "interleaved"),
    ):
        with pytest.raises(TensorMapError, match=message):
            TensorMap(**{**EXAMPLE.__dict__, **change}).check()
    with pytest.raises(TensorMapError, match="no tensor map"):
        TensorMap.decode(bytes(128))


REPLACE = [
    ("global_address", "b64", (), 0x1234500, "address", 0x1234500),
    ("rank", "b32", (), 1, "rank", 2),
    ("box_dim", "b32", (0,), 32, "box", (32, 8, 1)),
    ("global_dim", "b32", (1,), 99, "sizes", (320, 99, 5)),
    ("global_stride", "b64", (0,), 1280, "strides", (1280, 640 * 17)),
    ("element_stride", "b32", (1,), 2, "steps", (1, 2, 1)),
    ("elemtype", "b32", (), 6, "element", "f16"),
    ("swizzle_mode", "b32", (), 2, "swizzle", "64B"),
    ("fill_mode", "b32", (), 1, "nan_fill", True),
]


@pytest.mark.parametrize("space", ["shared::cta", "global"])
@pytest.mark.parametrize("field,kind,ordinal,new,attribute,want", REPLACE)
def test_replace(space, field, kind, ordinal, new, attribute, want):
    m = Machine()
    raw = np.frombuffer(EXAMPLE.encode(), np.uint8).copy()
    addr = m.global_memory.place(raw)
    m.fill(0, 2048, raw)
    where = 2048 if space == "shared::cta" else addr
    operands = ", ".join(["[%a]", *map(str, ordinal), "%v"])
    m.add(
        0, f"tensormap.replace.tile.{field}.{space}.b1024.{kind} {operands};", LANE0, a=where, v=new
    )
    m.run()
    data = m.shared().data[2048:2176] if space == "shared::cta" else raw
    assert getattr(TensorMap.decode(data.tobytes()), attribute) == want


def _use(fence: bool) -> Machine:
    """A map edited in shared memory, published to global memory, and used for a load."""
    m = Machine()
    source = np.arange(1024, dtype=np.uint16).reshape(16, 64)
    base = m.global_memory.place(source)
    old = TensorMap(1 << 30, "u16", (64, 16), (128,), (64, 8), (1, 1))
    m.fill(0, 2048, np.frombuffer(old.encode(), np.uint8))
    published = m.global_memory.place(np.zeros(128, np.uint8))
    text = (
        "mbarrier.init.shared.b64 [1024], 1; mbarrier.arrive.expect_tx.shared.b64 _, [1024], 1024;"
        "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [2048], %base;"
        "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned "
        "[%g], [2048], 128;"
    )
    if fence:
        text += "fence.proxy.tensormap::generic.acquire.gpu [%g], 128;"
    text += (
        "cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [4096], [%g, "
        "{0, 8}], [1024];"
        "mbarrier.try_wait.parity.shared.b64 %p, [1024], 0;"
    )
    m.add(0, text, LANE0, base=base, g=published)
    m.want = source[8:]
    return m


def test_published_map_works_after_the_acquire_fence():
    m = _use(True).run()
    got = m.shared().data[4096 : 4096 + 1024].view(np.uint16).reshape(8, 64)
    assert (got == m.want).all()


def test_missing_tensormap_fence_is_reported():
    with pytest.raises(MissingProxyFence, match="tensor map"):
        _use(False).run()
