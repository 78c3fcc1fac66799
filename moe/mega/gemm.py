"""Grouped GEMM of rows in (token, slot) order, on the kernels or in plain PyTorch by choice."""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import gemm_ops, nvfp4, ops
from cute_kernels.nvfp4 import BLOCK, SWIZZLE_32_4_4, Nvfp4Tensor
from moe import reference
from moe.backends import backend_status, choose_backend
from moe.experts import grouped_matmul, row_expert
from moe.mega.weights import MegaWeights, block_scale_bytes, code_bytes
from moe.plan import RoutingPlan, make_plan

GEMM_BACKENDS = ("sm100", "sim", "torch", "reference")
_KERNELS = ("sm100", "sim")
_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gemm_backend(name: str, device: torch.device | str) -> str:
    """The implementation that ``backend=name`` of the GEMMs means for tensors of ``device``.

    "auto" is "sm100" where those kernels run, else "torch" (decoded operands, plain PyTorch), else
    "reference"; "sim", the kernels in the simulator, only when asked for. Another name of
    `GEMM_BACKENDS` is itself. Raises ValueError for an unknown name, RuntimeError with the reason
    for one that cannot run there.
    """
    where = torch.device(device)
    if name == "auto":
        usable = {s.name for s in backend_status(where) if s.usable} - {"sim"}
        return next(n for n in GEMM_BACKENDS if n in usable)
    if name not in GEMM_BACKENDS:
        raise ValueError(
            f"backend must be 'auto' or one of {GEMM_BACKENDS} (NVFP4 x NVFP4 GEMMs), got {name!r}"
        )
    return choose_backend(name, where)


