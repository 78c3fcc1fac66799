"""The layer on the compiled Hopper kernels, in the simulator, against the reference: router, sort,
staging, both GEMMs, combine, each launched on the results of the one before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import sm90_ops
from cute_kernels.sm90 import config as configs
from moe import MoE, reference
from tests.sm90.test_gemm_sim import CONFIGS
from tests.test_layer_sim import SHAPES, Shape, build, routed

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)


def hopper(seed: int = 0, schedule: str = "lazy", gathers: bool = False) -> Any:
    """``gathers``: rows that nobody stores are not loaded, and multiplied as they lie there."""
    from cute_kernels.sim import Checks, Simulator

    checks = Checks(uninitialised=not gathers)
    return Simulator(seed=seed, schedule=schedule, arch="sm_90a", checks=checks)


def names(simulator: Any) -> list[str]:
    return [launch.name for launch in simulator.launches]


def assert_close(y: Tensor, want: Tensor, bound: float) -> None:
    error = (y.double() - want.double()).norm() / want.double().norm()
    assert y.shape == want.shape and error < bound, f"{error:.2e}"


@pytest.mark.parametrize(
    ("shape", "activations", "static"),
    [
        (SHAPES[0], "nvfp4", False),
        (SHAPES[1], "nvfp4", True),
        (SHAPES[2], "bf16", False),
        (SHAPES[3], "nvfp4", False),
    ],
    ids=["deepseek-v4", "qwen3-static", "gpt-oss-bf16", "nemotron"],
)
def test_kernels_give_the_reference(shape: Shape, activations: str, static: bool) -> None:
    cfg, weights = build(shape, static)
    x, ids, mix = routed(cfg, 11)
    with hopper(gathers=activations == "bf16") as s:
        layer = MoE(cfg, weights, backend="sm90", activations=activations)
        y = layer.experts(x, ids, mix)
    assert sum("sm90_w4a16_middle" in name for name in names(s)) == 2
    want = reference.experts(x, ids, mix, cfg, weights, activations=activations).y
    # another exp and another order of fp32 sums may flip a code; bf16 rounds h
    assert_close(y, want, 5e-3)


@pytest.mark.parametrize(("tokens", "config"), [(1, "decode"), (80, "trio"), (112, "duo")])
def test_configurations(tokens: int, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nemotron's shape with as many tokens as the layer takes each configuration for, which has
    fewer main loops to compile here."""
    if config in CONFIGS:
        monkeypatch.setitem(sm90_ops._CONFIGS, config, CONFIGS[config])
    cfg, weights = build(SHAPES[3], static=True)
    assert configs.choose_config(tokens * cfg.top_k, cfg.num_experts).name == config
    x, ids, mix = routed(cfg, tokens)
    with hopper(5, "random") as s:
        layer = MoE(cfg, weights, backend="sm90")
        y = layer.experts(x, ids, mix)
    assert any(f"sm90_w4a16_{config}" in name for name in names(s))
    assert_close(y, reference.experts(x, ids, mix, cfg, weights).y, 5e-3)


def test_no_tokens() -> None:
    cfg, weights = build(SHAPES[1], static=True)
    x, ids, mix = routed(cfg, 0)
    with hopper():
        assert MoE(cfg, weights, backend="sm90").experts(x, ids, mix).shape == x.shape


def test_every_order_has_the_same_bits_and_few_launches() -> None:
    """With its router: launches depend on each other, and may start before the one before ends."""
    cfg, weights = build(SHAPES[1], static=False)
    g = torch.Generator().manual_seed(4)
    weight = torch.randn(cfg.num_experts, cfg.hidden, generator=g) * 0.02
    with hopper():
        layer = MoE(cfg, weights, router_weight=weight, backend="sm90")
    x, *_ = routed(cfg, 13)
    ys = []
    for schedule, seed in (("lazy", 0), ("eager", 0), ("random", 1), ("random", 2)):
        with hopper(seed, schedule) as s:
            ys.append(layer(x))
    assert not ys[0].isnan().any() and all(torch.equal(y, ys[0]) for y in ys[1:])
    assert len(s.launches) == 8, names(s)  # 2 of the router, sort, stage, L1, stage, L2, combine
    assert_close(ys[0], layer(x), 5e-3)  # outside of a simulator: the plain operators


def test_auto_and_other_targets() -> None:
    cfg, weights = build(SHAPES[1], static=True)
    with pytest.raises(RuntimeError, match="needs a Hopper GPU"):
        MoE(cfg, weights, backend="sm90")
    with hopper():
        assert MoE(cfg, weights).backend == "torch"  # never chosen by itself on a CPU
        layer = MoE(cfg, weights, backend="sm90")
    from cute_kernels.sim import Simulator

    x, ids, mix = routed(cfg, 3)
    with pytest.raises(ValueError, match='arch="sm_90a"'), Simulator():
        layer.experts(x, ids, mix)
    with pytest.raises(ValueError, match="arch must be one of"):
        Simulator(arch="sm_80")


def test_blackwell_and_hopper_in_one_process() -> None:
    """Kernels of both targets are compiled under one name: none takes the other's place."""
    from cute_kernels.sim import Simulator

    cfg, weights = build(SHAPES[3], static=False)
    x, ids, mix = routed(cfg, 5)
    got = {}
    for backend, arch in (("sim", "sm_100a"), ("sm90", "sm_90a"), ("sim", "sm_100a")):
        with Simulator(schedule="lazy", arch=arch) as s:
            layer = MoE(cfg, weights, backend=backend)
            y = layer.experts(x, ids, mix)
        assert any("sm90" in name for name in names(s)) == (backend == "sm90")
        assert torch.equal(y, got.setdefault(backend, y))
    assert_close(got["sm90"], got["sim"], 5e-3)
