"""Where the rows of A come from. A load is a frozen dataclass (its repr is part of the kernel's
key).

    make_atoms(gemm, args, k, stage_layouts, mma, vmnk)   host side of the trace: TMA atoms of A and
                                                          SFA
    copy_fn(...) -> copy of A, copy of SFA                device: both (k_tile, stage, barrier); the
                                                          first is called by every load warp, the
                                                          second by one
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import cpasync

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx


class RowArgs(NamedTuple):
    """Codes (rows, K/2) and SWIZZLE_32_4_4_GROUPED scales of scale_rows x K/16."""

    data: Any
    scale: Any
    rows: Any
    scale_rows: Any


@dataclasses.dataclass(frozen=True)
class ContiguousRows:
    """Expert-major rows (R, K/2), loaded as tiles."""

    warps = 1
    name = "rows"

    @property
    def arguments(self) -> RowArgs:
        return RowArgs(Ptr("Float4E2M1FN"), Ptr("Float8E4M3FN"), "i32", "i32")

    def device_args(self, args: RowArgs) -> None:
        return None

    def make_atoms(self, gemm, args, k, stage, mma, vmnk) -> tuple:
        mA = cute.make_tensor(args.data, cute.make_layout((args.rows, k, 1), stride=(k, 1, 0)))
        op = cpasync.CopyBulkTensorTileG2SOp(gemm.cta_group)
        a = cute.nvgpu.make_tiled_tma_atom_A(op, mA, stage[0], gemm.tiler, mma, vmnk.shape)
        return a, scale_atom(gemm, args, k, stage[2], mma, vmnk)

    def copy_fn(self, gemm, atoms, tensors, operands, args, row0, sf_row0):
        """Rows row0 : row0 + 128 * ctas of A and their scales, for this CTA of the pair."""
        sA, gA = tile_views(gemm, atoms[0], tensors[0], row0, operands[0])

        def copy(k_tile, stage, barrier):
            cute.copy(atoms[0], gA[(None, k_tile)], sA[(None, stage)], tma_bar_ptr=barrier)

        return copy, scale_copy_fn(gemm, atoms[1], tensors[1], operands[2], sf_row0)


class GatherArgs(NamedTuple):
    """Codes (tokens, K/2), row_token int32 (rows,), grouped scales of scale_rows x K/16."""

    data: Any
    scale: Any
    row_token: Any
    tokens: Any
    rows: Any
    scale_rows: Any


GATHER_ROWS = 32  # rows of one load warp; their indices stay in its registers for a whole tile


@dataclasses.dataclass(frozen=True)
class GatheredRows:
    """Row r of A is token row_token[r], fetched by TMA gather4; a negative index loads zeros.

    Four load warps of 32 rows each: eight gathers a warp and K tile. Scales are per routed row.
    """

    warps = 4
    name = "gather"

    @property
    def arguments(self) -> GatherArgs:
        fp4, fp8 = Ptr("Float4E2M1FN"), Ptr("Float8E4M3FN")
        return GatherArgs(fp4, fp8, Ptr("Int32", 4), "i32", "i32", "i32")

    def device_args(self, args: GatherArgs) -> tuple:
        return args.row_token, args.rows

    def make_atoms(self, gemm, args, k, stage, mma, vmnk) -> tuple:
        mX = cute.make_tensor(args.data, cute.make_layout((args.tokens, k), stride=(k, 1)))
        index = cute.make_layout((args.rows, k), stride=(1, 0))
        mI = cute.make_tensor(args.row_token, index)
        tile_k = gemm.config.tile_k
        op = cpasync.CopyBulkTensor2DGather4G2SOp(gemm.cta_group)
        layout = cute.make_composed_layout(stage[0].inner, 0, self.smem_layout(gemm))
        a = cpasync.make_tiled_tma_atom(op, mX, layout, (GATHER_ROWS, tile_k), gmem_coord_tensor=mI)
        return a, scale_atom(gemm, args, k, stage[2], mma, vmnk)

    def smem_layout(self, gemm, stages: int = 0):
        """The MMA's image of A, 32 rows of it, before its swizzle: (32, (64, K/64)[, STAGE])."""
        tile_k = gemm.config.tile_k
        shape, stride = (GATHER_ROWS, (64, tile_k // 64)), (tile_k, (1, 64))
        if stages:
            shape, stride = (*shape, stages), (*stride, 128 * tile_k)
        return cute.make_layout(shape, stride=stride)

    def copy_fn(self, gemm, atoms, tensors, operands, args, row0, sf_row0):
        row_token, rows = args
        tile_k = gemm.config.tile_k
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - gemm.first_load_warp
        first = row0 + (rank % gemm.config.ctas) * 128 + warp * GATHER_ROWS
        rI = cute.make_rmem_tensor(GATHER_ROWS, Int32)
        for i in range(GATHER_ROWS):
            at = cutlass.min(first + i, rows - 1)  # rows past the last are loaded, never stored
            rI[i] = ptx.load_i32(row_token.toint() + Int64(at) * 4)
        k_tiles = cute.size(tensors[0], mode=[1]) // tile_k
        index = cute.make_tensor(
            rI.iterator, cute.make_layout((GATHER_ROWS, tile_k, k_tiles), stride=(1, 0, 0))
        )
        gX = cute.local_tile(tensors[0], (GATHER_ROWS, tile_k), (0, None))
        part = GATHER_ROWS * tile_k  # codes of this warp's rows
        sA = cute.make_tensor(
            operands[0].iterator + cute.assume(warp * part, part),
            self.smem_layout(gemm, gemm.config.stages),
        )
        sA, gX, gI = cpasync.tma_partition(
            atoms[0],
            0,
            cute.make_layout(1),
            cute.group_modes(sA, 0, 2),
            [cute.group_modes(gX, 0, 2), cute.group_modes(index, 0, 2)],
        )

        def copy(k_tile, stage, barrier):
            source = [gX[(None, k_tile)], gI[(None, k_tile)]]
            cute.copy(atoms[0], source, sA[(None, stage)], tma_bar_ptr=barrier)

        return copy, scale_copy_fn(gemm, atoms[1], tensors[1], operands[2], sf_row0)


def scale_atom(gemm, args, k, stage_layout, mma, vmnk) -> Any:
    """TMA atom of the rows' scales, each expert's rows starting at a multiple of 128."""
    layout = blockscaled.tile_atom_to_shape_SF((args.scale_rows, k, 1), 16)
    mSFA = cute.make_tensor(args.scale, layout)
    op = cpasync.CopyBulkTensorTileG2SOp(gemm.cta_group)
    make = cute.nvgpu.make_tiled_tma_atom_A
    return make(op, mSFA, stage_layout, gemm.tiler, mma, vmnk.shape, internal_type=cutlass.Int16)


def tile_views(gemm, atom, tensor, start, s) -> tuple:
    """(TMA, STAGE) of shared memory and (TMA, REST_K) of the tile whose first row is ``start``."""
    mma, _ = gemm._tiled_mmas()
    rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    part = mma.get_slice(rank % gemm.config.ctas)
    moved = cute.domain_offset((start, 0, 0), tensor)
    tile = cute.local_tile(moved, (gemm.tiler[0], gemm.tiler[2]), (0, None, 0))
    g = part.partition_A(tile)  # (MMA, MMA_M, MMA_K, REST_K)
    one = cute.make_layout(1)
    return cpasync.tma_partition(atom, 0, one, cute.group_modes(s, 0, 3), cute.group_modes(g, 0, 3))


def scale_copy_fn(gemm, atom, tensor, s, sf_row0) -> Any:
    """copy(k_tile, stage, barrier) of the rows' scales; sf_row0 counts padded rows."""
    s, g = tile_views(gemm, atom, tensor, sf_row0, s)
    s, g = cute.filter_zeros(s), cute.filter_zeros(g)

    def copy(k_tile, stage, barrier):
        cute.copy(atom, g[(None, k_tile)], s[(None, stage)], tma_bar_ptr=barrier)

    return copy
