"""The backend "sm90": the layer on a Hopper GPU, NVFP4 weights times bf16 rows.

    x, plan -> staged rows (NVFP4 values or bf16, expert-major) -> L1 with activation
            -> h, staged the same way -> L2 -> combine

activations "nvfp4": the values of quantised rows are exact in bf16, their outer scales multiply the
accumulator: the numerics of an SM100 GPU (W4A4). With an outer scale of h per expert (`gh`) L1
rounds h itself; without, h leaves it in fp32 and is staged once its rows are whole. "bf16": h
leaves L1 in bf16 (W4A16). Weights lie packed (`cute_kernels.sm90.layout`); nothing waits for the
device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import exchange_ops, ops, sm90_ops
from cute_kernels.activations import Activation
from cute_kernels.nvfp4 import Nvfp4Tensor, swizzle, unswizzle
from cute_kernels.sm90_ops import Epilogue, Sm90Weight, Sums
from moe.config import MoEConfig
from moe.experts import Numerics
from moe.plan import RoutingPlan
from moe.ranges import stage
from moe.reference import Tokens, input_scale, output_dtype
from moe.weights import ExpertWeights
from moe.workspace import Buffer, Workspace, allocate, total_bytes

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
CANONICAL = ("l1_data", "l1_scale", "l2_data", "l2_scale")  # what the packed weights replace
COUNTERS = 2  # words that a GEMM finds at zero and leaves so (`sm90_ops.gemm_scratch`)
PACKED = ("l1_packed", "l1_alpha", "l2_packed", "l2_alpha", "b13_packed")


class PackedExperts(NamedTuple):
    """Weights of one rank as the kernels read them; gh, gx and b2 as in `ExpertWeights`.

    b13  float32 (E, P*I) in packed row order, or None
    """

    l1: Sm90Weight
    l2: Sm90Weight
    activation: Activation
    b13: Tensor | None
    b2: Tensor | None
    gh: Tensor | None
    gx: Tensor | None
    first_expert: int

    @property
    def num_experts(self) -> int:
        return self.l1.num_experts

    @property
    def hidden(self) -> int:
        return self.l2.rows

    @property
    def device(self) -> torch.device:
        return self.l1.device


def _sizes(cfg: MoEConfig) -> dict[str, tuple[int, int, bool]]:
    """(rows, K, gated) of both projections."""
    rows = cfg.projections * cfg.intermediate
    return {
        "l1": (rows, cfg.hidden, cfg.activation.gated),
        "l2": (cfg.hidden, cfg.intermediate, False),
    }


def pack(weights: ExpertWeights, cfg: MoEConfig) -> dict[str, Tensor | None]:
    """Canonical weights -> tensors by the names of `PACKED`, one expert at a time.

    ``weights`` is not changed: the peak is both layouts and the work of one expert. It may be freed
    afterwards.
    """
    out: dict[str, Tensor | None] = dict.fromkeys(PACKED)
    for name, (rows, k, gated) in _sizes(cfg).items():
        shape = (weights.num_experts, *sm90_ops.blob_shape(rows, k))
        blob = weights.l1_data.new_empty(shape)
        canonical = {n: getattr(weights, n) for n in CANONICAL}
        fill(blob, canonical[f"{name}_data"], canonical[f"{name}_scale"], gated)
        g = weights.g13 if name == "l1" else weights.g2[:, None]
        out[f"{name}_packed"], out[f"{name}_alpha"] = blob, sm90_ops.pack_alpha(g)
    if weights.b13 is not None:
        out["b13_packed"] = pack_bias(weights.b13, cfg)
    return out


def fill(blob: Tensor, data: Tensor, scale: Tensor, gated: bool) -> None:
    """Write codes (E, rows, K/2) and swizzled scales into ``blob``, expert by expert; the tensors
    may be on another device."""
    rows, groups = data.shape[1], data.shape[2] // 8
    for e in range(data.shape[0]):
        one, s = data[e].to(blob.device), scale[e].to(blob.device)
        blob[e] = sm90_ops.pack_expert(one, unswizzle(s.view(torch.uint8), rows, groups), gated)


def pack_bias(b13: Tensor, cfg: MoEConfig) -> Tensor:
    """Interleaved bias (E, P*I) in packed row order."""
    rows, _, gated = _sizes(cfg)["l1"]
    return b13[:, sm90_ops.row_order(rows, gated, b13.device)].contiguous()


def unpack(buffers: dict[str, Any], cfg: MoEConfig) -> dict[str, Tensor]:
    """Packed tensors -> new tensors by the names of `CANONICAL`, scales as UE4M3 bytes (uint8).

    Codes and scales are those that were packed, but for blocks of scale 0: they come back as zero
    codes of scale 2^-9, the same values.
    """
    out = {}
    for name, (rows, k, gated) in _sizes(cfg).items():
        blob: Tensor = buffers[f"{name}_packed"]
        experts, groups = blob.shape[0], -(-k // 64) * 4
        data = blob.new_empty((experts, rows, k // 2))
        scale = blob.new_empty((experts, -(-rows // 128) * 128, groups))
        for e in range(experts):
            codes, plain = sm90_ops.unpack_expert(blob[e], rows, k, gated)
            data[e], scale[e] = codes, swizzle(plain.view(torch.uint8))
        out[f"{name}_data"], out[f"{name}_scale"] = data, scale
    return out


def repack(buffers: dict[str, Any], canonical: dict[str, Tensor], cfg: MoEConfig) -> None:
    """Write canonical weights (by the names of `CANONICAL`) into the packed buffers of a layer, and
    what follows from its g13, g2 and b13."""
    for name, (_, _, gated) in _sizes(cfg).items():
        data, scale = canonical[f"{name}_data"], canonical[f"{name}_scale"]
        fill(buffers[f"{name}_packed"], data, scale, gated)
    pack_alphas(buffers)
    if buffers["b13"] is not None:
        buffers["b13_packed"].copy_(pack_bias(buffers["b13"], cfg))


def pack_alphas(buffers: dict[str, Any]) -> None:
    """Write what follows from the g13 and g2 of a layer; nothing waits for the device."""
    for name, g in (("l1", buffers["g13"]), ("l2", buffers["g2"][:, None])):
        buffers[f"{name}_alpha"].copy_(sm90_ops.pack_alpha(g))


def experts_of(buffers: dict[str, Any], cfg: MoEConfig, first_expert: int) -> PackedExperts:
    """View of a layer's buffers by name."""
    l1, l2 = (
        Sm90Weight(buffers[f"{name}_packed"], buffers[f"{name}_alpha"], rows, k, gated)
        for name, (rows, k, gated) in _sizes(cfg).items()
    )
    b13, b2, gh, gx = (buffers[name] for name in ("b13_packed", "b2", "gh", "gx"))
    return PackedExperts(l1, l2, cfg.activation, b13, b2, gh, gx, first_expert)


