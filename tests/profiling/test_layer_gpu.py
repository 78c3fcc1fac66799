"""Goals of `profiling.layer_gpu` and the attribution of kernels to parts."""

from __future__ import annotations

import pytest

from profiling import layer_gpu
from profiling.timing import Roofs

H200 = Roofs(4243e9, 707e12)


@pytest.mark.parametrize(
    ("rows", "active", "n", "k", "us"),
    [(6, 6, 6144, 7168, 47), (384, 48, 6144, 7168, 336), (6, 6, 7168, 3072, 27),
     (384, 48, 7168, 3072, 171)],
)  # fmt: skip
def test_goals_of_few_rows(rows: int, active: int, n: int, k: int, us: float) -> None:
    goal, roof = layer_gpu.gemm_goal(rows, active, n, k, H200)
    assert goal == pytest.approx(us, abs=1) and roof == "weights"


def test_goal_of_many_rows_is_a_share_of_the_dense_rate() -> None:
    goal, roof = layer_gpu.gemm_goal(24576, 48, 6144, 7168, H200)
    assert roof == "dense"
    assert 2 * 24576 * 6144 * 7168 / goal * 1e6 == pytest.approx(0.88 * 707e12)


def test_a_layer_adds_the_rest() -> None:
    assert layer_gpu.Goal(10.0, 5.0, ("weights", "dense")).layer == 10 + 5 + 25


def test_without_a_gpu_it_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    if layer_gpu.main(["--backend", "sm100"]) == 2:
        assert "backend 'sm100' cannot run" in capsys.readouterr().err
