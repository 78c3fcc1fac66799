"""python -m moe {run,inspect,backends,explain,demo,demo-real}"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from moe.backends import BACKENDS, backend_status
from moe.checkpoint import load_checkpoint
from moe.config import MoEConfig
from moe.experts import scratch_buffers
from moe.layer import MoE
from moe.workspace import total_bytes


def table(title: str, *columns: str) -> Table:
    out = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        out.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    return out


def megabytes(n: int) -> str:
    return f"{n / 1e6:.2f} MB"


def cmd_run(args: argparse.Namespace, console: Console) -> None:
    """Load one layer, run it on a tensor from a file, write the result."""
    started = time.perf_counter()
    cfg, weights, extras = load_checkpoint(
        args.checkpoint, layer=args.layer, device=args.device, h_scale=args.h_scale
    )
    loaded = time.perf_counter() - started
    inputs = load_file(args.input, device=args.device)
    if "x" not in inputs:
        raise ValueError(
            f"{args.input} must hold a tensor 'x' (T, {cfg.hidden}), got {sorted(inputs)}"
        )
    if extras.router_weight is None and "topk_ids" not in inputs:
        raise ValueError(
            "the checkpoint has no router: give topk_ids and topk_weights in the input"
        )

    def to(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t.to(args.device)

    layer = MoE(
        cfg,
        weights,
        router_weight=to(extras.router_weight),
        router_bias=to(extras.router_bias),
        selection_bias=to(extras.selection_bias),
        tid2eid=to(extras.tid2eid),
        backend=args.backend,
        activations=args.activations,
        activation_scale=args.activation_scale,
    )
    started = time.perf_counter()
    if "topk_ids" in inputs:
        y = layer.experts(inputs["x"], inputs["topk_ids"], inputs["topk_weights"])
    else:
        y = layer(inputs["x"], inputs.get("input_ids"))
    seconds = time.perf_counter() - started
    save_file({"y": y.contiguous()}, args.out)
    out = table(f"layer {args.layer} of {args.checkpoint}", "what", "value")
    for name, value in (
        ("dialect", extras.report.dialect),
        ("experts", f"{weights.num_experts} of {cfg.num_experts}, top {cfg.top_k}"),
        ("weights", megabytes(weights.nbytes)),
        ("h scale", "dynamic" if weights.gh is None else "static"),
        ("backend", layer.backend),
        ("x -> y", f"{tuple(inputs['x'].shape)} {inputs['x'].dtype} -> {args.out}"),
        ("load", f"{loaded:.2f} s"),
        ("run", f"{seconds * 1e3:.1f} ms"),
    ):
        out.add_row(name, value)
    console.print(out)
    if extras.shared:
        console.print(
            "note: the shared expert is not part of this run: y is the routed experts alone"
        )


def cmd_inspect(args: argparse.Namespace, console: Console) -> None:
    """What a checkpoint holds, layer by layer."""
    from moe.inspect_checkpoint import inspect

    for part in inspect(args.path, args.layer):
        console.print(part)


def cmd_backends(args: argparse.Namespace, console: Console) -> None:
    """Which backends are usable here, and why the others are not."""
    out = table("backends, best first", "backend", "usable", "why")
    for s in backend_status(args.device):
        out.add_row(s.name, "yes" if s.usable else "no", s.reason)
    console.print(out)


def cmd_explain(args: argparse.Namespace, console: Console) -> None:
    """The data flow of one call with its shapes and bytes."""
    cfg = MoEConfig(args.hidden, args.intermediate, args.experts, args.top_k)
    t, h, i, e = args.tokens, cfg.hidden, cfg.intermediate, cfg.num_experts
    rows = t * cfg.top_k
    fp4 = 9 / 16  # bytes of a code and its share of the block scale
    out = table(
        f"{t} tokens through {e} experts, H {h}, I {i}, top {cfg.top_k}", "step", "shape", "bytes"
    )
    for step, shape, size in (
        ("x", f"({t}, {h}) bf16", 2 * t * h),
        ("route: logits, top-k, weights", f"({t}, {e}) -> ({t}, {cfg.top_k})", 4 * t * e),
        ("plan: rows by expert", f"({rows},)", 8 * rows + 4 * (e + 1)),
        ("quantise x: one scale per token, one per 16", f"({t}, {h})", int(t * h * fp4)),
        ("gate, up: weights of experts in use", f"(<= {min(e, rows)}, {2 * i}, {h})",
         int(min(e, rows) * 2 * i * h * fp4)),
        ("h = act(gate, up), quantised", f"({rows}, {i})", int(rows * i * fp4)),
        ("down: weights of experts in use", f"(<= {min(e, rows)}, {h}, {i})",
         int(min(e, rows) * i * h * fp4)),
        ("o: one row per token and slot", f"({rows}, {h}) bf16", 2 * rows * h),
        ("y: weighted sum over slots", f"({t}, {h}) bf16", 2 * t * h),
    ):  # fmt: skip
        out.add_row(step, shape, megabytes(size))
    console.print(out)
    console.print(f"multiply-adds: {3 * rows * h * i / 1e9:.2f} G")


def cmd_demo(args: argparse.Namespace, console: Console) -> None:
    """Write a small checkpoint, load it, run it, compare every stage with fp64."""
    from moe.demo import run_demo

    layer, rows = run_demo(Path(args.folder), tokens=args.tokens)
    out = table(
        "a heavy-tailed MoE layer, error against fp64 without quantisation",
        "stage", "shape", "bytes", "time", "relative error",
    )  # fmt: skip
    for r in rows:
        seconds = "" if r.seconds != r.seconds else f"{r.seconds * 1e3:.1f} ms"
        error = "" if r.error != r.error else f"{r.error:.4f}"
        out.add_row(r.stage, r.shape, megabytes(r.nbytes), seconds, error)
    console.print(out)
    scratch = total_bytes(scratch_buffers(args.tokens, layer.cfg, layer.weights))
    console.print(
        f"backend: {layer.backend}; scratch {megabytes(scratch)}; checkpoint in {args.folder}"
    )


def cmd_demo_real(args: argparse.Namespace, console: Console) -> None:
    """Real transformer weights and activations: error of the scale modes."""
    from moe.demo_real import run_demo_real

    for part in run_demo_real(Path(args.folder)):
        console.print(part)


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
    what = "safetensors with x (T, H); optionally topk_ids and topk_weights, or input_ids"
    run.add_argument("--input", required=True, help=what)
    run.add_argument("--out", required=True, help="safetensors to write y to")
    run.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
    run.add_argument("--device", default="cpu")
    run.add_argument("--activations", default="nvfp4", choices=("nvfp4", "bf16"))
    modes = ("per_token", "static", "per_tensor")
    run.add_argument("--activation-scale", default=modes[0], choices=modes)
    run.add_argument("--h-scale", default="auto", choices=("auto", "static", "dynamic"))
    inspect = add("inspect", cmd_inspect)
    inspect.add_argument("path")
    inspect.add_argument("--layer", type=int, help="one layer; default: all with experts")
    add("backends", cmd_backends).add_argument("--device", help="default: a GPU if there is one")
    explain = add("explain", cmd_explain)
    sizes = {"hidden": 4096, "intermediate": 2048, "experts": 256, "top-k": 6, "tokens": 8}
    for name, value in sizes.items():
        explain.add_argument(f"--{name}", type=int, default=value)
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
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
