"""The specification: one MoE layer on any device, every sum in fp64 and rounded once.

This file is what every backend is held against, and the backend "reference". It is slow and loops
over experts. Nothing is approximated: operands decode exactly, and a sum of K products code*scale *
code*scale is a multiple of 2^-20, so that fp64 holds it exactly, in any order, while sum|a b| <
2^33.

T tokens, K slots per token, R = T*K routed rows in expert-major order, E local experts, hidden H,
intermediate I.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import Nvfp4Tensor
from cute_kernels.torch_math import TORCH_MATH
from moe.config import MoEConfig
from moe.plan import RoutingPlan, make_plan
from moe.weights import ExpertWeights

# Tokens of a call: values (T, H), or quantised by somebody else, ROW_MAJOR with an outer scale ()
# or (T,).
Tokens = Tensor | Nvfp4Tensor


class Stages(NamedTuple):
    """Every value between x and y, so that a kernel can be compared stage by stage on the same
    input.
    """

    plan: RoutingPlan
    x: Tensor  # (T, H) fp64, code * scale of the quantised tokens, or the bf16 tokens
    gx: Tensor  # (T,) fp32 outer scale of each token; 1 for bf16
    gate: Tensor  # (R, I) fp32; rows past expert_offsets[E] are 0, here and below
    up: Tensor  # (R, I) fp32; 0 without a gate
    h: Tensor  # (R, I) fp32
    hq: Tensor  # (R, I) fp64, code * scale of the quantised h, or the bf16 h
    gh: Tensor  # (R,) fp32 outer scale of each row of h; 1 for bf16
    o: Tensor  # (R, H) bf16
    y: Tensor  # (T, H), see `output_dtype`


def accumulate(a: Tensor, b: Tensor) -> Tensor:
    """fp64 (rows, K) x (N, K) -> fp32 (rows, N): sum in fp64, one rounding."""
    return (a @ b.t()).float()


def output_dtype(x: Tokens) -> torch.dtype:
    """dtype of y: that of x; bf16 for tokens that are quantised already."""
    return torch.bfloat16 if isinstance(x, Nvfp4Tensor) else x.dtype


def input_scale(
    x: Tensor, topk_ids: Tensor, cfg: MoEConfig, weights: ExpertWeights, mode: str
) -> nvfp4.GlobalScale:
    """What `nvfp4.quantize` gets as outer scale of x (T, H) in each mode of
    ``activation_scale``.
    """
    if mode == "per_token":
        return "per_token"
    if mode == "static":
        if weights.gx is None:
            raise ValueError(
                "activation_scale='static' needs a scale of x: the checkpoint has no input_scale; "
                "call calibrate(x) first or choose 'per_token'"
            )
        return weights.gx
    if mode == "per_tensor":  # padding tokens have no slot with a real expert and do not count
        real = ((topk_ids >= 0) & (topk_ids < cfg.num_experts)).any(dim=-1, keepdim=True)
        amax = torch.where(real, x.float(), 0.0).abs().flatten()
        amax = amax.amax() if amax.numel() else amax.new_zeros(())
        return amax / (nvfp4.E2M1_MAX * nvfp4.UE4M3_MAX)
    raise ValueError(f"activation_scale must be per_token, static or per_tensor, got {mode!r}")


def stage_input(
    x: Tokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    cfg: MoEConfig,
    weights: ExpertWeights,
    activations: str,
    activation_scale: str,
) -> tuple[Tensor, Tensor]:
    """x (T, H) -> values (T, H) fp64 and outer scales gx (T,) fp32."""
    if isinstance(x, Nvfp4Tensor):
        return nvfp4.decode(x, torch.float64), x.global_scale.expand(x.shape[0])
    if cfg.weight_on_input:
        x = x.float() * topk_weights.float()  # (T, H) * (T, 1): top_k is 1
    if activations == "bf16":
        return x.bfloat16().double(), torch.ones(x.shape[0], device=x.device)
    q = nvfp4.quantize(x, input_scale(x, topk_ids, cfg, weights, activation_scale))
    return nvfp4.decode(q, torch.float64), q.global_scale.expand(x.shape[0])


def stage_hidden(h: Tensor, gh: Tensor | None, activations: str) -> tuple[Tensor, Tensor]:
    """h (rows, I) fp32 of one expert -> values (rows, I) fp64 and outer scales (rows,) fp32."""
    if activations == "bf16":
        return h.bfloat16().double(), torch.ones(h.shape[0], device=h.device)
    q = nvfp4.quantize(h, "per_token" if gh is None else gh)
    return nvfp4.decode(q, torch.float64), q.global_scale.expand(h.shape[0])


def combine(
    o: Tensor, plan: RoutingPlan, topk_weights: Tensor, dtype: torch.dtype, shared: Tensor | None
) -> Tensor:
    """o (R, H), weights (T, K) -> y (T, H): fp32, slots in order, each product and each sum
    rounded, shared last.
    """
    y = torch.zeros((plan.num_tokens, o.shape[1]), dtype=torch.float32, device=o.device)
    for slot in range(plan.token_rows.shape[1]):
        row = plan.token_rows[:, slot]  # (T,), -1: not computed here
        here = (row >= 0).unsqueeze(-1)
        term = topk_weights[:, slot, None].float() * o[row.clamp(min=0).long()].float()
        y = torch.where(here, y + term, y)
    if shared is not None:
        y = y + shared.float()
    return y.to(dtype)


def experts(
    x: Tokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    cfg: MoEConfig,
    weights: ExpertWeights,
    activations: str = "nvfp4",
    activation_scale: str = "per_token",
    shared: Tensor | None = None,
) -> Stages:
    """x (T, H) bf16/fp16/fp32 or NVFP4, ids and weights (T, K) -> every stage up to y (T, H); see
    `Stages`.

    Weights are used as given. ``shared`` (T, H) is the output of the shared expert, added last.
    """
    plan = make_plan(
        topk_ids, topk_weights, cfg.num_experts, weights.first_expert, weights.num_experts
    )
    xv, gx = stage_input(x, topk_ids, topk_weights, cfg, weights, activations, activation_scale)
    rows = expert_rows(xv, gx, plan, cfg, weights, activations)
    mix = torch.ones_like(topk_weights) if cfg.weight_on_input else topk_weights
    y = combine(rows.o, plan, mix, output_dtype(x), shared)
    return Stages(plan, xv, gx, *rows, y)


class RowStages(NamedTuple):
    """The stages of `Stages` that have one row per routed row."""

    gate: Tensor
    up: Tensor
    h: Tensor
    hq: Tensor
    gh: Tensor
    o: Tensor


def expert_rows(
    xv: Tensor,
    gx: Tensor,
    plan: RoutingPlan,
    cfg: MoEConfig,
    weights: ExpertWeights,
    activations: str,
) -> RowStages:
    """The experts on the rows of ``plan``: xv (T, H) fp64 and gx (T,) of `stage_input` -> stages up
    to o (R, H).
    """
    rows, inter = plan.row_token.numel(), weights.intermediate
    gate = torch.zeros((rows, inter), device=xv.device)
    up, h, hq = gate.clone(), gate.clone(), gate.double()
    gh_rows = torch.ones(rows, device=xv.device)
    o = torch.zeros((rows, weights.hidden), dtype=torch.bfloat16, device=xv.device)
    w13, w2, step = weights.l1(), weights.l2(), cfg.projections
    offsets = plan.expert_offsets.tolist()
    for e in range(weights.num_experts):
        r = slice(offsets[e], offsets[e + 1])
        if r.start == r.stop:
            continue
        token = plan.row_token[r].long()
        w1 = nvfp4.decode(expert(w13, e), torch.float64)  # (P*I, H), gate and up rows in turns
        acc = accumulate(xv[token], w1)  # (rows, P*I)
        for p, out in enumerate((gate, up)[:step]):
            out[r] = acc[:, p::step] * (gx[token] * weights.g13[e, p]).unsqueeze(-1)
            if weights.b13 is not None:
                out[r] += weights.b13[e, p::step]
        h[r] = cfg.activation(TORCH_MATH, gate[r], up[r] if step == 2 else None)
        gh = None if weights.gh is None else weights.gh[e]
        hq[r], gh_rows[r] = stage_hidden(h[r], gh, activations)
        down = accumulate(hq[r], nvfp4.decode(expert(w2, e), torch.float64))  # (rows, H)
        down = down * (gh_rows[r] * weights.g2[e]).unsqueeze(-1)
        o[r] = (down if weights.b2 is None else down + weights.b2[e]).bfloat16()
    return RowStages(gate, up, h, hq, gh_rows, o)


def expert(q: Nvfp4Tensor, e: int) -> Nvfp4Tensor:
    """Expert e of a swizzled (E, rows, K) tensor."""
    g = q.global_scale if q.global_scale.dim() == 0 else q.global_scale[e]
    return Nvfp4Tensor(q.data[e], q.scale[e], g, q.scale_layout)
