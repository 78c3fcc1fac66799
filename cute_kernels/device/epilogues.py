"""What happens to an accumulator row: epilogue objects of the grouped GEMMs.

An epilogue is a frozen dataclass (its repr is part of the kernel's key). The mainloop hands it a
piece of an accumulator row at a time, ``values``: acc[row, col : col + width] in fp32, of which
one thread owns all.

    prefill   width columns, a multiple of 16, of the row of the thread
        row = begin_row(args, place)            once per tile, before the accumulator is ready:
                                                all that does not depend on the column
        store_row(args, row, values, place)     the row is real; threads diverge here: no warp
                                                collectives
    decode    16 columns; lanes 2i and 2i + 1 hold the halves of the same 32 columns of row i of a
              step of 16 rows
        tile = begin_tile(args, place, count)   once per tile of ``count`` rows; ``place`` names
                                                its first row
        store_part(args, tile, values, place, part)
                                                the whole warp is here; ``part`` is a `Part`

``place`` is a `Place`. Columns at and past ``place.n`` exist in ``values`` but not in the output.
Both plans give the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from cute_kernels.activations import Activation
from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.lanes import row_scale_of, row_scales
from cute_kernels.device.math import DEVICE_MATH

BLOCK = 16
_BYTES = {"BFloat16": 2, "Float16": 2, "Float32": 4}


class Place(NamedTuple):
    """Where a row segment belongs: local expert, routed row, the row counted with every expert
    padded to 128 rows (scales), first column, and the number of columns of the output."""

    expert: Any
    row: Any
    sf_row: Any
    col: Any
    n: Any


class Part(NamedTuple):
    """Row of a decode tile that a lane holds, counted from the first of the tile, and whether it is
    one of the expert."""

    row: Any
    real: Any


def row_alpha(place: Place, alpha, row_scale, row_index, projection: int = 0, parts: int = 1):
    """alpha[expert, projection], times row_scale[row_index[row]] where these are given; fp32
    product.
    """
    value = ptx.load_f32(alpha.toint() + (Int64(place.expert) * parts + projection) * 4)
    if row_scale is None:
        return value
    index = place.row
    if row_index is not None:
        index = ptx.load_i32(row_index.toint() + Int64(place.row) * 4)
    return ptx.mul(ptx.load_f32(row_scale.toint() + Int64(index) * 4), value)


def scaled(values, first: int, count: int, pair) -> list:
    """values[first : first + count], even ones times pair[0], odd ones times pair[1]."""
    pairs = (ptx.mul_pair((values[i], values[i + 1]), pair) for i in range(first, first + count, 2))
    return [v for both in pairs for v in both]


def with_bias(values, bias, count: int) -> list:
    """values[:count] plus the ``count`` biases from address ``bias`` on, 16-byte aligned; the
    values where it is None."""
    if bias is None:
        return values
    loaded = [w for i in range(0, count, 4) for w in ptx.load_u32x4(bias + 4 * i)]
    return [ptx.add(v, b.bitcast(Float32)) for v, b in zip(values, loaded)]


def row_values(row, values, col, first: int, count: int) -> list:
    """values[first : first + count] times row.alpha, plus the biases from column ``col`` on where
    the row has any."""
    part = scaled(values, first, count, (row.alpha, row.alpha))
    return with_bias(part, None if row.bias is None else row.bias + col * 4, count)


def expert_bias(bias, place):
    """Address of the biases of place.expert, None where there are none."""
    return None if bias is None else bias.toint() + Int64(place.expert) * place.n * 4


class StoreArgs(NamedTuple):
    out: Any
    alpha: Any
    row_scale: Any
    bias: Any


class RowStore(NamedTuple):
    """A row of the output: its factor, and addresses of the row and of the expert's bias."""

    alpha: Any
    out: Any
    bias: Any


class TileScale(NamedTuple):
    """What the rows of a decode tile share: the factors of the expert, the scales of the rows."""

    alphas: Any
    scales: Any


