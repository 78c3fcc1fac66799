"""The backends "sm100" and "sim": the layer on the SM100 kernels, on a GPU or in the simulator.

x, plan -> quantised rows -> L1 with activation and quantiser (static gh), or L1, activation and
quantiser apart (one outer scale per row) -> L2 -> combine; or L2 adds its rows straight into their
tokens (deterministic=False).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import ops
from cute_kernels.gemm_ops import (
    K_MULTIPLE,
    HiddenScales,
    Rows,
    ScatterTarget,
    Weights,
    WorkItems,
    config_name,
    grouped_gemm,
    grouped_gemm_act_quant,
    grouped_gemm_scatter_add,
    hidden_buffers,
    kernels_on,
    without_launches,
)
from cute_kernels.nvfp4 import Nvfp4Tensor
from moe.config import MoEConfig
from moe.experts import Numerics
from moe.plan import RoutingPlan
from moe.ranges import stage
from moe.reference import Tokens, input_scale, output_dtype
from moe.weights import ExpertWeights
from moe.workspace import Buffer, Workspace, allocate, total_bytes

KERNEL_BACKENDS = ("sm100", "sim")
ALL_KERNEL_BACKENDS = (*KERNEL_BACKENDS, "sm90")  # Hopper has GEMMs of its own
_PLANS = 1024  # sizes of calls whose scratch is remembered
Run = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def check_layer(backend: str, cfg: MoEConfig, activations: str) -> None:
    """Raises ValueError for a layer that the kernels cannot compute: hidden and intermediate are
    the K of its GEMMs."""
    if activations != "nvfp4":
        raise ValueError(
            f"backend {backend!r} multiplies NVFP4 by NVFP4: activations must be 'nvfp4', got "
            f"{activations!r}"
        )
    if cfg.hidden % K_MULTIPLE or cfg.intermediate % K_MULTIPLE:
        raise ValueError(
            f"backend {backend!r} reads rows by TMA: hidden and intermediate must be multiples of "
            f"{K_MULTIPLE}, got {cfg.hidden} and {cfg.intermediate}; backend='torch' takes them"
        )


class Experts(NamedTuple):
    """`ExpertWeights` as the kernels read them: views, made anew at every call."""

    w13: Weights
    w2: Weights
    g13: Tensor
    g2: Tensor
    gh: Tensor | None
    gx: Tensor | None
    b13: Tensor | None
    b2: Tensor | None
    ones: Tensor  # fp32 (E,): the factors of sums that the quantiser scales
    first_expert: int
    num_experts: int

    @classmethod
    def of(cls, weights: ExpertWeights) -> Experts:
        return experts_of(dict(weights.tensors()), weights.first_expert)


class Ones:
    """fp32 (E,) ones that a layer keeps. They are no buffer: what makes buffers without values
    (`to_empty`) or gives those of a state dict alone (``assign=True``) would spoil them."""

    def __init__(self) -> None:
        self._made: Tensor | None = None

    def like(self, g2: Tensor) -> Tensor:
        made = self._made
        if made is not None and made.device == g2.device:
            return made
        made = torch.ones_like(g2)
        capturing = g2.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing and not torch.compiler.is_compiling():
            self._made = made  # what a graph makes exists in its replays alone
        return made


def experts_of(tensors: dict[str, Any], first_expert: int, ones: Tensor | None = None) -> Experts:
    """From tensors by the names of `ExpertWeights`, as in the buffers of a layer."""
    w13 = Weights(tensors["l1_data"], tensors["l1_scale"])
    w2 = Weights(tensors["l2_data"], tensors["l2_scale"])
    g13, g2 = tensors["g13"], tensors["g2"]
    gh, gx, b13, b2 = (tensors.get(name) for name in ("gh", "gx", "b13", "b2"))
    ones = torch.ones_like(g2) if ones is None else ones
    return Experts(w13, w2, g13, g2, gh, gx, b13, b2, ones, first_expert, w2.data.shape[0])


# ---- scratch


def row_buffers(rows: int, cfg: MoEConfig, experts: Experts) -> list[Buffer]:
    """Scratch of the two GEMMs of ``rows`` routed rows."""
    widths = (cfg.hidden, cfg.intermediate, cfg.projections)
    return _row_buffers(rows, widths, experts.num_experts, experts.gh is not None, False)


def _row_buffers(
    rows: int, widths: tuple[int, int, int], experts: int, static: bool, adds: bool
) -> list[Buffer]:
    """``widths``: H, I and the projections. ``adds``: L2 leaves no rows."""
    hidden, inter, projections = widths
    o_rows = 0 if adds else rows
    if static:
        return [
            *hidden_buffers(rows, inter, experts),
            Buffer("o", (o_rows, hidden), torch.bfloat16),
            Buffer("alpha", (experts,), torch.float32),
        ]
    size = max(o_rows * hidden, rows * projections * inter * 2)
    return [
        *ops.row_hidden_buffers(rows, inter, experts),
        # rows of L2 take the place of the sums of L1, which are quantised by then
        Buffer("sums_or_o", (size,), torch.bfloat16),
    ]


def scratch_buffers(
    num_tokens: int, cfg: MoEConfig, experts: Experts, numerics: Numerics
) -> Sequence[Buffer]:
    """Scratch of one call; the same tuple for the same sizes."""
    widths = (cfg.top_k, cfg.hidden, cfg.intermediate, cfg.projections)
    plan = _scratch.__wrapped__ if torch.compiler.is_compiling() else _scratch
    kinds = (experts.gh is not None, not numerics.deterministic, numerics.schedule == "dynamic")
    return plan(num_tokens, widths, experts.num_experts, kinds)


@functools.lru_cache(_PLANS)
def _scratch(
    num_tokens: int,
    widths: tuple[int, int, int, int],
    experts: int,
    kinds: tuple[bool, bool, bool],
) -> tuple[Buffer, ...]:
    """``widths``: K, H, I and the projections. ``kinds``: one gh per expert, L2 adds its rows up,
    a dynamic schedule."""
    top_k, hidden, inter, projections = widths
    static, adds, dynamic = kinds
    if experts == 0 or num_tokens == 0:
        return ()
    rows = num_tokens * top_k
    return (
        *ops.sort_buffers(num_tokens, top_k, experts),
        *ops.quantize_buffers(num_tokens, hidden, rows, experts),
        *_row_buffers(rows, (hidden, inter, projections), experts, static, adds),
        Buffer("y_sums", (num_tokens if adds else 0, hidden), torch.float32),
        *([Buffer("work_counter", (1,), torch.int32)] if dynamic else []),
    )


def plan_memory(num_tokens: int, cfg: MoEConfig, experts: Experts, numerics: Numerics) -> int:
    """Bytes that `run_kernels` takes for up to ``num_tokens`` tokens."""
    return total_bytes(scratch_buffers(num_tokens, cfg, experts, numerics))


# ---- the layer


def run_kernels(
    x: Tokens,
    topk_ids: Tensor,
    topk_weights: Tensor,
    cfg: MoEConfig,
    experts: Experts,
    numerics: Numerics,
    shared: Tensor | None = None,
    workspace: Workspace | None = None,
) -> Tensor:
    """x (T, H), ids and weights (T, K) -> y (T, H), see `output_dtype`."""
    num_tokens, dtype = x.shape[0], output_dtype(x)
    if num_tokens == 0 or experts.num_experts == 0:  # more ranks than experts: no row here
        y = torch.zeros((num_tokens, cfg.hidden), dtype=torch.float32, device=x.device)
        return (y if shared is None else y + shared.float()).to(dtype)
    buffers = scratch_buffers(num_tokens, cfg, experts, numerics)
    scratch = allocate(buffers, x.device, workspace)
    counter = scratch.pop() if numerics.schedule == "dynamic" else None
    mix = topk_weights.float()
    chain = scratch[9:-1]
    alpha = outer_alpha(experts, chain)
    with kernels_on(x.device):
        with stage("moe.route"):
            plan = route_rows(topk_ids, mix, cfg, experts, scratch[:5], counter)
        with stage("moe.quantize"):
            rows, gx = quantise(x, topk_ids, mix, plan, cfg, experts, numerics, scratch)
        h, gh = hidden(rows, gx, plan, cfg, experts, chain)
        factors = (alpha, gh)
        with stage("moe.l2"):
            if not numerics.deterministic:
                y = scratch[-1].zero_()
                return _add_rows(h, factors, plan, cfg, experts, y, shared, dtype)
            o = down(h, factors, plan, cfg, experts, chain)
        with stage("moe.combine"):
            return combine_rows(o, plan, mix, cfg, shared, dtype)


def route_rows(
    topk_ids: Tensor,
    mix: Tensor,
    cfg: MoEConfig,
    experts: Experts,
    out: list[Tensor],
    counter: Tensor | None = None,
) -> RoutingPlan:
    """Rows of the local experts, in the first of `scratch_buffers`."""
    local = (experts.first_expert, experts.num_experts)
    plan = ops.sort_routes(topk_ids, mix, cfg.num_experts, *local, out=out, counter=counter)
    return RoutingPlan(*plan, counter)


def work_items(plan: RoutingPlan) -> Tensor | WorkItems:
    if plan.counter is None:
        return plan.expert_offsets
    return WorkItems(plan.expert_offsets, plan.counter)


def quantise(
    x: Tokens,
    topk_ids: Tensor,
    mix: Tensor,
    plan: RoutingPlan,
    cfg: MoEConfig,
    experts: Experts,
    numerics: Numerics,
    scratch: list[Tensor],
) -> tuple[Rows, Tensor]:
    """Codes once per token, scales once per row, and gx; tokens that come quantised: all by row."""
    if isinstance(x, Nvfp4Tensor):
        gx = x.global_scale.expand(x.shape[0]).contiguous()
        return _received(x.data, x.scale, gx, plan)
    on_input = mix[:, 0].contiguous() if cfg.weight_on_input else None
    given = _outer_scale(x, topk_ids, on_input, cfg, experts, numerics)
    index = (plan.expert_offsets, plan.row_token)
    data, scale, gx = ops.quantize_rows(x, *index, given, on_input, out=scratch[5:9])
    return Rows(data, scale, plan.row_token), gx


def combine_rows(
    o: Tensor,
    plan: RoutingPlan,
    mix: Tensor,
    cfg: MoEConfig,
    shared: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y (T, H); weights that multiplied x already are not used again."""
    y = torch.empty((plan.num_tokens, cfg.hidden), dtype=dtype, device=o.device)
    return ops.combine(o, plan.token_rows, None if cfg.weight_on_input else mix, shared, out=y)


