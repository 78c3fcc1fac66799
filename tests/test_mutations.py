"""Known mistakes, put into the library one at a time: the test named for each must fail."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import moe.experts
import moe.plan
import moe.reference
import moe.weights
from cute_kernels import nvfp4, torch_router
from cute_kernels.activations import SwiGLU, silu
from moe import ExpertWeights
from moe.weights import ExpertWeightsBuilder
from tests import test_layer as layer_tests
from tests import test_public_reports as reports
from tests import test_public_reports_format as format_reports
from tests import test_reference as reference_tests
from tests import test_router as router_tests
from tests import test_weights as weights_tests
from tests.test_reference import Case

Patch = pytest.MonkeyPatch


def swap_gate_and_up(patch: Patch) -> None:
    original = moe.weights._row_split
    patch.setattr(moe.weights, "_row_split", lambda *a: original(*a)[::-1])


def one_global_scale_for_gate_and_up(patch: Patch) -> None:
    original = ExpertWeightsBuilder.finish

    def finish(self: ExpertWeightsBuilder, *args: Any) -> ExpertWeights:
        w = original(self, *args)
        return dataclasses.replace(w, g13=w.g13[:, :1].expand_as(w.g13).contiguous())

    patch.setattr(ExpertWeightsBuilder, "finish", finish)


def drop_the_global_scale_of_down(patch: Patch) -> None:
    original = ExpertWeightsBuilder.finish

    def finish(self: ExpertWeightsBuilder, *args: Any) -> ExpertWeights:
        w = original(self, *args)
        return dataclasses.replace(w, g2=torch.ones_like(w.g2))

    patch.setattr(ExpertWeightsBuilder, "finish", finish)


def ties_down(patch: Patch) -> None:
    midpoints = tuple((m, False) for m, _ in nvfp4._E2M1_MIDPOINTS)
    patch.setattr(nvfp4, "_E2M1_MIDPOINTS", midpoints)


def ties_away_from_zero(patch: Patch) -> None:
    midpoints = tuple((m, True) for m, _ in nvfp4._E2M1_MIDPOINTS)
    patch.setattr(nvfp4, "_E2M1_MIDPOINTS", midpoints)


def divide_by_the_unrounded_scale(patch: Patch) -> None:
    def blocks(x: Tensor, g: Tensor, exact_division: bool) -> tuple[Tensor, Tensor]:
        parts = x.unflatten(-1, (x.shape[-1] // 16, 16))
        per_block = g.reshape(*g.shape, *([1] * (parts.dim() - 1 - g.dim())))
        unrounded = (parts.abs().amax(dim=-1) / (6.0 * per_block)).clamp(2.0**-9, 448.0)
        step = (unrounded * per_block).unsqueeze(-1)
        codes = nvfp4.encode_e2m1(parts / step if exact_division else parts * (1.0 / step))
        return codes.flatten(-2), nvfp4.encode_ue4m3(unrounded)

    patch.setattr(nvfp4, "_quantize_blocks", blocks)


def clip_a_block_after_normalising(patch: Patch) -> None:
    """amax clamped to 448 although it may reach 2688."""
    original = nvfp4._quantize_blocks

    def blocks(x: Tensor, g: Tensor, exact_division: bool) -> tuple[Tensor, Tensor]:
        limit = 448.0 * g.reshape(*g.shape, *([1] * (x.dim() - g.dim())))
        return original(x.clamp(-limit, limit), g, exact_division)

    patch.setattr(nvfp4, "_quantize_blocks", blocks)


def weights_before_swiglu(patch: Patch) -> None:
    """The top-1 weight scales gate and up; combine leaves it out."""
    stage, combine = moe.experts.stage_rows, moe.experts.combine

    def stage_rows(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        values, gx = stage(x, ids, weights, *rest)
        return values, gx * weights[:, 0]

    def unweighted(o: Tensor, plan: Any, weights: Tensor, *rest: Any) -> Tensor:
        return combine(o, plan, torch.ones_like(weights), *rest)

    patch.setattr(moe.experts, "stage_rows", stage_rows)
    patch.setattr(moe.experts, "combine", unweighted)


def clamp_the_product(patch: Patch) -> None:
    def call(self: SwiGLU, m: Any, gate: Any, up: Any = None) -> Any:
        product = silu(m, gate) * up
        return product if self.limit is None else m.minimum(product, self.limit)

    patch.setattr(SwiGLU, "__call__", call)


def clamp_the_gate_from_below(patch: Patch) -> None:
    original = SwiGLU.__call__

    def call(self: SwiGLU, m: Any, gate: Any, up: Any = None) -> Any:
        return original(self, m, gate if self.limit is None else m.maximum(gate, -self.limit), up)

    patch.setattr(SwiGLU, "__call__", call)


def round_the_accumulator_to_bf16(patch: Patch) -> None:
    patch.setattr(moe.reference, "accumulate", lambda a, b: (a @ b.t()).bfloat16().float())


def lose_the_low_nibble_order(patch: Patch) -> None:
    original = nvfp4.pack
    patch.setattr(
        nvfp4, "pack", lambda codes: original(codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))
    )


def slots_in_reverse_order(patch: Patch) -> None:
    original = moe.reference.combine

    def combine(o: Tensor, plan: Any, weights: Tensor, *rest: Any) -> Tensor:
        plan = dataclasses.replace(plan, token_rows=plan.token_rows.flip(1))
        return original(o, plan, weights.flip(1), *rest)

    patch.setattr(moe.reference, "combine", combine)


def minus_one_is_the_last_expert(patch: Patch) -> None:
    original = moe.plan.make_plan

    def make_plan(ids: Tensor, weights: Tensor, num_experts: int, *rest: Any) -> Any:
        return original(torch.where(ids < 0, num_experts - 1, ids), weights, num_experts, *rest)

    patch.setattr(moe.experts, "make_plan", make_plan)


def unstable_ties(patch: Patch) -> None:
    """Ties to the higher id."""

    def top(values: Tensor, k: int) -> Tensor:
        last = values.shape[-1] - 1
        return last - values.flip(-1).sort(dim=-1, descending=True, stable=True).indices[..., :k]

    patch.setattr(torch_router, "stable_top", top)


def a_vector_loop_with_another_remainder(patch: Patch) -> None:
    """What torch.sigmoid does on some CPUs: elements after the last full vector differ a bit."""

    def scores(logits: Tensor, scoring: str) -> Tensor:
        out = (1.0 / (1.0 + torch.exp(-logits))).flatten()
        full = out.numel() // 16 * 16
        out[full:] = torch.nextafter(out[full:], torch.ones(()))
        return out.reshape(logits.shape)

    patch.setattr(torch_router, "scores", scores)


def logits_summed_in_the_order_of_a_batch(patch: Patch) -> None:
    """What a matrix product does: another order of the sum for another shape."""

    def logits(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        x, w = x.float(), w.float()
        out = x @ w.t() if x.shape[0] % 2 else x.flip(1) @ w.flip(1).t()
        return out if bias is None else out + bias

    patch.setattr(router_tests, "router_logits", logits)


def factor_twice(patch: Patch) -> None:
    original = moe.router.route

    def route(logits: Tensor, cfg: Any, *rest: Any) -> tuple[Tensor, Tensor]:
        ids, weights = original(logits, cfg, *rest)
        return ids, weights * cfg.routed_scaling_factor

    patch.setattr(moe.router, "route", route)


def call(test: Callable[..., None], *args: Any, **kwargs: Any) -> Callable[[], None]:
    """The body of a test with its parameters."""

    def run() -> None:
        test(*args, **kwargs)

    run.__name__ = test.__name__
    return run


stages = reference_tests.test_every_stage_equals_the_second_implementation
MUTATIONS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (
        swap_gate_and_up,
        call(weights_tests.test_h30_named_row_order_decides_what_is_gate, "gate_up", 1),
    ),
    (swap_gate_and_up, call(stages, Case())),
    (
        one_global_scale_for_gate_and_up,
        call(weights_tests.test_h20_gate_and_up_with_different_global_scales),
    ),
    (one_global_scale_for_gate_and_up, call(stages, Case())),
    (drop_the_global_scale_of_down, call(stages, Case())),
    (
        drop_the_global_scale_of_down,
        call(
            weights_tests.test_h28_scales_of_later_experts_lie_where_the_padding_puts_them,
            128,
            1408,
        ),
    ),
    (ties_down, call(format_reports.test_ties_round_to_even)),
    (ties_away_from_zero, call(format_reports.test_ties_round_to_even)),
    (divide_by_the_unrounded_scale, call(stages, Case())),
    (
        divide_by_the_unrounded_scale,
        call(
            weights_tests.test_from_bf16_gives_the_bytes_of_a_second_quantiser, torch.bfloat16, True
        ),
    ),
    (clip_a_block_after_normalising, call(stages, Case())),
    (clip_a_block_after_normalising, call(format_reports.test_a_block_above_2688)),
    (
        weights_before_swiglu,
        call(reports.test_router_weight_on_the_input, False, 0.4403985, "nvfp4"),
    ),
    (weights_before_swiglu, call(layer_tests.test_torch_equals_the_reference_bit_for_bit, Case())),
    (clamp_the_product, call(reports.test_the_clamp_comes_before_the_product)),
    (clamp_the_product, call(stages, Case(activation="swiglu-limit"))),
    (clamp_the_gate_from_below, call(reports.test_the_clamp_comes_before_the_product)),
    (round_the_accumulator_to_bf16, call(stages, Case())),
    (lose_the_low_nibble_order, call(stages, Case())),
    (slots_in_reverse_order, call(reference_tests.test_combine_adds_slots_in_order)),
    (minus_one_is_the_last_expert, call(reports.test_minus_one_is_not_the_last_expert, None)),
    (unstable_ties, call(router_tests.test_all_equal_logits_choose_the_first_experts)),
    (
        a_vector_loop_with_another_remainder,
        call(router_tests.test_route_gives_a_token_the_same_bits_in_any_batch, "sigmoid", 3),
    ),
    (
        logits_summed_in_the_order_of_a_batch,
        call(router_tests.test_logits_are_batch_invariant_bit_for_bit, 1000),
    ),
    (factor_twice, call(reports.test_scaling_factor_once_and_not_on_the_shared_expert)),
]


def name_of(value: Any) -> str:
    return value.__name__.removeprefix("test_")


@pytest.mark.parametrize(("mutate", "check"), MUTATIONS, ids=name_of)
def test_the_named_test_catches_the_mistake(mutate, check, monkeypatch: Patch) -> None:
    check()  # passes on the library as it is
    with monkeypatch.context() as patch:
        mutate(patch)
        with pytest.raises(AssertionError):
            check()
    check()


def test_every_mistake_of_this_file_is_tried() -> None:
    here = {
        n
        for n, f in globals().items()
        if inspect.isfunction(f) and next(iter(inspect.signature(f).parameters), "") == "patch"
    }
    assert here == {m.__name__ for m, _ in MUTATIONS}
