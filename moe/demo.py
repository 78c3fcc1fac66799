"""The main job on made-up weights: write a checkpoint, load it, route and run a batch, compare
every stage with fp64."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.torch_math import TORCH_MATH
from moe import experts, reference
from moe.checkpoint import load_checkpoint
from moe.config import MoEConfig
from moe.layer import MoE
from moe.plan import RoutingPlan, make_plan
from moe.reference import combine
from moe.router import route, router_logits
from moe.weights import ExpertWeights

T = TypeVar("T")
LAYER = 1
CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "quantization_config": {"quant_algo": "NVFP4", "quant_method": "modelopt", "group_size": 16},
}


class Row(NamedTuple):
    """One line of the table; NaN where there is nothing to measure. ``error`` is the norm of the
    difference from an unquantised fp64 layer over the norm of the latter."""

    stage: str
    shape: str
    nbytes: int
    seconds: float = math.nan
    error: float = math.nan


class Result(NamedTuple):
    """``differing``: elements of y that are not the specification's; ``distance``: relative norm
    of that difference."""

    layer: MoE
    rows: list[Row]
    differing: int
    distance: float


def heavy_tailed(shape: tuple[int, ...], generator: torch.Generator, scale: float) -> Tensor:
    """fp32 like Student's t with 4 degrees of freedom, and one row in 32 eight times larger:
    outliers as in real weights."""
    normal = torch.randn(shape, generator=generator)
    chi = torch.randn((4, *shape), generator=generator).pow(2).mean(0)
    rows = 1.0 + 7.0 * (torch.rand(shape[:-1], generator=generator) < 1 / 32).float()
    return normal / chi.sqrt() * rows.unsqueeze(-1) * scale


def write_checkpoint(folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """Write ``folder`` in the ModelOpt dialect (config.json, one safetensors file). Returns the
    weights of layer LAYER before quantisation by name."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    hidden, inter = CONFIG["hidden_size"], CONFIG["moe_intermediate_size"]
    tensors: dict[str, Tensor] = {}
    originals: dict[str, Tensor] = {}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp"
        router = torch.randn(CONFIG["num_experts"], hidden, generator=generator) / hidden**0.5
        tensors[f"{prefix}.gate.weight"] = router.bfloat16()
        for e in range(CONFIG["num_experts"]):
            shapes = {"gate_proj": (inter, hidden), "up_proj": (inter, hidden)}
            weights = {
                name: heavy_tailed(shape, generator, shape[1] ** -0.5).bfloat16()
                for name, shape in {**shapes, "down_proj": (hidden, inter)}.items()
            }
            pair = torch.stack([weights[name] for name in shapes])
            for name, weight in weights.items():
                g = modelopt_scale(pair if name in shapes else weight)  # gate and up share theirs
                full = f"{prefix}.experts.{e}.{name}"
                tensors.update(modelopt_tensors(full, weight, g))
                if layer == LAYER:
                    originals[f"{e}.{name}"] = weight
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return originals


def modelopt_scale(weight: Tensor) -> Tensor:
    """amax / (6 * 448), fp32 ()."""
    return weight.abs().amax().float() / (nvfp4.E2M1_MAX * nvfp4.UE4M3_MAX)


def modelopt_tensors(
    name: str, weight: Tensor, g: Tensor, input_scale: float = 1.0
) -> dict[str, Tensor]:
    """weight, weight_scale, weight_scale_2 and input_scale (1.0: a placeholder), as ModelOpt
    writes them."""
    q = nvfp4.quantize(weight, g, exact_division=True)
    return {
        f"{name}.weight": q.data,
        f"{name}.weight_scale": q.scale,
        f"{name}.weight_scale_2": q.global_scale,
        f"{name}.input_scale": torch.tensor(input_scale),
    }


