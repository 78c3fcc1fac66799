"""One call of a layer whose experts are spread over ranks: see `moe.parallel.ExpertParallel`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import exchange_ops
from cute_kernels.exchange_ops import Source, Views
from cute_kernels.gemm_ops import without_launches
from cute_kernels.nvfp4 import DecodeTables, Nvfp4Tensor, decode_tables
from moe.exchange import (
    Senders,
    Sizes,
    Steps,
    Wire,
    exchange_buffers,
    part_of,
    wire_of,
)
from moe.local import LocalExperts, TokenRows
from moe.parallel import Capacity, Exchange, ExpertParallel
from moe.plan import RoutingPlan
from moe.ranges import stage
from moe.reference import Tokens, output_dtype
from moe.weights import ExpertWeights
from moe.workspace import Buffer, Workspace, allocate, total_bytes

_LARGE = 2**26  # bytes of scratch from which on calls share the sizes of their memory


def join(parallel: ExpertParallel, local: LocalExperts) -> int:
    """Agree with the other ranks on one layer: its number in ``parallel``. Collective.

    Raises ValueError on every rank when configurations differ, and when this rank's weights are not
    the experts that ``parallel`` gives it.
    """
    cfg, w, numerics = local.cfg, local.weights, local.numerics
    assert isinstance(w, ExpertWeights)  # they are packed afterwards
    mine = (w.first_expert, w.first_expert + w.num_experts)
    if cfg.num_experts != parallel.num_experts or mine != parallel.expert_range:
        raise ValueError(
            f"rank {parallel.rank} of {parallel.size} must hold experts "
            f"{parallel.expert_range[0]}:{parallel.expert_range[1]} of {parallel.num_experts}, got "
            f"{mine[0]}:{mine[1]} of {cfg.num_experts}: load expert_range=parallel.expert_range"
        )
    some = w.num_experts > 0  # a rank without experts has no opinion on theirs
    static = numerics.activation_scale == "static"
    fields: dict[str, Any] = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    fields |= dataclasses.asdict(numerics) | {
        "activation": repr(cfg.activation),
        "backend": local.backend,
        "gx": float(w.gx) if static and w.gx is not None else None,
        "h_scale": ("dynamic" if w.gh is None else "static") if some else None,
        "biases": w.b2 is not None if some else None,
    }
    return parallel.attach(fields, w.device)


def _tables(parallel: ExpertParallel, device: torch.device) -> DecodeTables:
    return parallel.keep((DecodeTables, device), lambda: decode_tables(device, torch.bfloat16))


class Batch(NamedTuple):
    """Tokens of this rank: x (T, H), ids and weights (T, K), shared (T, H) or None."""

    x: Tokens
    ids: Tensor
    weights: Tensor
    shared: Tensor | None

    def part(self, first: int, end: int) -> Batch:
        x = self.x
        if isinstance(x, Nvfp4Tensor):  # its type alone is asked for: its tokens are staged
            x = dataclasses.replace(
                x,
                data=x.data[first:end],
                scale=x.scale[first:end],
                global_scale=x.global_scale.expand(x.shape[0])[first:end],
            )
        else:
            x = x[first:end]
        shared = None if self.shared is None else self.shared[first:end]
        return Batch(x, self.ids[first:end], self.weights[first:end], shared)


class Trip(NamedTuple):
    """One part of a batch on its way.

    scratch   its buffers
    computed  rows of experts, in as many places for each sender where those are fixed
    there     what arrives, what leaves, and how many rows from and to each rank
    back      where rows come back, how many from each rank, and how many go back to each
    by        who has sent what arrives
    places    int32 (T, K), or (T, W) of summed rows: their places among those that came back
    lost      bool (T,) or None
    """

    batch: Batch
    scratch: list[Tensor]
    computed: int
    there: tuple[Any, ...]
    back: tuple[Any, ...]
    by: Senders
    places: Tensor
    lost: Tensor | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class ExchangeCall:
    """`Exchange` of one layer: ``layer`` is its number in ``parallel``."""

    parallel: ExpertParallel
    layer: int
    local: LocalExperts
    mode: Exchange
    workspace: Workspace | None = None

    @property
    def wire(self) -> Wire:
        return wire_of(self.local.cfg, self.local.numerics, self.mode.pre_reduce)

    @functools.cached_property
    def steps(self) -> Steps:
        return Steps(self.local, self.wire, self.parallel.size)

    def __call__(self, batch: Batch) -> Tensor:
        """y (T, H), see `output_dtype`."""
        with self.parallel.phase("quantize"), stage("moe.quantize"):
            given = (batch.x, batch.ids, batch.weights)
            source = self.local.source(*given, self.parallel.max_over_ranks)
        parts = self._parts(batch, source)
        trips = self._by_counts(parts) if self.mode.capacity is None else self._by_places(parts)
        parallel = self.parallel
        # all that leaves is on its way before the first part is computed
        outward = [(trip, parallel.start("dispatch", *trip.there)) for trip in trips]
        homeward = []
        for trip, arrived in outward:
            arrived()
            with parallel.phase("experts"):
                out = self._compute(trip)
            homeward.append((trip, parallel.start("return", trip.back[0], out, *trip.back[1:])))
        done = []
        for trip, returned in homeward:
            returned()
            with parallel.phase("combine"), stage("moe.combine"):
                done.append(self._sum(trip))
        return done[0] if len(done) == 1 else torch.cat(done)

    def _parts(self, batch: Batch, source: Source) -> list[tuple[Batch, Source]]:
        count, parts = batch.ids.shape[0], self.mode.split
        if parts == 1:
            return [(batch, source)]
        ends = [count * i // parts for i in range(parts + 1)]
        return [(batch.part(a, b), part_of(source, a, b)) for a, b in itertools.pairwise(ends)]

    def worst(self, max_tokens: int) -> Sizes:
        """Rows of one part of a call with up to ``max_tokens`` tokens on every rank: all tokens of
        all ranks come here, with all their slots."""
        ranks, top_k = self.parallel.size, self.local.cfg.top_k
        if self.mode.capacity is not None:
            places, rows = self._room(self.mode.capacity)
            tokens, rows = ranks * places, ranks * rows
            return Sizes(tokens, tokens, rows, tokens if self.mode.pre_reduce else rows)
        most = -(-max_tokens // self.mode.split)
        received = ranks * most if self.local.weights.num_experts else 0
        sent = most * min(top_k, ranks, self.parallel.num_experts)
        returned = sent if self.mode.pre_reduce else most * top_k
        return Sizes(sent, received, received * top_k, returned)

    def memory(self, max_tokens: int) -> int:
        """Bytes of scratch that are enough for every call with up to ``max_tokens`` tokens on
        every rank."""
        return total_bytes(self.buffers([self.worst(max_tokens)] * self.mode.split))

    def warmup(self, max_tokens: int) -> None:
        """Compile what this rank runs for up to ``max_tokens`` tokens; nothing is exchanged."""
        self.local.warmup(self._alone, max_tokens, self.worst(max_tokens).computed)
        if self.local.on_kernels:
            with without_launches():
                self._warm_places(max_tokens)

    def _warm_places(self, max_tokens: int) -> None:
        """Every kernel that books: which one follows from the tokens, those of one CTA and of
        several, from whether places may be too few, and from the dtype of ids."""
        top_k, device = self.local.cfg.top_k, self.local.weights.device
        overflow = torch.zeros(3, dtype=torch.int64, device=device)
        many = exchange_ops.ONE_CTA_TOKENS + 1
        for count in (2, many) if max_tokens >= many else (2,):
            rooms = ((1, 1), (count, count * top_k)) if self.mode.capacity else (None,)
            for dtype in (torch.int32, torch.int64):
                ids = torch.full((count, top_k), -1, dtype=dtype, device=device)
                for room in rooms:
                    self.steps.book(ids, room, overflow)

    def _alone(self, x: Tensor, ids: Tensor, mix: Tensor, shared: Tensor | None) -> Tensor:
        """A call without its collectives, whose tokens have no expert on any rank."""
        (count, slots), ranks = ids.shape, self.parallel.size
        source = self.local.source(x, ids, mix, lambda amax: amax)
        overflow = torch.zeros(3, dtype=torch.int64, device=x.device)
        fixed = self.mode.capacity is not None
        booking = self.steps.book(ids, (count, count * slots) if fixed else None, overflow)
        rows = x.new_empty((ranks * count, self.wire.row_bytes), dtype=torch.uint8)
        self.steps.send(source, booking, mix, rows, count if fixed else 0)
        rows = rows[:count].fill_(255)  # ids -1
        needed = overflow.new_zeros((1, 2 * self.mode.split + 1))[:, :2]
        by = Senders(1, count, count * slots) if fixed else Senders(1, needed=needed)
        out = x.new_empty((count * slots, self.local.cfg.hidden), dtype=torch.bfloat16)
        scratch = allocate(self.local.buffers(len(out)), x.device, None)
        back = self._experts(*self._arrived(rows, len(out)), by, out, scratch)
        factors = None if self.mode.pre_reduce or self.local.cfg.weight_on_input else mix
        places = booking.token_place if self.mode.pre_reduce else booking.slot_place
        for lost in (None, torch.zeros_like(ids[:, 0], dtype=torch.bool)) if fixed else (None,):
            y = self.local.combine(back, places, factors, x.dtype, shared, lost)
        return y

    def buffers(self, parts: Sequence[Sizes]) -> list[Buffer]:
        """Scratch of a call, part after part."""
        return [
            buffer
            for sizes in parts
            for buffer in (*exchange_buffers(sizes, self.wire), *self.local.buffers(sizes.computed))
        ]

    def _scratch(self, parts: Sequence[Sizes], device: torch.device) -> list[list[Tensor]]:
        buffers = self.buffers(parts)
        memory = self.workspace or self._block(total_bytes(buffers), device)
        flat = allocate(buffers, device, memory)
        each = len(flat) // len(parts)
        return [flat[i : i + each] for i in range(0, len(flat), each)]

    def _block(self, nbytes: int, device: torch.device) -> Workspace | None:
        """Memory for one call whose sizes follow the routing, or None: buffer by buffer. Buffers
        of a little more rows than ever before would be asked of the driver, each of them and with
        a wait for the device; blocks of few sizes are found again in torch's cache."""
        if self.mode.capacity is not None or nbytes < _LARGE:
            return None
        step = 1 << (nbytes.bit_length() - 4)
        return Workspace(-(-nbytes // step) * step, device)

    def _room(self, capacity: Capacity) -> tuple[int, int]:
        """Tokens and rows of one part for each pair of ranks."""
        tokens = -(-capacity.tokens // self.mode.split)
        most = tokens * self.local.cfg.top_k
        if capacity.rows is None:
            return tokens, most
        share = max(-(-capacity.rows // self.mode.split), self.local.cfg.top_k)
        return tokens, min(share, capacity.rows, most)  # one token of a part has what it may need

    def _by_counts(self, parts: list[tuple[Batch, Source]]) -> Iterator[Trip]:
        """Sizes follow the routing: one exchange of counts, for which the host waits."""
        parallel, reduced = self.parallel, self.mode.pre_reduce
        device = parts[0][0].ids.device
        with parallel.phase("counts"):
            bookings = [self.steps.book(batch.ids, None, None) for batch, _ in parts]
            counts = [booking.needed for booking in bookings]
            table = counts[0] if len(counts) == 1 else torch.cat(counts, dim=1)
        there, here, needed = parallel.exchange_counts(table, self.layer)
        # by part: tokens and slots that go to, and that come from, each rank
        numbers = [
            [[row[column] for row in side] for side in (there, here) for column in (i, i + 1)]
            for i in range(0, 2 * len(parts), 2)
        ]
        sizes = [
            Sizes(sum(sent), sum(received), sum(slots_here), sum(sent if reduced else slots_sent))
            for sent, slots_sent, received, slots_here in numbers
        ]
        with parallel.phase("dispatch"):
            scratch = self._scratch(sizes, device)
        for i, (sent, slots_sent, received, slots_here) in enumerate(numbers):
            (batch, source), booking = parts[i], bookings[i]
            leaving, arriving, _, returned = scratch[i][:4]
            with parallel.phase("dispatch"):
                self.steps.send(source, booking, batch.weights, leaving)
            back = (sent, received) if reduced else (slots_sent, slots_here)
            yield Trip(
                batch,
                scratch[i],
                sizes[i].computed,
                (arriving, leaving, received, sent),
                (returned[: sizes[i].returned], *back),
                Senders(parallel.size, needed=needed[:, 2 * i : 2 * i + 2]),
                booking.token_place if reduced else booking.slot_place,
            )

    def _by_places(self, parts: list[tuple[Batch, Source]]) -> Iterator[Trip]:
        """Sizes are fixed, nothing waits for the device."""
        parallel, reduced = self.parallel, self.mode.pre_reduce
        device, sizes = parts[0][0].ids.device, self.worst(0)
        assert self.mode.capacity is not None
        room = self._room(self.mode.capacity)
        with parallel.phase("dispatch"):
            scratch = self._scratch([sizes] * len(parts), device)
        for (batch, source), mine in zip(parts, scratch):
            leaving, arriving, _, returned = mine[:4]
            with parallel.phase("dispatch"):
                booking = self.steps.book(batch.ids, room, parallel.overflow(device))
                self.steps.send(source, booking, batch.weights, leaving, room[0])
            there, back, by = (arriving, leaving), (returned,), Senders(parallel.size, *room)
            at = booking.token_place if reduced else booking.slot_place
            yield Trip(batch, mine, sizes.computed, there, back, by, at, booking.lost)

    def _compute(self, trip: Trip) -> Tensor:
        """Tokens as they arrived -> the rows that go back, bf16."""
        part, plan, mix = self._arrived(trip.there[0], trip.computed)
        self.parallel.count_received(plan.expert_offsets)
        return self._experts(part, plan, mix, trip.by, trip.scratch[2], trip.scratch[4:])

    def _arrived(self, rows: Tensor, computed: int) -> tuple[Views, RoutingPlan, Tensor]:
        """Parts of rows off the wire, the rows of experts for them, and the weights of slots."""
        part = self.steps.received(rows)
        # where the owner sums, nobody reads weights here
        mix = torch.empty(part.ids.shape, dtype=torch.float32, device=rows.device)
        if part.weights is not None:
            mix = part.weights.contiguous()
        return part, self.local.plan(part.ids, mix, computed), mix

    def _experts(
        self,
        part: Views,
        plan: RoutingPlan,
        mix: Tensor,
        by: Senders,
        out: Tensor,
        scratch: list[Tensor],
    ) -> Tensor:
        """The rows that go back: in ``out``, or new ones where slots are summed here."""
        tables = None if self.local.on_kernels else _tables(self.parallel, out.device)
        o = self.local.rows(TokenRows(part.data, part.scale, part.gx, tables), plan, scratch)
        if part.first is None:
            return self._partial(o, plan.token_rows, mix)
        self.steps.leave(o, plan.token_rows, part.first, by, out)
        return out

    def _partial(self, o: Tensor, token_rows: Tensor, weights: Tensor) -> Tensor:
        """bf16 (N, H): each received token's slots, weighted and summed in fp32."""
        if o.shape[0] == 0:
            shape = (token_rows.shape[0], o.shape[1])
            return torch.zeros(shape, dtype=torch.bfloat16, device=o.device)
        factors = None if self.local.cfg.weight_on_input else weights
        return self.local.combine(o, token_rows, factors, torch.bfloat16)

    def _sum(self, trip: Trip) -> Tensor:
        batch = trip.batch
        plain = self.mode.pre_reduce or self.local.cfg.weight_on_input
        factors = None if plain else batch.weights
        dtype, returned = output_dtype(batch.x), trip.scratch[3]
        return self.local.combine(returned, trip.places, factors, dtype, batch.shared, trip.lost)


@dataclasses.dataclass(frozen=True, eq=False)
class ReducedCall:
    """`Replicated` with reduce=True."""

    parallel: ExpertParallel
    local: LocalExperts
    workspace: Workspace | None = None

    def memory(self, max_tokens: int) -> int:
        """Bytes of scratch that are enough for every call with up to ``max_tokens`` tokens."""
        return total_bytes(self.local.buffers(max_tokens * self.local.cfg.top_k))

    def warmup(self, max_tokens: int) -> None:
        def part(x: Tensor, ids: Tensor, mix: Tensor, shared: Tensor | None) -> Tensor:
            tokens = self.local.stage(x, ids, mix, lambda amax: amax)
            plan = self.local.plan(ids, mix, ids.numel())
            scratch = allocate(self.local.buffers(ids.numel()), x.device, None)
            o = self.local.rows(tokens, plan, scratch)
            factors = None if self.local.cfg.weight_on_input else mix
            return self.local.combine(o, plan.token_rows, factors, torch.float32)

        self.local.warmup(part, max_tokens, max_tokens * self.local.cfg.top_k)

    def __call__(self, batch: Batch) -> Tensor:
        """y (T, H), see `output_dtype`: the same on every rank."""
        local, device = self.local, batch.x.device
        with self.parallel.phase("experts"):
            rows = batch.ids.numel()
            scratch = allocate(local.buffers(rows), device, self.workspace)
            tokens = local.stage(batch.x, batch.ids, batch.weights, lambda amax: amax)
            plan = local.plan(batch.ids, batch.weights, rows)
            o = local.rows(tokens, plan, scratch)
            factors = None if local.cfg.weight_on_input else batch.weights
            y = torch.zeros((batch.ids.shape[0], local.cfg.hidden), device=device)
            if rows:
                y = local.combine(o, plan.token_rows, factors, torch.float32)
        y = self.parallel.sum_over_ranks(y)
        y = y if batch.shared is None else y + batch.shared.float()
        return y.to(output_dtype(batch.x))
