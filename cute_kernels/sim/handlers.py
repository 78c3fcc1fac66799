"""Which mnemonics are host instructions, and the handler of each."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from . import bulk, control, mma, sync, tcgen05, tensormap, tma, warp_mma, wgmma
from .checks import UnsupportedInstruction

Handler = Callable[..., Any]
TABLE: MappingProxyType[str, Handler] = MappingProxyType(
    {
        **sync.HANDLERS,
        **control.HANDLERS,
        **bulk.HANDLERS,
        **tensormap.HANDLERS,
        **tma.HANDLERS,
        "cp.async.bulk.prefetch.tensor": bulk.no_effect,
        **tcgen05.HANDLERS,
        **mma.HANDLERS,
        **warp_mma.HANDLERS,
        **wgmma.HANDLERS,
    }
)
_BASES = frozenset(
    (
        "mbarrier", "bar", "barrier", "fence", "membar", "griddepcontrol", "clusterlaunchcontrol",
        "nanosleep", "setmaxnreg", "prefetch", "prefetchu", "applypriority", "discard",
        "tensormap", "tcgen05", "mma", "wgmma",
    )
)  # fmt: skip


@lru_cache(maxsize=4096)
def is_host(base: str, mods: tuple[str, ...]) -> bool:
    """True for instructions that synchronise or start asynchronous work; the interpreter core does
    the others."""
    if base in ("cp", "st", "red"):
        return "async" in mods
    if base == "bar" and mods[:1] == ("warp",):
        return False
    return base in _BASES


@lru_cache(maxsize=4096)
def _lookup(base: str, mods: tuple[str, ...]) -> Handler | None:
    parts = [base, *mods]
    for count in range(len(parts), 0, -1):
        found = TABLE.get(".".join(parts[:count]))
        if found is not None:
            return found
    return None


def find_handler(instr: Any) -> Handler:
    """The handler of a host instruction: the one with the longest matching prefix of the mnemonic.

    Raises:
        UnsupportedInstruction: there is none.
    """
    handler = _lookup(instr.base, instr.mods)
    if handler is None:
        raise UnsupportedInstruction(f"instruction {instr.opcode} is not modelled")
    return handler
