"""Public bug reports about checkpoints: H15 to H20, H30, H55."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe import ExpertWeights, MoE, MoEConfig, ReLU2, load_checkpoint, reference
from moe.tensor_files import CheckpointError, TensorFiles
from tests import oracle
from tests.checkpoints import (
    HF,
    QWEN,
    E,
    H,
    I,
    K,
    assert_holds,
    compressed,
    dividing,
    expert_tensors,
    layer,
    write,
)

PLAIN_CFG = MoEConfig(H, I, E, K, activation=ReLU2())  # no gate


def with_input_scales(tensors: dict[str, Tensor], values: dict[int, float | None]) -> dict:
    out = dict(tensors)
    for e, value in values.items():
        for role in HF.values():
            if value is not None:
                name = f"model.layers.0.mlp.experts.{e}.{role}.input_scale"
                out[name] = torch.tensor(value)
    return out


@pytest.mark.parametrize("byte", [0x7F, 0xFF, 0x80])
def test_scale_byte_that_is_nan_or_negative(tmp_path: Path, byte: int) -> None:
    """H15: one such byte of an all-zero block would ruin the whole output; it is named instead."""
    want = layer(sizes=(2, 128, 128))
    want.down[0][1, 5, 16:24] = 0  # codes 32..47 of row 5
    want.down[1][1, 5, 2] = byte
    cfg = MoEConfig(128, 128, 2, 1)
    name = r"model\.layers\.0\.mlp\.experts\.1\.down_proj\.weight_scale"
    kind = "negative" if byte == 0x80 else "NaN"
    with pytest.raises(
        CheckpointError, match=rf"expert 1 down: {name} has a {kind} scale.* at row 5 block 2$"
    ):
        load_checkpoint(write(tmp_path, expert_tensors(want)), 0, config=cfg)


@pytest.mark.parametrize("present", [None, 0.0, math.nan])
def test_missing_activation_scale_of_some_experts(tmp_path: Path, present: float | None) -> None:
    """H16: experts 3 and 6 were never calibrated."""
    want = layer(sizes=(8, H, I))
    scales = {e: present if e in (3, 6) else 0.25 for e in range(8)}
    write(tmp_path, with_input_scales(expert_tensors(want), scales), QWEN | {"num_experts": 8})
    for mode in ("auto", "static"):
        with pytest.raises(CheckpointError, match=r"input_scale of .* experts \[3, 6\]"):
            load_checkpoint(tmp_path, 0, h_scale=mode)
    cfg, weights, _ = load_checkpoint(tmp_path, 0, h_scale="dynamic")
    assert weights.gh is None and weights.gx is None
    ids = torch.tensor([[3, 6], [6, 3]])
    y = MoE(cfg, weights).experts(torch.ones(2, H), ids, torch.ones(2, 2))
    assert y.isfinite().all() and y.any()
    with pytest.raises(ValueError, match="no gx"):
        MoE(cfg, weights, activation_scale="static").experts(
            torch.ones(2, H), ids, torch.ones(2, 2)
        )


@pytest.mark.parametrize("value", [None, 1.0])
def test_absent_and_placeholder_activation_scales(tmp_path: Path, value: float | None) -> None:
    """H16: absent, or 1.0 for every expert, means one scale per row; asking for static fails."""
    tensors = with_input_scales(expert_tensors(layer()), dict.fromkeys(range(E), value))
    write(tmp_path, tensors, QWEN)
    _, weights, extras = load_checkpoint(tmp_path, 0)
    assert weights.gh is None and weights.gx is None
    assert (extras.input_scales is None) == (value is None)
    with pytest.raises(CheckpointError, match="h_scale='static'"):
        load_checkpoint(tmp_path, 0, h_scale="static")


def test_activation_scales_that_divide(tmp_path: Path) -> None:
    """H16, H18: input_global_scale is a divisor; gate and up read one x: the larger counts."""
    want = dividing(layer())
    tensors = expert_tensors(want, compressed)
    for e in range(E):
        for role, divisor in (("gate_proj", 64.0), ("up_proj", 32.0), ("down_proj", 2.0**e)):
            name = f"model.layers.0.mlp.experts.{e}.{role}.input_global_scale"
            tensors[name] = torch.tensor([divisor])
    _, weights, _ = load_checkpoint(write(tmp_path, tensors, QWEN), 0)
    assert weights.gx is not None and float(weights.gx) == 1 / 32
    assert weights.gh is not None and weights.gh.tolist() == [1.0, 0.5, 0.25, 0.125]


@pytest.mark.parametrize("garbage", [0x38, 0x00, 0x7F])
def test_scales_that_are_not_there(
    tmp_path: Path, garbage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H17: expert 2 lacks the block scales of its up projection; what memory held before does not
    matter."""
    original = torch.zeros

    def prefilled(*args: Any, **kwargs: Any) -> Tensor:
        out = original(*args, **kwargs)
        return out.fill_(garbage) if out.dtype == torch.uint8 else out

    tensors = expert_tensors(layer())
    del tensors["model.layers.0.mlp.experts.2.up_proj.weight_scale"]
    write(tmp_path, tensors, QWEN)
    monkeypatch.setattr(torch, "zeros", prefilled)
    with pytest.raises(CheckpointError, match="layer 0 expert 2 up: weight_scale is missing"):
        load_checkpoint(tmp_path, 0)


