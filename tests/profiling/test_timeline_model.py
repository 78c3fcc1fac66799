"""Timelines in modelled clocks: the times of the replay, nothing lost, nothing at two places."""

from __future__ import annotations

import itertools

import pytest

from cute_kernels import compile as compiler
from cute_kernels.config import GemmConfig
from profiling import timeline
from profiling.model_constants import Machine
from profiling.timeline_model import modelled
from profiling.timeline_sim import Specimen, simulated

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)
CASE = Specimen(GemmConfig(2, 256), (256,), 512, 1024)


def test_a_warp_does_one_thing_at_a_time() -> None:
    drawn = modelled(CASE)
    assert drawn.clock == "clk" and drawn.end > 0
    warps = [k for k in drawn.rows() if k[1].partition(" ")[0] in timeline.ROLES]
    assert {row for _, row in warps} >= {"load", "mma", "epilogue 0", "epilogue 3"}
    for key in warps:
        mine = sorted((s.start, s.end) for s in drawn.slices if (s.cta, s.row) == key)
        assert all(b <= c + 1e-6 for (_, b), (c, _) in itertools.pairwise(mine)), key
        covered = timeline.covered(mine)
        assert covered == pytest.approx(mine[-1][1], rel=1e-6), f"{key} has holes"


def test_the_work_is_that_of_the_simulated_run() -> None:
    def work(drawn: timeline.Timeline) -> dict[str, int]:
        names = [s.name for s in drawn.slices if s.kind == "async"]
        return {n: names.count(n) for n in ("mma", "cp", "commit", "load")}

    counted = work(modelled(CASE))
    assert counted == work(simulated(CASE)) and counted["mma"] == 2 * 4 * 4


def test_the_tensor_pipe_works_for_the_published_interval() -> None:
    """M 256, N 256, K 64: 128 clocks each, one after another."""
    spans = sorted((s.start, s.end) for s in modelled(CASE).slices if s.name == "mma")
    assert all(b - a == pytest.approx(128) for a, b in spans)
    assert all(b <= c + 1e-6 for (_, b), (c, _) in itertools.pairwise(spans))


def test_waits_name_their_barrier_and_constants_matter() -> None:
    drawn = modelled(CASE)
    waits = {(s.row, s.name.partition("[")[0]) for s in drawn.slices if s.kind == "wait"}
    assert {("mma", "ab_full"), ("epilogue 0", "acc_full"), ("load", "ab_empty")} <= waits
    slower = modelled(CASE, Machine().with_(fabric=3.0))
    assert slower.end > 1.5 * drawn.end, "a quarter of the fabric"


def test_command_line(capsys: pytest.CaptureFixture) -> None:
    arguments = ["sim", "--clock", "model", "--config", "tile_n=64", "--rows", "20", "--n", "64"]
    assert timeline.main([*arguments, "--k", "256"]) == 0
    assert "modelled clocks of a B200: a forecast" in capsys.readouterr().out
