"""Bytes that a grouped GEMM moves over the L2-to-SM fabric, ours against the peers' kernels.

    python -m profiling.fabric --peers PYTHON           # the 14 projections of LightMoE's table
    python -m profiling.fabric --json fabric.json       # ours, and what is recorded of the peers

Published NVFP4 grouped GEMMs on B200 are limited by these bytes (docs/forecast.md). Every figure is
a counter of the simulator: each kernel computes one output tile of a cluster at the K of the row,
and bytes are extrapolated to the tiles of the whole problem; nothing is timed.

    fabric = loaded (each tensor load once, however many CTAs a multicast reaches) + 2 x stored

Boxes are counted whole, also where they hang over the end of K or N. Needs no GPU and no network;
PYTHON is an interpreter with the peers installed (tests/conformance/README.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling.events import Stream
from profiling.model_grid import Family, Shape
from profiling.model_validation import PROJECTIONS, Row
from profiling.specimens import Specimen, collect

STORE_WEIGHT = 2
# (tile_n, pairs, columns) of the pair kernels that a row may run
OURS = ((256, 1, 1), (256, 2, 1), (256, 1, 2), (256, 4, 1), (256, 1, 4), (128, 1, 1))
GOALS = {"lightmoe": 0.87, "flashinfer": 0.9}


@dataclass(frozen=True)
class Count:
    """What one kernel does for one output tile of a cluster.

    loaded, stored  bytes over the fabric, a multicast counted once
    filled          bytes written to shared memory by tensor loads, and by cp.async
    mma             tcgen05.mma instructions
    epilogue        warp instructions of the warps that read TMEM, from the first accumulator on
    in_flight       bytes per SM that all stages together hold
    elements        of the output tile, before an activation halves them
    """

    loaded: int
    stored: int
    filled: int
    mma: int
    epilogue: int
    in_flight: int
    elements: int

    @property
    def fabric(self) -> int:
        return self.loaded + STORE_WEIGHT * self.stored


def count(stream: Stream, specimen: Specimen) -> Count:
    """Counts of a stream that computed exactly the output tile of ``specimen``."""
    t = Counter(stream.totals)
    by_copy = t["cp_async_bytes"]
    return Count(
        loaded=t["tma_load_bytes"] + t["bulk_load_bytes"] + by_copy,
        stored=t["tma_store_bytes"] + t["bulk_store_bytes"] + t["global_store_bytes"],
        filled=t["tma_fill_bytes"] + t["bulk_load_bytes"] + by_copy,
        mma=t["mma"],
        epilogue=epilogue_instructions(stream),
        in_flight=in_flight(stream),
        elements=specimen.rows * specimen.n,
    )


def epilogue_instructions(stream: Stream) -> int:
    """Instructions behind the last wait before the first tcgen05.ld, up to the exit."""
    total = 0
    for events in stream.warps:
        reads = [i for i, e in enumerate(events) if e.kind == "ld"]
        if reads:
            waits = [i for i in range(reads[0]) if events[i].kind == "wait"]
            start = waits[-1] + 1 if waits else reads[0]
            total += sum(e.instructions for e in events[start:] if e.kind != "exit")
    return total


def in_flight(stream: Stream) -> int:
    """Bytes of one phase of every barrier that loads signal, per SM."""
    phases: Counter[tuple[int, int]] = Counter()
    for op in stream.ops:
        if op.unit == "load" and op.arrivals:
            for barrier, phase, _ in op.arrivals:
                phases[barrier, phase] += op.size * op.copies // len(op.arrivals)
    full: dict[int, int] = {}
    for (barrier, _), size in phases.items():
        full[barrier] = max(full.get(barrier, 0), size)
    copied = sum(op.size for op in stream.ops if op.unit == "cp.async")
    return (sum(full.values()) + copied * len(full) // max(len(phases), 1)) // stream.ctas


def specimen_of(family: Family, k: int) -> Specimen:
    """One output tile of one cluster at this K."""
    return dataclasses.replace(
        family.specimen(k), rows=family.rows, n=family.width, sms=family.cluster
    )


def families(row: Row) -> dict[str, list[Family]]:
    """The kernels that can run a row, by who made them. Gate/up rows also have FP4 output; the
    non-gated Nemotron is counted with the same gated epilogue."""
    first = not row.name.endswith("down")
    wide = 256 if row.n % 256 == 0 else 128  # what LightMoE's published times are made with
    outputs = ("fp4", "bf16") if first else ("bf16",)
    peer = Family("fi_l1", "fp4", 256, wide) if first else Family("fi_l2", "bf16", 256, wide)
    ours = [Family("ours", o, 256, *tile) for o in outputs for tile in OURS if tile[0] >= wide]
    return {
        "ours": ours,
        "lightmoe": [Family("lightmoe", o, 256, wide) for o in outputs],
        "flashinfer": [peer],
    }


@dataclass(frozen=True)
class Entry:
    """One kernel on one row: bytes for the whole problem, and the count of a tile."""

    maker: str
    family: Family
    fabric: float
    count: Count

    def as_json(self) -> dict[str, Any]:
        c = self.count
        return {
            "maker": self.maker,
            "kernel": self.family.label,
            "output": self.family.output,
            "cluster": self.family.cluster,
            "fabric_bytes": self.fabric,
            **dataclasses.asdict(c),
            "mma_per_128x256": c.mma * self.family.tile_m / 128 * 128 * 256 / c.elements,
            "epilogue_per_element": 32 * c.epilogue / c.elements,
        }


def entries(row: Row, folder: Path) -> list[Entry]:
    """Every kernel of the row whose stream exists."""
    found = []
    for maker, members in families(row).items():
        for family in members:
            specimen = specimen_of(family, row.k)
            path = specimen.file(folder)
            if path.exists():
                counted = count(Stream.load(path), specimen)
                tiles = Shape(row.shape.counts, row.n, row.k).tiles(family)
                found.append(Entry(maker, family, counted.fabric * tiles, counted))
    return found


def best(found: list[Entry], maker: str, output: str) -> Entry | None:
    """The kernel of a maker with the fewest fabric bytes."""
    mine = [e for e in found if e.maker == maker and e.family.output == output]
    return min(mine, key=lambda e: e.fabric) if mine else None


def compare(row: Row, found: list[Entry]) -> list[dict[str, Any]]:
    """Our best kernel against each peer kernel with the same output; gate/up rows also against
    LightMoE's bf16 output, which is what it publishes times for."""
    lines = []
    for peer in (e for e in found if e.maker != "ours"):
        first = not row.name.endswith("down")
        ours = best(found, "ours", "fp4" if first else "bf16")
        if ours is None:
            continue
        goal = GOALS[peer.maker] if row.k >= 1024 else None
        ratio = ours.fabric / peer.fabric
        mine, theirs = ours.as_json(), peer.as_json()
        lines.append(
            {
                "row": row.name, "n": row.n, "k": row.k, "ours": ours.family.label,
                "peer": peer.family.label, "ours_gb": ours.fabric / 1e9,
                "peer_gb": peer.fabric / 1e9, "ratio": ratio, "goal": goal,
                "met": goal is None or ratio <= goal,
                "mma": (mine["mma_per_128x256"], theirs["mma_per_128x256"]),
                "tma_kb": (_tile_kb(ours), _tile_kb(peer)),
                "epilogue": (mine["epilogue_per_element"], theirs["epilogue_per_element"]),
                "same_output": ours.family.output == peer.family.output,
                "in_flight_kb": (ours.count.in_flight / 1024, peer.count.in_flight / 1024),
            }
        )  # fmt: skip
    return lines


