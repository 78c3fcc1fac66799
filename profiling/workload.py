"""One rank's share of a layer of a public model, with random weights and rotating inputs.

    python -m profiling.workload --case deepseek-v4-pro --ranks 8 --tokens 64 --calls 5 --nvtx

runs it and nothing else: what `profiling.ncu` and `profiling.nsys` start under the profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from moe import ExpertWeights, MoE, MoEConfig, ranges
from moe.backends import BACKENDS
from moe.explain import find_config
from profiling.roofline import Share, Stage, stages
from profiling.timing import l2_bytes, rotations


@dataclasses.dataclass(frozen=True)
class Case:
    """``tokens`` on each of ``ranks`` ranks of model ``model``; what is run is rank 0's share: its
    experts, and every token of all ranks that picks one of them.

    h_scale      "static" or "per_row": outer scale of h (`ExpertWeights.gh`)
    activations  "nvfp4" (W4A4) or "bf16" (W4A16)
    """

    model: str
    tokens: int
    ranks: int = 1
    h_scale: str = "static"
    activations: str = "nvfp4"

    def __post_init__(self) -> None:
        experts = find_config(self.model).num_experts
        if self.ranks < 1 or experts % self.ranks or self.tokens < 1:
            raise ValueError(
                f"ranks must divide the {experts} experts of {self.model} and tokens be 1 or more, "
                f"got {self.ranks} ranks, {self.tokens} tokens"
            )

    @property
    def cfg(self) -> MoEConfig:
        return find_config(self.model)

    @property
    def experts(self) -> int:
        """Experts of one rank."""
        return self.cfg.num_experts // self.ranks

    @property
    def flow(self) -> str:
        """As `profiling.roofline.stages` names it."""
        return "bf16" if self.activations == "bf16" else self.h_scale


def random_weights(case: Case, device: torch.device, seed: int = 0) -> ExpertWeights:
    """Random codes and block scales of 0.5 to 1.9: every bit pattern of a code occurs, nothing
    overflows. Made on the device: a layer of a large model is several gigabytes."""
    cfg, g = case.cfg, torch.Generator(device).manual_seed(seed)

    def packed(rows: int, k: int) -> tuple[Tensor, Tensor]:
        shape = (case.experts, rows, k // 2)
        data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g, device=device)
        groups = (case.experts, -(-rows // 128) * 128, -(-k // 64) * 4)
        scale = torch.randint(0x30, 0x40, groups, dtype=torch.uint8, generator=g, device=device)
        return data, scale.view(torch.float8_e4m3fn)

    l1, s1 = packed(cfg.projections * cfg.intermediate, cfg.hidden)
    l2, s2 = packed(cfg.hidden, cfg.intermediate)
    g13 = torch.full((case.experts, cfg.projections), 1e-3, device=device)
    gh = torch.full((case.experts,), 1e-2, device=device) if case.h_scale == "static" else None
    return ExpertWeights(l1, s1, g13, l2, s2, g13[:, 0].clone(), gh)


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments of one `MoE.experts`."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    def run(self, layer: MoE) -> Tensor:
        return layer.experts(self.x, self.ids, self.weights)


def make_call(case: Case, device: torch.device, seed: int) -> Call:
    """Uniform routing: every token picks top_k distinct experts of the whole model."""
    cfg, g = case.cfg, torch.Generator(device).manual_seed(seed)
    everyone = case.tokens * case.ranks
    score = torch.rand(everyone, cfg.num_experts, generator=g, device=device)
    ids = score.topk(cfg.top_k, dim=-1).indices.int()
    here = (ids < case.experts).any(dim=-1)
    if not bool(here.any()):
        ids[0, 0] = 0  # few tokens may miss every expert here; an empty call tells nothing
        here[0] = True
    ids = ids[here].contiguous()
    x = torch.randn(len(ids), cfg.hidden, generator=g, device=device).bfloat16()
    mix = torch.rand(ids.shape, generator=g, device=device)
    return Call(x, ids, mix / mix.sum(dim=-1, keepdim=True))


class Workload:
    """A layer and the calls that rotate: together they read several times the L2, unless one call
    already touches everything."""

    def __init__(
        self, case: Case, backend: str, device: torch.device, most: int = 16,
        layer: MoE | None = None,
    ) -> None:  # fmt: skip
        """``layer``: one made for another token count of the same case, which is used again."""
        self.case, self.device = case, device
        if layer is None:
            weights = random_weights(case, device)
            layer = MoE(case.cfg, weights, backend=backend, activations=case.activations)
        self.layer = layer
        expected = stages(case.cfg, Share.expected(case.cfg, case.tokens, case.ranks), self.flow)
        sets = rotations(sum(s.nbytes for s in expected), l2_bytes(device), most)
        self.calls = [make_call(case, device, seed) for seed in range(sets)]

    @property
    def flow(self) -> str:
        """Of this backend, as `profiling.roofline.stages` names it."""
        decodes = self.layer.backend == "sm90" and self.case.activations == "nvfp4"
        return "decoded" if decodes else self.case.flow

    def share(self) -> Share:
        """Mean over the calls of what they compute."""
        shares = [Share.of(c.ids, 0, self.case.experts) for c in self.calls]
        fields = [f.name for f in dataclasses.fields(Share)]
        return Share(*(sum(getattr(s, f) for s in shares) / len(shares) for f in fields))

    def work(self) -> list[Stage]:
        return stages(self.case.cfg, self.share(), self.flow)


def add_case_arguments(p: argparse.ArgumentParser) -> None:
    """--case, --ranks, --h-scale, --activations, --device: shared by the programs."""
    p.add_argument("--case", default="deepseek-v4-flash", help="a public model, or a path")
    p.add_argument("--ranks", type=int, default=1, help="expert-parallel; tokens are per rank")
    p.add_argument("--h-scale", choices=("static", "per_row"), default="static")
    p.add_argument("--activations", choices=("nvfp4", "bf16"), default="nvfp4")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    p.add_argument("--device", type=torch.device, default=torch.device(default))


def case_of(args: argparse.Namespace, tokens: int) -> Case:
    return Case(args.case, tokens, args.ranks, args.h_scale, args.activations)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m profiling.workload", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add_case_arguments(p)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    p.add_argument("--calls", type=int, default=3)
    p.add_argument("--warmup", type=int, default=2, help="calls outside of the profiled region")
    p.add_argument("--nvtx", action="store_true", help="ranges moe.route, moe.l1, ... (CUDA)")
    args = p.parse_args(argv)
    try:
        case = case_of(args, args.tokens)
        if args.nvtx and args.device.type != "cuda":
            raise ValueError("--nvtx needs a CUDA device: Nsight shows ranges beside kernels")
        work = Workload(case, args.backend, args.device)
        run_region(work, args.calls, args.warmup, args.nvtx)
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    share = work.share()
    Console(width=110).print(
        f"{args.calls} calls of {case}: backend {work.layer.backend}, "
        f"{share.rows:g} rows on {share.active:g} experts"
    )
    return 0


def run_region(work: Workload, calls: int, warmup: int, nvtx: bool) -> None:
    """Warm up, then ``calls`` calls between cudaProfilerStart and Stop, with NVTX ranges."""
    cuda = work.device.type == "cuda"
    for i in range(warmup):
        work.calls[i % len(work.calls)].run(work.layer)
    with contextlib.ExitStack() as stack:
        if cuda:
            torch.cuda.synchronize()
            stack.enter_context(torch.cuda.profiler.profile())
        if nvtx:
            stack.enter_context(ranges.emit(nvtx_range))
        for i in range(calls):
            work.calls[i % len(work.calls)].run(work.layer)
        if cuda:
            torch.cuda.synchronize()


def nvtx_range(name: str) -> Any:
    return torch.cuda.nvtx.range(name)


if __name__ == "__main__":
    sys.exit(main())
