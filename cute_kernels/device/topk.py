"""Router logits to expert ids and weights: the bits of `cute_kernels.torch_router.select`.

One CTA per token. Its warps share the scores, then the first one chooses: lane l owns experts l,
32 + l, ... . Values are compared as integer keys of the same order, in which NaN is the largest and
-0 equals 0, as in a stable descending sort of torch.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels import scoring
from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.quantize import tree

WARP = 32
MOST_WARPS = 4
TOP, SIGN = 0xFFFFFFFF, 0x80000000
MINUS_INF_KEY = 0x007FFFFF  # `order_key` of -inf


class DeviceScores:
    """The namespace of `cute_kernels.scoring`: every operation is one instruction, never fused."""

    def add(self, a, b):
        return ptx.add(Float32(a), Float32(b))

    def mul(self, a, b):
        return ptx.mul(Float32(a), Float32(b))

    def div(self, a, b):
        return rounded("div.rn.f32", Float32(a), Float32(b))

    def sqrt(self, a):
        return rounded("sqrt.rn.f32", Float32(a))

    def maximum(self, a, b):
        return cute.arch.fmax(Float32(a), Float32(b), nan=True)

    def minus_abs(self, a):
        return (a.bitcast(Uint32) | Uint32(SIGN)).bitcast(Float32)

    def where_negative(self, a, yes, no):
        return ptx.select(a < 0.0, Float32(yes), Float32(no))

    def scale(self, a, t):
        k = t.bitcast(Int32) - scoring.ROUNDER_BITS
        half = k >> 1
        for exponent in (half, k - half):
            a = ptx.mul(a, ((exponent + 127) << 23).bitcast(Float32))
        return a


def rounded(instruction, *values):
    operands = ", ".join(f"{{$r{i}}}" for i in range(len(values)))
    return cute.arch.inline_ptx(
        f"{instruction} {{$w0}}, {operands};", write_only_types=[Float32], read_only_args=[*values]
    )


MATH = DeviceScores()


def order_key(value):
    """Uint32 that orders fp32 values as `torch.sort` does: NaN on top, -0 equal to 0."""
    bits = ptx.add(value, Float32(0.0)).bitcast(Uint32)
    negative = bits >= SIGN
    key = ptx.select(negative, ~bits, bits | Uint32(SIGN))
    return ptx.select((bits & 0x7FFFFFFF) > 0x7F800000, Uint32(TOP), key)


def value_of_key(key):
    bits = ptx.select(key >= SIGN, key ^ Uint32(SIGN), ~key)
    return bits.bitcast(Float32)


@dataclasses.dataclass(frozen=True)
class RouterTopK:
    """num_experts  E
    top_k        slots, at most 32: lane j keeps slot j
    scoring      one of `scoring.SCORINGS`
    groups       (number, kept ones), at most 32 of them; (1, 1): no groups
    renormalize  weights are divided by their sum
    biased       ``bias`` is added to the scores that choose
    table        '' or the integer type of tid2eid: ids = tid2eid[input_ids]
    tokens       the integer type of input_ids

    logits fp32 (T, E); bias fp32 (E,); tid2eid (vocabulary, top_k); input_ids (T,); ids int32 and
    weights fp32 (T, top_k), times ``factor``. A token whose input id is negative or past the
    vocabulary gets ids -1 and weights 0.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    groups: tuple[int, int] = (1, 1)
    renormalize: bool = True
    biased: bool = False
    table: str = ""
    tokens: str = "Int64"

    @property
    def name(self) -> str:
        kind = "hash" if self.table else f"g{self.groups[0]}"
        return f"router_topk_e{self.num_experts}_k{self.top_k}_{self.scoring}_{kind}"

    @property
    def arguments(self) -> tuple:
        f32 = Ptr("Float32", 4)
        hashed = (None, None)
        if self.table:
            hashed = tuple(Ptr(t, 4 if t == "Int32" else 8) for t in (self.table, self.tokens))
        inputs = (f32, f32 if self.biased else None, *hashed)
        return (inputs, (Ptr("Int32", 4), f32), "i32", "i32", "f32")

    @property
    def parts(self) -> int:
        """Experts of a lane."""
        return -(-self.num_experts // WARP)

    @property
    def warps(self) -> int:
        return min(self.parts, MOST_WARPS)

    @cute.jit
    def __call__(self, inputs, outputs, num_tokens, vocabulary, factor, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, outputs, vocabulary, factor).launch(
            grid=(num_tokens, 1, 1),
            block=(self.warps * WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, inputs, outputs, vocabulary, factor):
        logits, bias, table, input_ids = inputs
        tid, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        lane, warp = tid % WARP, tid // WARP
        sScore = cute.make_tensor(
            cute.arch.alloc_smem(Float32, self.parts * WARP, alignment=16),
            cute.make_layout(self.parts * WARP),
        )
        ptx.wait_for_previous_kernel()
        ptx.allow_next_kernel()  # it waits for the end of this one: its start is hidden
        row = logits.toint() + Int64(token) * (self.num_experts * 4)
        offsets = self.load_bias(bias, lane)  # in flight with the logits
        if cutlass.const_expr(self.scoring == "softmax"):
            self.share_exps(row, sScore, warp, lane)
        else:
            self.share_scores(row, sScore, warp, lane)
        cute.arch.sync_threads()
        if warp == 0:
            padding = None
            total = None
            if cutlass.const_expr(self.scoring == "softmax"):
                total = self.total(sScore, lane)
            if cutlass.const_expr(self.table):
                chosen, padding = self.looked_up((table, input_ids), token, vocabulary, lane)
            else:
                keys = self.keys(sScore, offsets, total, lane)
                if cutlass.const_expr(self.groups[0] > 1):
                    keys = self.keep_best_groups(keys, lane)
                chosen = self.best(keys, lane)
            weight = self.score(sScore, chosen, total)
            self.store(outputs, token, lane, (chosen, weight, padding), factor)

    def experts(self, lane):
        return [lane + WARP * r for r in range(self.parts)]

    def near(self, expert):
        """The expert, or the last one for one past it."""
        return cutlass.min(expert, Int32(self.num_experts - 1))

    def load_bias(self, bias, lane):
        if not self.biased:
            return None
        return [ptx.load_f32(bias.toint() + Int64(self.near(e)) * 4) for e in self.experts(lane)]

    @cute.jit
    def share_scores(self, row, sScore, warp, lane):
        """Scores of every ``warps``-th part of the experts; those past the last are junk."""
        score = scoring.sigmoid if self.scoring == "sigmoid" else scoring.sqrtsoftplus
        count = -(-self.parts // self.warps)
        mine = [(warp + self.warps * i) * WARP + lane for i in range(count)]
        values = [ptx.load_f32(row + Int64(self.near(e)) * 4) for e in mine]
        for i in cutlass.range_constexpr(count):
            if mine[i] < self.parts * WARP:
                sScore[mine[i]] = score(MATH, values[i])

    @cute.jit
    def share_exps(self, row, sScore, warp, lane):
        """exp(x - max); 0 past the last expert. Every warp finds the maximum itself."""
        values = [ptx.load_f32(row + Int64(self.near(e)) * 4) for e in self.experts(lane)]
        most = over_warp(MATH.maximum, tree(MATH.maximum, values))
        for r in cutlass.range_constexpr(self.parts):
            if r % self.warps == warp:
                e = scoring.exp(MATH, ptx.add(values[r], -most))
                inside = lane + WARP * r < self.num_experts
                sScore[lane + WARP * r] = ptx.select(inside, e, Float32(0.0))

    def total(self, sScore, lane):
        """Sum of a softmax, in the order of `torch_router.softmax`."""
        values = [sScore[e] for e in self.experts(lane)]
        total = values[0]
        for value in values[1:]:
            total = ptx.add(total, value)
        return over_warp(ptx.add, total)

    def score(self, sScore, expert, total):
        value = sScore[expert]
        return value if total is None else MATH.div(value, total)

    def keys(self, sScore, offsets, total, lane):
        """Keys of the scores that choose; 0, below all others, past the last expert."""
        keys = []
        for r, e in enumerate(self.experts(lane)):
            value = self.score(sScore, e, total)
            if offsets is not None:
                value = ptx.add(value, offsets[r])
            inside = e < self.num_experts
            keys.append(ptx.select(inside, order_key(value), Uint32(0)))
        return keys

    def keep_best_groups(self, keys, lane):
        """A group counts as the sum of its two best; experts of other groups become -inf."""
        count, kept = self.groups
        size = self.num_experts // count
        group_keys = []
        for g in range(count):
            here = [(e >= g * size) & (e < (g + 1) * size) for e in self.experts(lane)]
            mine = [ptx.select(h, k, Uint32(0)) for h, k in zip(here, keys)]
            first, expert = self.best_of(mine, lane)
            total = value_of_key(first)
            if size > 1:
                rest = [
                    ptx.select(e == expert, Uint32(0), k) for e, k in zip(self.experts(lane), mine)
                ]
                total = ptx.add(total, value_of_key(ptx.redux_max_u32(tree(cutlass.max, rest))))
            group_keys.append(order_key(total))
        out = list(keys)
        for g in range(count):
            better = [
                (key >= group_keys[g]) if h < g else (key > group_keys[g])
                for h, key in enumerate(group_keys)
                if h != g
            ]
            rank = tree(lambda a, b: a + b, [ptx.select(b, Int32(1), Int32(0)) for b in better])
            for r, e in enumerate(self.experts(lane)):
                drop = (e >= g * size) & (e < (g + 1) * size) & (rank >= kept)
                out[r] = ptx.select(drop, Uint32(MINUS_INF_KEY), out[r])
        return out

    def best_of(self, keys, lane):
        """(largest key of the warp, the lowest expert that has it)."""
        most = ptx.redux_max_u32(tree(cutlass.max, keys))
        same = [
            ptx.select(k == most, Uint32(e), Uint32(TOP)) for e, k in zip(self.experts(lane), keys)
        ]
        return most, Int32(ptx.redux_min_u32(tree(cutlass.min, same)))

    @cute.jit
    def best(self, keys, lane):
        """Expert of slot ``lane``; the lowest one past the last slot."""
        left = cute.make_rmem_tensor((self.parts,), Uint32)
        for r in cutlass.range_constexpr(self.parts):
            left[r] = keys[r]
        chosen = Int32(0)
        for slot in cutlass.range(self.top_k, unroll=1):  # short code: it runs from the first cache
            _, expert = self.best_of([left[r] for r in range(self.parts)], lane)
            for r in cutlass.range_constexpr(self.parts):
                left[r] = ptx.select(lane + WARP * r == expert, Uint32(0), left[r])
            chosen = ptx.select(lane == slot, expert, chosen)
        return chosen

    def looked_up(self, tables, token, vocabulary, lane):
        """(expert of slot ``lane``, whether the token is padding)."""
        table, input_ids = tables
        size = 4 if self.tokens == "Int32" else 8
        address = input_ids.toint() + Int64(token) * size
        high = Uint32(0)
        if self.tokens == "Int32":
            low = ptx.load_u32(address)
        else:
            low, high = ptx.load_u32x2(address)
        padding = (high != 0) | (low >= Uint32(vocabulary))  # a negative id is a large unsigned one
        row = Int64(ptx.select(padding, Uint32(0), low))
        size = 4 if self.table == "Int32" else 8
        slot = cutlass.min(lane, Int32(self.top_k - 1))
        return ptx.load_i32(table.toint() + (row * self.top_k + slot) * size), padding

    @cute.jit
    def store(self, outputs, token, lane, slots, factor):
        ids, weights = outputs
        chosen, weight, padding = slots
        if cutlass.const_expr(self.renormalize):
            weight = self.normalized(weight)
        if cutlass.const_expr(padding is not None):
            chosen = ptx.select(padding, Int32(-1), chosen)
            weight = ptx.select(padding, Float32(0.0), weight)
        if lane < self.top_k:
            at = (Int64(token) * self.top_k + lane) * 4
            ptx.store_u32(ids.toint() + at, chosen)
            ptx.store_f32(weights.toint() + at, ptx.mul(weight, factor))

    def normalized(self, weight):
        """Over the sum of the slots, added in order."""
        total = Float32(cute.arch.shuffle_sync(weight, 0))
        for slot in range(1, self.top_k):
            total = ptx.add(total, Float32(cute.arch.shuffle_sync(weight, slot)))
        return ptx.select(total == 0.0, Float32(0.0), MATH.div(weight, total))


def over_warp(operation, value):
    """Reduction over the warp: lanes 16, 8, 4, 2, 1 apart in turn."""
    for offset in (16, 8, 4, 2, 1):
        value = operation(value, Float32(cute.arch.shuffle_sync_bfly(value, offset)))
    return value
