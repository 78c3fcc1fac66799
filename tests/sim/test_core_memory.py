"""Loads, stores, atomics and matrix moves on both cores, and the faults they report."""

# ruff: noqa: E501 (PTX and tables)
from __future__ import annotations

import gc
import struct
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.sim.checks import (
    Checks,
    Misaligned,
    OutOfBounds,
    SimError,
    UninitialisedRead,
)
from tests.sim.onewarp import CORES, evaluate, launch, u16, u32, u64

LANE = np.arange(32)
HEAD = ".version 9.0\n.target sm_100a\n.address_size 64\n"


def run(core: str, body: str, tensors: list[torch.Tensor], shared: int = 0, **options: Any) -> Any:
    """A kernel with the addresses of the tensors in %rd10, %rd11, ... and the lane in %r0."""
    params = ",\n".join(f".param .u64 p{i}" for i in range(len(tensors)))
    loads = "\n".join(f"ld.param.b64 %rd{10 + i}, [p{i}];" for i in range(len(tensors)))
    text = (
        f"{HEAD}.visible .entry k({params})\n{{\n.reg .b32 %r<64>;\n.reg .b64 %rd<32>;\n.reg .pred %p<4>;\n"
        f".reg .b16 %h<16>;\n.shared .align 128 .b8 buffer[{max(shared, 1)}];\n"
        f"mov.u32 %r0, %tid.x;\n{loads}\n{body}\nret;\n}}\n"
    )
    raw = struct.pack(f"<{len(tensors)}Q", *(t.data_ptr() for t in tensors))
    return launch(text, raw, core=core, **options)


@pytest.mark.parametrize("core", CORES)
def test_vectors_of_every_width(core: str) -> None:
    source = torch.arange(32 * 16, dtype=torch.int32)
    for count, kind, size in (
        (2, "b32", 8),
        (4, "b32", 16),
        (2, "b64", 16),
        (4, "b16", 8),
        (8, "b32", 32),
    ):
        prefix = {"b32": "%r", "b64": "%rd", "b16": "%h"}[kind]
        first = 1 if kind != "b64" else 20
        items = ", ".join(f"{prefix}{first + i}" for i in range(count))
        out = torch.full((32 * size,), 0x5A, dtype=torch.uint8)
        body = (
            f"mad.wide.u32 %rd1, %r0, {size}, %rd10; mad.wide.u32 %rd2, %r0, {size}, %rd11;"
            f"ld.global.v{count}.{kind} {{{items}}}, [%rd1]; st.global.v{count}.{kind} [%rd2], {{{items}}};"
        )
        run(core, body, [source, out])
        assert torch.equal(out, source.view(torch.uint8)[: 32 * size]), (count, kind)


@pytest.mark.parametrize("core", CORES)
def test_narrow_loads_extend_to_their_register(core: str) -> None:
    source = torch.tensor([0x80, 0x7F, 0xFF, 1] * 8, dtype=torch.uint8)
    for t, want in (("s8", [-128, 127, -1, 1]), ("u8", [128, 127, 255, 1])):
        out = torch.full((32,), 99, dtype=torch.int32)
        body = (
            f"cvt.u64.u32 %rd1, %r0; add.s64 %rd1, %rd1, %rd10; ld.global.{t} %r1, [%rd1];"
            "mad.wide.u32 %rd2, %r0, 4, %rd11; st.global.b32 [%rd2], %r1;"
        )
        run(core, body, [source, out])
        assert out.tolist() == want * 8


@pytest.mark.parametrize("core", CORES)
def test_modifiers_of_loads_and_stores_change_nothing_here(core: str) -> None:
    source = torch.arange(32, dtype=torch.int32)
    for mods in ("global.nc", "global.L1::no_allocate", "relaxed.gpu.global", "acquire.sys.global",
                 "volatile.global", "weak.global"):  # fmt: skip
        out = torch.full((32,), -1, dtype=torch.int32)
        body = (
            "mad.wide.u32 %rd1, %r0, 4, %rd10; mad.wide.u32 %rd2, %r0, 4, %rd11;"
            f"ld.{mods}.b32 %r1, [%rd1]; st.release.gpu.global.b32 [%rd2], %r1;"
        )
        run(core, body, [source, out])
        assert torch.equal(out, source), mods


