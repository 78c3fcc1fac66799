"""The routing plan against a loop over (token, slot) pairs, and the sizes of what follows from
it."""

from __future__ import annotations

import dataclasses
import doctest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import moe.plan
from cute_kernels import nvfp4
from moe import ExpertWeights, MoEConfig, RoutingPlan, make_plan
from moe.experts import row_expert, scratch_buffers

GUARD = 0x7FFFFFFF


def test_the_worked_example_of_the_docstring() -> None:
    result = doctest.testmod(moe.plan)
    assert result.attempted >= 6 and result.failed == 0


@dataclasses.dataclass(frozen=True)
class PlanByHand:
    expert_offsets: list[int]
    row_token: list[int]
    row_weight: list[float]
    token_rows: list[list[int]]


def plan_by_hand(
    ids: Tensor, weights: Tensor, num_experts: int, first: int = 0, local: int | None = None
) -> PlanByHand:
    """Expert by expert, tokens in order, slots in order."""
    local = num_experts - first if local is None else local
    tokens, slots = ids.shape
    offsets, row_token, row_weight = [0], [], []
    token_rows = [[-1] * slots for _ in range(tokens)]
    for e in range(first, first + local):
        for t in range(tokens):
            for k in range(slots):
                if int(ids[t, k]) == e and 0 <= e < num_experts:
                    token_rows[t][k] = len(row_token)
                    row_token.append(t)
                    row_weight.append(float(weights[t, k]))
        offsets.append(len(row_token))
    pad = tokens * slots - len(row_token)
    return PlanByHand(offsets, row_token + [-1] * pad, row_weight + [0.0] * pad, token_rows)


def assert_plan(plan: RoutingPlan, want: PlanByHand) -> None:
    assert plan.expert_offsets.dtype == plan.row_token.dtype == torch.int32
    assert plan.token_rows.dtype == torch.int32 and plan.row_weight.dtype == torch.float32
    assert plan.expert_offsets.tolist() == want.expert_offsets
    assert plan.row_token.tolist() == want.row_token
    assert plan.row_weight.tolist() == want.row_weight
    assert plan.token_rows.tolist() == want.token_rows


