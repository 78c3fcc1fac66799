"""What a call of the mega MoE accepts: every check before anything is computed or written."""

from __future__ import annotations

import math
import numbers

import torch
from torch import Tensor

from moe.mega.buffer import SymmBuffer
from moe.mega.weights import MegaWeights, SharedWeights

RECIPE = (1, 1, 16)


def check_y(
    y: Tensor, buffer: SymmBuffer, recipe: tuple[int, ...], activation: str, fast_math: bool
) -> int:
    """Tokens of the call."""
    if not isinstance(buffer, SymmBuffer):
        raise TypeError(f"sym_buffer must be a SymmBuffer, got {type(buffer).__name__}")
    memory = buffer.live()
    if not isinstance(recipe, tuple | list) or tuple(recipe) != RECIPE:
        raise ValueError(f"recipe must be {RECIPE} (one scale per 16 of K), got {recipe}")
    if activation != buffer.activation:
        raise ValueError(f"activation is {activation!r}, the buffer's {buffer.activation!r}")
    if not isinstance(fast_math, bool | int):
        raise TypeError(f"fast_math must be a bool, got {fast_math!r}")
    if not isinstance(y, Tensor) or y.dtype != torch.bfloat16:
        raise TypeError(f"y must be a bfloat16 tensor, got {getattr(y, 'dtype', type(y))}")
    if y.dim() != 2 or y.shape[1] != buffer.hidden or not y.is_contiguous():
        raise ValueError(
            f"y must be contiguous (num_tokens, {buffer.hidden}), got {tuple(y.shape)}, strides "
            f"{y.stride()}"
        )
    check_writable("y", y)
    if y.device != memory.device:
        raise ValueError(f"y is on {y.device}, the buffer on {memory.device}")
    if y.shape[0] > buffer.num_max_tokens_per_rank:
        raise ValueError(
            f"y has {y.shape[0]} tokens, the buffer holds {buffer.num_max_tokens_per_rank}"
        )
    return y.shape[0]


def clamp_of(value: float | None) -> float | None:
    if value is None:
        return None
    check_number("activation_clamp", value)
    if value == math.inf:
        return None
    if not 0.0 < value < math.inf:
        raise ValueError(
            f"activation_clamp must be positive, None or inf, got {value}: at 0 every expert would "
            "return 0"
        )
    return float(value)