@pytest.mark.parametrize("core", CORES)
def test_shared_memory_and_its_generic_addresses(core: str) -> None:
    out = torch.full((32,), -1, dtype=torch.int32)
    body = (
        "mov.b32 %r1, buffer; mad.lo.s32 %r2, %r0, 4, %r1; mul.lo.s32 %r3, %r0, 3;"
        "st.shared.b32 [%r2], %r3; bar.sync 0; xor.b32 %r4, %r0, 31; mul.wide.u32 %rd1, %r4, 4;"
        "mov.b64 %rd2, buffer; cvta.shared.u64 %rd2, %rd2; add.s64 %rd1, %rd1, %rd2; ld.b32 %r5, [%rd1];"
        "mad.wide.u32 %rd3, %r0, 4, %rd10; st.global.b32 [%rd3], %r5;"
    )
    run(core, body, [out], shared=128)
    assert out.tolist() == [3 * (31 - i) for i in range(32)]


@pytest.mark.parametrize("core", CORES)
def test_local_memory_is_private_to_a_lane(core: str) -> None:
    out = torch.full((32,), -1, dtype=torch.int32)
    body = (
        ".local .align 8 .b8 depot[16]; mov.b64 %rd1, depot; cvta.local.u64 %rd2, %rd1;"
        "st.local.b32 [%rd1+4], %r0; ld.b32 %r1, [%rd2+4];"
        "mad.wide.u32 %rd3, %r0, 4, %rd10; st.global.b32 [%rd3], %r1;"
    )
    run(core, body, [out])
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize("core", CORES)
def test_another_cta_of_the_cluster(core: str) -> None:
    """Each CTA writes its rank into the memory of the other one."""
    out = torch.full((2,), -1, dtype=torch.int32)
    body = (
        "mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1; mov.b32 %r3, buffer;"
        "mapa.shared::cluster.u32 %r4, %r3, %r2; st.shared::cluster.b32 [%r4], %r1;"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; ld.shared.b32 %r5, [%r3];"
        "mad.wide.u32 %rd1, %r1, 4, %rd10; st.global.b32 [%rd1], %r5;"
        "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    )
    run(core, body, [out], shared=16, grid=(2, 1, 1), cluster=(2, 1, 1), block=(1, 1, 1))
    assert out.tolist() == [1, 0]


ATOMICS = [
    ("add.u32", 5, 3, 8), ("add.u32", 0xFFFFFFFF, 2, 1), ("min.s32", 5, -3 & 0xFFFFFFFF, -3 & 0xFFFFFFFF),
    ("max.u32", 5, 0xFFFFFFFD, 0xFFFFFFFD), ("and.b32", 0xFF, 0x3C, 0x3C), ("or.b32", 1, 6, 7),
    ("xor.b32", 5, 6, 3), ("exch.b32", 5, 6, 6), ("inc.u32", 5, 5, 0), ("inc.u32", 4, 5, 5),
    ("dec.u32", 0, 7, 7), ("dec.u32", 9, 7, 7), ("dec.u32", 3, 7, 2),
    ("add.f32", 0x3F800000, 0x40000000, 0x40400000), ("add.noftz.bf16x2", 0x3F803F80, 0x40003F80, 0x40404000),
    ("add.noftz.f16x2", 0x3C003C00, 0x3C003C00, 0x40004000),
]  # fmt: skip


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(core: str, space: str) -> None:
    for form, old, operand, new in ATOMICS:
        op, t = form.split(".", 1)
        memory = torch.from_numpy(u32(old).view(np.int32).copy())
        got = torch.full((2,), 77, dtype=torch.int32)
        setup = "mov.b64 %rd1, %rd10;"
        if space == "shared":
            setup = "mov.b64 %rd1, buffer; ld.global.b32 %r9, [%rd10]; st.shared.b32 [%rd1], %r9;"
        body = (
            f"{setup} mov.b32 %r1, {operand}; atom.{space}.{op}.{t} %r2, [%rd1], %r1;"
            f"ld.{space}.b32 %r3, [%rd1]; st.global.b32 [%rd11], %r2; st.global.b32 [%rd11+4], %r3;"
        )
        run(core, body, [memory, got], shared=16, block=(1, 1, 1))
        assert [v & 0xFFFFFFFF for v in got.tolist()] == [old, new], (form, space)


@pytest.mark.parametrize("core", CORES)
def test_compare_and_swap_and_contention(core: str) -> None:
    counter = torch.zeros(3, dtype=torch.int32)
    seen = torch.full((32,), -1, dtype=torch.int32)
    body = (
        "atom.global.add.u32 %r1, [%rd10], 1; mad.wide.u32 %rd1, %r0, 4, %rd11; st.global.b32 [%rd1], %r1;"
        "atom.global.cas.b32 %r2, [%rd10+4], 0, 55; red.relaxed.gpu.global.add.s32 [%rd10+8], 2;"
    )
    run(core, body, [counter, seen])
    assert counter.tolist() == [32, 55, 64]
    assert sorted(seen.tolist()) == list(range(32))


@pytest.mark.parametrize("core", CORES)
def test_vector_reductions(core: str) -> None:
    memory = torch.arange(4, dtype=torch.float32)
    body = (
        "mov.b32 %r1, 0f3F800000; mov.b32 %r2, 0f40000000;"
        "red.global.add.v4.f32 [%rd10], {%r1, %r2, %r1, %r2};"
    )
    run(core, body, [memory], block=(2, 1, 1))
    assert memory.tolist() == [2.0, 5.0, 4.0, 7.0]


@pytest.mark.parametrize("core", CORES)
def test_fp32_atomics_flush_in_global_memory_only(core: str) -> None:
    if core == "numpy":
        pytest.skip("the numpy core keeps subnormals in both")
    memory = torch.from_numpy(u32(1).view(np.float32).copy())
    out = torch.full((1,), 9, dtype=torch.int32)
    body = (
        "mov.b32 %r1, 0f00000001; red.global.add.f32 [%rd10], %r1; mov.b64 %rd1, buffer;"
        "st.shared.b32 [%rd1], %r1; red.shared.add.f32 [%rd1], %r1; ld.shared.b32 %r2, [%rd1];"
        "st.global.b32 [%rd11], %r2;"
    )
    run(core, body, [memory, out], shared=16, block=(1, 1, 1))
    assert memory.view(torch.int32).tolist() == [0]
    assert out.tolist() == [2]


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("transposed", ["", ".trans"])
def test_matrix_moves(core: str, transposed: str) -> None:
    """stmatrix of four matrices, then an ordinary read: element (i, k) of matrix j sits at row 8 j + i."""
    out = torch.full((32 * 8,), -1, dtype=torch.int16)
    body = (
        "mov.b32 %r9, buffer; mad.lo.s32 %r10, %r0, 16, %r9;"
        + "".join(
            f"mad.lo.s32 %r{1 + j}, %r0, 2, {100 * j}; add.s32 %r20, %r{1 + j}, 1; shl.b32 %r20, %r20, 16;"
            f"or.b32 %r{1 + j}, %r{1 + j}, %r20;"
            for j in range(4)
        )
        + f"stmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 [%r10], {{%r1, %r2, %r3, %r4}};"
        "bar.sync 0; ld.shared.v4.b32 {%r5, %r6, %r7, %r8}, [%r10]; mad.wide.u32 %rd1, %r0, 16, %rd10;"
        "st.global.v4.b32 [%rd1], {%r5, %r6, %r7, %r8};"
    )
    run(core, body, [out], shared=512)
    want = np.zeros((4, 8, 8), np.int64)
    for j in range(4):
        for lane in range(32):
            for half in range(2):
                i, c = lane // 4, 2 * (lane % 4) + half
                if transposed:
                    i, c = c, i
                want[j, i, c] = 2 * lane + 100 * j + half
    assert out.view(4, 8, 8).tolist() == want.tolist()


@pytest.mark.parametrize("core", CORES)
def test_matrix_load_gives_back_what_the_store_put(core: str) -> None:
    for trans in ("", ".trans"):
        body = (
            f".shared .align 128 .b8 tile[512]; mov.b32 %r9, tile; mad.lo.s32 %r10, %r29, 16, %r9;"
            f"stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r10], {{%a0, %a1, %a0, %a1}};"
            f"bar.warp.sync 0xffffffff;"
            f"ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r1, %r2, %r3, %r4}}, [%r10]; mov.b32 %d, %r4;"
        )
        words = [u32(*(LANE * 3)), u32(*(LANE * 65537))]
        assert evaluate(core, body, words, np.uint32).tolist() == words[1].tolist()


# ---- faults


FAULTS = [
    ("ld.global.b32 %r1, [%rd10+128];", OutOfBounds, "no live allocation"),
    ("st.global.b32 [%rd10+-4], %r0;", OutOfBounds, "no live allocation"),
    ("ld.global.b32 %r1, [%rd10+2];", Misaligned, "multiple of 4"),
    ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%rd10+8];", Misaligned, "multiple of 16"),
    ("mov.b32 %r9, buffer; ld.shared.b32 %r1, [%r9];", UninitialisedRead, ""),
    ("mov.b32 %r9, 0x700000; st.shared.b32 [%r9], %r0;", OutOfBounds, "window"),
    ("mov.b32 %r9, 0x01000400; st.shared::cluster.b32 [%r9], %r0;", OutOfBounds, "rank 1"),
    (".local .align 4 .b8 depot[8]; mov.b64 %rd1, depot; st.local.b32 [%rd1+4096], %r0;", OutOfBounds,
     "stack frame"),
]  # fmt: skip


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize(("body", "error", "text"), FAULTS, ids=lambda v: str(v)[:40])
def test_fault(core: str, body: str, error: type[SimError], text: str) -> None:
    whole = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(error) as caught:
        run(core, body, [whole], shared=64)
    message = str(caught.value)
    assert text in message
    assert "kernel k" in message and "warp 0" in message and "at PTX line" in message


