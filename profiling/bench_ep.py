"""Times and bytes of a layer whose experts are spread over ranks: dispatch, experts, combine.

    torchrun --nproc-per-node 8 -m profiling.bench_ep --model deepseek-v4-flash --json ep.json
    python -m profiling.bench_ep --ranks 4 --shape 512 256 32 6 --tokens 1 16 128

Under torchrun every rank has a GPU (NCCL), or all share the CPUs of a machine without any (gloo);
without torchrun the program starts --ranks processes on the CPUs. Measured, for every number
of tokens a rank and every skew: the phases of `moe.dispatch` (CUDA events, or wall clock on a CPU),
the median over the calls of the slowest rank. "skew" is the busiest rank's share of the slots over
the average share; a skew that so many ranks cannot have is left out. "bytes" is what all ranks
really sent to others, dispatch and return; the program fails if the formulas of `ExpertParallel`
say otherwise.

One machine's CPUs tell nothing about a fabric: figures of gloo are there to show that the program
works.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moe import Capacity, Exchange, ExpertParallel, ExpertWeights, MoE, MoEConfig
from moe.exchange import Wire
from moe.explain import find_config

GROUPS = {  # phase of `moe.dispatch` -> column
    "quantize": "dispatch",
    "counts": "dispatch",
    "dispatch": "dispatch",
    "experts": "experts",
    "return": "combine",
    "combine": "combine",
}
COLUMNS = ("dispatch", "experts", "combine")
TIMEOUT = 300.0  # s that a rank waits for others: first calls compile kernels


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table."""

    tokens: int
    skew: float
    mode: str  # "counts", "places" or "summed"

    def exchange(self, cfg: MoEConfig, ranks: int) -> Exchange:
        """Places for twice the tokens and rows that this skew needs on average."""
        if self.mode != "places":
            return Exchange(pre_reduce=self.mode == "summed")
        rows = max(int(2 * self.skew * self.tokens * cfg.top_k / ranks), cfg.top_k)
        return Exchange(capacity=Capacity(self.tokens, min(rows, self.tokens * cfg.top_k)))


class TimedParallel(ExpertParallel):
    """Sums the time of every phase of a call."""

    def start(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[str, Any, Any]] = []

    def times(self) -> dict[str, float]:
        """Microseconds by column since `start`."""
        out = dict.fromkeys(COLUMNS, 0.0)
        if self._on_gpu:
            torch.cuda.synchronize()
        for name, a, b in self._marks:
            spent = a.elapsed_time(b) * 1e3 if self._on_gpu else (b - a) * 1e6
            out[GROUPS[name]] += spent
        return out

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        marks = getattr(self, "_marks", None)
        begin = None if marks is None else self._mark()
        with super().phase(name):
            yield
        if marks is not None and name in GROUPS:
            marks.append((name, begin, self._mark()))


