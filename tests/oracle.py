"""A second implementation of the numeric contract (docs/numerics.md), in numpy, structured
differently on purpose: token by token and slot by slot, from the weights as a checkpoint holds
them (projections apart, row-major scales), with none of the library's code.

Sums are fp64, everything else is fp32 with one rounding per operation, as the contract says.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cute_kernels.nvfp4 import Nvfp4Tensor
from moe import ExpertWeights

F32 = np.float32
Array = NDArray[np.generic]

MAGNITUDES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def decode_codes(packed: Array) -> Array:
    """uint8 (..., K/2) -> fp64 (..., K); the low nibble is the even k."""
    both = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return np.where(both & 8, -1.0, 1.0) * MAGNITUDES[both & 7]


def decode_scales(scale: Array) -> Array:
    """uint8 bytes -> fp64: exponent bias 7, subnormals, 0x7F is NaN."""
    exponent, mantissa = (scale >> 3).astype(int), (scale & 7).astype(float)
    normal = (1.0 + mantissa / 8.0) * np.exp2(exponent - 7.0)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    return np.where(scale == 0x7F, math.nan, value)


def decode(packed: Array, scale: Array) -> Array:
    """code * scale, fp64 (rows, K), from bytes (rows, K/2) and row-major scale bytes
    (rows, K/16)."""
    return decode_codes(packed) * np.repeat(decode_scales(scale), 16, axis=-1)


def round_e2m1(x: Array) -> Array:
    """fp32 -> values of the E2M1 grid (fp64), ties to even, saturating."""
    return x.astype(ml_dtypes.float4_e2m1fn).astype(np.float64)


def round_e4m3(x: Array) -> Array:
    return x.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)


def row_scale(x: Array) -> np.float32:
    """Outer scale of one row of fp32, mode per_token."""
    amax = np.max(np.abs(x)) if x.size else F32(0)
    return np.maximum(F32(amax) / F32(2688.0), F32(2.0**-100))


def quantize_row(x: Array, g: np.float32) -> Array:
    """fp32 (K,) with outer scale g -> fp64 code * scale (K,), section 2."""
    c = F32(1.0) / (F32(6.0) * g)
    out = np.empty(x.shape, np.float64)
    for k in range(0, x.size, 16):
        block = x[k : k + 16]
        wanted = np.max(np.abs(block)) * c
        s = round_e4m3(np.minimum(np.maximum(wanted, F32(2.0**-9)), F32(448.0)))
        r = F32(1.0) / (s * g)
        out[k : k + 16] = round_e2m1(block * r) * np.float64(s)
    return out


# ---- activations in fp64: section 4, from the table, not from the library -----------------------


def silu(x: Array) -> Array:
    with np.errstate(over="ignore"):
        return x / (1.0 + np.exp(-x))


def swiglu(gate: Array, up: Array) -> Array:
    return silu(gate) * up


def swiglu_limit(limit: float) -> Callable[[Array, Array], Array]:
    def act(gate: Array, up: Array) -> Array:
        return silu(np.minimum(gate, limit)) * np.clip(up, -limit, limit)

    return act


def swiglu_oai(gate: Array, up: Array) -> Array:
    gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
    with np.errstate(over="ignore"):
        return (up + 1.0) * (gate / (1.0 + np.exp(-1.702 * gate)))


def geglu(gate: Array, up: Array) -> Array:
    inner = math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1.0 + np.tanh(inner)) * up


def relu2(gate: Array, up: Array) -> Array:
    return np.maximum(gate, 0.0) ** 2


# ---- one layer ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class OracleLayer:
    """Weights as a checkpoint holds them: per projection bytes (E, rows, K/2), row-major scale
    bytes (E, rows, K/16) and one fp32 global scale per expert. ``up`` is None without a gate."""

    gate: tuple[Array, Array, Array]
    up: tuple[Array, Array, Array] | None
    down: tuple[Array, Array, Array]
    act: Callable[[Array, Array], Array]
    biases: tuple[Array, Array | None, Array] | None = None  # fp32 (E, I), (E, I), (E, H)
    gh: Array | None = None  # fp32 (E,)
    weight_on_input: bool = False
    w4a16: bool = False

    @property
    def num_experts(self) -> int:
        return int(self.gate[2].shape[0])

    def project(self, part: tuple[Array, Array, Array], e: int) -> Array:
        return decode(part[0][e], part[1][e])


@dataclasses.dataclass(frozen=True)
class Slot:
    """Everything between one token and one expert's output row."""

    expert: int
    gate: Array  # (I,) fp32
    up: Array  # (I,) fp32
    gate_bound: Array  # (I,) fp64: sum |a b| * alpha, for the bound of section 6
    up_bound: Array
    h: Array  # (I,) fp64
    hq: Array  # (I,) fp64, code * scale
    gh: np.float32
    o: Array  # (H,) bf16 as fp32
    o_exact: Array  # (H,) fp64, before any rounding
    o_bound: Array  # (H,) fp64


