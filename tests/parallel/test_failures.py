"""No rank waits for ever: ranks that raise, die, stop or come late, and layers that disagree."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe import Capacity, Exchange, ExpertParallel, MoE, Replicated
from moe import dispatch as dispatch_module
from moe.failures import RankError
from moe.local import LocalExperts
from tests import test_reference as ref
from tests.layers import same_bits
from tests.parallel.ranks import GROUP_TIMEOUT, Outcome, run_ranks, values
from tests.test_reference import Case

TIMEOUT = 4.0  # s, of ExpertParallel: what a rank that says nothing costs
PLACES = Exchange(capacity=Capacity(tokens=16))


def layer_of(parallel: ExpertParallel, case: Case = Case()) -> MoE:  # noqa: B008
    _, cfg, weights = ref.build(case)
    return MoE(cfg, parallel.local(weights), backend="torch", parallel=parallel)


def call(layer: MoE, rank: int) -> torch.Tensor:
    b = ref.batch(Case(), seed=rank)
    return layer.experts(b.x, b.ids, b.weights)


def refused(layer: MoE, rank: int) -> str:
    """After a failure: the message with which the next call is refused, at once."""
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        call(layer, rank)
    assert time.monotonic() - start < 0.2
    return str(caught.value)


def attempt(layer: MoE, rank: int) -> dict[str, Any]:
    """A call that must fail: its error, how long it took, and the refusal of the next one."""
    start = time.monotonic()
    try:
        call(layer, rank)
    except Exception as error:
        seconds = time.monotonic() - start
        kind = type(error).__name__
        return {
            "error": str(error), "kind": kind, "seconds": seconds, "next": refused(layer, rank)
        }  # fmt: skip
    raise AssertionError("the call went through")


def inject(where: str, action: Any) -> None:
    """Let ``action`` happen in this rank in one phase of its calls."""
    owner, name = {
        "quantize": (LocalExperts, "source"),
        "experts": (LocalExperts, "rows"),
        "combine": (LocalExperts, "combine"),
        "dispatch": (dispatch_module.Steps, "send"),
    }[where]
    before = getattr(owner, name)

    def changed(*args: Any) -> Any:
        action()
        return before(*args)

    setattr(owner, name, changed)


def fail() -> None:
    raise MemoryError("no room for rows")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def sleep_long() -> None:
    time.sleep(2 * TIMEOUT)


ACTIONS = {"raise": fail, "die": die, "sleep": sleep_long}


def broken(
    rank: int, size: int, mode: Any, bad: int, where: str, what: str, timeout: float | None
) -> Any:
    """One good call, then one in which rank ``bad`` does ``what`` in phase ``where``."""
    parallel = ExpertParallel(None, ref.E, mode=mode, timeout=timeout)
    layer = layer_of(parallel)
    call(layer, rank)
    if rank == bad:
        inject(where, ACTIONS[what])
    return attempt(layer, rank)


def check_survivors(outcomes: list[Outcome], bad: int, words: list[str], seconds: float) -> None:
    others = [o for r, o in enumerate(outcomes) if r != bad]
    for value in values(others):
        assert value["kind"] == "RankError"
        for word in words:
            assert word in value["error"], value["error"]
        assert value["seconds"] < seconds, value
        assert "refused after a failure" in value["next"] and words[0] in value["next"]


@pytest.mark.parametrize("where", ["quantize", "dispatch", "experts", "combine"])
@pytest.mark.parametrize("mode", [Exchange(), PLACES], ids=["counts", "places"])
def test_an_exception_in_one_rank_reaches_the_others(
    mode: Exchange, where: str, tmp_path: Path
) -> None:
    """In seconds, although the group would wait for a minute: its text comes with rank and phase.
    In the last phase the others have all they need: the *next* call fails for them."""
    outcomes = run_ranks(3, broken, mode, 1, where, "raise", None, path=tmp_path)
    mine = values(outcomes[1:2])[0]
    assert mine["kind"] == "MemoryError" and mine["error"] == "no room for rows"
    assert f"rank 1 raised in phase '{where}' of call 3" in mine["next"]
    if where == "combine":
        for outcome in (outcomes[0], outcomes[2]):
            assert outcome.error is not None and "the call went through" in outcome.error
        return
    words = ["rank 1 raised", f"phase '{where}' of call 3", "MemoryError: no room for rows"]
    check_survivors(outcomes, 1, words, 10.0)


@pytest.mark.parametrize("where", ["quantize", "experts"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_killed_rank(bad: int, where: str, tmp_path: Path) -> None:
    outcomes = run_ranks(3, broken, Exchange(), bad, where, "die", None, path=tmp_path)
    assert outcomes[bad].error == "ended with code -9 and no result"
    waiting = "counts" if where == "quantize" else "return"
    words = [f"rank {bad} died or did not answer", f"this rank was in phase '{waiting}' of call 3"]
    check_survivors(outcomes, bad, words, 10.0)


def test_the_rank_that_hosts_the_store_is_killed(tmp_path: Path) -> None:
    outcomes = run_ranks(3, broken, Exchange(), 0, "experts", "die", None, path=tmp_path, master=0)
    words = ["a rank is gone", "rank 0 hosts it", "phase 'return' of call 3"]
    check_survivors(outcomes, 0, words, 15.0)


@pytest.mark.parametrize("mode", [Exchange(), PLACES], ids=["counts", "places"])
def test_a_rank_that_does_not_answer(mode: Exchange, tmp_path: Path) -> None:
    """It sleeps for 2 timeouts, then it finds that the others have given up."""
    outcomes = run_ranks(3, broken, mode, 1, "experts", "sleep", TIMEOUT, path=tmp_path)
    words = ["rank 1 died or did not answer in time", "phase 'return' of call 3"]
    check_survivors(outcomes, 1, words, 2 * TIMEOUT)
    late = values(outcomes[1:2])[0]
    assert late["kind"] == "RankError" and late["seconds"] < 4 * TIMEOUT


def skewed(rank: int, size: int, seconds: float) -> Any:
    """One rank starts late, before construction and again before a call."""
    parallel = ExpertParallel(None, ref.E)
    if rank == 1:
        time.sleep(seconds)
    layer = layer_of(parallel)
    if rank == 1:
        time.sleep(seconds)
    y = call(layer, rank)
    _, cfg, weights = ref.build(Case())
    b = ref.batch(Case(), seed=rank)
    return same_bits(y, MoE(cfg, weights, backend="torch").experts(b.x, b.ids, b.weights))


@pytest.mark.parametrize("seconds", [1.5, pytest.param(20.0, marks=pytest.mark.slow, id="20 s")])
def test_a_late_rank_is_waited_for(seconds: float, tmp_path: Path) -> None:
    assert 2 * seconds < GROUP_TIMEOUT
    assert values(run_ranks(2, skewed, seconds, path=tmp_path)) == [True, True]


# ---- configurations that differ ------------------------------------------------------------------

DIFFERENT = {
    "hidden": (Case(), {"hidden": 112}),
    "top_k": (Case(), {"top_k": 2}),
    "intermediate": (Case(), {"intermediate": 96}),
    "activation": (Case(activation="geglu"), {}),
    "activations": (Case(activations="bf16"), {}),
    "activation_scale": (Case(mode="per_tensor"), {}),
    "h_scale": (Case(static_h=True), {}),
    "biases": (Case(biases=True), {}),
    "renormalize": (Case(), {"renormalize": False}),
}


def disagree(rank: int, size: int) -> dict[str, str]:
    """Rank 1 makes another layer: the error of each rank, by field."""
    errors = {}
    for name, (case, change) in DIFFERENT.items():
        parallel = ExpertParallel(None, ref.E)
        _, cfg, weights = ref.build(case if rank == 1 else Case())
        cfg = cfg if rank != 1 else dispatch_module.dataclasses.replace(cfg, **change)
        weights = parallel.local(weights)
        if {"hidden", "intermediate"} & change.keys() and rank == 1:
            zeros = torch.zeros(weights.num_experts, cfg.intermediate, cfg.hidden)
            weights = type(weights).from_bf16(
                zeros, zeros, zeros.mT.contiguous(), first_expert=weights.first_expert
            )
        options = {"activations": case.activations, "activation_scale": case.mode}
        with pytest.raises(ValueError) as caught:
            MoE(cfg, weights, backend="torch", parallel=parallel, **(options if rank == 1 else {}))
        errors[name] = str(caught.value)
    return errors


def test_different_layers_are_seen_at_construction(tmp_path: Path) -> None:
    ranks = values(run_ranks(3, disagree, path=tmp_path))
    for name in DIFFERENT:
        for errors in ranks:  # every rank raises, and says the same
            assert errors[name] == ranks[0][name]
            assert f"{name} (rank 0: " in errors[name] and "rank 1: " in errors[name]


def arguments(rank: int, size: int) -> dict[str, str]:
    """ExpertParallel itself made with other arguments, or with bad ones, on one rank."""
    odd: dict[str, dict[str, Any]] = {
        "num_experts": {"num_experts": ref.E + 1},
        "mode": {"mode": Exchange(pre_reduce=True)},
        "max_tokens": {"max_tokens": 7},
        "timeout": {"timeout": 30.0},
        "num_experts must be positive": {"num_experts": 0},
        "capacity must be positive": {"mode": Exchange(capacity=Capacity(0))},
        "split must be positive": {"mode": Exchange(split=0)},
        "mode must be": {"mode": "exchange"},
        "timeout must be positive": {"timeout": -1.0},
    }
    errors = {}
    for name, change in odd.items():
        fields = {"num_experts": ref.E} | (change if rank == 1 else {})
        with pytest.raises(ValueError) as caught:
            ExpertParallel(None, **fields)
        errors[name] = str(caught.value)
    return errors


def test_different_or_bad_arguments_are_seen_by_every_rank(tmp_path: Path) -> None:
    ranks = values(run_ranks(2, arguments, path=tmp_path))
    assert ranks[0] == ranks[1]
    for name, error in ranks[0].items():
        if " " in name:
            assert f"rank 1: {name}" in error
        else:
            assert f"ranks disagree about {name} (rank 0: " in error


def mixed_up(rank: int, size: int) -> str:
    """Ranks call different layers of one group."""
    parallel = ExpertParallel(None, ref.E)
    layers = [layer_of(parallel), layer_of(parallel)]
    with pytest.raises(RuntimeError) as caught:
        call(layers[rank], rank)
    return str(caught.value)


def test_calls_of_different_layers(tmp_path: Path) -> None:
    errors = values(run_ranks(2, mixed_up, path=tmp_path))
    assert any("this one is in layer 1 (by order of construction), rank 1 in layer 2" in e
               for e in errors)  # fmt: skip
    assert all("layer" in e for e in errors)


def refusals(rank: int, size: int) -> None:
    """What one rank alone can be told before anybody waits for it."""
    parallel = ExpertParallel(None, ref.E, max_tokens=4, mode=Replicated())
    _, cfg, weights = ref.build(Case())
    with pytest.raises(TypeError, match="group must be a ProcessGroup that this rank belongs to"):
        ExpertParallel(-100, ref.E)
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "ep"))
    with pytest.raises(ValueError, match=r"2 dimensions: .* tensor parallelism"):
        ExpertParallel(mesh, ref.E)
    assert ExpertParallel(mesh["ep"], ref.E).size == size
    with pytest.raises(TypeError, match="cannot be pickled"):
        __import__("pickle").dumps(parallel)
    layer = MoE(cfg, parallel.local(weights), backend="torch", parallel=parallel)
    with pytest.raises(ValueError, match=f"9 tokens on rank {rank}, max_tokens is 4"):
        call(layer, rank)
    whole = ExpertParallel(None, ref.E)
    with pytest.raises(ValueError, match=rf"rank {rank} of 2 must hold experts .* got 0:6 of 6"):
        MoE(cfg, weights, backend="torch", parallel=whole)
    sliced = ExpertParallel(None, ref.E)
    half = torch.zeros(3, ref.I // 5, ref.H)
    with pytest.raises(ValueError, match="tensor parallelism inside an expert"):
        part = type(weights).from_bf16(
            half, half, half.mT.contiguous(), first_expert=sliced.expert_range[0]
        )
        MoE(cfg, part, backend="torch", parallel=sliced)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    values(run_ranks(2, refusals, path=tmp_path))


def test_without_a_process_group() -> None:
    with pytest.raises(RuntimeError, match="call init_process_group first"):
        ExpertParallel(None, 4)
