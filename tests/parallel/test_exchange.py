"""The exchange without processes: what lies on the wire, who goes where, and which place each row
comes back to."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from cute_kernels import nvfp4
from moe.exchange import Homes, Places, Wire, book, depart, leaving_rows, owners, token_places
from moe.local import TokenRows
from moe.parallel import split_experts
from moe.plan import RoutingPlan, make_plan
from tests.layers import poison_new_tensors, same_bits

SIZES = [(1, 4, 2), (2, 6, 3), (3, 7, 3), (5, 3, 2), (8, 30, 6)]  # ranks, experts, slots


def homes_of(ranks: int, experts: int) -> Homes:
    return Homes.of(split_experts(experts, ranks), torch.device("cpu"))


def sort(ids: Tensor, groups: int) -> RoutingPlan:
    return make_plan(ids, torch.zeros(ids.shape), groups)


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
    """H51: contiguous ranges whose sizes differ by one at most, the larger ones first."""
    ranges = split_experts(experts, ranks)
    assert [b - a for a, b in ranges] == want
    assert ranges[0][0] == 0 and ranges[-1][1] == experts
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))
    far = [-(2**31), 2**31 - 1]  # an int32 more would be another number
    ids = torch.tensor([*range(-2, experts + 2), *far], dtype=torch.int32)
    beyond = torch.tensor([2**32, 2**63 - 1, -(2**63)])  # what int32 would turn into expert 0
    for given in (ids, ids.long(), beyond):
        owner = owners(given.unsqueeze(1), homes_of(ranks, experts))
        want = [rank_of(e, ranks, experts) for e in given.tolist()]
        assert owner.rank.squeeze(1).tolist() == [ranks if r < 0 else r for r in want]
        assert owner.goes.tolist() == [[d if d == r else -1 for d in range(ranks)] for r in want]
        sent = zip(given.tolist(), owner.ids.squeeze(1).tolist())
        assert all(e == s if 0 <= e < experts else s in (-1, experts) for e, s in sent)


# ---- the wire ------------------------------------------------------------------------------------


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("hidden", "top_k"), [(16, 1), (96, 3), (112, 8), (2880, 4)])
def test_a_row_comes_out_as_it_went_in(
    hidden: int, top_k: int, quantized: bool, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire(hidden, top_k, quantized, weighted)
    x = torch.randn(7, hidden, generator=torch.Generator().manual_seed(0))
    x[3] = torch.nan
    q = nvfp4.quantize(x)
    tokens = TokenRows(q.data, q.scale.view(torch.uint8), q.global_scale)
    tokens = tokens if quantized else TokenRows(x.bfloat16())
    ids, weights = random_ids(7, 9, top_k, 1), torch.rand(7, top_k)
    poison_new_tensors(monkeypatch)
    rows = wire.pack(tokens, ids, weights)
    size = 4 * top_k * (1 + weighted) + (hidden * 9 // 16 + 4 if quantized else 2 * hidden)
    assert rows.shape == (7, wire.row_bytes) and size <= wire.row_bytes < size + 16
    assert wire.row_bytes % 16 == 0
    back, ids_back, weights_back = wire.unpack(rows)
    assert same_bits(back.data, tokens.data) and same_bits(ids_back, ids)
    if quantized:
        assert back.scale is not None and tokens.scale is not None
        assert back.gx is not None and tokens.gx is not None
        assert same_bits(back.scale, tokens.scale) and same_bits(back.gx, tokens.gx)
    assert same_bits(weights_back, weights) if weighted else weights_back is None
    wire.empty(rows, torch.arange(7) % 2 == 0)
    emptied = wire.unpack(rows)[1]
    assert (emptied[::2] == -1).all() and same_bits(emptied[1::2], ids[1::2])
    assert same_bits(wire.unpack(rows)[0].data, tokens.data)


def test_row_bytes_of_one_model() -> None:
    """DeepSeek-V4-Pro, top 6: 4032 bytes of codes and scales, a scale and 6 ids."""
    assert Wire(7168, 6, True, False).row_bytes == 4064
    assert Wire(7168, 6, True, True).row_bytes == 4096
    assert Wire(7168, 6, False, False).row_bytes == 14368


# ---- departures and places -----------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "experts", "top_k"), SIZES)
@pytest.mark.parametrize("count", [0, 1, 13])
def test_tokens_go_once_to_each_rank(ranks: int, experts: int, top_k: int, count: int) -> None:
    ids = random_ids(count, experts, top_k, count)
    going = depart(owners(ids, homes_of(ranks, experts)), sort)
    homes = [[rank_of(e, ranks, experts) for e in row] for row in ids.tolist()]
    pairs = [(d, t) for d in range(ranks) for t in range(count) if d in homes[t]]
    assert going.tokens.row_token[: len(pairs)].tolist() == [t for _, t in pairs]
    slots = [(d, t, k) for d, t in pairs for k in range(top_k) if homes[t][k] == d]
    counts = [[sum(p[0] == d for p in x) for x in (pairs, slots)] for d in range(ranks)]
    assert going.counts().tolist() == counts
    place = {(t, k): n for n, (_, t, k) in enumerate(slots)}
    want = [[place.get((t, k), -1) for k in range(top_k)] for t in range(count)]
    assert going.slots.token_rows.tolist() == want
    sent = {(t, d): n for n, (d, t) in enumerate(pairs)}
    want = [[sent.get((t, d), -1) for d in range(ranks)] for t in range(count)]
    assert going.tokens.token_rows.tolist() == want


@pytest.mark.parametrize(("ranks", "experts", "top_k"), SIZES)
@pytest.mark.parametrize(("tokens", "rows"), [(13, 80), (4, 80), (13, 5), (3, 4), (1, 1)])
def test_places_are_given_in_order(
    ranks: int, experts: int, top_k: int, tokens: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = random_ids(13, experts, top_k, tokens + rows)
    owner = owners(ids, homes_of(ranks, experts))
    going = depart(owner, sort)
    poison_new_tensors(monkeypatch)
    places = Places.of(tokens, rows, ranks, torch.device("cpu"))
    booking = book(owner, going, places)
    homes = [[rank_of(e, ranks, experts) for e in row] for row in ids.tolist()]
    token = [-1] * (ranks * tokens)
    row_place = [[-1] * top_k for _ in range(13)]
    token_place = [[-1] * ranks for _ in range(13)]
    for d in range(ranks):
        there = [t for t in range(13) if d in homes[t]]
        slots = [(t, k) for t in there[:tokens] for k in range(top_k) if homes[t][k] == d]
        for n, t in enumerate(there[:tokens]):
            token[d * tokens + n], token_place[t][d] = t, d * tokens + n
        for n, (t, k) in enumerate(slots[:rows]):
            row_place[t][k] = d * rows + n
    lost = [any(homes[t][k] >= 0 and row_place[t][k] < 0 for k in range(top_k)) for t in range(13)]
    assert booking.token.masked_fill(booking.empty, -1).tolist() == token
    assert all(0 <= t < 13 for t in booking.token.tolist())
    assert booking.rows.tolist() == row_place
    for wanted, sent, places_of in zip(ids.tolist(), booking.ids.tolist(), row_place):
        assert all(e == s if p >= 0 else s in (-1, experts) for e, s, p in
                   zip(wanted, sent, places_of))  # fmt: skip
    assert token_places(going, places).tolist() == token_place
    if tokens >= 13 and rows >= 13 * top_k:
        assert booking.lost is None and not any(lost)  # known before any routing is
    else:
        assert booking.lost is not None and booking.lost.tolist() == lost


@pytest.mark.parametrize(("ranks", "experts", "top_k"), SIZES)
@pytest.mark.parametrize("capacity", [None, (16, 64), (3, 7), (1, 1)])
def test_every_slot_comes_back_to_its_token(
    ranks: int, experts: int, top_k: int, capacity: tuple[int, int] | None
) -> None:
    """All ranks in one process: the "experts" of rank d answer for slot (token, slot) of rank r
    with a number of its own, and it must arrive there and nowhere else."""
    homes, wire = homes_of(ranks, experts), Wire(16, top_k, False, False)
    rng = random.Random(ranks)
    ids = [random_ids(rng.choice((0, 1, 9, 14)), experts, top_k, r) for r in range(ranks)]
    owner = [owners(i, homes) for i in ids]
    tokens = [(torch.arange(len(i)) + 100.0 * r).repeat(16, 1).t() for r, i in enumerate(ids)]
    going = [depart(o, sort) for o in owner]
    given = [o.ids for o in owner]
    if capacity is not None:
        places = Places.of(*capacity, ranks, torch.device("cpu"))
        books = [book(o, g, places) for o, g in zip(owner, going)]
        given = [b.ids for b in books]
    packed = [wire.pack(TokenRows(t.bfloat16()), i, i) for t, i in zip(tokens, given)]
    if capacity is not None:
        nothing = torch.full((1, wire.row_bytes), 255, dtype=torch.uint8)
        sent = [(p if len(p) else nothing)[b.token] for p, b in zip(packed, books)]
        for rows, b in zip(sent, books):
            wire.empty(rows, b.empty)
        sent = [list(s.split(capacity[0])) for s in sent]
    else:
        sent = [
            list(p[g.tokens.row_token[: sum(n)]].split(n))
            for p, g in zip(packed, going)
            for n in [g.counts()[:, 0].tolist()]
        ]
    back: list[list[Tensor]] = [[] for _ in range(ranks)]
    for d in range(ranks):
        arrived, here, _ = wire.unpack(torch.cat([sent[r][d] for r in range(ranks)]))
        first, end = split_experts(experts, ranks)[d]
        plan = make_plan(here, torch.zeros(here.shape), experts, first, end - first)
        # o of a row: its token's number and its slot
        o = torch.full((plan.row_token.numel() + 1, 2), -1.0)
        for n, slots in enumerate(plan.token_rows.tolist()):
            for k, row in enumerate(slots):
                if row >= 0:
                    o[row] = torch.tensor([float(arrived.data[n, 0]), float(k)])
        if capacity is not None:
            index = leaving_rows(plan.token_rows, ranks * capacity[1], places)
            parts = o[index].split(capacity[1])
        else:
            counts = [int(g.counts()[d, 1]) for g in going]
            parts = o[leaving_rows(plan.token_rows, sum(counts))].split(counts)
        for r in range(ranks):
            back[r].append(parts[r])
    for r in range(ranks):
        returned = torch.cat(back[r])
        found = going[r].slots.token_rows if capacity is None else books[r].rows
        for t, slots in enumerate(found.tolist()):
            for k, place in enumerate(slots):
                valid = 0 <= int(ids[r][t, k]) < experts
                gone = None if capacity is None else books[r].lost
                assert (place >= 0) == valid or (gone is not None and bool(gone[t]))
                if place >= 0:
                    assert returned[place].tolist() == [float(tokens[r][t, 0].bfloat16()), k]