def _bf16(x: Array) -> Array:
    return x.astype(F32).astype(ml_dtypes.bfloat16).astype(F32)


def _linear(v: Array, w: Array, alpha: np.float32, bias: Array | None) -> tuple[Array, ...]:
    """fp32 result of acc * alpha (+ bias), the same in fp64, and sum |a b| * alpha."""
    acc = w @ v
    rounded = acc.astype(F32) * alpha
    exact = acc * np.float64(alpha)
    if bias is not None:
        rounded, exact = rounded + bias, exact + bias.astype(np.float64)
    return rounded, exact, (np.abs(w) @ np.abs(v)) * np.float64(alpha)


def stage_token(layer: OracleLayer, x: Array, weight: np.float32, g: np.float32 | None) -> tuple:
    """x fp32 (H,) -> fp64 code * scale (H,) and the outer scale; ``g`` None means per_token."""
    if layer.weight_on_input:
        x = x * weight
    if layer.w4a16:
        return _bf16(x).astype(np.float64), F32(1.0)
    scale = row_scale(x) if g is None else np.maximum(g, F32(2.0**-100))
    return quantize_row(x, scale), scale


def stage_hidden(layer: OracleLayer, h: Array, e: int) -> tuple[Array, np.float32]:
    """h fp32 (I,) of expert e -> fp64 code * scale (I,) and its outer scale."""
    if layer.w4a16:
        return _bf16(h).astype(np.float64), F32(1.0)
    scale = row_scale(h) if layer.gh is None else F32(layer.gh[e])
    return quantize_row(h, scale), scale


def run_slot(layer: OracleLayer, xq: Array, gx: np.float32, e: int, h: Array | None = None) -> Slot:
    """One (token, slot). ``h``: fp32 hidden values to continue from instead of our own, so that a
    last-bit difference of an exponential does not hide what follows it."""
    bias = layer.biases
    bg = None if bias is None else bias[0][e]
    gate, _, gate_bound = _linear(xq, layer.project(layer.gate, e), gx * layer.gate[2][e], bg)
    up, up_bound = np.zeros_like(gate), np.zeros_like(gate_bound)
    if layer.up is not None:
        bu = None if bias is None or bias[1] is None else bias[1][e]
        up, _, up_bound = _linear(xq, layer.project(layer.up, e), gx * layer.up[2][e], bu)
    own = layer.act(gate.astype(np.float64), up.astype(np.float64))
    hq, gh = stage_hidden(layer, own.astype(F32) if h is None else h, e)
    bd = None if bias is None else bias[2][e]
    o, exact, o_bound = _linear(hq, layer.project(layer.down, e), gh * layer.down[2][e], bd)
    return Slot(e, gate, up, gate_bound, up_bound, own, hq, gh, _bf16(o), exact, o_bound)


def combine(rows: list[tuple[np.float32, Array]], hidden: int, shared: Array | None) -> Array:
    """fp32: slots in order, every product and every sum rounded, shared expert last."""
    y: Array | None = None
    for weight, o in rows:
        term = weight * o.astype(F32)
        y = term if y is None else y + term
    y = np.zeros(hidden, F32) if y is None else y
    return y if shared is None else y + shared.astype(F32)


