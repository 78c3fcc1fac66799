"""Time the layer at the size of public models, whole and stage by stage.

    python -m profiling.bench --case deepseek-v4-flash --tokens 1 16 64 512 --backends auto torch
    python -m profiling.bench --json a.json --png a.png
    python -m profiling.bench --compare a.json b.json

What is timed is `MoE.experts` on one rank's share (`profiling.workload.Case`): sorting, quantising,
both GEMMs, combining, not the router's product. Whole calls: `profiling.timing`. Stages: the same
calls under torch's profiler, kernels attributed to the layer's ranges, mean over the calls; they
leave out gaps between kernels and need not add up to the whole. On a CPU a stage is host time. Next
to each time stands the roof, computed: `profiling.roofline`, on a GPU with the copy and bf16 rates
measured in the same run where it has no FP4.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._C._autograd import DeviceType

from cute_kernels import toolchain
from moe import MoE, ranges
from moe.backends import BACKENDS, choose_backend
from profiling import timing
from profiling.roofline import PEAKS, Peaks, Stage, roof_seconds
from profiling.workload import Case, Workload, add_case_arguments, case_of

Row = dict[str, Any]
KEY = ("case", "ranks", "tokens", "backend", "h_scale", "activations")


def bench(
    case: Case,
    backends: list[str],
    device: torch.device,
    options: Options,
    layers: dict[str, MoE] | None = None,
) -> list[Row]:
    """One row per backend, timed in turn. A backend that cannot run the case gets a row with the
    reason in ``skipped``. ``layers`` by backend are used, and filled: making one packs its weights.
    """
    layers = {} if layers is None else layers
    race = timing.Race(device, options.rounds)
    running: dict[str, Workload] = {}
    rows: dict[str, Row] = {}
    for name in backends:
        row = rows[name] = {**dataclasses.asdict(case), "case": case.model, "backend": name}
        del row["model"]
        try:
            work = Workload(case, name, device, options.most_sets, layers.get(name))
            layers[name] = work.layer
            race.add(name, [functools.partial(c.run, work.layer) for c in work.calls])
        except (ValueError, RuntimeError) as error:
            row["skipped"] = " ".join(str(error).split())
            continue
        running[name] = work
    times = race.run()
    for name, work in running.items():
        split = stage_us(work) if options.stages else {}
        rows[name] |= {**times[name].as_json(), **row_of(work, split, options.peaks)}
    return list(rows.values())


@dataclasses.dataclass(frozen=True)
class Options:
    """``peaks`` None: no roof is known for this device."""

    rounds: int = 15
    most_sets: int = 16
    stages: bool = True
    peaks: Peaks | None = None


def row_of(work: Workload, split: dict[str, float], peaks: Peaks | None) -> Row:
    """Sizes, work and roof of a row, and its stages."""
    stages, share = work.work(), work.share()
    row: Row = {
        "sets": len(work.calls), "rows": share.rows, "active_experts": share.active,
        "flop": sum(s.flop for s in stages), "bytes": sum(s.nbytes for s in stages),
    }  # fmt: skip
    if peaks is not None:
        row["roof_us"] = roof_seconds(stages, peaks) * 1e6
    row["stages"] = [stage_row(name, stages, split, peaks) for name in ranges.STAGES]
    return row


def stage_row(
    name: str, stages: list[Stage], split: dict[str, float], peaks: Peaks | None
) -> dict[str, Any]:
    """One range of the layer: it may hold several stages of the roofline (quantising x and h)."""
    mine = [s for s in stages if s.range == name]
    short = name.removeprefix("moe.")
    row: dict[str, Any] = {
        "name": short.upper() if short in ("l1", "l2") else short,
        "flop": sum(s.flop for s in mine),
        "bytes": sum(s.nbytes for s in mine),
    }
    if name in split:
        row["us"] = split[name]
    if peaks is not None:
        row["roof_us"] = sum(s.seconds(peaks) for s in mine) * 1e6
    return row


def stage_us(work: Workload) -> dict[str, float]:
    """Range -> microseconds a call: of the device's kernels, on a CPU of the host."""
    cuda = work.device.type == "cuda"
    activity = torch.profiler.ProfilerActivity
    activities = [activity.CPU, activity.CUDA] if cuda else [activity.CPU]
    with (
        torch.profiler.profile(activities=activities) as profile,
        ranges.emit(torch.profiler.record_function),
    ):
        for call in work.calls:
            call.run(work.layer)
        if cuda:
            torch.cuda.synchronize()
    total: dict[str, float] = {}
    for event in profile.events() or []:
        host = event.device_type == DeviceType.CPU
        if host and event.name in ranges.STAGES:
            us = event.device_time_total if cuda else event.cpu_time_total
            total[event.name] = total.get(event.name, 0.0) + us / len(work.calls)
    return total


