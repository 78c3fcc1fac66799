"""Scratch memory that several layers may share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cute_kernels.ops import Buffer

__all__ = ["Buffer", "Workspace", "allocate", "total_bytes"]

_ALIGNMENT = 256  # bytes; what CUDA's allocator gives, more than a TMA descriptor asks for
_KEPT = 256  # calls of different sizes whose tensors a workspace remembers


def total_bytes(buffers: Sequence[Buffer]) -> int:
    return sum(_aligned(b.nbytes) for b in buffers)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Workspace:
    """One allocation of ``nbytes`` that layers carve their scratch from, one call at a time.

    Layers that share a workspace must run one after another on one stream. Without a workspace
    every call takes its scratch from torch's allocator and frees it.
    """

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes must not be negative, got {nbytes}")
        memory = torch.empty(nbytes + _ALIGNMENT - 1, dtype=torch.uint8, device=device)
        start = -memory.data_ptr() % _ALIGNMENT  # torch aligns host memory to 64 bytes only
        self._memory = memory[start : start + nbytes]
        self._carved: dict[int, tuple[Sequence[Buffer], list[Tensor]]] = {}

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    @property
    def device(self) -> torch.device:
        return self._memory.device

    def carve(self, buffers: Sequence[Buffer]) -> list[Tensor]:
        """Uninitialised tensors, 256-byte aligned, for one call. Those of a tuple are kept: the
        same tuple gets the same tensors again.

        Raises ValueError when they do not fit: nothing is allocated and nothing is launched then.
        """
        known = self._carved.get(id(buffers))
        if known is not None and known[0] is buffers:
            return list(known[1])
        need = total_bytes(buffers)
        if need > self.nbytes:
            raise ValueError(
                f"workspace of {self.nbytes} bytes is too small for this call, which needs {need}: "
                "size it with MoE.plan_memory(max_tokens)"
            )
        views, start = [], 0
        for b in buffers:
            piece = self._memory[start : start + b.nbytes]
            views.append(piece.view(b.dtype).view(b.shape))
            start += _aligned(b.nbytes)
        if isinstance(buffers, tuple) and not torch.compiler.is_compiling():
            if len(self._carved) >= _KEPT:
                self._carved.clear()
            self._carved[id(buffers)] = (buffers, list(views))
        return views


def allocate(
    buffers: Sequence[Buffer], device: torch.device, workspace: Workspace | None
) -> list[Tensor]:
    """Scratch for one call, from ``workspace`` or from torch's allocator."""
    if workspace is None:
        return [torch.empty(b.shape, dtype=b.dtype, device=device) for b in buffers]
    if workspace.device != device:
        raise ValueError(f"workspace is on {workspace.device}, the call on {device}")
    return workspace.carve(buffers)
