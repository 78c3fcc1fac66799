"""Tile configurations of the SM90 kernel: frozen, validated, chosen from shapes alone. Imports no
DSL."""

from __future__ import annotations

import dataclasses

from cute_kernels.sm90 import layout

SMEM_LIMIT = 227 * 1024  # bytes one CTA may have on SM90
SMEM_SM = 228 * 1024  # bytes of one SM; each resident CTA costs 1 KB more than it asks for
SM_REGISTERS = 64 * 1024


@dataclasses.dataclass(frozen=True)
class Sm90Config:
    """One compiled shape of the mainloop.

    name        short, ends up in the kernel's name
    row_tiles   128-row tiles of the weight in one CTA tile (1 or 2)
    token_sizes N of the wgmma instances, ascending; a tile takes the smallest that holds its rows
    stage_k64   k64 blocks of one pipeline stage (1 or 2)
    num_stages  pipeline stages
    ctas_per_sm persistent CTAs per SM
    split_steps 0: a unit of work is all of K. Otherwise it is a chunk of about so many steps of
                128 k (`chunk_steps`); fp32 partial sums go through global memory and a second
                kernel adds them in chunk order.
    warpgroups  of consumers: 2 share a tile, each with one m64 of every 128 rows; 1 has both, so
                that one CTA of an SM decodes, or stores its tile, while another multiplies
    warp_tokens N up to which warps multiply with mma.sync (`warp_loop`), instead of wgmma
    burst       k16 steps of wgmma issued back to back (1 or 4). A wgmma holds its warp until its
                registers are read: 1 decodes in between, 4 lets the other warpgroup decode
                meanwhile
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
    warpgroups: int = 2
    warp_tokens: int = 0
    burst: int = 1
    epilogue_tokens: int = 128

    def __post_init__(self) -> None:
        sizes = self.token_sizes
        if not sizes or sorted(set(sizes)) != list(sizes) or any(n % 8 or n > 256 for n in sizes):
            raise ValueError(f"token_sizes must ascend in multiples of 8 up to 256, got {sizes}")
        if sizes[-1] % sizes[0]:
            most = -(-sizes[-1] // sizes[0]) * sizes[0]
            raise ValueError(
                f"the largest of token_sizes must be a multiple of the smallest, got {sizes}: a "
                f"tile of {most} rows would fit none and never be computed"
            )
        if self.row_tiles not in (1, 2) or self.stage_k64 not in (1, 2):
            raise ValueError(
                f"row_tiles and stage_k64 are 1 or 2, got {self.row_tiles}, {self.stage_k64}"
            )
        if self.warpgroups not in (1, 2):
            raise ValueError(f"warpgroups is 1 or 2, got {self.warpgroups}")
        if not self.split_k and self.epilogue_tokens < 16 * self.blocks64:
            raise ValueError(
                f"epilogue_tokens {self.epilogue_tokens} hold no eight tokens of {self.blocks64} x "
                "64 features in fp32"
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
    def threads(self) -> int:
        """A whole warpgroup gives its registers away; one of its warps works, or all four
        (`loads.GatheredRows`)."""
        return 128 * (self.warpgroups + 1)

    @property
    def blocks64(self) -> int:
        """64-row blocks of the CTA tile that one warpgroup multiplies: its accumulators."""
        return 2 * self.row_tiles // self.warpgroups

    @property
    def producer_registers(self) -> int:
        """setmaxnreg of the producer warpgroup."""
        return 56 if self.ctas_per_sm == 1 else 32  # GatheredRows keeps the tokens of its rows

    @property
    def consumer_registers(self) -> int:
        """setmaxnreg of the consumers: what all threads get at launch, less the producers'."""
        launch = SM_REGISTERS // (self.threads * self.ctas_per_sm) // 8 * 8
        left = launch * (self.warpgroups + 1) - self.producer_registers
        return min(left // self.warpgroups // 8 * 8, 240)

    @property
    def staging_bytes(self) -> int:
        """A warpgroup's for the end of a tile: rows, and factors of 128 block scales."""
        return self.epilogue_tokens * 128 + 1024

    @property
    def smem_bytes(self) -> int:
        stages = self.num_stages * (self.weight_stage_bytes + self.row_stage_bytes + 16)
        staging = 0 if self.split_k else self.warpgroups * self.staging_bytes
        return stages + staging + 1024 + 512


DECODE = Sm90Config("decode", 1, (8, 16), 2, 8, 2, split_steps=8, warp_tokens=16)
MAX_CHUNKS = 4  # of K: each costs a unit's start and a pass over the partial sums
MIDDLE = Sm90Config(
    "middle", 2, (8, 16, 24, 32, 40, 48), 2, 3, 2, warp_tokens=24, epilogue_tokens=48
)
TRIO = Sm90Config(
    "trio", 1, tuple(range(8, 65, 8)), 1, 5, 3, warpgroups=1, burst=4, epilogue_tokens=32
)
DUO = Sm90Config(
    "duo", 1, tuple(range(16, 161, 16)), 1, 4, 2,
    warpgroups=1, burst=4, epilogue_tokens=96,
)  # fmt: skip
PREFILL = Sm90Config("prefill", 1, tuple(range(16, 257, 16)), 1, 5, 1, burst=4)


CONFIGS = (DECODE, MIDDLE, TRIO, DUO, PREFILL)
_MOST_ROWS = ((MIDDLE, 36), (TRIO, 54), (DUO, 150))  # rows per expert; measured, see README.md


def chunk_steps(k: int, config: Sm90Config) -> int:
    """k128 steps of a unit's chunk: a function of K alone, so that bits do not depend on the
    batch."""
    steps = -(-k // layout.TILE_K)
    if not config.split_k:
        return steps
    chunks = min(-(-steps // config.split_steps), MAX_CHUNKS)
    return -(-steps // chunks)


def choose_config(num_rows: int, num_experts: int, batch_invariant: bool = False) -> Sm90Config:
    """From shapes alone: few rows per expert stream weights, many feed the tensor cores.

    All but DECODE add all of K into one accumulator in the same order, so their bits are equal
    (those of mma.sync and wgmma too, see README.md); DECODE adds sums of chunks.
    ``batch_invariant`` leaves DECODE out.
    """
    if 2 * num_rows <= num_experts and not batch_invariant:
        return DECODE
    fitting = (c for c, most in _MOST_ROWS if num_rows <= most * num_experts)
    return next(fitting, PREFILL)