def relative(out: Tensor, want: Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


def timed(what: Callable[[], T]) -> tuple[T, float]:
    """Result and seconds of the second of two calls: the first one warms up."""
    what()
    started = time.perf_counter()
    result = what()
    return result, time.perf_counter() - started


def unquantised(
    cfg: MoEConfig, weights: dict[str, Tensor], x: Tensor, plan: RoutingPlan
) -> dict[str, Tensor]:
    """The same experts in fp64: gate, up and h of every routed row (R, I), y (T, H)."""
    offsets, wide = plan.expert_offsets.tolist(), x.double()
    rows = plan.row_token.numel()
    gate = torch.zeros(rows, cfg.intermediate, dtype=torch.float64)
    up, o = gate.clone(), torch.zeros(rows, cfg.hidden, dtype=torch.float64)
    for e in range(cfg.num_experts):
        r = slice(offsets[e], offsets[e + 1])
        tokens = wide[plan.row_token[r].long()]
        gate[r] = tokens @ weights[f"{e}.gate_proj"].double().t()
        up[r] = tokens @ weights[f"{e}.up_proj"].double().t()
        o[r] = (torch.nn.functional.silu(gate[r]) * up[r]) @ weights[f"{e}.down_proj"].double().t()
    y = torch.zeros_like(wide)
    y.index_add_(0, plan.row_token.long(), o * plan.row_weight.double().unsqueeze(-1))
    return {"gate": gate, "up": up, "h": torch.nn.functional.silu(gate) * up, "y": y}


def run_demo(folder: Path, tokens: int = 64, seed: int = 1) -> Result:
    """Write, load, route, run and compare.

    Raises RuntimeError when the layer is further from the specification than bf16 rounding.
    """
    originals = write_checkpoint(folder)
    (cfg, weights, extras), loading = timed(lambda: load_checkpoint(folder, layer=LAYER))
    layer = MoE(cfg, weights, **extras.router())
    x = heavy_tailed((tokens, cfg.hidden), torch.Generator().manual_seed(seed), 1.0).bfloat16()
    y, running = timed(lambda: layer(x))
    rows, ids, mix = stage_rows(layer, x, originals)
    specification = reference.experts(x, ids, mix, cfg, weights).y
    exact = unquantised(cfg, originals, x, _plan(cfg, weights, ids, mix))["y"]
    distance = relative(y, specification)
    if not distance < 2.0**-7:
        raise RuntimeError(f"y differs from the specification by {distance:.2e}, over 2^-7")
    load = Row("load, check, pack", f"{cfg.num_experts} experts", weights.nbytes, loading)
    whole = Row(
        f"whole layer ({layer.backend})", str(tuple(y.shape)), y.nbytes, running, relative(y, exact)
    )
    return Result(layer, [load, *rows, whole], int((y != specification).sum()), distance)


def _plan(cfg: MoEConfig, weights: ExpertWeights, ids: Tensor, mix: Tensor) -> RoutingPlan:
    return make_plan(ids, mix, cfg.num_experts, weights.first_expert, weights.num_experts)


def stage_rows(
    layer: MoE, x: Tensor, originals: dict[str, Tensor]
) -> tuple[list[Row], Tensor, Tensor]:
    """The stages of backend "torch" one by one, and the routing (ids, weights) of x (T, H)."""
    cfg, weights, numerics = layer.cfg, layer.weights, layer.numerics
    router = layer.router_weight
    assert router is not None, "the demo writes a router"
    (ids, mix), routing = timed(lambda: route(router_logits(x, router), cfg))
    plan, planning = timed(lambda: _plan(cfg, weights, ids, mix))
    exact = unquantised(cfg, originals, x, plan)
    (values, gx), quantising = timed(
        lambda: experts.stage_rows(x, ids, mix, cfg, weights, numerics)
    )
    token, expert = plan.row_token.long(), experts.row_expert(plan)
    xs, offsets = values[token], plan.expert_offsets
    l1_scale, l2_scale = (s.view(torch.uint8) for s in (weights.l1_scale, weights.l2_scale))
    acc = torch.empty(token.numel(), 2 * cfg.intermediate)
    _, l1 = timed(lambda: experts.grouped_matmul(xs, weights.l1_data, l1_scale, offsets, acc))
    gate, up = (acc[:, p::2] * (gx[token] * weights.g13[expert, p]).unsqueeze(-1) for p in range(2))
    h, activating = timed(lambda: cfg.activation(TORCH_MATH, gate, up))
    (hq, gh), quantising_h = timed(lambda: experts.stage_hidden_rows(h, None, numerics))
    assert gh is not None, "activations are quantised"
    acc2 = torch.empty(token.numel(), cfg.hidden)
    _, l2 = timed(lambda: experts.grouped_matmul(hq, weights.l2_data, l2_scale, offsets, acc2))
    o = (acc2 * (gh * weights.g2[expert]).unsqueeze(-1)).bfloat16()
    y, combining = timed(lambda: combine(o, plan, mix, x.dtype, None))

    def packed(rows: int, k: int) -> int:
        return rows * k // 2 + rows * k // 16 + 4 * rows

    (t, hidden), (r, inter) = x.shape, h.shape
    x_error = relative(values.float() * gx.unsqueeze(-1), x)
    h_error = relative(hq.float() * gh.unsqueeze(-1), h)
    return (
        [
            Row("route", f"{tuple(ids.shape)} of {cfg.num_experts}", 8 * ids.numel(), routing),
            Row("plan", f"({r},)", 12 * r + offsets.nbytes, planning),
            Row("quantise x", f"({t}, {hidden})", packed(t, hidden), quantising, x_error),
            Row("L1: gate", f"({r}, {inter})", 4 * r * inter, l1, relative(gate, exact["gate"])),
            Row("L1: up", f"({r}, {inter})", 4 * r * inter, error=relative(up, exact["up"])),
            Row("activation", f"({r}, {inter})", h.nbytes, activating, relative(h, exact["h"])),
            Row("quantise h", f"({r}, {inter})", packed(r, inter), quantising_h, h_error),
            Row("L2", f"({r}, {hidden})", o.nbytes, l2),
            Row("combine", f"({t}, {hidden})", y.nbytes, combining, relative(y, exact["y"])),
        ],
        ids,
        mix,
    )
