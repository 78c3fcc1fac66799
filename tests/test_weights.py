"""Expert weights: every order of rows, global scales, biases, sizes, and the bytes of the offline
quantiser against a second implementation."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import SWIZZLE_32_4_4, Nvfp4Tensor
from moe import ExpertWeights, MoEConfig, ReLU2, SwiGLU, reference
from moe.weights import ExpertWeightsBuilder
from tests import oracle
from tests.oracle import OracleLayer

F32 = np.float32
E, H, I = 3, 96, 80  # noqa: E741  neither a multiple of 128 nor of 64


def layer(gated: bool = True, seed: int = 0, **options) -> OracleLayer:
    act = oracle.swiglu if gated else oracle.relu2
    return oracle.random_layer(seed, E, H, I, act, gated, **options)


def scale_offset(row: int, group: int, groups_padded: int) -> int:
    """Byte of (row, group) in a swizzled tile, spelled as the contract spells it."""
    return (
        row // 128 * 128 * groups_padded
        + group // 4 * 512
        + row % 32 * 16
        + row % 128 // 32 * 4
        + group % 4
    )


def assert_holds(weights: ExpertWeights, want: OracleLayer) -> None:
    """Every code and scale byte of the canonical layout, addressed by hand; padding is 0."""
    parts = [want.gate] if want.up is None else [want.gate, want.up]
    step = len(parts)
    for p, (codes, _, g) in enumerate(parts):
        assert np.array_equal(weights.l1_data[:, p::step].numpy(), codes)
        assert np.array_equal(weights.g13[:, p].numpy(), g)
    assert np.array_equal(weights.l2_data.numpy(), want.down[0])
    assert np.array_equal(weights.g2.numpy(), want.down[2])
    l1_rows = np.stack([s for _, s, _ in parts], axis=2).reshape(len(parts[0][1]), -1, H // 16)
    for tensor, plain in ((weights.l1_scale, l1_rows), (weights.l2_scale, want.down[1])):
        experts, rows, groups = plain.shape
        rows_p, groups_p = -(-rows // 128) * 128, -(-groups // 4) * 4
        assert tuple(tensor.shape) == (experts, rows_p, groups_p)
        for e in range(experts):
            flat = np.zeros(rows_p * groups_p, np.uint8)
            for r in range(rows):
                for c in range(groups):
                    flat[scale_offset(r, c, groups_p)] = plain[e, r, c]
            assert np.array_equal(tensor[e].view(torch.uint8).numpy().ravel(), flat)


def stacked(want: OracleLayer, order: str, granularity: int) -> Nvfp4Tensor:
    """w13 as a checkpoint with that row order holds it; built row by row in Python."""
    assert want.up is not None
    rows: list[tuple[int, int]] = []  # (projection, row)
    if order == "interleaved":
        for start in range(0, I, granularity):
            for p in (0, 1):
                rows += [(p, r) for r in range(start, start + granularity)]
    else:
        first = (0, 1) if order == "gate_up" else (1, 0)
        rows = [(p, r) for p in first for r in range(I)]
    both = (want.gate, want.up)
    codes, scale = (np.stack([both[p][i][:, r] for p, r in rows], axis=1) for i in (0, 1))
    g = np.stack([want.gate[2], want.up[2]], axis=1)
    return Nvfp4Tensor(torch.from_numpy(codes), torch.from_numpy(scale), torch.from_numpy(g))


def down_tensor(want: OracleLayer) -> Nvfp4Tensor:
    return Nvfp4Tensor(*(torch.from_numpy(a) for a in want.down))


ORDERS = [("gate_up", 1), ("up_gate", 1)] + [("interleaved", n) for n in (1, 2, 8, 16, 40, 80)]


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize(("order", "granularity"), ORDERS)
def test_every_row_order_gives_the_canonical_layout(
    order: str, granularity: int, swizzled: bool
) -> None:
    """Gate and up global scales differ; codes, block scales and biases move together."""
    want = layer(biases=oracle.random_biases(1, E, H, I))
    w13, w2 = stacked(want, order, granularity), down_tensor(want)
    if swizzled:
        w13, w2 = w13.with_layout(SWIZZLE_32_4_4), w2.with_layout(SWIZZLE_32_4_4)
    bg, bu, bd = want.biases
    index = {"gate_up": [bg, bu], "up_gate": [bu, bg]}
    if order == "interleaved":
        blocks = [b.reshape(E, -1, granularity) for b in (bg, bu)]
        b13 = np.stack(blocks, axis=2).reshape(E, 2 * I)
    else:
        b13 = np.concatenate(index[order], axis=1)
    weights = ExpertWeights.from_nvfp4(
        w13, w2, order, granularity, biases=(torch.from_numpy(b13), torch.from_numpy(bd))
    )
    assert_holds(weights, want)
    assert np.array_equal(weights.b13.numpy(), np.stack([bg, bu], axis=2).reshape(E, 2 * I))
    assert np.array_equal(weights.b2.numpy(), bd)


def test_without_a_gate() -> None:
    want = layer(gated=False)
    weights = oracle.to_library(want)
    assert not weights.gated and weights.g13.shape == (E, 1)
    assert_holds(weights, want)


@pytest.mark.parametrize("kind", ["scalar", "per_expert"])
def test_one_global_scale_counts_for_gate_and_up(kind: str) -> None:
    want = layer()
    w13 = stacked(want, "gate_up", 1)
    g = torch.tensor(0.25) if kind == "scalar" else torch.tensor([0.25, 0.5, 2.0])
    weights = ExpertWeights.from_nvfp4(dataclasses.replace(w13, global_scale=g), down_tensor(want))
    assert torch.equal(weights.g13, g.reshape(-1, 1).expand(E, 2))


def test_builder_takes_experts_one_at_a_time_in_any_order() -> None:
    want = layer(biases=oracle.random_biases(1, E, H, I))
    builder = ExpertWeightsBuilder(E, H, I, first_expert=5)
    for e in (2, 0, 1):
        gate, up, down = (
            Nvfp4Tensor(*(torch.from_numpy(np.array(a[e])) for a in part))
            for part in (want.gate, want.up, want.down)
        )
        bias = tuple(torch.from_numpy(b[e]) for b in want.biases)
        builder.set_expert(
            e, gate, up.with_layout(SWIZZLE_32_4_4), down, biases=bias, h_scale=float(e + 1)
        )
    weights = builder.finish(gx=0.5)
    assert_holds(weights, want)
    assert weights.gh.tolist() == [1.0, 2.0, 3.0] and weights.gx.item() == 0.5
    assert weights.first_expert == 5 and weights.gx.dtype == torch.float32


def expert_parts() -> tuple[Nvfp4Tensor, Nvfp4Tensor, Nvfp4Tensor]:
    zeros = (torch.zeros(I, H), torch.zeros(I, H), torch.zeros(H, I))
    return tuple(nvfp4.quantize(z, 1.0) for z in zeros)


def test_builder_names_what_is_missing_or_wrong() -> None:
    gate, up, down = expert_parts()
    builder = ExpertWeightsBuilder(4, H, I)
    builder.set_expert(0, gate, up, down, h_scale=1.0)
    with pytest.raises(ValueError, match=r"experts \[1, 2, 3\] were never set"):
        builder.finish()
    for e in (1, 2, 3):
        builder.set_expert(e, gate, up, down, h_scale=1.0 if e == 2 else None)
    with pytest.raises(ValueError, match=r"experts \[1, 3\] have no h_scale"):
        builder.finish()
    bias = (torch.zeros(I), torch.zeros(I), torch.zeros(H))
    for e in range(4):
        builder.set_expert(e, gate, up, down, biases=bias if e else None)
    with pytest.raises(ValueError, match=r"experts \[0\] have no biases"):
        builder.finish()
    with pytest.raises(ValueError, match="expert 1: gate and up expected, got up=None"):
        builder.set_expert(1, gate, None, down)
    with pytest.raises(ValueError, match=r"expert 2: up must be \(80, 96\)"):
        builder.set_expert(2, gate, down, down)
    with pytest.raises(ValueError, match=r"expert 3: down must be \(96, 80\)"):
        builder.set_expert(3, gate, up, gate)
    per_row = nvfp4.quantize(torch.ones(H, I), "per_token")
    with pytest.raises(ValueError, match="one global scale"):
        builder.set_expert(3, gate, up, per_row)
    with pytest.raises(ValueError, match="one projection"):
        ExpertWeightsBuilder(4, H, I, gated=False).set_expert(0, gate, up, down)


def test_from_nvfp4_refuses_what_it_cannot_place() -> None:
    want = layer()
    w13, w2 = stacked(want, "gate_up", 1), down_tensor(want)
    with pytest.raises(ValueError, match="order"):
        ExpertWeights.from_nvfp4(w13, w2, "gate")
    for granularity in (0, 3, 160):
        with pytest.raises(ValueError, match="granularity must divide I = 80"):
            ExpertWeights.from_nvfp4(w13, w2, "interleaved", granularity)
    with pytest.raises(ValueError, match=r"\(E, 2I, H\)"):
        ExpertWeights.from_nvfp4(w2, w13)
    two = Nvfp4Tensor(w2.data[:2], w2.scale[:2], w2.global_scale[:2])
    with pytest.raises(ValueError, match="w13 and w2"):
        ExpertWeights.from_nvfp4(w13, two)
    single = oracle.to_library(layer(gated=False))
    plain = Nvfp4Tensor(
        single.l1_data,
        torch.zeros(E, I, H // 16, dtype=torch.uint8),
        w2.scale.new_ones(E, I, dtype=torch.float32),
    )
    with pytest.raises(ValueError, match="global scale must be"):
        ExpertWeights.from_nvfp4(plain, w2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("g2", torch.ones(E + 1), "g2"),
        ("g13", torch.ones(E, 2, dtype=torch.float64), "g13"),
        ("gh", torch.ones(1), "gh"),
        ("gx", torch.ones(1), "gx"),
        ("b13", torch.ones(E, I), "b13"),
        ("b2", torch.ones(E, H, dtype=torch.bfloat16), "b2"),
        ("l1_scale", torch.zeros(E, 2 * I, 6, dtype=torch.float8_e4m3fn), "l1_scale"),
        ("l2_data", torch.zeros(I // 2, H, E, dtype=torch.uint8).permute(2, 1, 0), "contiguous"),
        ("g2", torch.ones(E, device="meta"), "meta"),
    ],
)
def test_the_container_checks_every_tensor(field: str, value: Tensor, message: str) -> None:
    weights = oracle.to_library(layer())
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(weights, **{field: value})


# ---- from_bf16 -----------------------------------------------------------------------------------


def modelopt_bytes(w: np.ndarray, g: np.float32) -> tuple[np.ndarray, np.ndarray]:
    """One projection (rows, K) fp32 with divisions, by ml_dtypes' casts -> codes, scale bytes."""
    rows, k = w.shape
    blocks = w.reshape(rows, k // 16, 16)
    s = np.abs(blocks).max(axis=-1) / (F32(6.0) * g)
    s = np.clip(s, F32(2.0**-9), F32(448.0)).astype(ml_dtypes.float8_e4m3fn)
    step = s.astype(F32) * g
    codes = (blocks / step[..., None]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    codes = codes.reshape(rows, k)
    return codes[:, 0::2] | codes[:, 1::2] << 4, s.view(np.uint8)


def bf16_weights(dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Heavy-tailed, a zero row, a zero block, one tiny expert, and exact ties."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        w = torch.randn(shape, generator=gen) * 0.05
        w[..., ::29] *= 20
        w[0, 3] = 0
        w[0, 5, 32:48] = 0
        w[1, 7, :16] = torch.arange(16) * 0.03125
        w[2] *= 1e-4
        return w.to(dtype)

    return rand(E, I, H), rand(E, I, H) * 3, rand(E, H, I)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_from_bf16_gives_the_bytes_of_a_second_quantiser(dtype: torch.dtype, share: bool) -> None:
    gate, up, down = bf16_weights(dtype)
    weights = ExpertWeights.from_bf16(gate, up, down, share_gate_up=share)
    arrays = [t.float().numpy() for t in (gate, up, down)]
    amax = [np.abs(a).max(axis=(1, 2)) for a in arrays]
    g = [m / F32(2688.0) for m in amax]
    if share:
        g[0] = g[1] = np.maximum(g[0], g[1])
    parts = []
    for a, scale in zip(arrays, g):
        made = [modelopt_bytes(a[e], scale[e]) for e in range(E)]
        parts.append((np.stack([m[0] for m in made]), np.stack([m[1] for m in made]), scale))
    assert_holds(weights, OracleLayer(*parts, oracle.swiglu))
    assert torch.equal(weights.g13[:, 0], weights.g13[:, 1]) == share


def test_from_bf16_without_a_gate_and_with_the_other_fields() -> None:
    _, up, down = bf16_weights(torch.bfloat16)
    biases = (torch.randn(E, I), None, torch.randn(E, H))
    gh = torch.tensor([0.1, 0.2, 0.3])
    weights = ExpertWeights.from_bf16(
        up, None, down, biases=biases, gh=gh, gx=torch.tensor(0.7), first_expert=4
    )
    assert not weights.gated
    assert torch.equal(weights.b13, biases[0]) and torch.equal(weights.b2, biases[2])
    assert torch.equal(weights.gh, gh) and weights.gx.item() == F32(0.7)
    assert weights.first_expert == 4
    with_gate = ExpertWeights.from_bf16(up, up, down)
    assert torch.equal(with_gate.l1_data[:, 0::2], weights.l1_data)


def test_from_bf16_refuses_shapes() -> None:
    gate, up, down = bf16_weights(torch.bfloat16)
    with pytest.raises(ValueError, match="down must be"):
        ExpertWeights.from_bf16(gate, up, down.transpose(1, 2))
    with pytest.raises(ValueError, match="up must be"):
        ExpertWeights.from_bf16(gate, up[:, :16], down)
    with pytest.raises(ValueError, match=r"\(E, I, H\)"):
        ExpertWeights.from_bf16(gate[0], up[0], down)
    with pytest.raises(TypeError, match="float64"):
        ExpertWeights.from_bf16(gate.double(), up.double(), down.double())
    with pytest.raises(TypeError, match="only projection is given as gate"):
        ExpertWeights.from_bf16(None, up, down)  # type: ignore[arg-type]


def test_from_bf16_takes_views_without_changing_a_byte() -> None:
    gate, up, down = bf16_weights(torch.bfloat16)
    strided = down.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided.is_contiguous()
    a = ExpertWeights.from_bf16(gate, up, down)
    b = ExpertWeights.from_bf16(gate, up, strided)
    for (_, s), (_, t) in zip(a.tensors(), b.tensors()):
        assert torch.equal(s.view(torch.uint8), t.view(torch.uint8))


# ---- cases of public reports ---------------------------------------------------------------------


def constant(rows: int, k: int, scale: float, g: float, experts: int = 1) -> Nvfp4Tensor:
    """All codes 1.0 with one block scale and one global scale."""
    data = torch.full((experts, rows, k // 2), 0x22, dtype=torch.uint8)
    block = torch.full((experts, rows, k // 16), scale).to(torch.float8_e4m3fn)
    return Nvfp4Tensor(data, block, torch.full((experts,), g))


def hidden_of(weights: ExpertWeights, act=None) -> Tensor:
    cfg = MoEConfig(weights.hidden, weights.intermediate, 1, 1, activation=act or SwiGLU())
    ids, one = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    return reference.experts(torch.ones(1, weights.hidden), ids, one, cfg, weights).h


def test_h20_gate_and_up_with_different_global_scales() -> None:
    """H20: gate 2^-10, up 2^-8; one scale for both gives .0083001, .1556148 or .0563960."""
    w13 = constant(256, 128, 1.0, 1.0)
    w13 = dataclasses.replace(w13, global_scale=torch.tensor([[2.0**-10, 2.0**-8]]))
    weights = ExpertWeights.from_nvfp4(w13, constant(128, 128, 1.0, 1 / 128))
    h = hidden_of(weights)
    want = 0.125 / (1 + math.exp(-0.125)) * 0.5
    torch.testing.assert_close(h, torch.full((1, 128), want), rtol=1e-6, atol=0)
    assert abs(want - 0.0332006) < 1e-7


@pytest.mark.parametrize(
    ("order", "granularity"),
    [("gate_up", 1), ("up_gate", 1)] + [("interleaved", n) for n in (1, 8, 16, 32, 64)],
)
def test_h30_named_row_order_decides_what_is_gate(order: str, granularity: int) -> None:
    """H30: gate 2.0 and up 0.5 give .8807970 in every order; read the other way round .6224594.
    The block scales (not the globals) carry the difference, so they must move with the rows."""
    gate, up = constant(128, 128, 2.0, 1.0), constant(128, 128, 0.5, 1.0)
    rows: list[Nvfp4Tensor] = []
    if order == "interleaved":
        for start in range(0, 128, granularity):
            rows += [_rows(p, start, start + granularity) for p in (gate, up)]
    else:
        rows = [gate, up] if order == "gate_up" else [up, gate]
    w13 = Nvfp4Tensor(
        torch.cat([r.data for r in rows], dim=1),
        torch.cat([r.scale.view(torch.uint8) for r in rows], dim=1),
        torch.tensor([1 / 128]),
    )
    down = constant(128, 128, 1.0, 1 / 128)
    h = hidden_of(ExpertWeights.from_nvfp4(w13, down, order, granularity))
    torch.testing.assert_close(h, torch.full((1, 128), 0.8807970), rtol=1e-6, atol=0)
    wrong = {"gate_up": "up_gate", "up_gate": "gate_up"}.get(order)
    if wrong is not None:
        h = hidden_of(ExpertWeights.from_nvfp4(w13, down, wrong))
        torch.testing.assert_close(h, torch.full((1, 128), 0.6224594), rtol=1e-6, atol=0)


def _rows(q: Nvfp4Tensor, start: int, stop: int) -> Nvfp4Tensor:
    return Nvfp4Tensor(q.data[:, start:stop], q.scale[:, start:stop], q.global_scale)


@pytest.mark.parametrize(("hidden", "inter"), [(2880, 2880), (1600, 128), (128, 1408)])
def test_h28_scales_of_later_experts_lie_where_the_padding_puts_them(
    hidden: int, inter: int
) -> None:
    """H28: block scale 2^e folded out of the global scale of expert e; a stride of 2880 instead of
    2944 rows reads a neighbour's."""
    experts = 3
    w13 = constant(2 * inter, hidden, 1.0, 1 / hidden, experts)
    block = torch.stack([torch.full((hidden, inter // 16), 2.0**e) for e in range(experts)])
    g2 = torch.tensor([(e + 1) / inter * 2.0**-e for e in range(experts)])
    data = torch.full((experts, hidden, inter // 2), 0x22, dtype=torch.uint8)
    w2 = Nvfp4Tensor(data, block.to(torch.float8_e4m3fn), g2)
    weights = ExpertWeights.from_nvfp4(w13, w2)
    assert weights.l2_scale.shape == (3, -(-hidden // 128) * 128, -(-inter // 64) * 4)
    cfg = MoEConfig(hidden, inter, experts, 1)
    ids = torch.arange(3, dtype=torch.int32).reshape(3, 1)
    y = reference.experts(torch.ones(3, hidden), ids, torch.ones(3, 1), cfg, weights).y
    assert y.shape == (3, hidden)
    for e in range(experts):
        torch.testing.assert_close(
            y[e], torch.full((hidden,), (e + 1) * 0.731059), rtol=1e-2, atol=0
        )


@pytest.mark.parametrize(("hidden", "inter"), [(2688, 1856), (128, 96), (128, 192)])
def test_h29_no_gate_and_a_width_that_is_no_multiple_of_128(hidden: int, inter: int) -> None:
    """H29: the accepted scale shape is the padded one that the quantiser itself makes."""
    experts = 4
    one = torch.ones(1, inter, hidden) / hidden
    weights = ExpertWeights.from_bf16(
        one.expand(experts, -1, -1),
        None,
        torch.stack([torch.full((hidden, inter), (e + 1) / inter) for e in range(experts)]),
    )
    rows = -(-inter // 128) * 128
    assert weights.l1_scale.shape == (experts, rows, -(-hidden // 64) * 4)
    assert nvfp4.swizzle(torch.zeros(inter, hidden // 16, dtype=torch.uint8)).shape[0] == rows
    cfg = MoEConfig(hidden, inter, experts, 2, activation=ReLU2())
    ids = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    weight = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    y = reference.experts(torch.ones(2, hidden), ids, weight, cfg, weights).y
    want = torch.tensor([[1.0], [3.5]]).expand(2, hidden)
    torch.testing.assert_close(y, want, rtol=1e-2, atol=0)


def test_the_layout_check_sees_one_wrong_scale_byte() -> None:
    want = layer()
    weights = oracle.to_library(want)
    weights.l2_scale.view(torch.uint8)[1, 0, 0] ^= 1
    with pytest.raises(AssertionError):
        assert_holds(weights, want)
    weights = oracle.to_library(want)
    weights.l1_scale.view(torch.uint8)[2, -1, -1] = 1  # padding
    with pytest.raises(AssertionError):
        assert_holds(weights, want)


def test_repr_shows_sizes_and_no_contents() -> None:
    w = ExpertWeights.from_bf16(
        torch.randn(4, 32, 64), torch.randn(4, 32, 64), torch.randn(4, 64, 32)
    )
    text = repr(w)
    assert "tensor(" not in text and len(text) < 200
    assert "experts=0:4" in text and "hidden=64" in text and f"{w.nbytes} bytes" in text
    assert repr(w.l1()) == (
        "Nvfp4Tensor(shape=(4, 64, 64), scale_layout=SWIZZLE_32_4_4, global_scale=(), device=cpu)"
    )
