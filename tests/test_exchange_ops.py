"""The operations between ranks in plain PyTorch: what lies on the wire, who goes where, and which
place each row comes back to; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cute_kernels import exchange_ops, nvfp4
from cute_kernels.exchange_ops import Booking, Senders, Source, Wire, views
from tests.exchange_cases import POISON, TRIPS, Trip, arrived, assert_booked, assert_sent, source_of
from tests.layers import same_bits

W = Wire(64, 3, True, False)


def booked(trip: Trip, overflow: torch.Tensor | None = None) -> Booking:
    kept = trip.overflow() if overflow is None else overflow
    return exchange_ops.book_places(trip.topk_ids(), *trip.sizes(), kept)


# ---- places


@pytest.mark.parametrize("trip", TRIPS, ids=str)
def test_places_by_hand(trip: Trip) -> None:
    size, rest = divmod(trip.experts, trip.ranks)
    home = [r for r in range(trip.ranks) for _ in range(size + (r < rest))]
    ids = trip.topk_ids().tolist()
    homes = [[home[e] if 0 <= e < trip.experts else -1 for e in row] for row in ids]
    overflow = trip.overflow()
    got = booked(trip, overflow)
    token_place = [[-1] * trip.ranks for _ in ids]
    token_first = [[0] * trip.ranks for _ in ids]
    slot_place = [[-1] * trip.top_k for _ in ids]
    base, needed = [0, 0], []
    for d in range(trip.ranks):
        there = [t for t, row in enumerate(homes) if d in row]
        slots = [(t, k) for t in there for k in range(trip.top_k) if homes[t][k] == d]
        tokens, rows = trip.room or (len(there), len(slots))
        for n, t in enumerate(there):
            token_first[t][d] = sum(s[0] < t for s in slots)
            if n < tokens:
                token_place[t][d] = base[0] + n
        for n, (t, k) in enumerate(slots):
            if n < rows and token_place[t][d] >= 0:
                slot_place[t][k] = base[1] + n
        base = [base[0] + tokens, base[1] + rows]
        needed.append([len(there), len(slots)])
    assert got.token_place.tolist() == token_place and got.token_first.tolist() == token_first
    assert got.slot_place.tolist() == slot_place and got.needed.tolist() == needed
    pairs = [list(zip(*rows)) for rows in zip(ids, slot_place)]
    assert got.ids.tolist() == [[e if p >= 0 else -1 for e, p in row] for row in pairs]
    lost = [any(h >= 0 and p < 0 for h, p in zip(*row)) for row in zip(homes, slot_place)]
    assert (got.lost is not None) == trip.limited  # else known before any routing is
    assert any(lost) <= trip.limited
    if got.lost is not None and overflow is not None:
        assert got.lost.tolist() == lost
        most = [max(n) for n in zip(*needed)]
        assert overflow.tolist() == [5 + sum(lost), max(2, most[0]), 2**40]


def test_the_cases_lose_tokens_for_both_reasons() -> None:
    lost = [booked(t).lost for t in TRIPS]
    assert sum(bool(found.any()) for found in lost if found is not None) >= 4


@pytest.mark.parametrize("field", Booking._fields)
def test_a_wrong_place_is_seen(field: str) -> None:
    trip = Trip(45, room=(7, 30))
    want = booked(trip)
    wrong = want._replace(**{field: getattr(want, field).clone()})
    flat = getattr(wrong, field).view(-1)
    flat[len(flat) // 2] = ~flat[len(flat) // 2]
    with pytest.raises(AssertionError, match=field):
        assert_booked(wrong, want)


# ---- the wire


FORMS = [
    *((True, form) for form in ("bf16", "fp32 weighted", "codes", "bf16 given")),
    *((False, form) for form in ("bf16", "fp32 weighted")),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("quantized", "form"), FORMS)
@pytest.mark.parametrize(("hidden", "top_k"), [(16, 1), (96, 3), (112, 8), (2880, 4)])
def test_a_row_comes_out_as_it_went_in(
    hidden: int, top_k: int, quantized: bool, weighted: bool, form: str
) -> None:
    wire = Wire(hidden, top_k, quantized, weighted)
    trip = Trip(7, 2, 9, top_k, room=(7, 7 * top_k), hidden=hidden)
    booking, mix, source = booked(trip), torch.rand(7, top_k), source_of(trip, form)
    rows = torch.full((14, wire.row_bytes), POISON, dtype=torch.uint8)
    exchange_ops.send_rows(source, booking, mix, wire, rows, 7)
    size = 4 * top_k + (4 * top_k if weighted else 4)
    size += hidden * 9 // 16 + 4 if quantized else 2 * hidden
    assert size <= wire.row_bytes < size + 16 and wire.row_bytes % 16 == 0
    got = views(rows, wire)
    x = source.x if source.weight is None else source.x.float() * source.weight[:, None]
    if form == "codes":
        codes = (source.x, source.scale, source.outer)
    else:
        q = nvfp4.quantize(x, "per_token" if source.outer is None else source.outer)
        codes = (q.data, q.scale.view(torch.uint8), q.global_scale.expand(7))
    seen = 0
    for t in range(7):
        for d in range(2):
            place = int(booking.token_place[t, d])
            if place < 0:
                continue
            seen += 1
            assert same_bits(got.ids[place], booking.ids[t])
            if got.weights is None:
                assert int(got.first[place]) == int(booking.token_first[t, d])
            else:
                assert same_bits(got.weights[place], mix[t])
            if quantized:
                for g, w in zip((got.data, got.scale, got.gx), codes):
                    assert same_bits(g[place], w[t])
            else:
                assert same_bits(got.data[place], x[t].bfloat16())
    assert seen == int((booking.token_place >= 0).sum()) > 0
    empty = torch.ones(14, dtype=torch.bool)
    empty[booking.token_place[booking.token_place >= 0].long()] = False
    assert (got.ids[empty] == -1).all()


def test_row_bytes_of_one_model() -> None:
    """DeepSeek-V4-Pro, top 6: 4032 bytes of codes and scales, a scale, a place and 6 ids."""
    assert Wire(7168, 6, True, False).row_bytes == 4064
    assert Wire(7168, 6, True, True).row_bytes == 4096
    assert Wire(7168, 6, False, False).row_bytes == 14368


@pytest.mark.parametrize("part", ["data", "scale", "gx", "first", "ids", "empty"])
def test_a_wrong_row_is_seen(part: str) -> None:
    trip = Trip(9, room=(9, 27))
    booking = booked(trip)
    want = torch.full((27, W.row_bytes), POISON, dtype=torch.uint8)
    exchange_ops.send_rows(source_of(trip, "bf16"), booking, None, W, want, 9)
    got = want.clone()
    fields = views(got, W)._asdict() | {"empty": views(got, W).ids}
    place = 26 if part == "empty" else int(booking.token_place.amax())
    fields[part][place] += 1
    with pytest.raises(AssertionError):
        assert_sent(got, want, W, booking)


# ---- refusals


def refused(kind: type[Exception], text: str, operation: Any, *args: Any) -> None:
    with pytest.raises(kind, match=text):
        operation(*args)


def test_what_is_refused() -> None:
    ids, book = torch.zeros((4, 3), dtype=torch.int32), exchange_ops.book_places
    refused(TypeError, "topk_ids must be int32 or int64", book, ids.float(), 8, 2)
    refused(ValueError, r"topk_ids must be \(T, K\) with K >= 1", book, ids[:, :0], 8, 2)
    refused(ValueError, "ranks must be 1 to 4096", book, ids, 8, 0)
    refused(ValueError, "room must be positive", book, ids, 8, 2, (0, 3))
    refused(ValueError, "may not be enough for", book, ids, 8, 2, (3, 12))
    refused(TypeError, "overflow must be torch.int64", book, ids, 8, 2, (3, 12), torch.zeros(3))
    refused(ValueError, "places must be below 2", book, ids, 8, 2, (2**30, 12))
    refused(ValueError, r"topk_ids must be \(T, K\)", book, ids[0], 8, 2)
    trip = Trip(4, room=(4, 12))
    booking, send = booked(trip), exchange_ops.send_rows
    out = torch.empty((12, W.row_bytes), dtype=torch.uint8)
    x, codes = source_of(trip, "bf16"), source_of(trip, "codes")
    refused(ValueError, "rows must be", send, x, booking, None, W, out[:11], 4)
    refused(ValueError, "x must have 64 columns", send, Source(x.x[:, :48]), booking, None, W, out)
    refused(ValueError, "codes need their outer", send, codes._replace(outer=None), booking, None,
            W, out, 4)  # fmt: skip
    plain, mixed = Wire(64, 3, False, False), Wire(64, 3, True, True)
    refused(ValueError, "codes travel on a quantised wire", send, codes, booking, None, plain, out)
    refused(ValueError, "needs weights", send, x, booking, None, mixed, out, 4)
    refused(ValueError, "weights must be torch.float32", send, x, booking, torch.ones(4, 2), mixed,
            out, 4)  # fmt: skip
    short = codes._replace(scale=codes.scale[:, :3])
    refused(ValueError, "scale must be torch.uint8", send, short, booking, None, W, out, 4)
    leave, o = exchange_ops.leave_rows, torch.zeros((5, 16), dtype=torch.bfloat16)
    first = torch.zeros(4, dtype=torch.int32)
    refused(ValueError, "2 ranks of 2 tokens and 3 rows, got 4 tokens and room for 5 rows", leave,
            o, ids, first, Senders(2, 2, 3), o)  # fmt: skip
    refused(
        ValueError, "needed must be torch.int64", leave, o, ids, first, Senders(2, needed=first), o
    )
    refused(TypeError, "o must be bfloat16", leave, o.float(), ids, first, Senders(2, 2, 3), o)
    stage = exchange_ops.stage_received
    refused(ValueError, "codes come with scale", stage, *codes[:2], None, ids, o, None)
    refused(
        ValueError, "token_rows must be torch.int32", stage, *codes[:3], ids[:3], o, first.float()
    )


@pytest.mark.parametrize("name", ["book_places", "send_rows", "stage_received", "leave_rows"])
def test_registration(name: str) -> None:
    """Schemas say what is written; fake tensors pass the same checks."""
    trip = Trip(6, room=(3, 9))
    booking, overflow = booked(trip), trip.overflow()
    rows, token_rows = arrived(Trip(1), W, 6, 0)
    part = views(rows, W)
    assert part.first is not None
    part.first.zero_()
    scratch = torch.empty((0, 6), dtype=torch.int32)
    out = torch.empty((9, W.row_bytes), dtype=torch.uint8)
    values = torch.empty((18, 64), dtype=torch.bfloat16)
    routes = (booking.ids, None, booking.token_place, booking.token_first, booking.needed)
    cases = {
        "book_places": (trip.topk_ids(), 7, 3, 9, *booking, overflow, scratch),
        "send_rows": (*source_of(trip, "bf16"), *routes, 3, [64, 3, 1, 0], out),
        "stage_received": (*part[:3], token_rows, values, torch.empty(18)),
        "leave_rows": (values, token_rows, part.first, None, [2, 3, 9], values.clone()),
    }
    op = getattr(torch.ops.nvfp4_megamoe, name).default
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(op, cases[name], test_utils=checks)
