"""The packed weight: a bijection of bits, and a decode that is exact for every code and scale."""

import pytest
import torch

from cute_kernels import nvfp4
from cute_kernels.sm90 import layout, weights


def random_nvfp4(rows: int, k: int, seed: int, low: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(low, 127, (rows, k // 16), dtype=torch.uint8, generator=generator)
    return data, scale.view(torch.float8_e4m3fn)


def test_registers_use_every_bit_of_two_words_once() -> None:
    sources = [source for pairs in layout.register_sources() for _, source in pairs]
    assert sorted(sources) == list(range(64))


@pytest.mark.parametrize(
    "rows, k, gated",
    [(128, 128, False), (272, 2880, True), (96, 48, False), (16, 16, True), (256, 640, False)],
)
def test_pack_and_unpack_are_inverse(rows: int, k: int, gated: bool) -> None:
    data, scale = random_nvfp4(rows, k, seed=rows + k)
    blob = weights.pack_expert(data, scale, gated)
    assert tuple(blob.shape) == weights.blob_shape(rows, k)
    back, back_scale = weights.unpack_expert(blob, rows, k, gated)
    assert torch.equal(back, data)
    assert torch.equal(back_scale.view(torch.uint8), scale.view(torch.uint8))


def test_every_bit_of_the_blob_matters() -> None:
    """Meta-test: the comparison above fails for any flipped bit of a block, so packing loses
    nothing."""
    data, scale = random_nvfp4(128, 128, seed=0)
    blob = weights.pack_expert(data, scale)
    for byte in range(0, layout.BLOCK_BYTES, 61):
        for bit in range(8):
            changed = blob.clone()
            changed[0, 1, 0, byte] ^= 1 << bit
            back, back_scale = weights.unpack_expert(changed, 128, 128)
            same = torch.equal(back, data) and torch.equal(
                back_scale.view(torch.uint8), scale.view(torch.uint8)
            )
            assert not same, (byte, bit)


def test_decode_is_exact_for_every_code_and_scale() -> None:
    """All 16 codes x 126 scales, at every position of the 16 codes of a word pair: what the
    registers hold is the bf16 of code x scale x 2^-7, which is exact."""
    scales = torch.arange(1, 127, dtype=torch.uint8)
    rows = 16 * 128
    code = (torch.arange(rows).unsqueeze(1) // 128 + torch.arange(128)) % 16
    data = nvfp4.pack(code.to(torch.uint8))
    per_row = scales[torch.arange(rows) % 126]
    scale = per_row.unsqueeze(1).expand(rows, 8).contiguous()
    blob = weights.pack_expert(data, scale)
    got = weights.emulate_decode(blob).double() * layout.ALPHA_FACTOR
    want = nvfp4.decode_e2m1(code.to(torch.uint8), torch.float64)
    want = want * scale.view(torch.float8_e4m3fn).double().repeat_interleave(16, dim=1)
    assert torch.equal(got, want)
    pairs = {
        (c, s) for c, s in zip(code.flatten().tolist(), per_row.repeat_interleave(128).tolist())
    }
    assert len(pairs) == 16 * 126


@pytest.mark.parametrize("gated", [False, True])
def test_decode_of_random_weights(gated: bool) -> None:
    data, scale = random_nvfp4(144, 208, seed=3, low=0)
    blob = weights.pack_expert(data, scale, gated)
    values = nvfp4.decode(nvfp4.Nvfp4Tensor(data, scale, torch.ones(())), torch.float64)
    got = weights.emulate_decode(blob).double() * layout.ALPHA_FACTOR
    assert torch.equal(got[:144, :208], values[weights.row_order(144, gated)])
    assert not got[144:].any() and not got[:, 208:].any()


def test_scale_zero_packs_to_zero_codes() -> None:
    data, scale = random_nvfp4(128, 128, seed=5)
    scale.view(torch.uint8)[3, 2] = 0
    back, back_scale = weights.unpack_expert(weights.pack_expert(data, scale), 128, 128)
    assert not back[3, 16:24].any()
    assert int(back_scale.view(torch.uint8)[3, 2]) == 1


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFE])
def test_nan_and_negative_scales_are_refused(byte: int) -> None:
    data, scale = random_nvfp4(128, 128, seed=6)
    scale.view(torch.uint8)[7, 1] = byte
    with pytest.raises(ValueError, match=r"\(7, 1\).*not a UE4M3 scale"):
        weights.pack_expert(data, scale)


def test_gated_rows_put_gates_before_ups() -> None:
    order = weights.row_order(32, gated=True).tolist()
    assert order[:8] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert order[8:16] == [1, 3, 5, 7, 9, 11, 13, 15]
    assert order[16] == 16 and order[24] == 17
    assert sorted(order) == list(range(32))


def test_pack_weight_takes_every_scale_layout_and_both_global_scales() -> None:
    pieces = [random_nvfp4(48, 80, seed=s) for s in range(3)]
    data, scale = (torch.stack(t) for t in zip(*pieces))
    g = torch.rand(3, 2) + 0.5
    plain = nvfp4.Nvfp4Tensor(data, scale, g)
    packed = weights.pack_weight(plain, gated=True)
    assert torch.equal(packed.alpha, g * 128)
    swizzled = weights.pack_weight(plain.with_layout(nvfp4.SWIZZLE_32_4_4), gated=True)
    assert torch.equal(packed.blob, swizzled.blob)
    one = weights.pack_weight(nvfp4.Nvfp4Tensor(data, scale, g[:, 0].contiguous()))
    assert torch.equal(one.alpha, (g[:, :1] * 128).expand(3, 2))
    with pytest.raises(ValueError, match="global_scale"):
        weights.pack_weight(plain, gated=False)
