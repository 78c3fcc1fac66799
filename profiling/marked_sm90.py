"""The Hopper kernel with ranges around its phases, for the DSL's in-kernel event tracing (iket).

The DSL strips iket operations unless it is told otherwise (`iket profile` does that for the program
it starts): compiled as usual, this is the kernel it derives from, instruction by instruction. What
stands between two ranges of a consumer warp is the end of a tile: accumulators to memory, then the
wait for the next tile.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cutlass.cute.experimental import iket

from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm
from cute_kernels.sm90.loads import ContiguousRows
from cute_kernels.sm90.scheduler import TokenSplit


@dataclasses.dataclass(frozen=True)
class MarkedSplit(TokenSplit):
    """Finding a tile is a range."""

    def find(self, *args: Any) -> Any:
        iket.range_push("find tile")
        found = TokenSplit.find(self, *args)
        iket.range_pop()
        return found


@dataclasses.dataclass(frozen=True)
class MarkedRows(ContiguousRows):
    """Issuing the copies of one stage of rows is a range."""

    def copy_fn(self, *args: Any) -> Any:
        copy = ContiguousRows.copy_fn(self, *args)

        def marked(*where: Any) -> None:
            iket.range_push("issue rows")
            copy(*where)
            iket.range_pop()

        return marked


@dataclasses.dataclass(frozen=True)
class MarkedGemm(Sm90GroupedGemm):
    """Loading a tile, multiplying it, and waiting for a stage in between are ranges."""

    @property
    def name(self) -> str:
        return f"{super().name}_marked"

    @property
    def split(self) -> TokenSplit:
        return MarkedSplit(self.config.max_tokens, self.config.token_step)

    def load_stages(self, *args: Any) -> Any:
        iket.range_push("load tile")
        state = Sm90GroupedGemm.load_stages(self, *args)
        iket.range_pop()
        return state

    def mainloop(self, *args: Any) -> Any:
        iket.range_push("main loop")
        result = Sm90GroupedGemm.mainloop(self, *args)
        iket.range_pop()
        return result

    def wait_full(self, *args: Any) -> None:
        iket.range_push("wait ab_full")
        Sm90GroupedGemm.wait_full(self, *args)
        iket.range_pop()
