"""Activations of an expert: small frozen objects whose formula is written once, over a math
namespace.

A formula is a method ``__call__(m, gate, up)`` in fp32. ``m`` is
`cute_kernels.torch_math.TorchMath` on tensors or the device's namespace inside a kernel; both offer

    m.exp(x) m.tanh(x) m.erf(x) m.div(a, b) m.minimum(a, b) m.maximum(a, b) m.fma(a, b, c)

with NaN kept by minimum and maximum. ``+ - *`` are the operators themselves, each rounded once;
write ``m.fma(a, b, c)`` where a sum of a product is meant: a device compiler fuses ``a * b + c``
anyway, and both sides must round alike.

Your own activation needs no kernel change:

    @dataclasses.dataclass(frozen=True)
    class GELU(Activation):
        gated = False
        def __call__(self, m, gate, up=None):
            half = 0.5 * gate
            return m.fma(half, m.erf(gate * 0.70710678), half)
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import math
from typing import Any, ClassVar, Protocol


class MathNamespace(Protocol):
    """What a formula may use; values are fp32 tensors or device scalars."""

    def exp(self, x: Any) -> Any: ...
    def tanh(self, x: Any) -> Any: ...
    def erf(self, x: Any) -> Any: ...
    def div(self, a: Any, b: Any) -> Any: ...
    def minimum(self, a: Any, b: Any) -> Any: ...
    def maximum(self, a: Any, b: Any) -> Any: ...
    def fma(self, a: Any, b: Any, c: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Activation:
    """Base class. ``gated``: the expert has a gate and an up projection; otherwise ``up`` is None
    and ``gate`` is the single projection. The repr is part of a kernel's cache key: keep every
    parameter a field."""

    gated: ClassVar[bool] = True

    def __call__(self, m: MathNamespace, gate: Any, up: Any = None) -> Any:
        raise NotImplementedError(
            f"{type(self).__name__} has no formula: define __call__(self, m, gate, up)"
        )


def silu(m: MathNamespace, x: Any) -> Any:
    """x / (1 + exp(-x))."""
    return m.div(x, 1.0 + m.exp(-x))


def _check_limit(limit: float | None, owner: str) -> None:
    if limit is not None and not 0.0 < limit < math.inf:
        raise ValueError(f"{owner} limit must be positive and finite, got {limit}")


@dataclasses.dataclass(frozen=True)
class SwiGLU(Activation):
    """silu(gate) * up. With ``limit`` c (DeepSeek-V4: 10): gate = min(gate, c), up = clamp(up, -c,
    c) *before* the product; the gate is not clamped from below."""

    limit: float | None = None

    def __post_init__(self) -> None:
        _check_limit(self.limit, "SwiGLU")

    def __call__(self, m: MathNamespace, gate: Any, up: Any = None) -> Any:
        if self.limit is not None:
            gate = m.minimum(gate, self.limit)
            up = m.maximum(m.minimum(up, self.limit), -self.limit)
        return silu(m, gate) * up


@dataclasses.dataclass(frozen=True)
class SwiGLUOAI(Activation):
    """(up + 1) * gate * sigmoid(alpha * gate) with gate = min(gate, limit), up = clamp(up, -limit,
    limit) (gpt-oss).
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __post_init__(self) -> None:
        _check_limit(self.limit, "SwiGLUOAI")

    def __call__(self, m: MathNamespace, gate: Any, up: Any = None) -> Any:
        gate = m.minimum(gate, self.limit)
        up = m.maximum(m.minimum(up, self.limit), -self.limit)
        return (up + 1.0) * m.div(gate, 1.0 + m.exp(gate * -self.alpha))


@dataclasses.dataclass(frozen=True)
class GeGLU(Activation):
    """gelu_tanh(gate) * up, gelu_tanh(x) = x/2 * (1 + tanh(sqrt(2/pi) * (x + 0.044715 x^3)))
    (Hendrycks and Gimpel 2016).
    """

    def __call__(self, m: MathNamespace, gate: Any, up: Any = None) -> Any:
        k = math.sqrt(2.0 / math.pi)
        inner = gate * m.fma(gate * gate, 0.044715 * k, k)
        half = 0.5 * gate
        return m.fma(half, m.tanh(inner), half) * up


@dataclasses.dataclass(frozen=True)
class ReLU2(Activation):
    """max(x, 0)^2, not gated (Nemotron; So et al. 2021)."""

    gated: ClassVar[bool] = False

    def __call__(self, m: MathNamespace, gate: Any, up: Any = None) -> Any:
        positive = m.maximum(gate, 0.0)
        return positive * positive


BUILT_IN: dict[str, type[Activation]] = {c.__name__: c for c in (SwiGLU, SwiGLUOAI, GeGLU, ReLU2)}


def spec(activation: Activation) -> tuple[str, list[float]]:
    """What `from_spec` turns back into an equal object: an operator's arguments are strings and
    numbers. Numbers are apart, since a traced program may not know their values. Raises ValueError
    for a class that cannot be imported by name."""
    cls = type(activation)
    if "<locals>" in cls.__qualname__:
        raise ValueError(
            f"{cls.__qualname__} is defined inside a function and cannot be found by name, as the "
            "kernels need: define it at the top level of a module"
        )
    kinds, numbers = {}, []
    for field in dataclasses.fields(activation):
        value = getattr(activation, field.name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            kinds[field.name] = ("int" if isinstance(value, int) else "float", None)
            numbers.append(float(value))
        else:
            kinds[field.name] = ("literal", value)
    return f"{cls.__module__}:{cls.__qualname__}:{kinds!r}", numbers


@functools.cache
def spec_of(activation: Activation) -> tuple[str, tuple[float, ...]]:
    """`spec`, made once per object."""
    text, numbers = spec(activation)
    return text, tuple(numbers)


@functools.cache
def class_of(text: str) -> type[Activation]:
    """Class of the activation that `spec` described."""
    module, name, _ = text.split(":", 2)
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    if not isinstance(found, type) or not issubclass(found, Activation):
        raise ValueError(f"{module}.{name} is no Activation")
    return found


@functools.cache
def from_spec(text: str, numbers: tuple[float, ...]) -> Activation:
    """Inverse of `spec`. Raises ValueError for a field that is neither a number nor a literal."""
    cls, fields = class_of(text), text.split(":", 2)[2]
    try:
        kinds = ast.literal_eval(fields)
    except (ValueError, SyntaxError) as error:
        raise ValueError(
            f"fields of {cls.__name__} must be numbers, strings, None or tuples of these, got "
            f"{fields}"
        ) from error
    rest = iter(numbers)
    make = {"int": lambda _: int(next(rest)), "float": lambda _: next(rest)}
    values = {n: make.get(kind, lambda v: v)(value) for n, (kind, value) in kinds.items()}
    return cls(**values)
