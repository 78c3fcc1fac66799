"""The configurations that multiply with mma.sync, in the simulator (those with wgmma:
test_gemm_sim.py).

Sums are exact: equal to fp64, under several orders of the asynchronous work, outputs and scratch
poisoned, every access checked (a stage released too early is an error of its own).
"""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, sm90_ops
from cute_kernels.activations import Activation, ReLU2
from cute_kernels.sm90 import config as configs
from cute_kernels.sm90 import host, weights
from tests import check
from tests.layers import poison
from tests.sm90.test_finish_sim import Sum
from tests.small_kernels import assert_same

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)

# the mma.sync instances of MIDDLE, for direct stores of two 128-row tiles
FEW = dataclasses.replace(configs.MIDDLE, name="few", token_sizes=(8, 16, 24), epilogue_tokens=32)
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
    """`host.sm90_grouped_gemm` on the CPU tensors of a Hopper GPU of one SM, so that its few CTAs
    have several tiles each; output in poison. ``parts``: of the operation, ``x``, ``dtype``,
    ``checks``."""
    from cute_kernels.sim import Simulator

    activation, row_token = parts.get("activation"), parts.get("row_token")
    gated = activation is not None and activation.gated
    x, checks = parts.pop("x", problem.x()), parts.pop("checks", None)
    dtype = parts.pop("dtype", torch.bfloat16)
    weight = weights.pack_weight(problem.weight(), gated)
    num_rows = x.shape[0] if row_token is None else row_token.numel()
    counters, partial = host.scratch_sizes(problem.rows, problem.k, num_rows, config)
    scratch = host.Sm90Scratch.for_calls("cpu", counters, partial)
    scratch.partial.fill_(float("nan"))
    out = torch.full((num_rows, problem.rows // (1 + gated)), float("nan"), dtype=dtype)
    simulator = Simulator(seed=seed, schedule=schedule, arch=host.ARCH, checks=checks)
    with mock.patch.object(host, "multiprocessors", lambda device: 1), simulator:
        host.sm90_grouped_gemm(
            x, weight, problem.offsets(), config=config, scratch=scratch,
            out=out, out_dtype=dtype, **parts,
        )  # fmt: skip
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


@pytest.mark.parametrize("activation", [None, Sum(), ReLU2()], ids=["store", "gated", "relu2"])
@pytest.mark.parametrize("config", [configs.DECODE, FEW], ids=lambda c: c.name)
def test_rounded_where_it_is_summed(
    config: configs.Sm90Config, activation: Activation | None
) -> None:
    """The bytes that staging makes of fp32 rows; weight rows that end inside a tile, an expert of
    which all is NaN and one that saturates."""
    problem = Problem((3, 1, 0, 18), 160, 1056)
    scale = torch.tensor([0.6, 0.01, 5.0, float("nan")])
    rows = torch.tensor([4e5, 3.0, 9.0, 20.0])
    bias = torch.randn((4, 160), generator=torch.Generator().manual_seed(3))
    parts = {"activation": activation, "expert_scale": rows, "bias": bias}
    wide = simulate(problem, config, "random", 3, dtype=torch.float32, **parts)
    got = simulate(problem, config, "random", 3, out_scale=scale, **parts)
    values = poison(torch.empty(got.shape, dtype=torch.bfloat16))
    sm90_ops.stage_rows(wide, problem.offsets(), values, torch.empty(22), outer=scale)
    assert_same(got, values, "rows")
    assert got[4:].isnan().all() and not got[:4].isnan().any() and got.nan_to_num().any()


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
