"""Reported bugs of the quantiser and of scale layouts; see test_public_reports.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import SWIZZLE_32_4_4
from moe import MoE, MoEConfig
from tests import oracle
from tests.layers import (
    assert_rows,
    ids_of,
    poison_new_tensors,
    routing,
    same_bits,
    unit_layer,
)


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)


# ---- the quantiser -------------------------------------------------------------------------------


def test_a_zero_block_has_a_finite_scale() -> None:
    """H15: the quantiser's part; row 5, columns 32..47 are 0, the global amax is .01."""
    w = torch.randn(128, 128, generator=torch.Generator().manual_seed(0)).clamp(-2, 2) * 0.005
    w[0, 0] = 0.01
    w[5, 32:48] = 0
    for exact in (False, True):
        q = nvfp4.quantize(w, float(w.abs().max() / 2688), exact_division=exact)
        assert not nvfp4.invalid_scales(q.scale).any()
        assert not q.dequantize()[5, 32:48].any()
        assert torch.isfinite(q.dequantize()).all()


def test_a_block_above_2688() -> None:
    """H21: with a fixed outer scale of 1 it saturates and stays finite; a dynamic one holds it."""
    x = torch.randn(1, 128, generator=torch.Generator().manual_seed(0))
    big = torch.tensor([4032.0, -4032.0, 2016.0, 1000.0])
    x[0, :16] = 0
    x[0, :4] = big
    fixed = nvfp4.quantize(x, 1.0)
    assert fixed.dequantize()[0, :4].tolist() == [2688.0, -2688.0, 1792.0, 896.0]
    assert fixed.scale.view(torch.uint8)[0, 0] == 0x7E
    dynamic = nvfp4.quantize(x, "per_token").dequantize()[0, :4]
    assert ((dynamic - big).abs() < big.abs() / 8).all()


def test_ties_round_to_even() -> None:
    """H22: every midpoint of E2M1, both signs, and -0."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    x = torch.tensor([*ties, *(-t for t in ties), 6.0, -0.0])
    for exact in (False, True):
        q = nvfp4.quantize(x, 1.0, exact_division=exact)
        assert q.scale.float().tolist() == [1.0]
        want = [0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 7, 8]
        assert nvfp4.unpack(q.data).tolist() == want


def test_every_block_scale_decodes() -> None:
    """H23: subnormals are multiples of 2^-9, not (1 + m/8) 2^-7."""
    scale = torch.arange(128, dtype=torch.uint8).reshape(128, 1)
    data = torch.full((128, 8), 0x22, dtype=torch.uint8)
    values = nvfp4.Nvfp4Tensor(data, scale, torch.tensor(1.0)).dequantize()[:, 3]
    spots = {0: 0.0, 1: 2.0**-9, 7: 0.013671875, 8: 0.015625, 0x38: 1.0, 0x7E: 448.0}
    assert {b: values[b].item() for b in spots} == spots
    assert values[0x7F].isnan() and torch.isfinite(values[:0x7F]).all()
    want = oracle.decode_scales(np.arange(128, dtype=np.uint8))
    np.testing.assert_array_equal(values.double().numpy(), want)


def test_zero_rows_and_zero_tensors() -> None:
    """H24: no reciprocal of zero in x, and none in an expert whose intermediate is 0."""
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    x[1] = 0
    q = nvfp4.quantize(x)
    assert not q.data[1].any() and not q.dequantize()[1].any()
    assert not nvfp4.invalid_scales(q.scale).any() and (q.global_scale > 0).all()
    rest = nvfp4.quantize(x[[0, 2]])
    assert torch.equal(q.data[[0, 2]], rest.data)
    assert same_bits(q.scale[[0, 2]].view(torch.uint8), rest.scale.view(torch.uint8))
    for outer in ("per_token", "per_tensor"):
        zero = nvfp4.quantize(torch.zeros(3, 128), outer)
        assert not zero.data.any() and not zero.dequantize().any()
        assert torch.isfinite(zero.scale.float()).all() and torch.isfinite(zero.global_scale).all()
    layer = unit_layer(128, 128, 8, 2)
    layer.l1_data[:, 1::2] = 0  # up
    y = layer.experts(torch.ones(1, 128), ids_of([[0, 1]]), torch.ones(1, 2))
    assert_rows(y, [0.0])


def test_quantiser_input_that_is_not_contiguous() -> None:
    """H25: a column slice, a transposed slice, every other row, an expanded row."""
    big = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    views = (big[:, :128], big.t()[:128].t(), big[::2], big[:1].expand(4, 256), big.t()[::2])
    for x in views:
        assert not x.is_contiguous()
        for layout in (nvfp4.ROW_MAJOR, SWIZZLE_32_4_4):
            a, b = (nvfp4.quantize(v, scale_layout=layout) for v in (x, x.contiguous()))
            assert torch.equal(a.data, b.data) and torch.equal(a.global_scale, b.global_scale)
            assert torch.equal(a.scale.view(torch.uint8), b.scale.view(torch.uint8))


def test_activations_of_every_type() -> None:
    """H26: multiples of 1/8 give the same bytes from bf16, fp16 and fp32; fp64 is refused."""
    values = torch.randint(-64, 64, (6, 128), generator=torch.Generator().manual_seed(0)) / 8
    layer = unit_layer(128, 128, 8, 2)
    ids, weights = routing(6, 2)
    want = nvfp4.quantize(values.float())
    y = layer.experts(values.float(), ids, weights)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        q = nvfp4.quantize(values.to(dtype))
        assert torch.equal(q.data, want.data) and torch.equal(q.global_scale, want.global_scale)
        got = layer.experts(values.to(dtype), ids, weights)
        assert got.dtype == dtype and same_bits(got, y.to(dtype))
    with pytest.raises(TypeError, match="float64"):
        nvfp4.quantize(values.double())
    with pytest.raises(TypeError, match="float64"):
        layer.experts(values.double(), ids, weights)


def test_scale_padding(poisoned) -> None:
    """H27: M=5, K=352: bytes of padding are 0 and nobody's result depends on them."""
    x = torch.randn(5, 352, generator=torch.Generator().manual_seed(0))
    q = nvfp4.quantize(x, scale_layout=SWIZZLE_32_4_4)
    assert q.scale.shape == (128, 24)
    inside = torch.zeros(128, 24, dtype=torch.uint8)
    inside[:5, :22] = 1
    padding = nvfp4.swizzle(inside) == 0
    assert not q.scale.view(torch.uint8)[padding].any()
    offsets = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    grouped = nvfp4.quantize_grouped(x, offsets)
    assert grouped.scale.view(torch.uint8).count_nonzero() == 5 * 22
    layer = MoE(
        MoEConfig(352, 80, 3, 1),
        oracle.to_library(oracle.random_layer(0, 3, 352, 80, oracle.swiglu)),
        backend="torch",
    )
    ids = ids_of([[0], [1], [2], [1], [0]])
    y = layer.experts(x, ids, torch.ones(5, 1))
    sizes = (("l1_scale", 160, 22), ("l2_scale", 352, 5))
    for byte in (0x7F, 0x7E, 0x00):
        for name, rows, groups in sizes:
            buffer = getattr(layer, name)
            inside = torch.zeros(buffer.shape, dtype=torch.uint8)
            inside[:, :rows, :groups] = 1
            buffer[nvfp4.swizzle(inside) == 0] = byte
        assert same_bits(layer.experts(x, ids, torch.ones(5, 1)), y)
