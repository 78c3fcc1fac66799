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
    bounds = tuple(split_experts(32, ranks))
    favour = bench_ep.favour_for(skew, CFG, bounds)
    assert favour is not None
    ids = bench_ep.draw(4096, CFG, bounds[0][1], favour, torch.Generator().manual_seed(5))
    assert abs(bench_ep.skew_of(ids, bounds) - skew) < 0.1 * skew
    assert all(len(set(row)) == 6 for row in ids[:100].tolist())


def test_a_skew_that_cannot_be_is_left_out() -> None:
    assert bench_ep.favour_for(4.0, CFG, tuple(split_experts(32, 2))) is None  # twice is the most
    assert (
        bench_ep.favour_for(7.0, CFG, tuple(split_experts(32, 8))) is None
    )  # 4 experts for 6 slots
    ids = torch.tensor([[0, 1, 2], [0, 1, 31]])
    assert bench_ep.skew_of(ids, split_experts(32, 2)) == pytest.approx(5 / 6 * 2)


def test_places_hold_the_skew() -> None:
    mode = bench_ep.Setting(100, 2.0, "places").exchange(CFG, 8)
    assert mode.capacity == Capacity(100, 150 + 74)  # six times the root of the mean
    assert bench_ep.Setting(1, 1.0, "places").exchange(CFG, 8).capacity == Capacity(1, 6)
    assert bench_ep.Setting(100, 2.0, "summed").exchange(CFG, 8).pre_reduce


def bench(rank: int, size: int, path: str) -> int:
    args = argparse.Namespace(
        shape=[64, 64, 6, 2],
        tokens=[3],
        skews=[1.0, 5.0],
        modes=list(bench_ep.MODES),
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
    assert [r["mode"] for r in result["rows"]] == list(bench_ep.MODES)  # 5x cannot be
    for row in result["rows"]:
        if row["mode"] == "replicated":
            assert row["bytes"] is None and row["formula"] is None
        else:
            assert row["bytes"] == row["formula"] > 0
        assert row["how"] == "eager"  # no graphs on a CPU
        nothing = ("wait", "dispatch") if row["mode"] == "replicated" else ("wait",)
        assert all(row[f"{c}_us"] > 0 for c in bench_ep.COLUMNS if c not in nothing)
        parts = sum(row[f"{c}_us"] for c in bench_ep.PHASES)
        assert row["layer_us"] > 0.5 * parts


def test_columns() -> None:
    """The rank that comes last to the combine does not wait there."""
    one = {"dispatch": 3.0, "experts": 10.0, "combine": 2.0, "layer": 15.0, "host": 1.0}
    two = {"dispatch": 4.0, "experts": 5.0, "combine": 6.5, "layer": 15.5, "host": 2.0}
    late = {k: 2 * v for k, v in one.items()}
    want = {"dispatch": 4.0, "experts": 10.0, "combine": 2.0, "wait": 4.5, "layer": 15.5, "host": 2}
    got = bench_ep.columns([[one, two], [one, two], [late, late]])
    assert got == {f"{k}_us": v for k, v in want.items()}
