"""The layer on kernels: memory planned once, warm-up, ranks without experts, sums without order,
and every stage against exact sums on the kernel's own input."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import gemm_ops, nvfp4
from moe import ExpertWeights, MoE, MoEConfig, Workspace, kernels, reference
from moe.workspace import Buffer, total_bytes
from tests.layers import poison, same_bits
from tests.test_layer_sim import SHAPES, Shape, build, routed

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)
DEEPSEEK, QWEN, GPT_OSS, NEMOTRON = SHAPES


def layer_of(shape: Shape, static: bool = True, **options: Any) -> MoE:
    cfg, weights = build(shape, static)
    return MoE(cfg, weights, backend="sim", **options)


def scratch_of(layer: MoE, num_tokens: int) -> dict[str, Buffer]:
    found = kernels.scratch_buffers(num_tokens, layer.cfg, layer._kernel_experts(), layer.numerics)
    return {b.name: b for b in found}


# ---- memory


class Allocations:
    """Bytes that torch.empty gave, each rounded up as a workspace does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.buffers: list[Buffer] = []
        original = torch.empty

        def empty(*args: Any, **kwargs: Any) -> Tensor:
            out = original(*args, **kwargs)
            self.buffers.append(Buffer("", tuple(out.shape), out.dtype))
            return poison(out)

        monkeypatch.setattr(torch, "empty", empty)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("static", [True, False], ids=["static_h", "dynamic_h"])
