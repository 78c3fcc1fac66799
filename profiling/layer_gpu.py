"""The whole layer on a GPU at a few token counts, its parts, and the goal for a Hopper GPU.

    python -m profiling.layer_gpu --models deepseek-v4-flash qwen3-30b-a3b --json layer.json

Timed in CUDA graphs of several calls with rotating inputs (`profiling.timing`), everything of one
layer in turn: ``layer`` is `MoE.experts` (sort, stage, L1 with activation, stage h, L2, combine),
``router`` the layer's own router and `MoE.forward` before it. Parts are the times of the kernels
alone, from torch's profiler, so they leave out the gaps between kernels.

Goal = for both GEMMs max(bytes of the weights of the active experts / (0.85 x copy rate) + 6 us,
operations / (0.88 x dense bf16 rate)), and 25 us for the rest. Both rates are measured in this run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moe import MoE
from moe.backends import BACKENDS, choose_backend
from profiling import timing
from profiling.workload import Call, Case, make_call, random_weights

Row = dict[str, Any]
REST_US = 25.0  # everything but the two GEMMs
GEMM_US = 6.0  # launch and first loads of one GEMM
COPY_SHARE, DENSE_SHARE = 0.85, 0.88
NVFP4_BYTES = 9 / 16  # of one weight: half a byte and a sixteenth of a scale
PARTS = {  # name of a kernel contains -> part; the first match counts
    "sort_routes": "route",
    "count_routes": "route",
    "stage_rows": "stage",
    "combine": "combine",
}


@dataclasses.dataclass(frozen=True)
class Goal:
    """Microseconds; ``roof`` says for each GEMM what bounds it."""

    l1: float
    l2: float
    roof: tuple[str, str]

    @property
    def layer(self) -> float:
        return self.l1 + self.l2 + REST_US


def gemm_goal(rows: float, active: float, n: int, k: int, roofs: timing.Roofs) -> tuple[float, str]:
    """(us, "weights" or "dense") of one grouped GEMM (rows, k) x (n, k) over ``active`` experts."""
    weights = active * n * k * NVFP4_BYTES / (COPY_SHARE * roofs.copy) * 1e6 + GEMM_US
    dense = 2 * rows * n * k / (DENSE_SHARE * roofs.dense) * 1e6
    return max((weights, "weights"), (dense, "dense"))


def goal_of(case: Case, calls: list[Call], roofs: timing.Roofs) -> Goal:
    """Mean active experts of the calls."""
    cfg = case.cfg
    active = sum(len(c.ids.unique()) for c in calls) / len(calls)
    rows = sum(c.ids.numel() for c in calls) / len(calls)
    l1 = gemm_goal(rows, active, cfg.projections * cfg.intermediate, cfg.hidden, roofs)
    l2 = gemm_goal(rows, active, cfg.hidden, cfg.intermediate, roofs)
    return Goal(l1[0], l2[0], (l1[1], l2[1]))


def kernel_parts(layer: MoE, calls: list[Call]) -> dict[str, float]:
    """Part -> microseconds of its kernels per call. Of the GEMMs the first is L1."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    for call in calls[:2]:
        call.run(layer)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds) as profile:
        for call in calls:
            call.run(layer)
        torch.cuda.synchronize()
    events = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    total: dict[str, float] = {}
    last, step = "", {"L1": "L2", "L2": "L1", "": "L1"}
    for event in sorted(events, key=lambda e: e.time_range.start):
        if "sm90_w4a16" in event.name:
            if "_combine" not in event.name:  # that is the second kernel of a split K
                last = step[last]
            part = last
        else:
            part = next((p for n, p in PARTS.items() if n in event.name), "other")
        us = float(event.time_range.elapsed_us()) / len(calls)
        total[part] = total.get(part, 0.0) + us
    return total


def measure(layer: MoE, case: Case, options: Options) -> Row:
    """One row: a layer and a token count."""
    device = layer.g13.device
    touched = min(case.tokens * case.cfg.top_k, case.experts) * 3 * case.cfg.hidden
    nbytes = touched * case.cfg.intermediate * NVFP4_BYTES
    sets = timing.rotations(nbytes, timing.l2_bytes(device), options.most_sets)
    calls = [make_call(case, device, seed) for seed in range(sets)]
    race = timing.Race(device, options.rounds)
    race.add("layer", [lambda c=c: c.run(layer) for c in calls])
    if layer.router_weight is not None:
        race.add("forward", [lambda c=c: layer(c.x) for c in calls])
    with torch.no_grad():
        times = race.run()
    goal = goal_of(case, calls, options.roofs)
    row: Row = {
        "model": case.model,
        "activations": case.activations,
        "tokens": case.tokens,
        "backend": layer.backend,
        **times["layer"].as_json(),
        "forward_us": times["forward"].median if "forward" in times else None,
        "goal_us": goal.layer,
        "goal_gemms_us": goal.l1 + goal.l2,
        "roofs": goal.roof,
        "parts_us": kernel_parts(layer, calls),
        "plan_memory": layer.plan_memory(case.tokens),
    }
    return row


@dataclasses.dataclass(frozen=True)
class Options:
    rounds: int
    most_sets: int
    roofs: timing.Roofs


def build(case: Case, backend: str, weights: Any) -> MoE:
    """With a random router, so that `forward` can be timed as well."""
    g = torch.Generator(weights.device).manual_seed(1)
    router: Tensor = torch.randn(
        case.cfg.num_experts, case.cfg.hidden, generator=g, device=weights.device
    )
    return MoE(
        case.cfg, weights, router_weight=router, backend=backend, activations=case.activations
    )


def table(rows: list[Row]) -> Table:
    parts = ("route", "stage", "L1", "L2", "combine", "other")
    out = Table(title="microseconds of one layer", title_justify="left")
    for name in ("model", "activations", "tokens", "layer", "goal", "of goal", "GEMM goals"):
        out.add_column(name, justify="left" if name in ("model", "activations") else "right")
    for name in (*parts, "with router"):
        out.add_column(name, justify="right")
    for r in rows:
        numbers = [f"{r['us']:.1f}", f"{r['goal_us']:.1f}", f"{r['us'] / r['goal_us']:.2f}"]
        numbers += [f"{r['goal_gemms_us']:.1f}"]
        numbers += [f"{r['parts_us'].get(p, 0.0):.1f}" for p in parts]
        forward = "-" if r["forward_us"] is None else f"{r['forward_us']:.1f}"
        out.add_row(r["model"], r["activations"], str(r["tokens"]), *numbers, forward)
    return out


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m profiling.layer_gpu", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--models", nargs="+", default=["deepseek-v4-flash", "qwen3-30b-a3b"])
    p.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 1024, 8192])
    p.add_argument("--activations", nargs="+", default=["nvfp4", "bf16"])
    p.add_argument("--h-scale", choices=("static", "per_row"), default="per_row")
    p.add_argument("--backend", default="sm90", choices=("auto", *BACKENDS))
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--most-sets", type=int, default=12, help="rotating inputs at most")
    p.add_argument("--json", help="write the rows here")
    args = p.parse_args(argv)
    device = torch.device("cuda:0")
    try:
        choose_backend(args.backend, device)
        cases = [Case(m, 1, 1, args.h_scale) for m in args.models]
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    console = Console(width=150)
    roofs = timing.measured_roofs(device)
    options = Options(args.rounds, args.most_sets, roofs)
    rows: list[Row] = []
    for base in cases:
        weights = random_weights(base, device)
        for activations in args.activations:
            mode = dataclasses.replace(base, activations=activations)
            layer = build(mode, args.backend, weights)
            for tokens in args.tokens:
                rows.append(measure(layer, dataclasses.replace(mode, tokens=tokens), options))
            del layer
        del weights
    name = torch.cuda.get_device_name(device)
    console.print(
        f"{name}: copy {roofs.copy / 1e12:.2f} TB/s, dense {roofs.dense / 1e12:.0f} TFLOP/s; h "
        f"{args.h_scale}"
    )
    console.print(table(rows))
    if args.json:
        report = {"device": name, "roofs": dataclasses.asdict(roofs), "rows": rows}
        with open(args.json, "w") as file:
            json.dump(report | {"state": timing.device_state()}, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