# ---- the machine ---------------------------------------------------------------------------------


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures depend on besides the code."""
    found: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "dsl": toolchain.installed().dsl,
        "commit": commit(),
        "device": str(device),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name, "sms": properties.multi_processor_count,
            "l2_bytes": timing.l2_bytes(device), "state": timing.device_state(),
        }  # fmt: skip
    else:
        found["threads"] = torch.get_num_threads()
    return found


def commit() -> str | None:
    """The commit of the code, with + for a changed tree; None outside of a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def peaks_here(device: torch.device) -> tuple[Peaks | None, dict[str, float]]:
    """Roof for this device and the rates measured for it. A GPU without FP4: measured rates. With
    FP4: its datasheet, as no product here reaches that rate. A CPU has none.
    """
    if device.type != "cuda":
        return None, {}
    roofs = timing.measured_roofs(device)
    rates = {"copy_bytes_per_s": roofs.copy, "dense_bf16_flop_per_s": roofs.dense}
    name = torch.cuda.get_device_name(device)
    sheet = next((p for p in PEAKS.values() if p.name in name.upper() and p.fp4), None)
    if sheet is not None:
        return sheet, rates
    return Peaks(name, roofs.copy, roofs.dense, None, "copy and 8192^3 bf16 product, here"), rates


# ---- tables and files ----------------------------------------------------------------------------


def rate(row: Row, name: str, unit: float) -> str:
    return f"{row[name] / row['us'] * 1e6 / unit:.3g}"


def report(rows: list[Row], console: Console) -> None:
    out = Table(title="time of one call of MoE.experts", title_justify="left")
    columns = ("case", "ranks", "tokens", "backend", "us", "p10..p90", "how", "TB/s", "TFLOP/s",
               "roof us", "of roof")  # fmt: skip
    for name in columns:
        out.add_column(name, justify="left" if name in ("case", "backend", "how") else "right")
    for r in rows:
        head = (r["case"], str(r["ranks"]), str(r["tokens"]), r["backend"])
        if "skipped" in r:
            out.add_row(*head, "", "", "skipped")
            continue
        roof = (f"{r['roof_us']:.1f}", f"{r['roof_us'] / r['us']:.2f}") if "roof_us" in r else ()
        out.add_row(*head, f"{r['us']:.1f}", f"{r['us_p10']:.1f}..{r['us_p90']:.1f}", r["method"],
                    rate(r, "bytes", 1e12), rate(r, "flop", 1e12), *roof)  # fmt: skip
    console.print(out)
    split = Table(title="kernels of each stage, us (roof)", title_justify="left")
    for name in ("case", "tokens", "backend", *(s.removeprefix("moe.") for s in ranges.STAGES)):
        split.add_column(name, justify="left" if name in ("case", "backend") else "right")
    for r in rows:
        if any("us" in s for s in r.get("stages", [])):
            cells = [f"{s['us']:.1f}" + (f" ({s['roof_us']:.1f})" if "roof_us" in s else "")
                     if "us" in s else "" for s in r["stages"]]  # fmt: skip
            split.add_row(r["case"], str(r["tokens"]), r["backend"], *cells)
    if split.row_count:
        console.print(split)
    for note in dict.fromkeys(notes(r) for r in rows):
        if note:
            console.print(note)


def notes(row: Row) -> str:
    """What the table has no room for."""
    if "skipped" in row:
        return f"{row['backend']} skipped: {row['skipped']}"
    if "why" in row:
        return f"{row['backend']} could not be captured into a graph: {row['why']}"
    return ""


