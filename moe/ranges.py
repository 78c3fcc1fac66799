"""Named ranges around the stages of the layer, for profilers; nothing unless one asks for them.

    with ranges.emit(torch.cuda.nvtx.range):                  # Nsight Systems, Nsight Compute
        layer(x)
    with torch.profiler.profile(), ranges.emit(torch.profiler.record_function):
        layer(x)

Without `emit` a range costs one look-up of a context variable, about 0.1 us; nothing is read from
the environment. Ranges mark the time in which the host *launches* a stage; profilers attribute its
kernels to it.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import torch

STAGES = ("moe.route", "moe.quantize", "moe.l1", "moe.l2", "moe.combine")

Factory = Callable[[str], Any]  # name -> context manager

# Of the calling context (thread or task), not of the process: two layers may differ.
_factory: contextvars.ContextVar[Factory | None] = contextvars.ContextVar("ranges", default=None)
_NOTHING = contextlib.nullcontext()


@contextlib.contextmanager
def emit(factory: Factory) -> Iterator[None]:
    """Inside, every stage of a layer runs in ``factory(name)``, name one of `STAGES`."""
    token = _factory.set(factory)
    try:
        yield
    finally:
        _factory.reset(token)


def stage(name: str) -> Any:
    """Context manager around the launches of one stage."""
    if torch.compiler.is_compiling():  # a graph has no host ranges
        return _NOTHING
    factory = _factory.get()
    return _NOTHING if factory is None else factory(name)
