"""What the ranks of the tests run: many layers in one set of processes, since processes are dear.

A `Call` says what every rank does; `call_of_rank` does it, `call_of_one` does it with one rank that
has the tokens of all.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import torch
from torch import Tensor

from cute_kernels import nvfp4
from moe import (
    Capacity,
    Exchange,
    ExpertParallel,
    ExpertWeights,
    MoE,
    MoEConfig,
    Replicated,
    Workspace,
)
from moe.router import route, router_logits
from tests import test_reference as ref
from tests.test_reference import CASES, Case

COUNTS = (5, 0, 9, 1, 3)  # tokens of each rank, unless a call says otherwise
ROOMY = Exchange(capacity=Capacity(tokens=16))
Mode = Exchange | Replicated


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of one layer on every rank.

    counts     tokens of each rank
    experts    of the layer
    routing    "random", or how ids are replaced: see `_ids`
    form       how tokens are given: see `_given`
    """

    name: str
    case: Case = Case()  # noqa: RUF009  a frozen value
    mode: Mode = Exchange()  # noqa: RUF009
    counts: tuple[int, ...] = COUNTS
    experts: int = ref.E
    routing: str = "random"
    form: str = "plain"
    backend: str = "torch"

    def tokens(self, size: int) -> list[int]:
        return [self.counts[r % len(self.counts)] for r in range(size)]


def calls(size: int = 2) -> list[Call]:
    """The calls for ``size`` ranks: every kind of layer on 2, some of them on more."""
    cases = CASES if size == 2 else CASES[:: size + 1]
    every = [Call(f"case {c}", c) for c in cases]
    every += [Call(f"reference {c}", c, backend="reference") for c in (CASES[0], CASES[6])]
    shapes = [
        Call("nobody has a token", counts=(0,)),
        Call("one rank has all tokens", counts=(0, 0, 17)),
        Call("one token each", counts=(1,)),
        Call("many tokens", counts=(200, 0, 131)),
        *(Call(f"{n} experts", experts=n) for n in (3, 4, 5)),
        Call("strided", form="strided"),
        Call("sequences", counts=(6, 12, 0), form="sequences"),
        Call("quantised", form="quantised"),
        Call("routed", form="routed"),
        Call("routed float32", Case(dtype=torch.float32), form="routed"),
    ]
    routings = [
        Call(r, routing=r)
        for r in ("all to the first", "all to the last", "no slot", "int64", "twice", "own", "away")
    ]
    both = [*shapes, *routings]
    roomy = [dataclasses.replace(c, name=f"{c.name}, places", mode=ROOMY) for c in both]
    roomy = [c for c in roomy if max(c.counts) <= 16 or c.name.startswith("one rank")]
    some = [Case(mode="per_tensor"), Case(weight_on_input=True), Case(activations="bf16")]
    roomy += [Call(f"case {c}, places", c, ROOMY) for c in some]
    tight = Exchange(capacity=Capacity(tokens=16, rows=24))
    two, four = Exchange(split=2), Exchange(split=4)
    parts = [
        Call("two parts", mode=two),
        Call("two parts per tensor", Case(mode="per_tensor"), two),
        Call("two parts w4a16", Case(activations="bf16"), two),
        Call("two parts quantised", mode=two, form="quantised"),
        Call("two parts routed", mode=two, form="routed"),
        Call("more parts than tokens", mode=four, counts=(3, 0, 17)),
        Call("three parts, places", mode=Exchange(capacity=Capacity(tokens=16), split=3)),
        Call("two parts, enough rows", mode=Exchange(capacity=Capacity(16, 48), split=2)),
        Call(
            "a part for each token", mode=Exchange(capacity=Capacity(3, 3), split=3), counts=(3, 1)
        ),
    ]
    return [*every, *both, *roomy, *parts, Call("rows limited but enough", mode=tight)]


def build(call: Call) -> tuple[MoEConfig, ExpertWeights]:
    return _build(call.case, call.experts)


