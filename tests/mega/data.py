"""A layer as a checkpoint holds it, the packings that callers bring it in, and what is right."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cute_kernels.activations import SwiGLU
from cute_kernels.nvfp4 import Nvfp4Tensor
from moe import ExpertWeights, MoEConfig, reference
from moe.reference import Stages
from tests import oracle
from tests.oracle import OracleLayer

T, E, K, H, I = 9, 6, 3, 128, 64  # noqa: E741
F32 = np.float32
Pair = tuple[Tensor, Tensor]


def layer(limit: float | None = None, gh: bool = False, seed: int = 0) -> OracleLayer:
    act = oracle.swiglu if limit is None else oracle.swiglu_limit(limit)
    scales = np.linspace(2e-3, 9e-3, E).astype(F32) if gh else None
    return oracle.random_layer(seed, E, H, I, act, gh=scales)


def tensor(a: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(a))


def gate_up(of: OracleLayer) -> tuple[Tensor, Tensor]:
    """Codes and scale bytes (E, 2I, ...), all gate rows before all up rows."""
    assert of.up is not None
    codes, scale = (np.concatenate([of.gate[i], of.up[i]], axis=1) for i in (0, 1))
    return tensor(codes), tensor(scale)


def down(of: OracleLayer) -> tuple[Tensor, Tensor]:
    return tensor(of.down[0]), tensor(of.down[1])


def alphas(of: OracleLayer) -> tuple[Tensor, Tensor]:
    """(E, 2) = (gate, up) and (E,)."""
    assert of.up is not None
    return tensor(np.stack([of.gate[2], of.up[2]], axis=1)), tensor(of.down[2])


def words(scale: Tensor) -> Tensor:
    """Bytes (..., K/16) -> int32 (..., K/64), the lowest k in the lowest byte, by arithmetic."""
    b = scale.long().unflatten(-1, (-1, 4))
    value = b[..., 0] + (b[..., 1] << 8) + (b[..., 2] << 16) + (b[..., 3] << 24)
    return torch.where(value >= 2**31, value - 2**32, value).int()


def mn_major(sf: Tensor) -> Tensor:
    """(E, rows, words) with rows contiguous in memory, as a TMA descriptor wants them."""
    out = torch.empty(sf.shape[0], sf.shape[2], sf.shape[1], dtype=sf.dtype).transpose(1, 2)
    out.copy_(sf)
    assert out.stride()[1] == 1
    return out


def published(pair: tuple[Tensor, Tensor]) -> Pair:
    """Codes int8 and MN-major int32 scales."""
    return pair[0].view(torch.int8), mn_major(words(pair[1]))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Codes and scales that no quantiser would choose, ids with empty and foreign slots."""

    codes: Tensor  # uint8 (T, H/2)
    scale: Tensor  # uint8 (T, H/16)
    gx: Tensor  # fp32 (T,)
    ids: Tensor  # int64 (T, K)
    weights: Tensor  # fp32 (T, K)

    @property
    def count(self) -> int:
        return self.codes.shape[0]


def tokens(count: int = T, seed: int = 1, scaled: bool = False) -> Tokens:
    gen = np.random.default_rng(seed)
    codes, scale = (tensor(a) for a in oracle.random_nvfp4(gen, count, H))
    ids = np.stack([gen.permutation(E)[:K] for _ in range(count)]) if count else np.zeros((0, K))
    ids = ids.astype(np.int64)
    ids[1::5] = -1
    ids[2::4, 1] = -7
    ids[3::4, 0] = E
    gx = gen.uniform(0.5, 2.0, count).astype(F32) if scaled else np.ones(count, F32)
    weights = gen.uniform(0.1, 1.1, (count, K)).astype(F32)
    return Tokens(codes, scale, tensor(gx), tensor(ids), tensor(weights))


def counts(t: Tokens) -> Tensor:
    """int32 (E,): (token, slot) pairs of every expert, by a loop."""
    out = torch.zeros(E, dtype=torch.int32)
    for e in t.ids.flatten().tolist():
        if 0 <= e < E:
            out[e] += 1
    return out


def stages(
    of: OracleLayer,
    t: Tokens,
    limit: float | None = None,
    shared: Tensor | None = None,
    factor: float = 1.0,
) -> Stages:
    """The reference on weights that were laid out without the adapters."""
    g13, g2 = alphas(of)
    gh = None if of.gh is None else tensor(of.gh)
    weights = ExpertWeights.from_nvfp4(
        Nvfp4Tensor(*gate_up(of), g13), Nvfp4Tensor(*down(of), g2), h_scale=gh
    )
    cfg = MoEConfig(H, I, E, K, activation=SwiGLU(limit=limit))
    x = Nvfp4Tensor(t.codes, t.scale, t.gx)
    mix = t.weights if factor == 1.0 else t.weights * factor
    return reference.experts(x, t.ids, mix, cfg, weights, shared=shared)


def oracle_y(of: OracleLayer, t: Tokens) -> Tensor:
    """fp32 (T, H) from the second implementation, token by token."""
    out = []
    for i in range(t.count):
        xq = oracle.decode(t.codes[i].numpy(), t.scale[i].numpy())
        rows = []
        for w, e in zip(t.weights[i].numpy(), t.ids[i].tolist()):
            if 0 <= e < E:
                rows.append((w, oracle.run_slot(of, xq, t.gx[i].numpy(), e).o))
        out.append(oracle.combine(rows, H, None))
    return tensor(np.stack(out))
