"""Router logits of many tokens, 64 tokens x 64 experts a tile; see `cute_kernels.device.router`."""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32

from cute_kernels.device import ptx
from cute_kernels.device.quantize import tree
from cute_kernels.device.router import (
    LOWEST_PAIRS,
    SUMS,
    UPPER_PAIRS,
    W_DIGITS,
    WARP,
    X_DIGITS,
    RouterLogits,
    allocate,
    cluster_barrier,
    exact_total,
    multiply_digits,
    row_factors,
    word_of_rank,
)
from cute_kernels.device.sizes import ROUTER_TILE

TOKENS = 64
TILES = 4  # of 16 experts
WARPS = 8
CHUNK = 4  # steps of 32 columns between two barriers
BLOCK_WORDS = X_DIGITS * WARP * 4  # digits of 16 tokens in a step
BUFFER_WORDS = CHUNK * (TOKENS // 16) * BLOCK_WORDS


@dataclasses.dataclass(frozen=True)
class RouterTile(RouterLogits):
    """Warp w multiplies 32 tokens (w % 2) by 16 experts (w / 2), and makes the digits of 16 tokens
    in two of the four steps of a chunk, for all warps.

    Chunks of 128 columns are double buffered in shared memory: while a warp multiplies one, it
    makes digits of the next from registers, whose x was loaded a chunk before. Digits of the
    weights are in registers, two steps ahead. The row maxima take a pass of their own, once for
    all experts of a CTA; x comes from the L2 then. A cluster of ``split`` > 1 CTAs shares the
    columns of a tile and has one tile of experts.

    The lowest digit is 0 in most blocks of 16 x 32 elements of bf16: those within 2^-15 of the
    largest of their row have none. A block without it takes 9 of the 12 products.
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
        sLowest = allocate(Uint32, 2 * CHUNK * (TOKENS // 16))
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
                (sDigits, sLowest),
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
        # its own memory: other CTAs may still read the part when this one has the whole
        sPart = allocate(Uint32, TOKENS) if self.split > 1 else sRow
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
                sPart[warp * each + r] = bits
        if cutlass.const_expr(self.split > 1):
            cluster_barrier()
            if tid < TOKENS:  # nobody leaves while this reads: `add_up` has barriers
                ranks = range(self.split)
                parts = [word_of_rank(sPart, tid, Int32(c)) for c in ranks]
                sRow[tid] = tree(cutlass.max, parts)
        cute.arch.sync_threads()

    @cute.jit
    def multiply_tile(self, operands, shared, sums, mine, tile, first_chunk):
        """sums = digits of 32 tokens times those of 16 experts, over the columns of this CTA."""
        x, digits = operands
        sDigits, sLowest = shared
        tid, _, _ = cute.arch.thread_idx()
        lane, warp = tid % WARP, tid // WARP
        ahead = [cute.make_rmem_tensor((W_DIGITS * 4,), Uint32) for _ in range(2)]
        words = [
            [cute.make_rmem_tensor((self.row_bytes // self.hidden * 2,), Uint32) for _ in range(2)]
            for _ in range(CHUNK // 2)
        ]
        sums.fill(0)
        for s in cutlass.range_constexpr(2):
            fill_all([ahead[s]], [self.flat_digits(digits, tile, first_chunk * CHUNK + s, lane)])
        for k in cutlass.range_constexpr(CHUNK // 2):
            fill_all(words[k], self.load_pair(x, mine, first_chunk, k))
            self.store_digits(shared, Int32(0), words[k], mine, k)
            second = first_chunk + cutlass.min(1, self.chunks - 1)
            fill_all(words[k], self.load_pair(x, mine, second, k))
        cute.arch.sync_threads()
        for i in cutlass.range(self.chunks, unroll=1):
            buffer = i % 2
            for s in cutlass.range_constexpr(CHUNK):
                slot = ahead[s % 2]
                b = [
                    [[slot[j * 4 + 2 * n + h] for h in range(2)] for j in range(3)] for n in (0, 1)
                ]
                for half in cutlass.range_constexpr(2):
                    block = (buffer * CHUNK + s) * (TOKENS // 16) + warp % 2 * 2 + half
                    at = sDigits.iterator + block * BLOCK_WORDS + lane * 4
                    a = [load_shared(at + d * (WARP * 4)) for d in range(X_DIGITS)]
                    first = [(half * 2 + n) * SUMS * 4 for n in range(2)]
                    multiply_digits(a, b, (sums, first), UPPER_PAIRS)
                    if sLowest[block] != 0:
                        multiply_digits(a, b, (sums, first), LOWEST_PAIRS)
                step = (first_chunk + i) * CHUNK + s + 2
                fill_all([slot], [self.flat_digits(digits, tile, step, lane)])
                if cutlass.const_expr(s % 2 == 1):
                    k = s // 2
                    self.store_digits(shared, 1 - buffer, words[k], mine, k)
                    later = first_chunk + cutlass.min(i + 2, self.chunks - 1)  # the last again
                    fill_all(words[k], self.load_pair(x, mine, later, k))
            cute.arch.sync_threads()

    def flat_digits(self, digits, tile, step, lane):
        """Words (digit, 4) of the weights."""
        return [w for part in self.load_digits(digits, tile, step, lane) for w in part]

    def load_pair(self, x, mine, chunk, k):
        """The eight elements of both rows whose digits this lane makes, in its step ``k`` of two
        of the chunk."""
        tid, _, _ = cute.arch.thread_idx()
        column = self.column(chunk * CHUNK + tid // (4 * WARP) + 2 * k, tid % WARP)
        return [self.load_elements(x, row, column) for row in mine[0]]

    @cute.jit
    def store_digits(self, shared, buffer, words, mine, k: cutlass.Constexpr):
        """Digits of 16 tokens in one step, and whether a lowest one is not 0."""
        sDigits, sLowest = shared
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % WARP
        step = tid // (4 * WARP) + 2 * k
        block = (buffer * CHUNK + step) * (TOKENS // 16) + tid // WARP % 4
        row_words = [[row[n] for n in range(self.row_bytes // self.hidden * 2)] for row in words]
        fragments = self.pair_fragments(row_words, mine[1])
        for d in cutlass.range_constexpr(X_DIGITS):
            at = block * BLOCK_WORDS + d * (WARP * 4) + lane * 4
            store_shared(sDigits.iterator + at, fragments[d])
        lowest = fragments[0]
        some = cute.arch.vote_ballot_sync((lowest[0] | lowest[1] | lowest[2] | lowest[3]) != 0)
        if lane == 0:
            sLowest[block] = Uint32(some)

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


def fill_all(tensors, rows):
    """Registers of each tensor from a list of words."""
    for registers, words in zip(tensors, rows):
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
