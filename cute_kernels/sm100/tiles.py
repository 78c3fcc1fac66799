"""Work items of a grouped GEMM, found by a warp from ``expert_offsets``."""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from cute_kernels.device import ptx
from cute_kernels.device.scheduler import inclusive_sum


class Work(NamedTuple):
    """One output tile. ``found`` is False past the last; row0 : end are the rows of the expert from
    this tile on; sf_row0 is row0 counted with every expert padded to 128 rows."""

    found: Any
    expert: Any
    row0: Any
    end: Any
    sf_row0: Any
    n_tile: Any


@cute.jit
def find_work(offsets, num_experts, item, n_tiles, tile_rows: cutlass.Constexpr):
    """The ``item``-th tile when experts come one after another and, within one expert, row tiles
    run fastest: the CTAs that work at the same time share weights, which stay in the L2.

    offsets  address of expert_offsets, int32 (num_experts + 1,). 32 experts a step; every lane of
             the
    warp must be here and all get the same answer.
    """
    lane = cute.arch.lane_idx()
    before = Int32(0)  # tiles of the experts already passed
    sf_before = Int32(0)  # their rows, padded
    base = Int32(0)
    found = Boolean(False)
    expert = Int32(0)
    row0 = Int32(0)
    end = Int32(0)
    sf_row0 = Int32(0)
    n_tile = Int32(0)
    while base < num_experts and not found:
        mine = cutlass.min(base + lane, num_experts - 1)
        first = ptx.load_i32(offsets + Int64(mine) * 4)
        last = ptx.load_i32(offsets + Int64(mine) * 4 + 4)
        rows = last - first
        if base + lane >= num_experts:
            rows = Int32(0)
        row_tiles = (rows + (tile_rows - 1)) // tile_rows
        padded = (rows + 127) // 128 * 128
        upto = inclusive_sum(row_tiles * n_tiles, lane)
        sf_upto = inclusive_sum(padded, lane)
        start = before + upto - row_tiles * n_tiles
        owners = cute.arch.vote_ballot_sync(item >= start and item < before + upto)
        found = owners != 0
        owner = Int32(31 - cute.arch.clz(owners))
        if not found:
            owner = Int32(0)
        inside = item - start
        tiles = cutlass.max(row_tiles, 1)
        m_tile = inside % tiles
        expert = base + owner
        row0 = cute.arch.shuffle_sync(first + m_tile * tile_rows, owner)
        end = cute.arch.shuffle_sync(last, owner)
        sf_row0 = cute.arch.shuffle_sync(sf_before + sf_upto - padded + m_tile * tile_rows, owner)
        n_tile = cute.arch.shuffle_sync(inside // tiles, owner)
        before = before + cute.arch.shuffle_sync(upto, 31)
        sf_before = sf_before + cute.arch.shuffle_sync(sf_upto, 31)
        base = base + 32
    return Work(found, expert, row0, end, sf_row0, n_tile)
