"""The small kernels, compiled for sm_100a, in the simulator.

The E2M1 conversion here is the instruction that an SM90 lacks, and every memory access is checked.
Bytes equal the plain PyTorch implementation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, ops
from tests.small_kernels import Case, assert_quantized, assert_same, guarded, plan

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)
SCHEDULES = [("lazy", 0), ("random", 1), ("random", 2)]


def simulate(operation: Any, *args: Any, schedule: str = "lazy", seed: int = 0) -> Any:
    """Result of the operation on CPU tensors, its kernels run in the simulator, buffers
    poisoned."""
    from cute_kernels.sim import Simulator

    torch.use_deterministic_algorithms(True)
    try:
        with Simulator(seed=seed, schedule=schedule) as s:
            out = operation(*args)
    finally:
        torch.use_deterministic_algorithms(False)
    assert s.launches, "nothing was launched: the plain implementation ran instead"
    return out


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("ctas", [1, 3])
def test_sort_routes(ctas: int, schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(45, experts=5, top_k=3, routing="holes", first=2)
    monkeypatch.setattr(ops, "ONE_CTA_PAIRS", 135 if ctas == 1 else 45)
    args = (*case.routes(), case.all_experts, case.first, case.experts, 7)
    got = simulate(ops.sort_routes, *args, schedule=schedule, seed=seed)
    for g, w, name in zip(got, plan(case, 7), ("offsets", "row_token", "row_weight", "token_rows")):
        assert_same(g, w, name)


@pytest.mark.parametrize("experts", [1, 33, 385])
def test_sort_routes_expert_counts(experts: int) -> None:
    case = Case(20, experts=experts, top_k=4, routing="holes", ids=torch.int32)
    got = simulate(ops.sort_routes, *case.routes(), case.all_experts, 0, experts)
    for g, w, name in zip(got, plan(case), ("offsets", "row_token", "row_weight", "token_rows")):
        assert_same(g, w, name)


@pytest.mark.parametrize("mode", ["per_token", "static", "weighted"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantize_rows(dtype: torch.dtype, mode: str) -> None:
    case = Case(17, hidden=352, experts=3, routing="holes", dtype=dtype)
    offsets, row_token, _, _ = plan(case)
    given: Tensor | str = torch.tensor([0.0123]) if mode == "static" else "per_token"
    weight = torch.rand(17) if mode == "weighted" else None
    args = (case.x(), guarded(offsets), guarded(row_token), given, weight)
    want = ops.quantize_rows(*args)
    assert_quantized(simulate(ops.quantize_rows, *args), want, offsets)


def test_quantize_rounding_boundaries() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = middles.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32)
    values = torch.cat(
        (near.view(torch.float32).reshape(-1), -near.view(torch.float32).reshape(-1))
    )
    x = torch.nn.functional.pad(values.reshape(-1, 14), (0, 2), value=6.0)
    offsets = torch.tensor([0, x.shape[0]], dtype=torch.int32)
    args = (x, offsets, None, torch.ones(1))
    assert_quantized(simulate(ops.quantize_rows, *args), ops.quantize_rows(*args), offsets)


@pytest.mark.parametrize("g", [1.0, 2.0**-100])
def test_quantize_every_bf16_pattern(g: float) -> None:
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    offsets = torch.tensor([0, 32], dtype=torch.int32)
    args = (patterns.reshape(32, 2048), offsets, None, torch.tensor([g]))
    assert_quantized(simulate(ops.quantize_rows, *args), ops.quantize_rows(*args), offsets)


@pytest.mark.parametrize("shared", [False, True])
def test_combine(shared: bool) -> None:
    case = Case(9, hidden=80, top_k=3, routing="holes")
    _, _, _, token_rows = plan(case)
    token_rows[4] = -1  # exactly +0, plus its shared row
    rows = torch.randn(27, 80).bfloat16()
    lost = torch.arange(9) % 4 == 1
    args = (rows, token_rows, case.routes()[1], case.x() if shared else None, torch.float32)
    assert_same(simulate(ops.combine, *args), ops.combine(*args), "y")
    y = simulate(ops.combine, *args, None, lost)
    assert_same(y, ops.combine(*args).masked_fill(lost[:, None], torch.nan), "y of lost tokens")


def test_permute_quantized_rows() -> None:
    case = Case(30, hidden=352, experts=4, routing="holes")
    offsets, row_token, _, _ = plan(case)
    q = nvfp4.quantize(case.x())
    args = (q.data, q.scale, q.global_scale, guarded(row_token), guarded(offsets))
    want = ops.permute_quantized_rows(*args)
    got = simulate(ops.permute_quantized_rows, *args)
    real = int(offsets[-1])
    assert (got[0][real:] == 255).all(), "rows past the last expert were written"
    whole = (
        torch.cat((got[0][:real], want[0][real:])),
        got[1],
        torch.cat((got[2][:real], want[2][real:])),
    )
    assert_quantized(whole, want, offsets)