def _outer_scale(
    x: Tensor,
    topk_ids: Tensor,
    on_input: Tensor | None,
    cfg: MoEConfig,
    experts: Experts,
    numerics: Numerics,
) -> Tensor | str:
    mode = numerics.activation_scale
    if mode == "per_tensor" and on_input is not None:
        x = x.float() * on_input[:, None]  # what is quantised, see reference.stage_input
    found = input_scale(x, topk_ids, cfg, experts, mode)  # type: ignore[arg-type]  # reads gx alone
    assert isinstance(found, str | Tensor)  # never a float: see input_scale
    return found


def run_received(
    data: Tensor,
    scale: Tensor,
    gx: Tensor,
    plan: RoutingPlan,
    cfg: MoEConfig,
    experts: Experts,
    scratch: list[Tensor],
) -> Tensor:
    """The experts on tokens that came quantised: codes uint8 (N, H/2), row-major scales uint8
    (N, H/16), gx fp32 (N,), whose rows may be apart, -> o (R, H) bf16 for the rows of ``plan``;
    rows past expert_offsets[E] are unspecified. ``scratch``: `received_buffers` of at least R rows.
    """
    count = plan.row_token.shape[0]
    fitted = [
        _fit(memory, buffer)
        for memory, buffer in zip(scratch, received_buffers(count, cfg, experts))
    ]
    alpha = outer_alpha(experts, fitted[3:])
    with kernels_on(data.device):
        with stage("moe.quantize"):
            rows, gx = _received(data, scale, gx, plan, fitted[:3])
        h, gh = hidden(rows, gx, plan, cfg, experts, fitted[3:])
        with stage("moe.l2"):
            return down(h, (alpha, gh), plan, cfg, experts, fitted[3:])


