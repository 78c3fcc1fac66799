"""The kernels between ranks, compiled for sm_100a, in the simulator: bytes equal the plain PyTorch
implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import compile as compiler
from cute_kernels import exchange_ops, ops
from cute_kernels.exchange_ops import Senders, Wire, views
from tests.exchange_cases import (
    POISON,
    Trip,
    arrived,
    assert_booked,
    assert_sent,
    source_of,
)
from tests.small_kernels import assert_same, used_scales

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)
SCHEDULES = [("lazy", 0), ("random", 1), ("random", 2)]


def simulate(operation: Any, *args: Any, schedule: str = "lazy", seed: int = 0, none: bool = False):
    """Result of the operation, its kernels run in the simulator, buffers poisoned."""
    from cute_kernels.sim import Simulator

    torch.use_deterministic_algorithms(True)
    try:
        with Simulator(seed=seed, schedule=schedule) as s:
            out = operation(*args)
    finally:
        torch.use_deterministic_algorithms(False)
    assert none or s.launches, "nothing was launched: the plain implementation ran instead"
    return out


def book(trip: Trip, **how: Any) -> None:
    ids, mine, theirs = trip.topk_ids(), trip.overflow(), trip.overflow()
    got = simulate(exchange_ops.book_places, ids, *trip.sizes(), mine, none=not len(ids), **how)
    want = exchange_ops.book_places(ids, *trip.sizes(), theirs, kernels=False)
    assert_booked(got, want)
    if mine is not None and theirs is not None:
        assert_same(mine, theirs, "overflow")


BOOKED = [
    Trip(0), Trip(1, 64, 256, 8), Trip(33, room=(33, 99)), Trip(70, 5, 3, 2),
    Trip(45, room=(7, 30), ids=torch.int64), Trip(50, 40, 385, 8, room=(3, 5)),
    Trip(40, 8, 30, 6, room=(40, 13)),
]  # fmt: skip


@pytest.mark.parametrize("trip", BOOKED, ids=str)
def test_book_places(trip: Trip) -> None:
    book(trip)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("room", [None, (30, 80), (100, 33)])
def test_book_places_over_ctas(room, schedule, seed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_ops, "ONE_CTA_TOKENS", 40)
    book(Trip(100, room=room), schedule=schedule, seed=seed)


@pytest.mark.parametrize("seed", range(4))
def test_book_places_with_counters_of_several_warps(seed: int) -> None:
    """Where a rank begins follows from counters that other warps have added up."""
    book(Trip(20, 64, 256, 4), schedule="random", seed=seed)


def test_the_cases_run_out_of_tokens_and_of_rows() -> None:
    """Else no comparison would see a limit that is off by one."""
    reasons = {"tokens": 0, "rows": 0}
    for trip in (*BOOKED, Trip(100, room=(30, 80)), Trip(100, room=(100, 33))):
        whole, found = (
            exchange_ops.book_places(trip.topk_ids(), *sizes, trip.overflow(), False)
            for sizes in ((trip.experts, trip.ranks, None), trip.sizes())
        )
        if found.lost is not None:
            there = ((whole.token_place >= 0) == (found.token_place >= 0)).all(dim=1)
            reasons["tokens"] += int((found.lost & ~there).sum())
            reasons["rows"] += int((found.lost & there).sum())
    assert min(reasons.values()) > 0, reasons


SENT = [
    (Trip(9, room=(4, 11)), "bf16", False),
    (Trip(9), "fp32 weighted", True),
    (Trip(0, room=(4, 11)), "bf16", False),
    (Trip(5, 33, 40, 8, room=(3, 8), hidden=96), "fp16 given", True),
    (Trip(6, 2, 4, 1, hidden=1040), "codes", False),
    (Trip(4, room=(4, 12), hidden=16), "codes", True),
    (Trip(2, 2, 4, 1, hidden=4112), "bf16", False),  # two blocks per thread, some have one
    (Trip(2, 2, 4, 1, hidden=4112), "codes", True),
]


@pytest.mark.parametrize(("trip", "form", "weights"), SENT, ids=str)
def test_send_rows(trip: Trip, form: str, weights: bool) -> None:
    send(trip, form, Wire(trip.hidden, trip.top_k, True, weights))


@pytest.mark.parametrize("form", ["bf16", "fp32 weighted"])
def test_send_rows_in_bf16(form: str) -> None:
    trip = Trip(9, room=(4, 11), hidden=80)
    send(trip, form, Wire(80, 3, False, False))


def send(trip: Trip, form: str, wire: Wire) -> None:
    ids = trip.topk_ids()
    booking = exchange_ops.book_places(ids, *trip.sizes(), trip.overflow(), kernels=False)
    places, room = trip.places(booking), 0 if trip.room is None else trip.room[0]
    source, mix = source_of(trip, form), torch.rand(ids.shape)
    got, want = (torch.full((places, wire.row_bytes), POISON, dtype=torch.uint8) for _ in range(2))
    simulate(exchange_ops.send_rows, source, booking, mix, wire, got, room)
    exchange_ops.send_rows(source, booking, mix, wire, want, room, kernels=False)
    assert_sent(got, want, wire, booking)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_sending_waits_for_the_booking(schedule: str, seed: int) -> None:
    """It is launched before the booking has ended."""
    trip = Trip(9, room=(4, 11))
    ids, sizes, wire = trip.topk_ids(), trip.sizes(), Wire(trip.hidden, trip.top_k, True, True)
    booking = exchange_ops.book_places(ids, *sizes, trip.overflow(), kernels=False)
    source, mix = source_of(trip, "codes"), torch.rand(ids.shape)
    shape = (trip.places(booking), wire.row_bytes)
    got, want = (torch.full(shape, POISON, dtype=torch.uint8) for _ in range(2))

    def both() -> Any:
        booked = exchange_ops.book_places(ids, *sizes, trip.overflow())
        exchange_ops.send_rows(source, booked, mix, wire, got, 4)

    simulate(both, schedule=schedule, seed=seed)
    exchange_ops.send_rows(source, booking, mix, wire, want, 4, kernels=False)
    assert_sent(got, want, wire, booking)


@pytest.mark.parametrize(
    ("hidden", "quantized", "on_wire"),
    [
        (16, True, True),
        (112, True, False),
        (1040, True, True),
        (80, False, True),
        (4112, True, True),
    ],
)
def test_stage_received(hidden: int, quantized: bool, on_wire: bool) -> None:
    wire = Wire(hidden, 3, quantized, False)
    rows, token_rows = arrived(Trip(1), wire, 11, hidden)
    part = views(rows, wire)[:3]
    given = part if on_wire else tuple(None if p is None else p.contiguous() for p in part)
    values, row_gx = (torch.full(s, -7.0) for s in ((33, hidden), (33,)))
    out = [values.bfloat16(), row_gx if quantized else None]
    simulate(exchange_ops.stage_received, *given, token_rows, *out)
    want = [None if t is None else torch.empty_like(t) for t in out]
    exchange_ops.stage_received(*given, token_rows, *want)
    used = token_rows[token_rows >= 0].long()
    for g, w, name in zip(out, want, ("values", "row_gx")):
        if g is not None and w is not None:
            assert_same(g[used], w[used], name)
            rest = torch.ones(33, dtype=torch.bool).index_fill_(0, used, False)
            assert (g[rest] == -7.0).all()


@pytest.mark.parametrize(("hidden", "close"), [(2056, False), (16, True)])
def test_leave_rows(hidden: int, close: bool) -> None:
    wire = Wire(16, 3, True, False)
    rows, token_rows = arrived(Trip(1), wire, 12, hidden)
    counts = torch.tensor([[5, 0, 9], [0, 0, 9], [7, 0, 9]]) if close else None
    sizes = [5, 0, 7] if close else [4, 4, 4]
    here = (token_rows >= 0).sum(dim=1)
    first = views(rows, wire).first
    assert first is not None
    at = 0
    for rank, size in enumerate(sizes):
        mine = here[at : at + size]
        first[at : at + size] = (mine.cumsum(0) - mine).int()
        if counts is not None:
            counts[rank, 1] = mine.sum()
        at += size
    total = int(here.sum())
    senders = Senders(3, 4, 13) if counts is None else Senders(3, needed=counts[:, :2])
    o = torch.randn(36, hidden).bfloat16()
    got, want = (torch.full((39 if counts is None else total, hidden), -7.0) for _ in range(2))
    got, want = got.bfloat16(), want.bfloat16()
    simulate(exchange_ops.leave_rows, o, token_rows, first, senders, got)
    exchange_ops.leave_rows(o, token_rows, first, senders, want, False)
    used = torch.cat([torch.arange(int(here[sum(sizes[:r]) : sum(sizes[: r + 1])].sum())) + (
        13 * r if counts is None else int(counts[:r, 1].sum())) for r in range(3)])  # fmt: skip
    assert_same(got[used], want[used], "rows")
    rest = torch.ones(len(got), dtype=torch.bool).index_fill_(0, used, False)
    assert (got[rest] == -7.0).all()
    flat = token_rows.reshape(-1)
    assert_same(got[used], o[flat[flat >= 0].long()], "rows in the order of slots")


@pytest.mark.parametrize("ctas", [1, 3])
@pytest.mark.parametrize("hidden", [128, 352])
def test_rows_apart_are_sorted_and_permuted_as_they_lie(
    hidden: int, ctas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "ONE_CTA_PAIRS", 66 // ctas)
    rows, _ = arrived(Trip(1, experts=9), Wire(hidden, 6, True, False), 11, hidden)
    part, mix = views(rows, Wire(hidden, 6, True, False)), torch.rand(11, 6)
    plan = simulate(ops.sort_routes, part.ids, mix, 9, 1, 4)
    close = ops.sort_routes(part.ids.contiguous(), mix, 9, 1, 4)
    for apart, whole, name in zip(plan, close, ("offsets", "row_token", "weights", "token_rows")):
        assert_same(apart, whole, name)
    assert part.scale is not None and part.gx is not None
    inputs = (part.data, part.scale, part.gx)
    got = simulate(ops.permute_quantized_rows, *inputs, plan[1], plan[0])
    want = ops.permute_quantized_rows(*(p.contiguous() for p in inputs), plan[1], plan[0])
    end = int(plan[0][-1])
    assert 0 < end < 66
    assert_same(got[0][:end], want[0][:end], "codes")
    assert_same(used_scales(got[1], plan[0]), used_scales(want[1], plan[0]), "scales")
    assert_same(got[2][:end], want[2][:end], "gx")
