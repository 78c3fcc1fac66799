"""Notes of failures in a store, and stores that do not answer."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch.distributed as dist

from moe import failures
from moe.failures import Note, Notes, Watch


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
