"""Tokens travel to the ranks of their experts and rows come back.

    owner                       rank of the experts                      owner
    x -> codes, scales, gx  ->  sort, L1, activation, L2: o per slot  ->  sum in slot order -> y

A token goes at most once to each rank, however many of its experts are there. Rows sent to rank d
lie in the order of their tokens; rows come back in the order (token, slot), so that nothing but the
rows themselves travels on the way back.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.nvfp4 import BLOCK
from moe.config import MoEConfig
from moe.experts import Numerics
from moe.local import TokenRows
from moe.plan import RoutingPlan, make_plan
from moe.workspace import Buffer

_ROW_ALIGNMENT = 16  # bytes: rows are gathered by words, and a copy engine likes whole sectors


@dataclasses.dataclass(frozen=True)
class Wire:
    """One token on its way to the experts, ``row_bytes`` in this order:

        gx 4 | ids 4 K | weights 4 K | codes H/2 | block scales H/16 | padding to 16       nvfp4
        ids 4 K | weights 4 K | bf16 2 H | padding to 16                                   bf16

    Weights travel only where the experts' rank sums (``weighted``); else the owner keeps them.
    """

    hidden: int
    top_k: int
    quantized: bool
    weighted: bool

    @classmethod
    def of(cls, cfg: MoEConfig, numerics: Numerics, weighted: bool) -> Wire:
        return cls(cfg.hidden, cfg.top_k, numerics.activations == "nvfp4", weighted)

    @property
    def _head_words(self) -> int:
        return self.quantized + self.top_k * (1 + self.weighted)

    @property
    def _data_words(self) -> int:
        return self.hidden // 8 if self.quantized else self.hidden // 2

    @property
    def row_bytes(self) -> int:
        size = 4 * (self._head_words + self._data_words)
        size += self.hidden // BLOCK if self.quantized else 0
        return -(-size // _ROW_ALIGNMENT) * _ROW_ALIGNMENT

    def pack(self, tokens: TokenRows, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """Tokens with ids and weights (T, K) -> uint8 (T, row_bytes)."""
        count = tokens.data.shape[0]
        rows = torch.zeros((count, self.row_bytes), dtype=torch.uint8, device=tokens.data.device)
        words, first = rows.view(torch.int32), 0
        parts: list[Tensor] = []
        if tokens.gx is not None:
            parts.append(_words(tokens.gx.unsqueeze(1)))
        parts.append(topk_ids.int())
        if self.weighted:
            parts.append(_words(topk_weights.float()))
        parts.append(_words(tokens.data))
        for part in parts:
            words[:, first : first + part.shape[1]] = part
            first += part.shape[1]
        if tokens.scale is not None:
            rows[:, 4 * first : 4 * first + tokens.scale.shape[1]] = tokens.scale
        return rows

    def empty(self, rows: Tensor, which: Tensor) -> None:
        """Give the rows ``which`` (bool (N,)) ids that name no expert."""
        first = int(self.quantized)
        ids = rows.view(torch.int32)[:, first : first + self.top_k]
        ids.masked_fill_(which.unsqueeze(1), -1)

    def unpack(self, rows: Tensor) -> tuple[TokenRows, Tensor, Tensor | None]:
        """Inverse of `pack`: tokens, ids int32 (N, K), weights fp32 (N, K) or None."""
        words, first = rows.view(torch.int32), 0

        def take(width: int, dtype: torch.dtype) -> Tensor:
            nonlocal first
            part = words[:, first : first + width].contiguous().view(dtype)
            first += width
            return part

        gx = take(1, torch.float32).reshape(-1) if self.quantized else None
        ids = take(self.top_k, torch.int32)
        weights = take(self.top_k, torch.float32) if self.weighted else None
        if not self.quantized:
            return TokenRows(take(self._data_words, torch.bfloat16)), ids, weights
        data = take(self._data_words, torch.uint8)
        scale = rows[:, 4 * first : 4 * first + self.hidden // BLOCK].contiguous()
        return TokenRows(data, scale, gx), ids, weights


def _words(rows: Tensor) -> Tensor:
    """(n, m) of any type -> its bytes as int32 (n, ...). Flat first: one row counts as contiguous
    whatever its strides, but cannot be viewed as another type then."""
    count, width = rows.shape
    size = width * rows.element_size() // 4
    return rows.contiguous().reshape(-1).view(torch.int32).view(count, size)


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


# ---- the owner's side


def owners(topk_ids: Tensor, bounds: Tensor) -> Tensor:
    """int64 (T, K): rank of each slot's expert; -1 where the id names no expert.

    bounds  int64 (W+1,): rank r owns the experts bounds[r] : bounds[r+1]
    """
    ids = topk_ids.long()
    rank = torch.searchsorted(bounds[1:], ids, right=True)
    return torch.where((ids >= 0) & (ids < bounds[-1]), rank, -1)


class Departure(NamedTuple):
    """What leaves one rank, destination by destination, and where its rows come back.

    goes        bool (T, W): token t goes to rank d
    slots       `RoutingPlan` of (token, slot) pairs over *ranks*: its token_rows (T, K) are the
                places of the slots among the rows that come back
    """

    goes: Tensor
    slots: RoutingPlan

    def counts(self) -> Tensor:
        """int64 (W, 2): tokens and slots for each rank."""
        return torch.stack((self.goes.sum(dim=0), self.slots.expert_offsets.diff().long()), dim=1)

    def tokens(self) -> Tensor:
        """int64 (sum of counts,): token of each row that is sent. Waits for the device."""
        return self.goes.t().nonzero()[:, 1]

    def token_rows(self) -> Tensor:
        """int32 (T, W): place of token t among the rows sent to all ranks, -1 where it is not
        sent. Rows that ranks have summed come back in these places.
        """
        place = self.goes.t().reshape(-1).cumsum(0) - 1  # (W * T,)
        return torch.where(self.goes.t(), place.view(self.goes.t().shape), -1).t().int()


def depart(owner: Tensor, ranks: int) -> Departure:
    """owner (T, K) of `owners` -> `Departure`."""
    count = owner.shape[0]
    goes = torch.zeros((count, ranks + 1), dtype=torch.bool, device=owner.device)
    goes.scatter_(1, torch.where(owner < 0, ranks, owner), True)
    slots = make_plan(owner, torch.zeros(owner.shape, device=owner.device), ranks)
    return Departure(goes[:, :ranks], slots)


class Booking(NamedTuple):
    """A `Departure` in a fixed number of places: C tokens and S rows for each rank.

    token       int64 (W * C,): token in each place, -1 where it is empty
    rows        int32 (T, K): place of each slot among the W * S rows that come back, or -1
    token_rows  int32 (T, W): place of each token among the W * C places, or -1
    lost        bool (T,): a slot of the token found no place
    needed      int64 (2,): largest number of tokens, and of slots, for any one rank
    """

    token: Tensor
    rows: Tensor
    token_rows: Tensor
    lost: Tensor
    needed: Tensor


def book(owner: Tensor, ranks: int, tokens: int, rows: int) -> Booking:
    """Places for tokens in order; nothing waits for the device. ``tokens`` = C, ``rows`` = S."""
    going = depart(owner, ranks)
    count = owner.shape[0]
    place = going.goes.cumsum(dim=0) - 1  # (T, W)
    fits = going.goes & (place < tokens)
    rank = torch.arange(ranks, device=owner.device)
    token_rows = torch.where(fits, rank * tokens + place, -1)  # (T, W)
    token = torch.full(
        (ranks * tokens + 1,), -1, device=owner.device
    )  # the last one takes the rest
    index = torch.where(fits, token_rows, ranks * tokens).reshape(-1)
    source = torch.arange(count, device=owner.device).repeat_interleave(ranks)
    token.scatter_(0, index, source)
    # a token without a place has no slots there either: the experts' rank never sees it
    held = fits.gather(1, owner.clamp(min=0)) & (owner >= 0)  # (T, K)
    slots = depart(torch.where(held, owner, -1), ranks).slots
    first = slots.expert_offsets.gather(0, owner.clamp(min=0).reshape(-1)).view(owner.shape)
    place = slots.token_rows - first
    held &= place < rows
    return Booking(
        token[:-1],
        torch.where(held, owner * rows + place, -1).int(),
        token_rows.int(),
        ((owner >= 0) & ~held).any(dim=1),
        going.counts().amax(dim=0),
    )


# ---- the side of the experts


def leaving_rows(token_rows: Tensor, rows: int) -> Tensor:
    """int64 (rows,): row of o in each place on the way back: slots that have one, in the order
    (token, slot). Places past the last slot name row 0.
    """
    flat = token_rows.reshape(-1).long()
    here = flat >= 0
    place = torch.where(here, here.cumsum(0) - 1, rows).clamp(max=rows)
    return flat.new_zeros(rows + 1).scatter_(0, place, flat.clamp(min=0))[:rows]


def leaving_places(token_rows: Tensor, ranks: int, rows: int) -> Tensor:
    """`leaving_rows` with ``rows`` places for each rank: int64 (ranks * rows,)."""
    flat = token_rows.reshape(ranks, -1).long()
    here = flat >= 0
    place = here.cumsum(dim=1) - 1  # (W, C * K)
    rank = torch.arange(ranks, device=flat.device).unsqueeze(1)
    index = torch.where(here & (place < rows), rank * rows + place, ranks * rows)
    out = flat.new_zeros(ranks * rows + 1)
    return out.scatter_(0, index.reshape(-1), flat.reshape(-1).clamp(min=0))[:-1]


def keep_places(ids: Tensor, here: Tensor, ranks: int, rows: int) -> Tensor:
    """ids (W * C, K) of tokens that came from ``ranks`` ranks: -1 where the slot is the rank's
    (``here``) but found no place among ``rows`` of its sender, which counts alike.
    """
    place = here.reshape(ranks, -1).cumsum(dim=1).view(ids.shape) - 1
    return torch.where(here & (place >= rows), -1, ids)


def gather_rows(rows: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """out = rows[index], bytes (N, row_bytes), moved as 8-byte words."""
    torch.index_select(rows.view(torch.int64), 0, index, out=out.view(torch.int64))
    return out
