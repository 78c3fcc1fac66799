"""Sizes of a grouped GEMM and the tile configuration that runs it. Plain Python: no torch, no
DSL.
"""

from __future__ import annotations

import dataclasses

SMEM_PER_CTA = 232448  # bytes a CTA may have on SM100 (227 KB)
TMEM_COLUMNS = 512


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tiles of the SM100 grouped GEMM.

    ctas      1: M = 128 per MMA, one CTA; 2: M = 256 over a pair (cta_group::2)
    tile_n    64, 128 or 256 columns of an output tile
    pairs     MMA tiles of one expert side by side in a cluster; they share B by multicast
    tile_k    256: 128 bytes of codes, one 128-byte swizzle span

    Raises ValueError for a combination whose shared memory or TMEM does not fit.
    """

    ctas: int = 1
    tile_n: int = 128
    pairs: int = 1
    tile_k: int = 256

    def __post_init__(self) -> None:
        if self.ctas not in (1, 2) or self.pairs not in (1, 2, 4):
            raise ValueError(
                f"ctas must be 1 or 2 and pairs 1, 2 or 4, got {self.ctas}, {self.pairs}"
            )
        if self.tile_n not in (64, 128, 256) or (self.ctas == 2 and self.tile_n == 64):
            raise ValueError(
                f"tile_n must be 64 (one CTA only), 128 or 256, got {self.tile_n} with {self.ctas} "
                "CTAs"
            )
        if self.stages < 4:
            raise ValueError(f"only {self.stages} stages fit into shared memory, 4 are needed")

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.ctas * self.pairs

    @property
    def tile_m(self) -> int:
        """Rows of one expert that a cluster computes at a time."""
        return 128 * self.cluster

    @property
    def sfb_rows(self) -> int:
        """Rows of weight scales that a tile loads: whole scale tiles."""
        return -(-self.tile_n // 128) * 128

    @property
    def stage_bytes(self) -> int:
        """Bytes that one CTA loads per K tile: its rows of A, its share of B, SFA, all of SFB."""
        operands = (128 + self.tile_n // self.ctas) * self.tile_k // 2
        return operands + (128 + self.sfb_rows) * self.tile_k // 16

    @property
    def stages(self) -> int:
        return min(8, (SMEM_PER_CTA - 4096) // self.stage_bytes)

    @property
    def overlapped(self) -> bool:
        """Two accumulators of 256 columns share the columns that the scales need."""
        return self.tile_n == 256

    @property
    def sf_columns(self) -> int:
        """TMEM columns of SFA and SFB of one K tile."""
        return (128 + self.sfb_rows) // 32 * (self.tile_k // 64)

    @property
    def acc_stride(self) -> int:
        """TMEM columns from one accumulator to the next."""
        return self.tile_n - self.sf_columns if self.overlapped else self.tile_n

    @property
    def acc_columns(self) -> int:
        """TMEM columns of both accumulators."""
        return self.acc_stride + self.tile_n

    @property
    def name(self) -> str:
        return f"{128 * self.ctas}x{self.tile_n}x{self.tile_k}_c{self.cluster}"


def choose_config(rows: int, experts: int, n: int) -> GemmConfig:
    """Configuration for ``rows`` routed rows over ``experts`` and ``n`` output columns.

    Sizes only, never the routing: with more than 128 rows an expert on average a CTA pair shares
    the weights of a tile, below that half of its rows would be padding.
    """
    if rows > 128 * experts:
        return GemmConfig(2, 256 if n >= 256 else 128)
    return GemmConfig(1, 128 if n > 64 else 64)
