"""What happens to an accumulator row: epilogue objects of the grouped GEMMs.

An epilogue is a frozen dataclass (its repr is part of the kernel's key). The mainloop hands it a
piece of an accumulator at a time, which one of two methods takes, by the plan of the mainloop:

    store_row(args, row, values, place)     one thread owns acc[row, col : col + width] in fp32
    store_col(args, col, values, place, rows)
                                            one thread owns acc[row : row + DECODE_STEP, col]

``place`` is a `Place`. store_row: the mainloop has checked that ``row`` is a real row; columns at
and past ``place.n`` exist in ``values`` but not in the output. Threads diverge here: no warp
collectives. ``row`` is what ``begin_row(args, place)`` returned once per tile, before the
accumulator was ready: all that does not depend on the column. store_col: the 32 threads of a warp
own consecutive columns from a multiple of 32 on and are all here; ``rows`` is (step, count), the
first ``count`` rows of this ``step`` of the tile are real; a column may be at or past ``place.n``.
``col`` is what ``begin_col(args, place, count)`` returned for the ``count`` rows of the tile. Both
methods give the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from cute_kernels.activations import Activation
from cute_kernels.compile import Ptr
from cute_kernels.config import DECODE_STEP
from cute_kernels.device import ptx
from cute_kernels.device.lanes import (
    column_bias,
    row_factor,
    row_scales,
    step_scales,
    transpose,
)
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


def row_values(row, values, col, first: int, count: int) -> list:
    """values[first : first + count] times row.alpha, plus the biases from column ``col`` on where
    the row has any."""
    part = scaled(values, first, count, (row.alpha, row.alpha))
    if row.bias is None:
        return part
    bias = row.bias + col * 4
    return [ptx.add(v, ptx.load_f32(bias + 4 * j)) for j, v in enumerate(part)]


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


class ColumnStore(NamedTuple):
    """A column of a decode tile: the expert's factor, the scales of the rows, the bias."""

    alpha: Any
    scales: Any
    bias: Any


