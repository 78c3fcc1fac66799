"""Tokens travel to the ranks of their experts and rows come back.

    owner                       rank of the experts                      owner
    x -> codes, scales, gx  ->  sort, L1, activation, L2: o per slot  ->  sum in slot order -> y

A token goes at most once to each rank, however many of its experts are there. Rows sent to rank d
lie in the order of their tokens; rows come back in the order (token, slot), so that nothing but the
rows themselves travels on the way back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.nvfp4 import BLOCK, DecodeTables
from moe.config import MoEConfig
from moe.experts import Numerics
from moe.local import TokenRows
from moe.plan import RoutingPlan
from moe.workspace import Buffer

_ROW_ALIGNMENT = 16  # bytes: rows are gathered by words, and a copy engine likes whole sectors


@dataclasses.dataclass(frozen=True)
class Wire:
    """One token on its way to the experts, ``row_bytes`` in this order:

        gx 4 | ids 4 K | weights 4 K | codes H/2 | block scales H/16 | padding to 16       nvfp4
        ids 4 K | weights 4 K | bf16 2 H | padding to 16                                   bf16

    Padding holds anything.
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
        """Tokens, ids int32 and weights (T, K) -> uint8 (T, row_bytes)."""
        count = tokens.data.shape[0]
        rows = tokens.data.new_empty((count, self.row_bytes), dtype=torch.uint8)
        words, first = rows.view(torch.int32), 0
        parts: list[Tensor] = []
        if tokens.gx is not None:
            parts.append(_words(tokens.gx.unsqueeze(1)))
        parts.append(topk_ids)
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

    def unpack(
        self, rows: Tensor, tables: DecodeTables | None = None
    ) -> tuple[TokenRows, Tensor, Tensor | None]:
        """Inverse of `pack`: tokens (strided views of ``rows``, with ``tables`` to decode them),
        ids int32 (N, K), weights fp32 (N, K) or None.
        """
        words, first = rows.view(torch.int32), 0

        def take(width: int, dtype: torch.dtype) -> Tensor:
            nonlocal first
            part = words[:, first : first + width].view(dtype)
            first += width
            return part

        gx = take(1, torch.float32).squeeze(1) if self.quantized else None
        ids = take(self.top_k, torch.int32).contiguous()
        weights = take(self.top_k, torch.float32).contiguous() if self.weighted else None
        if not self.quantized:
            return TokenRows(take(self._data_words, torch.bfloat16)), ids, weights
        data = take(self._data_words, torch.uint8)
        scale = rows[:, 4 * first : 4 * first + self.hidden // BLOCK]
        return TokenRows(data, scale, gx, tables), ids, weights


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

Sort = Callable[[Tensor, int], RoutingPlan]  # ids int32 (T, N), number of groups -> their rows


class Homes(NamedTuple):
    """Where the E experts live, on one device: entry e + 1 is that of expert e, the first and the
    last one are those of ids that name no expert.

    rank  int32 (E+2,): rank of the expert, W for none
    goes  int32 (E+2, W): that rank in the column of the rank, else -1
    """

    rank: Tensor
    goes: Tensor

    @classmethod
    def of(cls, ranges: list[tuple[int, int]], device: torch.device) -> Homes:
        ranks = len(ranges)
        inner = [r for r, (first, end) in enumerate(ranges) for _ in range(first, end)]
        rank = torch.tensor([ranks, *inner, ranks], dtype=torch.int32)
        column = torch.arange(ranks, dtype=torch.int32)
        goes = torch.where(rank.unsqueeze(1) == column, column, -1)
        return cls(rank.to(device), goes.to(device))


class Owners(NamedTuple):
    """Where the slots of a batch go.

    ids   int32 (T, K): those that travel; what names no expert is -1 or E
    rank  int32 (T, K): rank of the slot's expert, W for none
    goes  int32 (T, W): d in column d where token t goes to rank d, else -1
    """

    ids: Tensor
    rank: Tensor
    goes: Tensor


def owners(topk_ids: Tensor, homes: Homes) -> Owners:
    """topk_ids int32 or int64 (T, K)."""
    count, ranks = topk_ids.shape[0], homes.goes.shape[1]
    entry = topk_ids.add(1).clamp_(0, homes.rank.shape[0] - 1)
    flat = entry.reshape(-1)
    rank = homes.rank.index_select(0, flat).view(topk_ids.shape)
    goes = homes.goes.index_select(0, flat).view(count, topk_ids.shape[1], ranks).amax(dim=1)
    # int32 on the wire: an id beyond it must not turn into one that exists
    return Owners(entry.sub_(1).int(), rank, goes)


class Departure(NamedTuple):
    """What leaves one rank, destination by destination, and where its rows come back: plans over
    *ranks*, in which a row is a token that is sent, or a slot.

    tokens  row_token (T * W,): token of each row that is sent; token_rows (T, W): place of token t
            among the rows sent to all ranks, -1 where it is not sent. Rows that ranks have summed
            come back in these places
    slots   token_rows (T, K): place of each slot among the rows that come back
    """

    tokens: RoutingPlan
    slots: RoutingPlan

    def counts(self) -> Tensor:
        """int32 (W, 2): tokens and slots for each rank."""
        ends = (self.tokens.expert_offsets, self.slots.expert_offsets)
        return torch.stack(ends, dim=1).diff(dim=0)


def depart(owner: Owners, sort: Sort) -> Departure:
    ranks = owner.goes.shape[1]
    return Departure(sort(owner.goes, ranks), sort(owner.rank, ranks))


class Booking(NamedTuple):
    """A `Departure` in a fixed number of places: C tokens and S rows for each rank.

    token  int32 (W * C,): token in each place; some token or other in a place that is empty
    empty  bool (W * C,)
    rows   int32 (T, K): place of each slot among the W * S rows that come back, or -1
    ids    int32 (T, K): those that travel; of a slot without a place, one of no expert, which must
           not compute what cannot come back
    lost   bool (T,): a slot of the token found no place. None: there were enough, for any routing
    """

    token: Tensor
    empty: Tensor
    rows: Tensor
    ids: Tensor
    lost: Tensor | None


class Places(NamedTuple):
    """Room for C ``tokens`` and S ``rows`` between each pair of ranks, on one device.

    place  int32 (C,): 0, 1, ...
    ends   int32 (W + 1,): 0, S, 2 S, ..., W S
    """

    tokens: int
    rows: int
    place: Tensor
    ends: Tensor

    @classmethod
    def of(cls, tokens: int, rows: int, ranks: int, device: torch.device) -> Places:
        place = torch.arange(tokens, dtype=torch.int32, device=device)
        ends = torch.arange(ranks + 1, dtype=torch.int32, device=device) * rows
        return cls(tokens, rows, place, ends)


def book(owner: Owners, going: Departure, places: Places) -> Booking:
    """Places for tokens in order; nothing waits for the device."""
    tokens, rows = places.tokens, places.rows
    (count, top_k), ranks = owner.rank.shape, owner.goes.shape[1]
    first = going.tokens.expert_offsets.unsqueeze(1)  # (W + 1, 1)
    empty = (places.place >= first.diff(dim=0)).reshape(-1)
    if count:
        source = (first[:-1] + places.place).clamp_(max=count * ranks - 1).reshape(-1)
        token = going.tokens.row_token.index_select(0, source).clamp_(min=0)
    else:
        token = torch.zeros_like(empty, dtype=torch.int32)
    found = going.slots.token_rows
    shift = places.ends - going.slots.expert_offsets  # (W + 1,)
    moved = shift.index_select(0, owner.rank.reshape(-1)).view(found.shape) + found
    held = found >= 0  # (T, K)
    if count <= tokens and count * top_k <= rows:
        return Booking(token, empty, torch.where(held, moved, -1), owner.ids, None)
    fits = held & (moved.div(rows, rounding_mode="floor") == owner.rank)
    if count > tokens:
        at = owner.rank.clamp(max=ranks - 1).long()
        fits &= token_places(going, places).gather(1, at) >= 0
    lost = (fits != held).any(dim=1)
    ids = torch.where(fits, owner.ids, -1)
    return Booking(token, empty, torch.where(fits, moved, -1), ids, lost)


def token_places(going: Departure, places: Places) -> Tensor:
    """int32 (T, W): place of each token among the W * C that leave, -1 where it has none. Rows that
    ranks have summed come back in these places."""
    found, first = going.tokens.token_rows, going.tokens.expert_offsets[:-1]
    place = found - first
    base = torch.arange(first.shape[0], dtype=torch.int32, device=first.device) * places.tokens
    return torch.where((found >= 0) & (place < places.tokens), place + base, -1)


# ---- the side of the experts


def leaving_rows(token_rows: Tensor, rows: int, places: Places | None = None) -> Tensor:
    """int32 (rows,): row of o in each place on the way back, which slots that have a row take in
    the order (token, slot). A place past the last slot names row 0.

    token_rows  (N, K)
    places      the same number of tokens comes from each rank, and S of the places are for each
    """
    flat = token_rows.reshape(1 if places is None else places.ends.shape[0] - 1, -1)
    here = flat >= 0
    place = here.cumsum(dim=1)  # from 1
    if places is not None:
        place += places.ends[:-1].unsqueeze(1)
    place *= here  # entry 0 takes the slots that are not here
    out = flat.new_zeros(rows + 1)
    return out.scatter_(0, place.reshape(-1), flat.reshape(-1))[1:]


def gather_rows(rows: Tensor, index: Tensor, out: Tensor) -> Tensor:
    """out = rows[index], bytes (N, row_bytes), moved as 8-byte words."""
    torch.index_select(rows.view(torch.int64), 0, index, out=out.view(torch.int64))
    return out
