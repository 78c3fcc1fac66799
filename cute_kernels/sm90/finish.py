"""From accumulators to memory: directly, or through fp32 partial sums when K is split over units.

Register v of an accumulator: token 8 (v // 4) + 2 (lane % 4) + v % 2, packed weight row lane // 4 +
8 (v // 2 % 2) of the warp's 16 (PTX ISA, "Accumulator fragments of wgmma.mma_async.m64nNk16").
"""

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.device.ptx import (
    allow_next_kernel,
    pack_bf16x2,
    select,
    store_f32,
    store_u32x2,
    store_u32x4,
    wait_for_previous_kernel,
)
from cute_kernels.device.quantize import tree
from cute_kernels.device.stage import (
    block_factors,
    magnitude_bits,
    pack_pairs,
    round_elements,
    round_values,
    scale_byte,
)
from cute_kernels.sm90 import layout
from cute_kernels.sm90.config import Sm90Config
from cute_kernels.sm90.epilogues import StoreRows

BARRIER = 1  # named barriers 1, 2: one per warpgroup of consumers


def make_finish(gemm: Any) -> Any:
    if gemm.config.split_k:
        return SplitFinish(gemm.epilogue, gemm.config)
    return whole_k_finish(gemm.epilogue, gemm.config)


def whole_k_finish(epilogue: StoreRows, config: Sm90Config) -> Any:
    """Where accumulators hold the sum over all of K."""
    if epilogue.rounded:
        return RoundedFinish(epilogue, config)
    return (StagedFinish if epilogue.dtype == "Float32" else DirectFinish)(epilogue, config)


def first_row(config: Sm90Config, tile: Any, block: int, warpgroup: Int32) -> Int32:
    """First packed weight row of a warpgroup's block of 64."""
    return ((tile.m * config.blocks64 + block) * config.warpgroups + warpgroup) * 64


