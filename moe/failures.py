"""How ranks fail together: a rank that raises leaves a note in the store of its process group, and
ranks that wait for others look at the notes.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from datetime import timedelta
from typing import Any

import torch

_SLICE = 0.5  # s between two looks at the notes of a wait that takes longer than that
_GRACE = 3.0  # s that ranks get to report after the first one saw a failure
_ASK = 2.0  # s that the store gets to answer: the process that hosts it may be stopped or gone
_TEXT = 500  # characters of an error that a note keeps
_ABORT = 2.0  # s that NCCL gets to give up; where a CUDA graph holds it, it goes on by itself
WATCHDOG = 10.0  # s that the watchdog of NCCL is kept behind a `Watch`: it ends the process


class RankError(RuntimeError):
    """Another rank raised, died or did not answer in time; the message names rank and phase."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What one rank reports. ``raised``: an error of its own; else it saw another one go."""

    rank: int
    raised: bool
    where: str
    text: str


class Notes:
    """One note per rank under ``prefix`` in a store of torch.distributed; a rank's first one stays.

    Every operation answers within `_ASK` seconds, with nothing if the store does not: a store that
    failed to answer once is not asked again.
    """

    def __init__(self, store: Any, prefix: str, rank: int, size: int) -> None:
        self._store, self._prefix = store, prefix
        self.rank, self.size = rank, size
        self._posted = False

    @property
    def reachable(self) -> bool:
        return self._store is not None

    def count(self, key: str) -> int:
        """How often this rank has asked, this time included."""
        return self._ask("add", f"{key}/{self.rank}", 1) or 0

    def post(self, raised: bool, where: str, text: str) -> None:
        if self._posted:
            return
        self._posted = True
        note = json.dumps([raised, where, text[:_TEXT]])
        self._ask("set", self._key(self.rank), note)

    def read(self) -> dict[int, Note]:
        """Notes of the other ranks."""
        found: dict[int, Note] = {}
        for rank in range(self.size):
            key = self._key(rank)
            if rank != self.rank and self._ask("check", [key]):
                text = self._ask("get", key)
                if text:
                    found[rank] = Note(rank, *json.loads(text))
        return found

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._store is None:
            return None
        call, answer = getattr(self._store, method), []

        def run() -> None:
            try:
                answer.append(call(*arguments))
            except Exception:  # whatever a store raises when its host is gone
                return

        _within(_ASK, run)
        if not answer:
            self._store = None
            return None
        return answer[0]


def _within(seconds: float, call: Any) -> bool:
    """Whether ``call()`` came back in time, returning or raising. It goes on if it did not."""
    running = threading.Thread(target=call, daemon=True)
    running.start()
    running.join(seconds)
    return not running.is_alive()


def abort(group: Any, device: torch.device) -> None:
    """End the collectives of ``group`` that are under way on ``device``, without its other ranks.

    NCCL's wait for the rank that will not come is a kernel: every synchronisation with the device,
    destroy_process_group and the end of the process would wait for it. The kernel goes at once; the
    rest waits, in a thread, for CUDA graphs that hold collectives of the group to be deleted.
    """

    def run() -> None:
        try:
            group._get_backend(device).abort()
        except (AttributeError, RuntimeError):  # gone already, or a torch without it
            return

    _within(_ABORT, run)


def drained(device: torch.device, seconds: float) -> bool:
    """Whether the current stream of ``device`` runs empty within ``seconds``. A stream that is
    captured has nothing under way, a broken one nothing left.
    """
    event = torch.cuda.Event()
    try:
        event.record(torch.cuda.current_stream(device))
        end = time.monotonic() + seconds
        while not event.query():
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
    except RuntimeError:
        return True
    return True


class Recorded:
    """What the current stream of ``device`` has been given so far, as work to wait for."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(device))

    def is_completed(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()


class Watch:
    """Waits for collectives of one process group within ``timeout`` seconds (None: as long as the
    group itself allows).
    """

    def __init__(self, notes: Notes, timeout: float | None) -> None:
        self.notes, self.timeout = notes, timeout

    def wait(self, work: Any, where: str) -> None:
        """Until ``work``, a collective on host memory, is done. Raises `RankError`."""
        start = time.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=_SLICE))
                return
            except RuntimeError as error:
                cause = error
            if work.is_completed():  # it failed, or finished just after the slice
                try:
                    work.wait()
                    return
                except RuntimeError as error:
                    raise self.lost(where, str(error)) from error
            waited = time.monotonic() - start
            if self.notes.read() or (self.timeout is not None and waited >= self.timeout):
                raise self.lost(where, f"no answer for {waited:.1f} s") from cause

    def wait_device(self, work: Any, where: str) -> None:
        """Until the device has done ``work``, because the host needs the result. Raises `RankError`
        unless the watchdog of the group ends the process first.
        """
        start, look = time.monotonic(), _SLICE
        while not work.is_completed():
            waited = time.monotonic() - start
            if waited > 0.05:
                time.sleep(0.005)
            if waited >= look:
                look += _SLICE
                late = self.timeout is not None and waited >= self.timeout
                if late or self.notes.read():
                    raise self.lost(where, f"no answer for {waited:.1f} s")
        work.wait()  # orders the stream after it, and raises if it failed

    def lost(self, where: str, cause: str) -> RankError:
        """The error of a rank that saw a failure: who raised, or who has not reported."""
        self.notes.post(False, where, cause)
        found, start = self.notes.read(), time.monotonic()
        while (
            self.notes.reachable
            and len(found) < self.notes.size - 1
            and not any(note.raised for note in found.values())
            and time.monotonic() - start < _GRACE
        ):
            time.sleep(0.05)
            found = self.notes.read()
        return RankError(f"{self._blame(found)}; this rank was in {where}: {cause}")

    def _blame(self, found: dict[int, Note]) -> str:
        raised = [n for n in found.values() if n.raised]
        if raised:
            return "; ".join(f"rank {n.rank} raised in {n.where}: {n.text}" for n in raised)
        if not self.notes.reachable:
            return (
                "a rank is gone, and with it the store of the process group: rank 0 hosts it, "
                "unless a launcher does"
            )
        silent = [r for r in range(self.notes.size) if r not in found and r != self.notes.rank]
        if silent:
            names = ", ".join(map(str, silent))
            return f"rank{'s' if len(silent) > 1 else ''} {names} died or did not answer in time"
        first = min(found.values(), key=lambda n: n.rank)
        return f"the exchange failed on every rank (rank {first.rank} in {first.where})"
