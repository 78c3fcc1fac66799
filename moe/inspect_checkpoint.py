"""What `python -m moe inspect` shows: experts, dialect, shapes, scale ranges, saturated and zero
blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cute_kernels import nvfp4
from cute_kernels.activations import ReLU2, SwiGLU
from moe.checkpoint import ExpertReader, read_expert
from moe.checkpoint_names import MoENames, moe_layers, moe_names
from moe.config import MoEConfig
from moe.model_config import fused, moe_config
from moe.tensor_files import CheckpointError, TensorFiles

HEADINGS = (
    "weight",
    "N x K",
    "blocks",
    "block scale",
    "global scale",
    "input scale",
    "at 448",
    "zero",
    "inexact",
)


@dataclasses.dataclass
class Range:
    """Smallest and largest of what was seen."""

    low: float = float("inf")
    high: float = float("-inf")

    def add(self, values: Tensor) -> None:
        if values.numel():
            self.low = min(self.low, float(values.min()))
            self.high = max(self.high, float(values.max()))

    def __str__(self) -> str:
        if self.low > self.high:
            return "none"
        if self.low == self.high:
            return f"{self.low:.3g}"
        return f"{self.low:.3g}..{self.high:.3g}"


@dataclasses.dataclass
class Totals:
    """Over all experts of one projection of one layer.

    block   block scales in use (not of zero blocks); saturated: blocks whose scale is the largest,
    448; zero: blocks whose codes are all 0; whole: global scales; inexact: see
    `moe.formats.read`
    """

    shape: tuple[int, int]
    dialects: set[str] = dataclasses.field(default_factory=set)
    blocks: int = 0
    saturated: int = 0
    zero: int = 0
    inexact: int = 0
    block: Range = dataclasses.field(default_factory=Range)
    whole: Range = dataclasses.field(default_factory=Range)

    def add(self, dialect: str, q: nvfp4.Nvfp4Tensor, inexact: int) -> None:
        scale = q.row_major_scale().float()
        codes = nvfp4.unpack(q.data) & 7
        empty = codes.unflatten(-1, (-1, nvfp4.BLOCK)).amax(-1) == 0
        self.dialects.add(dialect)
        self.blocks += scale.numel()
        self.saturated += int((scale == nvfp4.UE4M3_MAX).sum())
        self.zero += int(empty.sum())
        self.inexact += inexact
        self.block.add(scale[~empty])
        self.whole.add(q.global_scale)

    def row(self, role: str, inputs: Range) -> tuple[str, ...]:
        rows, cols = self.shape
        counts = (self.saturated, self.zero, self.inexact)
        ranges = (self.block, self.whole, inputs)
        return role, f"{rows} x {cols}", *map(str, (self.blocks, *ranges, *counts))


class LayerTable(NamedTuple):
    """``rows`` under `HEADINGS`, one a projection."""

    title: str
    rows: list[tuple[str, ...]]


def inspect(path: str | Path, layer: int | None = None) -> Iterable[LayerTable]:
    """One table a layer with experts (or that of ``layer`` alone).

    Scales of plain weights are those that loading would give them. A model type that is not known
    is read by the shapes of its experts. Raises CheckpointError.
    """
    files = TensorFiles(path)
    layers = sorted(n or 0 for n in moe_layers(files.names()))
    if not layers:
        raise CheckpointError(f"{path} has no layer with experts (names with 'experts.')")
    for number in layers if layer is None else [layer]:
        yield _layer_table(files, number)


def _layer_table(files: TensorFiles, layer: int) -> LayerTable:
    names = moe_names(files.names(), layer)
    cfg = read_config(files, names)
    reader = ExpertReader(files, layer, cfg, names, fused(files.config()))
    plans = [reader.plans(e) for e in range(cfg.num_experts)]
    totals: dict[str, Totals] = {}
    for expert in tqdm(plans, f"layer {layer}", disable=None, delay=2.0, leave=False):
        for plan, (tensor, inexact) in zip(expert, read_expert(expert)):
            p = plan.projection
            role = p.where.rsplit(" ", 1)[1]
            totals.setdefault(role, Totals((p.rows, p.cols))).add(plan.dialect, tensor, inexact)
    scales = reader.input_scales()
    out = []
    for role, total in totals.items():
        column = scales[:, 1 if role == "down" else 0]
        inputs = Range()
        inputs.add(column[~torch.isnan(column)])
        out.append(total.row(role, inputs))
    dialects = "+".join(sorted({d for total in totals.values() for d in total.dialects}))
    return LayerTable(f"layer {layer}: {cfg.num_experts} experts, {dialects}", out)


def read_config(files: TensorFiles, names: MoENames) -> MoEConfig:
    """The model's config, or, for an unknown model type, one whose sizes are those of the experts
    (routing and activation are then placeholders)."""
    try:
        return moe_config(files.config())
    except CheckpointError:
        down = names.single.get("down", {})
        if not down:
            raise
    first = next(iter(down.values()))
    name = first.get("weight") or first.get("weight_packed")
    if name is None:
        raise CheckpointError(f"no weight among {sorted(first.values())}")
    stored = files.stored(name)
    if len(stored.shape) != 2:
        raise CheckpointError(f"{name} must be (H, I), got {stored.shape}")
    hidden, cols = stored.shape
    gated = bool({"gate", "gate_up"} & names.roles())
    return MoEConfig(
        hidden,
        cols if stored.dtype.is_floating_point else 2 * cols,
        max(names.expert_ids()) + 1,
        top_k=1,
        activation=SwiGLU() if gated else ReLU2(),
    )
