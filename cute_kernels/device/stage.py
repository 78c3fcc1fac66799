"""Rows for a GEMM that multiplies bf16: routed rows rounded to bf16, or to NVFP4 and back.

    g = max(amax(row) / 2688, 2^-100);  s = e4m3(clamp(amax(block) / (6 g), 2^-9, 448))
    value = e2m1(x / (s g)) * s                  exact in bf16: at most 6 significant bits

with the reciprocals of numerics section 2: value * g is what `QuantizeRows` and a decoder give.
The rows lie expert-major, so that the GEMM loads them with TMA. Few tokens: a CTA per routed
row, which reads its token. Many: a CTA per token, which reads and rounds it once and writes all of
its rows.
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.quantize import (
    E2M1_UE4M3_MAX,
    GLOBAL_MIN,
    UE4M3_NAN,
    QuantizeRows,
    cta_max,
    tree,
)

_TWO22 = 2.0**22
_NAN = 0x7FC00000


@dataclasses.dataclass(frozen=True)
class StageRows(QuantizeRows):
    """One CTA per routed row or per token; a thread owns blocks of 16 elements, as in
    `QuantizeRows`.

    hidden     K, a multiple of 16
    dtype      of x: 'BFloat16', 'Float16' or 'Float32'
    given      the outer scale is an input: one per expert (``by_expert``), else one for all
    weighted   x is multiplied by a weight per token first (fp32, rounded)
    quantised  to NVFP4 values; False: rounded to bf16, no scale is read or written
    indexed    routed row r is row row_token[r] of x; otherwise row r
    slots      0: a CTA per routed row. Else a CTA per token t, which is written to the rows
               token_rows[t, :] of ``slots`` columns, those that are not negative

    x (tokens, K); outer fp32 (experts,) or one element; weight fp32 (tokens,); row_token int32
    (rows,); token_rows int32 (tokens, slots); expert_offsets int32 (experts + 1,), without
    ``slots``: rows at and past its last entry are skipped; values bf16 (rows, K); gx fp32 (rows,).
    """

    quantised: bool = True
    indexed: bool = True
    by_expert: bool = False
    slots: int = 0

    @property
    def name(self) -> str:
        scale = ("by_expert" if self.by_expert else "given") if self.given else "per_row"
        mode = scale if self.quantised else "bf16"
        kind = f"{mode}{'_weighted' if self.weighted else ''}{'_indexed' if self.indexed else ''}"
        kind += f"_to{self.slots}" if self.slots else ""
        return f"stage_rows_{kind}_h{self.hidden}_{self.dtype.lower()}"

    @property
    def arguments(self) -> tuple:
        f32, i32 = Ptr("Float32", 4), Ptr("Int32", 4)
        inputs = (
            Ptr(self.dtype),
            f32 if self.given else None,
            f32 if self.weighted else None,
            i32 if self.indexed else None,
            i32,  # token_rows or expert_offsets
        )
        return (inputs, (Ptr("BFloat16"), f32 if self.quantised else None), "i32", "i32")

    @cute.jit
    def __call__(self, inputs, outputs, rows, experts, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, outputs, experts).launch(
            grid=(rows, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, inputs, outputs, experts):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        ptx.wait_for_previous_kernel()
        at = inputs[4].toint()
        if cutlass.const_expr(self.slots > 0):
            at += Int64(row) * (4 * self.slots)
            rows = [ptx.load_i32(at + 4 * j) for j in range(self.slots)]
            if tree(cutlass.max, rows) >= 0:
                self.stage_token(inputs, outputs, row, rows, tid, experts)
        elif row < ptx.load_i32(at + Int64(experts) * 4):
            source = row
            if cutlass.const_expr(self.indexed):
                source = ptx.load_i32(inputs[3].toint() + Int64(row) * 4)
            self.stage_token(inputs, outputs, source, [row], tid, experts)
        ptx.allow_next_kernel()

    @cute.jit
    def stage_token(self, inputs, outputs, source, rows, tid, experts):
        """Row ``source`` of x to each of ``rows`` that is not negative."""
        x, outer, weight, _, offsets = inputs
        words = self.load_row(x.toint(), source, tid)  # (blocks, words of a block)
        factor = None
        if cutlass.const_expr(self.weighted):
            factor = ptx.load_f32(weight.toint() + Int64(source) * 4)
        g = None
        if cutlass.const_expr(self.quantised):
            amaxes = [self.block_amax(w, factor) for w in words]
            if cutlass.const_expr(not self.given):
                amax = cta_max(tree(cutlass.max, amaxes), self.threads, tid)
                g = amax.bitcast(Float32) / Float32(E2M1_UE4M3_MAX)
            elif cutlass.const_expr(self.by_expert):
                expert = self.expert_of(rows[0], offsets.toint(), experts)
                g = ptx.load_f32(outer.toint() + Int64(expert) * 4)
            else:
                g = ptx.load_f32(outer.toint())
            g, c = rounding_of(g)
            blocks = [
                self.pack(round_values(self.elements(w, factor), a, g, c))
                for w, a in zip(words, amaxes)
            ]
        elif cutlass.const_expr(self.dtype == "BFloat16" and factor is None):
            blocks = words
        else:
            blocks = [self.pack(self.elements(w, factor)) for w in words]
        blocks = [swap_halves(b, tid) for b in blocks]
        for row in rows:
            if row >= 0:
                self.store_row(outputs, row, g, blocks, tid)

    @cute.jit
    def store_row(self, outputs, row, g, blocks, tid):
        """A row and its outer scale; blocks as `swap_halves` leaves them."""
        if tid == 0:
            self.store_scale(outputs, row, g)
        base = outputs[0].toint() + Int64(row) * (self.hidden * 2) + tid % 2 * 16
        for i in cutlass.range_constexpr(self.blocks):
            first = tid // 2 * 2 + i * self.threads
            for j in cutlass.range_constexpr(2):
                if first + j < self.groups:
                    ptx.store_u32x4(base + (first + j) * 32, blocks[i][4 * j : 4 * j + 4])

    def store_scale(self, outputs, row, g):
        if self.quantised:
            ptx.store_f32(outputs[1].toint() + Int64(row) * 4, g)

    def pack(self, values):
        return pack_pairs(values)

    @cute.jit
    def expert_of(self, row, offsets, experts):
        """How many experts end at or before this row: a warp looks at 32 at a time."""
        lane, expert = cute.arch.lane_idx(), Int32(0)
        for first in cutlass.range(0, experts, 32, unroll=1):
            ended = cutlass.Boolean(False)
            if first + lane < experts:
                ended = ptx.load_i32(offsets + Int64(first + lane + 1) * 4) <= row
            expert += cute.arch.popc(cute.arch.vote_ballot_sync(ended))
        return expert


def pack_pairs(values):
    """fp32 -> bf16, two to a word, the first in the low half."""
    return [ptx.pack_bf16x2(a, b) for a, b in zip(values[::2], values[1::2])]


def usable_scale(g: Float32) -> Float32:
    """An outer scale as it is used: not too small for its reciprocal; NaN stays."""
    return cute.arch.fmax(g, Float32(GLOBAL_MIN), nan=True)


def rounding_of(g: Float32) -> tuple[Float32, Float32]:
    """(outer scale as it is used, factor of a block's amax): once per row or more."""
    g = usable_scale(g)
    return g, Float32(1.0) / ptx.mul(g, Float32(6.0))


def magnitude_bits(values) -> Uint32:
    """Bits of the largest magnitude of fp32 values. Compared as integers, so NaN wins."""
    return tree(cutlass.max, [v.bitcast(Uint32) & 0x7FFFFFFF for v in values])


def scale_byte(amax: Float32, c: Float32) -> Uint32:
    """UE4M3 scale of a block with that amax; ``c`` as `rounding_of` gives it. NaN: 0x7F."""
    clamped = cute.arch.fmax(ptx.mul(amax, c), Float32(2.0**-9), nan=True)
    return ptx.encode_e4m3(cute.arch.fmin(clamped, Float32(448.0), nan=True))


def block_factors(byte: Uint32, g: Float32) -> tuple[Float32, Float32]:
    """(what its elements are multiplied with before they are rounded, and after) of a block with
    that scale; the second is NaN for 0x7F."""
    scale = ptx.decode_ue4m3(byte)
    r = Float32(1.0) / ptx.mul(scale, g)
    nan = ptx.select(byte == UE4M3_NAN, Uint32(_NAN), scale.bitcast(Uint32))
    return r, nan.bitcast(Float32)


def round_elements(values, factors):
    """Values of one block, or some of them -> those that NVFP4 has, without g: fp32, exact in bf16.
    ``factors`` as `block_factors` gives them."""
    before, after = factors
    return [ptx.mul(round_e2m1(ptx.mul(v, before)), after) for v in values]


def round_values(values, amax_bits, g, c):
    """`round_elements` of values of a block of which ``amax_bits`` are the `magnitude_bits`."""
    byte = scale_byte(amax_bits.bitcast(Float32), c)
    return round_elements(values, block_factors(byte, g))


def swap_halves(block, tid):
    """8 words of a block -> 4 words of this thread's half (tid % 2) of the even block of a pair of
    threads, then 4 of the odd one: what two threads store together is 32 bytes, a whole sector."""
    odd = tid % 2 == 1
    out = [[], []]
    for low, high in zip(block[:4], block[4:]):
        other = cute.arch.shuffle_sync_bfly(ptx.select(odd, low, high), 1)
        out[0].append(ptx.select(odd, other, low))
        out[1].append(ptx.select(odd, high, other))
    return out[0] + out[1]


def round_e2m1(value: Float32) -> Float32:
    """The nearest E2M1 value in fp32, ties to even, saturating at 6, sign kept; NaN becomes 6 (the
    scale of its block is NaN).

    With m = 2^max(exponent, 0) of |value| <= 6, |value| + 2^22 m has steps of m/2 after rounding:
    the E2M1 grid at that exponent. Taking 2^22 m away again is exact.
    """
    magnitude = cute.arch.fmin(ptx.abs_f32(value), 6.0)
    binade = cute.arch.fmax(magnitude, 1.0).bitcast(Uint32) & 0x7F800000
    m = binade.bitcast(Float32)
    rounded = ptx.fma(m, Float32(-_TWO22), ptx.fma(m, Float32(_TWO22), magnitude))
    sign = value.bitcast(Uint32) & Uint32(0x80000000)
    return (rounded.bitcast(Uint32) | sign).bitcast(Float32)
