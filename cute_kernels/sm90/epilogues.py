"""What becomes of an fp32 accumulator on SM90: small frozen objects, one method per pair of values.

A thread of a warpgroup owns, per token, the accumulators of packed rows r and r + 8 (r % 16 < 8):
two features of the output, or, for gated weights, gate and up of one feature. An epilogue says what
to store for the pair.

    begin(args, expert, row, num_rows) -> context    once per tile and pair of rows; row = packed
                                                     weight row r
    scale_of(args, token_row) -> scale               of one routed row; None without row_scale
    pair(context, scale, low, high) -> values        tuple of ``values_per_pair`` fp32
"""

import dataclasses
from typing import Any, NamedTuple

from cutlass import Float32, Int32, Int64

from cute_kernels.activations import Activation
from cute_kernels.compile import Ptr
from cute_kernels.device.math import DEVICE_MATH
from cute_kernels.device.ptx import add, load_f32, load_i32, mul


class EpilogueArgs(NamedTuple):
    """alpha      float32 (E, 2), see `weights.Sm90Weight`
    row_scale  float32 (rows of x,) or None: multiplies every row of the output (outer scale of
               quantised activations)
    row_token  int32 (routed rows,) or None: row of x of each routed row
    bias       float32 (E, weight rows) in packed row order or None
    """

    alpha: Any
    row_scale: Any
    row_token: Any
    bias: Any


class Context(NamedTuple):
    alpha: Any
    bias: Any


@dataclasses.dataclass(frozen=True)
class StoreRows:
    """out[row, feature] = acc * (row_scale * alpha) + bias, stored as ``dtype``.

    indexed  row_scale belongs to rows of x: routed rows find theirs through row_token
    """

    row_scale: bool = False
    bias: bool = False
    indexed: bool = False
    dtype: str = "BFloat16"  # or "Float32"
    values_per_pair = 2
    kind = "store"

    @property
    def name(self) -> str:
        return self.kind + ("_f32" if self.dtype == "Float32" else "")

    @property
    def arguments(self) -> EpilogueArgs:
        f32 = Ptr("Float32", 4)
        return EpilogueArgs(
            Ptr("Float32", 8),
            f32 if self.row_scale else None,
            Ptr("Int32", 4) if self.row_scale and self.indexed else None,
            f32 if self.bias else None,
        )

    def begin(self, args: EpilogueArgs, expert: Int32, row: Int32, num_rows: Int32) -> Context:
        at = args.alpha.toint() + Int64(expert) * 8
        bias = None
        if self.bias:
            first = args.bias.toint() + (Int64(expert) * num_rows + row) * 4
            bias = (load_f32(first), load_f32(first + 32))
        return Context((load_f32(at), load_f32(at + 4)), bias)

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
