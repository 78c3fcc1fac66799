"""The decode plan: weights on M, rows on N. It gives the bits of the prefill plan."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import nvfp4
from cute_kernels.activations import GeGLU, ReLU2, SwiGLU
from cute_kernels.config import GemmConfig
from tests.sm100.configs import DECODE
from tests.sm100.harness import Data, Problem, activation_quantize, equal_bits, store_rows

# every number of row boxes, tiles that begin in the upper half of a scale tile, empty experts
COUNTS = (1, 15, 16, 0, 17, 47, 64, 65, 130)


@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
def test_rows_from_one_to_several_tiles(gathered: bool) -> None:
    data = Data(Problem(COUNTS, n=272, k=320, gathered=gathered, biased=True))
    for seed in range(3):
        out, want, _ = store_rows(data, DECODE, seed=seed, schedule="random")
        assert equal_bits(out, want)


@pytest.mark.parametrize("activation", [SwiGLU(10.0), GeGLU(), ReLU2()], ids=repr)
def test_both_plans_quantise_to_the_same_bytes(activation: object) -> None:
    data = Data(Problem((3, 0, 33, 70), n=352, k=256, gathered=True, biased=True, seed=5))
    a, _ = activation_quantize(data, DECODE, activation, seed=1, schedule="random")
    b, _ = activation_quantize(data, GemmConfig(1, 128), activation, seed=1, schedule="random")
    assert torch.equal(a.data, b.data)
    rows, columns = a.scale.shape
    real = nvfp4.grouped_rows(data.offsets, sum(data.problem.counts))
    scales = [nvfp4.unswizzle(x.scale.view(torch.uint8), rows, columns)[real] for x in (a, b)]
    assert torch.equal(*scales)  # with those that pad K


@pytest.mark.parametrize("activation", [SwiGLU(), ReLU2()], ids=repr)
@pytest.mark.parametrize("spoilt", [float("nan"), float("inf")], ids=str)
def test_a_spoilt_row_stays_alone(activation: object, spoilt: float) -> None:
    """NaN and Inf in the scale of one token, against the prefill plan."""
    results = []
    for config in (DECODE, GemmConfig(1, 128)):
        data = Data(Problem((5, 20), n=96, k=256, seed=6))
        clean, _ = activation_quantize(data, config, activation, seed=0, schedule="lazy")
        data.gx[7] = spoilt
        data.inputs.clear()  # one of them has just changed
        got, _ = activation_quantize(data, config, activation, seed=0, schedule="lazy")
        others = torch.arange(25) != 7
        assert torch.equal(got.data[others], clean.data[others])
        scales = [x.row_major_scale().view(torch.uint8) for x in (got, clean)]
        assert torch.equal(scales[0][others], scales[1][others])
        results.append((got.data, scales[0]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_few_rows_load_few_bytes() -> None:
    """16 rows of an expert are one box of rows per K tile, 64 are four."""
    loaded = {}
    for rows in (1, 16, 17, 64):
        data = Data(Problem((rows,), n=128, k=256))
        _, _, launch = store_rows(data, DECODE, seed=0, schedule="lazy")
        loaded[rows] = launch.counters.total()["tma_load_bytes"]
    assert loaded[1] == loaded[16] == DECODE.fixed_bytes + DECODE.step_bytes
    assert loaded[17] == DECODE.fixed_bytes + 2 * DECODE.step_bytes
    assert loaded[64] == DECODE.stage_bytes
