"""Forecast of SM100 grouped GEMMs on a B200, from simulated event streams and quoted constants.

    python -m profiling.model validate --peers PYTHON       # published times against the model
    python -m profiling.model projections --peers PYTHON    # the 14 rows of LightMoE's table
    python -m profiling.model sweep --peers PYTHON          # ours, lightmoe, flashinfer, one run
    python -m profiling.model ranges                        # what each uncertain constant does
    python -m profiling.model constants                     # the table with sources

Everything printed is a forecast, never a measurement; its error on published times is in the last
line. PYTHON is an interpreter with the peers installed (tests/conformance/README.md); kernels are
recorded once into --streams and again when their sources change. docs/forecast.md explains.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from profiling import model_cases as cases
from profiling import model_validation as validation
from profiling.model_constants import TABLE, Machine, knobs
from profiling.model_grid import Family, Forecast, Model, Shape
from profiling.specimens import collect

# mean absolute errors of `validate`, as printed on docs/forecast.md
ERROR = (
    "forecast; mean error on published times: LightMoE 3 % (rows not fitted), FlashInfer 8 to 9 %"
)


@dataclass(frozen=True)
class Entry:
    """The fastest kernel of a maker on a shape."""

    family: Family
    forecast: Forecast


def fastest(
    model: Model, machine: Machine, shape: Shape, families: Iterable[Family]
) -> Entry | None:
    """Of the kernels that are recorded and fit; None if there is none."""
    able = [f for f in families if model.has(f) and cases.fits(f, shape)]
    entries = [Entry(f, model.forecast(f, shape, machine)) for f in able]
    return min(entries, key=lambda e: e.forecast.us) if entries else None


def chosen(shape: Shape, output: str) -> Family:
    """The kernel that `cute_kernels.config.choose_config` takes for a shape."""
    from cute_kernels.config import FP4_HIDDEN, choose_config

    out_bytes = FP4_HIDDEN if output == "fp4" else 2.0
    config = choose_config(shape.rows, len(shape.counts), shape.n, shape.k, out_bytes)
    if config.decode:
        return next(f for f in cases.ours(output) if f.decode_rows)
    return Family("ours", output, 128 * config.ctas, config.tile_n, config.pairs, config.columns)


@dataclass(frozen=True)
class Line:
    """One layer of one case at one number of tokens per rank."""

    case: str
    layer: str
    tokens: int
    shape: Shape
    best: Entry
    chosen_us: float | None
    chosen: Family
    peers: dict[str, Entry]

    def as_json(self) -> dict[str, Any]:
        return {
            "case": self.case, "layer": self.layer, "tokens": self.tokens,
            "n": self.shape.n, "k": self.shape.k, "rows": self.shape.rows,
            "ours": {"kernel": self.best.family.label, "us": self.best.forecast.us,
                     "limit": self.best.forecast.limit},
            "chosen": {"kernel": self.chosen.label, "us": self.chosen_us},
            "peers": {name: {"kernel": e.family.label, "us": e.forecast.us,
                             "limit": e.forecast.limit} for name, e in self.peers.items()},
        }  # fmt: skip


def sweep(model: Model, machine: Machine, names: str, tokens: Iterable[int]) -> list[Line]:
    """Every case whose name contains ``names``, gate/up with FP4 output and down with bf16."""
    lines = []
    for case in cases.CASES:
        if names.lower() not in case.name.lower():
            continue
        for count in tokens:
            layers = zip(("gate/up", "down"), ("fp4", "bf16"), case.shapes(count), strict=True)
            for layer, output, shape in layers:
                best = fastest(model, machine, shape, cases.ours(output))
                if best is None or not shape.rows:
                    continue
                found = {
                    "lightmoe": fastest(model, machine, shape, cases.lightmoe(output)),
                    "flashinfer": fastest(model, machine, shape, cases.flashinfer(output)),
                }
                mine = chosen(shape, output)
                us = model.forecast(mine, shape, machine).us if model.has(mine) else None
                peers = {name: entry for name, entry in found.items() if entry is not None}
                lines.append(Line(case.name, layer, count, shape, best, us, mine, peers))
    return lines


def sweep_table(lines: list[Line], machine: Machine) -> str:
    """Text table; x is how many times faster our best kernel is."""
    out = [
        f"HBM {machine.hbm} TB/s, fabric {machine.fabric} TB/s",
        f"{'case':18s} {'layer':8s} {'tokens':>6s} {'rows/e':>6s} {'ours us':>8s} "
        f"{'kernel':24s} {'limit':20s} {'chosen us':>9s} {'lightmoe us':>11s} {'x':>5s} "
        f"{'flashinfer us':>13s} {'x':>5s}",
    ]
    for line in lines:
        us = line.best.forecast.us
        per = line.shape.rows / len(line.shape.counts)
        taken = "" if line.chosen_us is None else f"{line.chosen_us:.1f}"
        text = (
            f"{line.case:18s} {line.layer:8s} {line.tokens:>6d} {per:>6.0f} {us:>8.1f} "
            f"{line.best.family.label.removeprefix('ours '):24s} {line.best.forecast.limit:20s} "
            f"{taken:>9s}"
        )
        for name, width in (("lightmoe", 11), ("flashinfer", 13)):
            peer = line.peers.get(name)
            text += (
                f" {peer.forecast.us:>{width}.1f} {peer.forecast.us / us:>5.2f}"
                if peer
                else " " * (width + 7)
            )
        out.append(text)
    return "\n".join(out)


GOAL = 1.18  # times LightMoE's bf16 kernel, rows with K >= 1024


def projections(model: Model, machine: Machine) -> str:
    """Our kernels on the published rows: FP4 output where LightMoE's row has bf16 for gate/up, its
    SwiGLU kernel beside it."""
    out = [
        f"{'row':26s} {'K':>5s} {'ours us':>8s} {'kernel':22s} {'limit':20s} {'chosen us':>9s} "
        f"{'published':>9s} {'lightmoe bf16':>13s} {'x':>5s} {'lightmoe fp4':>12s} {'x':>5s} "
        f"{'flashinfer':>10s} {'x':>5s}"
    ]
    rows = [p for p in validation.PROJECTIONS if p.k >= 1024]
    met = 0
    for row in validation.PROJECTIONS:
        output = "bf16" if row.name.endswith("down") else "fp4"
        mine = fastest(model, machine, row.shape, cases.ours(output))
        plain = model.forecast(validation.lightmoe_family(row.n), row.shape, machine).us
        peers = [cases.lightmoe(output) if output == "fp4" else [], cases.flashinfer(output)]
        others = [fastest(model, machine, row.shape, families) for families in peers]
        if mine is None:
            continue
        us, taken = mine.forecast.us, chosen(row.shape, output)
        met += row in rows and plain / us >= GOAL
        out.append(
            f"{row.name:26s} {row.k:>5d} {us:>8.1f} {mine.family.label.removeprefix('ours '):22s} "
            f"{mine.forecast.limit:20s} {model.forecast(taken, row.shape, machine).us:>9.1f} "
            f"{row.us:>9.1f} {plain:>13.1f} {plain / us:>5.2f} "
            + " ".join(
                f"{e.forecast.us:>{w}.1f} {e.forecast.us / us:>5.2f}" if e else " " * (w + 6)
                for e, w in zip(others, (12, 10), strict=True)
            )
        )
    out.append(f"at least {GOAL} times LightMoE's bf16 kernel: {met} of {len(rows)} rows")
    return "\n".join(out)


def ranges(model: Model, machine: Machine, names: str, tokens: Iterable[int]) -> str:
    """Forecast of our best kernel with every uncertain constant at its ends, one at a time."""
    out = []
    for line in sweep(model, machine, names, tokens):
        family, us = line.best.family, line.best.forecast.us
        moved = {
            name: [
                model.forecast(family, line.shape, machine.with_(**{name: end})).us
                for end in (low, high)
            ]
            for name, low, high in knobs()
        }
        low, high = (f(u for ends in moved.values() for u in ends) for f in (min, max))
        out.append(
            f"{line.case} {line.layer} {line.tokens} tokens, {family.label}: {us:.1f} us, "
            f"one constant at a time {min(low, us):.1f} to {max(high, us):.1f}"
        )
        ranked = sorted(moved.items(), key=lambda kv: min(kv[1]) - max(kv[1]))
        out += [
            f"    {name:18s} {ends[0]:8.1f} {ends[1]:8.1f}"
            for name, ends in ranked
            if max(abs(u - us) for u in ends) > 0.002 * us
        ]
    return "\n".join(out)


def constants_table() -> str:
    """The constants with ranges, units and sources."""
    lines = [f"{'constant':18s} {'value':>7s} {'range':>15s}  unit; source"]
    for name, c in TABLE.items():
        span = "" if c.low == c.high else f"{c.low:g} to {c.high:g}"
        lines.append(f"{name:18s} {c.value:>7g} {span:>15s}  {c.unit}; {c.source}")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=("validate", "projections", "sweep", "ranges", "constants"))
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter with the peers installed")
    parser.add_argument("--streams", type=Path, default=Path("build/streams"))
    parser.add_argument("--recorded", action="store_true", help="record nothing, use what is there")
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(cases.TOKENS))
    parser.add_argument("--hbm", type=float, nargs="+", default=[5.15, 7.1], help="TB/s")
    parser.add_argument("--json", type=Path, help="write the sweep to this file")
    args = parser.parse_args()
    if args.what == "constants":
        sys.stdout.write(constants_table() + "\n")
        return
    wanted = validation.families() if args.what == "validate" else cases.everyone()
    if not args.recorded:
        collect([s for f in wanted for s in f.specimens()], args.streams, args.peers)
    model, machine = Model(args.streams), Machine()
    if args.what == "validate":
        missing = [f.label for f in wanted if not model.has(f)]
        if missing:
            sys.exit(f"not recorded, give --peers: {', '.join(missing)}")
        sys.stdout.write(validation.report(validation.validate(model, machine)) + "\n")
        return
    if args.what == "projections":
        sys.stdout.write(projections(model, machine) + "\n" + ERROR + "\n")
        return
    written = []
    for hbm in args.hbm:
        set_to = machine.with_(hbm=hbm)
        if args.what == "ranges":
            sys.stdout.write(ranges(model, set_to, args.case, args.tokens) + "\n")
            continue
        lines = sweep(model, set_to, args.case, args.tokens)
        sys.stdout.write(sweep_table(lines, set_to) + "\n")
        written += [{"hbm": hbm, **line.as_json()} for line in lines]
    sys.stdout.write(ERROR + "\n")
    if args.json:
        args.json.write_text(json.dumps({"error": ERROR, "lines": written}, indent=1))


if __name__ == "__main__":
    main()
