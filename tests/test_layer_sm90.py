"""The backend "sm90" on CPU tensors: its operators run in plain PyTorch with sums in fp64, so that
packing, order of operations, scratch and state are proved bit for bit. The kernels themselves:
tests/sm90."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cute_kernels import nvfp4, ops, sm90_ops
from moe import (
    ExpertWeights,
    MoE,
    MoEConfig,
    SwiGLU,
    Workspace,
    kernels_sm90,
    make_plan,
    reference,
)
from moe import layer as layer_module
from moe.experts import Numerics
from moe.workspace import allocate
from tests import test_reference as ref
from tests.layers import (
    E,
    H,
    K,
    build,
    full_layer,
    poison_new_tensors,
    routed,
    routing,
    same_bits,
    slice_layer,
    tokens,
)
from tests.test_reference import CASES, Case


@pytest.fixture(autouse=True)
def any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a layer be built for Hopper where there is none."""
    monkeypatch.setattr(layer_module, "choose_backend", lambda name, device: name)


def sm90(case: Case = Case(), **options: Any) -> MoE:  # noqa: B008  a frozen value
    return build(case, backend="sm90", **options)


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_reference_bit_for_bit(case: Case) -> None:
    b = ref.batch(case)
    y = sm90(case).experts(b.x, b.ids, b.weights)
    want = build(case, backend="reference").experts(b.x, b.ids, b.weights)
    assert same_bits(y, want)
    assert y[4].count_nonzero() == 0 and y.count_nonzero() > 0


@pytest.mark.parametrize("count", [0, 1, 33])
def test_forward_with_a_shared_expert(count: int) -> None:
    x = tokens(count)
    options: dict[str, Any] = {"shared": nn.Identity()}
    assert same_bits(routed(backend="sm90", **options)(x), routed(backend="torch", **options)(x))


@pytest.mark.parametrize("gathers", [False, True])
def test_bf16_rows_gathered_or_staged_are_the_same(monkeypatch, gathers: bool) -> None:
    monkeypatch.setattr(sm90_ops, "gathers_well", lambda config: gathers)
    wide, routes = torch.cat((tokens(9), tokens(9)), dim=1), routing(9)
    case = Case(activations="bf16")
    for x in (wide[:, :H], wide[:, 3 : H + 3]):  # strided, and at an odd address
        want = build(case, backend="reference").experts(x, *routes)
        assert same_bits(sm90(case).experts(x, *routes), want)


def test_ranks_add_up_to_the_whole() -> None:
    case = Case(activation="oai", biases=True, static_h=True)
    x, (ids, weights) = tokens(20, dtype=torch.float32), routing(20)
    whole = sm90(case).experts(x, ids, weights)
    total = torch.zeros_like(whole)
    for start, stop in ((0, 2), (2, 5), (5, E)):
        part = slice_layer(case, start, stop)
        other = MoE(part.cfg, part.weights, backend="sm90")
        y = other.experts(x, ids, weights)
        assert same_bits(y, part.experts(x, ids, weights))
        total += y
    torch.testing.assert_close(total, whole)


@pytest.mark.parametrize("static_h", [False, True])
def test_tokens_that_came_quantised(static_h: bool) -> None:
    case = Case(static_h=static_h)
    x, (ids, mix) = nvfp4.quantize(tokens(9)), routing(9)
    ids[2] = -1
    layer = sm90(case)
    y = layer.experts(x, ids, mix)
    assert same_bits(y, build(case, backend="reference").experts(x, ids, mix))
    plan = make_plan(ids, mix, E)
    packed = layer._packed_experts()
    rows = dataclasses.replace(plan, row_token=plan.row_token[:25])  # 24 slots have an expert
    buffers = kernels_sm90.received_buffers(25, layer.cfg, packed, layer.numerics)
    scratch = allocate(buffers, x.data.device, None)
    given = (x.data, x.scale.view(torch.uint8), x.global_scale)
    o = kernels_sm90.run_received(given, rows, packed, layer.numerics, scratch)
    o = torch.cat((o, o.new_zeros(2, H)))
    assert same_bits(y, reference.combine(o, plan, mix, torch.bfloat16, None))


def test_a_rank_without_experts() -> None:
    _, cfg, weights = ref.build(Case())
    fields = {n: t[:0] for n, t in weights.tensors()}
    layer = MoE(cfg, dataclasses.replace(weights, **fields), backend="sm90")
    x, (ids, mix) = tokens(5), routing(5)
    assert layer.experts(x, ids, mix).count_nonzero() == 0
    assert layer.plan_memory(100) == 0
    assert same_bits(layer._run(x, ids, mix, x), x)
    assert layer.weights.num_experts == 0 and "experts=0/6" in repr(layer)


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
@pytest.mark.parametrize("scale", ["per_token", "per_tensor"])
def test_poisoned_buffers_change_nothing(monkeypatch, activations: str, scale: str) -> None:
    case = Case(activations=activations, mode=scale)
    x, (ids, weights) = tokens(9), routing(9)
    ids[3] = -1
    want = build(case, backend="reference").experts(x, ids, weights)
    layer = sm90(case)
    layer.workspace = Workspace(layer.plan_memory(9))
    poison_new_tensors(monkeypatch)
    layer.workspace._memory.fill_(0x7F)
    for _ in range(2):  # and after another call
        assert same_bits(layer.experts(x, ids, weights), want)


def test_a_wrong_packed_weight_would_be_seen() -> None:
    """Meta-test: the codes of 32 rows of one expert, or its alphas."""
    b = ref.batch(Case())
    want = sm90().experts(b.x, b.ids, b.weights)
    for name in ("l1_packed", "l2_packed", "l1_alpha", "l2_alpha"):
        layer = sm90()
        buffer = getattr(layer, name)
        if "alpha" in name:
            buffer[0] *= 2
        else:
            buffer[0].flatten()[:1024] ^= 0xFF
        assert not same_bits(layer.experts(b.x, b.ids, b.weights), want), name


# ---- state ---------------------------------------------------------------------------------------


def test_state_dict_is_canonical_and_loads_into_any_backend() -> None:
    layer, plain = full_layer(backend="sm90"), full_layer()
    state, want = layer.state_dict(), plain.state_dict()
    assert set(state) == set(want)
    assert all(same_bits(state[n], want[n]) for n in want)
    assert all(layer._buffers[n] is None for n in kernels_sm90.CANONICAL)  # kept once
    x = tokens(6)
    y = plain(x)
    for backend in ("sm90", "torch"):
        other = full_layer(backend=backend)
        for buffer in other.buffers():
            buffer.zero_()
        assert not same_bits(other(x), y)
        outer = nn.ModuleDict({"moe": other})
        report = outer.load_state_dict({f"moe.{n}": t for n, t in state.items()})
        assert not report.missing_keys and not report.unexpected_keys
        assert same_bits(other(x), y)


def test_a_missing_weight_is_named() -> None:
    layer = full_layer(backend="sm90")
    state = {n: t for n, t in layer.state_dict().items() if n != "l2_scale"}
    with pytest.raises(RuntimeError, match=r'Missing key.*"l2_scale"'):
        layer.load_state_dict(state)


@pytest.mark.parametrize("case", [Case(activation="relu2", biases=True), Case(static_h=True)])
def test_weights_and_files_are_canonical(tmp_path: Path, case: Case) -> None:
    layer, (_, _, weights) = sm90(case), ref.build(case)
    again = layer.weights
    assert {n for n, _ in again.tensors()} == {n for n, _ in weights.tensors()}
    for name, tensor in weights.tensors():
        a, b = getattr(again, name).view(torch.uint8), tensor.view(torch.uint8)
        assert torch.equal(a, b), name
    layer.save_packed(tmp_path / "layer.safetensors")
    x, (ids, mix) = tokens(7), routing(7)
    for backend in ("sm90", "torch"):
        loaded = MoE.load_packed(tmp_path / "layer.safetensors", backend=backend)
        assert loaded.backend == backend
        assert same_bits(loaded.experts(x, ids, mix), layer.experts(x, ids, mix))


def test_the_given_weights_are_not_changed() -> None:
    _, cfg, weights = ref.build(Case(biases=True))
    before = {n: t.clone() for n, t in weights.tensors()}
    layer = MoE(cfg, weights, backend="sm90")
    layer.experts(tokens(5), *routing(5))
    for name, tensor in weights.tensors():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))


