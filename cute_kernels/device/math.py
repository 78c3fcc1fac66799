"""The math namespace of activation formulas on the device; see `cute_kernels.activations`.

exp is ex2.approx of x * log2(e) and div multiplies by rcp.approx: each within 2 ulp (PTX ISA 9.1),
one instruction of the special function unit. Everything else is rounded once.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32

from cute_kernels.device import ptx

LOG2_E = math.log2(math.e)


class DeviceMath:
    """fp32 device scalars in, fp32 device scalars out."""

    def exp(self, x):
        return cute.math.exp2(ptx.mul(Float32(x), Float32(LOG2_E)), fastmath=True)

    def tanh(self, x):
        return cute.math.tanh(Float32(x), fastmath=True)

    def erf(self, x):
        return cute.math.erf(Float32(x))

    def div(self, a, b):
        return Float32(a) * cute.arch.rcp_approx(Float32(b))

    def minimum(self, a, b):
        return cute.arch.fmin(Float32(a), Float32(b), nan=True)

    def maximum(self, a, b):
        return cute.arch.fmax(Float32(a), Float32(b), nan=True)

    def fma(self, a, b, c):
        return ptx.fma(Float32(a), Float32(b), Float32(c))


DEVICE_MATH = DeviceMath()
