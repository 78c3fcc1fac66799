"""The layer on the compiled SM100 kernels, in the simulator, against the reference."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from cute_kernels import compile as compiler
from cute_kernels.activations import Activation, ReLU2, SwiGLU, SwiGLUOAI
from moe import ExpertWeights, MoE, MoEConfig, reference

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)


@dataclass(frozen=True)
class Shape:
    """A public model with fewer experts and narrower layers; remainders are kept."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    top_k: int
    activation: Activation
    biased: bool = False


SHAPES = [
    Shape("deepseek-v4", 512, 256, 8, 3, SwiGLU(limit=10.0)),
    Shape("qwen3", 256, 96, 8, 4, SwiGLU()),
    Shape("gpt-oss", 320, 320, 4, 2, SwiGLUOAI(), biased=True),  # 64 over a multiple of 128 and 256
    Shape("nemotron", 384, 192, 4, 2, ReLU2()),
]


def build(shape: Shape, static: bool) -> tuple[MoEConfig, ExpertWeights]:
    g = torch.Generator().manual_seed(len(shape.name))
    e, h, i = shape.experts, shape.hidden, shape.intermediate

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=g)

    up = rand(e, i, h) * 0.05 if shape.activation.gated else None
    bias = None
    if shape.biased:
        bias = (rand(e, i), rand(e, i) if shape.activation.gated else None, rand(e, h))
    gh = torch.full((e,), 2e-3) if static else None
    gate, down = rand(e, i, h) * 0.05, rand(e, h, i) * 0.05
    weights = ExpertWeights.from_bf16(gate, up, down, gh=gh, biases=bias)
    return MoEConfig(h, i, e, shape.top_k, activation=shape.activation), weights


def routed(cfg: MoEConfig, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, cfg.hidden, generator=g).bfloat16()
    order = torch.rand(tokens, cfg.num_experts, generator=g).argsort(dim=1)
    ids = order[:, : cfg.top_k].int()
    if tokens > 2:
        ids[2, 0] = -1  # a slot that is not computed
    return x, ids, torch.rand(tokens, cfg.top_k, generator=g)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic_h", "static_h"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_kernels_give_the_reference(shape: Shape, static: bool) -> None:
    cfg, weights = build(shape, static)
    layer = MoE(cfg, weights, backend="sim")
    x, ids, mix = routed(cfg, 11)
    y = layer.experts(x, ids, mix)
    want = reference.experts(x, ids, mix, cfg, weights).y
    if static or shape.activation.gated:
        # the device's exp and division may differ from torch's in the last bit and flip a code
        error = (y.float() - want.float()).norm() / want.float().norm()
        assert error < 2e-3, f"{error:.2e}"
    else:
        assert torch.equal(y, want)


@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_token_counts(tokens: int) -> None:
    cfg, weights = build(SHAPES[1], static=True)
    x, ids, mix = routed(cfg, tokens)
    y = MoE(cfg, weights, backend="sim").experts(x, ids, mix)
    want = reference.experts(x, ids, mix, cfg, weights).y
    assert y.shape == want.shape
    assert torch.allclose(y.float(), want.float(), rtol=2e-2, atol=2e-2)


def test_the_same_token_gives_the_same_bits_alone_and_in_a_batch() -> None:
    cfg, weights = build(SHAPES[0], static=True)
    layer = MoE(cfg, weights, backend="sim")
    x, ids, mix = routed(cfg, 9)
    y = layer.experts(x, ids, mix)
    assert torch.equal(layer.experts(x[4:5], ids[4:5], mix[4:5]), y[4:5])


def test_slots_without_an_expert_add_nothing() -> None:
    cfg, weights = build(SHAPES[1], static=True)
    whole = MoE(cfg, weights, backend="sim")
    assert whole.backend == "sim"
    x, ids, mix = routed(cfg, 5)
    nobody = torch.full_like(ids, -1)
    assert torch.equal(whole.experts(x, nobody, mix), torch.zeros_like(x))


def test_bf16_activations_are_refused() -> None:
    cfg, weights = build(SHAPES[1], static=True)
    with pytest.raises(ValueError, match="activations must be 'nvfp4'"):
        MoE(cfg, weights, backend="sim", activations="bf16")


def test_a_compiled_layer_keeps_a_simulator_around_it_and_asks_for_one() -> None:
    """A graph cannot hold the simulator that a call outside of one starts."""
    from cute_kernels import sim

    cfg, weights = build(SHAPES[1], static=True)
    layer, call = MoE(cfg, weights, backend="sim"), routed(cfg, 3)
    want = layer.experts(*call)
    whole = torch.compile(layer.experts, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        with sim.Simulator(seed=3) as s:
            assert torch.equal(whole(*call), want)
            kernels = len(s.launches)
            assert torch.equal(whole(*call), want)
        assert kernels > 3 and len(s.launches) == 2 * kernels
        with pytest.raises(Exception, match="compile and call the layer inside"):
            whole(*call)  # never the plain code instead
        assert torch.equal(torch.compile(layer.experts, backend="aot_eager")(*call), want)