@functools.cache
def _build(case: Case, experts: int) -> tuple[MoEConfig, ExpertWeights]:
    _, cfg, weights = ref.build(case)
    if experts == ref.E:
        return cfg, weights
    return dataclasses.replace(cfg, num_experts=experts), weights.select(0, experts)


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """What one rank passes to its layer."""

    x: Any
    ids: Tensor
    weights: Tensor
    shared: Tensor | None = None


def given(call: Call, rank: int, size: int) -> Given:
    """Tokens of one rank, the same wherever this is called."""
    case, count = call.case, call.tokens(size)[rank]
    top_k = 1 if case.weight_on_input else min(ref.K, call.experts)
    gen = torch.Generator().manual_seed(100 * rank + len(call.name))
    x = torch.randn(count, ref.H, generator=gen) * torch.logspace(-2, 1, count).unsqueeze(1)
    x[1:2] = 0
    ids = torch.rand(count, call.experts, generator=gen).argsort(dim=1)[:, :top_k].int()
    weights = torch.rand(count, top_k, generator=gen) + 0.1
    if call.routing == "random" and count > 2:
        ids[2] = -1
        ids[1, -1] = call.experts  # no expert of the layer
        x[2] *= 1e4  # a token without a slot: no scale may see it
    ids = _ids(call, ids, rank, size)
    shared = torch.randn(count, ref.H, generator=gen) if call.form == "routed" else None
    return Given(_given(call, x.to(case.dtype)), ids, weights, shared)


def _ids(call: Call, ids: Tensor, rank: int, size: int) -> Tensor:
    slot = torch.arange(ids.shape[1], dtype=ids.dtype)
    match call.routing:
        case "all to the first":
            return torch.zeros_like(ids)
        case "all to the last":
            return torch.full_like(ids, call.experts - 1)
        case "no slot":
            return -1 - ids
        case "int64":  # ids that int32 would turn into experts among them
            return ids.long() + (2**32) * (torch.arange(ids.shape[0]) % 3 == 1).unsqueeze(1)
        case "twice":
            return ids[:, :1].expand(ids.shape)
        case "spread":
            return (slot * 2 % call.experts).expand(ids.shape)
        case "own" | "away":  # experts of this rank, or of the next
            there = rank if call.routing == "own" else (rank + 1) % size
            first = there * call.experts // size
            return ((first + slot) % call.experts).expand(ids.shape)
    return ids


def _given(call: Call, x: Tensor) -> Any:
    if call.form == "strided":
        return torch.stack((x, x), dim=-1).flatten(1)[:, ::2]
    if call.form == "sequences":
        return x.reshape(-1, 3, ref.H)
    return nvfp4.quantize(x) if call.form == "quantised" else x


def make_layer(call: Call, weights: ExpertWeights, cfg: MoEConfig, **options: Any) -> MoE:
    fields: dict[str, Any] = {
        "activations": call.case.activations,
        "activation_scale": call.case.mode,
        "backend": call.backend,
    }
    if call.form == "routed":
        gen = torch.Generator().manual_seed(7)
        fields["router_weight"] = torch.randn(call.experts, ref.H, generator=gen)
    return MoE(cfg, weights, **(fields | options))


def run_layer(layer: MoE, call: Call, part: Given) -> Tensor:
    if call.form == "routed":
        layer.shared = lambda x: part.shared.to(x.dtype)
        return layer(part.x)
    shape = (*part.x.shape[:-1], part.ids.shape[1])
    return layer.experts(part.x, part.ids.reshape(shape), part.weights.reshape(shape))


