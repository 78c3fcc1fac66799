"""Which tensor of a checkpoint is which: the MoE modules of its layers, their experts, and what
else they hold.

Known spellings (any prefix): ``layers.3.mlp.experts.5.gate_proj.weight`` (also w1, w3, w2; feed
forward, block_sparse_moe, ffn, mixer instead of mlp), stacked ``experts.gate_up_proj`` and
``experts.down_proj`` with ``_weight_scale``, ``_bias``, ``_blocks`` or ``.weight_packed`` behind.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from moe.tensor_files import CheckpointError

_EXPERTS = re.compile(r"^((?:.*\.)?)experts\.(.+)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_PREDICTION = re.compile(r"(?:^|\.)mtp(?:\.|$)")  # layers that predict further tokens count apart
_ONE = re.compile(r"^(\d+)\.(\w+?)\.(\w+)$")  # 5.gate_proj.weight
_STACKED = re.compile(
    r"^(gate_up_proj|gate_proj|up_proj|down_proj|w13|w1|w2|w3)(?:[._](\w+))?$"
)  # gate_up_proj, gate_up_proj_weight_scale, w13.weight_packed
_ROLE = {
    "gate_proj": "gate", "w1": "gate",
    "up_proj": "up", "w3": "up",
    "down_proj": "down", "w2": "down",
    "gate_up_proj": "gate_up", "w13": "gate_up",
}  # fmt: skip
_ROUTER = {
    "gate.weight": "router_weight",
    "router.weight": "router_weight",
    "gate.bias": "gate_bias",
    "router.bias": "router_bias",
    "gate.e_score_correction_bias": "selection_bias",
    "router.e_score_correction_bias": "selection_bias",
    "e_score_correction_bias": "selection_bias",
    "gate.tid2eid": "tid2eid",
}

Names = dict[str, str]  # last name ("weight_scale") -> full name


@dataclasses.dataclass(frozen=True)
class MoENames:
    """Tensor names of one MoE module.

    prefix   what comes before "experts.", for example "model.layers.3.mlp."
    single   role ("gate", "up", "down", "gate_up") -> expert -> names
    stacked  role -> names of tensors that hold all experts
    router   "router_weight", "router_bias", "gate_bias", "selection_bias", "tid2eid" -> full name
    shared   "shared_experts.up_proj.weight" -> full name
    others   the rest of the module
    """

    prefix: str
    single: dict[str, dict[int, Names]]
    stacked: dict[str, Names]
    router: Names
    shared: Names
    others: tuple[str, ...]

    def roles(self) -> set[str]:
        return set(self.single) | set(self.stacked)

    def expert_ids(self) -> set[int]:
        return {e for experts in self.single.values() for e in experts}


def moe_layers(names: Iterable[str]) -> dict[int | None, list[str]]:
    """Layer number -> prefixes of its MoE modules; None: prefixes without a layer number."""
    found: dict[int | None, list[str]] = {}
    for prefix in sorted({m.group(1) for n in names if (m := _EXPERTS.match(n))}):
        numbers = _LAYER.findall(prefix)
        found.setdefault(int(numbers[-1]) if numbers else None, []).append(prefix)
    for prefixes in found.values():
        ordinary = [p for p in prefixes if not _PREDICTION.search(p)]
        prefixes[:] = ordinary or prefixes
    return found


def moe_names(names: list[str], layer: int) -> MoENames:
    """The MoE module of layer ``layer``; a file whose names have no layer number holds one layer.

    Raises CheckpointError when there is no such module, more than one, or a projection of an expert
    that has an unknown name.
    """
    layers = moe_layers(names)
    prefixes = layers.get(layer) or (layers[None] if set(layers) == {None} else [])
    if not prefixes:
        having = sorted(n for n in layers if n is not None)
        raise CheckpointError(
            f"layer {layer} has no experts; layers with experts: {_ranges(having) or 'none'}"
        )
    if len(prefixes) > 1:
        raise CheckpointError(f"layer {layer} has more than one set of experts: {prefixes}")
    prefix = prefixes[0]
    result = MoENames(prefix, {}, {}, {}, {}, ())
    others = []
    for name in names:
        if not name.startswith(prefix):
            continue
        rest = name.removeprefix(prefix)
        if rest.startswith("experts."):
            _add_expert(result, rest.removeprefix("experts."), name)
        elif rest in _ROUTER:
            result.router[_ROUTER[rest]] = name
        elif rest.startswith("shared_expert"):
            result.shared[rest] = name
        elif prefix:  # without a prefix the whole file would be "others" of its only layer
            others.append(name)
    return dataclasses.replace(result, others=tuple(others))


def _add_expert(result: MoENames, rest: str, name: str) -> None:
    if one := _ONE.match(rest):
        expert, projection, last = int(one.group(1)), one.group(2), one.group(3)
        if projection not in _ROLE:
            raise CheckpointError(
                f"{name}: {projection!r} is no projection of an expert, expected one of "
                f"{sorted(_ROLE)}"
            )
        target = result.single.setdefault(_ROLE[projection], {}).setdefault(expert, {})
    elif stacked := _STACKED.match(rest):
        last = stacked.group(2) or "weight"
        target = result.stacked.setdefault(_ROLE[stacked.group(1)], {})
    else:
        raise CheckpointError(
            f"{name} is no tensor of an expert that is known: leaving it out would change values"
        )
    if last in target:
        raise CheckpointError(f"{name} and {target[last]} are the same tensor under two names")
    target[last] = name


def _ranges(numbers: list[int]) -> str:
    """[3, 4, 5, 9] -> "3..5, 9"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in parts)
