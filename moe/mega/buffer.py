"""The input buffer of the mega-MoE calls, under the names of DeepGEMM."""

from __future__ import annotations

import dataclasses
import types
import weakref
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from cute_kernels.activations import SwiGLU
from moe.backends import choose_backend
from moe.config import MoEConfig
from moe.layer import MoE
from moe.mega.weights import MegaWeights
from moe.parallel import Exchange, ExpertParallel
from moe.workspace import Buffer, total_bytes

MMA_TYPE = "fp4xfp4"
ACTIVATION = "swiglu"
_WORD = 64  # elements of K whose four block scales share one int32
_RINGS = {
    f"{prefix}{name}"
    for prefix in ("", "shared_")
    for name in ("l1_acts", "l1_acts_sf", "l2_acts", "l2_acts_sf")
}


# L1 -> L2 -> the layer made of both; weights that nobody else keeps leave with it
Layers = weakref.WeakKeyDictionary[MegaWeights, weakref.WeakKeyDictionary[MegaWeights, MoE]]


class SymmBuffer:
    """Inputs of this rank for one call; copy into the first rows, then call `fp4_fp4_mega_moe`.

    x             uint8 (T, H/2)   E2M1 codes, even k in the low nibble
    x_sf          int32 (T, H/64)  four UE4M3 bytes per word, lowest byte = lowest k
    topk_idx      int64 (T, K)     global expert ids; negative: this slot is empty (initially all)
    topk_weights  float32 (T, K)
    x_scales      float32 (T,)     outer scale of each token, initially 1: leave it where the scale
                                   of x is folded into ``l1_alphas``
    buffer        int8: the one allocation they are views of
    backend, device, group, num_experts, num_experts_per_rank, experts_start_idx, num_topk, hidden,
    intermediate_hidden, num_max_tokens_per_rank, num_shared_experts, mma_type, activation

    With a group of several ranks construction is collective, and so is every call: tokens of this
    rank go to the ranks of their experts (contiguous ranges, ``experts_start_idx`` and
    ``num_experts_per_rank`` here) and come back, see `moe.ExpertParallel`. ``mode`` is its
    `Exchange`: with the default the host waits once per call for the sizes, with
    ``Exchange(capacity=Capacity(num_max_tokens_per_rank))`` nothing waits and every token has a
    place, as in DeepGEMM. ``parallel`` is None on one rank.

    T = num_max_tokens_per_rank. One buffer serves any number of layers, one call at a time. Layers
    that it has prepared are kept for as long as their weights live.

    Differs from DeepGEMM: T is not rounded up, experts need not divide by the ranks, there are no
    rings and no combine slots (``l1_acts`` and the like are refused by name), ``mma_type`` has one
    value, ``backend``, ``device`` and ``mode`` are chosen here and ``x_scales`` is new.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_topk: int,
        hidden: int,
        intermediate_hidden: int,
        num_shared_experts: int = 0,
        mma_type: str = MMA_TYPE,
        activation: str = ACTIVATION,
        base: SymmBuffer | None = None,
        *,
        backend: str = "auto",
        device: torch.device | str | None = None,
        mode: Exchange = Exchange(),  # noqa: B008  a frozen value
    ) -> None:
        _check_options(mma_type, activation)
        _check_sizes(num_max_tokens_per_rank, hidden, num_shared_experts)
        config = MoEConfig(hidden, intermediate_hidden, num_experts, num_topk)
        if base is not None:
            _check_base(base, device, mode)
            device = base.device
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self.group = group
        self.num_experts, self.num_topk = num_experts, num_topk
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.hidden, self.intermediate_hidden = hidden, intermediate_hidden
        self.num_shared_experts = num_shared_experts
        self.mma_type, self.activation = mma_type, activation
        self.backend = choose_backend(backend, torch.device(device))
        self.parallel: ExpertParallel | None
        self.parallel = _parallel(self, mode) if base is None else base.parallel
        first, end = (0, num_experts) if self.parallel is None else self.parallel.expert_range
        self.experts_start_idx, self.num_experts_per_rank = first, end - first
        self.layers: Layers = weakref.WeakKeyDictionary()
        self._configs: dict[float | None, MoEConfig] = {None: config}
        parts = _parts(num_max_tokens_per_rank, num_topk, hidden)
        memory = _reused(base, self) if base is not None else None
        if memory is None:
            memory = torch.zeros(total_bytes(parts), dtype=torch.int8, device=device)
        self.buffer: Tensor | None = memory
        self.handle: types.SimpleNamespace | None
        self.handle = types.SimpleNamespace(buffer_ptrs=[memory.data_ptr()])
        views = _views(memory, parts)
        self.x, self.x_sf, self.topk_idx, self.topk_weights, self.x_scales = views
        if base is None:
            self.topk_idx.fill_(-1)  # a row that nobody filled computes nothing
            self.x_scales.fill_(1.0)

    @property
    def device(self) -> torch.device:
        return self.live().device

    @property
    def input_global_scale(self) -> Tensor:
        """``x_scales``; assigning a number, a tensor of one element or (n,) sets all rows, or the
        first n."""
        return self.x_scales

    @input_global_scale.setter
    def input_global_scale(self, scale: Tensor | float) -> None:
        if not isinstance(scale, Tensor):
            self.x_scales.fill_(float(scale))
        elif scale.numel() == 1:
            self.x_scales.copy_(scale.reshape(1).expand_as(self.x_scales))
        elif scale.dim() == 1 and scale.shape[0] <= self.x_scales.shape[0]:
            self.x_scales[: scale.shape[0]].copy_(scale)
        else:
            raise ValueError(
                f"input_global_scale must be a number, one element or (n,) with n <= "
                f"{self.x_scales.shape[0]} tokens, got {tuple(scale.shape)}"
            )

    def config(self, clamp: float | None) -> MoEConfig:
        """Configuration of a call with this clamp."""
        found = self._configs.get(clamp)
        if found is None:
            activation = SwiGLU(limit=clamp)
            found = dataclasses.replace(self._configs[None], activation=activation)
            self._configs[clamp] = found
        return found

    def live(self) -> Tensor:
        """``buffer``. Raises RuntimeError after `destroy`."""
        if self.buffer is None:
            raise RuntimeError("this buffer was destroyed: make another one")
        return self.buffer

    def destroy(self) -> None:
        """Give the memory back; later calls with this buffer raise."""
        for name in ("buffer", "handle", "group", "parallel", *(b.name for b in _parts(0, 0, 0))):
            setattr(self, name, None)
        self.layers.clear()

    def __getattr__(self, name: str) -> NoReturn:
        if name in _RINGS:
            raise AttributeError(
                f"{name} is a ring of DeepGEMM's kernel: rows of the experts are made per call "
                "here, no caller can read or fill them"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def get_symm_buffer_for_mega_moe(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    num_shared_experts: int = 0,
    use_fp8_dispatch: bool | None = None,
    mma_type: str = MMA_TYPE,
    activation: str = ACTIVATION,
    *,
    backend: str = "auto",
    device: torch.device | str | None = None,
    mode: Exchange = Exchange(),  # noqa: B008  a frozen value
) -> SymmBuffer:
    """A `SymmBuffer`; see there for the arguments.

    group    process group of the ranks (gloo for the CPU, NCCL for GPUs), or None: this process
             alone
    backend  "auto" or a name from `python -m moe backends`; the one in use is ``buffer.backend``
    device   default: the current CUDA device if there is one, else the CPU
    mode     how tokens travel between several ranks

    Raises ValueError for sizes and options that cannot be, before anything is allocated.

    Differs from DeepGEMM: ``mma_type`` defaults to "fp4xfp4", the only one; FP8 dispatch is
    refused.
    """
    if use_fp8_dispatch:
        raise ValueError("use_fp8_dispatch=True is not offered: tokens are NVFP4 (fp4xfp4)")
    return SymmBuffer(
        group,
        num_experts,
        num_max_tokens_per_rank,
        num_topk,
        hidden,
        intermediate_hidden,
        num_shared_experts,
        mma_type,
        activation,
        backend=backend,
        device=device,
        mode=mode,
    )


def get_symm_buffer(
    group: dist.ProcessGroup | None,
    num_experts: int,
    num_max_tokens_per_rank: int,
    num_topk: int,
    hidden: int,
    intermediate_hidden: int,
    *,
    backend: str = "auto",
    device: torch.device | str | None = None,
    mode: Exchange = Exchange(),  # noqa: B008  a frozen value
) -> SymmBuffer:
    """The buffer of `nvfp4_mega_moe_full`: a `SymmBuffer`, with ``input_global_scale`` and
    ``experts_start_idx``.

    Differs from the original: sizes are arguments, not constants of one model, and the scale may
    differ from token to token.
    """
    sizes = (num_max_tokens_per_rank, num_topk, hidden, intermediate_hidden)
    return SymmBuffer(group, num_experts, *sizes, backend=backend, device=device, mode=mode)


def _check_options(mma_type: str, activation: str) -> None:
    if mma_type != MMA_TYPE:
        raise ValueError(f"mma_type must be {MMA_TYPE!r} (NVFP4 x NVFP4), got {mma_type!r}")
    if activation != ACTIVATION:
        raise ValueError(f"activation must be {ACTIVATION!r}, got {activation!r}")


def _check_base(base: SymmBuffer, device: torch.device | str | None, mode: Exchange) -> None:
    """Device and mode come from ``base``; another one that is asked for would be dropped."""
    if not isinstance(base, SymmBuffer):
        raise TypeError(f"base must be a SymmBuffer or None, got {type(base).__name__}")
    if device is not None:
        asked, kept = torch.device(device), base.device
        if asked.type != kept.type or asked.index not in (None, kept.index):
            raise ValueError(f"device is {asked}, base lies on {kept}: leave it out")
    if base.parallel is not None and mode not in (Exchange(), base.parallel.mode):
        raise ValueError(
            f"mode is {mode}, base exchanges tokens in {base.parallel.mode}: leave it out"
        )


def _parallel(buffer: SymmBuffer, mode: Exchange) -> ExpertParallel | None:
    """How tokens reach experts of other ranks; None on one rank."""
    if buffer.group is None or buffer.group.size() == 1:
        return None
    tokens = buffer.num_max_tokens_per_rank
    return ExpertParallel(buffer.group, buffer.num_experts, mode=mode, max_tokens=tokens)


def _check_sizes(tokens: int, hidden: int, shared: int) -> None:
    if tokens < 1:
        raise ValueError(f"num_max_tokens_per_rank must be positive, got {tokens}")
    if hidden < _WORD or hidden % _WORD:
        raise ValueError(
            f"hidden must be a positive multiple of {_WORD} (one int32 of x_sf carries the scales "
            f"of {_WORD} elements), got {hidden}"
        )
    if shared < 0:
        raise ValueError(f"num_shared_experts must not be negative, got {shared}")


def _parts(tokens: int, top_k: int, hidden: int) -> list[Buffer]:
    return [
        Buffer("x", (tokens, hidden // 2), torch.uint8),
        Buffer("x_sf", (tokens, hidden // _WORD), torch.int32),
        Buffer("topk_idx", (tokens, top_k), torch.int64),
        Buffer("topk_weights", (tokens, top_k), torch.float32),
        Buffer("x_scales", (tokens,), torch.float32),
    ]


def _views(memory: Tensor, parts: list[Buffer]) -> list[Tensor]:
    views, start = [], 0
    for part in parts:
        piece = memory[start : start + part.nbytes]
        views.append(piece.view(part.dtype).view(part.shape))
        start += total_bytes([part])
    return views


def _reused(base: SymmBuffer, new: SymmBuffer) -> Tensor:
    """The memory of ``base``, which must have the same sizes, or its views would lie elsewhere."""
    memory = base.live()
    names = ("num_experts", "num_max_tokens_per_rank", "num_topk", "hidden", "intermediate_hidden")
    for name in (*names, "num_shared_experts", "group", "backend"):
        if getattr(base, name) != getattr(new, name):
            raise ValueError(
                f"base must have the same {name}, got {getattr(base, name)} and "
                f"{getattr(new, name)}: its rows would lie elsewhere"
            )
    return memory
