"""An NVFP4 Mixture-of-Experts layer. See `MoE`."""

from __future__ import annotations

from cute_kernels.activations import Activation, GeGLU, ReLU2, SwiGLU, SwiGLUOAI
from moe.config import MoEConfig
from moe.layer import MoE
from moe.parallel import Capacity, Exchange, ExpertParallel, Replicated
from moe.plan import RoutingPlan, make_plan
from moe.weights import ExpertWeights
from moe.workspace import Workspace

__all__ = [
    "Activation",
    "Capacity",
    "Exchange",
    "ExpertParallel",
    "ExpertWeights",
    "GeGLU",
    "MoE",
    "MoEConfig",
    "ReLU2",
    "Replicated",
    "RoutingPlan",
    "SwiGLU",
    "SwiGLUOAI",
    "Workspace",
    "load_checkpoint",
    "make_plan",
]


def __getattr__(name: str) -> object:
    if name == "load_checkpoint":  # imported on use: most programs that run a layer load none
        from moe.checkpoint import load_checkpoint

        return load_checkpoint
    raise AttributeError(f"module 'moe' has no attribute {name!r}")
