"""What is not the default: sums on the experts' rank, fixed capacity that is too small, replicated
tokens, and calibration."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import Capacity, Exchange, ExpertParallel, Replicated, Workspace, reference
from moe.parallel import CapacityError
from tests.layers import same_bits
from tests.parallel import jobs
from tests.parallel.jobs import Call
from tests.parallel.ranks import run_ranks, values
from tests.test_reference import Case

COUNTS = (7, 0, 11)
CASES = {
    "bf16": Case(),
    "fp32": Case(dtype=torch.float32),
    "w4a16": Case(activations="bf16", dtype=torch.float32),
    "on input": Case(weight_on_input=True),
    "biases": Case(biases=True, static_h=True, dtype=torch.float32),
}
SUMMING = {
    "counts": Exchange(pre_reduce=True),
    "places": Exchange(True, Capacity(16)),
    "two parts": Exchange(True, split=2),
    "places of two parts": Exchange(True, Capacity(16), 2),
}


def summing_calls() -> list[Call]:
    return [
        Call(f"{c}, {m}", case, mode, COUNTS)
        for c, case in CASES.items()
        for m, mode in SUMMING.items()
    ]


def tight_calls() -> list[Call]:
    """Too few places, for tokens or for rows."""
    capacities = {"tokens": Capacity(4), "rows": Capacity(16, 9), "one": Capacity(1, 1)}
    return [
        Call(f"{n}{', summed' if s else ''}", counts=COUNTS, mode=Exchange(s, c))
        for n, c in capacities.items()
        for s in (False, True)
    ]


def run_all(rank: int, size: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for call in summing_calls():
        parallel = ExpertParallel(None, call.experts, mode=call.mode)
        out[call.name] = jobs.call_of_rank(call, parallel)
    for call in tight_calls():
        out[f"tight {call.name}"] = overflowing(call)
    out["replicated"] = {n: replicated(case) for n, case in CASES.items()}
    out["received"] = [received(Exchange(split=n)) for n in (1, 3)]
    out["calibrate"] = [calibrated(mode) for mode in (Exchange(), Replicated())]
    return out


def overflowing(call: Call) -> dict[str, Any]:
    parallel = ExpertParallel(None, call.experts, mode=call.mode)
    cfg, weights = jobs.build(call)
    layer = jobs.make_layer(call, parallel.local(weights), cfg, parallel=parallel)
    part = jobs.given(call, parallel.rank, parallel.size)
    y = jobs.run_layer(layer, call, part)
    error = None
    try:
        parallel.check()
    except CapacityError as caught:
        error = str(caught)
    parallel.check()  # reported once
    again = jobs.run_layer(layer, call, part)  # the layer goes on
    assert torch.equal(torch.isnan(again), torch.isnan(y))
    return {"y": y, "error": error}


def received(mode: Exchange) -> list[int]:
    """expert_offsets of all rows that this rank computed in the latest of two calls."""
    call = Call("received", mode=mode, counts=COUNTS)
    parallel = ExpertParallel(None, call.experts, mode=mode)
    cfg, weights = jobs.build(call)
    layer = jobs.make_layer(call, parallel.local(weights), cfg, parallel=parallel)
    for _ in range(2):
        jobs.run_layer(layer, call, jobs.given(call, parallel.rank, parallel.size))
    assert parallel.received is not None
    return parallel.received.tolist()


def shared_rows(x: Tensor) -> Tensor:
    return x.float().flip(1).to(x.dtype)


def replicated(case: Case) -> dict[str, Tensor]:
    """All tokens on every rank: this rank's part, and the sum over ranks."""
    call = Call("replicated", case, counts=(9,))
    cfg, weights = jobs.build(call)
    part = jobs.given(call, 0, 1)
    out = {}
    for name, mode in (("part", Replicated()), ("sum", Replicated(reduce=True))):
        parallel = ExpertParallel(None, call.experts, mode=mode)
        layer = jobs.make_layer(call, parallel.local(weights), cfg, parallel=parallel)
        layer.workspace = Workspace(layer.plan_memory(9))
        shared = shared_rows(part.x)
        out[name] = layer.experts(part.x, part.ids, part.weights, shared=shared)
    return out