class TileScales:
    """Row scales of a tile of ``n`` tokens, 32 to a register: lane l of register i has that of
    token 32 i + l. One load each, all in flight together; reading one is a shuffle."""

    def __init__(self, epilogue: StoreRows, args: Any, tile: Any, n: int) -> None:
        lane, last = cute.arch.lane_idx(), tile.n - 1
        tokens = [cutlass.min(Int32(32 * i) + lane, last) for i in range(-(-n // 32))]
        self.words = [epilogue.scale_of(args, tile.row0 + t) for t in tokens]

    def of(self, first: int, lane: Int32, odd: int) -> Any:
        """Scale of token first + 2 (lane % 4) + odd, ``first`` a multiple of 8; the whole warp
        calls."""
        word = self.words[first // 32]
        if word is None:
            return None
        return cute.arch.shuffle_sync(word, Int32(first % 32 + odd) + 2 * (lane % 4))


class OutRows(NamedTuple):
    """Where a warpgroup's 64 weight rows of a tile go.

    out, features  base and width of the output
    column         first feature of the warpgroup (of its first 64 weight rows)
    tile           `scheduler.Tile`
    rounding       `StoreRows.rounding`
    """

    out: Any
    features: Int32
    column: Int32
    tile: Any
    rounding: Any

    def address(self, token: int, column: Int32, size: int = 2) -> Int64:
        """Of a feature of ``size`` bytes of a token of the tile."""
        return self.out.toint() + (Int64(self.tile.row0 + token) * self.features + column) * size


@dataclasses.dataclass(frozen=True)
class DirectFinish:
    """Registers -> shared memory (stmatrix, transposed) -> 16-byte stores along the features of a
    row.

    A warpgroup stages `epilogue_tokens` tokens x 64 features (or 32 activated ones) in its own
    buffer; 16-byte chunk c of token t lies at chunk c ^ (t % 8) (c ^ (t / 2 % 4)): neither side has
    bank conflicts.
    """

    epilogue: StoreRows
    config: Sm90Config

    @cute.jit
    def __call__(
        self,
        n: cutlass.Constexpr,
        accs: Any,
        tidx: Int32,
        args: Any,
        epilogue_args: Any,
        geometry: Any,
        tile: Any,
        staging: Int32,
    ):
        half, thread = tidx // 128, tidx % 128
        tokens, buffer = self.config.epilogue_tokens, staging + half * self.config.staging_bytes
        features = args.weight_rows // (2 // self.epilogue.values_per_pair)
        scales = TileScales(self.epilogue, epilogue_args, tile, n)
        packed, contexts = [], []  # what all blocks need is loaded together
        for m in cutlass.range_constexpr(self.config.blocks64):
            packed.append(first_row(self.config, tile, m, half))
            mine = packed[m] + thread // 32 * 16 + cute.arch.lane_idx() // 4
            mine = cutlass.min(mine, args.weight_rows - 9)
            contexts.append(self.epilogue.begin(epilogue_args, tile.expert, mine, args.weight_rows))
        for m in cutlass.range_constexpr(self.config.blocks64):
            column, context = packed[m] // (2 // self.epilogue.values_per_pair), contexts[m]
            rows = OutRows(args.out, features, column, tile, None)
            for first in cutlass.range_constexpr(0, n, tokens):
                count = min(tokens, n - first)
                cute.arch.barrier(barrier_id=BARRIER + half, number_of_threads=128)
                self._stage(first, count, accs[m], thread, buffer, context, scales)
                cute.arch.barrier(barrier_id=BARRIER + half, number_of_threads=128)
                self._store(first, count, thread, buffer, rows)

    @cute.jit
    def _stage(
        self,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
        acc: Any,
        thread: Int32,
        buffer: Int32,
        context: Any,
        scales: Any,
    ):
        lane, warp = cute.arch.lane_idx(), thread // 32
        both = self.epilogue.values_per_pair == 2
        for t16 in cutlass.range_constexpr(0, count, 16):
            # a matrix each: packed rows 0-7 and 8-15 (or one activated) of 8 tokens, and again
            words = []
            for t8 in cutlass.range_constexpr(min(2, (count - t16) // 8)):
                token = first + t16 + 8 * t8
                v, even, odd = token // 2, scales.of(token, lane, 0), scales.of(token, lane, 1)
                a = self.epilogue.pair(context, even, acc[v], acc[v + 2])
                b = self.epilogue.pair(context, odd, acc[v + 1], acc[v + 3])
                words += [pack_bf16x2(x, y) for x, y in zip(a, b)]
            if cutlass.const_expr(both):
                token = t16 + lane // 16 * 8 + lane % 8
                chunk = (warp * 2 + lane // 8 % 2) ^ (token % 8)
                address = buffer + token * 128 + chunk * 16
            else:
                token = t16 + lane // 8 % 2 * 8 + lane % 8
                chunk = warp ^ (token // 2 % 4)
                address = buffer + token * 64 + chunk * 16
            regs = ", ".join(f"{{$r{i + 1}}}" for i in range(len(words)))
            cute.arch.inline_ptx(
                f"stmatrix.sync.aligned.m8n8.x{len(words)}.trans.shared.b16 [{{$r0}}], {{{regs}}};",
                read_only_args=[address, *words],
            )

    @cute.jit
    def _store(
        self,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
        thread: Int32,
        buffer: Int32,
        rows: Any,
    ):
        chunks = 4 * self.epilogue.values_per_pair  # 16-byte chunks of a token's features
        per_pass = 128 // chunks
        chunk, mine = thread % chunks, thread // chunks
        words = []  # all loads are in flight before the first store
        for p in cutlass.range_constexpr(-(-count // per_pass)):
            token = p * per_pass + mine
            if cutlass.const_expr((p + 1) * per_pass > count):
                token = cutlass.min(token, count - 1)
            swizzled = chunk ^ (token % 8 if chunks == 8 else token // 2 % 4)
            words.append(load_shared_u32x4(buffer + token * (chunks * 16) + swizzled * 16))
        column, last = rows.column + chunk * 8, cutlass.min(rows.tile.n - first, count)
        if column >= rows.features:
            last = Int32(0)
        out = rows.address(first + mine, column)
        for p in cutlass.range_constexpr(len(words)):
            if p * per_pass + mine < last:
                store_u32x4(out + p * per_pass * Int64(rows.features) * 2, words[p])


@dataclasses.dataclass(frozen=True)
class StagedFinish:
    """Registers -> fp32 in shared memory -> whole lines of a row.

    Some tokens of all weight rows of a warpgroup are staged at a time; 16-byte chunk c of token t
    lies at chunk c ^ (t % 8), so that neither side has bank conflicts. This class stores fp32.
    """

    epilogue: StoreRows
    config: Sm90Config
    size = 4  # bytes of a value that is stored
    chunk_values = 4  # features that a thread stores at a time
    lanes = 8  # neighbours that store a run of them

    @property
    def tokens(self) -> int:
        """How many are staged at a time."""
        return self.config.epilogue_tokens // (8 * self.per_token) * 8

    @property
    def per_token(self) -> int:
        """Lines of 128 bytes in shared memory."""
        return self.epilogue.values_per_pair * self.config.blocks64

    @cute.jit
    def __call__(
        self,
        n: cutlass.Constexpr,
        accs: Any,
        tidx: Int32,
        args: Any,
        epilogue_args: Any,
        geometry: Any,
        tile: Any,
        staging: Int32,
    ):
        half, thread = tidx // 128, tidx % 128
        buffer = staging + half * self.config.staging_bytes
        per_feature = 2 // self.epilogue.values_per_pair
        scales = TileScales(self.epilogue, epilogue_args, tile, n)
        contexts, row = [], first_row(self.config, tile, 0, half)
        for m in cutlass.range_constexpr(self.config.blocks64):
            mine = first_row(self.config, tile, m, half) + thread // 32 * 16 + thread % 32 // 4
            mine = cutlass.min(mine, args.weight_rows - 9)
            contexts.append(self.epilogue.begin(epilogue_args, tile.expert, mine, args.weight_rows))
        rounding = self.epilogue.rounding(epilogue_args, tile.expert)
        features = args.weight_rows // per_feature
        rows = OutRows(args.out, features, row // per_feature, tile, rounding)
        for first in cutlass.range_constexpr(0, n, self.tokens):
            count = min(self.tokens, n - first)
            cute.arch.barrier(barrier_id=BARRIER + half, number_of_threads=128)
            if cutlass.const_expr(first == 0):
                self._prepare(thread, buffer, rows)
            for m in cutlass.range_constexpr(self.config.blocks64):
                self._stage(m, (first, count), accs[m], thread, buffer, contexts[m], scales)
            cute.arch.barrier(barrier_id=BARRIER + half, number_of_threads=128)
            self._store(first, count, thread, buffer, rows)

    def _prepare(self, thread: Int32, buffer: Int32, rows: OutRows) -> None:
        """Once per tile, when nobody reads what the last one left in shared memory."""

    @cute.jit
    def _stage(
        self,
        m: cutlass.Constexpr,
        tokens: cutlass.Constexpr,
        acc: Any,
        thread: Int32,
        buffer: Int32,
        context: Any,
        scales: Any,
    ):
        """Block ``m`` of 64 rows of ``tokens`` = (first, count)."""
        (first, count), pitch = tokens, 128 * self.per_token
        lane, per_pair = cute.arch.lane_idx(), self.epilogue.values_per_pair
        feature = thread // 32 * (8 * per_pair) + lane // 4 + m * (32 * per_pair)
        for odd in cutlass.range_constexpr(2):
            token = 2 * (lane % 4) + odd  # of every eight
            at = [
                buffer + token * pitch + (chunk ^ token) * 16 + feature % 4 * 4
                for chunk in (feature // 4, feature // 4 + 2)
            ]
            for t8 in cutlass.range_constexpr(0, count, 8):
                v, scale = (first + t8) // 2 + odd, scales.of(first + t8, lane, odd)
                values = self.epilogue.pair(context, scale, acc[v], acc[v + 2])
                for i in cutlass.range_constexpr(per_pair):
                    cute.arch.inline_ptx(
                        "st.shared.f32 [{$r0}], {$r1};",
                        read_only_args=[at[i] + t8 * pitch, values[i]],
                    )

    @cute.jit
    def _store(
        self,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
        thread: Int32,
        buffer: Int32,
        rows: Any,
    ):
        chunk, per_pass, out = self._place(first, thread, rows)
        mine, valid = thread // self.lanes % per_pass, self._valid(first, count, chunk, rows)
        words = []  # all loads are in flight before the first store
        for p in cutlass.range_constexpr(-(-count // per_pass)):
            token = cutlass.min(mine + p * per_pass, count - 1)
            words.append(self._load(buffer, token, chunk))
        for p in cutlass.range_constexpr(len(words)):
            if mine + p * per_pass < valid:
                at = out + Int64(mine + p * per_pass) * rows.features * self.size
                store_u32x4(at, words[p])

    def _place(self, first: int, thread: Int32, rows: OutRows) -> tuple[Int32, int, Int64]:
        """(chunk of a token's features that a thread stores, tokens of a pass, address of that
        chunk of token ``first``)."""
        per_token = self.per_token * 32 // self.chunk_values  # chunks
        per_pass, lanes = 128 // per_token, self.lanes
        chunk = thread // (lanes * per_pass) * lanes + thread % lanes
        return chunk, per_pass, rows.address(first, rows.column + self._feature(chunk), self.size)

    def _feature(self, chunk: Int32) -> Int32:
        """First feature of a chunk, from that of the warpgroup's first block of 64 rows."""
        in_block = 32 * self.epilogue.values_per_pair  # features
        chunks = in_block // self.chunk_values
        between = self.config.warpgroups * in_block
        return chunk // chunks * between + chunk % chunks * self.chunk_values

    def _valid(self, first: int, count: int, chunk: Int32, rows: OutRows) -> Int32:
        """How many of the tokens from ``first`` on are stored; none past the last feature."""
        exists = rows.column + self._feature(chunk) < rows.features
        return select(exists, cutlass.min(rows.tile.n - first, count), Int32(0))

    def _load(self, buffer: Int32, token: Int32, chunk: Int32) -> tuple[Uint32, ...]:
        at = buffer + token * (128 * self.per_token) + (chunk ^ (token % 8)) * 16
        return load_shared_u32x4(at)


@dataclasses.dataclass(frozen=True)
class RoundedFinish(StagedFinish):
    """Values of NVFP4 in bf16: a thread has half a block of 16 features, and asks its neighbour for
    the amax of the other half.

    A block of gated features lies in two warps, one of 64 weight rows in the accumulators of eight
    lanes: in shared memory both are whole. `block_factors` of every scale there is are computed
    once per tile, behind the rows. Features are a multiple of 16. The loop over tokens is rolled,
    which is faster than four of its turns under way together: less code, which runs once per tile.
    """

    size = 2
    chunk_values = 8
    lanes = 4

    def _prepare(self, thread: Int32, buffer: Int32, rows: OutRows) -> None:
        factors = block_factors(Uint32(thread), rows.rounding[0])
        cute.arch.inline_ptx(
            "st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};",
            read_only_args=[self._factors(buffer, thread), *factors],
        )

    def _factors(self, buffer: Int32, byte: Any) -> Int32:
        return buffer + 128 * self.config.epilogue_tokens + Int32(byte) * 8

    @cute.jit
    def _store(
        self,
        first: cutlass.Constexpr,
        count: cutlass.Constexpr,
        thread: Int32,
        buffer: Int32,
        rows: Any,
    ):
        chunk, per_pass, out = self._place(first, thread, rows)
        token, valid = thread // self.lanes % per_pass, self._valid(first, count, chunk, rows)
        pitch = Int64(rows.features) * (self.size * per_pass)
        out += Int64(token) * rows.features * self.size
        for _ in cutlass.range(-(-count // per_pass), unroll=1):
            words = self._round(buffer, cutlass.min(token, count - 1), chunk, rows)
            if token < valid:
                store_u32x4(out, words)
            token += per_pass
            out += pitch

    def _round(self, buffer: Int32, token: Int32, chunk: Int32, rows: OutRows) -> list[Uint32]:
        """16 bytes as they are stored; the whole warp is here."""
        words = self._load(buffer, token, 2 * chunk) + self._load(buffer, token, 2 * chunk + 1)
        values = [w.bitcast(Float32) for w in words]
        amax = tree(max_magnitude, values)
        amax = max_magnitude(amax, cute.arch.shuffle_sync_bfly(amax, 1))
        factors = cute.arch.inline_ptx(
            "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
            write_only_types=[Float32] * 2,
            read_only_args=[self._factors(buffer, scale_byte(amax, rows.rounding[1]))],
        )
        return pack_pairs(round_elements(values, factors))


@dataclasses.dataclass(frozen=True)
class SplitFinish:
    """fp32 partial sums of the tile's real rows; `Combine` adds them up."""

    epilogue: StoreRows
    config: Sm90Config

    @cute.jit
    def __call__(
        self,
        n: cutlass.Constexpr,
        accs: Any,
        tidx: Int32,
        args: Any,
        epilogue_args: Any,
        geometry: Any,
        tile: Any,
        staging: Any,
    ):
        half, thread, lane = tidx // 128, tidx % 128, cute.arch.lane_idx()
        stride = Int64(padded_rows(args))
        origin = args.partial.toint() + (Int64(tile.chunk) * args.num_rows + tile.row0) * stride * 4
        for m in cutlass.range_constexpr(self.config.blocks64):
            row = first_row(self.config, tile, m, half) + thread // 32 * 16 + lane // 4
            if row < stride:
                for v in cutlass.range_constexpr(n // 2):
                    token = v // 4 * 8 + lane % 4 * 2 + v % 2
                    if token < tile.n:
                        at = origin + (token * stride + row + v // 2 % 2 * 8) * 4
                        store_f32(at, accs[m][v])


COMBINE_THREADS = 128


@dataclasses.dataclass(frozen=True)
class Combine:
    """Second kernel of a split K: adds the chunks of every routed row in chunk order and applies
    the epilogue. One CTA per row and 1024 weight rows; a thread takes rows r .. r + 3 and r + 8 ..
    r + 11 (r % 16 in {0, 4})."""

    epilogue: StoreRows

    @cute.jit
    def launch(self, args: Any, epilogue_args: Any, name: cutlass.Constexpr, stream: Any):
        columns = (args.weight_rows // 8 + (COMBINE_THREADS - 1)) // COMBINE_THREADS
        self.kernel.set_name_prefix(name)
        self.kernel(args, epilogue_args).launch(
            grid=[args.num_rows, columns, 1],
            block=[COMBINE_THREADS, 1, 1],
            use_pdl=True,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, args: Any, epilogue_args: Any):
        tidx, _, _ = cute.arch.thread_idx()
        token, column, _ = cute.arch.block_idx()
        expert = self._expert_of(token, args)
        group = column * COMBINE_THREADS + tidx
        row = group // 2 * 16 + group % 2 * 4
        wait_for_previous_kernel()
        allow_next_kernel()
        first = (group - cute.arch.lane_idx()) * 8  # row of the warp
        if first < args.weight_rows and expert < args.num_experts:
            self._sum(args, epilogue_args, expert, token, row)

    @cute.jit
    def _expert_of(self, token: Int32, args: Any):
        """How many experts end at or before this row: a warp looks at 32 at a time."""
        lane, expert = cute.arch.lane_idx(), Int32(0)
        for first in cutlass.range(0, args.num_experts, 32, unroll=1):
            ended = cutlass.Boolean(False)
            if first + lane < args.num_experts:
                ended = args.offsets[first + lane + 1] <= token
            expert += cute.arch.popc(cute.arch.vote_ballot_sync(ended))
        return expert

    @cute.jit
    def _sum(self, args: Any, epilogue_args: Any, expert: Int32, token: Int32, row: Int32):
        stride, exists = Int64(padded_rows(args)) * 4, row < args.weight_rows
        row = select(exists, row, row % 16)  # the whole warp is here: lanes share blocks
        at = args.partial.toint() + Int64(token) * stride + row * 4
        sums = [Float32(0.0) for _ in range(8)]
        for _ in cutlass.range(num_chunks(args), unroll=4):
            values = load_f32x4(at) + load_f32x4(at + 32)
            sums = [s + v for s, v in zip(sums, values)]
            at += args.num_rows * stride
        pairs, scale = [], self.epilogue.scale_of(epilogue_args, token)
        for i in cutlass.range_constexpr(4):
            context = self.epilogue.begin(epilogue_args, expert, row + i, args.weight_rows)
            pairs.append(self.epilogue.pair(context, scale, sums[i], sums[4 + i]))
        outs = self._round([v for column in zip(*pairs) for v in column], epilogue_args, expert)
        if exists:
            self._store(args, token, row, outs)

    def _round(self, values: list[Float32], epilogue_args: Any, expert: Int32) -> list[Float32]:
        """A block of 16 features lies in 2 lanes, or in 4 that have one of a pair."""
        rounding = self.epilogue.rounding(epilogue_args, expert)
        if rounding is None:
            return values
        amax = magnitude_bits(values)
        for distance in (1, 2)[: 3 - self.epilogue.values_per_pair]:
            amax = cutlass.max(amax, cute.arch.shuffle_sync_bfly(amax, distance))
        return round_values(values, amax, *rounding)

    @cute.jit
    def _store(self, args: Any, token: Int32, row: Int32, values: Any):
        """Features of packed rows row .. row + 3, then, of pairs, those of row + 8 .. row + 11."""
        per_pair = self.epilogue.values_per_pair
        size = 4 if self.epilogue.dtype == "Float32" else 2
        out = args.out.toint() + Int64(token) * (args.weight_rows // (2 // per_pair)) * size
        for j in cutlass.range_constexpr(per_pair):
            column = row + 8 * j if per_pair == 2 else row // 16 * 8 + row % 16
            four = values[4 * j : 4 * j + 4]
            if cutlass.const_expr(size == 4):
                store_u32x4(out + column * 4, [v.bitcast(Uint32) for v in four])
            else:
                store_u32x2(out + column * 2, pack_pairs(four))


def padded_rows(args: Any) -> Int32:
    """Weight rows as packed: floats of a row of partial sums."""
    return (args.weight_rows + (layout.TILE_ROWS - 1)) // layout.TILE_ROWS * layout.TILE_ROWS


def num_chunks(args: Any) -> Int32:
    """Chunks of chunk_steps * 128 k."""
    steps = (args.k + (layout.TILE_K - 1)) // layout.TILE_K
    return (steps + args.chunk_steps - 1) // args.chunk_steps


def load_shared_u32x4(address: Int32) -> tuple[Uint32, ...]:
    return cute.arch.inline_ptx(
        "ld.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def max_magnitude(a: Float32, b: Float32) -> Float32:
    """max(|a|, |b|), NaN if one of them is: one instruction."""
    return cute.arch.inline_ptx(
        "{ .reg .f32 a, b; abs.f32 a, {$r0}; abs.f32 b, {$r1}; max.NaN.f32 {$w0}, a, b; }",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def load_f32x4(address: Int64) -> tuple[Float32, ...]:
    return cute.arch.inline_ptx(
        "ld.global.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )
