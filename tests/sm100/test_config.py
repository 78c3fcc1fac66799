"""Configurations: what is chosen, what fits, what is refused."""

from __future__ import annotations

import pytest

from cute_kernels.config import (
    SMEM_PER_CTA,
    TMEM_COLUMNS,
    GemmConfig,
    choose_config,
    clusters_at_once,
    tile_bytes,
)
from tests.sm100.configs import DECODE, MAIN, OTHER, names

# (experts of a rank, hidden, intermediate) of model families, gated and not
MODELS = [
    (48, 7168, 3072), (32, 7168, 2048), (256, 7168, 2048), (16, 4096, 1536), (128, 2880, 2880),
    (128, 2048, 768), (8, 4096, 14336), (64, 2688, 1856), (160, 5120, 1536), (512, 1536, 704),
    (4, 128, 96),
]  # fmt: skip
ROWS = (1, 3, 8, 16, 40, 64, 65, 100, 128, 129, 300, 512, 1024, 4096)


def chosen() -> set[GemmConfig]:
    found = set()
    for experts, hidden, inter in MODELS:
        for n in (hidden, inter, 2 * inter):
            found |= {choose_config(experts * rows, experts, n) for rows in ROWS}
            found.add(choose_config(1, experts, n))
    return found


def test_choice_stays_within_the_tested_configurations() -> None:
    assert chosen() == set(MAIN)
    assert len(MAIN) <= 12


@pytest.mark.parametrize("experts, hidden, inter", MODELS, ids=str)
def test_decode_up_to_64_rows_an_expert_then_tiles_of_more_rows(
    experts: int, hidden: int, inter: int
) -> None:
    for n in (hidden, 2 * inter):
        for rows in ROWS:
            config = choose_config(experts * rows, experts, n)
            assert config.decode == (rows <= 64)
            assert config.ctas == (2 if rows > 128 else 1)


def test_prefill_shares_rows_where_that_moves_fewer_bytes() -> None:
    pair, four = GemmConfig(2, 256), GemmConfig(2, 256, columns=2)
    assert choose_config(512 * 8, 8, 4096) == four
    assert tile_bytes(four, 4096) == 0.75 * tile_bytes(pair, 4096)
    assert choose_config(512 * 8, 8, 256) == pair  # the second pair would have no columns
    assert choose_config(512 * 8, 8, 768) == pair  # as many bytes, one idle tile
    assert choose_config(512 * 8, 8, 1280) == four
    # sharing the weights instead moves as many bytes, over twice the rows
    weights = GemmConfig(2, 256, pairs=2)
    assert tile_bytes(weights, 4096) == 2 * tile_bytes(four, 4096)


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
