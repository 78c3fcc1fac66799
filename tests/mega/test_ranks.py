"""The published call sequence on several ranks: y of every rank is that of one rank with all
experts, statistics count what arrives, a rank that refuses leaves nobody waiting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe.parallel import split_experts
from tests.layers import same_bits
from tests.mega import data, jobs
from tests.mega.data import E
from tests.mega.jobs import LIMIT, SEQUENCES
from tests.parallel.ranks import run_ranks, values


def wrong(results: list[dict[str, Any]]) -> list[str]:
    size, out = len(results), []
    for sequence in SEQUENCES:
        received = sum(data.counts(jobs.tokens_of(r)) for r in range(size))
        for rank, (first, end) in enumerate(split_experts(E, size)):
            found = results[rank][sequence.name]
            want = data.stages(jobs.layer_of(sequence), jobs.tokens_of(rank), LIMIT).y
            if not same_bits(found["y"], want):
                out.append(f"{sequence.name}, rank {rank}: y")
            if not torch.equal(found["stats"], 7 + sequence.calls * received[first:end]):
                out.append(f"{sequence.name}, rank {rank}: statistics {found['stats'].tolist()}")
            if found["experts"] != (first, end - first):
                out.append(f"{sequence.name}, rank {rank}: experts {found['experts']}")
    return out


@pytest.mark.parametrize("size", [2, 5])
def test_the_published_sequence_over_ranks(size: int, tmp_path: Path) -> None:
    results = values(run_ranks(size, jobs.published_sequences, path=tmp_path))
    assert not wrong(results)
    results[0]["counts"]["y"].view(torch.int16)[2, 3] ^= 1  # the comparison can fail
    results[1]["a2"]["stats"][0] += 1
    assert wrong(results) == [
        "counts, rank 0: y",
        f"a2, rank 1: statistics {results[1]['a2']['stats'].tolist()}",
    ]


def test_a_rank_that_refuses_makes_the_others_raise(tmp_path: Path) -> None:
    results = values(run_ranks(3, jobs.one_rank_refuses, path=tmp_path))
    assert results[1]["errors"][0].startswith("TypeError: y must be a bfloat16 tensor")
    for rank in (0, 2):
        first = results[rank]["errors"][0]
        assert first.startswith("RankError") and "rank 1" in first and "bfloat16" in first, first
    for result in results:
        assert "refused after a failure" in result["errors"][1]
        assert result["kept"] and result["seconds"] < 30
