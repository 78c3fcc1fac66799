"""Nsight Compute on the stages of the layer, as a short table.

    python -m profiling.ncu --case deepseek-v4-pro --ranks 8 --tokens 64 --ranges moe.l1 moe.l2
    python -m profiling.ncu --processes 8 -- torchrun --nproc-per-node 8 -m profiling.bench_ep
    python -m profiling.ncu --parse report.csv

One command: it starts `profiling.workload` (or what follows ``--``) under ncu, warm and with NVTX
ranges, profiles the kernels inside the chosen ranges and prints, for each, what usually decides:
duration, tensor pipe, issue slots, ALU, shared memory, DRAM, L2, the reasons for which warps stall,
registers. Clocks are left alone (``--clock-control none``): compare durations of one run,
percentages of any. Kernels are replayed to collect the counters, each time with cold caches
(``--cache-control all``).

Several processes (``--processes``) advance in lockstep: a kernel that waits for a peer would hang
if ncu profiled one rank at a time.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moe import ranges
from profiling.nsight import base_parser, run_tool, short_name

# label -> names of the counter on different chips: the first that the report has is shown
COUNTERS = {
    "us": ("gpu__time_duration.sum",),
    "tensor %": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    ),
    "issue %": ("smsp__issue_active.avg.pct_of_peak_sustained_active",),
    "ALU %": ("sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",),
    "shared %": ("l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",),
    "DRAM %": ("dram__throughput.avg.pct_of_peak_sustained_elapsed",),
    "DRAM read": ("dram__bytes_read.sum",),
    "DRAM written": ("dram__bytes_write.sum",),
    "L2 %": ("lts__throughput.avg.pct_of_peak_sustained_elapsed",),
    "L2 hit %": ("lts__t_sector_hit_rate.pct",),
    "registers": ("launch__registers_per_thread",),
    "smem kB": ("launch__shared_mem_per_block",),
    "warps %": ("sm__warps_active.avg.pct_of_peak_sustained_active",),
}
STALL = "smsp__average_warps_issue_stalled_"
STALL_END = "_per_issue_active.ratio"
EXTRA = ("launch__grid_size", "launch__block_size", "launch__occupancy_limit_shared_mem")
UNITS = {
    "nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3,
    "second": 1.0, "s": 1.0, "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9,
    "byte/block": 1.0, "Kbyte/block": 1e3,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One profiled launch. ``values`` by label of `COUNTERS`: seconds under "us" turned into
    microseconds, bytes, percent; a counter that the report lacks is missing. ``stalls``: reason ->
    warps that wait for it per issued instruction, largest first."""

    name: str
    range: str
    process: str
    values: dict[str, float]
    stalls: dict[str, float]


def metrics() -> str:
    """Value of ncu's --metrics. Names unknown to a chip are left out by ncu with a warning."""
    names = [n for group in COUNTERS.values() for n in group]
    return ",".join([*names, *EXTRA, f"regex:{STALL}.*{STALL_END.replace('.', '[.]')}"])


def command(
    target: list[str], csv_file: Path, chosen: list[str], processes: int, ncu: str = "ncu"
) -> list[str]:
    """ncu around ``target``; with several processes, one lockstep group."""
    out = [ncu, "--clock-control", "none", "--cache-control", "all", "--csv", "--page", "raw",
           "--log-file", str(csv_file), "--nvtx", "--profile-from-start", "off",
           "--metrics", metrics(), "--target-processes", "all"]  # fmt: skip
    for name in chosen:
        out += ["--nvtx-include", f"{name}/"]  # a push/pop range of the default domain
    if processes > 1:
        # shmem: the ranks are children of this one ncu, on one host
        out += ["--lockstep-kernel-launch", "--communicator", "shmem",
                "--communicator-shmem-num-peers", str(processes)]  # fmt: skip
    return [*out, *target]


