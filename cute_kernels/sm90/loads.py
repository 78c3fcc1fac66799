"""Where routed rows come from. A load is a frozen dataclass (its repr is part of the kernel's key).

sizes(config)                       token sizes for which the weights' warp has loops of their own
make_tma(gemm, args)                host side of the trace: (atom, tensor) of each size
stage_bytes(config, size)           bytes of rows that the weights' warp expects in a stage
copy_fn(gemm, size, tma, shared, tile)
    -> copy(k64, stage, barrier)    device: called by the weights' warp
run(gemm, args, geometry, shared)   device: the other ``warps`` load warps
arrivals                            on ab_full, besides that of the weights' warp
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.compile import Ptr
from cute_kernels.sm90 import layout
from cute_kernels.sm90.scheduler import load_tile

ROW_BYTES = 2 * layout.BLOCK_K  # of a routed row in one k64: eight 16-byte chunks
CHUNKS = ROW_BYTES // 16


@dataclasses.dataclass(frozen=True)
class ContiguousRows:
    """Expert-major rows x (R, K) by TMA. Every token size has a box of its own, so that the rows of
    64 k are one instruction: a loop over boxes of 16 rows kept the warp that issues them busy
    most of the time (README.md, version 29)."""

    warps = 0
    arrivals = 0
    name = ""

    @property
    def row_token(self) -> None:
        return None

    def sizes(self, config: Any) -> tuple[int, ...]:
        return config.token_sizes

    def make_tma(self, gemm: Any, args: Any) -> list[tuple[Any, Any]]:
        k = cute.assume(args.k, divby=8)
        mX = cute.make_tensor(args.x, cute.make_layout((args.num_rows, k), stride=(k, 1)))
        op = cpasync.CopyBulkTensorTileG2SOp()
        return [
            cpasync.make_tiled_tma_atom(op, mX, gemm.rows_layout(n), (n, layout.BLOCK_K))
            for n in self.sizes(gemm.config)
        ]

    def stage_bytes(self, config: Any, size: int) -> int:
        """A box counts in full, rows and k past the end of x included (zeros)."""
        return size * ROW_BYTES * config.stage_k64

    def copy_fn(self, gemm: Any, size: int, tma: Any, shared: Any, tile: Any) -> Any:
        c = gemm.config
        atom, tX = tma
        box = (size, layout.BLOCK_K)
        gX = cute.local_tile(cute.domain_offset((tile.row0, 0), tX), box, (0, None))
        sX, gX = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(gemm.slabs(shared, size), 0, 2),
            cute.group_modes(gX, 0, 2),
        )

        def copy(k64: Int32, stage: Int32, barrier: Any):
            for s in range(c.stage_k64):
                slab = sX[None, stage * c.stage_k64 + s]
                cute.copy(atom, gX[None, k64 + s], slab, tma_bar_ptr=barrier)

        return copy

    def run(self, gemm: Any, args: Any, geometry: Any, shared: Any) -> None:
        pass


GATHER_WARPS = 3
GATHER_THREADS = 32 * GATHER_WARPS
GATHER_ROWS = GATHER_THREADS // CHUNKS  # rows of one pass of the load warps: 12


@dataclasses.dataclass(frozen=True)
class GatheredRows:
    """Routed row r is x[row_token[r]] of x (tokens, K): 16-byte cp.async by three more warps.

    Thread t copies chunk t % 8 of rows t / 8, t / 8 + 12, ... of the tile; their tokens stay in
    registers for a whole tile. Chunk c of row r lies at chunk c ^ (r % 8) of its 128 bytes, where
    TMA would have put it. Chunks past K are filled with zeros: the codes there are zero, which
    does not cancel a NaN. Every thread arrives on ab_full when its copies have landed; they are
    writes of the generic proxy, so the consumers put a proxy fence between that barrier and their
    wgmma.
    """

    warps = GATHER_WARPS
    arrivals = GATHER_THREADS
    name = "gather_"

    @property
    def row_token(self) -> Ptr:
        return Ptr("Int32", 4)

    def sizes(self, config: Any) -> tuple[int, ...]:
        return (config.max_tokens,)  # weights alone: one loop serves all

    def make_tma(self, gemm: Any, args: Any) -> list[None]:
        return [None]

    def stage_bytes(self, config: Any, size: int) -> int:
        return 0

    def copy_fn(self, gemm: Any, size: int, tma: Any, shared: Any, tile: Any) -> Any:
        def copy(k64: Int32, stage: Int32, barrier: Any):
            pass

        return copy

    @cute.jit
    def run(self, gemm: Any, args: Any, geometry: Any, shared: Any):
        c = gemm.config
        passes = -(-c.max_tokens // GATHER_ROWS)
        thread = cute.arch.thread_idx()[0] % 128 - 32
        row, chunk = thread // CHUNKS, thread % CHUNKS
        rows = Int32(shared.rows.iterator.toint())
        # 12 rows further on, r % 8 has its bit 2 flipped
        swizzled = [row * ROW_BYTES + (chunk ^ row % 8 ^ flip) * 16 for flip in (0, 4)]
        stage, phase, slot, slot_phase = Int32(0), Int32(1), Int32(0), Int32(0)
        more = cutlass.Boolean(True)
        while more:
            cute.arch.mbarrier_wait(shared.tile_full + slot, slot_phase)
            tile = load_tile(shared, slot)
            cute.arch.sync_warp()
            if cute.arch.lane_idx() == 0:
                cute.arch.mbarrier_arrive(shared.tile_empty + slot)
            slot += 1
            if slot == gemm.tile_slots:
                slot = Int32(0)
                slot_phase ^= 1
            more = tile.n > 0
            if more:
                tokens = []
                for i in cutlass.range_constexpr(passes):
                    if cutlass.const_expr(i % 4 == 0):
                        cute.arch.sync_warp()  # else ptxas wants all the addresses at once: spills
                    at = tile.row0 + cutlass.min(row + i * GATHER_ROWS, tile.n - 1)
                    tokens.append(load_at(args.row_token.toint(), at))
                first = gemm.first_step(args, tile.chunk) * 2
                for k64 in cutlass.range(first, first + tile.steps * 2, c.stage_k64, unroll=1):
                    cute.arch.mbarrier_wait(shared.ab_empty + stage, phase)
                    for s in cutlass.range_constexpr(c.stage_k64):
                        k = (k64 + s) * layout.BLOCK_K + chunk * 8
                        slab = rows + (stage * c.stage_k64 + s) * (c.max_tokens * ROW_BYTES)
                        # a chunk past K: no bytes of the source are read
                        size = cutlass.select_(k < args.k, Int32(16), Int32(0))
                        k = cutlass.select_(k < args.k, k, Int32(0))
                        source = args.x.toint() + Int64(k) * 2
                        for i in cutlass.range_constexpr(passes):
                            if row + i * GATHER_ROWS < tile.n:
                                copy_async(
                                    slab + swizzled[i % 2] + i * (GATHER_ROWS * ROW_BYTES),
                                    source,
                                    tokens[i],
                                    args.k * 2,
                                    size,
                                )
                    cute.arch.cp_async_mbarrier_arrive_noinc(shared.ab_full + stage)
                    stage += 1
                    if stage == c.num_stages:
                        stage = Int32(0)
                        phase ^= 1


def load_at(base: Int64, index: Int32) -> Int32:
    """int32 number ``index`` at ``base``; its address lives no longer than this."""
    return cute.arch.inline_ptx(
        "{ .reg .b64 at; mad.wide.s32 at, {$r1}, 4, {$r0}; ld.global.s32 {$w0}, [at]; }",
        write_only_types=[Int32],
        read_only_args=[base, index],
    )


def copy_async(destination: Int32, base: Int64, row: Int32, pitch: Int32, size: Int32) -> None:
    """16 bytes of shared memory: ``size`` bytes (16 or 0) at base + row * pitch, then zeros.

    The product is made here each time: those of all rows, kept as 64 bits, would not fit the
    registers of a load warp.
    """
    cute.arch.inline_ptx(
        "{ .reg .b64 at; mad.wide.s32 at, {$r2}, {$r3}, {$r1};"
        " cp.async.cg.shared.global [{$r0}], [at], 16, {$r4}; }",
        read_only_args=[destination, base, row, pitch, size],
    )
