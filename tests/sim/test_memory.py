"""Which memory of the process kernels may touch."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cute_kernels.sim.memory import GlobalMemory, TensorRanges, _storage


def test_a_tensor_is_kept_once_however_often_it_is_found() -> None:
    """A process that launches thousands of kernels looks for tensors thousands of times."""
    kept = [torch.zeros(8) for _ in range(3)]
    view = kept[0][2:]
    ranges = TensorRanges()
    for _ in range(5):
        ranges.scan(0)
        ranges.scan(1)
        ranges.scan(2)
    sizes = [len(refs) for refs in ranges._known.values()]
    alive = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())  # proxies may be dead
    assert sum(sizes) <= alive
    first = kept[0].untyped_storage().data_ptr()
    assert len(ranges._known[first, first + 32]) == 2  # the tensor and its view
    assert (first, first + 32) in ranges.live()
    del kept, view
    assert (first, first + 32) not in ranges.live()


def test_tensors_are_found_when_they_are_asked_for() -> None:
    memory = GlobalMemory()
    tensor = torch.zeros(16)
    assert memory.search(tensor.data_ptr(), 64)
    assert not memory.search(tensor.data_ptr(), 65)
    address = tensor.data_ptr()
    del tensor
    memory.refresh()
    assert not memory.contains(address, 1)


@pytest.mark.filterwarnings("error")
def test_a_tensor_without_values_is_not_asked_for_its_address() -> None:
    """torch warns about that; programs of torch.compile leave some behind."""
    with FakeTensorMode():
        fake = torch.zeros(16)
    assert fake.device.type == "cpu" and _storage(fake) is None
    real = torch.zeros(16)
    assert _storage(real) == (real.data_ptr(), real.data_ptr() + 64)


def test_numbers_that_look_like_addresses_are_looked_for_once(monkeypatch) -> None:
    memory, scans = GlobalMemory(TensorRanges()), []
    scan = memory._tensors.scan
    monkeypatch.setattr(memory._tensors, "scan", lambda g: (scans.append(g), scan(g)))
    tensor = torch.zeros(16)
    words = {tensor.data_ptr(), 0x1234_5678_9ABC}
    for _ in range(3):
        memory.look_for(words)
        assert memory.contains(tensor.data_ptr(), 64)
    assert scans == [0, 1, 2]
