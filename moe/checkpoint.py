"""One MoE layer out of a checkpoint: `load_checkpoint`.

Dialects: ModelOpt NVFP4, compressed-tensors nvfp4-pack-quantized, DeepSeek-native and gpt-oss
MXFP4, BF16.
Experts may be stored one by one (gate_proj, up_proj, down_proj or w1, w3, w2) or stacked over
experts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from cute_kernels.nvfp4 import Nvfp4Tensor
from moe import formats
from moe.config import MoEConfig
from moe.formats import Projection
from moe.model_config import moe_config
from moe.tensor_files import CheckpointError, TensorFiles
from moe.weights import ExpertWeights, ExpertWeightsBuilder

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_ONE = re.compile(r"\.experts\.(\d+)\.(\w+?)\.(\w+)$")  # experts.5.gate_proj.weight
_STACKED = re.compile(
    r"\.experts\.(gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)(?:[._](\w+))?$"
)
_ROLE = {
    "gate_proj": "gate", "w1": "gate",
    "up_proj": "up", "w3": "up",
    "down_proj": "down", "w2": "down",
    "gate_up_proj": "gate_up", "w13": "gate_up",
}  # fmt: skip
H_SCALES = ("auto", "static", "dynamic")


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found: dialect of the experts, number of blocks of 16 that MXFP4 scales did not
    allow to keep exactly, and tensors of the layer that belong to neither experts, router nor
    shared expert."""

    dialect: str
    inexact_blocks: int
    other_tensors: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Extras:
    """What belongs to the layer besides its experts; None where the checkpoint has none.

    router_weight   (num_experts, H); router_bias (num_experts,): part of the logits
    selection_bias  (num_experts,): only chooses; tid2eid (vocabulary, top_k): hash routing
    shared          tensors of the shared expert by the rest of their names
    input_scales    float32 (num_experts, 2) = (x, h) of all experts of all ranks; NaN where absent
    """

    router_weight: Tensor | None
    router_bias: Tensor | None
    selection_bias: Tensor | None
    tid2eid: Tensor | None
    shared: dict[str, Tensor]
    input_scales: Tensor | None
    report: Report


class ExpertNames(NamedTuple):
    """Names of the expert tensors of one layer: role -> expert (None: stacked) -> last name -> full
    name.
    """

    roles: dict[str, dict[int | None, dict[str, str]]]

    def num_experts(self) -> int:
        return 1 + max((e for r in self.roles.values() for e in r if e is not None), default=-1)


def layer_names(files: TensorFiles, layer: int) -> list[str]:
    """Every tensor of layer ``layer``; a file without layer numbers holds one layer.

    Raises CheckpointError when the checkpoint has no such layer.
    """
    numbered = {n: m for n in files.names() if (m := _LAYER.search(n))}
    names = [n for n, m in numbered.items() if int(m.group(1)) == layer]
    if not numbered:
        names = files.names()
    if not any(".experts." in n for n in names):
        having = sorted({int(m.group(1)) for n, m in numbered.items() if ".experts." in n})
        raise CheckpointError(
            f"layer {layer} has no experts; layers with experts: {having or 'none'}"
        )
    return names


def expert_names(names: list[str]) -> ExpertNames:
    roles: dict[str, dict[int | None, dict[str, str]]] = {}
    for name in names:
        if ".shared_expert" in name:
            continue
        if one := _ONE.search(name):
            role, expert, last = _ROLE.get(one.group(2)), int(one.group(1)), one.group(3)
        elif stacked := _STACKED.search(name):
            role, expert, last = _ROLE[stacked.group(1)], None, stacked.group(2) or "weight"
        else:
            continue
        if role is None:
            raise CheckpointError(
                f"{name}: unknown projection {one and one.group(2)!r} of an expert"
            )
        roles.setdefault(role, {}).setdefault(expert, {})[last] = name
    return ExpertNames(roles)


