"""Constants of the B200 forecast: value, range, source, in one table. Nothing here was measured by
this project on a B200.

The uncertain ones are knobs: a result is given with the range that they span one at a time. Two,
``fabric`` and ``store_weight``, are fitted to published times (`profiling.model_validation`), the
rest is quoted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """``low`` to ``high`` is the range in the sources; both are ``value`` where nobody disputes."""

    value: float
    low: float
    high: float
    unit: str
    source: str


def _sure(value: float, unit: str, source: str) -> Constant:
    return Constant(value, value, value, unit, source)


SA = "SemiAnalysis Blackwell microbenchmarks (B200)"
QRC = "QuickRunCUDA notes (B300)"
FIT = "fitted here to published kernel times"

TABLE: dict[str, Constant] = {
    "clock": Constant(
        1.85, 1.5, 1.965, "GHz", "datasheet peak 1.856, boost 1.965, power-limited 1.5"
    ),
    "sms": _sure(148, "", SA),
    "sms_cluster4": _sure(132, "", f"{SA}: GPCs of 9 and 10 TPCs leave pairs over"),
    "sms_cluster8": _sure(120, "", f"{SA}; {QRC} agrees"),
    "fabric": Constant(13.3, 13.0, 14.9, "TB/s L2 to all SMs", f"{FIT}; GEMMs imply 13.4 to 14.9"),
    "store_weight": Constant(2.0, 1.5, 2.5, "loaded bytes per stored byte", FIT),
    "fill": Constant(130, 100, 130, "B/clk into one SM", f"{QRC}: one CTA peaks at 241 GB/s"),
    "hbm": Constant(
        5.15, 5.15, 7.1, "TB/s", "published NVFP4 decode 4.9-5.4, bf16 decode 6.9, SA 7.1"
    ),
    "launch": Constant(3.0, 2.0, 3.5, "us per kernel in a stream", f"{QRC}: enqueue 1.9, prologue"),
    "l2_latency": Constant(400, 200, 550, "ns", "one B200 author: 197, 540, 595 in three set-ups"),
    "dram_latency": Constant(
        720, 720, 1100, "ns", f"{SA}: 719 median unloaded, 1100 by Little's law"
    ),
    "tma_issue": Constant(48, 48, 60, "clk per tensor copy", QRC),
    "mma_latency": Constant(137, 132, 149, "clk behind the last MMA, one CTA", SA),
    "mma_latency_pair": Constant(173, 171, 185, "clk behind the last MMA, pair", SA),
    "smem_port": _sure(128, "B/clk operand reads per SM", SA),
    "scale_copy": Constant(
        31, 31, 52, "clk per 32x128b.warpx4", f"{QRC}: 52 alone, <= 31 in a GEMM"
    ),
    "tmem_load": Constant(57, 53, 57, "B/clk per warp", QRC),
    "tmem_latency": _sure(12, "clk", QRC),
    "issue": Constant(
        1.5, 1.0, 2.5, "clk per PTX instruction of a warp", "assumed; SASS not modelled"
    ),
    "mufu": _sure(8, "clk per warp instruction", "16 lanes/clk/SM, as on Hopper"),
    "wait": _sure(8, "clk, try_wait on a complete phase", QRC),
    "hop": Constant(54, 54, 123, "clk from arrival to a woken waiter", QRC),
    "named_barrier": _sure(31, "clk", QRC),
    "cluster_hop": _sure(102, "clk, arrive.relaxed to wait", QRC),
}


@dataclass(frozen=True)
class Machine:
    """The constants as numbers; `with_` changes some. Units as in `TABLE`."""

    values: tuple[tuple[str, float], ...] = tuple((n, c.value) for n, c in TABLE.items())

    def __getattr__(self, name: str) -> float:
        for key, value in object.__getattribute__(self, "values"):
            if key == name:
                return float(value)
        raise AttributeError(name)

    def with_(self, **changes: float) -> Machine:
        """A copy with other values. Raises KeyError for an unknown name."""
        unknown = changes.keys() - TABLE.keys()
        if unknown:
            raise KeyError(f"no constant {sorted(unknown)}; there are {sorted(TABLE)}")
        return dataclasses.replace(
            self, values=tuple((n, changes.get(n, v)) for n, v in self.values)
        )

    def clk(self, nanoseconds: float) -> float:
        return nanoseconds * self.clock

    def usable_sms(self, cluster: int) -> int:
        """SMs that clusters of this size can cover."""
        return int({4: self.sms_cluster4, 8: self.sms_cluster8}.get(cluster, self.sms))

    def share(self, active_sms: float) -> float:
        """Fabric bytes per clock and SM while ``active_sms`` compete."""
        return min(self.fabric * 1e3 / self.clock / max(active_sms, 1.0), self.fill)

    def hbm_share(self, active_sms: float) -> float:
        """DRAM bytes per clock and SM while ``active_sms`` compete."""
        return min(self.hbm * 1e3 / self.clock / max(active_sms, 1.0), self.fill)


def knobs() -> list[tuple[str, float, float]]:
    """(name, low, high) of every constant that has a range."""
    return [(n, c.low, c.high) for n, c in TABLE.items() if c.low != c.high]
