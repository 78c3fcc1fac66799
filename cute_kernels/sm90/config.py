"""Tile configurations of the SM90 kernel: frozen, validated, chosen from shapes alone. Imports no
DSL."""

from __future__ import annotations

import dataclasses

from cute_kernels.sm90 import layout

SMEM_LIMIT = 227 * 1024  # bytes one CTA may have on SM90
SMEM_SM = 228 * 1024  # bytes of one SM; each resident CTA costs 1 KB more than it asks for
CONSUMER_WARPS = 8  # two warpgroups, each with one m64 of every 128-row tile


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """One compiled shape of the mainloop.

    name        short, ends up in the kernel's name
    row_tiles   128-row tiles of the weight in one CTA tile (1 or 2)
    token_sizes N of the wgmma instances, ascending; a tile takes the smallest that holds its rows
    stage_k64   k64 blocks of one pipeline stage (1 or 2)
    num_stages  pipeline stages
    ctas_per_sm persistent CTAs per SM
    split_steps 0: a unit of work is all of K. Otherwise it is a chunk of at most so many steps of
    128 k; fp32 partial
                sums go through global memory and a second kernel adds them in chunk order.
    warp_tokens N up to which warps multiply with mma.sync (`warp_loop`), instead of wgmma
    burst       k16 steps of wgmma issued back to back (1 or 4). A wgmma holds its warp until its
                registers are read: 1 decodes in between, 4 lets the other warpgroup decode
                meanwhile
    box_rows    routed rows of one TMA box
    epilogue_tokens  tokens (128 bytes each) a warpgroup stages at a time on their way to global
                     memory; without split_k
    """

    name: str
    row_tiles: int
    token_sizes: tuple[int, ...]
    stage_k64: int
    num_stages: int
    ctas_per_sm: int
    split_steps: int = 0
    warp_tokens: int = 0
    burst: int = 1
    epilogue_tokens: int = 128
    box_rows: int = 8

    def __post_init__(self) -> None:
        sizes = self.token_sizes
        if not sizes or sorted(set(sizes)) != list(sizes) or any(n % 8 or n > 256 for n in sizes):
            raise ValueError(f"token_sizes must ascend in multiples of 8 up to 256, got {sizes}")
        if self.row_tiles not in (1, 2) or self.stage_k64 not in (1, 2):
            raise ValueError(
                f"row_tiles and stage_k64 are 1 or 2, got {self.row_tiles}, {self.stage_k64}"
            )
        if self.max_tokens % self.box_rows or self.box_rows % 8:
            raise ValueError(
                f"box_rows {self.box_rows} must divide {self.max_tokens} and be a multiple of 8"
            )
        limit = min(SMEM_LIMIT, SMEM_SM // self.ctas_per_sm - 1024)
        if self.smem_bytes > limit:
            raise ValueError(
                f"config {self.name} needs {self.smem_bytes} bytes of shared memory per CTA, "
                f"{self.ctas_per_sm} CTAs per SM leave {limit}: the launch would fail"
            )

    @property
    def split_k(self) -> bool:
        return self.split_steps > 0

    @property
    def max_tokens(self) -> int:
        return self.token_sizes[-1]

    @property
    def token_step(self) -> int:
        """Tiles of one expert are multiples of this (but for the last)."""
        return self.token_sizes[0]

    @property
    def weight_stage_bytes(self) -> int:
        return self.row_tiles * self.stage_k64 * 2 * layout.BLOCK_BYTES

    @property
    def row_stage_bytes(self) -> int:
        return self.max_tokens * self.stage_k64 * layout.BLOCK_K * 2

    @property
    def producer_registers(self) -> int:
        """setmaxnreg of the producer warpgroup and of the consumers: 128 * producer + 256 *
        consumer registers must not exceed what 384 threads get at launch (168 each, or 80 with two
        CTAs per SM)."""
        if self.ctas_per_sm == 1:
            return 56  # GatheredRows keeps the tokens of its rows
        return 32

    @property
    def consumer_registers(self) -> int:
        if self.ctas_per_sm == 1:
            return 224
        return 104

    @property
    def smem_bytes(self) -> int:
        stages = self.num_stages * (self.weight_stage_bytes + self.row_stage_bytes + 16)
        staging = 0 if self.split_k else 2 * self.epilogue_tokens * 128
        return stages + staging + 1024 + 512


# 14 steps: 1792 k, 129 KB of weights for 128 rows. 6 experts of K 7168 or 3072 fill 264 CTAs to
# 0.87 and 0.85
DECODE = Sm90Config("decode", 1, (8, 16), 2, 8, 2, split_steps=14, warp_tokens=16)
MIDDLE = Sm90Config(
    "middle", 2, (8, 16, 24, 32, 40, 48), 2, 3, 2, warp_tokens=24, epilogue_tokens=48
)
PREFILL = Sm90Config("prefill", 1, tuple(range(16, 257, 16)), 1, 5, 1, burst=4, box_rows=32)


def chunk_steps(k: int, config: Sm90Config) -> int:
    """k128 steps of a unit's chunk: a function of K alone, so that bits do not depend on the
    batch."""
    steps = -(-k // layout.TILE_K)
    if not config.split_k:
        return steps
    chunks = -(-steps // config.split_steps)
    return -(-steps // chunks)


def choose_config(num_rows: int, num_experts: int, batch_invariant: bool = False) -> Sm90Config:
    """From shapes alone: few rows per expert stream weights, many feed the tensor cores.

    MIDDLE and PREFILL add all of K into one accumulator in the same order, so their bits are equal
    (those of mma.sync and wgmma too, see README.md); DECODE adds sums of chunks.
    ``batch_invariant`` leaves DECODE out.
    """
    if 2 * num_rows <= num_experts and not batch_invariant:
        return DECODE
    return MIDDLE if num_rows <= 40 * num_experts else PREFILL
