"""NVFP4 x bf16 grouped GEMM on Hopper against torch's bf16 one, with the roofs measured in the same
run.

    python -m profiling.bench_sm90 [--cases L1,L2] [--rows 6,384,...] [--json out.json]

Method: every method of a case is captured into one CUDA graph of several launches whose inputs
differ (other experts or other rows; together they exceed the L2), the graphs are replayed in turn,
and the median over replays counts. Copy rate: bytes read plus written by a large element-wise copy
(2 GiB each way). Dense rate: an 8192^3 bf16 product.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from cute_kernels.activations import SwiGLU
from cute_kernels.sm90 import host
from cute_kernels.sm90.config import Sm90Config, choose_config
from cute_kernels.sm90.weights import Sm90Weight, blob_shape

ROWS = (6, 48, 96, 384, 1536, 6144, 24576)
Method = Callable[[int], object]  # launch with the inputs of one rotation


@dataclasses.dataclass(frozen=True)
class Case:
    """One GEMM of the expert MLP on one rank: E local experts, weight (rows, k)."""

    name: str
    k: int
    rows: int
    experts: int = 48


CASES = {c.name: c for c in (Case("L1", 7168, 6144), Case("L2", 3072, 7168))}


def random_counts(num_rows: int, experts: int, generator: torch.Generator) -> Tensor:
    """Rows per expert when every row picks one at random; up to 8 rows: distinct experts (one
    token's top-k)."""
    if num_rows <= 8:
        chosen = torch.randperm(experts, generator=generator)[:num_rows]
        return torch.zeros(experts, dtype=torch.int64).index_fill_(0, chosen, 1)
    return torch.bincount(
        torch.randint(experts, (num_rows,), generator=generator), minlength=experts
    )


def offsets_of(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)


def random_weight(case: Case, gated: bool) -> Sm90Weight:
    """Random codes and scales near 1, in packed form at once (values do not matter, bits are
    uniform)."""
    blob = torch.randint(
        0, 256, (case.experts, *blob_shape(case.rows, case.k)), dtype=torch.uint8, device="cuda"
    )
    scales = blob[..., 2048:]
    scales.copy_(
        torch.where(torch.rand(scales.shape, device="cuda") < 0.5, 0xAA, 0xBB)
    )  # any two bytes stay finite
    alpha = torch.full((case.experts, 2), 0.01, device="cuda")
    return Sm90Weight(blob, alpha, case.rows, case.k, gated)


class Timer:
    """Graphs of `launches` calls each, replayed in turn."""

    def __init__(self, launches: int, replays: int) -> None:
        self.launches, self.replays = launches, replays
        self.graphs: dict[str, torch.cuda.CUDAGraph] = {}

    def add(self, name: str, method: Method) -> None:
        method(0)  # compile and load outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(self.launches):
                method(i)
        self.graphs[name] = graph

    def run(self) -> dict[str, float]:
        """Median microseconds of one launch."""
        times: dict[str, list[float]] = {name: [] for name in self.graphs}
        for _ in range(self.replays + 1):
            for name, graph in self.graphs.items():
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                times[name].append(start.elapsed_time(end) * 1e3 / self.launches)
        return {name: statistics.median(t[1:]) for name, t in times.items()}


def roofs() -> tuple[float, float]:
    """(copy bytes/s read + written, dense bf16 FLOP/s) of this GPU now."""
    a = torch.randn(1 << 29, device="cuda")
    b = torch.empty_like(a)
    m = [torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2)]
    timer = Timer(4, 7)
    timer.add("copy", lambda i: torch.add(a, 1, out=b))
    timer.add("dense", lambda i: torch.mm(*m))
    t = timer.run()
    return 8 * a.numel() / t["copy"] * 1e6, 2 * 8192**3 / t["dense"] * 1e6


