"""The layer: the torch backend against the reference bit for bit, everything a module must do, and
what it refuses."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import nvfp4
from cute_kernels.activations import Activation
from moe import ExpertWeights, MoE, MoEConfig, Workspace, backends, experts, make_plan, reference
from moe.backends import BACKENDS, backend_status, choose_backend
from moe.router import route, router_logits
from moe.workspace import Buffer, total_bytes
from tests import test_reference as ref
from tests.test_reference import CASES, Case

E, K, H, I = ref.E, ref.K, ref.H, ref.I  # noqa: E741


def bits(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


def build(case: Case = Case(), **options) -> MoE:  # noqa: B008  a frozen value
    _, cfg, weights = ref.build(case)
    fields: dict[str, Any] = {
        "activations": case.activations,
        "activation_scale": case.mode,
        "backend": "torch",
    }
    return MoE(cfg, weights, **(fields | options))


def routed(**options) -> MoE:
    gen = torch.Generator().manual_seed(7)
    return build(router_weight=torch.randn(E, H, generator=gen), **options)


def tokens(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 2) -> Tensor:
    return torch.randn(*shape, H, generator=torch.Generator().manual_seed(seed)).to(dtype)


def routing(count: int, top_k: int = K, seed: int = 3) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed)
    ids = torch.rand(count, E, generator=gen).argsort(dim=-1)[:, :top_k].int()
    return ids, torch.rand(count, top_k, generator=gen)


# ---- the two backends ----------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_torch_equals_the_reference_bit_for_bit(case: Case) -> None:
    b = ref.batch(case)
    y = build(case).experts(b.x, b.ids, b.weights)
    want = build(case, backend="reference").experts(b.x, b.ids, b.weights)
    assert same_bits(y, want)
    assert y[4].count_nonzero() == 0 and y.count_nonzero() > 0


@pytest.mark.parametrize("count", [0, 1, 2, 130, 400])
@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_torch_equals_the_reference_at_other_sizes(count: int, activations: str) -> None:
    layer = routed(activations=activations)
    other = routed(activations=activations, backend="reference")
    x = tokens(count)
    assert same_bits(layer(x), other(x))


# ---- shapes and views ----------------------------------------------------------------------------


def test_batches_of_sequences_keep_their_shape() -> None:
    layer, x = routed(), tokens(12)
    y = layer(x)
    for shape in ((3, 4, H), (2, 2, 3, H), (12, 1, H)):
        assert same_bits(layer(x.reshape(shape)), y.reshape(shape))
    for shape in ((0, H), (0, 5, H), (3, 0, H)):
        assert layer(tokens(*shape[:-1])).shape == shape
    ids, weights = routing(12)
    want = layer.experts(x, ids, weights).reshape(3, 4, H)
    x3 = x.reshape(3, 4, H)
    assert same_bits(layer.experts(x3, ids.reshape(3, 4, K), weights.reshape(3, 4, K)), want)
    assert same_bits(layer.experts(x3, ids, weights), want)


def test_strided_input_equals_its_copy() -> None:
    layer = routed()
    wide = torch.randn(20, 2 * H, generator=torch.Generator().manual_seed(0)).bfloat16()
    views = [
        wide[:, :H],
        wide[:, 1 : 2 * H : 2],
        wide[::3, H:],
        wide[:H, :].t()[:H, :].t()[:, :H],
        wide[:1, :H].expand(5, H),
        wide.reshape(10, 2, 2 * H)[:, :, H:].transpose(0, 1),
    ]
    for x in views:
        assert not x.is_contiguous()
        assert same_bits(layer(x), layer(x.contiguous()))


def test_strided_routing_of_both_integer_types() -> None:
    layer, x = build(), tokens(8)
    wide_ids, wide_weights = routing(8, E)
    for ids, weights in (
        (wide_ids[:, :K], wide_weights[:, 1 : K + 1]),
        (wide_ids[:, ::2][:, :K], wide_weights.t().contiguous().t()[:, :K]),
        (wide_ids[:1, :K].expand(8, K), wide_weights[:1, :K].expand(8, K)),
    ):
        want = layer.experts(x, ids.contiguous(), weights.contiguous())
        assert same_bits(layer.experts(x, ids, weights), want)
        assert same_bits(layer.experts(x, ids.long(), weights), want)


def test_padding_slots_and_tokens_without_a_slot() -> None:
    layer, x = build(), tokens(4, dtype=torch.float32)
    ids = torch.tensor([[0, -1, 2], [-1, -1, -1], [E, 1, -5], [3, 4, 5]])
    weights = torch.rand(4, K) + 0.5
    y = layer.experts(x, ids, weights)
    assert bits(y[1]) == bytes(4 * H)  # +0.0, not -0.0
    for bad in (float("nan"), float("inf")):  # nobody reads the weight of a padding slot
        spoilt = torch.where((ids >= 0) & (ids < E), weights, bad)
        assert same_bits(layer.experts(x, ids, spoilt), y)
    x[1] = float("nan")  # nor the values of a padding token
    assert same_bits(layer.experts(x, ids, weights), y)


# ---- batch invariance ----------------------------------------------------------------------------


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("activation", ["swiglu", "oai", "geglu", "relu2"])
def test_a_token_has_the_same_bits_in_every_batch(scoring: str, activation: str) -> None:
    case = Case(activation=activation)
    _, cfg, weights = ref.build(case)
    cfg = dataclasses.replace(cfg, scoring=scoring, routed_scaling_factor=1.5)
    gen = torch.Generator().manual_seed(7)
    layer = MoE(cfg, weights, router_weight=torch.randn(E, H, generator=gen), backend="torch")
    x = tokens(64)
    whole = layer(x)
    for size in (1, 2, 3, 7, 16, 33, 63):
        for start in (0, 64 - size):
            assert same_bits(layer(x[start : start + size]), whole[start : start + size])
    order = torch.randperm(64, generator=gen)
    assert same_bits(layer(x[order]), whole[order])
    crowd = torch.cat([x[5:6], tokens(40, seed=9) * 50])  # other tokens, other expert counts
    assert same_bits(layer(crowd)[:1], whole[5:6])


def test_experts_are_batch_invariant_too() -> None:
    layer, x = build(), tokens(50)
    ids, weights = routing(50)
    whole = layer.experts(x, ids, weights)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    assert same_bits(layer.experts(x[order], ids[order], weights[order]), whole[order])
    for t in range(0, 50, 7):
        one = slice(t, t + 1)
        assert same_bits(layer.experts(x[one], ids[one], weights[one]), whole[one])


def test_per_tensor_scale_is_not_batch_invariant() -> None:
    """The mode exists and does what it says: the default would pass for it otherwise."""
    layer, x = routed(activation_scale="per_tensor"), tokens(8)
    assert not same_bits(layer(torch.cat([x, 100 * x]))[:8], layer(x))


# ---- shared expert and factor --------------------------------------------------------------------


def test_shared_expert_is_added_last_and_the_factor_stays_out_of_it() -> None:
    cfg = dataclasses.replace(routed().cfg, routed_scaling_factor=2.5)
    shared = nn.Linear(H, H, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    router = routed().router_weight
    layer = MoE(cfg, routed().weights, router_weight=router, shared=shared, backend="torch")
    x = tokens(3, 4)
    flat = x.flatten(0, 1)
    ids, weights = route(router_logits(flat, router), cfg)
    want = reference.experts(flat, ids, weights * 2.5, cfg, layer.weights, shared=shared(flat)).y
    assert same_bits(layer(x), want.reshape(x.shape))
    given = layer.experts(flat, ids, weights)
    assert same_bits(given, reference.experts(flat, ids, weights, cfg, layer.weights).y)


def test_shared_expert_sees_flat_tokens_and_must_keep_their_shape() -> None:
    seen = []

    def shared(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x.float()

    layer = routed(shared=shared)
    layer(tokens(2, 3))
    assert seen == [(6, H)]
    with pytest.raises(ValueError, match=r"shared must return \(6, 96\)"):
        routed(shared=lambda x: x[:, :4])(tokens(2, 3))


def test_hash_routing_through_the_layer() -> None:
    table = torch.stack([torch.randperm(E)[:K] for _ in range(11)]).int()
    layer, x = routed(tid2eid=table), tokens(2, 3)
    token_ids = torch.tensor([[10, 0, 3], [3, 3, 7]])
    flat = x.flatten(0, 1)
    logits = router_logits(flat, layer.router_weight)
    ids, weights = route(logits, layer.cfg, tid2eid=table, input_ids=token_ids)
    assert torch.equal(ids, table[token_ids.flatten()])
    assert same_bits(layer(x, token_ids), layer.experts(flat, ids, weights).reshape(x.shape))
    with pytest.raises(ValueError, match="input_ids"):
        layer(x)


def test_router_biases_are_two_different_things() -> None:
    gen = torch.Generator().manual_seed(1)
    linear, selection = torch.randn(2, E, generator=gen) * 3
    layer, x = routed(router_bias=linear, selection_bias=selection), tokens(9)
    logits = router_logits(x, layer.router_weight) + linear
    ids, weights = route(logits, layer.cfg, selection_bias=selection)
    assert same_bits(layer(x), layer.experts(x, ids, weights))
    assert not torch.equal(ids, route(logits, layer.cfg)[0])


# ---- a module like any other ---------------------------------------------------------------------


def full_layer(**options) -> MoE:
    """Every optional buffer set."""
    case = Case(activation="oai", biases=True, static_h=True, mode="static")
    _, cfg, weights = ref.build(case)
    gen = torch.Generator().manual_seed(7)
    fields: dict[str, Any] = {
        "router_weight": torch.randn(E, H, generator=gen),
        "router_bias": torch.randn(E, generator=gen),
        "selection_bias": torch.randn(E, generator=gen),
        "activation_scale": "static",
        "backend": "torch",
    }
    return MoE(cfg, weights, **(fields | options))


def test_state_dict_holds_every_tensor_and_loads_into_another_layer() -> None:
    layer, x = full_layer(), tokens(6)
    state = layer.state_dict()
    weights = {n for n, _ in layer.weights.tensors()}
    assert set(state) == weights | {"router_weight", "router_bias", "selection_bias"}
    assert len(weights) == 10
    zero = copy.deepcopy(layer)
    for buffer in zero.buffers():
        buffer.zero_()
    assert not same_bits(zero(x), layer(x))
    assert zero.load_state_dict(state).missing_keys == []
    assert same_bits(zero(x), layer(x))
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for buffer in zero.buffers():
        buffer.zero_()
    zero.load_state_dict(torch.load(file, weights_only=True))
    assert same_bits(zero(x), layer(x))


def test_a_deep_copy_shares_nothing() -> None:
    layer, x = full_layer(), tokens(6)
    y = layer(x)
    other = copy.deepcopy(layer)
    for buffer in other.buffers():
        buffer.zero_()
    assert same_bits(layer(x), y)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
        lambda m: m.float().eval().requires_grad_(False),
    ],
)
def test_a_change_of_dtype_leaves_quantised_weights_alone(change) -> None:
    shared = nn.Linear(H, H, bias=False).requires_grad_(False)
    layer, x = full_layer(shared=shared), tokens(6)
    before = {n: b.clone() for n, b in layer.named_buffers()}
    ids, weights = routing(6)
    y = layer.experts(x, ids, weights)
    changed = change(layer)
    assert changed is layer
    for name, buffer in layer.named_buffers():
        assert same_bits(buffer, before[name]), name
    assert same_bits(layer.experts(x, ids, weights), y)


def test_the_shared_expert_follows_a_change_of_dtype() -> None:
    shared = nn.Sequential(nn.Linear(H, H), nn.Linear(H, H)).requires_grad_(False)
    layer = full_layer(shared=shared).half()
    assert {p.dtype for p in layer.parameters()} == {torch.float16}
    assert layer(tokens(2, dtype=torch.float16)).dtype == torch.float16


def test_a_move_takes_every_buffer() -> None:
    moved = full_layer().to("meta")
    assert {b.device.type for b in moved.buffers()} == {"meta"}
    assert moved.weights.device.type == "meta"
    weights = full_layer().weights.to("meta")
    assert {t.device.type for _, t in weights.tensors()} == {"meta"}


def test_weights_are_views_of_the_buffers() -> None:
    layer = full_layer()
    for name, tensor in layer.weights.tensors():
        assert tensor.data_ptr() == getattr(layer, name).data_ptr()
    assert not list(layer.parameters())
    assert "backend=torch" in repr(layer) and "experts=6/6" in repr(layer)


@dataclasses.dataclass(frozen=True)
class ScaledGELU(Activation):
    """A user's own: erf-GELU times a constant."""

    gated = False
    factor: float = 1.0

    def __call__(self, m: Any, gate: Any, up: Any = None) -> Any:
        half = gate * (0.5 * self.factor)
        return m.fma(half, m.erf(gate * 0.70710678), half)


