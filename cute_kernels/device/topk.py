"""Router logits to expert ids and weights, one warp per token: the bits of
`cute_kernels.torch_router.select`.

Lane l owns experts l, 32 + l, ... . Values are compared as integer keys of the same order, in which
NaN is the largest and -0 equals 0, as in a stable descending sort of torch.
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
WARPS = 4  # tokens of a CTA
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

    @cute.jit
    def __call__(self, inputs, outputs, num_tokens, vocabulary, factor, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, outputs, num_tokens, vocabulary, factor).launch(
            grid=((num_tokens + WARPS - 1) // WARPS, 1, 1),
            block=(WARPS * WARP, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, inputs, outputs, num_tokens, vocabulary, factor):
        logits, bias, table, input_ids = inputs
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        token, lane = block * WARPS + tid // WARP, tid % WARP
        ptx.wait_for_previous_kernel()
        if token < num_tokens:
            s = self.scores(logits.toint() + Int64(token) * (self.num_experts * 4), lane)
            padding = None
            if cutlass.const_expr(self.table):
                chosen, padding = self.looked_up((table, input_ids), token, vocabulary, lane)
                weight = self.weights_of(s, chosen, lane)
            else:
                keys = self.keys(s, bias, lane)
                if cutlass.const_expr(self.groups[0] > 1):
                    keys = self.keep_best_groups(keys, lane)
                chosen, weight = self.best(keys, s, lane)
            self.store(outputs, token, lane, (chosen, weight, padding), factor)
        ptx.allow_next_kernel()

    def experts(self, lane):
        return [lane + WARP * r for r in range(self.parts)]

    def scores(self, row, lane):
        """Scores of this lane's experts; those past the last are junk."""
        last = Int32(self.num_experts - 1)
        near = [cutlass.min(e, last) for e in self.experts(lane)]
        values = [ptx.load_f32(row + Int64(e) * 4) for e in near]
        if self.scoring == "sigmoid":
            return [scoring.sigmoid(MATH, v) for v in values]
        if self.scoring == "sqrtsoftplus":
            return [scoring.sqrtsoftplus(MATH, v) for v in values]
        most = over_warp(MATH.maximum, tree(MATH.maximum, values))
        exps = [scoring.exp(MATH, ptx.add(v, -most)) for v in values]
        inside = [e <= last for e in self.experts(lane)]
        total = None
        for e, here in zip(exps, inside):
            e = ptx.select(here, e, Float32(0.0))
            total = e if total is None else ptx.add(total, e)
        total = over_warp(ptx.add, total)
        return [MATH.div(e, total) for e in exps]

    def keys(self, s, bias, lane):
        """Keys of the scores that choose; 0, below all others, past the last expert."""
        last = Int32(self.num_experts - 1)
        keys = []
        for e, value in zip(self.experts(lane), s):
            if self.biased:
                near = Int64(cutlass.min(e, last))
                value = ptx.add(value, ptx.load_f32(bias.toint() + near * 4))
            keys.append(ptx.select(e <= last, order_key(value), Uint32(0)))
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
        key, expert = keys[0], Int32(lane)
        for r in range(1, self.parts):
            more = keys[r] > key
            key = ptx.select(more, keys[r], key)
            expert = ptx.select(more, Int32(lane + WARP * r), expert)
        most = ptx.redux_max_u32(key)
        candidate = ptx.select(key == most, Uint32(expert), Uint32(TOP))
        return most, Int32(ptx.redux_min_u32(candidate))

    def best(self, keys, s, lane):
        """(expert, weight) of slot ``lane``."""
        chosen, weight = Int32(0), Float32(0.0)
        for slot in range(self.top_k):
            _, expert = self.best_of(keys, lane)
            keys = [ptx.select(e == expert, Uint32(0), k) for e, k in zip(self.experts(lane), keys)]
            here = lane == slot
            chosen = ptx.select(here, expert, chosen)
            weight = ptx.select(here, self.score_of(s, expert, lane), weight)
        return chosen, weight

    def score_of(self, s, expert, lane):
        """Score of one expert, in every lane."""
        value = s[0]
        for r in range(1, self.parts):
            value = ptx.select(expert >= WARP * r, s[r], value)
        return Float32(cute.arch.shuffle_sync(value, expert % WARP))

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

    def weights_of(self, s, chosen, lane):
        weight = Float32(0.0)
        for slot in range(self.top_k):
            expert = Int32(cute.arch.shuffle_sync(chosen, slot))
            weight = ptx.select(lane == slot, self.score_of(s, expert, lane), weight)
        return weight

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
