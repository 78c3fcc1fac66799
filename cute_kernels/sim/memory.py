"""Memories of a simulated launch: shared memory with shadow state, and global memory at its real
addresses.

Address spaces as kernels see them (64 bits):
    shared   cluster rank << 24 | offset in the CTA's window; the window's first RESERVED bytes
    belong to
             the system, static variables follow, then dynamic shared memory
    generic  SHARED_BASE | shared address, LOCAL_BASE | local address, anything else is a process
    address
    global, param, const   process addresses
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterable

import numpy as np
import torch

from cute_kernels.sim.checks import OutOfBounds

RESERVED = 1024  # bytes of shared memory below the first variable (simulator.md)
SHARED_BASE = 1 << 56
LOCAL_BASE = 2 << 56
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1


class SharedMemory:
    """The shared-memory window of one CTA with its shadow state; every array has one element per
    byte.

    data          uint8, the contents; 0xFF until written
    init          uint8, 1 once the byte has been written
    writer        uint64, 0 or `checks.pack_writer` of the last generic store
    async_reads   uint16, how many asynchronous operations may still read the byte
    async_writes  uint16, how many bulk copies may still write it
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // 128) * 128
        self.data = np.full(self.size, 0xFF, np.uint8)
        self.init = np.zeros(self.size, np.uint8)
        self.writer = np.zeros(self.size, np.uint64)
        self.async_reads = np.zeros(self.size, np.uint16)
        self.async_writes = np.zeros(self.size, np.uint16)


class TensorRanges:
    """Storages of the CPU tensors of this process, found by asking the garbage collector.

    A scan takes tenths of a second in a large process, so what it found is kept: a tensor stays
    known
    until it dies.
    """

    def __init__(self) -> None:
        # by storage, the references to its tensors by identity: Python makes one per tensor
        self._known: dict[tuple[int, int], dict[int, weakref.ref]] = {}
        self.nowhere: set[int] = set()  # see `GlobalMemory.look_for`

    def live(self) -> list[tuple[int, int]]:
        """(first, end) of the storages that still belong to one of the tensors found."""
        for key, refs in list(self._known.items()):
            left = {i: r for i, r in refs.items() if _storage(r()) == key}
            if left:
                self._known[key] = left
            else:
                del self._known[key]
        return list(self._known)

    def scan(self, generation: int) -> None:
        """Adds the tensors among the objects of one generation of the collector; 2 holds most
        objects."""
        is_tensor: dict[type, bool] = {}
        for thing in gc.get_objects(generation):
            kind = type(thing)
            known = is_tensor.get(kind)
            if known is None:
                known = is_tensor[kind] = issubclass(kind, torch.Tensor)
            if known:
                key = _storage(thing)
                if key is not None:
                    ref = weakref.ref(thing)
                    self._known.setdefault(key, {})[id(ref)] = ref


def _storage(tensor: torch.Tensor | None) -> tuple[int, int] | None:
    """(first, end) of the memory behind a tensor; None if it has none here."""
    try:
        if tensor is None or tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return None
        storage = tensor.untyped_storage()
        if storage.device.type != "cpu":  # a fake tensor's, whose address torch warns about
            return None
        first, size = storage.data_ptr(), storage.nbytes()
    except (RuntimeError, NotImplementedError):  # fake and functional tensors have no storage
        return None
    return (first, first + size) if first and size else None


class GlobalMemory:
    """Process memory that kernels may touch: storages of live CPU tensors and owned or allowed
    ranges.

    Tensors are searched for lazily, when an access falls outside the ranges known so far. Ranges of
    tensors that have been freed are dropped by `refresh`.
    """

    def __init__(self, tensors: TensorRanges | None = None) -> None:
        self._tensors = TensorRanges() if tensors is None else tensors
        self._owned: dict[int, tuple[int, object]] = {}
        self.ranges = np.zeros((0, 2), np.int64)

    def own(self, size: int, data: bytes | None = None, align: int = 128) -> int:
        """Allocates launch-owned memory (parameters, module variables, cudaMalloc); returns the
        address."""
        raw = np.zeros(size + align, np.uint8)
        address = -(-raw.ctypes.data // align) * align
        self._owned[address] = (max(size, 1), raw)
        if data is not None:
            ctypes.memmove(address, data, len(data))
        self.refresh()
        return address

    def release(self, address: int) -> None:
        """Frees what `own` made."""
        if self._owned.pop(address, None) is not None:
            self.refresh()

    def refresh(self, scan: bool = False) -> None:
        """Drops the ranges of tensors that have died; with `scan`, finds every live one."""
        if scan:
            for generation in range(3):
                self._tensors.scan(generation)
        self.ranges = _merge(
            [*self._tensors.live(), *((a, a + n) for a, (n, _) in self._owned.items())]
        )

    def search(self, address: int, size: int) -> bool:
        """Is [address, address + size) in a live allocation? Looks for new tensors, youngest
        first."""
        for generation in range(3):
            if self.contains(address, size):
                return True
            self._tensors.scan(generation)
            self.refresh()
        return self.contains(address, size)

    def look_for(self, words: set[int]) -> None:
        """Finds the tensors that ``words`` point into, with one scan at most. Words that pointed
        nowhere are not looked for again: parameters hold numbers that only look like addresses."""
        unknown = {w for w in words - self._tensors.nowhere if not self.contains(w, 1)}
        if unknown:
            self.refresh(scan=True)
            self._tensors.nowhere.update(w for w in unknown if not self.contains(w, 1))

    def contains(self, address: int, size: int) -> bool:
        i = int(np.searchsorted(self.ranges[:, 0], address, side="right")) - 1
        return i >= 0 and address + size <= int(self.ranges[i, 1])

    def range_of(self, address: int, size: int) -> tuple[int, int]:
        """(first, end) of the live allocation that holds [address, address + size).

        Raises:
            OutOfBounds: if no single one does.
        """
        self.find(address, size)
        i = int(np.searchsorted(self.ranges[:, 0], address, side="right")) - 1
        return int(self.ranges[i, 0]), int(self.ranges[i, 1])

    def find(self, address: int, size: int, write: bool = False) -> np.ndarray:
        """A uint8 view of [address, address + size).

        Raises:
            OutOfBounds: if the bytes are not inside one live allocation.
        """
        address, size = int(address), int(size)
        if not self.search(address, size):
            raise OutOfBounds(f"[{address:#x}, {address + size:#x}) is in no live allocation")
        return raw_view(address, size)


def raw_view(address: int, size: int) -> np.ndarray:
    """A writable uint8 view of process memory; nothing is checked."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def _merge(ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    """Sorted, disjoint (lo, hi) rows. Only overlapping ranges merge: touching neighbours stay
    apart, so
    an access that runs from one tensor into the next is still out of bounds."""
    out: list[list[int]] = []
    for lo, hi in sorted(ranges):
        if out and lo < out[-1][1]:
            out[-1][1] = max(out[-1][1], hi)
        else:
            out.append([lo, hi])
    return np.array(out, np.int64).reshape(-1, 2)
