"""The stages one by one: packed scales, quantiser, L1, L2 and the GEMMs, bit for bit against the
reference's sums of the same operands."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, ops
from moe import mega
from tests import oracle
from tests.layers import poison_new_tensors, same_bits
from tests.mega import data
from tests.mega.data import E, H, I, K, T

needs_simulator = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)
BACKENDS = ["reference", "torch", pytest.param("sim", marks=needs_simulator)]
F32 = np.float32


# ---- scales and quantiser ------------------------------------------------------------------------


def test_unpacking_reads_bytes_and_never_values() -> None:
    word = torch.tensor([0x7E_38_01_3F], dtype=torch.int64).int()  # bytes 3F 01 38 7E
    want = torch.tensor([1.875, 2.0**-9, 1.0, 448.0])
    for dtype in (torch.int32, torch.uint32):
        assert torch.equal(mega.unpack_ue4m3_u32(word.view(dtype)).float(), want)


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4), (2, 0, 4), (0,)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32, torch.uint8])
def test_unpacking_any_shape(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    raw = torch.randint(0, 256, (*shape, 4), dtype=torch.uint8)
    packed = raw.flatten(-2) if dtype == torch.uint8 else raw.view(dtype).squeeze(-1)
    out = mega.unpack_ue4m3_u32(packed)
    assert out.dtype == torch.float8_e4m3fn
    assert torch.equal(out.view(torch.uint8), raw.flatten(-2))


def test_unpacking_strided_words_and_refusing_others() -> None:
    words = data.words(torch.randint(0, 127, (3, 5, 16), dtype=torch.uint8))
    turned = data.mn_major(words)
    want = mega.unpack_ue4m3_u32(words).view(torch.uint8)
    assert torch.equal(mega.unpack_ue4m3_u32(turned).view(torch.uint8), want)
    thin = torch.empty_strided((3, 4, 1), (4, 1, 4), dtype=torch.int32).fill_(0x01020304)
    assert mega.unpack_ue4m3_u32(thin).shape == (3, 4, 4)
    for wrong in (torch.int64, torch.float32, torch.float8_e4m3fn):
        with pytest.raises(TypeError, match="must be int32, uint32 or uint8"):
            mega.unpack_ue4m3_u32(torch.zeros(4).to(wrong))


def test_quantiser_scales_by_the_rounded_scale_and_rounds_ties_to_even() -> None:
    block = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, 0, 1, 2, 3, 4])
    codes, sf = mega._quantize_to_e2m1(block.unsqueeze(0))
    assert codes.dtype == torch.int8 and sf.dtype == torch.float8_e4m3fn
    assert sf.float().item() == 1.0
    grid = ml_dtypes.float4_e2m1fn
    want = block.numpy().astype(grid).astype(F32)
    assert np.array_equal(nvfp4.decode_e2m1(nvfp4.unpack(codes.view(torch.uint8)))[0], want)


def test_quantiser_is_the_oracle_on_values_far_beyond_448() -> None:
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=gen) * torch.logspace(-3, 3.2, 5).unsqueeze(1)
    x[2, 16:32] = 0
    codes, sf = mega._quantize_to_e2m1(x)
    got = oracle.decode(codes.view(torch.uint8).numpy(), sf.view(torch.uint8).numpy())
    want = np.stack([oracle.quantize_row(r, F32(1)) for r in x.numpy()])
    assert np.array_equal(got, want)
    assert np.abs(got).max() > 448  # the limit belongs to the scale


@pytest.mark.parametrize("mode", ["per_tensor", "per_token", 0.125])
@pytest.mark.parametrize("count", [0, 1, 7])
def test_staged_activations(mode: Any, count: int) -> None:
    x = torch.randn(count, H, generator=torch.Generator().manual_seed(count)).bfloat16()
    codes, sf, g = mega.stage_activation(x, mode)
    want = nvfp4.quantize(x, mode)
    assert torch.equal(codes.view(torch.uint8), want.data)
    assert torch.equal(sf.view(torch.uint8), want.scale.view(torch.uint8))
    assert g.shape == ((count,) if mode == "per_token" else ())
    if count:
        error = (want.dequantize() - x.float()).norm() / x.float().norm()
        assert error < 0.1  # 20 dB: 6 dB where the amax is clamped in place of the scale


# ---- GEMMs ---------------------------------------------------------------------------------------


def column_major(pair: tuple[Tensor, Tensor], packed: bool) -> tuple[Tensor, Tensor]:
    """(E, N, K/2), (E, N, K/16) -> codes int8 (E, K/2, N), scales (E, K/16, N) or words."""
    codes, scale = pair
    sf = data.words(scale).view(torch.uint32) if packed else scale.view(torch.float8_e4m3fn)
    return codes.view(torch.int8).transpose(1, 2), sf.transpose(1, 2)


def expected(
    x: tuple[Tensor, Tensor], row: Tensor, w: tuple[Tensor, Tensor], ids: Tensor, factor: Tensor
) -> Tensor:
    """fp32 (P, N): sums in fp64 rounded once, times factor (P,) or (P, N); by a loop over pairs."""
    out = torch.zeros(ids.numel(), w[0].shape[1])
    xv = oracle.decode(x[0].numpy(), x[1].numpy())
    for p, e in enumerate(ids.flatten().tolist()):
        if 0 <= e < E:
            acc = oracle.decode(w[0][e].numpy(), w[1][e].numpy()) @ xv[int(row[p])]
            out[p] = torch.from_numpy(acc.astype(F32)) * factor[p]
    return out


def rows(count: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    gen = np.random.default_rng(seed)
    codes, scale = oracle.random_nvfp4(gen, count, k)
    return data.tensor(codes), data.tensor(scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("packed", [False, True], ids=["bytes", "words"])
def test_l1_gives_one_row_per_slot(
    backend: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, t = data.layer(), data.tokens()
    w = data.gate_up(of)
    sf = data.words(t.scale) if packed else t.scale.view(torch.float8_e4m3fn)
    poison_new_tensors(monkeypatch)
    out = mega.nvfp4_mega_moe_l1(
        t.codes.view(torch.int8),
        sf,
        *column_major(w, packed),
        t.ids.int(),
        t.weights,
        E,
        alpha=0.3,
        backend=backend,
    )
    monkeypatch.undo()
    row = torch.arange(T * K) // K
    alpha = torch.full((T * K,), 0.3)
    want = expected((t.codes, t.scale), row, w, t.ids, alpha).bfloat16()
    assert out.shape == (T * K, 2 * I)
    assert same_bits(out, want)
    empty = ((t.ids < 0) | (t.ids >= E)).flatten()
    assert empty.any() and not out[empty].any() and out[~empty].any(dim=1).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_l1_on_finished_weights_with_gate_and_up_scales_apart(backend: str) -> None:
    of, t = data.layer(), data.tokens(scaled=True)
    (w13, s13), (g13, g2) = data.gate_up(of), data.alphas(of)
    l1, _ = mega.finalize_weights(w13, s13, *data.down(of), g13, g2)
    row = torch.arange(T * K) // K
    expert = t.ids.flatten().clamp(0, E - 1)
    each = t.gx[row, None] * g13[expert]  # (P, 2)
    factor = each.repeat_interleave(I, dim=1)
    want = expected((t.codes, t.scale), row, (w13, s13), t.ids, factor).bfloat16()
    call = (t.codes, t.scale, l1, None, t.ids, None, E)
    out = mega.nvfp4_mega_moe_l1(*call, x_scales=t.gx, backend=backend)
    assert same_bits(out, want)
    raw = (t.codes, t.scale, *column_major((w13, s13), False), t.ids, None, E)
    out = mega.nvfp4_mega_moe_l1(*raw, g13, x_scales=t.gx, backend=backend)
    assert same_bits(out, want)
    w, sf = l1  # as the original unpacks it
    again = (t.codes, t.scale, w, sf, t.ids, None, E)
    assert same_bits(mega.nvfp4_mega_moe_l1(*again, g13, x_scales=t.gx, backend=backend), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["number", "element", "expert"])
def test_l2_reads_one_row_per_slot(backend: str, kind: str) -> None:
    of, t = data.layer(), data.tokens()
    x, w = rows(T * K, I, 5), data.down(of)
    g2 = data.alphas(of)[1]
    alpha: Any = {"number": 0.3, "element": torch.tensor([0.3]), "expert": g2}[kind]
    expert = t.ids.flatten().clamp(0, E - 1)
    factor = g2[expert] if kind == "expert" else torch.full((T * K,), 0.3)
    want = expected(x, torch.arange(T * K), w, t.ids, factor).bfloat16()
    out = mega.nvfp4_mega_moe_l2(
        *x, *column_major(w, True), t.ids, t.weights, E, alpha, backend=backend
    )
    assert same_bits(out, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_stages_in_a_row_are_the_layer_but_for_one_rounding(backend: str) -> None:
    """stage, L1, SwiGLU, stage, L2, combine: only gate and up are rounded to bf16 on the way."""
    of = data.layer()
    t = data.tokens()
    g13, g2 = data.alphas(of)
    l1, l2 = mega.finalize_weights(*data.gate_up(of), *data.down(of), g13, g2)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(8)).bfloat16()
    codes, sf, g = mega.stage_activation(x, "per_token")
    options = {"backend": backend}
    gu = mega.nvfp4_mega_moe_l1(codes, sf, l1, None, t.ids, t.weights, E, x_scales=g, **options)
    gate, up = gu.float().chunk(2, dim=-1)
    h = torch.nn.functional.silu(gate) * up
    codes, sf, gh = mega.stage_activation(h, "per_token")
    o = mega.nvfp4_mega_moe_l2(codes, sf, l2, None, t.ids, t.weights, E, x_scales=gh, **options)
    pairs = torch.arange(T * K, dtype=torch.int32).view(T, K)
    y = ops.combine(o, pairs, t.weights)
    buffer = mega.get_symm_buffer(None, E, T, K, H, I, backend="reference")
    codes, sf, g = mega.stage_activation(x, "per_token")
    buffer.x.copy_(codes.view(torch.uint8))
    buffer.x_sf.copy_(sf.view(torch.int32))
    buffer.topk_idx.copy_(t.ids)
    buffer.topk_weights.copy_(t.weights)
    buffer.input_global_scale = g
    whole = torch.empty(T, H, dtype=torch.bfloat16)
    mega.nvfp4_mega_moe_full(whole, l1, l2, buffer)
    error = (y.float() - whole.float()).norm() / whole.float().norm()
    assert error < 0.03
    assert torch.equal(y == 0, whole == 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dense_gemm(backend: str, dtype: torch.dtype) -> None:
    a, b = rows(5, 64, 1), rows(48, 64, 2)
    scales = torch.linspace(0.5, 1.5, 5)
    acc = oracle.decode(a[0].numpy(), a[1].numpy()) @ oracle.decode(b[0].numpy(), b[1].numpy()).T
    want = (torch.from_numpy(acc.astype(F32)) * (scales * 0.3).unsqueeze(1)).to(dtype)
    out = mega.cutlass_nvfp4_blockscaled_gemm(
        a[0],
        data.words(a[1]),
        b[0].t(),
        b[1].view(torch.float8_e4m3fn).t(),
        torch.tensor(0.3),
        a_scales=scales,
        backend=backend,
        out_dtype=dtype,
    )
    assert same_bits(out, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_nobody_here(backend: str) -> None:
    of = data.layer()
    w = column_major(data.gate_up(of), False)
    none, few = rows(0, H, 1), rows(2, H, 1)
    ids = torch.empty((0, K), dtype=torch.int64)
    out = mega.nvfp4_mega_moe_l1(*none, *w, ids, None, E, backend=backend)
    assert out.shape == (0, 2 * I) and out.dtype == torch.bfloat16
    ids = torch.full((2, K), -1)
    out = mega.nvfp4_mega_moe_l1(*few, *w, ids, None, E, backend=backend)
    assert same_bits(out, torch.zeros(2 * K, 2 * I, dtype=torch.bfloat16))


def test_the_comparison_notices_one_byte_one_row_and_one_scale() -> None:
    of, t = data.layer(), data.tokens()
    w = column_major(data.gate_up(of), False)

    def run(codes: Tensor, scale: Tensor, alpha: float = 0.3) -> Tensor:
        return mega.nvfp4_mega_moe_l1(codes, scale, *w, t.ids, None, E, alpha)

    good = run(t.codes, t.scale)
    for part in (t.codes, t.scale):
        part[4, 5] ^= 4
        assert not same_bits(run(t.codes, t.scale), good)
        part[4, 5] ^= 4
    assert not same_bits(run(t.codes, t.scale, 0.3 * 0.98), good)
    assert not same_bits(run(t.codes.roll(1, 0), t.scale.roll(1, 0)), good)
    assert same_bits(run(t.codes, t.scale), good)


def test_the_choice_of_the_gemm_is_visible() -> None:
    assert mega.gemm_backend("auto", "cpu") == "torch"
    assert mega.gemm_backend("reference", "cpu") == "reference"
    with pytest.raises(RuntimeError, match="'sm100' cannot run on cpu"):
        mega.gemm_backend("sm100", "cpu")
    with pytest.raises(ValueError, match="backend must be 'auto' or one of"):
        mega.gemm_backend("sm90", "cpu")


def test_operands_that_do_not_fit_are_refused() -> None:
    of, t = data.layer(), data.tokens()
    w, sf = column_major(data.gate_up(of), False)
    good: dict[str, Any] = {
        "x_fp4": t.codes,
        "x_sf": t.scale,
        "weights": w,
        "weight_scales": sf,
        "topk_ids": t.ids,
    }
    l1, l2 = mega.finalize_weights(*data.gate_up(of), *data.down(of))

    def refuse(error: type[Exception], match: str, **changed: Any) -> None:
        with pytest.raises(error, match=match):
            mega.cutlass_grouped_nvfp4_gemm(**(good | changed))

    refuse(TypeError, "x_fp4 must be int8 or uint8", x_fp4=t.codes.float())
    refuse(ValueError, r"x_fp4 must be \(rows, K/2\)", x_fp4=t.codes[0])
    refuse(TypeError, "x_sf must be int32", x_sf=t.scale.float())
    refuse(ValueError, r"x_sf must be bytes \(9, 8\)", x_sf=t.scale[:, :4])
    refuse(ValueError, r"x_sf must be bytes \(9, 8\)", x_sf=data.words(t.scale)[1:])
    refuse(ValueError, r"x_scales must be float32 \(9,\)", x_scales=torch.ones(T, 1))
    refuse(ValueError, "x_sf is on meta", x_sf=t.scale.to("meta"))
    refuse(ValueError, "weight_scales are missing", weight_scales=None)
    refuse(ValueError, "weight_scales must be None for MegaWeights", weights=l1)
    refuse(ValueError, r"weights must be \(E, K/2, N\)", weights=w[0])
    refuse(ValueError, "weight_scales of", weight_scales=sf[:, 1:])
    refuse(ValueError, "weight_scales of", weight_scales=sf[:, :, 1:])
    refuse(ValueError, "the weights K = 64", weights=l2, weight_scales=None)
    refuse(TypeError, "topk_ids must be int32 or int64", topk_ids=t.ids.float())
    refuse(ValueError, "must have 8 rows .one per token. or 24", topk_ids=t.ids[1:])
    refuse(ValueError, "topk_ids are on meta", topk_ids=t.ids.to("meta"))
    refuse(ValueError, "topk_weights must be", topk_weights=t.weights[1:])
    refuse(ValueError, "alpha must be a number or float32", alpha=torch.ones(E + 1))
    refuse(ValueError, "alpha must be a number or float32", alpha=torch.ones(E).double())
    refuse(TypeError, "out_dtype must be", out_dtype=torch.float64)
    refuse(ValueError, "backend must be", backend="cutlass")
    stage = (t.codes, t.scale, w, sf, t.ids, None)
    with pytest.raises(ValueError, match="num_experts_per_rank is 7, l1_weights hold 6"):
        mega.nvfp4_mega_moe_l1(*stage, E + 1)
    with pytest.raises(ValueError, match="l1_weights holds the projection l2"):
        mega.nvfp4_mega_moe_l1(t.codes, t.scale, l2, None, t.ids, None, E)
    with pytest.raises(ValueError, match=r"one row per \(token, slot\), 27, got"):
        mega.nvfp4_mega_moe_l2(*stage, E)
    x = rows(T * K, I, 0)
    with pytest.raises(ValueError, match="is for gate and up"):
        mega.nvfp4_mega_moe_l2(*x, l2, None, t.ids, None, E, torch.ones(E, 2))
    with pytest.raises(ValueError, match=r"b must be \(K/2, N\)"):
        mega.cutlass_nvfp4_blockscaled_gemm(t.codes, t.scale, w, sf)
