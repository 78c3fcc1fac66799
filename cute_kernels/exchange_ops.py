"""Operations between ranks on torch tensors: places for tokens and rows, tokens onto the wire and
off it, rows back. Registered with torch.library; see `cute_kernels.ops` for what operations share.

``kernels`` False: plain PyTorch (`cute_kernels.torch_exchange`) on any device, the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import torch_exchange
from cute_kernels.device.wire import Wire
from cute_kernels.launch import (
    ALIGNMENT,
    DSL_TYPES,
    FLOATS,
    Buffer,
    allocate,
    arch_of,
    check_matrix,
    check_out,
    check_rows,
    check_vector,
    flat,
    launch,
    pitched,
    register,
)
from cute_kernels.nvfp4 import BLOCK
from cute_kernels.torch_exchange import Source, Views, views

__all__ = [
    "Booking",
    "Senders",
    "Source",
    "Views",
    "Wire",
    "book_places",
    "leave_rows",
    "send_rows",
    "stage_received",
    "views",
]

ONE_CTA_TOKENS = 1024  # tokens that one CTA books before another one joins
MAX_BOOK_CTAS = 64
MAX_RANKS = 4096  # whose counters fit the shared memory of a CTA


class Booking(NamedTuple):
    """Where the tokens of one rank go, and where their rows come back.

    token_place  int32 (T, W): place of the token among those that leave, -1 where it has none
    token_first  int32 (T, W): how many slots of earlier tokens are on that rank; 0 where the token
                 does not go there
    slot_place   int32 (T, K): place of the slot among the rows that come back, or -1
    ids          int32 (T, K): those that travel: -1 for a slot without a place, which must not
                 compute what cannot come back
    needed       int32 (W, 2): tokens and slots for each rank, with a place or without
    lost         bool (T,): a slot of the token found no place. None: there were enough, for any
                 routing
    """

    token_place: Tensor
    token_first: Tensor
    slot_place: Tensor
    ids: Tensor
    needed: Tensor
    lost: Tensor | None


class _Plain(NamedTuple):
    """What stands for a registered operation where there are no kernels: its checks, its values,
    and how many of its arguments are written."""

    check: Callable[..., None]
    values: Callable[..., Any]
    outputs: int

    def __call__(self, *args: Any) -> None:
        self.check(*args)
        for out, value in zip(args[-self.outputs :], self.values(*args)):
            if out is not None:
                out.copy_(value)


def _check_like(
    tensor: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    """Any strides."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the rows are on {device}")


# ---- places


def book_places(
    topk_ids: Tensor,
    num_experts: int,
    ranks: int,
    room: tuple[int, int] | None = None,
    overflow: Tensor | None = None,
    kernels: bool = True,
) -> Booking:
    """Places for tokens and slots, in the order of tokens; see `device.exchange_book`.

    topk_ids  (T, K) int32 or int64; what is none of 0 .. num_experts - 1 has no place
    room      (C, S): tokens and rows for each rank. None: the ranks lie close behind one another
    overflow  int64 (3,), when C < T or S < T * K: the number of lost tokens is added, and the most
              tokens and slots that any rank needed are kept

    Raises TypeError or ValueError before anything is allocated.
    """
    _check_book(topk_ids, num_experts, ranks, room)
    tokens, slots = topk_ids.shape
    limited = _limited(topk_ids, room)
    if limited and overflow is None:
        raise ValueError(f"room {room} may not be enough for {(tokens, slots)}: pass overflow")
    kept = overflow if limited else None
    lost = [Buffer("lost", (tokens,), torch.bool)] if limited else []
    buffers = [*_booked(tokens, slots, ranks), *lost, _book_scratch(tokens, ranks)]
    token_place, token_first, slot_place, ids, needed, *gone, scratch = allocate(
        buffers, topk_ids.device
    )
    found = Booking(token_place, token_first, slot_place, ids, needed, gone[0] if gone else None)
    sizes = (num_experts, *(room or (0, 0)))
    run = _book_places_op if kernels else _PLAIN_BOOK
    run(topk_ids, *sizes, *found, kept, scratch)
    return found


def _limited(ids: Tensor, room: tuple[int, int] | None) -> bool:
    return room is not None and (ids.shape[0] > room[0] or ids.numel() > room[1])


