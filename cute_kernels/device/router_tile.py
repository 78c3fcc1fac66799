"""Router logits of many tokens, 64 tokens x 64 experts a tile; see `cute_kernels.device.router`."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.quantize import tree
from cute_kernels.device.router import (
    SUMS,
    W_DIGITS,
    WARP,
    X_DIGITS,
    RouterLogits,
    allocate,
    cluster_barrier,
    exact_total,
    multiply_digits,
    row_factors,
    tile_half,
    word_of_rank,
)
from cute_kernels.device.sizes import ROUTER_TILE

TOKENS = 64
TILES = 4  # of 16 experts
WARPS = 8
CHUNK = 2  # steps of 32 columns between two barriers
BLOCK_WORDS = X_DIGITS * WARP * 4  # digits of 16 tokens in a step
BUFFER_WORDS = CHUNK * (TOKENS // 16) * BLOCK_WORDS


@dataclasses.dataclass(frozen=True)
class RouterTile(RouterLogits):
    """Warp w multiplies 32 tokens (w % 2) by 16 experts (w / 2), and makes the digits of 16 tokens
    in one of the two steps of a chunk, for all warps.

    Per chunk of 64 columns, double buffered: digits of x in shared memory, those of the weights in
    registers. Their loads for the next chunk are in flight while the warp multiplies this one. The
    row maxima take a pass of their own, once for all experts of a CTA; x comes from the L2 then.
    A cluster of ``split`` > 1 CTAs shares the columns of a tile and has one tile of experts.
    """

    label = "router_tile"

    @property
    def chunks(self) -> int:
        """Chunks of a CTA."""
        return -(-self.steps // (CHUNK * self.split))

    @cute.jit
    def __call__(self, inputs, logits, num_tokens, num_experts, columns, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, logits, num_tokens, num_experts, columns).launch(
            grid=(columns * self.split, (num_tokens + TOKENS - 1) // TOKENS, 1),
            block=(WARPS * WARP, 1, 1),
            cluster=(self.split, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, inputs, logits, num_tokens, num_experts, columns):
        x = inputs[0].toint()
        tid, _, _ = cute.arch.thread_idx()
        block, token_tile, _ = cute.arch.block_idx()
        first_token = token_tile * TOKENS
        first_chunk = block % self.split * self.chunks
        sDigits = allocate(Uint32, 2 * BUFFER_WORDS)
        sRow = allocate(Uint32, TOKENS)
        ptx.wait_for_previous_kernel()
        self.row_maxima(x, sRow, (first_token, num_tokens), first_chunk, tid)

        lane, warp = tid % WARP, tid // WARP
        mine = [warp % 4 * 16 + lane // 4 + r for r in (0, 8)]  # rows whose digits this lane makes
        factors = [row_factors(sRow[r]) for r in mine]
        rows = [cutlass.min(first_token + r, num_tokens - 1) for r in mine]
        sums = cute.make_rmem_tensor((2 * 2 * SUMS * 4,), Int32)
        tiles = (num_experts + ROUTER_TILE - 1) // ROUTER_TILE
        for column in cutlass.range(block // self.split, (tiles + TILES - 1) // TILES, columns):
            tile = column * TILES + warp // 2
            self.multiply_tile(
                (x, inputs[1].toint()),
                sDigits,
                sums,
                (rows, factors),
                cutlass.min(tile, tiles - 1),
                first_chunk,
            )
            place = (first_token, num_tokens, tile * ROUTER_TILE, num_experts)
            if cutlass.const_expr(self.split == 1):
                self.store(inputs, logits, sums, sRow, place)
            else:
                self.add_up(inputs, logits, sums, sRow, place)
        ptx.allow_next_kernel()

    @cute.jit
    def row_maxima(self, x, sRow, tokens, first_chunk, tid):
        """sRow[r] = bits of the largest magnitude of row r of the tile, over all its columns."""
        first_token, num_tokens = tokens
        lane, warp = tid % WARP, tid // WARP
        each = TOKENS // WARPS
        rows = [cutlass.min(first_token + warp * each + r, num_tokens - 1) for r in range(each)]
        best = cute.make_rmem_tensor((each,), Uint32)
        best.fill(0)
        first = first_chunk * (CHUNK * 32) + lane * 8
        for i in cutlass.range(-(-self.chunks * CHUNK // 8), unroll=1):
            words = [self.load_elements(x, row, first + i * 256) for row in rows]
            for r in cutlass.range_constexpr(each):
                best[r] = cutlass.max(best[r], self.amax_bits(words[r]))
        for r in cutlass.range_constexpr(each):
            bits = ptx.redux_max_u32(best[r])
            if lane == 0:
                sRow[warp * each + r] = bits
        if cutlass.const_expr(self.split > 1):
            cluster_barrier()
            bits = Uint32(0)
            if tid < TOKENS:
                ranks = range(self.split)
                bits = tree(cutlass.max, [word_of_rank(sRow, tid, Int32(c)) for c in ranks])
            cluster_barrier()  # all have read before one is changed
            if tid < TOKENS:
                sRow[tid] = bits
        cute.arch.sync_threads()

    @cute.jit
    def multiply_tile(self, operands, sDigits, sums, mine, tile, first_chunk):
        """sums = digits of 32 tokens times those of 16 experts, over the columns of this CTA."""
        x, digits = operands
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        now = cute.make_rmem_tensor((CHUNK * W_DIGITS * 4,), Uint32)
        later = cute.make_rmem_tensor((CHUNK * W_DIGITS * 4,), Uint32)
        sums.fill(0)
        fill(now, self.load_chunk(digits, tile, first_chunk, lane))
        self.store_digits(sDigits, 0, self.load_pair(x, mine, first_chunk, lane, warp), mine)
        cute.arch.sync_threads()
        for i in cutlass.range(self.chunks, unroll=1):
            chunk = first_chunk + cutlass.min(i + 1, self.chunks - 1)  # the last one again
            fill(later, self.load_chunk(digits, tile, chunk, lane))
            words = self.load_pair(x, mine, chunk, lane, warp)
            buffer = i % 2 * BUFFER_WORDS
            for step in cutlass.range_constexpr(CHUNK):
                b = [[now[(step * W_DIGITS + j) * 4 + n] for n in range(4)] for j in range(3)]
                for half in cutlass.range_constexpr(2):
                    at = buffer + (step * 4 + warp % 2 * 2 + half) * BLOCK_WORDS + lane * 4
                    a = [
                        load_shared(sDigits.iterator + at + d * (WARP * 4)) for d in range(X_DIGITS)
                    ]
                    for n in cutlass.range_constexpr(2):
                        multiply_digits(a, tile_half(b, n), sums, (half * 2 + n) * SUMS * 4)
            self.store_digits(sDigits, BUFFER_WORDS - buffer, words, mine)
            cute.arch.sync_threads()
            fill(now, [later[n] for n in range(CHUNK * W_DIGITS * 4)])

    def load_chunk(self, digits, tile, chunk, lane):
        """Words (step, digit, 4) of the weights."""
        steps = [self.load_digits(digits, tile, chunk * CHUNK + s, lane) for s in range(CHUNK)]
        return [w for step in steps for part in step for w in part]

    def load_pair(self, x, mine, chunk, lane, warp):
        """The eight elements of both rows whose digits this lane makes."""
        column = self.column(chunk * CHUNK + warp // 4, lane)
        return [self.load_elements(x, row, column) for row in mine[0]]

    def store_digits(self, sDigits, buffer, words, mine):
        tid, _, _ = cute.arch.thread_idx()
        at = buffer + tid // WARP * BLOCK_WORDS + tid % WARP * 4
        for d, a in enumerate(self.pair_fragments(words, mine[1])):
            store_shared(sDigits.iterator + at + d * (WARP * 4), a)

    @cute.jit
    def store(self, inputs, logits, sums, sRow, place):
        """Round and store the 16 outputs of this lane."""
        first_token, num_tokens, first_expert, num_experts = place
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        for half in cutlass.range_constexpr(2):
            for r in cutlass.range_constexpr(2):
                row = (warp % 2 * 2 + half) * 16 + r * 8 + lane // 4
                for n in cutlass.range_constexpr(4):
                    expert = first_expert + n // 2 * 8 + lane % 4 * 2 + n % 2
                    if first_token + row < num_tokens and expert < num_experts:
                        first = (half * 2 + n // 2) * SUMS * 4
                        total = exact_total(sums, first, 2 * r + n % 2)
                        token = first_token + row
                        self.finish(inputs, logits, total, sRow[row], token, expert, num_experts)

    @cute.jit
    def add_up(self, inputs, logits, sums, sRow, place):
        """Totals over the CTAs of the cluster; each rounds and stores a part of the tokens."""
        first_token, num_tokens, first_expert, num_experts = place
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        lane, warp = tid % WARP, tid // WARP
        width = TILES * ROUTER_TILE
        sTotal = allocate(Int64, TOKENS * width * 2)
        for half in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(8):
                row = (warp % 2 * 2 + half) * 16 + n // 2 % 2 * 8 + lane // 4
                column = warp // 2 * ROUTER_TILE + n // 4 * 8 + lane % 4 * 2 + n % 2
                high, low = exact_total(sums, (half * 2 + n // 4) * SUMS * 4, n % 4)
                sTotal[(row * width + column) * 2] = high
                sTotal[(row * width + column) * 2 + 1] = low
        cluster_barrier()
        each = TOKENS * width // self.split
        base = first_expert - warp // 2 * ROUTER_TILE
        for i in cutlass.range_constexpr(each // (WARPS * WARP)):
            output = block % self.split * each + i * (WARPS * WARP) + tid
            token, expert = first_token + output // width, base + output % width
            if token < num_tokens and expert < num_experts:
                total = self.over_ranks(sTotal, output)
                amax = sRow[output // width]
                self.finish(inputs, logits, total, amax, token, expert, num_experts)
        cluster_barrier()  # nobody leaves while its totals are read


def fill(registers, words):
    for n, word in enumerate(words):
        registers[n] = word


def load_shared(pointer):
    """Four words of shared memory."""
    return cute.arch.inline_ptx(
        "ld.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[Int32(pointer.toint())],
    )


def store_shared(pointer, words):
    cute.arch.inline_ptx(
        "st.shared.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[Int32(pointer.toint()), *words],
    )