def test_dtype_device_and_copies() -> None:
    layer, x = full_layer(backend="sm90"), tokens(6)
    y = layer(x)
    before = {n: b.clone() for n, b in layer.named_buffers()}
    layer.half()
    assert all(same_bits(b, before[n]) for n, b in layer.named_buffers())
    other = copy.deepcopy(layer)
    for buffer in other.buffers():
        buffer.zero_()
    assert same_bits(layer(x), y)
    assert {b.device.type for b in other.to("meta").buffers()} == {"meta"}
    with pytest.raises(ValueError, match="x is on cpu, the weights are on meta"):
        other(x)


@pytest.mark.parametrize("assign", [True, False])
def test_a_layer_without_values_gets_all_of_them_from_a_state_dict(assign: bool) -> None:
    case = Case(activation="oai", biases=True)
    options = {"router_weight": torch.ones(E, H)}
    other = sm90(case, **options).to("meta")
    if not assign:
        other.to_empty(device="cpu")
    layer, x = sm90(case, **options | {"router_weight": torch.randn(E, H)}), tokens(6)
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert {b.device.type for b in other.buffers()} == {"cpu"}
    assert same_bits(other(x), layer(x))


def test_a_router_of_inference_mode_follows_a_state_dict() -> None:
    """Its weight counts no writes."""
    with torch.inference_mode():
        layer, other, x = routed(backend="sm90"), routed(backend="sm90"), tokens(6)
        other.router_weight.neg_()
        before = layer(x)
        layer.load_state_dict(other.state_dict())
        assert same_bits(layer(x), other(x)) and not same_bits(layer(x), before)


def test_calibration_reaches_the_packed_layer() -> None:
    layer, want = sm90(), build()
    x, routes = tokens(40), routing(40)
    for each in (layer, want):
        each.calibrate(x, routing=routes)
    assert same_bits(layer.gh, want.gh)
    assert same_bits(layer.experts(x, *routes), want.experts(x, *routes))


def test_blocks_of_scale_zero_keep_their_values() -> None:
    """Packed as zero codes: a checkpoint may hold them."""
    _, cfg, weights = ref.build(Case())
    scale = weights.l1_scale.clone()
    scale.view(torch.uint8)[:, :40] = 0
    weights = dataclasses.replace(weights, l1_scale=scale)
    x, (ids, mix) = tokens(9), routing(9)
    want = MoE(cfg, weights, backend="torch").experts(x, ids, mix)
    layer = MoE(cfg, weights, backend="sm90")
    assert same_bits(layer.experts(x, ids, mix), want)
    assert same_bits(MoE(cfg, layer.weights, backend="torch").experts(x, ids, mix), want)


# ---- configurations and scratch ------------------------------------------------------------------


def counted(experts: int, top_k: int) -> MoEConfig:
    return MoEConfig(H, 80, experts, top_k, activation=SwiGLU())


def test_configurations_by_tokens() -> None:
    cfg, free = counted(256, 6), Numerics()
    names = [kernels_sm90.configuration(t, cfg, free) for t in (1, 16, 128, 1024, 8192)]
    assert names[0] == "decode" and names[-1] == "prefill"
    ends = kernels_sm90.last_of_each_configuration(8192, cfg, free)
    assert ends[-1] == 8192 and ends == sorted(ends)
    for first, second in itertools.pairwise(ends):
        left, right, last = (
            kernels_sm90.configuration(t, cfg, free) for t in (first, first + 1, second)
        )
        assert left != right == last
    pinned = Numerics(batch_invariant=True)  # these sum in the same order
    names = [kernels_sm90.configuration(t, cfg, pinned) for t in range(1, 9000, 37)]
    assert set(names) == {"middle", "trio", "duo", "prefill"}
    assert len(kernels_sm90.last_of_each_configuration(8192, cfg, pinned)) == 4
    assert kernels_sm90.last_of_each_configuration(0, cfg, free) == []