def bench_case(
    case: Case,
    num_rows: int,
    configs: dict[str, Sm90Config | None],
    with_torch: bool,
    gated: bool,
    weight: Sm90Weight,
    dense: Tensor | None,
) -> dict[str, object]:
    """Times of every method, in microseconds."""
    generator = torch.Generator().manual_seed(num_rows)
    launches = 8 if num_rows <= 1536 else 4
    counts = [random_counts(num_rows, case.experts, generator) for _ in range(launches)]
    offsets = [offsets_of(c).cuda() for c in counts]
    xs = [torch.randn(num_rows, case.k, device="cuda").bfloat16() for _ in range(launches)]
    activation = SwiGLU() if gated else None
    timer = Timer(launches, 15 if num_rows <= 1536 else 9)
    keep = []
    for name, config in configs.items():
        config = config or choose_config(num_rows, case.experts)
        sizes = host.scratch_sizes(case.rows, case.k, num_rows, config)
        scratch = host.Sm90Scratch.for_calls("cuda", *sizes)
        out = torch.empty(
            num_rows, case.rows // (2 if gated else 1), device="cuda", dtype=torch.bfloat16
        )
        keep.append((scratch, out))

        def ours(i: int, config=config, scratch=scratch, out=out) -> None:
            host.sm90_grouped_gemm(
                xs[i],
                weight,
                offsets[i],
                activation=activation,
                config=config,
                scratch=scratch,
                out=out,
            )

        timer.add(name, ours)
    if with_torch and dense is not None:
        ends = [o[1:].contiguous() for o in offsets]
        timer.add("torch", lambda i: torch._grouped_mm(xs[i], dense, offs=ends[i]))
    if (
        num_rows >= 6144
    ):  # the dense rate a hot GPU reaches: the power limit lowers clocks in long runs
        square = [torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2)]
        timer.add("dense", lambda i: torch.mm(*square))
    times = timer.run()
    active = sum(int((c > 0).sum()) for c in counts) / launches
    weight_bytes = active * case.rows * case.k * 9 / 16
    flop = 2.0 * num_rows * case.rows * case.k
    hot = times.pop("dense", None)
    return {
        "case": case.name,
        "rows": num_rows,
        "active_experts": active,
        "weight_bytes": weight_bytes,
        "flop": flop,
        "us": times,
        "hot_dense": hot and 2 * 8192**3 / hot * 1e6,
    }


def report(results: list[dict], copy: float, dense: float, write: Callable[[str], object]) -> None:
    write(f"copy {copy / 1e9:.0f} GB/s, dense bf16 {dense / 1e12:.0f} TFLOP/s\n")
    for r in results:
        write(f"{r['case']} rows {r['rows']:6d} experts {r['active_experts']:5.1f}")
        roof = r["hot_dense"] or dense
        for name, us in r["us"].items():
            speed, rate = r["weight_bytes"] / us * 1e6, r["flop"] / us * 1e6
            write(
                f" | {name} {us:8.1f} us {speed / 1e9:5.0f} GB/s {rate / 1e12:5.0f} TF "
                f"({speed / copy:.2f} copy, {rate / roof:.2f} dense)"
            )
        write(f" | dense here {roof / 1e12:.0f} TF\n" if r["hot_dense"] else "\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="L1,L2")
    parser.add_argument("--rows", default=",".join(map(str, ROWS)))
    parser.add_argument("--activation", action="store_true", help="L1 with SwiGLU in the epilogue")
    parser.add_argument("--no-torch", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args(argv)
    copy, dense_rate = roofs()
    results = []
    for name in options.cases.split(","):
        case = CASES[name]
        gated = options.activation and name == "L1"
        weight = random_weight(case, gated)
        dense = None
        if not options.no_torch:
            dense = torch.randn(
                case.experts, case.rows, case.k, device="cuda", dtype=torch.bfloat16
            ).transpose(1, 2)
        for rows in map(int, options.rows.split(",")):
            results.append(
                bench_case(case, rows, {"ours": None}, dense is not None, gated, weight, dense)
            )
            report(results[-1:], copy, dense_rate, sys.stdout.write)
            sys.stdout.flush()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {
                    "copy": copy,
                    "dense": dense_rate,
                    "gpu": torch.cuda.get_device_name(),
                    "results": results,
                },
                file,
            )


if __name__ == "__main__":
    main()
