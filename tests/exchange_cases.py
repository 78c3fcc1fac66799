"""Inputs and comparisons for the kernels between ranks: shared by the CPU, simulator and GPU
tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from cute_kernels import nvfp4, torch_ops
from cute_kernels.exchange_ops import Booking, Source, Wire, views
from tests.small_kernels import Case, assert_same

FAR = [-(2**31), 2**31 - 1]  # an int32 more would be another number
POISON = 0x5A  # of rows on the wire: four of these bytes are no id -1, which 255 would be
BEYOND = [2**32, 2**63 - 1, -(2**63)]  # what int32 would turn into expert 0


@dataclasses.dataclass(frozen=True)
class Trip:
    """``room``: (C, S) or None. ``routing``: 'random', 'one' (all slots on one rank), 'nowhere'."""

    tokens: int
    ranks: int = 3
    experts: int = 7
    top_k: int = 3
    room: tuple[int, int] | None = None
    ids: torch.dtype = torch.int32
    routing: str = "random"
    hidden: int = 64

    def topk_ids(self, device: torch.device | str = "cpu") -> Tensor:
        """Duplicates, padding and ids of no expert among them."""
        g = torch.Generator().manual_seed(self.tokens + self.ranks)
        shape = (self.tokens, self.top_k)
        ids = torch.randint(-2, self.experts + 2, shape, generator=g)
        if self.routing == "one":
            ids = torch.full(shape, self.experts - 1)
        elif self.routing == "nowhere":
            ids = torch.full(shape, -1)
        elif self.tokens > 2:
            far = FAR + (BEYOND if self.ids == torch.int64 else [])
            pick = torch.randint(0, len(far), shape, generator=g)
            ids = torch.where(torch.rand(shape, generator=g) < 0.2, torch.tensor(far)[pick], ids)
        return ids.to(self.ids).to(device)

    @property
    def limited(self) -> bool:
        if self.room is None:
            return False
        return self.tokens > self.room[0] or self.tokens * self.top_k > self.room[1]

    def overflow(self, device: torch.device | str = "cpu") -> Tensor | None:
        """What earlier calls have left."""
        return torch.tensor([5, 2, 2**40], device=device) if self.limited else None

    def sizes(self) -> tuple[int, int, tuple[int, int] | None]:
        return self.experts, self.ranks, self.room

    def places(self, booking: Booking) -> int:
        if self.room is not None:
            return self.ranks * self.room[0]
        return int(booking.needed[:, 0].sum())


TRIPS = [
    Trip(0), Trip(0, room=(4, 5)), Trip(1), Trip(1, room=(1, 3)), Trip(1, 64, 256, 8),
    Trip(33, room=(33, 99)), Trip(45, ids=torch.int64), Trip(45, room=(7, 30), ids=torch.int64),
    Trip(70, 1, 4, 2, room=(9, 11)), Trip(70, 5, 3, 2), Trip(40, 8, 30, 6, room=(40, 13)),
    Trip(50, 40, 385, 8, room=(3, 5)), Trip(64, 2, 4, 6, routing="one", room=(64, 100)),
    Trip(64, 2, 4, 6, routing="nowhere", room=(64, 100)), Trip(130, 2, 256, 6, room=(100, 300)),
]  # fmt: skip


def assert_booked(got: Booking, want: Booking) -> None:
    for name, g, w in zip(Booking._fields, got, want):
        assert (g is None) == (w is None), name
        if g is not None and w is not None:
            assert_same(g, w, name)


def assert_sent(got: Tensor, want: Tensor, wire: Wire, booking: Booking) -> None:
    """Every part of every row with a token, and the ids of every place."""
    assert got.shape == want.shape
    held = torch.zeros(got.shape[0], dtype=torch.bool)
    place = booking.token_place.cpu()
    held[place[place >= 0].long()] = True
    for name, g, w in zip(("data", "scale", "gx", "first", "ids", "weights"),
                          views(got.cpu(), wire), views(want.cpu(), wire)):  # fmt: skip
        assert (g is None) == (w is None), name
        if g is not None and w is not None:
            every = held if name != "ids" else torch.ones_like(held)
            assert_same(g[every].contiguous(), w[every].contiguous(), name)
    empty = views(got.cpu(), wire).ids[~held]
    assert (empty == -1).all()


def source_of(trip: Trip, form: str, device: torch.device | str = "cpu") -> Source:
    """``form``: 'codes', 'bf16', 'fp16', 'fp32', with ' given' or ' weighted' behind."""
    kind, *how = form.split()
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(kind, torch.bfloat16)
    x = Case(trip.tokens, hidden=trip.hidden, dtype=dtype, special=trip.tokens > 0).x()
    if kind == "codes":
        q = nvfp4.quantize(x)
        gx = q.global_scale.expand(trip.tokens).contiguous()
        parts: list[Any] = [q.data, q.scale.view(torch.uint8), gx, None]
    else:
        outer = torch.tensor([0.0123]) if "given" in how else None
        g = torch.Generator().manual_seed(trip.tokens)
        weight = torch.rand(trip.tokens, generator=g) if "weighted" in how else None
        parts = [x, None, outer, weight]
    return Source(*(None if p is None else p.to(device) for p in parts))


def arrived(trip: Trip, wire: Wire, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Rows on the wire with anything in them, and token_rows (N, K) of their slots."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (count, wire.row_bytes), generator=g, dtype=torch.uint8)
    part = views(rows, wire)
    ids = torch.randint(-1, trip.experts, (count, wire.top_k), generator=g, dtype=torch.int32)
    if count > 2:
        ids[1] = -1  # an empty place
    part.ids.copy_(ids)
    if part.gx is not None:
        part.gx.copy_(torch.rand(count, generator=g))
    if not wire.quantized:
        part.data.copy_(torch.randn(part.data.shape, generator=g))
    weights = torch.zeros(ids.shape)
    return rows, torch_ops.sort_routes(ids, weights, trip.experts, 1, 2, ids.numel())[3]
