"""Layers with the sizes of public models.

Experts are fewer: two more than top-k, or as many as the groups need. H and I above 512 are
reduced to 256 + (size mod 256): remainders modulo 128 and 256, and the padding of scale groups to
4, are those of the model. I after a tensor-parallel split is kept as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cute_kernels.activations import Activation, GeGLU, ReLU2, SwiGLU, SwiGLUOAI
from moe import MoE, MoEConfig, reference
from moe.router import route, router_logits
from tests import oracle
from tests.test_reference import Batch, check_stages

V3_GROUPS = {"num_groups": 8, "top_groups": 4}
V4 = SwiGLU(limit=10.0)

FORMULA: dict[Activation, Callable] = {
    SwiGLU(): oracle.swiglu,
    V4: oracle.swiglu_limit(10.0),
    SwiGLUOAI(): oracle.swiglu_oai,
    GeGLU(): oracle.geglu,
    ReLU2(): oracle.relu2,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """``options`` go to `MoEConfig`; extras of the layer are named in ``extras``."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    scoring: str = "softmax"
    activation: Activation = dataclasses.field(default_factory=SwiGLU)
    extras: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def model(
    name: str, h: int, i: int, e: int, k: int, *args: Any, extras: str = "", **options
) -> Model:
    return Model(
        name, h, i, e, k, *args, extras=tuple(extras.split()), options=tuple(options.items())
    )


SIG = "sigmoid"
NO_NORM = {"renormalize": False}
MODELS = [
    model(
        "DeepSeek-V3",
        7168,
        2048,
        256,
        8,
        SIG,
        extras="bias shared",
        routed_scaling_factor=2.5,
        **V3_GROUPS,
    ),
    model(
        "DeepSeek-V3.2",
        7168,
        2048,
        256,
        8,
        SIG,
        extras="bias shared",
        routed_scaling_factor=2.5,
        **V3_GROUPS,
    ),
    model(
        "DeepSeek-V4-Pro",
        7168,
        3072,
        384,
        6,
        "sqrtsoftplus",
        V4,
        extras="hash shared",
        routed_scaling_factor=2.5,
    ),
    model(
        "DeepSeek-V4-Flash",
        4096,
        2048,
        256,
        6,
        "sqrtsoftplus",
        V4,
        extras="bias shared",
        routed_scaling_factor=1.5,
    ),
    model("DeepSeek-16B", 2048, 1408, 64, 6, extras="shared"),
    model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    model("Qwen3-235B-A22B", 4096, 1536, 128, 8),
    model("Qwen3-Next-80B-A3B", 2048, 512, 512, 10, extras="shared"),
    model("Qwen3.5-35B-A3B", 2048, 512, 256, 8, extras="shared"),
    model("Qwen3.5-397B-A17B", 4096, 1024, 512, 10),
    model("Qwen3.8-Flash-Next", 2560, 640, 512, 10),
    model("Qwen1.5-MoE-A2.7B", 2048, 1408, 60, 4, extras="shared", **NO_NORM),
    model("GLM-4.5-Air", 4096, 1408, 128, 8, SIG, extras="bias shared"),
    model("GLM-4.5", 5120, 1536, 160, 8, SIG, extras="bias shared", routed_scaling_factor=2.5),
    model("GLM-4.7-Flash", 2048, 1536, 64, 4, SIG, extras="bias shared", routed_scaling_factor=1.8),
    model("GLM-5", 6144, 2048, 256, 8, SIG, extras="bias7 shared", routed_scaling_factor=2.5),
    model("Kimi-K2", 7168, 2048, 384, 8, SIG, extras="bias shared", routed_scaling_factor=2.827),
    model("Kimi-K3", 3584, 3072, 896, 16),  # its activation has no public formula: SwiGLU here
    model("Moonlight-16B-A3B", 2048, 1408, 64, 6, SIG, extras="bias shared"),
    model(
        "gpt-oss-120b", 2880, 2880, 128, 4, "softmax", SwiGLUOAI(), extras="expert_biases linear"
    ),
    model("gpt-oss-20b", 2880, 2880, 32, 4, "softmax", SwiGLUOAI(), extras="expert_biases linear"),
    model("Mixtral-8x7B", 4096, 14336, 8, 2),
    model(
        "Llama-4-Scout", 5120, 8192, 16, 1, SIG, extras="shared", weight_on_input=True, **NO_NORM
    ),
    model("MiniMax-M2", 3072, 1536, 256, 8, SIG, extras="bias"),
    model("MiniMax-M3", 6144, 3072, 128, 4, "softmax", SwiGLUOAI()),
    model("Nemotron-3-Nano", 2688, 1856, 128, 6, SIG, ReLU2(), extras="bias shared"),
    model("Nemotron-3-Super", 1024, 2688, 512, 22, SIG, ReLU2(), extras="bias shared"),
    model("ERNIE-4.5-21B-A3B", 2560, 1536, 64, 6, extras="bias shared"),
    model("Hunyuan-Large", 6400, 18304, 16, 1, extras="shared", **NO_NORM),
    model("Hy3-preview", 4096, 1536, 192, 8, SIG, extras="bias shared"),
    model("Step-3.5-Flash", 4096, 1280, 288, 8, extras="shared"),
    model("Gemma-4-26B-A4B", 2816, 704, 128, 8, "softmax", GeGLU(), extras="shared"),
    model("Ling-plus", 5376, 3072, 64, 4, extras="shared"),
    model("Ling-Coder-lite", 2048, 1408, 64, 6, extras="shared"),
    model("OLMoE-1B-7B", 2048, 1024, 64, 8, **NO_NORM),
]

