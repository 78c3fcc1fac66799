"""Sizes of a grouped GEMM and the tile configuration that runs it. Plain Python: no torch, no
DSL.
"""

from __future__ import annotations

import dataclasses
import functools

SMEM_PER_CTA = 232448  # bytes a CTA may have on SM100 (227 KB)
TMEM_COLUMNS = 512
# SMs of the 148 of a B200 that clusters of this size cover (published measurements): a cluster lies
# within one GPC, those have 16 to 20 SMs, and what is left over idles
USABLE_SMS = {1: 148, 2: 148, 4: 132, 8: 120}
DECODE_STEP = 16  # rows by which a decode tile grows: one box of rows to load, 16 columns of an MMA


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tiles of the SM100 grouped GEMM.

    ctas      1: M = 128 per MMA, one CTA; 2: M = 256 over a pair (cta_group::2)
    tile_n    64, 128 or 256 columns of an MMA tile
    pairs     MMA tiles side by side in M in a cluster; they share the N operand by multicast
    columns   MMA tiles side by side in N in a cluster; they share the M operand by multicast
              (the cluster shape, in CTAs: ctas * pairs along M, columns along N)
    decode    swap-AB: weights on M and routed rows on N, as many as there are up to tile_n = 64;
              one CTA
    dynamic   work items come from an atomic counter instead of a stride over the clusters
    tile_k    256: 128 bytes of codes, one 128-byte swizzle span

    Raises ValueError for a combination that does not exist or does not fit into shared memory.
    """

    ctas: int = 1
    tile_n: int = 128
    pairs: int = 1
    columns: int = 1
    decode: bool = False
    dynamic: bool = False
    tile_k: int = 256

    def __post_init__(self) -> None:
        if self.ctas not in (1, 2) or self.pairs not in (1, 2, 4) or self.columns not in (1, 2, 4):
            raise ValueError(
                f"ctas must be 1 or 2, pairs and columns 1, 2 or 4, got {self.ctas}, {self.pairs}, "
                f"{self.columns}"
            )
        if self.pairs > 1 and self.columns > 1:
            raise ValueError(
                "pairs or columns must be 1: a stage is released by every MMA of the cluster, got "
                f"{self.pairs} x {self.columns}"
            )
        if self.tile_n not in (64, 128, 256) or (self.ctas == 2 and self.tile_n == 64):
            raise ValueError(
                f"tile_n must be 64 (one CTA only), 128 or 256, got {self.tile_n} with {self.ctas} "
                "CTAs"
            )
        if self.decode and (self.cluster, self.tile_n) != (1, 64):
            raise ValueError(
                f"a decode tile must be 64 rows of one CTA, got {self.tile_n} of {self.cluster}"
            )
        if self.stages < 4:
            raise ValueError(f"only {self.stages} stages fit into shared memory, 4 are needed")

    @functools.cached_property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.ctas * self.pairs * self.columns

    @property
    def tile_rows(self) -> int:
        """Routed rows of one expert that a cluster computes at a time."""
        return self.tile_n if self.decode else 128 * self.ctas * self.pairs

    @property
    def tile_columns(self) -> int:
        """Output columns that a cluster computes at a time."""
        return 128 if self.decode else self.tile_n * self.columns

    @property
    def sfb_rows(self) -> int:
        """Rows of scales of the N side that a tile loads: whole scale tiles."""
        return -(-self.tile_n // 128) * 128

    @property
    def step_bytes(self) -> int:
        """Bytes of `DECODE_STEP` rows of a decode tile."""
        return DECODE_STEP * self.tile_k // 2

    @property
    def fixed_bytes(self) -> int:
        """Bytes per K tile of a decode tile besides its rows: weights and both scales."""
        return self.stage_bytes - self.tile_n * self.tile_k // 2

    @property
    def stage_bytes(self) -> int:
        """Bytes that one CTA holds per K tile: its rows of A, its share of B, SFA, all of SFB."""
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
        plan = "decode_" if self.decode else ""
        shared = "rows" if self.columns > 1 else ""
        size = f"{128 * self.ctas}x{self.tile_n}x{self.tile_k}_c{self.cluster}{shared}"
        return f"{plan}{size}{'_dynamic' if self.dynamic else ''}"


def clusters_at_once(sms: int, cluster: int) -> int:
    """Clusters that run at the same time on ``sms`` multiprocessors, at least 1: the grid of a
    persistent kernel, whose static schedule would wait for a cluster that starts late.

    A GPU with another number of SMs than a B200 is taken to lose the same share of them.
    """
    return max(sms * USABLE_SMS[cluster] // USABLE_SMS[1] // cluster, 1)


# What the choice of a tile weighs, of a B200; `cute_kernels.forecast` has the sources.
CLOCK = 1.85e3  # clocks per microsecond
FABRIC = 13.5e6  # bytes per microsecond from L2 into all SMs; fitted to published times
STORE_WEIGHT = 2.0  # fabric bytes per stored byte; fitted
EPILOGUE_CLOCKS = {False: 7.4, True: 13.9}  # of a warp per column; True: activation and quantiser
FP4_HIDDEN = 9 / 32  # bytes of a gated h that are stored per accumulator column, scales included


def column_clocks(config: GemmConfig, n: int, k: int, out_bytes: float) -> float:
    """Clocks in which a full GPU computes ``config.tile_rows`` rows of all ``n`` columns, were
    there enough of them: the larger of the fabric's time and of a cluster's, tensor pipe or
    epilogue."""
    c = config
    rows, columns = 128 * c.ctas * c.pairs, c.tile_n * c.columns
    moved = (rows + columns) * k * 9 / 16 + STORE_WEIGHT * rows * columns * out_bytes
    mma = k * c.tile_n / 128
    epilogue = c.tile_n * EPILOGUE_CLOCKS[out_bytes < 1]
    own = max(mma, epilogue) * c.cluster / USABLE_SMS[c.cluster]
    return -(-n // columns) * max(moved * CLOCK / FABRIC, own)


def _both(config: GemmConfig) -> tuple[GemmConfig, GemmConfig]:
    """With a static and with a dynamic schedule."""
    return config, dataclasses.replace(config, dynamic=True)


_DECODE = _both(GemmConfig(1, 64, decode=True))
_SMALL, _NARROW = _both(GemmConfig(1, 128)), _both(GemmConfig(2, 128))
_MEDIUM = _both(GemmConfig(2, 128, columns=2))
_PREFILL = [_both(GemmConfig(2, 256, columns=columns)) for columns in (1, 2, 4)]
MARGIN = 0.98  # a larger cluster must save this much: it rounds more of the columns up
# Clusters of eight: replays of the kernels (docs/forecast.md) find them ahead for these K alone,
# for bf16 rows. Longer K wait for the MMAs of 120 SMs, shorter ones for their stores.
EIGHT_K = range(1024, 2049)


def choose_config(
    rows: int, experts: int, n: int, k: int, out_bytes: float = 2.0, dynamic: bool = False
) -> GemmConfig:
    """Configuration for ``rows`` routed rows over ``experts``, weights (E, n, k) and ``out_bytes``
    stored per accumulator column.

    Sizes only, never the routing; R = rows per expert on average:

        R <= 64    decode: the weights are read once, tokens in steps of 16
        R <= 112   one CTA: a pair's second half would be padding for most experts
        R <= 208   two CTA pairs of 128 columns that share their rows: there are few waves, which
                   small tiles fill better
        else       a CTA pair, or two or four that share their rows: what takes the fewest
                   `column_clocks`, four for K in `EIGHT_K` only. Large clusters leave SMs idle and
                   save bytes over the fabric. (Pairs that share weights save as many, but round
                   the rows of an expert up to 512.)

    `cute_kernels.forecast` finds little that is faster: tests/sm100/test_config.py.
    """
    if rows <= 64 * experts:
        return _DECODE[dynamic]
    if rows <= 112 * experts:
        return _SMALL[dynamic]
    if n < 256:
        return _NARROW[dynamic]
    if rows <= 208 * experts:
        return _MEDIUM[dynamic]
    best, least = _PREFILL[0], float("inf")
    eight = k in EIGHT_K and out_bytes > 1
    for candidate in _PREFILL if eight else _PREFILL[:2]:
        clocks = column_clocks(candidate[0], n, k, out_bytes)
        if clocks < least * MARGIN:
            best, least = candidate, clocks
    return best[dynamic]
