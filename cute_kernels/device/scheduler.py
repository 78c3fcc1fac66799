"""Which expert owns the n-th tile, found by a warp from ``expert_offsets``."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_kernels.device import ptx

PER_LANE = 8


@cute.jit
def find_tile(offsets, num_experts, tile, tile_rows: cutlass.Constexpr):
    """(found, first row, end): the rows of tile ``tile`` when every expert's rows are cut into
    tiles of ``tile_rows`` and tiles are numbered expert after expert: first row : min(first row +
    tile_rows, end).

    offsets  address of expert_offsets, int32 (num_experts + 1,), read within its bounds
    Every lane of the warp must be here; all get the same answer. A lane looks at 8 experts a step,
    so 256 experts cost one round of loads and one scan.
    """
    lane = cute.arch.lane_idx()
    before = Int32(0)  # tiles of the experts already passed
    base = Int32(0)
    found = Boolean(False)
    row0 = Int32(0)
    end = Int32(0)
    while base < num_experts and not found:
        expert = base + lane * PER_LANE
        edges = [
            ptx.load_i32(offsets + Int64(cutlass.min(expert + j, num_experts)) * 4)
            for j in range(PER_LANE + 1)
        ]  # past the last expert they repeat, which makes empty experts
        tiles = [(edges[j + 1] - edges[j] + (tile_rows - 1)) // tile_rows for j in range(PER_LANE)]
        mine = tiles[0]
        for j in cutlass.range_constexpr(1, PER_LANE):
            mine += tiles[j]
        upto = inclusive_sum(mine, lane)
        start = before + upto - mine
        owners = cute.arch.vote_ballot_sync(tile >= start and tile < start + mine)
        found = owners != 0
        first = Int32(0)
        last = Int32(0)
        for j in cutlass.range_constexpr(PER_LANE):
            if tile >= start and tile < start + tiles[j]:
                first = edges[j] + (tile - start) * tile_rows
                last = edges[j + 1]
            start += tiles[j]
        owner = cutlass.max(31 - Int32(cute.arch.clz(owners)), 0)
        row0 = cute.arch.shuffle_sync(first, owner)
        end = cute.arch.shuffle_sync(last, owner)
        before += cute.arch.shuffle_sync(upto, 31)
        base += 32 * PER_LANE
    return found, row0, end


@cute.jit
def inclusive_sum(value, lane):
    """Sum over this lane and the lanes below it."""
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            value += other
    return value
