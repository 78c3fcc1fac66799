"""The end of the SM90 kernel alone: accumulators come from memory instead of from wgmma."""

import dataclasses
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8

from cute_kernels.compile import Ptr
from cute_kernels.sm90.config import Sm90Config
from cute_kernels.sm90.epilogues import StoreRows
from cute_kernels.sm90.finish import whole_k_finish
from cute_kernels.sm90.scheduler import Tile


class Out(NamedTuple):
    out: Any
    weight_rows: Any


@dataclasses.dataclass(frozen=True)
class Finish:
    """One tile of one CTA. acc fp32 (blocks64, N / 2, threads): register v of each consumer."""

    epilogue: StoreRows
    config: Sm90Config

    @property
    def name(self) -> str:
        return f"finish_{self.config.name}_{self.epilogue.name}_n{self.config.max_tokens}"

    @property
    def threads(self) -> int:
        return 128 * self.config.warpgroups

    @property
    def arguments(self) -> tuple[Any, ...]:
        out = Out(Ptr(self.epilogue.dtype, 16), "i32")
        return Ptr("Float32", 4), out, self.epilogue.arguments, "i32", "i32", "i32"

    @cute.jit
    def __call__(self, acc, args, epilogue_args, expert, row0, tokens, stream):  # type: ignore[no-untyped-def]
        self.kernel.set_name_prefix(self.name)
        self.kernel(acc, args, epilogue_args, expert, row0, tokens).launch(
            grid=(1, 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, acc, args, epilogue_args, expert, row0, tokens):  # type: ignore[no-untyped-def]
        tidx, _, _ = cute.arch.thread_idx()
        n, c = self.config.max_tokens, self.config
        accs = self.load(acc, tidx)
        staging = cute.arch.alloc_smem(Uint8, c.warpgroups * c.staging_bytes, alignment=1024)
        tile = Tile(expert, Int32(0), row0, tokens, Int32(0), Int32(0))
        finish, address = whole_k_finish(self.epilogue, c), Int32(staging.toint())
        finish(n, accs, tidx, args, epilogue_args, None, tile, address)

    def load(self, acc, tidx):  # type: ignore[no-untyped-def]
        c, registers = self.config, self.config.max_tokens // 2
        mAcc = cute.make_tensor(acc, cute.make_layout(c.blocks64 * registers * self.threads))
        accs = []
        for m in range(c.blocks64):
            rAcc = cute.make_rmem_tensor(cute.make_layout(registers), Float32)
            for v in range(registers):
                rAcc[v] = mAcc[(m * registers + v) * self.threads + tidx]
            accs.append(rAcc)
        return accs