def calibrated(mode: Any) -> dict[str, Any]:
    """Scales from a sample; expert 4 sees no token of it."""
    call = Call("sample", mode=mode, counts=(6, 0, 8) if isinstance(mode, Exchange) else (14,))
    parallel = ExpertParallel(None, call.experts, mode=mode)
    cfg, weights = jobs.build(call)
    layer = jobs.make_layer(call, parallel.local(weights), cfg, parallel=parallel)
    part = sample(call, parallel.rank if isinstance(mode, Exchange) else 0, parallel.size)
    scales = layer.calibrate(part.x, routing=(part.ids, part.weights))
    y = layer.experts(part.x, part.ids, part.weights)
    return {**{k: v.clone() for k, v in scales.items()}, "y": y}


def sample(call: Call, rank: int, size: int) -> jobs.Given:
    part = jobs.given(call, rank, size)
    return dataclasses.replace(part, ids=torch.where(part.ids == 4, 3, part.ids))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(3, run_all, path=tmp_path_factory.mktemp("three")))


# ---- sums on the experts' rank -------------------------------------------------------------------


def bound(call: Call, part: jobs.Given, size: int) -> Tensor:
    """fp64 (T, H): |y' - y| of `ExpertParallel`, and one ulp for the roundings of y."""
    cfg, weights = jobs.build(call)
    numerics = (call.case.activations, call.case.mode)
    stages = reference.experts(part.x, part.ids, part.weights, cfg, weights, *numerics)
    rows = stages.plan.token_rows.clamp(min=0).long()
    here = (stages.plan.token_rows >= 0).unsqueeze(-1)
    w = torch.ones_like(part.weights) if cfg.weight_on_input else part.weights
    terms = torch.where(here, w.unsqueeze(-1).double() * stages.o[rows].double(), 0.0).abs()
    slots = part.ids.shape[1]
    out = (2.0**-8 + (slots + size) * 2.0**-23) * terms.sum(dim=1)
    return out + torch.finfo(stages.y.dtype).eps * stages.y.double().abs()


def outside(got: Tensor, want: Tensor, limit: Tensor) -> int:
    return int((~((got.double() - want.double()).abs() <= limit)).sum())


@pytest.mark.parametrize("call", summing_calls(), ids=lambda c: c.name)
def test_sums_on_the_experts_rank_keep_the_bound(call: Call, three: list) -> None:
    differ = 0
    for rank, want in enumerate(jobs.call_of_one(call, 3)):
        part, got = jobs.given(call, rank, 3), three[rank][call.name]
        limit = bound(call, part, 3)
        assert outside(got["y"], want, limit) == 0
        differ += int((got["y"] != want).sum())
        want_bytes = jobs.expected_bytes(call, 3)[rank]
        assert {k: got["sent"].get(k, 0) for k in want_bytes} == want_bytes
        if len(part.x):
            assert outside(got["y"] * 1.02, want, limit) > 0, "the bound would see 2 %"
            assert outside(got["y"].roll(1, 0), want, limit) > 0
    assert differ or call.case.dtype == torch.bfloat16, "the mode did nothing"


# ---- too few places ------------------------------------------------------------------------------


def lost_tokens(call: Call, part: jobs.Given, size: int) -> tuple[list[bool], int, int]:
    """By hand: tokens without a place, and the places that would have been enough."""
    assert isinstance(call.mode, Exchange) and call.mode.capacity is not None
    capacity, top_k = call.mode.capacity, part.ids.shape[1]
    rows = capacity.tokens * top_k if capacity.rows is None else capacity.rows
    base = call.experts // size
    lost, tokens, slots = [False] * len(part.ids), 0, 0
    for d in range(size):
        home = range(d * base, (d + 1) * base)
        there = [(t, sum(e in home for e in row)) for t, row in enumerate(part.ids.tolist())]
        there = [(t, n) for t, n in there if n]
        tokens = max(tokens, len(there))
        slots = max(slots, sum(n for _, n in there))
        used = 0
        for place, (t, n) in enumerate(there):
            if place >= capacity.tokens:
                lost[t] = True
            else:
                used += n
                lost[t] |= used > rows
    return lost, tokens, slots


