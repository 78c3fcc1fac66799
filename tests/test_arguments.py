"""What constructors and public functions refuse: each error says what was expected and what came,
and nothing has changed after it. Calls of a layer: tests/test_layer_checks.py."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import Nvfp4Tensor
from moe import ExpertWeights, MoE, MoEConfig, Workspace, make_plan
from tests.layers import E, H, K, full_layer, routed, routing, same_bits, tokens

NAN, INF = math.nan, math.inf
I = 32  # noqa: E741

# ---- configurations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("hidden", 64.0, TypeError),
        ("top_k", 2.0, TypeError),
        ("num_experts", True, TypeError),
        ("renormalize", "no", TypeError),
        ("weight_on_input", 1, TypeError),
        ("routed_scaling_factor", NAN, ValueError),
        ("routed_scaling_factor", INF, ValueError),
        ("routed_scaling_factor", "2.5", ValueError),
    ],
)
def test_config(field: str, value: Any, error: type[Exception]) -> None:
    fields: dict[str, Any] = {"hidden": 64, "intermediate": 32, "num_experts": 4, "top_k": 2}
    MoEConfig(**fields)
    with pytest.raises(error, match=rf"{field} must be .*, got {value!r}"):
        MoEConfig(**fields | {field: value})


@pytest.mark.parametrize(("first", "local"), [(-1, 2), (5, None), (3, 2), (0, -1), (0, 5)])
def test_plan_of_experts_that_are_not_there(first: int, local: int | None) -> None:
    ids, mix = routing(3)
    with pytest.raises(ValueError, match="are not all among the 4 experts"):
        make_plan(ids, mix, 4, first, local)


# ---- weights -------------------------------------------------------------------------------------


def parts() -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    shapes = {"gate": (E, I, H), "up": (E, I, H), "down": (E, H, I)}
    return {n: torch.randn(s, generator=g) for n, s in shapes.items()}


def biases() -> list[Tensor]:
    return [torch.zeros(E, I), torch.zeros(E, I), torch.zeros(E, H)]


def spoilt(tensor: Tensor, value: float, *index: int) -> Tensor:
    out = tensor.clone()
    out[index] = value
    return out


def with_bias(which: int, bias: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(bias if i == which else b for i, b in enumerate(biases()))


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("gate", lambda: spoilt(parts()["gate"], NAN, 3, 1, 2), "expert 3: gate must be .*finite"),
        ("up", lambda: spoilt(parts()["up"], INF, 3, 1, 2), "expert 3: .*finite"),
        ("down", lambda: spoilt(parts()["down"], -INF, 0, 0, 0), "expert 0: down must be .*finite"),
        ("gh", lambda: torch.ones(E - 1), f"gh must have one entry for each of {E} experts"),
        ("gh", lambda: torch.ones(E + 1), f"gh must have one entry for each of {E} experts"),
        ("gh", lambda: spoilt(torch.ones(E), NAN, 2), "expert 2: h_scale must be positive"),
        ("gh", lambda: spoilt(torch.ones(E), 0.0, 2), "expert 2: h_scale must be positive"),
        ("gh", lambda: spoilt(torch.ones(E), -1.0, 2), "expert 2: h_scale must be positive"),
        ("gx", lambda: torch.ones(2), "gx must be one number"),
        ("gx", lambda: torch.tensor(INF), "gx must be positive and finite, got inf"),
        ("biases", lambda: (torch.zeros(E, I), torch.zeros(E, H)), "biases must be those of gate"),
        ("biases", lambda: with_bias(0, torch.zeros(E, I + 1)), "expert 0: biases must be"),
        ("biases", lambda: with_bias(1, None), "expert 0: biases must be"),
        ("biases", lambda: with_bias(2, torch.zeros(E - 1, H)), "biases must have one entry"),
        ("biases", lambda: with_bias(2, spoilt(biases()[2], NAN, 1, 3)), "expert 1: .*be finite"),
    ],
)
def test_weights_from_bf16(name: str, value: Callable[[], Any], match: str) -> None:
    given = parts() | {"biases": tuple(biases()), "gh": torch.ones(E), "gx": torch.tensor(1.0)}
    ExpertWeights.from_bf16(**given)
    with pytest.raises(ValueError, match=match):
        ExpertWeights.from_bf16(**given | {name: value()})


def quantised() -> dict[str, Any]:
    p = parts()
    w13 = nvfp4.quantize(torch.cat([p["gate"], p["up"]], 1), "per_tensor")
    return {"w13": w13, "w2": nvfp4.quantize(p["down"], "per_tensor")}


def with_byte(q: Nvfp4Tensor, byte: int) -> Nvfp4Tensor:
    scale = q.scale.clone()
    scale.view(torch.uint8)[4, 1, 1] = byte
    return dataclasses.replace(q, scale=scale)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("w13", lambda: with_byte(quantised()["w13"], 0x7F), "expert 4: gate has a block scale"),
        ("w2", lambda: with_byte(quantised()["w2"], 0x85), "expert 4: down has a block scale"),
        ("h_scale", lambda: torch.ones(E + 1), "h_scale must have one entry"),
        ("biases", lambda: (torch.zeros(E, 3), torch.zeros(E, H)), "b13 must be"),
        ("biases", lambda: (torch.zeros(E, 2 * I), torch.zeros(E, 3)), "expert 0: biases must be"),
    ],
)
def test_weights_from_nvfp4(name: str, value: Callable[[], Any], match: str) -> None:
    ExpertWeights.from_nvfp4(**quantised())
    with pytest.raises(ValueError, match=match):
        ExpertWeights.from_nvfp4(**quantised() | {name: value()})


def test_plain_tensors_are_no_quantised_weights() -> None:
    p = parts()
    with pytest.raises(TypeError, match=r"w13 and w2 must be Nvfp4Tensor.*from_bf16"):
        ExpertWeights.from_nvfp4(p["gate"], p["down"])


def test_quantised_tensors_that_nobody_can_read() -> None:
    q = nvfp4.quantize(tokens(3))
    with pytest.raises(ValueError, match="data is on cpu, scale on meta, global_scale on cpu"):
        dataclasses.replace(q, scale=q.scale.to("meta"))
    with pytest.raises(ValueError, match="K must be a multiple of 16"):
        empty = torch.zeros(3, 0, dtype=torch.uint8)
        Nvfp4Tensor(torch.zeros(3, 4, dtype=torch.uint8), empty, torch.ones(()))
    with pytest.raises(TypeError, match="dtype must be one of"):
        nvfp4.decode(q, torch.int32)
    for wrong in (torch.zeros(4, 4), torch.zeros(4, dtype=torch.uint8)):
        with pytest.raises(ValueError, match="of one byte each"):
            nvfp4.swizzle(wrong)


# ---- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("shared", 3, "shared must be callable, got 3"),
        ("workspace", 4096, "workspace must be a Workspace or None, got 4096"),
        ("deterministic", None, "deterministic must be True or False, got None"),
        ("batch_invariant", 3, "batch_invariant must be True or False, got 3"),
        ("router_weight", [1.0], "router_weight must be a dense torch.Tensor, got list"),
        ("cfg", None, "needs a MoEConfig and ExpertWeights, got NoneType and ExpertWeights"),
        ("weights", "w", "needs a MoEConfig and ExpertWeights, got MoEConfig and str"),
    ],
)
def test_a_layer_of_other_things(name: str, value: Any, match: str) -> None:
    layer = routed()
    given = {"cfg": layer.cfg, "weights": layer.weights, "workspace": Workspace(64)}
    MoE(**given)
    with pytest.raises(TypeError, match=match):
        MoE(**given | {name: value})


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_router_on_another_device(backend: str) -> None:
    """It may move with the layer; a call says what is where, and routing by the caller needs
    none."""
    given = {"router_weight": torch.randn(E, H), "router_bias": torch.ones(E)}
    like, x = routed(backend=backend), tokens(3)
    for name in given:
        elsewhere = given | {name: given[name].to("meta")}
        layer = MoE(like.cfg, like.weights, backend=backend, **elsewhere)
        for call in (layer, layer.calibrate):
            with pytest.raises(ValueError, match=f"{name} is on meta, the tokens are on cpu"):
                call(x)
        assert same_bits(layer.experts(x, *routing(3)), like.experts(x, *routing(3)))


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_call_with_what_only_looks_like_tensors(backend: str) -> None:
    layer, x, (ids, mix) = routed(backend=backend), tokens(3), routing(3)
    before = layer.experts(x, ids, mix)
    for wrong in (x.tolist(), x.float().numpy(), None, x.float().to_sparse()):
        with pytest.raises(TypeError, match=r"x must be a dense torch.Tensor, got"):
            layer(wrong)
        with pytest.raises(TypeError, match=r"x must be a dense torch.Tensor, got"):
            layer.experts(wrong, ids, mix)
    with pytest.raises(TypeError, match="topk_ids must be a dense"):
        layer.experts(x, ids.tolist(), mix)
    with pytest.raises(TypeError, match="topk_weights must be a dense"):
        layer.experts(x, ids, None)
    with pytest.raises(TypeError, match=r"shared must be a dense torch.Tensor, got str"):
        layer.experts(x, ids, mix, "x")
    layer.shared = lambda x: None
    with pytest.raises(TypeError, match=r"shared must be a dense torch.Tensor, got NoneType"):
        layer(x)
    for call in (layer.plan_memory, layer.warmup):
        with pytest.raises(TypeError, match=r"max_tokens must be an int, got 1\.5"):
            call(1.5)
    assert same_bits(layer.experts(x, ids, mix), before)


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_token_ids_that_are_none(backend: str) -> None:
    table = torch.zeros(10, K, dtype=torch.int64) + torch.arange(K)
    layer = routed(backend=backend, tid2eid=table)
    with pytest.raises(TypeError, match="input_ids must be a tensor, got list"):
        layer(tokens(3), [1, 2, 3])
    with pytest.raises(ValueError, match="input_ids are on meta, the tokens on cpu"):
        layer(tokens(3), torch.zeros(3, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("wrong", ["g13", "g2", "gh"])
def test_wrong_scales_leave_the_layer_all_of_its_own(wrong: str) -> None:
    layer, x, routes = routed(), tokens(3), routing(3)
    before = layer.experts(x, *routes)
    good: dict[str, Tensor] = {"g13": layer.g13 * 2, "g2": layer.g2 * 2, "gh": torch.ones(E)}
    values = [good["gh"][:2], good["g2"].double(), [1.0], None]
    for value in values if wrong != "gh" else values[:-1]:  # a layer may lack gh
        with pytest.raises((ValueError, TypeError), match=f"{wrong} must be"):
            layer.set_scales(**good | {wrong: value})
        assert same_bits(layer.experts(x, *routes), before)


# ---- files ---------------------------------------------------------------------------------------


class Stored:
    """A packed layer, taken apart."""

    def __init__(self, path: Path) -> None:
        full_layer().save_packed(path)
        with safe_open(str(path), "pt") as f:
            self.meta: dict[str, str] = f.metadata()
            self.tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118

    def config(self, **fields: Any) -> dict[str, str]:
        kept = {k: v for k, v in json.loads(self.meta["config"]).items() if k not in fields}
        new = {k: v for k, v in fields.items() if v is not None}
        return self.meta | {"config": json.dumps(kept | new)}


Damage = Callable[[Stored], tuple[dict[str, Tensor], dict[str, str]]]


def tensor_damage(name: str, change: Callable[[Tensor], Tensor | None]) -> Damage:
    def damage(s: Stored) -> tuple[dict[str, Tensor], dict[str, str]]:
        new = s.tensors | {name: change(s.tensors[name].clone())}
        return {n: t for n, t in new.items() if t is not None}, s.meta

    return damage


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (tensor_damage("l2_data", lambda t: None), r"it lacks \['l2_data'\]"),
        (tensor_damage("g13", lambda t: None), r"it lacks \['g13'\]"),
        (lambda s: (s.tensors | {"more": torch.ones(1)}, s.meta), r"the unknown \['more'\]"),
        (tensor_damage("l1_scale", lambda t: t.fill_(0x7F)), "l1_scale holds NaN"),
        (tensor_damage("l2_scale", lambda t: t.fill_(0x80)), "l2_scale holds NaN"),
        (tensor_damage("l1_scale", lambda t: t.float()), "l1_scale must be bytes"),
        (tensor_damage("g2", lambda t: t.fill_(NAN)), "g2 holds NaN"),
        (tensor_damage("b2", lambda t: t.fill_(INF)), "b2 holds NaN"),
        (tensor_damage("g2", lambda t: t.double()), "g2 must be torch.float32"),
        (lambda s: (s.tensors, s.meta | {"config": "{"}), "its config is missing or no JSON"),
        (lambda s: (s.tensors, s.meta | {"config": "[]"}), "its config must be an object"),
        (lambda s: (s.tensors, s.meta | {"numerics": ""}), "its numerics is missing or no JSON"),
        (lambda s: (s.tensors, s.config(flavour=1)), "unexpected keyword argument 'flavour'"),
        (lambda s: (s.tensors, s.config(hidden=None)), "'hidden'"),
        (lambda s: (s.tensors, s.config(top_k=2.0)), r"top_k must be an int, got 2\.0"),
        (lambda s: (s.tensors, s.config(activation=3)), "its activation is 3"),
    ],
)
def test_a_damaged_file(damage: Damage, match: str, tmp_path: Path) -> None:
    stored = Stored(tmp_path / "whole")
    tensors, meta = damage(stored)
    save_file(tensors, str(tmp_path / "damaged"), metadata=meta)
    with pytest.raises(ValueError, match=match):
        MoE.load_packed(tmp_path / "damaged", backend="torch")
    x = tokens(3)
    assert same_bits(MoE.load_packed(tmp_path / "whole", backend="torch")(x), full_layer()(x))
