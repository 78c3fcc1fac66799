"""Every packing and row order that is accepted ends in the same bytes; what is not is refused by
name before a call can see it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cute_kernels.nvfp4 import Nvfp4Tensor
from moe import ExpertWeights, mega
from tests.mega import data
from tests.mega.data import E, H, I


def canonical(seed: int = 0) -> ExpertWeights:
    of = data.layer(seed=seed)
    one = torch.ones(())
    return ExpertWeights.from_nvfp4(
        Nvfp4Tensor(*data.gate_up(of), one), Nvfp4Tensor(*data.down(of), one)
    )


def same_weights(l1: mega.MegaWeights, l2: mega.MegaWeights, want: ExpertWeights) -> bool:
    pairs = (
        (l1.data, want.l1_data),
        (l1.scale, want.l1_scale),
        (l2.data, want.l2_data),
        (l2.scale, want.l2_scale),
    )
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def raw(t: Tensor) -> Tensor:
    """The bytes of a tensor of any strides as integers of its own size."""
    return t.view({1: torch.uint8, 4: torch.int32}[t.element_size()])


def permuted(rows: Tensor, layout: str) -> Tensor:
    """(E, 2I, ...) = [gate | up] -> the rows of ``layout``, by a loop."""
    gate, up = rows[:, :I], rows[:, I:]
    if layout == "gate_up":
        return rows
    if layout == "up_gate":
        return torch.cat((up, gate), dim=1)
    step = {"interleaved": 1, "deep_gemm": 8}.get(layout) or int(layout.split("_")[1])
    parts = []
    for i in range(0, I, step):
        parts += [gate[:, i : i + step], up[:, i : i + step]]
    return torch.cat(parts, dim=1)


def utccp(sf: Tensor) -> Tensor:
    """Within 128 rows, row 32 q + r goes to 4 r + q."""
    out = torch.empty_like(sf)
    for row in range(sf.shape[1]):
        tile, inside = divmod(row, 128)
        q, r = divmod(inside, 32)
        out[:, tile * 128 + 4 * r + q] = sf[:, row]
    return out


SCALES = {
    "int32": data.words,
    "mn_major": lambda s: data.mn_major(data.words(s)),
    "uint32": lambda s: data.words(s).view(torch.uint32),
    "uint8": lambda s: s,
    "e4m3": lambda s: s.view(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("layout", mega.LAYOUTS)
@pytest.mark.parametrize("packing", SCALES)
def test_every_order_and_packing_gives_the_same_bytes(layout: str, packing: str) -> None:
    of = data.layer()
    (w13, s13), (w2, s2) = data.gate_up(of), data.down(of)
    w13, s13 = permuted(w13, layout), permuted(s13, layout)
    if layout == "deep_gemm":
        s13, s2 = utccp(s13), utccp(s2)
    pack = SCALES[packing]
    l1 = (w13.view(torch.int8), pack(s13))
    l2 = (w2, pack(s2))  # uint8 codes are accepted as well
    kept = [raw(t).clone() for t in (*l1, *l2)]
    laid = mega.transform_weights_for_mega_moe(l1, l2, layout=layout)
    assert same_weights(*laid, canonical())
    assert all(torch.equal(a, raw(b)) for a, b in zip(kept, (*l1, *l2)))


def test_one_wrong_byte_or_order_is_noticed() -> None:
    of, want = data.layer(), canonical()
    l1, l2 = data.published(data.gate_up(of)), data.published(data.down(of))
    laid = mega.transform_weights_for_mega_moe(l1, l2)
    assert same_weights(*laid, want)
    for layout in mega.LAYOUTS:
        if layout not in ("gate_up", "interleaved_64"):  # one turn of I rows: the same order
            assert not same_weights(
                *mega.transform_weights_for_mega_moe(l1, l2, layout=layout), want
            )
    for part in (laid[0].data, laid[0].scale, laid[1].data, laid[1].scale):
        part.view(torch.uint8).flatten()[-1] ^= 1
        assert not same_weights(*laid, want)
        part.view(torch.uint8).flatten()[-1] ^= 1


def test_strided_codes() -> None:
    of = data.layer()
    w13, s13 = data.gate_up(of)
    w2, s2 = data.down(of)
    wide = torch.full((E, 2 * I, H), 0x55, dtype=torch.uint8)
    wide[..., : H // 2] = w13
    turned = w2.transpose(0, 1).contiguous().transpose(0, 1)
    laid = mega.transform_weights_for_mega_moe((wide[..., : H // 2], s13), (turned, s2))
    assert same_weights(*laid, canonical())


def test_a_rank_without_experts() -> None:
    """More ranks than experts: the last ones lay out nothing."""
    of = data.layer()
    none = [tuple(t[:0] for t in p) for p in (data.gate_up(of), data.down(of))]
    l1, l2 = mega.transform_weights_for_mega_moe(*(data.published(p) for p in none))
    assert (l1.num_experts, l1.rows, l1.k) == (0, 2 * I, H)
    assert (l2.num_experts, l2.rows, l2.k) == (0, H, I)


def test_unpacking_gives_the_column_major_pair() -> None:
    of = data.layer()
    l1, l2 = mega.finalize_weights(*data.gate_up(of), *data.down(of))
    for laid, (codes, scale) in ((l1, data.gate_up(of)), (l2, data.down(of))):
        w, sf = laid
        assert w.dtype == torch.int8 and sf.dtype == torch.float8_e4m3fn
        assert w.stride(1) == 1 and sf.stride(1) == 1  # K is contiguous
        assert torch.equal(w.view(torch.uint8).transpose(1, 2), codes)
        assert torch.equal(sf.view(torch.uint8).transpose(1, 2), scale)
        assert laid.num_experts == w.shape[0] == E
    assert "6 experts, 128 x 128, alphas (6, 2), cpu" in repr(l1)
    assert l1.nbytes == E * (2 * I * H // 2 + 128 * H // 16)


def test_finalize_keeps_global_scales() -> None:
    of = data.layer()
    raw, (g13, g2) = (*data.gate_up(of), *data.down(of)), data.alphas(of)
    l1, l2 = mega.finalize_weights(*raw, g13, g2)
    assert same_weights(l1, l2, canonical())
    assert l1.alphas is not None and torch.equal(l1.alphas, g13)
    assert l2.alphas is not None and torch.equal(l2.alphas, g2)
    l1, l2 = mega.finalize_weights(*raw, g2, torch.tensor([0.5]))  # one per expert; one for all
    assert torch.equal(l1.alphas, g2.unsqueeze(1).expand(E, 2)) and (l2.alphas == 0.5).all()
    l1, l2 = mega.finalize_weights(*raw)
    assert (l1.alphas == 1).all() and l1.alphas.shape == (E, 2) and (l2.alphas == 1).all()
    with pytest.raises(ValueError, match=r"w13_weight_scale_2 must be .* \(6,\) or \(6, 2\)"):
        mega.finalize_weights(*raw, torch.ones(2 * E))
    with pytest.raises(ValueError, match="w2_weight_scale_2 must be floating point"):
        mega.finalize_weights(*raw, None, torch.ones(E, dtype=torch.int32))


@pytest.mark.parametrize("byte", [0x7F, 0x80, 0xFF])
@pytest.mark.parametrize("projection", ["l1", "l2"])
def test_scales_that_are_no_number_are_named(projection: str, byte: int) -> None:
    of = data.layer()
    parts = {"l1": data.gate_up(of), "l2": data.down(of)}
    parts[projection][1][2, 77, 3] = byte
    message = (
        f"{projection}_weights: 1 block scales .* expert 2, row 77, block 3: byte 0x{byte:02x}"
    )
    with pytest.raises(ValueError, match=message):
        mega.transform_weights_for_mega_moe(*(data.published(p) for p in parts.values()))


def test_pairs_that_cannot_be_are_refused() -> None:
    of = data.layer()
    (w13, s13), (w2, s2) = data.gate_up(of), data.down(of)
    good = (w13, s13), (w2, s2)

    def refuse(error: type[Exception], match: str, l1=good[0], l2=good[1], **options) -> None:
        with pytest.raises(error, match=match):
            mega.transform_weights_for_mega_moe(l1, l2, **options)

    refuse(ValueError, "activation must be 'swiglu', got 'situ'", activation="situ")
    refuse(ValueError, "layout must be one of", layout="interleaved_7")
    refuse(TypeError, "l1_weights must be a pair", l1=w13)
    refuse(TypeError, "l2_weights must be a pair", l2=(w2, s2, s2))
    refuse(TypeError, "l2_weights must be a pair of tensors", l2=(w2, None))
    refuse(TypeError, "l1_weights must be int8 or uint8", l1=(w13.float(), s13))
    refuse(TypeError, "block scales of l1_weights must be int32", l1=(w13, s13.float()))
    refuse(ValueError, r"must be bytes \(6, 128, 8\) or words", l1=(w13, s13[:, :, 1:]))
    refuse(ValueError, r"must be bytes \(6, 128, 8\) or words", l1=(w13, s13[:, 1:]))
    refuse(ValueError, "codes .E, rows, K/2.", l1=(w13[0], s13[0]))
    refuse(ValueError, "gate or up rows are missing", l1=(w13[:, :I], s13[:, :I]))
    refuse(ValueError, "different layers", l2=(w2[1:], s2[1:]))
    refuse(ValueError, "different layers", l2=(w2[:, 16:], s2[:, 16:]))
    refuse(ValueError, "is on cpu, its block scales on meta", l1=(w13, s13.to("meta")))
    refuse(
        ValueError,
        "whole tiles of 128 rows, l1_weights has 120 rows",
        l1=(w13[:, :120], s13[:, :120]),
        layout="deep_gemm",
    )
    with pytest.raises(ValueError, match="layout must be one of"):
        mega.finalize_weights(w13, s13, w2, s2, layout="ug")


def test_bf16_experts_are_refused_and_shared_ones_taken() -> None:
    l1, l2 = (torch.zeros(s, dtype=torch.bfloat16) for s in ((2 * I, H), (H, I)))
    pair = mega.transform_weights_for_mega_moe(l1, l2)
    assert [type(p) for p in pair] == [mega.SharedWeights] * 2
    assert pair[0].weight is l1 and pair[1].weight is l2
    assert repr(pair[0]) == "SharedWeights(l1: (128, 128))"
    with pytest.raises(ValueError, match=r"experts in torch.bfloat16 are not offered"):
        mega.transform_weights_for_mega_moe(l1.unsqueeze(0), l2.unsqueeze(0))
    with pytest.raises(TypeError, match="shared experts must be bfloat16"):
        mega.transform_weights_for_mega_moe(l1.float(), l2)
    with pytest.raises(ValueError, match=r"shared experts must be \(2 S, H\)"):
        mega.transform_weights_for_mega_moe(l1[1:], l2)
