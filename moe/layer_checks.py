"""What the layer refuses, before anything is allocated or launched."""

from __future__ import annotations

import torch
from torch import Tensor

from moe import kernels
from moe.config import MoEConfig
from moe.experts import Numerics
from moe.weights import ExpertWeights
from moe.workspace import Workspace

X_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUTER_FIELDS = ("router_weight", "router_bias", "selection_bias", "tid2eid")


def check_backend(
    name: str, device: torch.device, cfg: MoEConfig, numerics: Numerics, alone: bool
) -> None:
    """What the backend ``name`` on ``device`` cannot promise. ``alone``: not over ranks."""
    if not numerics.deterministic and not (alone and name in kernels.KERNEL_BACKENDS):
        raise ValueError(
            f"deterministic=False needs one of the backends {kernels.KERNEL_BACKENDS} in one "
            f"process: backend {name!r} has no other order of sums to offer"
        )
    if name in kernels.KERNEL_BACKENDS:
        kernels.check_layer(name, cfg, numerics.activations)
    elif numerics.schedule != "static":
        raise ValueError(
            f"schedule='dynamic' needs one of the backends {kernels.KERNEL_BACKENDS}: backend "
            f"{name!r} has one schedule"
        )
    if numerics.batch_invariant and name == "torch" and device.type != "cpu":
        raise ValueError(
            "backend 'torch' on a GPU leaves the order of sums to torch: a token would "
            "have other bits in another batch, which batch_invariant=True rules out"
        )


def check_tensor(value: object, name: str) -> None:
    """Refuses what only looks like a tensor: a list, an array, a sparse tensor."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        kind = value.layout if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a dense torch.Tensor, got {kind}")


def check_tokens(x: Tensor, hidden: int, device: torch.device) -> None:
    """x of a call: (T, hidden) or (B, S, hidden) on ``device``."""
    check_tensor(x, "x")
    if x.dtype not in X_DTYPES:
        raise TypeError(f"x must be bfloat16, float16 or float32, got {x.dtype}")
    if x.dim() < 2 or x.shape[-1] != hidden:
        raise ValueError(f"x must be (T, {hidden}) or (B, S, {hidden}), got {tuple(x.shape)}")
    if x.device != device:
        raise ValueError(f"x is on {x.device}, the weights are on {device}")
    refuse_gradient(x, "x")


def check_shared(shared: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Output of a shared expert for tokens (T, hidden) = ``shape``."""
    check_tensor(shared, "shared")
    if tuple(shared.shape) != shape:
        raise ValueError(f"shared must be {shape}, got {tuple(shared.shape)}")
    if shared.dtype not in X_DTYPES:
        raise TypeError(f"shared must be bfloat16, float16 or float32, got {shared.dtype}")
    if shared.device != device:
        raise ValueError(f"shared is on {shared.device}, the weights are on {device}")
    refuse_gradient(shared, "shared")


def refuse_gradient(tensor: Tensor, name: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "this layer has no backward (NVFP4 inference): call it under torch.no_grad() or "
            f"detach {name}; gradients would silently stop here otherwise"
        )


def check_max_tokens(max_tokens: int) -> None:
    if not isinstance(max_tokens, int):
        raise TypeError(f"max_tokens must be an int, got {max_tokens!r}")
    if max_tokens < 0:
        raise ValueError(f"max_tokens must not be negative, got {max_tokens}")


def check_scale(
    name: str, scale: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> None:
    """Global scales that replace those of a layer."""
    check_tensor(scale, name)
    assert scale is not None
    if tuple(scale.shape) != shape or scale.dtype != torch.float32:
        raise ValueError(f"{name} must be float32 {shape}, got {tuple(scale.shape)} {scale.dtype}")
    if not scale.is_contiguous() or scale.device != device:
        raise ValueError(
            f"{name} must be contiguous on {device}, got strides {tuple(scale.stride())} on "
            f"{scale.device}"
        )


def check_weights(cfg: MoEConfig, w: ExpertWeights) -> None:
    """Weights of a layer, all experts or a rank's."""
    if not isinstance(cfg, MoEConfig) or not isinstance(w, ExpertWeights):
        raise TypeError(
            f"a layer needs a MoEConfig and ExpertWeights, got {type(cfg).__name__} and "
            f"{type(w).__name__}"
        )
    if (w.hidden, w.intermediate) != (cfg.hidden, cfg.intermediate):
        raise ValueError(
            f"weights have H={w.hidden}, I={w.intermediate}, the config says H={cfg.hidden}, "
            f"I={cfg.intermediate}; experts are whole: a slice of I on each rank (tensor "
            "parallelism inside an expert) is not supported"
        )
    if w.gated != cfg.activation.gated:
        raise ValueError(
            f"{cfg.activation} {'needs' if cfg.activation.gated else 'has no'} gate projection, "
            f"the weights have {'one' if w.gated else 'none'}"
        )
    if w.first_expert < 0 or w.first_expert + w.num_experts > cfg.num_experts:
        raise ValueError(
            f"local experts {w.first_expert}..{w.first_expert + w.num_experts - 1} are not all "
            f"among the {cfg.num_experts} experts of the config"
        )


def check_helpers(shared: object, workspace: object) -> None:
    """What a layer calls and what it takes scratch from."""
    if shared is not None and not callable(shared):
        raise TypeError(f"shared must be callable, got {shared!r}")
    if not isinstance(workspace, Workspace | None):
        raise TypeError(f"workspace must be a Workspace or None, got {workspace!r}")


def check_router_device(tensors: tuple[Tensor | None, ...], device: torch.device) -> None:
    """Of a call: a router may be made elsewhere and moved with its layer."""
    for name, tensor in zip(ROUTER_FIELDS, tensors):
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{name} is on {tensor.device}, the tokens are on {device}: move the layer, "
                "layer.to(device)"
            )


def check_router(cfg: MoEConfig, tensors: tuple[Tensor | None, ...]) -> None:
    """``tensors``: one for each of `ROUTER_FIELDS`."""
    for name, tensor in zip(ROUTER_FIELDS, tensors):
        if tensor is not None:
            check_tensor(tensor, name)
    shapes = ((cfg.num_experts, cfg.hidden), (cfg.num_experts,), (cfg.num_experts,))
    for name, tensor, shape in zip(ROUTER_FIELDS, tensors, shapes):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {shape}, got {tuple(tensor.shape)}")
        if tensor is not None and not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {tensor.dtype}")
    table = tensors[3]
    if table is not None and (table.dim() != 2 or table.shape[1] != cfg.top_k):
        raise ValueError(f"tid2eid must be (vocabulary, {cfg.top_k}), got {tuple(table.shape)}")
    if table is not None and table.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"tid2eid must hold int32 or int64, got {table.dtype}")
    if table is not None and table.numel() and table.device.type != "meta":
        least, most = (int(t) for t in table.aminmax())  # once: a GPU's gather would not say which
        if least < 0 or most >= cfg.num_experts:
            raise ValueError(f"tid2eid must hold ids < {cfg.num_experts}, got {least} to {most}")
