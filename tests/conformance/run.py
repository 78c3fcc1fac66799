"""Run the peers' kernels in the simulator and compare them with fp64.

    python -m tests.conformance.run                      # every peer, 20 schedules each
    python -m tests.conformance.run --only flashinfer.l1 --schedules 3
    python -m tests.conformance.run --arch sm_90a        # the peers for Hopper

A case passes when no schedule is reported, every result is right, and (where the kernel adds in a
fixed order) every schedule gives the same bits.
"""

import argparse
import importlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

PEERS = {"sm_100a": ("lightmoe", "cudnn", "flashinfer", "quack"), "sm_90a": ("quack_sm90",)}
CAPABILITY = {"sm_100a": (10, 0), "sm_90a": (9, 0)}
SCHEDULES = 20


def _schedules(count: int) -> Iterator[tuple[int, str]]:
    """(seed, policy): the two extremes first, then seeded random ones."""
    yield from ((0, "lazy"), (0, "eager"))[:count]
    yield from ((seed, "random") for seed in range(count - 2))


def _run_case(case: Any, schedules: int, arch: str) -> tuple[str, float]:
    """One line about the case and the seconds of its fastest schedule; raises what it finds."""
    from cute_kernels import sim
    from tests.conformance.data import Mismatch

    first, verdict, best = None, "", float("inf")
    for seed, policy in _schedules(schedules):
        case.reset()
        begin = time.perf_counter()
        try:
            with sim.Simulator(seed=seed, schedule=policy, arch=arch):
                case.launch()
        except Exception as error:
            error.add_note(f"{case.name}, schedule {policy}, seed {seed}")
            raise
        best = min(best, time.perf_counter() - begin)
        verdict = case.check()
        bits = case.bits()
        if case.ordered and first is not None:
            for a, b in zip(first, bits):
                if not bool((a == b).all()):
                    raise Mismatch(f"{case.name}: schedule {policy} {seed} changes the result")
        first = first or bits
    return verdict, best


def _cases(peers: list[str]) -> Iterator[Any]:
    for peer in peers:
        module = importlib.import_module(f"tests.conformance.peer_{peer}")
        yield from module.cases()


def main() -> int:
    """Command line; exit status 1 if a case fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.run", description=__doc__)
    parser.add_argument("--arch", choices=list(PEERS), default="sm_100a")
    parser.add_argument("--peers", nargs="+", help="default: all of the target")
    parser.add_argument("--only", default="", help="run cases whose name contains this")
    parser.add_argument("--schedules", type=int, default=SCHEDULES)
    parser.add_argument("--keep-going", action="store_true", help="go on after a failing case")
    args = parser.parse_args()
    peers = args.peers or list(PEERS[args.arch])
    if not set(peers) <= set(PEERS[args.arch]):
        parser.error(f"peers of {args.arch} are {', '.join(PEERS[args.arch])}")

    from cute_kernels import compile as kernels

    kernels.enable_simulator()
    os.environ["CUTE_DSL_ARCH"] = args.arch  # read when a peer imports the DSL
    os.environ["QUACK_CACHE_ENABLED"] = "0"  # the peer's own disk cache would bypass the compiler
    from tests.conformance import host

    host.present_gpu(CAPABILITY[args.arch])
    failed = 0
    with host.quiet():
        for case in _cases(peers):
            if args.only not in case.name:
                continue
            try:
                verdict, seconds = _run_case(case, args.schedules, args.arch)
                line = f"ok    {case.name:36s} {seconds:7.2f} s  {verdict}"
            except Exception as error:
                failed += 1
                notes = "; ".join(getattr(error, "__notes__", []))
                line = f"FAIL  {case.name:36s} {type(error).__name__}: {error}\n      {notes}"
                if not args.keep_going:
                    sys.stdout.write(line + "\n")
                    raise
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
