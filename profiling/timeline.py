"""What every warp of a kernel did, and when: for Perfetto (ui.perfetto.dev) and as a picture.

    python -m profiling.timeline sim --config ctas=2,tile_n=256 --rows 300 --n 512 --k 1024
    python -m profiling.timeline sim --load gathered --epilogue act --schedule random --seed 3
    python -m profiling.timeline sm90 --rows 384 --case deepseek-v4-pro    # on a Hopper GPU

``sim`` runs our SM100 kernel, any `GemmConfig`, in the simulator: no GPU. ``sm90`` runs the Hopper
kernel on the GPU of this machine with time stamps compiled in for this run only. The clock is part
of the result and says what it is worth: ``steps`` (simulated order of events, no time), ``clk``
(modelled clocks of a B200, with --clock model) or ``ns`` (measured).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

CLOCKS = {
    "steps": "simulated steps: order, not time",
    "clk": "modelled clocks of a B200: a forecast",
    "ns": "measured ns",
}


@dataclasses.dataclass(frozen=True)
class Slice:
    """Something that one row of the timeline did for a while.

    cta    CTA of the launch, 0 first
    row    "load", "mma", "epilogue 0", ... or an engine: "tma", "tensor"
    kind   "run" (instructions), "wait" (blocked; ``name`` says on what) or "async" (issue to end)
    """

    cta: int
    row: str
    kind: str
    name: str
    start: float
    duration: float
    detail: str = ""

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Slices of one launch; ``clock`` is a key of `CLOCKS`."""

    title: str
    clock: str
    slices: tuple[Slice, ...]

    @property
    def end(self) -> float:
        return max((s.end for s in self.slices), default=0.0)

    def rows(self) -> list[tuple[int, str]]:
        """(CTA, row) in the order in which they are drawn: warps by role, then engines."""
        found = {(s.cta, s.row) for s in self.slices}
        return sorted(found, key=lambda r: (r[0], row_order(r[1])))

    def cut(self, start: float, end: float) -> Timeline:
        """The part between two points, slices that reach over them shortened."""
        kept = [
            dataclasses.replace(
                s, start=max(s.start, start), duration=min(s.end, end) - max(s.start, start)
            )
            for s in self.slices
            if s.start < end and s.end > start
        ]
        return dataclasses.replace(self, slices=tuple(kept))

    def busy(self) -> dict[tuple[int, str], float]:
        """Share of the whole that each row did not wait; overlapping slices count once."""
        out = {}
        for key in self.rows():
            mine = [s for s in self.slices if (s.cta, s.row) == key and s.kind != "wait"]
            out[key] = covered((s.start, s.end) for s in mine) / self.end if self.end else 0.0
        return out


ROLES = ("schedule", "load", "mma", "producer", "epilogue", "consumer")
ENGINES = ("items", "tma", "cp", "tensor", "commit", "store")


def row_order(row: str) -> tuple[int, int, int, str]:
    role, _, number = row.partition(" ")
    known = (*ROLES, *ENGINES)
    place = known.index(role) if role in known else len(known)
    return row in ENGINES, place, int(number) if number.isdigit() else 0, row


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """Chrome trace JSON: a process per CTA, a thread per row. One unit of the clock is shown as one
    microsecond, measured ns as ns. Slices of a row that overlap without nesting, as those of an
    engine do, are spread over several threads of the same name.
    """
    scale = 1e-3 if timeline.clock == "ns" else 1.0
    events: list[dict[str, Any]] = []
    tid = 0
    for cta, row in timeline.rows():
        mine = sorted((s for s in timeline.slices if (s.cta, s.row) == (cta, row)),
                      key=lambda s: (s.start, -s.duration))  # fmt: skip
        lanes: list[float] = []  # end of the last slice
        first = tid
        for s in mine:
            lane = next((i for i, end in enumerate(lanes) if end <= s.start), len(lanes))
            lanes[lane : lane + 1] = [s.end]
            events.append({
                "name": s.name, "cat": s.kind, "ph": "X", "pid": cta + 1, "tid": first + lane,
                "ts": s.start * scale, "dur": s.duration * scale,
                "args": {"detail": s.detail} if s.detail else {},
            })  # fmt: skip
        for lane in range(len(lanes)):
            events.append(meta("thread_name", cta + 1, first + lane, row))
            events.append(meta("thread_sort_index", cta + 1, first + lane, first + lane))
        tid += len(lanes)
    for cta in sorted({s.cta for s in timeline.slices}):
        events.append(meta("process_name", cta + 1, 0, f"cta {cta}"))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {"title": timeline.title, "clock": CLOCKS[timeline.clock]},
    }


