"""From the replay of one cluster to a whole launch: a family of kernels, its steady state for any K
and share of the memory system, and the real tile list scheduled over the SMs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from profiling.events import Stream
from profiling.model_constants import Machine
from profiling.replay import Timing, replay
from profiling.specimens import Specimen

TILES = 4  # of a recorded cluster: the last two show the steady state
DEPTHS = (512, 1024, 2048, 3072)  # K of the recordings; in between and beyond, straight lines
DECODE_ROWS = (16, 32, 64)  # rows of an expert in the recordings of a decode plan
_FP4_BYTES = 9 / 16  # codes and scales of one element


@dataclass(frozen=True)
class Family:
    """A kernel whose size is open: fields as in `Specimen`.

    decode_rows  of a decode plan, whose tiles are as wide as there are rows: the rows of a tile in
                 the recording; 0 for other plans
    """

    source: str
    output: str
    tile_m: int
    tile_n: int
    pairs: int = 1
    columns: int = 1
    decode_rows: int = 0

    @property
    def cluster(self) -> int:
        return self.tile_m // 128 * self.pairs * self.columns

    @property
    def rows(self) -> int:
        """Rows of one expert that a cluster computes at a time."""
        return self.tile_n if self.decode_rows else self.tile_m * self.pairs

    @property
    def width(self) -> int:
        """Output columns that a cluster computes at a time."""
        return self.tile_m if self.decode_rows else self.tile_n * self.columns

    def specimen(self, k: int) -> Specimen:
        """Four tiles for every cluster; two clusters of one CTA, which share a TPC."""
        sms = max(2, self.cluster)
        side, rows = 2 * sms // self.cluster, 2 * self.rows
        if self.decode_rows:
            side, rows = 2 * side, self.decode_rows
        return Specimen(
            self.source, self.output, self.tile_m, self.tile_n, rows, side * self.width, k, sms,
            self.pairs, self.columns, self.decode_rows > 0,
        )  # fmt: skip

    def specimens(self) -> list[Specimen]:
        return [self.specimen(k) for k in DEPTHS]

    @property
    def label(self) -> str:
        return self.specimen(DEPTHS[0]).label


@dataclass(frozen=True)
class Shape:
    """One grouped GEMM: rows per expert, N, K of the weights."""

    counts: tuple[int, ...]
    n: int
    k: int

    @property
    def rows(self) -> int:
        return sum(self.counts)

    def tiles(self, family: Family) -> int:
        """Output tiles of a cluster."""
        n_tiles = -(-self.n // family.width)
        return sum(-(-rows // family.rows) for rows in self.counts) * n_tiles

    def dram_bytes(self, output: str) -> float:
        """Weights of the experts that have rows, rows once, results once."""
        used = sum(rows > 0 for rows in self.counts)
        weights = used * self.n * self.k * _FP4_BYTES
        result = self.n * 2 if output == "bf16" else self.n / 2 * _FP4_BYTES
        return weights + self.rows * (self.k * _FP4_BYTES + result)


@dataclass(frozen=True)
class Steady:
    """Clocks of one cluster: up to the end of the first tile's MMAs, per further tile, behind the
    last; fabric bytes per tile and SM, stores weighted; clocks of MMA work per tile."""

    first: float
    period: float
    tail: float
    fabric: float
    mma: float


@dataclass(frozen=True)
class Forecast:
    """Microseconds of a launch, and what limits it in the steady state."""

    us: float
    limit: str
    tiles: int
    clusters: int
    steady: Steady


class Model:
    """Replays of recorded kernels, kept: two per kernel, K, machine and latency.

    folder  where `profiling.specimens.collect` has put the streams
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._stream = functools.cache(self._load)
        self._steady = functools.cache(self._replay)

    def _load(self, specimen: Specimen) -> Stream:
        return Stream.load(specimen.file(self.folder))

    def has(self, family: Family) -> bool:
        """Are there recordings of this kernel?"""
        return len(self._depths(family)) >= 2

    def _depths(self, family: Family) -> list[int]:
        return [d for d in DEPTHS if family.specimen(d).file(self.folder).exists()]

    def _replay(self, specimen: Specimen, machine: Machine, rate: float, latency: float) -> Steady:
        stream = self._stream(specimen)
        return steady_state(stream, replay(stream, machine, rate, latency), rate)

    def _at(self, specimen: Specimen, m: Machine, rate: float, latency: float) -> Steady:
        """Replayed up to the share of a full device; in between that and what one SM can take, from
        the replays of these two."""
        slow = m.share(m.usable_sms(specimen.cluster))
        if rate <= slow:
            return self._steady(specimen, m, rate, latency)
        full = self._steady(specimen, m, slow, latency)
        alone = self._steady(specimen, m, m.fill, latency)
        return between(full, alone, (slow, m.fill), rate)

    def steady(
        self, family: Family, k: int, machine: Machine, rate: float, latency: float
    ) -> Steady:
        """Steady state for any K: a straight line through the two recordings next to it, beyond
        the last no faster than bytes and MMAs allow."""
        low, high = _around(self._depths(family), k)
        a, b = (self._at(family.specimen(d), machine, rate, latency) for d in (low, high))
        mixed = _mix(a, b, (k - low) / (high - low))
        return dataclasses.replace(mixed, period=max(mixed.period, mixed.fabric / rate, mixed.mma))

    def steady_of(
        self, family: Family, shape: Shape, machine: Machine, rate: float, latency: float
    ) -> Steady:
        """`steady` for the K of a shape; a decode plan between the recordings whose tiles have
        fewer and more rows than the average tile here."""
        if not family.decode_rows or family.source != "ours":  # a peer's tile has one size
            return self.steady(family, shape.k, machine, rate, latency)
        recorded = (dataclasses.replace(family, decode_rows=rows) for rows in DECODE_ROWS)
        steps = [f for f in recorded if self.has(f)]
        rows = shape.rows / max(1, sum(-(-c // family.rows) for c in shape.counts))
        at = min(max(rows, steps[0].decode_rows), steps[-1].decode_rows)
        i = max(j for j, f in enumerate(steps[:-1] or steps) if f.decode_rows <= at)
        a, b = steps[i], steps[min(i + 1, len(steps) - 1)]
        low, high = (self.steady(f, shape.k, machine, rate, latency) for f in (a, b))
        return _mix(low, high, (at - a.decode_rows) / max(b.decode_rows - a.decode_rows, 1))

    def forecast(self, family: Family, shape: Shape, machine: Machine) -> Forecast:
        """Time of one launch.

        All usable SMs share the fabric and the DRAM; a last, partly filled wave has more for each.
        Bytes that only one tile uses come from DRAM, with its latency and rate.
        """
        m = machine
        clusters = m.usable_sms(family.cluster) // family.cluster
        tiles = shape.tiles(family)
        dram = shape.dram_bytes(family.output) / tiles / family.cluster  # per tile and SM
        clusters = min(clusters, tiles)
        waves, left = divmod(tiles, clusters)
        state, limit = self._shared(family, shape, m, clusters, dram)
        clocks = state.first + (waves - 1) * state.period + state.tail
        if left:
            clocks += self._shared(family, shape, m, left, dram)[0].period
        return Forecast(m.launch + clocks / m.clock / 1e3, limit, tiles, clusters, state)

    def _shared(
        self, family: Family, shape: Shape, m: Machine, active: int, dram: float
    ) -> tuple[Steady, str]:
        """Steady state while ``active`` clusters run, and its limit; ``dram`` bytes per tile and SM
        come from DRAM."""
        rate, hbm = m.share(active * family.cluster), m.hbm_share(active * family.cluster)
        latencies = m.clk(m.l2_latency), m.clk(m.dram_latency)
        fabric = self.steady_of(family, shape, m, rate, latencies[0]).fabric
        rate_here = min(rate, hbm * fabric / dram)
        near, far = (self.steady_of(family, shape, m, rate_here, x) for x in latencies)
        state = _mix(near, far, min(dram / fabric, 1.0))  # of the bytes, these come from DRAM
        bounds = {"MMA": state.mma, "fabric": state.fabric / rate, "HBM": dram / hbm}
        name = max(bounds, key=lambda n: bounds[n])
        return state, name if bounds[name] > 0.9 * state.period else "epilogue or latency"


def steady_state(stream: Stream, timing: Timing, rate: float) -> Steady:
    """The last two of a cluster's recorded tiles, no faster than their bytes cross the fabric: the
    stores of a short recording are still on their way at its end. The rest of its time is the
    tail, so that the recorded tiles take as long as they did."""
    ends = timing.tile_ends(TILES)
    fabric = timing.fabric / TILES / stream.ctas
    period = max((ends[-1] - ends[1]) / 2, fabric / rate)
    tail = max(timing.end - ends[0] - (TILES - 1) * period, 0.0)
    return Steady(ends[0], period, tail, fabric, timing.mma_busy / TILES)


def between(full: Steady, alone: Steady, rates: tuple[float, float], rate: float) -> Steady:
    """The steady state at a rate between two. The period is the larger of what the bytes take and
    of what the kernel takes without a limit; the ends of a launch are linear in 1 / rate."""
    slow, fast = rates
    t = (1 / rate - 1 / fast) / (1 / slow - 1 / fast) if fast > slow else 1.0
    ends = _mix(alone, full, t)
    period = max(alone.period, full.fabric / rate)
    return dataclasses.replace(full, first=ends.first, tail=ends.tail, period=period)


def _mix(a: Steady, b: Steady, t: float) -> Steady:
    """a at t = 0, b at t = 1."""
    return Steady(*(x + (y - x) * t for x, y in zip(_tuple(a), _tuple(b), strict=True)))


def _tuple(steady: Steady) -> tuple[float, ...]:
    return dataclasses.astuple(steady)


def _around(depths: Sequence[int], k: int) -> tuple[int, int]:
    """The two recorded depths next to k. Raises ValueError with fewer than two."""
    if len(depths) < 2:
        raise ValueError(f"two recordings of different K are needed, found K = {list(depths)}")
    i = min(max(sum(d <= k for d in depths) - 1, 0), len(depths) - 2)
    return depths[i], depths[i + 1]


def spread(rows: int, experts: int) -> tuple[int, ...]:
    """``rows`` dealt evenly."""
    return tuple(rows // experts + (e < rows % experts) for e in range(experts))


def routed(tokens: int, top_k: int, experts: int, seed: int = 0) -> tuple[int, ...]:
    """Rows per expert of uniformly random routing (without replacement), seeded."""
    import numpy as np

    rng = np.random.default_rng(seed)
    picks = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    return tuple(int(c) for c in np.bincount(picks.ravel(), minlength=experts))


def ratio(a: Forecast, b: Forecast) -> float:
    """How many times faster a is than b."""
    return b.us / a.us if a.us else math.inf
