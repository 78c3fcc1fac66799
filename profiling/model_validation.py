"""Published B200 times against the model: two constants fitted on half of one table, all else
predicted.

Sources: LightMoE 0.1.0 BENCHMARKS.md (B200, bf16 output, balanced routing; in five rows the fastest
other is FlashInfer's masked kernel); FlashInfer pull request 2503 (CuTe DSL masked grouped GEMM, 18
groups of 0.7 to 1.3 times the mean).
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from profiling.model_constants import Machine
from profiling.model_grid import Family, Model, Shape, spread

MASKED = Family("fi_masked", "bf16", 128, 128)
# fastest first, as published (GLM-5.2 gate/up; B300 sweeps agree on these three)
TILE_ORDER = tuple(
    Family("lightmoe", "bf16", m, n) for m, n in ((256, 256), (128, 256), (128, 128))
)
FABRIC_GRID = tuple(12.6 + 0.1 * i for i in range(24))
STORE_GRID = (1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5)


def lightmoe_family(n: int, output: str = "bf16") -> Family:
    """The tile of LightMoE's published times: 256 columns where they divide N, else 128. The two
    Nemotron rows, of which only this is known, match no other tile."""
    return Family("lightmoe", output, 256, 256 if n % 256 == 0 else 128)


@dataclass(frozen=True)
class Row:
    """A published time. experts are those of one rank; rows are dealt evenly over them."""

    name: str
    experts: int
    rows: int
    n: int
    k: int
    us: float
    flashinfer_us: float | None = None
    uneven: bool = False

    @property
    def shape(self) -> Shape:
        """Uneven groups have 0.7 to 1.3 times the mean, as the benchmark draws them: here the
        equally spaced quantiles of that distribution."""
        counts = spread(self.rows, self.experts)
        if self.uneven:
            factor = [0.7 + 0.6 * (e + 0.5) / self.experts for e in range(self.experts)]
            counts = tuple(int(c * f) for c, f in zip(counts, factor, strict=True))
        return Shape(counts, self.n, self.k)


def _lightmoe(name: str, routing: tuple[int, int, int], n: int, k: int, *us: float) -> Row:
    experts, top_k, ranks = routing
    return Row(name, experts // ranks, 8192 * top_k, n, k, *us)


PROJECTIONS = (
    _lightmoe("Qwen3.5-35B gate/up", (256, 8, 16), 1024, 2048, 77.0, 95.8),
    _lightmoe("Qwen3.5-35B down", (256, 8, 16), 2048, 512, 67.8, 68.0),
    _lightmoe("Qwen3.5-397B gate/up", (512, 10, 32), 2048, 4096, 296.2),
    _lightmoe("Qwen3.5-397B down", (512, 10, 32), 4096, 1024, 214.3, 248.4),
    _lightmoe("DeepSeek-V4-Flash gate/up", (256, 6, 32), 4096, 4096, 353.4),
    _lightmoe("DeepSeek-V4-Flash down", (256, 6, 32), 4096, 2048, 195.9),
    _lightmoe("Kimi-K3 gate/up", (896, 16, 32), 6144, 3584, 1191.0, 1777.7),
    _lightmoe("Kimi-K3 down", (896, 16, 32), 3584, 3072, 644.4, 893.9),
    _lightmoe("GLM-5.2 gate/up", (256, 8, 16), 4096, 6144, 627.7),
    _lightmoe("GLM-5.2 down", (256, 8, 16), 6144, 2048, 406.7),
    _lightmoe("MiniMax-M3 gate/up", (128, 4, 16), 6144, 6144, 486.6),
    _lightmoe("MiniMax-M3 down", (128, 4, 16), 6144, 3072, 275.6),
    _lightmoe("Nemotron-3.5 up", (128, 6, 16), 1920, 2688, 156.1),
    _lightmoe("Nemotron-3.5 down", (128, 6, 16), 2688, 1920, 167.2),
)

_MEANS = (28, 56, 113, 170, 227, 341, 455)
_MASKED_US = {
    (4096, 7168): (67, 67, 72, 89, 96, 123, 153),
    (7168, 2048): (38, 38, 41, 53, 62, 74, 88),
}
MASKED_ROWS = tuple(
    Row(f"masked N{n} K{k} mean {mean}", 18, 18 * mean, n, k, us, uneven=True)
    for (n, k), times in _MASKED_US.items()
    for mean, us in zip(_MEANS, times, strict=True)
)


@dataclass(frozen=True)
class Point:
    """One published time and the kernel that it belongs to."""

    row: Row
    family: Family
    us: float


LIGHTMOE_POINTS = tuple(Point(r, lightmoe_family(r.n), r.us) for r in PROJECTIONS)
FLASHINFER_POINTS = tuple(
    Point(r, MASKED, r.flashinfer_us) for r in PROJECTIONS if r.flashinfer_us is not None
)
MASKED_POINTS = tuple(Point(r, MASKED, r.us) for r in MASKED_ROWS)


def errors(model: Model, machine: Machine, points: Sequence[Point]) -> list[float]:
    """Relative errors, positive where the forecast is too slow."""
    return [model.forecast(p.family, p.row.shape, machine).us / p.us - 1 for p in points]


def mean_abs(values: Sequence[float]) -> float:
    return statistics.fmean(abs(v) for v in values)


Grid = dict[tuple[float, float], list[float]]


def search(model: Model, machine: Machine, points: Sequence[Point]) -> Grid:
    """Errors of every point for every (fabric, store_weight) of the grid."""
    return {
        (fabric, weight): errors(model, machine.with_(fabric=fabric, store_weight=weight), points)
        for fabric, weight in itertools.product(FABRIC_GRID, STORE_GRID)
    }


def fit(grid: Grid, rows: Sequence[int]) -> tuple[float, float]:
    """(fabric, store_weight) with the smallest mean absolute error on these rows."""
    return min(grid, key=lambda key: mean_abs([grid[key][i] for i in rows]))


def splits(grid: Grid, count: int = 200, seed: int = 0) -> list[float]:
    """Mean absolute error on the other half of the rows, for random halves to fit on."""
    total = len(next(iter(grid.values())))
    rng = random.Random(seed)
    out = []
    for _ in range(count):
        fitted = rng.sample(range(total), total // 2)
        key = fit(grid, fitted)
        out.append(mean_abs([grid[key][i] for i in range(total) if i not in fitted]))
    return out


@dataclass(frozen=True)
class Validation:
    """Errors by set of rows, with the constants fitted on the first set.

    used  (fabric, store_weight) fitted on all rows of LightMoE: what the table of constants has
    """

    fabric: float
    store_weight: float
    used: tuple[float, float]
    errors: dict[str, list[tuple[Point, float]]]
    split_errors: list[float]
    tile_us: list[float]

    @property
    def ordered(self) -> bool:
        """Does the model put the tile shapes in the published order?"""
        return self.tile_us == sorted(self.tile_us)

    def mean(self, name: str) -> float:
        return mean_abs([e for _, e in self.errors[name]])


def validate(model: Model, machine: Machine) -> Validation:
    """Fits on both rows of every other model of LightMoE's table, predicts everything else."""
    grid = search(model, machine, LIGHTMOE_POINTS)
    rows = [i for i in range(len(LIGHTMOE_POINTS)) if i // 2 % 2 == 0]
    fabric, weight = fit(grid, rows)
    fitted = machine.with_(fabric=fabric, store_weight=weight)
    sets = {
        "LightMoE, fitted": [LIGHTMOE_POINTS[i] for i in rows],
        "LightMoE, predicted": [p for i, p in enumerate(LIGHTMOE_POINTS) if i not in rows],
        "FlashInfer in LightMoE's table": FLASHINFER_POINTS,
        "FlashInfer masked": MASKED_POINTS,
    }
    found = {
        name: list(zip(points, errors(model, fitted, points), strict=True))
        for name, points in sets.items()
    }
    glm = next(r for r in PROJECTIONS if r.name == "GLM-5.2 gate/up").shape
    order = [model.forecast(f, glm, fitted).us for f in TILE_ORDER if model.has(f)]
    everything = fit(grid, range(len(LIGHTMOE_POINTS)))
    return Validation(fabric, weight, everything, found, splits(grid), order)


def families() -> list[Family]:
    """Every kernel that has a published time."""
    points = (*LIGHTMOE_POINTS, *FLASHINFER_POINTS, *MASKED_POINTS)
    return list(dict.fromkeys([*(p.family for p in points), *TILE_ORDER]))


def report(v: Validation) -> str:
    """Text: each row, then a line per set."""
    lines = [f"{'row':34s} {'published us':>12s} {'model us':>9s} {'error':>7s}"]
    for name, members in v.errors.items():
        lines.append(f"-- {name}")
        for point, error in members:
            us = point.us * (1 + error)
            lines.append(f"{point.row.name:34s} {point.us:>12.1f} {us:>9.1f} {100 * error:>+6.1f}%")
    lines.append("-- mean absolute error (worst)")
    for name, members in v.errors.items():
        worst = max(abs(e) for _, e in members)
        lines.append(f"{name:34s} {100 * v.mean(name):>6.1f}% ({100 * worst:.1f}%)")
    ranked = sorted(v.split_errors)
    lines.append(
        f"{len(ranked)} random halves fitted, other half predicted: mean "
        f"{100 * statistics.fmean(ranked):.1f}%, 95th percentile "
        f"{100 * ranked[int(0.95 * (len(ranked) - 1))]:.1f}%"
    )
    order = ", ".join(
        f"{f.tile_m}x{f.tile_n} {us:.0f} us" for f, us in zip(TILE_ORDER, v.tile_us, strict=False)
    )
    verdict = "the published order" if v.ordered else "NOT the published order"
    lines.append(f"tiles on GLM-5.2 gate/up: {order}: {verdict}")
    lines.append(f"fitted: fabric {v.fabric:.1f} TB/s, a stored byte counts {v.store_weight}")
    lines.append(f"fitted on all LightMoE rows, for use: {v.used[0]:.1f} TB/s, {v.used[1]}")
    return "\n".join(lines)
