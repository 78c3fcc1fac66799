"""What becomes of an fp32 accumulator on SM90: small frozen objects, one method per pair of values.

A thread of a warpgroup owns, per token, the accumulators of packed rows r and r + 8 (r % 16 < 8):
two features of the output, or, for gated weights, gate and up of one feature. An epilogue says what
to store for the pair.

    begin(args, expert, row, num_rows) -> context    once per tile and pair of rows; row = packed
                                                     weight row r
    scale_of(args, token_row) -> scale               of one routed row; None without row_scale
    pair(context, scale, low, high) -> values        tuple of ``values_per_pair`` fp32
    rounding(args, expert) -> (g, c)                 once per tile: how blocks of 16 values are
                                                     rounded (`device.stage.rounding_of`), or None
"""

import dataclasses
from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64

from cute_kernels.activations import Activation
from cute_kernels.compile import Ptr
from cute_kernels.device.math import DEVICE_MATH
from cute_kernels.device.ptx import add, load_f32, load_i32, mul
from cute_kernels.device.stage import rounding_of, usable_scale


class EpilogueArgs(NamedTuple):
    """alpha         float32 (E, 2), see `weights.Sm90Weight`
    row_scale     float32 (rows of x,) or None: multiplies every row of the output (outer scale of
                  quantised activations)
    row_token     int32 (routed rows,) or None: row of x of each routed row
    bias          float32 (E, weight rows) in packed row order or None
    expert_scale  float32 (E,) or None: instead of row_scale, the same for all rows of an expert
    out_scale     float32 (E,) or None: outer scale with which the output is rounded to NVFP4
    """

    alpha: Any
    row_scale: Any
    row_token: Any
    bias: Any
    expert_scale: Any
    out_scale: Any


class Context(NamedTuple):
    alpha: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class StoreRows:
    """out[row, feature] = acc * (row_scale * alpha) + bias, stored as ``dtype``.

    indexed    row_scale belongs to rows of x: routed rows find theirs through row_token
    by_expert  the scale of rows is that of their expert
    rounded    to values of NVFP4 without their outer scale; ``dtype`` is bf16, which has them all
    """

    row_scale: bool = False
    bias: bool = False
    indexed: bool = False
    dtype: str = "BFloat16"  # or "Float32"
    by_expert: bool = False
    rounded: bool = False
    values_per_pair = 2
    kind = "store"

    @property
    def name(self) -> str:
        rounded = "_nvfp4" if self.rounded else ""
        return self.kind + ("_f32" if self.dtype == "Float32" else rounded)

    @property
    def arguments(self) -> EpilogueArgs:
        f32 = Ptr("Float32", 4)
        return EpilogueArgs(
            Ptr("Float32", 8),
            f32 if self.row_scale else None,
            Ptr("Int32", 4) if self.row_scale and self.indexed else None,
            f32 if self.bias else None,
            f32 if self.by_expert else None,
            f32 if self.rounded else None,
        )

    def begin(self, args: EpilogueArgs, expert: Int32, row: Int32, num_rows: Int32) -> Context:
        at = args.alpha.toint() + Int64(expert) * 8
        bias = None
        if self.bias:
            first = args.bias.toint() + (Int64(expert) * num_rows + row) * 4
            bias = (load_f32(first), load_f32(first + 32))
        alpha = (load_f32(at), load_f32(at + 4))
        if self.by_expert:
            g = usable_scale(load_f32(args.expert_scale.toint() + Int64(expert) * 4))
            alpha = (mul(g, alpha[0]), mul(g, alpha[1]))
        return Context(alpha, bias)

    def rounding(self, args: EpilogueArgs, expert: Int32) -> tuple[Float32, Float32] | None:
        if not self.rounded:
            return None
        return rounding_of(load_f32(args.out_scale.toint() + Int64(expert) * 4))

    def scale_of(self, args: EpilogueArgs, token_row: Int32) -> Any:
        if not self.row_scale:
            return None
        if self.indexed:
            token_row = load_i32(args.row_token.toint() + Int64(token_row) * 4)
        return load_f32(args.row_scale.toint() + Int64(token_row) * 4)

    def scaled(self, context: Context, scale: Any, low: Float32, high: Float32):
        a, b = context.alpha
        if scale is not None:
            a, b = mul(scale, a), mul(scale, b)
        low, high = mul(low, a), mul(high, b)
        if self.bias:
            low, high = add(low, context.bias[0]), add(high, context.bias[1])
        return low, high

    def pair(self, context: Context, scale: Any, low: Float32, high: Float32):
        return self.scaled(context, scale, low, high)


@dataclasses.dataclass(frozen=True)
class Activate(StoreRows):
    """h = activation(gate, up) of gated weights, or activation(x) of both rows."""

    activation: Activation = None  # type: ignore[assignment]

    @property
    def values_per_pair(self) -> int:  # type: ignore[override]
        return 1 if self.activation.gated else 2

    @property
    def kind(self) -> str:  # type: ignore[override]
        return type(self.activation).__name__.lower()

    def pair(self, context: Context, scale: Any, low: Float32, high: Float32):
        low, high = self.scaled(context, scale, low, high)
        if self.activation.gated:
            return (self.activation(DEVICE_MATH, low, high),)
        return self.activation(DEVICE_MATH, low), self.activation(DEVICE_MATH, high)
