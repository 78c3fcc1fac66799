"""Results do not depend on the number of ranks: every call on 2, 3, 4 and 5 of them against one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.check import assert_bytes_equal
from tests.parallel import jobs
from tests.parallel.jobs import Call
from tests.parallel.ranks import run_ranks, values


def compare(results: list[dict[str, Any]], calls: list[Call]) -> list[str]:
    """What differs from one rank, in bits of y or in bytes on the wire."""
    size, wrong = len(results), []
    for call in calls:
        parts = [r[call.name] for r in results]
        for rank, (part, want) in enumerate(zip(parts, jobs.call_of_one(call, size), strict=True)):
            try:
                assert_bytes_equal(part["y"], want, f"{call.name}, rank {rank}")
            except AssertionError as error:
                wrong.append(str(error))
        for rank, want in enumerate(jobs.expected_bytes(call, size)):
            sent = {k: parts[rank]["sent"].get(k, 0) for k in want}
            if sent != want:
                wrong.append(f"{call.name}, rank {rank}: sent {sent}, the formulas say {want}")
    return wrong


@pytest.mark.parametrize("size", [2, 3, 4, 5, pytest.param(8, marks=pytest.mark.slow)])
def test_the_bits_of_one_rank(size: int, tmp_path: Path) -> None:
    workspace = size == 3  # scratch of exactly plan_memory bytes, poisoned
    results = values(run_ranks(size, jobs.matrix, workspace, path=tmp_path, timeout=240.0))
    wrong = compare(results, jobs.calls(size))
    assert not wrong, "\n".join(wrong)


def one_rank_results(size: int, calls: list[Call]) -> list[dict[str, Any]]:
    want = {c.name: (jobs.call_of_one(c, size), jobs.expected_bytes(c, size)) for c in calls}
    return [
        {name: {"y": y[r].clone(), "sent": dict(sent[r])} for name, (y, sent) in want.items()}
        for r in range(size)
    ]


def test_the_comparison_sees_a_wrong_bit_a_lost_row_and_a_byte_too_many() -> None:
    calls = [jobs.calls()[0], Call("many tokens", counts=(20, 0, 13))]
    good = one_rank_results(3, calls)
    assert not compare(good, calls)
    for name in (c.name for c in calls):
        bad = one_rank_results(3, calls)
        bad[2][name]["y"].view(torch.int16)[0, 3] ^= 1
        assert len(compare(bad, calls)) == 1
        bad = one_rank_results(3, calls)
        bad[0][name]["y"][3] = 0
        assert len(compare(bad, calls)) == 1
        bad = one_rank_results(3, calls)
        bad[1][name]["sent"]["dispatch"] += 16
        assert len(compare(bad, calls)) == 1


def test_calls_have_names_of_their_own_and_reach_every_rank() -> None:
    names = [c.name for c in jobs.calls()]
    assert len(names) == len(set(names))
    sent = jobs.expected_bytes(dataclasses.replace(jobs.calls()[0], counts=(40,)), 5)
    assert all(s["dispatch"] > 0 and s["return"] > 0 for s in sent)
