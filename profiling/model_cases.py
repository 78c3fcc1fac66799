"""Problems that the forecast is used on, and the kernels that compete for them.

Shapes are those of one rank: with T tokens per rank and expert parallelism over P ranks, T * top_k
rows arrive at experts / P local experts, routed uniformly at random with a fixed seed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from profiling.model_grid import DECODE_ROWS, Family, Shape, routed


@dataclass(frozen=True)
class MoeCase:
    """A public model on ``ranks`` ranks; sources of the sizes: model cards, LightMoE's shapes."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    ranks: int

    def shapes(self, tokens: int) -> tuple[Shape, Shape]:
        """(gate/up, down) of one rank with ``tokens`` tokens per rank."""
        everywhere = routed(tokens * self.ranks, self.top_k, self.experts)
        counts = everywhere[: self.experts // self.ranks]
        return Shape(counts, 2 * self.inter, self.hidden), Shape(counts, self.hidden, self.inter)


CASES = (
    MoeCase("DeepSeek-V4-Pro", 7168, 3072, 384, 6, 8),
    MoeCase("DeepSeek-V4-Flash", 4096, 2048, 256, 6, 8),
    MoeCase("Qwen3-235B", 4096, 1536, 128, 8, 8),
    MoeCase("Qwen3-30B", 2048, 768, 128, 8, 1),
    MoeCase("gpt-oss-120b", 2880, 2880, 128, 4, 1),
    MoeCase("GLM-5.2", 6144, 2048, 256, 8, 16),
    MoeCase("MiniMax-M3", 6144, 3072, 128, 4, 16),
)
TOKENS = (1, 16, 32, 64, 128, 512, 2048, 8192)

# (tile_m, tile_n, pairs, columns)
_TILES = (
    (128, 128, 1, 1),
    (128, 256, 1, 1),
    (256, 128, 1, 1),
    (256, 256, 1, 1),
    (256, 256, 2, 1),
    (256, 256, 1, 2),
    (256, 256, 4, 1),
    (256, 256, 1, 4),
    (256, 128, 1, 2),
)
_PEER_TILES = ((256, 256), (256, 128), (128, 128))


def ours(output: str) -> list[Family]:
    """Our kernels: the row plans and the decode plan."""
    plans = [Family("ours", output, *tile) for tile in _TILES]
    return [*plans, Family("ours", output, 128, 64, decode_rows=64)]


def lightmoe(output: str) -> list[Family]:
    """LightMoE's kernels; with swapped operands the tile is as wide as the rows."""
    plans = [Family("lightmoe", output, *tile) for tile in _PEER_TILES]
    return plans + [Family("lightmoe", output, 128, r, decode_rows=r) for r in (16, 64)]


def flashinfer(output: str) -> list[Family]:
    """FlashInfer's: gather + SwiGLU + FP4, or finalise."""
    source = "fi_l1" if output == "fp4" else "fi_l2"
    return [Family(source, output, *tile) for tile in _PEER_TILES]


def everyone() -> list[Family]:
    """Every kernel that a sweep may ask for."""
    makers = (ours, lightmoe, flashinfer)
    families = [f for output in ("fp4", "bf16") for maker in makers for f in maker(output)]
    decode = [
        dataclasses.replace(f, decode_rows=rows)
        for f in families
        for rows in DECODE_ROWS
        if f.source == "ours" and f.decode_rows
    ]
    return list(dict.fromkeys([*families, *decode]))


def fits(family: Family, shape: Shape) -> bool:
    """May the kernel run this problem at all? LightMoE's gated FP4 output needs whole 128 columns;
    its swapped tiles are compiled for the rows of the busiest expert, up to 64; decode plans are
    not asked for more than 64 rows an expert on average."""
    if family.source == "lightmoe" and family.output == "fp4" and shape.n % 128:
        return False
    if not family.decode_rows:
        return True
    used = [c for c in shape.counts if c]
    if family.source == "lightmoe":
        return max(used, default=0) <= family.decode_rows
    return bool(used) and shape.rows <= 64 * len(used)
