"""Accumulators -> activation -> quantised rows, on torch tensors; see `cute_kernels.launch`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import activations, torch_gemm
from cute_kernels.activations import Activation
from cute_kernels.gemm_ops import (
    HiddenScales,
    Rows,
    activation_spec,
    check_factor,
    check_hidden,
    hidden_buffers,
)
from cute_kernels.launch import (
    Buffer,
    allocate,
    arch_of,
    check_count,
    check_matrix,
    check_rows,
    check_vector,
    check_written,
    flat,
    launch,
    register,
)
from cute_kernels.nvfp4 import BLOCK, check_expert_offsets


def quantize_hidden(
    acc: Tensor,
    expert_offsets: Tensor,
    activation: Activation,
    scales: HiddenScales,
    row_token: Tensor | None = None,
    bias: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
) -> tuple[Rows, Tensor]:
    """h = act(acc * (gx * alpha) + bias) of expert-major rows, quantised (numerics sections 2, 3).

    acc             fp32 (R, P*I), contiguous: sums of gate and up in turns (g0, u0, g1, ...), or of
                    the one projection (P = 1); I a multiple of 16
    expert_offsets  int32 (E+1,)
    scales          alpha fp32 (E, P); gx fp32 (R,), or (T,) with ``row_token`` int32 (R,);
                    gh fp32 (E,), or None: one outer scale per row, from its largest magnitude
    bias            fp32 (E, P*I), interleaved

    Returns Rows: codes uint8 (R, I/2), scales SWIZZLE_32_4_4_GROUPED; and the outer scale fp32 (R,)
    of each row. Rows past expert_offsets[E] and scale bytes of padding rows are not written.
    Raises TypeError or ValueError before anything is allocated.
    """
    arguments = (acc, expert_offsets, row_token, *scales, bias)
    parts = 2 if activation.gated else 1
    if out is None:
        _check(*arguments, parts)
        rows, inter = acc.shape[0], acc.shape[1] // parts
        buffers = row_hidden_buffers(rows, inter, expert_offsets.shape[0] - 1)
        out = allocate(buffers, acc.device)
    data, scale, gh = check_count(out, ("h_data", "h_scale", "row_gh"))
    spec = activation_spec(activation)
    _quantize_hidden_op(*arguments, *spec, data, scale, gh)
    return Rows(data, scale), gh


def row_hidden_buffers(rows: int, inter: int, experts: int) -> list[Buffer]:
    """What `quantize_hidden` writes: codes and scales of h (R, I), outer scales."""
    return [*hidden_buffers(rows, inter, experts), Buffer("row_gh", (rows,), torch.float32)]


def _check(*args: Any) -> tuple[int, int]:
    """Arguments of the schema up to bias, then the projections P. Returns (E, I)."""
    acc, offsets, row_token, alpha, gx, gh, bias, parts = args
    check_matrix(acc, "acc", (torch.float32,), parts * BLOCK)
    if not acc.is_contiguous():
        raise ValueError(f"acc must be contiguous, got strides {tuple(acc.stride())}")
    check_expert_offsets(offsets, acc.device)
    rows, experts, device = acc.shape[0], offsets.shape[0] - 1, acc.device
    check_rows(rows, "rows of acc")
    if row_token is None:
        check_factor(gx, "gx", (rows,), device)
    else:
        check_vector(row_token, "row_token", torch.int32, rows, device)
        check_vector(gx, "gx", torch.float32, (), device)
    check_factor(alpha, "alpha", (experts, parts), device)
    check_factor(gh, "gh", (experts,), device)
    check_factor(bias, "bias", (experts, acc.shape[1]), device)
    return experts, acc.shape[1] // parts


def _check_out(*args: Any) -> None:
    *arguments, name, _, _, _, _ = args
    parts = 2 if activations.class_of(name).gated else 1
    experts, inter = _check(*arguments, parts)
    rows, device = args[0].shape[0], args[0].device
    check_hidden(args[-3:-1], rows, inter, experts, device)
    check_written(args[-1], "row_gh", (rows,), torch.float32, device)


def _quantize_hidden(
    inter: int, name: str, numbers: tuple[float, ...], flags: tuple[bool, bool, bool, bool]
) -> Any:
    """``flags``: indexed, given, biased, hardware."""
    from cute_kernels.device.hidden import QuantizeHidden

    return QuantizeHidden(inter, activations.from_spec(name, numbers), *flags)


def _kernel(*args: Any) -> None:
    acc, offsets, row_token, alpha, gx, gh, bias, name, numbers, *out = args
    if acc.shape[0] == 0:
        return
    hardware = arch_of(acc.device) != "sm_90a"
    flags = (row_token is not None, gh is not None, bias is not None, hardware)
    kernel = (_quantize_hidden, out[0].shape[1] * 2, name, tuple(numbers), flags)
    offsets, row_token = offsets.contiguous(), None if row_token is None else row_token.contiguous()
    bias = None if bias is None else flat(bias)  # read 16 bytes at a time
    inputs = (flat(acc), offsets, row_token, alpha, gx.contiguous(), gh, bias)
    launch(kernel, acc.device, *inputs, *out, offsets.shape[0] - 1, acc.shape[0])


def _plain(*args: Any) -> tuple[Tensor, ...]:
    acc, offsets, row_token, alpha, gx, gh, bias, name, numbers, *_ = args
    row_gx = gx if row_token is None else gx[row_token.clamp(min=0).long()]
    activation = activations.from_spec(name, tuple(numbers))
    h = torch_gemm.hidden(acc, offsets, (alpha, row_gx), bias, activation)
    return torch_gemm.quantized(h, offsets, gh)


_quantize_hidden_op = register(
    "quantize_hidden(Tensor acc, Tensor expert_offsets, Tensor? row_token, Tensor alpha, "
    "Tensor gx, Tensor? gh, Tensor? bias, str activation, float[] parameters, "
    "Tensor(a!) h_data, Tensor(b!) h_scale, Tensor(c!) row_gh)",
    _check_out,
    _plain,
    _kernel,
)
