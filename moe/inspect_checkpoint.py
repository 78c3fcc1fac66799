"""What `python -m moe inspect` shows: dialect, shapes, scale ranges, saturated and zero blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.table import Table

from cute_kernels import nvfp4
from moe import formats
from moe.checkpoint import ExpertReader, expert_names, layer_names
from moe.config import MoEConfig
from moe.model_config import moe_config
from moe.tensor_files import CheckpointError, TensorFiles


@dataclasses.dataclass
class Totals:
    """Over all experts of one projection of one layer."""

    shape: tuple[int, int] = (0, 0)
    dialects: set[str] = dataclasses.field(default_factory=set)
    experts: int = 0
    lowest: float = float("inf")
    highest: float = 0.0
    global_low: float = float("inf")
    global_high: float = 0.0
    saturated: int = 0
    zero: int = 0
    inexact: int = 0

    def add(self, projection: formats.Projection) -> None:
        q, inexact = formats.read(projection)
        scale = q.row_major_scale().float()
        self.shape = (projection.rows, projection.cols)
        self.dialects.add(formats.dialect(projection))
        self.experts += 1
        self.lowest = min(self.lowest, float(scale.min()))
        self.highest = max(self.highest, float(scale.max()))
        self.global_low = min(self.global_low, float(q.global_scale))
        self.global_high = max(self.global_high, float(q.global_scale))
        self.saturated += int((scale == nvfp4.UE4M3_MAX).sum())
        empty = (nvfp4.unpack(q.data) & 7).unflatten(-1, (-1, nvfp4.BLOCK)).amax(-1) == 0
        self.zero += int(empty.sum())
        self.inexact += inexact


def inspect(path: str | Path, only: int | None = None) -> Iterator[Table]:
    """One table per layer with experts. Raises CheckpointError."""
    files = TensorFiles(path)
    cfg = moe_config(files.config())
    layers = _layers(files) if only is None else [only]
    if not layers:
        raise CheckpointError(f"{path} has no layer with experts")
    for layer in layers:
        yield _layer_table(files, layer, cfg)


def _layers(files: TensorFiles) -> list[int]:
    from moe.checkpoint import _LAYER

    found = {int(m.group(1)) for n in files.names() if ".experts." in n and (m := _LAYER.search(n))}
    return sorted(found)


def _layer_table(files: TensorFiles, layer: int, cfg: MoEConfig) -> Table:
    reader = ExpertReader(files, layer, cfg, expert_names(layer_names(files, layer)))
    totals: dict[str, Totals] = {}
    for e in range(cfg.num_experts):
        for projection in reader.projections(e)[0]:
            role = projection.where.rsplit(" ", 1)[1]
            totals.setdefault(role, Totals()).add(projection)
    scales = reader.input_scales()
    known = int(torch.isfinite(scales).all(dim=1).sum())
    out = Table(
        title=f"layer {layer}: {cfg.num_experts} experts, {cfg.activation}, top {cfg.top_k}; "
        f"input scales of {known} experts",
        title_justify="left",
    )
    names = ("projection", "dialect", "(rows, K)", "block scales", "global scales")
    for name in (*names, "saturated", "zero", "inexact"):
        out.add_column(name, justify="left" if name == "projection" else "right")
    for role, t in totals.items():
        out.add_row(
            role,
            "+".join(sorted(t.dialects)),
            str(t.shape),
            f"{t.lowest:g} .. {t.highest:g}",
            f"{t.global_low:.3g} .. {t.global_high:.3g}",
            str(t.saturated),
            str(t.zero),
            str(t.inexact),
        )
    return out
