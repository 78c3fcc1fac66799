"""The layer: the torch backend against the reference bit for bit, shapes, batches, ranks, and what
is refused."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe import ExpertWeights, MoE, MoEConfig, backends, experts, reference
from moe.backends import BACKENDS, backend_status, choose_backend
from moe.router import route, router_logits
from tests import test_reference as ref
from tests.layers import (
    E,
    H,
    K,
    bits,
    build,
    op_arguments,
    routed,
    routing,
    same_bits,
    slice_layer,
    tokens,
)
from tests.test_reference import CASES, Case

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
    with pytest.raises(ValueError, match=r"shared must be \(6, 96\)"):
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


def test_padding_tokens_of_a_hash_routed_layer_are_zero() -> None:
    table = torch.stack([torch.randperm(E)[:K] for _ in range(11)]).int()
    layer, x = routed(tid2eid=table), tokens(4)
    y = layer(x, torch.tensor([10, -1, 3, -7]))
    assert not y[[1, 3]].any() and y[[0, 2]].any()
    assert same_bits(y[[0, 2]], layer(x[[0, 2]], torch.tensor([10, 3])))
    shared = routed(tid2eid=table, shared=lambda v: v * 2)
    assert same_bits(shared(x, torch.full((4,), -1)), (x.float() * 2).bfloat16())


def test_router_biases_are_two_different_things() -> None:
    gen = torch.Generator().manual_seed(1)
    linear, selection = torch.randn(2, E, generator=gen) * 3
    layer, x = routed(router_bias=linear, selection_bias=selection), tokens(9)
    logits = router_logits(x, layer.router_weight) + linear
    ids, weights = route(logits, layer.cfg, selection_bias=selection)
    assert same_bits(layer(x), layer.experts(x, ids, weights))
    assert not torch.equal(ids, route(logits, layer.cfg)[0])


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


# ---- expert parallelism as the layer sees it: a slice of the experts -----------------------------


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
        ({"tid2eid": torch.zeros(10, K)}, "tid2eid must hold int32"),
        ({"tid2eid": torch.full((10, K), E)}, f"ids < {E}, got {E} to {E}"),
        ({"tid2eid": torch.full((10, K), -1)}, f"ids < {E}, got -1 to -1"),
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
