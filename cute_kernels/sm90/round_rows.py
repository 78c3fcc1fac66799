"""Rows quantised to NVFP4 and decoded at once: what Hopper multiplies where Blackwell multiplies
codes.

    value = code * float(block scale)      exact in bf16; the outer scale g goes to the epilogue
"""

from __future__ import annotations

import dataclasses

import cutlass.cute as cute
from cutlass import Float32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.quantize import BLOCK, UE4M3_NAN, QuantizeRows


@dataclasses.dataclass(frozen=True)
class RoundRows(QuantizeRows):
    """`QuantizeRows` with the same choices and the same codes and scales, bit for bit, but each
    code is stored as code * float(block scale).

    x (rows, K); outer, weight, limit as there; values bf16 (rows, K); gx fp32 (rows,).
    """

    hardware: bool = False

    @property
    def name(self) -> str:
        return super().name.replace("quantize", "round")

    @property
    def arguments(self) -> tuple:
        inputs, _, *sizes = super().arguments
        return (inputs, (Ptr("BFloat16"), Ptr("Float32", 4)), *sizes)

    @cute.jit
    def store_block(self, outputs, row, block, byte, codes):
        out, _ = outputs
        # the decoder takes the byte of NaN for a number
        scale = ptx.select(byte == UE4M3_NAN, Float32(float("nan")), ptx.decode_ue4m3(byte))
        values = [v for word in codes for v in decode(word, scale)]
        pairs = [ptx.pack_bf16x2(a, b) for a, b in zip(values[::2], values[1::2])]
        at = out.toint() + Int64(row) * (self.hidden * 2) + Int64(block) * (BLOCK * 2)
        if block < self.groups:
            ptx.store_u32x4(at, pairs[:4])
            ptx.store_u32x4(at + 16, pairs[4:])


def decode(word: Uint32, scale: Float32) -> list[Float32]:
    """Eight codes times their scale. Magnitude bits at 24..22 of a fp32 are the value times
    2^-126; both products are exact."""
    values = []
    for i in range(8):
        shifted = word >> (4 * i)
        bits = ((shifted & 8) << 28) | ((shifted & 7) << 22)
        values.append(ptx.mul(ptx.mul(bits.bitcast(Float32), Float32(2.0**126)), scale))
    return values
