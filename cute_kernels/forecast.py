"""A forecast of one SM100 grouped GEMM on a B200: a closed form, no simulation, plain Python.

    t = launch + (first + (waves - 1) * period + tail) / clock
    period = max(fabric, DRAM, MMA, epilogue)          clocks of a cluster per output tile

The terms are bytes and instructions that `GemmConfig` implies; the epilogue's clocks and the
constants come from `profiling.model`, which replays the kernels' event streams, is validated on
published times and has the ranges and sources (docs/forecast.md). Nothing here was measured on a
B200: print `Forecast.note` with every number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from cute_kernels.config import (
    CLOCK,
    DECODE_STEP,
    EPILOGUE_CLOCKS,
    FABRIC,
    FP4_HIDDEN,
    STORE_WEIGHT,
    USABLE_SMS,
    GemmConfig,
    choose_config,
)

SMS = USABLE_SMS
FILL = 130.0  # bytes per clock into one SM
LAUNCH = 3.0  # microseconds per kernel in a stream
LATENCY = 1300.0  # clocks from the launch to the first MMA, L2 or DRAM latency included
ERROR = 0.1  # relative: 3 % on grouped GEMMs of 4096 rows an expert, 8 % on smaller ones
FP4 = 9 / 16  # bytes of an NVFP4 element, scale included

# Clocks of one epilogue warp per output tile, by (decode, FP4 output): constant and per column of
# the MMA tile. From replays without a memory limit, 1.5 clocks per PTX instruction (1 to 2.5).
EPILOGUE = {
    (False, False): (100.0, EPILOGUE_CLOCKS[False]),
    (False, True): (100.0, EPILOGUE_CLOCKS[True]),
    (True, False): (130.0, 11.9),
    (True, True): (130.0, 20.8),
}


@dataclasses.dataclass(frozen=True)
class Forecast:
    """us       microseconds of one launch
    low, high   with the validated error, and HBM between the two published rates
    limit       fabric, HBM, MMA or epilogue: what the steady state waits for
    waves       tiles that the busiest cluster computes
    """

    us: float
    low: float
    high: float
    limit: str
    waves: int

    @property
    def note(self) -> str:
        return (
            "forecast for a B200: modelled, not measured; 3 to 18 % off where times are published"
        )


@dataclasses.dataclass(frozen=True)
class _Tile:
    """Clocks per output tile and cluster, with all SMs busy."""

    fabric: float
    hbm: float
    mma: float
    epilogue: float

    @property
    def bounds(self) -> dict[str, float]:
        return {"fabric": self.fabric, "HBM": self.hbm, "MMA": self.mma, "epilogue": self.epilogue}


def fabric_bytes(config: GemmConfig, k: int, fp4_output: bool, rows: int = 0) -> float:
    """Bytes that one output tile of a cluster moves between L2 and the SMs, a multicast counted
    once and a stored byte `STORE_WEIGHT` times. ``rows`` of a decode tile."""
    c = config
    if c.decode:
        step = -(-rows // DECODE_STEP) * DECODE_STEP
        loaded = (128 + step) * k / 2 + 256 * k / 16
        elements = 128.0 * rows
    else:
        m = 128 * c.ctas * c.pairs
        loaded = (m + c.tile_n * c.columns) * k / 2 + (m + c.sfb_rows * c.columns) * k / 16
        elements = float(m * c.tile_n * c.columns)
    return loaded + STORE_WEIGHT * elements * (FP4 / 2 if fp4_output else 2)


def mma_clocks(config: GemmConfig, k: int, rows: int = 0) -> float:
    """Clocks of the tensor pipe per output tile: per K64 step the larger of N / 2 and the operand
    bytes of one SM over its 128-byte port."""
    n = -(-rows // DECODE_STEP) * DECODE_STEP if config.decode else config.tile_n
    return -(-k // 64) * max(n / 2, (4096 + 32 * n / config.ctas) / 128)


def forecast(
    config: GemmConfig,
    counts: Sequence[int],
    n: int,
    k: int,
    *,
    fp4_output: bool,
    hbm: tuple[float, float] = (5.15, 7.1),
) -> Forecast:
    """Microseconds of one launch for ``counts`` rows per expert and weights (E, n, k).

    fp4_output  an activation over pairs of columns and requantisation, else bf16
    hbm         TB/s that published kernels reach, slowest (NVFP4 decode) and fastest; ``us`` is for
                the first

    Raises ValueError when there are no rows.
    """
    used = [c for c in counts if c > 0]
    if not used:
        raise ValueError("a forecast needs rows, got none: nothing is launched")
    results = [_launch(config, used, (n, k), fp4_output, rate) for rate in hbm]
    us = [r[0] for r in results]
    return Forecast(us[0], min(us) * (1 - ERROR), max(us) * (1 + ERROR), *results[0][1:])


def forecast_chosen(
    counts: Sequence[int], n: int, k: int, *, fp4_output: bool
) -> tuple[GemmConfig, Forecast]:
    """The configuration that the operators take for these sizes, and its `forecast`."""
    out_bytes = FP4_HIDDEN if fp4_output else 2.0
    config = choose_config(sum(counts), len(counts), n, k, out_bytes)
    return config, forecast(config, counts, n, k, fp4_output=fp4_output)


def _launch(
    config: GemmConfig, used: list[int], size: tuple[int, int], fp4_output: bool, hbm: float
) -> tuple[float, str, int]:
    """(microseconds, limit, waves)."""
    n, k = size
    c = config
    rows = -(-sum(used) // len(used)) if c.decode else 0
    columns = -(-n // c.tile_columns)
    tiles = sum(-(-count // c.tile_rows) for count in used) * columns
    out = n / 2 * FP4 if fp4_output else n * 2
    dram = len(used) * n * k * FP4 + sum(used) * (k * FP4 + out)
    fixed, per_column = EPILOGUE[c.decode, fp4_output]
    width = min(rows, c.tile_n) if c.decode else c.tile_n

    def tile(clusters: int) -> _Tile:
        sms = clusters * c.cluster
        share = min(FABRIC / CLOCK / sms, FILL)
        own = min(hbm * 1e6 / CLOCK / sms, FILL)
        return _Tile(
            fabric_bytes(c, k, fp4_output, min(rows, c.tile_n)) / c.cluster / share,
            dram / tiles / c.cluster / own,
            mma_clocks(c, k, min(rows, c.tile_n)),
            fixed + per_column * width,
        )

    clusters = min(SMS[c.cluster] // c.cluster, tiles)
    waves, left = divmod(tiles, clusters)
    full = tile(clusters)
    period = max(full.bounds.values())
    first = LATENCY + max(full.hbm, full.mma, full.fabric)
    clocks = first + (waves - 1) * period + full.epilogue
    if left:
        clocks += max(tile(left).bounds.values())
    limit = max(full.bounds, key=lambda name: full.bounds[name])
    return LAUNCH + clocks / CLOCK, limit, waves + (left > 0)
