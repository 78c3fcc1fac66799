"""Launches of our SM100 kernel for `profiling.specimens`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cute_kernels import compile as compiler
from cute_kernels import nvfp4
from cute_kernels.activations import SwiGLU
from cute_kernels.config import GemmConfig
from cute_kernels.device.epilogues import ActivationQuantize, StoreRows
from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
from cute_kernels.sm100.loads import ContiguousRows


def config_of(specimen: Any) -> GemmConfig:
    """The `GemmConfig` that a specimen names."""
    s = specimen
    return GemmConfig(s.tile_m // 128, s.tile_n, s.pairs, columns=s.columns, decode=s.decode)


def launcher(specimen: Any) -> Callable[[], None]:
    """A function that runs the kernel once on zeros; all CTAs of ``specimen.ctas`` at a time."""
    s, config = specimen, config_of(specimen)
    one = torch.ones(2)
    offsets = torch.tensor([0, s.rows], dtype=torch.int32)
    rows = torch.zeros(s.rows, s.k // 2, dtype=torch.uint8)
    scale = torch.zeros(nvfp4.grouped_scale_rows(s.rows, 1), -(-s.k // 64) * 4, dtype=torch.uint8)
    weights = torch.zeros(1, s.n, s.k // 2, dtype=torch.uint8)
    weight_scale = torch.zeros(-(-s.n // 128) * 128, -(-s.k // 64) * 4, dtype=torch.uint8)
    row_scale = torch.ones(s.rows)
    epilogue: Any = StoreRows("BFloat16", row_scaled=True)
    out = [torch.empty(s.rows, s.n, dtype=torch.bfloat16), one, row_scale]
    if s.output == "fp4":
        epilogue = ActivationQuantize(SwiGLU(), indexed=False)
        shape = (nvfp4.grouped_scale_rows(s.rows, 1), -(-s.n // 128) * 4)
        codes = torch.empty(s.rows, s.n // 4, dtype=torch.uint8)
        out = [codes, torch.empty(shape, dtype=torch.uint8), one, row_scale, one]
    kernel = compiler.load(Sm100GroupedGemm(ContiguousRows(), epilogue, config), "sm_100a")
    kept = [rows, scale, weights, weight_scale, offsets, *out]

    def launch() -> None:
        kernel(
            rows.data_ptr(), scale.data_ptr(), s.rows, scale.shape[0],
            *(t.data_ptr() for t in kept[2:]), 1, s.n, s.k, s.ctas // config.cluster, 0,
        )  # fmt: skip

    return launch
