"""What the layer refuses, and that it does so before anything else happens."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from moe import MoE
from tests.layers import E, H, K, build, full_layer, routing, same_bits, tokens
from tests.test_reference import Case


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_nothing_with_a_gradient_enters(backend: str) -> None:
    layer = build(Case(), backend=backend)
    x, (ids, mix) = tokens(3), routing(3)
    with pytest.raises(RuntimeError, match="detach topk_weights"):
        layer.experts(x, ids, mix.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="detach shared"):
        layer.experts(x, ids, mix, x.float().requires_grad_())
    with torch.no_grad():
        y = layer.experts(x, ids, mix.clone().requires_grad_(), x)
    assert not y.requires_grad


def test_a_trainable_shared_expert_leaves_no_graph() -> None:
    layer = full_layer()
    layer.shared = nn.Linear(H, H).bfloat16()
    x = tokens(3)
    y = layer(x)
    assert not y.requires_grad
    with torch.no_grad():
        assert same_bits(layer(x), y)


def test_shared_of_another_kind() -> None:
    layer = build(Case())
    x, (ids, mix) = tokens(3), routing(3)
    for wrong in (x.double(), x.int()):
        with pytest.raises(TypeError, match="shared must be bfloat16, float16 or float32"):
            layer.experts(x, ids, mix, wrong)
    with pytest.raises(ValueError, match=rf"shared must be \(3, {H}\)"):
        layer.experts(x, ids, mix, x[:2])
    with pytest.raises(ValueError, match="shared is on meta"):
        layer.experts(x, ids, mix, x.to("meta"))


def test_negative_sizes_integer_routers_and_float_token_ids() -> None:
    layer = build(Case())
    for call in (layer.plan_memory, layer.warmup):
        with pytest.raises(ValueError, match="max_tokens must not be negative, got -3"):
            call(-3)
    with pytest.raises(ValueError, match="router_weight must be floating point"):
        MoE(layer.cfg, layer.weights, router_weight=torch.ones(E, H, dtype=torch.int32))
    table = torch.zeros(10, K, dtype=torch.int64) + torch.arange(K)
    hashed = MoE(layer.cfg, layer.weights, router_weight=torch.randn(E, H), tid2eid=table)
    with pytest.raises(TypeError, match="input_ids must be integers"):
        hashed(tokens(3), torch.tensor([1.0, 2.0, 3.5]))


def test_scales_that_kernels_cannot_read() -> None:
    layer = build(Case())
    strided = torch.ones(E, 2)[:, 0]
    before = layer.g2
    with pytest.raises(ValueError, match="g2 must be contiguous"):
        layer.set_scales(layer.g13, strided, None)
    assert layer.g2 is before


def test_widths_differ_from_the_config() -> None:
    layer = build(Case())
    with pytest.raises(ValueError, match="tensor parallelism"):
        MoE(dataclasses.replace(layer.cfg, intermediate=2 * layer.cfg.intermediate), layer.weights)