def _tile_kb(entry: Entry) -> float:
    """KiB loaded per 256 x 256 outputs."""
    return entry.count.loaded * 65536 / entry.count.elements / 1024


def table(lines: list[dict[str, Any]]) -> str:
    """Text table; a pair of figures is ours / theirs, and ! marks where theirs is better."""
    head = (
        f"{'row':26s} {'K':>5s} {'ours':>14s} {'peer':>24s} {'ours GB':>8s} {'peer GB':>8s} "
        f"{'ratio':>6s} {'goal':>5s}   {'KiB / 256x256':>15s} {'MMA':>9s} {'epilogue/elem':>14s} "
        f"{'KiB in flight':>13s}"
    )
    out = [head]
    for x in lines:
        goal = "" if x["goal"] is None else f"{x['goal']:.2f}"
        tma, mma = _pair(x["tma_kb"], 0), _pair(x["mma"], 0)
        flight = "{:.0f}/{:.0f}".format(*x["in_flight_kb"])
        epilogue = _pair(x["epilogue"], 2) if x["same_output"] else ""
        out.append(
            f"{x['row']:26s} {x['k']:>5d} {x['ours'].removeprefix('ours '):>14s} {x['peer']:>24s} "
            f"{x['ours_gb']:>8.3f} {x['peer_gb']:>8.3f} {x['ratio']:>6.3f} {goal:>5s} "
            f"{' ' if x['met'] else '!'} {tma:>15s} {mma:>9s} {epilogue:>14s} "
            f"{flight:>13s}"
        )
    return "\n".join(out)


def summary(lines: list[dict[str, Any]], counts: list[dict[str, Any]]) -> str:
    """How many goals are met with the best kernel, and with each cluster size alone."""
    goals = [x for x in lines if x["goal"] is not None]
    out = [f"goals met: {sum(x['met'] for x in goals)} of {len(goals)}"]
    for cluster in (2, 4, 8):
        met = 0
        for x in goals:
            output = "bf16" if x["row"].endswith("down") else "fp4"
            mine = [
                c["fabric_bytes"] / 1e9
                for c in counts
                if c["row"] == x["row"] and c["maker"] == "ours" and c["output"] == output
                and c["cluster"] == cluster
            ]  # fmt: skip
            met += min(mine) <= x["goal"] * x["peer_gb"]
        out.append(f"with cluster {cluster} alone: {met} of {len(goals)}")
    return "\n".join(out)


def _pair(values: tuple[float, float], digits: int) -> str:
    worse = "!" if values[0] > values[1] * 1.0001 else ""
    return f"{values[0]:.{digits}f}/{values[1]:.{digits}f}{worse}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.fabric",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter with the peers installed")
    parser.add_argument("--streams", type=Path, default=Path("build/streams"))
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--json", type=Path, help="write every count to this file")
    args = parser.parse_args()
    rows = [r for r in PROJECTIONS if args.rows.lower() in r.name.lower()]
    wanted = [
        specimen_of(family, row.k)
        for row in rows
        for members in families(row).values()
        for family in members
    ]
    collect(wanted, args.streams, args.peers)
    lines, everything = [], []
    for row in rows:
        found = entries(row, args.streams)
        lines += compare(row, found)
        everything += [{"row": row.name, "k": row.k, **e.as_json()} for e in found]
    sys.stdout.write("simulator counters, extrapolated to the whole problem; nothing is timed\n")
    if lines:
        sys.stdout.write(table(lines) + "\n" + summary(lines, everything) + "\n")
    else:
        sys.stdout.write(
            f"{len(everything)} counts of our kernels and none of others: --peers names an "
            "interpreter that has theirs (tests/conformance/README.md), --json keeps ours\n"
        )
    if args.json:
        args.json.write_text(json.dumps({"comparisons": lines, "counts": everything}, indent=1))


if __name__ == "__main__":
    main()
