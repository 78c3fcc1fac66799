"""Times and bytes of a layer whose experts are spread over ranks: dispatch, experts, combine.

    torchrun --nproc-per-node 8 -m profiling.bench_ep --model deepseek-v4-flash --json ep.json
    python -m profiling.bench_ep --ranks 4 --shape 512 256 32 6 --tokens 1 16 128

Under torchrun every rank has a GPU (NCCL), or all share the CPUs of a machine without any (gloo);
without torchrun the program starts --ranks processes on the CPUs. Measured, for every number
of tokens a rank and every skew, over calls with other tokens each:

    dispatch, experts  phases of `moe.dispatch`, of the slowest rank
    combine            the way back and the sum, of the rank that comes to it last
    wait               how much longer the rank that came first was in it
    layer              the whole call on the device, of the slowest rank
    host               what the call, or the replay of its graph, takes the host
    one GPU            the tokens of all ranks on one GPU alone that holds every expert

Medians over the calls. On GPUs layer and host are those of a call without marks in time inside,
which keep kernels apart and take microseconds each; the phases are those of the same call with
marks, so that their sum is more than the layer for few tokens. Ranks start together (a collective,
then a delay in which the hosts catch up), and modes that wait for nothing are replayed from a CUDA
graph: "places", "parts" (the same, and one half travels while the other is computed), "summed"
("places" with pre_reduce) and "replicated", where each rank has the tokens of all. "counts" cannot
be captured: its times contain those of its host. On CPUs all is wall clock. "skew" is the busiest
rank's share of the slots over the average share; a skew that so many ranks cannot have is left out.
"bytes" is what all ranks really sent to others, dispatch and return; the program fails if the
formulas of `ExpertParallel` say otherwise.

One machine's CPUs tell nothing about a fabric: figures of gloo are there to show that the program
works.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moe import Capacity, Exchange, ExpertParallel, ExpertWeights, MoE, MoEConfig, Replicated
from moe.dispatch import join
from moe.exchange import Wire
from moe.explain import find_config
from moe.local import LocalExperts
from moe.parallel import split_experts

GROUPS = {  # phase of `moe.dispatch` -> column
    "quantize": "dispatch",
    "counts": "dispatch",
    "dispatch": "dispatch",
    "experts": "experts",
    "return": "combine",
    "combine": "combine",
    "reduce": "combine",
}
PHASES = ("dispatch", "experts", "combine")
COLUMNS = ("dispatch", "experts", "combine", "wait", "layer", "host", "alone")
HEADINGS = {"alone": "one GPU"}  # of columns that are not called as they are
MODES = ("counts", "places", "parts", "summed", "replicated")
CAPTURED = ("places", "parts", "summed", "replicated")  # nothing in them waits for the device
DELAY = 500_000  # cycles of a GPU between the start that ranks agree on and the call
WARMUPS = 2  # calls that compile, allocate and connect
TIMEOUT = 300.0  # s that a rank waits for others: first calls compile kernels


@dataclasses.dataclass(frozen=True)
class Setting:
    """One row of the table."""

    tokens: int
    skew: float
    mode: str  # one of `MODES`

    def exchange(self, cfg: MoEConfig, ranks: int) -> Exchange | Replicated:
        """Rows for what this skew needs on average and six deviations of it."""
        if self.mode == "replicated":
            return Replicated(reduce=True)
        if self.mode == "counts":
            return Exchange()
        mean = self.skew * self.tokens * cfg.top_k / ranks
        rows = max(math.ceil(mean + 6 * math.sqrt(mean)), cfg.top_k)
        capacity = Capacity(self.tokens, min(rows, self.tokens * cfg.top_k))
        return Exchange(self.mode == "summed", capacity, 2 if self.mode == "parts" else 1)


class Clock:
    """Marks in time on one device; those made while a CUDA graph is captured become part of it."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        inside = torch.cuda.is_current_stream_capturing()
        event = torch.cuda.Event(enable_timing=True, external=inside)
        event.record()
        return event

    def between(self, a: Any, b: Any) -> float:
        """Microseconds; the device must have come to both marks."""
        return a.elapsed_time(b) * 1e3 if self._on_gpu else (b - a) * 1e6

    def start_together(self) -> None:
        """Let the ranks begin what they do next at one time, however late their hosts are."""
        if not self._on_gpu:
            dist.barrier()
            return
        dist.all_reduce(torch.zeros((), device="cuda"))
        torch.cuda._sleep(DELAY)

    def wait(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()


class TimedParallel(ExpertParallel):
    """Marks every phase of a call between `begin` with a clock and `times`."""

    def begin(self, clock: Clock | None) -> None:
        """Of a call that is marked; None: of one that is not."""
        self._clock = clock
        if clock is not None:
            self._marks: list[tuple[str, Any, Any]] = []

    def times(self) -> dict[str, float]:
        """Microseconds by column, of the latest call or replay."""
        out = dict.fromkeys(PHASES, 0.0)
        assert self._clock is not None
        for name, a, b in self._marks:
            out[GROUPS[name]] += self._clock.between(a, b)
        return out

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        clock = getattr(self, "_clock", None)
        begin = None if clock is None else clock.mark()
        with super().phase(name):
            yield
        if clock is not None and name in GROUPS:
            self._marks.append((name, begin, clock.mark()))


Given = tuple[Tensor, Tensor, Tensor]  # x, ids, weights


class Runner:
    """One layer and one set of input tensors: eager calls, or replays of a graph."""

    def __init__(self, layer: MoE, given: Given, clock: Clock, captured: bool) -> None:
        self.layer, self.given, self.clock = layer, given, clock
        self._captured = captured and given[0].is_cuda
        over_ranks = isinstance(layer.parallel, TimedParallel)
        self.kinds: tuple[Clock | None, ...] = (None,)  # of calls: without marks inside, with them
        if over_ranks:
            self.kinds = (None, clock) if given[0].is_cuda else (clock,)
        self._graphs: dict[bool, tuple[torch.cuda.CUDAGraph, Any, Any]] = {}
        for _ in range(WARMUPS):
            layer.experts(*given)
        clock.wait()

    @property
    def how(self) -> str:
        return "graph" if self._captured else "eager"

    def run(self, given: Given, together: bool = True) -> dict[str, float]:
        """Microseconds: layer, host, and the phases where the layer is spread over ranks."""
        for target, source in zip(self.given, given):
            target.copy_(source)
        times: dict[str, float] = {}
        for marks in self.kinds:
            layer, host = self._time(marks, together)
            times = times or {"layer": layer, "host": host}
        parallel = self.layer.parallel
        return times | (parallel.times() if isinstance(parallel, TimedParallel) else {})

    def _time(self, marks: Clock | None, together: bool) -> tuple[float, float]:
        """Microseconds of one call: on the device, and of the host."""
        key = marks is not None
        if self._captured and key not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                ends = self._call(marks)
            self._graphs[key] = (graph, *ends)
            graph.replay()  # the first replay uploads the graph
        self.clock.wait()
        if together:
            self.clock.start_together()
        start = time.perf_counter()
        if self._captured:
            graph, *ends = self._graphs[key]
            graph.replay()
        else:
            ends = self._call(marks)
        host = (time.perf_counter() - start) * 1e6
        self.clock.wait()
        return self.clock.between(*ends), host

    def _call(self, marks: Clock | None) -> tuple[Any, Any]:
        if isinstance(self.layer.parallel, TimedParallel):
            self.layer.parallel.begin(marks)
        begin = self.clock.mark()
        self.layer.experts(*self.given)
        return begin, self.clock.mark()


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


def skew_of(ids: Tensor, bounds: Sequence[tuple[int, int]]) -> float:
    """Largest share of the slots of one rank over the average share."""
    counts = [int(((ids >= a) & (ids < b)).sum()) for a, b in bounds]
    return max(counts) * len(bounds) / max(sum(counts), 1)


@functools.cache
def favour_for(skew: float, cfg: MoEConfig, bounds: tuple[tuple[int, int], ...]) -> float | None:
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


def formula(
    ids: list[Tensor], setting: Setting, cfg: MoEConfig, parallel: ExpertParallel
) -> int | None:
    """Bytes that all ranks send to others in one call, by the formulas of `ExpertParallel`; None
    where the library's all-reduce decides."""
    mode = setting.exchange(cfg, parallel.size)
    if isinstance(mode, Replicated):
        return None
    row = Wire(cfg.hidden, cfg.top_k, True, mode.pre_reduce).row_bytes
    if mode.capacity is not None:
        pairs = parallel.size * (parallel.size - 1) * mode.split
        tokens = -(-mode.capacity.tokens // mode.split)
        whole = mode.capacity.rows or 0
        share = max(-(-whole // mode.split), cfg.top_k)
        rows = min(share, whole, tokens * cfg.top_k)
        back = tokens if mode.pre_reduce else rows
        return pairs * (tokens * row + back * 2 * cfg.hidden)
    total = 24 * parallel.size * (parallel.size - 1)
    for rank, mine in enumerate(ids):
        for other, (first, end) in enumerate(parallel.ranges):
            if other != rank:
                here = (mine >= first) & (mine < end)
                sent, slots = int(here.any(dim=1).sum()), int(here.sum())
                total += sent * row + (sent if mode.pre_reduce else slots) * 2 * cfg.hidden
    return total


class Bench:
    """What all settings share: weights of this rank, and of all experts on rank 0."""

    def __init__(self, cfg: MoEConfig, device: torch.device, args: argparse.Namespace) -> None:
        self.cfg, self.device, self.args = cfg, device, args
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.bounds = tuple(split_experts(cfg.num_experts, self.size))
        self.weights = random_weights(cfg, self.bounds[self.rank], device)
        self.layer = MoE(cfg, self.weights, backend=args.backend)
        self.clock = Clock(device)
        self._alone: dict[tuple[int, float], float] = {}
        self._whole: MoE | None = None

    def over_ranks(self, parallel: ExpertParallel) -> MoE:
        """The one layer, on other terms: packing its weights for every setting would take most of
        the time."""
        layer = self.layer
        local = LocalExperts(self.cfg, self.weights, layer.numerics, layer.backend)
        layer.parallel, layer._number = parallel, join(parallel, local)
        return layer

    def routings(self, setting: Setting, favour: float) -> list[list[Tensor]]:
        """ids of every rank, call by call: the same for every mode, and on every rank."""
        calls = []
        for call in range(self.args.repeats):
            gens = [torch.Generator().manual_seed(1000 * call + r) for r in range(self.size)]
            hot = self.bounds[0][1]
            calls.append([draw(setting.tokens, self.cfg, hot, favour, g) for g in gens])
        return calls

    def given(self, ids: Tensor, seed: int) -> Given:
        gen = torch.Generator(self.device).manual_seed(seed)
        shape = (ids.shape[0], self.cfg.hidden)
        x = torch.randn(shape, generator=gen, device=self.device).bfloat16()
        mix = torch.full(ids.shape, 1 / self.cfg.top_k, device=self.device)
        return x, ids.to(self.device), mix

    def alone(self, setting: Setting, routings: list[list[Tensor]]) -> float:
        """Microseconds that rank 0 takes for the tokens of all, once for every routing."""
        key = (setting.tokens, setting.skew)
        if self.rank == 0 and key not in self._alone:
            if self._whole is None:
                whole = random_weights(self.cfg, (0, self.cfg.num_experts), self.device)
                self._whole = MoE(self.cfg, whole, backend=self.args.backend)
            calls = [self.given(torch.cat(every), i) for i, every in enumerate(routings)]
            first = tuple(t.clone() for t in calls[0])
            runner = Runner(self._whole, first, self.clock, captured=True)  # type: ignore[arg-type]
            times = [runner.run(given, together=False)["layer"] for given in calls]
            self._alone[key] = statistics.median(times)
        return self._alone.get(key, 0.0)

    def measure(self, setting: Setting) -> dict[str, Any] | None:
        """One row, on every rank alike; None where the skew cannot be."""
        favour = favour_for(setting.skew, self.cfg, self.bounds)
        if favour is None:
            return None
        mode = setting.exchange(self.cfg, self.size)
        routings = self.routings(setting, favour)
        parallel = TimedParallel(None, self.cfg.num_experts, mode=mode)
        layer = self.over_ranks(parallel)
        mine = [
            self.given(torch.cat(every) if setting.mode == "replicated" else every[self.rank], i)
            for i, every in enumerate(routings)
        ]
        first = tuple(t.clone() for t in mine[0])
        runner = Runner(layer, first, self.clock, setting.mode in CAPTURED)  # type: ignore[arg-type]
        parallel.bytes_sent.clear()
        samples = []
        for given in mine:
            before = sum(parallel.bytes_sent.values())
            times = runner.run(given)
            sent = (sum(parallel.bytes_sent.values()) - before) / len(runner.kinds)
            samples.append(times | {"bytes": float(sent)})
        parallel.check()  # a token that was left out would make the call cheaper
        alone = self.alone(setting, routings)
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, samples)
        backend, how = layer.backend, runner.how
        del runner  # NCCL waits for graphs that hold its collectives
        parallel.close()
        row: dict[str, Any] = {"tokens": setting.tokens, "mode": setting.mode, "how": how}
        row |= {"skew": statistics.median(skew_of(torch.cat(e), self.bounds) for e in routings)}
        row |= {"asked_skew": setting.skew, "backend": backend}
        row |= columns([list(ranks) for ranks in zip(*gathered)]) | {"alone_us": alone}
        expected = [formula(every, setting, self.cfg, parallel) for every in routings]
        if None in expected:
            return row | {"bytes": None, "formula": None}
        captured = how == "graph"  # bytes are counted where calls are made: once
        sent = [sum(g["bytes"] for g in ranks) for ranks in zip(*gathered)]
        if captured:
            return row | {"bytes": sent[0], "formula": expected[0]}
        return row | {"bytes": statistics.mean(sent), "formula": statistics.mean(expected)}


def columns(calls: list[list[dict[str, float]]]) -> dict[str, float]:
    """Times of every call and rank -> medians over the calls, by the definitions above."""
    samples = []
    for ranks in calls:
        sample = {c: max(r[c] for r in ranks) for c in ("dispatch", "experts", "layer", "host")}
        sample["combine"] = min(r["combine"] for r in ranks)
        sample["wait"] = max(r["combine"] for r in ranks) - sample["combine"]
        samples.append(sample)
    return {f"{c}_us": statistics.median(s[c] for s in samples) for c in samples[0]}


def table_of(rows: list[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    names = (
        "mode",
        "",
        "tokens a rank",
        "skew",
        *(f"{HEADINGS.get(c, c)} us" for c in COLUMNS),
        "bytes",
    )
    for name in names:
        table.add_column(name, justify="right")
    for r in rows:
        times = [f"{r[f'{c}_us']:.1f}" for c in COLUMNS]
        sent = "" if r["bytes"] is None else f"{r['bytes']:.0f}"
        table.add_row(r["mode"], r["how"], str(r["tokens"]), f"{r['skew']:.2f}", *times, sent)
    return table


def run(args: argparse.Namespace) -> int:
    """The ranks of one process group."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu")
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    cfg = MoEConfig(*args.shape) if args.shape else find_config(args.model)
    bench = Bench(cfg, device, args)
    settings = [Setting(t, k, m) for m in args.modes for t in args.tokens for k in args.skews]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, gloo"
    shape = {k: getattr(cfg, k) for k in ("hidden", "intermediate", "num_experts", "top_k")}
    result = {"ranks": size, "device": where, "torch": torch.__version__, "shape": shape}
    rows: list[dict[str, Any]] = []
    for setting in settings:
        row = bench.measure(setting)
        if row is None:
            continue
        rows.append(row)
        if rank == 0 and args.json:  # what was measured stays if a later setting fails
            args.json.write_text(json.dumps(result | {"rows": rows}, indent=1))
    wrong = [r for r in rows if r["bytes"] != r["formula"]]
    if rank == 0:
        title = (
            f"{size} ranks ({where}), {', '.join(f'{k} {v}' for k, v in shape.items())}, measured"
        )
        Console(width=140).print(table_of(rows, title))
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
    p.add_argument("--modes", nargs="+", choices=MODES, default=["counts", "places"])
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
