"""The backend "sm90" over the GPUs of this machine, at the sizes of a large model: the bits of one
GPU, whatever the routing and wherever the tokens are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moe import Capacity, Exchange, ExpertParallel, MoE, MoEConfig, SwiGLU
from profiling.bench_ep import random_weights
from tests.layers import same_bits
from tests.parallel.gpus import NEEDS_NCCL, gpus
from tests.parallel.ranks import run_ranks, values

pytestmark = [
    *NEEDS_NCCL,
    pytest.mark.sm90,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs Hopper GPUs",
    ),
]
MOST = 200  # tokens of a rank
MODES = {"counts": Exchange(), "places": Exchange(capacity=Capacity(MOST))}
SHARE = 48  # experts of a rank: DeepSeek-V4-Pro on 8


def shapes(size: int) -> dict[str, MoEConfig]:
    act = SwiGLU(limit=10.0)
    return {
        "30 experts": MoEConfig(2048, 1024, 30, 6, activation=act),
        "deepseek-v4-pro": MoEConfig(7168, 3072, SHARE * size, 6, activation=act),
    }


def tokens(cfg: MoEConfig, case: str, rank: int, size: int) -> tuple[torch.Tensor, ...]:
    """x, ids, weights of one rank; the last rank has no token in "one rank has none"."""
    count = 0 if case == "one rank has none" and rank == size - 1 else MOST - 7 * rank
    g = torch.Generator("cuda").manual_seed(len(case) + rank)
    x = torch.randn(count, cfg.hidden, device="cuda", generator=g).bfloat16()
    first = 0
    if case == "all to the last rank":
        first = cfg.num_experts - cfg.num_experts // size
    race = torch.rand(count, cfg.num_experts - first, device="cuda", generator=g)
    ids = (race.argsort(dim=1)[:, : cfg.top_k] + first).int()
    ids[3:5, 1] = -1
    return x, ids, torch.rand(ids.shape, device="cuda", generator=g)


def compare(rank: int, size: int, shape: str) -> list[str]:
    cfg = shapes(size)[shape]
    device = torch.device("cuda", rank)
    wrong = []
    alone = MoE(
        cfg, random_weights(cfg, (0, cfg.num_experts), device), backend="sm90", batch_invariant=True
    )
    for name, mode in MODES.items():
        parallel = ExpertParallel(None, cfg.num_experts, mode=mode)
        share = parallel.local(random_weights(cfg, (0, cfg.num_experts), device))
        over = MoE(cfg, share, backend="sm90", parallel=parallel)
        for case in ("uniform", "one rank has none", "all to the last rank"):
            given = tokens(cfg, case, rank, size)
            y, want = over.experts(*given), alone.experts(*given)
            assert bool(torch.isfinite(want).all())
            if not same_bits(y.cpu(), want.cpu()):
                wrong.append(f"{name}, {case}")
            if y.numel() and not bool(y[0].any()):
                wrong.append(f"{name}, {case}: nothing was computed")
        parallel.check()
    return wrong


@pytest.mark.parametrize("shape", ["30 experts", "deepseek-v4-pro"])
def test_the_bits_of_one_gpu(shape: str, tmp_path: Path) -> None:
    job = (compare, shape)
    results = values(run_ranks(gpus(), *job, path=tmp_path, timeout=100.0, backend="nccl"))
    assert results == [[]] * gpus()


def launches(rank: int, size: int) -> list[str]:
    """What the GPU does in one call with places."""
    cfg = MoEConfig(2048, 1024, 30, 6, activation=SwiGLU(limit=10.0))
    parallel = ExpertParallel(None, cfg.num_experts, mode=MODES["places"])
    share = parallel.local(random_weights(cfg, (0, cfg.num_experts), torch.device("cuda", rank)))
    layer = MoE(cfg, share, backend="sm90", parallel=parallel)
    given = tokens(cfg, "uniform", rank, size)
    layer.experts(*given)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        layer.experts(*given)
        torch.cuda.synchronize()
    device = torch.autograd.DeviceType.CUDA
    return [e.name for e in profile.events() if e.device_type == device]


def test_a_call_is_few_launches(tmp_path: Path) -> None:
    """Another launch needs a reason, and a new number here: kernels, copies and fills."""
    for names in values(run_ranks(gpus(), launches, path=tmp_path, timeout=100.0, backend="nccl")):
        for part in ("book_places", "send_rows", "stage_received", "leave_rows", "combine"):
            assert sum(name.startswith(part) for name in names) == 1, names
        assert len(names) <= 11, names
