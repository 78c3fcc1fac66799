"""Checkpoints that cannot be loaded: one error that names tensor, expert and expectation, and
nothing is returned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moe import MoEConfig, ReLU2, checkpoint, load_checkpoint
from moe.tensor_files import CheckpointError
from tests.checkpoints import QWEN, E, H, I, K, compressed, dividing, expert_tensors, layer, write

CFG = MoEConfig(H, I, E, K)
P = "model.layers.0.mlp.experts."
Tensors = dict[str, Tensor]
Change = Callable[[Tensors], None]


def drop(name: str) -> Change:
    def change(t: Tensors) -> None:
        del t[name]

    return change


def put(name: str, value: Tensor) -> Change:
    def change(t: Tensors) -> None:
        t[name] = value

    return change


def cut(name: str, rows: int) -> Change:
    def change(t: Tensors) -> None:
        t[name] = t[name][:rows]

    return change


def move(name: str, to: str) -> Change:
    def change(t: Tensors) -> None:
        t[to] = t.pop(name)

    return change


def drop_prefix(prefix: str) -> Change:
    def change(t: Tensors) -> None:
        for name in [n for n in t if n.startswith(prefix)]:
            del t[name]

    return change


BYTES = torch.zeros(I, H // 2, dtype=torch.uint8)
# what is done to a good ModelOpt checkpoint -> what the error says
BAD: dict[str, tuple[Change, str]] = {
    "no codes": (drop(f"{P}1.up_proj.weight"), r"expert 1 up: no weight tensor; found \['weight_"),
    "no block scales": (
        drop(f"{P}1.up_proj.weight_scale"),
        rf"expert 1 up: weight_scale is missing, expected float8_e4m3fn.* \({I}, {H // 16}\)",
    ),
    "no global scale": (
        drop(f"{P}3.down_proj.weight_scale_2"),
        r"expert 3 down: .*one scale per 16.*global scale is missing",
    ),
    "no projection": (
        drop_prefix(f"{P}2.gate_proj"),
        "expert 2 gate: no tensor of this projection",
    ),
    "no expert": (drop_prefix(f"{P}2."), "layer 0 expert 2 gate: no tensor"),
    "one expert too many": (
        put(f"{P}4.up_proj.weight", BYTES),
        r"layer 0: tensors of experts \[4\], but the config has 4 experts",
    ),
    "an unknown projection": (
        put(f"{P}0.mid_proj.weight", BYTES),
        r"0\.mid_proj\.weight: 'mid_proj' is no projection of an expert",
    ),
    "an unknown tensor of the experts": (
        put(f"{P}smoothing", torch.ones(2)),
        r"experts\.smoothing is no tensor of an expert that is known",
    ),
    "an unknown tensor of a projection": (
        put(f"{P}0.up_proj.weight_zero_point", torch.ones(2)),
        r"expert 0 up: .*weight_zero_point does not belong to a modelopt weight",
    ),
    "the same projection twice": (
        put(f"{P}0.w3.weight", BYTES),
        r"0\.w3\.weight and .*0\.up_proj\.weight are the same tensor|"
        r"0\.up_proj\.weight and .*0\.w3\.weight are the same tensor",
    ),
    "codes of another shape": (
        cut(f"{P}1.gate_proj.weight", I - 16),
        rf"expert 1 gate: .*1\.gate_proj\.weight must be uint8 or int8 \({I}, {H // 2}\), got "
        rf"uint8 \({I - 16}, {H // 2}\)",
    ),
    "block scales of another shape": (
        cut(f"{P}1.gate_proj.weight_scale", I - 1),
        rf"expert 1 gate: .*weight_scale must be .* \({I}, {H // 16}\), got .*\({I - 1},",
    ),
    "block scales of another type": (
        put(f"{P}1.gate_proj.weight_scale", torch.ones(I, H // 16)),
        r"expert 1 gate: .*weight_scale must be float8_e4m3fn or uint8.*, got float32",
    ),
    "codes of another type": (
        put(f"{P}1.gate_proj.weight", torch.zeros(I, H // 2, dtype=torch.int32)),
        r"expert 1 gate: .*gate_proj\.weight is torch\.int32: experts are read from",
    ),
    "fp8 experts": (
        put(f"{P}1.gate_proj.weight", torch.zeros(I, H).to(torch.float8_e4m3fn)),
        r"gate_proj\.weight is torch\.float8_e4m3fn: experts are read from NVFP4, MXFP4",
    ),
    "global scales of several values": (
        put(f"{P}1.gate_proj.weight_scale_2", torch.ones(2)),
        r"expert 1 gate: .*weight_scale_2 must be one number, got \(2,\)",
    ),
    "a global scale of 0": (
        put(f"{P}1.gate_proj.weight_scale_2", torch.tensor(0.0)),
        r"expert 1 gate: .*weight_scale_2 must be positive and finite, got 0\.0",
    ),
    "a negative global scale": (
        put(f"{P}1.down_proj.weight_scale_2", torch.tensor(-0.5)),
        r"expert 1 down: .*weight_scale_2 must be positive and finite, got -0\.5",
    ),
    "a global scale that is NaN": (
        put(f"{P}1.down_proj.weight_scale_2", torch.tensor(float("nan"))),
        r"expert 1 down: .*weight_scale_2 must be positive and finite, got nan",
    ),
    "an infinite global scale": (
        put(f"{P}1.down_proj.weight_scale_2", torch.tensor(float("inf"))),
        r"expert 1 down: .*weight_scale_2 must be positive and finite, got inf",
    ),
    "a bias that other projections lack": (
        put(f"{P}1.down_proj.bias", torch.zeros(H)),
        "expert 1 gate: bias is missing, other projections of the expert have one",
    ),
    "biases of some experts": (
        lambda t: t.update(
            {
                f"{P}1.gate_proj.bias": torch.zeros(I),
                f"{P}1.up_proj.bias": torch.zeros(I),
                f"{P}1.down_proj.bias": torch.zeros(H),
            }
        ),
        r"experts \[0, 2, 3\] have no biases",
    ),
    "a bias of another shape": (
        put(f"{P}1.down_proj.bias", torch.zeros(H + 1)),
        rf"expert 1 down: .*bias must be .* \({H},\), got float32 \({H + 1},\)",
    ),
    "fused and separate gate and up": (
        put(f"{P}0.gate_up_proj.weight", BYTES),
        "expert 0: both fused and separate gate and up",
    ),
    "another layer": (
        lambda t: [t.update({n.replace("layers.0", "layers.7"): t.pop(n)}) for n in list(t)],
        "layer 0 has no experts; layers with experts: 7",
    ),
    "no experts at all": (
        lambda t: (t.clear(), t.update({"model.layers.0.mlp.up_proj.weight": BYTES})),
        "layer 0 has no experts; layers with experts: none",
    ),
    "two sets of experts": (
        put("tower.layers.0.mlp.experts.0.up_proj.weight", BYTES),
        "layer 0 has more than one set of experts",
    ),
    "a quantised router": (
        put("model.layers.0.mlp.gate.weight", torch.zeros(E, H, dtype=torch.uint8)),
        rf"mlp\.gate\.weight must be the router_weight.*{E} rows, floats, got uint8",
    ),
    "a router of other experts": (
        put("model.layers.0.mlp.gate.weight", torch.zeros(E + 1, H)),
        rf"mlp\.gate\.weight must be the router_weight.*, got float32 \({E + 1}, {H}\)",
    ),
    "a table of other experts": (
        put("model.layers.0.mlp.gate.tid2eid", torch.zeros(5, K + 1, dtype=torch.int64)),
        rf"tid2eid must be .*integers \(vocabulary, {K}\)",
    ),
}


@pytest.mark.parametrize("what", list(BAD))
def test_errors_name_what_is_wrong(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And, but for values, it is found from the headers: no expert has been packed by then."""
    change, message = BAD[what]
    tensors = expert_tensors(layer())
    change(tensors)
    write(tmp_path, tensors, QWEN)
    values = ("a global scale of 0", "a negative", "that is NaN", "an infinite", "biases of some")
    if not any(v in what for v in values):

        def packed(*args: object) -> None:
            pytest.fail("packing began before the headers were checked")

        monkeypatch.setattr(checkpoint, "_pack", packed)
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path, 0)


