"""Notes of failures in a store, and stores that do not answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe import ExpertParallel, failures
from moe import parallel as parallel_module
from moe.failures import Note, Notes, RankError, Watch
from tests.parallel.ranks import GROUP_TIMEOUT, run_ranks, values

CPU = torch.device("cpu")


def test_ranks_read_each_others_first_note() -> None:
    store = dist.HashStore()
    ranks = [Notes(store, "a", r, 3) for r in range(3)]
    assert ranks[0].read() == {}
    ranks[2].post(True, "phase 'experts' of call 7", "ValueError: " + "x" * 1000)
    ranks[2].post(False, "later", "is not kept")
    note = ranks[0].read()[2]
    assert note == Note(2, True, "phase 'experts' of call 7", ("ValueError: " + "x" * 1000)[:500])
    assert ranks[2].read() == {} and Notes(store, "b", 0, 3).read() == {}
    assert [ranks[1].count("k"), ranks[1].count("k"), ranks[0].count("k")] == [1, 2, 1]
    assert "rank 2 raised in phase 'experts' of call 7" in str(Watch(ranks[0], 1.0).lost("", ""))


class Silent:
    """A store whose host is stopped, or gone."""

    def __init__(self, action: Any) -> None:
        self.set = self.check = self.get = lambda *_: action()


def gone() -> None:
    raise RuntimeError("Connection reset by peer")


@pytest.mark.parametrize("action", [gone, lambda: time.sleep(5.0)], ids=["gone", "stopped"])
def test_a_store_that_does_not_answer_is_asked_once(
    action: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "_ASK", 0.2)
    notes, start = Notes(Silent(action), "a", 1, 3), time.monotonic()
    error = str(Watch(notes, 1.0).lost("phase 'return' of call 2", "reset"))
    assert time.monotonic() - start < 1.0 and not notes.reachable
    assert "rank 0 hosts it" in error and "phase 'return' of call 2: reset" in error


def test_who_has_not_reported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_GRACE", 0.2)
    store = dist.HashStore()
    ranks = [Notes(store, "a", r, 4) for r in range(4)]
    ranks[3].post(False, "phase 'counts' of call 2", "reset")
    error = str(Watch(ranks[0], 1.0).lost("phase 'counts' of call 2", "reset"))
    assert error.startswith("ranks 1, 2 died or did not answer in time; this rank was in phase")
    ranks[1].post(False, "x", "y")
    ranks[2].post(False, "x", "y")
    assert "failed on every rank" in str(Watch(ranks[0], 1.0).lost("", ""))


class Stuck:
    """A group whose backend on one device records that it was aborted, and takes ``seconds``."""

    def __init__(self, seconds: float = 0.0, error: type[Exception] | None = None) -> None:
        self.seconds, self.error, self.aborted = seconds, error, 0

    def _get_backend(self, device: torch.device) -> Any:
        assert device.type == "cuda"
        return self

    def abort(self) -> None:
        self.aborted += 1
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error("the communicator is gone")


def test_an_abort_that_fails_or_takes_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_ABORT", 0.2)
    for group in (Stuck(), Stuck(error=RuntimeError), Stuck(seconds=3.0)):
        start = time.monotonic()
        failures.abort(group, torch.device("cuda", 0))
        assert time.monotonic() - start < 1.0 and group.aborted == 1
    failures.abort(object(), torch.device("cuda", 0))  # a torch without it


def fails_on_a_device(rank: int, size: int) -> list[int]:
    """How often a group on GPUs is aborted: after a RankError, after an error of this rank when its
    stream runs empty, and when it does not."""
    counts = []
    for error, idle in ((RankError, False), (ValueError, True), (ValueError, False)):
        made: list[Any] = []
        parallel = ExpertParallel(None, 4)
        patched = {
            "abort": lambda group, device, made=made: made.append((group, device.type)),
            "drained": lambda device, seconds, idle=idle: idle,
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, value in patched.items():
                patch.setattr(parallel_module, name, value)
            patch.setattr(parallel, "_control_device", lambda: torch.device("cuda", 0))
            with pytest.raises(error), parallel.call():
                raise error("this time")
        assert all(m == (parallel.group, "cuda") for m in made)
        assert parallel.failure is not None and "this time" in parallel.failure
        counts.append(len(made))
    return counts


def test_what_is_under_way_on_a_device_is_aborted(tmp_path: Path) -> None:
    assert values(run_ranks(1, fails_on_a_device, path=tmp_path)) == [[1, 0, 1]]


def limits(rank: int, size: int) -> list[float | None]:
    """Seconds that a rank waits: the group's own with gloo, less with NCCL, whose watchdog ends the
    process then."""
    group = dist.group.WORLD
    found = [parallel_module._group_limit(group)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
        fake = type("Group", (), {"_get_backend": lambda self, device: group._get_backend(CPU)})
        found.append(parallel_module._group_limit(fake()))
    return found


def test_a_rank_gives_up_before_the_watchdog_does(tmp_path: Path) -> None:
    want = [GROUP_TIMEOUT, GROUP_TIMEOUT - failures.WATCHDOG]
    assert values(run_ranks(1, limits, path=tmp_path)) == [want]
