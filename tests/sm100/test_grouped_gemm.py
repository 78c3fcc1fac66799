"""The tcgen05 grouped GEMM in the simulator: exact results, identical bits over schedules."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import compile as compiler
from cute_kernels import nvfp4
from cute_kernels.activations import GeGLU, ReLU2, SwiGLU, SwiGLUOAI
from cute_kernels.config import GemmConfig
from cute_kernels.device.epilogues import StoreRows
from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
from cute_kernels.sm100.loads import ContiguousRows
from tests.sm100.configs import DECODE, MAIN, OTHER, names
from tests.sm100.harness import (
    Data,
    Problem,
    activation_quantize,
    equal_bits,
    scatter_add,
    store_rows,
)

# empty experts, one row, a row over a tile, K and N that are no multiple of a tile
RAGGED = (5, 0, 130, 1, 129)


@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("config", MAIN + OTHER, ids=names)
def test_every_configuration_is_exact_on_ragged_rows(config: GemmConfig, gathered: bool) -> None:
    data = Data(Problem(RAGGED, n=320, k=448, gathered=gathered))
    for seed, schedule in ((0, "lazy"), (1, "random")):
        out, want, _ = store_rows(data, config, seed=seed, schedule=schedule)
        assert equal_bits(out, want)


@pytest.mark.parametrize("counts", [(0, 0, 0), (1,), (127,), (128,), (129,), (0, 257, 0)], ids=str)
def test_row_counts_around_the_tile(counts: tuple[int, ...]) -> None:
    data = Data(Problem(counts, n=128, k=256))
    for config in (GemmConfig(1, 128), GemmConfig(2, 128), DECODE):
        out, want, _ = store_rows(data, config, seed=3, schedule="random")
        assert equal_bits(out, want)


@pytest.mark.parametrize("config", [GemmConfig(1, 128), DECODE], ids=names)
@pytest.mark.parametrize("dtype", ["BFloat16", "Float16", "Float32"])
def test_output_types_and_biases(dtype: str, config: GemmConfig) -> None:
    data = Data(Problem((3, 40), n=192, k=256, biased=True))
    out, want, _ = store_rows(data, config, dtype, seed=1, schedule="random")
    assert equal_bits(out, want)


@pytest.mark.parametrize(
    "activation", [SwiGLU(), SwiGLU(10.0), SwiGLUOAI(), GeGLU(), ReLU2()], ids=repr
)
@pytest.mark.parametrize("config", [GemmConfig(1, 128), GemmConfig(2, 256), DECODE], ids=names)
def test_activation_and_quantiser_give_the_reference_bytes(
    config: GemmConfig, activation: object
) -> None:
    data = Data(Problem((5, 0, 130, 1), n=352, k=320, gathered=True, biased=True, seed=2))
    got, want = activation_quantize(data, config, activation, seed=2, schedule="random")
    # exp and division of the device are simulated correctly rounded, torch's differ by an ulp
    # now and then: a code may flip on a tie, a scale byte hardly ever
    differ = (nvfp4.unpack(got.data) != nvfp4.unpack(want.data)).float().mean().item()
    assert differ < 1e-3, f"{differ:.2e} of the codes differ"
    scales = got.row_major_scale().view(torch.uint8) != want.row_major_scale().view(torch.uint8)
    assert scales.float().mean().item() < 1e-3
    groups = want.data.shape[1] * 2 // nvfp4.BLOCK
    rows, columns = got.scale.shape
    plain = nvfp4.unswizzle(got.scale.view(torch.uint8), rows, columns)
    real = plain[nvfp4.grouped_rows(data.offsets, len(want.data))]
    assert not real[:, groups:].any(), "bytes that pad K must be 0"


def test_a_wrong_expectation_is_noticed() -> None:
    data = Data(Problem((3, 5), n=128, k=256))
    out, want, _ = store_rows(data, GemmConfig(1, 128), seed=0, schedule="lazy")
    want[4, 16:32] = 0
    assert not equal_bits(out, want)


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16"])
@pytest.mark.parametrize("config", MAIN, ids=names)
def test_scatter_add_in_every_plan(config: GemmConfig, dtype: str) -> None:
    data = Data(Problem((5, 0, 70, 1), n=272, k=192, biased=True))
    for seed in range(2):
        got, want = scatter_add(data, config, dtype, seed=seed, schedule="random")
        assert equal_bits(got, want)


@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("config", MAIN, ids=names)
def test_hidden_rows_in_every_plan(config: GemmConfig, gathered: bool) -> None:
    """The bytes of the plain path, whatever the tiles; one activation for all, see above."""
    data = Data(Problem((5, 0, 70, 1), n=544, k=192, gathered=gathered, seed=3))
    got, want = activation_quantize(data, config, SwiGLU(), seed=1, schedule="random")
    differ = nvfp4.unpack(got.data) != nvfp4.unpack(want.data)
    assert differ.float().mean().item() < 1e-3


def test_one_compile_serves_every_shape() -> None:
    config, epilogue = GemmConfig(1, 128), StoreRows("Float32", row_scaled=True)
    compiler.load(Sm100GroupedGemm(ContiguousRows(), epilogue, config), "sm_100a")
    before = compiler.stats()
    for n, k, counts in ((128, 256, (4,)), (64, 64, (1, 2)), (400, 96, (130, 3))):
        out, want, _ = store_rows(Data(Problem(counts, n, k)), config, seed=0, schedule="lazy")
        assert equal_bits(out, want)
    assert compiler.stats().compiles == before.compiles
