"""The backend "sm90" over ranks, its operators in plain PyTorch: the bits of one rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from moe import Capacity, Exchange, ExpertParallel
from moe import layer as layer_module
from tests.layers import same_bits
from tests.parallel import jobs
from tests.parallel.jobs import Call
from tests.parallel.ranks import run_ranks, values
from tests.test_reference import Case

CASES = {
    "plain": Case(),
    "w4a16": Case(activations="bf16"),
    "static": Case(activation="oai", biases=True, static_h=True, mode="static"),
    "on input": Case(weight_on_input=True),
    "per tensor": Case(mode="per_tensor"),
}
PLACES = Exchange(capacity=Capacity(16))


def sm90_calls() -> list[Call]:
    calls = [Call(n, c, counts=(7, 0, 11), backend="sm90") for n, c in CASES.items()]
    calls += [dataclasses.replace(calls[0], name="quantised", form="quantised")]
    calls += [dataclasses.replace(calls[0], name="routed", form="routed")]
    modes = {"places": PLACES, "two parts": Exchange(split=2)}
    return calls + [dataclasses.replace(calls[0], name=n, mode=m) for n, m in modes.items()]


def run_all(rank: int, size: int) -> dict[str, Any]:
    layer_module.choose_backend = lambda name, device: name  # as if this were a Hopper GPU
    out = {}
    for call in sm90_calls():
        parallel = ExpertParallel(None, call.experts, mode=call.mode)
        plain = jobs.call_of_rank(call, parallel)["y"]
        again = jobs.call_of_rank(call, parallel, workspace=True)["y"]
        assert same_bits(plain, again)
        out[call.name] = plain
    return out


@pytest.mark.parametrize("size", [3])
def test_ranks_give_the_bits_of_one(size: int, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(layer_module, "choose_backend", lambda name, device: name)
    got = values(run_ranks(size, run_all, path=tmp_path))
    for call in sm90_calls():
        want = jobs.call_of_one(call, size)
        for rank in range(size):
            assert same_bits(got[rank][call.name], want[rank]), (call.name, rank)
