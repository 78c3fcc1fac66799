"""Scheduler, producer and loads of every configuration, compiled for sm_90a, in the simulator.

What a launch may get wrong before anything is multiplied: tiles, boxes, bytes expected, addresses.
Sums are exact, outputs and whatever nobody may use are poisoned.
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
from cute_kernels.sm90 import layout, weights
from tests import check
from tests.sm90.test_decode_sim import Problem, simulate

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)

NAN = float("nan")
ROW_BYTES = 2 * layout.BLOCK_K
by_config = pytest.mark.parametrize("config", configs.CONFIGS, ids=lambda c: c.name)


@dataclasses.dataclass(frozen=True)
class Behind(Problem):
    """The experts own rows behind ``skipped`` of nobody, and follow ``empty`` that have none."""

    skipped: int = 0
    empty: int = 0

    def offsets(self) -> Tensor:
        real = super().offsets() + self.skipped
        return torch.cat((real[:1].expand(self.empty), real))


def all_sizes(config: configs.Sm90Config) -> tuple[int, ...]:
    """Rows per expert: full tiles and tiles of the fewest rows of every token size, one that is cut
    in two, experts without rows. The box of the last one ends past the end of x."""
    low, counts = 0, [0]
    for size in config.token_sizes:
        counts += [size, 0] if size // config.token_step % 2 else [low + 1]
        low = size
    return (*counts, config.max_tokens + 1, 0, low - config.token_step + 1)


def same(out: Tensor, problem: Problem, spoilt: slice) -> None:
    """Exact sums, but for the rows ``spoilt``, all NaN."""
    want = problem.want().to(torch.bfloat16)
    assert bool(out[spoilt].isnan().all())
    out, want[spoilt] = out.clone(), 0.0
    out[spoilt] = 0.0
    check.assert_bytes_equal(out, want)


@by_config
def test_every_token_size_in_one_launch(config: configs.Sm90Config) -> None:
    """K ends inside a block of 64, the block behind it lies past the end of x; weight rows end
    inside a tile; the rows of expert 4, which the box of expert 3 reaches, are NaN."""
    problem = Problem(all_sizes(config), 144, 176)
    x, offsets = problem.x(), problem.offsets().tolist()
    spoilt = slice(*offsets[4:6])
    x[spoilt] = NAN
    same(simulate(problem, config, "random", 1, x=x), problem, spoilt)


@by_config
def test_gathered_tiles_of_every_token_size(config: configs.Sm90Config) -> None:
    """Whole tiles: rows that nobody stores are not loaded, and the simulator minds their use. The
    load knows no token sizes, so a few will do. One row starts with Inf: what fills K past its end
    is multiplied by codes of zero, and only zeros keep them so."""
    from cute_kernels.sim import Checks

    checks = Checks(cp_async_fence=True)
    few = (*config.token_sizes[:2], config.max_tokens)
    config = dataclasses.replace(config, token_sizes=tuple(sorted(set(few))))
    problem = Problem((0, *reversed(config.token_sizes), 0, 2 * config.max_tokens), 128, 176)
    count = sum(problem.counts)
    where = torch.randperm(count, generator=torch.Generator().manual_seed(3)) * 2
    x = torch.full((2 * count, problem.k), NAN, dtype=torch.bfloat16)
    x[where] = problem.x()
    x[where[-1], 0] = float("inf")
    out = simulate(problem, config, "random", 2, x=x, row_token=where.int(), checks=checks)
    check.assert_bytes_equal(out[:-1], problem.want()[:-1].to(torch.bfloat16))
    column = nvfp4.decode(problem.weight(), torch.float64)[-1, :, 0]
    assert torch.equal(out[-1].isnan(), column == 0) and bool(column.any())
    assert torch.equal(out[-1].isinf(), column != 0)


@by_config
def test_fewer_rows_than_any_box(config: configs.Sm90Config) -> None:
    problem = Problem((0, 1, 0), 128, 16)
    out = simulate(problem, config, "lazy", 0)
    check.assert_bytes_equal(out, problem.want().to(torch.bfloat16))


@by_config
def test_many_experts_and_every_unit_once(
    config: configs.Sm90Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler looks at 32 experts at a time; of the second 32 none has rows. Rows before the
    first expert's and past the last one's are neither read nor written. A unit that is computed
    twice gives the same rows: loads are counted. Tiles of one expert are equal and whole steps, so
    that all its boxes together pad it by less than a step."""
    from cute_kernels import sim

    simulators: list[Any] = []

    class Kept(sim.Simulator):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            simulators.append(self)

    monkeypatch.setattr(sim, "Simulator", Kept)
    counts = [0] * 103
    counts[0], counts[31], counts[64], counts[65], counts[102] = 145, 1, 17, 3, 9
    problem = Behind(tuple(counts), 144, 176, skipped=3)
    real = slice(3, 3 + sum(counts))
    x = torch.full((sum(counts) + 8, problem.k), NAN, dtype=torch.bfloat16)
    x[real] = problem.x()
    out = simulate(problem, config, "random", 4, x=x)
    check.assert_bytes_equal(out[real], problem.want().to(torch.bfloat16))
    assert bool(out[: real.start].isnan().all() and out[real.stop :].isnan().all())

    loads = simulators[0].launches[0].counters.total()
    row_tiles, blocks = 2 // config.row_tiles, 4  # of the weight; of 64 k
    tiles = row_tiles * sum(-(-n // config.max_tokens) for n in counts)
    steps = row_tiles * sum(-(-n // config.token_step) for n in counts)
    assert loads["tma_loads"] == tiles * blocks
    assert loads["tma_load_bytes"] == steps * config.token_step * ROW_BYTES * blocks
    assert loads["bulk_load_bytes"] == tiles * blocks * config.row_tiles * 2 * layout.BLOCK_BYTES


def _far(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory of more than 2^31 elements, of which the system holds only what is written."""
    assert torch.Size(shape).numel() > 2**31
    return torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("gathered", [False, True], ids=["contiguous", "gathered"])
def test_addresses_of_more_than_32_bits(gathered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rows of x, and the weight of the last expert."""
    k, counts = 4096, (16, 8)
    rows, real = 2**31 // k + 32, slice(-sum(counts), None)
    near = weights.pack_weight(Problem(counts, 128, k).weight())
    empty = 2**31 // near.blob[0].numel() + 1
    blob = _far((empty + 2, *near.blob.shape[1:]), torch.uint8)
    blob[-2:] = near.blob
    alpha = near.alpha[:1].repeat(len(blob), 1)
    far: Any = dataclasses.replace(near, blob=blob, alpha=alpha)
    monkeypatch.setattr(weights, "pack_weight", lambda *_: far)
    x = _far((rows, k), torch.bfloat16)
    first = 0 if gathered else rows - sum(counts)
    problem = Behind(counts, 128, k, skipped=first, empty=empty)
    x[real] = problem.x()
    parts = {"row_token": torch.arange(rows, dtype=torch.int32)[real]} if gathered else {}
    out = simulate(problem, configs.MIDDLE, "random", 5, x=x, **parts)
    check.assert_bytes_equal(out[first:], problem.want().to(torch.bfloat16))
