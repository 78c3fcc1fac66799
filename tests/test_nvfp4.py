"""The NVFP4 format: codes, scales, the quantiser against a second one in numpy and ml_dtypes."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import ROW_MAJOR, SWIZZLE_32_4_4, SWIZZLE_32_4_4_GROUPED, Nvfp4Tensor
from tests.check import assert_bytes_equal

F32 = np.float32
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = {0.25: 0, 0.75: 2, 1.25: 2, 1.75: 4, 2.5: 4, 3.5: 6, 5.0: 6}  # midpoint -> code
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
quick = settings(deadline=None, max_examples=40, derandomize=True)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def all_bf16() -> Tensor:
    """Every bit pattern of bf16, as fp32."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def numpy_quantize(x: np.ndarray, g: np.ndarray, exact: bool) -> tuple[np.ndarray, np.ndarray]:
    """fp32 (rows, K), outer scale fp32 (rows,) -> bytes (rows, K/2) and scale bytes (rows, K/16)
    of docs/numerics.md section 2, one block at a time, with the rounding of ml_dtypes."""
    rows, k = x.shape
    data = np.zeros((rows, k // 2), np.uint8)
    scales = np.zeros((rows, k // 16), np.uint8)
    for r in range(rows):
        six_g = F32(6.0) * g[r]
        for b in range(k // 16):
            block = x[r, 16 * b : 16 * b + 16]
            amax = np.abs(block).max()
            wanted = amax / six_g if exact else amax * (F32(1.0) / six_g)
            s = min(max(wanted, F32(2.0**-9)), F32(448.0)).astype(ml_dtypes.float8_e4m3fn)
            step = s.astype(F32) * g[r]
            scaled = block / step if exact else block * (F32(1.0) / step)
            codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
            data[r, 8 * b : 8 * b + 8] = codes[0::2] + 16 * codes[1::2]
            scales[r, b] = s.view(np.uint8)
    return data, scales


# ---- E2M1 ----------------------------------------------------------------------------------------


def test_all_sixteen_codes_decode_and_encode() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    want = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    for dtype in (*DTYPES, torch.float64):
        values = nvfp4.decode_e2m1(codes, dtype)
        assert values.dtype == dtype and torch.equal(values, want.to(dtype))
    assert torch.equal(torch.signbit(nvfp4.decode_e2m1(codes)), codes > 7)  # -0.0 too
    assert torch.equal(nvfp4.encode_e2m1(want), codes)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_every_tie_and_its_neighbours(sign: float) -> None:
    """A midpoint goes to the even code, the fp32 values next to it to the nearer one."""
    for i, (tie, code) in enumerate(TIES.items()):
        x = np.array([np.nextafter(F32(tie), F32(0)), tie, np.nextafter(F32(tie), F32(9))], F32)
        got = nvfp4.encode_e2m1(sign * torch.from_numpy(x))
        want = [i, code, i + 1]
        assert (got & 7).tolist() == want and ((got >> 3).bool() == (sign < 0)).all()


def test_encode_saturates_keeps_the_sign_of_zero_and_maps_nan_to_six() -> None:
    tiny = 2.0**-149
    x = torch.tensor([0.0, -0.0, 6.5, -7.0, 3e38, -3e38, math.inf, -math.inf, tiny, -tiny])
    assert nvfp4.encode_e2m1(x).tolist() == [0, 8, 7, 15, 7, 15, 7, 15, 0, 8]
    assert nvfp4.encode_e2m1(torch.tensor([math.nan, -math.nan])).tolist() == [7, 7]


def test_every_bf16_value_encodes_as_in_ml_dtypes() -> None:
    x = all_bf16()
    nan = torch.isnan(x)
    got = nvfp4.encode_e2m1(x)
    want = x[~nan].clamp(-1e30, 1e30).numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15
    assert_bytes_equal(got[~nan], torch.from_numpy(want))
    assert (got[nan] == 7).all()
    assert got.dtype == torch.uint8 and int(nan.sum()) == 254


def test_encode_takes_any_shape() -> None:
    x = normal(3, 5, 7, seed=1) * 3
    assert torch.equal(nvfp4.encode_e2m1(x).flatten(), nvfp4.encode_e2m1(x.flatten()))
    assert nvfp4.encode_e2m1(torch.zeros(0, 4)).shape == (0, 4)


# ---- UE4M3 ---------------------------------------------------------------------------------------


def test_all_scale_bytes_decode_as_in_ml_dtypes() -> None:
    """128 bytes of the format; 0x7F is NaN; the loader's check refuses it and bytes with bit 7."""
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    data = torch.full((256, 8), 0x22, dtype=torch.uint8)
    q = Nvfp4Tensor(data, every.reshape(256, 1), torch.ones(()))
    values = nvfp4.decode(q)[:128, 0].numpy()
    want = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
    np.testing.assert_array_equal(values, want)
    assert values[1] == 2.0**-9 and values[0x7E] == 448 and np.isnan(values[0x7F])
    assert nvfp4.invalid_scales(every).tolist() == [b >= 0x7F for b in range(256)]
    assert torch.equal(nvfp4.invalid_scales(q.scale).flatten(), nvfp4.invalid_scales(every))


def test_every_bf16_value_encodes_to_a_scale_as_in_ml_dtypes() -> None:
    x = all_bf16()
    nan = torch.isnan(x)
    got = nvfp4.encode_ue4m3(x).view(torch.uint8)
    clamped = np.clip(x[~nan].numpy(), F32(2.0**-9), F32(448.0))
    want = clamped.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert_bytes_equal(got[~nan], torch.from_numpy(want))
    assert (got[nan] == 0x7F).all()
    assert int(got.min()) == 1 and int(got[~nan].max()) == 0x7E


def test_scale_ties_and_neighbours_round_to_even() -> None:
    """All 125 midpoints of neighbouring finite scales."""
    grid = np.arange(1, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
    middle = (grid[:-1] + grid[1:]) / 2
    low, high = np.nextafter(middle, F32(0)), np.nextafter(middle, F32(1e9))
    index = np.arange(1, 0x7E)
    for x, want in ((low, index), (middle, index + index % 2), (high, index + 1)):
        got = nvfp4.encode_ue4m3(torch.from_numpy(x)).view(torch.uint8)
        np.testing.assert_array_equal(got.numpy(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_decode_is_exact(dtype: torch.dtype) -> None:
    """Every product of 16 codes and 127 scales has at most 6 significant bits."""
    codes = torch.arange(16, dtype=torch.uint8)
    data = nvfp4.pack(codes).expand(127, 8).contiguous()
    scale = torch.arange(127, dtype=torch.uint8).reshape(127, 1)
    got = nvfp4.decode(Nvfp4Tensor(data, scale, torch.ones(())), dtype)
    scales = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    grid = np.array([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    assert got.dtype == dtype
    np.testing.assert_array_equal(got.double().numpy(), scales[:, None] * grid)


def test_dequantize_rounds_once_after_an_exact_product() -> None:
    """(code * scale) * g: fp64 exact, fp32 one rounding, bf16 that rounding cast again."""
    q = nvfp4.quantize(normal(4, 64, seed=2), "per_token")
    exact = nvfp4.decode(q, torch.float64) * q.global_scale.double().unsqueeze(-1)
    assert torch.equal(q.dequantize(torch.float64), exact)
    assert torch.equal(q.dequantize(), exact.float())  # 6 by 24 bits are exact in fp64
    assert torch.equal(nvfp4.dequantize(q, torch.bfloat16), exact.float().bfloat16())
    experts = Nvfp4Tensor(q.data.view(2, 2, 32), q.scale.view(2, 2, 4), torch.tensor([1.0, 2.0]))
    values = nvfp4.decode(experts)
    assert torch.equal(experts.dequantize(), values * torch.tensor([1.0, 2.0]).view(2, 1, 1))


# ---- quantise ------------------------------------------------------------------------------------


def outliers(rows: int, k: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Rows of very different size, blocks of zeros, one element 300 times its neighbours."""
    x = normal(rows, k, seed=seed) * torch.logspace(-3, 2, rows).unsqueeze(-1)
    x[0] = 0
    x[1, 16:32] = 0
    x[2, 5] *= 300
    x[3, ::2] = -0.0
    return x.to(dtype)


def outer_scale(mode: str, x: np.ndarray) -> tuple[object, np.ndarray]:
    """What to give to `quantize`, and the fp32 scale of every row."""
    if mode == "static":
        return 0.01, np.full(x.shape[0], F32(0.01))
    amax = np.abs(x).max(axis=-1)
    amax = np.full_like(amax, amax.max()) if mode == "per_tensor" else amax
    return mode, np.maximum(amax / F32(2688.0), F32(2.0**-100))


@pytest.mark.parametrize("exact", [False, True], ids=["reciprocal", "division"])
@pytest.mark.parametrize("mode", ["per_token", "per_tensor", "static"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_equals_the_second_implementation(
    dtype: torch.dtype, mode: str, exact: bool
) -> None:
    x = outliers(24, 96, dtype, seed=3)
    wide = x.float().numpy()
    given_scale, g = outer_scale(mode, wide)
    q = nvfp4.quantize(x, given_scale, exact_division=exact)
    assert q.global_scale.shape == ((24,) if mode == "per_token" else ())
    np.testing.assert_array_equal(q.global_scale.expand(24).numpy(), g)
    data, scale = numpy_quantize(wide, g, exact)
    assert_bytes_equal(q.data, torch.from_numpy(data), "codes")
    assert_bytes_equal(q.scale.view(torch.uint8), torch.from_numpy(scale), "scales")


def test_the_two_forms_differ_where_the_reciprocal_rounds() -> None:
    """About 5e-4 of the codes of bf16 data: a test of one form cannot pass with the other."""
    x = normal(256, 256, seed=4, dtype=torch.bfloat16)
    a, b = (nvfp4.quantize(x, 0.01, exact_division=e) for e in (False, True))
    share = float((nvfp4.unpack(a.data) != nvfp4.unpack(b.data)).float().mean())
    assert 1e-5 < share < 3e-3


def test_block_scales_at_a_tie_round_as_the_form_says() -> None:
    """amax around the midpoints of block scales, where amax * (1 / 6g) and amax / 6g may fall on
    different sides: bytes of both forms, and some of them differ."""
    grid = np.arange(8, 0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(F32)
    middle = (grid[:-1] + grid[1:]) / 2
    differing = 0
    for g in (F32(0.01), F32(0.003), F32(0.7)):
        near = (middle * (F32(6.0) * g)).astype(F32).view(np.int32)
        amax = np.concatenate([(near + ulp).view(F32) for ulp in (-1, 0, 1)])
        x = np.zeros((amax.size, 16), F32)
        x[:, 3] = amax
        scales = []
        for exact in (False, True):
            q = nvfp4.quantize(torch.from_numpy(x), float(g), exact_division=exact)
            _, want = numpy_quantize(x, np.full(amax.size, g), exact)
            assert_bytes_equal(q.scale.view(torch.uint8), torch.from_numpy(want))
            scales.append(want)
        differing += int((scales[0] != scales[1]).sum())
    assert differing > 10


def test_elements_are_divided_by_the_rounded_scale() -> None:
    """amax 1.1 with g = 1: the scale 0.18333 rounds to 0.1875 and 1.1 / 0.1875 = 5.87 -> 6; an
    element 0.93 is 4.96 of the rounded scale (-> 4) and 5.07 of the unrounded one (-> 6)."""
    x = torch.zeros(16)
    x[0], x[1] = 1.1, 0.93
    q = nvfp4.quantize(x, 1.0)
    assert q.scale.float().item() == 0.1875
    assert nvfp4.decode_e2m1(nvfp4.unpack(q.data))[:2].tolist() == [6.0, 4.0]


def test_global_scales_of_every_shape() -> None:
    """Numbers, () and (1,) tensors, one per expert, one per row: the same as row by row."""
    x = normal(3, 5, 32, seed=5)
    per_expert = torch.tensor([0.001, 0.01, 0.1])
    per_row = torch.rand(3, 5, generator=torch.Generator().manual_seed(0)) + 0.001
    for g in (0.01, torch.tensor(0.01), torch.tensor([0.01]), per_expert, per_row):
        q = nvfp4.quantize(x, g)
        full = torch.as_tensor(g).reshape(*torch.as_tensor(g).shape, *[1] * 2)
        full = torch.as_tensor(g).expand(3, 5) if full.numel() in (1, 15) else full[..., 0]
        full = full.expand(3, 5)
        for e in range(3):
            for r in range(5):
                one = nvfp4.quantize(x[e, r], float(full[e, r]))
                assert torch.equal(one.data, q.data[e, r])
                assert_bytes_equal(one.scale, q.scale[e, r])
    assert nvfp4.quantize(x, "per_token").global_scale.shape == (3, 5)
    assert nvfp4.quantize(x, "per_tensor").global_scale.shape == ()
    assert nvfp4.quantize(x[0, 0], "per_token").global_scale.shape == ()


@quick
@given(st.integers(-60, 60), st.integers(0, 2**31))
def test_per_token_codes_do_not_depend_on_a_power_of_two(exponent: int, seed: int) -> None:
    x = normal(4, 48, seed=seed)
    q, scaled = nvfp4.quantize(x), nvfp4.quantize(x * 2.0**exponent)
    assert torch.equal(q.data, scaled.data)
    assert_bytes_equal(q.scale, scaled.scale)
    assert torch.equal(q.global_scale * 2.0**exponent, scaled.global_scale)


@quick
@given(st.integers(0, 2**31), st.booleans())
def test_quantising_what_was_decoded_changes_nothing(seed: int, exact: bool) -> None:
    """With the same power-of-two outer scale, values of the grid are fixed points."""
    values = nvfp4.quantize(normal(4, 64, seed=seed), 2.0**-8).dequantize()
    again = nvfp4.quantize(values, 2.0**-8, exact_division=exact)
    assert torch.equal(again.dequantize(), values)


def test_tokens_are_quantised_one_by_one() -> None:
    """per_token: batch-invariant, leading shapes and strides do not matter."""
    x = outliers(12, 64, torch.bfloat16, seed=6)
    q = nvfp4.quantize(x.view(3, 4, 64))
    assert q.shape == (3, 4, 64) and q.scale.shape == (3, 4, 4) and q.data.shape == (3, 4, 32)
    for r in range(12):
        one = nvfp4.quantize(x[r : r + 1])
        assert torch.equal(one.data[0], q.data[r // 4, r % 4])
        assert_bytes_equal(one.scale[0], q.scale[r // 4, r % 4])
    strided = x.t().contiguous().t()
    assert not strided.is_contiguous()
    assert torch.equal(nvfp4.quantize(strided).data.view(3, 4, 32), q.data)


@pytest.mark.parametrize("mode", ["per_token", "per_tensor", 0.5])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (0, 3, 64), (4, 0)])
def test_no_tokens_and_no_columns(mode: object, shape: tuple[int, ...]) -> None:
    for layout in (ROW_MAJOR, SWIZZLE_32_4_4):
        q = nvfp4.quantize(torch.zeros(shape, dtype=torch.bfloat16), mode, layout)
        assert q.shape == shape and q.dequantize().shape == shape
        assert (q.global_scale > 0).all()


def test_tiny_and_zero_rows_stay_finite() -> None:
    x = torch.zeros(3, 32)
    x[1] = 1e-40  # subnormal: its outer scale would be 0
    x[2] = 2.0**-110  # half of 2^-9 2^-100, the smallest step: kept
    q = nvfp4.quantize(x)
    assert q.global_scale.tolist() == [2.0**-100] * 3
    assert (q.scale.view(torch.uint8) == 1).all()
    assert not q.data[:2].any() and torch.equal(q.dequantize()[2], x[2])


def test_nan_and_inf_spoil_what_the_contract_says() -> None:
    """per_token: their own row; static: Inf saturates, NaN spoils its block; per_tensor: all."""
    clean = normal(4, 64, seed=7)
    for bad in (math.nan, math.inf, -math.inf):
        x = clean.clone()
        x[1, 20] = bad
        q, want = nvfp4.quantize(x), nvfp4.quantize(clean)
        y = q.dequantize()
        assert y[1].isnan().all()
        rest = [0, 2, 3]
        assert torch.equal(q.data[rest], want.data[rest]) and torch.isfinite(y[rest]).all()
        assert nvfp4.quantize(x, "per_tensor").dequantize().isnan().all()
        q = nvfp4.quantize(x, 0.01)
        y = q.dequantize()
        if math.isnan(bad):
            assert y[1, 16:32].isnan().all()
            assert q.scale.view(torch.uint8)[1, 1] == 0x7F
            y[1, 16:32] = 0
        else:
            assert y[1, 20] == math.copysign(2688 * F32(0.01), bad)
        assert torch.isfinite(y).all()


def test_snr_of_normal_data() -> None:
    """N(0, 1) with one scale per token: 20.4 dB (measured: 20.42 here, 20.43 at 4096 x 4096)."""
    x = normal(512, 2048, seed=8)
    noise = nvfp4.quantize(x).dequantize(torch.float64) - x.double()
    snr = 10 * math.log10(float(x.double().square().sum() / noise.square().sum()))
    assert 20.3 < snr < 20.5, snr


@pytest.mark.parametrize("mode", ["per_token", "per_tensor", 0.01])
def test_quantize_compiles_without_a_graph_break(mode: object) -> None:
    def run(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = nvfp4.quantize(x, mode, SWIZZLE_32_4_4)
        return q.data, q.scale.view(torch.uint8), q.global_scale

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    for rows in (5, 9):
        x = normal(rows, 64, seed=9, dtype=torch.bfloat16)
        for got, want in zip(compiled(x), run(x)):
            assert_bytes_equal(got, want)


@pytest.mark.parametrize(
    ("x", "options", "error", "message"),
    [
        (torch.zeros(2, 24), {}, ValueError, r"multiple of 16 .* got \(2, 24\)"),
        (torch.zeros(()), {}, ValueError, "multiple of 16"),
        (torch.zeros(2, 16).double(), {}, TypeError, "float64: cast it explicitly"),
        (torch.zeros(2, 16).int(), {}, TypeError, "int32"),
        (torch.zeros(2, 16), {"global_scale": "per_row"}, ValueError, "'per_row'"),
        (torch.zeros(2, 16), {"global_scale": 0.0}, ValueError, "positive and finite, got 0.0"),
        (torch.zeros(2, 16), {"global_scale": -1.0}, ValueError, "positive and finite"),
        (torch.zeros(2, 16), {"global_scale": math.inf}, ValueError, "positive and finite"),
        (torch.zeros(2, 16), {"global_scale": math.nan}, ValueError, "positive and finite"),
        (torch.zeros(2, 16), {"global_scale": torch.ones(3)}, ValueError, r"\(2,\).*got \(3,\)"),
        (
            torch.zeros(2, 16),
            {"global_scale": torch.ones(2, 16)},
            ValueError,
            r"one element or a prefix of \(2,\).* got \(2, 16\)",
        ),
        (
            torch.zeros(2, 16),
            {"scale_layout": SWIZZLE_32_4_4_GROUPED},
            ValueError,
            "quantize_grouped",
        ),
    ],
)
def test_quantize_refuses(x: Tensor, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        nvfp4.quantize(x, **options)