def compare(a: Path, b: Path, console: Console) -> int:
    """Ratios b / a of the rows that both files have. Raises ValueError when there are none."""
    files = [json.loads(p.read_text()) for p in (a, b)]
    left, right = ({tuple(r.get(k) for k in KEY): r for r in f["rows"]} for f in files)
    both = [k for k in left if k in right and "us" in left[k] and "us" in right[k]]
    if not both:
        raise ValueError(f"{a} and {b} have no timed row in common")
    gpus = [f["machine"].get("gpu", f["machine"]["device"]) for f in files]
    title = f"{b.name} ({gpus[1]}) against {a.name} ({gpus[0]}): below 1 is faster"
    out = Table(title=title, title_justify="left")
    stages = [s.removeprefix("moe.") for s in ranges.STAGES]
    for name in ("case", "ranks", "tokens", "backend", "us", "us", "ratio", *stages):
        out.add_column(name, justify="left" if name in ("case", "backend") else "right")
    for key in both:
        x, y = left[key], right[key]
        cells = [
            f"{t['us'] / s['us']:.2f}" if s.get("us") and t.get("us") else ""
            for s, t in zip(x["stages"], y["stages"])
        ]
        out.add_row(*map(str, key[:4]), f"{x['us']:.1f}", f"{y['us']:.1f}",
                    f"{y['us'] / x['us']:.3f}", *cells)  # fmt: skip
    console.print(out)
    for path, mine in ((a, left), (b, right)):
        if len(mine) > len(both):
            console.print(f"{path.name}: {len(mine) - len(both)} rows not timed in the other file")
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m profiling.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_case_arguments(p)
    p.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 512])
    p.add_argument("--backends", nargs="+", default=["auto"], choices=("auto", *BACKENDS))
    p.add_argument("--rounds", type=int, default=15, help="samples per row")
    p.add_argument("--sets", type=int, default=16, help="most sets of inputs that rotate")
    p.add_argument("--no-stages", action="store_true")
    p.add_argument("--json", type=Path)
    p.add_argument("--png", type=Path, help="time over tokens (needs matplotlib)")
    p.add_argument("--compare", type=Path, nargs=2, metavar=("A.JSON", "B.JSON"))
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    console = Console() if sys.stdout.isatty() else Console(width=150)
    try:
        if args.compare:
            return compare(args.compare[0], args.compare[1], console)
        return run(args, console)
    except (ValueError, RuntimeError, OSError, KeyError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2


def run(args: argparse.Namespace, console: Console) -> int:
    """Bench every token count and write what was asked for."""
    device = args.device
    names = list(dict.fromkeys(choose_backend("auto", device) if n == "auto" else n
                               for n in args.backends))  # fmt: skip
    if "sim" in names:
        raise ValueError("the simulator tells no time: python -m profiling.model forecasts it")
    cases = [case_of(args, tokens) for tokens in args.tokens]
    peaks, rates = peaks_here(device)
    options = Options(args.rounds, args.sets, not args.no_stages, peaks)
    found = machine(device)
    where = found.get("gpu", f"CPU, {found.get('threads')} threads")
    console.print(f"{where}, torch {found['torch']}, commit {found['commit']}")
    if peaks is not None:
        flop = peaks.fp4 or peaks.bf16
        console.print(
            f"roof: {peaks.memory / 1e12:.3g} TB/s, {flop / 1e12:.4g} TFLOP/s ({peaks.source})"
        )
    result = {"machine": found, "rates": rates, "command": sys.argv[1:]}
    rows: list[Row] = []
    layers: dict[str, MoE] = {}
    for case in cases:
        rows += bench(case, names, device, options, layers)
        if args.json:  # after every case: what is done is kept when a later one fails
            args.json.write_text(json.dumps({**result, "rows": rows}, indent=1))
    report(rows, console)
    if device.type == "cuda":
        found["state_after"] = timing.device_state()
    if args.json:
        args.json.write_text(json.dumps({**result, "rows": rows}, indent=1))
    if args.png:
        from profiling.pictures import bench_picture

        bench_picture(args.png, f"{args.case}, {args.ranks} ranks, {where}", rows)
    return 0 if any("us" in r for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
