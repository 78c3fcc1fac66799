"""One call of a layer whose experts are spread over ranks: see `moe.parallel.ExpertParallel`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe import exchange
from moe.exchange import Sizes, Wire, exchange_buffers
from moe.local import LocalExperts, TokenRows
from moe.parallel import Capacity, Exchange, ExpertParallel
from moe.ranges import stage
from moe.reference import Tokens, output_dtype
from moe.weights import ExpertWeights
from moe.workspace import Buffer, Workspace, allocate, total_bytes


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


class Batch(NamedTuple):
    """Tokens of this rank: x (T, H), ids and weights (T, K), shared (T, H) or None."""

    x: Tokens
    ids: Tensor
    weights: Tensor
    shared: Tensor | None


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
        return Wire.of(self.local.cfg, self.local.numerics, self.mode.pre_reduce)

    def __call__(self, batch: Batch) -> Tensor:
        """y (T, H), see `output_dtype`."""
        with self.parallel.phase("quantize"), stage("moe.quantize"):
            tokens = self.local.stage(
                batch.x, batch.ids, batch.weights, self.parallel.max_over_ranks
            )
        if self.mode.capacity is None:
            return self._by_counts(batch, tokens)
        return self._by_places(batch, tokens, self.mode.capacity)

    def worst(self, max_tokens: int) -> Sizes:
        """Rows of a call with up to ``max_tokens`` tokens on every rank: all tokens of all ranks
        come here, with all their slots."""
        ranks, top_k = self.parallel.size, self.local.cfg.top_k
        capacity = self.mode.capacity
        if capacity is not None:
            tokens, rows = ranks * capacity.tokens, ranks * self._rows(capacity)
            return Sizes(tokens, tokens, rows, tokens if self.mode.pre_reduce else rows)
        received = ranks * max_tokens if self.local.weights.num_experts else 0
        sent = max_tokens * min(top_k, ranks, self.parallel.num_experts)
        returned = sent if self.mode.pre_reduce else max_tokens * top_k
        return Sizes(sent, received, received * top_k, returned)

    def memory(self, max_tokens: int) -> int:
        """Bytes of scratch that are enough for every call with up to ``max_tokens`` tokens on
        every rank."""
        return total_bytes(self.buffers(self.worst(max_tokens)))

    def warmup(self, max_tokens: int) -> None:
        self.local.warmup(max_tokens, self.worst(max_tokens).computed, self.mode.pre_reduce)

    def buffers(self, sizes: Sizes) -> list[Buffer]:
        return [*exchange_buffers(sizes, self.wire), *self.local.buffers(sizes.computed)]

    def _rows(self, capacity: Capacity) -> int:
        most = capacity.tokens * self.local.cfg.top_k
        return most if capacity.rows is None else min(capacity.rows, most)

    def _by_counts(self, batch: Batch, tokens: TokenRows) -> Tensor:
        """Sizes follow the routing: one exchange of counts, for which the host waits."""
        parallel, reduced = self.parallel, self.mode.pre_reduce
        with parallel.phase("counts"):
            owner = exchange.owners(batch.ids, parallel.homes(batch.x.device))
            going = exchange.depart(owner, self.local.sort)
        with parallel.phase("dispatch"):
            packed = self.wire.pack(tokens, owner.ids, batch.weights)
        there, here = parallel.exchange_counts(going.counts(), self.layer)
        sent, received = ([n for n, _ in c] for c in (there, here))
        slots_sent, slots_here = ([n for _, n in c] for c in (there, here))
        back = sent if reduced else slots_sent
        sizes = Sizes(sum(sent), sum(received), sum(slots_here), sum(back))
        with parallel.phase("dispatch"):
            scratch = allocate(self.buffers(sizes), batch.x.device, self.workspace)
            leaving, arriving, _, returned = scratch[:4]
            exchange.gather_rows(packed, going.tokens.row_token[: sizes.sent], leaving)
        parallel.all_to_all("dispatch", arriving, leaving, received, sent)
        with parallel.phase("experts"):
            out = self._compute(arriving, scratch, sizes.computed, 1)
        back_here = received if reduced else slots_here
        parallel.all_to_all("return", returned[: sizes.returned], out, back, back_here)
        with parallel.phase("combine"), stage("moe.combine"):
            places = going.tokens.token_rows if reduced else going.slots.token_rows
            return self._sum(returned, places, batch)

    def _by_places(self, batch: Batch, tokens: TokenRows, capacity: Capacity) -> Tensor:
        """Sizes are fixed, nothing waits for the device."""
        parallel, reduced = self.parallel, self.mode.pre_reduce
        rows, sizes = self._rows(capacity), self.worst(capacity.tokens)
        with parallel.phase("dispatch"):
            scratch = allocate(self.buffers(sizes), batch.x.device, self.workspace)
            leaving, arriving, _, returned = scratch[:4]
            owner = exchange.owners(batch.ids, parallel.homes(batch.x.device))
            going = exchange.depart(owner, self.local.sort)
            booking = exchange.book(owner, going, capacity.tokens, rows)
            ids = owner.ids
            if booking.lost is not None:
                parallel.count_lost(booking.lost, going.counts().amax(dim=0))
                # an expert must not compute what has no place on the way back
                ids = ids.masked_fill(booking.rows < 0, -1)
            if batch.x.shape[0]:
                packed = self.wire.pack(tokens, ids, batch.weights)
                exchange.gather_rows(packed, booking.token, leaving)
            self.wire.empty(leaving, booking.empty)
        parallel.all_to_all("dispatch", arriving, leaving)
        with parallel.phase("experts"):
            out = self._compute(arriving, scratch, sizes.computed, parallel.size)
        parallel.all_to_all("return", returned, out)
        with parallel.phase("combine"), stage("moe.combine"):
            places = exchange.token_places(going, capacity.tokens) if reduced else booking.rows
            y = self._sum(returned, places, batch)
            if booking.lost is None:
                return y
            return y.masked_fill_(booking.lost.unsqueeze(1), torch.nan)

    def _compute(
        self, arriving: Tensor, scratch: list[Tensor], computed: int, senders: int
    ) -> Tensor:
        """Tokens as they arrived -> the rows that go back, bf16. ``scratch`` is that of the call,
        ``computed`` the rows of experts, in as many places for each of ``senders``."""
        tokens, ids, weights = self.wire.unpack(arriving, self.parallel.tables(arriving.device))
        mix = ids.new_zeros(ids.shape, dtype=torch.float32) if weights is None else weights
        plan = self.local.plan(ids, mix, computed)
        self.parallel.received = plan.expert_offsets
        o = self.local.rows(tokens, plan, scratch[4:])
        if self.mode.pre_reduce:
            return self._partial(o, plan.token_rows, mix)
        index = exchange.leaving_rows(plan.token_rows, computed // senders, senders)
        return torch.index_select(o, 0, index, out=scratch[2])

    def _partial(self, o: Tensor, token_rows: Tensor, weights: Tensor) -> Tensor:
        """bf16 (N, H): each received token's slots, weighted and summed in fp32."""
        if o.shape[0] == 0:
            shape = (token_rows.shape[0], o.shape[1])
            return torch.zeros(shape, dtype=torch.bfloat16, device=o.device)
        factors = None if self.local.cfg.weight_on_input else weights
        return self.local.combine(o, token_rows, factors, torch.bfloat16)

    def _sum(self, returned: Tensor, places: Tensor, batch: Batch) -> Tensor:
        plain = self.mode.pre_reduce or self.local.cfg.weight_on_input
        factors = None if plain else batch.weights
        return self.local.combine(returned, places, factors, output_dtype(batch.x), batch.shared)


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
        self.local.warmup(max_tokens, max_tokens * self.local.cfg.top_k, False)

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