def check_number(name: str, value: object) -> None:
    """A tensor is no number here: reading it would wait for the device."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise TypeError(f"{name} must be a Python number, got {value!r}")


def check_weights(buffer: SymmBuffer, l1: MegaWeights, l2: MegaWeights) -> None:
    experts, hidden, inter = buffer.num_experts_per_rank, buffer.hidden, buffer.intermediate_hidden
    for projection, weights, rows, k in (("l1", l1, 2 * inter, hidden), ("l2", l2, hidden, inter)):
        if not isinstance(weights, MegaWeights):
            raise TypeError(
                f"{projection}_weights must come from transform_weights_for_mega_moe or "
                f"finalize_weights, got {type(weights).__name__}: the order of the rows of a plain "
                "pair is unknown"
            )
        if weights.projection != projection:
            raise ValueError(f"{projection}_weights holds the projection {weights.projection}")
        if (weights.num_experts, weights.rows, weights.k) != (experts, rows, k):
            raise ValueError(
                f"{projection}_weights must be {experts} experts of {rows} x {k} for this buffer, "
                f"got {weights}"
            )
        if weights.data.device != buffer.device:
            raise ValueError(
                f"{projection}_weights are on {weights.data.device}, the buffer on {buffer.device}"
            )


def check_vector(
    name: str, tensor: Tensor, dtype: torch.dtype, buffer: SymmBuffer, columns: int = 0
) -> None:
    shape = (buffer.num_experts_per_rank, *([columns] if columns else []))
    if not isinstance(tensor, Tensor) or tensor.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {getattr(tensor, 'dtype', type(tensor))}")
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {shape}, one row per local expert, got "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    if tensor.device != buffer.device:
        raise ValueError(f"{name} is on {tensor.device}, the buffer on {buffer.device}")


def global_scales(
    buffer: SymmBuffer, l1: MegaWeights, l2: MegaWeights, given: tuple[Tensor | None, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """g13 (E, 2), g2 (E,), gh (E,) or None."""
    chosen = []
    for name, alphas, weights in zip(("l1_alphas", "l2_alphas"), given, (l1, l2)):
        columns = 2 if weights is l1 else 0
        if alphas is None:
            shape = weights.data.shape[:1] + ((2,) if columns else ())
            alphas = weights.alphas
            alphas = torch.ones(shape, device=buffer.device) if alphas is None else alphas
        elif weights.alphas is not None:
            raise ValueError(
                f"{name} are given and {weights.projection}_weights hold global scales of their "
                "own: one of them would be dropped or both applied"
            )
        check_vector(name, alphas, torch.float32, buffer, columns)
        chosen.append(alphas)
    gh = given[2]
    if gh is not None:
        check_vector("a2_scales", gh, torch.float32, buffer)
        good = (gh > 0) & (gh < math.inf)
        if gh.device.type == "cpu" and not bool(good.all()):
            expert = int((~good).nonzero()[0])
            raise ValueError(
                f"a2_scales must be positive and finite, got {float(gh[expert])} for local expert "
                f"{expert}"
            )
        gh = gh if gh.device.type == "cpu" else torch.where(good, gh, math.nan)
    return chosen[0], chosen[1], gh


def check_shared(
    buffer: SymmBuffer,
    l1: SharedWeights | None,
    l2: SharedWeights | None,
    x: Tensor | None,
    tokens: int,
) -> None:
    parts = {"shared_l1_weights": l1, "shared_l2_weights": l2, "x_bf16": x}
    missing = [name for name, part in parts.items() if part is None]
    if len(missing) not in (0, 3):
        raise ValueError(
            f"shared experts need {', '.join(parts)} together, {', '.join(missing)} missing"
        )
    inter = buffer.intermediate_hidden * buffer.num_shared_experts
    if l1 is None or l2 is None or x is None:
        if inter:
            raise ValueError(f"the buffer has {buffer.num_shared_experts} shared experts, got none")
        return
    for projection, weights, shape in (
        ("l1", l1, (2 * inter, buffer.hidden)),
        ("l2", l2, (buffer.hidden, inter)),
    ):
        name = f"shared_{projection}_weights"
        if not isinstance(weights, SharedWeights) or weights.projection != projection:
            raise TypeError(f"{name} must come from transform_weights_for_mega_moe, got {weights}")
        if tuple(weights.weight.shape) != shape:
            raise ValueError(
                f"{name} must be {shape} for {buffer.num_shared_experts} shared experts, got "
                f"{tuple(weights.weight.shape)}"
            )
        if weights.weight.device != buffer.device:
            raise ValueError(f"{name} is on {weights.weight.device}, not on {buffer.device}")
    if x.dtype != torch.bfloat16:
        raise TypeError(f"x_bf16 must be bfloat16, got {x.dtype}")
    if x.dim() != 2 or x.shape[0] < tokens or x.shape[1] != buffer.hidden:
        raise ValueError(
            f"x_bf16 must be (>= {tokens}, {buffer.hidden}) for {tokens} tokens, got "
            f"{tuple(x.shape)}"
        )
    if x.device != buffer.device:
        raise ValueError(f"x_bf16 is on {x.device}, the buffer on {buffer.device}")


def check_writable(name: str, tensor: Tensor) -> None:
    """Raises where torch would refuse the write after everything was computed."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError(
            f"{name} was made in inference mode and cannot be written outside it: make it outside, "
            "or call in inference mode"
        )


def check_overlap(
    y: Tensor,
    stats: Tensor | None,
    buffer: SymmBuffer,
    weights: tuple[MegaWeights, MegaWeights],
    others: tuple[Tensor | None, ...],
) -> None:
    """What is written must not lie in what is read."""
    read = [buffer.live(), *(t for w in weights for t in (w.data, w.scale))]
    spans = [_span(t) for t in (*read, *(t for t in others if t is not None))]
    written = {"y": _span(y)}
    if stats is not None:
        written["cumulative_local_expert_recv_stats"] = _span(stats)
    for name, (first, end) in written.items():
        if any(first < b and a < end for a, b in spans):
            raise ValueError(f"{name} shares memory with an input of the call")
        spans.append((first, end))  # statistics in y count as well


def _span(t: Tensor) -> tuple[int, int]:
    """Addresses of the first byte and behind the last; strided tensors count with their gaps."""
    first = t.data_ptr()
    if t.is_contiguous():
        return first, first + t.nbytes
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return first, first + (last + 1) * t.element_size()
