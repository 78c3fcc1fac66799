"""Where the operands come from. A load is a frozen dataclass (its repr is part of the kernel's
key).

    make_atoms(gemm, side, args, shape, stage)  host side of the trace: ((TMA atom, view) of the
                                                codes, the same of the scales)
    copy_fn(gemm, side, what, smem, args, tile) device: (copy of codes, copy of scales), both called
                                                with (k_tile, stage, barrier); the first by every
                                                load warp, the second by one

Codes that are gathered, and the few rows of a decode tile, arrive in boxes of rows: the image of
an operand in shared memory is 128-byte rows under one swizzle, so that any 8 rows are contiguous.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.compile import Ptr
from cute_kernels.config import DECODE_STEP
from cute_kernels.device import ptx

GATHER_WARPS = 4


class WeightArgs(NamedTuple):
    """Codes (E, N, K/2) and scales SWIZZLE_32_4_4 per expert."""

    data: Any
    scale: Any


@dataclasses.dataclass(frozen=True)
class WeightTiles:
    """Weights (E, N, K), one map for all experts."""

    warps = 1

    def make_atoms(self, gemm, side, args, shape, stage) -> tuple:
        n, k, _ = shape
        # codes of an expert: n * k, which is over 2^31 for all experts of a large layer
        pitch = cute.assume(Int64(n) * Int64(k), 512)
        tensor = cute.make_tensor(args.data, cute.make_layout(shape, stride=(k, 1, pitch)))
        return side.code_atom(gemm, tensor, stage), side.scale_atom(gemm, args.scale, shape, stage)

    def copy_fn(self, gemm, side, what, smem, args, tile) -> tuple:
        codes, scales = what
        return (
            side.code_copy(gemm, *codes, smem[side.index], tile.weights),
            side.scale_copy(gemm, *scales, smem[2 + side.index], tile.weights),
        )


class RowArgs(NamedTuple):
    """Codes (rows, K/2) and SWIZZLE_32_4_4_GROUPED scales of scale_rows x K/16."""

    data: Any
    scale: Any
    rows: Any
    scale_rows: Any


@dataclasses.dataclass(frozen=True)
class ContiguousRows:
    """Expert-major rows (R, K/2), loaded as tiles; a decode tile in boxes, as many as it needs."""

    warps = 1
    name = "rows"

    @property
    def arguments(self) -> RowArgs:
        return RowArgs(Ptr("Float4E2M1FN"), Ptr("Float8E4M3FN"), "i32", "i32")

    def device_args(self, args: RowArgs) -> None:
        return None

    def make_atoms(self, gemm, side, args, shape, stage) -> tuple:
        k = shape[1]
        scales = side.scale_atom(gemm, args.scale, (args.scale_rows, k, 1), stage)
        if gemm.config.decode:
            mA = cute.make_tensor(args.data, cute.make_layout((args.rows, k), stride=(k, 1)))
            layout = box_image(gemm, side, stage, DECODE_STEP)
            box = (DECODE_STEP, gemm.tiler[2])
            op = side.load_op(gemm, 1)
            return cpasync.make_tiled_tma_atom(op, mA, layout, box), scales
        mA = cute.make_tensor(args.data, cute.make_layout((args.rows, k, 1), stride=(k, 1, 0)))
        return side.code_atom(gemm, mA, stage), scales

    def copy_fn(self, gemm, side, what, smem, args, tile) -> tuple:
        codes, scales = what
        copy_scales = side.scale_copy(gemm, *scales, smem[2 + side.index], tile.rows)
        if gemm.config.decode:
            return self.box_copy(gemm, side, codes, smem[side.index], tile), copy_scales
        return side.code_copy(gemm, *codes, smem[side.index], tile.rows), copy_scales

    def box_copy(self, gemm, side, codes, s, tile) -> Any:
        """Boxes of DECODE_STEP rows up to the last row of the tile."""
        atom, tensor = codes
        moved = cute.domain_offset((tile.rows.row, 0), tensor)
        gA = cute.local_tile(moved, (DECODE_STEP, gemm.tiler[2]), (None, None))
        sA = cute.make_tensor(s.iterator, box_layout(gemm, side, DECODE_STEP, whole=True))
        # (TMA, BOX, STAGE), (TMA, REST_ROWS, REST_K)
        sA, gA = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sA, 0, 2), cute.group_modes(gA, 0, 2)
        )

        def copy(k_tile, stage, barrier):
            copy_boxes(atom, gA[(None, None, k_tile)], sA[(None, None, stage)], barrier, tile.boxes)

        return copy


@cute.jit
def copy_boxes(atom, source, destination, barrier, boxes):
    for b in cutlass.range(boxes, unroll=1):
        cute.copy(atom, source[(None, b)], destination[(None, b)], tma_bar_ptr=barrier)


class GatherArgs(NamedTuple):
    """Codes (tokens, K/2), row_token int32 (rows,), grouped scales of scale_rows x K/16."""

    data: Any
    scale: Any
    row_token: Any
    tokens: Any
    rows: Any
    scale_rows: Any


@dataclasses.dataclass(frozen=True)
class GatheredRows:
    """Row r is token row_token[r], fetched by TMA gather4; a negative index loads zeros.

    Four load warps; the indices of a warp's rows stay in its registers for a whole tile. Pairs that
    work on the same rows gather a part each and multicast it. Scales are per routed row.
    """

    warps = GATHER_WARPS
    name = "gather"

    @property
    def arguments(self) -> GatherArgs:
        fp4, fp8 = Ptr("Float4E2M1FN"), Ptr("Float8E4M3FN")
        return GatherArgs(fp4, fp8, Ptr("Int32", 4), "i32", "i32", "i32")

    def device_args(self, args: GatherArgs) -> tuple:
        return args.row_token, args.rows

    def warp_rows(self, gemm, side) -> int:
        return side.cta_rows(gemm) // GATHER_WARPS

    def box(self, gemm, side) -> int:
        """Rows that one warp of one CTA gathers."""
        return self.warp_rows(gemm, side) // gemm.config.columns

    def make_atoms(self, gemm, side, args, shape, stage) -> tuple:
        k = shape[1]
        mX = cute.make_tensor(args.data, cute.make_layout((args.tokens, k), stride=(k, 1)))
        index = cute.make_layout((args.rows, k), stride=(1, 0))
        mI = cute.make_tensor(args.row_token, index)
        if gemm.config.columns > 1:
            op = cpasync.CopyBulkTensor2DGather4G2SMulticastOp(gemm.cta_group)
        else:
            op = cpasync.CopyBulkTensor2DGather4G2SOp(gemm.cta_group)
        box = self.box(gemm, side)
        layout = box_image(gemm, side, stage, box)
        codes = cpasync.make_tiled_tma_atom(
            op, mX, layout, (box, gemm.tiler[2]), gmem_coord_tensor=mI
        )
        return codes, side.scale_atom(gemm, args.scale, (args.scale_rows, k, 1), stage)

    def copy_fn(self, gemm, side, what, smem, args, tile) -> tuple:
        (atom, tensor), scales = what
        c, box, tile_k = gemm.config, self.box(gemm, side), gemm.tiler[2]
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - gemm.first_load_warp
        # of the rows of this CTA: those of this warp, and of these the part of this column
        part = warp * self.warp_rows(gemm, side) + rank // (c.ctas * c.pairs) * box
        first = tile.rows.row + rank % c.ctas * side.cta_rows(gemm) + part
        rI = load_indices(args, first, box)
        k_tiles = cute.size(tensor, mode=[1]) // tile_k
        layout = cute.make_layout((box, tile_k, k_tiles), stride=(1, 0, 0))
        index = cute.make_tensor(rI.iterator, layout)
        gX = cute.local_tile(tensor, (box, tile_k), (0, None))
        start = cute.assume(part * tile_k, box * tile_k)
        sA = cute.make_tensor(smem[side.index].iterator + start, box_layout(gemm, side, box))
        sA, gX, gI = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(sA, 0, 2),
            [cute.group_modes(gX, 0, 2), cute.group_modes(index, 0, 2)],
        )
        mask = gemm.column_mask(rank) if c.columns > 1 else None

        def copy(k_tile, stage, barrier):
            source = [gX[(None, k_tile)], gI[(None, k_tile)]]
            if c.decode:
                copy_if(warp < tile.boxes, atom, source, sA[(None, stage)], barrier)
            else:
                cute.copy(atom, source, sA[(None, stage)], tma_bar_ptr=barrier, mcast_mask=mask)

        return copy, side.scale_copy(gemm, *scales, smem[2 + side.index], tile.rows)


def load_indices(args: tuple, first: Any, count: int) -> cute.Tensor:
    """row_token[first : first + count] in registers."""
    row_token, rows = args
    rI = cute.make_rmem_tensor(count, Int32)
    for i in range(count):
        at = cutlass.min(first + i, rows - 1)  # rows past the last are loaded, never stored
        rI[i] = ptx.load_i32(row_token.toint() + Int64(at) * 4)
    return rI


@cute.jit
def copy_if(wanted, atom, source, destination, barrier):
    if wanted:
        cute.copy(atom, source, destination, tma_bar_ptr=barrier)


def box_layout(gemm, side, box: int, whole: bool = False) -> cute.Layout:
    """A box in the MMA's image of its operand, before the swizzle: (box, (64, K/64), STAGE), or
    with ``whole`` all boxes of a stage: (box, (64, K/64), BOX, STAGE). Strides in codes."""
    tile_k, rows, stages = gemm.tiler[2], side.cta_rows(gemm), gemm.config.stages
    shape: tuple = (box, (64, tile_k // 64))
    stride: tuple = (tile_k, (1, 64))
    if whole:
        shape, stride = (*shape, rows // box), (*stride, box * tile_k)
    return cute.make_layout((*shape, stages), stride=(*stride, rows * tile_k))


def box_image(gemm, side, stage, box: int) -> cute.ComposedLayout:
    """Swizzled image of one box of one stage: (box, (64, K/64))."""
    one = cute.slice_(box_layout(gemm, side, box), (None, None, 0))
    return cute.make_composed_layout(stage[side.index].inner, 0, one)
