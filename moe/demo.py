"""The main job on made-up weights: write a checkpoint, load it, run it, compare every stage with
fp64.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from cute_kernels import nvfp4
from moe import reference
from moe.checkpoint import load_checkpoint
from moe.config import MoEConfig
from moe.layer import MoE
from moe.reference import Stages

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


def heavy_tailed(shape: tuple[int, ...], generator: torch.Generator, scale: float) -> Tensor:
    """Student-t like with 4 degrees of freedom, and one row in 32 eight times larger: outliers as
    in real weights.
    """
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
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        router = torch.randn(CONFIG["num_experts"], hidden, generator=generator) / hidden**0.5
        tensors[f"{prefix}.gate.weight"] = router.bfloat16()
        for e in range(CONFIG["num_experts"]):
            for name, shape in (
                ("gate_proj", (inter, hidden)),
                ("up_proj", (inter, hidden)),
                ("down_proj", (hidden, inter)),
            ):
                weight = heavy_tailed(shape, generator, shape[1] ** -0.5).bfloat16()
                full = f"{prefix}.experts.{e}.{name}"
                tensors.update(modelopt_tensors(full, weight))
                if layer == LAYER:
                    originals[f"{e}.{name}"] = weight
    save_file(tensors, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return originals


def modelopt_tensors(name: str, weight: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale, weight_scale_2 and a placeholder input_scale, as ModelOpt writes
    them.
    """
    g = weight.abs().amax().float() / (nvfp4.E2M1_MAX * nvfp4.UE4M3_MAX)
    q = nvfp4.quantize(weight, g, exact_division=True)
    return {
        f"{name}.weight": q.data,
        f"{name}.weight_scale": q.scale,
        f"{name}.weight_scale_2": q.global_scale,
        f"{name}.input_scale": torch.ones(()),
    }


class StageRow(NamedTuple):
    """One line of the table: measured seconds (NaN: part of another), error against an fp64
    layer.
    """

    stage: str
    shape: str
    nbytes: int
    seconds: float
    error: float


def relative(out: Tensor, want: Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


def fp64_layer(
    cfg: MoEConfig, weights: dict[str, Tensor], x: Tensor, plan_of: Stages
) -> dict[str, Tensor]:
    """The same experts in fp64 without any quantisation: gate, up, h of every routed row, and y."""
    plan = plan_of.plan
    offsets, wide = plan.expert_offsets.tolist(), x.double()
    rows = plan.row_token.numel()
    gate = torch.zeros(rows, cfg.intermediate, dtype=torch.float64)
    up = gate.clone()
    o = torch.zeros(rows, cfg.hidden, dtype=torch.float64)
    for e in range(cfg.num_experts):
        r = slice(offsets[e], offsets[e + 1])
        rows_x = wide[plan.row_token[r].long()]
        gate[r] = rows_x @ weights[f"{e}.gate_proj"].double().t()
        up[r] = rows_x @ weights[f"{e}.up_proj"].double().t()
        o[r] = (torch.nn.functional.silu(gate[r]) * up[r]) @ weights[f"{e}.down_proj"].double().t()
    y = torch.zeros_like(wide)
    y.index_add_(0, plan.row_token.long(), o * plan.row_weight.double().unsqueeze(-1))
    return {"gate": gate, "up": up, "h": torch.nn.functional.silu(gate) * up, "y": y}


def run_demo(folder: Path, tokens: int = 64, seed: int = 1) -> tuple[MoE, list[StageRow]]:
    """Write, load, route and run; returns the layer and its table."""
    originals = write_checkpoint(folder)
    started = time.perf_counter()
    cfg, weights, extras = load_checkpoint(folder, layer=LAYER)
    loaded = time.perf_counter() - started
    layer = MoE(cfg, weights, router_weight=extras.router_weight)
    x = heavy_tailed((tokens, cfg.hidden), torch.Generator().manual_seed(seed), 1.0).bfloat16()
    layer(x)
    started = time.perf_counter()
    y = layer(x)
    seconds = time.perf_counter() - started
    stages, timing = _timed_reference(layer, x)
    exact = fp64_layer(cfg, originals, x, stages)
    decoded = stages.x.float() * stages.gx.unsqueeze(-1)
    hq = stages.hq.float() * stages.gh.unsqueeze(-1)
    size = stages.plan.row_token.numel()
    inter, hidden = cfg.intermediate, cfg.hidden
    nan = float("nan")
    table = [
        StageRow(
            "load and pack experts", f"{cfg.num_experts} experts", weights.nbytes, loaded, nan
        ),
        StageRow(
            "quantise x",
            f"({tokens}, {hidden})",
            tokens * hidden * 9 // 16,
            nan,
            relative(decoded, x),
        ),
        StageRow(
            "gate",
            f"({size}, {inter})",
            size * inter * 4,
            nan,
            relative(stages.gate, exact["gate"]),
        ),
        StageRow(
            "up", f"({size}, {inter})", size * inter * 4, nan, relative(stages.up, exact["up"])
        ),
        StageRow(
            "h = act(gate, up)",
            f"({size}, {inter})",
            size * inter * 4,
            nan,
            relative(stages.h, exact["h"]),
        ),
        StageRow(
            "quantise h", f"({size}, {inter})", size * inter * 9 // 16, nan, relative(hq, stages.h)
        ),
        StageRow(
            "y (reference)",
            f"({tokens}, {hidden})",
            y.nbytes,
            timing,
            relative(stages.y, exact["y"]),
        ),
        StageRow(
            f"y ({layer.backend})",
            f"({tokens}, {hidden})",
            y.nbytes,
            seconds,
            relative(y, exact["y"]),
        ),
    ]
    return layer, table


def _timed_reference(layer: MoE, x: Tensor) -> tuple[Stages, float]:
    from moe.router import route, router_logits

    assert layer.router_weight is not None
    ids, mix = route(router_logits(x, layer.router_weight), layer.cfg)
    started = time.perf_counter()
    stages = reference.experts(x, ids, mix, layer.cfg, layer.weights)
    return stages, time.perf_counter() - started
