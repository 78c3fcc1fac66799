"""profiling.bench_ep: skewed routings, the formulas, and one run on two ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import Capacity, MoEConfig
from moe.parallel import split_experts
from profiling import bench_ep
from tests.parallel.ranks import run_ranks, values

CFG = MoEConfig(64, 64, 32, 6)


@pytest.mark.parametrize(("ranks", "skew"), [(4, 1.0), (4, 2.0), (8, 4.0), (2, 1.5)])
def test_a_skew_is_what_was_asked_for(ranks: int, skew: float) -> None:
    bounds = split_experts(32, ranks)
    favour = bench_ep.favour_for(skew, CFG, bounds)
    assert favour is not None
    ids = bench_ep.draw(4096, CFG, bounds[0][1], favour, torch.Generator().manual_seed(5))
    assert abs(bench_ep.skew_of(ids, bounds) - skew) < 0.1 * skew
    assert all(len(set(row)) == 6 for row in ids[:100].tolist())


def test_a_skew_that_cannot_be_is_left_out() -> None:
    assert bench_ep.favour_for(4.0, CFG, split_experts(32, 2)) is None  # twice is the most
    assert bench_ep.favour_for(7.0, CFG, split_experts(32, 8)) is None  # 4 experts for 6 slots
    ids = torch.tensor([[0, 1, 2], [0, 1, 31]])
    assert bench_ep.skew_of(ids, split_experts(32, 2)) == pytest.approx(5 / 6 * 2)


def test_places_hold_the_skew() -> None:
    mode = bench_ep.Setting(100, 2.0, "places").exchange(CFG, 8)
    assert mode.capacity == Capacity(100, 300)
    assert bench_ep.Setting(100, 2.0, "summed").exchange(CFG, 8).pre_reduce


def bench(rank: int, size: int, path: str) -> int:
    args = argparse.Namespace(
        shape=[64, 64, 6, 2],
        tokens=[3],
        skews=[1.0, 5.0],
        modes=["counts", "places"],
        backend="torch",
        repeats=1,
        json=Path(path),
    )
    return bench_ep.run(args)


def test_two_ranks(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    assert values(run_ranks(2, bench, str(file), path=tmp_path / "ranks")) == [0, 0]
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["ranks"] == 2 and result["device"] == "CPU, gloo"
    assert [r["mode"] for r in result["rows"]] == ["counts", "places"]  # 5x cannot be
    for row in result["rows"]:
        assert row["bytes"] == row["formula"] > 0
        assert all(row[f"{c}_us"] > 0 for c in bench_ep.COLUMNS)