def meta(kind: str, pid: int, tid: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if kind.endswith("sort_index") else "name"
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {key: value}}


# ---- command line --------------------------------------------------------------------------------


def summary(timeline: Timeline, console: Console) -> None:
    """Rows of the first CTA: how busy, and what they waited for longest."""
    out = Table(title=timeline.title, title_justify="left")
    for name in ("row", "busy", "waits", "longest on", "share of the whole"):
        out.add_column(name, justify="left" if name in ("row", "longest on") else "right")
    for (cta, row), busy in timeline.busy().items():
        if cta != min(s.cta for s in timeline.slices):
            continue
        waits = [s for s in timeline.slices if (s.cta, s.row, s.kind) == (cta, row, "wait")]
        by: dict[str, float] = {}
        for s in waits:
            name = s.name.partition("[")[0]
            by[name] = by.get(name, 0.0) + s.duration
        top = max(by, key=lambda n: by[n], default="")
        share = f"{by[top] / timeline.end:.2f}" if top else ""
        out.add_row(row, f"{busy:.2f}", str(len(waits)), top, share)
    console.print(out)
    console.print(f"end: {timeline.end:.0f} {CLOCKS[timeline.clock]}")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m profiling.timeline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    which = p.add_subparsers(dest="source", required=True)
    sim = which.add_parser("sim", help="our SM100 kernel in the simulator")
    sim.add_argument("--config", default="ctas=2,tile_n=256", help="fields of GemmConfig")
    sim.add_argument("--rows", type=int, nargs="+", default=[300], help="of each expert")
    sim.add_argument("--n", type=int, default=512, help="output columns (gate and up together)")
    sim.add_argument("--k", type=int, default=1024)
    sim.add_argument("--load", choices=("rows", "gathered"), default="rows")
    sim.add_argument("--epilogue", choices=("store", "act"), default="store")
    sim.add_argument("--clusters", type=int, default=1, help="that run; they share the tiles")
    sim.add_argument("--clock", choices=("steps", "model"), default="steps")
    sim.add_argument("--schedule", choices=("lazy", "eager", "random"), default="lazy")
    sim.add_argument("--seed", type=int, default=0)
    gpu = which.add_parser("sm90", help="the Hopper kernel on this GPU, with stamps")
    gpu.add_argument("--case", default="deepseek-v4-pro")
    gpu.add_argument("--stage", choices=("L1", "L2"), default="L1")
    gpu.add_argument("--experts", type=int, default=48)
    gpu.add_argument("--rows", type=int, default=384)
    gpu.add_argument("--ctas", type=int, default=2, help="of the launch to draw")
    for sub in (sim, gpu):
        sub.add_argument("--json", type=Path, help="write the trace for Perfetto here")
        sub.add_argument("--png", type=Path, help="picture (needs matplotlib)")
        sub.add_argument("--from", type=float, dest="start", default=0.0, help="cut the picture")
        sub.add_argument("--to", type=float, dest="stop", default=float("inf"))
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=110)
    try:
        if args.source == "sim":
            from profiling.timeline_sim import record
        else:
            from profiling.timeline_sm90 import record
        timeline = record(args)
        summary(timeline, console)
        if args.json:
            args.json.write_text(json.dumps(perfetto(timeline)))
        if args.png:
            from profiling.pictures import timeline_picture

            timeline_picture(args.png, timeline.cut(args.start, args.stop))
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
