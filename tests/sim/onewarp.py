"""One instruction on many values: a kernel written in PTX around it, run on either core."""

# ruff: noqa: E501 (PTX and tables)
from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels import sim
from cute_kernels.sim.checks import Checks
from cute_kernels.sim.ptx import parse

CORES = ("compiled", "numpy")
_BITS = {1: "b8", 2: "b16", 4: "b32", 8: "b64"}
_HEADER = ".version 9.0\n.target sm_100a\n.address_size 64\n"
_TORCH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def needs(core: str) -> str:
    """The core's name, or a skip where its package is missing."""
    if core == "compiled":
        pytest.importorskip("numba", reason="the compiled core needs numba")
    return core


def launch(
    text: str,
    params: bytes,
    *,
    core: str,
    grid: tuple[int, int, int] = (1, 1, 1),
    block: tuple[int, int, int] = (32, 1, 1),
    cluster: tuple[int, int, int] = (1, 1, 1),
    smem_bytes: int = 0,
    checks: Checks | None = None,
    schedule: str = "lazy",
    seed: int = 0,
) -> Any:
    """Run the only kernel of a PTX text; returns the LaunchResult."""
    (function,) = parse(text).entries()
    simulator = sim.Simulator(seed=seed, schedule=schedule, core=needs(core), checks=checks)
    shape = SimpleNamespace(grid=grid, block=block, cluster=cluster, smem_bytes=smem_bytes)
    return simulator.run(function, params, shape)


def kernel(body: str, sources: list[int], result: int, declarations: str = "") -> str:
    """PTX of a kernel: thread i loads element i of each source (given by its bytes) into %a0, %a1, ...,
    runs ``body`` and stores %d."""
    lines = [_HEADER, ".visible .entry k("]
    names = ["out", *(f"in{i}" for i in range(len(sources)))]
    lines += [",\n".join(f".param .u64 {n}" for n in names), ")\n{"]
    lines += [f".reg .{_BITS[size]} %a{i};" for i, size in enumerate(sources)]
    lines += [f".reg .{_BITS[result]} %d;", ".reg .b64 %rd<8>;", ".reg .b32 %r<32>;"]
    lines += [".reg .b16 %h<8>;", ".reg .pred %p<8>;", declarations]
    lines += ["mov.u32 %r31, %ctaid.x;", "mov.u32 %r30, %ntid.x;", "mov.u32 %r29, %tid.x;"]
    lines += ["mad.lo.s32 %r31, %r31, %r30, %r29;"]
    for i, size in enumerate(sources):
        lines += [f"ld.param.b64 %rd1, [in{i}];", f"mad.wide.u32 %rd1, %r31, {size}, %rd1;"]
        lines += [f"ld.global.{_BITS[size]} %a{i}, [%rd1];"]
    lines += [body, "ld.param.b64 %rd1, [out];", f"mad.wide.u32 %rd1, %r31, {result}, %rd1;"]
    lines += [f"st.global.{_BITS[result]} [%rd1], %d;", "ret;", "}"]
    return "\n".join(lines) + "\n"


def evaluate(core: str, body: str, sources: list[Any], result: Any, declarations: str = "") -> Any:
    """``body`` applied to arrays of equal length (padded to whole warps); returns an array of dtype ``result``.

    The output is poisoned, so that a lane that stores nothing shows.
    """
    arrays = [np.atleast_1d(np.asarray(s)) for s in sources]
    count = max(len(a) for a in arrays) if arrays else 32
    padded = -(-count // 32) * 32
    warps = padded // 32
    inputs = []
    for a in arrays:
        full = np.resize(a, padded) if len(a) < count else np.pad(a, (0, padded - count), "edge")
        inputs.append(torch.from_numpy(np.ascontiguousarray(full).view(f"i{a.itemsize}").copy()))
    size = np.dtype(result).itemsize
    out = torch.full((padded * size,), 0xA5, dtype=torch.uint8)
    text = kernel(body, [a.itemsize for a in arrays], size, declarations)
    params = struct.pack(f"<{1 + len(inputs)}Q", out.data_ptr(), *(t.data_ptr() for t in inputs))
    per_block = next(w for w in (32, 16, 8, 4, 2, 1) if warps % w == 0)
    launch(text, params, core=core, grid=(warps // per_block, 1, 1), block=(32 * per_block, 1, 1))
    return out.numpy().view(result)[:count]


def f32(*bits: int) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def u32(*values: int) -> np.ndarray:
    return np.array([v & 0xFFFFFFFF for v in values], np.uint32)


def u64(*values: int) -> np.ndarray:
    return np.array([v & (2**64 - 1) for v in values], np.uint64)


def u16(*values: int) -> np.ndarray:
    return np.array([v & 0xFFFF for v in values], np.uint16)
