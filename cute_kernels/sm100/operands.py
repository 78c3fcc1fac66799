"""The two sides of the MMA: how tiles of a (rows, K) tensor come into shared memory.

Either side may hold the routed rows, the other one holds the weights (`cute_kernels.sm100.plans`).
"Offset the domain, take tile 0" is the one pattern: a tile may begin at any row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass.cute.nvgpu import cpasync

SF_VEC = 16


class Corner(NamedTuple):
    """First row of a tile, the same counted as its scales count rows, and the expert coordinate."""

    row: Any
    sf_row: Any
    expert: Any


@dataclasses.dataclass(frozen=True)
class Side:
    """index 0: M (operands A and SFA), 1: N (B and SFB).

    Codes of the M side are split over the CTAs of a pair by rows, like their scales. Those of the N
    side are split too, but every CTA needs all of their scales. Clusters of several pairs share one
    side: the other pairs work on other rows (`pairs`, N is shared) or columns (`columns`, M is).
    """

    index: int

    def rows(self, gemm: Any) -> int:
        """Rows of an MMA tile."""
        return gemm.tiler[self.index]

    def cta_rows(self, gemm: Any) -> int:
        """Rows of an MMA tile in the shared memory of one CTA."""
        return self.rows(gemm) // gemm.config.ctas

    def _partition(self, gemm: Any, scales: bool) -> tuple:
        """The MMA and cluster layout that partition the tensor, and its rows per tile."""
        mma, scales_mma = gemm.tiled_mmas()
        vmnk, sfb_vmnk = gemm.cluster_layouts(mma, scales_mma)
        if scales and self.index == 1:
            return scales_mma, sfb_vmnk, gemm.config.sfb_rows
        return mma, vmnk, self.rows(gemm)

    def _peers(self, vmnk: cute.Layout) -> tuple:
        """Layout of the CTAs that share a tile, and the mode of vmnk they differ in."""
        pick, mode = ((0, 0, None, 0), 2) if self.index == 0 else ((0, None, 0, 0), 1)
        return cute.make_layout(cute.slice_(vmnk, pick).shape), mode

    def load_op(self, gemm: Any, shared: int) -> Any:
        """TMA load, multicast when ``shared`` CTAs load a tile together."""
        if shared > 1:
            return cpasync.CopyBulkTensorTileG2SMulticastOp(gemm.cta_group)
        return cpasync.CopyBulkTensorTileG2SOp(gemm.cta_group)

    def code_atom(self, gemm: Any, tensor: cute.Tensor, stage: Any) -> tuple:
        """(TMA atom, its view) of codes (rows, K, E); ``stage``: layouts of A, B, SFA, SFB."""
        return self._atom(gemm, tensor, stage[self.index], False)

    def scale_atom(self, gemm: Any, scale: Any, shape: tuple, stage: Any) -> tuple:
        """(TMA atom, its view) of the scales of a (rows, K, E) tensor, rows in tiles of 128."""
        tensor = cute.make_tensor(scale, blockscaled.tile_atom_to_shape_SF(shape, SF_VEC))
        return self._atom(gemm, tensor, stage[2 + self.index], True, internal_type=cutlass.Int16)

    def _atom(self, gemm: Any, tensor: Any, layout: Any, scales: bool, **kwargs: Any) -> tuple:
        mma, vmnk, rows = self._partition(gemm, scales)
        m, n, k = gemm.tiler
        tiler = (rows, n, k) if self.index == 0 else (128 if scales else m, rows, k)
        make = (cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B)[self.index]
        op = self.load_op(gemm, cute.size(self._peers(vmnk)[0]))
        return make(op, tensor, layout, tiler, mma, vmnk.shape, **kwargs)

    def code_copy(self, gemm: Any, atom: Any, tensor: Any, s: Any, corner: Corner) -> Any:
        """copy(k_tile, stage, barrier) of this CTA's codes."""
        return self._copy(gemm, (atom, tensor, s), corner.row, corner.expert, False)

    def scale_copy(self, gemm: Any, atom: Any, tensor: Any, s: Any, corner: Corner) -> Any:
        """copy(k_tile, stage, barrier) of the scales: whole tiles of 128 rows."""
        first = corner.sf_row // 128 * 128
        return self._copy(gemm, (atom, tensor, s), first, corner.expert, True)

    def _copy(self, gemm: Any, what: tuple, row: Any, expert: Any, scales: bool) -> Any:
        atom, tensor, s = what
        mma, vmnk, rows = self._partition(gemm, scales)
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        coord = vmnk.get_flat_coord(rank)
        moved = cute.domain_offset((row, 0, expert), tensor)
        tile = cute.local_tile(moved, (rows, gemm.tiler[2]), (0, None, 0))
        part = mma.get_slice(coord[0])
        # (MMA, MMA_MN, MMA_K, REST_K)
        g = part.partition_A(tile) if self.index == 0 else part.partition_B(tile)
        peers, mode = self._peers(vmnk)
        s, g = cpasync.tma_partition(
            atom, coord[mode], peers, cute.group_modes(s, 0, 3), cute.group_modes(g, 0, 3)
        )  # (TMA, STAGE), (TMA, REST_K)
        if scales:
            s, g = cute.filter_zeros(s), cute.filter_zeros(g)
        mask = None
        if cute.size(peers) > 1:
            mask = cpasync.create_tma_multicast_mask(vmnk, coord, mcast_mode=mode)

        def copy(k_tile, stage, barrier):
            cute.copy(
                atom,
                g[(None, k_tile)],
                s[(None, stage)],
                tma_bar_ptr=barrier,
                mcast_mask=mask,
            )

        return copy


M_SIDE, N_SIDE = Side(0), Side(1)
