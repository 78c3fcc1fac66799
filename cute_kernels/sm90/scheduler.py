"""Which tile next: units of work in a fixed order, handed out by one atomic counter, found by a
whole warp."""

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from cute_kernels.device.ptx import load_i32


class Tile(NamedTuple):
    """One unit of work. expert < 0: there is none left.

    m       index of the CTA's row tile of the weight
    row0    first routed row; n: real rows of the tile, 0 when there is no tile left
    chunk   index of its chunk of K; steps: of 128 k in it
    """

    expert: Int32
    m: Int32
    row0: Int32
    n: Int32
    chunk: Int32
    steps: Int32


TILE_WORDS = 8  # of a Tile in shared memory


def load_tile(shared: Any, slot: Int32) -> Tile:
    words = cute.arch.inline_ptx(
        "ld.volatile.shared.v4.s32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];"
        " ld.volatile.shared.v2.s32 {{$w4}, {$w5}}, [{$r0} + 16];",
        write_only_types=[Int32] * 6,
        read_only_args=[Int32(shared.tiles.iterator.toint()) + slot * (4 * TILE_WORDS)],
    )
    return Tile(*[cute.arch.make_warp_uniform(w) for w in words])


@dataclasses.dataclass(frozen=True)
class TokenSplit:
    """Rows of one expert are cut into ceil(rows / max_tokens) tiles of equal size, rounded up to
    token_step: random routing pads by at most token_step - 1 rows per expert."""

    max_tokens: int
    token_step: int

    @cute.jit
    def find(
        self,
        offsets: Int64,
        num_experts: Int32,
        row_tiles: Int32,
        chunks: Int32,
        unit: Int32,
        base: tuple[Int32, Int32],
    ) -> Any:
        """Tile number ``unit`` and where to look next: (Tile, base). All 32 lanes together; units
        must ascend.

        offsets  address of expert_offsets int32 (E + 1,)
        base     (expert, unit): first expert of the current 32 and the number of its first unit
        Order: expert, row tile, token tile, chunk of K; the last runs fastest.
        """
        lane = cute.arch.lane_idx()
        first, before = base
        expert, m, row0, n, chunk = Int32(-1), Int32(0), Int32(0), Int32(0), Int32(0)
        while first < num_experts and expert < 0:
            begin, count = Int32(0), Int32(0)
            if first + lane < num_experts:
                at = offsets + Int64(first + lane) * 4
                begin = load_i32(at)
                count = load_i32(at + 4) - begin
            tiles = (count + (self.max_tokens - 1)) // self.max_tokens
            units = tiles * row_tiles * chunks
            total = units
            for shift in cutlass.range_constexpr(5):
                up = cute.arch.shuffle_sync_up(total, 1 << shift, mask_and_clamp=0)
                if lane >= (1 << shift):
                    total += up
            last = cute.arch.shuffle_sync(total, 31)
            local = unit - before
            if local < last:
                hit = cute.arch.vote_ballot_sync(total > local)
                source = cute.arch.popc((hit & -hit) - 1)
                local -= cute.arch.shuffle_sync(total - units, source)
                begin = cute.arch.shuffle_sync(begin, source)
                count = cute.arch.shuffle_sync(count, source)
                tiles = cute.arch.shuffle_sync(tiles, source)
                expert = first + source
                chunk = local % chunks
                local = local // chunks
                m = local // tiles
                size = (count + tiles - 1) // tiles
                size = (size + (self.token_step - 1)) // self.token_step * self.token_step
                skip = (local % tiles) * size
                row0 = begin + skip
                n = cutlass.min(size, count - skip)
            else:
                first += 32
                before += last
        return Tile(expert, m, row0, n, chunk, Int32(0)), (first, before)
