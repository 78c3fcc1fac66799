"""Nsight Systems on a call of the layer: which kernel ran when, as a short table by stage.

    python -m profiling.nsys --case deepseek-v4-flash --ranks 8 --tokens 64 --report layer
    python -m profiling.nsys --report ranks -- torchrun --nproc-per-node 8 -m profiling.bench_ep
    python -m profiling.nsys --parse layer_nvtx_kern_sum.csv

One command: it starts `profiling.workload` (or what follows ``--``) under nsys, warm and with NVTX
ranges, keeps ``layer.nsys-rep`` for the GUI, lets nsys write its report ``nvtx_kern_sum`` and
prints it: stage, kernel, launches, time. All ranks of a job are recorded into one report; nothing
is replayed, so they need no lockstep.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moe import ranges
from profiling.nsight import base_parser, run_tool, short_name

REPORT = "nvtx_kern_sum"


@dataclasses.dataclass(frozen=True)
class KernelSum:
    """Launches of one kernel inside one range; microseconds in total and of the median launch."""

    range: str
    kernel: str
    launches: int
    total_us: float
    median_us: float


def record_command(target: list[str], report: Path, nsys: str = "nsys") -> list[str]:
    """nsys around ``target``: CUDA and NVTX, kernels of graphs one by one, from
    cudaProfilerStart to Stop."""
    return [
        nsys, "profile", "--trace=cuda,nvtx", "--cuda-graph-trace=node", "--sample=none",
        "--cpuctxsw=none", "--capture-range=cudaProfilerApi", "--capture-range-end=stop",
        "--force-overwrite=true", f"--output={report}", *target,
    ]  # fmt: skip


def stats_command(report: Path, nsys: str = "nsys") -> list[str]:
    """Writes <report>_nvtx_kern_sum.csv."""
    return [
        nsys, "stats", f"--report={REPORT}:base", "--format=csv", "--timeunit=nsec",
        "--force-export=true", "--force-overwrite=true", f"--output={report}",
        f"{report}.nsys-rep",
    ]  # fmt: skip


def parse(text: str) -> list[KernelSum]:
    """Rows of ``nvtx_kern_sum`` in CSV; lines in front of the header are skipped.

    Columns are found by their names, in nanoseconds. Raises ValueError when one is missing.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("NVTX Range")), None)
    if start is None:
        raise ValueError(explain_failure(text))
    out = []
    for row in csv.DictReader(lines[start:]):
        try:
            out.append(
                KernelSum(
                    row["NVTX Range"].lstrip(":"), short_name(row["Kernel Name"]),
                    int(row["Kern Inst"]), float(row["Total Time (ns)"]) / 1e3,
                    float(row.get("Med (ns)") or "nan") / 1e3,
                )
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise ValueError(f"{REPORT} has no column {error}: got {list(row)}") from error
    order = {name: i for i, name in enumerate(ranges.STAGES)}
    return sorted(out, key=lambda k: (order.get(k.range, len(order)), -k.total_us))


def explain_failure(text: str) -> str:
    """One line for the usual reasons why there is no report."""
    if "does not contain CUDA kernel data" in text or "does not contain NV Tools" in text:
        return "the report holds no kernels inside NVTX ranges: is the backend on the GPU?"
    if "QdstrmImporter" in text or ".qdstrm" in text:
        return "nsys recorded but cannot import its own file here: open the .qdstrm elsewhere"
    tail = " | ".join(line for line in text.splitlines()[-3:] if line.strip())
    return f"nsys gave no {REPORT}: {tail or 'no output'}"


def show(kernels: list[KernelSum], console: Console) -> None:
    out = Table(title="Nsight Systems: kernels of each stage", title_justify="left")
    for name in ("range", "kernel", "launches", "total us", "median us", "share"):
        text = name in ("range", "kernel")
        out.add_column(name, justify="left" if text else "right", overflow="fold")
    total = sum(k.total_us for k in kernels) or 1.0
    for k in kernels:
        out.add_row(k.range, k.kernel, str(k.launches), f"{k.total_us:.2f}", f"{k.median_us:.2f}",
                    f"{k.total_us / total:.3f}")  # fmt: skip
    console.print(out)


def parser() -> argparse.ArgumentParser:
    p = base_parser("nsys", __doc__, "a kept CSV")
    p.add_argument("--calls", type=int, default=5)
    p.add_argument("--report", type=Path, default=Path("layer"), help="name, without extension")
    return p


def main(argv: list[str] | None = None) -> int:
    return run_tool(argv, parser(), 140, lambda text, console: show(parse(text), console), run)


def run(args: argparse.Namespace, target: list[str], console: Console) -> int:
    """Raises RuntimeError when nsys is missing, ValueError when it gives no report."""
    commands = [record_command(target, args.report), stats_command(args.report)]
    if args.dry_run:
        for line in commands:
            console.print(" ".join(line), soft_wrap=True, markup=False)
        return 0
    if shutil.which("nsys") is None:
        raise RuntimeError(
            "nsys (Nsight Systems) is not on the PATH; --dry-run prints the commands for a machine "
            "that has it"
        )
    output = ""
    for line in commands:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        output += f"{done.stdout}\n{done.stderr}\n"
        if done.returncode:
            raise ValueError(explain_failure(output))
    kept = Path(f"{args.report}_{REPORT}_base.csv")
    if not kept.exists():
        kept = Path(f"{args.report}_{REPORT}.csv")
    show(parse(kept.read_text(errors="replace") if kept.exists() else output), console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
