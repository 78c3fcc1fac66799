"""Counting sort of (token, slot) pairs by expert: stable and on the device.

CTAs take the pairs in order, every warp a contiguous run of them:

    1. each warp counts its pairs per expert and notes the rank of each pair within the warp
    2. a CTA sums over its warps and over earlier CTAs; a scan over experts gives first rows
    3. row = first row of the expert + its pairs in earlier CTAs and warps + rank

One CTA does all of it for few pairs. For many, `CountRoutes` counts per CTA before. Where atomics
are used they only count: the order of rows is the order of pairs.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.scheduler import inclusive_sum

WARP = 32
FULL_MASK = 0xFFFFFFFF
BATCH = 4  # groups of 32 pairs whose loads a warp has in flight
SHARED_BYTES = 224 * 1024  # of a CTA: a row of counters per warp, and two more per CTA


class WarpRuns:
    """Kernels over ids, whose warps each take a contiguous run of the items; a subclass has ``ids``
    ('Int32' or 'Int64') and ``warps`` of a CTA."""

    @property
    def threads(self) -> int:
        return self.warps * WARP

    @property
    def ids_argument(self) -> Ptr:
        return Ptr(self.ids, 4 if self.ids == "Int32" else 8)

    def shared(self, size):
        return cute.make_tensor(
            cute.arch.alloc_smem(Int32, size, alignment=16), cute.make_layout(size)
        )

    def run_of_warp(self, items, ctas, cta, tid):
        """(first, end) of the items of this warp."""
        per_warp = (items + (ctas * self.threads - 1)) // (ctas * self.threads) * WARP
        begin = (cta * self.warps + tid // WARP) * per_warp
        return begin, cutlass.min(begin + per_warp, items)


@dataclasses.dataclass(frozen=True)
class Routes(WarpRuns):
    """What both kernels share.

    num_experts  local experts E
    ids          'Int32' or 'Int64'
    top_k        slots per token
    apart        ids of a token are ``pitch`` elements behind those of the token before it, as on
                 the wire between ranks; otherwise they lie close behind one another
    """

    num_experts: int
    ids: str = "Int32"
    top_k: int = 1
    apart: bool = False

    @property
    def warps(self) -> int:
        return max(1, min(32, SHARED_BYTES // (4 * self.num_experts) - 2))

    def load_experts(self, inputs, base, stop):
        """Local experts of the pairs base + 0, 32, 64, ..: -1 without a row and from ``stop`` on.
        The loads are in flight together."""
        topk_ids, _, first_expert, global_experts, pitch = inputs
        index = [base + WARP * n for n in range(BATCH)]
        near = [Int64(cutlass.max(cutlass.min(i, stop - 1), 0)) for i in index]
        if self.apart:
            near = [i // self.top_k * pitch + i % self.top_k for i in near]
        if self.ids == "Int64":  # compared as 64 bits: no wrap-around makes an id valid
            words = [ptx.load_u32x2(topk_ids.toint() + i * 8) for i in near]
            known = [high == 0 for _, high in words]
            ids = [Int32(low) for low, _ in words]
        else:
            ids = [ptx.load_i32(topk_ids.toint() + i * 4) for i in near]
            known = [True] * BATCH
        experts = []
        for i, expert, valid in zip(index, ids, known):
            local = expert - first_expert
            here = cutlass.select_(expert < global_experts, local, Int32(-1))
            here = cutlass.select_(expert < 0, Int32(-1), here)
            here = cutlass.select_(local >= self.num_experts, Int32(-1), here)
            here = cutlass.select_(i < stop, here, Int32(-1))
            if valid is not True:
                here = cutlass.select_(valid, here, Int32(-1))
            experts.append(cutlass.max(Int32(here), -1))
        return index, experts

    def lanes_alike(self, expert):
        """Mask of lanes with the same expert: one vote per bit, cheaper than match.any for many
        experts."""
        mask = Uint32(FULL_MASK)
        for b in range(self.num_experts.bit_length()):
            bit = (expert >> b) & 1
            ballot = Uint32(cute.arch.vote_ballot_sync(bit != 0))
            mask = mask & (
                ballot ^ Uint32(bit - 1)
            )  # bit 1: those that voted, bit 0: those that did not
        return mask


@dataclasses.dataclass(frozen=True)
class CountRoutes(Routes):
    """counts[cta, e] = pairs of local expert e among those of the CTA.

    topk_ids (T, K); counts int32 (ctas, E)
    """

    @property
    def name(self) -> str:
        apart = f"_k{self.top_k}_apart" if self.apart else ""
        return f"count_routes_e{self.num_experts}_{self.ids.lower()}{apart}"

    @property
    def arguments(self) -> tuple:
        source = (self.ids_argument, "i32")
        return (source, Ptr("Int32", 4), "i32", "i32", "i32", "i32")

    @cute.jit
    def __call__(self, source, counts, pairs, ctas, first_expert, global_experts, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        inputs = (source[0], None, first_expert, global_experts, source[1])
        self.kernel(inputs, counts, pairs, ctas).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, inputs, counts, pairs, ctas):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        sCount = self.shared(self.num_experts)
        for i in cutlass.range(tid, self.num_experts, self.threads):
            sCount[i] = Int32(0)
        ptx.wait_for_previous_kernel()
        cute.arch.sync_threads()
        begin, stop = self.run_of_warp(pairs, ctas, cta, tid)
        base = begin
        while base < stop:
            _, experts = self.load_experts(inputs, base + tid % WARP, stop)
            for n in cutlass.range_constexpr(BATCH):
                if experts[n] >= 0:
                    ptx.count_shared(sCount.iterator + experts[n])
            base += WARP * BATCH
        cute.arch.sync_threads()
        for i in cutlass.range(tid, self.num_experts, self.threads):
            position = Int64(cta) * self.num_experts + i
            ptx.store_u32(counts.toint() + position * 4, sCount[i])
        ptx.allow_next_kernel()


@dataclasses.dataclass(frozen=True)
class SortRoutes(Routes):
    """spread    several CTAs, whose counts `CountRoutes` left in ``counts``
    counters  so many int32 words are set to 0: work counters of the kernels that follow

    topk_ids (T, K) global ids; weights fp32 (T, K); counts int32 (ctas, E); pairs = T * K;
    first_expert: global id of local expert 0; global_experts: ids at and past it are ignored, like
    negative ones and those of other ranks.
    expert_offsets int32 (E+1,); row_token int32, row_weight fp32 (rows,) with rows >= pairs: -1
    and 0 past the last routed row; token_rows int32 (T, K): -1 where a slot has no row here.
    """

    spread: bool = False
    counters: int = 0

    @property
    def name(self) -> str:
        counter = "_counter" if self.counters == 1 else f"_counters{self.counters}"
        chosen = {"_spread": self.spread, counter: self.counters > 0, "_apart": self.apart}
        flags = "".join(flag for flag, on in chosen.items() if on)
        return f"sort_routes_e{self.num_experts}_k{self.top_k}_{self.ids.lower()}{flags}"

    @property
    def arguments(self) -> tuple:
        i32, f32 = Ptr("Int32", 4), Ptr("Float32", 4)
        inputs = (self.ids_argument, f32, i32 if self.spread else None, "i32", "i32", "i32")
        outputs = (i32, i32, f32, i32, i32 if self.counters else None)
        return (inputs, outputs, "i32", "i32", "i32")

    @cute.jit
    def __call__(self, inputs, outputs, pairs, rows, ctas, stream):
        topk_ids, weights, counts, first_expert, global_experts, pitch = inputs
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        inputs = (topk_ids, weights, first_expert, global_experts, pitch)
        self.kernel(inputs, counts, outputs, pairs, rows, ctas).launch(
            grid=(ctas, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, inputs, counts, outputs, pairs, rows, ctas):
        expert_offsets, row_token, row_weight, token_rows, counter = outputs
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        sCount = self.shared(self.warps * self.num_experts)  # (warp, expert)
        sTotal, sFirst = self.shared(self.num_experts), self.shared(self.num_experts)
        sScan = self.shared(self.warps)
        for i in cutlass.range(tid, self.warps * self.num_experts, self.threads):
            sCount[i] = Int32(0)
        ptx.wait_for_previous_kernel()
        cute.arch.sync_threads()

        begin, stop = self.run_of_warp(pairs, ctas, cta, tid)
        self.rank_pairs(inputs, token_rows, sCount, begin, stop, tid)
        cute.arch.sync_threads()
        self.scan_warps(sCount, sTotal, tid)
        cute.arch.sync_threads()
        total = self.scan_experts((sTotal, sFirst, sScan), counts, expert_offsets, ctas, cta, tid)
        cute.arch.sync_threads()

        self.place_pairs(inputs, outputs, (sFirst, sCount), begin, stop, tid)
        for i in cutlass.range(total + cta * self.threads + tid, rows, ctas * self.threads):
            ptx.store_u32(row_token.toint() + Int64(i) * 4, Int32(-1))
            ptx.store_f32(row_weight.toint() + Int64(i) * 4, cutlass.Float32(0.0))
        if cutlass.const_expr(self.counters > 0):  # noqa: SIM102 (one is compile-time)
            if cta == 0 and tid < self.counters:
                ptx.store_u32(counter.toint() + tid * 4, Int32(0))
        ptx.allow_next_kernel()

    @cute.jit
    def rank_pairs(self, inputs, token_rows, sCount, begin, stop, tid):
        """Count this warp's pairs per expert; token_rows gets the rank of each, -1 where there is
        no row."""
        lane, warp = tid % WARP, tid // WARP
        base = begin
        while base < stop:
            index, experts = self.load_experts(inputs, base + lane, stop)
            for n in cutlass.range_constexpr(BATCH):
                expert = experts[n]
                same = self.lanes_alike(expert)
                earlier = Int32(cute.arch.popc(same & ((Uint32(1) << lane) - 1)))
                rank = Int32(-1)
                slot = warp * self.num_experts + cutlass.max(expert, 0)
                if expert >= 0:
                    rank = sCount[slot] + earlier
                cute.arch.sync_warp()
                if expert >= 0 and earlier == 0:  # the first lane of each expert counts for all
                    sCount[slot] = rank + Int32(cute.arch.popc(same))
                cute.arch.sync_warp()
                if index[n] < stop:
                    ptx.store_u32(token_rows.toint() + Int64(index[n]) * 4, rank)
            base += WARP * BATCH

    @cute.jit
    def place_pairs(self, inputs, outputs, counts, begin, stop, tid):
        """Rows of this warp's pairs, and what the rows hold."""
        _, row_token, row_weight, token_rows, _ = outputs
        sFirst, sCount = counts
        weights = inputs[1].toint()
        lane, warp = tid % WARP, tid // WARP
        base = begin
        while base < stop:
            index, experts = self.load_experts(inputs, base + lane, stop)
            near = [Int64(cutlass.max(cutlass.min(i, stop - 1), 0)) * 4 for i in index]
            ranks = [ptx.load_i32(token_rows.toint() + i) for i in near]
            values = [ptx.load_f32(weights + i) for i in near]
            for n in cutlass.range_constexpr(BATCH):
                expert = experts[n]
                if expert >= 0:
                    row = ranks[n] + sFirst[expert] + sCount[warp * self.num_experts + expert]
                    ptx.store_u32(token_rows.toint() + near[n], row)
                    ptx.store_u32(row_token.toint() + Int64(row) * 4, index[n] // self.top_k)
                    ptx.store_f32(row_weight.toint() + Int64(row) * 4, values[n])
            base += WARP * BATCH

    @cute.jit
    def scan_warps(self, sCount, sTotal, tid):
        """sCount becomes the pairs of earlier warps of this CTA, sTotal the CTA's counts."""
        for expert in cutlass.range(tid, self.num_experts, self.threads):
            running = Int32(0)
            for w in cutlass.range(self.warps, unroll=8):
                count = sCount[w * self.num_experts + expert]
                sCount[w * self.num_experts + expert] = running
                running += count
            sTotal[expert] = running

    @cute.jit
    def scan_experts(self, shared, counts, expert_offsets, ctas, cta, tid):
        """sFirst[e] = first row of expert e + its pairs in earlier CTAs. Returns the number of
        routed rows."""
        sTotal, sFirst, sScan = shared
        lane, warp = tid % WARP, tid // WARP
        done = Int32(0)  # rows of the experts of earlier steps
        for step in cutlass.range_constexpr(-(-self.num_experts // self.threads)):
            expert = step * self.threads + tid
            earlier, count = self.counts_of(expert, sTotal, counts, ctas, cta)
            upto = inclusive_sum(count, lane)
            if lane == WARP - 1:
                sScan[warp] = upto
            cute.arch.sync_threads()
            before = done
            for w in cutlass.range(self.warps, unroll=8):
                part = sScan[w]
                done += part
                if w < warp:
                    before += part
            cute.arch.sync_threads()
            if expert < self.num_experts:
                first = before + upto - count
                sFirst[expert] = first + earlier
                if cta == 0:
                    ptx.store_u32(expert_offsets.toint() + Int64(expert) * 4, first)
        if cta == 0 and tid == 0:
            ptx.store_u32(expert_offsets.toint() + 4 * self.num_experts, done)
        return done

    @cute.jit
    def counts_of(self, expert, sTotal, counts, ctas, cta):
        """(pairs of ``expert`` in earlier CTAs, in all CTAs); 0 past the last expert."""
        earlier, count = Int32(0), Int32(0)
        if expert < self.num_experts:
            if cutlass.const_expr(self.spread):
                column = counts.toint() + Int64(expert) * 4
                for c in cutlass.range(ctas, unroll=8):
                    part = ptx.load_i32(column + Int64(c) * (self.num_experts * 4))
                    count += part
                    if c < cta:
                        earlier += part
            else:
                count = sTotal[expert]
        return earlier, count
