"""What the host does per call: every part is timed, nothing reaches a GPU, and a call launches and
allocates a known number of times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from profiling import host_time

pytest.importorskip("cutlass", reason="kernel objects are classes of the DSL")
LAUNCHES = {
    True: ["SortRoutes", "QuantizeRows", "GroupScales", "Sm100GroupedGemm", "Sm100GroupedGemm"],
    False: [
        *("SortRoutes", "QuantizeRows", "GroupScales", "Sm100GroupedGemm"),
        *("QuantizeHidden", "Sm100GroupedGemm"),
    ],
}


@pytest.mark.parametrize("static", [True, False])
def test_launches_and_allocations_of_a_call(static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    moe = host_time.layer(static)
    x, ids = torch.zeros(4, 512).bfloat16(), torch.zeros(4, 8, dtype=torch.int32)
    made: list[int] = []
    original = torch.empty

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        made.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    with torch.no_grad(), host_time.mocked_launches() as names:
        y = moe.experts(x, ids, torch.ones(4, 8))
    assert names == [*LAUNCHES[static], "Combine"]
    assert len(made) <= 16 and y.shape == (4, 512)


def test_every_part_is_timed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.json"
    host_time.main(["--tokens", "2", "--json", str(file)])
    times = json.loads(file.read_text())["us"]
    for kind in ("static gh", "one gh per row"):
        whole = times[kind].pop("MoE.experts")
        assert 0 < max(times[kind].values()) < whole
    assert "quantize_rows" in capsys.readouterr().out


def test_least_mean_of_a_batch() -> None:
    assert host_time.microseconds(lambda: sum(range(20000)), batch=5) > 10.0
