"""The epilogue that adds rows of experts straight into their tokens.

    y[row_token[r], n] += row_weight[r] * bf16(acc[r, n] * (row_scale[r] * alpha[e]) + bias[e, n])

The order in which the slots of a token are added is not fixed: with three slots or more the last
bits of a sum may differ from run to run.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.epilogues import (
    begin_scale,
    expert_bias,
    part_alphas,
    row_alpha,
    row_values,
)


class ScatterArgs(NamedTuple):
    y: Any
    alpha: Any
    row_scale: Any
    bias: Any
    row_token: Any
    row_weight: Any


class RowScatter(NamedTuple):
    """What a row becomes: its factors, and addresses of its token in y and of the bias."""

    alpha: Any
    weight: Any
    y: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class ScatterAdd:
    """Each product, sum and rounding as `StoreRows` and `Combine` have them, but for the order of
    the sums.

    dtype       'Float32': sums in fp32; 'BFloat16': each addend and each sum is rounded to bf16
    row_scaled  row_scale fp32 (R,) is an argument; alpha fp32 (E,) always is
    biased      bias fp32 (E, N) is an argument
    weighted    row_weight fp32 (R,) is an argument

    y (T, N), row pitch N, holds what is added to; row_token int32 (R,), every entry a row of y.
    """

    dtype: str = "Float32"
    row_scaled: bool = False
    biased: bool = False
    weighted: bool = True
    width = 32

    @property
    def name(self) -> str:
        flags = {"rowscale": self.row_scaled, "bias": self.biased, "sum": not self.weighted}
        return "_".join(["scatter", self.dtype.lower(), *(n for n, on in flags.items() if on)])

    @property
    def arguments(self) -> ScatterArgs:
        f32 = Ptr("Float32", 4)
        return ScatterArgs(
            Ptr(self.dtype),
            f32,
            f32 if self.row_scaled else None,
            Ptr("Float32") if self.biased else None,
            Ptr("Int32", 4),
            f32 if self.weighted else None,
        )

    def begin_row(self, args, place):
        return self.row(args, place, row_alpha(place, args.alpha, args.row_scale, None))

    def row(self, args, place, alpha):
        token = ptx.load_i32(args.row_token.toint() + Int64(place.row) * 4)
        weight = None
        if self.weighted:
            weight = ptx.load_f32(args.row_weight.toint() + Int64(place.row) * 4)
        size = 4 if self.dtype == "Float32" else 2
        y = args.y.toint() + Int64(token) * (place.n * size)
        return RowScatter(alpha, weight, y, expert_bias(args.bias, place))

    @cute.jit
    def store_row(self, args, row, values, place):
        width = cute.size(values)
        if place.col + width <= place.n:
            self.add_all(row, values, place.col)
        else:  # the last columns of the output: at least 16, not all
            for i in cutlass.range_constexpr(0, width, self.per_add):
                if place.col + i < place.n:
                    self.add_some(row, values, place.col, i)

    @property
    def per_add(self) -> int:
        """Columns of one reduction of 16 bytes."""
        return 4 if self.dtype == "Float32" else 8

    def add_all(self, row, values, col):
        for i in range(0, cute.size(values), self.per_add):
            self.add_some(row, values, col, i)

    def add_some(self, row, values, col, i: int):
        """One reduction, of the columns from values[i] on."""
        part = self.addends(row_values(row, values, col + i, i, self.per_add), row.weight)
        size = 16 // self.per_add
        self.add(row.y + col * size + i * size, part)

    def begin_tile(self, args, place, count):
        return begin_scale(args, place, None, count)

    @cute.jit
    def store_part(self, args, tile, values, place, part):
        (alpha,) = part_alphas(tile, part.row)
        if part.real and place.col < place.n:
            self.add_all(self.row(args, place, alpha), values, place.col)

    def addends(self, part, weight):
        """What a token gets: the bf16 rounding of each value, weighted."""
        pairs = [ptx.pack_bf16x2(a, b) for a, b in zip(part[::2], part[1::2])]
        halves = [h for w in pairs for h in (w << 16, w & Uint32(0xFFFF0000))]
        rounded = [h.bitcast(Float32) for h in halves]
        return rounded if weight is None else [ptx.mul(weight, v) for v in rounded]

    def add(self, address, part):
        """One reduction of 16 bytes."""
        if self.dtype == "Float32":
            ptx.reduce_f32x4(address, part)
        else:
            words = [ptx.pack_bf16x2(a, b) for a, b in zip(part[::2], part[1::2])]
            ptx.reduce_bf16x8(address, words)
