"""The backend "torch": the expert MLP on plain PyTorch, all experts at once.

Weights are decoded to their exact values, a few rows at a time, and multiplied by exactly decoded
activations.

CPU    products and sums in fp64, rounded once to fp32: the bits of the reference, whatever the
       batch
CUDA   torch's grouped GEMM on bf16 operands (exact: a product code * scale has 6 significant bits)
       with fp32 accumulators. torch forces *one bf16 rounding of the accumulator* before alpha is
       applied: the bound of numerics.md section 6 grows by 2^-9 |acc| * alpha for gate, up and o.
       Not promised to be batch-invariant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import SWIZZLE_32_4_4, TILE_ROWS, Nvfp4Tensor
from cute_kernels.torch_math import TORCH_MATH
from moe.config import MoEConfig
from moe.plan import RoutingPlan, make_plan
from moe.ranges import stage
from moe.reference import Tokens, combine, input_scale, output_dtype
from moe.weights import ExpertWeights
from moe.workspace import Buffer, Workspace, allocate

_CUDA_CHUNK_BYTES = 1 << 30  # decoded weights of all experts that exist at one time


@dataclasses.dataclass(frozen=True)
class Numerics:
    """activations "nvfp4" (W4A4) or "bf16" (W4A16); activation_scale "per_token", "static" or
    "per_tensor"; batch_invariant: the bits of a token depend on no other token, where a backend
    would else choose by size between orders of summation; deterministic: False allows sums in an
    order that no one fixes; schedule of the GEMMs, "static" or "dynamic": no bit depends on it.
    """

    activations: str = "nvfp4"
    activation_scale: str = "per_token"
    batch_invariant: bool = False
    deterministic: bool = True
    schedule: str = "static"

    def __post_init__(self) -> None:
        for name in ("deterministic", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.activations not in ("nvfp4", "bf16"):
            raise ValueError(f"activations must be 'nvfp4' or 'bf16', got {self.activations!r}")
        if self.activation_scale not in ("per_token", "static", "per_tensor"):
            raise ValueError(
                "activation_scale must be 'per_token', 'static' or 'per_tensor', got "
                f"{self.activation_scale!r}"
            )
        if self.schedule not in ("static", "dynamic"):
            raise ValueError(f"schedule must be 'static' or 'dynamic', got {self.schedule!r}")
        if self.batch_invariant and not self.deterministic:
            raise ValueError(
                "batch_invariant=True needs deterministic=True: sums in no fixed order give a "
                "token other bits from call to call"
            )


def find_grouped_mm() -> Callable[..., Tensor] | None:
    """torch's grouped GEMM, or None where this torch has none."""
    public = getattr(torch.nn.functional, "grouped_mm", None)
    return public or getattr(torch, "_grouped_mm", None)


@torch.library.custom_op("nvfp4_megamoe::grouped_matmul_torch", mutates_args=("out",))
def grouped_matmul(
    rows: Tensor, data: Tensor, scale: Tensor, expert_offsets: Tensor, out: Tensor
) -> None:
    """out[r] = rows[r] @ decoded(weights[e])^T for the expert e that owns row r.

    rows            bf16 (R, K), expert-major
    data, scale     uint8 (E, N, K/2), and UE4M3 bytes as uint8 in SWIZZLE_32_4_4 (E, N padded to
                    128, K/16 padded to 4): torch's own checks of an operator cannot compute with
                    float8
    expert_offsets  int32 (E+1,)
    out             float32 (R, N); rows past expert_offsets[E] are left unspecified
    """
    if rows.is_cuda:
        _grouped_matmul_device(rows, data, scale, expert_offsets, out)
    else:
        _grouped_matmul_host(rows, data, scale, expert_offsets, out)


@grouped_matmul.register_fake
def _(rows: Tensor, data: Tensor, scale: Tensor, expert_offsets: Tensor, out: Tensor) -> None:
    return None


