"""The router's kernels on a real GPU: the bits of the torch router on a CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cute_kernels import compile as compiler
from cute_kernels import router_ops, torch_router
from cute_kernels.torch_router import Selection
from moe import MoEConfig
from moe.router import RouterKernels, route, router_logits
from tests.router_cases import hostile, hostile_logits, router_weight, selections
from tests.small_kernels import assert_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA = torch.device("cuda:0")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "experts"), [(72, 10), (4096, 256), (7168, 390)])
def test_logits(hidden: int, experts: int, dtype: torch.dtype) -> None:
    weight, bias = router_weight(experts, hidden), torch.randn(experts)
    packed = router_ops.pack_weights(weight.to(CUDA))
    x = hostile(1100, hidden, dtype)
    want = router_logits(x, weight, bias)
    for tokens in (0, 1, 16, 17, 64, 65, 200, 300, 700, 1100):  # every kernel
        got = router_ops.router_logits(x[:tokens].to(CUDA), packed, bias.to(CUDA))
        assert_same(got, want[:tokens], f"logits of {tokens}")


def test_digits_made_on_a_gpu_are_those_of_a_cpu() -> None:
    weight = router_weight(37, 200)
    for got, want in zip(router_ops.pack_weights(weight.to(CUDA)), router_ops.pack_weights(weight)):
        assert_same(got.view(torch.int32), want.view(torch.int32), "digits")


@pytest.mark.parametrize(("experts", "top_k"), [(10, 3), (256, 8), (390, 6)])
def test_topk(experts: int, top_k: int) -> None:
    logits, bias = hostile_logits(3000, experts), torch.randn(experts)
    for how in selections(experts, top_k):
        for chooses in (None, bias):
            given = None if chooses is None else chooses.to(CUDA)
            got = router_ops.router_topk(logits.to(CUDA), how, given)
            want = torch_router.select(logits, how, chooses)
            for g, w, name in zip(got, want, ("ids", "weights")):
                assert_same(g, w, f"{name} of {how}")


def test_torch_scores_of_a_gpu_are_those_of_a_cpu() -> None:
    logits = hostile_logits(500, 64)
    for kind in ("softmax", "sigmoid", "sqrtsoftplus"):
        got = torch_router.scores(logits.to(CUDA), kind)
        assert_same(got, torch_router.scores(logits, kind), kind)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_topk_by_token_id(integer: torch.dtype) -> None:
    """An id past the vocabulary is padding: no read outside the table."""
    table = torch.stack([torch.randperm(30)[:4] for _ in range(11)]).to(integer)
    ids = torch.tensor([0, -1, 10, 3, 9, 5, 2]).to(integer)
    how, logits = Selection(4, "sqrtsoftplus"), hostile_logits(7, 30)
    want = torch_router.select(logits, how, None, table, ids)
    got = router_ops.router_topk(logits.to(CUDA), how, None, table.to(CUDA), ids.to(CUDA))
    for g, w, name in zip(got, want, ("ids", "weights")):
        assert_same(g, w, name)
    ids[2], ids[5] = 11, 2**31 - 1
    got = router_ops.router_topk(logits.to(CUDA), how, None, table.to(CUDA), ids.to(CUDA))
    assert got[0][[1, 2, 5]].cpu().tolist() == [[-1] * 4] * 3
    assert not got[1][[1, 2, 5]].any()


def test_graph_replays_new_tokens_and_new_weights_and_nothing_waits() -> None:
    cfg = MoEConfig(256, 64, 30, 4, scoring="sigmoid", routed_scaling_factor=2.5)
    router = RouterKernels.of("sm90", cfg)
    assert router is not None
    weight, bias = router_weight(30, 256), torch.randn(30)
    mine = (weight.to(CUDA), None, bias.to(CUDA), None)
    x = torch.randn(24, 256).bfloat16()
    given = x.to(CUDA)
    router.warmup(24, mine)
    router(given, mine, None)
    compiler.reset_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = router(given, mine, None)
    for seed in range(2):
        g = torch.Generator().manual_seed(seed)
        x, weight = torch.randn(24, 256, generator=g).bfloat16(), weight * (1 + seed)
        weight[3] += seed
        mine[0].copy_(weight)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            router.weights(mine[0])  # in the memory that the graph reads
        finally:
            torch.cuda.set_sync_debug_mode("default")
        given.copy_(x)
        graph.replay()
        want = route(router_logits(x, weight), cfg, bias)
        assert_same(ids, want[0], "ids")
        assert_same(weights, want[1] * 2.5, "weights")
    assert compiler.stats().compiles == 0