def begin_scale(args, place, row_index, count, parts: int = 1) -> TileScale:
    """``args`` with alpha and row_scale, which is None where there is none."""
    first = args.alpha.toint() + Int64(place.expert) * (parts * 4)
    alphas = [ptx.load_f32(first + 4 * p) for p in range(parts)]
    return TileScale(alphas, row_scales(place, args.row_scale, row_index, count))


def part_alphas(tile: TileScale, row) -> list:
    """The factors of row ``row`` of the tile, as `row_alpha` has them. The whole warp is here."""
    if tile.scales is None:
        return tile.alphas
    scale = row_scale_of(tile.scales, row)
    return [ptx.mul(scale, alpha) for alpha in tile.alphas]


@dataclasses.dataclass(frozen=True)
class StoreRows:
    """out[row, col] = dtype(acc * (row_scale[row] * alpha[expert]) + bias[expert, col]), each step
    rounded.

    dtype       'BFloat16', 'Float16' or 'Float32'; out (R, N), row pitch N, N a multiple of 16
    row_scaled  row_scale fp32 (R,) is an argument; alpha fp32 (E,) always is
    biased      bias fp32 (E, N) is an argument
    """

    dtype: str = "BFloat16"
    row_scaled: bool = False
    biased: bool = False
    width = 64

    @property
    def name(self) -> str:
        scaled = "_rowscale" if self.row_scaled else ""
        return f"store_{self.dtype.lower()}{scaled}{'_bias' if self.biased else ''}"

    @property
    def arguments(self) -> StoreArgs:
        f32, bias = Ptr("Float32", 4), Ptr("Float32") if self.biased else None
        return StoreArgs(Ptr(self.dtype), f32, f32 if self.row_scaled else None, bias)

    def begin_row(self, args, place):
        return self.row(args, place, row_alpha(place, args.alpha, args.row_scale, None))

    def row(self, args, place, alpha):
        out = args.out.toint() + Int64(place.row) * (place.n * _BYTES[self.dtype])
        return RowStore(alpha, out, expert_bias(args.bias, place))

    @cute.jit
    def store_row(self, args, row, values, place):
        width, per_store = cute.size(values), 32 // _BYTES[self.dtype]
        if place.col + width <= place.n:
            self.store_all(row, values, place.col)
        else:  # the last columns of the output: at least 16, not all
            for i in cutlass.range_constexpr(0, width, per_store):
                if place.col + i < place.n:
                    self.store(row, values, place.col, i)

    def store_all(self, row, values, col):
        for i in range(0, cute.size(values), 32 // _BYTES[self.dtype]):
            self.store(row, values, col, i)

    def store(self, row, values, col, i: int):
        """The 32 bytes from values[i] on."""
        size = _BYTES[self.dtype]
        part = row_values(row, values, col + i, i, 32 // size)
        ptx.store_u32x8(row.out + col * size + i * size, self.pack(part))

    def begin_tile(self, args, place, count):
        return begin_scale(args, place, None, count)

    @cute.jit
    def store_part(self, args, tile, values, place, part):
        (alpha,) = part_alphas(tile, part.row)
        if part.real and place.col < place.n:
            self.store_all(self.row(args, place, alpha), values, place.col)

    def pack(self, part):
        """Eight words of one 32-byte store."""
        if self.dtype == "Float32":
            return [v.bitcast(Uint32) for v in part]
        pack = ptx.pack_bf16x2 if self.dtype == "BFloat16" else ptx.pack_f16x2
        return [pack(part[2 * j], part[2 * j + 1]) for j in range(8)]


class ActivationArgs(NamedTuple):
    data: Any
    scale: Any
    alpha: Any
    row_scale: Any
    row_index: Any
    out_scale: Any
    bias: Any


class RowQuantize(NamedTuple):
    """A row of h: factors of gate and up, outer scale g and 1 / (6 g), addresses of its codes, of
    its first scale byte, and of the expert's bias."""

    alphas: Any
    g: Any
    c: Any
    data: Any
    scale: Any
    bias: Any


class TileQuantize(NamedTuple):
    """What the rows of a decode tile share: their scales, outer scale g and 1 / (6 g)."""

    scale: TileScale
    g: Any
    c: Any


@dataclasses.dataclass(frozen=True)
class ActivationQuantize:
    """h = act(gate, up) of interleaved accumulator columns, quantised to NVFP4 in the same thread.

    activation  an `Activation`; gated: columns are g0, u0, g1, u1, ..., N = 2 I; else N = I
    indexed     row_scale is per token and row_index int32 (R,) names the token of a row; else per
                row
    biased      bias fp32 (E, N), interleaved like the columns, is added right after alpha

    data uint8 (R, I/2); scale UE4M3 SWIZZLE_32_4_4_GROUPED of I/16 groups padded to 4; alpha fp32
    (E, P) for P projections; row_scale fp32; out_scale fp32 (E,): the outer scale of h. numerics
    sections 2 and 3.
    Scale bytes that pad K are written (0); those of padding rows are not touched.
    """

    activation: Activation
    indexed: bool = True
    biased: bool = False

    @property
    def parts(self) -> int:
        return 2 if self.activation.gated else 1

    @property
    def width(self) -> int:
        return 32 * self.parts  # 32 values of h: 16 bytes of codes, two scales

    @property
    def name(self) -> str:
        act = type(self.activation).__name__.lower()
        return f"{act}_nvfp4{'_indexed' if self.indexed else ''}{'_bias' if self.biased else ''}"

    @property
    def arguments(self) -> ActivationArgs:
        f32, bias = Ptr("Float32", 4), Ptr("Float32") if self.biased else None
        index = Ptr("Int32", 4) if self.indexed else None
        return ActivationArgs(Ptr("Uint8"), Ptr("Uint8"), f32, f32, index, f32, bias)

    def begin_row(self, args, place):
        parts = self.parts
        alphas = [
            row_alpha(place, args.alpha, args.row_scale, args.row_index, p, parts)
            for p in range(parts)
        ]
        return self.row(args, place, alphas, self.outer(args, place))

    def outer(self, args, place):
        """(g, 1 / (6 g)) of the expert."""
        g = ptx.load_f32(args.out_scale.toint() + Int64(place.expert) * 4)
        return g, Float32(1.0) / ptx.mul(g, Float32(6.0))

    def row(self, args, place, alphas, outer):
        inter = place.n >> (self.parts - 1)  # `//` rounds down, which costs more
        bias = expert_bias(args.bias, place)
        data = args.data.toint() + Int64(place.row) * (inter >> 1)
        padded = ((inter >> 4) + 3) & -4
        scale = args.scale.toint() + scale_offset(place.sf_row, 0, padded)
        return RowQuantize((alphas[0], alphas[-1]), *outer, data, scale, bias)

    @cute.jit
    def store_row(self, args, row, values, place):
        """Both blocks of h are computed, only those inside are stored: a second block past the
        last column gives scale byte 0, which is what pads K."""
        shift = self.parts - 1
        inter = place.n >> shift
        col = place.col >> shift  # of h, a multiple of 32
        size = BLOCK * self.parts
        byte0, codes0 = encode_block(self.hidden(row, values, place, 0, size), row.g, row.c)
        byte1, codes1 = encode_block(self.hidden(row, values, place, size, size), row.g, row.c)
        data = row.data + (col >> 1)
        group, groups = col >> 4, inter >> 4  # group is even
        scale = row.scale + ((group >> 2) * 512 + (group & 3))
        if inter & 31 == 0:
            ptx.store_u32x4(data, [*codes0, *codes1])
        else:  # rows of codes are aligned to 8 bytes only
            ptx.store_u32x2(data, codes0)
            if col + BLOCK < inter:
                ptx.store_u32x2(data + 8, codes1)
            else:
                byte1 = Uint32(0)
        ptx.store_u16(scale, byte0 | (byte1 << 8))
        if group + 2 >= groups and group & 3 == 0:
            ptx.store_u16(scale + 2, Uint32(0))

    def hidden(self, row, values, place, first: int, count: int) -> list:
        """h of values[first : first + count]."""
        pre = scaled(values, first, count, row.alphas)
        if row.bias is not None:
            # the last block of a step may lie outside: any bias will do there
            col = cutlass.min(place.col + first, place.n - count)
            pre = with_bias(pre, row.bias + Int64(col) * 4, count)
        parts = self.parts
        return [self.activation(DEVICE_MATH, *pre[i : i + parts]) for i in range(0, count, parts)]

    def begin_tile(self, args, place, count):
        scale = begin_scale(args, place, args.row_index, count, self.parts)
        return TileQuantize(scale, *self.outer(args, place))

    @cute.jit
    def store_part(self, args, tile, values, place, part):
        """A lane has a block of h, or half of one where gate and up alternate: then its neighbour
        has the other half."""
        row = self.row(args, place, part_alphas(tile.scale, part.row), (tile.g, tile.c))
        h = self.hidden(row, values, place, 0, 16)
        amax = largest(h)
        if cutlass.const_expr(self.parts == 2):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 1), nan=True)
        byte, r = block_scale(amax, row.g, row.c)
        codes = scaled(h, 0, len(h), (r, r))
        shift = self.parts - 1
        group, groups = place.col >> (4 + shift), place.n >> (4 + shift)
        if part.real and place.col < place.n:
            data = row.data + (place.col >> (1 + shift))
            if cutlass.const_expr(self.parts == 2):
                ptx.store_u32(data, ptx.encode_e2m1x8(codes))
            else:
                words = [ptx.encode_e2m1x8(codes[:8]), ptx.encode_e2m1x8(codes[8:])]
                ptx.store_u32x2(data, words)
            if self.parts == 1 or place.col & 16 == 0:
                scale = row.scale + ((group >> 2) * 512 + (group & 3))
                ptx.store_u8(scale, byte)
                if group + 1 == groups:
                    for i in cutlass.range_constexpr(1, 4):  # bytes that pad K must be 0
                        if (group & 3) + i < 4:
                            ptx.store_u8(scale + i, Uint32(0))