def test_the_good_checkpoint_of_these_tests_loads(tmp_path: Path) -> None:
    load_checkpoint(write(tmp_path, expert_tensors(layer()), QWEN), 0)


def test_compressed_tensors_without_its_divisor(tmp_path: Path) -> None:
    tensors = expert_tensors(dividing(layer()), compressed)
    del tensors[f"{P}2.gate_proj.weight_global_scale"]
    write(tmp_path, tensors, QWEN)
    with pytest.raises(CheckpointError, match="expert 2 gate: weight_global_scale is missing"):
        load_checkpoint(tmp_path, 0)
    tensors[f"{P}2.gate_proj.weight_global_scale"] = torch.tensor([0.0])  # its reciprocal is Inf
    write(tmp_path, tensors, QWEN)
    with pytest.raises(CheckpointError, match="must be positive and finite, got 0"):
        load_checkpoint(tmp_path, 0)


def test_a_gate_for_an_activation_that_has_none(tmp_path: Path) -> None:
    write(tmp_path, expert_tensors(layer()))
    with pytest.raises(CheckpointError, match=r"has a gate projection, ReLU2\(\) uses none"):
        load_checkpoint(tmp_path, 0, config=MoEConfig(H, I, E, K, activation=ReLU2()))
    write(tmp_path, expert_tensors(layer(gated=False)))
    with pytest.raises(CheckpointError, match="expert 0 gate: no tensor of this projection"):
        load_checkpoint(tmp_path, 0, config=CFG)