def test_a_users_activation_runs_and_is_what_it_says() -> None:
    _, cfg, weights = ref.build(Case(activation="relu2"))
    layer = MoE(dataclasses.replace(cfg, activation=ScaledGELU(2.0)), weights, backend="reference")
    x, (ids, w) = tokens(5), routing(5)
    stages = reference.experts(x, ids, w, layer.cfg, weights)
    want = 2.0 * torch.nn.functional.gelu(stages.gate.double())
    torch.testing.assert_close(stages.h.double(), want, rtol=1e-6, atol=1e-6)
    assert same_bits(layer.experts(x, ids, w), stages.y)


def test_packed_layer_comes_back_bit_for_bit(tmp_path: Path) -> None:
    layer, x = full_layer(), tokens(6)
    layer.save_packed(tmp_path / "layer.safetensors")
    back = MoE.load_packed(tmp_path / "layer.safetensors", backend="torch")
    assert back.cfg == layer.cfg and back.numerics == layer.numerics
    assert back.state_dict().keys() == layer.state_dict().keys()
    for name, buffer in layer.named_buffers():
        assert same_bits(buffer, back.get_buffer(name)), name
    assert same_bits(back(x), layer(x))


def test_packed_layer_keeps_first_expert_and_leaves_the_shared_expert_out(tmp_path: Path) -> None:
    layer, cfg, _ = ref.build(Case())
    local = dataclasses.replace(
        layer,
        **{n: tuple(a[2:5] for a in getattr(layer, n)) for n in ("gate", "up", "down")},
    )
    shared = nn.Linear(H, H)
    weights = ref.oracle.to_library(local, first_expert=2)
    part = MoE(cfg, weights, activations="bf16", shared=shared, backend="torch")
    part.save_packed(tmp_path / "part")
    back = MoE.load_packed(tmp_path / "part", shared=lambda x: x)
    assert back.first_expert == 2 and back.numerics.activations == "bf16"
    assert not any(n.startswith("shared") for n in back.state_dict())
    x, (ids, w) = tokens(7), routing(7)
    assert same_bits(back.experts(x, ids, w), part.experts(x, ids, w))


