"""The GEMMs and the hidden rows of an expert in plain PyTorch: what CPU tensors get, and what the
kernels must equal. Sums in fp64, rounded once to fp32; `expert_offsets` are read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.activations import Activation
from cute_kernels.nvfp4 import SWIZZLE_32_4_4, Nvfp4Tensor
from cute_kernels.torch_math import TORCH_MATH


def accumulators(
    data: Tensor,
    scale: Tensor,
    row_token: Tensor | None,
    w_data: Tensor,
    w_scale: Tensor,
    expert_offsets: Tensor,
) -> Tensor:
    """fp32 (R, N): sums of products of decoded rows and weights, no global scales; 0 past the last
    expert."""
    rows = data.shape[0] if row_token is None else row_token.shape[0]
    if row_token is not None:
        data = data[row_token.clamp(min=0).long()]
    groups = data.shape[1] * 2 // nvfp4.BLOCK
    plain = nvfp4.unswizzle(scale, scale.shape[0], groups)
    plain = plain[nvfp4.grouped_rows(expert_offsets, rows)]
    one = torch.ones((), device=data.device)
    a = nvfp4.decode(Nvfp4Tensor(data, plain, one), torch.float64)
    bounds = expert_offsets.tolist()
    out = torch.zeros((rows, w_data.shape[1]), device=data.device)
    for e in range(len(bounds) - 1):
        r = slice(bounds[e], bounds[e + 1])
        if r.stop > r.start:
            b = Nvfp4Tensor(w_data[e], w_scale[e], one, SWIZZLE_32_4_4)
            out[r] = (a[r] @ nvfp4.decode(b, torch.float64).t()).float()
    return out


def row_expert(expert_offsets: Tensor, rows: int) -> Tensor:
    """int64 (rows,): expert of each row; the last one past expert_offsets[E]."""
    row = torch.arange(rows, device=expert_offsets.device, dtype=torch.int32)
    found = torch.searchsorted(expert_offsets[1:].contiguous(), row, right=True)
    return found.clamp(max=expert_offsets.numel() - 2)


def scaled(
    acc: Tensor,
    expert_offsets: Tensor,
    alpha: Tensor,
    row_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """acc * (row_scale * alpha[e]) + bias[e], fp32, each step rounded."""
    expert = row_expert(expert_offsets, acc.shape[0])
    factor = alpha[expert] if row_scale is None else row_scale * alpha[expert]
    out = acc * factor[:, None]
    return out if bias is None else out + bias[expert]


def hidden(
    acc: Tensor,
    expert_offsets: Tensor,
    scales: Sequence[Tensor],
    bias: Tensor | None,
    activation: Activation,
) -> Tensor:
    """h (R, I) fp32 of accumulators (R, P*I) whose projections alternate. ``scales``: alpha (E, P)
    and gx (R,)."""
    alpha, gx = scales
    expert, parts = row_expert(expert_offsets, acc.shape[0]), alpha.shape[1]
    values = []
    for p in range(parts):
        value = acc[:, p::parts] * (gx * alpha[expert, p])[:, None]
        values.append(value if bias is None else value + bias[expert, p::parts])
    return activation(TORCH_MATH, values[0], values[1] if parts == 2 else None)


def quantized(
    h: Tensor, expert_offsets: Tensor, gh: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (R, I/2), grouped scales and outer scales (R,) of expert-major h; gh (E,), or one per
    row from its amax."""
    row_gh = None if gh is None else gh[row_expert(expert_offsets, h.shape[0])]
    q = nvfp4.quantize(h, "per_token" if row_gh is None else row_gh)
    scale = nvfp4.group_scales(q.scale.view(torch.uint8), expert_offsets)
    return q.data, scale, q.global_scale.expand(h.shape[0])
