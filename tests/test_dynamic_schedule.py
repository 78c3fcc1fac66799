"""A dynamic schedule, from the operations and from the layer: the counter that clusters draw tiles
from, and the bits of a static schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import gemm_ops, ops, sim
from cute_kernels.activations import SwiGLU
from cute_kernels.gemm_ops import ScatterTarget, WorkItems
from moe import MoE, Workspace, kernels
from moe.experts import Numerics
from moe.local import LocalExperts
from tests.layers import poison, same_bits
from tests.sm100.harness import Problem
from tests.small_kernels import Case, assert_same, plan
from tests.test_gemm_ops import Inputs, poisoned
from tests.test_layer_sim import SHAPES, build, routed

needs_simulator = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)
PROBLEM = Problem((66, 0, 3), n=288, k=64)


def counter_of(value: int, words: int = 1) -> Tensor:
    return torch.full((words,), value, dtype=torch.int32)


# ---- sort_routes


@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("tokens", [0, 45])
def test_plain_sort_sets_the_counter(tokens: int, words: int) -> None:
    counter = counter_of(7, words)
    case = Case(tokens, top_k=3)
    ops.sort_routes(*case.routes(), case.all_experts, counter=counter)
    assert not counter.any()


@needs_simulator
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("ctas", [1, 3])
def test_the_sort_kernel_sets_the_counter(
    ctas: int, words: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(45, experts=5, top_k=3, routing="holes", first=2)
    monkeypatch.setattr(ops, "ONE_CTA_PAIRS", 135 if ctas == 1 else 45)
    around = counter_of(7, words + 2)
    args = (*case.routes(), case.all_experts, case.first, case.experts, 7)
    with sim.Simulator(seed=ctas, schedule="random") as s:
        got = poisoned(ops.sort_routes, *args, counter=around[1:-1])
    assert s.launches
    assert around.tolist() == [7, *[0] * words, 7]
    for g, w in zip(got, plan(case, 7)):
        assert_same(g, w, "routes")


@needs_simulator
def test_a_sort_without_tokens_sets_the_counter_too() -> None:
    """No kernel runs; those that follow draw from 0 all the same."""
    counter, case = counter_of(7), Case(0, top_k=3)
    with sim.Simulator(schedule="lazy"):
        ops.sort_routes(*case.routes(), case.all_experts, counter=counter)
    assert counter.item() == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("words", [1, 2])
@pytest.mark.parametrize("tokens", [1, 45, 3000])
def test_the_sort_kernel_sets_the_counter_on_a_gpu(tokens: int, words: int) -> None:
    """Whenever a CUDA graph runs it, and one CTA of several does it alone."""
    case = Case(tokens, experts=5, top_k=3, routing="holes", first=2)
    ids, weights = (t.cuda() for t in case.routes())
    sizes = (case.all_experts, case.first, case.experts, 7)
    around = counter_of(7, words + 2).cuda()
    ops.sort_routes(ids, weights, *sizes, counter=around[1:-1])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ops.sort_routes(ids, weights, *sizes, counter=around[1:-1])
    for _ in range(2):
        around.fill_(7)
        graph.replay()
        assert around.tolist() == [7, *[0] * words, 7]
        for g, w in zip(got, plan(case, 7)):
            assert_same(g, w, "routes")


# ---- GEMMs


def gemms(data: Inputs, items: Tensor | WorkItems) -> list[Tensor]:
    """Results of the three operations; no row is added to twice."""
    h = ops.grouped_gemm_act_quant(data.a, data.weights, items, SwiGLU(), data.scales(2))
    args = (data.a, data.weights, items, data.alpha)
    y = torch.zeros(len(data.rows), data.problem.n)
    target = ScatterTarget(y, torch.arange(len(data.rows), dtype=torch.int32))
    gemm_ops.grouped_gemm_scatter_add(*args, target, row_scale=data.gx)
    return [gemm_ops.grouped_gemm(*args, row_scale=data.gx), h.data, y]


@needs_simulator
def test_gemms_give_the_bits_of_the_static_schedule() -> None:
    data, counter = Inputs(PROBLEM), counter_of(0)
    with sim.Simulator(schedule="lazy") as s:
        want = gemms(data, data.offsets)
    assert not any("dynamic" in launch.name for launch in s.launches)
    for seed in range(2):
        with sim.Simulator(seed=seed, schedule="random") as s:
            got = gemms(data, WorkItems(data.offsets, counter))
        assert ["_dynamic" in launch.name for launch in s.launches] == [True] * 3
        for g, w in zip(got, want):
            assert_same(g, w, f"seed {seed}")
        assert counter.item() == 0


@pytest.mark.parametrize(
    "counter",
    [torch.zeros(1), counter_of(0)[0], counter_of(0, 3),
     torch.zeros(1, dtype=torch.int32, device="meta")],
    ids=["dtype", "scalar", "three", "device"],
)  # fmt: skip
def test_other_counters_are_refused(counter: Tensor) -> None:
    data = Inputs(PROBLEM)
    with pytest.raises((TypeError, ValueError), match="counter"):
        gemms(data, WorkItems(data.offsets, counter))
    with pytest.raises((TypeError, ValueError), match="counter"):
        gemms(data, WorkItems(data.offsets, counter_of(0, 2)))  # what SM90 has
    with pytest.raises((TypeError, ValueError), match="counter"):
        ops.sort_routes(torch.zeros(2, 1).int(), torch.zeros(2, 1), 4, counter=counter)


# ---- the layer


def layer(static: bool, schedule: str, **options: Any) -> MoE:
    cfg, weights = build(SHAPES[1], static)
    return MoE(cfg, weights, backend="sim", schedule=schedule, **options)


@needs_simulator
@pytest.mark.parametrize("static", [True, False], ids=["static_h", "dynamic_h"])
def test_a_layer_gives_the_bits_of_the_static_schedule(static: bool) -> None:
    """Whatever the memory held before, twice in a row, and with a wider batch in between."""
    fixed, moving = layer(static, "static"), layer(static, "dynamic")
    calls = [routed(fixed.cfg, t) for t in (5, 20)]
    want = [fixed.experts(*call) for call in calls]
    need = moving.plan_memory(20)
    assert need == fixed.plan_memory(20) + 256  # the counter, aligned
    moving.workspace = Workspace(need)
    poison(moving.workspace._memory)
    with sim.Simulator(seed=3, schedule="random") as s:
        got = [moving.experts(*calls[i]) for i in (0, 1, 0)]
    names = [launch.name for launch in s.launches if "gemm" in launch.name]
    assert len(names) == 6 and all("dynamic" in name for name in names)
    for y, i in zip(got, (0, 1, 0)):
        assert same_bits(y, want[i])
    assert same_bits(moving.experts(*calls[0]), want[0])


@needs_simulator
def test_sums_without_an_order_take_a_dynamic_schedule_too() -> None:
    fixed = layer(True, "static")
    moving = layer(True, "dynamic", deterministic=False)
    call = routed(fixed.cfg, 6)
    y = moving.experts(*call).float()
    assert torch.allclose(y, fixed.experts(*call).float(), rtol=2e-2, atol=1e-3)


@needs_simulator
def test_after_a_warm_up_a_dynamic_layer_compiles_nothing() -> None:
    moving = layer(True, "dynamic")
    moving.warmup(70)
    before = compiler.stats()
    with gemm_ops.without_launches():
        for tokens in (1, 33, 70):
            moving.experts(*routed(moving.cfg, tokens))
    assert compiler.stats() == before


@needs_simulator
def test_rows_of_other_ranks_with_a_dynamic_schedule() -> None:
    cfg, weights = build(SHAPES[1], static=True)
    x, ids, mix = routed(cfg, 5)
    found = {}
    for schedule in ("static", "dynamic"):
        local = LocalExperts(cfg, weights, Numerics(schedule=schedule), "sim")
        tokens, there = local.stage(x, ids, mix, lambda g: g), local.plan(ids, mix, ids.numel())
        scratch = [torch.empty(b.shape, dtype=b.dtype) for b in local.buffers(ids.numel())]
        with sim.Simulator(seed=1, schedule="random") as s:
            o = local.rows(tokens, there, scratch)
        dynamic = ["_dynamic" in launch.name for launch in s.launches]
        assert any(dynamic) == (schedule == "dynamic")
        found[schedule] = o[: int(there.expert_offsets[-1])]
    assert same_bits(found["dynamic"], found["static"])


def test_what_is_refused() -> None:
    cfg, weights = build(SHAPES[1], static=True)
    with pytest.raises(ValueError, match="schedule must be 'static' or 'dynamic', got 'random'"):
        MoE(cfg, weights, backend="torch", schedule="random")
    with pytest.raises(ValueError, match="'torch' has one schedule"):
        MoE(cfg, weights, backend="torch", schedule="dynamic")


@needs_simulator
def test_a_packed_layer_keeps_its_schedule(tmp_path: Path) -> None:
    path = tmp_path / "layer.safetensors"
    layer(True, "dynamic").save_packed(path)
    assert MoE.load_packed(path, backend="sim").numerics.schedule == "dynamic"


def test_the_counter_has_its_place_in_the_plan() -> None:
    cfg, weights = build(SHAPES[1], static=True)
    local = kernels.Experts.of(weights)
    for schedule in ("static", "dynamic"):
        buffers = kernels.scratch_buffers(4, cfg, local, Numerics(schedule=schedule))
        shapes = {b.name: b.shape for b in buffers}
        assert shapes.get("work_counter") == ((1,) if schedule == "dynamic" else None)
