"""The configurations that multiply with wgmma in the simulator: the PTX that a Hopper GPU gets.

Sums are exact: equal to fp64 in every order of the asynchronous work, outputs poisoned, every
access of shared memory and every register of a wgmma in flight checked. The kernels that leave
something out are errors of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cute_kernels import compile as compiler
from cute_kernels.sm90 import config as configs
from cute_kernels.sm90 import host
from tests import check
from tests.sm90.test_decode_sim import Problem, simulate
from tests.sm90.test_finish_sim import Sum

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)

# few main loops to compile; the loops between differ in N alone
CONFIGS = {
    c.name: dataclasses.replace(c, token_sizes=sizes, epilogue_tokens=tokens)
    for c, sizes, tokens in (
        (configs.MIDDLE, (8, 32, 48), 48),
        (configs.TRIO, (8, 48), 32),
        (configs.DUO, (16, 64), 64),
        (configs.PREFILL, (16, 64), 64),
    )
}
# tiles of several sizes, one that starts at an odd row, an expert without rows, one of several
# tiles, one whose last tile is shorter than the others and than its box, which ends past the rows
COUNTS = (19, 0, 70, 5)
PROBLEM = Problem(COUNTS, 272, 416)  # padded weight rows, K not a multiple of 64
ORDERS = [("lazy", 0), ("eager", 0), ("random", 1), ("random", 2)]


@pytest.mark.parametrize(("schedule", "seed"), ORDERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_exact_sums_are_equal(name: str, schedule: str, seed: int) -> None:
    out = simulate(PROBLEM, CONFIGS[name], schedule, seed)
    check.assert_bytes_equal(out, PROBLEM.want().to(torch.bfloat16))


@pytest.mark.parametrize(
    "config",
    [
        dataclasses.replace(configs.DUO, name="duo160", token_sizes=(16, 160)),
        dataclasses.replace(configs.PREFILL, name="prefill256", token_sizes=(16, 256)),
        dataclasses.replace(configs.TRIO, name="trio64", token_sizes=(8, 64)),
    ],
    ids=lambda c: c.name,
)
def test_the_largest_tiles(config: configs.Sm90Config) -> None:
    problem = Problem((config.max_tokens, 3), 128, 512)
    out = simulate(problem, config, "random", 7)
    check.assert_bytes_equal(out, problem.want().to(torch.bfloat16))


@pytest.mark.parametrize("name", CONFIGS)
def test_gathered_with_row_scale_and_bias(name: str) -> None:
    from cute_kernels.sim import Checks

    config = CONFIGS[name]
    # whole token tiles: rows that nobody stores are not loaded, and the simulator minds their use
    most = config.max_tokens
    problem = Problem((config.token_sizes[0], 0, 2 * most), 128, 416)
    count = sum(problem.counts)
    g = torch.Generator().manual_seed(3)
    where = torch.randperm(count, generator=g) * 2
    x = torch.full((2 * count, problem.k), float("nan"), dtype=torch.bfloat16)
    x[where] = problem.x()
    scale, bias = torch.rand(2 * count, generator=g) + 0.5, torch.randn(3, 128, generator=g)
    parts = {"x": x, "row_token": where.int(), "row_scale": scale, "bias": bias}
    checks = Checks(cp_async_fence=True)
    out = simulate(problem, config, "random", 3, dtype=torch.float32, checks=checks, **parts)
    added = bias.repeat_interleave(torch.tensor(problem.counts), dim=0)
    want = problem.want().float() * scale[where, None] + added
    check.assert_bytes_equal(out, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_gated(name: str) -> None:
    """gate and up meet in a thread: an activation that keeps sums exact."""
    out = simulate(PROBLEM, CONFIGS[name], "random", 5, activation=Sum(), dtype=torch.float32)
    want = PROBLEM.want()  # canonical rows: gate, up, gate, up, ...
    check.assert_bytes_equal(out, Sum()(None, want[:, ::2], want[:, 1::2]).float())


def test_all_configurations_have_the_same_bits() -> None:
    """Of values whose sums round: K is summed in one order by wgmma and by mma.sync."""
    g = torch.Generator().manual_seed(11)
    x = torch.randn(sum(COUNTS), PROBLEM.k, generator=g).bfloat16()
    outs = [
        simulate(PROBLEM, config, "random", 2, x=x, dtype=torch.float32)
        for config in CONFIGS.values()
    ]
    assert not outs[0].isnan().any()
    for out in outs[1:]:
        check.assert_bytes_equal(out, outs[0])


# ---- kernels that leave something out


def variant(monkeypatch: pytest.MonkeyPatch, **methods: Callable[..., Any]) -> None:
    """Launch kernels whose methods are replaced."""
    from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm

    changed = "_".join(methods)
    name = property(lambda self: f"{Sm90GroupedGemm.name.fget(self)}_other_{changed}")
    kind = type("Other", (Sm90GroupedGemm,), {**methods, "name": name})
    other, made = dataclasses.dataclass(frozen=True)(kind), host._kernel
    monkeypatch.setattr(host, "_kernel", lambda *a: other(**vars(made(*a))))


def errors_of(config: configs.Sm90Config, problem: Problem, **parts: Any) -> list[str]:
    """Names of the errors of a lazy, an eager and two random orders; "right" for none."""
    from cute_kernels.sim import SimError

    out = []
    for schedule, seed in (("lazy", 0), ("eager", 0), ("random", 1), ("random", 2)):
        try:
            got = simulate(problem, config, schedule, seed, **parts)
        except SimError as error:
            out.append(type(error).__name__)
            continue
        right = torch.equal(got.double(), problem.want().to(got.dtype).double())
        out.append("right" if right else "wrong")
    return out


LONG = Problem((40,), 128, 1536)  # the ring of stages turns


@pytest.mark.parametrize("name", CONFIGS)
def test_a_stage_released_too_early_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.sm90.sanitize import early_class

    made, early = host._kernel, early_class()
    monkeypatch.setattr(host, "_kernel", lambda *a: early(**vars(made(*a))))
    seen = errors_of(CONFIGS[name], LONG)
    assert set(seen) <= {"SharedRace", "SharedOverwrite"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_missing_wgmma_fence_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cutlass.cute.nvgpu import warpgroup

    monkeypatch.setattr(warpgroup, "fence", lambda: None)
    variant(monkeypatch, _unfenced=lambda self: None)
    assert set(errors_of(CONFIGS[name], LONG)) == {"RegisterRace"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_missing_wait_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for the products: the stages are given back under them."""
    from cutlass.cute.nvgpu import warpgroup

    monkeypatch.setattr(warpgroup, "wait_group", lambda n: None)
    variant(monkeypatch, _unwaited=lambda self: None)
    seen = errors_of(CONFIGS[name], LONG)
    assert set(seen) <= {"RegisterRace", "SharedOverwrite"}


