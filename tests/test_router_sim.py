"""The router's kernels, compiled for sm_100a, in the simulator: the bits of the torch router."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import ops, router_ops, torch_router
from cute_kernels.torch_router import Selection
from moe.router import router_logits
from tests.router_cases import hostile, hostile_logits, router_weight, selections
from tests.small_kernels import assert_same
from tests.test_small_kernels_sim import SCHEDULES, simulate

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, **options: Any) -> None:
    packed = router_ops.pack_weights(weight)
    got = simulate(router_ops.router_logits, x, packed, bias, **options)
    assert_same(got, router_logits(x, weight, bias), "logits")


def use_tiles(patch: pytest.MonkeyPatch, split: int) -> None:
    patch.setattr(router_ops, "FEW_TOKENS", 0)
    patch.setattr(router_ops, "best_split", lambda *_: split)


# ---- few tokens: 16 tokens x 16 experts, columns over a cluster


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "experts"), [(1, 64, 8), (19, 72, 10), (16, 648, 33)])
def test_few(tokens: int, hidden: int, experts: int, dtype: torch.dtype) -> None:
    bias = torch.randn(experts) if experts % 2 else None
    check_logits(hostile(tokens, hidden, dtype), router_weight(experts, hidden), bias)


@pytest.mark.parametrize("hidden", [7168, 2**14])
def test_few_of_a_large_hidden(hidden: int) -> None:
    check_logits(hostile(5, hidden, torch.bfloat16), router_weight(9, hidden))


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_few_in_any_order(schedule: str, seed: int) -> None:
    x, weight = hostile(7, 520, torch.bfloat16), router_weight(10, 520)
    check_logits(x, weight, torch.randn(10), schedule=schedule, seed=seed)


# ---- more: tiles of 64 tokens x 64 experts, columns over a cluster or one after another


@pytest.mark.parametrize("split", [8, 2, 1])
@pytest.mark.parametrize(
    ("tokens", "hidden", "experts", "dtype"),
    [
        (17, 64, 8, torch.bfloat16),
        (70, 200, 30, torch.float32),
        (65, 392, 70, torch.float16),
    ],
)
def test_tiles(
    tokens: int,
    hidden: int,
    experts: int,
    dtype: torch.dtype,
    split: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_tiles(monkeypatch, split)
    check_logits(hostile(tokens, hidden, dtype), router_weight(experts, hidden))


@pytest.mark.parametrize("columns", [1, 2])
def test_tiles_of_experts_in_turn(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One CTA does all of them, or every other one."""
    use_tiles(monkeypatch, 1)
    monkeypatch.setattr(router_ops, "best_columns", lambda *_: columns)
    check_logits(hostile(20, 96, torch.bfloat16), router_weight(200, 96), torch.randn(200))


@pytest.mark.parametrize("split", [8, 1])
@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:])
def test_tiles_in_any_order(
    schedule: str, seed: int, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_tiles(monkeypatch, split)
    x, weight = hostile(30, 264, torch.bfloat16), router_weight(70, 264)
    check_logits(x, weight, schedule=schedule, seed=seed)


def test_largest_sums_do_not_overflow() -> None:
    """Every digit near its limit, over all the columns that are allowed."""
    x = torch.full((1, 2**14), 2.0 - 2.0**-23)
    weight = torch.full((1, 2**14), -(1.0 - 2.0**-22))
    check_logits(x, weight)
    check_logits(-x, weight)


# ---- top-k


def check_topk(logits: Tensor, how: Selection, *rest: Any) -> None:
    got = simulate(router_ops.router_topk, logits, how, *rest)
    for g, w, name in zip(got, torch_router.select(logits, how, *rest), ("ids", "weights")):
        assert_same(g, w, name)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        (experts, how)
        for experts, top_k in ((1, 1), (10, 3), (64, 6), (256, 8))
        for how in selections(experts, top_k)
    ],
    ids=lambda p: f"{p[0]}-{p[1].scoring}-{p[1].num_groups}-{p[1].renormalize}",
)
def test_topk(how: tuple[int, Selection], biased: bool) -> None:
    bias = torch.randn(how[0]) if biased else None
    check_topk(hostile_logits(35, how[0]), how[1], bias)


def test_topk_of_all_experts_and_of_many() -> None:
    check_topk(hostile_logits(18, 32), Selection(32, "sigmoid", renormalize=False))
    check_topk(hostile_logits(18, 390), Selection(9, "softmax"))


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_topk_by_token_id(integer: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    table = torch.stack([torch.randperm(30, generator=g)[:4] for _ in range(11)]).to(integer)
    last = 5 if integer == torch.int32 else 3 - 2**32  # negative, and 3 in its low word
    ids = torch.tensor([0, -1, 10, 3, 9, -(2**31), last]).to(integer)
    check_topk(hostile_logits(7, 30), Selection(4, "sqrtsoftplus", factor=1.5), None, table, ids)


def test_strided_biases() -> None:
    """A column of a table: kernels get an address and read what follows it."""
    bias = torch.randn(10, 3)[:, 1]
    assert bias.stride() == (3,)
    check_logits(hostile(5, 64, torch.bfloat16), router_weight(10, 64), bias)
    check_topk(hostile_logits(5, 10), Selection(3, "sigmoid"), bias)


# ---- one kernel after another: each is launched before the one in front of it has ended


def route(rows: Tensor, token_rows: Tensor, packed: Any, how: Selection) -> tuple[Tensor, ...]:
    x = ops.combine(rows, token_rows)  # the layer before
    logits = router_ops.router_logits(x, packed)
    ids, weights = router_ops.router_topk(logits, how)
    return x, logits, ids, weights, *ops.sort_routes(ids, weights, 40, 0, 40)


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize("few", [True, False])
def test_kernels_wait_for_each_other(
    few: bool, schedule: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not few:
        use_tiles(monkeypatch, 2)
    g = torch.Generator().manual_seed(seed)
    rows, weight = torch.randn(18, 136, generator=g).bfloat16(), torch.randn(40, 136, generator=g)
    token_rows, how = torch.randperm(18, generator=g).int().view(9, 2), Selection(3)
    packed = router_ops.pack_weights(weight)
    got = simulate(route, rows, token_rows, packed, how, schedule=schedule, seed=seed)
    x = ops.combine(rows, token_rows)
    logits = router_logits(x, weight)
    ids, weights = torch_router.select(logits, how)
    assert len(ids.unique()) > 3, "old bytes must not choose the same"
    want = (x, logits, ids, weights, *ops.sort_routes(ids, weights, 40, 0, 40))
    names = ("x", "logits", "ids", "weights", "offsets", "row_token", "row_weight", "token_rows")
    for a, b, name in zip(got, want, names, strict=True):
        assert_same(a, b, name)
