"""One MoE layer out of a checkpoint: `load_checkpoint`.

Dialects: ModelOpt NVFP4, compressed-tensors nvfp4-pack-quantized, MXFP4 (DeepSeek-native and
gpt-oss), BF16; see `moe.formats`. Names: see `moe.checkpoint_names`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from cute_kernels.nvfp4 import Nvfp4Tensor
from moe import formats
from moe.checkpoint_names import MoENames, Names, moe_names
from moe.config import MoEConfig
from moe.formats import Plan, Projection
from moe.model_config import Fused, fused, moe_config
from moe.tensor_files import CheckpointError, Stored, TensorFiles
from moe.weights import ORDERS, ExpertWeights, ExpertWeightsBuilder, _row_split

H_SCALES = ("auto", "static", "dynamic")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found.

    dialect      of the experts' weights: "modelopt", "compressed-tensors", "mxfp4", "bf16", or
                 several joined by "+"
    activations  "bf16" where the checkpoint says that its weights are meant for 16-bit activations
                 (W4A16), else "nvfp4": what to give to `MoE`
    inexact      (projection, blocks of 16) whose MXFP4 values UE4M3 scales could not keep exactly;
                 everything else was kept bit for bit (bf16 is quantised, which does not count)
    unused       tensors of the MoE module that are neither experts, router nor shared expert
    """

    dialect: str
    activations: str
    inexact: tuple[tuple[str, int], ...]
    unused: tuple[str, ...]

    @property
    def inexact_blocks(self) -> int:
        return sum(blocks for _, blocks in self.inexact)


@dataclasses.dataclass(frozen=True)
class Extras:
    """What belongs to the layer besides its experts; None where the checkpoint has none.

    router_weight   (num_experts, H); router_bias (num_experts,): part of the logits
    selection_bias  (num_experts,): only chooses; tid2eid (vocabulary, top_k): hash routing
    shared          tensors of the shared expert by the rest of their names, as stored
    input_scales    float32 (num_experts, 2): multipliers of (x, h) of all experts of all ranks; NaN
                    where absent
    """

    router_weight: Tensor | None
    router_bias: Tensor | None
    selection_bias: Tensor | None
    tid2eid: Tensor | None
    shared: dict[str, Tensor]
    input_scales: Tensor | None
    report: Report

    def router(self) -> dict[str, Any]:
        """Arguments of `MoE` about routing."""
        names = ("router_weight", "router_bias", "selection_bias", "tid2eid")
        return {name: getattr(self, name) for name in names}


class ExpertReader:
    """Plans of one expert at a time, whatever way its tensors are stored."""

    def __init__(
        self,
        files: TensorFiles,
        layer: int,
        cfg: MoEConfig,
        names: MoENames,
        fused: Fused,
    ) -> None:
        self.files, self.layer, self.cfg, self.names = files, layer, cfg, names
        if fused.order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {fused.order!r}")
        self._rows = _row_split(fused.order, fused.granularity, cfg.intermediate)  # of gate, of up
        extra = sorted(e for e in names.expert_ids() if e >= cfg.num_experts)
        if extra:
            raise CheckpointError(
                f"layer {layer}: tensors of experts {extra}, but the config has "
                f"{cfg.num_experts} experts"
            )

    def plans(self, e: int) -> list[Plan]:
        """[gate, up, down], or [up, down] for an activation without a gate. Headers only.

        Raises CheckpointError for what is missing, extra, or of another dtype or shape.
        """
        inter, hidden = self.cfg.intermediate, self.cfg.hidden
        parts = {role: self._tensors(role, e) for role in ("gate", "up", "down", "gate_up")}
        fused = parts.pop("gate_up")
        if fused:
            if parts["gate"] or parts["up"]:
                raise CheckpointError(f"{self._where(e)}: both fused and separate gate and up")
            across = self._is_across(fused, parts["down"])
            parts["gate"], parts["up"] = self._split(fused, across, e)
            if across:  # such models store the down projection across, too
                parts["down"] = _turn(parts["down"])
        if not self.cfg.activation.gated:
            if parts["gate"] and parts["up"]:
                raise CheckpointError(
                    f"{self._where(e)}: has a gate projection, {self.cfg.activation} uses none"
                )
            parts["up"] = parts["up"] or parts.pop("gate")
        plans = []
        for role in ("gate", "up", "down") if self.cfg.activation.gated else ("up", "down"):
            rows, cols = (hidden, inter) if role == "down" else (inter, hidden)
            where = f"{self._where(e)} {role}"
            if not parts[role]:
                raise CheckpointError(f"{where}: no tensor of this projection is there")
            plans.append(formats.plan(Projection(where, rows, cols, parts[role])))
        biased = ["bias" in p.projection.tensors for p in plans]
        if any(biased) and not all(biased):
            without = plans[biased.index(False)].projection
            raise without.fail("bias is missing, other projections of the expert have one")
        return plans

    def _where(self, e: int) -> str:
        return f"layer {self.layer} expert {e}"

    def _tensors(self, role: str, e: int) -> dict[str, Stored]:
        single = self.names.single.get(role, {}).get(e)
        if single:
            return {last: self.files.stored(name) for last, name in single.items()}
        stacked = self.names.stacked.get(role, {})
        return {last: self._slice(name, e) for last, name in stacked.items()}

    def _slice(self, name: str, e: int) -> Stored:
        """Expert e of a stacked tensor: (E, ...), (E * rows, cols), or one value for all
        experts."""
        whole, experts = self.files.stored(name), self.cfg.num_experts
        shape = whole.shape
        if shape in ((), (1,)):
            return whole
        if shape[0] == experts:
            one = self.files.stored_rows(name, e, e + 1)
            return one.part(shape[1:], lambda t: t[0])
        if len(shape) == 2 and shape[0] % experts == 0:
            rows = shape[0] // experts
            return self.files.stored_rows(name, e * rows, (e + 1) * rows)
        raise CheckpointError(f"{name} cannot be split over {experts} experts, shape {shape}")

    def _is_across(self, fused: dict[str, Stored], down: dict[str, Stored]) -> bool:
        """Stored as (K, N) instead of (N, K), packed codes and scales included, as Llama-4 and
        gpt-oss do? Of a square gate_up_proj the down projection, which cannot be square then, tells
        it."""
        weight = fused.get("weight") or fused.get("weight_packed")
        if weight is None:
            return False
        k = self.cfg.hidden if weight.dtype.is_floating_point else self.cfg.hidden // 2
        n = 2 * self.cfg.intermediate
        if k != n:
            return weight.shape == (k, n)
        other = down.get("weight") or down.get("weight_packed")
        return other is not None and other.shape[-1:] == (self.cfg.hidden,)

    def _split(
        self, fused: dict[str, Stored], across: bool, e: int
    ) -> tuple[dict[str, Stored], dict[str, Stored]]:
        """gate_up -> gate, up. One global scale serves both, two belong to gate and up."""
        inter = self.cfg.intermediate
        halves: tuple[dict[str, Stored], dict[str, Stored]] = ({}, {})
        for last, stored in (_turn(fused) if across else fused).items():
            shape = stored.shape
            picks: list[Callable[[Tensor], Tensor]]
            if shape in ((), (1,), (1, 1)):
                picks = [lambda t: t, lambda t: t]
            elif shape == (2,):
                shape, picks = (), [lambda t: t[0], lambda t: t[1]]
            elif shape[0] != 2 * inter:
                raise CheckpointError(
                    f"{self._where(e)}: {stored.name} must have {2 * inter} rows of gate and up, "
                    f"got {shape}"
                )
            else:
                shape = (inter, *shape[1:])
                picks = [functools.partial(_take_rows, rows) for rows in self._rows]
            for half, pick in zip(halves, picks):
                half[last] = stored.part(shape, pick)
        return halves

    def input_scales(self) -> Tensor:
        """float32 (num_experts, 2) multipliers of (x, h), NaN where absent; divisors are inverted.
        gate and up read the same x: the larger scale counts."""
        out = torch.full((self.cfg.num_experts, 2), torch.nan)
        for role, column in (("gate_up", 0), ("gate", 0), ("up", 0), ("down", 1)):
            for e, names in self.names.single.get(role, {}).items():
                _merge(out[e, column], self._input_scale(names))
            _merge(out[:, column], self._input_scale(self.names.stacked.get(role, {})))
        return out

    def _input_scale(self, names: Names) -> Tensor | None:
        for last in ("input_scale", "input_global_scale"):
            if last in names:
                value = self.files.stored(names[last]).read().float()
                value = torch.reciprocal(value) if last == "input_global_scale" else value
                if value.numel() in (1, self.cfg.num_experts):
                    return value.reshape(-1)
                return value.reshape(self.cfg.num_experts, -1).amax(dim=1)  # (E, 2): gate and up
        return None


def _turn(tensors: dict[str, Stored]) -> dict[str, Stored]:
    return {last: s.transposed() if len(s.shape) == 2 else s for last, s in tensors.items()}


