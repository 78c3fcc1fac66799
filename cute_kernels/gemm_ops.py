"""Grouped GEMMs on torch tensors: NVFP4 rows of many experts times their NVFP4 weights, with what
happens to the accumulators fused.

CUDA tensors run on an SM100 GPU; CPU tensors run `cute_kernels.torch_gemm`, or the kernels in the
simulator while one is active (`kernels_on` starts one). Registered with torch.library as described
in `cute_kernels.launch`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import activations, toolchain, torch_gemm
from cute_kernels import compile as compiler
from cute_kernels.activations import Activation
from cute_kernels.config import GemmConfig, choose_config, clusters_at_once
from cute_kernels.launch import (
    DSL_TYPES,
    FLOATS,
    Buffer,
    allocate,
    check_count,
    check_out,
    check_vector,
    flat,
    grouped_scales,
    launch,
    multiprocessors,
    register,
)
from cute_kernels.nvfp4 import BLOCK, check_expert_offsets, grouped_scale_rows

_OPERAND_NAMES = ("rows", "scales of the rows", "weights", "scales of the weights")
K_MULTIPLE = 32  # TMA: the pitch of a row of codes is a multiple of 16 bytes


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
    """Codes uint8 (E, N, K/2) and scales SWIZZLE_32_4_4 (E, N padded to 128, K/16 padded to 4),
    uint8 or float8_e4m3fn."""

    data: Tensor
    scale: Tensor


class HiddenScales(NamedTuple):
    """What turns accumulators into h: alpha fp32 (E, P), gx fp32 per token (or per row without
    row_token), gh fp32 (E,) or None: one outer scale per row of h (`ops.quantize_hidden` alone).
    """

    alpha: Tensor
    gx: Tensor
    gh: Tensor | None = None


class ScatterTarget(NamedTuple):
    """Where rows are added: y (T, N) fp32 or bf16, row_token int32 (R,), row_weight fp32 (R,) or
    None for weight 1. Entries of row_token past the last routed row are not read."""

    y: Tensor
    row_token: Tensor
    row_weight: Tensor | None = None


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


def without_launches() -> Any:
    """Context in which operations compile and load their kernels, and run nothing."""
    return compiler.without_launches()


def config_name(rows: int, experts: int, n: int) -> str:
    """Name of the configuration that a GEMM of these sizes takes: one kernel each."""
    return choose_config(rows, experts, n).name


# ---- public functions


def grouped_gemm(
    rows: Rows,
    weights: Weights,
    expert_offsets: Tensor,
    alpha: Tensor,
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """out[r, n] = dtype(acc[r, n] * (row_scale[r] * alpha[e]) + bias[e, n]), e the expert of row r.

    expert_offsets int32 (E+1,); alpha fp32 (E,); row_scale fp32 (R,); bias fp32 (E, N); out (R, N)
    in bf16, fp16 or fp32, contiguous.
    Rows past expert_offsets[E] are not written. Raises TypeError or ValueError for shapes, layouts
    and devices, before anything is allocated.
    """
    rows, weights = _bytes(rows), Weights(*_bytes(weights))
    if out is None:
        _check_store(*rows, *weights, expert_offsets, alpha, row_scale, bias, out_dtype)
        shape = (rows.routed, weights.data.shape[1])
        out = torch.empty(shape, dtype=out_dtype, device=rows.data.device)
    torch.ops.nvfp4_megamoe.grouped_gemm(
        *rows, *weights, expert_offsets, alpha, row_scale, bias, out
    )
    return out


def grouped_gemm_act_quant(
    rows: Rows,
    weights: Weights,
    expert_offsets: Tensor,
    activation: Activation,
    scales: HiddenScales,
    bias: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
) -> Rows:
    """h = act(gate, up) of interleaved gate/up weights, quantised with one outer scale per expert:
    data uint8 (R, I/2) and grouped scales, expert-major. numerics sections 2 and 3; bias fp32 (E,
    N).

    Raises TypeError or ValueError for shapes, layouts and devices, before anything is allocated.
    """
    rows, weights = _bytes(rows), Weights(*_bytes(weights))
    arguments = (*rows, *weights, expert_offsets, *scales, bias)
    parts = 2 if activation.gated else 1
    if out is None:
        _check_act(*arguments, parts)
        experts, n, _ = weights.data.shape
        out = allocate(hidden_buffers(rows.routed, n // parts, experts), rows.data.device)
    data, scale = check_count(out, "h_data, h_scale")
    spec = activations.spec(activation)
    torch.ops.nvfp4_megamoe.grouped_gemm_act_quant(*arguments, *spec, data, scale)
    return Rows(data, scale)


def hidden_buffers(rows: int, inter: int, experts: int) -> list[Buffer]:
    """What `grouped_gemm_act_quant` writes: codes and scales of h (R, I)."""
    return [
        Buffer("h_data", (rows, inter // 2), torch.uint8),
        grouped_scales("h_scale", rows, experts, inter),
    ]


def grouped_gemm_scatter_add(
    rows: Rows,
    weights: Weights,
    expert_offsets: Tensor,
    alpha: Tensor,
    target: ScatterTarget,
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """target.y[row_token[r]] += row_weight[r] * bf16(acc[r] * (row_scale[r] * alpha[e]) + bias[e]),
    for every routed row r; returns target.y.

    Arguments as in `grouped_gemm`. The order of the sums is not fixed: not deterministic with three
    rows or more of a token. With a bf16 y each addend and each partial sum is rounded to bf16.
    Raises TypeError or ValueError for shapes, layouts and devices.
    """
    rows, weights = _bytes(rows), Weights(*_bytes(weights))
    y, token, weight = target
    torch.ops.nvfp4_megamoe.grouped_gemm_scatter_add(
        *rows, *weights, expert_offsets, alpha, row_scale, bias, token, weight, y
    )
    return y


def _bytes(operand: Any) -> Any:
    """The same Rows or Weights with uint8 scales: torch's own checks of an operator cannot compute
    with float8."""
    if operand.scale.dtype == torch.uint8:
        return operand
    return operand._replace(scale=operand.scale.view(torch.uint8))


# ---- checks


def _check(rows: Rows, weights: Weights, offsets: Tensor) -> tuple[int, int, int]:
    """(E, N, K). Raises TypeError or ValueError."""
    device = rows.data.device
    if weights.data.dtype != torch.uint8 or weights.data.dim() != 3:
        raise ValueError(
            f"weights must be uint8 (E, N, K/2), got {tuple(weights.data.shape)} "
            f"{weights.data.dtype}"
        )
    experts, n, half = weights.data.shape
    k = 2 * half
    check_expert_offsets(offsets, device)
    if offsets.shape[0] != experts + 1:
        raise ValueError(f"expert_offsets must have {experts + 1} entries, got {offsets.shape[0]}")
    if rows.data.dtype != torch.uint8 or rows.data.dim() != 2 or rows.data.shape[1] != half:
        raise ValueError(
            f"rows must be uint8 (rows, {half}) for weights of K = {k}, got "
            f"{tuple(rows.data.shape)} {rows.data.dtype}"
        )
    if k % K_MULTIPLE or n % BLOCK:
        raise ValueError(
            f"K must be a multiple of {K_MULTIPLE} (16-byte rows for TMA) and N of {BLOCK}, got "
            f"K = {k}, N = {n}"
        )
    if rows.row_token is not None:
        check_vector(rows.row_token, "row_token", torch.int32, (), device)
    routed, padded_k = rows.routed, -(-k // 64) * 4
    need = (grouped_scale_rows(routed, experts), padded_k)
    if rows.scale.shape != need or rows.scale.dtype != torch.uint8:
        raise ValueError(
            f"scales of the rows must be uint8 or float8_e4m3fn {need} ({routed} routed rows, "
            f"grouped by {experts} experts), got {tuple(rows.scale.shape)} {rows.scale.dtype}"
        )
    shape = (experts, -(-n // 128) * 128, padded_k)
    if weights.scale.shape != shape or weights.scale.dtype != torch.uint8:
        raise ValueError(
            f"scales of the weights must be swizzled uint8 or float8_e4m3fn {shape}, got "
            f"{tuple(weights.scale.shape)} {weights.scale.dtype}"
        )
    for name, tensor in zip(_OPERAND_NAMES, (rows.data, rows.scale, *weights)):
        if not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"{name} must be contiguous and on {device}, got strides {tuple(tensor.stride())} "
                f"on {tensor.device}"
            )
    return experts, n, k


def check_factor(
    tensor: Tensor | None, name: str, shape: tuple[int, ...], device: torch.device
) -> None:
    """An optional fp32 operand of the epilogue."""
    if tensor is None:
        return
    if tensor.dtype != torch.float32 or tensor.shape != shape:
        raise ValueError(
            f"{name} must be float32 {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous and on {device}, got strides {tuple(tensor.stride())} on "
            f"{tensor.device}"
        )


def _check_store(*args: Any) -> tuple[int, int, Rows]:
    """Arguments of the schema up to bias, then the output dtype. Returns (E, N, rows)."""
    rows, weights = Rows(*args[:3]), Weights(*args[3:5])
    offsets, alpha, row_scale, bias, dtype = args[5:]
    experts, n, _ = _check(rows, weights, offsets)
    if dtype not in FLOATS:
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {dtype}")
    device = rows.data.device
    check_factor(alpha, "alpha", (experts,), device)
    check_factor(row_scale, "row_scale", (rows.routed,), device)
    check_factor(bias, "bias", (experts, n), device)
    return experts, n, rows


def _check_store_out(*args: Any) -> None:
    out = args[-1]
    _, n, rows = _check_store(*args[:-1], out.dtype)
    check_out((out,), (Buffer("out", (rows.routed, n), out.dtype),), rows.data.device)


def _check_scatter(*args: Any) -> None:
    *gemm, token, weight, y = args
    if y.dtype not in (torch.float32, torch.bfloat16) or y.dim() != 2:
        raise TypeError(f"y must be (T, N) float32 or bfloat16, got {tuple(y.shape)} {y.dtype}")
    _, n, rows = _check_store(*gemm, y.dtype)
    device = rows.data.device
    check_vector(token, "row_token of the target", torch.int32, rows.routed, device)
    check_factor(weight, "row_weight", (rows.routed,), device)
    check_out((y,), (Buffer("y", (y.shape[0], n), y.dtype),), device)


def _check_act(*args: Any) -> tuple[int, int, Rows]:
    """Arguments of the schema up to bias, then the projections P. Returns (E, I, rows)."""
    rows, weights = Rows(*args[:3]), Weights(*args[3:5])
    offsets, alpha, gx, gh, bias, parts = args[5:]
    experts, n, _ = _check(rows, weights, offsets)
    if n % (parts * BLOCK):
        raise ValueError(
            f"N must be a multiple of {parts * BLOCK} with {parts} projections, got {n}"
        )
    device = rows.data.device
    check_factor(alpha, "alpha", (experts, parts), device)
    check_factor(gx, "gx", (rows.data.shape[0],), device)
    if gh is None:
        raise ValueError("gh must be given: no tile holds a whole row of h (see quantize_hidden)")
    check_factor(gh, "gh", (experts,), device)
    check_factor(bias, "bias", (experts, n), device)
    return experts, n // parts, rows


def _check_act_out(*args: Any) -> None:
    *arguments, name, _, _, _ = args
    parts = 2 if activations.class_of(name).gated else 1
    experts, inter, rows = _check_act(*arguments, parts)
    check_out(args[-2:], hidden_buffers(rows.routed, inter, experts), rows.data.device)


# ---- launching

_config = functools.lru_cache(4096)(choose_config)


@functools.cache
def _kernel(gathered: bool, epilogue: Any, config: GemmConfig) -> Any:
    """One object per kernel: the compile cache then finds it by identity."""
    from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
    from cute_kernels.sm100.loads import ContiguousRows, GatheredRows

    return Sm100GroupedGemm(GatheredRows() if gathered else ContiguousRows(), epilogue, config)


def _run(rows: Rows, weights: Weights, offsets: Tensor, epilogue: Any, tensors: list[Any]) -> None:
    for name, tensor in (("rows", rows.data), ("weights", weights.data), ("scales", rows.scale)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes, as TMA reads them")
    if tensors[0].data_ptr() % 32:
        raise ValueError("the output must start at a multiple of 32 bytes: one store writes them")
    experts, n, half = weights.data.shape
    config = _config(rows.routed, experts, n)
    gathered = rows.row_token is not None
    kernel = _kernel(gathered, epilogue, config)
    device = rows.data.device
    sizes: list[Any] = [rows.data.shape[0], rows.routed] if gathered else [rows.routed]
    load = [rows.data, rows.scale, rows.row_token, *sizes, rows.scale.shape[0]]
    clusters = clusters_at_once(multiprocessors(device), config.cluster)
    problem = [experts, n, 2 * half, None, clusters]  # None: no counter, the schedule is static
    launch(kernel, device, *load, *weights, offsets, *tensors, *problem)


def _wide(bias: Tensor | None) -> Tensor | None:
    """Biases as the epilogues read them, 16 bytes at a time."""
    return None if bias is None else flat(bias)


def _store_kernel(*args: Any) -> None:
    from cute_kernels.device.epilogues import StoreRows

    rows, weights = Rows(*args[:3]), Weights(*args[3:5])
    offsets, alpha, row_scale, bias, out = args[5:]
    if rows.routed:
        epilogue = StoreRows(DSL_TYPES[out.dtype], row_scale is not None, bias is not None)
        _run(rows, weights, offsets, epilogue, [out, alpha, row_scale, _wide(bias)])


def _scatter_kernel(*args: Any) -> None:
    from cute_kernels.device.scatter import ScatterAdd

    rows, weights = Rows(*args[:3]), Weights(*args[3:5])
    offsets, alpha, row_scale, bias, token, weight, y = args[5:]
    if rows.routed and y.shape[0]:
        given = (row_scale is not None, bias is not None, weight is not None)
        epilogue = ScatterAdd(DSL_TYPES[y.dtype], *given)
        _run(rows, weights, offsets, epilogue, [y, alpha, row_scale, _wide(bias), token, weight])


def _act_kernel(*args: Any) -> None:
    from cute_kernels.device.epilogues import ActivationQuantize

    rows, weights = Rows(*args[:3]), Weights(*args[3:5])
    offsets, alpha, gx, gh, bias, name, numbers, data, scale = args[5:]
    if rows.routed:
        activation = activations.from_spec(name, tuple(numbers))
        epilogue = ActivationQuantize(activation, rows.row_token is not None, bias is not None)
        tensors = [data, scale, alpha, gx, rows.row_token, gh, _wide(bias)]
        _run(rows, weights, offsets, epilogue, tensors)


# ---- plain PyTorch


def _plain_store(*args: Any) -> tuple[Tensor]:
    offsets, alpha, row_scale, bias, out = args[5:]
    acc = torch_gemm.accumulators(*args[:6])
    return (torch_gemm.scaled(acc, offsets, alpha, row_scale, bias).to(out.dtype),)


def _plain_scatter(*args: Any) -> tuple[Tensor]:
    offsets, alpha, row_scale, bias, token, weight, y = args[5:]
    acc = torch_gemm.accumulators(*args[:6])
    o = torch_gemm.scaled(acc, offsets, alpha, row_scale, bias).bfloat16().float()
    o = o if weight is None else weight[:, None] * o
    here = int(offsets[-1])
    return (y.index_add(0, token[:here].long(), o[:here].to(y.dtype)),)


def _plain_act(*args: Any) -> tuple[Tensor, ...]:
    row_token = args[2]
    offsets, alpha, gx, gh, bias, name, numbers, *_ = args[5:]
    acc = torch_gemm.accumulators(*args[:6])
    row_gx = gx if row_token is None else gx[row_token.clamp(min=0).long()]
    activation = activations.from_spec(name, tuple(numbers))
    h = torch_gemm.hidden(acc, offsets, (alpha, row_gx), bias, activation)
    return torch_gemm.quantized(h, offsets, gh)


# ---- registration

_OPERANDS = (
    "Tensor data, Tensor scale, Tensor? row_token, Tensor w_data, Tensor w_scale, "
    "Tensor expert_offsets, "
)
register(
    f"grouped_gemm({_OPERANDS}Tensor alpha, Tensor? row_scale, Tensor? bias, Tensor(a!) out)",
    _check_store_out,
    _plain_store,
    _store_kernel,
)
register(
    f"grouped_gemm_scatter_add({_OPERANDS}Tensor alpha, Tensor? row_scale, Tensor? bias, "
    "Tensor target_token, Tensor? row_weight, Tensor(a!) y)",
    _check_scatter,
    _plain_scatter,
    _scatter_kernel,
)
register(
    f"grouped_gemm_act_quant({_OPERANDS}Tensor alpha, Tensor gx, Tensor gh, Tensor? bias, "
    "str activation, float[] parameters, Tensor(a!) h_data, Tensor(b!) h_scale)",
    _check_act_out,
    _plain_act,
    _act_kernel,
)
