"""NVFP4 x bf16 grouped GEMM on Hopper against its peers, with the roofs measured in the same run.

    python -m profiling.bench_sm90 [--cases L1 L2 qwen-L1 ...] [--rows 6 384 ...]
                                   [--peers "torch bf16" humming] [--json out.json] [--png out.png]
    python -m profiling.bench_sm90 --cases qwen-L1 --rows 8192 --configs trio duo --peers  # none
    python -m profiling.bench_sm90 --draw out.json --png out.png       # without a GPU

Method: `profiling.timing`: every contestant is one CUDA graph of several calls whose inputs differ
(other experts or other rows; together they exceed the L2), the graphs are replayed in turn, the
median counts. Copy rate: bytes read plus written by a large element-wise copy (2 GiB each way).
Dense rate: an 8192^3 bf16 product, cool before the first case and, where the power limit lowers the
clocks, once more among the contestants of the case. Goals: `profiling.layer_gpu.gemm_goal`. A peer
that cannot take part is named with the reason.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cute_kernels.activations import SwiGLU
from cute_kernels.launch import launch, multiprocessors
from cute_kernels.sm90 import host
from cute_kernels.sm90.config import CONFIGS, Sm90Config, choose_config, chunk_steps
from cute_kernels.sm90.weights import Sm90Weight, blob_shape
from profiling import pictures
from profiling.layer_gpu import gemm_goal
from profiling.peers_sm90 import PEERS, Unavailable
from profiling.timing import Op, Race, Roofs, measured_roofs

ROWS = (6, 48, 96, 384, 1536, 6144, 24576)
BY_NAME: dict[str, Sm90Config | None] = {c.name: c for c in CONFIGS}
Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """One GEMM of the expert MLP on one rank: E local experts, weight (rows, k)."""

    name: str
    k: int
    rows: int
    experts: int = 48


SHARE = (Case("L1", 7168, 6144), Case("L2", 3072, 7168))  # DeepSeek-V4-Pro on 8 ranks
CASES = {
    c.name: c
    for c in (
        *SHARE,
        Case("qwen-L1", 2048, 1536, 128),  # Qwen3-30B, short K
        Case("qwen-L2", 768, 2048, 128),
        Case("flash-L1", 4096, 4096, 64),  # DeepSeek-V4-Flash on 4 ranks
        Case("flash-L2", 2048, 4096, 64),
    )
}


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


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Rotating inputs of a case: rows and expert offsets, one of each per call of a graph."""

    xs: list[Tensor]
    offsets: list[Tensor]
    active: float  # experts with rows, mean

    @classmethod
    def make(cls, case: Case, num_rows: int) -> Inputs:
        generator = torch.Generator().manual_seed(num_rows)
        calls = range(8 if num_rows <= 1536 else 4)
        counts = [random_counts(num_rows, case.experts, generator) for _ in calls]
        xs = [torch.randn(num_rows, case.k, device="cuda").bfloat16() for _ in calls]
        active = sum(int((c > 0).sum()) for c in counts) / len(counts)
        return cls(xs, [offsets_of(c).cuda() for c in counts], active)


def ours(
    case: Case, inputs: Inputs, weight: Sm90Weight, config: Sm90Config | None = None
) -> list[Op]:
    """Our kernel on every input; ``config`` None: the one it chooses."""
    num_rows = inputs.xs[0].shape[0]
    config = config or choose_config(num_rows, case.experts)
    sizes = host.scratch_sizes(case.rows, case.k, num_rows, config)
    scratch = host.Sm90Scratch.for_calls("cuda", *sizes)
    shape = (num_rows, case.rows // (2 if weight.gated else 1))
    out = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    activation = SwiGLU() if weight.gated else None

    def run(x: Tensor, offsets: Tensor) -> Tensor:
        return host.sm90_grouped_gemm(
            x, weight, offsets, activation=activation, config=config, scratch=scratch, out=out
        )

    return [functools.partial(run, x, o) for x, o in zip(inputs.xs, inputs.offsets)]


def launches(gemm: Any, case: Case, inputs: Inputs, weight: Sm90Weight) -> list[Op]:
    """A `cute_kernels.sm90.grouped_gemm.Sm90GroupedGemm` or a variant of it that stores plain bf16
    rows, on every input, without the layer's operators."""
    num_rows, config = inputs.xs[0].shape[0], gemm.config
    sizes = host.scratch_sizes(case.rows, case.k, num_rows, config)
    scratch = host.Sm90Scratch.for_calls("cuda", *sizes)
    out = torch.empty((num_rows, case.rows), device="cuda", dtype=torch.bfloat16)
    ctas = multiprocessors(out.device) * config.ctas_per_sm
    shape = (case.experts, num_rows, case.k, case.rows, chunk_steps(case.k, config), ctas)

    def run(x: Tensor, offsets: Tensor) -> Tensor:
        pointers = (weight.blob, x, out, offsets, scratch.counters, scratch.partial)
        launch(gemm, out.device, *pointers, *shape, weight.alpha)
        return out

    return [functools.partial(run, x, o) for x, o in zip(inputs.xs, inputs.offsets)]


def bench_case(
    case: Case,
    num_rows: int,
    weight: Sm90Weight,
    configs: dict[str, Sm90Config | None],
    peers: list[str],
) -> Result:
    """Times of every contestant, in microseconds of one call, and what was left out and why."""
    inputs = Inputs.make(case, num_rows)
    race = Race(torch.device("cuda"), rounds=15 if num_rows <= 1536 else 9)
    missing = {}
    for name, config in configs.items():
        race.add(name, ours(case, inputs, weight, config))
    for name in peers:
        try:
            shape = (case.experts, case.rows, case.k)
            race.add(name, PEERS[name](shape, inputs.xs, inputs.offsets))
        except Exception as error:  # whatever a peer raises must not stop the others
            why = str(error) if isinstance(error, Unavailable) else repr(error)
            missing[name] = " ".join(why.split())[:300]
    if num_rows >= 6144:
        square = [torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2)]
        race.add("dense", [lambda: torch.mm(*square)] * 2)
    times = {name: t.as_json() for name, t in race.run().items()}
    hot = times.pop("dense", None)
    return {
        "case": case.name,
        "k": case.k,
        "n": case.rows,
        "rows": num_rows,
        "active_experts": inputs.active,
        "weight_bytes": inputs.active * case.rows * case.k * 9 / 16,
        "flop": 2.0 * num_rows * case.rows * case.k,
        "times": times,
        "missing": missing,
        "hot_dense": hot and 2 * 8192**3 / hot["us"] * 1e6,
    }


def goal_us(result: Result, roofs: Roofs) -> float:
    """Microseconds of the goal (`layer_gpu.gemm_goal`), with the dense rate of the case itself."""
    here = Roofs(roofs.copy, result["hot_dense"] or roofs.dense)
    return gemm_goal(result["rows"], result["active_experts"], result["n"], result["k"], here)[0]


def report(result: Result, roofs: Roofs) -> str:
    """One line per contestant."""
    roof = result["hot_dense"] or roofs.dense
    lines = [
        f"{result['case']} rows {result['rows']} experts {result['active_experts']:.1f} goal "
        f"{goal_us(result, roofs):.1f} us" + f", dense here {roof / 1e12:.0f} TFLOP/s"
    ]
    for name, times in result["times"].items():
        us = times["us"]
        speed, rate = result["weight_bytes"] / us * 1e6, result["flop"] / us * 1e6
        lines.append(
            f"  {name:14s} {us:8.1f} us  {speed / 1e9:5.0f} GB/s of FP4 weights "
            f"({speed / roofs.copy:.2f} copy)  {rate / 1e12:5.0f} TFLOP/s ({rate / roof:.2f} dense)"
        )
    lines += [f"  {name:14s} not run: {why}" for name, why in result["missing"].items()]
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    """Time over rows, one panel per GEMM: contestants and goal."""
    plt = pictures.pyplot()
    cases = list(dict.fromkeys(r["case"] for r in found["results"]))
    figure, panels = plt.subplots(1, len(cases), figsize=(6.5 * len(cases), 5), squeeze=False)
    for axes, case in zip(panels[0], cases):
        results = [r for r in found["results"] if r["case"] == case]
        names = dict.fromkeys(name for r in results for name in r["times"])
        for name, marker in zip(names, pictures.MARKERS):
            points = [(r["rows"], r["times"][name]["us"]) for r in results if name in r["times"]]
            axes.plot(*zip(*points), marker=marker, label=name)
        roofs = Roofs(found["copy"], found["dense"])
        goals = [(r["rows"], goal_us(r, roofs)) for r in results]
        axes.plot(*zip(*goals), "k--", label="goal (from rates of this run)")
        label = f"routed rows, {CASES[case].experts} experts"
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="us")
        axes.set_title(f"{case}: {results[0]['k']} x {results[0]['n']}")
        axes.grid(True, which="both", alpha=0.3)
        axes.legend()
    figure.suptitle(
        f"{found['gpu']}: copy {found['copy'] / 1e12:.2f} TB/s, dense bf16 "
        f"{found['dense'] / 1e12:.0f} TFLOP/s"
    )
    pictures.save(figure, path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.bench_sm90",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cases", nargs="+", default=[c.name for c in SHARE], choices=list(CASES))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument(
        "--configs", nargs="+", default=[], choices=list(BY_NAME),
        help="race these of our configurations instead of the one that is chosen",
    )  # fmt: skip
    parser.add_argument("--activation", action="store_true", help="L1 with SwiGLU in the epilogue")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    parser.add_argument("--draw", type=Path, help="a JSON file of an earlier run: only draw it")
    options = parser.parse_args(argv)
    if options.draw:
        draw(json.loads(options.draw.read_text()), options.png or options.draw.with_suffix(".png"))
        return 0
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.stderr.write("bench_sm90 needs a Hopper GPU (compute capability 9.0)\n")
        return 1
    roofs = measured_roofs(torch.device("cuda"))
    sys.stdout.write(
        f"copy {roofs.copy / 1e9:.0f} GB/s, dense bf16 {roofs.dense / 1e12:.0f} TFLOP/s\n"
    )
    found: dict[str, Any] = {
        **dataclasses.asdict(roofs),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "activation": options.activation,
        "results": [],
    }
    contestants = {name: BY_NAME[name] for name in options.configs} or {"ours": None}
    for name in options.cases:
        case = CASES[name]
        weight = random_weight(case, options.activation and name.endswith("L1"))
        for rows in options.rows:
            result = bench_case(case, rows, weight, contestants, options.peers)
            found["results"].append(result)
            sys.stdout.write(report(result, roofs))
            sys.stdout.flush()
            if options.json:  # after every case: a run that is cut short leaves what it has
                options.json.write_text(json.dumps(found, indent=1))
    if options.png:
        draw(found, options.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