def _take_rows(rows: Tensor, t: Tensor) -> Tensor:
    if t.dtype.itemsize > 1:
        return t[rows]
    return t.view(torch.uint8)[rows].view(t.dtype)  # float8 cannot be indexed


def _merge(into: Tensor, value: Tensor | None) -> None:
    if value is not None:
        into.copy_(torch.fmax(into, value if into.dim() else value.reshape(())))


def _static_scale(scales: Tensor, what: str, optional: bool, layer: int) -> Tensor | None:
    """One column of the input scales (num_experts,), or None where it is absent or a placeholder
    (1.0 for every expert).

    Raises CheckpointError, unless ``optional``, for a scale that only some experts have or that is
    no positive number.
    """
    if bool(torch.isnan(scales).all()) or bool((scales == 1.0).all()):
        return None
    bad = ~(torch.isfinite(scales) & (scales > 0))
    if not bool(bad.any()):
        return scales
    if optional:
        return None
    raise CheckpointError(
        f"layer {layer}: input_scale of {what} is missing, zero or not finite for experts "
        f"{torch.nonzero(bad).flatten().tolist()}: tokens routed there would give Inf or NaN; "
        "h_scale='dynamic' does without"
    )


def _static_scales(scales: Tensor, h_scale: str, layer: int) -> tuple[Tensor | None, Tensor | None]:
    """(gh (num_experts,), gx ()): None where every row of h, or of x, gets its own scale."""
    optional = h_scale == "dynamic"
    gx = _static_scale(scales[:, 0], "gate and up", optional, layer)
    gh = None if optional else _static_scale(scales[:, 1], "the down projection", False, layer)
    if h_scale == "static" and gh is None:
        raise CheckpointError(
            f"layer {layer}: h_scale='static', but the down projections have no input_scale, or "
            "1.0 for every expert, which exporters write unmeasured"
        )
    return gh, None if gx is None else gx.amax()


def load_checkpoint(
    path: str | Path,
    layer: int,
    expert_range: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
    config: MoEConfig | None = None,
    h_scale: str = "auto",
    order: str | None = None,
    granularity: int = 1,
) -> tuple[MoEConfig, ExpertWeights, Extras]:
    """Load layer ``layer`` of a safetensors file or a (sharded) checkpoint directory.

    expert_range  (first, end) global expert ids of this rank, none of them if first == end, or
                  None for all
    config        `MoEConfig`, or None: from config.json (model types of `moe.model_config`)
    h_scale       "auto": the checkpoint's input_scale of the down projections as static scale of h;
                  one per row where it is absent or 1.0 for all (a placeholder). "static": required.
                  "dynamic": one per row, input scales are not needed
    order         rows of a fused gate_up_proj: "gate_up" (halves, gate first), "up_gate" or
                  "interleaved" in turns of ``granularity``, gate first; None: what the model type
                  says (gpt-oss interleaves, others have halves with the gate first)

    First every name, dtype and shape is checked from the headers, then experts are read, checked
    and packed one at a time: peak memory is the result plus one expert as it is stored and some
    copies of its block scales (of a plain weight, plus a million elements that are quantised at a
    time). Raises CheckpointError (a ValueError) that names tensor, expert and expectation; nothing
    is returned then.
    """
    if h_scale not in H_SCALES:
        raise ValueError(f"h_scale must be one of {H_SCALES}, got {h_scale!r}")
    files = TensorFiles(path)
    model = files.config()
    cfg = moe_config(model) if config is None else config
    names = moe_names(files.names(), layer)
    rows = fused(model)
    if order is not None:
        rows = rows._replace(order=order, granularity=granularity)
    reader = ExpertReader(files, layer, cfg, names, rows)
    first, end = (0, cfg.num_experts) if expert_range is None else expert_range
    if not 0 <= first <= end <= cfg.num_experts:
        raise ValueError(f"expert_range must lie in 0..{cfg.num_experts}, got {expert_range}")
    plans = [reader.plans(e) for e in range(first, end)]
    scales = reader.input_scales()
    gh, gx = _static_scales(scales, h_scale, layer)
    router = _router(files, names, cfg)
    weights, inexact = _pack(plans, cfg, first, device, gh, gx)
    report = Report(
        "+".join(sorted({p.dialect for expert in plans for p in expert})),
        _activations(files.quantization(), names.prefix),
        tuple(inexact),
        names.others,
    )
    if inexact:
        _log.warning(
            "layer %d: %d blocks of 16 MXFP4 values do not fit NVFP4 scales exactly and were "
            "rounded (first: %s)", layer, report.inexact_blocks, inexact[0][0],
        )  # fmt: skip
    shared = {rest: files.stored(name).read().clone() for rest, name in names.shared.items()}
    known = None if bool(torch.isnan(scales).all()) else scales
    return cfg, weights, Extras(**router, shared=shared, input_scales=known, report=report)


