"""What the compiler makes of the kernels: instructions, registers, names. Nothing is run."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest

from cute_kernels import compile as compiler
from cute_kernels.activations import ReLU2, SwiGLU, SwiGLUOAI
from cute_kernels.config import GemmConfig
from cute_kernels.device.epilogues import ActivationQuantize, StoreRows
from cute_kernels.device.scatter import ScatterAdd
from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
from cute_kernels.sm100.loads import ContiguousRows, GatheredRows
from tests.sm100.configs import DECODE, MAIN, names

REGISTERS = 65536  # of an SM: of a CTA, as no second one fits
FOUR = GemmConfig(2, 256, columns=2)

KERNELS = [
    (GatheredRows(), ActivationQuantize(SwiGLU()), GemmConfig(1, 128)),
    (GatheredRows(), ActivationQuantize(SwiGLUOAI(), biased=True), GemmConfig(2, 256)),
    (GatheredRows(), ActivationQuantize(SwiGLU()), FOUR),
    (ContiguousRows(), StoreRows(), FOUR),
    (ContiguousRows(), StoreRows(), MAIN[-1]),
    (GatheredRows(), ActivationQuantize(SwiGLU()), DECODE),
    (ContiguousRows(), ActivationQuantize(ReLU2(), indexed=False), DECODE),
    (ContiguousRows(), StoreRows(row_scaled=True, biased=True), DECODE),
    (ContiguousRows(), ScatterAdd(), DECODE),
]


@functools.cache
def dump(load: Any, epilogue: Any, config: GemmConfig, arch: str = "sm_100a") -> Any:
    return compiler.dump(Sm100GroupedGemm(load, epilogue, config), arch, sass=True)


@pytest.mark.parametrize("load, epilogue, config", KERNELS, ids=lambda x: x.name)
def test_instructions_and_registers(load: Any, epilogue: Any, config: GemmConfig) -> None:
    kernel, code = Sm100GroupedGemm(load, epilogue, config), dump(load, epilogue, config)
    mma = re.findall(r"tcgen05\.mma\.\S+", code.ptx)
    sizes = 4 if config.decode else 1  # of N, chosen at run time
    assert len(mma) == config.tile_k // 64 * sizes
    group = f"cta_group::{config.ctas}"
    assert all(f"{group}.kind::mxf4nvf4.block_scale.block16" in m for m in mma)
    assert len(re.findall(r"tcgen05\.cp\.\S+32x128b", code.ptx)) == config.sf_columns // 4
    assert kernel.name in code.ptx
    assert ".local" not in code.ptx
    if code.sass is not None:
        assert not re.search(r"\b(LDL|STL)\b", code.sass), "local memory"
        used = max(int(r) for r in re.findall(r"\bR(\d+)\b", code.sass)) + 1
        assert used <= REGISTERS // kernel.threads // 8 * 8


@pytest.mark.parametrize("load, epilogue, config", KERNELS, ids=lambda x: x.name)
def test_loads_are_multicast_where_ctas_share_a_tile(
    load: Any, epilogue: Any, config: GemmConfig
) -> None:
    loads = re.findall(r"cp\.async\.bulk\.tensor\S+", dump(load, epilogue, config).ptx)
    gathers = [x for x in loads if "gather4" in x]
    others = [x for x in loads if "gather4" not in x]
    many = [x for x in gathers if "multicast::cluster" in x]
    assert len(many) == (len(gathers) if config.columns > 1 else 0)
    rows = 0
    if isinstance(load, GatheredRows):
        rows = (16 if config.decode else 32 // config.columns) // 4
    assert len(gathers) == rows
    # scales of the N side go to both CTAs of a pair; M codes and scales to all columns
    shared = sum("multicast::cluster" in x for x in others)
    tiles_of_m = 1 if rows else 2
    assert shared == (config.ctas == 2) + (tiles_of_m if config.columns > 1 else 0)


@pytest.mark.parametrize("arch", ["sm_100f", "sm_103a"])
@pytest.mark.parametrize("load, epilogue, config", [KERNELS[2], KERNELS[4]], ids=lambda x: x.name)
def test_other_targets(load: Any, epilogue: Any, config: GemmConfig, arch: str) -> None:
    code, base = dump(load, epilogue, config, arch), dump(load, epilogue, config)
    assert f".target {arch}" in code.ptx
    assert code.ptx.count("tcgen05.mma") == base.ptx.count("tcgen05.mma")
    if code.sass is not None:
        assert not re.search(r"\b(LDL|STL)\b", code.sass), "local memory"


def test_names() -> None:
    assert names(DECODE) == "decode_128x64x256_c1"
    assert names(FOUR) == "256x256x256_c4rows"
