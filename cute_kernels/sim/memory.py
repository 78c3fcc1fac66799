"""Memories of a simulated launch: shared memory with shadow state, and global memory at its real addresses.

Address spaces as kernels see them (64 bits):
    shared   cluster rank << 24 | offset in the CTA's window; the window's first RESERVED bytes belong to
             the system, static variables follow, then dynamic shared memory
    generic  SHARED_BASE | shared address, LOCAL_BASE | local address, anything else is a process address
    global, param, const   process addresses
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterable

import numpy as np
import torch

RESERVED = 1024  # bytes of shared memory below the first variable (simulator.md)
SHARED_BASE = 1 << 56
LOCAL_BASE = 2 << 56
RANK_SHIFT = 24
OFFSET_MASK = (1 << RANK_SHIFT) - 1


class SharedMemory:
    """The shared-memory window of one CTA with its shadow state; all arrays have one element per byte.

    data         uint8, the contents
    init         uint8, 1 once the byte has been written
    dirty        uint16, 0 or 1 + thread id of the last generic-proxy writer that has not passed a
                 fence.proxy.async since
    async_reads  uint16, the number of asynchronous operations that may still read the byte
    exempt       uint8, 1 for bytes of mbarrier objects: no proxy or initialisation check
    """

    def __init__(self, arrays: ClusterShared, rank: int) -> None:
        self.rank = rank
        self.data = arrays.data[rank]
        self.init = arrays.init[rank]
        self.dirty = arrays.dirty[rank]
        self.async_reads = arrays.async_reads[rank]
        self.exempt = arrays.exempt[rank]
        self.dirty_range = arrays.dirty_range[rank]
        self.size = self.data.shape[0]

    def offset(self, address: int) -> int:
        """Offset in the window of a shared, or generic, address of this CTA (the rank is not checked)."""
        return int(address) & OFFSET_MASK

    def view(self, offset: int, size: int) -> np.ndarray:
        """The bytes [offset, offset + size); IndexError if they leave the window."""
        if not 0 <= offset <= offset + size <= self.size:
            raise IndexError(
                f"shared memory [{offset:#x}, {offset + size:#x}) leaves the window of {self.size:#x} bytes"
            )
        return self.data[offset : offset + size]

    def read_u32(self, offset: int) -> int:
        return int.from_bytes(self.view(offset, 4).tobytes(), "little")

    def read_u64(self, offset: int) -> int:
        return int.from_bytes(self.view(offset, 8).tobytes(), "little")

    def write_int(self, offset: int, value: int, size: int) -> None:
        """Stores an integer and marks its bytes initialised and clean."""
        raw = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
        self.view(offset, size)[:] = np.frombuffer(raw, np.uint8)
        self.init[offset : offset + size] = 1
        self.dirty[offset : offset + size] = 0

    def mark_written(self, lo: int, hi: int) -> None:
        """Asynchronous write of [lo, hi): initialised, and visible to both proxies."""
        self.init[lo:hi] = 1
        self.dirty[lo:hi] = 0

    def fence_async(self, warp_id: int, mask: np.ndarray) -> None:
        """fence.proxy.async of the lanes in `mask`: their earlier generic writes reach the async proxy."""
        lo, hi = self.dirty_range[warp_id]
        if lo >= hi:
            return
        threads = 1 + 32 * warp_id + np.flatnonzero(mask)
        region = self.dirty[lo:hi]
        if len(threads) == 32:
            region[(region >= threads[0]) & (region <= threads[-1])] = 0
            self.dirty_range[warp_id] = (self.size, 0)
        else:
            region[np.isin(region, threads)] = 0


class ClusterShared:
    """Backing arrays of all shared windows of a cluster, (ranks, window bytes); see `SharedMemory`."""

    def __init__(self, ranks: int, window: int, warps: int, poison: int = 0xFF) -> None:
        self.data = np.full((ranks, window), poison, np.uint8)
        self.init = np.zeros((ranks, window), np.uint8)
        self.dirty = np.zeros((ranks, window), np.uint16)
        self.async_reads = np.zeros((ranks, window), np.uint16)
        self.exempt = np.zeros((ranks, window), np.uint8)
        # per (writer rank ignored) destination CTA and warp: extent of its unfenced generic writes
        self.dirty_range = np.zeros((ranks, warps, 2), np.int64)
        self.dirty_range[:, :, 0] = window

    def window(self, rank: int) -> SharedMemory:
        return SharedMemory(self, rank)


class OutOfRange(Exception):
    """An access outside every live allocation; callers turn it into an `OutOfBounds` report."""

    def __init__(self, address: int, size: int) -> None:
        super().__init__(f"[{address:#x}, {address + size:#x}) is in no live allocation")
        self.address, self.size = address, size


class GlobalMemory:
    """Process memory that kernels may touch: storages of live CPU tensors and owned or allowed ranges.

    The tensors are found by asking the garbage collector, lazily: when an access falls outside the
    ranges known so far. Ranges of tensors that have been freed are dropped by `refresh`.
    """

    def __init__(self) -> None:
        self._tensors: dict[tuple[int, int], list[weakref.ref]] = {}
        self._owned: dict[int, tuple[int, object]] = {}
        self.ranges = np.zeros((0, 2), np.int64)

    def own(self, size: int, data: bytes | None = None, align: int = 128) -> int:
        """Allocates launch-owned memory (parameters, module variables, cudaMalloc); returns the address."""
        raw = np.zeros(size + align, np.uint8)
        address = -(-raw.ctypes.data // align) * align
        self._owned[address] = (max(size, 1), raw)
        if data is not None:
            ctypes.memmove(address, data, len(data))
        self.refresh()
        return address

    def allow(self, address: int, size: int, keep: object = None) -> None:
        """Declares [address, address + size) valid; `keep` is kept alive as long."""
        self._owned[address] = (size, keep)
        self.refresh()

    def release(self, address: int) -> None:
        """Frees what `own` or `allow` made."""
        if self._owned.pop(address, None) is not None:
            self.refresh()

    def refresh(self, scan: bool = False) -> None:
        """Drops ranges of dead tensors; with `scan`, searches the process for live ones."""
        if scan:
            self._scan()
        live = []
        for key, refs in list(self._tensors.items()):
            if any(r() is not None for r in refs):
                live.append(key)
            else:
                del self._tensors[key]
        live += [(a, a + n) for a, (n, _) in self._owned.items()]
        self.ranges = _merge(live)

    def _scan(self) -> None:
        self._tensors.clear()
        for thing in gc.get_objects():
            kind = type(thing)
            if kind is torch.Tensor or kind is torch.nn.Parameter or (
                isinstance(kind, type) and issubclass(kind, torch.Tensor)
            ):
                self._add(thing)

    def _add(self, tensor: torch.Tensor) -> None:
        try:
            if tensor.device.type != "cpu" or tensor.layout != torch.strided:
                return
            storage = tensor.untyped_storage()
            lo, size = storage.data_ptr(), storage.nbytes()
        except (RuntimeError, NotImplementedError):  # fake and functional tensors have no storage
            return
        if lo and size:
            self._tensors.setdefault((lo, lo + size), []).append(weakref.ref(tensor))

    def contains(self, address: int, size: int) -> bool:
        i = int(np.searchsorted(self.ranges[:, 0], address, side="right")) - 1
        return i >= 0 and address + size <= int(self.ranges[i, 1])

    def find(self, address: int, size: int, write: bool = False) -> np.ndarray:
        """A uint8 view of [address, address + size).

        Raises:
            OutOfRange: if the bytes are not inside one live allocation.
        """
        address, size = int(address), int(size)
        if not self.contains(address, size):
            self.refresh(scan=True)
            if not self.contains(address, size):
                raise OutOfRange(address, size)
        return raw_view(address, size)


def raw_view(address: int, size: int) -> np.ndarray:
    """A writable uint8 view of process memory; nothing is checked."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def _merge(ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    """Sorted, disjoint (lo, hi) rows. Only overlapping ranges merge: touching neighbours stay apart, so
    an access that runs from one tensor into the next is still out of bounds."""
    out: list[list[int]] = []
    for lo, hi in sorted(ranges):
        if out and lo < out[-1][1]:
            out[-1][1] = max(out[-1][1], hi)
        else:
            out.append([lo, hi])
    return np.array(out, np.int64).reshape(-1, 2)