def call_of_rank(call: Call, parallel: ExpertParallel, workspace: bool = False) -> dict[str, Any]:
    """y of this rank and the bytes it sent."""
    cfg, weights = build(call)
    layer = make_layer(call, parallel.local(weights), cfg, parallel=parallel)
    part = given(call, parallel.rank, parallel.size)
    if workspace:
        most = max(call.tokens(parallel.size))
        layer.workspace = Workspace(layer.plan_memory(most))
        layer.workspace._memory.fill_(0x7F)
    before = parallel.bytes_sent.copy()
    y = run_layer(layer, call, part)
    parallel.check()
    sent = {k: n - before[k] for k, n in parallel.bytes_sent.items()}
    return {"y": y, "sent": sent}


def call_of_one(call: Call, size: int) -> list[Tensor]:
    """What each rank must get: one rank's y of all tokens, cut."""
    cfg, weights = build(call)
    parts = [given(call, r, size) for r in range(size)]
    layer = make_layer(call, weights, cfg)
    if call.form == "quantised":
        return [run_layer(layer, call, p) for p in parts]

    def joined(name: str) -> Any:
        values = [getattr(p, name) for p in parts]
        return None if values[0] is None else torch.cat(values)

    whole = Given(*(joined(n) for n in ("x", "ids", "weights", "shared")))
    y = run_layer(layer, call, whole)
    return list(y.split([len(p.x) for p in parts]))


def matrix(rank: int, size: int, workspace: bool) -> dict[str, Any]:
    """Every `Call` on one `ExpertParallel` for each mode and number of experts."""
    shared: dict[Any, ExpertParallel] = {}
    results = {}
    for call in calls(size):
        key = (call.mode, call.experts)
        if key not in shared:
            shared[key] = ExpertParallel(None, call.experts, mode=call.mode)
        results[call.name] = call_of_rank(call, shared[key], workspace)
    return results


def chosen_ids(call: Call, part: Given) -> Tensor:
    """ids that the layer uses: its own router's in the form "routed"."""
    if call.form != "routed":
        return part.ids
    cfg, weights = build(call)
    layer = make_layer(call, weights, cfg)
    return route(router_logits(part.x, layer.router_weight), cfg)[0]


def expected_bytes(call: Call, size: int) -> list[dict[str, int]]:
    """Bytes that each rank sends to others, by the formulas of `ExpertParallel`, by hand."""
    k = 1 if call.case.weight_on_input else min(ref.K, call.experts)
    assert isinstance(call.mode, Exchange)
    head = 8 * k if call.mode.pre_reduce else 4 * k + 4
    row = 2 * ref.H if call.case.activations == "bf16" else 9 * ref.H // 16 + 4
    row += head
    row = math.ceil(row / 16) * 16
    parts = [given(call, r, size) for r in range(size)]
    base, more = divmod(call.experts, size)
    home = [r for r in range(size) for _ in range(base + (r < more))]  # expert -> rank
    tokens = [[0] * size for _ in range(size)]
    slots = [[0] * size for _ in range(size)]
    for r, part in enumerate(parts):
        for ids in chosen_ids(call, part).tolist():
            ranks = [home[e] for e in ids if 0 <= e < call.experts]
            for d in set(ranks):
                tokens[r][d] += 1
            for d in ranks:
                slots[r][d] += 1
    capacity = call.mode.capacity
    if capacity is not None:
        pairs = call.mode.split * (size - 1)
        places = math.ceil(capacity.tokens / call.mode.split)
        rows = places * k
        if capacity.rows is not None:
            share = max(math.ceil(capacity.rows / call.mode.split), k)
            rows = min(rows, share, capacity.rows)
        back = places if call.mode.pre_reduce else rows
        one = {"dispatch": pairs * places * row}
        return [one | {"return": pairs * back * 2 * ref.H}] * size
    back_rows = tokens if call.mode.pre_reduce else slots
    return [
        {
            "counts": (16 * call.mode.split + 8) * (size - 1),
            "dispatch": row * (sum(tokens[r]) - tokens[r][r]),
            "return": 2 * ref.H * sum(back_rows[s][r] for s in range(size) if s != r),
        }
        for r in range(size)
    ]
