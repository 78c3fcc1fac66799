"""mma.sync of bytes against exact integers, on fragments as the PTX ISA lays them out."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from cute_kernels.sim.checks import UnsupportedInstruction
from tests.sim.onewarp import CORES, launch

TYPES = {"u8": np.uint8, "s8": np.int8}


def program(kind: str, lanes: str = "") -> str:
    """Lane i loads words i, 32 + i, ... of its operands, multiplies and stores four words."""
    words = [f"%{name}{i}" for name, count in (("a", 4), ("b", 2), ("c", 4)) for i in range(count)]
    lines = [
        ".version 9.0\n.target sm_100a\n.address_size 64",
        ".visible .entry k(.param .u64 out, .param .u64 in)\n{",
        ".reg .b32 %a<4>, %b<2>, %c<4>, %d<4>, %t; .reg .b64 %in, %out; .reg .pred %p;",
        "ld.param.u64 %in, [in]; ld.param.u64 %out, [out]; mov.u32 %t, %tid.x;",
        "mad.wide.u32 %in, %t, 4, %in; mad.wide.u32 %out, %t, 4, %out;",
    ]
    lines += [f"ld.global.b32 {w}, [%in+{128 * i}];" for i, w in enumerate(words)]
    lines += [
        lines_of(lanes),
        f"mma.sync.aligned.{kind} {{%d0, %d1, %d2, %d3}}, {{%a0, %a1, %a2, %a3}}, "
        "{%b0, %b1}, {%c0, %c1, %c2, %c3};",
    ]
    lines += [f"st.global.b32 [%out+{128 * i}], %d{i};" for i in range(4)]
    return "\n".join([*lines, "ret;\n}\n"])


def lines_of(lanes: str) -> str:
    return f"setp.ge.u32 %p, %t, {lanes};\n@%p ret;" if lanes else ""


def fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """int32 (10, 32): words of A (16, 32), B (32, 8) and C (16, 8), lane by lane from the tables of
    the PTX ISA."""
    words = np.zeros((10, 32), np.int32)
    for lane in range(32):
        group, member = lane // 4, lane % 4
        for i in range(4):
            row, column = group + 8 * (i % 2), 4 * member + 16 * (i // 2)
            words[i, lane] = a[row, column : column + 4].copy().view(np.int32)[0]
            words[6 + i, lane] = c[group + 8 * (i // 2), 2 * member + i % 2]
        for i in range(2):
            row = 4 * member + 16 * i
            words[4 + i, lane] = b[row : row + 4, group].copy().view(np.int32)[0]
    return words


def run(core: str, kind: str, words: np.ndarray, lanes: str = "") -> np.ndarray:
    """D (16, 8)."""
    given, out = torch.from_numpy(words.copy()), torch.full((4, 32), 0x5A5A5A5A, dtype=torch.int32)
    params = struct.pack("<QQ", out.data_ptr(), given.data_ptr())
    launch(program(kind, lanes), params, core=core)
    d = np.empty((16, 8), np.int32)
    for lane in range(32):
        for i in range(4):
            d[lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2] = out[i, lane]
    return d


@pytest.mark.parametrize("core", CORES)
@pytest.mark.parametrize("b_type", TYPES)
@pytest.mark.parametrize("a_type", TYPES)
def test_bytes(a_type: str, b_type: str, core: str) -> None:
    rng = np.random.default_rng(1)
    a = rng.integers(0, 256, (16, 32), np.uint8).view(TYPES[a_type])
    b = rng.integers(0, 256, (32, 8), np.uint8).view(TYPES[b_type])
    c = rng.integers(-(2**31), 2**31, (16, 8), np.int64).astype(np.int32)
    want = (a.astype(np.int64) @ b.astype(np.int64) + c).astype(np.int32)  # wraps around
    got = run(core, f"m16n8k32.row.col.s32.{a_type}.{b_type}.s32", fragments(a, b, c))
    np.testing.assert_array_equal(got, want)


def test_another_type_of_the_same_bytes_differs() -> None:
    """Meta-test: signs matter, and so does every byte."""
    ones = np.full((16, 32), 255, np.uint8)
    b, c = np.full((32, 8), 1, np.int8), np.zeros((16, 8), np.int32)
    words = fragments(ones, b, c)
    assert (run("numpy", "m16n8k32.row.col.s32.u8.s8.s32", words) == 32 * 255).all()
    assert (run("numpy", "m16n8k32.row.col.s32.s8.s8.s32", words) == -32).all()


def test_missing_lanes_and_other_shapes_are_refused() -> None:
    words = np.zeros((10, 32), np.int32)
    with pytest.raises(Exception, match="needs all 32 lanes"):
        run("numpy", "m16n8k32.row.col.s32.s8.s8.s32", words, lanes="31")
    for kind in ("m16n8k32.row.col.satfinite.s32.s8.s8.s32", "m16n8k64.row.col.s32.s4.s4.s32"):
        with pytest.raises(UnsupportedInstruction):
            run("numpy", kind, words)