def quantised_rows(codes: Tensor, scale: Tensor, outer: Tensor | None) -> Nvfp4Tensor:
    """Codes (S, K/2), block scales and outer scales (S,), 1 without, as one value.

    Raises TypeError or ValueError unless they agree.
    """
    data = code_bytes(codes, "x_fp4")
    if data.dim() != 2 or data.shape[1] * 2 % BLOCK:
        raise ValueError(
            f"x_fp4 must be (rows, K/2) with K a multiple of {BLOCK}, got {tuple(codes.shape)}"
        )
    raw = block_scale_bytes(scale, "x_sf")
    want = (data.shape[0], data.shape[1] * 2 // BLOCK)
    if tuple(raw.shape) != want:
        raise ValueError(
            f"x_sf must be bytes {want} or words of four for x_fp4 {tuple(codes.shape)}, got "
            f"{tuple(scale.shape)} {scale.dtype}"
        )
    if outer is None:
        outer = torch.ones(data.shape[0], dtype=torch.float32, device=data.device)
    if outer.dtype != torch.float32 or tuple(outer.shape) != (data.shape[0],):
        raise ValueError(
            f"x_scales must be float32 ({data.shape[0]},), got {tuple(outer.shape)} {outer.dtype}"
        )
    for name, tensor in (("x_sf", raw), ("x_scales", outer)):
        if tensor.device != data.device:
            raise ValueError(f"{name} is on {tensor.device}, x_fp4 on {data.device}")
    return Nvfp4Tensor(data, raw, outer)


def raw_weights(codes: Tensor, scale: Tensor | None) -> MegaWeights:
    """(E, K/2, N) codes and (E, K/16, N) or packed (E, K/64, N) scales, any strides, columns in any
    order -> the same columns as rows, K contiguous, scales in their tiles."""
    if scale is None:
        raise ValueError("weight_scales are missing: only MegaWeights hold their own")
    data = code_bytes(codes, "weights")
    if data.dim() != 3 or scale.dim() != 3 or data.shape[1] * 2 % BLOCK:
        raise ValueError(
            f"weights must be (E, K/2, N) with scales (E, K/{BLOCK}, N), K a multiple of {BLOCK}, "
            f"got {tuple(codes.shape)} and {tuple(scale.shape)}"
        )
    experts, half, columns = data.shape
    raw = block_scale_bytes(scale.transpose(1, 2), "weight_scales")
    if tuple(raw.shape) != (experts, columns, half * 2 // BLOCK):
        raise ValueError(
            f"weight_scales of {tuple(codes.shape)} must be bytes "
            f"{(experts, half * 2 // BLOCK, columns)} or words of four along K, got "
            f"{tuple(scale.shape)} {scale.dtype}"
        )
    if scale.device != codes.device:
        raise ValueError(f"weights are on {codes.device}, weight_scales on {scale.device}")
    laid = nvfp4.swizzle(raw).view(torch.float8_e4m3fn)
    return MegaWeights("raw", data.transpose(1, 2).contiguous(), laid)


def grouped_rows(
    q: Nvfp4Tensor,
    weights: MegaWeights,
    topk_ids: Tensor,
    alpha: float | Tensor,
    backend: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `cutlass_grouped_nvfp4_gemm`."""
    source, plan_ids = _pairs(q, weights, topk_ids)
    if out_dtype not in _OUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    factors = _factors(alpha, weights)
    chosen = gemm_backend(backend, q.device)
    unweighted = torch.ones(plan_ids.shape, device=plan_ids.device)
    plan = make_plan(plan_ids, unweighted, weights.num_experts)
    row = plan.row_token.clamp(min=0).long()  # pair of each expert-major row
    expert = row_expert(plan)
    halves = factors.dim() == 2
    gx = q.global_scale[source[row]]  # (P,)
    one = torch.ones_like(factors[:, 0]) if halves else factors
    scale = torch.ones_like(gx) if halves else gx
    kind = torch.float32 if halves else out_dtype
    out = _multiply(chosen, q, source, plan, weights, (one, scale, kind))
    if halves:
        first = torch.arange(weights.rows, device=out.device)
        is_up = first % 2 == 1 if weights.projection == "l1" else first >= weights.rows // 2
        g = gx.unsqueeze(1) * factors[expert]  # (P, 2)
        out = (out * torch.where(is_up, g[:, 1:], g[:, :1])).to(out_dtype)
    if weights.projection == "l1":  # interleaved columns -> [gate | up]
        out = torch.cat((out[:, 0::2], out[:, 1::2]), dim=1)
    back = plan.token_rows.flatten()
    picked = out[back.clamp(min=0).long()]
    return torch.where((back >= 0).unsqueeze(1), picked, 0.0)


def _multiply(
    backend: str,
    q: Nvfp4Tensor,
    source: Tensor,
    plan: RoutingPlan,
    weights: MegaWeights,
    scales: tuple[Tensor, Tensor, torch.dtype],
) -> Tensor:
    """Expert-major rows (P, N) = acc * (gx[row] * alpha[expert]); ``scales`` are alpha (E,), gx
    (P,) and the dtype of the result. Rows past expert_offsets[E] are unspecified."""
    alpha, gx, dtype = scales
    row = plan.row_token.clamp(min=0).long()
    if backend in _KERNELS:
        if backend == "sim":
            gemm_ops.start_simulator()
        pick = torch.where(plan.row_token >= 0, source[row], -1).int()
        with gemm_ops.kernels_on(q.device):
            data, scale, _ = ops.permute_quantized_rows(
                q.data, q.scale, q.global_scale, pick, plan.expert_offsets
            )
            return gemm_ops.grouped_gemm(
                gemm_ops.Rows(data, scale),
                gemm_ops.Weights(weights.data, weights.scale),
                plan.expert_offsets,
                alpha,
                row_scale=gx,
                out_dtype=dtype,
            )
    if backend == "torch":
        acc = torch.empty((row.shape[0], weights.rows), dtype=torch.float32, device=q.device)
        values = nvfp4.decode(q, torch.bfloat16)[source[row]]
        raw = weights.scale.view(torch.uint8)
        grouped_matmul(values, weights.data, raw, plan.expert_offsets, acc)
    else:
        acc = _reference(q, source[row], plan, weights)
    return (acc * (gx * alpha[row_expert(plan)]).unsqueeze(1)).to(dtype)


def _reference(q: Nvfp4Tensor, row: Tensor, plan: RoutingPlan, weights: MegaWeights) -> Tensor:
    """Accumulators fp32 (P, N): sums in fp64, rounded once."""
    values = nvfp4.decode(q, torch.float64)
    acc = torch.zeros((row.shape[0], weights.rows), dtype=torch.float32, device=q.device)
    bounds = plan.expert_offsets.tolist()
    one = torch.ones((), dtype=torch.float32, device=q.device)
    for e in range(weights.num_experts):
        r = slice(bounds[e], bounds[e + 1])
        w = Nvfp4Tensor(weights.data[e], weights.scale[e], one, SWIZZLE_32_4_4)
        acc[r] = reference.accumulate(values[row[r]], nvfp4.decode(w, torch.float64))
    return acc


def _pairs(q: Nvfp4Tensor, weights: MegaWeights, topk_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Row of x of each pair, int64 (P,), and the ids as (P, 1)."""
    if topk_ids.dtype not in (torch.int32, torch.int64) or topk_ids.dim() != 2:
        raise TypeError(
            f"topk_ids must be int32 or int64 (T, K), got {tuple(topk_ids.shape)} {topk_ids.dtype}"
        )
    rows, k = q.shape
    if k != weights.k:
        raise ValueError(f"x_fp4 has K = {k}, the weights K = {weights.k}")
    tokens, slots = topk_ids.shape
    if rows not in (tokens, tokens * slots):
        raise ValueError(
            f"x_fp4 must have {tokens} rows (one per token) or {tokens * slots} (one per (token, "
            f"slot)) for topk_ids {tuple(topk_ids.shape)}, got {rows}"
        )
    for name, tensor in (("topk_ids", topk_ids), ("weights", weights.data)):
        if tensor.device != q.device:
            raise ValueError(f"{name} are on {tensor.device}, x_fp4 on {q.device}")
    pair = torch.arange(tokens * slots, device=q.device)
    return pair if rows == tokens * slots else pair // max(slots, 1), topk_ids.reshape(-1, 1)


def _factors(alpha: float | Tensor, weights: MegaWeights) -> Tensor:
    """alpha times the weights' own global scales: fp32 (E,), or (E, 2) for the two halves."""
    experts, device = weights.num_experts, weights.data.device
    own = weights.alphas
    if not isinstance(alpha, Tensor):
        alpha = torch.full((), float(alpha), dtype=torch.float32, device=device)
    two = (experts, 2)
    fits = alpha.numel() == 1 or tuple(alpha.shape) in ((experts,), two)
    if alpha.dtype != torch.float32 or not fits:
        raise ValueError(
            f"alpha must be a number or float32 with one element, ({experts},) or {two}, got "
            f"{tuple(alpha.shape)} {alpha.dtype}"
        )
    if alpha.device != device:
        raise ValueError(f"alpha is on {alpha.device}, the weights on {device}")
    if tuple(alpha.shape) == two and (weights.projection == "l2" or weights.rows % 2):
        raise ValueError(f"alpha {two} is for gate and up: these weights are one projection")
    if alpha.numel() == 1 and tuple(alpha.shape) != (experts,):
        alpha = alpha.reshape(1).expand(experts)
    if own is None:
        return alpha.contiguous()
    if own.dim() == 2 and alpha.dim() == 1:
        alpha = alpha.unsqueeze(1)
    return (alpha * own).contiguous()
