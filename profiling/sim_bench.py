"""Speed of the functional simulator: seconds per launch of a GEMM, and of many schedules of it.

    python -m profiling.sim_bench                 # 256x256x512, then 200 schedules over 2 processes
    python -m profiling.sim_bench --json out.json

Kernels are the specimens of tests/sim, so this runs from a checkout.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from typing import Any

import torch

M, N, K = 256, 256, 512


def _program(pair: bool) -> Any:
    from tests.sim.programs import GemmCase, gemm

    return gemm(GemmCase(M, N, K, pair=pair))


def _time(program: Any, seed: int, schedule: str) -> float:
    begin = time.perf_counter()
    program.run(seed, schedule)
    seconds = time.perf_counter() - begin
    mismatch = program.mismatch()
    if mismatch:
        raise AssertionError(mismatch)
    return seconds


def single(pair: bool, repeats: int = 5) -> dict[str, float]:
    """Median seconds per launch by schedule, after one warm-up run that compiles the core."""
    program = _program(pair)
    begin = time.perf_counter()
    _time(program, 0, "lazy")
    first = time.perf_counter() - begin
    result = {"first": first}
    for schedule in ("lazy", "eager", "random"):
        result[schedule] = statistics.median(_time(program, i, schedule) for i in range(repeats))
    return result


def _schedules(arguments: tuple[int, int]) -> int:
    first, last = arguments
    torch.set_num_threads(1)
    program = _program(pair=False)
    for seed in range(first, last):
        _time(program, seed, "random")
    return last - first


def fuzz(count: int, processes: int) -> float:
    """Seconds for `count` random schedules of the one-CTA kernel, split over processes."""
    step = -(-count // processes)
    parts = [(i, min(i + step, count)) for i in range(0, count, step)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        begin = time.perf_counter()
        done = sum(pool.map(_schedules, parts))
        seconds = time.perf_counter() - begin
    if done != count:
        raise AssertionError(f"ran {done} of {count} schedules")
    return seconds


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m profiling.sim_bench", description=__doc__)
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {"problem": [M, N, K]}
    for pair in (False, True):
        label = "2-CTA" if pair else "1-CTA"
        figures[label] = single(pair)
        text = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in figures[label].items())
        sys.stdout.write(f"{label} {M}x{N}x{K}: {text}\n")
    if args.schedules:
        seconds = fuzz(args.schedules, args.processes)
        figures["fuzz"] = {"schedules": args.schedules, "seconds": seconds}
        sys.stdout.write(
            f"{args.schedules} schedules on {args.processes} processes: {seconds:.1f} s "
            "(process start and compile included)\n"
        )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(figures, file, indent=1)


if __name__ == "__main__":
    main()
