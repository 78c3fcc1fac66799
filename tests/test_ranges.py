"""Ranges of the stages: names, order and nesting; nothing without `emit`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch

from cute_kernels import compile as compiler
from moe import MoE, ranges
from tests.layers import unit_layer

EXPERTS = ["moe.route", "moe.quantize", "moe.l1", "moe.quantize", "moe.l2", "moe.combine"]


class Recorder:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.open = 0

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        assert self.open == 0, "stages do not nest"
        self.names.append(name)
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


def layer(backend: str = "torch") -> tuple[MoE, torch.Tensor]:
    router = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    return unit_layer(64, 64, 4, 2, backend=backend, router_weight=router), x


def backends() -> list[object]:
    missing = pytest.mark.skipif(
        not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
    )
    return ["torch", pytest.param("sim", marks=missing)]


@pytest.mark.parametrize("backend", backends())
def test_every_stage_has_its_range(backend: str) -> None:
    moe, x = layer(backend)
    seen = Recorder()
    with ranges.emit(seen):
        y = moe(x)
    assert seen.names == ["moe.route", *EXPERTS]  # the router, then sorting
    assert set(seen.names) == set(ranges.STAGES) and not seen.open
    assert torch.equal(y, moe(x)), "ranges change no value"
    assert len(seen.names) == 1 + len(EXPERTS), "nothing after emit"


def test_a_failing_stage_closes_its_range() -> None:
    moe, x = layer()
    seen = Recorder()
    ids = torch.zeros(4, 2, dtype=torch.int32)
    with ranges.emit(contextlib.nullcontext), ranges.emit(seen):
        moe.experts(x, ids, ids.float())
    assert seen.names == EXPERTS, "the innermost emit counts"
    with pytest.raises(ZeroDivisionError), ranges.emit(seen), ranges.stage("moe.l1"):
        raise ZeroDivisionError
    assert not seen.open
    assert ranges.stage("moe.l1") is ranges.stage("moe.l2"), "emit has ended"


def test_other_threads_are_not_concerned() -> None:
    seen = Recorder()
    moe, x = layer()
    with ranges.emit(seen):
        thread = threading.Thread(target=lambda: moe(x))
        thread.start()
        thread.join()
    assert seen.names == []


def test_profilers_see_the_ranges() -> None:
    """torch's own profiler, through record_function."""
    moe, x = layer()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with (
        torch.profiler.profile(activities=cpu) as profile,
        ranges.emit(torch.profiler.record_function),
    ):
        moe(x)
    assert {e.key for e in profile.key_averages()} >= set(ranges.STAGES)
