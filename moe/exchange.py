"""Tokens travel to the ranks of their experts and rows come back.

    owner                       rank of the experts                      owner
    x -> codes, scales, gx  ->  sort, L1, activation, L2: o per slot  ->  sum in slot order -> y

A token goes at most once to each rank, however many of its experts are there. Rows sent to rank d
lie in the order of their tokens; rows come back in the order (token, slot), and each token brings
along where its first one lies: nothing but the rows themselves travels on the way back.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import exchange_ops
from cute_kernels.exchange_ops import Booking, Senders, Source, Views, Wire
from moe.config import MoEConfig
from moe.experts import Numerics
from moe.local import LocalExperts
from moe.workspace import Buffer

__all__ = ["Booking", "Senders", "Sizes", "Steps", "Wire", "exchange_buffers", "wire_of"]


def wire_of(cfg: MoEConfig, numerics: Numerics, weighted: bool) -> Wire:
    """``weighted``: the experts' rank sums; else the owner keeps the weights."""
    return Wire(cfg.hidden, cfg.top_k, numerics.activations == "nvfp4", weighted)


class Sizes(NamedTuple):
    """Rows of one call on one rank: tokens ``sent`` and ``received`` (to and from itself included),
    ``computed`` rows of experts, ``returned`` rows for its own tokens.
    """

    sent: int
    received: int
    computed: int
    returned: int


def exchange_buffers(sizes: Sizes, wire: Wire) -> list[Buffer]:
    """Scratch of the exchange itself. Where the experts' rank sums, the rows that leave are the
    result of that sum and no scratch."""
    leaving = 0 if wire.weighted else sizes.computed
    return [
        Buffer("sent", (sizes.sent, wire.row_bytes), torch.uint8),
        Buffer("received", (sizes.received, wire.row_bytes), torch.uint8),
        Buffer("leaving", (leaving, wire.hidden), torch.bfloat16),
        # one row at least: a combine reads row 0 for slots that have none
        Buffer("returned", (max(sizes.returned, 1), wire.hidden), torch.bfloat16),
    ]


@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
    """What one rank does between the collectives of a call, on the backend of ``local``: kernels,
    or the plain operations that specify them (`cute_kernels.torch_exchange`)."""

    local: LocalExperts
    wire: Wire
    ranks: int

    def book(
        self, topk_ids: Tensor, room: tuple[int, int] | None, overflow: Tensor | None
    ) -> Booking:
        """See `exchange_ops.book_places`."""
        sizes = (self.local.cfg.num_experts, self.ranks, room, overflow)
        with self.local.kernels_on(topk_ids.device):
            return exchange_ops.book_places(topk_ids, *sizes, self.local.on_kernels)

    def send(
        self, source: Source, booking: Booking, weights: Tensor, out: Tensor, room: int = 0
    ) -> None:
        """See `exchange_ops.send_rows`."""
        mix = weights.float() if self.wire.weighted else None
        with self.local.kernels_on(out.device):
            on = self.local.on_kernels
            exchange_ops.send_rows(source, booking, mix, self.wire, out, room, on)

    def received(self, rows: Tensor) -> Views:
        return exchange_ops.views(rows, self.wire)

    def leave(self, o: Tensor, token_rows: Tensor, first: Tensor, by: Senders, out: Tensor) -> None:
        """See `exchange_ops.leave_rows`."""
        with self.local.kernels_on(out.device):
            exchange_ops.leave_rows(o, token_rows, first, by, out, self.local.on_kernels)


def part_of(source: Source, first: int, end: int) -> Source:
    """Tokens ``first`` to ``end`` - 1."""
    x, scale, outer, weight = source
    if scale is not None:
        assert outer is not None  # codes have one each
        scale, outer = scale[first:end], outer[first:end]
    return Source(x[first:end], scale, outer, None if weight is None else weight[first:end])