# ---- scratch


class Scratch(NamedTuple):
    """Buffers of one call, see `scratch_buffers`. gx is None where rows are not quantised, h and gh
    where h is not staged (`_stages_h`)."""

    sums: Sums
    x_rows: Tensor
    gx: Tensor | None
    h: Tensor | None
    h_rows: Tensor
    gh: Tensor | None


def configuration(num_tokens: int, cfg: MoEConfig, numerics: Numerics) -> str:
    """From shapes alone: rows per expert are those of the whole model, so the same on any rank."""
    rows = num_tokens * cfg.top_k
    return sm90_ops.config_name(rows, cfg.num_experts, numerics.batch_invariant)


def scratch_buffers(
    rows: int, config: str, cfg: MoEConfig, experts: PackedExperts, numerics: Numerics
) -> list[Buffer]:
    """Scratch of one call with ``rows`` routed rows. ``x_rows`` is read by L1 and then holds the
    result of L2."""
    rows = rows if experts.num_experts else 0
    counters, partial = 0, 0
    for weight in (experts.l1, experts.l2) if rows else ():
        need = sm90_ops.gemm_scratch(rows, weight, config)
        counters, partial = max(counters, need[0]), max(partial, need[1])
    scaled = rows if numerics.activations == "nvfp4" else 0  # rows that have an outer scale
    staged = rows if _stages_h(experts, numerics) else 0
    return [
        Buffer("counters", (counters,), torch.int32),
        Buffer("partial", (partial,), torch.float32),
        Buffer("x_rows", (rows, cfg.hidden), torch.bfloat16),
        Buffer("gx", (scaled,), torch.float32),
        Buffer("h", (staged, cfg.intermediate), torch.float32),
        Buffer("h_rows", (rows, cfg.intermediate), torch.bfloat16),
        Buffer("gh", (staged,), torch.float32),
    ]


def _stages_h(experts: PackedExperts, numerics: Numerics) -> bool:
    """Does h leave L1 in fp32? Its outer scales then come from whole rows."""
    return numerics.activations == "nvfp4" and experts.gh is None


def last_of_each_configuration(max_tokens: int, cfg: MoEConfig, numerics: Numerics) -> list[int]:
    """The largest token count up to ``max_tokens`` of every configuration in turn."""
    out: list[int] = []
    while (first := out[-1] + 1 if out else 1) <= max_tokens:
        name = configuration(first, cfg, numerics)
        counts = range(first, max_tokens + 1)

        def differs(count: int, name: str = name) -> bool:
            return configuration(count, cfg, numerics) != name

        out.append(counts[bisect.bisect_left(counts, True, key=differs) - 1])
    return out