def begin_column(args, place, count) -> ColumnStore:
    """``args`` with alpha, row_scale and bias, the last two None where there are none."""
    alpha = ptx.load_f32(args.alpha.toint() + Int64(place.expert) * 4)
    bias = None if args.bias is None else column_bias(args.bias, place)
    return ColumnStore(alpha, row_scales(place, args.row_scale, None, count), bias)


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
    width = 32

    @property
    def name(self) -> str:
        scaled = "_rowscale" if self.row_scaled else ""
        return f"store_{self.dtype.lower()}{scaled}{'_bias' if self.biased else ''}"

    @property
    def arguments(self) -> StoreArgs:
        f32 = Ptr("Float32", 4)
        return StoreArgs(
            Ptr(self.dtype), f32, f32 if self.row_scaled else None, f32 if self.biased else None
        )

    def begin_row(self, args, place):
        alpha = row_alpha(place, args.alpha, args.row_scale, None)
        size = _BYTES[self.dtype]
        out = args.out.toint() + Int64(place.row) * place.n * size
        return RowStore(alpha, out, expert_bias(args.bias, place))

    @cute.jit
    def store_row(self, args, row, values, place):
        size = _BYTES[self.dtype]
        per_store = 32 // size
        base = row.out + place.col * size
        for i in cutlass.range_constexpr(self.width // per_store):
            if place.col + i * per_store < place.n:
                col = place.col + i * per_store
                part = row_values(row, values, col, i * per_store, per_store)
                ptx.store_u32x8(base + 32 * i, self.pack(part))

    def begin_col(self, args, place, count):
        return begin_column(args, place, count)

    @cute.jit
    def store_col(self, args, col, values, place, rows):
        step, count = rows
        size = _BYTES[self.dtype]
        scales = step_scales(col.scales, step)
        base = args.out.toint() + (Int64(place.row) * place.n + place.col) * size
        for j in cutlass.range_constexpr(DECODE_STEP):
            value = ptx.mul(values[j], row_factor(col.alpha, scales, j))
            if cutlass.const_expr(self.biased):
                value = ptx.add(value, col.bias)
            if j < count and place.col < place.n:
                self.store_one(base + Int64(j) * place.n * size, value)

    def store_one(self, address, value):
        if self.dtype == "Float32":
            ptx.store_f32(address, value)
        elif self.dtype == "BFloat16":
            ptx.store_u16(address, ptx.pack_bf16x2(value, value))
        else:
            ptx.store_u16(address, ptx.pack_f16x2(value, value))

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


class ColumnQuantize(NamedTuple):
    """A column of a decode tile: factors of gate and up, outer scale g and 1 / (6 g), scales of the
    rows, biases of this column and of its neighbour in a pair."""

    alphas: Any
    g: Any
    c: Any
    scales: Any
    biases: Any


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
        f32 = Ptr("Float32", 4)
        index = Ptr("Int32", 4) if self.indexed else None
        return ActivationArgs(
            Ptr("Uint8"), Ptr("Uint8"), f32, f32, index, f32, f32 if self.biased else None
        )

    def begin_row(self, args, place):
        parts = self.parts
        alphas = [
            row_alpha(place, args.alpha, args.row_scale, args.row_index, p, parts)
            for p in range(parts)
        ]
        g = ptx.load_f32(args.out_scale.toint() + Int64(place.expert) * 4)
        c = Float32(1.0) / ptx.mul(g, Float32(6.0))
        inter = place.n // parts
        bias = expert_bias(args.bias, place)
        data = args.data.toint() + Int64(place.row) * (inter // 2)
        padded = (inter // BLOCK + 3) // 4 * 4
        scale = args.scale.toint() + scale_offset(place.sf_row, 0, padded)
        return RowQuantize((alphas[0], alphas[-1]), g, c, data, scale, bias)

    @cute.jit
    def store_row(self, args, row, values, place):
        """Both blocks of h are computed, only those inside are stored: a second block past the
        last column gives scale byte 0, which is what pads K."""
        shift = self.parts - 1  # shifts: the division of the language rounds down, which costs more
        inter = place.n >> shift
        col = place.col >> shift  # of h, a multiple of 32
        byte0, codes0 = self.block(row, values, place, 0)
        byte1, codes1 = self.block(row, values, place, 1)
        data = row.data + (col >> 1)
        if inter & 31 == 0:
            ptx.store_u32x4(data, [*codes0, *codes1])
        else:  # rows of codes are aligned to 8 bytes only
            ptx.store_u32x2(data, codes0)
            if col + BLOCK < inter:
                ptx.store_u32x2(data + 8, codes1)
        group, groups = col >> 4, inter >> 4  # group is even
        scale = row.scale + ((group >> 2) * 512 + (group & 3))
        if group + 1 == groups:
            byte1 = Uint32(0)
        ptx.store_u16(scale, byte0 | (byte1 << 8))
        if group + 2 >= groups and group & 3 == 0:
            ptx.store_u16(scale + 2, Uint32(0))

    def block(self, row, values, place, b: int):
        """(scale byte, codes) of block ``b`` of this step."""
        size = BLOCK * self.parts
        pre = scaled(values, b * size, size, row.alphas)
        if self.biased:
            # the last block of the step may lie outside: any bias will do there
            first = cutlass.min(place.col + b * size, place.n - size)
            bias = row.bias + Int64(first) * 4
            pre = [ptx.add(v, ptx.load_f32(bias + 4 * i)) for i, v in enumerate(pre)]
        step = self.parts
        h = [self.activation(DEVICE_MATH, *pre[i : i + step]) for i in range(0, size, step)]
        return encode_block(h, row.g, row.c)

    def begin_col(self, args, place, count):
        parts, first = self.parts, args.alpha.toint() + Int64(place.expert) * self.parts * 4
        alphas = [ptx.load_f32(first + 4 * p) for p in range(parts)]
        g = ptx.load_f32(args.out_scale.toint() + Int64(place.expert) * 4)
        c = Float32(1.0) / ptx.mul(g, Float32(6.0))
        scales = row_scales(place, args.row_scale, args.row_index, count)
        biases = None
        if self.biased:
            mine = column_bias(args.bias, place)
            biases = (mine, cute.arch.shuffle_sync_bfly(mine, 1)) if parts == 2 else (mine,)
        return ColumnQuantize(alphas, g, c, scales, biases)

    @cute.jit
    def store_col(self, args, col, values, place, rows):
        """The warp's 32 columns by 16 rows change hands until a lane holds consecutive values of
        one row: 8 of h (half a block) when gate and up alternate, else a block."""
        step, count = rows
        parts, lane = self.parts, cute.arch.lane_idx()
        scales = step_scales(col.scales, step)
        h = (pair_values if parts == 2 else column_values)(self.activation, col, values, scales)
        h = transpose(h, parts)
        upper = lane >> 4
        amax = largest(h)
        if cutlass.const_expr(parts == 2):
            amax = cute.arch.fmax(amax, cute.arch.shuffle_sync_bfly(amax, 16), nan=True)
        byte, r = block_scale(amax, col.g, col.c)
        codes = scaled(h, 0, len(h), (r, r))
        # lane 2i + p of gate and up holds row 8p + i, else lane i row i
        mine = (lane & 1) * 8 + (lane >> 1 & 7) if parts == 2 else lane & 15
        inter = place.n >> (parts - 1)
        group = (place.col - lane) >> 5 if parts == 2 else ((place.col - lane) >> 4) + upper
        if mine < count and group * BLOCK < inter:
            row = args.data.toint() + Int64(place.row + mine) * (inter >> 1) + group * 8
            if cutlass.const_expr(parts == 2):
                ptx.store_u32(row + upper * 4, ptx.encode_e2m1x8(codes))
            else:
                words = [ptx.encode_e2m1x8(codes[:8]), ptx.encode_e2m1x8(codes[8:])]
                ptx.store_u32x2(row, words)
            if parts == 1 or upper == 0:
                self.store_scale(args.scale, place.sf_row + mine, group, inter >> 4, byte)

    @cute.jit
    def store_scale(self, base, sf_row, group, groups, byte):
        padded = (groups + 3) // 4 * 4
        at = scale_offset(sf_row, group, padded)
        ptx.store_u8(base.toint() + at, byte)
        if group == groups - 1:
            for i in cutlass.range_constexpr(1, 4):  # bytes that pad K must be 0
                if group + i < padded:
                    ptx.store_u8(base.toint() + scale_offset(sf_row, group + i, padded), Uint32(0))


def pair_values(activation, col, values, scales) -> list:
    """Eight values of h of this lane's pair of columns: even lanes take the first eight rows,
    odd lanes the others, each gets what it lacks from its neighbour."""
    odd = (cute.arch.lane_idx() & 1) == 1
    half = DECODE_STEP // 2
    h = []
    for j in range(half):
        first, last = values[j], values[j + half]
        mine, got = ptx.select(odd, last, first), ptx.select(odd, first, last)
        got = cute.arch.shuffle_sync_bfly(got, 1)
        gate, up = ptx.select(odd, got, mine), ptx.select(odd, mine, got)
        value, lane = scales
        row = lane + j + (cute.arch.lane_idx() & 1) * half
        scale = cute.arch.shuffle_sync(value, row)
        factors = ptx.mul_pair((scale, scale), col.alphas)
        pre = ptx.mul_pair((gate, up), factors)
        if col.biases is not None:
            mine, other = col.biases
            pre = (
                ptx.add(pre[0], ptx.select(odd, other, mine)),
                ptx.add(pre[1], ptx.select(odd, mine, other)),
            )
        h.append(activation(DEVICE_MATH, *pre))
    return h


def column_values(activation, col, values, scales) -> list:
    """h of this lane's column, all rows."""
    h = []
    for j in range(DECODE_STEP):
        v = ptx.mul(values[j], row_factor(col.alphas[0], scales, j))
        h.append(
            activation(DEVICE_MATH, ptx.add(v, col.biases[0]) if col.biases is not None else v)
        )
    return h


def scale_offset(row, group, padded_groups):
    """Byte of (row, group) in SWIZZLE_32_4_4, Int64."""
    tile = Int64(row // 128) * (128 * padded_groups) + (group // 4) * 512
    inside = (row % 32) * 16 + ((row % 128) // 32) * 4 + group % 4
    return tile + Int64(inside)


def largest(values) -> Any:
    """max |v| of an even number of values, NaN if one is."""
    amax = ptx.abs_f32(values[0])
    for a, b in zip(values[1::2], [*values[2::2], values[0]]):
        amax = ptx.max_abs3(amax, a, b)
    return amax


def encode_block(h, g, c):
    """16 fp32 values -> (scale byte, two words of codes) for the outer scale g, c = 1 / (6 g)."""
    byte, r = block_scale(largest(h), g, c)
    codes = scaled(h, 0, BLOCK, (r, r))
    return byte, [ptx.encode_e2m1x8(codes[:8]), ptx.encode_e2m1x8(codes[8:])]


def block_scale(amax, g, c):
    """(scale byte, factor of the values before they become codes) of a block."""
    raw = cute.arch.fmax(ptx.mul(amax, c), Float32(2.0**-9), nan=True)
    byte = ptx.encode_e4m3(cute.arch.fmin(raw, Float32(448.0), nan=True))
    step = ptx.mul(ptx.decode_ue4m3(byte), g)
    # a NaN scale byte decodes as finite here; every code of its block is that of NaN
    return byte, cutlass.select_(byte == 0x7F, Float32(float("nan")), Float32(1.0) / step)
