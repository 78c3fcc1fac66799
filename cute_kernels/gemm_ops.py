"""Grouped GEMMs on torch tensors: NVFP4 rows of many experts times their NVFP4 weights, with what
happens to the accumulators fused.

CUDA tensors run on an SM100 GPU; CPU tensors run `cute_kernels.torch_gemm`, or the kernels in the
simulator while one is active (`kernels_on` starts one). Registered with torch.library as described
in `cute_kernels.launch`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import activations, toolchain, torch_gemm
from cute_kernels import compile as compiler
from cute_kernels.activations import Activation
from cute_kernels.config import FP4_HIDDEN, GemmConfig, choose_config
from cute_kernels.launch import (
    DSL_TYPES,
    FLOATS,
    Buffer,
    allocate,
    check_count,
    check_vector,
    check_written,
    flat,
    grouped_scales,
    launch,
    multiprocessors,
    register,
)
from cute_kernels.nvfp4 import BLOCK, check_expert_offsets, grouped_scale_rows

_GEMM = 7  # arguments that all operations begin with: rows, weights, offsets, counter
_NOTHING = contextlib.nullcontext()
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


class WorkItems(NamedTuple):
    """Tiles that clusters share dynamically: who is done early takes more. Worth it where clusters
    do not start together or share their SMs; no bit depends on it.

    expert_offsets  int32 (E+1,)
    counter         int32 (1,), 0 before a launch and again after it: launches one after another may
                    share it. `ops.sort_routes` writes the first 0
    """

    expert_offsets: Tensor
    counter: Tensor


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
    tensors, unless one is active, and nothing for a GPU.

    Raises RuntimeError for a program that torch.compile traces outside of a simulator: its calls
    would run without one. Where it may break the graph, torch then runs the call as it is."""
    if device.type != "cpu" or compiler.simulating():
        return _NOTHING
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "torch.compile cannot keep a simulator in a graph: compile and call the layer inside "
            "`with sim.Simulator():`, or without fullgraph=True"
        )
    from cute_kernels.sim import Simulator

    return Simulator(schedule="lazy")


def without_launches() -> Any:
    """Context in which operations compile and load their kernels, and run nothing."""
    return compiler.without_launches()


def config_name(rows: int, weights: Tensor, dtype: torch.dtype | None) -> str:
    """Name of the configuration that a GEMM of ``rows`` routed rows and weights (E, N, K/2) takes:
    one kernel each. ``dtype`` of the output, None: NVFP4, after an activation."""
    experts, n, half = weights.shape
    out_bytes = FP4_HIDDEN if dtype is None else dtype.itemsize
    return choose_config(rows, experts, n, 2 * half, out_bytes).name


# ---- public functions