def _booked(tokens: int, slots: int, ranks: int) -> list[Buffer]:
    shapes = {"token_place": (tokens, ranks), "token_first": (tokens, ranks)}
    shapes |= {"slot_place": (tokens, slots), "ids": (tokens, slots), "needed": (ranks, 2)}
    return [Buffer(name, shape, torch.int32) for name, shape in shapes.items()]


def _book_ctas(tokens: int) -> int:
    return min(-(-tokens // ONE_CTA_TOKENS), MAX_BOOK_CTAS)


def _book_scratch(tokens: int, ranks: int) -> Buffer:
    ctas = _book_ctas(tokens)
    return Buffer("book_counts", (ctas if ctas > 1 else 0, 2 * ranks), torch.int32)


def _check_book(ids: Tensor, num_experts: int, ranks: int, room: tuple[int, int] | None) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids must be int32 or int64, got {ids.dtype}")
    if ids.dim() != 2 or ids.shape[1] == 0:
        raise ValueError(f"topk_ids must be (T, K) with K >= 1, got {tuple(ids.shape)}")
    if not 1 <= ranks <= MAX_RANKS or num_experts < 1:
        raise ValueError(
            f"ranks must be 1 to {MAX_RANKS} and have experts, got {ranks} with {num_experts}"
        )
    if room is not None and min(room) < 1:
        raise ValueError(f"room must be positive, got {room}")
    check_rows(max([ids.numel(), *(ranks * n for n in room or ())]), "places")


def _check_book_out(ids: Tensor, num_experts: int, tokens: int, rows: int, *out: Any) -> None:
    *written, lost, overflow, scratch = out
    (count, slots), ranks = ids.shape, written[0].shape[1]
    room = (tokens, rows) if tokens else None
    _check_book(ids, num_experts, ranks, room)
    if not (lost is not None) == (overflow is not None) == _limited(ids, room):
        raise ValueError(f"room {room} for {tuple(ids.shape)}: lost and overflow, or none of them")
    if lost is not None:
        check_out([lost], [Buffer("lost", (count,), torch.bool)], ids.device)
        check_vector(overflow, "overflow", torch.int64, 3, ids.device)
    buffers = [*_booked(count, slots, ranks), _book_scratch(count, ranks)]
    check_out((*written, scratch), buffers, ids.device)


def _plain_book(ids: Tensor, num_experts: int, tokens: int, rows: int, *out: Any) -> Any:
    room = (tokens, rows) if tokens else None
    return torch_exchange.book_places(ids, num_experts, out[0].shape[1], room, out[6])


def _count_places(*of: Any) -> Any:
    from cute_kernels.device.exchange_book import CountPlaces

    return CountPlaces(*of)


def _book_places_of(*of: Any) -> Any:
    from cute_kernels.device.exchange_book import BookPlaces

    return BookPlaces(*of)


def _book_kernel(ids: Tensor, num_experts: int, tokens: int, rows: int, *out: Any) -> None:
    *written, lost, overflow, counts = out
    count, slots = ids.shape
    if count == 0:
        written[4].zero_()  # needed
        return
    ids, ranks, ctas = ids.contiguous(), written[0].shape[1], _book_ctas(count)
    spread = ctas > 1
    of = (num_experts, ranks, slots, DSL_TYPES[ids.dtype])
    if spread:
        launch((_count_places, *of), ids.device, ids, counts, count, ctas)
    kernel = (_book_places_of, *of, tokens > 0, lost is not None, spread)
    inputs = (ids, counts if spread else None)
    launch(kernel, ids.device, *inputs, *written, lost, overflow, tokens, rows, count, ctas)


# ---- onto the wire


def send_rows(
    source: Source,
    booking: Booking,
    weights: Tensor | None,
    wire: Wire,
    out: Tensor,
    room: int = 0,
    kernels: bool = True,
) -> None:
    """Write the tokens of ``source`` to all their places, quantised where the wire is.

    weights  fp32 (T, K) of a wire with weights, else None
    out      written: uint8 (places, wire.row_bytes); of its padding, and of an empty place all but
             its ids, which are -1, anything
    room     places for each rank. 0: none is empty

    Raises TypeError or ValueError before anything is launched.
    """
    mix = weights if wire.weighted else None
    fields = [wire.hidden, wire.top_k, int(wire.quantized), int(wire.weighted)]
    given = (booking.ids, mix, booking.token_place, booking.token_first, booking.needed)
    args = (*source, *given, room, fields, out)
    run = _send_rows_op if kernels else _PLAIN_SEND
    run(*args)


class _Send(NamedTuple):
    """Arguments of the operator, in order."""

    x: Tensor
    scale: Tensor | None
    outer: Tensor | None
    weight: Tensor | None
    ids: Tensor
    mix: Tensor | None
    token_place: Tensor
    token_first: Tensor
    needed: Tensor
    room: int
    fields: list[int]
    out: Tensor

    @property
    def wire(self) -> Wire:
        hidden, top_k, quantized, weighted = self.fields
        return Wire(hidden, top_k, bool(quantized), bool(weighted))


def _check_send(*args: Any) -> None:
    a = _Send(*args)
    wire, device = a.wire, a.x.device
    codes = a.scale is not None
    if codes and not wire.quantized:
        raise ValueError("codes travel on a quantised wire: pass values of x for one of bf16")
    check_matrix(a.x, "x", (torch.uint8,) if codes else FLOATS, BLOCK // 2 if codes else BLOCK)
    count, width = a.x.shape
    if width != (wire.hidden // 2 if codes else wire.hidden):
        raise ValueError(f"x must have {wire.hidden} columns, got {tuple(a.x.shape)} {a.x.dtype}")
    if a.outer is not None:
        check_vector(a.outer, "outer", torch.float32, count if codes else 1, device)
    elif codes:
        raise ValueError("codes need their outer scales: pass outer (T,)")
    if a.scale is not None:
        groups = (count, wire.hidden // BLOCK)
        _check_like(a.scale, "scale", torch.uint8, groups, device)
    if a.weight is not None:
        check_vector(a.weight, "weight", torch.float32, count, device)
    if wire.weighted and a.mix is None:
        raise ValueError("a wire with weights needs weights: pass float32 (T, K)")
    if a.mix is not None:
        _check_like(a.mix, "weights", torch.float32, (count, wire.top_k), device)
    ranks = a.token_place.shape[1]
    check_out([a.token_place, a.token_first, a.ids, a.needed], [
        Buffer("token_place", (count, ranks), torch.int32),
        Buffer("token_first", (count, ranks), torch.int32),
        Buffer("ids", (count, wire.top_k), torch.int32),
        Buffer("needed", (ranks, 2), torch.int32),
    ], device)  # fmt: skip
    places = a.out.shape[0] if a.room == 0 else a.room * ranks
    check_out([a.out], [Buffer("rows", (places, wire.row_bytes), torch.uint8)], device)


def _plain_send(*args: Any) -> tuple[Tensor]:
    a = _Send(*args)
    source = Source(a.x, a.scale, a.outer, a.weight)
    places = (a.token_place, a.token_first, a.wire, a.out.shape[0])
    return (torch_exchange.send_rows(source, a.ids, a.mix, *places),)


def _send_rows_of(dtype: str, given: bool, weighted: bool, hardware: bool, *wire: Any) -> Any:
    from cute_kernels.device.exchange_rows import SendRows

    *fields, ranks = wire
    layout = Wire(*fields)
    return SendRows(layout.hidden, dtype, given, weighted, False, hardware, 0, layout, ranks)


def _send_kernel(*args: Any) -> None:
    a = _Send(*args)
    wire, device, (count, ranks) = a.wire, a.x.device, a.token_place.shape
    if a.out.shape[0] == 0:
        return
    codes = a.scale is not None
    dtype = "Uint8" if codes else DSL_TYPES[a.x.dtype]
    given = a.outer is not None and not codes
    flags = (given, a.weight is not None, arch_of(device) != "sm_90a")
    fields = (wire.hidden, wire.top_k, wire.quantized, wire.weighted)
    kernel = (_send_rows_of, dtype, *flags, *fields, ranks)
    weight = None if a.weight is None else a.weight.contiguous()
    source = (flat(a.x), a.outer, weight, None if a.scale is None else a.scale.contiguous())
    mix = None if a.mix is None else a.mix.contiguous()
    routes = (a.ids, mix, a.token_place, None if wire.weighted else a.token_first, a.needed)
    threads = _send_threads(wire.hidden)
    fillers = -(-a.room * ranks // threads)
    launch(kernel, device, *source, *routes, a.out, count, a.room, fillers)


def _send_threads(hidden: int) -> int:
    from cute_kernels.device.quantize import QuantizeRows

    return QuantizeRows(hidden).threads


# ---- off the wire


def stage_received(
    data: Tensor,
    scale: Tensor | None,
    gx: Tensor | None,
    token_rows: Tensor,
    values: Tensor,
    row_gx: Tensor | None,
) -> None:
    """Received tokens to their rows, expert-major and in bf16.

    data        uint8 (N, K/2) codes or bf16 (N, K); rows may be apart, as on the wire
    scale       uint8 (N, K/16) row-major, and gx fp32 (N,), of codes; may be apart too
    token_rows  int32 (N, slots): the rows of each token, negative where a slot has none
    values      written: bf16 (R, K), code * scale; rows that no slot names are not
    row_gx      written: fp32 (R,), of codes

    Raises TypeError or ValueError before anything is launched.
    """
    _stage_received_op(data, scale, gx, token_rows, values, row_gx)


def _check_received(
    data: Tensor,
    scale: Tensor | None,
    gx: Tensor | None,
    token_rows: Tensor,
    values: Tensor,
    row_gx: Tensor | None,
) -> None:
    codes = scale is not None
    if (gx is None) == codes or (row_gx is None) == codes:
        raise ValueError("codes come with scale, gx and row_gx; bf16 with none of them")
    check_matrix(data, "data", (torch.uint8 if codes else torch.bfloat16,), 8 if codes else BLOCK)
    count, hidden = data.shape[0], data.shape[1] * (2 if codes else 1)
    if scale is not None and gx is not None:
        _check_like(scale, "scale", torch.uint8, (count, hidden // BLOCK), data.device)
        check_vector(gx, "gx", torch.float32, count, data.device)
    slots = token_rows.shape[-1]
    _check_like(token_rows, "token_rows", torch.int32, (count, slots), data.device)
    rows = values.shape[0]
    check_out([values], [Buffer("values", (rows, hidden), torch.bfloat16)], data.device)
    if row_gx is not None:
        check_out([row_gx], [Buffer("row_gx", (rows,), torch.float32)], data.device)


def _plain_received(
    data: Tensor, scale: Tensor | None, gx: Tensor | None, token_rows: Tensor, *out: Tensor
) -> Any:
    return torch_exchange.stage_received(data, scale, gx, token_rows, out[0].shape[0])


def _stage_received_of(*of: Any) -> Any:
    from cute_kernels.device.exchange_rows import StageReceived

    hidden, quantised, slots, *pitches = of
    pitch = dict(zip(("data_pitch", "scale_pitch", "gx_pitch"), pitches))
    return StageReceived(hidden, quantised=quantised, slots=slots, **pitch)


def _received_kernel(
    data: Tensor,
    scale: Tensor | None,
    gx: Tensor | None,
    token_rows: Tensor,
    values: Tensor,
    row_gx: Tensor | None,
) -> None:
    count, slots = token_rows.shape
    if count == 0 or values.shape[0] == 0:
        return
    data, data_pitch = pitched(data, 8 if data.dtype == torch.uint8 else ALIGNMENT)
    scale_pitch = gx_pitch = 0
    if scale is not None and gx is not None:
        scale, scale_pitch = pitched(scale, 1)
        gx, gx_pitch = pitched(gx, 4)
    pitches = (data_pitch, scale_pitch, gx_pitch)
    kernel = (_stage_received_of, values.shape[1], scale is not None, slots, *pitches)
    inputs = (data, scale, gx, token_rows.contiguous())
    launch(kernel, data.device, *inputs, values, row_gx, count)


# ---- back


class Senders(NamedTuple):
    """Who sent the tokens of a call: ``tokens`` from each of ``ranks`` ranks, which take ``rows``
    rows back each; or, with ``needed`` int64 (ranks, 2), as many tokens and rows as its lines say.
    """

    ranks: int
    tokens: int = 0
    rows: int = 0
    needed: Tensor | None = None


def leave_rows(
    o: Tensor,
    token_rows: Tensor,
    first: Tensor,
    senders: Senders,
    out: Tensor,
    kernels: bool = True,
) -> None:
    """Rows of experts to their places on the way back.

    o           bf16 (R, H), H a multiple of 8
    token_rows  int32 (N, K): rows of the received tokens, negative where a slot has none
    first       int32 (N,), as it came (`Booking.token_first`); may be apart
    out         written: bf16 (places, H); places that no slot has hold anything

    Raises TypeError or ValueError before anything is launched.
    """
    sizes = [senders.ranks, senders.tokens, senders.rows]
    run = _leave_rows_op if kernels else _PLAIN_LEAVE
    run(o, token_rows, first, senders.needed, sizes, out)


def _check_leave(
    o: Tensor,
    token_rows: Tensor,
    first: Tensor,
    needed: Tensor | None,
    sizes: list[int],
    out: Tensor,
) -> None:
    check_matrix(o, "o", (torch.bfloat16,), 8)
    count, slots = token_rows.shape[0], token_rows.shape[-1]
    _check_like(token_rows, "token_rows", torch.int32, (count, slots), o.device)
    check_vector(first, "first", torch.int32, count, o.device)
    if needed is None:
        ranks, tokens, rows = sizes
        if (ranks * tokens, ranks * rows) != (token_rows.shape[0], out.shape[0]):
            raise ValueError(
                f"{ranks} ranks of {tokens} tokens and {rows} rows, got {token_rows.shape[0]} "
                f"tokens and room for {out.shape[0]} rows"
            )
    else:
        _check_like(needed, "needed", torch.int64, (sizes[0], 2), o.device)
    shape = (out.shape[0], o.shape[1])
    check_out([out], [Buffer("out", shape, torch.bfloat16)], o.device)


def _plain_leave(
    o: Tensor,
    token_rows: Tensor,
    first: Tensor,
    needed: Tensor | None,
    sizes: list[int],
    out: Tensor,
) -> tuple[Tensor, ...]:
    if not out.numel():
        return ()
    ranks, *room = sizes
    places = torch_exchange.leaving_places(token_rows, first, needed, (room[0], room[1]), ranks)
    return (torch_exchange.leave_rows(o, token_rows, places, out),)


def _leave_rows_of(*of: int) -> Any:
    from cute_kernels.device.exchange_rows import LeaveRows

    return LeaveRows(*of)


def _leave_kernel(
    o: Tensor,
    token_rows: Tensor,
    first: Tensor,
    needed: Tensor | None,
    sizes: Sequence[int],
    out: Tensor,
) -> None:
    count, slots = token_rows.shape
    if count == 0 or out.shape[0] == 0:
        return
    first, first_pitch = pitched(first, 4)
    table_pitch = 0
    if needed is not None:
        needed, table_pitch = pitched(needed, 8)
    kernel = (_leave_rows_of, o.shape[1], slots, first_pitch, table_pitch)
    inputs = (flat(o), token_rows.contiguous(), first, needed)
    launch(kernel, o.device, *inputs, out, *sizes, count)


# ---- registration

_PLAIN_BOOK = _Plain(_check_book_out, _plain_book, 8)
_PLAIN_SEND = _Plain(_check_send, _plain_send, 1)
_PLAIN_LEAVE = _Plain(_check_leave, _plain_leave, 1)

_book_places_op = register(
    "book_places(Tensor topk_ids, int num_experts, int tokens, int rows, "
    "Tensor(a!) token_place, Tensor(b!) token_first, Tensor(c!) slot_place, Tensor(d!) ids, "
    "Tensor(e!) needed, Tensor(f!)? lost, Tensor(g!)? overflow, Tensor(h!) scratch)",
    _check_book_out,
    _plain_book,
    _book_kernel,
)
_send_rows_op = register(
    "send_rows(Tensor x, Tensor? scale, Tensor? outer, Tensor? weight, Tensor ids, Tensor? mix, "
    "Tensor token_place, Tensor token_first, Tensor needed, int room, int[] wire, "
    "Tensor(a!) rows)",
    _check_send,
    _plain_send,
    _send_kernel,
)
_stage_received_op = register(
    "stage_received(Tensor data, Tensor? scale, Tensor? gx, Tensor token_rows, "
    "Tensor(a!) values, Tensor(b!)? row_gx)",
    _check_received,
    _plain_received,
    _received_kernel,
)
_leave_rows_op = register(
    "leave_rows(Tensor o, Tensor token_rows, Tensor first, Tensor? needed, int[] sizes, "
    "Tensor(a!) out)",
    _check_leave,
    _plain_leave,
    _leave_kernel,
)
