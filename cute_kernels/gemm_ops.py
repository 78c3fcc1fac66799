"""Grouped GEMMs on torch tensors: NVFP4 rows of many experts times their NVFP4 weights.

CUDA tensors run on an SM100 GPU, CPU tensors in the simulator (`kernels_on` starts one). Not
registered with torch.library yet: eager calls only.
"""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import toolchain
from cute_kernels.activations import Activation
from cute_kernels.config import choose_config
from cute_kernels.nvfp4 import BLOCK, check_expert_offsets, grouped_scale_rows
from cute_kernels.ops import _launch

_DTYPES = {torch.bfloat16: "BFloat16", torch.float16: "Float16", torch.float32: "Float32"}
_K_MULTIPLE = 32  # TMA: the pitch of a row of codes is a multiple of 16 bytes


class Rows(NamedTuple):
    """Quantised rows of A.

    data       uint8 (rows, K/2); with ``row_token`` one row per token
    scale      uint8 or float8_e4m3fn, SWIZZLE_32_4_4_GROUPED, one row per *routed* row
    row_token  int32 (R,): token of each routed row, or None: data is expert-major
    """

    data: Tensor
    scale: Tensor
    row_token: Tensor | None = None

    @property
    def routed(self) -> int:
        return (self.data if self.row_token is None else self.row_token).shape[0]


class Weights(NamedTuple):
    """Codes uint8 (E, N, K/2) and scales SWIZZLE_32_4_4 (E, N padded to 128, K/16 padded to 4)."""

    data: Tensor
    scale: Tensor


class HiddenScales(NamedTuple):
    """What turns accumulators into h: alpha fp32 (E, P), gx fp32 per token (or per row without
    row_token), gh fp32 (E,).
    """

    alpha: Tensor
    gx: Tensor
    gh: Tensor


class Availability(NamedTuple):
    usable: bool
    reason: str


def sm100_available(device: torch.device) -> Availability:
    """Can the kernels run on this GPU?"""
    if device.type != "cuda" or not torch.cuda.is_available():
        return Availability(False, "needs an SM100 GPU")
    capability = torch.cuda.get_device_capability(device)
    if capability[0] != 10:
        return Availability(False, f"needs compute capability 10.x, this GPU has {capability}")
    found = compiler.status(capability)
    return Availability(found.ok, found.reason or f"{found.arch}; proved in the simulator only")


def simulator_available(device: torch.device) -> Availability:
    """Can the kernels run in the simulator, on CPU tensors?"""
    if device.type != "cpu":
        return Availability(False, f"runs on CPU tensors, not on {device.type}")
    found = toolchain.check_compiler(toolchain.installed())
    return Availability(found.ok, found.reason or "the compiled SM100 kernels on a CPU, slow")


def start_simulator() -> None:
    """Let this process run kernels in the simulator. Raises RuntimeError when the real CUDA
    runtime is loaded already."""
    compiler.enable_simulator()


def kernels_on(device: torch.device) -> Any:
    """Context in which kernels run for tensors of ``device``: a deterministic simulator for CPU
    tensors, unless one is active, and nothing for a GPU."""
    if device.type != "cpu" or compiler.simulating():
        return contextlib.nullcontext()
    from cute_kernels.sim import Simulator

    return Simulator(schedule="lazy")