class ExpertReader:
    """Projections of one expert at a time, whatever way they are stored."""

    def __init__(self, files: TensorFiles, layer: int, cfg: MoEConfig, names: ExpertNames) -> None:
        self.files, self.layer, self.cfg, self.names = files, layer, cfg, names
        found = names.num_experts()
        if found > cfg.num_experts:
            raise CheckpointError(
                f"layer {layer}: tensors of expert {found - 1}, but the config has "
                f"{cfg.num_experts} experts"
            )

    def tensors(self, role: str, e: int) -> dict[str, Tensor]:
        stored = self.names.roles.get(role, {})
        if e in stored:
            return {last: self.files.get(name) for last, name in stored[e].items()}
        return {last: self._slice(name, e) for last, name in stored.get(None, {}).items()}

    def _slice(self, name: str, e: int) -> Tensor:
        """Expert e of a stacked tensor: (E, ...), (E * rows, cols), or one value for all
        experts.
        """
        shape, experts = self.files.shape(name), self.cfg.num_experts
        if not shape or shape == (1,):
            return self.files.get(name)
        if shape[0] == experts:
            return self.files.get(name, e, e + 1)[0]
        if len(shape) == 2 and shape[0] % experts == 0:
            rows = shape[0] // experts
            return self.files.get(name, e * rows, (e + 1) * rows)
        raise CheckpointError(f"{name}: cannot be split over {experts} experts, shape {shape}")

    def projections(self, e: int) -> tuple[list[Projection], dict[str, Tensor]]:
        """[gate, up, down] or [up, down] (no gate) and their biases by role."""
        cfg, where = self.cfg, f"layer {self.layer} expert {e}"
        inter, hidden = cfg.intermediate, cfg.hidden
        parts: dict[str, dict[str, Tensor]] = {}
        fused = self.tensors("gate_up", e)
        if fused:
            parts["gate"], parts["up"] = self._split_fused(fused, where)
        for role in ("gate", "up", "down"):
            tensors = self.tensors(role, e)
            if tensors:
                parts[role] = tensors
        if "down" in parts and fused:
            parts["down"] = self._transpose_plain(parts["down"], hidden)
        roles = ("gate", "up", "down") if cfg.activation.gated else ("up", "down")
        if not cfg.activation.gated and "gate" in parts:
            raise CheckpointError(f"{where}: has a gate projection, {cfg.activation} has none")
        out, biases = [], {}
        for role in roles:
            tensors = parts.get(role, {})
            if not tensors:
                raise CheckpointError(f"{where}: no tensors of its {role} projection")
            rows, cols = (hidden, inter) if role == "down" else (inter, hidden)
            out.append(Projection(f"{where} {role}", rows, cols, tensors))
            if "bias" in tensors:
                biases[role] = tensors["bias"]
        return out, biases

    def _split_fused(self, fused: dict[str, Tensor], where: str) -> tuple[dict, dict]:
        """gate_up_proj: gpt-oss interleaves the rows; others put all gate rows first. Plain weights
        of gpt-oss and Llama-4 are stored (H, 2I)."""
        inter, hidden = self.cfg.intermediate, self.cfg.hidden
        interleaved = "blocks" in fused or "bias" in fused
        gate, up = {}, {}
        for last, tensor in fused.items():
            if (
                last == "weight"
                and tuple(tensor.shape) == (hidden, 2 * inter)
                and tensor.is_floating_point()
            ):
                tensor = tensor.t()
            if tensor.dim() == 0 or tensor.numel() == 1:
                gate[last] = up[last] = tensor
            elif tensor.shape[0] != 2 * inter:
                raise CheckpointError(
                    f"{where} gate_up {last}: {2 * inter} rows expected, got shape "
                    f"{tuple(tensor.shape)}"
                )
            elif interleaved:
                gate[last], up[last] = tensor[0::2], tensor[1::2]
            else:
                gate[last], up[last] = tensor[:inter], tensor[inter:]
        return gate, up

    @staticmethod
    def _transpose_plain(down: dict[str, Tensor], hidden: int) -> dict[str, Tensor]:
        """Models with a fused gate_up_proj store a plain down_proj as (I, H)."""
        weight = down.get("weight")
        if weight is not None and weight.is_floating_point() and weight.shape[-1] == hidden:
            return {**down, "weight": weight.t()}
        return down

    def input_scales(self) -> Tensor:
        """float32 (num_experts, 2) multipliers of (x, h), NaN where absent; divisors are
        inverted.
        """
        out = torch.full((self.cfg.num_experts, 2), torch.nan)
        for role, column in (("gate_up", 0), ("gate", 0), ("up", 0), ("down", 1)):
            for expert, stored in self.names.roles.get(role, {}).items():
                for last in ("input_scale", "input_global_scale"):
                    if last in stored:
                        value = self.files.get(stored[last]).float().reshape(-1)
                        value = 1.0 / value if last == "input_global_scale" else value
                        old = out[:, column] if expert is None else out[expert, column]
                        new = torch.fmax(old, value if expert is None else value.amax())
                        out[slice(None) if expert is None else expert, column] = new
        return out


