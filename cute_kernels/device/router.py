"""Router logits by exact integer arithmetic on tensor cores: bits of `moe.router.router_logits`.

    logits[t, e] = fp32(fp64(sum_k X[t, k] * W[e, k]) * 2^(a - 30) * w_scale[e]) + bias[e]

X = round(x * 2^(30 - a)) with 2^a the binade of the row's largest magnitude is an int32, and its
four bytes are the digits that the MMA multiplies: three unsigned ones below a signed one. W has
three signed digits (`cute_kernels.router_ops.pack_weights`). Products of digits of equal weight
share one of six int32 sums, |sum| <= 3 * 255 * 128 * H < 2^31 for H <= 2^14. Integer sums have no
order, so K is split over warps and CTAs freely: the same bits in any split, batch or schedule.

mma.sync.m16n8k32 takes A bytes by lane = 4 g + q: rows g, g + 8, g, g + 8 and columns 4q .. 4q + 3,
the last two 16 columns on. A step of 32 columns may be permuted alike in A and B: lane 4 g + q has
the eight *neighbouring* elements 8 q .. 8 q + 7 of its rows, one 16-byte load of bf16, and makes
its fragments of all four digits from them with no exchange between lanes.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.quantize import tree
from cute_kernels.device.sizes import ROUTER_STEP

WARP = 32
X_DIGITS, W_DIGITS = 4, 3
SUMS = X_DIGITS + W_DIGITS - 1
STEP_WORDS = W_DIGITS * WARP * 4  # of a step of 32 columns for 16 experts
# (digit of x, digit of w): the same i + j returns four pairs later at the earliest
UPPER_PAIRS = ((1, 2), (1, 1), (2, 2), (1, 0), (2, 1), (2, 0), (3, 1), (3, 2), (3, 0))
LOWEST_PAIRS = ((0, 2), (0, 1), (0, 0))
FIXED_BITS = 30  # the binade of a row's largest magnitude is that of 2^30
NOT_FINITE = 0x7F800000


@dataclasses.dataclass(frozen=True)
class RouterLogits:
    """What the two kernels share.

    hidden   H, a multiple of 8, at most 2^14
    dtype    of x: 'BFloat16', 'Float16' or 'Float32'
    biased   a linear bias is added to the logits
    split    CTAs of a cluster that share the columns of one tile

    x (T, H); digits uint32 (ceil(E / 16), ceil(H / 32), 3, 32, 4); w_scale fp64 (E,); bias fp32
    (E,); logits fp32 (T, E).
    """

    hidden: int
    dtype: str = "BFloat16"
    biased: bool = False
    split: int = 8

    @property
    def name(self) -> str:
        return f"{self.label}_h{self.hidden}_{self.dtype.lower()}_split{self.split}"

    @property
    def arguments(self) -> tuple:
        bias = Ptr("Float32", 4) if self.biased else None
        inputs = (Ptr(self.dtype), Ptr("Uint32"), Ptr("Float64", 8), bias)
        return (inputs, Ptr("Float32", 4), "i32", "i32", "i32")

    @property
    def steps(self) -> int:
        """Steps of 32 columns in a row."""
        return -(-self.hidden // ROUTER_STEP)

    @property
    def row_bytes(self) -> int:
        return self.hidden * (4 if self.dtype == "Float32" else 2)

    def load_digits(self, digits, tile, step, lane):
        """Words (j, 4) of this lane: digit j of 16 experts in a step. Steps past the last repeat
        it, and meet zeros of x."""
        step = cutlass.min(step, Int32(self.steps - 1))
        at = digits + ((Int64(tile) * self.steps + step) * STEP_WORDS + lane * 4) * 4
        return [ptx.load_u32x4(at + j * (WARP * 16)) for j in range(W_DIGITS)]

    # ---- x

    def column(self, step, lane):
        """First of the eight columns of this lane in a step."""
        return step * ROUTER_STEP + lane % 4 * 8

    def load_elements(self, x, row, column):
        """Words of eight elements (T, H)[row, column:]; 0 past the last column."""
        size = 8 * self.row_bytes // self.hidden
        inside = column < self.hidden
        near = cutlass.select_(inside, column, Int32(0))
        address = x + Int64(row) * self.row_bytes + near * (size // 8)
        words = [w for i in range(size // 16) for w in ptx.load_u32x4(address + 16 * i)]
        return [ptx.select(inside, w, Uint32(0)) for w in words]

    def values(self, words):
        """The eight elements in fp32, exact."""
        if self.dtype == "Float32":
            return [w.bitcast(Float32) for w in words]
        if self.dtype == "Float16":
            return [ptx.half_to_f32(w, upper) for w in words for upper in (False, True)]
        return [
            v
            for w in words
            for v in ((w << 16).bitcast(Float32), (w & Uint32(0xFFFF0000)).bitcast(Float32))
        ]

    def amax_bits(self, words):
        """Bits of the largest magnitude in fp32; compared as integers, so Inf and NaN win."""
        if self.dtype == "Float32":
            return tree(cutlass.max, [w & 0x7FFFFFFF for w in words])
        pair = tree(ptx.max_u16x2, [w & 0x7FFF7FFF for w in words])
        if self.dtype == "BFloat16":
            return cutlass.max(pair << 16, pair & Uint32(0xFFFF0000))
        low = ptx.half_to_f32(pair, False).bitcast(Uint32)
        return cutlass.max(low, ptx.half_to_f32(pair, True).bitcast(Uint32))

    def fragments(self, words, factors):
        """Eight elements of one row -> per digit the words of columns 4q.. and 16 + 4q.. of A."""
        up, more = factors
        whole = [round_to_int(ptx.mul(ptx.mul(v, up), more)) for v in self.values(words)]
        halves = [bytes_by_weight(whole[:4]), bytes_by_weight(whole[4:])]
        return list(zip(*halves))

    def over_ranks(self, sTotal, output):
        """(high, low) of an output, summed over the CTAs of the cluster."""
        pairs = [pair_of_rank(sTotal, output * 2, Int32(c)) for c in range(self.split)]
        return [tree(add, half) for half in zip(*pairs)]

    def pair_fragments(self, words, factors):
        """A of each digit, from eight elements of two rows."""
        upper, lower = (self.fragments(w, f) for w, f in zip(words, factors))
        return [(u[0], v[0], u[1], v[1]) for u, v in zip(upper, lower)]

    # ---- results

    @cute.jit
    def finish(self, inputs, logits, total, amax, row, expert, num_experts):
        """Round the exact total of one logit and store it."""
        _, _, w_scale, bias = inputs
        high, low = total
        exact = Float64(high) * Float64(65536.0) + Float64(low)  # the one rounding of the sum
        scale = power_of_two(binade(amax) - FIXED_BITS)
        if amax >= NOT_FINITE:
            scale = Float64(float("nan"))
        value = Float32(exact * scale * load_f64(w_scale.toint() + Int64(expert) * 8))
        if cutlass.const_expr(self.biased):
            value = ptx.add(value, ptx.load_f32(bias.toint() + Int64(expert) * 4))
        ptx.store_f32(logits.toint() + (Int64(row) * num_experts + expert) * 4, value)


def binade(bits):
    """Exponent of the fp32 with these bits; -127 for 0 and subnormal numbers."""
    return Int32(bits >> 23) - 127


def power_of_two(exponent):
    """fp64 2^exponent, a normal number."""
    return (Int64(exponent + 1023) << 52).bitcast(Float64)


def row_factors(bits):
    """Two fp32 powers of two with product 2^(30 - a): one alone may leave the range of fp32."""
    exponent = FIXED_BITS - binade(bits)
    half = exponent >> 1
    return [((e + 127) << 23).bitcast(Float32) for e in (half, exponent - half)]


def round_to_int(value):
    """Nearest int32, ties to even."""
    return cute.arch.inline_ptx(
        "cvt.rni.s32.f32 {$w0}, {$r0};", write_only_types=[Uint32], read_only_args=[value]
    )


def load_f64(address):
    return cute.arch.inline_ptx(
        "ld.global.f64 {$w0}, [{$r0}];", write_only_types=[Float64], read_only_args=[address]
    )


def bytes_by_weight(words):
    """Four words -> four words of their lowest bytes, ..., of their highest bytes."""
    a, b, c, d = words
    low = [ptx.prmt(a, b, 0x5140), ptx.prmt(c, d, 0x5140)]
    high = [ptx.prmt(a, b, 0x7362), ptx.prmt(c, d, 0x7362)]
    return [ptx.prmt(*pair, selector) for pair in (low, high) for selector in (0x5410, 0x7632)]


def multiply(a, b, c, signed):
    """a (16 x 32 bytes, four words) times b (32 x 8 signed bytes, two words) plus c."""
    kind = "s8" if signed else "u8"
    return cute.arch.inline_ptx(
        f"mma.sync.aligned.m16n8k32.row.col.s32.{kind}.s8.s32 "
        "{{$w0}, {$w1}, {$w2}, {$w3}}, {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, "
        "{{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Int32] * 4,
        read_only_args=[*a, *b, *c],
    )


def tile_half(words, n):
    """B of each digit for experts 8 n .. 8 n + 7 of a tile."""
    return [w[2 * n : 2 * n + 2] for w in words]


def multiply_digits(a, b, sums, pairs):
    """sums[n] += digit i of A (four words each) times digit j of B[n], for (i, j) in ``pairs``.

    ``sums``: registers, and where those of each n begin. The pairs are ordered so that an MMA does
    not wait for one just before it, whose sum it continues."""
    registers, first = sums
    for i, j in pairs:
        for n, at in enumerate(first):
            old = [registers[at + 4 * (i + j) + m] for m in range(4)]
            new = multiply(a[i], b[n][j], old, i == X_DIGITS - 1)
            for m in range(4):
                registers[at + 4 * (i + j) + m] = new[m]


def exact_total(sums, first, n):
    """(high, low) of register n: sum = high * 2^16 + low, both exact in fp64."""
    s = [Int64(sums[first + 4 * i + n]) for i in range(SUMS)]
    return s[2] + (s[3] << 8) + (s[4] << 16) + (s[5] << 24), s[0] + (s[1] << 8)


def over_quad(bits):
    """Maximum over the four lanes that share rows."""
    for offset in (1, 2):
        bits = cutlass.max(bits, Uint32(cute.arch.shuffle_sync_bfly(bits, offset)))
    return bits


@cute.jit
def cluster_barrier():
    cute.arch.cluster_arrive()
    cute.arch.cluster_wait()


def remote(shared, index, rank):
    """Address of shared[index] of the CTA ``rank`` of this cluster."""
    return Int32(cute.arch.map_dsmem_ptr(shared.iterator + index, rank).toint())


def word_of_rank(shared, index, rank):
    """shared[index], 32 bits, of another CTA."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.u32 {$w0}, [{$r0}];",
        write_only_types=[Uint32],
        read_only_args=[remote(shared, index, rank)],
    )