def received_buffers(rows: int, cfg: MoEConfig, experts: Experts) -> list[Buffer]:
    """Scratch of `run_received`."""
    permuted = ops.permute_buffers(cfg.hidden, rows, experts.num_experts)
    return [*permuted, *row_buffers(rows, cfg, experts)]


def _fit(memory: Tensor, buffer: Buffer) -> Tensor:
    """The start of ``memory`` as a tensor of the buffer's shape."""
    return memory.view(-1)[: math.prod(buffer.shape)].view(buffer.shape)


def _received(
    data: Tensor,
    scale: Tensor,
    gx: Tensor,
    plan: RoutingPlan,
    out: list[Tensor] | None = None,
) -> tuple[Rows, Tensor]:
    permuted = ops.permute_quantized_rows(
        data, scale, gx, plan.row_token, plan.expert_offsets, out=out
    )
    return Rows(permuted[0], permuted[1]), permuted[2]


def hidden(
    rows: Rows,
    gx: Tensor,
    plan: RoutingPlan,
    cfg: MoEConfig,
    experts: Experts,
    scratch: list[Tensor],
) -> tuple[Rows, Tensor | None]:
    """Quantised rows of h and their outer scales; None where these are experts.gh. ``scratch``:
    `row_buffers`."""
    items, scales = work_items(plan), HiddenScales(experts.g13, gx, experts.gh)
    if experts.gh is not None:
        with stage("moe.l1"):
            h = grouped_gemm_act_quant(
                rows, experts.w13, items, cfg.activation, scales, experts.b13, out=scratch[:2]
            )
        return h, None
    # The outer scale of a row needs the whole row, which no tile has: sums go through memory.
    width = cfg.projections * cfg.intermediate
    sums = scratch[3].view(torch.float32).as_strided((rows.routed, width), (width, 1))
    with stage("moe.l1"):
        grouped_gemm(rows, experts.w13, items, experts.ones, out_dtype=torch.float32, out=sums)
    with stage("moe.quantize"):
        return ops.quantize_hidden(
            sums,
            plan.expert_offsets,
            cfg.activation,
            scales,
            rows.row_token,
            experts.b13,
            out=scratch[:3],
        )


