"""Main loop for few tokens: every warp multiplies its own 16 weight rows with mma.sync.

A wgmma with A from registers takes 32 clocks however few tokens there are, and holds its warp: four
of them for 8 tokens take as long as the memory to deliver the 2304 bytes of their block.
mma.sync.m16n8k16 has the same fragments (A: R0..R3 of `layout`; accumulators: those of one warp of
the wgmma), takes a few clocks and needs neither fences nor waits, so a stage is released as soon as
it has been read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from cute_kernels.sm90 import layout
from cute_kernels.sm90.dequant import decode_step

ROW_BYTES = 2 * layout.BLOCK_K


@dataclasses.dataclass(frozen=True)
class WarpLoop:
    """steps k128 of one tile, for a `grouped_gemm.Sm90GroupedGemm`. Per k64: the rows of the tile
    once (ldmatrix), then per 128 weight rows 16 + 8 bytes of weights, decoded k16 by k16."""

    gemm: Any

    @cute.jit
    def __call__(
        self,
        n: cutlass.Constexpr,
        tidx: Int32,
        steps: Int32,
        stage: Int32,
        phase: Int32,
        shared: Any,
    ):
        """Returns (one accumulator of n / 2 registers per 128 weight rows, stage, phase)."""
        c = self.gemm.config
        thread, half = tidx % 128, cute.arch.make_warp_uniform(tidx // 128)
        lane = tidx % 32
        codes, scales = shared.codes[None, thread, None], shared.scales[None, thread // 4, None]
        accs = [cute.make_rmem_tensor((n // 2,), Float32) for _ in range(c.blocks64)]
        for acc in accs:
            acc.fill(0.0)
        # in a register, and unknown to the assembler: lop3 takes one immediate
        exponent = Uint32(layout.SCALE_EXPONENT) | Uint32(steps >> 30)
        # chunk h of row r lies at chunk h ^ r % 8: lane l points at row l % 8, chunk l / 8 of four
        rows = Int32(shared.rows.iterator.toint()) + lane % 8 * ROW_BYTES
        chunks = [((lane // 8 + 4 * h) ^ lane % 8) * 16 for h in range(2)]
        for _ in cutlass.range(steps * 2 // c.stage_k64, unroll=1):
            self.gemm.wait_full(shared, stage, phase)
            for k64 in cutlass.range_constexpr(c.stage_k64):
                slab = rows + (stage * c.stage_k64 + k64) * (c.max_tokens * ROW_BYTES)
                tokens = []  # per 8 tokens: registers of the four k16 steps, two each
                for t in cutlass.range_constexpr(n // 8):
                    at = slab + t * (8 * ROW_BYTES)
                    tokens.append([w for chunk in chunks for w in load_matrices(at + chunk)])
                blocks = [self._load(k64, m, stage, half, codes, scales) for m in range(c.blocks64)]
                if cutlass.const_expr(k64 == c.stage_k64 - 1):
                    self.gemm.release(stage, shared)
                for m in cutlass.range_constexpr(c.blocks64):
                    word, scale = blocks[m]
                    for k16 in cutlass.range_constexpr(4):
                        first = k16 // 2 * 2
                        pair = (word[first], word[first + 1])
                        a = decode_step(pair, scale[k16 // 2], exponent, k16 % 2)
                        for t in cutlass.range_constexpr(n // 8):
                            b = tokens[t][2 * k16 : 2 * k16 + 2]
                            values = multiply(a, b, [accs[m][4 * t + i] for i in range(4)])
                            for i in cutlass.range_constexpr(4):
                                accs[m][4 * t + i] = values[i]
            stage += 1
            if stage == c.num_stages:
                stage = Int32(0)
                phase ^= 1
        return accs, stage, phase

    def _load(self, k64: int, m: int, stage: Int32, half: Int32, codes: Any, scales: Any):
        word = cute.make_rmem_tensor((4,), Uint32)
        scale = cute.make_rmem_tensor((2,), Uint32)
        self.gemm.load_block(k64, m, stage, half, codes, scales, word, scale)
        return word, scale


def load_matrices(address: Int32) -> tuple[Uint32, ...]:
    """Four 8 x 8 matrices of bf16, one row address per lane."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def multiply(a: Any, b: Any, c: Any) -> tuple[Float32, ...]:
    """a (16 x 16, four registers) times b (16 x 8, two registers) plus c."""
    return cute.arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        "{{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )
