"""Rows for a GEMM that multiplies bf16: routed rows rounded to bf16, or to NVFP4 and back.

    g = max(amax(row) / 2688, 2^-100);  s = e4m3(clamp(amax(block) / (6 g), 2^-9, 448))
    value = e2m1(x / (s g)) * s                  exact in bf16: at most 6 significant bits

with the reciprocals of numerics section 2: value * g is what `QuantizeRows` and a decoder give.
The rows lie expert-major, each read through its token once, so that the GEMM loads them with TMA.
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
    """One CTA per routed row; a thread owns blocks of 16 elements, as in `QuantizeRows`.

    hidden     K, a multiple of 16
    dtype      of x: 'BFloat16', 'Float16' or 'Float32'
    given      the outer scale is an input: one per expert (``by_expert``), else one for all
    weighted   x is multiplied by a weight per token first (fp32, rounded)
    quantised  to NVFP4 values; False: rounded to bf16, no scale is read or written
    indexed    routed row r is row row_token[r] of x; otherwise row r

    x (tokens, K); outer fp32 (experts,) or one element; weight fp32 (tokens,); row_token int32
    (rows,); expert_offsets int32 (experts + 1,): rows at and past its last entry are skipped;
    values bf16 (rows, K); gx fp32 (rows,).
    """

    quantised: bool = True
    indexed: bool = True
    by_expert: bool = False

    @property
    def name(self) -> str:
        scale = ("by_expert" if self.by_expert else "given") if self.given else "per_row"
        mode = scale if self.quantised else "bf16"
        kind = f"{mode}{'_weighted' if self.weighted else ''}{'_indexed' if self.indexed else ''}"
        return f"stage_rows_{kind}_h{self.hidden}_{self.dtype.lower()}"

    @property
    def arguments(self) -> tuple:
        f32, i32 = Ptr("Float32", 4), Ptr("Int32", 4)
        inputs = (
            Ptr(self.dtype),
            f32 if self.given else None,
            f32 if self.weighted else None,
            i32 if self.indexed else None,
            i32,
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
        offsets = inputs[4].toint()
        if row < ptx.load_i32(offsets + Int64(experts) * 4):
            self.stage_row(inputs, outputs, row, tid, experts)
        ptx.allow_next_kernel()

    @cute.jit
    def stage_row(self, inputs, outputs, row, tid, experts):
        x, outer, weight, row_token, offsets = inputs
        source = row
        if cutlass.const_expr(self.indexed):
            source = ptx.load_i32(row_token.toint() + Int64(row) * 4)
        words = self.load_row(x.toint(), source, tid)  # (blocks, words of a block)
        factor = None
        if cutlass.const_expr(self.weighted):
            factor = ptx.load_f32(weight.toint() + Int64(source) * 4)
        base = outputs[0].toint() + Int64(row) * (self.hidden * 2)
        if cutlass.const_expr(self.quantised):
            amaxes = [self.block_amax(w, factor) for w in words]
            if cutlass.const_expr(not self.given):
                amax = cta_max(tree(cutlass.max, amaxes), self.threads, tid)
                g = amax.bitcast(Float32) / Float32(E2M1_UE4M3_MAX)
            elif cutlass.const_expr(self.by_expert):
                expert = self.expert_of(row, offsets.toint(), experts)
                g = ptx.load_f32(outer.toint() + Int64(expert) * 4)
            else:
                g = ptx.load_f32(outer.toint())
            g = cute.arch.fmax(g, Float32(GLOBAL_MIN), nan=True)
            c = Float32(1.0) / ptx.mul(g, Float32(6.0))
            if tid == 0:
                ptx.store_f32(outputs[1].toint() + Int64(row) * 4, g)
            blocks = [
                self.round_block(self.elements(w, factor), a, g, c) for w, a in zip(words, amaxes)
            ]
        elif cutlass.const_expr(self.dtype == "BFloat16" and factor is None):
            blocks = words
        else:
            blocks = [self.pack(self.elements(w, factor)) for w in words]
        for i in cutlass.range_constexpr(self.blocks):
            block = tid + i * self.threads
            if block < self.groups:
                for half in cutlass.range_constexpr(2):
                    ptx.store_u32x4(
                        base + block * 32 + half * 16, blocks[i][4 * half : 4 * half + 4]
                    )

    def round_block(self, values, amax_bits, g, c):
        """8 words of bf16: the values of a block that NVFP4 has, without g."""
        raw = ptx.mul(amax_bits.bitcast(Float32), c)
        clamped = cute.arch.fmax(raw, Float32(2.0**-9), nan=True)
        byte = ptx.encode_e4m3(cute.arch.fmin(clamped, Float32(448.0), nan=True))
        scale = ptx.decode_ue4m3(byte)
        r = Float32(1.0) / ptx.mul(scale, g)
        scale = ptx.select(byte == UE4M3_NAN, Uint32(_NAN), scale.bitcast(Uint32)).bitcast(Float32)
        return self.pack([ptx.mul(round_e2m1(ptx.mul(v, r)), scale) for v in values])

    def pack(self, values):
        return [ptx.pack_bf16x2(a, b) for a, b in zip(values[::2], values[1::2])]

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
