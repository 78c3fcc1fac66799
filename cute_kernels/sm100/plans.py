"""Which side of the MMA the routed rows are on. All that differs is here; one packed weight layout
serves both plans.

    prefill  rows on M, weights on N: an accumulator row is a routed row
    decode   weights on M, rows on N ("swap-AB"): an expert with few rows fills the MMA with its
             weights, and N is as large as the rows need, in steps of `DECODE_STEP`
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_kernels.config import DECODE_STEP, GemmConfig
from cute_kernels.device.epilogues import Part, Place
from cute_kernels.device.lanes import SCRATCH, exchange
from cute_kernels.sm100.operands import M_SIDE, N_SIDE, Corner


class Tile(NamedTuple):
    """What an MMA tile of this CTA works on. ``boxes`` steps of rows are real in a decode tile, 0:
    as many as fit."""

    rows: Corner
    weights: Corner
    boxes: Any


@dataclasses.dataclass(frozen=True)
class Prefill:
    rows_side = M_SIDE
    weights_side = N_SIDE
    scratch = 0  # fp32 of shared memory per epilogue warp

    def tile(self, c: GemmConfig, work: Any, rank: Any) -> Tile:
        """Pairs of a cluster: first those that share weights, then those that share rows."""
        down = rank % (c.ctas * c.pairs) // c.ctas * (128 * c.ctas)
        n0 = (work.n_tile * c.columns + rank // (c.ctas * c.pairs)) * c.tile_n
        rows = Corner(work.row0 + down, work.sf_row0 + down, 0)
        return Tile(rows, Corner(n0, n0, work.expert), 0)

    def mma_columns(self, c: GemmConfig) -> tuple[int, ...]:
        """N of the MMAs among which `Tile.boxes` chooses at run time."""
        return (c.tile_n,)

    def sfb_row(self, tile: Tile) -> Any:
        return tile.weights.sf_row

    def width(self, epilogue: Any) -> int:
        """Columns of the accumulator that the epilogue takes at a time."""
        return epilogue.width

    def steps(self, c: GemmConfig, epilogue: Any, tile: Tile) -> Any:
        return c.tile_n // epilogue.width

    def begin(self, epilogue, args, where):
        """What the epilogue keeps of this thread's row. Past the expert's end: of its last row."""
        work, tile, lane_row, n = where
        row = cutlass.min(tile.rows.row + lane_row, work.end - 1)
        sf_row = tile.rows.sf_row + lane_row
        place = Place(work.expert, row, sf_row, tile.weights.row, n)
        return epilogue.begin_row(args, place)

    @cute.jit
    def store(self, epilogue, args, begun, values, where, step, _):
        """Thread ``lane_row`` owns a routed row; ``step`` counts widths of columns."""
        work, tile, lane_row, n = where
        row = tile.rows.row + lane_row
        col = tile.weights.row + step * epilogue.width
        if row < work.end and col < n:
            place = Place(work.expert, row, tile.rows.sf_row + lane_row, col, n)
            epilogue.store_row(args, begun, values, place)


@dataclasses.dataclass(frozen=True)
class Decode:
    rows_side = N_SIDE
    weights_side = M_SIDE
    scratch = SCRATCH

    def tile(self, c: GemmConfig, work: Any, rank: Any) -> Tile:
        m0 = work.n_tile * 128
        rows = Corner(work.row0, work.sf_row0, 0)
        count = cutlass.min(work.end - work.row0, Int32(c.tile_n))
        return Tile(rows, Corner(m0, m0, work.expert), (count + (DECODE_STEP - 1)) // DECODE_STEP)

    def mma_columns(self, c: GemmConfig) -> tuple[int, ...]:
        return tuple(range(DECODE_STEP, c.tile_n + 1, DECODE_STEP))

    def sfb_row(self, tile: Tile) -> Any:
        return tile.rows.sf_row

    def width(self, epilogue: Any) -> int:
        return DECODE_STEP

    def steps(self, c: GemmConfig, epilogue: Any, tile: Tile) -> Any:
        return tile.boxes

    def begin(self, epilogue, args, where):
        """What the epilogue keeps of the rows of the tile."""
        work, tile, _, n = where
        count = cutlass.min(work.end - tile.rows.row, Int32(64))
        place = Place(work.expert, tile.rows.row, tile.rows.sf_row, tile.weights.row, n)
        return epilogue.begin_tile(args, place, count)

    @cute.jit
    def store(self, epilogue, args, begun, values, where, step, scratch):
        """Thread ``lane_row`` owns a row of the weights, a register is a routed row; then a warp
        turns its 32 x 16."""
        work, tile, lane_row, n = where
        lane = cute.arch.lane_idx()
        turned = exchange(values, scratch)
        row = step * DECODE_STEP + (lane >> 1)
        col = tile.weights.row + lane_row - lane + (lane & 1) * 16
        place = Place(work.expert, tile.rows.row + row, tile.rows.sf_row + row, col, n)
        epilogue.store_part(args, begun, turned, place, Part(row, place.row < work.end))


PREFILL, DECODE = Prefill(), Decode()
