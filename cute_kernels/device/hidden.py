"""Accumulators of the first GEMM to quantised rows of h, where h needs its whole row first.

    h = act(acc_gate * (gx alpha_gate) + b_gate, acc_up * (gx alpha_up) + b_up)
    g = max(amax(h) / 2688, 2^-100), or one g per expert;  codes and block scales as numerics
    section 2 has them

The GEMM's own epilogue does this when g is known beforehand; a tile does not hold a whole row.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.activations import Activation
from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.epilogues import scale_offset
from cute_kernels.device.math import DEVICE_MATH
from cute_kernels.device.quantize import (
    E2M1_UE4M3_MAX,
    GLOBAL_MIN,
    UE4M3_NAN,
    WARP,
    cta_max,
    tree,
)
from cute_kernels.device.sizes import BLOCK

VALUES = 8  # of h that a thread makes at a time: half a block, one word of codes
MAX_STEPS = 4  # pieces of a thread: what its registers hold


class HiddenInputs(NamedTuple):
    acc: Any
    offsets: Any
    row_token: Any
    alpha: Any
    gx: Any
    gh: Any
    bias: Any


class HiddenOutputs(NamedTuple):
    data: Any
    scale: Any
    gh: Any


@dataclasses.dataclass(frozen=True)
class QuantizeHidden:
    """One CTA per row; neighbouring threads share a block of 16 and keep h in registers between the
    row maximum and the codes, so accumulators are read once.

    inter       I, a multiple of 16
    activation  an `Activation`; P = 2 projections with a gate, else 1
    indexed     gx is per token and row_token int32 (R,) names the token of a row; else gx is (R,)
    given       gh fp32 (E,) is an input, else g comes from the row
    biased      bias fp32 (E, P*I), interleaved like the columns of acc
    hardware    cvt.e2m1x2 exists (sm_100); otherwise the same bits by integer arithmetic

    acc fp32 (R, P*I), columns g0, u0, g1, u1, ...; expert_offsets int32 (E+1,); alpha fp32 (E, P).
    data uint8 (R, I/2); scale UE4M3 SWIZZLE_32_4_4_GROUPED of I/16 groups padded to 4, bytes that
    pad K are 0, those of padding rows are not touched; gh fp32 (R,). Rows past expert_offsets[E]
    are neither read nor written.
    """

    inter: int
    activation: Activation
    indexed: bool = True
    given: bool = False
    biased: bool = False
    hardware: bool = True

    @property
    def parts(self) -> int:
        return 2 if self.activation.gated else 1

    @property
    def name(self) -> str:
        act = type(self.activation).__name__.lower()
        flags = {"indexed": self.indexed, "given": self.given, "bias": self.biased}
        return "_".join(["quantize", act, f"i{self.inter}", *(n for n, on in flags.items() if on)])

    @property
    def arguments(self) -> tuple:
        f32, i32 = Ptr("Float32", 4), Ptr("Int32", 4)
        inputs = HiddenInputs(
            Ptr("Float32"),
            i32,
            i32 if self.indexed else None,
            f32,
            f32,
            f32 if self.given else None,
            f32 if self.biased else None,
        )
        return (inputs, HiddenOutputs(Ptr("Uint8"), Ptr("Uint8"), f32), "i32", "i32")

    @property
    def pieces(self) -> int:
        """Pieces of `VALUES` columns in a row."""
        return self.inter // VALUES

    @property
    def steps(self) -> int:
        """Pieces per thread: as many as leave four warps. Few warps with much in flight beat many:
        0.93 of the copy rate against 0.77 with one piece (H200, I = 2048)."""
        return max(1, min(MAX_STEPS, self.pieces // 128))

    @property
    def threads(self) -> int:
        return -(-self.pieces // (self.steps * WARP)) * WARP

    @cute.jit
    def __call__(self, inputs, outputs, num_experts, rows, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, outputs, num_experts).launch(
            grid=(rows, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, inputs, outputs, num_experts):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        ptx.wait_for_previous_kernel()
        if row < ptx.load_i32(inputs.offsets.toint() + Int64(num_experts) * 4):
            self.quantize_row(inputs, outputs, num_experts, row, tid)
        ptx.allow_next_kernel()

    @cute.jit
    def quantize_row(self, inputs, outputs, num_experts, row, tid):
        words = self.load_row(inputs.acc.toint(), row, tid)  # (steps, VALUES * P)
        expert, sf_row = owner(inputs.offsets.toint(), num_experts, row)
        alphas = self.alphas(inputs, expert, row)
        h = [
            self.values(inputs, w, alphas, expert, self.piece(i, tid)) for i, w in enumerate(words)
        ]
        bits = [tree(cutlass.max, [v.bitcast(Uint32) & 0x7FFFFFFF for v in part]) for part in h]
        if cutlass.const_expr(self.given):
            g = ptx.load_f32(inputs.gh.toint() + Int64(expert) * 4)
        else:
            g = cta_max(tree(cutlass.max, bits), self.threads, tid).bitcast(Float32) / Float32(
                E2M1_UE4M3_MAX
            )
        g = cute.arch.fmax(g, Float32(GLOBAL_MIN), nan=True)
        c = Float32(1.0) / ptx.mul(g, Float32(6.0))
        if tid == 0:
            ptx.store_f32(outputs.gh.toint() + Int64(row) * 4, g)
        codes_row = outputs.data.toint() + Int64(row) * (self.inter // 2)
        for i in cutlass.range_constexpr(self.steps):
            other = Uint32(cute.arch.shuffle_sync_bfly(bits[i], 1))
            byte, codes = self.encode(h[i], cutlass.max(bits[i], other), g, c)
            piece = tid + i * self.threads
            if piece < self.pieces:
                ptx.store_u32(codes_row + piece * 4, codes)
                if piece % 2 == 0:
                    self.store_scale(outputs.scale.toint(), sf_row, piece // 2, byte)

    def piece(self, step, tid):
        """Piece of columns of this thread; past the row its last one again, which changes no
        maximum and is not stored."""
        piece = tid + step * self.threads
        if self.threads * self.steps > self.pieces:
            piece = cutlass.min(piece, Int32(self.pieces - 1))
        return piece

    def load_row(self, base, row, tid):
        """Accumulators of this thread's pieces; all loads are issued before the first use."""
        size = VALUES * self.parts * 4
        start = base + Int64(row) * (self.pieces * size)
        out = []
        for i in range(self.steps):
            address = start + self.piece(i, tid) * size
            loads = [ptx.load_u32x4(address + 16 * j) for j in range(size // 16)]
            out.append([w.bitcast(Float32) for load in loads for w in load])
        return out

    def alphas(self, inputs, expert, row):
        """gx * alpha of each projection."""
        index = row
        if self.indexed:
            index = ptx.load_i32(inputs.row_token.toint() + Int64(row) * 4)
        gx = ptx.load_f32(inputs.gx.toint() + Int64(index) * 4)
        base = inputs.alpha.toint() + Int64(expert) * (4 * self.parts)
        return [ptx.mul(gx, ptx.load_f32(base + 4 * p)) for p in range(self.parts)]

    def values(self, inputs, acc, alphas, expert, piece):
        """h of one piece, fp32."""
        width = VALUES * self.parts
        scaled = [ptx.mul(a, alphas[i % self.parts]) for i, a in enumerate(acc)]
        if self.biased:
            at = Int64(expert) * (self.inter * self.parts) + piece * width
            loads = [
                ptx.load_u32x4(inputs.bias.toint() + 4 * at + 16 * j) for j in range(width // 4)
            ]
            bias = [w.bitcast(Float32) for load in loads for w in load]
            scaled = [ptx.add(v, b) for v, b in zip(scaled, bias)]
        projections = [scaled[p :: self.parts] for p in range(self.parts)]
        return [self.activation(DEVICE_MATH, *pair) for pair in zip(*projections)]

    def encode(self, h, amax_bits, g, c):
        """(scale byte of the block, the word of codes of these eight values)."""
        raw = cute.arch.fmax(ptx.mul(amax_bits.bitcast(Float32), c), Float32(2.0**-9), nan=True)
        byte = ptx.encode_e4m3(cute.arch.fmin(raw, Float32(448.0), nan=True))
        r = Float32(1.0) / ptx.mul(ptx.decode_ue4m3(byte), g)
        encode = ptx.encode_e2m1x8 if self.hardware else ptx.encode_e2m1x8_integer
        codes = encode([ptx.mul(v, r) for v in h])
        # a NaN scale byte decodes as finite here; every code of its block is that of NaN
        return byte, ptx.select(byte == UE4M3_NAN, Uint32(0x77777777), codes)

    @cute.jit
    def store_scale(self, base, sf_row, group, byte):
        groups = self.inter // BLOCK
        padded = -(-groups // 4) * 4
        ptx.store_u8(base + scale_offset(sf_row, group, padded), byte)
        if group == groups - 1:
            for i in cutlass.range_constexpr(padded - groups):
                ptx.store_u8(base + scale_offset(sf_row, Int32(groups + i), padded), Uint32(0))


@cute.jit
def owner(offsets, num_experts, row):
    """(expert, sf_row) of a routed row: sf_row counts rows with every expert padded to 128.

    offsets  address of expert_offsets, int32 (num_experts + 1,); row < offsets[num_experts]. All
             lanes of the warp must be here; each looks at every 32nd expert.
    """
    passed = Int32(0)
    padded = Int32(0)
    for e in cutlass.range(cute.arch.lane_idx(), num_experts, WARP):
        first = ptx.load_i32(offsets + Int64(e) * 4)
        last = ptx.load_i32(offsets + Int64(e) * 4 + 4)
        if last <= row:
            passed += 1
            padded += (last - first + 127) // 128 * 128
    expert = ptx.redux_add_i32(passed)
    before = ptx.redux_add_i32(padded)
    return expert, before + row - ptx.load_i32(offsets + Int64(expert) * 4)
