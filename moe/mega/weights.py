"""Expert weights of the mega-MoE calls: laid out once, at load, whatever order they come in."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import BLOCK, Nvfp4Tensor
from moe.weights import ExpertWeights

_CODE_DTYPES = (torch.int8, torch.uint8)
_WORD_DTYPES = (torch.int32, torch.uint32)
_BYTE_DTYPES = (torch.uint8, torch.float8_e4m3fn)


class _Layout(NamedTuple):
    order: str  # of the rows of L1, see ExpertWeights.from_nvfp4
    granularity: int
    transposed: bool  # scale rows of every 128: (4, 32) -> (32, 4), the layout that UTCCP copies


LAYOUTS = {
    "gate_up": _Layout("gate_up", 1, False),
    "up_gate": _Layout("up_gate", 1, False),
    "interleaved": _Layout("interleaved", 1, False),
    **{f"interleaved_{g}": _Layout("interleaved", g, False) for g in (8, 16, 32, 64)},
    "deep_gemm": _Layout("interleaved", 8, True),
}


@dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True, repr=False)
class MegaWeights:
    """One projection of E local experts in the canonical layout of `ExpertWeights`.

    projection  "l1" (gate and up, interleaved row by row) or "l2"
    data        uint8 (E, N, K/2), N = 2I and K = H for L1, N = H and K = I for L2
    scale       float8_e4m3fn (E, N padded to 128, K/16 padded to 4), SWIZZLE_32_4_4 per expert
    alphas      float32 (E, 2) = (gate, up) for L1, (E,) for L2: global scales; None: given per call

    Made by `transform_weights_for_mega_moe` and `finalize_weights`. Unpacking it, ``w, sf = l1``,
    builds the column-major pair of `column_major` anew: for looking at, not for the hot path.
    """

    projection: str
    data: Tensor
    scale: Tensor
    alphas: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.data.shape[0]

    @property
    def rows(self) -> int:
        """N."""
        return self.data.shape[1]

    @property
    def k(self) -> int:
        return self.data.shape[2] * 2

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def column_major(self) -> tuple[Tensor, Tensor]:
        """Codes int8 (E, K/2, N) and block scales float8_e4m3fn (E, K/16, N), K contiguous in
        memory; the columns of L1 are [gate | up]."""
        data = self.data
        scale = nvfp4.unswizzle(self.scale.view(torch.uint8), self.rows, self.k // BLOCK)
        if self.projection == "l1":
            data, scale = (torch.cat((t[:, 0::2], t[:, 1::2]), dim=1) for t in (data, scale))
        pair = data.view(torch.int8), scale.view(torch.float8_e4m3fn)
        return pair[0].transpose(1, 2), pair[1].transpose(1, 2)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.column_major())

    def __repr__(self) -> str:
        scales = "given per call" if self.alphas is None else tuple(self.alphas.shape)
        return (
            f"MegaWeights({self.projection}: {self.num_experts} experts, {self.rows} x {self.k}, "
            f"alphas {scales}, {self.data.device})"
        )


@dataclasses.dataclass(frozen=True, eq=False, slots=True, repr=False)
class SharedWeights:
    """One bf16 projection of the shared experts: "l1" (2 S, H) = [gate | up] or "l2" (H, S)."""

    projection: str
    weight: Tensor

    def __repr__(self) -> str:
        return f"SharedWeights({self.projection}: {tuple(self.weight.shape)})"


Pair = tuple[Tensor, Tensor]


def transform_weights_for_mega_moe(
    l1_weights: Pair | Tensor,
    l2_weights: Pair | Tensor,
    activation: str = "swiglu",
    *,
    layout: str = "gate_up",
) -> tuple[MegaWeights, MegaWeights] | tuple[SharedWeights, SharedWeights]:
    """Lay out the weights of a rank's experts, once; the result goes into every call.

    l1_weights  (codes int8 or uint8 (E, 2I, H/2), block scales): scales int32 or uint32
                (E, 2I, H/64), four UE4M3 bytes per word, lowest byte = lowest k, or uint8 or
                float8_e4m3fn (E, 2I, H/16); any strides (MN-major words included)
    l2_weights  the same for (E, H, I)
    layout      order of the rows of L1: "gate_up" (all gate rows, then all up rows), "up_gate",
                "interleaved" (gate first, row by row), "interleaved_8", _16, _32, _64 (in turns of
                so many rows), or "deep_gemm": both pairs are the *output* of DeepGEMM's transform
    Two bf16 tensors (2 S, H), (H, S) instead of pairs are shared experts: [gate | up].

    Raises TypeError or ValueError for other types and shapes, and for block scales that are NaN or
    have bit 7 set (naming expert, row and block): read here once, never on the hot path.

    Differs from DeepGEMM: the result is in this package's own layout and carries its type, so that
    weights in any other order cannot reach a call; FP8 and bf16 experts are refused.
    """
    if activation != "swiglu":
        raise ValueError(f"activation must be 'swiglu', got {activation!r}")
    if isinstance(l1_weights, Tensor) and isinstance(l2_weights, Tensor):
        return _shared(l1_weights, l2_weights)
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {tuple(LAYOUTS)}, got {layout!r}")
    w13 = _quantised("l1_weights", l1_weights, LAYOUTS[layout].transposed)
    w2 = _quantised("l2_weights", l2_weights, LAYOUTS[layout].transposed)
    return _lay_out(w13, w2, layout)


def finalize_weights(
    w13_weight: Tensor,
    w13_weight_scale: Tensor,
    w2_weight: Tensor,
    w2_weight_scale: Tensor,
    w13_weight_scale_2: Tensor | None = None,
    w2_weight_scale_2: Tensor | None = None,
    *,
    layout: str = "gate_up",
) -> tuple[MegaWeights, MegaWeights]:
    """Checkpoint tensors of a rank's experts -> the weights of `nvfp4_mega_moe_full`.

    w13_weight, w13_weight_scale  as ``l1_weights`` of `transform_weights_for_mega_moe`
    w2_weight, w2_weight_scale    as ``l2_weights``
    w13_weight_scale_2            global scales (multipliers), one element, (E,) or (E, 2) = (gate,
                                  up); None: 1
    w2_weight_scale_2             one element or (E,); None: 1

    Raises what `transform_weights_for_mega_moe` raises.

    Differs from the original, which names it without a body: the global scales of the weights are
    kept and multiply in every call, gate and up apart.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {tuple(LAYOUTS)}, got {layout!r}")
    w13 = _quantised("w13_weight", (w13_weight, w13_weight_scale), LAYOUTS[layout].transposed)
    w2 = _quantised("w2_weight", (w2_weight, w2_weight_scale), LAYOUTS[layout].transposed)
    experts = w13.shape[0]
    g13 = _alphas("w13_weight_scale_2", w13_weight_scale_2, (experts, 2), w13.device)
    g2 = _alphas("w2_weight_scale_2", w2_weight_scale_2, (experts,), w2.device)
    l1, l2 = _lay_out(w13, w2, layout)
    return dataclasses.replace(l1, alphas=g13), dataclasses.replace(l2, alphas=g2)


