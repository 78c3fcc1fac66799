"""Small checkpoints as files of each dialect, written from numpy bytes, and what must come out.

The weights are those of `oracle.OracleLayer`: projections apart, row-major scales. Writers are
spelled from the formats' descriptions and use none of the library's code.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe import ExpertWeights
from tests import oracle
from tests.oracle import Array, OracleLayer

F32 = np.float32
E, K, H, I = 4, 2, 96, 80  # noqa: E741  neither a multiple of 128 nor of 64
QWEN: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": H,
    "moe_intermediate_size": I,
    "num_experts": E,
    "num_experts_per_tok": K,
    "norm_topk_prob": True,
}
HF = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}
Part = tuple[Array, Array, Array]
Dialect = Callable[[Part, int], dict[str, Tensor]]


def layer(gated: bool = True, seed: int = 0, sizes: tuple = (E, H, I), **options) -> OracleLayer:
    """Every projection of every expert has a global scale of its own."""
    act = oracle.swiglu if gated else oracle.relu2
    return oracle.random_layer(seed, *sizes, act, gated, **options)


def parts(want: OracleLayer) -> dict[str, Part]:
    found = {"gate": want.gate, "up": want.up, "down": want.down}
    if want.up is None:
        found = {"up": want.gate, "down": want.down}
    return {role: part for role, part in found.items() if part is not None}


def e4m3(scale: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(scale)).view(torch.float8_e4m3fn)


def tensor(array: Array) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def modelopt(part: Part, e: int) -> dict[str, Tensor]:
    return {
        "weight": tensor(part[0][e]),
        "weight_scale": e4m3(part[1][e]),
        "weight_scale_2": torch.tensor(float(part[2][e])),
    }


def compressed(part: Part, e: int) -> dict[str, Tensor]:
    """`dividing` the weights makes this exact."""
    return {
        "weight_packed": tensor(part[0][e]),
        "weight_scale": e4m3(part[1][e]),
        "weight_global_scale": torch.tensor([float(F32(1) / part[2][e])]),
    }


def dividing(want: OracleLayer) -> OracleLayer:
    """Global scales that are fp32 reciprocals of fp32 divisors which `compressed` writes."""

    def exact(part: Part) -> Part:
        g = part[2]
        for _ in range(3):  # a reciprocal of a reciprocal may move by one unit
            g = F32(1) / (F32(1) / g)
        return part[0], part[1], g

    done = {"gate": exact(want.gate), "down": exact(want.down)}
    result = dataclasses.replace(want, **done, up=None if want.up is None else exact(want.up))
    for part in parts(result).values():
        assert np.array_equal(F32(1) / (F32(1) / part[2]), part[2])
    return result


def expert_tensors(
    want: OracleLayer,
    dialect: Dialect = modelopt,
    prefix: str = "model.layers.0.mlp.",
    roles: dict[str, str] = HF,
) -> dict[str, Tensor]:
    """One entry per expert, projection and kind of tensor."""
    out = {}
    for role, part in parts(want).items():
        for e in range(want.num_experts):
            for last, value in dialect(part, e).items():
                out[f"{prefix}experts.{e}.{roles[role]}.{last}"] = value
    return out


def write(
    folder: Path, tensors: dict[str, Tensor], config: dict | None = None, shards: int = 1
) -> Path:
    """One file, or ``shards`` files and an index; tensors go round, so that experts are spread."""
    folder.mkdir(exist_ok=True)
    tensors = {name: t.contiguous().clone() for name, t in tensors.items()}
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"))
    else:
        names = list(tensors)
        index = {}
        for s in range(shards):
            file = f"model-{s + 1:05}-of-{shards:05}.safetensors"
            save_file({n: tensors[n] for n in names[s::shards]}, str(folder / file))
            index.update(dict.fromkeys(names[s::shards], file))
        text = json.dumps({"metadata": {}, "weight_map": index})
        (folder / "model.safetensors.index.json").write_text(text)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def scale_offset(row: int, group: int, groups_padded: int) -> int:
    """Byte of (row, group) in a swizzled tile, spelled as the contract spells it."""
    tile = row // 128 * 128 * groups_padded + group // 4 * 512
    return tile + row % 32 * 16 + row % 128 // 32 * 4 + group % 4


def assert_holds(weights: ExpertWeights, want: OracleLayer, first: int = 0) -> None:
    """Every code, scale byte and global scale of experts first, first + 1, ..., addressed by hand;
    padding is 0."""
    projections = [want.gate] if want.up is None else [want.gate, want.up]
    step, end = len(projections), first + weights.num_experts
    assert weights.first_expert == first
    for p, (codes, _, g) in enumerate(projections):
        assert np.array_equal(weights.l1_data[:, p::step].numpy(), codes[first:end])
        assert np.array_equal(weights.g13[:, p].numpy(), g[first:end])
    assert np.array_equal(weights.l2_data.numpy(), want.down[0][first:end])
    assert np.array_equal(weights.g2.numpy(), want.down[2][first:end])
    for local in range(weights.num_experts):
        e = first + local
        rows = np.stack([s[e] for _, s, _ in projections], axis=1)  # (I, P, groups)
        assert_swizzled(weights.l1_scale[local], rows.reshape(-1, rows.shape[-1]))
        assert_swizzled(weights.l2_scale[local], want.down[1][e])


def assert_swizzled(scale: Tensor, plain: Array) -> None:
    rows, groups = plain.shape
    rows_padded, groups_padded = -(-rows // 128) * 128, -(-groups // 4) * 4
    assert tuple(scale.shape) == (rows_padded, groups_padded)
    flat = np.zeros(rows_padded * groups_padded, np.uint8)
    for r in range(rows):
        for c in range(groups):
            flat[scale_offset(r, c, groups_padded)] = plain[r, c]
    assert np.array_equal(scale.view(torch.uint8).numpy().ravel(), flat)


def assert_biases(weights: ExpertWeights, want: tuple[Array, Array | None, Array]) -> None:
    gate, up, down = want
    assert weights.b13 is not None and weights.b2 is not None
    step = 1 if up is None else 2
    for p, b in enumerate([gate] if up is None else [gate, up]):
        assert np.array_equal(weights.b13[:, p::step].numpy(), b)
    assert np.array_equal(weights.b2.numpy(), down)


def quantise_weight(w: Array, g: np.float32) -> tuple[Array, Array]:
    """(N, K) fp32 -> codes (N, K/2), scale bytes (N, K/16): offline quantisation by division."""
    blocks = w.astype(F32).reshape(w.shape[0], -1, 16)
    amax = np.abs(blocks).max(-1)
    scale = np.clip(amax / (F32(6) * g), F32(2.0**-9), F32(448)).astype(ml_dtypes.float8_e4m3fn)
    codes = (blocks / (scale.astype(F32) * g)[..., None]).astype(ml_dtypes.float4_e2m1fn)
    nibbles = codes.view(np.uint8).reshape(w.shape)
    return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4), scale.view(np.uint8)