@pytest.mark.parametrize("wrong", [-128, 128], ids=["fewer", "more"])
def test_bytes_that_do_not_come_are_seen(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that expects a row less or more than its box has: on a GPU, this hangs."""
    from cute_kernels.sm90.loads import ContiguousRows

    right = ContiguousRows.stage_bytes
    monkeypatch.setattr(ContiguousRows, "stage_bytes", lambda self, c, n: right(self, c, n) + wrong)
    variant(monkeypatch, **{f"_bytes{wrong > 0}": lambda self: None})
    seen = errors_of(CONFIGS["duo"], LONG)
    assert set(seen) <= {"Deadlock", "BarrierError", "SharedRace"}


def test_a_missing_proxy_fence_behind_cp_async_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import cutlass.cute as cute

    from cute_kernels.sim import Checks

    def wait_full(self: Any, shared: Any, stage: Any, phase: Any) -> None:
        cute.arch.mbarrier_wait(shared.ab_full + stage, phase)

    variant(monkeypatch, wait_full=wait_full)
    problem = Problem((64,), 128, 512)
    parts = {"row_token": torch.arange(64).int(), "checks": Checks(cp_async_fence=True)}
    assert set(errors_of(CONFIGS["duo"], problem, **parts)) == {"MissingProxyFence"}
