"""The operations of `cute_kernels.sm90_ops` in plain PyTorch: what CPU tensors get.

Sums in fp64, rounded once to fp32; everything else rounds as the kernels do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.activations import Activation
from cute_kernels.nvfp4 import Nvfp4Tensor
from cute_kernels.sm90.layout import ALPHA_FACTOR
from cute_kernels.sm90.weights import Sm90Weight, row_order, unpack_expert
from cute_kernels.torch_math import TORCH_MATH


def stage_rows(
    x: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    token_rows: Tensor | None,
    outer: Tensor | None,
    row_scale: Tensor | None,
    values: Tensor,
    gx: Tensor | None,
) -> tuple[Tensor, ...]:
    """New values, and new gx if there is one; see `cute_kernels.sm90_ops.stage_rows`."""
    values = values.clone()
    if token_rows is not None:
        return _stage_tokens(x, token_rows, outer, row_scale, values, gx)
    end = int(expert_offsets[-1])
    source = x[:end] if row_token is None else x[row_token[:end].long()]
    if row_scale is not None:
        weight = row_scale[:end] if row_token is None else row_scale[row_token[:end].long()]
        source = source.float() * weight[:, None]
    if gx is None:
        values[:end] = source.bfloat16()
        return (values,)
    given: Tensor | str = "per_token"
    if outer is not None:
        counts = expert_offsets.diff().long()
        given = outer.reshape(()) if outer.numel() == 1 else outer.repeat_interleave(counts)
    q = nvfp4.quantize(source, given)  # type: ignore[arg-type]
    values[:end] = nvfp4.decode(q, torch.bfloat16)
    gx = gx.clone()
    gx[:end] = q.global_scale
    return values, gx


def _stage_tokens(
    x: Tensor,
    token_rows: Tensor,
    outer: Tensor | None,
    row_scale: Tensor | None,
    values: Tensor,
    gx: Tensor | None,
) -> tuple[Tensor, ...]:
    """`stage_rows` with ``token_rows``; ``values`` is a copy already."""
    token, slot = (token_rows >= 0).nonzero(as_tuple=True)
    rows = token_rows[token, slot].long()
    source = x if row_scale is None else x.float() * row_scale[:, None]
    if gx is None:
        values[rows] = source.bfloat16()[token]
        return (values,)
    q = nvfp4.quantize(source, "per_token" if outer is None else outer.reshape(()))
    values[rows] = nvfp4.decode(q, torch.bfloat16)[token]
    gx = gx.clone()
    gx[rows] = q.global_scale.expand(x.shape[0])[token]
    return values, gx


class Parts(NamedTuple):
    """Of an epilogue, as in `cute_kernels.sm90_ops.Epilogue`; row_scale of the routed rows."""

    activation: Activation | None
    row_scale: Tensor | None
    bias: Tensor | None
    expert_scale: Tensor | None
    out_scale: Tensor | None


def grouped_gemm(
    x: Tensor, weight: Sm90Weight, expert_offsets: Tensor, out: Tensor, parts: Parts
) -> Tensor:
    """New values of ``out``; see `cute_kernels.sm90_ops.grouped_gemm`."""
    out = out.clone()
    order = row_order(weight.rows, weight.gated)
    half = (torch.arange(weight.rows) // 8 % 2)[None]  # which of the two alphas a packed row has
    bounds = expert_offsets.tolist()
    one = torch.ones(())
    for e in range(weight.num_experts):
        rows = slice(bounds[e], bounds[e + 1])
        if rows.start == rows.stop:
            continue
        data, scale = unpack_expert(weight.blob[e], weight.rows, weight.k, weight.gated)
        w = nvfp4.decode(Nvfp4Tensor(data, scale, one), torch.float64)[order]  # packed order
        acc = (x[rows].double() @ w.t()).float()
        alpha = (weight.alpha[e] / ALPHA_FACTOR)[half]  # (1, rows)
        if parts.row_scale is not None:
            alpha = parts.row_scale[rows, None] * alpha
        if parts.expert_scale is not None:
            alpha = parts.expert_scale[e].clamp(min=nvfp4.GLOBAL_MIN) * alpha
        value = acc * alpha
        if parts.bias is not None:
            value = value + parts.bias[e]
        value = _activate(value, parts.activation, weight)
        if parts.out_scale is not None:
            value = nvfp4.decode(nvfp4.quantize(value, parts.out_scale[e]), torch.bfloat16)
        out[rows] = value.to(out.dtype)
    return out


def _activate(value: Tensor, activation: Activation | None, weight: Sm90Weight) -> Tensor:
    """(rows, packed weight rows) fp32 -> (rows, features)."""
    if activation is None:
        return value
    if not activation.gated:
        return activation(TORCH_MATH, value)  # type: ignore[no-any-return]
    pairs = value.unflatten(1, (weight.rows // 16, 2, 8))  # 8 gates, their 8 ups
    h: Tensor = activation(TORCH_MATH, pairs[:, :, 0], pairs[:, :, 1])
    return h.flatten(1)
