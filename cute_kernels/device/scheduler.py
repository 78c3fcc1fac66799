"""Which tile of which expert is the n-th one, found by a warp from ``expert_offsets``."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Uint32

from cute_kernels.device import ptx

PER_LANE = 8


class Tile(NamedTuple):
    """One output tile. ``found`` is False past the last; row0 : end are the rows of the expert from
    this tile on; sf_row0 is row0 counted with every expert padded to 128 rows; items: those before
    the last expert that was looked at, which are all when none is found."""

    found: Any
    expert: Any
    row0: Any
    end: Any
    sf_row0: Any
    n_tile: Any
    items: Any


@cute.jit
def find_tile(offsets, num_experts, item, n_tiles, tile_rows: cutlass.Constexpr):
    """The `Tile` ``item`` when every expert's rows are cut into tiles of ``tile_rows`` and its
    columns into ``n_tiles``. Experts come one after another and, within one expert, row tiles run
    fastest: the CTAs that work at the same time share weights, which stay in the L2.

    offsets  address of expert_offsets, int32 (num_experts + 1,), read within its bounds
    n_tiles  run-time value, or the Python int 1
    Every lane of the warp must be here; all get the same answer. A lane looks at 8 experts a step,
    so 256 experts cost one round of loads and one scan (two, unless ``tile_rows`` is 128).
    """
    lane = cute.arch.lane_idx()
    before = Int32(0)  # row tiles of the experts already passed
    sf_before = Int32(0)  # their rows, padded
    base = Int32(0)
    found = Boolean(False)
    expert, row0, end, sf_row0, n_tile = Int32(0), Int32(0), Int32(0), Int32(0), Int32(0)
    while base < num_experts and not found:
        mine0 = base + lane * PER_LANE
        edges = edges_of(offsets, mine0, num_experts)
        tiles = tiles_of(edges, tile_rows)
        mine = sum_of(tiles)
        upto = inclusive_sum(mine, lane)
        # with tiles of 128 rows the padded rows are those of the tiles
        padded = tiles if cutlass.const_expr(tile_rows == 128) else tiles_of(edges, 128)
        sf_mine = mine if cutlass.const_expr(tile_rows == 128) else sum_of(padded)
        sf_upto = upto if cutlass.const_expr(tile_rows == 128) else inclusive_sum(sf_mine, lane)
        start = (before + upto - mine) * n_tiles  # first item of this lane's experts
        sf_start = sf_before + sf_upto - sf_mine
        here = item >= start and item < start + mine * n_tiles
        owners = cute.arch.vote_ballot_sync(here)
        found = owners != 0
        owner = cutlass.max(31 - Int32(cute.arch.clz(owners)), 0)
        # of the experts that start at or before the item the last one has it, as the lane has it
        chosen, at, first, last, sf_first = mine0, start, edges[0], edges[1], sf_start
        for j in cutlass.range_constexpr(1, PER_LANE):
            start += tiles[j - 1] * n_tiles
            sf_start += padded[j - 1]
            reached = item >= start
            chosen = cutlass.select_(reached, mine0 + j, chosen)
            at = cutlass.select_(reached, start, at)
            first = cutlass.select_(reached, edges[j], first)
            last = cutlass.select_(reached, edges[j + 1], last)
            sf_first = cutlass.select_(reached, sf_start, sf_first)
        m_tile = item - at
        if cutlass.const_expr(not isinstance(n_tiles, int)):
            count = cutlass.max((last - first + (tile_rows - 1)) >> log2(tile_rows), 1)
            column = Int32(Uint32(m_tile) // Uint32(count))  # signed division would round to -inf
            m_tile -= column * count
            n_tile = cute.arch.shuffle_sync(column, owner)
            expert = cute.arch.shuffle_sync(chosen, owner)
            sf_row0 = cute.arch.shuffle_sync(sf_first * 128 + m_tile * tile_rows, owner)
        row0 = cute.arch.shuffle_sync(first + m_tile * tile_rows, owner)
        end = cute.arch.shuffle_sync(last, owner)
        before += cute.arch.shuffle_sync(upto, 31)
        sf_before += cute.arch.shuffle_sync(sf_upto, 31)
        base += 32 * PER_LANE
    return Tile(found, expert, row0, end, sf_row0, n_tile, before * n_tiles)


@cute.jit
def edges_of(offsets, first, num_experts):
    """expert_offsets[first : first + PER_LANE + 1]; past the last expert the last one repeats:
    empty experts."""
    near = cutlass.min(first, num_experts)
    address, left = offsets + Int64(near) * 4, num_experts - near
    return [
        ptx.load_i32(address + Int64(cutlass.min(left, j)) * 4 if j else address)
        for j in range(PER_LANE + 1)
    ]


def log2(rows: int) -> int:
    return rows.bit_length() - 1


def tiles_of(edges: list, rows: int) -> list:
    """Tiles of ``rows``, a power of two, from each edge to the next."""
    return [(b - a + (rows - 1)) >> log2(rows) for a, b in itertools.pairwise(edges)]


def sum_of(values: list) -> Any:
    total = values[0]
    for value in values[1:]:
        total += value
    return total


@cute.jit
def inclusive_sum(value, lane):
    """Sum over this lane and the lanes below it."""
    for step in cutlass.range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            value += other
    return value
