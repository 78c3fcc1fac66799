"""The decode configuration in the simulator: it has no wgmma, so it compiles for sm_100a as well.

Sums are exact: equal to fp64, under several orders of the asynchronous work, outputs and scratch
poisoned, every access checked (a stage released too early is an error of its own).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4
from cute_kernels.sm90 import config as configs
from cute_kernels.sm90 import host, weights
from tests import check

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)

# the mma.sync instances of MIDDLE, for direct stores of two 128-row tiles
FEW = dataclasses.replace(configs.MIDDLE, name="few", token_sizes=(8, 16, 24), epilogue_tokens=24)
SCHEDULES = [("lazy", 0), ("random", 1)]


@dataclasses.dataclass(frozen=True)
class Problem:
    """Rows per expert, weight rows, K; inputs whose partial sums are exact in fp32."""

    counts: tuple[int, ...]
    rows: int
    k: int

    def weight(self) -> nvfp4.Nvfp4Tensor:
        g = torch.Generator().manual_seed(1)
        shape = (len(self.counts), self.rows, self.k)
        data = torch.randint(0, 256, (*shape[:2], self.k // 2), dtype=torch.uint8, generator=g)
        scale = torch.randint(0, 4, (*shape[:2], self.k // 16), dtype=torch.uint8, generator=g)
        return nvfp4.Nvfp4Tensor(data, scale * 8 + 56, torch.ones(shape[0]))

    def x(self) -> Tensor:
        g = torch.Generator().manual_seed(2)
        return torch.randint(-4, 5, (sum(self.counts), self.k), generator=g).bfloat16()

    def offsets(self) -> Tensor:
        return torch.tensor((0, *torch.tensor(self.counts).cumsum(0))).int()

    def want(self) -> Tensor:
        """fp64 (rows of x, rows)."""
        values = nvfp4.decode(self.weight(), torch.float64)
        parts = self.x().double().split(self.counts)
        return torch.cat([a @ w.T for a, w in zip(parts, values)])


def simulate(
    problem: Problem, config: configs.Sm90Config, schedule: str, seed: int, **parts: Any
) -> Tensor:
    """The launch of `host.sm90_grouped_gemm` on CPU tensors with two CTAs; output in poison."""
    from cute_kernels.sim import Simulator

    row_token, row_scale = parts.get("row_token"), parts.get("row_scale")
    bias, dtype = parts.get("bias"), parts.get("dtype", torch.bfloat16)
    x = parts.get("x", problem.x())
    weight = weights.pack_weight(problem.weight())
    num_rows = x.shape[0] if row_token is None else row_token.numel()
    counters, partial = host.scratch_sizes(problem.rows, problem.k, num_rows, config)
    scratch = host.Sm90Scratch.for_calls("cpu", counters, partial)
    scratch.partial.fill_(float("nan"))
    out = torch.full((num_rows, problem.rows), float("nan"), dtype=dtype)
    epilogue = host._Epilogue(None, row_scale, bias, dtype)
    launch = compiler.load(host._kernel(config, row_token is not None, epilogue), "sm_100a")
    offsets = problem.offsets()
    pointers = [weight.blob, x, row_token, out, offsets, scratch.counters, scratch.partial]
    tokens = row_token if row_scale is not None else None
    steps = configs.chunk_steps(problem.k, config)
    sizes = (weight.num_experts, num_rows, problem.k, problem.rows, steps, 2)
    optional = host._addresses([weight.alpha, row_scale, tokens, bias])
    with Simulator(seed=seed, schedule=schedule):
        launch(*host._addresses(pointers), *sizes, *optional, 0)
    assert not bool(scratch.counters.any()), "a launch must leave the counters at zero"
    return out


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("config", [configs.DECODE, FEW], ids=lambda c: c.name)
def test_exact_sums_are_equal(config: configs.Sm90Config, schedule: str, seed: int) -> None:
    problem = Problem((3, 0, 18), 272, 2080)  # two chunks of K, padded rows and K
    out = simulate(problem, config, schedule, seed)
    check.assert_bytes_equal(out, problem.want().to(torch.bfloat16))


@pytest.mark.parametrize("config", [configs.DECODE, FEW], ids=lambda c: c.name)
def test_gathered_with_row_scale_and_bias(config: configs.Sm90Config) -> None:
    # whole token tiles: rows that nobody stores are not loaded, and the simulator minds their use
    problem = Problem((8, 0, 16), 128, 1952)
    g = torch.Generator().manual_seed(3)
    where = torch.randperm(24, generator=g) * 2
    x = torch.full((48, problem.k), float("nan"), dtype=torch.bfloat16)
    x[where] = problem.x()
    scale, bias = torch.rand(48, generator=g) + 0.5, torch.randn(3, 128, generator=g)
    parts = {"x": x, "row_token": where.int(), "row_scale": scale, "bias": bias}
    out = simulate(problem, config, "random", 3, dtype=torch.float32, **parts)
    added = bias.repeat_interleave(torch.tensor(problem.counts), dim=0)
    want = problem.want().float() * scale[where, None] + added
    check.assert_bytes_equal(out, want)


def test_a_stage_released_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta-test: the kernel that releases its stages before it has read them."""
    from cute_kernels.sim.checks import SharedRace
    from tests.sm90.sanitize import early_class

    made, early = host._kernel, early_class()
    monkeypatch.setattr(host, "_kernel", lambda *a: early(**vars(made(*a))))
    problem = Problem((8,), 128, 2560)  # 20 steps: the ring of 8 stages turns
    with pytest.raises(SharedRace):
        for seed in range(3):
            simulate(problem, configs.DECODE, "random", seed)