def outer_alpha(experts: Experts, scratch: list[Tensor]) -> Tensor:
    """Outer scale of L2 by expert: g2, times gh where rows have none of their own. In front of all
    kernels of a call: between two of them it would keep the second from starting early."""
    return experts.g2 if experts.gh is None else torch.mul(experts.gh, experts.g2, out=scratch[-1])


def down(
    h: Rows,
    factors: tuple[Tensor, Tensor | None],
    plan: RoutingPlan,
    cfg: MoEConfig,
    experts: Experts,
    scratch: list[Tensor],
) -> Tensor:
    """o (R, H) bf16. ``factors``: `outer_alpha`, and the outer scales of rows that have some."""
    alpha, gh = factors
    if gh is None:
        o = scratch[2]
    else:  # where the sums of L1 were
        o = scratch[3].as_strided((h.routed, cfg.hidden), (cfg.hidden, 1))
    options: dict[str, Any] = {"row_scale": gh, "bias": experts.b2, "out": o}
    return grouped_gemm(h, experts.w2, work_items(plan), alpha, **options)


def _add_rows(
    h: Rows,
    factors: tuple[Tensor, Tensor | None],
    plan: RoutingPlan,
    cfg: MoEConfig,
    experts: Experts,
    sums: Tensor,
    shared: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """y (T, H): L2 adds weighted rows to their tokens in fp32, in no given order. ``sums`` (T, H)
    is 0."""
    alpha, gh = factors
    weight = None if cfg.weight_on_input else plan.row_weight
    target = ScatterTarget(sums, plan.row_token, weight)
    grouped_gemm_scatter_add(
        h, experts.w2, work_items(plan), alpha, target, row_scale=gh, bias=experts.b2
    )
    y = torch.empty(sums.shape, dtype=dtype, device=sums.device)
    return y.copy_(sums) if shared is None else torch.add(sums, shared, out=y)


# ---- warm-up


def last_of_each(max_tokens: int, kind: Callable[[int], object]) -> list[int]:
    """The largest token count up to ``max_tokens`` of every ``kind`` in turn; counts of one kind
    follow one another."""
    out: list[int] = []
    while (first := out[-1] + 1 if out else 1) <= max_tokens:
        name = kind(first)
        counts = range(first, max_tokens + 1)

        def differs(count: int, name: object = name) -> bool:
            return kind(count) != name

        out.append(counts[bisect.bisect_left(counts, True, key=differs) - 1])
    return out


def warmup(run: Run, max_tokens: int, cfg: MoEConfig, experts: Experts) -> None:
    """Compile and load every kernel of every call with up to ``max_tokens`` tokens; nothing runs.

    run  (x, topk_ids, topk_weights, shared or None) -> y; called without and with ``shared``
    """

    def kind(count: int) -> tuple[object, ...]:
        rows = count * cfg.top_k
        if experts.num_experts == 0:  # over ranks: what books, sends and combines runs all the same
            return (rows > ops.ONE_CTA_PAIRS,)
        first = config_name(rows, experts.w13.data, torch.float32 if experts.gh is None else None)
        # rows that are added up are fp32, but change kernels at the same counts
        second = config_name(rows, experts.w2.data, torch.bfloat16)
        return first, second, rows > ops.ONE_CTA_PAIRS

    like = experts.g2
    kinds = [(d, torch.int32) for d in (torch.bfloat16, torch.float16, torch.float32)]
    kinds.append((torch.bfloat16, torch.int64))
    seen_sort: set[object] = set()
    with without_launches():
        for count in last_of_each(max_tokens, kind):
            spread = kind(count)[-1]
            several = spread not in seen_sort  # dtypes matter to the small kernels alone
            seen_sort.add(spread)
            for dtype, ids in kinds if several else kinds[:1]:
                x = like.new_empty((count, cfg.hidden), dtype=dtype)
                routes = like.new_empty((count, cfg.top_k), dtype=ids)
                mix = like.new_empty((count, cfg.top_k), dtype=torch.float32)
                for shared in (None, x):
                    run(x, routes, mix, shared)
