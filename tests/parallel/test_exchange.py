"""The exchange without processes: which rank has an expert, and which place each row comes back
to."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from cute_kernels import exchange_ops
from cute_kernels.exchange_ops import Booking, Senders, Source, Wire
from moe.parallel import split_experts
from moe.plan import make_plan
from tests.exchange_cases import POISON

SIZES = [(1, 4, 2), (2, 6, 3), (3, 7, 3), (5, 3, 2), (8, 30, 6)]  # ranks, experts, slots


def book(ids: Tensor, experts: int, ranks: int, room: tuple[int, int] | None) -> Booking:
    overflow = torch.zeros(3, dtype=torch.int64)
    return exchange_ops.book_places(ids, experts, ranks, room, overflow, kernels=False)


def random_ids(count: int, experts: int, top_k: int, seed: int) -> Tensor:
    """Duplicates, padding and ids of no expert among them."""
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-2, experts + 2, (count, top_k), generator=gen, dtype=torch.int32)


def rank_of(expert: int, ranks: int, experts: int) -> int:
    return next(
        (r for r, (a, b) in enumerate(split_experts(experts, ranks)) if a <= expert < b), -1
    )


@pytest.mark.parametrize(
    ("experts", "ranks", "want"),
    [
        (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]),
        (128, 6, [22, 22, 21, 21, 21, 21]),
        (3, 8, [1, 1, 1, 0, 0, 0, 0, 0]),
        (385, 4, [97, 96, 96, 96]),
        (1, 1, [1]),
    ],
)
def test_experts_are_split_evenly(experts: int, ranks: int, want: list[int]) -> None:
    """H51: contiguous ranges whose sizes differ by one at most, the larger ones first; tokens go to
    the ranks that have them."""
    ranges = split_experts(experts, ranks)
    assert [b - a for a, b in ranges] == want
    assert ranges[0][0] == 0 and ranges[-1][1] == experts
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    far = [-(2**31), 2**31 - 1]  # an int32 more would be another number
    ids = torch.tensor([*range(-2, experts + 2), *far], dtype=torch.int32)
    beyond = torch.tensor([2**32, 2**63 - 1, -(2**63)])  # what int32 would turn into expert 0
    for given in (ids, ids.long(), beyond):
        booking = book(given.unsqueeze(1), experts, ranks, None)
        want = [rank_of(e, ranks, experts) for e in given.tolist()]
        goes = booking.token_place >= 0
        assert goes.tolist() == [[d == r for d in range(ranks)] for r in want]
        sent = zip(given.tolist(), booking.ids.squeeze(1).tolist())
        assert all(s == (e if 0 <= e < experts else -1) for e, s in sent)


@pytest.mark.parametrize(("ranks", "experts", "top_k"), SIZES)
@pytest.mark.parametrize("room", [None, (16, 64), (3, 7), (1, 1)])
def test_every_slot_comes_back_to_its_token(
    ranks: int, experts: int, top_k: int, room: tuple[int, int] | None
) -> None:
    """All ranks in one process: the "experts" of rank d answer for slot (token, slot) of rank r
    with a number of its own, and it must arrive there and nowhere else."""
    wire = Wire(16, top_k, False, False)
    rng = random.Random(ranks)
    ids = [random_ids(rng.choice((0, 1, 9, 14)), experts, top_k, r) for r in range(ranks)]
    tokens = [(torch.arange(len(i)) + 100.0 * r).repeat(16, 1).t() for r, i in enumerate(ids)]
    books = [book(i, experts, ranks, room) for i in ids]
    counts = [b.needed.tolist() for b in books]
    sent = []
    for x, booking in zip(tokens, books):
        places = int(booking.needed[:, 0].sum()) if room is None else ranks * room[0]
        rows = torch.full((places, wire.row_bytes), POISON, dtype=torch.uint8)
        size = 0 if room is None else room[0]
        exchange_ops.send_rows(Source(x), booking, None, wire, rows, size, kernels=False)
        sent.append(rows.split(room[0] if room else booking.needed[:, 0].tolist()))
    back: list[list[Tensor]] = [[] for _ in range(ranks)]
    for d in range(ranks):
        part = exchange_ops.views(torch.cat([sent[r][d] for r in range(ranks)]), wire)
        first, end = split_experts(experts, ranks)[d]
        plan = make_plan(part.ids, torch.zeros(part.ids.shape), experts, first, end - first)
        # o of a row: its token's number and its slot
        o = torch.full((plan.row_token.numel() + 1, 8), -1.0, dtype=torch.bfloat16)
        for n, slots in enumerate(plan.token_rows.tolist()):
            for k, row in enumerate(slots):
                if row >= 0:
                    o[row] = torch.tensor([float(part.data[n, 0]), *[float(k)] * 7])
        by = Senders(ranks, *(room or ()))
        rows_for = [room[1] if room else counts[r][d][1] for r in range(ranks)]
        if room is None:
            by = Senders(ranks, needed=torch.tensor([c[d] for c in counts]))
        out = torch.full((sum(rows_for), 8), torch.nan, dtype=torch.bfloat16)
        assert part.first is not None
        exchange_ops.leave_rows(o, plan.token_rows, part.first, by, out, kernels=False)
        for r, rows in enumerate(out.split(rows_for)):
            back[r].append(rows)
    for r in range(ranks):
        returned = torch.cat(back[r])
        for t, slots in enumerate(books[r].slot_place.tolist()):
            for k, place in enumerate(slots):
                valid = 0 <= int(ids[r][t, k]) < experts
                lost = books[r].lost
                assert (place >= 0) == valid or (lost is not None and bool(lost[t]))
                if place >= 0:
                    assert returned[place, :2].tolist() == [float(tokens[r][t, 0].bfloat16()), k]
