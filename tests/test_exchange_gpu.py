"""The kernels between ranks on a real GPU: every byte equal to the plain PyTorch implementation on
the CPU. Buffers are poisoned."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_kernels import exchange_ops, ops
from cute_kernels.exchange_ops import Booking, Senders, Wire, views
from tests.exchange_cases import POISON, TRIPS, Trip, arrived, assert_booked, assert_sent, source_of
from tests.small_kernels import assert_same, used_scales

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA = torch.device("cuda:0")
MANY = [
    Trip(3000, 2, 256, 6, room=(2900, 9000)), Trip(8192, 8, 256, 8, room=(8192, 65536)),
    Trip(5000, 64, 384, 8, ids=torch.int64), Trip(70000, 2, 16, 1, room=(30000, 30000)),
]  # fmt: skip


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("trip", [*TRIPS, *MANY], ids=str)
def test_book_places(trip: Trip) -> None:
    ids, mine, theirs = trip.topk_ids(), trip.overflow(CUDA), trip.overflow()
    got = exchange_ops.book_places(ids.to(CUDA), *trip.sizes(), mine)
    assert_booked(got, exchange_ops.book_places(ids, *trip.sizes(), theirs))
    if mine is not None and theirs is not None:
        assert_same(mine, theirs, "overflow")


SENT = [
    *((Trip(130, r, 40, 6, room=(60, 200), hidden=h), f)
      for r, h in ((2, 16), (8, 352), (40, 2880)) for f in ("bf16", "fp32 weighted", "codes")),
    (Trip(1, 2, 256, 6, room=(1, 6), hidden=4096), "bf16"),
    (Trip(33, 3, 40, 6, hidden=7168), "fp16 given"),
    (Trip(600, 2, 40, 8, room=(600, 4800), hidden=7168), "bf16"),
    (Trip(0, room=(40, 50), hidden=4096), "bf16"),
]  # fmt: skip


@pytest.mark.parametrize("quantized", [True, False], ids=["nvfp4", "bf16"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weights"])
@pytest.mark.parametrize(("trip", "form"), SENT, ids=str)
def test_send_rows(trip: Trip, form: str, weighted: bool, quantized: bool) -> None:
    form = form if quantized or form != "codes" else "fp16"
    form = form if quantized else form.replace(" given", "")
    wire = Wire(trip.hidden, trip.top_k, quantized, weighted)
    booking = exchange_ops.book_places(trip.topk_ids(), *trip.sizes(), trip.overflow())
    places, room = trip.places(booking), 0 if trip.room is None else trip.room[0]
    mix = torch.rand(trip.tokens, trip.top_k)
    want = torch.full((places, wire.row_bytes), POISON, dtype=torch.uint8)
    exchange_ops.send_rows(source_of(trip, form), booking, mix, wire, want, room)
    there = Booking(*(None if t is None else t.to(CUDA) for t in booking))
    got = torch.full_like(want, POISON, device=CUDA)
    exchange_ops.send_rows(source_of(trip, form, CUDA), there, mix.to(CUDA), wire, got, room)
    assert_sent(got, want, wire, booking)


@pytest.mark.parametrize("on_wire", [True, False], ids=["wire", "close"])
@pytest.mark.parametrize("quantized", [True, False], ids=["nvfp4", "bf16"])
@pytest.mark.parametrize("hidden", [16, 352, 2880, 4096, 7168])
def test_stage_received(hidden: int, quantized: bool, on_wire: bool) -> None:
    wire = Wire(hidden, 6, quantized, False)
    rows, token_rows = arrived(Trip(1, experts=9), wire, 300, hidden)
    want = [torch.empty((1800, hidden), dtype=torch.bfloat16), torch.empty(1800)]
    want = want if quantized else [want[0], None]
    exchange_ops.stage_received(*views(rows, wire)[:3], token_rows, *want)
    part = views(rows.to(CUDA), wire)[:3]
    given = part if on_wire else tuple(None if p is None else p.contiguous() for p in part)
    got = [None if w is None else torch.full_like(w, -7.0, device=CUDA) for w in want]
    exchange_ops.stage_received(*given, token_rows.to(CUDA), *got)
    used = token_rows[token_rows >= 0].long()
    rest = torch.ones(1800, dtype=torch.bool).index_fill_(0, used, False)
    for g, w in zip(got, want):
        if g is not None and w is not None:
            assert_same(g.cpu()[used], w[used], "rows")
            assert (g.cpu()[rest] == -7.0).all()


@pytest.mark.parametrize("close", [False, True], ids=["fixed", "close"])
@pytest.mark.parametrize(("hidden", "ranks", "each"), [(16, 3, 5), (4096, 2, 1), (7168, 64, 20)])
def test_leave_rows(hidden: int, ranks: int, each: int, close: bool) -> None:
    wire, count = Wire(16, 6, True, False), ranks * each
    rows, token_rows = arrived(Trip(1, experts=5), wire, count, hidden)
    here = (token_rows >= 0).sum(dim=1).view(ranks, each)
    first = views(rows, wire).first
    assert first is not None
    first.copy_((here.cumsum(1) - here).view(-1))
    needed = torch.stack((torch.full((ranks,), each), here.sum(dim=1)), dim=1)
    room = each * 6
    o = torch.randn(count * 6, hidden).bfloat16()
    places = int(here.sum()) if close else ranks * room
    want = torch.full((places, hidden), -7.0).bfloat16()
    got = want.to(CUDA)
    by = there = Senders(ranks, each, room)
    if close:
        wide = torch.zeros((ranks, 5), dtype=torch.int64, device=CUDA)
        wide[:, 2:4] = needed.to(CUDA)
        by, there = Senders(ranks, needed=needed), Senders(ranks, needed=wide[:, 2:4])
    exchange_ops.leave_rows(o, token_rows, first, by, want)
    given = (o.to(CUDA), token_rows.to(CUDA), views(rows.to(CUDA), wire).first)
    exchange_ops.leave_rows(*given, there, got)
    if close:
        flat = token_rows.reshape(-1)
        assert_same(want, o[flat[flat >= 0].long()], "rows in the order of slots")
    used = torch.ones(places, dtype=torch.bool)
    if not close:
        used = torch.cat([torch.arange(room) < n for n in here.sum(dim=1)])
        assert (got.cpu()[~used] == -7.0).all()
    assert_same(got.cpu()[used], want[used], "rows")


@pytest.mark.parametrize("hidden", [128, 352, 7168])
def test_rows_apart_are_permuted_as_they_lie(hidden: int) -> None:
    wire = Wire(hidden, 6, True, False)
    rows, _ = arrived(Trip(1, experts=9), wire, 300, hidden)
    rows = rows.to(CUDA)
    part = views(rows, wire)
    plan = ops.sort_routes(part.ids, torch.zeros(300, 6, device=CUDA), 9, 1, 4)
    close = ops.sort_routes(part.ids.contiguous(), torch.zeros(300, 6, device=CUDA), 9, 1, 4)
    for apart, whole, name in zip(plan, close, ("offsets", "row_token", "weights", "token_rows")):
        assert_same(apart, whole, name)
    assert part.scale is not None and part.gx is not None
    got = ops.permute_quantized_rows(part.data, part.scale, part.gx, plan[1], plan[0])
    copies = (part.data.contiguous(), part.scale.contiguous(), part.gx.contiguous())
    want = ops.permute_quantized_rows(*copies, plan[1], plan[0])
    end = int(plan[0][-1])
    assert 0 < end < 1800
    assert_same(got[0][:end], want[0][:end], "codes")
    assert_same(used_scales(got[1], plan[0]), used_scales(want[1], plan[0]), "scales")
    assert_same(got[2][:end], want[2][:end], "gx")
