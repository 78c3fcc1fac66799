"""What a Hopper GEMM waits for: the same kernel with its loads, its decode or its products left
out, timed in turn.

    python -m profiling.ablate_sm90 [--cases qwen-L1 flash-L1] [--rows-per-expert 64 128]
                                    [--configs duo] [--json out.json]

A column is named after what is kept (`profiling.ablated_sm90`). When the whole takes as long as its
slowest part, that part is the roof; as long as the sum, nothing overlaps. All experts have the same
number of rows, so that one token size is compiled and no tile is padded. Random routing takes
longer. Method: `profiling.timing`, as `bench_sm90`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from cute_kernels.sm90.config import CONFIGS, Sm90Config
from profiling.bench_sm90 import CASES, Case, Inputs, launches, offsets_of, random_weight
from profiling.timing import Race

CHOICES = {c.name: c for c in CONFIGS if c.burst == 4}
PARTS = ("loads", "decode", "products")
KEPT = [kept for n in (3, 2, 1) for kept in itertools.combinations(PARTS, n)]


def one_size(config: Sm90Config, rows: int) -> Sm90Config:
    """The configuration with the token size of tiles of ``rows`` rows alone.

    Raises ValueError when they do not fit a tile, or fill none of its sizes.
    """
    if rows not in config.token_sizes:
        raise ValueError(f"{config.name} has tiles of {config.token_sizes} rows, not of {rows}")
    return dataclasses.replace(config, name=f"{config.name}{rows}", token_sizes=(rows,))


def ablate(case: Case, rows_per_expert: int, config: Sm90Config) -> dict[str, float]:
    """What is kept -> microseconds of one launch, median. Needs a Hopper GPU."""
    from cute_kernels.sm90.epilogues import StoreRows
    from cute_kernels.sm90.loads import ContiguousRows
    from profiling.ablated_sm90 import AblatedGemm

    rows = rows_per_expert * case.experts
    weight = random_weight(case, gated=False)
    offsets = offsets_of(torch.full((case.experts,), rows_per_expert)).cuda()
    xs = [torch.randn(rows, case.k, device="cuda").bfloat16() for _ in range(4)]
    inputs = Inputs(xs, [offsets] * len(xs), case.experts)
    race = Race(torch.device("cuda"), rounds=5)
    for kept in KEPT:
        gemm = AblatedGemm(ContiguousRows(), StoreRows(), config, kept)
        race.add(" + ".join(kept), launches(gemm, case, inputs, weight))
    return {name: times.median for name, times in race.run().items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.ablate_sm90",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", default=["qwen-L1", "flash-L1"], choices=list(CASES))
    parser.add_argument("--rows-per-expert", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--configs", nargs="+", default=["duo"], choices=list(CHOICES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    grid = list(itertools.product(options.cases, options.rows_per_expert, options.configs))
    try:
        configs = [one_size(CHOICES[name], rows) for _, rows, name in grid]
    except ValueError as error:
        parser.error(str(error))
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.stderr.write("ablate_sm90 needs a Hopper GPU (compute capability 9.0)\n")
        return 1
    found: list[dict[str, Any]] = []
    for (name, rows, config_name), config in zip(grid, configs):
        times = ablate(CASES[name], rows, config)
        found.append({"case": name, "rows_per_expert": rows, "config": config_name, "us": times})
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
    Console(width=150).print(table(found))
    return 0


def table(found: list[dict[str, Any]]) -> Table:
    """One row per case, microseconds."""
    out = Table(title=f"{torch.cuda.get_device_name()}: microseconds with only these parts")
    for heading in ("case", "rows per expert", "config", *(" + ".join(kept) for kept in KEPT)):
        out.add_column(heading, justify="left" if heading in ("case", "config") else "right")
    for row in found:
        times = [f"{row['us'][' + '.join(kept)]:.1f}" for kept in KEPT]
        out.add_row(row["case"], str(row["rows_per_expert"]), row["config"], *times)
    return out


if __name__ == "__main__":
    sys.exit(main())
