"""Experts over the GPUs of this machine, as many as there are: NCCL, no waiting, CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe import Capacity, Exchange
from moe.parallel import CapacityError
from tests.layers import same_bits
from tests.parallel.gpus import NEEDS_NCCL, batch, gpus, layers
from tests.parallel.ranks import run_ranks, values

pytestmark = NEEDS_NCCL


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


def test_the_bits_of_one_gpu(tmp_path: Path) -> None:
    results = values(run_ranks(gpus(), compare, path=tmp_path, timeout=300.0, backend="nccl"))
    assert results == [[]] * gpus()


def test_places_wait_for_nothing_and_can_be_captured(tmp_path: Path) -> None:
    """torch's grouped GEMM is not batch-invariant on a GPU: close, not equal."""
    results = values(run_ranks(gpus(), waiting, path=tmp_path, timeout=300.0, backend="nccl"))
    assert all(error < 1e-2 for errors in results for error in errors)
