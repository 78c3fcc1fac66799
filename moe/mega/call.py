"""The call of DeepGEMM's NVFP4 mega MoE: y of this rank's tokens from the rows of a buffer."""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cute_kernels.activations import Activation
from cute_kernels.nvfp4 import Nvfp4Tensor
from cute_kernels.torch_math import TORCH_MATH
from moe.kernels import KERNEL_BACKENDS
from moe.layer import MoE
from moe.mega.buffer import SymmBuffer
from moe.mega.checks import (
    RECIPE,
    check_number,
    check_overlap,
    check_shared,
    check_vector,
    check_weights,
    check_writable,
    check_y,
    clamp_of,
    global_scales,
)
from moe.mega.weights import MegaWeights, SharedWeights
from moe.weights import ExpertWeights


@torch.no_grad()
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
    sym_buffer                x, x_sf, topk_idx, topk_weights (and x_scales) of the n tokens; bit 7
                              of a block scale is ignored, as the tensor cores do
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
    With several ranks the call is collective, a rank without tokens calls too (n = 0), and a rank
    that raises makes the others raise `moe.failures.RankError`; ``activation_clamp`` must be the
    same on all of them.
    There is no autograd: y is written, and shared experts run, as under ``torch.no_grad()``.
    Nothing waits for a GPU and no tensor is kept but the weights and scales of the latest call, so
    a CUDA graph can hold the call after one call outside it.

    Differs from DeepGEMM: gate and up are not rounded to bf16, ``a2_scales=None`` means one scale
    per row and not 1, and y is rounded once, after the factor and the shared experts
    (docs/numerics.md, section 3).
    """
    given = _Given(
        l1_weights,
        l2_weights,
        (shared_l1_weights, shared_l2_weights, x_bf16),
        cumulative_local_expert_recv_stats,
        activation_clamp,
        (l1_alphas, l2_alphas, a2_scales),
        routed_scaling_factor,
    )
    parallel = sym_buffer.parallel if isinstance(sym_buffer, SymmBuffer) else None
    with contextlib.nullcontext() if parallel is None else parallel.call("mega"):
        tokens = check_y(y, sym_buffer, recipe, activation, fast_math)
        out = _compute(y, tokens, sym_buffer, given)
        y.copy_(out)
        if given.stats is not None:
            _count(sym_buffer, tokens, given.stats)


nvfp4_mega_moe = fp4_fp4_mega_moe

_BITS_0_TO_6 = 0x7F7F7F7F  # of the four block scales of a word


class _Given(NamedTuple):
    """Arguments of a call that one rank may get wrong alone."""

    l1: MegaWeights
    l2: MegaWeights
    shared: tuple[SharedWeights | None, SharedWeights | None, Tensor | None]
    stats: Tensor | None
    clamp: float | None
    scales: tuple[Tensor | None, Tensor | None, Tensor | None]
    factor: float


def _compute(y: Tensor, tokens: int, buffer: SymmBuffer, given: _Given) -> Tensor:
    """Check everything, then run the layer on the first rows of the buffer: bf16 (n, H)."""
    clamp = clamp_of(given.clamp)
    check_number("routed_scaling_factor", given.factor)
    if not math.isfinite(given.factor):
        raise ValueError(f"routed_scaling_factor must be finite, got {given.factor}")
    check_weights(buffer, given.l1, given.l2)
    scales = global_scales(buffer, given.l1, given.l2, given.scales)
    check_shared(buffer, *given.shared, tokens)
    if given.stats is not None:
        name = "cumulative_local_expert_recv_stats"
        check_vector(name, given.stats, torch.int32, buffer)
        check_writable(name, given.stats)
    shared_weights = [w.weight for w in given.shared[:2] if w is not None]
    others = (*scales, given.shared[2], *shared_weights)
    check_overlap(y, given.stats, buffer, (given.l1, given.l2), others)
    layer = _layer(buffer, given.l1, given.l2, clamp, scales)
    mix = buffer.topk_weights[:tokens]
    if given.factor != 1.0:
        mix = mix * given.factor
    l1, l2, x = given.shared
    shared = None
    if l1 is not None and l2 is not None and x is not None:
        shared = _shared_experts(x[:tokens], l1.weight, l2.weight, layer.cfg.activation)
    x_sf = buffer.x_sf[:tokens]
    if buffer.backend not in KERNEL_BACKENDS:
        x_sf = x_sf & _BITS_0_TO_6  # decoded, a byte with bit 7 would be negative
    quantised = Nvfp4Tensor(
        buffer.x[:tokens],
        x_sf.view(torch.float8_e4m3fn),
        buffer.x_scales[:tokens],
    )
    return layer.experts(quantised, buffer.topk_idx[:tokens], mix, shared)


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
        layer = made[l2] = MoE(cfg, weights, backend=buffer.backend, parallel=buffer.parallel)
    layer.cfg = cfg
    layer.set_scales(*scales)
    return layer


def _shared_experts(x: Tensor, l1: Tensor, l2: Tensor, activation: Activation) -> Tensor:
    """bf16 (n, H): gate, up and h rounded to bf16, activation in fp32."""
    gate, up = F.linear(x, l1).float().chunk(2, dim=-1)
    return F.linear(activation(TORCH_MATH, gate, up).bfloat16(), l2)


def _count(buffer: SymmBuffer, tokens: int, stats: Tensor) -> None:
    """Add the (token, slot) pairs that every local expert computed; nothing waits for a GPU."""
    if buffer.parallel is not None:
        received = buffer.parallel.received
        assert received is not None  # every exchange leaves it
        stats += received.diff()[: stats.shape[0]]
        return
    ids = buffer.topk_idx[:tokens].flatten()
    here = (ids >= 0) & (ids < buffer.num_experts)
    stats.scatter_add_(0, torch.where(here, ids, 0), here.to(torch.int32))
