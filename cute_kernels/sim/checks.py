"""Errors of the simulator, which of its checks are on, and the shadow-state rules of shared memory.

Every error names kernel, CTA, warp, lane, PTX line and text, and the source line when the PTX has
line info.
The proxy rule: a generic write is visible to the async proxy once its own thread, or a thread that
synchronised
after the write, has executed fence.proxy.async (PTX memory model: a proxy fence along the
causality path).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Checks:
    """One switch per check; `Checks.none()` turns all of them off (misuse that hangs still
    deadlocks)."""

    uninitialised: bool = True  # reads of shared memory or TMEM never written
    proxy_fence: bool = True  # generic write seen by the async proxy without a fence between
    # cp.async counts as a generic write for `proxy_fence`. Off: published kernels that run on B200s
    # hand cp.async data to tcgen05 through an mbarrier alone
    cp_async_fence: bool = False
    # a warp that arrives at a named barrier and then waits for the same phase counts twice. Off:
    # published kernels start the first of two warpgroups that take turns in this way
    barrier_self: bool = False
    shared_overwrite: bool = True  # write of bytes that an asynchronous operation may still read
    shared_race: bool = True  # access of bytes that an asynchronous operation may be writing
    mbarrier: bool = True  # re-initialisation, transaction and arrival overflow, missed phases
    # an mbarrier is used by another CTA, a copy or a commit before the warp that initialised it has
    # executed fence.mbarrier_init or fence.proxy.async. Off: whether all published kernels do is
    # not known
    mbarrier_init_fence: bool = False
    # tcgen05.fence::before_thread_sync ahead of the signal that other threads may overwrite what
    # was loaded, ::after_thread_sync behind the wait that orders another thread's operation. Off:
    # published kernels leave them out
    tcgen05_fence: bool = False
    tmem_pending_load: bool = True  # TMEM overwritten or released under an unfinished tcgen05.ld
    tmem_race: bool = True  # TMEM accessed while an asynchronous operation may be writing it
    wgmma_registers: bool = True  # registers of a wgmma changed in flight or without wgmma.fence
    tmem_leak: bool = True  # columns still allocated when the CTA ends
    scale_duplication: bool = True  # scale factors that differ between the four lane partitions
    tensormap_fence: bool = True  # a tensor map changed on the device and used without its fence
    bulk_exit: bool = True  # a CTA that ends while a bulk store still reads its shared memory

    @classmethod
    def none(cls) -> Checks:
        return cls(**{f.name: False for f in fields(cls)})


class SimError(Exception):
    """Base of everything that a simulated kernel can do wrong.

    Attributes `kernel, cta, warp, lane, line, text, source` are None until known; `args[0]` is the
    bare message.
    """

    kernel: str | None = None
    cta: tuple[int, ...] | None = None
    warp: int | None = None
    lane: int | None = None
    line: int | None = None
    text: str | None = None
    source: tuple[str, int] | None = None

    def at(self, warp: Any, instr: Any, lane: int | None = None) -> SimError:
        """Adds the place, unless it is known already; returns self."""
        if self.line is None and instr is not None:
            self.line, self.text, self.source = instr.line, instr.text, instr.source
        if self.warp is None and warp is not None:
            self.warp, self.cta = warp.warp_id, tuple(int(c) for c in warp.cta.coords)
            self.kernel = getattr(getattr(warp.cta, "launch", None), "name", None)
        if self.lane is None and lane is not None:
            self.lane = int(lane)
        return self

    def __str__(self) -> str:
        parts = [str(self.args[0]) if self.args else type(self).__name__]
        where = []
        if self.kernel is not None:
            where.append(f"kernel {self.kernel}")
        if self.cta is not None:
            where.append(f"cta {self.cta}")
        if self.warp is not None:
            where.append(
                f"warp {self.warp}" + (f" lane {self.lane}" if self.lane is not None else "")
            )
        if where:
            parts.append("  in " + ", ".join(where))
        if self.line is not None:
            parts.append(f"  at PTX line {self.line}: {self.text}")
        if self.source is not None:
            parts.append(f"  source {self.source[0]}:{self.source[1]}")
        return "\n".join(parts)


class UnsupportedInstruction(SimError):
    """An instruction, or a form of one, that the simulator does not model."""


class IllegalInstruction(SimError):
    """Operands that the PTX manual forbids (bad descriptor, shape, count, alignment rule)."""


class OutOfBounds(SimError):
    """An address outside shared memory or outside every live global allocation."""


class Misaligned(SimError):
    """An address that is not a multiple of what the instruction needs."""


class UninitialisedRead(SimError):
    """Shared memory or TMEM read before anything was written there."""


class MissingProxyFence(SimError):
    """The async proxy reads or writes bytes of a generic write that no proxy fence has followed."""


class SharedOverwrite(SimError):
    """Shared memory written while an asynchronous operation may still read it."""


class SharedRace(SimError):
    """Shared memory accessed while an asynchronous copy may be writing it."""


class BarrierError(SimError):
    """Misuse of an mbarrier, a named barrier or the cluster barrier."""


class TmemError(SimError):
    """TMEM used outside an allocation, wrong allocation calls, wrong lanes."""


class TmemLeak(TmemError):
    """A CTA ended with columns still allocated."""


class TmemRace(TmemError):
    """TMEM accessed while an MMA, copy or load that touches the same cells is in flight."""


class ScaleFactorError(TmemError):
    """Scale factors not duplicated over the four lane partitions of TMEM, or missing."""


class RegisterRace(SimError):
    """Registers of a wgmma in flight used or changed, changed without a wgmma.fence, or never
    waited for."""


class TensorMapError(SimError):
    """A tensor map that cannot be read, or that does not fit the instruction."""


class Deadlock(SimError):
    """Nothing can run any more; the message lists every barrier and warp."""


class Livelock(SimError):
    """The instruction budget is used up; the message lists every barrier and warp."""


REMOTE_WRITER = 2047  # thread field of `SharedMemory.writer` for a thread of another CTA
_EPOCH_SHIFT, _PC_SHIFT, _TID_MASK, _EPOCH_MASK = 11, 40, 0x7FF, (1 << 29) - 1


class FenceState:
    """Per-CTA record of who fenced when; together with `SharedMemory.writer` it decides which
    bytes are dirty.

    Epochs count the host instructions of a launch. `fenced[t + 1]` is the epoch of the last
    fence.proxy.async of
    thread t, `synced[t + 1]` that of its last completed wait on any barrier. A fence also covers
    the writes of other
    threads that precede the fencing thread's last synchronisation (`cleared`).
    """

    def __init__(self, num_threads: int) -> None:
        self.fenced = np.full(_TID_MASK + 1, -1, np.int64)
        self.synced = np.full(num_threads + 1, -1, np.int64)
        self.cleared = -1

    def sync(self, threads: np.ndarray, epoch: int) -> None:
        """`threads` (1 + thread id) completed a wait at `epoch`."""
        self.synced[threads] = epoch

    def fence(self, threads: np.ndarray, epoch: int) -> int:
        """fence.proxy.async of `threads` at `epoch`; returns the epoch up to which other threads'
        writes are covered.

        The fence of one lane is taken to cover its whole warp, whose lanes run together here."""
        for first in set((threads - 1) // 32 * 32 + 1):
            self.fenced[first : first + 32] = epoch
        covered = int(self.synced[threads].max())
        self.cleared = max(self.cleared, covered)
        return covered

    def dirty(self, writer: np.ndarray) -> np.ndarray:
        """bool mask of the entries of `SharedMemory.writer` that the async proxy may not see
        yet."""
        epoch = ((writer >> np.uint64(_EPOCH_SHIFT)) & np.uint64(_EPOCH_MASK)).astype(np.int64)
        thread = (writer & np.uint64(_TID_MASK)).astype(np.int64)
        return (writer != 0) & (epoch > self.cleared) & (epoch > self.fenced[thread])


def pack_writer(pc: int, epoch: int, thread: int | np.ndarray) -> Any:
    """Entry of `SharedMemory.writer`: instruction index, epoch, 1 + thread id."""
    return np.uint64(pc << _PC_SHIFT | (epoch & _EPOCH_MASK) << _EPOCH_SHIFT) | np.asarray(
        thread
    ).astype(np.uint64)


class ByteSet:
    """A set of bytes of one shared window, as a slice or as 16-byte chunk indices; views shadow
    arrays."""

    __slots__ = ("chunks", "hi", "lo")

    def __init__(self, lo: int = 0, hi: int = 0, chunks: np.ndarray | None = None) -> None:
        self.lo, self.hi, self.chunks = lo, hi, chunks

    @property
    def end(self) -> int:
        """Offset behind the last byte."""
        return self.hi if self.chunks is None else int(self.chunks.max()) * 16 + 16

    def get(self, array: np.ndarray) -> np.ndarray:
        """The elements of a per-byte `array`: (n,) for a slice, (chunks..., 16) for chunks; a copy
        for chunks."""
        if self.chunks is None:
            return array[self.lo : self.hi]
        return array.reshape(-1, 16)[self.chunks]

    def put(self, array: np.ndarray, value: Any) -> None:
        if self.chunks is None:
            array[self.lo : self.hi] = value
        else:
            array.reshape(-1, 16)[self.chunks] = value

    def add(self, array: np.ndarray, value: int) -> None:
        """Adds to every byte; chunks are distinct by construction. Wraps modulo 2**16, so -1
        undoes +1."""
        delta = array.dtype.type(value & 0xFFFF)
        if self.chunks is None:
            array[self.lo : self.hi] += delta
        else:
            array.reshape(-1, 16)[self.chunks] += delta

    def first(self, mask: np.ndarray) -> int:
        """Offset in the window of the first true element of a mask shaped like `get`'s result."""
        at = int(np.flatnonzero(mask.reshape(-1))[0])
        if self.chunks is None:
            return self.lo + at
        return int(self.chunks.reshape(-1)[at // 16]) * 16 + at % 16


def check_async_access(sim: Any, cta: Any, where: ByteSet, what: str, write: bool) -> None:
    """The checks of an async-proxy access of shared memory at its issue.

    Raises:
        MissingProxyFence: the bytes hold a generic write that no fence.proxy.async has followed.
        SharedOverwrite: a write of bytes that another operation in flight still reads.
        SharedRace: bytes that another operation in flight writes.
    """
    shared, checks = cta.shared, sim.checks
    if checks.proxy_fence:
        writer = where.get(shared.writer)
        if writer.any():
            bad = cta.fences.dirty(writer)
            if bad.any():
                raise _proxy_error(cta, where, writer, bad, what, write)
    if write and checks.shared_overwrite:
        busy = where.get(shared.async_reads)
        if busy.any():
            raise SharedOverwrite(
                f"{what} overwrites shared memory at {where.first(busy != 0):#x} which an MMA or a "
                "bulk store that has not been "
                "waited for may still read: the consumer's release (or commit, or wait_group.read) "
                "is missing or comes too late"
            )
    if checks.shared_race:
        busy = where.get(shared.async_writes)
        if busy.any():
            verb = "overwrites" if write else "reads"
            raise SharedRace(
                f"{what} {verb} shared memory at {where.first(busy != 0):#x} while an asynchronous "
                "copy may be writing it: "
                "the wait for that copy's mbarrier is missing or uses the wrong parity"
            )


def _proxy_error(
    cta: Any, where: ByteSet, writer: np.ndarray, bad: np.ndarray, what: str, write: bool
) -> SimError:
    entry = int(writer.reshape(-1)[np.flatnonzero(bad.reshape(-1))[0]])
    thread, pc = (entry & _TID_MASK) - 1, entry >> _PC_SHIFT
    by = (
        "a thread of another CTA"
        if thread + 1 == REMOTE_WRITER
        else f"thread {thread} (warp {thread // 32})"
    )
    line = ""
    instrs = getattr(getattr(cta, "launch", None), "instrs", None)
    if instrs is not None and pc < len(instrs):
        line = f", PTX line {instrs[pc].line}: {instrs[pc].text}"
    verb = "writes" if write else "reads"
    return MissingProxyFence(
        f"{what} {verb} shared memory at {where.first(bad):#x} through the async proxy, but it was "
        "written through the generic "
        f"proxy by {by}{line} and no fence.proxy.async of that thread, or of one that synchronised "
        "with it, follows the write"
    )


def check_initialised(sim: Any, cta: Any, where: ByteSet, what: str) -> None:
    """Raises UninitialisedRead if any byte was never written."""
    if sim.checks.uninitialised:
        init = where.get(cta.shared.init)
        if not init.all():
            raise UninitialisedRead(
                f"{what} reads shared memory at {where.first(init == 0):#x} (cluster rank "
                f"{cta.rank}) which was never written"
            )
