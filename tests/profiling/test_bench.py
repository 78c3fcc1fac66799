"""The bench on a model small enough for a CPU, its files, and the comparison of two of them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import MoE, ranges
from moe.explain import MODELS
from profiling import bench, workload
from profiling.roofline import Share
from profiling.workload import Case, Workload
from tests.checkpoints import QWEN, expert_tensors, layer, write

CPU = torch.device("cpu")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A checkpoint of a few experts, 64 wide: as a case it is named by its path."""
    return str(write(tmp_path / "model", expert_tensors(layer()), QWEN))


def run_bench(model: str, folder: Path, *more: str) -> tuple[int, dict[str, Any]]:
    out = folder / "bench.json"
    arguments = ["--case", model, "--tokens", "1", "3", "--rounds", "2", "--sets", "2",
                 "--device", "cpu", "--json", str(out), *more]  # fmt: skip
    return bench.main(arguments), json.loads(out.read_text())


def test_bench_on_a_cpu(model: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    png = tmp_path / "b.png"
    backends = ("--backends", "auto", "torch", "reference", "sm90")
    status, saved = run_bench(model, tmp_path, *backends, "--png", str(png))
    assert status == 0 and png.read_bytes().startswith(b"\x89PNG")
    rows = saved["rows"]
    assert [(r["tokens"], r["backend"]) for r in rows] == [
        (t, b) for t in (1, 3) for b in ("torch", "reference", "sm90")
    ], "auto is torch here, once"
    for row in rows:
        if row["backend"] == "sm90":
            assert "cannot run on cpu" in row["skipped"] and "us" not in row
            continue
        assert row["method"] == "wall" and 0 < row["us_p10"] <= row["us"] <= row["us_p90"]
        assert row["flop"] == sum(s["flop"] for s in row["stages"]) > 0
        assert row["bytes"] == sum(s["bytes"] for s in row["stages"]) > 0
        assert "roof_us" not in row, "a CPU has no roof here"
        timed = {s["name"] for s in row["stages"] if "us" in s}
        everything = {"route", "quantize", "L1", "L2", "combine"}
        assert timed == (everything if row["backend"] == "torch" else set())
    assert saved["machine"]["torch"] == torch.__version__
    shown = capsys.readouterr().out
    assert "skipped" in shown and "time of one call" in shown and "combine" in shown


def test_flows_and_shares_of_ranks(model: str, tmp_path: Path) -> None:
    status, saved = run_bench(model, tmp_path, "--ranks", "2", "--h-scale", "per_row")
    per_row = saved["rows"][0]
    assert status == 0 and per_row["h_scale"] == "per_row" and per_row["ranks"] == 2
    _, saved = run_bench(model, tmp_path, "--ranks", "2")
    assert saved["rows"][0]["bytes"] < per_row["bytes"], "accumulators go through memory"


def test_the_share_of_a_rank() -> None:
    """Every token of a call has a row here; the mean share is that of the calls."""
    case = Case("qwen3-30b-a3b", tokens=3, ranks=64)
    calls = [workload.make_call(case, CPU, seed) for seed in range(20)]
    for call in calls:
        local = call.ids < case.experts
        assert bool(local.any(dim=-1).all()) and len(call.x) <= 3 * 64
        assert all(len(set(row)) == len(row) for row in call.ids.tolist())
        assert torch.allclose(call.weights.sum(-1), torch.ones(len(call.x)))
    mean = sum(Share.of(c.ids, 0, case.experts).rows for c in calls) / len(calls)
    assert abs(mean - 3 * 8) < 4
    assert len(workload.make_call(Case("qwen3-30b-a3b", 1, 128), CPU, 1).x) >= 1


def test_a_layer_is_made_once() -> None:
    """Token counts share it: making one draws its weights, on Hopper packs them too."""
    layers: dict[str, MoE] = {}
    options, made = bench.Options(rounds=1, most_sets=2, stages=False), []
    for tokens in (1, 2):
        case = Case("qwen3-30b-a3b", tokens, ranks=128)
        (row,) = bench.bench(case, ["torch"], CPU, options, layers)
        assert row["tokens"] == tokens and row["us"] > 0
        made.append(layers["torch"])
    assert made[0] is made[1]
    work = Workload(case, "torch", CPU, 2, made[0])
    assert work.layer is made[0] and work.flow == "static"


def test_random_weights_are_valid() -> None:
    case = Case("qwen3-30b-a3b", 2, ranks=128)
    work = Workload(case, "torch", CPU, most=2)
    y = work.calls[0].run(work.layer)
    assert torch.isfinite(y).all() and float(y.float().norm()) > 0
    assert len(work.calls) == 2 and work.layer.weights.gh is not None
    per_row = workload.random_weights(Case("qwen3-30b-a3b", 2, 128, "per_row"), CPU)
    assert per_row.gh is None


def test_cases_refuse_what_cannot_be() -> None:
    for wrong in ({"ranks": 7}, {"ranks": 0}, {"tokens": 0}):
        with pytest.raises(ValueError, match="ranks must divide"):
            Case(**({"model": "qwen3-30b-a3b", "tokens": 1} | wrong))
    assert bench.main(["--backends", "sim", "--device", "cpu"]) == 2
    assert bench.main(["--case", "no-such-model", "--device", "cpu"]) == 2


def result(**changes: Any) -> dict[str, Any]:
    stages = [{"name": s, "us": 2.0} for s in ranges.STAGES]
    row = {"case": "m", "ranks": 1, "tokens": 8, "backend": "torch", "h_scale": "static",
           "activations": "nvfp4", "us": 10.0, "stages": stages}  # fmt: skip
    return {"machine": {"device": "cpu"}, "rows": [row | changes]}


def compared(folder: Path, a: dict, b: dict) -> int:
    for name, content in (("a.json", a), ("b.json", b)):
        (folder / name).write_text(json.dumps(content))
    return bench.main(["--compare", str(folder / "a.json"), str(folder / "b.json")])


def test_compare_prints_ratios(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    slower = copy.deepcopy(result(us=25.0))
    slower["rows"][0]["stages"][2]["us"] = 3.0
    assert compared(tmp_path, result(), slower) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "│ m" in x)
    cells = [c.strip() for c in line.strip("│ ").split("│")]
    assert cells == ["m", "1", "8", "torch", "10.0", "25.0", "2.500",
                     "1.00", "1.00", "1.50", "1.00", "1.00"]  # fmt: skip


def test_compare_wants_the_same_row(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for other in ({"tokens": 9}, {"backend": "sm90"}, {"h_scale": "per_row"}):
        assert compared(tmp_path, result(), result(**other)) == 2
        assert "no timed row in common" in capsys.readouterr().err
    extra = result()
    extra["rows"] += result(tokens=9)["rows"]
    assert compared(tmp_path, result(), extra) == 0
    assert "b.json: 1 rows not timed in the other file" in capsys.readouterr().out


def test_the_workload_as_a_program(model: str, capsys: pytest.CaptureFixture) -> None:
    arguments = ["--case", model, "--tokens", "3", "--device", "cpu", "--calls", "1"]
    assert workload.main(arguments) == 0
    assert "backend torch" in capsys.readouterr().out
    assert workload.main([*arguments, "--nvtx"]) == 2
    assert "--nvtx needs a CUDA device" in capsys.readouterr().err


def test_models_are_cases() -> None:
    for name, cfg in MODELS.items():
        assert Case(name, 1).experts == cfg.num_experts