def test_plan_memory_is_what_a_call_allocates(
    static: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(GPT_OSS, static, deterministic=deterministic)
    x, ids, mix = routed(layer.cfg, 7)
    seen = Allocations(monkeypatch)
    y = layer.experts(x, ids, mix)
    result = Buffer("", tuple(y.shape), y.dtype)
    assert total_bytes(seen.buffers) - total_bytes([result]) == layer.plan_memory(7)
    layer.workspace = Workspace(layer.plan_memory(7))
    seen.buffers.clear()
    assert same_bits(layer.experts(x, ids, mix), y)
    assert seen.buffers == [result], "a call with a workspace allocates its result alone"
    with pytest.raises(ValueError, match="too small"):
        layer.experts(*routed(layer.cfg, 8))
    sizes = [layer.plan_memory(t) for t in range(40)]
    assert sizes == sorted(sizes) and sizes[0] == 0


def test_two_layers_share_a_workspace() -> None:
    layers = [layer_of(QWEN), layer_of(NEMOTRON, static=False)]
    alone = [m.experts(*routed(m.cfg, 5)) for m in layers]
    shared = Workspace(max(m.plan_memory(5) for m in layers))
    for m in layers:
        m.workspace = shared
    poison(shared._memory)
    for m, want in zip(layers, alone):
        assert same_bits(m.experts(*routed(m.cfg, 5)), want)


# ---- warm-up


@pytest.mark.parametrize("static", [True, False], ids=["static_h", "dynamic_h"])
def test_after_a_warm_up_no_token_count_compiles(static: bool) -> None:
    """Every configuration and both ways to sort are passed between 1 and 700 tokens."""
    layer = layer_of(QWEN, static)
    limit = 700
    layer.warmup(limit)
    before = compiler.stats()
    with gemm_ops.without_launches():
        for count in (*range(1, 30), 31, 127, 128, 129, 255, 256, 257, 511, 512, 513, limit):
            x, ids, mix = routed(layer.cfg, count)
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                layer.experts(x.to(dtype), ids, mix)
            layer.experts(x, ids.long(), mix, shared=x)
    layer.experts(*routed(layer.cfg, 3))
    assert compiler.stats() == before
    kinds = {
        gemm_ops.config_name(t * layer.cfg.top_k, w, torch.bfloat16)
        for t in range(1, limit)
        for w in (layer.l1_data, layer.l2_data)
    }
    assert len(kinds) >= 4


def test_kernels_do_not_know_the_number_of_tokens() -> None:
    """H40: what 64 sizes of batch compile is counted by their configurations."""
    compiler.clear_memory()
    layer = layer_of(QWEN)
    before = compiler.stats()
    with gemm_ops.without_launches():
        for count in range(1, 65):
            layer.experts(*routed(layer.cfg, count))
    after = compiler.stats()
    made = after.compiles + after.disk_hits - before.compiles - before.disk_hits
    gemms = {
        (dtype, gemm_ops.config_name(t * layer.cfg.top_k, w, dtype))
        for t in range(1, 65)
        for w, dtype in ((layer.l1_data, None), (layer.l2_data, torch.bfloat16))
    }
    assert made == 4 + len(gemms) <= 14  # sort, codes, scales, combine, and the GEMMs


def test_without_launches_nothing_runs_and_the_count_of_kernels_shows() -> None:
    compiler.clear_memory()
    layer = layer_of(NEMOTRON)
    x, ids, mix = routed(layer.cfg, 3)
    before = compiler.stats()
    with gemm_ops.without_launches():
        layer.experts(x, ids, mix)
    after = compiler.stats()
    new = after.compiles + after.disk_hits - before.compiles - before.disk_hits
    assert new == 6  # sort, codes, scales, two GEMMs, combine
    with pytest.raises(AssertionError):  # the kernels of another dtype are not there yet
        layer.experts(x.half(), ids, mix)
        assert compiler.stats() == after


def test_last_of_each_kind() -> None:
    assert kernels.last_of_each(10, lambda t: t > 3) == [3, 10]
    assert kernels.last_of_each(10, lambda t: 0) == [10]
    assert kernels.last_of_each(3, lambda t: t) == [1, 2, 3]
    assert kernels.last_of_each(0, lambda t: t) == []


# ---- ranks, order, batches


@pytest.mark.parametrize("static", [True, False], ids=["static_h", "dynamic_h"])
def test_a_rank_without_experts(static: bool) -> None:
    cfg, weights = build(QWEN, static)
    fields = {n: t[:0] for n, t in weights.tensors()}
    none = ExpertWeights(**fields, first_expert=8)
    layer = MoE(cfg, none, backend="sim")
    x, ids, mix = routed(cfg, 4)
    assert layer.plan_memory(4) == 0
    layer.warmup(4)
    y = layer.experts(x, ids, mix)
    assert y.dtype == x.dtype and y.shape == x.shape and not y.any()
    assert same_bits(layer.experts(x, ids, mix, shared=x), x)


def test_parts_of_ranks_add_up_row_by_row() -> None:
    """Each slot's row has the bits of the whole layer, whoever owns the expert."""
    cfg, weights = build(QWEN, static=True)
    x, ids, _ = routed(cfg, 5)
    ids[1:] = -1
    ids[:, 1:] = -1  # one slot of token 0
    one = torch.ones(5, cfg.top_k)
    whole = MoE(cfg, weights, backend="sim").experts(x, ids, one)
    parts = []
    for start in (0, 4):
        fields = {n: t[start : start + 4] for n, t in weights.tensors()}
        local = ExpertWeights(**fields, first_expert=start)
        parts.append(MoE(cfg, local, backend="sim").experts(x, ids, one))
    owner = int(ids[0, 0]) // 4
    assert same_bits(parts[owner], whole) and not parts[1 - owner].any()


@pytest.mark.parametrize("static", [True, False], ids=["static_h", "dynamic_h"])
def test_a_token_has_the_same_bits_under_every_configuration(static: bool) -> None:
    """Few rows per expert swap the operands, many take a pair of CTAs."""
    shape = Shape("narrow", 128, 64, 2, 2, DEEPSEEK.activation)
    layer = layer_of(shape, static)
    x, ids, mix = routed(layer.cfg, 160)
    seen = set()
    rows = {}
    for count in (1, 5, 100, 160):  # 1, 5, 100 and 160 rows per expert
        seen.add(gemm_ops.config_name(count * 2, layer.l1_data, torch.float32))
        rows[count] = layer.experts(x[:count], ids[:count], mix[:count])
    assert len(seen) == 3
    for count, y in rows.items():
        assert same_bits(y, rows[160][:count]), f"{count} tokens"
    assert same_bits(layer.experts(x, ids, mix), rows[160]), "a second call"


@pytest.mark.parametrize(("shape", "static"), [(QWEN, True), (GPT_OSS, False)])
def test_sums_without_order(shape: Shape, static: bool) -> None:
    layer, free = layer_of(shape, static), layer_of(shape, static, deterministic=False)
    x, ids, mix = routed(layer.cfg, 9)
    for shared in (None, x):
        want = layer.experts(x, ids, mix, shared)
        got = free.experts(x, ids, mix, shared)
        if shape.top_k == 2 and shared is None:
            assert same_bits(got, want)  # a sum of two has one value
        # the order of the fp32 sums alone: half a step of bf16, unless the rounding flips
        step = want.float().abs() * 2.0**-7 + 1e-6
        assert ((got.float() - want.float()).abs() <= step).all()
        assert (got == want).float().mean() > 0.98
    nobody = torch.full_like(ids, -1)
    assert not free.experts(x, nobody, mix).any()


def test_who_may_give_up_the_order() -> None:
    cfg, weights = build(QWEN, static=True)
    with pytest.raises(ValueError, match="deterministic=False needs one of the backends"):
        MoE(cfg, weights, backend="torch", deterministic=False)
    with pytest.raises(ValueError, match="batch_invariant=True needs deterministic=True"):
        MoE(cfg, weights, backend="sim", deterministic=False, batch_invariant=True)


# ---- stages


def exact_rows(values: Tensor, w: nvfp4.Nvfp4Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """fp64 sums and sums of magnitudes of expert-major rows, no global scales."""
    sums, sizes = [], []
    for e in range(offsets.numel() - 1):
        b = nvfp4.decode(reference.expert(w, e), torch.float64)
        a = values[int(offsets[e]) : int(offsets[e + 1])]
        sums.append(a @ b.t())
        sizes.append(a.abs() @ b.t().abs())
    return torch.cat(sums), torch.cat(sizes)


def assert_rows_within_bound(got: Tensor, exact: Tensor, size: Tensor, k: int) -> None:
    """numerics section 6 for bf16 rows: error of the sum, and half a step of bf16."""
    bound = 4 * (k / 64 + 1) * 2.0**-24 * size
    error = (got.double() - exact).abs()
    assert bool((error <= bound + (exact.abs() + bound) * 2.0**-8).all()), "an element of o"
    slope = float((got.double() * exact).sum() / (exact * exact).sum())
    assert abs(slope - 1) < 1e-3, f"slope {slope}"


@pytest.mark.parametrize("static", [True, False], ids=["static_h", "dynamic_h"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_each_stage_on_its_own_input(shape: Shape, static: bool) -> None:
    """Codes of h as in the reference but for a few, the second GEMM exact given these codes, y bit
    for bit given its rows."""
    layer = layer_of(shape, static)
    cfg, weights, count = layer.cfg, layer.weights, 20
    layer.workspace = Workspace(layer.plan_memory(count))
    poison(layer.workspace._memory)
    x, ids, mix = routed(cfg, count)
    y = layer.experts(x, ids, mix)
    want = reference.experts(x, ids, mix, cfg, weights)
    left = scratch_of(layer, count)  # what the call left in the workspace
    memory = dict(zip(left, layer.workspace.carve(list(left.values()))))
    offsets, used = memory["expert_offsets"], int(want.plan.expert_offsets[-1])
    rows = count * cfg.top_k
    gh = memory["row_gh"] if not static else weights.gh[kernel_expert(offsets, rows)]
    hq = nvfp4.Nvfp4Tensor(
        memory["h_data"], memory["h_scale"], gh, nvfp4.SWIZZLE_32_4_4_GROUPED, offsets
    )
    ours = nvfp4.decode(hq, torch.float64)[:used]
    differ = (ours != want.hq[:used]).double().mean().item()
    assert differ < 1e-3, f"{differ:.1e} of the values of h"
    exact, size = exact_rows(ours, weights.l2(), offsets)
    factor = (gh[:used] * weights.g2[kernel_expert(offsets, rows)[:used]]).double()[:, None]
    exact, size = exact * factor, size * factor
    if weights.b2 is not None:
        exact = exact + weights.b2[kernel_expert(offsets, rows)[:used]]
    o = memory["o" if static else "sums_or_o"].view(-1).view(torch.bfloat16)
    o = o[: rows * cfg.hidden].view(rows, cfg.hidden)
    assert_rows_within_bound(o[:used], exact, size, cfg.intermediate)
    assert same_bits(y, reference.combine(o, want.plan, mix, x.dtype, None))
    spoilt = o[:used].clone()
    spoilt[3, 16:32] = 0
    for bad in (spoilt, o[:used] * 0.98):
        with pytest.raises(AssertionError):
            assert_rows_within_bound(bad, exact, size, cfg.intermediate)


def kernel_expert(offsets: Tensor, rows: int) -> Tensor:
    row = torch.arange(rows, dtype=torch.int32)
    return torch.searchsorted(offsets[1:].contiguous(), row, right=True).clamp(
        max=offsets.numel() - 2
    )


def test_tokens_over_two_dimensions_and_views() -> None:
    layer = layer_of(QWEN)
    x, ids, mix = routed(layer.cfg, 6)
    y = layer.experts(x, ids, mix)
    square = layer.experts(x.view(2, 3, -1), ids.view(2, 3, -1), mix.view(2, 3, -1))
    assert same_bits(square.view(6, -1), y)
    wide = torch.cat((x, x), 1)[:, : x.shape[1]]
    assert not wide.is_contiguous()
    assert same_bits(layer.experts(wide, ids.long(), mix), y)


def test_save_and_load_keep_the_choice_of_order(tmp_path: Any) -> None:
    layer = layer_of(QWEN, deterministic=False)
    layer.save_packed(tmp_path / "layer.safetensors")
    again = MoE.load_packed(tmp_path / "layer.safetensors", backend="sim")
    assert again.numerics == layer.numerics and isinstance(again.cfg, MoEConfig)


# ---- the outer scale of x

WAYS = [
    (mode, on_input) for mode in ("per_token", "static", "per_tensor") for on_input in (False, True)
]


@pytest.mark.parametrize("mode, on_input", WAYS)
def test_outer_scale_of_x_is_that_of_the_reference(mode: str, on_input: bool) -> None:
    """Weights that multiply x do so before the scale of all tokens is found."""
    cfg, weights = build(NEMOTRON, static=False)  # no exp: equal bits
    if on_input:
        cfg = dataclasses.replace(cfg, top_k=1, weight_on_input=True)
    weights = dataclasses.replace(weights, gx=torch.tensor(2e-3))
    x, ids, mix = routed(cfg, 6)
    x[0] *= 8  # the largest token is not the largest one after weighting
    mix[0] = 0.01
    options = {"activation_scale": mode}
    want = MoE(cfg, weights, backend="reference", **options).experts(x, ids, mix)
    got = MoE(cfg, weights, backend="sim", **options).experts(x, ids, mix)
    assert same_bits(got, want)


def test_widths_that_tma_cannot_read_are_refused_at_construction() -> None:
    odd = Shape("odd", 64, 48, 2, 1, NEMOTRON.activation)
    cfg, weights = build(odd, static=False)
    with pytest.raises(ValueError, match="multiples of 32, got 64 and 48; backend='torch'"):
        MoE(cfg, weights, backend="sim")
    MoE(cfg, weights, backend="torch")


def test_a_layer_without_values_gets_all_of_them_from_a_state_dict() -> None:
    """Made on "meta", then either way in which torch gives it tensors. No outer scale of h: the
    kernels take factors of one, which no file has."""
    layer = layer_of(QWEN, static=False)
    call = routed(layer.cfg, 3)
    want, state = layer.experts(*call), layer.state_dict()
    assert want.any()
    for assign in (True, False):
        other = layer_of(QWEN, static=False).to("meta")
        if not assign:
            other.to_empty(device="cpu")
            for buffer in other.buffers():
                poison(buffer)
        other.load_state_dict(state, assign=assign)
        assert same_bits(other.experts(*call), want)