def test_packed_layer_with_a_users_activation_asks_for_it(tmp_path: Path) -> None:
    _, cfg, weights = ref.build(Case(activation="relu2"))
    layer = MoE(dataclasses.replace(cfg, activation=ScaledGELU(3.0)), weights, backend="torch")
    layer.save_packed(tmp_path / "own")
    with pytest.raises(ValueError, match=r"ScaledGELU.*pass\s+activation"):
        MoE.load_packed(tmp_path / "own")
    with pytest.raises(ValueError, match="saved with ScaledGELU, got SwiGLU"):
        MoE.load_packed(tmp_path / "own", activation=ref.SwiGLU())
    back = MoE.load_packed(tmp_path / "own", activation=ScaledGELU(3.0))
    x, (ids, w) = tokens(7), routing(7)
    assert same_bits(back.experts(x, ids, w), layer.experts(x, ids, w))


def test_another_file_is_not_taken_for_a_packed_layer(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(2)}, str(tmp_path / "other"))
    with pytest.raises(ValueError, match="not a packed layer"):
        MoE.load_packed(tmp_path / "other")


# ---- calibration ---------------------------------------------------------------------------------


def test_calibrate_sets_the_largest_values_that_each_expert_saw() -> None:
    layer, x = build(activation_scale="static"), tokens(20) * 3
    ids, weights = routing(20)
    ids[ids == 4] = -1  # nobody reaches expert 4
    scales = layer.calibrate(x, routing=(ids, weights))
    stages = reference.experts(x, ids, weights, layer.cfg, build().weights)
    offsets = stages.plan.expert_offsets.tolist()
    spans = itertools.pairwise(offsets)
    amax = [stages.h[a:b].abs().max() if b > a else None for a, b in spans]
    most = max(a for a in amax if a is not None)
    want = torch.stack([most if a is None else a for a in amax]) / 2688
    torch.testing.assert_close(layer.gh, want, rtol=2e-7, atol=0)
    torch.testing.assert_close(layer.gx, x.float().abs().max() / 2688, rtol=2e-7, atol=0)
    assert scales["gh"] is layer.gh and scales["gx"] is layer.gx
    assert "gh" in layer.state_dict() and layer.weights.gx is layer.gx
    y = layer.experts(x, ids, weights)
    assert same_bits(
        y, reference.experts(x, ids, weights, layer.cfg, layer.weights, "nvfp4", "static").y
    )


