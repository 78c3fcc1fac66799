"""Ranks that raise or die over NCCL, where the wait for them is a kernel: who hears of it, and that
nobody is stuck afterwards, neither in a synchronisation nor at the end of the process."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moe import Capacity, Exchange, MoE
from moe.failures import RankError
from tests.layers import same_bits
from tests.parallel.gpus import NEEDS_NCCL, batch, gpus, layers
from tests.parallel.ranks import Outcome, run_ranks, values

pytestmark = [
    *NEEDS_NCCL,
    pytest.mark.skipif(gpus() < 2, reason="needs 2 GPUs: one rank has nobody to tell"),
]
TIMEOUT = 5.0  # s, of ExpertParallel
LIMIT = 60.0  # s, for all ranks of one test, their start included
PLACES = Exchange(capacity=Capacity(16))


def raises(over: MoE, given: tuple[torch.Tensor, ...]) -> None:
    with pytest.raises(TypeError):
        over.experts(given[0].double(), *given[1:])


def dies(over: MoE, given: tuple[torch.Tensor, ...]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS = {"raises": raises, "dies": dies}


def caught(wait: Any) -> dict[str, Any]:
    """What ``wait`` raises after how long, and that the device is idle then."""
    start = time.monotonic()
    with pytest.raises(RankError) as error:
        wait()
    seconds = time.monotonic() - start
    torch.cuda.synchronize()
    return {"error": str(error.value), "seconds": seconds}


def in_the_counts(rank: int, size: int, what: str, timeout: float | None) -> Any:
    """The last rank goes before the exchange of the second call."""
    over, _ = layers(Exchange(), timeout=timeout)
    given = batch(rank, 8)
    over.experts(*given)
    if rank == size - 1:
        return ACTIONS[what](over, given)
    found = caught(lambda: over.experts(*given))
    with pytest.raises(RankError, match="refused after a failure"):
        over.experts(*given)
    return found


def in_a_check(rank: int, size: int, what: str, captured: bool) -> Any:
    """With places nothing waits but `check`; in a graph no watchdog looks either."""
    over, _ = layers(PLACES, timeout=TIMEOUT)
    given = batch(rank, 8)
    over.experts(*given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            over.experts(*given)
        graph.replay()
    assert over.parallel is not None
    over.parallel.check()
    if rank == size - 1:
        del graph  # NCCL would wait for it, and the traceback of an error would keep it
        return ACTIONS[what](over, given)
    if captured:
        graph.replay()
    else:
        over.experts(*given)
    found = caught(over.parallel.check)
    del graph
    return found


def unseen(rank: int, size: int) -> Any:
    """Nobody looks: the host waits for its stream."""
    # torch gives its flight recorder four times so long before it ends the process: else a minute
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "500"
    over, _ = layers(PLACES, timeout=TIMEOUT)
    given = batch(rank, 8)
    over.experts(*given)
    torch.cuda.synchronize()
    if rank == size - 1:
        return dies(over, given)
    over.experts(*given)
    torch.cuda.synchronize()
    return "went on"


def recovered(rank: int, size: int) -> bool:
    """After a failure: a new object on a new group, in the same processes."""
    over, _ = layers(Exchange(), timeout=TIMEOUT)
    given = batch(rank, 8)
    over.experts(*given)
    if rank == size - 1:
        raises(over, given)
    else:
        caught(lambda: over.experts(*given))
    assert over.parallel is not None
    over.parallel.close()
    over, alone = layers(Exchange(), "reference", timeout=TIMEOUT)
    return same_bits(over.experts(*given).cpu(), alone.experts(*given).cpu())


def survivors(outcomes: list[Outcome], what: str, words: str, seconds: float) -> None:
    last = len(outcomes) - 1
    assert outcomes[last].error == ("ended with code -9 and no result" if what == "dies" else None)
    for found in values(outcomes[:-1]):
        assert f"rank {last} {words}" in found["error"], found
        assert found["seconds"] < seconds, found


def test_an_exception_reaches_the_wait_for_the_counts(tmp_path: Path) -> None:
    """Although the group would wait for a minute; the group is the default one."""
    job = (in_the_counts, "raises", None)
    outcomes = run_ranks(gpus(), *job, path=tmp_path, timeout=LIMIT, backend="nccl")
    words = "raised in phase 'route' of call 3: TypeError"
    survivors(outcomes, "raises", words, 5.0)


def test_a_killed_rank_is_missed_in_the_wait_for_the_counts(tmp_path: Path) -> None:
    job = (in_the_counts, "dies", TIMEOUT)
    outcomes = run_ranks(gpus(), *job, path=tmp_path, timeout=LIMIT, backend="nccl")
    survivors(outcomes, "dies", "died or did not answer in time", TIMEOUT + 8.0)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("what", ["raises", "dies"])
def test_check_tells_of_a_rank_that_is_gone(what: str, captured: bool, tmp_path: Path) -> None:
    job = (in_a_check, what, captured)
    outcomes = run_ranks(gpus(), *job, path=tmp_path, timeout=LIMIT, backend="nccl")
    words = "raised in" if what == "raises" else "died or did not answer in time"
    survivors(outcomes, what, words, TIMEOUT + 8.0)  # 3 for others to report, 2 to abort


def test_the_watchdog_ends_a_process_that_does_not_look(tmp_path: Path) -> None:
    outcomes = run_ranks(gpus(), unseen, path=tmp_path, timeout=LIMIT, backend="nccl")
    for outcome in outcomes[:-1]:
        assert outcome.error == f"ended with code -{signal.SIGABRT.value} and no result"


def test_a_new_group_after_a_failure(tmp_path: Path) -> None:
    outcomes = run_ranks(gpus(), recovered, path=tmp_path, timeout=LIMIT, backend="nccl")
    assert values(outcomes) == [True] * gpus()