def _pack(
    plans: list[list[Plan]],
    cfg: MoEConfig,
    first: int,
    device: torch.device | str,
    gh: Tensor | None,
    gx: Tensor | None,
) -> tuple[ExpertWeights, list[tuple[str, int]]]:
    gated = cfg.activation.gated
    builder = ExpertWeightsBuilder(
        len(plans),
        cfg.hidden,
        cfg.intermediate,
        gated=gated,
        first_expert=first,
        device=device,
    )
    inexact: list[tuple[str, int]] = []
    for local, expert in enumerate(tqdm(plans, "experts", disable=None, delay=2.0)):
        parts = read_expert(expert)
        inexact += [(p.projection.where, n) for p, (_, n) in zip(expert, parts) if n]
        builder.set_expert(
            local,
            parts[0][0],
            parts[1][0] if gated else None,
            parts[-1][0],
            biases=_biases(expert),
            h_scale=None if gh is None else gh[first + local],
        )
        del parts  # or two experts are alive while the next one is read
    return builder.finish(gx=gx), inexact


def read_expert(plans: list[Plan]) -> list[tuple[Nvfp4Tensor, int]]:
    """`formats.read` of each projection; a plain gate and up share their global scale, as
    ModelOpt's do."""
    *pair, down = plans
    shared = None
    if len(pair) == 2 and all(p.dialect == formats.PLAIN for p in pair):
        shared = torch.maximum(*(formats.plain_scale(p) for p in pair))
    return [*(formats.read(p, shared) for p in pair), formats.read(down)]


def _biases(plans: list[Plan]) -> tuple[Tensor, Tensor | None, Tensor] | None:
    if "bias" not in plans[0].projection.tensors:
        return None
    b = [p.projection.tensors["bias"].read() for p in plans]
    return b[0], b[1] if len(b) == 3 else None, b[-1]


def _router(files: TensorFiles, names: MoENames, cfg: MoEConfig) -> dict[str, Tensor | None]:
    """The routing fields of `Extras`."""
    stored = {field: files.stored(name) for field, name in names.router.items()}
    # DeepSeek's own files call the selection bias gate.bias; a softmax router has no such thing
    if "gate_bias" in stored:
        field = "router_bias" if cfg.scoring == "softmax" else "selection_bias"
        stored[field] = stored.pop("gate_bias")
    experts = cfg.num_experts
    for field, s in stored.items():
        integers = field == "tid2eid"
        sized = s.shape[-1:] == (cfg.top_k,) if integers else s.shape[:1] == (experts,)
        rank = 2 if field in ("tid2eid", "router_weight") else 1
        plain = s.dtype in ((torch.int32, torch.int64) if integers else formats.PLAIN_DTYPES)
        if not (plain and sized and len(s.shape) == rank):
            want = f"integers (vocabulary, {cfg.top_k})" if integers else f"{experts} rows, floats"
            raise CheckpointError(
                f"{s.name} must be the {field} of a router: {want}, got "
                f"{str(s.dtype).removeprefix('torch.')} {s.shape}"
            )
    fields = ("router_weight", "router_bias", "selection_bias", "tid2eid")
    return {f: stored[f].read().clone() if f in stored else None for f in fields}


def _activations(quantization: dict[str, Any], prefix: str) -> str:
    """`Report.activations`: "bf16" where the quantisation config says W4A16 for these experts."""
    layers = quantization.get("quantized_layers")  # ModelOpt's MIXED_PRECISION, one entry a module
    if isinstance(layers, dict):
        found = [v for n, v in layers.items() if n.startswith(f"{prefix}experts")]
        if found and all("W4A16" in str(v.get("quant_algo")) for v in found):
            return "bf16"
    if "W4A16" in str(quantization.get("moe_quant_algo") or quantization.get("quant_algo")):
        return "bf16"
    groups = quantization.get("config_groups")  # compressed-tensors
    if isinstance(groups, dict):
        fp4 = [g for g in groups.values() if (g.get("weights") or {}).get("num_bits") == 4]
        if fp4 and all(g.get("input_activations") is None for g in fp4):
            return "bf16"
    return "nvfp4"
