"""Timelines: rows and names of the SM100 kernel, slices that fit together, the two formats."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest

from cute_kernels import compile as compiler
from cute_kernels.config import GemmConfig
from profiling import timeline
from profiling.timeline import Slice, Timeline, covered, perfetto
from profiling.timeline_sim import Specimen, config_of, prepare, simulated

simulator = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)


def made() -> Timeline:
    return Timeline(
        "t", "clk",
        (
            Slice(0, "mma", "run", "run", 0, 10), Slice(0, "mma", "wait", "ab_full[0]", 10, 30),
            Slice(0, "tensor", "async", "mma", 5, 20), Slice(0, "tensor", "async", "mma", 15, 20),
            Slice(1, "load", "run", "run", 0, 100), Slice(0, "load", "run", "run", 2, 3),
            Slice(0, "epilogue 10", "run", "run", 1, 1), Slice(0, "epilogue 2", "run", "run", 1, 1),
        ),
    )  # fmt: skip


def test_rows_stand_in_the_order_of_the_data() -> None:
    assert made().rows() == [
        (0, "load"), (0, "mma"), (0, "epilogue 2"), (0, "epilogue 10"), (0, "tensor"), (1, "load"),
    ]  # fmt: skip


def test_busy_and_cut() -> None:
    busy = made().busy()
    assert busy[0, "mma"] == 0.1 and busy[0, "tensor"] == 0.3 and busy[1, "load"] == 1.0
    assert covered([(0, 4), (2, 3), (6, 7)]) == 5 and covered([]) == 0
    part = made().cut(8, 20)
    assert all(s.start >= 8 and s.end <= 20 for s in part.slices)
    (wait,) = (s for s in part.slices if s.kind == "wait")
    assert (wait.start, wait.end) == (10, 20)
    assert Timeline("t", "ns", ()).end == 0


def test_perfetto_keeps_every_slice_and_no_row_overlaps() -> None:
    data = perfetto(made())
    slices = [e for e in data["traceEvents"] if e["ph"] == "X"]
    assert len(slices) == len(made().slices)
    for _, group in itertools.groupby(sorted(slices, key=lambda e: e["tid"]), lambda e: e["tid"]):
        spans = sorted((e["ts"], e["ts"] + e["dur"]) for e in group)
        assert all(b <= c for (_, b), (c, _) in itertools.pairwise(spans))
    names = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"load", "mma", "epilogue 2", "epilogue 10", "tensor"}
    assert data["otherData"]["clock"] == "modelled clocks of a B200: a forecast"
    ns = perfetto(dataclasses.replace(made(), clock="ns"))["traceEvents"]
    assert max(e["dur"] for e in ns if e["ph"] == "X") == 0.1, "microseconds of a measured clock"


CONFIGS = [GemmConfig(1, 128), GemmConfig(2, 256), GemmConfig(2, 128, 2)]
CONFIGS.append(GemmConfig(2, 256, dynamic=True))


@simulator
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_the_kernel_in_the_simulator(config: GemmConfig) -> None:
    """Two tiles of one expert: what each role does is there, under the names of the barriers."""
    rows = config.cluster * 128
    specimen = Specimen(config, (rows,), 2 * config.tile_n, 512)
    drawn = simulated(specimen)
    assert drawn.clock == "steps" and "sm100_gemm" in drawn.title
    count = [s.name for s in drawn.slices if s.kind == "async"].count
    k_tiles, tiles = 2, 2
    assert count("mma") == tiles * k_tiles * 4 * config.pairs  # 4 MMAs of K 64, by the leaders
    assert {s.cta for s in drawn.slices} == set(range(config.cluster))
    waits = {(s.row, s.name.partition("[")[0]) for s in drawn.slices if s.kind == "wait"}
    assert {("mma", "ab_full"), ("epilogue 0", "acc_full"), ("load", "work_full")} <= waits
    assert any(s.row == "schedule" and s.kind == "run" for s in drawn.slices)
    assert ("load", "acc_full") not in waits and ("mma", "ab_empty") not in waits
    rows_of = {s.row for s in drawn.slices if s.kind == "async"}
    assert {"tma", "tensor", "cp"} <= rows_of
    assert all(s.duration >= 0 and s.end <= drawn.end for s in drawn.slices)


@simulator
def test_gathered_rows_and_the_activation() -> None:
    plain = Specimen(GemmConfig(), (5, 130), 64, 256, activated=True)
    drawn = simulated(dataclasses.replace(plain, gathered=True))
    loads = [sum(s.row == "tma" for s in d.slices) for d in (drawn, simulated(plain))]
    assert "gather" in drawn.title and loads[0] > 2 * loads[1], "rows are loaded a few at a time"
    assert any(s.row.startswith("load 1") for s in drawn.slices), "several warps gather"


@simulator
def test_the_schedule_changes_the_order_not_the_work() -> None:
    def work(drawn: Timeline) -> int:
        return sum(s.kind == "async" and s.name in ("mma", "cp") for s in drawn.slices)

    specimen = Specimen(GemmConfig(), (40,), 128, 512)
    lazy, random = simulated(specimen), simulated(specimen, "random", 3)
    assert work(lazy) == work(random) > 0 and lazy.slices != random.slices


@simulator
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, png = tmp_path / "t.json", tmp_path / "t.png"
    arguments = ["sim", "--config", "ctas=1,tile_n=128", "--rows", "20", "--n", "128", "--k", "256"]
    assert timeline.main([*arguments, "--json", str(out), "--png", str(png)]) == 0
    shown = capsys.readouterr().out
    assert "epilogue 3" in shown and "order, not time" in shown
    assert json.loads(out.read_text())["traceEvents"] and png.read_bytes()[:4] == b"\x89PNG"
    assert timeline.main([*arguments, "--png", str(png), "--from", "1e9"]) == 2
    assert "nothing to draw" in capsys.readouterr().err


def test_errors() -> None:
    assert config_of("ctas=2,tile_n=128,pairs=2") == GemmConfig(2, 128, 2)
    with pytest.raises(ValueError, match="--config takes"):
        config_of("tile_m=3")
    with pytest.raises(ValueError, match="n a multiple of 16"):
        Specimen(GemmConfig(), (4,), 40, 256)
    assert timeline.main(["sim", "--k", "33"]) == 2


@simulator
def test_the_simulated_launch_writes_its_output() -> None:
    """The operands are in the right places: a wrong argument list would leave zeros or fault."""
    from cute_kernels import sim

    kernel, launch = prepare(Specimen(GemmConfig(), (3,), 64, 256))
    with sim.Simulator(schedule="lazy") as s:
        launch()
    assert s.launches[0].counters.total()["global_store_bytes"] == 3 * 64 * 2
    assert s.launches[0].name.startswith(kernel.name)