def pair_of_rank(shared, index, rank):
    """shared[index] and the next, 64 bits each, of another CTA."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v2.u64 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int64] * 2,
        read_only_args=[remote(shared, index, rank)],
    )


def word_to_rank(shared, index, rank, word):
    cute.arch.inline_ptx(
        "st.shared::cluster.u32 [{$r0}], {$r1};",
        read_only_args=[remote(shared, index, rank), word],
    )


def pair_to_rank(shared, index, rank, pair):
    cute.arch.inline_ptx(
        "st.shared::cluster.v2.u64 [{$r0}], {{$r1}, {$r2}};",
        read_only_args=[remote(shared, index, rank), *pair],
    )


def allocate(dtype, size):
    return cute.make_tensor(cute.arch.alloc_smem(dtype, size, alignment=16), cute.make_layout(size))


@dataclasses.dataclass(frozen=True)
class RouterFew(RouterLogits):
    """Few tokens: a cluster owns 16 tokens x 16 experts, every warp a run of columns.

    What a warp needs of the digits is in flight at once, and x stays in registers between the row
    maximum and its digits. Warps add their totals in shared memory, CTAs over the cluster.
    """

    label = "router_few"
    MOST_STEPS = 4  # of a warp: digits and x of a step take 20 to 28 registers

    @property
    def warps(self) -> int:
        return min(32, max(8, -(-self.steps // (self.split * self.MOST_STEPS))))

    @cute.jit
    def __call__(self, inputs, logits, num_tokens, num_experts, tiles, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, logits, num_tokens, num_experts).launch(
            grid=(tiles * self.split, (num_tokens + 15) // 16, 1),
            block=(self.warps * WARP, 1, 1),
            cluster=(self.split, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, inputs, logits, num_tokens, num_experts):
        x, digits, _, _ = inputs
        tid, _, _ = cute.arch.thread_idx()
        block, token_tile, _ = cute.arch.block_idx()
        tile, rank = block // self.split, block % self.split
        lane, warp = tid % WARP, tid // WARP
        each = -(-self.steps // (self.split * self.warps))
        first = (rank * self.warps + warp) * each
        rows = [
            cutlass.min(token_tile * 16 + lane // 4 + r, num_tokens - 1) for r in (0, 8)
        ]  # rows past the last repeat it and are not stored
        sRow = allocate(Uint32, 16)
        if cutlass.const_expr(self.split > 1):
            cute.arch.cluster_arrive()
        # before the wait: no kernel that starts another early writes weights
        parts = [self.load_digits(digits.toint(), tile, first + i, lane) for i in range(each)]
        ptx.wait_for_previous_kernel()
        ptx.allow_next_kernel()  # it waits for the end of this one: its start is hidden
        elements = [
            [self.load_elements(x.toint(), row, self.column(first + i, lane)) for row in rows]
            for i in range(each)
        ]
        amax = self.row_maxima(elements, sRow, lane, warp)
        factors = [row_factors(bits) for bits in amax]
        sums = [Int32(0) for _ in range(2 * SUMS * 4)]
        for i in cutlass.range_constexpr(each):
            a = self.pair_fragments(elements[i], factors)
            b = [tile_half(parts[i], n) for n in range(2)]
            multiply_digits(a, b, (sums, (0, SUMS * 4)), UPPER_PAIRS + LOWEST_PAIRS)
        self.add_up(inputs, logits, sums, sRow, (token_tile * 16, num_tokens, tile, num_experts))

    @cute.jit
    def row_maxima(self, elements, sRow, lane, warp):
        """Bits of the largest magnitudes of this lane's two rows; sRow gets those of the tile."""
        sWarp, sRank = allocate(Uint32, self.warps * 16), allocate(Uint32, self.split * 16)
        for r in cutlass.range_constexpr(2):
            bits = tree(cutlass.max, [self.amax_bits(words[r]) for words in elements])
            bits = over_quad(bits)
            if lane % 4 == 0:
                sWarp[warp * 16 + lane // 4 + 8 * r] = bits
        cute.arch.sync_threads()
        bits = tree(cutlass.max, [sWarp[w * 16 + lane % 16] for w in range(self.warps)])
        if cutlass.const_expr(self.split > 1):
            rank = cute.arch.block_idx_in_cluster()
            cute.arch.cluster_wait()  # all CTAs have begun: the kernel has arrived at once
            if lane < 16 and warp < self.split:
                word_to_rank(sRank, rank * 16 + lane, warp, bits)  # a warp per receiver
            cluster_barrier()
            ranks = range(self.split)
            bits = tree(cutlass.max, [sRank[c * 16 + lane % 16] for c in ranks])
        if warp == 0 and lane < 16:
            sRow[lane] = bits
        return [Uint32(cute.arch.shuffle_sync(bits, lane // 4 + r)) for r in (0, 8)]

    @cute.jit
    def add_up(self, inputs, logits, sums, sRow, place):
        """Totals of the 256 outputs over warps and CTAs; output = 16 * row + expert of the tile.
        Each CTA sends those of its columns to the one that rounds them."""
        first_token, num_tokens, tile, num_experts = place
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        each = 256 // self.split  # outputs of a CTA
        sWarp = allocate(Int64, self.warps * 512)
        sRank = allocate(Int64, 512)  # (CTA that sent, output of this CTA, high and low)
        for n in cutlass.range_constexpr(8):
            column = n // 4 * 8 + lane % 4 * 2 + n % 2
            output = (lane // 4 + n % 4 // 2 * 8) * 16 + column
            high, low = exact_total(sums, n // 4 * SUMS * 4, n % 4)
            sWarp[(warp * 256 + output) * 2] = high
            sWarp[(warp * 256 + output) * 2 + 1] = low
        cute.arch.sync_threads()
        rank = Int32(0)
        if cutlass.const_expr(self.split > 1):
            rank = cute.arch.block_idx_in_cluster()
        if tid < 256:
            total = [
                tree(add, [sWarp[(w * 256 + tid) * 2 + half] for w in range(self.warps)])
                for half in range(2)
            ]
            if cutlass.const_expr(self.split > 1):
                pair_to_rank(sRank, (rank * each + tid % each) * 2, tid // each, total)
            else:
                sRank[tid * 2], sRank[tid * 2 + 1] = total
        if cutlass.const_expr(self.split > 1):
            cluster_barrier()  # then nobody reads or writes what is another's: CTAs may leave
        output = rank * each + tid
        row, expert = output // 16, tile * 16 + output % 16
        token = first_token + row
        if tid < each and token < num_tokens and expert < num_experts:
            total = [
                tree(add, [sRank[(c * each + tid) * 2 + half] for c in range(self.split)])
                for half in range(2)
            ]
            self.finish(inputs, logits, total, sRow[row], token, expert, num_experts)


def add(a, b):
    return a + b
