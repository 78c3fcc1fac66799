"""Python time of one call of `MoE.experts` on the SM100 kernels, part by part, launches mocked.

    python -m profiling.host_time [--tokens 16] [--json FILE]

Nothing is compiled or launched and no GPU is needed: a launch is an empty function, tensors lie on
the CPU. What remains is what the host does for every call that no CUDA graph replays: checks,
memory, the choice of kernels, arguments. Every time is the minimum over repeats of the mean of a
batch, in microseconds of processor time of this process. Scratch comes from a `Workspace`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from cute_kernels import compile as compiler
from moe import ExpertWeights, MoE, MoEConfig, Workspace, kernels
from moe.workspace import allocate

Part = Callable[[], object]


def microseconds(part: Part, batch: int = 200, repeats: int = 5) -> float:
    """Least mean of a batch of calls."""
    for _ in range(20):
        part()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(batch):
            part()
        best = min(best, (time.process_time() - start) / batch * 1e6)
    return best


@contextmanager
def mocked_launches() -> Iterator[list[str]]:
    """Operations on CPU tensors take their kernels, whose launches only note the name."""
    names: list[str] = []

    def load(kernel: Any, arch: str) -> Callable[..., None]:
        name = type(kernel).__name__
        return lambda *numbers: names.append(name)

    compiler.clear_memory()  # of kernels that are none
    with (
        mock.patch.object(compiler, "load", load),
        mock.patch.object(compiler, "simulating", lambda: True),
        mock.patch.object(compiler, "device_arch", lambda *_: "sm_100a"),
    ):
        yield names
    compiler.clear_memory()


def layer(static: bool, experts: int = 16, hidden: int = 512, top_k: int = 8) -> MoE:
    """A small layer: nothing here depends on the widths."""
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(experts, 256, hidden, generator=g) for _ in range(2))
    down = torch.randn(experts, hidden, 256, generator=g)
    gh = torch.full((experts,), 1e-3) if static else None
    weights = ExpertWeights.from_bf16(gate, up, down, gh=gh)
    with mock.patch("moe.layer.start_simulator"), mock.patch("moe.layer.choose_backend") as choose:
        choose.return_value = "sim"
        return MoE(MoEConfig(hidden, 256, experts, top_k), weights, backend="sim")


def parts(moe: MoE, tokens: int) -> dict[str, Part]:
    """Steps of `MoE.experts` by name, each on what the steps before it left."""
    cfg, local, numerics = moe.cfg, moe._kernel_experts(), moe.numerics
    x = torch.randn(tokens, cfg.hidden).bfloat16()
    ids = torch.randint(0, cfg.num_experts, (tokens, cfg.top_k), dtype=torch.int32)
    mix = torch.rand(tokens, cfg.top_k)
    buffers = kernels.scratch_buffers(tokens, cfg, local, numerics)
    workspace = moe.workspace = Workspace(moe.plan_memory(tokens))
    scratch = allocate(buffers, x.device, workspace)
    plan = kernels.route_rows(ids, mix, cfg, local, scratch[:5])
    rows, gx = kernels.quantise(x, ids, mix, plan, cfg, local, numerics, scratch)
    chain = scratch[9:-1]
    h, gh = kernels.hidden(rows, gx, plan, cfg, local, chain)
    factors = (kernels.outer_alpha(local, chain), gh)
    o = kernels.down(h, factors, plan, cfg, local, chain)
    return {
        "MoE.experts": lambda: moe.experts(x, ids, mix),
        "checks of the layer": lambda: moe._check_ids(moe._check_input(x), ids, mix),
        "views of the weights": moe._kernel_experts,
        "sizes of scratch": lambda: kernels.scratch_buffers(tokens, cfg, local, numerics),
        "scratch": lambda: allocate(buffers, x.device, workspace),
        "sort_routes": lambda: kernels.route_rows(ids, mix, cfg, local, scratch[:5]),
        "quantize_rows": lambda: kernels.quantise(x, ids, mix, plan, cfg, local, numerics, scratch),
        "L1": lambda: kernels.hidden(rows, gx, plan, cfg, local, chain),
        "alpha of L2": lambda: kernels.outer_alpha(local, chain),
        "L2": lambda: kernels.down(h, factors, plan, cfg, local, chain),
        "combine": lambda: kernels.combine_rows(o, plan, mix, cfg, None, x.dtype),
    }


def measure(static: bool, tokens: int) -> dict[str, float]:
    """Microseconds of each part."""
    moe = layer(static)
    with torch.no_grad(), mocked_launches():
        return {name: microseconds(part) for name, part in parts(moe, tokens).items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.host_time", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", help="write the times here")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    columns = {
        "static gh": measure(True, args.tokens),
        "one gh per row": measure(False, args.tokens),
    }
    sys.stdout.write(f"{args.tokens} tokens, us\n{'':24s}" + "".join(f"{c:>16s}" for c in columns))
    for name in columns["static gh"]:
        values = "".join(f"{times[name]:16.1f}" for times in columns.values())
        sys.stdout.write(f"\n{name:24s}{values}")
    rest = "".join(f"{2 * t['MoE.experts'] - sum(t.values()):16.1f}" for t in columns.values())
    sys.stdout.write(f"\n{'rest':24s}{rest}\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"tokens": args.tokens, "us": columns}, file, indent=1)


if __name__ == "__main__":
    main()