def grouped_gemm(
    rows: Rows,
    weights: Weights,
    expert_offsets: Tensor | WorkItems,
    alpha: Tensor,
    *,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """out[r, n] = dtype(acc[r, n] * (row_scale[r] * alpha[e]) + bias[e, n]), e the expert of row r.

    expert_offsets int32 (E+1,), clusters stride over the tiles, or `WorkItems`; alpha fp32 (E,);
    row_scale fp32 (R,); bias fp32 (E, N); out (R, N) in bf16, fp16 or fp32, contiguous.
    Rows past expert_offsets[E] are not written. Raises TypeError or ValueError for shapes, layouts
    and devices, before anything is allocated.
    """
    rows, weights, items = _bytes(rows), _bytes(weights), _items(expert_offsets)
    if out is None:
        _check_store(*rows, *weights, *items, alpha, row_scale, bias, out_dtype)
        shape = (rows.routed, weights.data.shape[1])
        out = torch.empty(shape, dtype=out_dtype, device=rows.data.device)
    _grouped_gemm_op(*rows, *weights, *items, alpha, row_scale, bias, out)
    return out


def grouped_gemm_act_quant(
    rows: Rows,
    weights: Weights,
    expert_offsets: Tensor | WorkItems,
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
    rows, weights, items = _bytes(rows), _bytes(weights), _items(expert_offsets)
    arguments = (*rows, *weights, *items, *scales, bias)
    parts = 2 if activation.gated else 1
    if out is None:
        _check_act(*arguments, parts)
        experts, n, _ = weights.data.shape
        out = allocate(hidden_buffers(rows.routed, n // parts, experts), rows.data.device)
    data, scale = check_count(out, ("h_data", "h_scale"))
    spec = activation_spec(activation)
    _grouped_gemm_act_quant_op(*arguments, *spec, data, scale)
    return Rows(data, scale)


def hidden_buffers(rows: int, inter: int, experts: int) -> list[Buffer]:
    """What `grouped_gemm_act_quant` writes: codes and scales of h (R, I)."""
    return [
        Buffer("h_data", (rows, inter // 2), torch.uint8),
        Buffer(*grouped_scales("h_scale", rows, experts, inter)),
    ]


def grouped_gemm_scatter_add(
    rows: Rows,
    weights: Weights,
    expert_offsets: Tensor | WorkItems,
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
    rows, weights, items = _bytes(rows), _bytes(weights), _items(expert_offsets)
    y, token, weight = target
    _grouped_gemm_scatter_add_op(*rows, *weights, *items, alpha, row_scale, bias, token, weight, y)
    return y


def _bytes(operand: Any) -> Any:
    """The same Rows or Weights with uint8 scales: torch's own checks of an operator cannot compute
    with float8."""
    if operand.scale.dtype == torch.uint8:
        return operand
    return operand._replace(scale=operand.scale.view(torch.uint8))


def activation_spec(activation: Activation) -> tuple[str, Any]:
    """`activations.spec`, remembered but for a traced program, whose numbers have no values yet."""
    traced = torch.compiler.is_compiling()
    return activations.spec(activation) if traced else activations.spec_of(activation)


def _items(items: Tensor | WorkItems) -> tuple[Tensor, Tensor | None]:
    return items if isinstance(items, WorkItems) else (items, None)


# ---- checks


def _check(
    data: Tensor,
    scale: Tensor,
    row_token: Tensor | None,
    w_data: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    counter: Tensor | None,
) -> tuple[int, int, int]:
    """What every operation begins with. Returns (E, N, routed rows). Raises TypeError or
    ValueError."""
    device = data.device
    if counter is not None:
        check_vector(counter, "counter", torch.int32, 1, device)
    if w_data.dtype != torch.uint8 or w_data.dim() != 3:
        raise ValueError(
            f"weights must be uint8 (E, N, K/2), got {tuple(w_data.shape)} {w_data.dtype}"
        )
    experts, n, half = w_data.shape
    check_expert_offsets(offsets, device)
    if offsets.shape[0] != experts + 1:
        raise ValueError(f"expert_offsets must have {experts + 1} entries, got {offsets.shape[0]}")
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != half:
        raise ValueError(
            f"rows must be uint8 (rows, {half}) for weights of K = {2 * half}, got "
            f"{tuple(data.shape)} {data.dtype}"
        )
    if 2 * half % K_MULTIPLE or n % BLOCK:
        raise ValueError(
            f"K must be a multiple of {K_MULTIPLE} (16-byte rows for TMA) and N of {BLOCK}, got "
            f"K = {2 * half}, N = {n}"
        )
    if row_token is not None:
        check_vector(row_token, "row_token", torch.int32, (), device)
    routed = (data if row_token is None else row_token).shape[0]
    padded_k = -(-half // 32) * 4
    need = (grouped_scale_rows(routed, experts), padded_k)
    if scale.shape != need or scale.dtype != torch.uint8:
        raise ValueError(
            f"scales of the rows must be uint8 or float8_e4m3fn {need} ({routed} routed rows, "
            f"grouped by {experts} experts), got {tuple(scale.shape)} {scale.dtype}"
        )
    shape = (experts, -(-n // 128) * 128, padded_k)
    if w_scale.shape != shape or w_scale.dtype != torch.uint8:
        raise ValueError(
            f"scales of the weights must be swizzled uint8 or float8_e4m3fn {shape}, got "
            f"{tuple(w_scale.shape)} {w_scale.dtype}"
        )
    for name, tensor in zip(_OPERAND_NAMES, (data, scale, w_data, w_scale)):
        if not tensor.is_contiguous() or tensor.device != device:
            raise ValueError(
                f"{name} must be contiguous and on {device}, got strides {tuple(tensor.stride())} "
                f"on {tensor.device}"
            )
    return experts, n, routed


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


def _check_store(*args: Any) -> tuple[int, int]:
    """Arguments of the schema up to bias, then the output dtype. Returns (N, routed rows)."""
    experts, n, routed = _check(*args[:_GEMM])
    alpha, row_scale, bias, dtype = args[_GEMM:]
    if dtype not in FLOATS:
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {dtype}")
    device = args[0].device
    check_factor(alpha, "alpha", (experts,), device)
    check_factor(row_scale, "row_scale", (routed,), device)
    check_factor(bias, "bias", (experts, n), device)
    return n, routed


def _check_store_out(*args: Any) -> None:
    out = args[-1]
    n, routed = _check_store(*args[:-1], out.dtype)
    check_written(out, "out", (routed, n), out.dtype, args[0].device)


def _check_scatter(*args: Any) -> None:
    *gemm, token, weight, y = args
    if y.dtype not in (torch.float32, torch.bfloat16) or y.dim() != 2:
        raise TypeError(f"y must be (T, N) float32 or bfloat16, got {tuple(y.shape)} {y.dtype}")
    n, routed = _check_store(*gemm, y.dtype)
    device = args[0].device
    check_vector(token, "row_token of the target", torch.int32, routed, device)
    check_factor(weight, "row_weight", (routed,), device)
    check_written(y, "y", (y.shape[0], n), y.dtype, device)


def _check_act(*args: Any) -> tuple[int, int, int]:
    """Arguments of the schema up to bias, then the projections P. Returns (E, I, routed rows)."""
    experts, n, routed = _check(*args[:_GEMM])
    alpha, gx, gh, bias, parts = args[_GEMM:]
    if n % (parts * BLOCK):
        raise ValueError(
            f"N must be a multiple of {parts * BLOCK} with {parts} projections, got {n}"
        )
    device = args[0].device
    check_factor(alpha, "alpha", (experts, parts), device)
    check_factor(gx, "gx", (args[0].shape[0],), device)
    if gh is None:
        raise ValueError("gh must be given: no tile holds a whole row of h (see quantize_hidden)")
    check_factor(gh, "gh", (experts,), device)
    check_factor(bias, "bias", (experts, n), device)
    return experts, n // parts, routed


def _check_act_out(*args: Any) -> None:
    *arguments, name, _, _, _ = args
    parts = 2 if activations.class_of(name).gated else 1
    experts, inter, routed = _check_act(*arguments, parts)
    check_hidden(args[-2:], routed, inter, experts, args[0].device)


def check_hidden(
    out: Sequence[Tensor], rows: int, inter: int, experts: int, device: torch.device
) -> None:
    """``out`` are the tensors of `hidden_buffers`."""
    data, scale = out
    check_written(data, "h_data", (rows, inter // 2), torch.uint8, device)
    check_written(scale, *grouped_scales("h_scale", rows, experts, inter), device)


# ---- launching


def _gemm(gathered: bool, config: GemmConfig, epilogue: Any, *flags: Any) -> Any:
    """The kernel object of a recipe; ``epilogue`` makes the epilogue of ``flags``."""
    from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
    from cute_kernels.sm100.loads import ContiguousRows, GatheredRows

    load = GatheredRows() if gathered else ContiguousRows()
    return Sm100GroupedGemm(load, epilogue(*flags), config)


def _run(operands: tuple[Any, ...], recipe: tuple[Any, ...], tensors: list[Any]) -> None:
    """``operands``: the arguments that all operations begin with. ``recipe``: of the epilogue, with
    ``tensors`` as its arguments, the output first."""
    data, scale, row_token, w_data, w_scale, offsets, counter = operands
    out = tensors[0]
    for name, tensor in (("rows", data), ("weights", w_data), ("scales", scale)):
        if tensor.data_ptr() % 16:
            raise ValueError(f"{name} must start at a multiple of 16 bytes, as TMA reads them")
    if out.data_ptr() % 32:
        raise ValueError("the output must start at a multiple of 32 bytes: one store writes them")
    experts, n, half = w_data.shape
    tokens, device, gathered = data.shape[0], data.device, row_token is not None
    routed = row_token.shape[0] if gathered else tokens
    out_bytes = FP4_HIDDEN if out.dtype == torch.uint8 else out.dtype.itemsize
    config = choose_config(routed, experts, n, 2 * half, out_bytes, counter is not None)
    sizes = (tokens, routed) if gathered else (routed,)
    load = (data, scale, row_token, *sizes, scale.shape[0])
    clusters = compiler.clusters_at_once(device, config.cluster, multiprocessors)
    problem = (experts, n, 2 * half, counter, clusters)
    kernel = (_gemm, gathered, config, *recipe)
    launch(kernel, device, *load, w_data, w_scale, offsets, *tensors, *problem)


def _store_rows(dtype: torch.dtype, row_scaled: bool, biased: bool) -> Any:
    from cute_kernels.device.epilogues import StoreRows

    return StoreRows(DSL_TYPES[dtype], row_scaled, biased)


def _wide(bias: Tensor | None) -> Tensor | None:
    """Biases as the epilogues read them, 16 bytes at a time."""
    return None if bias is None else flat(bias)


def _store_kernel(*args: Any) -> None:
    alpha, row_scale, bias, out = args[_GEMM:]
    if out.shape[0]:
        recipe = (_store_rows, out.dtype, row_scale is not None, bias is not None)
        _run(args[:_GEMM], recipe, [out, alpha, row_scale, _wide(bias)])


def _scatter_add(dtype: torch.dtype, row_scaled: bool, biased: bool, weighted: bool) -> Any:
    from cute_kernels.device.scatter import ScatterAdd

    return ScatterAdd(DSL_TYPES[dtype], row_scaled, biased, weighted)


def _scatter_kernel(*args: Any) -> None:
    alpha, row_scale, bias, token, weight, y = args[_GEMM:]
    if token.shape[0] and y.shape[0]:
        given = (row_scale is not None, bias is not None, weight is not None)
        tensors = [y, alpha, row_scale, _wide(bias), token, weight]
        _run(args[:_GEMM], (_scatter_add, y.dtype, *given), tensors)


def _activation_quantize(name: str, numbers: tuple[float, ...], indexed: bool, biased: bool) -> Any:
    from cute_kernels.device.epilogues import ActivationQuantize

    return ActivationQuantize(activations.from_spec(name, numbers), indexed, biased)


def _act_kernel(*args: Any) -> None:
    alpha, gx, gh, bias, name, numbers, data, scale = args[_GEMM:]
    if data.shape[0]:
        row_token = args[2]
        given = (row_token is not None, bias is not None)
        recipe = (_activation_quantize, name, tuple(numbers), *given)
        _run(args[:_GEMM], recipe, [data, scale, alpha, gx, row_token, gh, _wide(bias)])


# ---- plain PyTorch


def _plain_store(*args: Any) -> tuple[Tensor]:
    offsets, _, alpha, row_scale, bias, out = args[5:]
    acc = torch_gemm.accumulators(*args[:6])
    return (torch_gemm.scaled(acc, offsets, alpha, row_scale, bias).to(out.dtype),)


def _plain_scatter(*args: Any) -> tuple[Tensor]:
    offsets, _, alpha, row_scale, bias, token, weight, y = args[5:]
    acc = torch_gemm.accumulators(*args[:6])
    o = torch_gemm.scaled(acc, offsets, alpha, row_scale, bias).bfloat16().float()
    o = o if weight is None else weight[:, None] * o
    here = int(offsets[-1])
    return (y.index_add(0, token[:here].long(), o[:here].to(y.dtype)),)


def _plain_act(*args: Any) -> tuple[Tensor, ...]:
    row_token = args[2]
    offsets, _, alpha, gx, gh, bias, name, numbers, *_ = args[5:]
    acc = torch_gemm.accumulators(*args[:6])
    row_gx = gx if row_token is None else gx[row_token.clamp(min=0).long()]
    activation = activations.from_spec(name, tuple(numbers))
    h = torch_gemm.hidden(acc, offsets, (alpha, row_gx), bias, activation)
    return torch_gemm.quantized(h, offsets, gh)


# ---- registration

_OPERANDS = (
    "Tensor data, Tensor scale, Tensor? row_token, Tensor w_data, Tensor w_scale, "
    "Tensor expert_offsets, Tensor? counter, "
)
_grouped_gemm_op = register(
    f"grouped_gemm({_OPERANDS}Tensor alpha, Tensor? row_scale, Tensor? bias, Tensor(a!) out)",
    _check_store_out,
    _plain_store,
    _store_kernel,
)
_grouped_gemm_scatter_add_op = register(
    f"grouped_gemm_scatter_add({_OPERANDS}Tensor alpha, Tensor? row_scale, Tensor? bias, "
    "Tensor target_token, Tensor? row_weight, Tensor(a!) y)",
    _check_scatter,
    _plain_scatter,
    _scatter_kernel,
)
_grouped_gemm_act_quant_op = register(
    f"grouped_gemm_act_quant({_OPERANDS}Tensor alpha, Tensor gx, Tensor gh, Tensor? bias, "
    "str activation, float[] parameters, Tensor(a!) h_data, Tensor(b!) h_scale)",
    _check_act_out,
    _plain_act,
    _act_kernel,
)
