"""Layers, tokens and routing that the tests of the layer share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import nvfp4
from moe import ExpertWeights, MoE, MoEConfig, experts, make_plan
from tests import oracle
from tests import test_reference as ref
from tests.test_reference import Case

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


def slice_layer(case: Case, start: int, stop: int) -> MoE:
    layer, cfg, weights = ref.build(case)
    names = [n for n in ("gate", "up", "down", "biases") if getattr(layer, n) is not None]
    parts = {n: tuple(a[start:stop] for a in getattr(layer, n)) for n in names}
    if layer.gh is not None:
        parts["gh"] = layer.gh[start:stop]
    local = oracle.to_library(dataclasses.replace(layer, **parts), first_expert=start)
    local = dataclasses.replace(local, gx=weights.gx)
    return MoE(cfg, local, backend="torch", activation_scale=case.mode)


OP = torch.ops.nvfp4_megamoe.grouped_matmul_torch.default


def op_arguments(count: int, top_k: int = K) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    weights = build().weights
    plan = make_plan(*routing(count, top_k), E)
    rows = torch.randn(count * top_k, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    out = torch.empty(count * top_k, 2 * I)
    return rows, weights.l1_data, weights.l1_scale.view(torch.uint8), plan.expert_offsets, out


needs_grouped_mm = pytest.mark.skipif(
    experts.find_grouped_mm() is None, reason="this torch has no grouped GEMM"
)


def codes_of_one(experts: int, rows: int, k: int, g: Tensor) -> nvfp4.Nvfp4Tensor:
    """All codes 1.0, all block scales 1.0."""
    data = torch.full((experts, rows, k // 2), 0x22, dtype=torch.uint8)
    scale = torch.full((experts, rows, k // 16), 0x38, dtype=torch.uint8)
    return nvfp4.Nvfp4Tensor(data, scale, g)


def unit_layer(hidden: int, inter: int, experts: int, top_k: int, **options) -> MoE:
    """Known by hand: with x = 1 gate = up = 1, and expert e returns (e + 1) * silu(1) in every
    column; with `ReLU2` (no gate) e + 1. Fields of `MoEConfig` may be among ``options``."""
    fields = {f.name for f in dataclasses.fields(MoEConfig)} & options.keys()
    cfg = MoEConfig(hidden, inter, experts, top_k, **{n: options.pop(n) for n in fields})
    rows = cfg.projections * inter
    w13 = codes_of_one(experts, rows, hidden, torch.full((experts,), 1 / hidden))
    down = torch.arange(1, experts + 1) / inter
    weights = ExpertWeights.from_nvfp4(w13, codes_of_one(experts, hidden, inter, down))
    return MoE(cfg, weights, **({"backend": "torch"} | options))


def poison(tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.uint8 or tensor.dtype == torch.float8_e4m3fn:
        tensor.view(torch.uint8).fill_(0x7F)
    elif tensor.is_floating_point():
        tensor.fill_(math.nan)
    elif tensor.dtype != torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).max)
    return tensor


def poison_new_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch allocates without initialising is NaN, 0x7F or the largest integer from now on."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")):
        original = getattr(owner, name)

        def wrapped(*args: Any, _original: Any = original, **kwargs: Any) -> Tensor:
            return poison(_original(*args, **kwargs))

        monkeypatch.setattr(owner, name, wrapped)


def assert_rows(y: Tensor, want: list[float], rtol: float = 1e-2) -> None:
    """Every column of row t is want[t]; an expected 0 must be exactly 0."""
    assert torch.isfinite(y).all()
    for row, value in zip(y.float(), want, strict=True):
        if value == 0:
            assert not row.any()
        assert ((row - value).abs() <= rtol * abs(value)).all(), (row[:4], value)


def ids_of(rows: list[list[int]], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(rows, dtype=dtype)
