"""Values spread over the lanes of a warp: what a decode tile needs before its epilogue.

There the weights are on M: a thread reads a column of the output, and its registers are rows. The
warp turns that round (`exchange`), so that one thread has neighbours of one row, as in prefill.
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


def row_scale_of(scales: RowScales, row: Any) -> Any:
    """Scale of row ``row`` < 64 of the tile, another one in every lane; ``row`` >= 32 is the same
    in all of them. The whole warp is here."""
    return cute.arch.shuffle_sync(ptx.select(row < 32, scales.low, scales.high), row & 31)


# Between two rows of a warp's scratch: a multiple of 16 bytes, and eight lanes that each read 16
# bytes of the halves of four rows meet all banks once
PITCH = 36
SCRATCH = DECODE_STEP * PITCH  # fp32 values of shared memory that a warp needs to exchange


def exchange(values: Any, scratch: Any) -> Any:
    """acc[step of 16 rows, 32 columns] of a warp, from one column per lane to 16 columns per lane:
    lane l gets columns 16 (l % 2) to 16 (l % 2) + 15 of row l / 2.

    ``values``: 16 rows of the lane's column; ``scratch``: pointer to `SCRATCH` fp32 of the warp's
    own, aligned to 16 bytes. The whole warp is here."""
    lane = cute.arch.lane_idx()
    rows = cute.make_tensor(scratch, cute.make_layout((DECODE_STEP, 32), stride=(PITCH, 1)))
    cute.arch.sync_warp()  # what the step before wrote has been read
    for j in range(DECODE_STEP):
        rows[j, lane] = values[j]
    cute.arch.sync_warp()
    halves = cute.make_layout((16, (2, DECODE_STEP)), stride=(1, (16, PITCH)))
    mine = cute.make_tensor(scratch, halves)[None, lane]
    got = cute.make_rmem_tensor(16, Float32)
    cute.autovec_copy(mine, got)
    return got
