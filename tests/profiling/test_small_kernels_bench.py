"""`profiling.small_kernels_bench` without a GPU: its arguments reach the inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from profiling import small_kernels_bench


def test_arguments_reach_the_inputs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[Any, ...]] = []
    row = {"op": "router", "tokens": 1, "us": 7.0, "bytes": 1e6, "of_copy": 0.5}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(small_kernels_bench, "copy_rate", lambda: 4e12)
    monkeypatch.setattr(small_kernels_bench, "Shape", lambda *a: made.append(a))
    monkeypatch.setattr(small_kernels_bench, "bench", lambda shape, rate, only: [row])
    common = ["bench", "--tokens", "1", "128", "--hidden", "4096", "--top-k", "6"]
    monkeypatch.setattr("sys.argv", common)
    small_kernels_bench.main()
    monkeypatch.setattr("sys.argv", [*common, "--sets", "1"])
    small_kernels_bench.main()
    shapes = [(1, 4096, 256, 6), (128, 4096, 256, 6)]
    assert made == [(*s, sets) for sets in (small_kernels_bench.MOST_SETS, 1) for s in shapes]
    assert capsys.readouterr().out.count("router") == 4


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["bench"])
    with pytest.raises(SystemExit, match="1"):
        small_kernels_bench.main()
    assert "needs a CUDA GPU" in capsys.readouterr().err
