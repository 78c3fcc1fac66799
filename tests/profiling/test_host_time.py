"""What the host does per call: every part is timed, nothing reaches a GPU, and a call launches and
allocates a known number of times."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe import Workspace
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


class Operations(TorchDispatchMode):
    """Names of the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@contextmanager
def warm_call(static: bool) -> Iterator[Callable[[], object]]:
    """A call whose kernels are known and whose scratch is planned."""
    moe = host_time.layer(static)
    moe.workspace = Workspace(moe.plan_memory(16))
    x, ids = torch.zeros(16, 512).bfloat16(), torch.zeros(16, 8, dtype=torch.int32)
    mix = torch.ones(16, 8)
    with torch.no_grad(), host_time.mocked_launches():
        for _ in range(2):
            moe.experts(x, ids, mix)
        yield lambda: moe.experts(x, ids, mix)


@pytest.mark.parametrize("static", [True, False])
def test_torch_launches_nothing_between_our_kernels(static: bool) -> None:
    """Scales are multiplied in front of them; the rest are views, and the result's memory."""
    with warm_call(static) as call, Operations() as seen:
        call()
    ours = [i for i, name in enumerate(seen.names) if name.startswith("nvfp4_megamoe.")]
    assert len(ours) == len(LAUNCHES[static])  # one operation quantises with two kernels
    between = set(seen.names[ours[0] : ours[-1]]) - {seen.names[i] for i in ours}
    free = {"aten.view.dtype", "aten.detach.default", "aten.as_strided.default"}
    assert between <= {*free, "aten.empty.memory_format"}
    assert seen.names[: ours[0]] == (["aten.mul.out"] if static else [])


@pytest.mark.parametrize("static, most", [(True, 225), (False, 255)])
def test_python_calls_of_a_call(static: bool, most: int) -> None:
    """Python functions entered per call: a measure of the host's work that no other load moves."""
    entered: list[str] = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            entered.append(frame.f_code.co_name)

    with warm_call(static) as call:
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
    assert 100 < len(entered) <= most, Counter(entered).most_common(12)


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
