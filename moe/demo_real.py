"""The main job on real weights and real activations: the six feed-forward blocks of a small BERT
(all-MiniLM-L6-v2, 384 -> 1536 -> 384, GELU) as six experts without a gate, and the hidden states
of some sentences as tokens, each routed to the block whose input it is, or to that block and the
next one.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu

from cute_kernels import nvfp4
from cute_kernels.activations import Activation, MathNamespace
from moe import reference
from moe.checkpoint import load_checkpoint
from moe.config import MoEConfig
from moe.demo import modelopt_scale, modelopt_tensors, relative
from moe.demo_bert import Bert, model_folder
from moe.demo_text import CALIBRATION, MEASURED
from moe.layer import MoE
from moe.weights import ExpertWeights

MODES: dict[str, dict[str, Any]] = {  # name -> arguments of MoE
    "W4A4, per_token": {"activation_scale": "per_token"},
    "W4A4, per_tensor": {"activation_scale": "per_tensor"},
    "W4A4, static": {"activation_scale": "static"},
    "W4A16": {"activations": "bf16"},
}


class TextTable(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class GELU(Activation):
    """x/2 * (1 + erf(x / sqrt 2)), not gated: an activation as a user writes it."""

    gated: ClassVar[bool] = False

    def __call__(self, m: MathNamespace, gate: Any, up: Any = None) -> Any:
        half = 0.5 * gate
        return m.fma(half, m.erf(gate * math.sqrt(0.5)), half)


class Tokens(NamedTuple):
    """Inputs of all blocks in a row: x (T, H) fp32, block (T,)."""

    x: Tensor
    block: Tensor

    def routing(self) -> tuple[Tensor, Tensor]:
        return self.block.unsqueeze(-1), torch.ones(len(self.block), 1)

    def mixture(self, blocks: int) -> tuple[Tensor, Tensor]:
        """Top 2: three quarters of the own block, one quarter of the next (the first after the
        last), which sees tokens that it was not trained on."""
        ids = torch.stack([self.block, (self.block + 1) % blocks], -1)
        return ids, torch.tensor([[0.75, 0.25]]).expand(len(ids), 2)


def collect(model: Bert, sentences: tuple[str, ...]) -> Tokens:
    per_sentence = [model(s, model.ffn)[0] for s in sentences]
    per_block = [torch.cat(states) for states in zip(*per_sentence)]
    block = torch.cat([torch.full((len(x),), i) for i, x in enumerate(per_block)])
    return Tokens(torch.cat(per_block).float(), block)


def plain_weights(model: Bert, block: int) -> dict[str, Tensor]:
    name = f"encoder.layer.{block}"
    return {
        "up_proj": model.tensors[f"{name}.intermediate.dense.weight"].float(),
        "down_proj": model.tensors[f"{name}.output.dense.weight"].float(),
    }


def plain_bias(model: Bert, block: int) -> dict[str, Tensor]:
    name = f"encoder.layer.{block}"
    return {
        "up_proj": model.tensors[f"{name}.intermediate.dense.bias"].float(),
        "down_proj": model.tensors[f"{name}.output.dense.bias"].float(),
    }


def write_checkpoint(folder: Path, model: Bert, calibration: Tokens) -> None:
    """ModelOpt dialect, with biases, and with input scales measured on ``calibration`` without
    biases: amax / (6 * 448)."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for e in range(model.layers):
        weights, biases = plain_weights(model, e), plain_bias(model, e)
        x = calibration.x[calibration.block == e].double()
        h = gelu(x @ weights["up_proj"].double().t())
        for role, seen in (("up_proj", x), ("down_proj", h)):
            name = f"model.layers.0.mlp.experts.{e}.{role}"
            g = modelopt_scale(weights[role])
            tensors |= modelopt_tensors(name, weights[role], g, float(modelopt_scale(seen)))
            tensors[f"{name}.bias"] = biases[role].clone()
    save_file(tensors, str(folder / "model.safetensors"))


def decibels(out: Tensor, want: Tensor) -> float:
    """Signal to noise ratio of ``out``."""
    return -20.0 * math.log10(relative(out, want))


def without_biases(weights: ExpertWeights) -> ExpertWeights:
    return dataclasses.replace(weights, b13=None, b2=None)


def weight_table(model: Bert, weights: ExpertWeights) -> TextTable:
    rows: list[tuple[str, ...]] = []
    for e in range(model.layers):
        plain = plain_weights(model, e)
        up = reference.expert(weights.l1(), e)
        up_values = nvfp4.decode(up, torch.float64) * weights.g13[e, 0].double()
        down = reference.expert(weights.l2(), e).dequantize(torch.float64)
        rows.append(
            (
                str(e),
                f"{decibels(up_values, plain['up_proj']):.2f}",
                f"{decibels(down, plain['down_proj']):.2f}",
            )
        )
    return TextTable("weights, signal to noise in dB", ("block", "up", "down"), rows)


