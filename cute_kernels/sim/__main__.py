"""Run a saved launch again: `python -m cute_kernels.sim launch.npz`.

`Simulator(record=True)` keeps the launches it sees in `s.requests`;
`s.requests[0].save("launch.npz")`
writes one. With --schedules N the launch runs under N schedules (lazy, eager, then random ones):
a fault
in any of them, or results that differ between them, is reported and gives exit status 1.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import torch

from cute_kernels.sim.checks import SimError
from cute_kernels.sim.ptx import PtxError
from cute_kernels.sim.saved import SavedLaunch
from cute_kernels.sim.simulator import CORES, SCHEDULES, Simulator


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m cute_kernels.sim", description=__doc__.split("\n")[0]
    )
    parser.add_argument("launch", help="a file written by SavedLaunch.save (.npz)")
    parser.add_argument(
        "--ptx", help="run this PTX file instead of the saved text (same parameters)"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default="random")
    parser.add_argument("--seed", type=int, default=0, help="of the random schedule")
    parser.add_argument("--schedules", type=int, default=1, metavar="N",
                        help="fuzz: lazy, eager, then N - 2 random schedules")  # fmt: skip
    parser.add_argument(
        "--trace", metavar="OUT.JSON", help="timeline for Perfetto, of the last run"
    )
    parser.add_argument("--core", choices=CORES, default="auto")
    parser.add_argument("--counters", action="store_true", help="print the table of counters")
    return parser.parse_args(argv)


def run_once(saved: SavedLaunch, seed: int, schedule: str, options: argparse.Namespace) -> Any:
    """One run on fresh copies of the memory; returns (simulator, hash of all allocations after
    it)."""
    simulator = Simulator(seed, schedule, trace=bool(options.trace), core=options.core)
    copies = {address: torch.from_numpy(raw.copy()) for address, raw in saved.memory.items()}
    params = saved.rebased({address: t.data_ptr() for address, t in copies.items()})
    module = saved.module()
    function = module.functions.get(saved.name)
    if function is None:
        raise SimError(
            f"kernel {saved.name} is not in the PTX, which has {sorted(module.functions)}"
        )
    simulator.run_module(module, function, params, saved)
    digest = hashlib.sha256()
    for address in sorted(copies):
        digest.update(copies[address].numpy().tobytes())
    return simulator, digest.hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = arguments(argv)
    try:
        saved = SavedLaunch.load(options.launch)
        if options.ptx:
            with open(options.ptx, encoding="utf-8") as file:
                saved.ptx = file.read()
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    plan = [(options.seed, options.schedule)]
    if options.schedules > 1:
        plan = [(0, "lazy"), (0, "eager"), *((s, "random") for s in range(options.schedules - 2))]
    results: dict[str, tuple[int, str]] = {}
    faults = 0
    for seed, schedule in plan:
        try:
            simulator, digest = run_once(saved, seed, schedule, options)
        except (SimError, PtxError) as error:
            faults += 1
            sys.stdout.write(f"{schedule} {seed}: {type(error).__name__}: {error}\n")
            continue
        results.setdefault(digest, (seed, schedule))
        result = simulator.launches[-1]
        sys.stdout.write(
            f"{schedule} {seed}: {result.name} ran in {result.seconds:.3f} s, "
            f"memory {digest[:16]}\n"
        )
        if options.counters:
            sys.stdout.write(result.counters.table() + "\n")
        if options.trace and simulator.trace is not None:
            simulator.trace.save(options.trace)
    if len(results) > 1:
        sys.stdout.write(f"the results differ between schedules: {sorted(results.values())}\n")
    return 1 if faults or len(results) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
