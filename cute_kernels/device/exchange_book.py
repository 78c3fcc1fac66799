"""Places for the tokens that go to other ranks, and for the rows that come back.

Experts live on the ranks in contiguous ranges whose sizes differ by one at most, larger ones first.
A token goes once to every rank with an expert of it. For rank d

    before(t, d) = tokens before t that go to d        first(t, d) = slots of those tokens on d

and a token's own slots on d follow first(t, d) in order. In a fixed number of places, C tokens and
S rows for each rank, token t takes d C + before and a slot d S + first + its number, if before < C
and first + number < S; otherwise the ranks lie close behind one another.

Warps take contiguous runs of tokens, as in `routing`: each counts, a CTA sums over its warps, and
several CTAs leave their counts in memory with `CountPlaces` before. The order is that of tokens.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.routing import WARP, WarpRuns
from cute_kernels.device.scheduler import inclusive_sum

SHARED_BYTES = 200 * 1024  # of a CTA: two counters for each rank and warp, and four for each rank


@dataclasses.dataclass(frozen=True)
class _Places(WarpRuns):
    """What both kernels share.

    num_experts  of all ranks
    ranks        W
    top_k        slots per token
    ids          'Int32' or 'Int64'

    Counter c of a row of 2 W: tokens for rank c, from W on slots on rank c - W.
    """

    num_experts: int
    ranks: int
    top_k: int
    ids: str = "Int32"

    @property
    def warps(self) -> int:
        return max(1, min(32, SHARED_BYTES // (8 * self.ranks) - 2))

    @property
    def counters(self) -> int:
        return 2 * self.ranks

    def load_slots(self, topk_ids, token, stop):
        """(expert, rank) of each slot of a token; -1 and W where there is no expert, and from
        ``stop`` on. The loads are in flight together."""
        near = Int64(cutlass.max(cutlass.min(token, stop - 1), 0)) * self.top_k
        at = [near + k for k in range(self.top_k)]
        if self.ids == "Int64":  # compared as 64 bits: no wrap-around makes an id valid
            words = [ptx.load_u32x2(topk_ids.toint() + i * 8) for i in at]
            found = [ptx.select(high == 0, Int32(low), Int32(-1)) for low, high in words]
        else:
            found = [ptx.load_i32(topk_ids.toint() + i * 4) for i in at]
        slots = []
        for expert in found:
            here = ptx.select(expert < self.num_experts, expert, Int32(-1))
            here = cutlass.max(ptx.select(token < stop, here, Int32(-1)), Int32(-1))
            slots.append((here, self.rank_of(here)))
        return slots

    def rank_of(self, expert):
        """Ranks below ``rest`` have one expert more; W for a negative expert."""
        size, rest = divmod(self.num_experts, self.ranks)
        rank = expert // (size + 1)
        if size and rest:
            more = rest * (size + 1)
            rank = ptx.select(expert < more, rank, rest + (expert - more) // size)
        elif size:
            rank = expert // size
        return ptx.select(expert >= 0, Int32(rank), Int32(self.ranks))

    def slots_on(self, slots, rank):
        """How many slots of this lane's token are on ``rank``."""
        count = Int32(0)
        for _, found in slots:
            count += ptx.select(found == rank, Int32(1), Int32(0))
        return count

    @cute.jit
    def count_run(self, topk_ids, sCount, begin, stop, tid):
        """Counters of this warp's tokens."""
        lane, row = tid % WARP, tid // WARP * self.counters
        base = begin
        while base < stop:
            slots = self.load_slots(topk_ids, base + lane, stop)
            for rank in cutlass.range(self.ranks):
                count = self.slots_on(slots, rank)
                tokens = Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(count > 0))))
                rows = ptx.redux_add_i32(count)
                if lane == 0:
                    sCount[row + rank] = sCount[row + rank] + tokens
                    sCount[row + self.ranks + rank] = sCount[row + self.ranks + rank] + rows
            base += WARP

    @cute.jit
    def clear(self, sCount, tid):
        for i in cutlass.range(tid, self.warps * self.counters, self.threads):
            sCount[i] = Int32(0)


