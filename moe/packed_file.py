"""One layer in one safetensors file: config, choices of numerics and every tensor, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from cute_kernels.activations import BUILT_IN, Activation
from cute_kernels.nvfp4 import invalid_scales
from moe.config import MoEConfig
from moe.layer_checks import ROUTER_FIELDS
from moe.weights import ExpertWeights

_FORMAT = "nvfp4-megamoe/1"
_SCALES = ("l1_scale", "l2_scale")  # stored as bytes


class PackedLayer(NamedTuple):
    """What a file holds: arguments of `moe.MoE`."""

    cfg: MoEConfig
    weights: ExpertWeights
    options: dict[str, Any]  # tensors of the router and choices of numerics, by argument


def write(
    path: str | Path, cfg: MoEConfig, numerics: Any, first_expert: int, tensors: dict[str, Tensor]
) -> None:
    """``numerics``: a dataclass of plain values. ``tensors``: the state dict of the layer."""
    fields = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(MoEConfig)}
    act = cfg.activation
    fields["activation"] = {"name": type(act).__name__, "fields": dataclasses.asdict(act)}
    meta = {
        "format": _FORMAT,
        "config": json.dumps(fields),
        "numerics": json.dumps(dataclasses.asdict(numerics)),
        "first_expert": str(first_expert),
    }
    save_file({k: v.contiguous() for k, v in tensors.items()}, str(path), metadata=meta)


def read(
    path: str | Path, device: torch.device | str, activation: Activation | None
) -> PackedLayer:
    """Inverse of `write`. ``activation`` is needed when the file names a user-written one.

    Raises ValueError for another kind of file, an unknown activation, and a file that is damaged:
    one that lacks a part, or whose scales no weights have.
    """
    with safe_open(str(path), "pt", device=str(device)) as f:
        meta = f.metadata() or {}
        if meta.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a packed layer ({_FORMAT}): {meta.get('format')!r}")
        names = f.keys()  # not a dict: it cannot be iterated itself
        tensors = {name: f.get_tensor(name) for name in names}
    fields = _json(path, meta, "config")
    act = _activation(path, fields.pop("activation", None), activation)
    try:
        cfg = MoEConfig(**fields, activation=act)
    except TypeError as error:  # a field too few, too many, or of another type
        raise ValueError(f"{path} is damaged: {error}") from error
    options: dict[str, Any] = {n: tensors.pop(n, None) for n in ROUTER_FIELDS}
    return PackedLayer(
        cfg,
        _weights(path, tensors, int(meta["first_expert"])),
        options | _json(path, meta, "numerics"),
    )


def _json(path: str | Path, meta: dict[str, str], name: str) -> dict[str, Any]:
    try:
        found = json.loads(meta.get(name, ""))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: its {name} is missing or no JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: its {name} must be an object, got {found!r}")
    return found


def _activation(path: str | Path, stored: Any, given: Activation | None) -> Activation:
    if not isinstance(stored, dict) or stored.keys() != {"name", "fields"}:
        raise ValueError(f"{path} is damaged: its activation is {stored!r}")
    if given is None:
        if stored["name"] not in BUILT_IN:
            raise ValueError(
                f"{path} uses the activation {stored['name']}, which is not built in: pass "
                f"activation={stored['name']}(...)"
            )
        return BUILT_IN[stored["name"]](**stored["fields"])
    if type(given).__name__ != stored["name"]:
        raise ValueError(f"{path} was saved with {stored['name']}, got {type(given).__name__}")
    return given


def _weights(path: str | Path, tensors: dict[str, Tensor], first_expert: int) -> ExpertWeights:
    known = {f.name: f for f in dataclasses.fields(ExpertWeights) if f.name != "first_expert"}
    missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in tensors]
    unknown = sorted(tensors.keys() - known.keys())
    if missing or unknown:
        raise ValueError(f"{path} is damaged: it lacks {missing} and has the unknown {unknown}")
    for name, tensor in tensors.items():
        if name in _SCALES and tensor.dtype != torch.uint8:
            raise ValueError(f"{path} is damaged: {name} must be bytes, got {tensor.dtype}")
        wrong = invalid_scales(tensor) if name in _SCALES else ~torch.isfinite(tensor)
        if bool(wrong.any()):
            raise ValueError(f"{path} is damaged: {name} holds NaN, Inf or bytes of another format")
    scales = {n: tensors[n].view(torch.float8_e4m3fn) for n in _SCALES}
    fields: dict[str, Any] = tensors | scales
    return ExpertWeights(**fields, first_expert=first_expert)