@pytest.mark.parametrize("core", CORES)
def test_a_freed_tensor_is_out_of_bounds(core: str) -> None:
    storage = torch.zeros(1 << 20, dtype=torch.int32)  # large enough to be returned to the system
    address = storage.data_ptr()
    text = (
        f"{HEAD}.visible .entry k(.param .u64 p)\n{{\n.reg .b32 %r<4>;\n.reg .b64 %rd<4>;\n"
        "ld.param.b64 %rd1, [p];\nld.global.b32 %r1, [%rd1];\nret;\n}\n"
    )
    launch(text, struct.pack("<Q", address), core=core)
    del storage
    gc.collect()
    with pytest.raises(OutOfBounds):
        launch(text, struct.pack("<Q", address), core=core)


@pytest.mark.parametrize("core", CORES)
def test_checks_can_be_switched_off(core: str) -> None:
    run(core, "mov.b32 %r9, buffer; ld.shared.b32 %r1, [%r9];", [], shared=64, checks=Checks.none())


@pytest.mark.parametrize("core", CORES)
def test_bytes_are_counted(core: str) -> None:
    source = torch.arange(32, dtype=torch.int32)
    body = (
        "mad.wide.u32 %rd1, %r0, 4, %rd10; ld.global.b32 %r1, [%rd1]; mov.b32 %r9, buffer;"
        "mad.lo.s32 %r9, %r0, 4, %r9; st.shared.b32 [%r9], %r1; ld.shared.b32 %r2, [%r9];"
        "st.global.b32 [%rd1], %r2;"
    )
    result = run(core, body, [source], shared=128)
    total = result.counters.total()
    assert total is not None
    text = repr(total) + repr(result.counters)
    assert "128" in text


__all__ = ["u16", "u64"]
