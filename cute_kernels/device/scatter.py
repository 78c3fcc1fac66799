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
from cute_kernels.config import DECODE_STEP
from cute_kernels.device import ptx
from cute_kernels.device.epilogues import begin_column, expert_bias, row_alpha, row_values
from cute_kernels.device.lanes import row_factor, step_scales


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
            f32 if self.biased else None,
            Ptr("Int32", 4),
            f32 if self.weighted else None,
        )

    def begin_row(self, args, place):
        alpha = row_alpha(place, args.alpha, args.row_scale, None)
        token = ptx.load_i32(args.row_token.toint() + Int64(place.row) * 4)
        weight = None
        if self.weighted:
            weight = ptx.load_f32(args.row_weight.toint() + Int64(place.row) * 4)
        size = 4 if self.dtype == "Float32" else 2
        y = args.y.toint() + Int64(token) * place.n * size
        return RowScatter(alpha, weight, y, expert_bias(args.bias, place))

    @cute.jit
    def store_row(self, args, row, values, place):
        size = 4 if self.dtype == "Float32" else 2
        per_store = 16 // size
        base = row.y + place.col * size
        for i in cutlass.range_constexpr(self.width // per_store):
            if place.col + i * per_store < place.n:
                col = place.col + i * per_store
                part = row_values(row, values, col, i * per_store, per_store)
                self.add(base + 16 * i, self.addends(part, row.weight))

    def begin_col(self, args, place, count):
        return begin_column(args, place, count)

    @cute.jit
    def store_col(self, args, col, values, place, rows):
        """Consecutive lanes add to consecutive columns: whole sectors again."""
        step, count = rows
        lane = cute.arch.lane_idx()
        scales = step_scales(col.scales, step)
        row = Int64(place.row + cutlass.min(lane, count - 1))
        tokens = ptx.load_i32(args.row_token.toint() + row * 4)
        if cutlass.const_expr(self.weighted):
            weights = ptx.load_f32(args.row_weight.toint() + row * 4)
        for j in cutlass.range_constexpr(DECODE_STEP):
            value = ptx.mul(values[j], row_factor(col.alpha, scales, j))
            if cutlass.const_expr(self.biased):
                value = ptx.add(value, col.bias)
            value = (ptx.pack_bf16x2(value, value) << 16).bitcast(Float32)
            if cutlass.const_expr(self.weighted):
                value = ptx.mul(cute.arch.shuffle_sync(weights, j), value)
            token = cute.arch.shuffle_sync(tokens, j)
            other = cute.arch.shuffle_sync_bfly(value, 1)  # the next column's, for even lanes
            if j < count and place.col < place.n:
                at = Int64(token) * place.n + place.col
                if cutlass.const_expr(self.dtype == "Float32"):
                    ptx.reduce_f32(args.y.toint() + at * 4, value)
                elif lane % 2 == 0:
                    ptx.reduce_bf16x2(args.y.toint() + at * 2, ptx.pack_bf16x2(value, other))

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
