"""The stages of an NVFP4 mega MoE one by one: unpack scales, quantise, grouped and dense GEMM,
L1, L2, under the names of ``nvfp4_megamoe_kernel``.

P = T * K routed pairs in (token, slot) order: pair t * K + j is slot j of token t.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import BLOCK
from moe.mega.gemm import grouped_rows, quantised_rows, raw_weights
from moe.mega.weights import MegaWeights, block_scale_bytes

Alpha = float | Tensor


def unpack_ue4m3_u32(x_u32: Tensor) -> Tensor:
    """Words int32 or uint32 (..., N) of four UE4M3 bytes -> float8_e4m3fn (..., 4 N), lowest byte
    first; uint8 (..., N) -> (..., N). A view where the last dimension is contiguous.

    Raises TypeError for another dtype.

    Differs from the original: any number of dimensions, int32 as well, no arithmetic.
    """
    if x_u32.dtype not in (torch.int32, torch.uint32, torch.uint8):
        raise TypeError(f"packed scales must be int32, uint32 or uint8, got {x_u32.dtype}")
    return block_scale_bytes(x_u32, "packed scales").view(torch.float8_e4m3fn)


def _quantize_to_e2m1(x_f32: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 (..., N), N a multiple of 16 -> codes int8 (..., N/2) and block scales float8_e4m3fn
    (..., N/16), outer scale 1: values beyond 6 * 448 saturate.

    Differs from the original: the block scale is amax / 6 clamped to 2^-9 .. 448 (not the amax to
    448), elements are scaled by the *rounded* block scale, ties go to even.
    """
    q = nvfp4.quantize(x_f32, 1.0)
    return q.data.view(torch.int8), q.scale


def stage_activation(
    x_bf16: Tensor, scale: nvfp4.GlobalScale = "per_tensor"
) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, H) bf16/fp16/fp32 -> codes int8 (T, H/2), block scales float8_e4m3fn (T, H/16), outer
    scale fp32.

    scale  "per_tensor": amax of all rows / 2688, shape (); "per_token": one per row, (T,), so that
           no row depends on another; a number or a tensor (), (T,): used as given (static)

    Pass the outer scale on as ``alpha`` (one for all) or ``x_scales`` (one per row). Zero rows are
    valid. Raises TypeError or ValueError for other dtypes and shapes.

    Differs from the original: `_quantize_to_e2m1`'s values, three modes, and zero tokens.
    """
    q = nvfp4.quantize(x_bf16, scale)
    return q.data.view(torch.int8), q.scale, q.global_scale


def cutlass_grouped_nvfp4_gemm(
    x_fp4: Tensor,
    x_sf: Tensor,
    weights: Tensor | MegaWeights,
    weight_scales: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor | None = None,
    alpha: Alpha = 1.0,
    *,
    x_scales: Tensor | None = None,
    backend: str = "auto",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """out[p] = (x[row of p] @ W[expert of p]) * (x_scales[row of p] * alpha[expert of p]): one row
    per (token, slot), (T * K, N), rows in that order; rows of slots that are not here are 0.

    x_fp4          int8 or uint8 codes: (T, K_/2), one row per token, or (T * K, K_/2), one per pair
    x_sf           block scales of x_fp4's rows: int32 or uint32 words (rows, K_/64), or bytes
                   (rows, K_/16) as float8_e4m3fn or uint8
    weights        (E, K_/2, N) codes and ``weight_scales`` (E, K_/16, N) bytes or (E, K_/64, N)
                   words packed along K_, any strides ("column-major": K_ contiguous, no copy); or
                   `MegaWeights` and None: laid out already, columns of L1 come out as [gate | up]
    topk_ids       int32 or int64 (T, K) *local* expert ids; < 0 or >= E: not here
    topk_weights   (T, K) or None: shape checked; they multiply when rows are combined, after L2,
                   never here
    alpha          a number or fp32 with one element, (E,), or (E, 2) = (gate, up) half of N each;
                   multiplies the global scales of `MegaWeights`, if they have any
    x_scales       fp32 (rows of x_fp4,): outer scale of each row
    backend        "auto", "sm100", "sim", "torch" or "reference", see `gemm_backend`
    out_dtype      bfloat16, float16 or float32

    Raises TypeError or ValueError before anything is computed.

    Differs from the original: rows are per (token, slot), neither weighted nor summed, scales may
    be packed for x and weights alike, and it exists without CUTLASS's C++.
    """
    laid = weights if isinstance(weights, MegaWeights) else raw_weights(weights, weight_scales)
    if isinstance(weights, MegaWeights) and weight_scales is not None:
        raise ValueError("weight_scales must be None for MegaWeights, which hold their own")
    q = quantised_rows(x_fp4, x_sf, x_scales)
    if topk_weights is not None and topk_weights.shape != topk_ids.shape:
        raise ValueError(
            f"topk_weights must be {tuple(topk_ids.shape)} as topk_ids, got "
            f"{tuple(topk_weights.shape)}"
        )
    return grouped_rows(q, laid, topk_ids, alpha, backend, out_dtype)


def nvfp4_mega_moe_l1(
    x_fp4: Tensor,
    x_sf: Tensor,
    l1_weights: Tensor | MegaWeights,
    l1_scales: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    num_experts_per_rank: int,
    alpha: Alpha = 1.0,
    *,
    x_scales: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Gate and up projections of every (token, slot): bf16 (T * K, 2I) = [gate | up], rows in
    (token, slot) order, 0 for slots that are not here. Arguments as `cutlass_grouped_nvfp4_gemm`.

    Differs from the original: one row per slot, without routing weights, so that the activation
    sees one expert's values; the whole layer (`nvfp4_mega_moe_full`) does not round them to bf16.
    """
    _check_experts(l1_weights, num_experts_per_rank, "l1")
    return cutlass_grouped_nvfp4_gemm(
        x_fp4,
        x_sf,
        l1_weights,
        l1_scales,
        topk_ids,
        topk_weights,
        alpha,
        x_scales=x_scales,
        backend=backend,
    )


