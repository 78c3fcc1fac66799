"""The backends "sm100" and "sim": the layer on the SM100 kernels, on a GPU or in the simulator.

x, plan -> quantised rows -> L1 with activation and quantiser (static gh), or L1, activation,
quantiser apart (one outer scale per row) -> L2 -> combine.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.gemm_ops import (
    HiddenScales,
    Rows,
    Weights,
    grouped_gemm,
    grouped_gemm_act_quant,
    kernels_on,
)
from cute_kernels.nvfp4 import Nvfp4Tensor
from moe.config import MoEConfig
from moe.experts import Numerics
from moe.plan import RoutingPlan
from moe.ranges import stage
from moe.reference import Tokens, input_scale, output_dtype
from moe.weights import ExpertWeights

KERNEL_BACKENDS = ("sm100", "sim")


def run_kernels(
    x: Tokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    cfg: MoEConfig,
    weights: ExpertWeights,
    numerics: Numerics,
    shared: Tensor | None = None,
) -> Tensor:
    """x (T, H), ids and weights (T, K) -> y (T, H), see `output_dtype`."""
    mix = topk_weights.float()
    with kernels_on(x.device):
        with stage("moe.route"):
            plan = RoutingPlan(
                *ops.sort_routes(
                    topk_ids, mix, cfg.num_experts, weights.first_expert, weights.num_experts
                )
            )
        if isinstance(x, Nvfp4Tensor):
            gx = x.global_scale.expand(x.shape[0]).contiguous()
            o = run_received(x.data, x.scale, gx, plan, cfg, weights)
        else:
            with stage("moe.quantize"):
                given = input_scale(x, topk_ids, cfg, weights, numerics.activation_scale)
                assert isinstance(given, str | Tensor)  # never a float: see input_scale
                on_input = mix[:, 0].contiguous() if cfg.weight_on_input else None
                data, scale, gx = ops.quantize_rows(
                    x, plan.expert_offsets, plan.row_token, given, on_input
                )
            chain = _dynamic if weights.gh is None else _static
            o = chain(Rows(data, scale, plan.row_token), gx, plan, cfg, weights)
        factors = None if cfg.weight_on_input else mix
        with stage("moe.combine"):
            return ops.combine(o, plan.token_rows, factors, shared, output_dtype(x))


def run_received(
    data: Tensor,
    scale: Tensor,
    gx: Tensor,
    plan: RoutingPlan,
    cfg: MoEConfig,
    weights: ExpertWeights,
) -> Tensor:
    """The experts on tokens that came quantised: codes uint8 (N, H/2), row-major scales uint8
    (N, H/16), gx fp32 (N,) -> o (R, H) bf16 for the rows of ``plan``; rows past expert_offsets[E]
    are unspecified.
    """
    with kernels_on(data.device):
        with stage("moe.quantize"):
            data, scale, gx = ops.permute_quantized_rows(
                data, scale, gx, plan.row_token, plan.expert_offsets
            )
        chain = _dynamic if weights.gh is None else _static
        return chain(Rows(data, scale), gx, plan, cfg, weights)


def _static(
    rows: Rows, gx: Tensor, plan: RoutingPlan, cfg: MoEConfig, weights: ExpertWeights
) -> Tensor:
    """Two GEMMs; h leaves the first one as NVFP4."""
    assert weights.gh is not None
    w13, w2 = _weights(weights)
    scales = HiddenScales(weights.g13, gx, weights.gh)
    offsets = plan.expert_offsets
    with stage("moe.l1"):
        h = grouped_gemm_act_quant(rows, w13, offsets, cfg.activation, scales, weights.b13)
    with stage("moe.l2"):
        alpha = weights.gh * weights.g2
        return grouped_gemm(h, w2, offsets, alpha, bias=weights.b2)


def _dynamic(
    rows: Rows, gx: Tensor, plan: RoutingPlan, cfg: MoEConfig, weights: ExpertWeights
) -> Tensor:
    """The outer scale of a row of h needs the whole row, which no tile has: accumulators go through
    memory.
    """
    w13, w2 = _weights(weights)
    offsets = plan.expert_offsets
    with stage("moe.l1"):
        one = torch.ones_like(weights.g2)
        acc = grouped_gemm(rows, w13, offsets, one, out_dtype=torch.float32)
    with stage("moe.quantize"):
        scales = HiddenScales(weights.g13, gx)
        h, gh = ops.quantize_hidden(
            acc, offsets, cfg.activation, scales, rows.row_token, weights.b13
        )
    with stage("moe.l2"):
        return grouped_gemm(h, w2, offsets, weights.g2, row_scale=gh, bias=weights.b2)


def _weights(weights: ExpertWeights) -> tuple[Weights, Weights]:
    return (
        Weights(weights.l1_data, weights.l1_scale),
        Weights(weights.l2_data, weights.l2_scale),
    )