@pytest.mark.parametrize("call", tight_calls(), ids=lambda c: c.name)
def test_a_token_without_a_place_is_nan_and_reported(call: Call, three: list) -> None:
    """Never dropped in silence; every other token keeps its bits."""
    for rank, want in enumerate(jobs.call_of_one(call, 3)):
        part, got = jobs.given(call, rank, 3), three[rank][f"tight {call.name}"]
        lost, tokens, slots = lost_tokens(call, part, 3)
        assert torch.isnan(got["y"]).all(dim=1).tolist() == lost
        kept = ~torch.tensor(lost, dtype=torch.bool)
        if call.mode.pre_reduce:
            limit = bound(call, part, 3)
            assert outside(got["y"][kept], want[kept], limit[kept]) == 0
        else:
            assert same_bits(got["y"][kept], want[kept])
        if any(lost):
            assert f"{sum(lost)} tokens of rank {rank} found no place" in got["error"]
            assert f"up to {tokens} tokens and {slots} rows" in got["error"]
        else:
            assert got["error"] is None
    assert any(three[r][f"tight {call.name}"]["error"] for r in range(3))
    assert three[1][f"tight {call.name}"]["error"] is None  # it has no token


@pytest.mark.parametrize("parts", [0, 1], ids=["one part", "three parts"])
def test_rows_that_came_are_counted_in_all_parts(parts: int, three: list) -> None:
    call = Call("received", counts=COUNTS)
    ids = torch.cat([jobs.given(call, r, 3).ids for r in range(3)])
    for rank in range(3):
        counts = [int((ids == e).sum()) for e in (2 * rank, 2 * rank + 1)]
        assert three[rank]["received"][parts] == [0, counts[0], sum(counts)]


# ---- replicated ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_replicated_tokens(name: str, three: list) -> None:
    """Parts are those of the experts alone, with the shared expert in one of them; sums over the
    ranks are the same everywhere, up to the order of the sum."""
    call = Call("replicated", CASES[name], counts=(9,))
    part = jobs.given(call, 0, 1)
    cfg, weights = jobs.build(call)
    shared = shared_rows(part.x)
    for rank, (first, end) in enumerate([(0, 2), (2, 4), (4, 6)]):
        layer = jobs.make_layer(call, weights.select(first, end), cfg)
        want = layer.experts(part.x, part.ids, part.weights, shared=shared if rank == 0 else None)
        assert same_bits(three[rank]["replicated"][name]["part"], want)
    whole = jobs.make_layer(call, weights, cfg)
    want = whole.experts(part.x, part.ids, part.weights, shared=shared)
    got = three[0]["replicated"][name]["sum"]
    assert same_bits(got, three[1]["replicated"][name]["sum"])
    assert same_bits(got, three[2]["replicated"][name]["sum"])
    eps = torch.finfo(got.dtype).eps
    close = {"rtol": 2 * eps, "atol": 1e-5 * float(want.abs().max())}
    torch.testing.assert_close(got, want, **close)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(got - shared, want, **close)


# ---- calibration ---------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["exchange", "replicated"])
def test_calibration_sees_the_tokens_of_all_ranks(which: int, three: list) -> None:
    """H52: gx is the maximum over all ranks; an expert without a token takes the largest gh."""
    mode = (Exchange(), Replicated())[which]
    call = Call("sample", mode=mode, counts=(6, 0, 8) if which == 0 else (14,))
    parts = [sample(call, r, 3) for r in range(3 if which == 0 else 1)]
    x, ids, w = (torch.cat([getattr(p, n) for p in parts]) for n in ("x", "ids", "weights"))
    cfg, weights = jobs.build(call)
    whole = jobs.make_layer(call, weights, cfg)
    want = whole.calibrate(x, routing=(ids, w))
    got = [r["calibrate"][which] for r in three]
    assert torch.equal(torch.cat([g["gh"] for g in got]), want["gh"])
    assert all(torch.equal(g["gx"], want["gx"]) for g in got)
    assert float(want["gh"][4]) == float(want["gh"].max())
    if which == 0:
        y = whole.experts(x, ids, w).split([len(p.x) for p in parts])
        assert all(same_bits(g["y"], part) for g, part in zip(got, y))
