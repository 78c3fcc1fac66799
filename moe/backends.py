"""Which implementations of the layer are usable here, and why the others are not."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cute_kernels.gemm_ops import simulator_available, sm100_available
from cute_kernels.sm90_ops import sm90_available
from moe.experts import find_grouped_mm


class BackendStatus(NamedTuple):
    """``usable`` on this machine and device; ``reason`` says what was found or what is missing."""

    name: str
    usable: bool
    reason: str


BACKENDS = ("sm100", "sm90", "sim", "torch", "reference")


def backend_status(device: torch.device | str | None = None) -> list[BackendStatus]:
    """One `BackendStatus` for each name in `BACKENDS`, best first. ``device``: where x and weights
    live; default: the current CUDA device if there is one, else the CPU. Nothing is compiled or
    launched."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.device(device)
    return [
        BackendStatus("sm100", *sm100_available(where)),
        BackendStatus("sm90", *sm90_available(where)),
        BackendStatus("sim", *simulator_available(where)),
        _torch_status(where),
        BackendStatus("reference", True, "any device; fp64 sums, slow: the specification"),
    ]


def _torch_status(where: torch.device) -> BackendStatus:
    if where.type == "cpu":
        return BackendStatus("torch", True, "CPU: decoded weights, fp64 sums")
    if where.type != "cuda":
        return BackendStatus("torch", False, f"runs on cpu and cuda, not on {where.type}")
    if find_grouped_mm() is None:
        reason = f"torch {torch.__version__} has no grouped GEMM (torch.nn.functional.grouped_mm)"
        return BackendStatus("torch", False, reason)
    return BackendStatus("torch", True, "CUDA: decoded weights, torch's grouped GEMM in bf16")


def choose_backend(name: str, device: torch.device) -> str:
    """Resolve "auto" to the first usable backend for ``device`` (never one of the slow simulator);
    another name -> itself, if usable.

    Raises ValueError for an unknown name and RuntimeError, with the reason, for one that cannot run
    here.
    """
    status = {s.name: s for s in backend_status(device)}
    if name == "auto":
        slow = ("sim", "sm90") if device.type == "cpu" else ("sim",)
        return next(s.name for s in status.values() if s.usable and s.name not in slow)
    if name not in status:
        raise ValueError(f"backend must be 'auto' or one of {BACKENDS}, got {name!r}")
    if not status[name].usable:
        raise RuntimeError(f"backend {name!r} cannot run on {device}: {status[name].reason}")
    return name
