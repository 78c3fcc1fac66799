"""Tokens that are quantised already: every backend uses codes, block scales and outer scales as
they are, so that the rank that owns a token quantises it and nobody else."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4
from cute_kernels.activations import SwiGLU
from cute_kernels.nvfp4 import SWIZZLE_32_4_4, Nvfp4Tensor
from moe import ExpertWeights, MoE, MoEConfig, reference
from tests import layers
from tests.layers import poison_new_tensors, same_bits
from tests.test_reference import Case

needs_simulator = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)
BACKENDS = ["reference", "torch", pytest.param("sim", marks=needs_simulator)]
T, E, K, H, I = 11, 5, 2, 96, 64  # noqa: E741


def build(backend: str, static_h: bool = False) -> MoE:
    gen = torch.Generator().manual_seed(1)
    gate, up, down = (torch.randn(E, *s, generator=gen) * 0.1 for s in ((I, H), (I, H), (H, I)))
    gh = torch.linspace(1e-3, 4e-3, E) if static_h else None
    weights = ExpertWeights.from_bf16(gate, up, down, gh=gh)
    return MoE(MoEConfig(H, I, E, K, activation=SwiGLU(limit=3.0)), weights, backend=backend)


def arbitrary(count: int, scalar: bool = False) -> Nvfp4Tensor:
    """Codes and scales that no quantiser would choose: maxima below 6, subnormal scales, -0.0."""
    gen = torch.Generator().manual_seed(count)
    data = torch.randint(0, 256, (count, H // 2), generator=gen, dtype=torch.uint8)
    scale = torch.randint(1, 0x40, (count, H // 16), generator=gen, dtype=torch.uint8)
    data[::2, :8] &= 0x99  # codes 0, 1, -0 and -1 alone
    g = torch.tensor(0.37) if scalar else torch.rand(count, generator=gen) + 0.1
    return Nvfp4Tensor(data, scale, g)


def tokens(count: int, seed: int = 2) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(seed)).bfloat16()


def routing(count: int) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(3)
    ids = torch.rand(count, E, generator=gen).argsort(dim=-1)[:, :K].int()
    ids[::3, 0] = -1
    ids[1::4] = -1
    return ids, torch.rand(count, K, generator=gen)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("static_h", [False, True], ids=["dynamic_h", "static_h"])
def test_own_quantisation_from_outside_changes_no_bit(
    backend: str, static_h: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = build(backend, static_h)
    x, (ids, weights) = tokens(T), routing(T)
    want = layer.experts(x, ids, weights)
    poison_new_tensors(monkeypatch)
    assert same_bits(layer.experts(nvfp4.quantize(x), ids, weights), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scalar", [False, True], ids=["per_token", "one_scale"])
def test_codes_are_not_quantised_anew(backend: str, scalar: bool) -> None:
    layer = build(backend)
    q, (ids, weights) = arbitrary(T, scalar), routing(T)
    stages = reference.experts(q, ids, weights, layer.cfg, layer.weights)
    low = nvfp4.decode_e2m1(q.data & 15, torch.float64)  # of the even k
    assert torch.equal(stages.x[:, 0::2], low * q.scale.double().repeat_interleave(8, dim=1))
    assert torch.equal(stages.gx, q.global_scale.expand(T))
    y = layer.experts(q, ids, weights)
    assert y.dtype == torch.bfloat16
    assert same_bits(y, stages.y)


@pytest.mark.parametrize("what", ["data", "scale", "global_scale"])
def test_every_part_of_a_token_counts(what: str) -> None:
    """The comparison above fails when a backend drops one of the three."""
    layer, q, (ids, weights) = build("torch"), arbitrary(T), routing(T)
    changed = getattr(q, what).clone()
    if what == "global_scale":
        changed[2] *= 2
    else:
        changed.view(torch.uint8)[2, 1] ^= 4
    other = dataclasses.replace(q, **{what: changed})
    before, after = layer.experts(q, ids, weights), layer.experts(other, ids, weights)
    rows = torch.arange(T) != 2
    assert same_bits(before[rows], after[rows])
    assert not same_bits(before[2], after[2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_nobody_here(backend: str) -> None:
    layer = build(backend)
    y = layer.experts(arbitrary(0), *routing(0))
    assert y.shape == (0, H) and y.dtype == torch.bfloat16
    ids = torch.full((3, K), -1, dtype=torch.int32)
    zero = torch.zeros(3, H, dtype=torch.bfloat16)
    assert same_bits(layer.experts(arbitrary(3), ids, torch.ones(3, K)), zero)


def test_shared_output_is_added_last_and_rounded_once() -> None:
    layer, q, (ids, weights) = build("torch"), arbitrary(T), routing(T)
    shared = tokens(T, seed=9)
    want = reference.experts(q, ids, weights, layer.cfg, layer.weights, shared=shared).y
    assert same_bits(layer.experts(q, ids, weights, shared), want)
    with pytest.raises(ValueError, match="shared must be"):
        layer.experts(q, ids, weights, shared[1:])


def test_layouts_and_layers_that_cannot_use_them_are_refused() -> None:
    q, (ids, weights) = arbitrary(T), routing(T)
    layer = build("torch")
    with pytest.raises(ValueError, match="ROW_MAJOR"):
        layer.experts(q.with_layout(SWIZZLE_32_4_4), ids, weights)
    with pytest.raises(ValueError, match=rf"must be \(T, {H}\)"):
        layer.experts(nvfp4.quantize(torch.ones(T, 2 * H)), ids, weights)
    with pytest.raises(ValueError, match=r"must be \(T,"):
        layer.experts(nvfp4.quantize(torch.ones(1, T, H)), ids, weights)
    with pytest.raises(ValueError, match="is on"):
        layer.experts(q.to("meta"), ids, weights)
    other = nvfp4.quantize(torch.ones(T, layers.H))
    for case in (Case(activations="bf16"), Case(weight_on_input=True)):
        with pytest.raises(ValueError, match="activations='nvfp4' and weights that do not"):
            layers.build(case).experts(other, *layers.routing(T))
