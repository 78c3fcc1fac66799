"""A layer as a module: state, dtype and device, files, calibration, scratch memory."""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cute_kernels.activations import Activation
from moe import MoE, Workspace, experts, reference
from moe.workspace import Buffer, total_bytes
from tests import oracle
from tests import test_reference as ref
from tests.layers import (
    E,
    H,
    K,
    build,
    full_layer,
    routed,
    routing,
    same_bits,
    tokens,
)
from tests.test_reference import Case

# ---- a module like any other ---------------------------------------------------------------------


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
    weights = oracle.to_library(local, first_expert=2)
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


def test_calibrate_through_the_router_sees_what_forward_computes() -> None:
    """The routed factor multiplies x where weights do."""
    case = Case(weight_on_input=True, mode="static")
    _, cfg, weights = ref.build(case)
    cfg = dataclasses.replace(cfg, routed_scaling_factor=2.5, scoring="sigmoid")
    router = torch.randn(E, H, generator=torch.Generator().manual_seed(7))
    layer = MoE(cfg, weights, router_weight=router, backend="torch", activation_scale="static")
    x = tokens(30)
    routes = layer._route(x, None)
    assert (routes[1] > 1).any()
    by_hand = {k: v.clone() for k, v in layer.calibrate(x, routing=routes).items()}
    scales = layer.calibrate(x)
    assert same_bits(scales["gx"], by_hand["gx"]) and same_bits(scales["gh"], by_hand["gh"])
    want = (x.float() * routes[1]).abs().max() / 2688
    torch.testing.assert_close(scales["gx"], want, rtol=2e-7, atol=0)


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


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_calibrate_refuses_a_spoilt_sample(value: float) -> None:
    """One bad element would make every later token NaN: what the layer has stays."""
    layer, x, ids_weights = build(activation_scale="static"), tokens(6), routing(6)
    layer.calibrate(x, routing=ids_weights)
    before = (layer.gh.clone(), layer.gx.clone())
    x[2, 5] = value
    with pytest.raises(ValueError, match="NaN or Inf"):
        layer.calibrate(x, routing=ids_weights)
    assert same_bits(layer.gh, before[0]) and same_bits(layer.gx, before[1])


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
        assert all(t.data_ptr() % 256 == 0 for t in group)
        spans = sorted((t.data_ptr() - start, t.data_ptr() - start + t.nbytes) for t in group)
        assert spans[0][0] == 0 and spans[-1][1] <= need
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
    many = [Workspace(n) for n in range(512, 8000, 191)]  # host allocations are 64-byte aligned
    assert all(v.data_ptr() % 256 == 0 for w in many for v in w.carve(buffers) if v.numel())
    with pytest.raises(ValueError, match="needs 512"):
        Workspace(511).carve(buffers)


def test_the_reference_needs_no_scratch() -> None:
    assert build(backend="reference").plan_memory(1000) == 0


def test_scales_of_a_layer_can_be_replaced() -> None:
    layer = build(Case(static_h=True))
    x, (ids, weights) = tokens(5), routing(5)
    g13, g2, gh = layer.g13 * 2, layer.g2 * 4, layer.gh * 0.5
    want = build(Case(static_h=True))
    for old, factor in ((want.g13, 2), (want.g2, 4), (want.gh, 0.5)):
        old.mul_(factor)
    before = layer.experts(x, ids, weights)
    layer.set_scales(g13, g2, gh)
    after = layer.experts(x, ids, weights)
    assert same_bits(after, want.experts(x, ids, weights)) and not same_bits(after, before)
    layer.set_scales(g13, g2, None)
    assert layer.gh is None
    layer.set_scales(g13, g2, gh)
    for wrong in ((g13[:1], g2, gh), (g13, g2.double(), gh), (g13, g2, gh[1:])):
        with pytest.raises(ValueError, match="must be float32"):
            layer.set_scales(*wrong)


def test_a_workspace_keeps_the_tensors_of_a_tuple() -> None:
    """The same tuple of buffers: the same tensors; a list, or an equal tuple, is carved anew."""
    memory = Workspace(1 << 12)
    buffers = (Buffer("a", (3, 5), torch.float32), Buffer("b", (7,), torch.uint8))
    first, again = memory.carve(buffers), memory.carve(buffers)
    assert all(a is b for a, b in zip(first, again)) and first is not again
    equal = memory.carve((*buffers,))
    assert all(a is not b and a.data_ptr() == b.data_ptr() for a, b in zip(first, equal))
    assert memory.carve(list(buffers))[0] is not first[0]
    for n in range(600):
        memory.carve((Buffer("n", (n,), torch.uint8),))
    assert len(memory._carved) <= 256
    assert memory.carve(buffers)[1].data_ptr() == first[1].data_ptr()
