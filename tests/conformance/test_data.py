"""The comparisons of the conformance harness notice a wrong element, a scaled block, a lost row."""

import pytest
import torch

from cute_kernels import nvfp4
from tests.conformance import data

NORM = 0.25


def quantised(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """fp64 h (8, 64) with its codes and scales."""
    h = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 40
    amax = h.unflatten(-1, (-1, 16)).abs().amax(-1)
    scale = (amax * NORM / 6).float().to(torch.float8_e4m3fn)
    value = h * (NORM / scale.double()).repeat_interleave(16, -1)
    return nvfp4.pack(nvfp4.encode_e2m1(value.float())), scale, h


def test_quantised_right() -> None:
    assert data.check_quantised(*quantised(), NORM, "h") == 1.0


@pytest.mark.parametrize("row", [0, 7])
def test_quantised_sees_one_code(row: int) -> None:
    codes, scale, h = quantised()
    codes[row, 5] ^= 1
    with pytest.raises(data.Mismatch, match="codes"):
        data.check_quantised(codes, scale, h, NORM, "h")


def test_quantised_sees_one_scale_and_a_zeroed_block() -> None:
    codes, scale, h = quantised()
    wrong = scale.clone()
    wrong.view(torch.uint8)[3, 1] += 1
    with pytest.raises(data.Mismatch, match="scales"):
        data.check_quantised(codes, wrong, h, NORM, "h")
    codes[:, 8:16] = 0
    with pytest.raises(data.Mismatch, match="codes"):
        data.check_quantised(codes, scale, h, NORM, "h")


def test_equal_and_close() -> None:
    want = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
    data.check_equal(want.clone(), want, "same")
    data.check_close(want.clone(), want.double(), torch.full((4, 32), 1e-9), "same")
    for change in (float("nan"), 1e-3):
        got = want.clone()
        got[2, 31] += change
        with pytest.raises(data.Mismatch, match=r"\(2, 31\)"):
            data.check_equal(got, want, "one element")
        with pytest.raises(data.Mismatch, match=r"\(2, 31\)"):
            data.check_close(got, want.double(), torch.full((4, 32), 1e-4), "one element")


def test_operands_are_exact_in_fp32() -> None:
    g = torch.Generator().manual_seed(2)
    a, b = data.operand(g, 64, 512), data.operand(g, 1, 48, 512)
    want = data.matmul(a, b, [64])
    order = torch.randperm(512, generator=g)
    got = a.values.float()[:, order] @ b.values[0].float()[:, order].T
    data.check_equal(got.double(), want, "fp32 in another order")


def test_ragged_scales_start_at_whole_tiles() -> None:
    counts = [70, 0, 200, 1]
    scale = torch.arange(271 * 8).remainder(120).to(torch.uint8).reshape(271, 8)
    tiles = data.ragged_scales(scale.view(torch.float8_e4m3fn), counts)
    flat = nvfp4.unswizzle(tiles.view(torch.uint8).reshape(-1, 8), tiles.shape[1] * 128, 8)
    rows = data.ragged_scale_rows(counts)
    assert rows[0] == 0 and rows[70] == 128 * 2 and rows[270] == 128 * 5
    data.check_equal(flat[rows], scale, "scales")