def random_weights(cfg: MoEConfig, experts: tuple[int, int], device: torch.device) -> ExpertWeights:
    """Random codes and block scales of 0.5 to 1.9, with a static scale of h."""
    first, end = experts
    g = torch.Generator(device).manual_seed(first)
    count = end - first

    def packed(rows: int, k: int) -> tuple[Tensor, Tensor]:
        shape = (count, rows, k // 2)
        data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g, device=device)
        groups = (count, -(-rows // 128) * 128, -(-k // 64) * 4)
        scale = torch.randint(0x30, 0x40, groups, dtype=torch.uint8, generator=g, device=device)
        return data, scale.view(torch.float8_e4m3fn)

    l1, s1 = packed(cfg.projections * cfg.intermediate, cfg.hidden)
    l2, s2 = packed(cfg.hidden, cfg.intermediate)
    g13 = torch.full((count, cfg.projections), 1e-3, device=device)
    gh = torch.full((count,), 1e-2, device=device)
    return ExpertWeights(l1, s1, g13, l2, s2, g13[:, 0].clone(), gh, first_expert=first)


def draw(tokens: int, cfg: MoEConfig, hot: int, favour: float, gen: torch.Generator) -> Tensor:
    """ids (tokens, top_k), distinct in a token; the first ``hot`` experts are ``favour`` times as
    likely as the others (weighted sampling by exponential races)."""
    race = -torch.rand(tokens, cfg.num_experts, generator=gen).clamp(min=1e-9).log()
    race[:, :hot] /= favour
    return race.topk(cfg.top_k, dim=1, largest=False).indices.int()


def skew_of(ids: Tensor, bounds: list[tuple[int, int]]) -> float:
    """Largest share of the slots of one rank over the average share."""
    counts = [int(((ids >= a) & (ids < b)).sum()) for a, b in bounds]
    return max(counts) * len(bounds) / max(sum(counts), 1)


def favour_for(skew: float, cfg: MoEConfig, bounds: list[tuple[int, int]]) -> float | None:
    """How much likelier the experts of rank 0 must be; None where no routing is so skewed."""
    if skew <= 1.0:
        return 1.0
    hot = bounds[0][1]
    low, high = 1.0, 1e6
    gen = torch.Generator().manual_seed(0)
    if skew_of(draw(4096, cfg, hot, high, gen), bounds) < 0.97 * skew:
        return None
    for _ in range(24):
        middle = (low * high) ** 0.5
        gen.manual_seed(0)
        wide = skew_of(draw(4096, cfg, hot, middle, gen), bounds) < skew
        low, high = (middle, high) if wide else (low, middle)
    return high


def formula(ids: list[Tensor], setting: Setting, cfg: MoEConfig, parallel: ExpertParallel) -> int:
    """Bytes that all ranks send to others in one call, by the formulas of `ExpertParallel`."""
    mode = setting.exchange(cfg, parallel.size)
    row = Wire(cfg.hidden, cfg.top_k, True, mode.pre_reduce).row_bytes
    if mode.capacity is not None:
        pairs = parallel.size * (parallel.size - 1)
        return pairs * (mode.capacity.tokens * row + (mode.capacity.rows or 0) * 2 * cfg.hidden)
    total = 24 * parallel.size * (parallel.size - 1)
    for rank, mine in enumerate(ids):
        for other, (first, end) in enumerate(parallel.ranges):
            if other != rank:
                here = (mine >= first) & (mine < end)
                sent, slots = int(here.any(dim=1).sum()), int(here.sum())
                total += sent * row + (sent if mode.pre_reduce else slots) * 2 * cfg.hidden
    return total


def measure(
    setting: Setting, cfg: MoEConfig, weights: ExpertWeights, args: argparse.Namespace
) -> dict[str, Any] | None:
    """One row, on every rank alike; None where the skew cannot be."""
    device, size = weights.device, dist.get_world_size()
    mode = setting.exchange(cfg, size)
    parallel = TimedParallel(None, cfg.num_experts, mode=mode, timeout=TIMEOUT)
    layer = MoE(cfg, weights, backend=args.backend, parallel=parallel)
    favour = favour_for(setting.skew, cfg, parallel.ranges)
    if favour is None:
        parallel.close()
        return None
    samples: list[dict[str, float]] = []
    sent = expected = 0
    skews = []
    for call in range(args.repeats + 2):
        every = []
        for rank in range(size):
            gen = torch.Generator().manual_seed(1000 * call + rank)
            every.append(draw(setting.tokens, cfg, parallel.ranges[0][1], favour, gen))
        x = torch.randn(setting.tokens, cfg.hidden, generator=gen).bfloat16().to(device)
        ids = every[parallel.rank].to(device)
        mix = torch.full(ids.shape, 1 / cfg.top_k, device=device)
        before = sum(parallel.bytes_sent.values())
        dist.barrier()
        parallel.start(device)
        layer.experts(x, ids, mix)
        mine = parallel.times() | {"bytes": sum(parallel.bytes_sent.values()) - before}
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, mine)
        sent += int(sum(g["bytes"] for g in gathered))
        expected += formula(every, setting, cfg, parallel)
        skews.append(skew_of(torch.cat(every), parallel.ranges))
        if call >= 2:  # the first calls compile, allocate and connect
            samples.append({c: max(g[c] for g in gathered) for c in COLUMNS})
    parallel.close()
    row: dict[str, Any] = {"tokens": setting.tokens, "mode": setting.mode}
    row |= {"skew": statistics.median(skews), "asked_skew": setting.skew}
    row |= {f"{c}_us": statistics.median(s[c] for s in samples) for c in COLUMNS}
    calls = args.repeats + 2
    return row | {"bytes": sent / calls, "formula": expected / calls, "backend": layer.backend}


def run(args: argparse.Namespace) -> int:
    """The ranks of one process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    cfg = MoEConfig(*args.shape) if args.shape else find_config(args.model)
    parallel = ExpertParallel(None, cfg.num_experts)
    weights = random_weights(cfg, parallel.expert_range, device)
    rows = []
    for mode in args.modes:
        for tokens in args.tokens:
            for skew in args.skews:
                row = measure(Setting(tokens, skew, mode), cfg, weights, args)
                if row is not None:
                    rows.append(row)
    wrong = [r for r in rows if r["bytes"] != r["formula"]]
    if rank == 0:
        where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, gloo"
        table = Table(title=f"{size} ranks ({where}), {cfg.num_experts} experts, measured")
        for name in ("mode", "tokens a rank", "skew", *(f"{c} us" for c in COLUMNS), "bytes"):
            table.add_column(name, justify="right")
        for r in rows:
            times = [f"{r[f'{c}_us']:.1f}" for c in COLUMNS]
            cells = [r["mode"], str(r["tokens"]), f"{r['skew']:.2f}", *times, f"{r['bytes']:.0f}"]
            table.add_row(*cells)
        Console(width=120).print(table)
        if args.json:
            shape = {k: getattr(cfg, k) for k in ("hidden", "intermediate", "num_experts", "top_k")}
            result = {"ranks": size, "device": where, "torch": torch.__version__, "shape": shape}
            args.json.write_text(json.dumps(result | {"rows": rows}, indent=1))
        for r in wrong:
            sys.stdout.write(f"bytes {r['bytes']}, the formulas say {r['formula']}: {r}\n")
    return 1 if wrong else 0


def _start(rank: int, size: int, port: int, args: argparse.Namespace) -> None:
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    store = dist.TCPStore("127.0.0.1", port, size, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT)
    )
    code = run(args)
    dist.destroy_process_group()
    if code:
        raise SystemExit(code)


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m profiling.bench_ep", description=__doc__,
                                formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    p.add_argument("--model", default="deepseek-v4-flash", help="a public model")
    p.add_argument("--shape", type=int, nargs=4, metavar=("H", "I", "E", "K"), help="instead of it")
    p.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 128, 1024, 8192])
    p.add_argument("--skews", type=float, nargs="+", default=[1, 2, 4, 7])
    modes = ("counts", "places", "summed")
    p.add_argument("--modes", nargs="+", choices=modes, default=["counts"])
    p.add_argument("--backend", default="auto")
    p.add_argument("--repeats", type=int, default=10)
    p.add_argument("--ranks", type=int, default=2, help="without torchrun: processes on this CPU")
    p.add_argument("--json", type=Path)
    args = p.parse_args(argv)
    if not dist.is_torchelastic_launched():
        store = dist.TCPStore("127.0.0.1", 0, args.ranks + 1, True, wait_for_workers=False)
        mp.spawn(_start, (args.ranks, store.port, args), nprocs=args.ranks)
        return 0
    gpus = torch.cuda.device_count()
    dist.init_process_group("nccl" if gpus else "gloo", timeout=timedelta(seconds=TIMEOUT))
    if gpus and gpus < dist.get_world_size():
        raise SystemExit(f"{dist.get_world_size()} ranks need as many GPUs, found {gpus}")
    if gpus:
        torch.cuda.set_device(dist.get_rank() % gpus)
    code = run(args)
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    sys.exit(main())
