"""The SM90 weight: NVFP4 codes and scales in the order in which wgmma's register operand wants
them.

Packing happens once, offline, one expert at a time; see `layout` for the bits. Plain PyTorch, any
device.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cute_kernels.nvfp4 import BLOCK, Nvfp4Tensor, invalid_scales
from cute_kernels.sm90 import layout


@dataclasses.dataclass(frozen=True, eq=False)
class Sm90Weight:
    """Packed weights of E experts, logical shape (E, rows, K).

    blob   uint8 (E, rows padded to 128 / 128, K padded to 128 / 64, 2, 2304), see `layout`
    alpha  float32 (E, 2): what the fp32 accumulator is multiplied with in rows r % 16 < 8 and r %
           16 >= 8 of the packed order: the global scale times `layout.ALPHA_FACTOR`
    rows, k, gated: of the weight before padding. ``gated``: canonical rows g0, u0, g1, u1, ... are
    packed so that
           every 16 rows hold 8 gates, then their 8 ups.
    """

    blob: Tensor
    alpha: Tensor
    rows: int
    k: int
    gated: bool

    @property
    def num_experts(self) -> int:
        return self.blob.shape[0]

    @property
    def device(self) -> torch.device:
        return self.blob.device


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def blob_shape(rows: int, k: int) -> tuple[int, int, int, int]:
    """Shape of one expert's blob: (row tiles, k64 blocks, 2, 2304)."""
    return (
        _round_up(rows, layout.TILE_ROWS) // layout.TILE_ROWS,
        _round_up(k, layout.TILE_K) // layout.BLOCK_K,
        2,
        layout.BLOCK_BYTES,
    )


def row_order(rows: int, gated: bool, device: torch.device | str = "cpu") -> Tensor:
    """int64 (rows,): canonical row that lies at each packed row. Gated: rows must be a multiple of
    16."""
    order = torch.arange(rows, device=device)
    if gated:
        order = order.view(-1, 8, 2).transpose(1, 2).reshape(-1)  # (16 rows: 8 gates, 8 ups)
    return order


def _scatter_tables(device: torch.device) -> Tensor:
    """int64 (8, 256): bits of the word pair set by a byte of two codes (low nibble = low half) in
    register i."""
    tables = []
    every_byte = torch.arange(256, dtype=torch.int64)
    for pairs in layout.register_sources():  # 8 bits each: magnitude, sign; low half first
        word = torch.zeros(256, dtype=torch.int64)
        for code_bit, (bit, source) in enumerate(pairs):
            assert bit % 16 == (6, 7, 8, 15)[code_bit % 4]  # the bits of CODE_MASK
            one = (every_byte >> code_bit) & 1
            word |= one << source  # source 63 wraps into the sign, as it should
        tables.append(word)
    return torch.stack(tables).to(device)


def encode_ue5m3(scale: Tensor) -> Tensor:
    """UE4M3 bytes (any shape) -> UE5M3 bytes 0x68..0xF6; 0 becomes the byte of 2^-9 (its codes are
    packed as 0).

    Raises ValueError for 0x7F (NaN) and bytes of 0x80 and above, naming the first place.
    """
    bad = invalid_scales(scale)
    if bool(bad.any()):
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"block scale at {at} is byte {int(scale.view(torch.uint8)[at]):#04x}: NaN or "
            f"negative, not a UE4M3 scale"
        )
    value = scale.view(torch.uint8).int()
    value = torch.where(value == 0, 1, value)
    top = (value >= 2).int() + (
        value >= 4
    ).int()  # subnormal m / 8 * 2^-6: 1 -> 2^-9, 2..3 -> 2^-8, 4..7 -> 2^-7
    subnormal = (13 + top << 3) | ((value << (3 - top)) & 7)
    normal = ((value >> 3) + 15 << 3) | (value & 7)  # 2^(e-7), and e5 = 22 + (e - 7)
    return torch.where(value < 8, subnormal, normal).to(torch.uint8)


def decode_ue5m3(byte: Tensor) -> Tensor:
    """UE5M3 bytes -> UE4M3 bytes. Inverse of `encode_ue5m3` but for scale 0."""
    e, m = (byte >> 3).int(), (byte & 7).int()
    subnormal = (8 | m) >> (16 - e).clamp(0, 31)
    return torch.where(e >= 16, (e - 15 << 3) | m, subnormal).to(torch.uint8)


