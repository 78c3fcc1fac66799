"""The plan that `python -m moe explain` prints, against the kernels' own choices and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_kernels import compile as compiler
from cute_kernels.config import FP4_HIDDEN, SMEM_PER_CTA, GemmConfig, choose_config
from moe import __main__ as cli
from moe.explain import MODELS
from profiling import plan as plans
from profiling.plan import counts_of, make_plan, measured
from profiling.roofline import PEAKS, Share

PRO = MODELS["deepseek-v4-pro"]


@pytest.mark.parametrize("tokens", [1, 64, 2048, 8192])
def test_the_choice_is_the_kernels_own(tokens: int) -> None:
    plan = make_plan(PRO, tokens, ranks=8, gpu="b200")
    share = Share.expected(PRO, tokens, 8)
    for name, n, k, out_bytes in (("L1", 2 * 3072, 7168, FP4_HIDDEN), ("L2", 7168, 3072, 2.0)):
        config = choose_config(round(share.rows), 48, n, k, out_bytes)
        gemm = plan.gemms[name]
        assert gemm.kernel == f"sm100 {config.name}" and gemm.stages == config.stages
        assert gemm.in_flight >= 96 * 1024, "less would not fill the memory system"
        assert gemm.n == n and gemm.tiles >= gemm.waves >= 1


def test_tiles_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 rows on 2 experts, K 256, N 300: 3 and 1 row tiles of 256, 2 column tiles of 256."""
    monkeypatch.setattr(plans, "choose_config", lambda *sizes: GemmConfig(2, 256))
    gemm = plans.blackwell_gemm("L1", (300, 256), [744, 256], 148, False)
    assert gemm.tile == (256, 256, 256) and gemm.cluster == 2
    assert gemm.tiles == (3 + 1) * 2 and gemm.waves == 1
    assert plans.blackwell_gemm("L1", (300, 256), [744, 256], 4, False).waves == 4


def test_rows_are_spread_evenly() -> None:
    assert counts_of(Share(5, 10, 3.2, 0), 5) == [4, 3, 3, 0, 0]
    assert counts_of(Share(0, 0, 0.0, 0), 2) == [0, 0]


CONFIGS = [GemmConfig(), GemmConfig(1, 64), GemmConfig(2, 256), GemmConfig(2, 128, 2)]
CONFIGS.append(GemmConfig(1, 64, decode=True))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_memory_adds_up(config: GemmConfig) -> None:
    shared = plans.shared_memory(config)
    assert sum(shared.values()) == SMEM_PER_CTA and min(shared.values()) >= 0
    operands = sum(v for k, v in shared.items() if "codes" in k or "scales" in k)
    assert operands == config.stages * config.stage_bytes
    columns = plans.tensor_memory(config)
    assert sum(columns.values()) == 512 and min(columns.values()) >= 0


@pytest.mark.skipif(not compiler.simulated(), reason="the simulator needs the DSL and a C compiler")
@pytest.mark.parametrize("config", [CONFIGS[0], CONFIGS[-1]], ids=lambda c: c.name)
def test_the_kernel_asks_for_this_shared_memory(config: GemmConfig) -> None:
    from cute_kernels import sim
    from cute_kernels.device.lanes import SCRATCH
    from cute_kernels.sm100.grouped_gemm import EPILOGUE_WARPS
    from cute_kernels.sm100.schedule import DEPTH, WORDS
    from profiling.timeline_sim import Specimen, prepare

    _, launch = prepare(Specimen(config, (3,), 128, 256))
    with sim.Simulator(schedule="lazy") as s:
        launch()
    shared = plans.shared_memory(config)
    assert plans.RING_BYTES == DEPTH * (2 * 8 + 4 * WORDS)
    assert plans.EXCHANGE_BYTES == 4 * EPILOGUE_WARPS * SCRATCH
    used = sum(shared.values()) - shared["free"]
    assert used <= s.launches[0].smem_bytes <= used + 4096, "alignment, and nothing else"


def test_hopper_has_its_own_kernels() -> None:
    plan = make_plan(PRO, 1, ranks=8, gpu="h200", flow="bf16")
    assert {g.kernel for g in plan.gemms.values()} == {"sm90 decode"}
    large = make_plan(PRO, 8192, ranks=8, gpu="h200")
    assert large.gemms["L1"].kernel == "sm90 prefill"
    for gemm in (*plan.gemms.values(), *large.gemms.values()):
        assert min(gemm.shared.values()) >= 0 and gemm.forecast is None
    assert plans.notes(plan) == ["no forecast for H200: roofs only, which no kernel reaches"]


def test_every_model_has_a_plan() -> None:
    for cfg in MODELS.values():
        for gpu in PEAKS:
            for flow in ("static", "per_row"):
                plan = make_plan(cfg, 3, 1, gpu, flow)
                assert [s.name for s in plan.work if s.flop] == ["L1", "L2"]
                assert len(plans.tables(plan)) == 3


def test_measured_times_are_those_of_the_case() -> None:
    row = {"case": "m", "tokens": 8, "ranks": 1, "us": 20.0, "stages": [{"name": "L1", "us": 3.0}]}
    rows = [row, {**row, "us": 10.0, "stages": [{"name": "L1", "us": 2.0}, {"name": "L2"}]},
            {**row, "tokens": 9}, {k: v for k, v in row.items() if k != "us"}]  # fmt: skip
    assert measured(rows, "m", 8, 1) == {"L1": 2.0, "call": 10.0}, "the fastest backend"
    with pytest.raises(ValueError, match="no timed row for m, 8 tokens, 2 ranks"):
        measured(rows, "m", 8, 2)


def test_explain(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    arguments = ["explain", "--case", "deepseek-v4-pro", "--tokens", "64", "--ranks", "8"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    for part in ("decode_128x64x256", "shared: M codes", "TMEM: scales", "8 TB/s", "waves",
                 "forecast"):  # fmt: skip
        assert part in shown, part
    stage = [{"name": "L1", "us": 123.4}]
    row = {"case": "deepseek-v4-pro", "tokens": 64, "ranks": 8, "us": 456.7, "stages": stage}
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"rows": [row]}))
    assert cli.main([*arguments, "--measured", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "123.4" in shown and "measured: 456.7 us a call" in shown
    assert cli.main([*arguments[:-1], "7", "--gpu", "h200"]) == 2
    assert "ranks must divide" in capsys.readouterr().err


def test_a_forecast_is_labelled() -> None:
    """Of a B200 and of nothing else, with its range and what limits."""
    plan = make_plan(PRO, 64, 8, "b200")
    forecasts = [plan.gemms[name].forecast for name in ("L1", "L2")]
    assert all(f is not None and f.low < f.us < f.high for f in forecasts)
    assert "modelled, not measured" in plans.notes(plan)[0]
    column = next(c for c in plans.tables(plan)[0].columns if c.header == "forecast us")
    want = [f"{f.low:.0f}..{f.us:.0f}..{f.high:.0f}, {f.limit}" for f in forecasts]
    assert [c for c in column.cells if c] == want
    for gpu in set(PEAKS) - {"b200"}:
        assert all(g.forecast is None for g in make_plan(PRO, 64, 8, gpu).gemms.values())


def test_waves_count_the_clusters_that_fit() -> None:
    """Clusters of four: 33 at a time on the 148 SMs of a B200, not 37."""
    plan = make_plan(PRO, 8192, 8, "b200")
    gemm = plan.gemms["L1"]
    assert gemm.cluster == 4 and gemm.waves == -(-gemm.tiles // 33)
    assert gemm.forecast is not None and gemm.waves == gemm.forecast.waves
