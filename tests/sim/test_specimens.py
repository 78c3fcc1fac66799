"""Specimens end to end: right values and the same bits under every schedule, and no report."""

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")
pytest.importorskip("numba", reason="needs numba to execute them")

from tests.sim import programs
from tests.sim.programs import GemmCase

GEMMS = [
    GemmCase(m=128, n=128, k=256),
    GemmCase(m=256, n=256, k=512),
    GemmCase(m=128, n=256, k=512, tile_k=128, num_ab_stage=3),
    GemmCase(m=128, n=512, k=512, tile_n=256),
    GemmCase(m=256, n=128, k=768, cluster_m=2),
    GemmCase(m=256, n=256, k=512, pair=True),
    GemmCase(m=256, n=512, k=256, tile_n=256, pair=True, num_ab_stage=3),
    GemmCase(m=512, n=256, k=512, pair=True, cluster_m=4),
]


def check_all_schedules(program: programs.Program, count: int) -> None:
    """Right results, and the same bits, under `count` schedules."""
    first = None
    for seed, policy in programs.schedules(count):
        program.run(seed, policy)
        assert program.mismatch() is None, f"{program.mismatch()} ({policy}, seed {seed})"
        bits = program.bits()
        first = first or bits
        assert all(torch.equal(a, b) for a, b in zip(first, bits)), (policy, seed)


@pytest.mark.parametrize("case", GEMMS, ids=str)
def test_gemm(case: GemmCase) -> None:
    check_all_schedules(programs.gemm(case), 6)


@pytest.mark.parametrize("name", programs.SMALL)
def test_small_kernel(name: str) -> None:
    check_all_schedules(programs.SMALL[name](), 12)


def test_the_comparison_sees_one_element() -> None:
    program = programs.gemm(GEMMS[0])
    program.run(0, "lazy")
    assert program.mismatch() is None
    (out,) = program.outputs
    for row, column in ((0, 0), (127, 127), (64, 1)):
        kept = out[row, column].item()
        out[row, column] = kept + 0.25
        assert program.mismatch() is not None
        out[row, column] = float("nan")
        assert program.mismatch() is not None
        out[row, column] = kept
    out[:, 16:32] = 0
    assert program.mismatch() is not None


def test_outputs_are_poisoned_before_a_run() -> None:
    program = programs.SMALL["row_sum"]()
    program.call = lambda: None
    program.run(0, "lazy")
    assert program.mismatch() is not None


def test_two_runs_of_one_seed_are_the_same_run() -> None:
    program = programs.gemm(GEMMS[5])
    first, second = program.run(7, "random"), program.run(7, "random")
    for one, other in zip(first.launches, second.launches, strict=True):
        assert one.counters.warps == other.counters.warps  # waits included
        assert one.counters.waits_by == other.counters.waits_by