def codes_of_one(dialect: str, g: float) -> dict[str, Tensor]:
    """One expert without a gate, all codes 1.0 and all block scales 1.0."""
    names = {
        "divisor": ("weight_packed", "weight_global_scale", [g]),
        "multiplier": ("weight", "weight_scale_2", g),
    }
    packed, last, value = names[dialect]
    out = {}
    for role, rows, k in (("up_proj", I, H), ("down_proj", H, I)):
        name = f"model.layers.0.mlp.experts.0.{role}"
        out[f"{name}.{packed}"] = torch.full((rows, k // 2), 0x22, dtype=torch.uint8)
        out[f"{name}.weight_scale"] = torch.ones(rows, k // 16).to(torch.float8_e4m3fn)
        out[f"{name}.{last}"] = torch.tensor(value)
    return out


def test_global_scale_as_divisor_and_as_multiplier(tmp_path: Path) -> None:
    """H18: both decode to 0.00027902; the wrong reading gives 3584. The name decides."""
    cfg = MoEConfig(H, I, 1, 1, activation=ReLU2())
    values = []
    for dialect, g in (("divisor", 3584.0), ("multiplier", 1 / 3584)):
        folder = write(tmp_path / dialect, codes_of_one(dialect, g))
        weights = load_checkpoint(folder, 0, config=cfg)[1]
        values.append(weights.l2().dequantize())
        assert float(weights.g13[0, 0]) == float(weights.g2[0])
    for v in values:
        assert torch.allclose(v, torch.tensor(0.00027902), rtol=1e-4)
    both = codes_of_one("multiplier", 1 / 3584)
    both["model.layers.0.mlp.experts.0.up_proj.weight_global_scale"] = torch.tensor([3584.0])
    with pytest.raises(CheckpointError, match="ambiguous"):
        load_checkpoint(write(tmp_path / "both", both), 0, config=cfg)


def test_global_scale_that_is_dropped(tmp_path: Path) -> None:
    """H19: divisors 1000, 2000, 4000, 8000 reach their experts; without one, or with a tensor that
    nobody reads, loading says so."""
    divisors = np.array([1000, 2000, 4000, 8000], np.float32)
    g = np.float32(1) / divisors
    plain = layer(gated=False)
    want = dataclasses.replace(plain, gate=(*plain.gate[:2], g), down=(*plain.down[:2], g))

    def dialect(part: tuple, e: int) -> dict[str, Tensor]:
        given = {"weight_global_scale": torch.tensor([divisors[e]])}
        return compressed(part, e) | given

    tensors = expert_tensors(want, dialect)
    weights = load_checkpoint(write(tmp_path, tensors), 0, config=PLAIN_CFG)[1]
    assert_holds(weights, want)
    for e in range(E):
        decoded = oracle.decode(want.down[0][e], want.down[1][e]) / divisors[e]
        got = weights.l2().dequantize(torch.float64)[e].numpy()
        assert np.allclose(got, decoded, rtol=1e-6, atol=0)

    name = "model.layers.0.mlp.experts.3.down_proj."
    without = {n: t for n, t in tensors.items() if n != f"{name}weight_global_scale"}
    with pytest.raises(CheckpointError, match="expert 3 down: weight_global_scale is missing"):
        load_checkpoint(write(tmp_path / "without", without), 0, config=PLAIN_CFG)
    more = tensors | {f"{name}pre_quant_scale": torch.ones(I)}
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.pre_quant_scale does not"):
        load_checkpoint(write(tmp_path / "more", more), 0, config=PLAIN_CFG)


def hidden_of(weights: ExpertWeights, cfg: MoEConfig) -> float:
    """h of expert 0 for x = 1; every element is the same."""
    x = torch.ones(1, cfg.hidden)
    ids = torch.zeros(1, 1, dtype=torch.int64)
    h = reference.experts(x, ids, torch.ones(1, 1), cfg, weights).h
    assert bool((h == h[0, 0]).all())
    return float(h[0, 0])


def constant_expert(gate: float, up: float, order: str | None = None, turn: int = 1) -> dict:
    """H = 128, I = 64, codes and block scales 1.0; gate and up differ in their global scales, or,
    in a fused tensor with ``order``, in their block scales."""
    hidden, inter = 128, 64
    prefix = "model.layers.0.mlp.experts."
    out = {}

    def put(name: str, rows: int, k: int, g: float, separator: str) -> Tensor:
        out[f"{name}{separator}weight" if separator == "." else name] = torch.full(
            (rows, k // 2), 0x22, dtype=torch.uint8
        )
        scale = torch.ones(rows, k // 16)
        out[f"{name}{separator}weight_scale_2"] = torch.tensor(g)
        return scale

    if order is None:
        for role, g in (("gate_proj", gate), ("up_proj", up)):
            name = f"{prefix}0.{role}"
            out[f"{name}.weight_scale"] = put(name, inter, hidden, g, ".").to(torch.float8_e4m3fn)
        name = f"{prefix}0.down_proj"
        out[f"{name}.weight_scale"] = put(name, hidden, inter, 1 / 64, ".").to(torch.float8_e4m3fn)
        return out
    name = f"{prefix}gate_up_proj"
    scale = put(name, 2 * inter, hidden, 1 / hidden, "_")
    for r in range(2 * inter):
        if order == "interleaved":
            is_gate = r // turn % 2 == 0
        else:
            is_gate = (r < inter) == (order == "gate_up")
        scale[r] = gate if is_gate else up
    out[f"{name}_weight_scale"] = scale.to(torch.float8_e4m3fn)
    name = f"{prefix}down_proj"
    scale = put(name, hidden, inter, 1 / 64, "_")
    out[f"{name}_weight_scale"] = scale.to(torch.float8_e4m3fn)
    for n in out:
        if not n.endswith("scale_2"):
            out[n] = out[n].unsqueeze(0)  # (E = 1, ...)
    return out


def test_gate_and_up_with_different_global_scales(tmp_path: Path) -> None:
    """H20: h = silu(.125) * .5; gate's for both: .0083001, the maximum: .1556148."""
    cfg = MoEConfig(128, 64, 1, 1)
    write(tmp_path, constant_expert(2.0**-10, 2.0**-8))
    h = hidden_of(load_checkpoint(tmp_path, 0, config=cfg)[1], cfg)
    assert h == pytest.approx(0.0332006, rel=1e-5)


@pytest.mark.parametrize(
    ("order", "turn"),
    [("gate_up", 1), ("up_gate", 1)] + [("interleaved", n) for n in (1, 8, 16, 32, 64)],
)
def test_order_of_gate_and_up_is_an_argument(tmp_path: Path, order: str, turn: int) -> None:
    """H30: h = silu(2) * .5 when named correctly; swapped .6224594. Block scales go with rows."""
    cfg = MoEConfig(128, 64, 1, 1)
    write(tmp_path, constant_expert(2.0, 0.5, order, turn))

    def h(**options: Any) -> float:
        return hidden_of(load_checkpoint(tmp_path, 0, config=cfg, **options)[1], cfg)

    assert h(order=order, granularity=turn) == pytest.approx(0.8807970, rel=1e-5)
    if order == "up_gate":  # the default is gate_up, documented
        assert h() == pytest.approx(0.6224594, rel=1e-5)
    with pytest.raises(ValueError, match="order must be one of"):
        h(order="w3w1")


class Peak(TorchDispatchMode):
    """Largest sum of bytes of the storages that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor):
                self._see(t.untyped_storage())
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self.alive.pop(key)


BIG = MoEConfig(512, 256, 64, 2)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    want = layer(sizes=(64, 512, 256))
    return write(tmp_path_factory.mktemp("big"), expert_tensors(want))


def peak_of(load: Any) -> tuple[ExpertWeights, int]:
    gc.collect()
    with Peak() as p:
        weights = load()
        gc.collect()
    return weights, p.peak


def test_memory_while_loading(big: Path) -> None:
    """H55: the result plus at most one expert as stored and a few copies of its block scales, and
    the same bits as when all experts are stacked first."""
    weights, peak = peak_of(lambda: load_checkpoint(big, 0, config=BIG)[1])
    chunk = (weights.nbytes + 4 * weights.l1_scale.nbytes) // 64
    assert weights.nbytes <= peak <= weights.nbytes + chunk, (peak - weights.nbytes) / chunk
    want = oracle.to_library(layer(sizes=(64, 512, 256)))
    for (name, a), (_, b) in zip(weights.tensors(), want.tensors(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


def test_memory_is_measured(big: Path) -> None:
    """H55: the same check sees a loader that keeps every expert's tensors."""
    kept = []

    def careless() -> ExpertWeights:
        weights = load_checkpoint(big, 0, config=BIG)[1]
        kept.append(weights.l1_data.clone())
        return weights

    weights, peak = peak_of(careless)
    assert peak >= weights.nbytes + weights.l1_data.nbytes


# ---- config files --------------------------------------------------------------------------------


def test_what_a_config_says_of_its_text_part_and_of_quantisation(tmp_path: Path) -> None:
    """The type of a multi-modal model counts where its text part has none, and config.json where
    the exporter's own file disagrees."""
    text = {"hidden_size": 64, "quantization_config": {"quant_algo": "NVFP4", "group_size": 16}}
    config = {"model_type": "llama4", "text_config": text, "hidden_size": 1}
    write(tmp_path, {"x": torch.zeros(1)}, config)
    other = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["router"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(other))
    files = TensorFiles(tmp_path)
    assert files.config() == {"model_type": "llama4", **text}
    want = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["router"]}
    assert files.quantization() == want
    text["model_type"] = "llama4_text"
    write(tmp_path, {"x": torch.zeros(1)}, config)
    assert TensorFiles(tmp_path).config()["model_type"] == "llama4_text"
