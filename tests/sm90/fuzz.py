"""`make fuzz`: every configuration of the Hopper GEMM under 300 random schedules, on random shapes.
Not collected by the test run: name the file.

    python -m pytest -n 2 tests/sm90/fuzz.py                    all
    python -m pytest tests/sm90/fuzz.py -k "duo and 4"          one problem again, 50 schedules
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels.sm90 import config as configs
from tests import check
from tests.sm90.test_decode_sim import Problem, simulate
from tests.sm90.test_finish_sim import Sum
from tests.sm90.test_gemm_sim import CONFIGS

ALL = {"decode": configs.DECODE, **CONFIGS}
PROBLEMS, SCHEDULES = 6, 50


def problem(config: configs.Sm90Config, number: int) -> tuple[Problem, dict[str, Any], Tensor]:
    """Shape, parts of the operation, and what comes out, of the ``number``-th problem."""
    from cute_kernels.sim import Checks

    r = random.Random(number)
    most = config.max_tokens
    sizes = (0, 0, 1, r.randint(2, most), r.randint(2, most), most + 3)
    counts = (*(r.choice(sizes) for _ in range(r.randint(1, 3))), r.randint(1, most))
    shape = Problem(counts, 16 * r.randint(1, 17), 16 * r.randint(2, 70))
    parts: dict[str, Any] = {"dtype": r.choice((torch.bfloat16, torch.float32))}
    want = shape.want()
    if r.random() < 0.5:
        parts["activation"] = Sum()
        want = want[:, ::2] + 2 * want[:, 1::2]
    if r.random() < 0.5:
        where = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(number))
        x = torch.full((2 * len(where), shape.k), float("nan"), dtype=torch.bfloat16)
        x[2 * where] = shape.x()
        # rows that nobody stores are not loaded
        checks = Checks(cp_async_fence=True, uninitialised=False)
        parts |= {"x": x, "row_token": (2 * where).int(), "checks": checks}
    return shape, parts, want.float().to(parts["dtype"])


@pytest.mark.parametrize("number", range(PROBLEMS))
@pytest.mark.parametrize("name", ALL)
def test_random_problem(name: str, number: int) -> None:
    shape, parts, want = problem(ALL[name], number)
    for seed in range(SCHEDULES):
        out = simulate(shape, ALL[name], "random", 1000 * number + seed, **parts)
        check.assert_bytes_equal(out, want, f"{shape}, {name}, {parts}, seed {seed}")
