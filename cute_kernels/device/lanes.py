"""Values spread over the lanes of a warp: what the epilogues of decode tiles share.

In a decode tile a thread owns a column of the output and its registers are rows; see
`cute_kernels.device.epilogues`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from cute_kernels.config import DECODE_STEP
from cute_kernels.device import ptx


class RowScales(NamedTuple):
    """Scales of the rows of a decode tile: lane j holds those of rows j and 32 + j."""

    low: Any
    high: Any


def row_scales(place: Any, row_scale: Any, row_index: Any, count: Any) -> RowScales | None:
    """row_scale[row_index[place.row + j]] for the ``count`` <= 64 rows of a tile (row_index None:
    row_scale[place.row + j]); lanes past the last row hold its scale. None where there is none."""
    if row_scale is None:
        return None
    lane = cute.arch.lane_idx()
    loaded = []
    for first in (0, 32):
        index = place.row + cutlass.min(lane + first, count - 1)
        if row_index is not None:
            index = ptx.load_i32(row_index.toint() + Int64(index) * 4)
        loaded.append(ptx.load_f32(row_scale.toint() + Int64(index) * 4))
    return RowScales(*loaded)


def step_scales(scales: RowScales | None, step: Any) -> Any:
    """(value of this lane, lane of the first row) of step ``step``; row j of the step is
    `shuffle_sync(value, lane + j)`."""
    if scales is None:
        return None
    return ptx.select(step < 2, scales.low, scales.high), (step & 1) * DECODE_STEP


def row_factor(alpha: Any, scales: Any, j: Any) -> Any:
    """alpha times the scale of row j of the step, rounded once."""
    if scales is None:
        return alpha
    value, first = scales
    return ptx.mul(cute.arch.shuffle_sync(value, first + j), alpha)


@cute.jit
def column_bias(bias, place):
    """bias[expert, col], 0 past the last column."""
    value = Float32(0.0)
    if place.col < place.n:
        value = ptx.load_f32(bias.toint() + (Int64(place.expert) * place.n + place.col) * 4)
    return value


def transpose(values: list, stride: int) -> list:
    """Exchange registers with lanes: of the len(values) = 2^k lanes whose indices differ in the k
    bits from ``stride`` on, lane i gets register i of every lane, in the order of the lanes.

    k rounds, each exchanges half of the registers with the lane that differs in one bit."""
    lane = cute.arch.lane_idx()
    values, bit = list(values), 1
    while bit < len(values):
        upper = (lane & (bit * stride)) != 0
        for low in (i for i in range(len(values)) if not i & bit):
            a, b = values[low], values[low | bit]
            got = cute.arch.shuffle_sync_bfly(ptx.select(upper, a, b), bit * stride)
            values[low], values[low | bit] = ptx.select(upper, got, a), ptx.select(upper, b, got)
        bit *= 2
    return values