def test_a_share_of_the_experts_gets_the_configuration_of_the_whole() -> None:
    whole, x, (ids, mix) = sm90(), tokens(4), routing(4)
    names: list[str] = []
    part = MoE(whole.cfg, slice_layer(Case(), 0, 2).weights, backend="sm90")
    original = sm90_ops.grouped_gemm
    with pytest.MonkeyPatch.context() as m:

        def record(x: Tensor, weight: Any, offsets: Tensor, out: Tensor, sums: Any, **kw) -> None:
            names.append(sums.config)
            original(x, weight, offsets, out, sums, **kw)

        m.setattr(sm90_ops, "grouped_gemm", record)
        whole.experts(x, ids, mix)
        part.experts(x, ids, mix)
    assert len(names) == 4 and len(set(names)) == 1


@pytest.mark.parametrize("static", [False, True])
def test_static_h_leaves_l1_rounded(monkeypatch, static: bool) -> None:
    """No fp32 h, no scale per row, no kernel between the GEMMs; with a scale per row all three."""
    layer, staged, epilogues = sm90(Case(static_h=static)), [], []
    stage_rows, gemm = sm90_ops.stage_rows, sm90_ops.grouped_gemm

    def stage(*args: Any, **options: Any) -> None:
        staged.append(args)
        stage_rows(*args, **options)

    def multiply(*args: Any, **options: Any) -> None:
        epilogues.append(options["epilogue"])
        gemm(*args, **options)

    monkeypatch.setattr(sm90_ops, "stage_rows", stage)
    monkeypatch.setattr(sm90_ops, "grouped_gemm", multiply)
    layer.experts(tokens(9), *routing(9))
    l1, l2 = epilogues
    assert len(staged) == (1 if static else 2)
    assert (l1.out_scale is not None) == (l2.expert_scale is not None) == static
    assert (l2.row_scale is None) == static
    packed = layer._packed_experts()
    buffers = kernels_sm90.scratch_buffers(9 * K, "middle", layer.cfg, packed, layer.numerics)
    rows = {b.name: b.shape[0] for b in buffers}
    assert rows["h"] == rows["gh"] == (0 if static else 9 * K)


