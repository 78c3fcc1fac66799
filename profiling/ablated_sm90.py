"""The Hopper kernel with parts left out: its results are wrong, its times say what it waits for."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32
from cutlass.cute.nvgpu import warpgroup

from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm
from profiling.ablate_sm90 import PARTS


@dataclasses.dataclass(frozen=True)
class AblatedGemm(Sm90GroupedGemm):
    """``keep``: some of `ablate_sm90.PARTS`, at least one. For configurations that multiply four
    k16 steps in one go (burst 4); tiles, epilogue and stores stay.

    without loads     nothing is loaded, no stage is waited for or given back
    without decode    code words XOR scales go into the fragments as they are
    without products  one wgmma of four, with the four k16 steps XORed, so that all of them are
                      decoded

    Raises ValueError for another ``keep`` or configuration.
    """

    keep: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        if not self.keep or not set(self.keep) <= set(PARTS):
            raise ValueError(f"keep must name one or more of {PARTS}, got {self.keep}")
        if self.config.burst != 4:
            raise ValueError(
                f"config {self.config.name} multiplies {self.config.burst} k16 step at a time; "
                "parts can be left out of those that multiply four (trio, duo, prefill)"
            )

    @property
    def name(self) -> str:
        return f"{super().name}_only_{'_'.join(self.keep)}"

    def load_stages(self, *args: Any) -> Any:
        *_, state = args  # (stage, phase)
        return Sm90GroupedGemm.load_stages(self, *args) if "loads" in self.keep else state

    def wait_full(self, *args: Any) -> None:
        if "loads" in self.keep:
            Sm90GroupedGemm.wait_full(self, *args)

    def release(self, *args: Any) -> None:
        if "loads" in self.keep:
            Sm90GroupedGemm.release(self, *args)

    @cute.jit
    def _decode(
        self, k16: cutlass.Constexpr, word: Any, scale: Any, exponent: Uint32, fragment: Any
    ):
        if cutlass.const_expr("decode" in self.keep):
            Sm90GroupedGemm._decode(self, k16, word, scale, exponent, fragment)
        else:
            registers = cute.recast_tensor(fragment, Uint32)
            for i in cutlass.range_constexpr(4):
                registers[4 * k16 + i] = word[i] ^ scale[i % 2]

    @cute.jit
    def _multiply(
        self, steps: cutlass.Constexpr, mma: Any, acc: Any, fragment: Any, tB: Any, slab: Int32
    ):
        if cutlass.const_expr("products" not in self.keep):
            r = cute.recast_tensor(fragment, Uint32)
            for i in cutlass.range_constexpr(4):
                r[i] = r[i] ^ r[i + 4] ^ r[i + 8] ^ r[i + 12]
            warpgroup.fence()
            cute.gemm(mma, acc, fragment[None, None, 0], tB[None, None, 0, slab], acc)
            warpgroup.commit_group()
        else:
            Sm90GroupedGemm._multiply(self, steps, mma, acc, fragment, tB, slab)