def scale_offset(row, group, padded_groups):
    """Byte of (row, group) in SWIZZLE_32_4_4, Int64."""
    tile = Int64(row >> 7) * (padded_groups * 128) + (group >> 2) * 512
    return tile + Int64((row & 31) * 16 + (row >> 5 & 3) * 4 + (group & 3))


def largest(values) -> Any:
    """max |v|, NaN if one is; a tree of maxima of three."""
    while len(values) > 1:
        triples = [values[i : i + 3] for i in range(0, len(values), 3)]
        values = [ptx.max_abs3(t[0], t[1], t[-1]) if t[1:] else t[0] for t in triples]
    return values[0]


def encode_block(h, g, c):
    """16 fp32 values -> (scale byte, two words of codes) for the outer scale g, c = 1 / (6 g)."""
    byte, r = block_scale(largest(h), g, c)
    codes = scaled(h, 0, BLOCK, (r, r))
    return byte, [ptx.encode_e2m1x8(codes[:8]), ptx.encode_e2m1x8(codes[8:])]


def block_scale(amax, g, c):
    """(scale byte, factor of the values before they become codes) of a block. The conversion
    saturates at 448; a NaN makes the factor NaN and thereby every code of the block that of NaN."""
    byte = ptx.encode_e4m3(cute.arch.fmax(ptx.mul(amax, c), Float32(2.0**-9), nan=True))
    return byte, Float32(1.0) / ptx.mul(ptx.decode_e4m3(byte), g)
