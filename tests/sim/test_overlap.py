"""Programmatic dependent launch: old bytes before griddepcontrol.wait, nothing lost afterwards."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from cute_kernels.sim.asyncops import AsyncOps
from cute_kernels.sim.overlap import Overlap

TRIGGER = [SimpleNamespace(base="griddepcontrol", mods=("launch_dependents",))]


class Memory:
    """One allocation at its real address."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.live = array, True

    def contains(self, address: int, size: int) -> bool:
        lo = self.array.ctypes.data
        return self.live and lo <= address and address + size <= lo + len(self.array)

    search = contains

    def look_for(self, words: set[int]) -> None:
        return None

    def range_of(self, address: int, size: int) -> tuple[int, int]:
        lo = self.array.ctypes.data
        return lo, lo + len(self.array)

    def find(self, address: int, size: int) -> np.ndarray:
        return self.array

    def refresh(self, scan: bool = False) -> None:
        return None


def first_launch(instrs=TRIGGER) -> tuple[Overlap, np.ndarray, Memory]:
    data = np.zeros(64, np.uint8)
    memory = Memory(data)
    overlap = Overlap(memory)
    overlap.begin(instrs, np.array([5, data.ctypes.data], np.uint64).tobytes(), False)
    data[:8] = np.arange(1, 9)
    overlap.end()
    assert data[7] == 8, "the host sees the first launch's result"
    return overlap, data, memory


def test_old_bytes_until_the_wait():
    overlap, data, _ = first_launch()
    overlap.begin([], b"", True)
    assert not data.any()
    overlap.reveal()
    assert data[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_without_a_wait_the_writes_appear_at_the_end_over_what_the_second_launch_wrote():
    overlap, data, _ = first_launch()
    overlap.begin([], b"", True)
    data[2], data[20] = 99, 98
    overlap.end()
    assert data[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert data[20] == 98, "the first launch did not write there"


def test_every_wait_blocks_until_the_first_launch_ends():
    overlap, data, _ = first_launch()
    overlap.begin([], b"", True)
    machine = SimpleNamespace(
        async_ops=AsyncOps(),
        policy=SimpleNamespace(late=True),
        scheduler=SimpleNamespace(idle=False),
    )
    warp = SimpleNamespace(agent=None)
    waits = [overlap.wait(machine, warp, None) for _ in range(2)]
    assert len(machine.async_ops) == 1, "one end, however many wait"
    assert not data.any() and not any(w.predicate() for w in waits)
    assert machine.async_ops.oldest() is None, "others can still run"
    machine.scheduler.idle = True
    machine.async_ops.oldest().run()
    assert data[7] == 8 and all(w.predicate() for w in waits)
    assert overlap.wait(machine, warp, None) is None


def test_a_wait_does_not_block_without_a_launch_before():
    overlap = Overlap(Memory(np.zeros(64, np.uint8)))
    overlap.begin([], b"", True)
    assert overlap.wait(SimpleNamespace(), None, None) is None


@pytest.mark.parametrize("waits", [True, False])
def test_a_launch_that_never_waits_does_not_order_the_first_before_the_third(waits):
    overlap, data, _ = first_launch()
    overlap.begin(TRIGGER, np.array([data.ctypes.data], np.uint64).tobytes(), True)
    if waits:
        overlap.reveal()
    data[16:20] = 7
    overlap.end()
    assert data[7] == 8, "the host sees both"
    overlap.begin([], b"", True)
    assert not data[16:20].any()
    assert data[:8].any() == waits
    overlap.reveal()  # the third one waits for the second
    assert data[16:20].all()
    assert data[:8].any() == waits
    overlap.end()
    assert data[:8].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    overlap.begin([], b"", True)
    assert data[7] == 8


def test_an_ordinary_second_launch_sees_everything():
    overlap, data, _ = first_launch()
    overlap.begin([], b"", False)
    assert data[0] == 1


def test_a_first_launch_without_trigger_hides_nothing():
    overlap, data, _ = first_launch([])
    overlap.begin([], b"", True)
    assert data[0] == 1


@pytest.mark.parametrize("change", ["host write", "freed"])
def test_memory_that_is_no_longer_the_predecessors_stays(change):
    overlap, data, memory = first_launch()
    if change == "host write":
        data[20] = 1
    else:
        memory.live = False
    overlap.begin([], b"", True)
    assert data[0] == 1
