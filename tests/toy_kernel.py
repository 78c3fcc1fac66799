"""The smallest kernel with every kind of argument, for tests of the compile cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute

from cute_kernels.compile import Ptr


@dataclasses.dataclass(frozen=True)
class Toy:
    """out[i] = x[i] * factor + i for i < n."""

    threads: int = 32

    @property
    def name(self) -> str:
        return f"toy_t{self.threads}"

    @property
    def arguments(self) -> tuple[Any, ...]:
        return ((Ptr("Float32", 4), None), Ptr("Float32", 4), "i32", "f32", "i64")

    @cute.jit
    def __call__(self, inputs, out, n, factor, unused, stream):  # type: ignore[no-untyped-def]
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs[0], out, n, factor).launch(
            grid=((n + self.threads - 1) // self.threads, 1, 1),
            block=(self.threads, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x, out, n, factor):  # type: ignore[no-untyped-def]
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        i = cta * self.threads + tid
        if i < n:
            mX = cute.make_tensor(x, cute.make_layout(n))
            mOut = cute.make_tensor(out, cute.make_layout(n))
            mOut[i] = mX[i] * factor + cutlass.Float32(i)
