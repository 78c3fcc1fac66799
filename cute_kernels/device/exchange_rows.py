"""Rows between ranks: tokens quantised onto the wire, tokens off the wire decoded expert-major,
rows of experts on their way back.

Where a row lies is known before (`exchange_book`, `routing`): each kernel moves every byte once.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.combine import _spread, load_if
from cute_kernels.device.quantize import (
    E2M1_UE4M3_MAX,
    GLOBAL_MIN,
    WARP,
    QuantizeRows,
    cta_max,
    tree,
)
from cute_kernels.device.sizes import BLOCK
from cute_kernels.device.stage import StageRows, swap_halves
from cute_kernels.device.wire import Wire

_SMALLEST = Wire(BLOCK, 1, True, False)


@dataclasses.dataclass(frozen=True)
class SendRows(QuantizeRows):
    """Tokens to all their places on the wire, quantised on the way: one CTA per token, as in
    `QuantizeRows`, and further ones that give the places without a token ids of no expert.

    wire   layout of a row, whose ``hidden`` is K
    ranks  W
    dtype  of x; 'Uint8': codes of tokens that are quantised already, with scales and gx

    x (T, K); outer: fp32, one element (``given``), or gx fp32 (T,) of codes; weight fp32 (T,);
    scale uint8 (T, K/16) of codes; ids int32 (T, slots); mix fp32 (T, slots) of a wire with
    weights; token_place, token_first int32 (T, W), first without weights; needed int32 (W, 2), see
    `exchange_book.BookPlaces`; rows uint8 (places, row_bytes), of which ``room`` are for each rank
    (0: no place is empty).
    """

    wire: Wire = _SMALLEST
    ranks: int = 1

    @property
    def name(self) -> str:
        w = self.wire
        mode = ("given" if self.given else "per_token") if w.quantized else "bf16"
        kind = f"{mode}{'_weighted' if self.weighted else ''}{'_mix' if w.weighted else ''}"
        return f"send_rows_{kind}_h{self.hidden}_k{w.top_k}_w{self.ranks}_{self.dtype.lower()}"

    @property
    def codes(self) -> bool:
        return self.dtype == "Uint8"

    @property
    def arguments(self) -> tuple:
        f32, i32 = Ptr("Float32", 4), Ptr("Int32", 4)
        source = (
            Ptr(self.dtype),
            f32 if self.given or self.codes else None,
            f32 if self.weighted else None,
            Ptr("Uint8", 1) if self.codes else None,
        )
        mix, first = (f32, None) if self.wire.weighted else (None, i32)
        return (source, (i32, mix, i32, first, i32), Ptr("Uint8"), "i32", "i32", "i32")

    @cute.jit
    def __call__(self, source, routes, rows, tokens, room, fillers, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(source, routes, rows, tokens, room).launch(
            grid=(tokens + fillers, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, source, routes, rows, tokens, room):
        tid, _, _ = cute.arch.thread_idx()
        part, _, _ = cute.arch.block_idx()
        ptx.wait_for_previous_kernel()
        if part < tokens:
            self.send_token(source, routes, rows, part, tid)
        else:
            self.empty_place(routes, rows, (part - tokens) * self.threads + tid, room)
        ptx.allow_next_kernel()

    @cute.jit
    def empty_place(self, routes, rows, place, room):
        if place < room * self.ranks:
            rank = place // room
            if place - rank * room >= ptx.load_i32(routes[4].toint() + Int64(rank) * 8):
                at = rows.toint() + Int64(place) * self.wire.row_bytes + self.wire.ids_at
                for k in cutlass.range_constexpr(self.wire.top_k):
                    ptx.store_u32(at + 4 * k, Int32(-1))

    @cute.jit
    def send_token(self, source, routes, rows, token, tid):
        g, blocks = self.wire_blocks(source, token, tid)
        _, _, token_place, token_first, _ = routes
        lane = cute.arch.lane_idx()
        base = Int64(token) * (self.ranks * 4)
        for step in cutlass.range(0, self.ranks, WARP, unroll=1):
            column = base + cutlass.min(step + lane, self.ranks - 1) * 4
            place = ptx.load_i32(token_place.toint() + column)
            place = ptx.select(step + lane < self.ranks, place, Int32(-1))
            first = Int32(0)
            if cutlass.const_expr(not self.wire.weighted):
                first = ptx.load_i32(token_first.toint() + column)
            left = Uint32(cute.arch.vote_ballot_sync(place >= 0))
            while left != 0:
                # the lowest of the ranks that are left
                rank = Int32(cute.arch.popc(~left & (left - 1)))
                row = rows.toint() + Int64(cute.arch.shuffle_sync(place, rank)) * (
                    self.wire.row_bytes
                )
                self.store_wire(row, blocks, tid)
                self.store_head(row, routes, token, (g, cute.arch.shuffle_sync(first, rank)), tid)
                left = left & (left - 1)

    @cute.jit
    def wire_blocks(self, source, token, tid):
        """(outer scale or None, what the wire has of each of this thread's blocks: a scale byte and
        two words of codes, or eight words of bf16)."""
        x, outer, weight, scale = source
        factor = None
        if cutlass.const_expr(self.weighted):
            factor = ptx.load_f32(weight.toint() + Int64(token) * 4)
        if cutlass.const_expr(self.codes):
            g = ptx.load_f32(outer.toint() + Int64(token) * 4)
            return g, self.load_codes(x.toint(), scale.toint(), token, tid)
        words = self.load_row(x.toint(), token, tid)  # (blocks, words of a block)
        if cutlass.const_expr(not self.wire.quantized):
            if cutlass.const_expr(self.dtype == "BFloat16" and factor is None):
                return None, words
            values = [self.elements(w, factor) for w in words]
            return None, [[ptx.pack_bf16x2(a, b) for a, b in zip(v[::2], v[1::2])] for v in values]
        amaxes = [self.block_amax(w, factor) for w in words]
        if cutlass.const_expr(self.given):
            g = ptx.load_f32(outer.toint())
        else:
            amax = cta_max(tree(cutlass.max, amaxes), self.threads, tid)
            g = amax.bitcast(Float32) / Float32(E2M1_UE4M3_MAX)
        g = cute.arch.fmax(g, Float32(GLOBAL_MIN), nan=True)
        c = Float32(1.0) / ptx.mul(g, Float32(6.0))
        return g, [self.encode_block(w, a, g, c, factor) for w, a in zip(words, amaxes)]

    def load_codes(self, data, scale, token, tid):
        blocks = []
        for i in range(self.blocks):
            block = cutlass.min(tid + i * self.threads, Int32(self.groups - 1))
            at = Int64(token) * self.groups + block
            blocks.append((ptx.load_u8(scale + at), list(ptx.load_u32x2(data + at * 8))))
        return blocks

    @cute.jit
    def store_wire(self, row, blocks, tid):
        for i in cutlass.range_constexpr(self.blocks):
            block = tid + i * self.threads
            if block < self.groups:
                if cutlass.const_expr(self.wire.quantized):
                    byte, codes = blocks[i]
                    ptx.store_u32x2(row + block * 8, codes)
                    ptx.store_u8(row + self.wire.scale_at + block, byte)
                else:
                    ptx.store_u32x4(row + block * 32, blocks[i][:4])
                    ptx.store_u32x4(row + block * 32 + 16, blocks[i][4:])

    @cute.jit
    def store_head(self, row, routes, token, own, tid):
        """What the wire has besides the token itself. ``own``: outer scale or None, first."""
        ids, mix, *_ = routes
        w = self.wire
        if tid == 0:
            if cutlass.const_expr(w.quantized):
                ptx.store_f32(row + w.gx_at, own[0])
            if cutlass.const_expr(not w.weighted):
                ptx.store_u32(row + w.first_at, own[1])
        for k in cutlass.range(tid, w.top_k, self.threads):
            at = (Int64(token) * w.top_k + k) * 4
            ptx.store_u32(row + w.ids_at + k * 4, ptx.load_u32(ids.toint() + at))
            if cutlass.const_expr(w.weighted):
                ptx.store_u32(row + w.weights_at + k * 4, ptx.load_u32(mix.toint() + at))


@dataclasses.dataclass(frozen=True)
class StageReceived(StageRows):
    """Tokens that are quantised, or rounded to bf16, to their rows, expert-major and in bf16: one
    CTA per token; a thread owns blocks of 16 elements, as in `StageRows`.

    hidden      K, a multiple of 16
    quantised   codes with scales: value = code * scale, exact in bf16. False: bf16 as it is
    slots       columns of token_rows
    data_pitch, scale_pitch, gx_pitch  bytes from one token to the next: a multiple of 16, any, a
                multiple of 4

    data uint8 (N, K/2) or bf16 (N, K); scale uint8 (N, K/16); gx fp32 (N,); token_rows int32 (N,
    slots), -1 = no row; values bf16 (R, K); row_gx fp32 (R,).
    """

    slots: int = 1
    data_pitch: int = 0
    scale_pitch: int = 0
    gx_pitch: int = 0

    @property
    def name(self) -> str:
        kind = "nvfp4" if self.quantised else "bf16"
        return f"stage_received_{kind}_h{self.hidden}_to{self.slots}_p{self.data_pitch}"

    @property
    def arguments(self) -> tuple:
        f32 = Ptr("Float32", 4) if self.quantised else None
        scale = Ptr("Uint8", 1) if self.quantised else None
        data = Ptr("Uint8", 8) if self.quantised else Ptr("BFloat16")
        return ((data, scale, f32, Ptr("Int32", 4)), (Ptr("BFloat16"), f32), "i32")

    @cute.jit
    def __call__(self, inputs, outputs, tokens, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, outputs).launch(
            grid=(tokens, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, inputs, outputs):
        tid, _, _ = cute.arch.thread_idx()
        token, _, _ = cute.arch.block_idx()
        ptx.wait_for_previous_kernel()
        at = inputs[3].toint() + Int64(token) * (4 * self.slots)
        rows = [ptx.load_i32(at + 4 * j) for j in range(self.slots)]
        if tree(cutlass.max, rows) >= 0:
            g = None
            if cutlass.const_expr(self.quantised):
                g = ptx.load_f32(inputs[2].toint() + Int64(token) * self.gx_pitch)
            blocks = [swap_halves(b, tid) for b in self.read_token(inputs, token, tid)]
            for row in rows:
                if row >= 0:
                    self.store_row(outputs, row, g, blocks, tid)
        ptx.allow_next_kernel()

    def read_token(self, inputs, token, tid):
        """Eight words of bf16 for each of this thread's blocks; the loads are in flight
        together."""
        data = inputs[0].toint() + Int64(token) * self.data_pitch
        near = [
            cutlass.min(tid + i * self.threads, Int32(self.groups - 1)) for i in range(self.blocks)
        ]
        if not self.quantised:
            halves = [(data + b * 32, data + b * 32 + 16) for b in near]
            return [[w for a in pair for w in ptx.load_u32x4(a)] for pair in halves]
        scale = inputs[1].toint() + Int64(token) * self.scale_pitch
        codes = [ptx.load_u32x2(data + b * 8) for b in near]
        scales = [ptx.load_u8(scale + b) for b in near]
        return [decode_block(c, ptx.decode_e4m3(s)) for c, s in zip(codes, scales)]


def decode_block(codes, scale):
    """Two words of codes and a scale in fp32 -> eight words of bf16. The exponent and the fraction
    of a code at the top of those of an fp32 are its magnitude times 2^-126, zero and the subnormal
    included."""
    words = []
    for word in codes:
        values = []
        for j in range(8):
            sign = (word << (28 - 4 * j)) & Uint32(0x80000000)
            shifted = word << (22 - 4 * j) if 4 * j <= 22 else word >> (4 * j - 22)
            bits = sign | (shifted & Uint32(0x01C00000))
            values.append(ptx.mul(ptx.mul(bits.bitcast(Float32), Float32(2.0**126)), scale))
        words += [ptx.pack_bf16x2(a, b) for a, b in zip(values[::2], values[1::2])]
    return words


@dataclasses.dataclass(frozen=True)
class LeaveRows:
    """Rows of experts to their places on the way back: a thread owns eight columns of one received
    token, and the loads of all its slots are in flight together.

    hidden       columns, a multiple of 8
    top_k        slots of a token
    first_pitch  bytes from the ``first`` of one token to the next
    table_pitch  0: every rank has sent ``tokens`` tokens and takes ``room`` rows back. Else bytes
                 from one line of ``needed`` to the next: the ranks lie close behind one another

    o bf16 (R, hidden); token_rows int32 (N, top_k), -1 = no row; first int32, `exchange_book`;
    needed int64 (ranks, >= 2): tokens and slots that came from each rank; out bf16 (places,
    hidden).
    """

    hidden: int
    top_k: int
    first_pitch: int
    table_pitch: int = 0

    WIDTH = 8

    @property
    def name(self) -> str:
        kind = "close" if self.table_pitch else "fixed"
        return f"leave_rows_{kind}_h{self.hidden}_k{self.top_k}_p{self.first_pitch}"

    @property
    def arguments(self) -> tuple:
        i32, rows = Ptr("Int32", 4), Ptr("BFloat16")
        table = Ptr("Int64", 8) if self.table_pitch else None
        return ((rows, i32, i32, table), rows, ("i32", "i32", "i32"), "i32")

    @cute.jit
    def __call__(self, inputs, out, sizes, count, stream):
        threads, ctas = _spread(self.hidden // self.WIDTH)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, out, sizes).launch(
            grid=(count, ctas, 1), block=(threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, inputs, out, sizes):
        tid, _, _ = cute.arch.thread_idx()
        token, part, _ = cute.arch.block_idx()
        threads, _ = _spread(self.hidden // self.WIDTH)
        ptx.wait_for_previous_kernel()
        column = (part * threads + tid) * self.WIDTH
        if column < self.hidden:
            self.move_rows(inputs, out, sizes, token, column)
        ptx.allow_next_kernel()

    @cute.jit
    def move_rows(self, inputs, out, sizes, token, column):
        o, token_rows, first, table = inputs
        at = token_rows.toint() + Int64(token) * (4 * self.top_k)
        rows = [ptx.load_i32(at + 4 * j) for j in range(self.top_k)]
        if tree(cutlass.max, rows) >= 0:
            place = self.base_of(table, sizes, token)
            place += ptx.load_i32(first.toint() + Int64(token) * self.first_pitch)
            pieces = [load_if(o.toint(), row, self.hidden, column, "BFloat16") for row in rows]
            for row, piece in zip(rows, pieces):
                if row >= 0:
                    position = Int64(place) * self.hidden + column
                    ptx.store_u32x4(out.toint() + position * 2, piece)
                    place += 1

    @cute.jit
    def base_of(self, table, sizes, token):
        """First place of the rank that has sent the token."""
        ranks, tokens, room = sizes
        base = Int32(0)
        if cutlass.const_expr(self.table_pitch == 0):
            base = token // tokens * room
        else:
            upto = Int32(0)
            for rank in cutlass.range(ranks, unroll=8):
                line = table.toint() + Int64(rank) * self.table_pitch
                upto += ptx.load_i32(line)  # low words: counts are below 2^31
                if upto <= token:
                    base += ptx.load_i32(line + 8)
        return base