def _h_scale(scales: Tensor, mode: str, layer: int) -> tuple[Tensor | None, float | None]:
    """gh (num_experts,) and gx from (num_experts, 2); None where x or h is scaled dynamically."""
    gx_all, gh = scales[:, 0], scales[:, 1]
    known = gx_all[torch.isfinite(gx_all) & (gx_all > 0)]
    placeholder = bool((known == 1.0).all()) if known.numel() else True
    gx = None if placeholder else float(known.amax())
    usable = torch.isfinite(gh) & (gh > 0)
    absent = bool(torch.isnan(gh).all()) or bool((gh == 1.0).all())
    if mode == "dynamic" or (mode == "auto" and absent):
        return None, gx
    if not bool(usable.all()):
        raise CheckpointError(
            f"layer {layer}: down-projection input_scale is missing, zero or not finite for "
            f"experts {torch.nonzero(~usable).flatten().tolist()}; h_scale='dynamic' does without"
        )
    return gh, gx


def load_checkpoint(
    path: str | Path,
    layer: int,
    expert_range: tuple[int, int] | None = None,
    device: torch.device | str = "cpu",
    config: MoEConfig | None = None,
    h_scale: str = "auto",
) -> tuple[MoEConfig, ExpertWeights, Extras]:
    """Load layer ``layer`` of a safetensors file or a (sharded) checkpoint directory.

    expert_range  (first, end) global expert ids of this rank, or None for all
    config        `MoEConfig`, or None: from config.json (model types of `moe.model_config`)
    h_scale       "auto": the checkpoint's w2 input_scale where every expert has one; one per row
                  where it is absent or 1.0 for all (a placeholder). "static": required. "dynamic":
                  ignored

    Experts are read, checked and packed one at a time: peak memory is the result plus one expert.
    Raises CheckpointError (a ValueError) that names tensor, expert and expectation; nothing is
    returned then.
    """
    if h_scale not in H_SCALES:
        raise ValueError(f"h_scale must be one of {H_SCALES}, got {h_scale!r}")
    files = TensorFiles(path)
    cfg = moe_config(files.config()) if config is None else config
    names = layer_names(files, layer)
    experts = ExpertReader(files, layer, cfg, expert_names(names))
    first, end = (0, cfg.num_experts) if expert_range is None else expert_range
    if not 0 <= first < end <= cfg.num_experts:
        raise ValueError(f"expert_range must lie in 0..{cfg.num_experts}, got {expert_range}")
    scales = experts.input_scales()
    gh, gx = _h_scale(scales, h_scale, layer)
    builder = ExpertWeightsBuilder(
        end - first,
        cfg.hidden,
        cfg.intermediate,
        gated=cfg.activation.gated,
        first_expert=first,
        device=device,
    )
    kinds: set[str] = set()
    inexact = 0
    for e in tqdm(range(first, end), desc=f"layer {layer} experts", disable=None, delay=2.0):
        projections, biases = experts.projections(e)
        tensors, lost = _read_expert(projections)
        inexact += lost
        kinds |= {formats.dialect(p) for p in projections}
        bias = None
        if biases:
            bias = _biases(projections, biases)
        gate, up = (tensors[0], tensors[1]) if cfg.activation.gated else (tensors[0], None)
        builder.set_expert(
            e - first,
            gate,
            up,
            tensors[-1],
            biases=bias,
            h_scale=None if gh is None else gh[e],
        )
    extras = _extras(files, names, Report("+".join(sorted(kinds)), inexact, ()), scales)
    return cfg, builder.finish(gx=gx), extras