def plan_memory(max_tokens: int, cfg: MoEConfig, experts: PackedExperts, numerics: Numerics) -> int:
    """Bytes of the largest call with up to ``max_tokens`` tokens: a split K needs partial sums, so
    that it may be a smaller one."""
    counts = last_of_each_configuration(max_tokens, cfg, numerics)
    buffers = [_buffers_of_call(t, cfg, experts, numerics) for t in counts]
    return max(map(total_bytes, buffers), default=0)


def _buffers_of_call(
    num_tokens: int, cfg: MoEConfig, experts: PackedExperts, numerics: Numerics
) -> list[Buffer]:
    config = configuration(num_tokens, cfg, numerics)
    return scratch_buffers(num_tokens * cfg.top_k, config, cfg, experts, numerics)


def received_buffers(
    rows: int, cfg: MoEConfig, experts: PackedExperts, numerics: Numerics
) -> list[Buffer]:
    """Scratch of `run_received` for at most ``rows`` local rows."""
    config = _received_configuration(rows, experts)
    return scratch_buffers(rows, config, cfg, experts, numerics)


def _received_configuration(rows: int, experts: PackedExperts) -> str:
    """One of those that sum in the same order: the bits do not depend on how experts are spread
    over ranks, and more rows never need less scratch."""
    return sm90_ops.config_name(rows, experts.num_experts, batch_invariant=True)


