"""Rows back to tokens, and rows of received tokens into expert order.

    y[t] = out( ((w0 * o[r0]) + (w1 * o[r1])) + ... + shared[t] ),  r_j = token_rows[t, j]

in fp32, slots in order, every product and every sum rounded: the same bits in any batch.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.quantize import WARP, GroupScales, tree


def _spread(vectors: int, most: int = 256) -> tuple[int, int]:
    """(threads, CTAs) for ``vectors`` accesses of one row: whole warps, fewest idle threads."""
    ctas = -(-vectors // most)
    return -(-vectors // (ctas * 32)) * 32, ctas


@dataclasses.dataclass(frozen=True)
class Combine:
    """A thread owns eight columns of one token; the loads of all its slots are in flight together.

    hidden    columns, a multiple of 8
    top_k     slots per token
    dtypes    of the rows, of the output and of the shared expert's output ('' without one)
    weighted  products with the weights, else a plain sum (weights were applied to the input)
    lossy     tokens may be lost: their y is NaN

    o (R, hidden); token_rows int32 (T, top_k), -1 = nothing here; weights fp32 (T, top_k);
    shared and y (T, hidden); lost uint8 (T,), not 0 = lost. A token without a slot gets 0, plus its
    shared row.
    """

    hidden: int
    top_k: int
    rows_dtype: str = "BFloat16"
    out_dtype: str = "BFloat16"
    shared_dtype: str = ""
    weighted: bool = True
    lossy: bool = False

    WIDTH = 8

    @property
    def name(self) -> str:
        shared = f"_shared_{self.shared_dtype.lower()}" if self.shared_dtype else ""
        return (
            f"combine_h{self.hidden}_k{self.top_k}_{self.rows_dtype.lower()}_"
            f"{self.out_dtype.lower()}{shared}{'' if self.weighted else '_sum'}"
            f"{'_lossy' if self.lossy else ''}"
        )

    @property
    def arguments(self) -> tuple:
        return (
            Ptr(self.rows_dtype),
            Ptr("Int32", 4),
            Ptr("Float32", 4) if self.weighted else None,
            Ptr(self.shared_dtype) if self.shared_dtype else None,
            Ptr("Uint8", 1) if self.lossy else None,
            Ptr(self.out_dtype),
            "i32",
        )

    @cute.jit
    def __call__(self, o, token_rows, weights, shared, lost, y, tokens, stream):
        threads, ctas = _spread(self.hidden // self.WIDTH)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(o, token_rows, weights, shared, lost, y).launch(
            grid=(tokens, ctas, 1), block=(threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, o, token_rows, weights, shared, lost, y):
        tid, _, _ = cute.arch.thread_idx()
        token, part, _ = cute.arch.block_idx()
        threads, ctas = _spread(self.hidden // self.WIDTH)
        ptx.wait_for_previous_kernel()
        column = (part * threads + tid) * self.WIDTH
        inside = Boolean(True)
        if cutlass.const_expr(threads * ctas * self.WIDTH > self.hidden):
            inside = column < self.hidden
        if inside:
            slots = Int64(token) * (self.top_k * 4)
            rows = [ptx.load_i32(token_rows.toint() + slots + 4 * j) for j in range(self.top_k)]
            factors = [None] * self.top_k
            if cutlass.const_expr(self.weighted):
                factors = [ptx.load_f32(weights.toint() + slots + 4 * j) for j in range(self.top_k)]
            values = self.sum_slots(o, rows, factors, column)
            position = Int64(token) * self.hidden + column
            if cutlass.const_expr(bool(self.shared_dtype)):
                extra = unpack(load(shared.toint(), position, self.shared_dtype), self.shared_dtype)
                values = [ptx.add(v, e) for v, e in zip(values, extra)]
            else:
                most = tree(cutlass.max, rows)
                values = [ptx.select(most >= 0, v, Float32(0.0)) for v in values]
            if cutlass.const_expr(self.lossy):
                gone = ptx.load_u8(lost.toint() + token) != 0
                nan = Uint32(0x7FC00000).bitcast(Float32)
                values = [ptx.select(gone, nan, v) for v in values]
            store(y.toint(), position, values, self.out_dtype)
        ptx.allow_next_kernel()

    def sum_slots(self, o, rows, factors, column):
        """fp32 sums of this thread's columns. They start from -0.0, which changes no term added to
        it."""
        pieces = [load_if(o.toint(), row, self.hidden, column, self.rows_dtype) for row in rows]
        nothing = Uint32(0x80000000).bitcast(Float32)  # the literal -0.0 may come out as 0.0
        total = [nothing] * self.WIDTH
        for row, factor, words in zip(rows, factors, pieces):
            terms = unpack(words, self.rows_dtype)
            if factor is not None:
                terms = [ptx.mul(factor, v) for v in terms]
            terms = [ptx.select(row >= 0, v, nothing) for v in terms]
            total = [ptx.add(s, v) for s, v in zip(total, terms)]
        return total


def _bytes(dtype: str) -> int:
    return 4 if dtype == "Float32" else 2


def load(base, position, dtype):
    """Words of eight values from element ``position`` on."""
    address = base + position * _bytes(dtype)
    words = list(ptx.load_u32x4(address))
    return words + list(ptx.load_u32x4(address + 16)) if dtype == "Float32" else words


@cute.jit
def load_if(base, row, hidden: cutlass.Constexpr, column, dtype: cutlass.Constexpr):
    """`load` of row ``row``; zeros without memory traffic when it is negative."""
    words = [Uint32(0)] * (8 if dtype == "Float32" else 4)
    if row >= 0:
        words = load(base, Int64(row) * hidden + column, dtype)
    return [Uint32(w) for w in words]


def unpack(words, dtype):
    """Words -> fp32 values (exact)."""
    if dtype == "Float32":
        return [w.bitcast(Float32) for w in words]
    if dtype == "BFloat16":
        halves = [(w << 16, w & Uint32(0xFFFF0000)) for w in words]
        return [h.bitcast(Float32) for pair in halves for h in pair]
    return [ptx.half_to_f32(w, upper) for w in words for upper in (False, True)]


def store(base, position, values, dtype):
    address = base + position * _bytes(dtype)
    if dtype == "Float32":
        ptx.store_u32x4(address, [v.bitcast(Uint32) for v in values[:4]])
        ptx.store_u32x4(address + 16, [v.bitcast(Uint32) for v in values[4:]])
        return
    pack = ptx.pack_bf16x2 if dtype == "BFloat16" else ptx.pack_f16x2
    ptx.store_u32x4(address, [pack(a, b) for a, b in zip(values[::2], values[1::2])])


@dataclasses.dataclass(frozen=True)
class PermuteRows:
    """out[r] = data[row_token[r]] for routed rows r < expert_offsets[E], with their fp32 outer
    scales, and their block scales in SWIZZLE_32_4_4_GROUPED as `GroupScales` has them.

    row_bytes  bytes of a row, a multiple of 8: two codes a byte
    data_pitch, scale_pitch, gx_pitch  bytes from one row to the next of the input; 0: rows lie
               close behind one another
    One CTA per tile of 128 scale rows, then one per `ROWS` rows of the output; rows past the last
    expert are left alone. Both parts write to memory as fast as it takes it, and neither waits for
    the other.

    data uint8 (N, row_bytes); gx fp32 (N,); scale uint8 (N, row_bytes / 8); row_token int32 (R,);
    expert_offsets int32 (E+1,); out uint8 (R, row_bytes); out_gx fp32 (R,); grouped uint8
    (tiles * 128, groups padded to 4). ``sizes``: R, E, tiles.
    """

    row_bytes: int
    data_pitch: int = 0
    scale_pitch: int = 0
    gx_pitch: int = 0

    ROWS = 4

    @property
    def name(self) -> str:
        apart = self.data_pitch not in (0, self.row_bytes)
        return f"permute_rows_b{self.row_bytes}{f'_p{self.data_pitch}' if apart else ''}"

    @property
    def width(self) -> int:
        return 16 if self.row_bytes % 16 == 0 else 8

    @property
    def threads(self) -> int:
        """Two warps at least: `GroupScales` shares a tile among an even number of them."""
        return max(_spread(self.row_bytes // self.width)[0], 2 * WARP)

    @property
    def scales(self) -> GroupScales:
        groups = self.row_bytes // 8
        threads = self.threads // (2 * WARP) * 2 * WARP
        return GroupScales(groups, self.scale_pitch or groups, threads=threads, zeros=False)

    @property
    def arguments(self) -> tuple:
        i32, f32, rows = Ptr("Int32", 4), Ptr("Float32", 4), Ptr("Uint8", self.width)
        inputs = (rows, f32, Ptr("Uint8", self.scales.width))
        return (inputs, (i32, i32), (rows, f32, Ptr("Uint8")), ("i32", "i32", "i32"))

    @cute.jit
    def __call__(self, inputs, plan, outputs, sizes, stream):
        rows, _, tiles = sizes
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, plan, outputs, sizes).launch(
            grid=(tiles + (rows + self.ROWS - 1) // self.ROWS, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, inputs, plan, outputs, sizes):
        tid, _, _ = cute.arch.thread_idx()
        part, _, _ = cute.arch.block_idx()
        data, gx, scale = inputs
        row_token, expert_offsets = plan
        out, out_gx, grouped = outputs
        _, experts, tiles = sizes
        ptx.wait_for_previous_kernel()
        if part < tiles:
            if tid < self.scales.threads:
                self.scales.group_tile(scale, grouped, (row_token, expert_offsets, experts), part)
        else:
            total = ptx.load_i32(expert_offsets.toint() + Int64(experts) * 4)
            first = (part - tiles) * self.ROWS
            self.copy_rows((data, gx, row_token), (out, out_gx), first, total - 1)
        ptx.allow_next_kernel()

    @cute.jit
    def copy_rows(self, inputs, outputs, first, last):
        """Rows ``first`` to ``first`` + `ROWS` - 1, none past ``last``."""
        data, gx, row_token = inputs
        out, out_gx = outputs
        tid, _, _ = cute.arch.thread_idx()
        _, steps = _spread(self.row_bytes // self.width)
        if first <= last:
            rows = [cutlass.min(first + i, last) for i in range(self.ROWS)]  # the last one again
            tokens = [ptx.load_i32(row_token.toint() + Int64(r) * 4) for r in rows]
            if tid == 0:
                for r, t in zip(rows, tokens):
                    value = ptx.load_f32(gx.toint() + Int64(t) * (self.gx_pitch or 4))
                    ptx.store_f32(out_gx.toint() + Int64(r) * 4, value)
            for step in cutlass.range_constexpr(steps):
                offset = (step * self.threads + tid) * self.width
                if offset < self.row_bytes:
                    self.copy_pieces(data.toint() + offset, tokens, out.toint() + offset, rows)

    def copy_pieces(self, source, tokens, target, rows):
        """One piece of each of the rows; the loads are in flight together."""
        load, store = ptx.load_u32x4, ptx.stream_u32x4  # a source row is read by several experts
        if self.width == 8:
            load, store = ptx.load_u32x2, ptx.store_u32x2
        pieces = [load(source + Int64(t) * (self.data_pitch or self.row_bytes)) for t in tokens]
        for r, piece in zip(rows, pieces):
            store(target + Int64(r) * self.row_bytes, piece)
