"""Several ranks on one machine: processes of a test, with a deadline for all of them.

The store of the group lives in the test itself, as a launcher's would, so that it outlives a rank.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import multiprocessing
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOST = "127.0.0.1"
GROUP_TIMEOUT = 60.0  # s, of the process group: no test of a failure waits for it

Job = Callable[..., Any]  # (rank, size, *arguments) -> something torch.save can write


@functools.cache
def _context() -> Any:
    """Children fork from a server that has imported everything once; torch._dynamo is what the
    first call of an operator of ours loads."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch._dynamo", "tests.parallel.jobs", "pytest"])
    return context


@dataclasses.dataclass(frozen=True)
class Outcome:
    """``value`` of the job, or ``error``, the text of what it raised (or of how it ended)."""

    value: Any = None
    error: str | None = None
    seconds: float = 0.0


def run_ranks(
    size: int,
    job: Job,
    *arguments: Any,
    path: Path,
    timeout: float = 100.0,
    master: int = -1,
    backend: str = "gloo",
) -> list[Outcome]:
    """Run ``job(rank, size, *arguments)`` on ``size`` ranks; one `Outcome` each.

    path     a directory of this run alone
    timeout  s, for all ranks together: what still runs then is killed, and AssertionError raised;
             a little before, each rank that still runs writes to stderr where it is
    master   rank that hosts the store; -1: this process
    backend  "nccl": rank r has GPU r
    """
    path.mkdir(parents=True, exist_ok=True)
    store = dist.TCPStore(HOST, 0, size, is_master=True, wait_for_workers=False)
    port = store.port
    if master >= 0:  # its port is free again when the rank takes it
        del store
    start = time.monotonic()
    processes = [
        _context().Process(
            target=_child,
            args=(rank, size, (port, master, backend, timeout), str(path), job, arguments),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, start + timeout - time.monotonic()))
    late = [r for r, p in enumerate(processes) if p.is_alive()]
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    if late:
        raise AssertionError(f"ranks {late} of {size} still ran after {timeout} s")
    return [_outcome(path, rank, p.exitcode) for rank, p in enumerate(processes)]


def values(outcomes: list[Outcome]) -> list[Any]:
    """Results of ranks that must all have succeeded."""
    failed = [f"rank {r}: {o.error}" for r, o in enumerate(outcomes) if o.error is not None]
    assert not failed, "\n".join(failed)
    return [o.value for o in outcomes]


def _outcome(path: Path, rank: int, code: int) -> Outcome:
    file = path / f"{rank}.pt"
    if not file.exists():
        return Outcome(error=f"ended with code {code} and no result")
    return Outcome(**torch.load(file, weights_only=False))


def _child(
    rank: int, size: int, group: tuple[int, int, str, float], path: str, job: Job, arguments: Any
) -> None:
    port, master, backend, timeout = group
    faulthandler.dump_traceback_later(0.9 * timeout)
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    start = time.monotonic()
    store = dist.TCPStore(HOST, port, size, is_master=rank == master, wait_for_workers=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=GROUP_TIMEOUT)
    )
    value, error = None, None
    try:
        value = job(rank, size, *arguments)
    except BaseException as caught:  # pytest's own failures are no Exception
        error = f"{type(caught).__name__}: {caught}\n{traceback.format_exc()}"
    result = {"value": value, "error": error, "seconds": time.monotonic() - start}
    file = Path(path) / f"{rank}.pt"
    torch.save(result, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").rename(file)
    if error is None:
        dist.destroy_process_group()
