"""The math namespace of activation formulas on torch tensors: fp32, each operation rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


class TorchMath:
    """See `cute_kernels.activations`. Inputs are fp32 tensors (any shape, any device) or Python
    floats.
    """

    def exp(self, x: Tensor) -> Tensor:
        return torch.exp(x)

    def tanh(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def erf(self, x: Tensor) -> Tensor:
        return torch.erf(x)

    def div(self, a: Tensor, b: Tensor) -> Tensor:
        return a / b

    def minimum(self, a: Tensor, b: float | Tensor) -> Tensor:
        return a.clamp(max=b)  # clamp keeps NaN

    def maximum(self, a: Tensor, b: float | Tensor) -> Tensor:
        return a.clamp(min=b)

    def fma(self, a: Tensor, b: float | Tensor, c: float | Tensor) -> Tensor:
        """a * b + c with one rounding to fp32.

        The product of two fp32 values is exact in fp64. Their sum with c is rounded to odd in fp64
        (Boldo and Melquiond 2008), which makes the final rounding to fp32 the only one that shows.
        """
        product = a.double() * _wide(b, a)
        addend = _wide(c, a).expand_as(product)
        total = product + addend
        virtual = total - product
        error = (product - (total - virtual)) + (
            addend - virtual
        )  # Knuth's TwoSum: total + error is exact
        bits = total.view(torch.int64)
        toward_zero = (error > 0) != (total > 0)  # the exact sum is nearer to zero than `total`
        odd = torch.where(toward_zero, bits - 1, bits) | 1
        sticky = (error != 0) & torch.isfinite(error)
        return torch.where(sticky, odd, bits).view(torch.float64).float()


def _wide(value: float | Tensor, like: Tensor) -> Tensor:
    """fp64 of the fp32 rounding of ``value``: constants reach a kernel as fp32."""
    if isinstance(value, Tensor):
        return value.float().double()
    return torch.full((), value, dtype=torch.float32, device=like.device).double()


TORCH_MATH = TorchMath()