@pytest.mark.parametrize("static_h", [False, True])
@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_plan_memory_is_the_largest_call(monkeypatch, activations: str, static_h: bool) -> None:
    layer = sm90(Case(activations=activations, static_h=static_h))
    sizes: list[int] = []
    original = kernels_sm90.allocate

    def record(*args: Any) -> list[Tensor]:
        views = original(*args)
        sizes.append(sum(-(-v.nbytes // 256) * 256 for v in views))
        return views

    monkeypatch.setattr(kernels_sm90, "allocate", record)
    for count in range(1, 24):
        layer.experts(tokens(count), *routing(count))
        assert layer.plan_memory(count) == max(sizes), count
    assert layer.plan_memory(0) == 0
    workspace = Workspace(layer.plan_memory(23))
    layer.workspace = workspace
    x, routes = tokens(23), routing(23)
    assert same_bits(layer.experts(x, *routes), build(layer_case(layer)).experts(x, *routes))
    with pytest.raises(ValueError, match=r"too small.*plan_memory"):
        layer.experts(tokens(400), *routing(400))


def layer_case(layer: MoE) -> Case:
    return Case(activations=layer.numerics.activations, static_h=layer.gh is not None)


def test_layers_share_a_workspace() -> None:
    other = Case(activation="relu2", activations="bf16")
    a, b = sm90(), sm90(other)
    a.workspace = b.workspace = Workspace(max(a.plan_memory(40), b.plan_memory(40)))
    x, routes = tokens(40), routing(40)
    first = a.experts(x, *routes)
    kept = first.clone()
    second = b.experts(x, *routes)
    assert same_bits(first, kept)
    assert same_bits(first, build().experts(x, *routes))
    assert same_bits(second, build(other).experts(x, *routes))


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_rows_staged_by_token_have_the_same_bits(monkeypatch, activations: str) -> None:
    """Many rows are staged by token, few by row: the same call, with the border moved."""
    layer, x, routes = sm90(Case(activations=activations)), tokens(40).float(), routing(40)
    used: list[set[str]] = []
    original = sm90_ops.stage_rows

    def stage_rows(*args: Any, **options: Any) -> None:
        used.append({n for n in ("row_token", "token_rows") if options.get(n) is not None})
        original(*args, **options)

    monkeypatch.setattr(sm90_ops, "stage_rows", stage_rows)
    by_row = layer.experts(x, *routes)
    monkeypatch.setattr(ops, "ONE_CTA_PAIRS", 16)
    by_token = layer.experts(x, *routes)
    assert [u for u in used if u] == [{"row_token"}, {"token_rows"}]
    assert same_bits(by_row, by_token)


def test_warmup_visits_every_configuration(monkeypatch) -> None:
    layer = sm90()
    seen: list[tuple[int, torch.dtype]] = []
    original = layer._run
    monkeypatch.setattr(
        layer, "_run", lambda x, *rest: seen.append((x.shape[0], x.dtype)) or original(x, *rest)
    )
    layer.warmup(600)
    names = {kernels_sm90.configuration(t, layer.cfg, layer.numerics) for t, _ in seen}
    every = {kernels_sm90.configuration(t, layer.cfg, layer.numerics) for t in range(1, 601)}
    assert names == every and max(t for t, _ in seen) == 600
    assert {d for _, d in seen} == {torch.bfloat16, torch.float16, torch.float32}
    assert min(t * K for t, _ in seen) <= 1024 < max(t * K for t, _ in seen)
    layer.workspace = Workspace(layer.plan_memory(5))
    with pytest.raises(ValueError, match="too small for 600 tokens"):
        layer.warmup(600)


# ---- options -------------------------------------------------------------------------------------


def test_batch_invariance_is_part_of_the_file(tmp_path: Path) -> None:
    layer = sm90(batch_invariant=True)
    layer.save_packed(tmp_path / "layer.safetensors")
    assert MoE.load_packed(tmp_path / "layer.safetensors", backend="sm90").numerics.batch_invariant
    assert build(batch_invariant=True).numerics.batch_invariant  # on a CPU torch keeps the promise


def test_torch_on_a_gpu_promises_no_batch_invariance() -> None:
    _, cfg, weights = ref.build(Case())
    with pytest.raises(ValueError, match="batch_invariant=True rules out"):
        MoE(cfg, weights.to("meta"), backend="torch", batch_invariant=True)


def test_a_compiled_layer_has_no_graph_break_and_the_same_bits() -> None:
    layer = routed(backend="sm90", shared=nn.Identity())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for count in (2, 7, 33):
            x = tokens(count)
            assert same_bits(compiled(x), layer(x)), count


def test_weights_are_packed_one_expert_at_a_time(monkeypatch) -> None:
    """The work of packing never holds more than one expert."""
    shapes: list[tuple[int, ...]] = []
    original = sm90_ops.pack_expert

    def record(data: Tensor, scale: Tensor, gated: bool) -> Tensor:
        shapes.append(tuple(data.shape))
        return original(data, scale, gated)

    monkeypatch.setattr(sm90_ops, "pack_expert", record)
    weights: ExpertWeights = sm90().weights
    assert shapes == [weights.l1_data.shape[1:]] * E + [weights.l2_data.shape[1:]] * E


def test_auto_follows_the_tensors_to_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU stands for the GPU: only the choice differs."""
    case, choice = Case(), ["torch"]
    monkeypatch.setattr(
        layer_module, "choose_backend", lambda name, _: choice[0] if name == "auto" else name
    )
    layer = build(case, backend="auto")
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    x, (ids, weights) = tokens(7), routing(7)
    choice[0] = "sm90"
    want = build(case, backend="sm90").experts(x, ids, weights)
    named = build(case, backend="torch")
    assert layer.to("cpu").backend == "sm90" and named.to("cpu").backend == "torch"
    assert same_bits(layer.experts(x, ids, weights), want)
    choice[0] = "torch"
    assert layer.half().backend == "torch"
    after = layer.state_dict()
    assert after.keys() == before.keys()
    assert all(same_bits(after[name], before[name]) for name in before)


def test_a_move_to_where_the_layer_cannot_run_moves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_module, "choose_backend", lambda name, device: "torch")
    layer = build(Case(), backend="auto", batch_invariant=True)
    with pytest.raises(ValueError, match="batch_invariant=True"):
        layer.to("meta")
    assert layer.g13.device.type == "cpu"
