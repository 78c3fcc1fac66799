"""Times of the small kernels against the rate of a plain copy, on one GPU.

    python -m profiling.small_kernels_bench [--json FILE] [--variants]

Every time is the median over replays of a CUDA graph that runs the operation on rotating inputs
(together several times the L2 cache), divided by the number of operations in the graph. Bytes are
those that must move: inputs once, results once; ``of copy`` is their rate over that of a
device-to-device copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, ops, router_ops
from cute_kernels.activations import SwiGLU
from cute_kernels.gemm_ops import HiddenScales
from cute_kernels.launch import arch_of
from cute_kernels.torch_router import Selection

ROTATE_BYTES = 400 << 20
MOST_SETS = 16
INTER = 2048  # I of DeepSeek-V3 and V4-Flash
Op = Callable[[], object]


def time_us(operations: list[Op], replays: int = 15) -> float:
    """Microseconds of one operation; ``operations`` are the same work on different buffers."""
    while len(operations) < 20:
        operations = operations * 2
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        operations[0]()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for operation in operations:
            operation()
    times = []
    for i in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) * 1e3 / len(operations))
    return statistics.median(times)


def host_us(operation: Op, calls: int = 200) -> float:
    """Microseconds of Python and driver per call; the device keeps up with small operations."""
    for _ in range(20):
        operation()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        operation()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / calls * 1e6


def copy_rate(size: int = 2 << 30) -> float:
    """Bytes per second (read + written) of the faster of two copies of ``size`` bytes: the
    driver's, and an elementwise kernel."""
    a = torch.randn(size // 4, device="cuda")
    b = torch.empty_like(a)
    best = min(time_us([lambda: b.copy_(a)], 5), time_us([lambda: torch.neg(a, out=b)], 5))
    return 2 * size / best * 1e6


class Shape:
    """Rotating inputs for ``tokens`` tokens, at most ``most`` of each."""

    def __init__(
        self, tokens: int, hidden: int, experts: int, top_k: int, most: int = MOST_SETS
    ) -> None:
        self.tokens, self.hidden, self.experts, self.top_k = tokens, hidden, experts, top_k
        sets = max(1, min(most, ROTATE_BYTES // (tokens * hidden * 2)))
        g = torch.Generator("cuda").manual_seed(tokens)

        def rand(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, device="cuda")

        self.x = [rand(tokens, hidden).bfloat16() for _ in range(sets)]
        logits = [rand(tokens, experts) for _ in range(sets)]
        chosen = [scores.topk(top_k) for scores in logits]
        self.ids = [c.indices.int() for c in chosen]
        self.weights = [c.values.softmax(-1) for c in chosen]
        self.plans = [ops.sort_routes(i, w, experts) for i, w in zip(self.ids, self.weights)]
        row_sets = max(1, min(most, ROTATE_BYTES // (tokens * top_k * hidden * 2)))
        self.rows = [rand(tokens * top_k, hidden).bfloat16() for _ in range(row_sets)]
        self.scale_rows = [int(nvfp4.grouped_scale_offsets(plan[0])[-1]) for plan in self.plans]

    def row(self, name: str, us: float, size: float, rate: float) -> dict[str, Any]:
        return {
            "op": name,
            "tokens": self.tokens,
            "hidden": self.hidden,
            "experts": self.experts,
            "top_k": self.top_k,
            "us": us,
            "bytes": size,
            "of_copy": size / us * 1e6 / rate,
        }


def bench(shape: Shape, rate: float, only: str = "") -> list[dict[str, Any]]:
    """Rows of the operations whose name contains ``only``."""
    t, h, k, e = shape.tokens, shape.hidden, shape.top_k, shape.experts
    groups = h // 16
    scales = statistics.mean(shape.scale_rows) * groups  # padding rows are written too
    rows: list[dict[str, Any]] = []
    plans = shape.plans

    def add(name: str, operations: list[Op], size: float) -> None:
        if only not in name:
            return
        row = shape.row(name, time_us(operations), size, rate)
        rows.append({**row, "host_us": host_us(operations[0])})

    routes = list(zip(shape.ids, shape.weights))
    add(
        "sort_routes",
        [lambda i=i, w=w: ops.sort_routes(i, w, e) for i, w in routes],
        t * k * (4 + 4 + 4 + 4 + 4),
    )
    add(
        "quantize_rows",
        [lambda x=x, p=p: ops.quantize_rows(x, p[0], p[1]) for x, p in zip(shape.x, plans)],
        t * h * 2.5 + t * 4 + scales + t * k * 4,
    )
    given = torch.ones(1, device="cuda")
    add(
        "quantize_rows static",
        [lambda x=x, p=p: ops.quantize_rows(x, p[0], p[1], given) for x, p in zip(shape.x, plans)],
        t * h * 2.5 + t * 4 + scales + t * k * 4,
    )
    add(
        "combine",
        [
            lambda o=o, p=p, w=w: ops.combine(o, p[3], w)
            for o, p, w in zip(shape.rows * 16, plans, shape.weights)
        ],
        t * k * h * 2 + t * h * 2 + t * k * 8,
    )
    q = [ops.quantize_rows(x, p[0], p[1]) for x, p in zip(shape.x, plans)]
    plain = torch.randint(0, 126, (t, groups), dtype=torch.uint8, device="cuda")
    add(
        "permute_quantized_rows",
        [
            lambda d=d, p=p: ops.permute_quantized_rows(d[0], plain, d[2], p[1], p[0])
            for d, p in zip(q, plans)
        ],
        t * h // 2 + t * k * h // 2 + t * groups + scales + t * k * 12,
    )
    rows += bench_hidden(shape, rate) if only in "quantize_hidden" else []
    rows += bench_router(shape, rate, only)
    return rows


def bench_router(shape: Shape, rate: float, only: str) -> list[dict[str, Any]]:
    """x and the digits of a router's weight -> logits -> ids and weights; ``router`` is both, as
    the layer runs them."""
    t, h, e, k = shape.tokens, shape.hidden, shape.experts, shape.top_k
    sets = len(shape.x)
    weights = [
        router_ops.pack_weights(torch.randn(e, h, device="cuda")) for _ in range(min(sets, 8))
    ]
    inputs = list(zip(shape.x, weights * 2))
    logits = [router_ops.router_logits(x, w) for x, w in inputs]
    how, bias = Selection(k, "sqrtsoftplus", factor=1.5), torch.randn(e, device="cuda")

    def both(x: Tensor, w: router_ops.RouterWeights) -> object:
        return router_ops.router_topk(router_ops.router_logits(x, w), how, bias)

    first, last = t * h * 2 + e * h * 3, t * k * 8
    calls: list[tuple[str, list[Op], float]] = [
        (
            "router_logits",
            [lambda x=x, w=w: router_ops.router_logits(x, w) for x, w in inputs],
            first + t * e * 4,
        ),
        (
            "router_topk",
            [lambda s=s: router_ops.router_topk(s, how, bias) for s in logits],
            t * e * 4 + last,
        ),
        ("router", [lambda x=x, w=w: both(x, w) for x, w in inputs], first + last),
    ]
    return [
        {**shape.row(name, time_us(ops_), size, rate), "host_us": host_us(ops_[0])}
        for name, ops_, size in calls
        if only in name
    ]


def bench_hidden(shape: Shape, rate: float) -> list[dict[str, Any]]:
    """Accumulators of gate and up (R, 2I) fp32 -> codes, scales and one outer scale per row of h,
    with I = `INTER`."""
    routed, e = shape.tokens * shape.top_k, shape.experts
    sets = max(2, min(8, ROTATE_BYTES // (routed * INTER * 8)))
    scales = HiddenScales(torch.full((e, 2), 1e-3, device="cuda"), torch.ones(shape.tokens).cuda())
    size = routed * (INTER * 8 + INTER / 2 + INTER / 16 + 8)
    accumulators = [torch.randn(routed, 2 * INTER, device="cuda") for _ in range(sets)]
    calls = [
        lambda a=a, p=p: ops.quantize_hidden(a, p[0], SwiGLU(limit=10.0), scales, p[1])
        for a, p in zip(accumulators, shape.plans * 8)
    ]
    row = shape.row(f"quantize_hidden I={INTER}", time_us(calls), size, rate)
    return [{**row, "host_us": host_us(calls[0])}]


def variants(shape: Shape, rate: float) -> list[dict[str, Any]]:
    """The parts of quantize_rows alone, over the blocks a thread owns; sort_routes over its
    number of CTAs."""
    from cute_kernels.device.quantize import GroupScales, QuantizeRows, scale_pitch
    from cute_kernels.device.routing import CountRoutes, SortRoutes

    t, h = shape.tokens, shape.hidden
    arch = arch_of(torch.device("cuda:0"))
    data = torch.empty((t, h // 2), dtype=torch.uint8, device="cuda")
    scale = torch.empty((t, scale_pitch(h)), dtype=torch.uint8, device="cuda")
    gx = torch.empty(t, device="cuda")
    rows = []

    def add(name: str, kernel: Any, calls: list[tuple], size: float) -> None:
        launch = compiler.load(kernel, arch)

        def once(values: tuple) -> None:
            numbers = [v.data_ptr() if isinstance(v, Tensor) else v for v in values]
            launch(*numbers, torch.cuda.current_stream().cuda_stream)

        us = time_us([lambda c=c: once(c) for c in calls])
        rows.append(shape.row(name, us, size, rate))

    for blocks in (1, 2, 4):
        kernel = QuantizeRows(h, hardware=arch != "sm_90a", blocks_per_thread=blocks)
        calls = [(x, data, scale, gx, t, 1) for x in shape.x]
        add(f"codes only, {blocks} blocks/thread", kernel, calls, t * h * 2.5 + t * h / 16)
    grouped = [
        torch.empty((nvfp4.grouped_scale_rows(t * shape.top_k, shape.experts), h // 16))
        .to(torch.uint8)
        .cuda()
        for _ in range(2)
    ]
    calls = [
        (scale, p[1], p[0], grouped[i % 2], shape.experts, grouped[0].shape[0] // 128)
        for i, p in enumerate(shape.plans)
    ]
    size = t * h / 16 + statistics.mean(shape.scale_rows) * h / 16
    for threads in (128, 256, 512):
        kernel = GroupScales(h // 16, scale_pitch(h), threads=threads)
        add(f"scales only, {threads} threads", kernel, calls, size)
    for ctas in (1, 16, 64, 128):
        pairs = t * shape.top_k
        counts = torch.zeros((ctas, shape.experts), dtype=torch.int32, device="cuda")
        spread = [counts] if ctas > 1 else []
        calls = [
            (i, w, *spread, 0, shape.experts, *p, pairs, pairs, ctas)
            for i, w, p in zip(shape.ids, shape.weights, shape.plans)
        ]
        kernel = SortRoutes(shape.experts, "Int32", shape.top_k, spread=ctas > 1)
        if ctas > 1:
            count = compiler.load(CountRoutes(shape.experts), arch)
            stream = torch.cuda.current_stream().cuda_stream
            count(shape.ids[0].data_ptr(), counts.data_ptr(), pairs, ctas, 0, shape.experts, stream)
        add(f"sort_routes only, {ctas} CTAs", kernel, calls[:1], pairs * 20)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.small_kernels_bench", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--variants", action="store_true", help="also the parts and their variants")
    parser.add_argument("--only", default="", help="operations whose name contains this")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 16, 64, 512, 2048, 8192])
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument(
        "--sets", type=int, default=MOST_SETS,
        help="most inputs that rotate; 1: the same again and again, from the L2 where it fits",
    )  # fmt: skip
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "needs a CUDA GPU: these are times\n")
    rate = copy_rate()
    device = torch.cuda.get_device_name()
    sys.stdout.write(f"{device}, copy {rate / 1e12:.2f} TB/s (read + written)\n")
    sys.stdout.write(
        f"{'operation':34s} {'tokens':>6s} {'us':>9s} {'MB':>9s} {'of copy':>8s} {'host us':>8s}\n"
    )
    rows = []
    for tokens in args.tokens:
        shape = Shape(tokens, args.hidden, args.experts, args.top_k, args.sets)
        for row in bench(shape, rate, args.only) + (variants(shape, rate) if args.variants else []):
            rows.append(row)
            sys.stdout.write(
                f"{row['op']:34s} {row['tokens']:6d} {row['us']:9.2f} {row['bytes'] / 1e6:9.2f} "
                f"{row['of_copy']:8.3f} {row.get('host_us', float('nan')):8.1f}\n"
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": device, "copy_bytes_per_s": rate, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