def parse(text: str) -> list[Kernel]:
    """Kernels of a raw page in CSV: a row of names, a row of units, a row per launch. Lines before
    the names (==PROF== and the program's own output) are skipped.

    Raises ValueError when there is no such table.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(explain_failure(text))
    rows = list(csv.reader(line for line in lines[start:] if line.startswith('"')))
    names, units = rows[0], dict(zip(rows[0], rows[1]))
    out = []
    for cells in rows[2:]:
        row = dict(zip(names, cells))
        out.append(
            Kernel(
                short_name(row["Kernel Name"]), range_of(row), row.get("Process ID", ""),
                counters(row, units), stall_reasons(row, units),
            )
        )  # fmt: skip
    return out


def counters(row: dict[str, str], units: dict[str, str]) -> dict[str, float]:
    out = {}
    for label, names in COUNTERS.items():
        for name in names:
            value = number(row.get(name, ""), units.get(name, ""))
            if value is not None:
                out[label] = value * (1e6 if label == "us" else 1)
                break
    if "smem kB" in out:
        out["smem kB"] /= 1e3
    return out


def number(cell: str, unit: str) -> float | None:
    """A cell in base units: seconds, bytes; None for an empty or unavailable one."""
    text = cell.replace(",", "")
    try:
        return float(text) * UNITS.get(unit, 1.0)
    except ValueError:
        return None


def stall_reasons(row: dict[str, str], units: dict[str, str]) -> dict[str, float]:
    found = {}
    for name, cell in row.items():
        if name.startswith(STALL) and name.endswith(STALL_END):
            value = number(cell, units.get(name, ""))
            if value:
                found[name.removeprefix(STALL).removesuffix(STALL_END)] = value
    return dict(sorted(found.items(), key=lambda kv: -kv[1]))


def range_of(row: dict[str, str]) -> str:
    """The innermost range of ours that the NVTX columns name."""
    text = " ".join(v for k, v in row.items() if "Range" in k and v)
    return next((name for name in ranges.STAGES if name in text), "")


def explain_failure(text: str) -> str:
    """One line for the usual reasons why ncu gives no table."""
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "this user may not read the GPU's counters (ERR_NVGPUCTRPERM): run as root, or load "
            "the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    if "LibraryNotLoaded" in text or "Failed to initialize the profiler" in text:
        return (
            "ncu cannot initialise the profiler here: sandboxes and some virtual machines hide it"
        )
    if "unrecognised option" in text and "communicator" in text:
        return "this ncu cannot keep ranks in lockstep: --processes needs Nsight Compute 2026.1"
    if "No kernels were profiled" in text:
        return "no kernel ran inside the chosen ranges: is the backend on the GPU?"
    tail = " | ".join(line for line in text.splitlines()[-3:] if line.strip())
    return f"ncu gave no table: {tail or 'no output'}"


COLUMNS = {  # label of `COUNTERS` -> format, in the order of the table
    "us": ".2f", "tensor %": ".1f", "issue %": ".1f", "ALU %": ".1f", "shared %": ".1f",
    "DRAM %": ".1f", "DRAM TB/s": ".2f", "L2 %": ".1f", "L2 hit %": ".1f", "registers": ".0f",
    "smem kB": ".1f", "warps %": ".1f",
}  # fmt: skip


def report(kernels: list[Kernel], console: Console) -> None:
    out = Table(title="Nsight Compute", title_justify="left")
    for name in ("range", "kernel", *COLUMNS, "stalled on"):
        out.add_column(name, justify="right" if name in COLUMNS else "left", overflow="fold")
    for k in kernels:
        v = dict(k.values)
        moved = v.get("DRAM read", 0.0) + v.get("DRAM written", 0.0)
        if moved and v.get("us"):
            v["DRAM TB/s"] = moved / v["us"] / 1e6
        cells = [format(v[name], form) if name in v else "" for name, form in COLUMNS.items()]
        stalls = ", ".join(f"{n} {x:.2g}" for n, x in list(k.stalls.items())[:3])
        out.add_row(k.range, k.name, *cells, stalls)
    console.print(out)


def parser() -> argparse.ArgumentParser:
    p = base_parser("ncu", __doc__, "a kept report")
    p.set_defaults(calls=1)  # kernels are replayed: more calls say nothing new
    p.add_argument("--ranges", nargs="+", default=list(ranges.STAGES), choices=ranges.STAGES)
    p.add_argument("--processes", type=int, default=1, help="ranks in lockstep (needs ncu 2026.1)")
    p.add_argument("--csv", type=Path, help="keep the report")
    return p


def main(argv: list[str] | None = None) -> int:
    return run_tool(argv, parser(), 200, lambda text, console: report(parse(text), console), run)


def run(args: argparse.Namespace, target: list[str], console: Console) -> int:
    """Raises RuntimeError when ncu is missing, ValueError when it gives no table."""
    with tempfile.TemporaryDirectory() as folder:
        kept = args.csv or Path(folder) / "report.csv"
        line = command(target, kept, args.ranges, args.processes)
        if args.dry_run:
            console.print(" ".join(line), soft_wrap=True, markup=False)
            return 0
        if shutil.which("ncu") is None:
            raise RuntimeError(
                "ncu (Nsight Compute, part of the CUDA toolkit) is not on the PATH; --dry-run "
                "prints the command for a machine that has it"
            )
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        text = kept.read_text(errors="replace") if kept.exists() else ""
        if done.returncode and '"ID"' not in text:
            raise ValueError(explain_failure(f"{text}\n{done.stdout}\n{done.stderr}"))
        report(parse(text), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