def pack_expert(data: Tensor, scale: Tensor, gated: bool = False) -> Tensor:
    """One expert: codes uint8 (rows, K/2), ROW_MAJOR UE4M3 scales (rows, K/16) -> blob uint8
    (`blob_shape`).

    Rows that pad to 128 and K that pads to 128 are zero codes. Raises ValueError for NaN or
    negative scales and for gated rows that are not a multiple of 16.
    """
    rows, k = data.shape[0], data.shape[1] * 2
    if tuple(scale.shape) != (rows, k // BLOCK) or k % BLOCK:
        raise ValueError(
            f"codes {tuple(data.shape)} need scales ({rows}, {k // BLOCK}) and K a multiple of "
            f"{BLOCK}, got {tuple(scale.shape)}"
        )
    if gated and rows % 16:
        raise ValueError(f"gated rows must be a multiple of 16 (8 gates, 8 ups), got {rows}")
    order = row_order(rows, gated, data.device)
    scale = scale.view(torch.uint8)[order]
    data = torch.where((scale == 0).repeat_interleave(BLOCK // 2, dim=1), 0, data[order])
    mt, kb, _, _ = blob_shape(rows, k)
    rows_p, k_p = mt * layout.TILE_ROWS, kb * layout.BLOCK_K
    codes = data.new_zeros((rows_p, k_p // 2))
    codes[:rows, : k // 2] = data
    coded = torch.full(
        (rows_p, k_p // BLOCK), layout.SCALE_ONE, dtype=torch.uint8, device=data.device
    )
    coded[:rows, : k // BLOCK] = encode_ue5m3(scale)
    blob = data.new_empty((mt, kb, 2, layout.BLOCK_BYTES))
    blob[..., : layout.CODE_BYTES] = _pack_codes(codes)
    blob[..., layout.CODE_BYTES :] = _pack_scales(coded)
    return blob


def _pack_codes(codes: Tensor) -> Tensor:
    """(rows, K/2) -> (mt, kb, 2, 2048)."""
    mt, kb = codes.shape[0] // 128, codes.shape[1] // 32
    # rows = (mt, m64, warp, half, l // 4), bytes along K = (k64, step pair, step, k half, l % 4)
    v = codes.view(mt, 2, 4, 2, 8, kb, 2, 2, 2, 4)
    # -> (mt, k64, m64, warp, l // 4, l % 4, step pair, [step, k half, half] = register)
    v = v.permute(0, 5, 1, 2, 4, 9, 6, 7, 8, 3).reshape(mt, kb, 2, 128, 2, 8)
    tables = _scatter_tables(codes.device)
    words = torch.zeros(v.shape[:-1], dtype=torch.int64, device=codes.device)
    for i in range(8):
        words |= tables[i][v[..., i].int()]
    return words.contiguous().view(torch.uint8).reshape(mt, kb, 2, layout.CODE_BYTES)


def _pack_scales(coded: Tensor) -> Tensor:
    """UE5M3 (rows, K/16) -> (mt, kb, 2, 256)."""
    mt, kb = coded.shape[0] // 128, coded.shape[1] // 4
    v = coded.view(mt, 2, 4, 2, 8, kb, 2, 2)  # (mt, m64, warp, half, l // 4, k64, step pair, step)
    v = v.permute(
        0, 5, 1, 2, 4, 6, 3, 7
    ).int()  # (mt, k64, m64, warp, l // 4, step pair, half, step)
    even, odd = v[..., 0], v[..., 1]
    half = (even << 4) | ((odd & 0xF) << 12) | (odd >> 4)
    return (
        half.to(torch.uint16).contiguous().view(torch.uint8).reshape(mt, kb, 2, layout.SCALE_BYTES)
    )


def unpack_expert(blob: Tensor, rows: int, k: int, gated: bool = False) -> tuple[Tensor, Tensor]:
    """Inverse of `pack_expert`: codes (rows, K/2) uint8 and scales (rows, K/16) float8_e4m3fn.

    A scale of 0 comes back as 2^-9 with codes 0: the same values.
    """
    mt, kb, _, _ = blob.shape
    words = blob[..., : layout.CODE_BYTES].contiguous().view(torch.int64).view(mt, kb, 2, 128, 2)
    registers = []
    for pairs in layout.register_sources():
        byte = torch.zeros_like(words)
        for code_bit, (_, source) in enumerate(pairs):
            byte |= ((words >> source) & 1) << code_bit
        registers.append(byte.to(torch.uint8))
    v = torch.stack(registers, dim=-1).view(mt, kb, 2, 4, 8, 4, 2, 2, 2, 2)
    v = v.permute(
        0, 2, 3, 9, 4, 1, 6, 7, 8, 5
    )  # (mt, m64, warp, half, l // 4, k64, pair, step, k half, l % 4)
    codes = v.reshape(mt * 128, kb * 32)
    half = blob[..., layout.CODE_BYTES :].contiguous().view(torch.uint16).int()
    half = half.view(mt, kb, 2, 4, 8, 2, 2)
    both = torch.stack(((half >> 4) & 0xFF, (half >> 12) | ((half & 0xF) << 4)), dim=-1)
    coded = both.permute(0, 2, 3, 6, 4, 1, 5, 7).reshape(mt * 128, kb * 4)
    order = row_order(rows, gated, blob.device)
    data = blob.new_empty((rows, k // 2))
    scale = blob.new_empty((rows, k // BLOCK))
    data[order] = codes[:rows, : k // 2]
    scale[order] = decode_ue5m3(coded[:rows, : k // BLOCK])
    return data, scale.view(torch.float8_e4m3fn)


def pack_weight(weight: Nvfp4Tensor, gated: bool = False) -> Sm90Weight:
    """Canonical (E, rows, K) in any scale layout -> `Sm90Weight`, one expert at a time.

    ``global_scale`` is (), (E,) or, gated, (E, 2) = (gate, up). Raises ValueError for another
    shape.
    """
    if weight.data.dim() != 3:
        raise ValueError(f"weight must be (num_experts, rows, K), got {weight.shape}")
    experts, rows, k = weight.shape
    g = weight.global_scale
    if g.dim() == 0 or g.dim() == 1:
        alpha = g.reshape(-1, 1).expand(experts, 2)
    elif gated and tuple(g.shape) == (experts, 2):
        alpha = g
    else:
        raise ValueError(
            f"global_scale must be (), ({experts},) or, for gated weights, ({experts}, 2), got "
            f"{tuple(g.shape)}"
        )
    blob = weight.data.new_empty((experts, *blob_shape(rows, k)))
    for e in range(experts):
        one = Nvfp4Tensor(weight.data[e], weight.scale[e], g.new_ones(()), weight.scale_layout)
        blob[e] = pack_expert(one.data, one.row_major_scale(), gated)
    return Sm90Weight(blob, (alpha * layout.ALPHA_FACTOR).contiguous(), rows, k, gated)


def emulate_decode(blob: Tensor) -> Tensor:
    """What the kernel's registers hold, bit operation by bit operation: bf16 (mt * 128, kb * 64) in
    packed row order, code x scale x 2^-7. Slow; for tests."""
    mt, kb, _, _ = blob.shape
    words = blob[..., : layout.CODE_BYTES].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(mt, kb, 2, 128, 2, 2)
    w = (words[..., 0], words[..., 1])
    scales = blob[..., layout.CODE_BYTES :].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    scales = (
        scales.view(mt, kb, 2, 32, 1, 2).expand(-1, -1, -1, -1, 4, -1).reshape(mt, kb, 2, 128, 2)
    )
    registers = []
    for step in range(2):
        split = layout.SPLIT_MASK[step]
        mixed = (w[step] & split) | (w[1 - step] & ~split)
        s = scales if step == 0 else ((scales & 0x00FF00FF) << 8) | ((scales >> 8) & 0x00FF00FF)
        s = (s & layout.SCALE_MASK) | layout.SCALE_EXPONENT
        for j in range(4):
            source, by = (
                (w[step], layout.ROTATE[step][j]) if j < 3 else (mixed, layout.SPLIT_ROTATE[step])
            )
            rotated = ((source << by) | (source >> (32 - by))) & layout.CODE_MASK
            factor = _bf16((s >> 16 * (j % 2)) & 0xFFFF)
            registers.append(
                torch.stack((_bf16(rotated & 0xFFFF), _bf16(rotated >> 16)), -1) * factor[..., None]
            )
    v = torch.stack(registers, dim=-2)  # (mt, k64, m64, thread, pair, register, 2)
    v = v.view(mt, kb, 2, 4, 8, 4, 2, 2, 2, 2, 2)
    v = v.permute(0, 2, 3, 9, 4, 1, 6, 7, 8, 5, 10)
    return v.reshape(mt * 128, kb * 64)


def _bf16(bits: Tensor) -> Tensor:
    return bits.to(torch.uint16).view(torch.bfloat16)