def block_scale_bytes(scale: Tensor, what: str) -> Tensor:
    """int32 or uint32 words (..., K/64), or bytes (..., K/16) -> uint8 (..., K/16): a view where
    the last dimension is contiguous."""
    if scale.dtype not in (*_WORD_DTYPES, *_BYTE_DTYPES) or scale.dim() < 1:
        raise TypeError(
            f"{what} must be int32 or uint32 words of four UE4M3 bytes, uint8 or float8_e4m3fn, "
            f"got {tuple(scale.shape)} {scale.dtype}"
        )
    if scale.stride(-1) != 1:  # contiguous() leaves a last dimension of size 1 as it is
        scale = scale.clone(memory_format=torch.contiguous_format)
    return scale.view(torch.uint8)


def code_bytes(codes: Tensor, what: str) -> Tensor:
    """int8 or uint8 (..., K/2) -> the same bytes as uint8."""
    if codes.dtype not in _CODE_DTYPES or codes.dim() < 1:
        raise TypeError(
            f"{what} must be int8 or uint8 with two E2M1 codes per byte, got "
            f"{tuple(codes.shape)} {codes.dtype}"
        )
    return codes.view(torch.uint8)


def check_block_scales(what: str, scale: Tensor) -> None:
    """Raises ValueError for bytes (E, rows, groups) that are NaN or have bit 7 set. Waits for the
    device."""
    bad = nvfp4.invalid_scales(scale)
    if bool(bad.any()):
        expert, row, block = (int(i) for i in bad.nonzero()[0])
        byte = int(scale.view(torch.uint8)[expert, row, block])
        raise ValueError(
            f"{what}: {int(bad.sum())} block scales are no UE4M3 number, first at expert {expert}, "
            f"row {row}, block {block}: byte 0x{byte:02x}; the packing or the order of bytes is "
            "wrong, or the checkpoint is spoilt"
        )


