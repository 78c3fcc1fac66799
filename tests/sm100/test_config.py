"""Configurations: what is chosen, what fits, what is refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from cute_kernels import config as config_module
from cute_kernels.config import (
    EIGHT_K,
    FP4_HIDDEN,
    SMEM_PER_CTA,
    TMEM_COLUMNS,
    GemmConfig,
    choose_config,
    clusters_at_once,
    column_clocks,
)
from cute_kernels.forecast import forecast
from tests.sm100.configs import DECODE, MAIN, OTHER, names

# (experts of a rank, hidden, intermediate) of model families, gated and not
MODELS = [
    (48, 7168, 3072), (32, 7168, 2048), (256, 7168, 2048), (16, 4096, 1536), (128, 2880, 2880),
    (128, 2048, 768), (8, 4096, 14336), (64, 2688, 1856), (160, 5120, 1536), (512, 1536, 704),
    (4, 256, 96),
]  # fmt: skip
ROWS = (1, 3, 8, 16, 40, 64, 65, 100, 112, 113, 128, 208, 209, 300, 512, 1024, 4096)


def gemms(hidden: int, inter: int) -> list[tuple[int, int, float]]:
    """(N, K, bytes stored per column) of L1 to FP4, L1 to fp32, L2, L2 added up."""
    wide = (2 * inter, hidden)
    return [(*wide, FP4_HIDDEN), (*wide, 4.0), (hidden, inter, 2.0), (hidden, inter, 4.0)]


def chosen() -> set[GemmConfig]:
    found = set()
    for experts, hidden, inter in MODELS:
        for gemm in gemms(hidden, inter):
            found |= {choose_config(experts * rows, experts, *gemm) for rows in ROWS}
            found.add(choose_config(1, experts, *gemm))
    return found


def test_choice_stays_within_the_tested_configurations() -> None:
    assert chosen() == set(MAIN)
    assert len(MAIN) <= 12


@pytest.mark.parametrize("experts, hidden, inter", MODELS, ids=str)
def test_decode_up_to_64_rows_an_expert_then_tiles_of_more_rows(
    experts: int, hidden: int, inter: int
) -> None:
    for gemm in gemms(hidden, inter):
        for rows in ROWS:
            config = choose_config(experts * rows, experts, *gemm)
            assert config.decode == (rows <= 64)
            assert config.ctas == (2 if rows > 112 else 1)


@pytest.mark.parametrize("experts, hidden, inter", MODELS, ids=str)
def test_every_kind_of_rows_is_one_range(experts: int, hidden: int, inter: int) -> None:
    """What a warm-up relies on: more rows never come back to a configuration."""
    for gemm in gemms(hidden, inter):
        found = [choose_config(rows, experts, *gemm) for rows in range(1, 400 * experts, experts)]
        changes = [a for a, b in itertools.pairwise(found) if a != b]
        assert len(changes) == len(set(found)) - 1


def lost(rows: Callable[[int, int], list[int]], each: int) -> list[float]:
    """Forecast of what is chosen over that of the best of all tested configurations, less 1, of
    real models. Where replays do not find clusters of eight ahead, they do not take part."""
    out = []
    for experts, hidden, inter in MODELS[:-1]:
        for n, k, out_bytes in ((2 * inter, hidden, FP4_HIDDEN), (hidden, inter, 2.0)):
            counts = rows(each, experts)
            us = {
                c: forecast(c, counts, n, k, fp4_output=out_bytes < 1).us
                for c in MAIN + OTHER
                if not (c.decode and each > 128)
                and (c.cluster < 8 or (k in EIGHT_K and out_bytes > 1))
            }
            taken = us[choose_config(sum(counts), experts, n, k, out_bytes)]
            out.append(taken / min(us.values()) - 1)
    return out


def even(each: int, experts: int) -> list[int]:
    return [each] * experts


def uneven(each: int, experts: int) -> list[int]:
    """As a router leaves them: a standard deviation of 1.5 sqrt(rows)."""
    g = random.Random(1000 * each + experts)
    return [max(0, round(g.gauss(each, 1.5 * each**0.5))) for _ in range(experts)]


@pytest.mark.parametrize("rows", [even, uneven])
def test_the_forecast_finds_little_that_is_faster(rows: Callable[[int, int], list[int]]) -> None:
    """On average over the models, the forecast errs by more."""
    losses = {each: lost(rows, each) for each in (*range(8, 512, 24), 768, 1024, 4096)}
    means = {each: sum(found) / len(found) for each, found in losses.items()}
    assert max(means.values()) < 0.02, means
    assert sum(means.values()) / len(means) < 0.007, means


def test_choosing_by_bytes_alone_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "_PREFILL", config_module._PREFILL[:2])
    assert sum(lost(even, 1024)) / (2 * len(MODELS) - 2) > 0.02


def test_short_k_takes_the_larger_cluster_where_much_is_stored() -> None:
    pair, four, eight = (GemmConfig(2, 256, columns=columns) for columns in (1, 2, 4))
    assert choose_config(512 * 8, 8, 7168, 2048) == eight  # the fabric limits
    assert {choose_config(512 * 8, 8, 7168, k) for k in (512, 3072)} == {four}
    assert choose_config(512 * 8, 8, 7168, 7168, FP4_HIDDEN) == four  # the tensor pipe does
    assert choose_config(512 * 8, 8, 256, 2048) == pair  # a second pair would have no columns
    assert column_clocks(four, 1024, 2048, 2.0) < column_clocks(pair, 1024, 2048, 2.0)
    # sharing the weights instead moves as many bytes, over twice the rows
    weights = GemmConfig(2, 256, pairs=2)
    moved = column_clocks(weights, 4096, 2048, 2.0)
    assert moved == pytest.approx(2 * column_clocks(four, 4096, 2048, 2.0))


def test_clusters_that_run_at_once() -> None:
    assert [clusters_at_once(148, c) for c in (1, 2, 4, 8)] == [148, 74, 33, 15]
    assert clusters_at_once(4, 4) == clusters_at_once(1, 2) == 1


def test_bytes_in_flight() -> None:
    """Stages x bytes of a stage: what the latency of memory is hidden behind. A decode tile is
    counted with the fewest rows that it loads."""
    assert DECODE.stages * (DECODE.fixed_bytes + DECODE.step_bytes) >= 96 * 1024
    for config in MAIN:
        if not config.decode:
            assert config.stages * config.stage_bytes >= 150 * 1024, config.name


@pytest.mark.parametrize("config", MAIN + OTHER, ids=names)
def test_memory_of_a_cta_suffices(config: GemmConfig) -> None:
    assert config.stages >= 4
    assert config.stages * config.stage_bytes + 2048 <= SMEM_PER_CTA
    assert config.acc_columns + config.sf_columns <= TMEM_COLUMNS


@pytest.mark.parametrize(
    "bad",
    [
        {"ctas": 3}, {"tile_n": 96}, {"ctas": 2, "tile_n": 64}, {"pairs": 3}, {"columns": 3},
        {"pairs": 2, "columns": 2}, {"decode": True}, {"decode": True, "tile_n": 64, "pairs": 2},
    ],
    ids=str,
)  # fmt: skip
def test_configurations_that_do_not_exist_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be"):
        GemmConfig(**bad)


def test_names_are_distinct() -> None:
    assert len({c.name for c in MAIN + OTHER}) == len(MAIN + OTHER)