def random_routing(tokens: int, top_k: int, experts: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(seed * 1000 + tokens)
    draw = torch.rand(tokens, experts, generator=gen)
    return draw.argsort(dim=-1)[:, :top_k].int(), torch.rand(tokens, top_k, generator=gen)


def test_h05_every_token_count_up_to_257() -> None:
    """H05: every pair exactly once, rows of an expert contiguous, combine undoes permute."""
    for tokens in range(1, 258):
        ids, weights = random_routing(tokens, 2, 8)
        plan = make_plan(ids, weights, 8)
        assert_plan(plan, plan_by_hand(ids, weights, 8))
        rows = plan.token_rows.flatten()
        assert sorted(rows.tolist()) == list(range(2 * tokens))
        assert torch.equal(plan.row_token[rows.long()], torch.arange(tokens).repeat_interleave(2))
        assert torch.equal(row_expert(plan)[rows.long()], ids.flatten().long())


def offsets_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


@pytest.mark.parametrize(
    ("counts", "total"),
    [
        ((1, 127, 129, 0, 128), 640),  # rounding the sum 385 would give 512
        ((1,) * 8, 1024),
        ((0, 0, 0), 0),
        ((128, 128), 256),
        ((0, 4096, 0), 4096),
    ],
)
def test_h05_scale_rows_are_padded_per_expert(counts: tuple[int, ...], total: int) -> None:
    """H05: sum of ceil(c / 128) * 128, which the buffer size must cover."""
    offsets = nvfp4.grouped_scale_offsets(offsets_of(list(counts)))
    assert offsets.dtype == torch.int32
    assert offsets[-1] == total
    starts = [sum(-(-c // 128) * 128 for c in counts[:e]) for e in range(len(counts) + 1)]
    assert offsets.tolist() == starts
    assert nvfp4.grouped_scale_rows(sum(counts), len(counts)) >= total


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40))
@settings(deadline=None, max_examples=200)
def test_h36_grouped_scale_rows_are_enough_for_every_split(counts: list[int]) -> None:
    """H36: the bound from T*k and E alone; never more than 127 rows per used expert too many."""
    rows = sum(counts)
    bound = nvfp4.grouped_scale_rows(rows, len(counts))
    assert bound % 128 == 0
    assert sum(-(-c // 128) * 128 for c in counts) <= bound
    assert bound <= rows + 127 * min(len(counts), rows)


def test_h36_the_bound_is_reached() -> None:
    """H36: T=64, top-8, E=8: a remainder of 1 in every expert needs the whole bound; it cannot be
    smaller."""
    counts = [1] * 8
    assert nvfp4.grouped_scale_rows(8, 8) == 1024
    assert sum(-(-c // 128) * 128 for c in counts) == 1024
    spread = [129] * 3 + [125]  # 512 rows on 4 experts
    assert sum(-(-c // 128) * 128 for c in spread) == 896
    assert nvfp4.grouped_scale_rows(512, 4) == 896


def test_h06_minus_one_is_nobody() -> None:
    """H06: -1 does not wrap to the last expert."""
    ids = torch.tensor([[0, -1], [-1, -1], [3, 7]], dtype=torch.int32)
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]])
    plan = make_plan(ids, weights, 8)
    assert plan.expert_offsets.tolist() == [0, 1, 1, 1, 2, 2, 2, 2, 3]
    assert plan.token_rows.tolist() == [[0, -1], [-1, -1], [1, 2]]
    assert plan.row_token.tolist() == [0, 2, 2, -1, -1, -1]
    assert plan.row_weight.tolist() == [0.75, 0.5, 0.5, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("bad", [-1, 8, 2**31 - 1, -(2**31)])
def test_h07_a_batch_of_padding(dtype: torch.dtype, bad: int) -> None:
    """H07: no row for anybody; every id outside 0..E-1 counts as padding."""
    ids = torch.full((16, 6), bad, dtype=dtype)
    plan = make_plan(ids, torch.full((16, 6), 1 / 6), 8)
    assert plan.expert_offsets.tolist() == [0] * 9
    assert plan.row_token.tolist() == [-1] * 96
    assert plan.row_weight.tolist() == [0.0] * 96
    assert plan.token_rows.tolist() == [[-1] * 6] * 16


@pytest.mark.parametrize("bad", [2**32 - 1, 2**32 + 3, 2**63 - 1, -(2**63), -(2**32)])
def test_ids_beyond_32_bits_are_not_truncated(bad: int) -> None:
    ids = torch.tensor([[bad, 3]], dtype=torch.int64)
    plan = make_plan(ids, torch.ones(1, 2), 8, first_expert=2, num_local_experts=6)
    assert plan.token_rows.tolist() == [[-1, 0]]
    assert plan.expert_offsets.tolist() == [0, 0, 1, 1, 1, 1, 1]


def test_h08_int64_equals_int32_and_other_types_are_refused() -> None:
    """H08: one TypeError that names what is accepted."""
    ids, weights = torch.tensor([[5, 2], [7, 0], [-1, 3]]), torch.rand(3, 2)
    want = plan_by_hand(ids, weights, 8)
    for dtype in (torch.int32, torch.int64):
        assert_plan(make_plan(ids.to(dtype), weights, 8), want)
    for dtype in (torch.uint32, torch.int16, torch.uint8, torch.float32, torch.bool):
        with pytest.raises(TypeError, match="int32 or int64"):
            make_plan(ids[:2].to(dtype), weights[:2], 8)


def test_h09_strided_ids_and_weights() -> None:
    """H09: slices of wider tensors, transposed ones, and expanded ones equal their copies."""
    wide_ids = (torch.arange(64).reshape(8, 8) % 8).int()
    wide_weights = torch.rand(8, 8)
    cases = [
        (wide_ids[:, :2], wide_weights[:, :2]),
        (wide_ids[:, 3:5], wide_weights[:, 6:]),
        (wide_ids.t()[:8, :2], wide_weights.t()[:8, :2]),
        (wide_ids[::2, ::3], wide_weights[::2, ::3]),
        (wide_ids[:1, :2].expand(8, 2), wide_weights[:1, :2].expand(8, 2)),
    ]
    for ids, weights in cases:
        assert not (ids.is_contiguous() and weights.is_contiguous())
        plan = make_plan(ids, weights, 8)
        assert_plan(plan, plan_by_hand(ids.contiguous(), weights.contiguous(), 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_float_types_become_fp32(dtype: torch.dtype) -> None:
    ids, weights = random_routing(9, 3, 8)
    weights = weights.to(dtype)
    assert_plan(make_plan(ids, weights, 8), plan_by_hand(ids, weights.float(), 8))


@pytest.mark.parametrize("experts", [1, 2, 3, 5, 7, 40, 60, 160, 385])
def test_h32_any_number_of_experts(experts: int) -> None:
    """H32: offsets of exactly E+1 elements (what kernels read: tests/test_kernel_reports.py)."""
    ids, weights = random_routing(50, min(2, experts), experts)
    plan = make_plan(ids, weights, experts)
    assert_plan(plan, plan_by_hand(ids, weights, experts))
    assert plan.expert_offsets.numel() == experts + 1


def test_h35_expert_offsets_beyond_32_bits_are_exact() -> None:
    """H35: 384 experts of 6144 x 7168 codes; nothing is allocated (meta device)."""
    experts, hidden, inter = 384, 7168, 3072
    meta: dict = {"device": "meta"}
    weights = ExpertWeights(
        torch.empty(experts, 2 * inter, hidden // 2, dtype=torch.uint8, **meta),
        torch.empty(experts, 2 * inter, hidden // 16, dtype=torch.float8_e4m3fn, **meta),
        torch.empty(experts, 2, **meta),
        torch.empty(experts, hidden, inter // 2, dtype=torch.uint8, **meta),
        torch.empty(experts, hidden, inter // 16, dtype=torch.float8_e4m3fn, **meta),
        torch.empty(experts, **meta),
    )
    per_expert = 22_020_096
    for e in (48, 49, 97, 98, 383):
        assert weights.l1().data[e].storage_offset() == e * per_expert
    assert 383 * per_expert == 8_433_696_768
    assert weights.l1_data.nbytes == experts * per_expert


def test_sizes_depend_on_tokens_and_slots_alone() -> None:
    """Whatever the routing: the shapes of a captured graph."""
    weights = torch.rand(10, 4)
    shapes = set()
    for ids in (
        torch.zeros(10, 4, dtype=torch.int32),
        torch.full((10, 4), -1, dtype=torch.int32),
        random_routing(10, 4, 16)[0],
    ):
        plan = make_plan(ids, weights, 16)
        assert plan.counter is None
        shapes.add(tuple(tuple(t.shape) for t in vars(plan).values() if t is not None))
    assert shapes == {((17,), (40,), (40,), (10, 4))}


@pytest.mark.parametrize(("first", "local"), [(0, 8), (0, 3), (3, 5), (7, 1), (2, 0)])
def test_a_slice_of_experts_has_rows_for_its_own_slots_only(first: int, local: int) -> None:
    ids, weights = random_routing(33, 3, 8)
    ids[4] = -1
    ids[5, 1] = 8
    plan = make_plan(ids, weights, 8, first, local)
    assert_plan(plan, plan_by_hand(ids, weights, 8, first, local))


@given(
    st.integers(1, 12).flatmap(
        lambda experts: st.tuples(
            st.just(experts),
            st.lists(st.lists(st.integers(-2, experts + 1), min_size=3, max_size=3), max_size=12),
            st.integers(0, experts - 1),
        )
    )
)
@settings(deadline=None, max_examples=150)
def test_any_ids_duplicates_included(case: tuple[int, list[list[int]], int]) -> None:
    experts, rows, first = case
    ids = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)
    weights = torch.arange(ids.numel()).reshape(ids.shape).float()
    plan = make_plan(ids, weights, experts, first)
    assert_plan(plan, plan_by_hand(ids, weights, experts, first))


def test_no_tokens() -> None:
    plan = make_plan(torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 4), 6)
    assert plan.expert_offsets.tolist() == [0] * 7
    assert plan.token_rows.shape == (0, 4)
    assert plan.row_token.shape == plan.row_weight.shape == (0,)
    assert plan.num_tokens == 0 and plan.num_experts == 6


@pytest.mark.parametrize(
    ("ids", "weights", "error", "message"),
    [
        (torch.zeros(3, dtype=torch.int32), torch.zeros(3), ValueError, r"\(T, K\)"),
        (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 1), ValueError, r"\(3, 1\)"),
        (torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 2).int(), TypeError, "floating"),
        (
            torch.zeros(3, 2, dtype=torch.int32),
            torch.zeros(3, 2, device="meta"),
            ValueError,
            "meta",
        ),
    ],
)
def test_wrong_routing_is_refused(ids, weights, error, message) -> None:
    with pytest.raises(error, match=message):
        make_plan(ids, weights, 8)


def test_h37_scratch_follows_tokens_and_slots_not_the_number_of_experts() -> None:
    """H37: bytes = T * K * (2 H + 4 P I + 2 I + 4 H); a rank with fewer experts needs no more."""
    cfg = MoEConfig(128, 64, 32, 6)
    for local in (32, 16, 8, 4, 2, 1):
        zeros = torch.zeros(local, 64, 128)
        weights = ExpertWeights.from_bf16(zeros, zeros, torch.zeros(local, 128, 64))
        for tokens in (0, 1, 64, 1024):
            total = sum(b.nbytes for b in scratch_buffers(tokens, cfg, weights))
            assert total == tokens * 6 * (2 * 128 + 4 * 2 * 64 + 2 * 64 + 4 * 128)


@pytest.mark.parametrize("corrupt", ["row_token", "row_weight", "token_rows", "expert_offsets"])
def test_the_comparison_sees_one_wrong_element(corrupt: str) -> None:
    ids, weights = random_routing(7, 2, 5)
    plan = make_plan(ids, weights, 5)
    wrong = getattr(plan, corrupt).clone()
    wrong.view(-1)[1] += 1
    with pytest.raises(AssertionError):
        assert_plan(dataclasses.replace(plan, **{corrupt: wrong}), plan_by_hand(ids, weights, 5))
