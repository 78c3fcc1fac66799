"""python -m moe {run,inspect,backends,explain,demo,demo-real}"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moe.backends import BACKENDS, backend_status
from moe.checkpoint import H_SCALES, load_checkpoint
from moe.experts import scratch_buffers
from moe.layer import MoE
from moe.workspace import total_bytes


def table(title: str, *columns: str, words: int = 1) -> Table:
    """The first ``words`` columns are text, the others numbers."""
    out = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        out.add_column(name, justify="left" if i < words else "right", overflow="fold")
    return out


def size(n: int) -> str:
    """Bytes for people: 512 B, 1.5 kB, 3.2 MB, 4.1 GB."""
    step = 0 if n < 1000 else min(int(math.log10(n)) // 3, 3)
    return f"{n} B" if step == 0 else f"{n / 1000**step:.3g} {'kMG'[step - 1]}B"


def cmd_run(args: argparse.Namespace, console: Console) -> None:
    """Load one layer, run it on a tensor from a file, write the result."""
    inputs = load_file(args.input)
    if "x" not in inputs or ("topk_ids" in inputs) != ("topk_weights" in inputs):
        raise ValueError(
            f"{args.input} must hold x (T, H), and topk_ids with topk_weights or neither; got "
            f"{sorted(inputs)}"
        )
    inputs = {name: tensor.to(args.device) for name, tensor in inputs.items()}
    started = time.perf_counter()
    cfg, weights, extras = load_checkpoint(
        args.checkpoint, layer=args.layer, device=args.device, h_scale=args.h_scale
    )
    loaded = time.perf_counter() - started
    routed = "topk_ids" in inputs
    if extras.router_weight is None and not routed:
        raise ValueError(
            "the checkpoint has no router: topk_ids and topk_weights must be in the input"
        )
    # a router that is not used may read another width than the experts
    router = {
        n: None if routed or t is None else t.to(args.device) for n, t in extras.router().items()
    }
    layer = MoE(
        cfg,
        weights,
        router_weight=router["router_weight"],
        router_bias=router["router_bias"],
        selection_bias=router["selection_bias"],
        tid2eid=router["tid2eid"],
        backend=args.backend,
        activations=extras.report.activations if args.activations == "auto" else args.activations,
        activation_scale=args.activation_scale,
    )
    started = time.perf_counter()
    if routed:
        y = layer.experts(inputs["x"], inputs["topk_ids"], inputs["topk_weights"])
    else:
        y = layer(inputs["x"], inputs.get("input_ids"))
    y = y.cpu()  # waits for the device, so that the time is that of the layer
    seconds = time.perf_counter() - started
    save_file({"y": y.contiguous()}, args.out)
    out = table(f"layer {args.layer} of {args.checkpoint}", "what", "value", words=2)
    report = extras.report
    for name, value in (
        ("dialect", report.dialect),
        ("experts", f"{cfg.num_experts}, top {cfg.top_k}, {cfg.activation}"),
        ("sizes", f"H {cfg.hidden}, I {cfg.intermediate}"),
        ("weights", size(weights.nbytes)),
        ("blocks not exact", str(report.inexact_blocks)),
        ("activations", f"{layer.numerics.activations}, {layer.numerics.activation_scale}"),
        ("scale of h", "one per row" if weights.gh is None else "static"),
        ("routing", "from the input" if routed else cfg.scoring),
        ("backend", layer.backend),
        ("x", f"{tuple(inputs['x'].shape)} {str(inputs['x'].dtype).removeprefix('torch.')}"),
        ("y", args.out),
        ("load", f"{loaded:.2f} s"),
        ("run", f"{seconds * 1e3:.1f} ms"),
    ):
        out.add_row(name, value)
    console.print(out)
    if extras.shared:
        console.print("y is that of the routed experts: the shared expert is not part of this run")
    if report.unused:
        console.print(f"not used: {', '.join(report.unused)}", overflow="fold")


def cmd_inspect(args: argparse.Namespace, console: Console) -> None:
    """What a checkpoint holds: experts, dialect, shapes, scale ranges, odd blocks."""
    from moe.inspect_checkpoint import HEADINGS, inspect

    for title, rows in inspect(args.path, args.layer):
        out = table(title, *HEADINGS)
        for row in rows:
            out.add_row(*row)
        console.print(out)


def cmd_backends(args: argparse.Namespace, console: Console) -> None:
    """Which backends are usable here, and why the others are not."""
    out = table("backends, best first", "backend", "usable", "why", words=3)
    for s in backend_status(args.device):
        out.add_row(s.name, "yes" if s.usable else "no", s.reason)
    console.print(out)


def cmd_explain(args: argparse.Namespace, console: Console) -> None:
    """One call in plain words, and the plan: tiles, memory, bytes, roofs, times."""
    from moe.explain import explain, find_config, multiply_adds

    name = args.case or args.model
    cfg = find_config(name)
    if args.tokens < 0:
        raise ValueError(f"--tokens must be 0 or more, got {args.tokens}")
    if args.ranks < 1 or cfg.num_experts % args.ranks:
        raise ValueError(f"--ranks must divide {cfg.num_experts} experts, got {args.ranks}")
    title = f"{name}: {args.tokens} tokens, {cfg.num_experts} experts, top {cfg.top_k}"
    out = table(title, "step", "what happens", "shape", "bytes", words=2)
    for step in explain(cfg, args.tokens):
        out.add_row(step.name, step.words, step.shape, size(step.nbytes) if step.nbytes else "")
    console.print(out)
    console.print(f"multiply-adds: {multiply_adds(cfg, args.tokens) / 1e9:.3g} G")
    if args.tokens:
        explain_plan(args, name, console)


def explain_plan(args: argparse.Namespace, name: str, console: Console) -> None:
    """What one of ``--ranks`` ranks launches on ``--gpu`` for ``--tokens`` tokens of its own."""
    from moe.explain import find_config
    from profiling.plan import make_plan, measured, notes, tables

    plan = make_plan(find_config(name), args.tokens, args.ranks, args.gpu, args.h_scale)
    times = None
    if args.measured:
        rows = json.loads(Path(args.measured).read_text())["rows"]
        times = measured(rows, name, args.tokens, args.ranks)
    for out in tables(plan, times):
        console.print(out)
    if times:
        console.print(f"measured: {times['call']:.1f} us a call ({args.measured})")
    for note in notes(plan):
        console.print(note)


def cmd_demo(args: argparse.Namespace, console: Console) -> None:
    """Write a small checkpoint, load it, run it, compare every stage with fp64."""
    from moe.demo import run_demo

    if args.tokens < 1:
        raise ValueError(f"--tokens must be 1 or more, got {args.tokens}: there would be no error")
    result = run_demo(Path(args.folder), tokens=args.tokens)
    layer = result.layer
    out = table("a layer of heavy-tailed weights", "stage", "shape", "bytes", "time", "error*")
    for r in result.rows:
        seconds = "" if math.isnan(r.seconds) else f"{r.seconds * 1e3:.2f} ms"
        error = "" if math.isnan(r.error) else f"{r.error:.4f}"
        out.add_row(r.stage, r.shape, size(r.nbytes), seconds, error)
    console.print(out)
    console.print("* relative norm of the difference from an fp64 layer without quantisation")
    scratch = total_bytes(scratch_buffers(args.tokens, layer.cfg, layer.weights))
    console.print(f"backend {layer.backend}, scratch {size(scratch)}, checkpoint in {args.folder}")
    console.print(
        f"{result.differing} elements of y differ from the specification (fp64 sums of the same "
        f"quantised operands), relative norm {result.distance:.1e}"
    )


def cmd_demo_real(args: argparse.Namespace, console: Console) -> None:
    """Real transformer weights and activations: error of the scale modes."""
    from moe.demo_real import run_demo_real

    for title, columns, rows in run_demo_real(Path(args.folder)):
        out = table(title, *columns)
        for row in rows:
            out.add_row(*row)
        console.print(out)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m moe", description="An NVFP4 MoE layer.")
    commands = top.add_subparsers(dest="command", required=True)

    def add(
        name: str, run: Callable[[argparse.Namespace, Console], None]
    ) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=run.__doc__, description=run.__doc__)
        sub.set_defaults(run=run)
        return sub

    run = add("run", cmd_run)
    run.add_argument("--checkpoint", required=True, help="safetensors file or folder")
    run.add_argument("--layer", type=int, required=True)
    run.add_argument(
        "--input",
        required=True,
        help="safetensors with x (T, H); optionally topk_ids and topk_weights (T, K), or input_ids",
    )
    run.add_argument("--out", required=True, help="safetensors to write y (T, H) to")
    run.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    run.add_argument("--device", default="cpu")
    run.add_argument(
        "--activations",
        default="auto",
        choices=("auto", "nvfp4", "bf16"),
        help="auto: what the checkpoint's quantisation config says",
    )
    scales = ("per_token", "static", "per_tensor")
    run.add_argument("--activation-scale", default="per_token", choices=scales)
    run.add_argument("--h-scale", default="auto", choices=H_SCALES)
    inspect = add("inspect", cmd_inspect)
    inspect.add_argument("path")
    inspect.add_argument("--layer", type=int, help="one layer; default: all with experts")
    add("backends", cmd_backends).add_argument("--device", help="default: a GPU if there is one")
    explain = add("explain", cmd_explain)
    explain.add_argument(
        "model", nargs="?", default="deepseek-v4-flash", help="name of a public model, or a path"
    )
    explain.add_argument("--case", help="the same, by name")
    explain.add_argument("--tokens", type=int, default=8, help="of one rank")
    explain.add_argument("--ranks", type=int, default=1, help="that share the experts")
    explain.add_argument("--gpu", default="b200", choices=("b200", "gb200", "b300", "h200", "h100"))
    explain.add_argument("--h-scale", default="static", choices=("static", "per_row"))
    explain.add_argument("--measured", help="file of python -m profiling.bench --json")
    demo = add("demo", cmd_demo)
    demo.add_argument("--folder", default=".demo/checkpoint")
    demo.add_argument("--tokens", type=int, default=64)
    add("demo-real", cmd_demo_real).add_argument("--folder", default=".demo/real")
    return top


def main(argv: list[str] | None = None) -> int:
    """0, or 2 with one line on stderr for an input that cannot be used."""
    args = parser().parse_args(argv)
    try:
        console = Console()
        if not console.is_terminal:
            console = Console(width=110)
        args.run(args, console)
    except (ValueError, TypeError, RuntimeError, OSError, SafetensorError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