# (model width, ranks): I / ranks as a tensor-parallel rank sees it
SPLITS = [(704, 2), (704, 4), (640, 4), (640, 8), (1856, 4), (2688, 8)]


def reduced(size: int) -> int:
    return size if size <= 512 else 256 + size % 256


def reduced_experts(m: Model) -> int:
    groups = dict(m.options).get("num_groups", 1)
    return min(m.experts, 2 * groups if groups > 1 else m.top_k + 2)


def test_there_are_35_models_and_their_sizes_keep_their_remainders() -> None:
    assert len(MODELS) == len({m.name for m in MODELS}) == 35
    for m in MODELS:
        for size in (m.hidden, m.inter):
            small = reduced(size)
            assert small <= 512
            assert small % 128 == size % 128 and small % 256 == size % 256
            assert small // 16 % 4 == size // 16 % 4
        MoEConfig(  # the configuration of the model itself is accepted
            m.hidden,
            m.inter,
            m.experts,
            m.top_k,
            m.scoring,
            activation=m.activation,
            **dict(m.options),
        )
    assert {m.hidden % 128 for m in MODELS} == {0, 64}
    assert {m.inter % 128 for m in MODELS} == {0, 64}
    assert {i // n // 16 % 4 for i, n in SPLITS} == {1, 2, 3}


def check_layer(m: Model, hidden: int, inter: int, seed: int, tokens: int = 2) -> None:
    """forward: torch == reference; its stages against the fp64 implementation, element by element
    on the same input (tests/oracle.py)."""
    count = reduced_experts(m)
    gen = torch.Generator().manual_seed(seed)
    gated = m.activation.gated
    layer = oracle.random_layer(
        seed,
        count,
        hidden,
        inter,
        FORMULA[m.activation],
        gated,
        biases=oracle.random_biases(seed, count, hidden, inter, gated)
        if "expert_biases" in m.extras
        else None,
        weight_on_input=dict(m.options).get("weight_on_input", False),
    )
    weights = oracle.to_library(layer)
    cfg = MoEConfig(
        hidden, inter, count, m.top_k, m.scoring, activation=m.activation, **dict(m.options)
    )
    router = torch.randn(count, hidden, generator=gen) * 0.1
    table = torch.rand(50, count, generator=gen).argsort(dim=-1)[:, : m.top_k].int()
    extras: dict[str, Any] = {
        "router_bias": torch.randn(count, generator=gen) if "linear" in m.extras else None,
        "selection_bias": torch.randn(count, generator=gen) * 0.1 if "bias" in m.extras else None,
        "tid2eid": table if "hash" in m.extras else None,
        "shared": (lambda x: 0.5 * x) if "shared" in m.extras else None,
    }
    if "bias7" in m.extras:  # large equal parts, small differences
        extras["selection_bias"] = 6.8 + 0.3 * torch.rand(count, generator=gen)
    x = torch.randn(tokens, hidden, generator=gen).bfloat16()
    token_ids = torch.randint(0, 50, (tokens,), generator=gen)
    y = MoE(cfg, weights, router_weight=router, backend="torch", **extras)(x, token_ids)
    slow = MoE(cfg, weights, router_weight=router, backend="reference", **extras)
    assert torch.equal(y, slow(x, token_ids))

    logits = router_logits(x, router, extras["router_bias"])
    ids, w = route(logits, cfg, extras["selection_bias"], extras["tid2eid"], token_ids)
    w = w * cfg.routed_scaling_factor
    stages = reference.experts(x, ids, w, cfg, weights)
    check_stages(stages, layer, Batch(x, ids, w), None, x.dtype)
    check_bounds(stages, layer, ids)
    if extras["shared"] is None:
        assert torch.equal(y, stages.y)
    assert y.count_nonzero() > 0.9 * y.numel()


def check_bounds(stages: reference.Stages, layer: oracle.OracleLayer, ids: torch.Tensor) -> None:
    """Section 6, element by element before output rounding, and the slope of o on fp64 per
    expert."""
    slopes: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            e, row = int(ids[t, k]), int(stages.plan.token_rows[t, k])
            gx = np.float32(stages.gx[t])
            want = oracle.run_slot(layer, stages.x[t].numpy(), gx, e, stages.h[row].numpy())
            o, depth = stages.o[row].double().numpy(), stages.h.shape[1]
            bound = 4 * (depth / 64 + 1) * 2.0**-24 * want.o_bound
            half_ulp = np.abs(want.o_exact) * 2.0**-8
            assert (np.abs(o - want.o_exact) <= bound + half_ulp).all()
            slopes.setdefault(e, []).append((o, want.o_exact))
    for pairs in slopes.values():
        out, ref = (np.concatenate(v) for v in zip(*pairs))
        assert abs(out @ ref / (ref @ ref) - 1) < 1e-3


@pytest.mark.parametrize("m", MODELS, ids=str)
def test_model(m: Model) -> None:
    check_layer(m, reduced(m.hidden), reduced(m.inter), seed=MODELS.index(m))


@pytest.mark.parametrize(("width", "ranks"), SPLITS)
def test_width_after_a_tensor_parallel_split(width: int, ranks: int) -> None:
    """352 (22 scale groups), 176 (11), 160 (10), 80 (5), 464 (29) and 336 (21)."""
    m = next(m for m in MODELS if m.inter == width)
    check_layer(dataclasses.replace(m, top_k=2, extras=()), 128, width // ranks, seed=ranks)


@pytest.mark.parametrize(
    "spoil", [lambda o: o.mul_(0.99), lambda o: o[0, 16:32].zero_(), lambda o: o[3].zero_()]
)
def test_the_bounds_see_a_scale_a_lost_block_and_a_lost_row(spoil) -> None:
    layer = oracle.random_layer(0, 4, 128, 80, oracle.swiglu)
    cfg = MoEConfig(128, 80, 4, 2)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    ids, w = torch.tensor([[0, 1], [2, 3], [1, 0]]), torch.ones(3, 2)
    stages = reference.experts(x, ids, w, cfg, oracle.to_library(layer))
    check_bounds(stages, layer, ids)
    o = stages.o.clone()
    spoil(o)
    with pytest.raises(AssertionError):
        check_bounds(stages._replace(o=o), layer, ids)