def _decode_rows(data: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Codes (..., n, K/2) whose first row starts a scale tile -> values (..., n, K), no global
    scale.
    """
    one = torch.ones((), dtype=torch.float32, device=data.device)
    return nvfp4.decode(Nvfp4Tensor(data, scale, one, SWIZZLE_32_4_4), dtype)


def _grouped_matmul_host(
    rows: Tensor, data: Tensor, scale: Tensor, expert_offsets: Tensor, out: Tensor
) -> None:
    # 128 weight rows at a time stay in the cache between decoding and multiplying: 2x faster than
    # whole experts.
    offsets = expert_offsets.numpy()  # host memory: this reads it and waits for nothing
    num_experts, n, _ = data.shape
    out.zero_()
    for e in range(num_experts):
        start, stop = int(offsets[e]), int(offsets[e + 1])
        if start == stop:
            continue
        a = rows[start:stop].double()
        for n0 in range(0, n, TILE_ROWS):
            n1 = min(n0 + TILE_ROWS, n)
            w = _decode_rows(data[e, n0:n1], scale[e, n0 : n0 + TILE_ROWS], torch.float64)
            out[start:stop, n0:n1] = a @ w.t()  # the copy rounds fp64 to fp32 once


def _grouped_matmul_device(
    rows: Tensor, data: Tensor, scale: Tensor, expert_offsets: Tensor, out: Tensor
) -> None:
    grouped_mm = find_grouped_mm()
    if grouped_mm is None:
        raise RuntimeError(
            f"backend 'torch' on {rows.device} needs torch.nn.functional.grouped_mm, which torch "
            f"{torch.__version__} lacks: a loop over experts would wait for the device"
        )
    num_experts, n, half = data.shape
    chunk = max(_CUDA_CHUNK_BYTES // (num_experts * half * 4) // TILE_ROWS, 1) * TILE_ROWS
    ends = expert_offsets[1:]
    for n0 in range(0, n, chunk):
        n1 = min(n0 + chunk, n)
        padded = -(-(n1 - n0) // TILE_ROWS) * TILE_ROWS
        w = _decode_rows(
            data[:, n0:n1].contiguous(), scale[:, n0 : n0 + padded].contiguous(), torch.bfloat16
        )
        out[:, n0:n1] = grouped_mm(rows, w.transpose(1, 2), offs=ends)


def scratch_buffers(num_tokens: int, cfg: MoEConfig, weights: ExpertWeights) -> list[Buffer]:
    """Scratch of one call: the two operands and two results of the grouped GEMMs."""
    return row_buffers(num_tokens * cfg.top_k if weights.num_experts else 0, cfg, weights)


def row_buffers(rows: int, cfg: MoEConfig, weights: ExpertWeights) -> list[Buffer]:
    """What `expert_rows` needs for ``rows`` routed rows."""
    return [
        Buffer("x_rows", (rows, weights.hidden), torch.bfloat16),
        Buffer("gate_up", (rows, cfg.projections * weights.intermediate), torch.float32),
        Buffer("h_rows", (rows, weights.intermediate), torch.bfloat16),
        Buffer("down", (rows, weights.hidden), torch.float32),
    ]


def stage_rows(
    x: Tokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    cfg: MoEConfig,
    weights: ExpertWeights,
    numerics: Numerics,
) -> tuple[Tensor, Tensor]:
    """x (T, H) -> exact bf16 values of the tokens (T, H) and outer scale (T,) fp32."""
    if isinstance(x, Nvfp4Tensor):
        return nvfp4.decode(x, torch.bfloat16), x.global_scale.expand(x.shape[0])
    if cfg.weight_on_input:
        x = x.float() * topk_weights.float()
    if numerics.activations == "bf16":
        return x.bfloat16(), torch.ones(x.shape[0], device=x.device)
    g = input_scale(x, topk_ids, cfg, weights, numerics.activation_scale)
    q = nvfp4.quantize(x, g)
    return nvfp4.decode(q, torch.bfloat16), q.global_scale.expand(x.shape[0])


def stage_hidden_rows(
    h: Tensor, gh: Tensor | None, numerics: Numerics
) -> tuple[Tensor, Tensor | None]:
    """h (R, I) fp32 and its static outer scale (R,) or None -> exact bf16 values (R, I), outer
    scale (R,) or None.
    """
    if numerics.activations == "bf16":
        return h.bfloat16(), None
    q = nvfp4.quantize(h, "per_token" if gh is None else gh)
    return nvfp4.decode(q, torch.bfloat16), q.global_scale


def run_torch(
    x: Tokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    cfg: MoEConfig,
    weights: ExpertWeights,
    numerics: Numerics,
    shared: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """x (T, H), ids and weights (T, K) -> y (T, H), see `output_dtype`. Nothing waits for the
    device.
    """
    scratch = allocate(scratch_buffers(x.shape[0], cfg, weights), x.device, workspace)
    with stage("moe.route"):
        plan = make_plan(
            topk_ids, topk_weights, cfg.num_experts, weights.first_expert, weights.num_experts
        )
    if weights.num_experts == 0:  # more ranks than experts: this one computes no row
        none = torch.zeros((plan.row_token.numel(), weights.hidden), device=x.device)
        return combine(none, plan, topk_weights, output_dtype(x), shared)
    with stage("moe.quantize"):
        values, gx = stage_rows(x, topk_ids, topk_weights, cfg, weights, numerics)
    o = expert_rows(values, gx, plan, cfg, weights, numerics, scratch)
    with stage("moe.combine"):
        mix = torch.ones_like(topk_weights) if cfg.weight_on_input else topk_weights
        return combine(o, plan, mix, output_dtype(x), shared)


def expert_rows(
    values: Tensor,
    gx: Tensor,
    plan: RoutingPlan,
    cfg: MoEConfig,
    weights: ExpertWeights,
    numerics: Numerics,
    scratch: list[Tensor],
) -> Tensor:
    """The experts on the rows of ``plan``: o (R, H) bf16; rows past expert_offsets[E] are
    unspecified.

    values   bf16 (T, H): code * scale of the quantised tokens, or the bf16 tokens
    gx       fp32 (T,): their outer scales
    scratch  `row_buffers` of R rows
    """
    x_rows, gate_up, h_rows, down = scratch
    l1_scale, l2_scale = (s.view(torch.uint8) for s in (weights.l1_scale, weights.l2_scale))
    with stage("moe.l1"):
        # (R,); rows that are not here compute token 0 and are dropped
        token = plan.row_token.clamp(min=0).long()
        expert = row_expert(plan)  # (R,)
        torch.index_select(values, 0, token, out=x_rows)
        grouped_matmul(x_rows, weights.l1_data, l1_scale, plan.expert_offsets, gate_up)
        h = hidden_rows(gate_up, gx[token], expert, cfg, weights)
    with stage("moe.quantize"):
        gh = None if weights.gh is None else weights.gh[expert]
        staged, gh = stage_hidden_rows(h, gh, numerics)
        h_rows.copy_(staged)
    with stage("moe.l2"):
        grouped_matmul(h_rows, weights.l2_data, l2_scale, plan.expert_offsets, down)
        alpha = weights.g2[expert] if gh is None else gh * weights.g2[expert]  # (R,)
        o = down * alpha.unsqueeze(-1)
        return (o if weights.b2 is None else o + weights.b2[expert]).bfloat16()


def hidden_rows(
    acc: Tensor, gx: Tensor, expert: Tensor, cfg: MoEConfig, weights: ExpertWeights
) -> Tensor:
    """L1 accumulators (R, P*I) fp32 -> h (R, I) fp32: global scales, biases, activation. ``gx`` and
    ``expert`` (R,) are the outer scale and the local expert of each row.
    """
    step = cfg.projections
    parts = []
    for p in range(step):
        part = acc[:, p::step] * (gx * weights.g13[expert, p]).unsqueeze(-1)  # (R, I)
        parts.append(part if weights.b13 is None else part + weights.b13[expert, p::step])
    return cfg.activation(TORCH_MATH, parts[0], parts[1] if step == 2 else None)


def row_expert(plan: RoutingPlan) -> Tensor:
    """int64 (R,): local expert of each row; the last one for rows past expert_offsets[E]."""
    row = torch.arange(plan.row_token.numel(), device=plan.expert_offsets.device, dtype=torch.int32)
    bounds = plan.expert_offsets[1:].contiguous()
    return torch.searchsorted(bounds, row, right=True).clamp(max=plan.num_experts - 1)
