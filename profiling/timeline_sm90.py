"""Timelines of the Hopper kernel from hardware, through the DSL's in-kernel event tracing (iket).

`record` starts this module once more under ``iket profile``, which compiles the ranges of
`profiling.marked_sm90` in and records them; the kernel cache is switched off for that process, so
that no kernel with ranges is kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moe.explain import find_config
from profiling.timeline import Slice, Timeline

KERNEL = "_marked"


def record(args: argparse.Namespace) -> Timeline:
    """Raises RuntimeError without a Hopper GPU, without iket, or when it records nothing."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise RuntimeError("a timeline of the Hopper kernel needs a GPU of compute capability 9.0")
    if importlib.util.find_spec("iket") is None:
        raise RuntimeError("iket, part of nvidia-cutlass-dsl 4.8.1, cannot be imported")
    cfg = find_config(args.case)
    n, k = cfg.projections * cfg.intermediate, cfg.hidden
    if args.stage == "L2":
        n, k = cfg.hidden, cfg.intermediate
    sizes = [str(v) for v in (args.rows, args.experts, n, k)]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "env", "NVFP4_MEGAMOE_CACHE_DIR=off",
            sys.executable, "-m", "iket.cli.main", "--output-dir", f"{folder}/iket",
            "profile", "--postprocess", "json", "--",
            sys.executable, "-m", "profiling.timeline_sm90", *sizes,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        found = sorted(Path(folder).rglob("*.trace.json"))
        if done.returncode or not found:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise RuntimeError(f"iket recorded nothing: {' '.join(last)}")
        trace = json.loads(found[0].read_text())
    title = f"sm90 {args.case} {args.stage}: {args.rows} rows on {args.experts} experts, {n} x {k}"
    return from_iket(trace, args.ctas, title)


def from_iket(trace: dict[str, Any], ctas: int, title: str) -> Timeline:
    """The last launch of the marked kernel in what ``iket profile --postprocess json`` writes, its
    first ``ctas`` CTAs; time starts with the first warp.

    Raises ValueError when the file holds no such launch.
    """
    launches = [x for x in trace["launches"] if KERNEL in x["kernelName"]]
    if not launches:
        raise ValueError(f"no launch of a kernel named *{KERNEL}* among {len(trace['launches'])}")
    last, places, names = launches[-1], trace["locationTable"], trace["stringTable"]
    lives = {x["locIdx"]: (x["startTs"], x["endTs"]) for x in last["warpLifetimes"]}
    origin = min(start for start, _ in lives.values())
    ranges: dict[int, list[Span]] = {}
    for r in last["ranges"]:
        span = Span(names[r["rangeNameIdx"]], r["startTs"] - origin, r["endTs"] - origin)
        ranges.setdefault(r["warpLocIdxs"][0], []).append(span)
    slices = []
    for where, spans in ranges.items():
        cta, warp = places[where]["ctaId"][0], places[where]["warpId"]
        if cta >= ctas:
            continue
        consumer = any(p.name == "main loop" for p in spans)
        row = f"consumer {warp}" if consumer else "producer"
        start, end = (t - origin for t in lives[where])
        outer = Span("finish" if consumer else "schedule", start, end)
        slices += [
            Slice(cta, row, "wait" if p.name in WAITS else "run", p.name, p.start, p.end - p.start)
            for p in flatten([outer, *spans])
        ]
    return Timeline(title, "ns", tuple(slices))


WAITS = ("wait ab_full", "load tile")  # of the latter only what is not "issue rows"


class Span(NamedTuple):
    name: str
    start: int
    end: int


def flatten(spans: list[Span]) -> list[Span]:
    """Nested intervals -> what is innermost at each moment, in order, without gaps or overlaps
    inside the outermost one. Intervals nest or follow each other."""
    out: list[Span] = []
    stack: list[Span] = []
    at = min((s.start for s in spans), default=0)

    def advance(to: int) -> None:
        nonlocal at
        while stack and stack[-1].end <= to:
            done = stack.pop()
            emit(done.name, done.end)
        if stack:
            emit(stack[-1].name, to)
        at = max(at, to)

    def emit(name: str, to: int) -> None:
        nonlocal at
        if to > at:
            out.append(Span(name, at, to))
            at = to

    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        advance(span.start)
        stack.append(span)
    advance(max((s.end for s in spans), default=0))
    return out


def launch(rows: int, experts: int, n: int, k: int) -> None:
    """One call of the marked kernel on random data, after one that warms up."""
    from cute_kernels.sm90.config import choose_config
    from cute_kernels.sm90.epilogues import StoreRows
    from profiling.bench_sm90 import Case, Inputs, launches, random_weight
    from profiling.marked_sm90 import MarkedGemm, MarkedRows

    case = Case("timeline", k, n, experts)
    gemm = MarkedGemm(MarkedRows(), StoreRows(), choose_config(rows, experts))
    inputs = Inputs.make(case, rows)
    run = launches(gemm, case, inputs, random_weight(case, gated=False))[0]
    for _ in range(2):
        out: Any = run()
    torch.cuda.synchronize()
    assert bool(torch.isfinite(out).all())


if __name__ == "__main__":
    if not all(argument.isdecimal() for argument in sys.argv[1:]):
        sys.exit("the part of `python -m profiling.timeline sm90` that runs on the GPU; see there")
    launch(*map(int, sys.argv[1:]))
