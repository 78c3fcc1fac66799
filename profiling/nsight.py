"""What the commands around Nsight Compute and Nsight Systems share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console


def base_parser(tool: str, words: str | None, kept: str) -> argparse.ArgumentParser:
    """Options of both: the case, and what to do instead of a run. ``kept``: what --parse takes.
    The tool adds its own, ``calls`` among them."""
    from profiling.workload import add_case_arguments

    p = argparse.ArgumentParser(
        prog=f"python -m profiling.{tool}",
        description=words,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_case_arguments(p)
    p.add_argument("--tokens", type=int, default=64)
    p.add_argument("--backend", default="auto")
    p.add_argument("--parse", type=Path, help=f"print the table of {kept}, run nothing")
    p.add_argument("--dry-run", action="store_true", help="print what would run, run nothing")
    return p


def run_tool(
    argv: list[str] | None,
    parser: argparse.ArgumentParser,
    width: int,
    show: Callable[[str, Console], None],
    run: Callable[[argparse.Namespace, list[str], Console], int],
) -> int:
    """``show`` a kept report, or ``run`` the tool around a command. Returns the exit status; errors
    become one line. ``width``: columns of the table where there is no terminal."""
    own, other = split(list(sys.argv[1:] if argv is None else argv))
    args = parser.parse_args(own)
    console = Console() if sys.stdout.isatty() else Console(width=width)
    try:
        if args.parse:
            show(args.parse.read_text(errors="replace"), console)
            return 0
        return run(args, other or workload_command(args), console)
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        return 2


def split(given: list[str]) -> tuple[list[str], list[str]]:
    """Arguments of ours, and the command behind ``--`` (empty without one)."""
    at = given.index("--") if "--" in given else len(given)
    return given[:at], given[at + 1 :]


def workload_command(args: Any) -> list[str]:
    """`profiling.workload` with the case of ``args``, in ranges."""
    return [
        sys.executable, "-m", "profiling.workload", "--case", args.case, "--ranks", str(args.ranks),
        "--tokens", str(args.tokens), "--h-scale", args.h_scale, "--activations", args.activations,
        "--backend", args.backend, "--calls", str(args.calls), "--nvtx",
    ]  # fmt: skip


def short_name(name: str, most: int = 60) -> str:
    """Without parameters, arguments of templates and what the DSL appends to a name."""
    depth = 0
    out: list[str] = []
    for c in name:
        depth -= c == ">"
        if depth == 0 and c not in ">":
            if c == "(" and out:
                break
            out.append(c)
        depth += c == "<"
    plain = "".join(out).replace("<", "").removeprefix("void ").strip()
    return plain.partition("_kernel_cutlass")[0].removesuffix("_0")[:most]