def run(
    layer: OracleLayer, x: Array, ids: Array, weights: Array, g: np.float32 | None = None
) -> Array:
    """fp32 y (T, H) before the rounding to the output type; x fp32 (T, H)."""
    out = []
    for t in range(x.shape[0]):
        xq, gx = stage_token(layer, x[t], F32(weights[t, 0]), g)
        rows = []
        for k in range(ids.shape[1]):
            e = int(ids[t, k])
            if 0 <= e < layer.num_experts:
                w = F32(1.0) if layer.weight_on_input else F32(weights[t, k])
                rows.append((w, run_slot(layer, xq, gx, e).o))
        out.append(combine(rows, x.shape[1], None))
    return np.stack(out) if out else np.zeros(x.shape, F32)


def static_scale(x: Array, ids: Array, num_experts: int) -> np.float32:
    """Outer scale of mode per_tensor: tokens without any real slot do not count."""
    amax = F32(0)
    for t in range(x.shape[0]):
        if any(0 <= int(e) < num_experts for e in ids[t]):
            amax = np.maximum(amax, np.max(np.abs(x[t])))
    return np.maximum(amax / F32(2688.0), F32(2.0**-100))


# ---- random weights that the oracle and the library both get ------------------------------------


def random_nvfp4(gen: np.random.Generator, *shape: int, spread: int = 2) -> tuple[Array, Array]:
    """Random codes (..., K/2) and row-major scale bytes (..., K/16) around 1.0, no NaN."""
    *lead, k = shape
    codes = gen.integers(0, 256, (*lead, k // 2), dtype=np.uint8)
    exponent = gen.integers(7 - spread, 7 + spread, (*lead, k // 16), dtype=np.uint8)
    mantissa = gen.integers(0, 8, (*lead, k // 16), dtype=np.uint8)
    return codes, (exponent << 3) | mantissa


def random_layer(
    seed: int, experts: int, hidden: int, inter: int, act: Callable, gated: bool = True, **options
) -> OracleLayer:
    """Every projection with its own global scale, sized so that gate, up and o are of order 1."""
    gen = np.random.default_rng(seed)

    def part(rows: int, k: int) -> tuple[Array, Array, Array]:
        codes, scale = random_nvfp4(gen, experts, rows, k)
        g = gen.uniform(0.2, 0.5, experts) / math.sqrt(k)
        return codes, scale, g.astype(F32)

    gate, down = part(inter, hidden), part(hidden, inter)
    up = part(inter, hidden) if gated else None
    return OracleLayer(gate, up, down, act, **options)


def random_biases(seed: int, experts: int, hidden: int, inter: int, gated: bool = True) -> tuple:
    gen = np.random.default_rng(seed)
    gate, up = gen.normal(size=(2, experts, inter)).astype(F32)
    return gate, up if gated else None, gen.normal(size=(experts, hidden)).astype(F32)


def _tensor(part: tuple[Array, Array, Array]) -> Nvfp4Tensor:
    return Nvfp4Tensor(*(torch.from_numpy(np.ascontiguousarray(a)) for a in part))


def to_library(layer: OracleLayer, first_expert: int = 0) -> ExpertWeights:
    """The same layer as `ExpertWeights`, through `from_nvfp4` with gate rows before up rows."""
    gate, up = layer.gate, layer.up
    if up is None:
        w13 = _tensor(gate)
    else:
        both = [np.concatenate([gate[i], up[i]], axis=1) for i in (0, 1)]
        w13 = _tensor((both[0], both[1], np.stack([gate[2], up[2]], axis=1)))
    biases = None
    if layer.biases is not None:
        bg, bu, bd = layer.biases
        b13 = bg if bu is None else np.concatenate([bg, bu], axis=1)
        biases = (torch.from_numpy(b13), torch.from_numpy(bd))
    gh = None if layer.gh is None else torch.from_numpy(layer.gh)
    down = _tensor(layer.down)
    return ExpertWeights.from_nvfp4(
        w13, down, "gate_up", h_scale=gh, biases=biases, first_expert=first_expert
    )


def numpy32(x: Tensor) -> Array:
    return x.detach().float().numpy()
