"""What the layer will launch for a case: configurations, memory maps, bytes, roofs, times.

`python -m moe explain` prints it. Nothing is compiled or run.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.table import Table

from cute_kernels.config import (
    FP4_HIDDEN,
    SMEM_PER_CTA,
    TMEM_COLUMNS,
    GemmConfig,
    choose_config,
    clusters_at_once,
)
from cute_kernels.forecast import Forecast, forecast_chosen
from moe.config import MoEConfig
from profiling.roofline import PEAKS, Peaks, Share, Stage, padded, stages

SMS = {"b200": 148, "gb200": 148, "b300": 148, "h200": 132, "h100": 132}


RING_BYTES = 4 * (2 * 8 + 8 * 4)  # `cute_kernels.sm100.schedule`: barriers and items, 4 deep
EXCHANGE_BYTES = 4 * 4 * 16 * 36  # `cute_kernels.device.lanes`: four warps turn a decode tile


@dataclasses.dataclass(frozen=True)
class Gemm:
    """One grouped GEMM of the plan: R rows over ``experts`` local experts against (n, k).

    columns      of the output tile of a cluster, in output columns of the GEMM
    tiles        work items, rows spread evenly over the active experts
    waves        tiles of the busiest cluster
    """

    name: str
    n: int
    k: int
    kernel: str
    tile: tuple[int, int, int]
    cluster: int
    stages: int
    stage_bytes: int
    tiles: int
    waves: int
    shared: dict[str, int]
    tensor_memory: dict[str, int]
    forecast: Forecast | None = None  # on a B200

    @property
    def in_flight(self) -> int:
        """Bytes that the stages of one CTA hold."""
        return self.stages * self.stage_bytes


@dataclasses.dataclass(frozen=True)
class Plan:
    """Stages with their work, and the two GEMMs among them."""

    peaks: Peaks
    share: Share
    work: list[Stage]
    gemms: dict[str, Gemm]


def counts_of(share: Share, experts: int) -> list[int]:
    """Rows per expert when they are spread evenly over the active ones."""
    active = max(1, min(experts, round(share.active)))
    rows = round(share.rows)
    low, more = divmod(rows, active)
    return [low + (i < more) for i in range(active)] + [0] * (experts - active)


def make_plan(cfg: MoEConfig, tokens: int, ranks: int, gpu: str, flow: str = "static") -> Plan:
    """The plan of one rank on ``gpu`` (a key of `profiling.roofline.PEAKS`).

    Raises ValueError for ranks that do not divide the experts, KeyError for another GPU.
    """
    peaks, share = PEAKS[gpu], Share.expected(cfg, tokens, ranks)
    if peaks.fp4 is None and flow != "bf16":
        flow = "decoded"
    experts = cfg.num_experts // ranks
    counts = counts_of(share, experts)
    sizes = {
        "L1": (cfg.projections * cfg.intermediate, cfg.hidden),
        "L2": (cfg.hidden, cfg.intermediate),
    }
    gemms = {}
    for name, (n, k) in sizes.items():
        fp4_output = name == "L1" and flow == "static"
        if peaks.fp4 is None:
            gemms[name] = hopper_gemm(name, n, k, counts, SMS[gpu])
        else:
            gemms[name] = blackwell_gemm(name, (n, k), counts, SMS[gpu], fp4_output)
        if gpu == "b200" and any(counts):
            found = forecast_chosen(counts, n, k, fp4_output=fp4_output)[1]
            gemms[name] = dataclasses.replace(gemms[name], forecast=found)
    return Plan(peaks, share, stages(cfg, share, flow), gemms)


def blackwell_gemm(
    name: str, size: tuple[int, int], counts: list[int], sms: int, fp4_output: bool
) -> Gemm:
    """What `cute_kernels.config.choose_config` takes. GPCs leave SMs over when clusters are large:
    fewer than ``sms`` can work."""
    n, k = size
    out_bytes = FP4_HIDDEN if fp4_output else 2.0
    c = choose_config(sum(counts), len(counts), n, k, out_bytes)
    row_tiles = sum(-(-rows // c.tile_rows) for rows in counts)
    tiles = row_tiles * -(-n // c.tile_columns)
    clusters = clusters_at_once(sms, c.cluster)
    return Gemm(
        name, n, k, f"sm100 {c.name}", (c.tile_rows, c.tile_columns, c.tile_k), c.cluster,
        c.stages, c.stage_bytes, tiles, -(-tiles // clusters), shared_memory(c), tensor_memory(c),
    )  # fmt: skip


def shared_memory(c: GemmConfig) -> dict[str, int]:
    """Bytes of one CTA: both operands of the MMA for all stages, barriers, what is left. M holds
    the rows, in a decode tile the weights."""
    m_rows, n_rows = 128, c.tile_n // c.ctas
    out = {
        "M codes": c.stages * m_rows * c.tile_k // 2,
        "N codes": c.stages * n_rows * c.tile_k // 2,
        "M scales": c.stages * 128 * c.tile_k // 16,
        "N scales": c.stages * c.sfb_rows * c.tile_k // 16,
        "turned tile": EXCHANGE_BYTES if c.decode else 0,
        "barriers, items": 8 * (2 * c.stages + (2 if c.overlapped else 4)) + RING_BYTES + 4,
    }
    return out | {"free": SMEM_PER_CTA - sum(out.values())}


def tensor_memory(c: GemmConfig) -> dict[str, int]:
    """Columns of the 512: accumulators (two of 256 share columns), scales, what is left."""
    out = {"two accumulators": c.acc_columns, "scales": c.sf_columns}
    return out | {"free": TMEM_COLUMNS - sum(out.values())}


def hopper_gemm(name: str, n: int, k: int, counts: list[int], sms: int) -> Gemm:
    """What `cute_kernels.sm90.config.choose_config` takes. Weights are M, tokens are N."""
    from cute_kernels.sm90.config import SMEM_SM, chunk_steps
    from cute_kernels.sm90.config import choose_config as choose

    c = choose(sum(counts), len(counts))
    steps = -(-padded(k, 128) // (128 * chunk_steps(k, c)))
    row_tiles = -(-n // (128 * c.row_tiles))
    tiles = steps * row_tiles * sum(-(-rows // c.max_tokens) for rows in counts)
    stage = c.weight_stage_bytes + c.row_stage_bytes
    shared = {
        "weights": c.num_stages * c.weight_stage_bytes,
        "rows": c.num_stages * c.row_stage_bytes,
        "staging, barriers": c.smem_bytes - c.num_stages * stage,
    }
    shared["free"] = SMEM_SM // c.ctas_per_sm - 1024 - c.smem_bytes
    tile = (c.max_tokens, 128 * c.row_tiles, 64 * c.stage_k64)
    return Gemm(
        name, n, k, f"sm90 {c.name}", tile, 1, c.num_stages, stage, tiles,
        -(-tiles // (sms * c.ctas_per_sm)), shared, {},
    )  # fmt: skip


# ---- what a bench measured -----------------------------------------------------------------------


def measured(rows: list[dict[str, Any]], case: str, tokens: int, ranks: int) -> dict[str, float]:
    """Stage -> microseconds of the row of a `profiling.bench` file for this case, and "call".

    Raises ValueError when the file has no timed row for it.
    """
    mine = [
        r for r in rows
        if (r["case"], r["tokens"], r["ranks"]) == (case, tokens, ranks) and "us" in r
    ]  # fmt: skip
    if not mine:
        raise ValueError(f"the file has no timed row for {case}, {tokens} tokens, {ranks} ranks")
    best = min(mine, key=lambda r: r["us"])
    return {s["name"]: s["us"] for s in best["stages"] if "us" in s} | {"call": best["us"]}


# ---- tables --------------------------------------------------------------------------------------


def tables(plan: Plan, times: dict[str, float] | None = None) -> list[Table]:
    """Stages, the two GEMMs, their memory. ``times``: what `measured` returned."""
    return [stage_table(plan, times or {}), gemm_table(plan), memory_table(plan)]


def stage_table(plan: Plan, times: dict[str, float]) -> Table:
    p = plan.peaks
    rate = f"{p.memory / 1e12:g} TB/s, {p.math(plan.work[-2].kind) / 1e15:.3g} PFLOP/s"
    title = f"stages on one {p.name}: roofs of {rate} ({p.source})"
    columns = ["stage", "MB read", "MB written", "GFLOP", "roof us", "bound", "forecast us"]
    out = columns_of(title, [*columns, "measured us"] if times else columns, words=1)
    for s in plan.work:
        gemm = plan.gemms.get(s.name)
        f = gemm.forecast if gemm else None
        bound = "math" if s.math_seconds(p) > s.memory_seconds(p) else "memory"
        row = [s.name, f"{sum(s.read.values()) / 1e6:.4g}", f"{sum(s.written.values()) / 1e6:.4g}",
               f"{s.flop / 1e9:.4g}", f"{s.seconds(p) * 1e6:.4g}", bound,
               f"{f.low:.0f}..{f.us:.0f}..{f.high:.0f}, {f.limit}" if f else ""]  # fmt: skip
        name = s.range.removeprefix("moe.")
        name = name.upper() if name in ("l1", "l2") else name
        if times:
            row.append(f"{times[name]:.1f}" if name in times else "")
        out.add_row(*row)
    return out


def gemm_table(plan: Plan) -> Table:
    share = plan.share
    title = f"GEMMs: {share.rows:.4g} rows on {share.active:.4g} active experts, spread evenly"
    names = ["GEMM", "N x K", "kernel", "rows x N x K", "cluster", "stages", "in flight",
             "tiles", "waves"]  # fmt: skip
    out = columns_of(title, names, words=3)
    for g in plan.gemms.values():
        out.add_row(
            g.name, f"{g.n} x {g.k}", g.kernel, " x ".join(map(str, g.tile)), str(g.cluster),
            str(g.stages), f"{g.in_flight / 1024:.0f} KB", str(g.tiles), str(g.waves),
        )  # fmt: skip
    return out


def memory_table(plan: Plan) -> Table:
    out = columns_of("memory of one CTA", ["GEMM", "what", "amount"], words=2)
    for g in plan.gemms.values():
        for name, nbytes in g.shared.items():
            out.add_row(g.name, f"shared: {name}", f"{nbytes} B")
        for name, columns in g.tensor_memory.items():
            out.add_row(g.name, f"TMEM: {name}", f"{columns} columns")
        out.add_section()
    return out


def columns_of(title: str, names: list[str], words: int) -> Table:
    out = Table(title=title, title_justify="left")
    for i, name in enumerate(names):
        out.add_column(name, justify="left" if i < words else "right", no_wrap=name == "kernel")
    return out


def notes(plan: Plan) -> list[str]:
    """What the numbers are."""
    forecasts = [g.forecast for g in plan.gemms.values() if g.forecast is not None]
    if forecasts:
        return [f"{forecasts[0].note}; low..expected..high, and what limits"]
    return [f"no forecast for {plan.peaks.name}: roofs only, which no kernel reaches"]
