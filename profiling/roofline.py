"""What a call of the layer must move and multiply, stage by stage, and how fast a GPU could do it.

    python -m profiling.roofline --case deepseek-v4-pro --tokens 1 64 8192 --ranks 8 --gpu b200
    python -m profiling.roofline --points bench.json --png roofline.png

Bytes are honest: every operand once per stage, block scales included and padded as they are
stored, active experts only. Nothing is taken off because a stage could hide behind another or
because its input may still be in the L2: roofs of stages add up to the roof of the call. Work is
computed, times are those of the named peaks, and neither is measured, except points read from a
file of `profiling.bench`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from moe.config import MoEConfig
from moe.explain import find_config

SCALE_TILE = 128  # rows of block scales are stored, loaded and padded in tiles of so many


@dataclasses.dataclass(frozen=True)
class Peaks:
    """Rates of one GPU, dense, per second: FLOP of the tensor cores, bytes of device memory.

    ``fp4`` is None where there is no FP4 arithmetic: NVFP4 weights are then decoded and multiplied
    in bf16. ``source`` says where the figures come from.
    """

    name: str
    memory: float
    bf16: float
    fp4: float | None
    source: str

    def math(self, kind: str) -> float:
        """FLOP/s of a product: ``kind`` "fp4" (both operands NVFP4) or "bf16"."""
        return self.fp4 if kind == "fp4" and self.fp4 is not None else self.bf16


SHEET = "vendor datasheet, dense"
PEAKS = {
    "b200": Peaks("B200", 8.0e12, 2.25e15, 9.0e15, SHEET),
    "gb200": Peaks("GB200", 8.0e12, 2.5e15, 10.0e15, SHEET),
    "b300": Peaks("B300", 8.0e12, 2.25e15, 15.0e15, SHEET + "; FP4 with K = 96 instructions"),
    "h200": Peaks("H200", 4.8e12, 989.5e12, None, SHEET),
    "h100": Peaks("H100 SXM", 3.35e12, 989.5e12, None, SHEET),
}
# What published or own programs have reached: a roof that can be touched.
REACHED = {
    "b200": Peaks(
        "B200", 7.2e12, 2.25e15, 6.23e15,
        "memory: TMA reads, SemiAnalysis microbenchmarks, 7.1 to 7.26 TB/s; FP4: fast.cu at "
        "8192^3; bf16: datasheet",
    ),
    "h200": Peaks(
        "H200", 4.24e12, 796e12, None,
        "measured: copy (read + written) and 8192^3 bf16 product, python -m profiling.bench_sm90",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank has to compute in one call.

    tokens       rows of x it reads: tokens with at least one expert here
    rows         (token, slot) pairs it computes
    active       its experts that have rows; an expectation need not be whole
    padded_rows  rows when each expert is padded to 128: rows of block scales that are stored
    """

    tokens: float
    rows: float
    active: float
    padded_rows: float

    @classmethod
    def expected(cls, cfg: MoEConfig, tokens: int, ranks: int = 1) -> Share:
        """Expectation for ``tokens`` tokens on each of ``ranks`` ranks, experts chosen uniformly
        and spread evenly. An expert gets Binomial(tokens * ranks, top_k / num_experts) rows.

        Raises ValueError when the ranks do not divide the experts.
        """
        if tokens < 0 or ranks < 1 or cfg.num_experts % ranks:
            raise ValueError(
                f"ranks must divide {cfg.num_experts} experts and tokens be 0 or more, got "
                f"{ranks} ranks, {tokens} tokens"
            )
        experts, everyone = cfg.num_experts // ranks, tokens * ranks
        count = torch.arange(everyone + 1, dtype=torch.float64)
        share = torch.tensor(cfg.top_k / cfg.num_experts, dtype=torch.float64)
        if cfg.top_k == cfg.num_experts:
            pmf = (count == everyone).double()
        else:
            pmf = torch.distributions.Binomial(everyone, share).log_prob(count).exp()
        tiles = float((pmf * (count / SCALE_TILE).ceil()).sum())
        elsewhere = math.comb(cfg.num_experts - experts, cfg.top_k)
        here = 1 - elsewhere / math.comb(cfg.num_experts, cfg.top_k)
        used = 1 - float(pmf[0]) if everyone else 0.0
        padded = experts * tiles * SCALE_TILE
        return cls(everyone * here, tokens * cfg.top_k, experts * used, padded)

    @classmethod
    def of(cls, topk_ids: Tensor, first_expert: int, num_local_experts: int) -> Share:
        """What the ids (T, K) of a call give a rank with these experts."""
        local = topk_ids.long() - first_expert
        here = (local >= 0) & (local < num_local_experts)
        counts = torch.bincount(local[here], minlength=max(num_local_experts, 1))
        padded = (-(-counts // SCALE_TILE) * SCALE_TILE).sum()
        tokens, active = here.any(dim=-1).sum(), (counts > 0).sum()
        return cls(int(tokens), int(here.sum()), int(active), int(padded))


@dataclasses.dataclass(frozen=True)
class Stage:
    """Work of one stage: FLOP of its products (2 per multiply-add), bytes read and written by name.

    ``range`` is the name under which the layer shows it to profilers (`moe.ranges`).
    """

    name: str
    range: str
    flop: float
    read: dict[str, float]
    written: dict[str, float]
    kind: str = "fp4"

    @property
    def nbytes(self) -> float:
        return sum(self.read.values()) + sum(self.written.values())

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.nbytes if self.nbytes else 0.0

    def seconds(self, peaks: Peaks) -> float:
        """The roof: the longer of moving the bytes and doing the products."""
        return max(self.memory_seconds(peaks), self.math_seconds(peaks))

    def memory_seconds(self, peaks: Peaks) -> float:
        return self.nbytes / peaks.memory

    def math_seconds(self, peaks: Peaks) -> float:
        return self.flop / peaks.math(self.kind)


FLOWS = ("static", "per_row", "decoded", "bf16")


def weight_bytes(n: int, k: int) -> float:
    """Codes and stored scales of one expert's (n, k): scales in tiles of 128 rows x 4 groups."""
    return n * k / 2 + padded(n, SCALE_TILE) * padded(k // 16, 4)


def padded(size: int, to: int) -> int:
    return -(-size // to) * to


def stages(cfg: MoEConfig, share: Share, flow: str = "static") -> list[Stage]:
    """Work of one call of `MoE.experts` (the router's own product is not part of it).

    flow  "static": h leaves L1 as NVFP4, one outer scale per expert. "per_row": fp32 accumulators
          go through memory, one outer scale per row. "decoded": rows are quantised and decoded to
          bf16 at once, h leaves L1 as fp32 (W4A4 without FP4 arithmetic). "bf16": activations are
          bf16 (W4A16)

    Raises ValueError for another flow.
    """
    if flow not in FLOWS:
        raise ValueError(f"flow must be one of {FLOWS}, got {flow!r}")
    h, i, k, parts = cfg.hidden, cfg.intermediate, cfg.top_k, cfg.projections
    t, r, active, p = share.tokens, share.rows, share.active, share.padded_rows
    groups_h, groups_i = padded(h // 16, 4), padded(i // 16, 4)
    index, outer = 4.0 * r, {"outer scales": 4.0 * r}  # int32 and fp32 per row
    kind = "fp4" if flow in ("static", "per_row") else "bf16"
    x = {"x": t * h / 2, "x scales": p * groups_h, "outer scales": 4 * t}
    h_in = {"h": r * i / 2, "h scales": p * groups_i}
    l1_out = h_in
    if flow == "per_row":
        l1_out = {"accumulators": 4.0 * r * parts * i}
        h_in = {**h_in, **outer}
    elif flow == "decoded":
        x = {"x": 2 * r * h, **outer}
        l1_out, h_in = {"h fp32": 4.0 * r * i}, {"h": 2 * r * i, **outer}
    elif flow == "bf16":
        x, h_in = {"x": 2 * t * h}, {"h": 2 * r * i}
        l1_out = h_in
    tokens = {"row_token": index}
    w1 = {"weights": active * weight_bytes(parts * i, h)}
    w2 = {"weights": active * weight_bytes(h, i)}
    o = {"o": 2.0 * r * h}
    plan = {"plan": 2 * index + 4 * t * k}
    out = [Stage("route", "moe.route", 0, {"ids, weights": 8 * t * k}, plan)]
    if flow != "bf16":
        out.append(Stage("quantize x", "moe.quantize", 0, {"x bf16": 2 * t * h, **tokens}, x))
    l1_in = {**x, **w1} if flow == "decoded" else {**x, **tokens, **w1}
    out.append(Stage("L1", "moe.l1", 2.0 * r * parts * i * h, l1_in, l1_out, kind))
    if flow in ("per_row", "decoded"):
        out.append(Stage("quantize h", "moe.quantize", 0, l1_out, h_in))
    out.append(Stage("L2", "moe.l2", 2.0 * r * h * i, {**h_in, **w2}, o, kind))
    reads = {**o, "plan, weights": 8 * t * k}
    out.append(Stage("combine", "moe.combine", 0, reads, {"y": 2.0 * t * h}))
    return out


def roof_seconds(work: list[Stage], peaks: Peaks) -> float:
    """Stages run one after the other."""
    return sum(stage.seconds(peaks) for stage in work)


# ---- command line --------------------------------------------------------------------------------


def table(title: str, work: list[Stage], peaks: Peaks) -> Table:
    out = Table(title=title, title_justify="left")
    for name in ("stage", "GFLOP", "MB read", "MB written", "FLOP/B", "memory us", "math us",
                 "roof us", "bound"):  # fmt: skip
        out.add_column(name, justify="left" if name in ("stage", "bound") else "right")
    for s in work:
        memory, math_ = s.memory_seconds(peaks), s.math_seconds(peaks)
        out.add_row(
            s.name, f"{s.flop / 1e9:.4g}", f"{sum(s.read.values()) / 1e6:.4g}",
            f"{sum(s.written.values()) / 1e6:.4g}", f"{s.intensity:.4g}", f"{memory * 1e6:.4g}",
            f"{math_ * 1e6:.4g}", f"{s.seconds(peaks) * 1e6:.4g}",
            "math" if math_ > memory else "memory",
        )  # fmt: skip
    out.add_section()
    total = [sum(x) for x in zip(*((sum(s.read.values()), sum(s.written.values())) for s in work))]
    out.add_row(
        "sum", f"{sum(s.flop for s in work) / 1e9:.4g}", f"{total[0] / 1e6:.4g}",
        f"{total[1] / 1e6:.4g}", "", "", "", f"{roof_seconds(work, peaks) * 1e6:.4g}", "",
    )  # fmt: skip
    return out


def as_json(work: list[Stage], peaks: Peaks) -> dict[str, Any]:
    rows = [
        {**dataclasses.asdict(s), "bytes": s.nbytes, "roof_us": s.seconds(peaks) * 1e6}
        for s in work
    ]
    return {"gpu": peaks.name, "stages": rows, "roof_us": roof_seconds(work, peaks) * 1e6}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m profiling.roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--case", default="deepseek-v4-pro", help="name of a public model, or a path")
    p.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 512, 2048, 8192])
    p.add_argument("--ranks", type=int, default=1, help="expert-parallel; tokens are per rank")
    p.add_argument("--flow", choices=FLOWS, default="static")
    p.add_argument("--gpu", choices=sorted(PEAKS), default="b200")
    p.add_argument("--reached", action="store_true", help="what programs reached, not datasheets")
    p.add_argument("--points", type=Path, help="file of profiling.bench: measured points")
    p.add_argument("--json", type=Path)
    p.add_argument("--png", type=Path, help="log-log picture (needs matplotlib)")
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        cfg = find_config(args.case)
        peaks = (REACHED if args.reached else PEAKS)[args.gpu]
        work = {t: stages(cfg, Share.expected(cfg, t, args.ranks), args.flow) for t in args.tokens}
        measured = [] if args.points is None else json.loads(args.points.read_text())["rows"]
    except KeyError:
        sys.stderr.write(f"error: nothing is known to be reached on {args.gpu}: drop --reached\n")
        return 2
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    console = Console() if sys.stdout.isatty() else Console(width=110)
    console.print(
        f"{peaks.name}: memory {peaks.memory / 1e12:g} TB/s, bf16 {peaks.bf16 / 1e15:g} PFLOP/s, "
        f"fp4 {'none' if peaks.fp4 is None else f'{peaks.fp4 / 1e15:g} PFLOP/s'} ({peaks.source})"
    )
    for tokens, s in work.items():
        title = f"{args.case}, {tokens} tokens a rank, {args.ranks} ranks, flow {args.flow}: roofs"
        console.print(table(title, s, peaks))
    if args.json:
        rows = [{"tokens": t, **as_json(s, peaks)} for t, s in work.items()]
        head = {"case": args.case, "ranks": args.ranks, "flow": args.flow}
        args.json.write_text(json.dumps({**head, "rows": rows}, indent=1))
    if args.png:
        from profiling.pictures import roofline_picture

        roofline_picture(args.png, args.gpu, f"{args.case}, {args.ranks} ranks", work, measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
