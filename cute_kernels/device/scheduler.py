"""Which expert owns the n-th tile, found by a warp from ``expert_offsets``."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_kernels.device import ptx


@cute.jit
def find_tile(offsets, num_experts, tile, tile_rows: cutlass.Constexpr):
    """(found, first row, end): the rows of tile ``tile`` when every expert's rows are cut into tiles of
    ``tile_rows`` and tiles are numbered expert after expert. Rows are first row : min(first row + tile_rows, end).

    offsets  address of expert_offsets, int32 (num_experts + 1,), read within its bounds
    Every lane of the warp must be here; all get the same answer. 32 experts a step.
    """
    lane = cute.arch.lane_idx()
    before = Int32(0)  # tiles of the experts already passed
    base = Int32(0)
    found = Boolean(False)
    row0 = Int32(0)
    end = Int32(0)
    while base < num_experts and not found:
        expert = cutlass.min(base + lane, num_experts - 1)
        first = ptx.load_i32(offsets + Int64(expert) * 4)
        last = ptx.load_i32(offsets + Int64(expert) * 4 + 4)
        tiles = (last - first + (tile_rows - 1)) // tile_rows
        if base + lane >= num_experts:
            tiles = Int32(0)
        upto = inclusive_sum(tiles, lane)
        start = before + upto - tiles
        mine = tile >= start and tile < start + tiles
        owners = cute.arch.vote_ballot_sync(mine)
        found = owners != 0
        owner = 31 - Int32(cute.arch.clz(owners))
        if not found:
            owner = Int32(0)
        row0 = cute.arch.shuffle_sync(first + (tile - start) * tile_rows, owner)
        end = cute.arch.shuffle_sync(last, owner)
        before = before + cute.arch.shuffle_sync(upto, 31)
        base = base + 32
    return found, row0, end


@cute.jit
def inclusive_sum(value, lane):
    """Sum over this lane and the lanes below it."""
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            value += other
    return value
