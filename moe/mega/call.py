"""The call of DeepGEMM's NVFP4 mega MoE: y of this rank's tokens from the rows of a buffer."""

from __future__ import annotations

import math
import weakref

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.activations import Activation
from cute_kernels.nvfp4 import Nvfp4Tensor
from cute_kernels.torch_math import TORCH_MATH
from moe.layer import MoE
from moe.mega.buffer import SymmBuffer
from moe.mega.checks import (
    RECIPE,
    check_overlap,
    check_shared,
    check_vector,
    check_weights,
    check_y,
    clamp_of,
    global_scales,
)
from moe.mega.weights import MegaWeights, SharedWeights
from moe.weights import ExpertWeights


def fp4_fp4_mega_moe(
    y: Tensor,
    l1_weights: MegaWeights,
    l2_weights: MegaWeights,
    sym_buffer: SymmBuffer,
    shared_l1_weights: SharedWeights | None = None,
    shared_l2_weights: SharedWeights | None = None,
    x_bf16: Tensor | None = None,
    cumulative_local_expert_recv_stats: Tensor | None = None,
    recipe: tuple[int, int, int] = RECIPE,
    activation: str = "swiglu",
    activation_clamp: float | None = None,
    fast_math: bool = True,
    l1_alphas: Tensor | None = None,
    l2_alphas: Tensor | None = None,
    a2_scales: Tensor | None = None,
    routed_scaling_factor: float = 1.0,
) -> None:
    """y[t] = sum over slots of topk_weights * expert(x[t]), for the first ``len(y)`` rows of the
    buffer: complete for this rank's own tokens, nothing is left to reduce.

    y                         bf16 (n, H), contiguous, n <= the buffer's tokens; written once at the
                              end, not at all when something is refused; 0 for a token whose ids
                              are all negative
    l1_weights, l2_weights    from `transform_weights_for_mega_moe` or `finalize_weights`
    sym_buffer                x, x_sf, topk_idx, topk_weights (and x_scales) of the n tokens
    shared_*, x_bf16          bf16 shared experts and the tokens (>= n, H) they read, added last;
                              all three or none
    cumulative_local_expert_recv_stats
                              int32 (E_local,): the (token, slot) pairs of this call that each local
                              expert computes are *added*
    activation_clamp          c > 0: gate = min(gate, c), up = clamp(up, -c, c), before the product;
                              None or inf: off
    fast_math                 a permission that is not used: both values give the same bits
    l1_alphas, l2_alphas      fp32 (E_local, 2) = (gate, up) and (E_local,): global scales; None: 1,
                              or those in the weights (both at once are refused)
    a2_scales                 fp32 (E_local,), positive and finite: static outer scale of the
                              intermediate h; None: one per row, from its amax. Checked where it
                              lies on the host; on a GPU an expert with another value gives NaN
    routed_scaling_factor     finite; multiplies the routing weights in fp32, not the shared part

    Raises TypeError, ValueError (RuntimeError for a destroyed buffer) before anything is written.
    Nothing waits for a GPU and no tensor is kept but the weights and scales of the latest call, so
    a CUDA graph can hold the call after one call outside it.

    Differs from DeepGEMM: gate and up are not rounded to bf16, ``a2_scales=None`` means one scale
    per row and not 1, and y is rounded once, after the factor and the shared experts
    (docs/numerics.md, section 3).
    """
    tokens = check_y(y, sym_buffer, recipe, activation, fast_math)
    clamp = clamp_of(activation_clamp)
    if not math.isfinite(routed_scaling_factor):
        raise ValueError(f"routed_scaling_factor must be finite, got {routed_scaling_factor}")
    check_weights(sym_buffer, l1_weights, l2_weights)
    scales = global_scales(sym_buffer, l1_weights, l2_weights, (l1_alphas, l2_alphas, a2_scales))
    check_shared(sym_buffer, shared_l1_weights, shared_l2_weights, x_bf16, tokens)
    stats = cumulative_local_expert_recv_stats
    if stats is not None:
        check_vector("cumulative_local_expert_recv_stats", stats, torch.int32, sym_buffer)
    check_overlap(y, stats, sym_buffer, (l1_weights, l2_weights), (*scales, x_bf16))
    layer = _layer(sym_buffer, l1_weights, l2_weights, clamp, scales)
    ids, mix = sym_buffer.topk_idx[:tokens], sym_buffer.topk_weights[:tokens]
    if routed_scaling_factor != 1.0:
        mix = mix * routed_scaling_factor
    shared = None
    if shared_l1_weights is not None and shared_l2_weights is not None and x_bf16 is not None:
        pair = shared_l1_weights.weight, shared_l2_weights.weight
        shared = _shared_experts(x_bf16[:tokens], *pair, layer.cfg.activation)
    x = Nvfp4Tensor(
        sym_buffer.x[:tokens],
        sym_buffer.x_sf[:tokens].view(torch.float8_e4m3fn),
        sym_buffer.x_scales[:tokens],
    )
    out = layer.experts(x, ids, mix, shared)
    if stats is not None:
        _count(ids, stats, sym_buffer)
    y.copy_(out)


