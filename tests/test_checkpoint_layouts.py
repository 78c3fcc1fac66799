"""Loading: every dialect, way of naming and way of stacking gives the same bytes in the canonical
layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moe import MoE, MoEConfig, ReLU2, load_checkpoint
from moe.tensor_files import CheckpointError
from tests import oracle
from tests.checkpoints import (
    HF,
    QWEN,
    W123,
    E,
    H,
    I,
    K,
    assert_biases,
    assert_holds,
    compressed,
    dividing,
    e4m3,
    expert_tensors,
    layer,
    modelopt,
    parts,
    tensor,
    write,
)
from tests.oracle import Array, OracleLayer

CFG = MoEConfig(H, I, E, K)
PLAIN_CFG = MoEConfig(H, I, E, K, activation=ReLU2())  # no gate

# ---- dialects and names -------------------------------------------------------------------------

PREFIXES = [
    ("model.layers.3.mlp.", HF),
    ("model.language_model.layers.3.mlp.", HF),
    ("language_model.model.layers.3.feed_forward.", HF),
    ("layers.3.ffn.", W123),
    ("model.layers.3.block_sparse_moe.", W123),
    ("backbone.layers.3.mixer.", HF),
    ("", HF),
]


@pytest.mark.parametrize(("prefix", "roles"), PREFIXES)
def test_names_of_public_models(tmp_path: Path, prefix: str, roles: dict[str, str]) -> None:
    want = layer()
    tensors = expert_tensors(want, modelopt, prefix, roles)
    if prefix:  # other layers, and layers of other towers, are not touched
        tensors |= expert_tensors(layer(seed=9), modelopt, prefix.replace("3", "13"), roles)
        tensors["vision.layers.3.mlp.up_proj.weight"] = torch.zeros(2, 2)
    cfg, weights, extras = load_checkpoint(write(tmp_path, tensors), 3, config=CFG)
    assert cfg is CFG
    assert_holds(weights, want)
    assert extras.report.dialect == "modelopt"
    assert extras.report.inexact == () and extras.report.unused == ()
    assert weights.gh is None and weights.gx is None and extras.input_scales is None


def test_layers_that_predict_further_tokens_are_not_layer_0(tmp_path: Path) -> None:
    want = layer()
    tensors = expert_tensors(want) | expert_tensors(layer(seed=9), prefix="mtp.layers.0.mlp.")
    assert_holds(load_checkpoint(write(tmp_path, tensors), 0, config=CFG)[1], want)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dialect", ["modelopt", "compressed-tensors"])
def test_nvfp4_dialects(tmp_path: Path, dialect: str, gated: bool) -> None:
    want = layer(gated) if dialect == "modelopt" else dividing(layer(gated))
    writer = modelopt if dialect == "modelopt" else compressed
    tensors = expert_tensors(want, writer)
    path = write(tmp_path, tensors) / "model.safetensors"  # a single file is a checkpoint, too
    _, weights, extras = load_checkpoint(path, 0, config=CFG if gated else PLAIN_CFG)
    assert_holds(weights, want)
    assert weights.gated == gated
    assert extras.report.dialect == dialect


def test_block_scales_may_be_called_scale_and_stored_as_bytes(tmp_path: Path) -> None:
    """The dtype and the shape decide, not the name."""

    def renamed(part: tuple, e: int) -> dict[str, Tensor]:
        t = modelopt(part, e)
        return {
            "weight": t["weight"].view(torch.int8),
            "scale": t["weight_scale"].view(torch.uint8),
            "weight_scale_2": t["weight_scale_2"].reshape(1),
        }

    want = layer()
    tensors = expert_tensors(want, renamed)
    assert_holds(load_checkpoint(write(tmp_path, tensors), 0, config=CFG)[1], want)


def test_dialects_of_one_layer_may_differ(tmp_path: Path) -> None:
    want = dividing(layer())
    tensors = expert_tensors(want, compressed)
    for role in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.2.{role}."
        tensors = {n: t for n, t in tensors.items() if not n.startswith(name)}
    tensors |= {n: t for n, t in expert_tensors(want, modelopt).items() if ".experts.2." in n}
    _, weights, extras = load_checkpoint(write(tmp_path, tensors), 0, config=CFG)
    assert_holds(weights, want)
    assert extras.report.dialect == "compressed-tensors+modelopt"


@pytest.mark.parametrize("shards", [1, 3])
def test_a_rank_gets_its_experts_and_opens_no_other_file(tmp_path: Path, shards: int) -> None:
    want = layer()
    tensors = expert_tensors(want)
    for role in HF.values():  # static scales are those of all experts of all ranks
        for e in range(E):
            name = f"model.layers.0.mlp.experts.{e}.{role}.input_scale"
            tensors[name] = torch.tensor(0.5 + e)
    write(tmp_path, tensors, QWEN, shards)
    _, weights, extras = load_checkpoint(tmp_path, 0, expert_range=(1, 3))
    assert_holds(weights, want, first=1)
    assert weights.gh is not None and weights.gh.tolist() == [1.5, 2.5]
    assert weights.gx is not None and float(weights.gx) == 3.5  # that of expert 3, another rank's
    assert extras.input_scales is not None
    assert extras.input_scales.tolist() == [[0.5 + e] * 2 for e in range(E)]
    _, none, _ = load_checkpoint(tmp_path, 0, expert_range=(E, E))  # more ranks than experts
    assert none.num_experts == 0 and none.first_expert == E and none.hidden == H
    assert none.gx is not None and float(none.gx) == 3.5


def test_shards_of_other_ranks_need_not_be_there(tmp_path: Path) -> None:
    want = layer()
    tensors = expert_tensors(want)
    mine = {n: t for n, t in tensors.items() if ".experts.0." in n or ".experts.1." in n}
    write(tmp_path, mine, QWEN, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    absent = {n: "model-00009-of-00009.safetensors" for n in tensors if n not in mine}
    entries = ", ".join(f'"{n}": "{f}"' for n, f in absent.items())
    index.write_text(text.replace('"weight_map": {', '"weight_map": {' + entries + ", "))
    assert_holds(load_checkpoint(tmp_path, 0, expert_range=(0, 2))[1], want)
    with pytest.raises(CheckpointError, match=r"model-00009-of-00009.safetensors does not exist"):
        load_checkpoint(tmp_path, 0)


# ---- stacked and fused experts ------------------------------------------------------------------


def fused_rows(want: OracleLayer, order: str, granularity: int = 1) -> list[tuple[int, int]]:
    """(0 gate or 1 up, row) of each row of w13."""
    if order == "interleaved":
        turns = range(0, I, granularity)
        return [(p, r) for t in turns for p in (0, 1) for r in range(t, t + granularity)]
    return [(p, r) for p in ((0, 1) if order == "gate_up" else (1, 0)) for r in range(I)]


def fuse(want: OracleLayer, which: int, rows: list[tuple[int, int]]) -> Array:
    """Codes (which = 0) or block scales (1) of gate and up, (E, 2I, ...)."""
    assert want.up is not None
    both = (want.gate, want.up)
    return np.stack([both[p][which][:, r] for p, r in rows], axis=1)


def one_global(want: OracleLayer) -> OracleLayer:
    """One global scale a layer and projection, shared by gate and up."""
    assert want.up is not None
    same = np.full(E, 0.25, np.float32)
    return dataclasses.replace(
        want,
        gate=(*want.gate[:2], same),
        up=(*want.up[:2], same),
        down=(*want.down[:2], same * np.float32(0.5)),
    )


ORDERS = [("gate_up", 1), ("up_gate", 1), ("interleaved", 1), ("interleaved", 8)]


@pytest.mark.parametrize(("order", "granularity"), ORDERS)
@pytest.mark.parametrize("globals_of", ["layer", "expert", "projection"])
def test_stacked_and_fused(tmp_path: Path, order: str, granularity: int, globals_of: str) -> None:
    want = one_global(layer()) if globals_of == "layer" else layer()
    assert want.up is not None
    if globals_of == "expert":
        want = dataclasses.replace(want, up=(*want.up[:2], want.gate[2]))
    g13, g2 = {
        "layer": (np.array([0.25], np.float32), np.array([0.125], np.float32)),
        "expert": (want.gate[2], want.down[2]),
        "projection": (np.stack([want.gate[2], want.up[2]], 1), want.down[2][:, None]),
    }[globals_of]
    rows = fused_rows(want, order, granularity)
    prefix = "model.layers.0.mlp.experts."
    tensors = {
        "gate_up_proj": tensor(fuse(want, 0, rows)),
        "gate_up_proj_weight_scale": e4m3(fuse(want, 1, rows)),
        "gate_up_proj_weight_scale_2": tensor(g13),
        "down_proj": tensor(want.down[0]),
        "down_proj_weight_scale": e4m3(want.down[1]),
        "down_proj_weight_scale_2": tensor(g2),
    }
    write(tmp_path, {prefix + n: t for n, t in tensors.items()}, QWEN)
    loaded = load_checkpoint(tmp_path, 0, order=order, granularity=granularity)[1]
    assert_holds(loaded, want)
    if order == "gate_up":  # the documented default
        assert_holds(load_checkpoint(tmp_path, 0)[1], want)
    assert_holds(
        load_checkpoint(tmp_path, 0, (2, 4), order=order, granularity=granularity)[1], want, 2
    )


def test_banks_of_experts_row_after_row(tmp_path: Path) -> None:
    """(E * rows, cols) with one divisor per projection and layer."""
    want = dividing(one_global(layer()))
    tensors = {}
    for role, (codes, scale, g) in parts(want).items():
        name = f"model.layers.0.mlp.experts.{HF[role]}"
        tensors[f"{name}.weight_packed"] = tensor(codes.reshape(-1, codes.shape[-1]))
        tensors[f"{name}.weight_scale"] = e4m3(scale.reshape(-1, scale.shape[-1]))
        tensors[f"{name}.weight_global_scale"] = torch.tensor([1 / float(g[0])])
    assert_holds(load_checkpoint(write(tmp_path, tensors, QWEN), 0)[1], want)


@pytest.mark.parametrize("square", [False, True])
def test_weights_stored_across(tmp_path: Path, square: bool) -> None:
    """Llama-4 keeps (H, 2I) and (I, H), packed along K. A square one follows the other."""
    hidden, inter = (512, 128) if square else (H, I)  # packed (256, 256)
    want = layer(sizes=(E, hidden, inter))
    assert want.up is not None
    want = dataclasses.replace(want, up=(*want.up[:2], want.gate[2]))
    gate, up = want.gate, want.up
    tensors = {
        "gate_up_proj": tensor(np.concatenate([gate[0], up[0]], 1).transpose(0, 2, 1)),
        "gate_up_proj_weight_scale": e4m3(np.concatenate([gate[1], up[1]], 1).transpose(0, 2, 1)),
        "gate_up_proj_weight_scale_2": tensor(gate[2]),
        "down_proj": tensor(want.down[0].transpose(0, 2, 1)),
        "down_proj_weight_scale": e4m3(want.down[1].transpose(0, 2, 1)),
        "down_proj_weight_scale_2": tensor(want.down[2]),
    }
    prefix = "language_model.model.layers.0.feed_forward.experts."
    config = {
        "text_config": {
            "model_type": "llama4_text",
            "hidden_size": hidden,
            "intermediate_size": inter,
            "num_local_experts": E,
            "num_experts_per_tok": 1,
        }
    }
    write(tmp_path, {prefix + n: t for n, t in tensors.items()}, config)
    cfg, weights, _ = load_checkpoint(tmp_path, 0)
    assert cfg.weight_on_input and cfg.scoring == "sigmoid" and not cfg.renormalize
    assert_holds(weights, want)


# ---- router, shared expert, biases --------------------------------------------------------------


def test_router_tensors_and_what_is_not_used(tmp_path: Path) -> None:
    gen = torch.Generator().manual_seed(0)
    router = torch.randn(E, H, generator=gen)
    bias, correction = torch.randn(2, E, generator=gen)
    table = torch.tensor([[0, 1], [2, 3], [1, 2]])
    shared = torch.randn(I, H, generator=gen)
    p = "layers.0.ffn."
    tensors = expert_tensors(layer(), modelopt, p, W123) | {
        f"{p}gate.weight": router,
        f"{p}gate.bias": correction,
        f"{p}gate.tid2eid": table,
        f"{p}shared_experts.w1.weight": shared,
        f"{p}norm.weight": torch.ones(H),
        "layers.0.attn.wq.weight": torch.ones(2, 2),
        "layers.0.attn.gate.weight": torch.ones(2, 2),
    }
    write(tmp_path, tensors)
    cfg = dataclasses.replace(CFG, scoring="sigmoid")
    extras = load_checkpoint(tmp_path, 0, config=cfg)[2]
    assert torch.equal(extras.router_weight, router) and extras.router_bias is None
    assert torch.equal(extras.selection_bias, correction)  # gate.bias of DeepSeek's own files
    assert torch.equal(extras.tid2eid, table)
    assert list(extras.shared) == ["shared_experts.w1.weight"]
    assert torch.equal(extras.shared["shared_experts.w1.weight"], shared)
    assert extras.report.unused == (f"{p}norm.weight",)
    softmax = load_checkpoint(tmp_path, 0, config=CFG)[2]  # such a router has no correction
    assert softmax.selection_bias is None and torch.equal(softmax.router_bias, correction)

    tensors = expert_tensors(layer()) | {
        "model.layers.0.mlp.router.weight": router,
        "model.layers.0.mlp.router.bias": bias,
        "model.layers.0.mlp.gate.e_score_correction_bias": correction,
    }
    extras = load_checkpoint(write(tmp_path / "hf", tensors, QWEN), 0)[2]
    assert torch.equal(extras.router_weight, router) and torch.equal(extras.router_bias, bias)
    assert torch.equal(extras.selection_bias, correction)
    layer_ = MoE(CFG, load_checkpoint(tmp_path / "hf", 0)[1], **extras.router())
    assert layer_(torch.randn(3, H, generator=gen)).isfinite().all()


def test_what_was_loaded_outlives_the_file(tmp_path: Path) -> None:
    """Nothing of the result is a view of the mapped file."""
    want = layer(biases=oracle.random_biases(1, E, H, I))
    assert want.biases is not None and want.up is not None
    tensors = expert_tensors(want)
    for role, b in zip(("gate", "up", "down"), want.biases):
        for e in range(E):
            tensors[f"model.layers.0.mlp.experts.{e}.{HF[role]}.bias"] = tensor(b[e])
    tensors["model.layers.0.mlp.gate.weight"] = torch.ones(E, H)
    tensors["model.layers.0.mlp.shared_expert.up_proj.weight"] = torch.ones(2, 2)
    file = write(tmp_path, tensors, QWEN) / "model.safetensors"
    _, weights, extras = load_checkpoint(tmp_path, 0)
    with file.open("r+b") as f:  # in place: the mapped pages change
        size = file.stat().st_size
        f.write(b"\xff" * size)
    assert_holds(weights, want)
    assert_biases(weights, want.biases)
    assert torch.equal(extras.router_weight, torch.ones(E, H))
    assert torch.equal(extras.shared["shared_expert.up_proj.weight"], torch.ones(2, 2))


@pytest.mark.parametrize("field", ["l1_data", "l1_scale", "g13", "l2_data", "l2_scale", "g2"])
@pytest.mark.parametrize("end", [0, -1])
def test_the_comparison_sees_one_changed_byte(tmp_path: Path, field: str, end: int) -> None:
    """Padding included: the last byte of the scales is one of a padding row."""
    want = layer()
    _, weights, _ = load_checkpoint(write(tmp_path, expert_tensors(want)), 0, config=CFG)
    assert_holds(weights, want)
    changed = getattr(weights, field).clone()
    changed.view(torch.uint8).view(-1)[end] ^= 1
    with pytest.raises(AssertionError):
        assert_holds(dataclasses.replace(weights, **{field: changed}), want)
