"""GEMMs of `Nvfp4Tensor`s: the operations of `cute_kernels.gemm_ops` with scales taken from the
tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels import gemm_ops, nvfp4
from cute_kernels.nvfp4 import Nvfp4Tensor


def grouped_gemm(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor,
    expert_offsets: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """out[r] = dtype((a[r] @ b[e]^T) * (ga * gb)) for the expert e that owns row r.

    a  (R, K) expert-major, SWIZZLE_32_4_4_GROUPED (`nvfp4.quantize_grouped`), global scale () or
       (R,)
    b  (E, N, K), SWIZZLE_32_4_4, global scale () or (E,)

    out (R, N) bf16, fp16 or fp32, row-major; rows past expert_offsets[E] are not written.
    `gemm_ops.grouped_gemm` also gathers rows and adds biases. Raises TypeError or ValueError for
    shapes, layouts and devices, before anything is allocated.
    """
    if a.scale_layout is not nvfp4.SWIZZLE_32_4_4_GROUPED:
        raise ValueError(
            "a must have its scales in SWIZZLE_32_4_4_GROUPED, every expert's rows from a multiple "
            f"of 128 on (nvfp4.quantize_grouped), got {a.scale_layout.name}"
        )
    return _nvfp4_gemm(a, b, expert_offsets, out_dtype, out)


def blockscaled_gemm(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """dtype((a @ b^T) * (ga * gb)), a (M, K) and b (N, K), both SWIZZLE_32_4_4.

    Global scales: () or (M,) for a, () for b. The grouped GEMM with one expert. Raises TypeError
    or ValueError for shapes, layouts and devices, before anything is allocated.
    """
    if a.scale_layout is not nvfp4.SWIZZLE_32_4_4 or b.data.dim() != 2 or b.global_scale.dim():
        raise ValueError(
            "a must be (M, K) and b (N, K) with one global scale, both in SWIZZLE_32_4_4, got "
            f"{a.shape} {a.scale_layout.name} and {b.shape} {b.scale_layout.name} with global "
            f"scale {tuple(b.global_scale.shape)}"
        )
    one = Nvfp4Tensor(b.data[None], b.scale[None], b.global_scale[None], b.scale_layout)
    rows = a.data.shape[0]
    ends = torch.arange(2, dtype=torch.int32, device=a.device) * rows  # no copy from the host
    return _nvfp4_gemm(a, one, ends, out_dtype, out)


def _nvfp4_gemm(
    a: Nvfp4Tensor, b: Nvfp4Tensor, offsets: Tensor, dtype: torch.dtype, out: Tensor | None
) -> Tensor:
    if b.scale_layout is not nvfp4.SWIZZLE_32_4_4 or b.data.dim() != 3 or b.global_scale.dim() > 1:
        raise ValueError(
            "b must be (E, N, K) in SWIZZLE_32_4_4 with one global scale per expert, got "
            f"{b.shape} {b.scale_layout.name} with {tuple(b.global_scale.shape)}"
        )
    alpha = b.global_scale.expand(b.data.shape[0]).contiguous()
    row_scale = a.global_scale.expand(a.data.shape[0]).contiguous()
    rows, weights = gemm_ops.Rows(a.data, a.scale), gemm_ops.Weights(b.data, b.scale)
    options: dict[str, Any] = {"row_scale": row_scale, "out_dtype": dtype, "out": out}
    return gemm_ops.grouped_gemm(rows, weights, offsets, alpha, **options)