nvfp4_mega_moe = fp4_fp4_mega_moe


def nvfp4_mega_moe_full(
    y: Tensor,
    transformed_l1_weights: MegaWeights,
    transformed_l2_weights: MegaWeights,
    symm_buffer: SymmBuffer,
    activation_clamp: float | None = None,
    fast_math: bool = False,
) -> None:
    """`fp4_fp4_mega_moe` with the global scales that `finalize_weights` put into the weights and
    the outer scale of x in ``symm_buffer.input_global_scale``.

    Differs from the original: routing weights multiply after L2 and once, the clamp comes before
    the product and on both sides, ids of other ranks and negative ids compute nothing, and y needs
    no all-reduce.
    """
    fp4_fp4_mega_moe(
        y,
        transformed_l1_weights,
        transformed_l2_weights,
        symm_buffer,
        activation_clamp=activation_clamp,
        fast_math=fast_math,
    )


def _layer(
    buffer: SymmBuffer,
    l1: MegaWeights,
    l2: MegaWeights,
    clamp: float | None,
    scales: tuple[Tensor, Tensor, Tensor | None],
) -> MoE:
    """The layer that computes with these weights, made by their first call with this buffer; clamp
    and global scales are those of this call."""
    cfg = buffer.config(clamp)
    made = buffer.layers.setdefault(l1, weakref.WeakKeyDictionary())
    layer = made.get(l2)
    if layer is None:
        weights = ExpertWeights(
            l1.data,
            l1.scale,
            scales[0],
            l2.data,
            l2.scale,
            scales[1],
            first_expert=buffer.experts_start_idx,
        )
        layer = made[l2] = MoE(cfg, weights, backend=buffer.backend)
    layer.cfg = cfg
    for name, scale in zip(("g13", "g2", "gh"), scales):
        if getattr(layer, name) is not scale:  # an assignment to a module costs more than this
            setattr(layer, name, scale)
    return layer


def _shared_experts(x: Tensor, l1: Tensor, l2: Tensor, activation: Activation) -> Tensor:
    """bf16 (n, H): gate, up and h rounded to bf16, activation in fp32."""
    gate, up = F.linear(x, l1).float().chunk(2, dim=-1)
    return F.linear(activation(TORCH_MATH, gate, up).bfloat16(), l2)


def _count(ids: Tensor, stats: Tensor, buffer: SymmBuffer) -> None:
    """Add the (token, slot) pairs of every local expert; nothing waits for the device."""
    local = ids - buffer.experts_start_idx
    here = (local >= 0) & (local < buffer.num_experts_per_rank)
    index = torch.where(here, local, 0).flatten()
    stats.scatter_add_(0, index, here.flatten().to(torch.int32))
