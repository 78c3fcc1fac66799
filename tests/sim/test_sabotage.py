"""Every synchronisation of a right kernel, left out one at a time, is noticed by the simulator.

Noticed: an error, or a wrong result, in at least one schedule; the whole kernel passes all of
them (test_specimens.py and `test_whole_kernels_pass` below). NOT_NOTICED lists what is known to
escape, with the reason: an entry that starts to be noticed fails, so that the list stays true.
"""

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl to compile kernels")
pytest.importorskip("numba", reason="needs numba to execute them")

from tests.sim import programs, sabotage

SCHEDULES = 8
NOT_NOTICED: dict[str, str] = {}

GEMM_CASES = {label: case for label, case, _ in sabotage.gemm_cases()}
SMALL_CASES = [(name, omit) for name, omits in programs.SMALL_OMISSIONS.items() for omit in omits]


@pytest.mark.parametrize("case", [sabotage.GEMM, sabotage.PAIR, sabotage.QUAD], ids=str)
def test_whole_kernels_pass(case: programs.GemmCase) -> None:
    outcome = sabotage.observe(programs.gemm(case), SCHEDULES)
    assert set(outcome.counts) == {sabotage.RIGHT}, outcome.example


@pytest.mark.parametrize("label", GEMM_CASES)
def test_gemm_sabotage_is_noticed(label: str) -> None:
    outcome = sabotage.observe(programs.gemm(GEMM_CASES[label]), SCHEDULES)
    if label in NOT_NOTICED:
        assert not outcome.detected, f"now noticed: {outcome}"
    else:
        assert outcome.detected, f"{label}: {outcome}"


@pytest.mark.parametrize(("name", "omit"), SMALL_CASES)
def test_small_sabotage_is_noticed(name: str, omit: str) -> None:
    outcome = sabotage.observe(programs.SMALL[name](omit), SCHEDULES)
    if f"{name}:{omit}" in NOT_NOTICED:
        assert not outcome.detected, f"now noticed: {outcome}"
    else:
        assert outcome.detected, f"{name} without {omit}: {outcome}"
