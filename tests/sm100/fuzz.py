"""`make fuzz`: the main configurations of the tcgen05 GEMM under 1,000 random schedules each, on
random shapes. Not collected by the test run: name the file.

    python -m pytest -n 2 tests/sm100/fuzz.py                    all
    python -m pytest tests/sm100/fuzz.py -k "decode and 17"      one problem again, 50 schedules
"""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from cute_kernels.activations import SwiGLU
from cute_kernels.config import GemmConfig
from tests.sm100.configs import MAIN, names
from tests.sm100.harness import (
    Data,
    Problem,
    activation_quantize,
    equal_bits,
    scatter_add,
    store_rows,
)

PROBLEMS, SCHEDULES = 20, 50


def problem(config: GemmConfig, number: int) -> tuple[Problem, GemmConfig, str]:
    """Shape, static or dynamic schedule, and epilogue of the ``number``-th problem."""
    r = random.Random(number)
    most = config.tile_rows + 2
    sizes = (0, 0, 1, r.randint(2, 40), r.randint(2, 40), config.tile_rows, most)
    counts = tuple(r.choice(sizes) for _ in range(r.randint(1, 4)))
    n = 32 * r.randint(1, (config.tile_columns + 96) // 32)
    shape = Problem(
        counts, n, 32 * r.randint(1, 14), gathered=r.random() < 0.5, biased=r.random() < 0.5,
        seed=number,
    )  # fmt: skip
    scheduled = dataclasses.replace(config, dynamic=r.random() < 0.25)
    return shape, scheduled, r.choice(("store", "store", "hidden", "scatter"))


@pytest.mark.parametrize("number", range(PROBLEMS))
@pytest.mark.parametrize("config", MAIN, ids=names)
def test_random_problem(config: GemmConfig, number: int) -> None:
    shape, config, epilogue = problem(config, number)
    data = Data(shape)
    first: tuple[torch.Tensor, ...] | None = None
    for seed in range(SCHEDULES):
        schedule = {"seed": 1000 * number + seed, "schedule": "random"}
        what = f"{shape}, {config.name}, {epilogue}, {schedule}"
        if epilogue == "hidden":
            got, want = activation_quantize(data, config, SwiGLU(), **schedule)
            # an ulp of torch's exp may flip a code; schedules may not
            same = (got.data == want.data).float().mean().item() if got.data.numel() else 1.0
            assert same > 0.98, what
            result = (got.data, got.scale)
        else:
            run = store_rows if epilogue == "store" else scatter_add
            out, want, *_ = run(data, config, **schedule)
            assert equal_bits(out, want), what
            result = (out,)
        first = first or result
        assert all(equal_bits(a, b) for a, b in zip(result, first, strict=True)), what