def test_sizes_of_the_config_that_are_not_those_of_the_tensors(tmp_path: Path) -> None:
    write(tmp_path, expert_tensors(layer()), QWEN | {"hidden_size": H + 16})
    with pytest.raises(CheckpointError, match=rf"must be uint8 or int8 \({I}, {(H + 16) // 2}\)"):
        load_checkpoint(tmp_path, 0)


@pytest.mark.parametrize("keep", [0.5, 0.01])
def test_truncated_file(tmp_path: Path, keep: float) -> None:
    file = write(tmp_path, expert_tensors(layer()), QWEN) / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * keep)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read \(truncated\?\)"):
        load_checkpoint(tmp_path, 0)


def test_paths(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        load_checkpoint(tmp_path / "nowhere", 0)
    with pytest.raises(CheckpointError, match="holds no tensors"):
        load_checkpoint(tmp_path, 0)


def test_the_same_tensor_in_two_files(tmp_path: Path) -> None:
    """Without an index nothing says which one counts; with an index it does."""
    folder = write(tmp_path, expert_tensors(layer()), QWEN)
    (folder / "consolidated.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"in both consolidated\.safetensors and model"):
        load_checkpoint(tmp_path, 0)
    index = {"weight_map": dict.fromkeys(expert_tensors(layer()), "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load_checkpoint(tmp_path, 0)


def test_an_index_that_is_wrong(tmp_path: Path) -> None:
    folder = write(tmp_path, expert_tensors(layer()), QWEN, shards=2)
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    name = f"{P}1.up_proj.weight"
    other = {"model-00001-of-00002.safetensors": "model-00002-of-00002.safetensors"}
    file = listed["weight_map"][name]
    swapped = other.get(file, next(iter(other)))
    index.write_text(json.dumps({"weight_map": listed["weight_map"] | {name: swapped}}))
    with pytest.raises(CheckpointError, match=rf"{name} is not in {swapped}"):
        load_checkpoint(tmp_path, 0)
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "must hold an object"),
        ("{}", "has no weight_map"),
        (json.dumps({"weight_map": {name: "../x.safetensors"}}), "not a name of a file here"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(tmp_path, 0)


def test_arguments(tmp_path: Path) -> None:
    write(tmp_path, expert_tensors(layer()), QWEN)
    for options, message in (
        ({"expert_range": (3, 2)}, r"expert_range must lie in 0\.\.4, got \(3, 2\)"),
        ({"expert_range": (0, 5)}, "expert_range"),
        ({"expert_range": (-1, 2)}, "expert_range"),
        ({"h_scale": "fixed"}, "h_scale must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            load_checkpoint(tmp_path, 0, **options)


def test_a_model_type_that_is_not_known_needs_a_config(tmp_path: Path) -> None:
    for config in (None, {}, {"model_type": "resnet"}):
        write(tmp_path, expert_tensors(layer()), config)
        with pytest.raises(CheckpointError, match=r"pass config=MoEConfig\(\.\.\.\)"):
            load_checkpoint(tmp_path, 0)
    load_checkpoint(tmp_path, 0, config=CFG)