def _quantised(what: str, pair: Pair | Tensor, transposed: bool) -> Nvfp4Tensor:
    """Codes and scales (E, rows, K) with global scale 1; rows in the order they came in."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise TypeError(f"{what} must be a pair (codes, block scales), got {type(pair).__name__}")
    codes, scale = pair
    if not isinstance(codes, Tensor) or not isinstance(scale, Tensor):
        raise TypeError(f"{what} must be a pair of tensors")
    data = code_bytes(codes, what)
    if data.dim() != 3 or data.shape[2] * 2 % BLOCK:
        raise ValueError(
            f"{what} must be codes (E, rows, K/2) with K a multiple of {BLOCK}, got "
            f"{tuple(codes.shape)}"
        )
    groups = data.shape[2] * 2 // BLOCK
    raw = block_scale_bytes(scale, f"block scales of {what}")
    if tuple(raw.shape) != (*data.shape[:2], groups):
        raise ValueError(
            f"block scales of {what} {tuple(codes.shape)} must be bytes "
            f"{(*data.shape[:2], groups)} or words of four, got {tuple(scale.shape)} {scale.dtype}"
        )
    if scale.device != codes.device:
        raise ValueError(f"{what} is on {codes.device}, its block scales on {scale.device}")
    if transposed:
        raw = _untransposed(what, raw)
    check_block_scales(what, raw)
    one = torch.ones((), dtype=torch.float32, device=data.device)
    return Nvfp4Tensor(data, raw, one)


def _untransposed(what: str, raw: Tensor) -> Tensor:
    """Undo (4, 32) -> (32, 4) within every 128 rows."""
    experts, rows, groups = raw.shape
    if rows % 128:
        raise ValueError(
            f"layout 'deep_gemm' transposes whole tiles of 128 rows, {what} has {rows} rows"
        )
    tiles = raw.reshape(experts, rows // 128, 32, 4, groups)
    return tiles.transpose(2, 3).reshape(experts, rows, groups)


def _lay_out(w13: Nvfp4Tensor, w2: Nvfp4Tensor, layout: str) -> tuple[MegaWeights, MegaWeights]:
    if w13.device != w2.device:
        raise ValueError(f"L1 is on {w13.device}, L2 on {w2.device}")
    experts, rows, hidden = w13.shape
    if w2.shape[:2] != (experts, hidden) or rows != 2 * w2.shape[2]:
        raise ValueError(
            f"L1 must be (E, 2I, H) and L2 (E, H, I), got {w13.shape} and {w2.shape}: gate or up "
            "rows are missing, or the tensors belong to different layers"
        )
    order, granularity, _ = LAYOUTS[layout]
    laid = ExpertWeights.from_nvfp4(w13, w2, order, granularity)
    l1 = MegaWeights("l1", laid.l1_data, laid.l1_scale)
    return l1, MegaWeights("l2", laid.l2_data, laid.l2_scale)


def _shared(l1: Tensor, l2: Tensor) -> tuple[SharedWeights, SharedWeights]:
    if l1.dim() == 3:
        raise ValueError(
            f"experts in {l1.dtype} are not offered: quantise them to NVFP4 pairs; only shared "
            "experts (2 S, H), (H, S) may be bf16"
        )
    if l1.dtype != torch.bfloat16 or l2.dtype != torch.bfloat16:
        raise TypeError(f"shared experts must be bfloat16, got {l1.dtype} and {l2.dtype}")
    if l1.dim() != 2 or l2.dim() != 2 or tuple(l1.shape) != (2 * l2.shape[1], l2.shape[0]):
        raise ValueError(
            f"shared experts must be (2 S, H) and (H, S), got {tuple(l1.shape)} and "
            f"{tuple(l2.shape)}"
        )
    return SharedWeights("l1", l1), SharedWeights("l2", l2)


def _alphas(
    what: str, given: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Global scales as fp32 of ``shape``."""
    if given is None:
        return torch.ones(shape, dtype=torch.float32, device=device)
    fits = given.numel() == 1 or tuple(given.shape) in (shape, shape[:1])
    if not given.is_floating_point() or not fits:
        raise ValueError(
            f"{what} must be floating point with one element, {shape[:1]} or {shape}, got "
            f"{tuple(given.shape)} {given.dtype}"
        )
    scale = given.detach().to(device=device, dtype=torch.float32)
    if scale.numel() == 1:
        scale = scale.reshape(())
    elif scale.dim() < len(shape):
        scale = scale.unsqueeze(1)
    return scale.expand(shape).contiguous()