def unquantised(model: Bert, x: Tensor, ids: Tensor, mix: Tensor) -> Tensor:
    """y (T, H) fp64 of the blocks with their original weights, without biases."""
    y = torch.zeros_like(x, dtype=torch.float64)
    for e in range(model.layers):
        token, slot = torch.where(ids == e)
        plain = plain_weights(model, e)
        h = gelu(x[token].double() @ plain["up_proj"].double().t())
        o = h @ plain["down_proj"].double().t()
        y.index_add_(0, token, o * mix[token, slot].double().unsqueeze(-1))
    return y


def layer_table(cfg: MoEConfig, model: Bert, folder: Path, tokens: Tokens) -> TextTable:
    """Each mode against the same experts in fp64 with their original weights; no biases."""
    ids, mix = tokens.routing()
    want = unquantised(model, tokens.x, ids, mix)
    rows: list[tuple[str, ...]] = []
    for name, options in MODES.items():
        h_scale = "static" if options.get("activation_scale") == "static" else "dynamic"
        _, weights, _ = load_checkpoint(folder, layer=0, config=cfg, h_scale=h_scale)
        layer = MoE(cfg, without_biases(weights), **options)
        y = layer.experts(tokens.x, ids, mix)
        ways = (layer.numerics.activations, layer.numerics.activation_scale)
        stages = reference.experts(tokens.x, ids, mix, cfg, layer.weights, *ways)
        x_seen = stages.x * stages.gx.double().unsqueeze(-1)
        h_seen = stages.hq * stages.gh.double().unsqueeze(-1)
        blocks = [
            relative(y[tokens.block == e], want[tokens.block == e]) for e in range(model.layers)
        ]
        rows.append(
            (
                name,
                f"{decibels(x_seen, tokens.x):.2f}",
                f"{decibels(h_seen, stages.h):.2f}",
                f"{decibels(y, want):.2f}",
                f"{relative(y, want):.4f}",
                f"{sum(blocks) / len(blocks):.4f}",
                f"{max(blocks):.4f} ({blocks.index(max(blocks))})",
            )
        )
    return TextTable(
        f"{len(tokens.x)} tokens through 6 experts, no biases, against fp64 and original weights",
        ("mode", "x, dB", "h, dB", "y, dB", "y, error", "mean of blocks", "worst block"),
        rows,
    )


def mixture_table(
    cfg: MoEConfig, model: Bert, folder: Path, tokens: Tokens, calibration: Tokens
) -> TextTable:
    """Top 2, no biases. Static scales are those of `MoE.calibrate` on ``calibration``."""
    ids, mix = tokens.mixture(model.layers)
    want = unquantised(model, tokens.x, ids, mix)
    rows: list[tuple[str, ...]] = []
    for name, options in MODES.items():
        _, weights, _ = load_checkpoint(folder, layer=0, config=cfg, h_scale="dynamic")
        layer = MoE(dataclasses.replace(cfg, top_k=2), without_biases(weights), **options)
        if options.get("activation_scale") == "static":
            layer.calibrate(calibration.x, routing=calibration.mixture(model.layers))
        y = layer.experts(tokens.x, ids, mix)
        rows.append((name, f"{decibels(y, want):.2f}", f"{relative(y, want):.4f}"))
    return TextTable(
        f"{len(tokens.x)} tokens, each 3/4 through its own block and 1/4 through the next",
        ("mode", "y, dB", "y, error"),
        rows,
    )


def model_table(cfg: MoEConfig, model: Bert, folder: Path, calibration: Tokens) -> TextTable:
    """All six blocks replaced, biases included: cosine of the embeddings of the sentences."""
    want = [model(s, model.ffn)[1] for s in MEASURED]
    rows: list[tuple[str, ...]] = []
    for name, options in MODES.items():
        _, weights, _ = load_checkpoint(folder, layer=0, config=cfg, h_scale="dynamic")
        layer = MoE(cfg, weights, **options)
        if options.get("activation_scale") == "static":
            layer.calibrate(calibration.x, routing=calibration.routing())

        def ffn(block: int, x: Tensor, layer: MoE = layer) -> Tensor:
            ids = torch.full((len(x), 1), block)
            return layer.experts(x.float(), ids, torch.ones(len(x), 1)).double()

        cosines = torch.stack([model(s, ffn)[1] @ w for s, w in zip(MEASURED, want)])
        rows.append((name, f"{float(cosines.mean()):.4f}", f"{float(cosines.min()):.4f}"))
    return TextTable(
        f"embeddings of {len(MEASURED)} sentences, all blocks replaced: cosine with the original",
        ("mode", "mean", "worst"),
        rows,
    )


def run_demo_real(folder: Path) -> list[TextTable]:
    """Write the checkpoint, load it, run, compare. Raises RuntimeError without the package."""
    model = Bert(model_folder())
    c = model.config
    cfg = MoEConfig(
        c["hidden_size"], c["intermediate_size"], model.layers, top_k=1, activation=GELU()
    )
    calibration, tokens = collect(model, CALIBRATION), collect(model, MEASURED)
    write_checkpoint(folder, model, calibration)
    _, weights, _ = load_checkpoint(folder, layer=0, config=cfg)
    return [
        weight_table(model, weights),
        layer_table(cfg, model, folder, tokens),
        mixture_table(cfg, model, folder, tokens, calibration),
        model_table(cfg, model, folder, calibration),
    ]