def test_calibrate_scales_x_by_the_weight_where_the_layer_does() -> None:
    case = Case(weight_on_input=True)
    layer, b = build(case), ref.batch(case)
    layer.calibrate(b.x, routing=(b.ids, b.weights))
    want = (b.x.float() * b.weights).abs().max() / 2688
    torch.testing.assert_close(layer.gx, want, rtol=2e-7, atol=0)


def test_calibrate_through_the_router_and_without_a_reached_expert() -> None:
    layer = routed()
    layer.calibrate(tokens(30))
    assert layer.gh.shape == (E,) and (layer.gh > 0).all()
    with pytest.raises(ValueError, match="no token"):
        build().calibrate(tokens(2), routing=(torch.full((2, K), -1), torch.ones(2, K)))
    with pytest.raises(ValueError, match="routing"):
        build().calibrate(tokens(2))
    with pytest.raises(ValueError, match="topk_ids must be"):
        build().calibrate(tokens(3), routing=routing(2))


# ---- scratch -------------------------------------------------------------------------------------


@pytest.fixture
def carved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Scratch tensors of the calls so far, every one filled with NaN first."""
    seen: list[Tensor] = []
    original = experts.allocate

    def record(*args: Any) -> list[Tensor]:
        made = original(*args)
        for tensor in made:
            tensor.fill_(float("nan"))
        seen.extend(made)
        return made

    monkeypatch.setattr(experts, "allocate", record)
    return seen


def aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


@pytest.mark.parametrize("count", [0, 1, 7, 64])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_plan_memory_is_what_a_call_allocates(carved, count: int, activation: str) -> None:
    layer = build(Case(activation=activation))
    layer.experts(tokens(count), *routing(count))
    assert sum(aligned(t.nbytes) for t in carved) == layer.plan_memory(count)
    assert (layer.plan_memory(count) > 0) == (count > 0)


def test_poisoned_scratch_changes_nothing(carved) -> None:
    x, (ids, weights) = tokens(9), routing(9)
    ids[3] = -1
    want = build(backend="reference").experts(x, ids, weights)
    assert same_bits(build().experts(x, ids, weights), want)
    workspace = Workspace(build().plan_memory(9))
    assert same_bits(build(workspace=workspace).experts(x, ids, weights), want)
    assert len(carved) == 8


def test_layers_share_a_workspace(carved) -> None:
    a, b = build(), build(Case(activation="relu2"))
    need = max(a.plan_memory(40), b.plan_memory(40))
    workspace = Workspace(need)
    a.workspace = b.workspace = workspace
    x, (ids, weights) = tokens(40), routing(40)
    first = a.experts(x, ids, weights)
    kept = first.clone()
    second = b.experts(x, ids, weights)
    assert same_bits(first, kept)  # the result is not scratch
    assert same_bits(first, build().experts(x, ids, weights))
    assert same_bits(second, build(Case(activation="relu2")).experts(x, ids, weights))
    start = workspace._memory.data_ptr()
    for group in (carved[:4], carved[4:8]):
        spans = sorted((t.data_ptr() - start, t.data_ptr() - start + t.nbytes) for t in group)
        assert spans[0][0] == 0 and spans[-1][1] <= need
        assert all(s % 256 == 0 for s, _ in spans)
        assert all(stop <= begin for (_, stop), (begin, _) in itertools.pairwise(spans))


def test_more_tokens_than_planned_is_an_error_and_not_an_overrun() -> None:
    layer = build()
    layer.workspace = Workspace(layer.plan_memory(8))
    layer.warmup(8)
    layer.experts(tokens(8), *routing(8))
    layer.experts(tokens(3), *routing(3))
    with pytest.raises(ValueError, match=r"too small.*plan_memory"):
        layer.experts(tokens(9), *routing(9))
    with pytest.raises(ValueError, match="9 tokens"):
        layer.warmup(9)
    build().warmup(10**6)  # no workspace: nothing to be too small
    with pytest.raises(ValueError, match="workspace is on meta"):
        build(workspace=Workspace(10**6, "meta")).experts(tokens(2), *routing(2))
    with pytest.raises(ValueError, match="negative"):
        Workspace(-1)


def test_workspace_views_have_the_shapes_asked_for() -> None:
    buffers = [
        Buffer("a", (3, 5), torch.float32),
        Buffer("b", (0, 7), torch.bfloat16),
        Buffer("c", (129,), torch.uint8),
    ]
    assert total_bytes(buffers) == 256 + 0 + 256
    views = Workspace(512).carve(buffers)
    assert [(tuple(v.shape), v.dtype) for v in views] == [(b.shape, b.dtype) for b in buffers]
    with pytest.raises(ValueError, match="needs 512"):
        Workspace(511).carve(buffers)


def test_the_reference_needs_no_scratch() -> None:
    assert build(backend="reference").plan_memory(1000) == 0


# ---- autograd ------------------------------------------------------------------------------------


def test_autograd_is_refused_where_a_gradient_would_stop() -> None:
    layer, x = routed(), tokens(3, dtype=torch.float32).requires_grad_()
    ids, weights = routing(3)
    for call in (lambda: layer(x), lambda: layer.experts(x, ids, weights)):
        with pytest.raises(RuntimeError, match="no backward"):
            call()
        with torch.no_grad():
            y = call()
        assert not y.requires_grad
        with torch.inference_mode():
            assert same_bits(call(), y)
    assert same_bits(layer(x.detach()), layer(x.detach().clone()))


# ---- torch.compile and the registered op ---------------------------------------------------------


def test_compiled_layer_has_no_graph_break_and_the_same_bits() -> None:
    layer = routed(shared=nn.Identity())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for count in (1, 7, 128, 0, 33):
            x = tokens(count)
            assert same_bits(compiled(x), layer(x)), count


def test_h54_compiled_experts_take_a_slice_of_recorded_routing() -> None:
    """H54: ids with row stride layers * k; no assertion on strides."""
    layer = build()
    compiled = torch.compile(layer.experts, fullgraph=True, backend="aot_eager")
    record = torch.randint(-1, E, (1, 64, 46, K), dtype=torch.int32)
    ids, weights, x = record[0, :, 3, :], torch.rand(64, K), tokens(64)
    assert ids.stride() == (46 * K, 1)
    with torch.no_grad():
        assert same_bits(compiled(x, ids, weights), layer.experts(x, ids, weights))


OP = torch.ops.nvfp4_megamoe.grouped_matmul_torch.default


def op_arguments(count: int, top_k: int = K) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights = build().weights
    plan = make_plan(*routing(count, top_k), E)
    rows = torch.randn(count * top_k, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(count * top_k, 2 * I)
    return rows, weights.l1_data, weights.l1_scale.view(torch.uint8), plan.expert_offsets, out


@pytest.mark.parametrize("count", [0, 1, 7])
def test_opcheck_passes_for_the_registered_op(count: int) -> None:
    torch.library.opcheck(OP, op_arguments(count))


# ---- the CUDA branch, on CPU tensors through torch's grouped_mm ----------------------------------


def exact_product(args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """fp64 sums and sums of magnitudes, (R, N)."""
    rows, data, scale, offsets, out = args
    one = torch.ones(())
    w = nvfp4.decode(nvfp4.Nvfp4Tensor(data, scale, one, nvfp4.SWIZZLE_32_4_4), torch.float64)
    exact, size = torch.zeros(out.shape, dtype=torch.float64), torch.zeros_like(out).double()
    for e in range(data.shape[0]):
        r = slice(int(offsets[e]), int(offsets[e + 1]))
        exact[r] = rows[r].double() @ w[e].t()
        size[r] = rows[r].double().abs() @ w[e].abs().t()
    return exact, size


needs_grouped_mm = pytest.mark.skipif(
    experts.find_grouped_mm() is None, reason="this torch has no grouped GEMM"
)


def assert_within_device_bound(args: tuple[Tensor, ...], out: Tensor) -> None:
    """One bf16 rounding of the accumulator, whose fp32 sum obeys section 6."""
    exact, size = exact_product(args)
    used = int(args[3][-1])
    depth = args[0].shape[1]
    bound = 4 * (depth / 64 + 1) * 2.0**-24 * size + exact.abs() * 2.0**-8 * (1 + 2.0**-8)
    assert ((out.double() - exact).abs() <= bound)[:used].all()


@needs_grouped_mm
@pytest.mark.parametrize("chunk", [1, 1 << 30])
@pytest.mark.parametrize("count", [1, 40])
def test_device_branch_is_within_its_documented_bound(monkeypatch, chunk: int, count: int) -> None:
    """``chunk`` 1: 128 rows of every expert at a time, the last piece shorter."""
    monkeypatch.setattr(experts, "_CUDA_CHUNK_BYTES", chunk)
    args = op_arguments(count)
    out = args[-1].fill_(float("nan"))
    experts._grouped_matmul_device(*args)
    assert_within_device_bound(args, out)
    host = torch.empty_like(out)
    experts._grouped_matmul_host(*args[:-1], host)
    assert same_bits(host, exact_product(args)[0].float())


@needs_grouped_mm
def test_the_device_bound_sees_a_lost_row_and_a_wrong_scale() -> None:
    args = op_arguments(40)
    experts._grouped_matmul_device(*args)
    for spoil in (lambda o: o[17].zero_(), lambda o: o[:, :16].zero_(), lambda o: o.mul_(0.98)):
        out = args[-1].clone()
        spoil(out)
        with pytest.raises(AssertionError):
            assert_within_device_bound(args, out)


@needs_grouped_mm
@pytest.mark.parametrize("case", [Case(), Case(activations="bf16"), Case(biases=True)], ids=str)
def test_layer_through_the_device_branch(monkeypatch, case: Case) -> None:
    """Both products are within the bound on their own input, and the first gets the input of the
    reference. End to end a bf16 accumulator moves some codes of h by a step: only a token as a
    whole is bounded."""
    calls = []

    def record(*args: Tensor) -> None:
        experts._grouped_matmul_device(*args)
        calls.append(tuple(a.clone() for a in args))

    monkeypatch.setattr(experts, "_grouped_matmul_host", record)
    x, (ids, weights) = tokens(30, dtype=torch.float32), routing(30)
    ids[4] = -1  # rows past the last expert are whatever the GEMM leaves there
    layer = build(case)
    got = layer.experts(x, ids, weights)
    want = reference.experts(x, ids, weights, layer.cfg, layer.weights, case.activations)
    assert len(calls) == 2
    for call in calls:
        assert_within_device_bound(call, call[-1])
    used = int(want.plan.expert_offsets[-1])
    x_rows = want.x[want.plan.row_token[:used].long()]
    assert torch.equal(calls[0][0][:used].double(), x_rows)
    difference = (got - want.y).norm(dim=-1)
    assert (difference > 0).any()  # the branch was taken
    assert (difference <= 0.15 * want.y.norm(dim=-1)).all()


# ---- host synchronisation ------------------------------------------------------------------------

_READS = ("item", "tolist", "__bool__", "cpu", "nonzero", "numpy", "__int__", "__float__")
_SYNCING_OPS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::_unique2",
    "aten::repeat_interleave.Tensor",
)


class HostRead(AssertionError):
    pass


class NoPythonReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in _READS:
            raise HostRead(func.__name__)
        return func(*args, **(kwargs or {}))


class NoSyncingOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        masks = name.startswith(("aten::index.", "aten::index_put")) and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name.startswith(_SYNCING_OPS) or masks:
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: bool(t),
        lambda t: float(t),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: torch.nonzero(t),
        lambda t: t.reshape(1)[t.reshape(1) > 0],
        lambda t: torch.masked_select(t, t > 0),
        lambda t: torch.arange(3)[: t.long()],
    ],
)
def test_the_guard_sees_a_read(read) -> None:
    with pytest.raises(HostRead), NoSyncingOps(), NoPythonReads():
        read(torch.ones(()))


@needs_grouped_mm
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(activations="bf16"),
        Case(mode="per_tensor"),
        Case(mode="static", static_h=True, activation="oai", biases=True),
        Case(weight_on_input=True),
    ],
    ids=str,
)
def test_h46_nothing_reads_the_device_on_the_default_path(monkeypatch, case: Case) -> None:
    """H46: routing, plan, quantiser, both GEMMs of the CUDA branch, combine."""
    monkeypatch.setattr(experts, "_grouped_matmul_host", experts._grouped_matmul_device)
    gen = torch.Generator().manual_seed(7)
    layer = build(
        case,
        router_weight=torch.randn(E, H, generator=gen),
        selection_bias=torch.randn(E, generator=gen),
        shared=lambda x: x,
        workspace=Workspace(1 << 20),
    )
    x = tokens(9)
    with NoSyncingOps(), NoPythonReads():
        layer(x)


# ---- expert parallelism as the layer sees it: a slice of the experts -----------------------------


def slice_layer(case: Case, start: int, stop: int) -> MoE:
    layer, cfg, weights = ref.build(case)
    names = [n for n in ("gate", "up", "down", "biases") if getattr(layer, n) is not None]
    parts = {n: tuple(a[start:stop] for a in getattr(layer, n)) for n in names}
    if layer.gh is not None:
        parts["gh"] = layer.gh[start:stop]
    local = ref.oracle.to_library(dataclasses.replace(layer, **parts), first_expert=start)
    local = dataclasses.replace(local, gx=weights.gx)
    return MoE(cfg, local, backend="torch", activation_scale=case.mode)


@pytest.mark.parametrize("bounds", [(0, 3, 6), (0, 1, 5, 6), (0, 1, 2, 3, 4, 5, 6)])
@pytest.mark.parametrize(
    "case",
    [Case(), Case(biases=True), Case(mode="per_tensor"), Case(mode="static", static_h=True)],
    ids=str,
)
def test_slices_of_experts_add_up(case: Case, bounds: tuple[int, ...]) -> None:
    """Two slots a token: fp32 addition commutes, so the sum of the ranks has the same bits."""
    x, (ids, weights) = tokens(25, dtype=torch.float32), routing(25)
    ids[:, 2] = -1
    ids[3] = -1
    whole = build(case).experts(x, ids, weights)
    ranks = [slice_layer(case, a, b) for a, b in itertools.pairwise(bounds)]
    parts = [r.experts(x, ids, weights) for r in ranks]
    assert same_bits(torch.stack(parts).sum(0) + 0.0, whole + 0.0)
    assert all(p.count_nonzero() for p in parts)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend may not run and nothing may be allocated for it."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a bad input reached the backend")

    monkeypatch.setattr("moe.layer.run_torch", fail)
    monkeypatch.setattr(experts, "allocate", fail)
    monkeypatch.setattr(reference, "experts", fail)


IDS, WEIGHTS = torch.zeros(4, K, dtype=torch.int32), torch.zeros(4, K)


@pytest.mark.parametrize(
    ("x", "ids", "weights", "error", "message"),
    [
        (torch.zeros(4, H).double(), IDS, WEIGHTS, TypeError, "float64"),
        (torch.zeros(4, H).int(), IDS, WEIGHTS, TypeError, "int32"),
        (torch.zeros(4, H - 16), IDS, WEIGHTS, ValueError, r"\(4, 80\)"),
        (torch.zeros(H), IDS, WEIGHTS, ValueError, r"\(96,\)"),
        (torch.zeros(5, H), IDS, WEIGHTS, ValueError, "5 tokens"),
        (torch.zeros(4, H, device="meta"), IDS, WEIGHTS, ValueError, "x is on meta"),
        (torch.zeros(4, H), IDS[:, :2], WEIGHTS[:, :2], ValueError, r"\(4, 3\)"),
        (torch.zeros(4, H), IDS, WEIGHTS[:, :2], ValueError, r"\(4, 2\)"),
        (torch.zeros(4, H), IDS[0], WEIGHTS[0], ValueError, r"\(3,\)"),
        (torch.zeros(1, H), IDS[0], WEIGHTS[0], ValueError, r"\(3,\)"),
        (torch.zeros(4, H), IDS, WEIGHTS.int(), TypeError, "floating"),
        (torch.zeros(4, H), IDS.float(), WEIGHTS, TypeError, "int32 or int64"),
        (torch.zeros(4, H), IDS.short(), WEIGHTS, TypeError, "int16"),
        (torch.zeros(4, H), IDS.to(torch.uint8), WEIGHTS, TypeError, "uint8"),
        (torch.zeros(4, H), IDS.to("meta"), WEIGHTS, ValueError, "meta"),
        (torch.zeros(4, H), IDS.to("meta"), WEIGHTS.to("meta"), ValueError, "meta"),
    ],
)
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_bad_input_is_refused_before_anything_runs(
    unreachable, backend: str, x, ids, weights, error, message
) -> None:
    with pytest.raises(error, match=message):
        build(backend=backend).experts(x, ids, weights)


def test_forward_refuses_before_anything_runs(unreachable) -> None:
    with pytest.raises(ValueError, match="router_weight"):
        build()(tokens(2))
    with pytest.raises(TypeError, match="float64"):
        routed()(tokens(2).double())
    with pytest.raises(ValueError, match="needs a scale of x"):
        routed(activation_scale="static")(tokens(2))
    with pytest.raises(ValueError, match="needs a scale of x"):
        build(activation_scale="static").experts(tokens(2), *routing(2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router_weight": torch.zeros(E, H - 1)}, "router_weight must be"),
        ({"router_bias": torch.zeros(E + 1)}, "router_bias must be"),
        ({"selection_bias": torch.zeros(1, E)}, "selection_bias must be"),
        ({"tid2eid": torch.zeros(10, K + 1, dtype=torch.int32)}, "tid2eid must be"),
        ({"activations": "fp8"}, "activations must be"),
        ({"activation_scale": "per_block"}, "activation_scale must be"),
        ({"deterministic": False}, "deterministic"),
        ({"parallel": object()}, "parallel"),
        ({"backend": "cuda"}, "backend must be"),
    ],
)
def test_a_layer_that_cannot_be_built_says_why(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_weights_must_fit_the_config() -> None:
    _, cfg, weights = ref.build(Case())
    change = dataclasses.replace
    with pytest.raises(ValueError, match="config says H=112"):
        MoE(change(cfg, hidden=112), weights)
    with pytest.raises(ValueError, match="has no gate"):
        MoE(change(cfg, activation=ref.ReLU2()), weights)
    with pytest.raises(ValueError, match=r"local experts 1\.\.6"):
        MoE(cfg, change(weights, first_expert=1))
    with pytest.raises(ValueError, match="among the 5 experts"):
        MoE(change(cfg, num_experts=5), weights)
    with pytest.raises(ValueError, match="needs gate"):
        MoE(cfg, ref.build(Case(activation="relu2"))[2])


# ---- backends ------------------------------------------------------------------------------------


def test_backends_are_listed_with_reasons() -> None:
    for device in ("cpu", "meta"):
        status = backend_status(device)
        assert tuple(s.name for s in status) == BACKENDS
        assert all(s.reason for s in status)
        assert status[-1].usable
    usable = {s.name: s.usable for s in backend_status("cpu")}
    assert usable["torch"] and not usable["sm100"] and not usable["sm90"]
    assert not {s.name: s.usable for s in backend_status("meta")}["torch"]


def test_auto_takes_torch_on_a_cpu_and_the_choice_is_visible() -> None:
    assert choose_backend("auto", torch.device("cpu")) == "torch"
    assert build(backend="auto").backend == "torch"
    assert build(backend="reference").backend == "reference"
    assert choose_backend("auto", torch.device("meta")) == "reference"


@pytest.mark.parametrize("name", ["sm100", "sm90"])
def test_h45_a_kernel_backend_on_the_wrong_device_says_why(name: str) -> None:
    """H45, the part without a GPU: refused when the layer is built, with what was found."""
    with pytest.raises(RuntimeError, match=f"{name}.*cannot run on cpu: ."):
        build(backend=name)


def test_cuda_without_a_grouped_gemm_is_left_to_the_reference(monkeypatch) -> None:
    monkeypatch.setattr(backends, "find_grouped_mm", lambda: None)
    status = {s.name: s for s in backend_status("cuda")}
    assert not status["torch"].usable and "grouped" in status["torch"].reason
    monkeypatch.setattr(experts, "find_grouped_mm", lambda: None)
    with pytest.raises(RuntimeError, match="loop over experts"):
        experts._grouped_matmul_device(*op_arguments(2))


def test_config_and_weights_of_the_layer_are_those_given() -> None:
    _, cfg, weights = ref.build(Case())
    assert isinstance(weights, ExpertWeights) and isinstance(cfg, MoEConfig)
    layer = MoE(cfg, weights)
    assert layer.cfg is cfg
    for name, tensor in weights.tensors():
        assert getattr(layer, name).data_ptr() == tensor.data_ptr()  # no copy
