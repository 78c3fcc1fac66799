"""How many operators one call over ranks is made of: each is a launch that the host pays for, and a
node of a CUDA graph."""

from __future__ import annotations

import collections
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from moe import Capacity, Exchange, ExpertParallel, MoE
from moe import layer as layer_module
from tests import test_reference as ref
from tests.layers import build
from tests.parallel.ranks import run_ranks, values
from tests.test_reference import Case

# what launches nothing: views, and memory without values
QUIET = ("alias", "as_strided", "detach", "empty", "empty_like", "expand", "narrow", "new_empty",
         "permute", "select", "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze",
         "view", "_unsafe_view", "scalar_tensor")  # fmt: skip
FEW = 16  # tokens of the case, more than enough
MODES = {
    "counts": (Exchange(), 14),
    "places": (Exchange(capacity=Capacity(FEW)), 11),
    "limited": (Exchange(capacity=Capacity(FEW, 12)), 11),
    "summed": (Exchange(pre_reduce=True), 15),
}


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in QUIET:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def count(rank: int, size: int) -> dict[str, dict[str, int]]:
    layer_module.choose_backend = lambda name, device: name  # as if this were a Hopper GPU
    _, cfg, weights = ref.build(Case())
    out = {}
    for name, (mode, _) in MODES.items():
        parallel = ExpertParallel(None, cfg.num_experts, mode=mode)
        layer = MoE(cfg, parallel.local(weights), backend="sm90", parallel=parallel)
        b = ref.batch(Case(), seed=rank)
        assert len(b.x) <= FEW
        layer.experts(b.x, b.ids, b.weights)
        with Launches() as launches:
            layer.experts(b.x, b.ids, b.weights)
        out[name] = dict(launches.seen)
    return out


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    return values(run_ranks(2, count, path=tmp_path_factory.mktemp("launches")))


@pytest.mark.parametrize("name", MODES)
def test_a_call_stays_small(name: str, seen: list[dict[str, dict[str, int]]]) -> None:
    """Another launch needs a reason, and a new number here."""
    for ops in (rank[name] for rank in seen):
        assert ops["sm90_grouped_gemm"] == 2 and ops["combine"] >= 1  # it saw the layer
        assert ops["alltoall_base_"] == (2 if MODES[name][0].capacity else 3)
        assert sum(ops.values()) <= MODES[name][1], ops


def test_one_rank_launches_its_kernels_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_module, "choose_backend", lambda name, device: name)
    layer, b = build(Case(), backend="sm90"), ref.batch(Case())
    layer.experts(b.x, b.ids, b.weights)
    with Launches() as launches:
        layer.experts(b.x, b.ids, b.weights)
    kernels = {"sort_routes": 1, "sm90_stage_rows": 2, "sm90_grouped_gemm": 2, "combine": 1}
    assert dict(launches.seen) == kernels