def nvfp4_mega_moe_l2(
    x_fp4: Tensor,
    x_sf: Tensor,
    l2_weights: Tensor | MegaWeights,
    l2_scales: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    num_experts_per_rank: int,
    alpha: Alpha = 1.0,
    *,
    x_scales: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Down projection of every (token, slot): bf16 (T * K, H), rows in (token, slot) order, 0 for
    slots that are not here. Arguments as `cutlass_grouped_nvfp4_gemm`.

    ``cute_kernels.ops.combine(rows, pairs, topk_weights)`` with ``pairs`` int32 (T, K) = 0, 1, ...
    T * K - 1 makes y (T, H) of the rows.

    Differs from the original: x has one row per (token, slot), and so has the result, neither
    weighted nor summed.
    """
    _check_experts(l2_weights, num_experts_per_rank, "l2")
    if x_fp4.shape[0] != topk_ids.numel():
        raise ValueError(
            f"x_fp4 of L2 must have one row per (token, slot), {topk_ids.numel()}, got "
            f"{tuple(x_fp4.shape)}: every slot has its own h"
        )
    return cutlass_grouped_nvfp4_gemm(
        x_fp4,
        x_sf,
        l2_weights,
        l2_scales,
        topk_ids,
        topk_weights,
        alpha,
        x_scales=x_scales,
        backend=backend,
    )


def cutlass_nvfp4_blockscaled_gemm(
    a_fp4: Tensor,
    a_sf: Tensor,
    b_fp4: Tensor,
    b_sf: Tensor,
    alpha: Alpha = 1.0,
    *,
    a_scales: Tensor | None = None,
    backend: str = "auto",
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """(a @ b) * (a_scales * alpha): a (M, K_/2) codes with ``a_sf`` (M, K_/16) bytes or (M, K_/64)
    words, b (K_/2, N) with ``b_sf`` (K_/16, N) or (K_/64, N) -> (M, N). Dtypes, strides, alpha (one
    element) and errors as `cutlass_grouped_nvfp4_gemm`, of which this is one expert.

    Differs from the original, of which only the name is known: a function of plain tensors.
    """
    if b_fp4.dim() != 2 or b_sf.dim() != 2:
        raise ValueError(
            f"b must be (K/2, N) with scales (K/{BLOCK}, N), got {tuple(b_fp4.shape)} and "
            f"{tuple(b_sf.shape)}"
        )
    ids = torch.zeros((a_fp4.shape[0], 1), dtype=torch.int32, device=a_fp4.device)
    return cutlass_grouped_nvfp4_gemm(
        a_fp4,
        a_sf,
        b_fp4.unsqueeze(0),
        b_sf.unsqueeze(0),
        ids,
        alpha=alpha,
        x_scales=a_scales,
        backend=backend,
        out_dtype=out_dtype,
    )


def _check_experts(weights: Tensor | MegaWeights, count: int, projection: str) -> None:
    found = weights.num_experts if isinstance(weights, MegaWeights) else weights.shape[0]
    if found != count:
        raise ValueError(
            f"num_experts_per_rank is {count}, {projection}_weights hold {found} experts"
        )
    if isinstance(weights, MegaWeights) and weights.projection != projection:
        raise ValueError(f"{projection}_weights holds the projection {weights.projection}")
