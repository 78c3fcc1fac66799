"""The shared shapes and routings hold the edges that they promise; grouped quantisation on all of
them, with poisoned memory."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import nvfp4, ops
from cute_kernels.nvfp4 import SWIZZLE_32_4_4
from moe import RoutingPlan
from moe.plan import make_plan
from tests import cases
from tests.cases import CASES, ROUTINGS, Case, Routing
from tests.check import assert_bytes_equal
from tests.test_nvfp4_layouts import group_by_loop

ALL_CASES = [*CASES, *cases.model_case_list()]


def by_name(value: object) -> str:
    return value.__name__ if callable(value) else str(value)


def rows_of(case: Case, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    gen = torch.Generator().manual_seed(case.rows)
    return torch.randn(case.rows, case.k, generator=gen).to(dtype)


# ---- the lists -----------------------------------------------------------------------------------


def test_names_are_unique_and_shapes_valid() -> None:
    assert len({c.name for c in ALL_CASES}) == len(ALL_CASES)
    for c in ALL_CASES:
        assert c.k % 16 == 0 and c.n % 16 == 0 and c.counts
        assert c.expert_offsets().tolist() == c.offsets and c.offsets[-1] + c.spare == c.rows


def test_edges_are_in_the_list() -> None:
    counts = [n for c in CASES for n in c.counts]
    assert {0, 1, 127, 128, 129} <= set(counts) and max(counts) > 256
    assert {c.k // 16 % 4 for c in CASES} == {0, 1, 2}
    assert any(c.n % 128 for c in CASES) and any(c.spare for c in CASES)
    assert any(sum(c.counts) == 0 for c in CASES) and max(len(c.counts) for c in CASES) == 60
    assert {0, 64} <= {c.k % 128 for c in cases.model_case_list()}


def test_models_give_both_products() -> None:
    gpt = next(m for m in cases.MODELS if m.name == "gpt-oss-120b")
    nemotron = next(m for m in cases.MODELS if m.name == "Nemotron-3-Nano")
    first, second = cases.model_cases(gpt)
    assert (first.n, first.k) == (640, 320) and (second.n, second.k) == (320, 320)  # 2880: 320
    first, second = cases.model_cases(nemotron)  # no gate: 1856 -> 320, 2688 -> 384
    assert (first.n, first.k) == (320, 384) and (second.n, second.k) == (384, 320)


# ---- routings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", ROUTINGS, ids=by_name)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(0, 8, 2), (1, 1, 1), (200, 60, 4)])
def test_routings_are_valid_and_repeatable(
    routing: Routing, tokens: int, experts: int, top_k: int
) -> None:
    ids, weights = cases.route(routing, tokens, experts, top_k)
    assert ids.shape == weights.shape == (tokens, top_k)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ((ids >= -1) & (ids < experts)).all() and (weights > 0).all()
    again, _ = cases.route(routing, tokens, experts, top_k)
    other, _ = cases.route(routing, tokens, experts, top_k, seed=1)
    assert torch.equal(ids, again)
    fixed = routing in (cases.one_expert, cases.all_padding)
    assert tokens < 2 or fixed == torch.equal(ids, other)
    if routing is not cases.one_expert:
        for row in ids.tolist():
            real = [e for e in row if e >= 0]
            assert len(set(real)) == len(real)


def test_routings_are_what_they_are_called() -> None:
    def counts(routing: Routing) -> torch.Tensor:
        ids, _ = cases.route(routing, 400, 32, 4)
        return torch.bincount(ids[ids >= 0], minlength=32)

    even, skew = counts(cases.uniform), counts(cases.skewed)
    assert even.min() > 20 and even.max() < 90  # 50 on average
    assert skew[0] > 300 and skew[0] > 10 * skew[8:].float().mean()
    assert counts(cases.few_experts).tolist() == [0] * 28 + [400] * 4
    assert counts(cases.one_expert).tolist() == [1600 * (e == 16) for e in range(32)]
    assert counts(cases.all_padding).sum() == 0
    ids, _ = cases.route(cases.some_padding, 400, 32, 4)
    empty = (ids < 0).all(dim=1)
    assert empty[::4].all() and 0.6 < (ids[~empty] >= 0).float().mean() < 0.8


# ---- poison --------------------------------------------------------------------------------------


def test_poison_begins_and_ends() -> None:
    with cases.poisoned():
        assert torch.empty(4).isnan().all()
        assert torch.zeros(1, dtype=torch.uint8).new_empty(3).tolist() == [0x7F] * 3
    original = torch.empty
    with pytest.raises(RuntimeError, match="inside"), cases.poisoned():
        raise RuntimeError("inside")
    assert torch.empty is original


# ---- grouped quantisation on every case ----------------------------------------------------------


def check_grouped(case: Case) -> None:
    x, offsets = rows_of(case), case.expert_offsets()
    plain = nvfp4.quantize(x)
    with cases.poisoned():
        grouped = nvfp4.quantize_grouped(x, offsets)
    want = group_by_loop(plain.scale.view(torch.uint8), case.offsets)
    assert_bytes_equal(grouped.scale.view(torch.uint8), want, "scales, padding included")
    assert_bytes_equal(grouped.data, plain.data)
    real = case.offsets[-1]
    assert_bytes_equal(grouped.dequantize()[:real], plain.dequantize()[:real])


@pytest.mark.parametrize("case", ALL_CASES, ids=str)
def test_grouped_scales(case: Case) -> None:
    check_grouped(case)


def test_grouped_scales_notice_padding_that_nobody_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    original = nvfp4.swizzle

    def forgetful(scale: torch.Tensor) -> torch.Tensor:
        """`swizzle` into memory that it does not clear."""
        rows, groups = scale.shape
        written = original(torch.ones(rows, groups, dtype=torch.uint8)) == 1
        out = torch.empty(written.shape, dtype=torch.uint8)
        out[written] = original(scale.view(torch.uint8))[written]
        return out.view(scale.dtype)

    monkeypatch.setattr(nvfp4, "swizzle", forgetful)
    with pytest.raises(AssertionError, match=r"padding included.* got 0x7f, want 0x00"):
        check_grouped(next(c for c in CASES if c.name == "k-groups-of-5"))


def check_routed(plan: RoutingPlan, x: torch.Tensor, ids: torch.Tensor) -> None:
    """Scales of every (token, slot) are those of its token, wherever its row lies."""
    plain = nvfp4.quantize(x)
    with cases.poisoned():
        data, scale, gx = ops.quantize_rows(x, plan.expert_offsets, plan.row_token)
    assert_bytes_equal(data, plain.data)
    assert_bytes_equal(gx, plain.global_scale)
    groups = x.shape[1] // 16
    plain_rows = nvfp4.unswizzle(scale, scale.shape[0], groups)
    place = nvfp4.grouped_rows(plan.expert_offsets, plan.row_token.shape[0])
    bytes_of = plain.scale.view(torch.uint8)
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            r = int(plan.token_rows[t, k])
            assert (r >= 0) == (e >= 0)
            if e >= 0:
                assert plan.expert_offsets[e] <= r < plan.expert_offsets[e + 1]
                assert_bytes_equal(plain_rows[place[r]], bytes_of[t], f"token {t} slot {k}")


@pytest.mark.parametrize("routing", ROUTINGS, ids=by_name)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(37, 8, 2), (150, 5, 3)])
def test_routed_scales(routing: Routing, tokens: int, experts: int, top_k: int) -> None:
    ids, weights = cases.route(routing, tokens, experts, top_k)
    x = torch.randn(tokens, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    check_routed(make_plan(ids, weights, experts), x, ids)


def test_routed_scales_notice_two_swapped_rows() -> None:
    ids, weights = cases.route(cases.uniform, 37, 8, 2)
    x = torch.randn(37, 80, generator=torch.Generator().manual_seed(1)).bfloat16()
    plan = make_plan(ids, weights, 8)
    plan.row_token[[4, 5]] = plan.row_token[[5, 4]]
    with pytest.raises(AssertionError, match="token"):
        check_routed(plan, x, ids)


def test_the_swizzled_layout_pads_whole_tiles() -> None:
    for case in CASES:
        q = nvfp4.quantize(rows_of(case), scale_layout=SWIZZLE_32_4_4)
        assert q.scale.shape[0] % 128 == 0 and q.scale.shape[1] % 4 == 0
        assert q.scale.shape[0] - case.rows < 128 and q.scale.shape[1] - case.k // 16 < 4