@dataclasses.dataclass(frozen=True)
class CountPlaces(_Places):
    """counts[cta, c] = counter c of the tokens of the CTA.

    topk_ids (T, K); counts int32 (ctas, 2 W)
    """

    @property
    def name(self) -> str:
        return f"count_places_e{self.num_experts}_w{self.ranks}_k{self.top_k}_{self.ids.lower()}"

    @property
    def arguments(self) -> tuple:
        return (self.ids_argument, Ptr("Int32", 4), "i32", "i32")

    @cute.jit
    def __call__(self, topk_ids, counts, tokens, ctas, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(topk_ids, counts, tokens, ctas).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, topk_ids, counts, tokens, ctas):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        sCount = self.shared(self.warps * self.counters)
        self.clear(sCount, tid)
        ptx.wait_for_previous_kernel()
        cute.arch.sync_threads()
        begin, stop = self.run_of_warp(tokens, ctas, cta, tid)
        self.count_run(topk_ids, sCount, begin, stop, tid)
        cute.arch.sync_threads()
        for c in cutlass.range(tid, self.counters, self.threads):
            total = Int32(0)
            for w in cutlass.range(self.warps, unroll=8):
                total += sCount[w * self.counters + c]
            ptx.store_u32(counts.toint() + (Int64(cta) * self.counters + c) * 4, total)
        ptx.allow_next_kernel()


