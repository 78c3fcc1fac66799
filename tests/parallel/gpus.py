"""Layers over the GPUs of this machine, and what their tests need."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe import Exchange, ExpertParallel, ExpertWeights, MoE, MoEConfig, SwiGLU

NEEDS_NCCL = [
    pytest.mark.gpu,
    pytest.mark.dist,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not dist.is_nccl_available(),
        reason="needs a CUDA GPU and a torch with NCCL",
    ),
]
H, I, E, K = 512, 256, 16, 4  # noqa: E741
CFG = MoEConfig(H, I, E, K, activation=SwiGLU(limit=10.0))


def weights() -> ExpertWeights:
    g = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(E, I, H, generator=g) * 0.05 for _ in range(2))
    return ExpertWeights.from_bf16(gate, up, torch.randn(E, H, I, generator=g) * 0.05).to("cuda")


def batch(rank: int, count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(100 * seed + rank)
    ids = torch.rand(count, E, generator=g).argsort(dim=1)[:, :K].int()
    x = torch.randn(count, H, generator=g).bfloat16()
    return x.cuda(), ids.cuda(), torch.rand(count, K, generator=g).cuda()


def layers(mode: Exchange, backend: str = "torch", timeout: float | None = None) -> tuple[MoE, MoE]:
    """Over the ranks, and alone."""
    parallel = ExpertParallel(None, E, mode=mode, timeout=timeout)
    whole = weights()
    over = MoE(CFG, parallel.local(whole), backend=backend, parallel=parallel)
    return over, MoE(CFG, whole, backend=backend)


def gpus() -> int:
    return min(torch.cuda.device_count(), 8)
