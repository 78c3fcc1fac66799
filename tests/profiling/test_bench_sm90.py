"""`profiling.bench_sm90` without a GPU: goals, report, picture, what it says when it cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cute_kernels.sm90.config import DUO, TRIO
from profiling import bench_sm90, peers_sm90
from profiling.timing import Roofs

ROOFS = Roofs(4243e9, 707e12)


def result(case: str = "L1", rows: int = 384, us: float = 300.0) -> dict[str, Any]:
    made = bench_sm90.CASES[case]
    return {
        "case": case,
        "k": made.k,
        "n": made.rows,
        "rows": rows,
        "active_experts": 48.0,
        "weight_bytes": 48 * made.rows * made.k * 9 / 16,
        "flop": 2.0 * rows * made.rows * made.k,
        "times": {"ours": {"us": us}, "torch bf16": {"us": 2 * us}},
        "missing": {"humming": "ModuleNotFoundError: no module"},
        "hot_dense": None,
    }


def test_report_names_shares_of_the_roofs_and_who_is_missing() -> None:
    text = bench_sm90.report(result(), ROOFS)
    assert "goal 335.7 us" in text  # 1189 MB / (0.85 * 4243 GB/s) + 6 us
    assert "300.0 us   3964 GB/s of FP4 weights (0.93 copy)" in text
    assert "113 TFLOP/s (0.16 dense)" in text
    assert "humming        not run: ModuleNotFoundError: no module" in text


def test_hot_dense_rate_takes_the_place_of_the_cool_one() -> None:
    hot = {**result(rows=24576), "hot_dense": 600e12}
    assert bench_sm90.goal_us(hot, ROOFS) == pytest.approx(
        bench_sm90.goal_us(result(rows=24576), ROOFS) * 707 / 600
    )


def test_random_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    assert bench_sm90.random_counts(6, 48, generator).max() == 1  # one token's experts differ
    many = bench_sm90.random_counts(384, 48, generator)
    assert many.sum() == 384 and many.max() > 8
    assert bench_sm90.offsets_of(many)[-1] == 384


def test_picture_of_a_json_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = {"copy": ROOFS.copy, "dense": ROOFS.dense, "gpu": "a GPU"}
    found["results"] = [result(c, r) for c in ("L1", "L2") for r in (6, 384)]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(found))
    assert bench_sm90.main(["--draw", str(path)]) == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_peer_that_cannot_be_imported_says_so() -> None:
    with pytest.raises(peers_sm90.Unavailable, match="ModuleNotFoundError"):
        peers_sm90._import("a_library_that_is_not_there")


def test_without_a_hopper_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_sm90.main([]) == 1
    assert "needs a Hopper GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "raced"),
    [([], {"ours": None}), (["--configs", "trio", "duo"], {"trio": TRIO, "duo": DUO})],
    ids=["chosen", "named"],
)
def test_who_races(
    given: list[str], raced: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(bench_sm90, "measured_roofs", lambda device: ROOFS)
    monkeypatch.setattr(bench_sm90, "random_weight", lambda case, gated: None)

    def bench_case(case: bench_sm90.Case, rows: int, weight: None, *others: Any) -> dict[str, Any]:
        seen.append((case.name, rows, *others))
        return result(case.name, rows)

    monkeypatch.setattr(bench_sm90, "bench_case", bench_case)
    argv = ["--cases", "qwen-L1", "L2", "--rows", "6", "384", *given, "--peers"]
    assert bench_sm90.main(argv) == 0
    assert seen == [(c, r, raced, []) for c in ("qwen-L1", "L2") for r in (6, 384)]
