"""The operations of `cute_kernels.exchange_ops` in plain PyTorch: what backends without kernels
run, what CPU tensors get, and what the kernels must equal.

Any device, byte for byte; nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.device.wire import Wire


def rank_of(expert: Tensor, num_experts: int, ranks: int) -> Tensor:
    """Rank of each expert, ``ranks`` for what names none: contiguous ranges, larger ones first."""
    size, rest = divmod(num_experts, ranks)
    more = rest * (size + 1)
    late = rest + (expert - more).div(max(size, 1), rounding_mode="floor")
    rank = torch.where(expert < more, expert.div(size + 1, rounding_mode="floor"), late)
    return torch.where((expert >= 0) & (expert < num_experts), rank, ranks)


def book_places(
    topk_ids: Tensor,
    num_experts: int,
    ranks: int,
    room: tuple[int, int] | None,
    overflow: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """token_place, token_first, slot_place, ids, needed, lost and overflow of
    `exchange_ops.book_places`."""
    rank = rank_of(topk_ids.long(), num_experts, ranks)  # (T, K)
    column = torch.arange(ranks, device=rank.device)
    on = rank.unsqueeze(2) == column  # (T, K, W)
    count = on.sum(dim=1)  # (T, W)
    goes = count > 0
    before, first = (n.cumsum(dim=0) - n for n in (goes.long(), count))
    needed = torch.stack((goes.sum(dim=0), count.sum(dim=0)), dim=1)  # (W, 2)
    at = rank.clamp(max=ranks - 1)
    earlier = (on.long().cumsum(dim=1) - on.long()).gather(2, at.unsqueeze(2)).squeeze(2)
    number = first.gather(1, at) + earlier  # (T, K): of a slot among those on its rank
    here = rank < ranks
    if room is None:
        bases = needed.cumsum(dim=0) - needed  # (W, 2)
        fits, kept = goes, here
    else:
        bases = torch.stack((column * room[0], column * room[1]), dim=1)
        fits = goes & (before < room[0])
        kept = here & fits.gather(1, at) & (number < room[1])
    token_place = torch.where(fits, before + bases[:, 0], -1).int()
    slot_place = torch.where(kept, number + bases[:, 1].take(at), -1).int()
    # int32 on the wire: an id beyond it must not turn into one that exists
    ids = torch.where(kept, topk_ids, -1).int()
    out = (token_place, torch.where(goes, first, 0).int(), slot_place, ids, needed.int())
    if overflow is None:
        return (*out, None, None)
    lost = (kept != here).any(dim=1)
    most = torch.maximum(overflow[1:], needed.amax(dim=0))
    return (*out, lost, torch.cat(((overflow[:1] + lost.sum()), most)))


class Views(NamedTuple):
    """Parts of rows on the wire (N, row_bytes), rows apart: data uint8 (N, H/2) or bf16 (N, H);
    scale uint8 (N, H/16), gx fp32 (N,) or None; first int32 (N,) or None; ids int32 (N, K);
    weights fp32 (N, K) or None."""

    data: Tensor
    scale: Tensor | None
    gx: Tensor | None
    first: Tensor | None
    ids: Tensor
    weights: Tensor | None


def views(rows: Tensor, wire: Wire) -> Views:
    words = rows.view(torch.int32)

    def part(start: int, width: int) -> Tensor:
        return words[:, start // 4 : start // 4 + width]

    ids = part(wire.ids_at, wire.top_k)
    first = weights = None
    if wire.weighted:
        weights = part(wire.weights_at, wire.top_k).view(torch.float32)
    else:
        first = part(wire.first_at, 1).squeeze(1)
    data = rows[:, : wire.data_bytes]
    if not wire.quantized:
        return Views(data.view(torch.bfloat16), None, None, first, ids, weights)
    scale = rows[:, wire.scale_at : wire.scale_at + wire.hidden // nvfp4.BLOCK]
    gx = part(wire.gx_at, 1).squeeze(1).view(torch.float32)
    return Views(data, scale, gx, first, ids, weights)


class Source(NamedTuple):
    """T tokens that are sent.

    x       (T, H) bf16, fp16 or fp32, or uint8 (T, H/2) codes of tokens that are quantised
    scale   uint8 (T, H/16) of codes, else None
    outer   fp32 (T,) of codes; fp32 (1,): one outer scale for all; None: one per token from x
    weight  fp32 (T,): x is multiplied by it first, in fp32; or None
    """

    x: Tensor
    scale: Tensor | None = None
    outer: Tensor | None = None
    weight: Tensor | None = None


def send_rows(
    source: Source,
    ids: Tensor,
    weights: Tensor | None,
    token_place: Tensor,
    token_first: Tensor,
    wire: Wire,
    places: int,
) -> Tensor:
    """Rows uint8 (places, row_bytes) of `exchange_ops.send_rows`."""
    count = source.x.shape[0]
    packed = source.x.new_zeros((count + 1, wire.row_bytes), dtype=torch.uint8)
    part = views(packed[:count], wire)
    x, scale, outer, weight = source
    values = x if weight is None else x.float() * weight[:, None]
    if not wire.quantized:
        part.data.copy_(values)
    else:
        if scale is None:
            q = nvfp4.quantize(values, "per_token" if outer is None else outer)
            x, scale, outer = q.data, q.scale.view(torch.uint8), q.global_scale
        assert part.scale is not None and part.gx is not None and outer is not None
        part.data.copy_(x)
        part.scale.copy_(scale)
        part.gx.copy_(outer)
    part.ids.copy_(ids)
    if part.weights is not None and weights is not None:
        part.weights.copy_(weights)
    everything = views(packed, wire)
    everything.ids[count:] = -1  # what an empty place holds
    at = torch.where(token_place >= 0, token_place, places).long().reshape(-1)
    token = torch.arange(count, device=at.device).repeat_interleave(token_place.shape[1])
    held = torch.full((places + 1,), count, device=at.device).scatter_(0, at, token)[:-1]
    rows = packed.index_select(0, held)
    first = views(rows, wire).first
    if first is not None:
        filled = token_first.new_zeros(places + 1).scatter_(0, at, token_first.reshape(-1))
        first.copy_(filled[:-1])
    return rows


def leaving_places(
    token_rows: Tensor, first: Tensor, needed: Tensor | None, room: tuple[int, int], ranks: int
) -> Tensor:
    """int64 (N, K): place of each slot among the rows that go back, -1 without a row."""
    count = token_rows.shape[0]
    token = torch.arange(count, device=token_rows.device)
    if needed is None:
        base = token.div(max(room[0], 1), rounding_mode="floor") * room[1]
    else:
        ends = needed.cumsum(dim=0)  # (W, 2)
        sender = torch.searchsorted(ends[:, 0].contiguous(), token, right=True)
        base = (ends[:, 1] - needed[:, 1]).index_select(0, sender.clamp(max=ranks - 1))
    here = token_rows >= 0
    number = here.long().cumsum(dim=1) - 1
    return torch.where(here, (base + first).unsqueeze(1) + number, -1)


def leave_rows(o: Tensor, token_rows: Tensor, places: Tensor, out: Tensor) -> Tensor:
    """``out`` with o[token_rows] in ``places``."""
    at = torch.where(places >= 0, places, out.shape[0]).reshape(-1)
    row = token_rows.clamp(min=0).long().reshape(-1)
    index = row.new_zeros(out.shape[0] + 1).scatter_(0, at, row)[:-1]
    return o.index_select(0, index)


def stage_received(
    data: Tensor, scale: Tensor | None, gx: Tensor | None, token_rows: Tensor, rows: int
) -> tuple[Tensor, Tensor | None]:
    """values and row_gx of `exchange_ops.stage_received`, zeros where there is no row."""
    at = torch.where(token_rows >= 0, token_rows, rows).long()  # (N, slots)
    count, slots = at.shape
    token = torch.arange(count, device=at.device).unsqueeze(1).expand(count, slots)
    held = torch.full((rows + 1,), count, device=at.device).scatter_(
        0, at.reshape(-1), token.reshape(-1)
    )[:-1]
    values = data if scale is None else _decoded(data, scale)
    values = torch.cat((values, values.new_zeros((1, values.shape[1]))))
    if gx is None:
        return values.index_select(0, held), None
    return values.index_select(0, held), torch.cat((gx, gx.new_zeros(1))).index_select(0, held)


def _decoded(data: Tensor, scale: Tensor) -> Tensor:
    one = torch.ones((), device=data.device)
    return nvfp4.decode(nvfp4.Nvfp4Tensor(data, scale, one), torch.bfloat16)