def warmup(run: Run, max_tokens: int, cfg: MoEConfig, numerics: Numerics, like: Tensor) -> None:
    """Call the layer with tokens that reach no expert: every kernel of every call with up to
    ``max_tokens`` tokens is compiled and loaded afterwards.

    run   (x, topk_ids, topk_weights, shared or None) -> y; called without and with ``shared``
    like  a tensor of the layer's device
    """
    few = max(min(max_tokens, ops.ONE_CTA_PAIRS // cfg.top_k), 1)
    counts = {1, few, min(few + 1, max_tokens)}  # routes of one CTA and of several
    counts |= set(last_of_each_configuration(max_tokens, cfg, numerics))
    kinds = [(d, torch.int32) for d in (torch.bfloat16, torch.float16, torch.float32)]
    kinds.append((torch.bfloat16, torch.int64))
    with sm90_ops.warming_up():
        for count in sorted(counts):
            for dtype, ids in kinds if count in (1, few + 1) else kinds[:1]:
                x = like.new_zeros((count, cfg.hidden), dtype=dtype)
                nowhere = like.new_full((count, cfg.top_k), -1, dtype=ids)
                mix = like.new_ones((count, cfg.top_k), dtype=torch.float32)
                run(x, nowhere, mix, None)
                run(x, nowhere, mix, x)


# ---- the layer


def run_sm90(
    x: Tokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    cfg: MoEConfig,
    experts: PackedExperts,
    numerics: Numerics,
    shared: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """x (T, H), ids and weights (T, K) -> y (T, H), see `reference.output_dtype`."""
    count, dtype = x.shape[0], output_dtype(x)
    if count == 0 or experts.num_experts == 0:
        y = torch.zeros((count, cfg.hidden), dtype=torch.float32, device=x.device)
        return (y if shared is None else y + shared.float()).to(dtype)
    tensors = allocate(_buffers_of_call(count, cfg, experts, numerics), x.device, workspace)
    scratch = _scratch(configuration(count, cfg, numerics), experts, numerics, tensors)
    mix = topk_weights.float()
    with stage("moe.route"):
        local = (experts.first_expert, experts.num_experts)
        counters = scratch.sums.counters
        rows = ops.sort_routes(topk_ids, mix, cfg.num_experts, *local, counter=counters)
        plan = RoutingPlan(*rows, counters)
    gathered = None  # rows of x that L1 reads by itself
    with stage("moe.quantize"):
        if isinstance(x, Nvfp4Tensor):
            scale = x.row_major_scale().view(torch.uint8)
            _stage_received((x.data, scale, x.global_scale.expand(count)), plan, scratch)
        elif _reads_tokens(x, cfg, numerics) and sm90_ops.gathers_well(scratch.sums.config):
            gathered = x
        else:
            on_input = mix[:, 0].contiguous() if cfg.weight_on_input else None
            outer = _outer_scale(x, topk_ids, on_input, cfg, experts, numerics)
            sm90_ops.stage_rows(
                x,
                plan.expert_offsets,
                scratch.x_rows,
                scratch.gx,
                outer=outer,
                row_scale=on_input,
                **_places(plan),
            )
    o = _expert_rows(plan, experts, scratch, gathered)
    with stage("moe.combine"):
        factors = None if cfg.weight_on_input else mix
        return ops.combine(o, plan.token_rows, factors, shared, dtype)


def _places(plan: RoutingPlan) -> dict[str, Tensor]:
    """How staging finds the rows of tokens: a CTA per row, or, where tokens alone fill the GPU, per
    token, so that each is read and rounded once. The bits are the same."""
    if plan.token_rows.numel() > ops.ONE_CTA_PAIRS:
        return {"token_rows": plan.token_rows}
    return {"row_token": plan.row_token}


def _reads_tokens(x: Tensor, cfg: MoEConfig, numerics: Numerics) -> bool:
    """Is x what L1 multiplies, so that it gathers the rows itself?"""
    return numerics.activations == "bf16" and x.dtype == torch.bfloat16 and not cfg.weight_on_input


def run_received(
    given: Received,
    plan: RoutingPlan,
    experts: PackedExperts,
    numerics: Numerics,
    tensors: list[Tensor],
) -> Tensor:
    """The experts on N tokens that came quantised or in bf16 -> o (R, H) bf16 for the rows of
    ``plan``; rows past expert_offsets[E] are unspecified. ``tensors``: `received_buffers` for R
    rows.
    """
    config = _received_configuration(plan.row_token.shape[0], experts)
    scratch = _scratch(config, experts, numerics, tensors)
    with stage("moe.quantize"):
        _stage_received(given, plan, scratch)
    return _expert_rows(plan, experts, scratch)


# codes uint8 (N, H/2), row-major scales uint8 (N, H/16) and outer scales fp32 (N,), or bf16 (N, H);
# rows may be apart
Received = tuple[Tensor, Tensor | None, Tensor | None]


def _stage_received(given: Received, plan: RoutingPlan, scratch: Scratch) -> None:
    exchange_ops.stage_received(*given, plan.token_rows, scratch.x_rows, scratch.gx)


def _expert_rows(
    plan: RoutingPlan, experts: PackedExperts, scratch: Scratch, tokens: Tensor | None = None
) -> Tensor:
    """Staged rows, or ``tokens`` bf16 (T, H) -> o (R, H) bf16, in the memory of x_rows."""
    offsets, sums, h_rows = plan.expert_offsets, scratch.sums, scratch.h_rows
    if plan.counter is not None:  # the sort has set it, without a kernel of its own
        sums = sums._replace(counters=plan.counter)
    else:
        sums.counters.zero_()
    static = experts.gh if scratch.gx is not None and scratch.h is None else None
    with stage("moe.l1"):
        sm90_ops.grouped_gemm(
            scratch.x_rows if tokens is None else tokens,
            experts.l1,
            offsets,
            h_rows if scratch.h is None else scratch.h,
            sums,
            epilogue=Epilogue(experts.activation, scratch.gx, experts.b13, out_scale=static),
            row_token=None if tokens is None else plan.row_token,
        )
    if scratch.h is not None:
        with stage("moe.quantize"):
            sm90_ops.stage_rows(scratch.h, offsets, h_rows, scratch.gh)
    with stage("moe.l2"):
        epilogue = Epilogue(row_scale=scratch.gh, bias=experts.b2, expert_scale=static)
        o = scratch.x_rows
        sm90_ops.grouped_gemm(h_rows, experts.l2, offsets, o, sums, epilogue=epilogue)
    return o


def _scratch(
    config: str, experts: PackedExperts, numerics: Numerics, tensors: list[Tensor]
) -> Scratch:
    counters, partial, x_rows, gx, h, h_rows, gh = tensors
    sums = Sums(config, counters, partial)
    scaled = gx if numerics.activations == "nvfp4" else None
    if not _stages_h(experts, numerics):
        return Scratch(sums, x_rows, scaled, None, h_rows, None)
    return Scratch(sums, x_rows, scaled, h, h_rows, gh)


def _outer_scale(
    x: Tensor,
    topk_ids: Tensor,
    on_input: Tensor | None,
    cfg: MoEConfig,
    experts: PackedExperts,
    numerics: Numerics,
) -> Tensor | None:
    """One outer scale of x for all rows (1,), or None: one per row, or rows that are not
    quantised."""
    if numerics.activations == "bf16" or numerics.activation_scale == "per_token":
        return None
    if numerics.activation_scale == "static":
        assert experts.gx is not None  # checked by the layer
        return experts.gx.reshape(1)
    values = x if on_input is None else x.float() * on_input[:, None]
    found = input_scale(values, topk_ids, cfg, experts, "per_tensor")  # type: ignore[arg-type]
    assert isinstance(found, Tensor)
    return found.reshape(1)
