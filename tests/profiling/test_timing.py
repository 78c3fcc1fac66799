"""Order, medians, rotation; on a GPU graphs and what cannot be captured."""

from __future__ import annotations

import time

import pytest
import torch

from profiling.timing import Race, Times, device_state, l2_bytes, measured_roofs, rotations

CPU = torch.device("cpu")


def test_contestants_take_turns() -> None:
    calls: list[str] = []
    race = Race(CPU, rounds=2, warmup=1)
    for name in "ab":
        race.add(name, [lambda i=i, name=name: calls.append(f"{name}{i}") for i in range(2)])
    assert calls == ["a0", "b0"], "the first call of each is not timed"
    times = race.run()
    assert calls[2:] == ["a0", "a1", "b0", "b1"] * 3
    assert list(times) == ["a", "b"] and len(times["a"].samples) == 2
    assert times["a"].method == "wall"


def test_the_time_is_that_of_one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def work() -> None:
        clock[0] += 0.004

    race = Race(CPU, rounds=3, warmup=0)
    race.add("work", [work] * 3)
    assert race.run()["work"].samples == pytest.approx((4000.0,) * 3)


def test_median_and_quantiles() -> None:
    times = Times((5.0, 1.0, 100.0, 2.0, 3.0), "wall")
    assert times.median == 3.0 and times.quantile(0.0) == 1.0 and times.quantile(0.9) == 100.0
    row = times.as_json()
    assert row["us"] == 3.0 and row["rounds"] == 5 and "why" not in row
    assert Times((1.0,), "eager", "syncs").as_json()["why"] == "syncs"


def test_rotation_passes_the_cache() -> None:
    l2 = 50 << 20
    for size in (1 << 20, 10 << 20, 60 << 20, 1 << 30):
        sets = rotations(size, l2, most=1000)
        assert sets >= 2 and sets * size >= 3 * l2
    assert rotations(1, l2) == 64 == rotations(0, l2), "never more than asked for"
    assert rotations(1 << 30, l2) == 2 and rotations(100, 0) == 2
    assert l2_bytes(CPU) == 0


def test_errors() -> None:
    race = Race(CPU)
    with pytest.raises(ValueError, match="needs operations"):
        race.add("none", [])
    race.add("a", [lambda: None])
    with pytest.raises(ValueError, match="a name of its own"):
        race.add("a", [lambda: None])
    with pytest.raises(ValueError, match="rounds must be"):
        Race(CPU, rounds=0)
    with pytest.raises(RuntimeError, match="on a CUDA device"):
        measured_roofs(CPU)
    assert isinstance(device_state(), dict)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_graphs_on_a_gpu() -> None:
    device = torch.device("cuda")
    a = torch.randn(64 << 20, device=device)
    b = torch.empty_like(a)
    race = Race(device, rounds=5)
    race.add("copy", [lambda: torch.add(a, 1, out=b)] * 4)
    race.add("half", [lambda: torch.add(a[: 32 << 20], 1, out=b[: 32 << 20])] * 4)
    race.add("syncs", [lambda: float(torch.add(a, 1, out=b)[0])])
    times = race.run()
    assert times["copy"].method == times["half"].method == "graph"
    assert 1.6 < times["copy"].median / times["half"].median < 2.4
    assert times["syncs"].method == "eager" and times["syncs"].why
    assert torch.randn(4, device=device).unique().numel() == 4, "random numbers after a failure"
    roofs = measured_roofs(device, copy_bytes=512 << 20, size=2048)
    assert 1e11 < roofs.copy < 2e13 and 1e12 < roofs.dense < 1e16