@dataclasses.dataclass(frozen=True)
class BookPlaces(_Places):
    """fixed    C tokens and S rows for each rank; False: close behind one another
    limited  C or S may be too few: ``lost`` and ``overflow`` are written
    spread   several CTAs, whose counts `CountPlaces` left in ``counts``

    topk_ids (T, K) global ids, T >= 1; counts int32 (ctas, 2 W).
    token_place, token_first int32 (T, W): place of the token among those that leave, -1 where it
    has none; `first`, 0 where the token does not go. slot_place, ids int32 (T, K): place of the
    slot among the rows that come back, and its expert; both -1 where it has none. needed int32
    (W, 2): tokens and slots for each rank, with a place or without. lost uint8 (T,): 1 where a slot
    of an expert has no place. overflow int64 (3,): tokens that are lost are added, the largest
    needs of a rank are kept.
    """

    fixed: bool = True
    limited: bool = True
    spread: bool = False

    @property
    def name(self) -> str:
        kind = ("limited" if self.limited else "fixed") if self.fixed else "close"
        kind += "_spread" if self.spread else ""
        sizes = f"e{self.num_experts}_w{self.ranks}_k{self.top_k}"
        return f"book_places_{kind}_{sizes}_{self.ids.lower()}"

    @property
    def arguments(self) -> tuple:
        i32 = Ptr("Int32", 4)
        inputs = (self.ids_argument, i32 if self.spread else None)
        limits = (Ptr("Uint8", 1), Ptr("Int64", 8)) if self.limited else (None, None)
        return (inputs, (i32, i32, i32, i32, i32, *limits), ("i32", "i32"), "i32", "i32")

    @cute.jit
    def __call__(self, inputs, outputs, room, tokens, ctas, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, outputs, room, tokens, ctas).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, inputs, outputs, room, tokens, ctas):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        sCount = self.shared(self.warps * self.counters)
        sTotal, sBase = self.shared(self.counters), self.shared(self.counters)
        self.clear(sCount, tid)
        ptx.wait_for_previous_kernel()
        cute.arch.sync_threads()
        begin, stop = self.run_of_warp(tokens, ctas, cta, tid)
        self.count_run(inputs[0], sCount, begin, stop, tid)
        cute.arch.sync_threads()
        self.scan_warps(inputs[1], (sCount, sTotal), outputs, ctas, cta)
        cute.arch.sync_threads()
        self.find_bases(sTotal, sBase, room, tid)
        cute.arch.sync_threads()
        self.place_run(inputs[0], (sCount, sBase), outputs, room, begin, stop)
        ptx.allow_next_kernel()

    @cute.jit
    def scan_warps(self, counts, shared, outputs, ctas, cta):
        """sCount becomes what earlier CTAs and earlier warps of this one have, sTotal what all
        have."""
        sCount, sTotal = shared
        tid, _, _ = cute.arch.thread_idx()
        for c in cutlass.range(tid, self.counters, self.threads):
            running, total = Int32(0), Int32(0)
            if cutlass.const_expr(self.spread):
                column = counts.toint() + Int64(c) * 4
                for other in cutlass.range(ctas, unroll=8):
                    part = ptx.load_i32(column + Int64(other) * (self.counters * 4))
                    total += part
                    if other < cta:
                        running += part
            for w in cutlass.range(self.warps, unroll=8):
                count = sCount[w * self.counters + c]
                sCount[w * self.counters + c] = running
                running += count
            if cutlass.const_expr(not self.spread):
                total = running
            sTotal[c] = total
            if cta == 0:
                rank, slots = c % self.ranks, c // self.ranks
                ptx.store_u32(outputs[4].toint() + (rank * 2 + slots) * 4, total)
                if cutlass.const_expr(self.limited):
                    ptx.max_i64(outputs[6].toint() + 8 + slots * 8, Int64(total))

    @cute.jit
    def find_bases(self, sTotal, sBase, room, tid):
        """sBase[c]: first place of the counter's rank."""
        for c in cutlass.range(tid, self.counters, self.threads):
            rank, slots = c % self.ranks, c // self.ranks
            base = rank * ptx.select(slots == 0, room[0], room[1])
            if cutlass.const_expr(not self.fixed):
                base = Int32(0)
                for other in cutlass.range(rank, unroll=8):
                    base += sTotal[slots * self.ranks + other]
            sBase[c] = base

    @cute.jit
    def place_run(self, topk_ids, shared, outputs, room, begin, stop):
        """Places of this warp's tokens and their slots."""
        sCount, _ = shared
        _, _, slot_place, ids, *_ = outputs
        tid, _, _ = cute.arch.thread_idx()
        lane, row = tid % WARP, tid // WARP * self.counters
        base = begin
        while base < stop:
            token = base + lane
            slots = self.load_slots(topk_ids, token, stop)
            at = Int64(token) * (4 * self.top_k)
            for k in cutlass.range_constexpr(self.top_k):
                if token < stop and slots[k][1] == self.ranks:
                    ptx.store_u32(slot_place.toint() + at + 4 * k, Int32(-1))
                    ptx.store_u32(ids.toint() + at + 4 * k, Int32(-1))
            lost = Int32(0)
            for rank in cutlass.range(self.ranks):
                count = self.slots_on(slots, rank)
                goes = Uint32(cute.arch.vote_ballot_sync(count > 0))
                earlier = Int32(cute.arch.popc(goes & ((Uint32(1) << lane) - 1)))
                before = sCount[row + rank] + earlier
                upto = inclusive_sum(count, lane) + sCount[row + self.ranks + rank]
                cute.arch.sync_warp()
                if lane == WARP - 1:
                    sCount[row + rank] = before + ptx.select(count > 0, Int32(1), Int32(0))
                    sCount[row + self.ranks + rank] = upto
                cute.arch.sync_warp()
                lost += self.place_token(
                    shared, outputs, room, slots, (token, stop, rank), (count, before, upto - count)
                )
            if cutlass.const_expr(self.limited):
                self.note_lost(outputs, token, stop, lost)
            base += WARP

    @cute.jit
    def place_token(self, shared, outputs, room, slots, where, counts):
        """One token on one rank. Returns how many of its slots there find no place."""
        token_place, token_first, slot_place, ids, *_ = outputs
        sBase = shared[1]
        token, stop, rank = where
        count, before, first = counts
        lost = Int32(0)
        if token < stop:
            fits = count > 0
            if cutlass.const_expr(self.limited):
                fits = fits and before < room[0]
            column = (Int64(token) * self.ranks + rank) * 4
            place = ptx.select(fits, sBase[rank] + before, Int32(-1))
            ptx.store_u32(token_place.toint() + column, place)
            ptx.store_u32(token_first.toint() + column, ptx.select(count > 0, first, Int32(0)))
            at = Int64(token) * (4 * self.top_k)
            mine = first
            for k in cutlass.range_constexpr(self.top_k):
                expert, found = slots[k]
                if found == rank:
                    kept = fits
                    if cutlass.const_expr(self.limited):
                        kept = fits and mine < room[1]
                    row = sBase[self.ranks + rank] + mine
                    ptx.store_u32(slot_place.toint() + at + 4 * k, ptx.select(kept, row, Int32(-1)))
                    ptx.store_u32(ids.toint() + at + 4 * k, ptx.select(kept, expert, Int32(-1)))
                    lost += ptx.select(kept, Int32(0), Int32(1))
                    mine += 1
        return lost

    @cute.jit
    def note_lost(self, outputs, token, stop, lost):
        lane = cute.arch.lane_idx()
        gone = Int32(cute.arch.popc(Uint32(cute.arch.vote_ballot_sync(lost > 0))))
        if token < stop:
            ptx.store_u8(outputs[5].toint() + token, ptx.select(lost > 0, Uint32(1), Uint32(0)))
        if lane == 0 and gone > 0:
            ptx.add_i64(outputs[6].toint(), Int64(gone))