def _check(rows: Rows, weights: Weights, offsets: Tensor) -> tuple[int, int, int]:
    """(E, N, K). Raises ValueError before anything is allocated."""
    experts, n, half = weights.data.shape
    k = 2 * half
    check_expert_offsets(offsets, rows.data.device)
    if offsets.numel() != experts + 1:
        raise ValueError(f"expert_offsets must have {experts + 1} entries, got {offsets.numel()}")
    if rows.data.dtype != torch.uint8 or rows.data.dim() != 2 or rows.data.shape[1] != half:
        raise ValueError(
            f"rows must be uint8 (rows, {half}) for weights of K = {k}, got "
            f"{tuple(rows.data.shape)} {rows.data.dtype}"
        )
    if k % _K_MULTIPLE or n % BLOCK:
        raise ValueError(
            f"K must be a multiple of {_K_MULTIPLE} (16-byte rows for TMA) and N of {BLOCK}, got "
            f"K = {k}, N = {n}"
        )
    need = (grouped_scale_rows(rows.routed, experts), -(-k // 64) * 4)
    if tuple(rows.scale.shape) != need:
        raise ValueError(
            f"scales of {rows.routed} rows must be grouped, {need}, got {tuple(rows.scale.shape)}"
        )
    for name, tensor in (("rows", rows.data), ("weights", weights.data), ("scales", weights.scale)):
        aligned = tensor.is_contiguous() and tensor.data_ptr() % 16 == 0
        if not aligned or tensor.device != rows.data.device:
            raise ValueError(
                f"{name} must be contiguous, 16-byte aligned and on {rows.data.device}, got "
                f"strides {tensor.stride()} on {tensor.device}"
            )
    return experts, n, k


def _run(rows: Rows, weights: Weights, offsets: Tensor, epilogue: Any, tensors: list[Any]) -> None:
    from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
    from cute_kernels.sm100.loads import ContiguousRows, GatheredRows

    experts, n, half = weights.data.shape
    config = choose_config(rows.routed, experts, n)
    gathered = rows.row_token is not None
    kernel = Sm100GroupedGemm(GatheredRows() if gathered else ContiguousRows(), epilogue, config)
    device = rows.data.device
    sizes: list[Any] = [rows.data.shape[0], rows.routed] if gathered else [rows.routed]
    load = [rows.data, rows.scale, rows.row_token, *sizes, rows.scale.shape[0]]
    problem = [experts, n, 2 * half, max(_multiprocessors(device) // config.cluster, 1)]
    _launch(kernel, device, *load, *weights, offsets, *tensors, *problem)


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        from cute_kernels.sim.runtime import NUM_SMS

        return NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def grouped_gemm(
    rows: Rows,
    weights: Weights,
    expert_offsets: Tensor,
    alpha: Tensor,
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """out[r, n] = dtype(acc[r, n] * (row_scale[r] * alpha[e]) + bias[e, n]), e the expert of row r.

    expert_offsets int32 (E+1,); alpha fp32 (E,); row_scale fp32 (R,); bias fp32 (E, N); out (R, N)
    in bf16, fp16 or fp32.
    Rows past expert_offsets[E] are not written. Raises ValueError for shapes, layouts and devices.
    """
    from cute_kernels.device.epilogues import StoreRows

    if out_dtype not in _DTYPES:
        raise ValueError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    _, n, _ = _check(rows, weights, expert_offsets)
    out = torch.empty((rows.routed, n), dtype=out_dtype, device=rows.data.device)
    if rows.routed:
        scaled, biased = row_scale is not None, bias is not None
        epilogue = StoreRows(_DTYPES[out_dtype], scaled, biased)
        _run(rows, weights, expert_offsets, epilogue, [out, alpha, row_scale, bias])
    return out


def grouped_gemm_act_quant(
    rows: Rows,
    weights: Weights,
    expert_offsets: Tensor,
    activation: Activation,
    scales: HiddenScales,
    bias: Tensor | None = None,
) -> Rows:
    """h = act(gate, up) of interleaved gate/up weights, quantised with one outer scale per expert:
    data uint8 (R, I/2) and grouped scales, expert-major. numerics sections 2 and 3; bias fp32 (E,
    N).

    Raises ValueError for shapes, layouts and devices.
    """
    from cute_kernels.device.epilogues import ActivationQuantize

    experts, n, _ = _check(rows, weights, expert_offsets)
    epilogue = ActivationQuantize(activation, rows.row_token is not None, bias is not None)
    inter, device = n // epilogue.parts, rows.data.device
    data = torch.empty((rows.routed, inter // 2), dtype=torch.uint8, device=device)
    shape = (grouped_scale_rows(rows.routed, experts), -(-inter // 64) * 4)
    scale = torch.empty(shape, dtype=torch.uint8, device=device)
    if rows.routed:
        tensors = [data, scale, scales.alpha, scales.gx, rows.row_token, scales.gh, bias]
        _run(rows, weights, expert_offsets, epilogue, tensors)
    return Rows(data, scale)