def _read_expert(projections: list[Projection]) -> tuple[list[Nvfp4Tensor], int]:
    """NVFP4 tensors of an expert; a plain gate and up share their global scale, as ModelOpt's
    do.
    """
    shared = None
    pair = projections[:-1]
    if len(pair) == 2 and all(formats.dialect(p) == formats.PLAIN for p in pair):
        shared = torch.stack([formats.plain_scale(p.tensors["weight"]) for p in pair]).amax()
    results = [formats.read(p, shared) for p in pair] + [formats.read(projections[-1])]
    return [q for q, _ in results], sum(n for _, n in results)


def _biases(
    projections: list[Projection], biases: dict[str, Tensor]
) -> tuple[Tensor, Tensor | None, Tensor]:
    for p in projections:
        if "bias" not in p.tensors:
            raise p.fail("bias is missing while other projections of the expert have one")
        p.take("bias", p.tensors["bias"].dtype, (p.rows,))
    first = biases["gate"] if "gate" in biases else biases["up"]
    return first, biases["up"] if "gate" in biases else None, biases["down"]


_ROUTER = re.compile(r"\.(?:gate|router)\.(weight|bias|e_score_correction_bias|tid2eid)$")
_SHARED = re.compile(r"\.(shared_experts?(?:_gate)?\..+)$")


def _router_tensors(names: list[str]) -> Iterator[tuple[str, str, str]]:
    """(field of Extras, name, kind of module) of every router tensor."""
    for name in names:
        match = _ROUTER.search(name)
        if match is None or ".experts." in name or "shared_expert" in name:
            continue
        last = match.group(1)
        if last == "bias":  # gpt-oss: part of the logits; DeepSeek's own names: chooses only
            yield ("router_bias" if ".router.bias" in name else "selection_bias"), name, last
        else:
            fields = {"weight": "router_weight", "e_score_correction_bias": "selection_bias"}
            yield fields.get(last, last), name, last


def _extras(files: TensorFiles, names: list[str], report: Report, scales: Tensor) -> Extras:
    fields: dict[str, Tensor] = {}
    used = set()
    for field, name, _ in _router_tensors(names):
        fields[field] = files.get(name)
        used.add(name)
    for name in names:  # mixtral-like checkpoints put the correction bias beside the gate
        if name.endswith(".e_score_correction_bias") and name not in used:
            fields["selection_bias"] = files.get(name)
            used.add(name)
    shared = {m.group(1): n for n in names if (m := _SHARED.search(n))}
    others = [
        n for n in names if n not in used and ".experts." not in n and n not in shared.values()
    ]
    return Extras(
        fields.get("router_weight"),
        fields.get("router_bias"),
        fields.get("selection_bias"),
        fields.get("tid2eid"),
        {rest: files.get(name) for rest, name in shared.items()},
        None if bool(torch.isnan(scales).all()) else scales,
        dataclasses.replace(report, other_tensors=tuple(others)),
    )
