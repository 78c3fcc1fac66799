"""Experts over the GPUs of this machine, as many as there are: NCCL, no waiting, CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe import Capacity, Exchange, ExpertParallel, ExpertWeights, MoE, MoEConfig, SwiGLU
from moe.failures import RankError
from moe.parallel import CapacityError
from tests.layers import same_bits
from tests.parallel.ranks import run_ranks, values

pytestmark = [
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


def layers(mode: Exchange, backend: str) -> tuple[MoE, MoE]:
    """Over the ranks, and alone."""
    parallel = ExpertParallel(None, E, mode=mode)
    whole = weights()
    over = MoE(CFG, parallel.local(whole), backend=backend, parallel=parallel)
    return over, MoE(CFG, whole, backend=backend)


def compare(rank: int, size: int) -> list[str]:
    """The specification runs on any device and is batch-invariant: the bits of one GPU."""
    wrong = []
    modes = {
        "counts": Exchange(),
        "places": Exchange(capacity=Capacity(64)),
        "summed": Exchange(pre_reduce=True),
    }
    for name, mode in modes.items():
        over, alone = layers(mode, "reference")
        for count in (33 * (rank == 0), 5 + rank, 0 if rank == 0 else 40):
            x, ids, mix = batch(rank, count)
            y, want = over.experts(x, ids, mix), alone.experts(x, ids, mix)
            if name == "summed":
                if not torch.allclose(y.float(), want.float(), rtol=2e-2, atol=2e-2):
                    wrong.append(f"{name}, {count} tokens: off")
            elif not same_bits(y.cpu(), want.cpu()):
                wrong.append(f"{name}, {count} tokens: other bits")
        assert over.parallel is not None
        over.parallel.check()
    return wrong


def waiting(rank: int, size: int) -> Any:
    """With places: no host synchronisation, and a graph that replays new tokens."""
    mode = Exchange(capacity=Capacity(64))
    over, alone = layers(mode, "torch")
    x, ids, mix = batch(rank, 48)
    over.experts(x, ids, mix)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    over.experts(x, ids, mix)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = over.experts(x, ids, mix)
    errors = []
    for seed in (1, 2):
        for target, source in zip((x, ids, mix), batch(rank, 48, seed)):
            target.copy_(source)
        graph.replay()
        torch.cuda.synchronize()
        want = alone.experts(x, ids, mix).float()
        errors.append(float((y.float() - want).norm() / want.norm()))
    assert over.parallel is not None
    over.parallel.check()
    ids.fill_(0)  # 48 tokens and 192 slots for one rank: they fit
    graph.replay()
    over.parallel.check()
    tight, _ = layers(Exchange(capacity=Capacity(8)), "torch")
    y = tight.experts(x, ids, mix)
    assert torch.isnan(y).any(dim=1).sum() == 40
    assert tight.parallel is not None
    with pytest.raises(CapacityError, match=f"40 tokens of rank {rank} found no place"):
        tight.parallel.check()
    return errors


def raising(rank: int, size: int) -> str | None:
    """The last rank raises before the exchange; the others hear of it, waiting for the counts."""
    over, _ = layers(Exchange(), "torch")
    x, ids, mix = batch(rank, 8)
    over.experts(x, ids, mix)
    if rank == size - 1:
        with pytest.raises(TypeError):
            over.experts(x.double(), ids, mix)
        return None
    with pytest.raises(RankError) as caught:
        over.experts(x, ids, mix)
    return str(caught.value)


def gpus() -> int:
    return min(torch.cuda.device_count(), 4)


def test_the_bits_of_one_gpu(tmp_path: Path) -> None:
    results = values(run_ranks(gpus(), compare, path=tmp_path, timeout=300.0, backend="nccl"))
    assert results == [[]] * gpus()


def test_places_wait_for_nothing_and_can_be_captured(tmp_path: Path) -> None:
    """torch's grouped GEMM is not batch-invariant on a GPU: close, not equal."""
    results = values(run_ranks(gpus(), waiting, path=tmp_path, timeout=300.0, backend="nccl"))
    assert all(error < 1e-2 for errors in results for error in errors)


@pytest.mark.skipif(gpus() < 2, reason="needs 2 GPUs: one rank has nobody to tell")
def test_an_exception_reaches_the_wait_for_the_counts(tmp_path: Path) -> None:
    results = values(run_ranks(gpus(), raising, path=tmp_path, timeout=300.0, backend="nccl"))
    for text in results[:-1]:
        assert f"rank {gpus() - 1} raised in phase 'route' of call 3: TypeError" in text
