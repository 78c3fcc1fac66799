"""Seconds until a layer on the SM100 kernels is ready: a first process with an empty kernel cache,
then a second one.

    python -m profiling.cold_start [--max-tokens 8192] [--hidden 7168] [--dynamic] [--json FILE]

Each process imports the packages, then the DSL, builds a layer and calls ``warmup(max_tokens)``.
Kernels are compiled for sm_100a and, without such a GPU, kept for the simulator: nothing is
launched. ``wall`` depends on what else the machine does, ``cpu`` is the time of the process itself.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
import time
from typing import Any


def start(max_tokens: int, hidden: int, dynamic: bool) -> dict[str, Any]:
    """What one process takes; times in seconds."""
    begun = time.perf_counter()
    import torch

    from cute_kernels import compile as compiler
    from moe import ExpertWeights, MoE, MoEConfig

    imported = time.perf_counter()
    # kernels are classes of the DSL, which their first use would import
    importlib.import_module("cute_kernels.sm100.grouped_gemm")
    known = time.perf_counter()
    experts, inter = 8, 256
    weight = torch.ones(experts, inter, hidden)
    gh = None if dynamic else torch.full((experts,), 1e-3)
    weights = ExpertWeights.from_bf16(weight, weight, weight.mT.contiguous(), gh=gh)
    backend = "sm100" if torch.cuda.is_available() else "sim"
    layer = MoE(MoEConfig(hidden, inter, experts, 8), weights, backend=backend)
    before, cpu = time.perf_counter(), time.process_time()
    layer.warmup(max_tokens)
    stats = compiler.stats()
    return {
        "imports_wall": imported - begun,
        "dsl_import_wall": known - imported,
        "warmup_wall": time.perf_counter() - before,
        "warmup_cpu": time.process_time() - cpu,
        "compiles": stats.compiles,
        "from_disk": stats.disk_hits,
        "kernels_wall": stats.seconds,
    }


def measure(max_tokens: int, hidden: int, dynamic: bool) -> list[dict[str, Any]]:
    """First and second process, sharing a cache that is empty at first."""
    options = ["--max-tokens", str(max_tokens), "--hidden", str(hidden)]
    command = [sys.executable, "-m", "profiling.cold_start", "--child", *options]
    with tempfile.TemporaryDirectory() as cache:
        # by the command `env`: only one module of the packages touches the environment
        prefix = ["env", f"NVFP4_MEGAMOE_CACHE_DIR={cache}"]
        whole = [*prefix, *command, *(["--dynamic"] if dynamic else [])]
        runs = [subprocess.run(whole, capture_output=True, text=True) for _ in range(2)]
    for run in runs:
        if run.returncode:
            raise RuntimeError(f"a child process failed:\n{run.stderr[-2000:]}")
    return [json.loads(run.stdout.splitlines()[-1]) for run in runs]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.cold_start", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--max-tokens", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--dynamic", action="store_true", help="one outer scale per row of h")
    parser.add_argument("--json", help="write the times here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        found = start(args.max_tokens, args.hidden, args.dynamic)
        sys.stdout.write(json.dumps(found) + "\n")
        return
    runs = measure(args.max_tokens, args.hidden, args.dynamic)
    for name, run in zip(("empty cache", "second process"), runs):
        values = "  ".join(
            f"{key} {value:.2f} s" if isinstance(value, float) else f"{key} {value}"
            for key, value in run.items()
        )
        sys.stdout.write(f"{name:15s} {values}\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(dict(zip(("first", "second"), runs)), file, indent=1)


if __name__ == "__main__":
    main()
