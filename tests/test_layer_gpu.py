"""The PyTorch backend on a CUDA GPU: no waiting, graphs, and the reference within the stated
bound.
"""

from __future__ import annotations

import pytest
import torch

from moe import ExpertWeights, MoE, MoEConfig, SwiGLU, reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
H, I, E, K = 512, 320, 16, 4  # noqa: E741


@pytest.fixture(scope="module")
def layer() -> MoE:
    g = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g)

    weights = ExpertWeights.from_bf16(rand(E, I, H) * 0.05, rand(E, I, H) * 0.05, rand(E, H, I))
    cfg = MoEConfig(H, I, E, K, activation=SwiGLU(limit=10.0))
    return MoE(cfg, weights.to("cuda"), router_weight=rand(E, H).cuda(), backend="torch")


def tokens(n: int, seed: int = 1) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, H, generator=g).bfloat16().cuda()


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_forward_never_waits_for_the_device(layer: MoE, activations: str) -> None:
    router = layer.router_weight
    other = MoE(
        layer.cfg, layer.weights, router_weight=router, backend="torch", activations=activations
    )
    x = tokens(33)
    other(x)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):  # the mode itself works
            x.sum().item()
        other(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_cuda_graph_replays_new_input_and_routing(layer: MoE) -> None:
    x = tokens(48)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    x.copy_(tokens(48, seed=2))
    graph.replay()
    torch.testing.assert_close(y, layer(x), rtol=0, atol=0)


# Rounding the accumulators to bf16 moves h by about 2^-9. With quantised h that flips a few per
# cent of its codes by one step, a quarter of their value: about 3 % of y.
@pytest.mark.parametrize(("activations", "bound"), [("nvfp4", 0.06), ("bf16", 0.01)])
@pytest.mark.parametrize("n", [1, 7, 300])
def test_output_matches_the_reference_within_the_bf16_rounding(
    layer: MoE, n: int, activations: str, bound: float
) -> None:
    x = tokens(n)
    ids = torch.stack([torch.randperm(E)[:K] for _ in range(n)]).int().cuda()
    weights = torch.rand(n, K).cuda()
    other = MoE(layer.cfg, layer.weights, backend="torch", activations=activations)
    y = other.experts(x, ids, weights)
    want = reference.experts(x, ids, weights, layer.cfg, layer.weights, activations)
    error = (y.float() - want.y.float()).norm() / want.y.float().norm()
    assert torch.isfinite(y).all()
    assert error < bound, f"relative error {error:.4f}"


def test_empty_batch_and_padding(layer: MoE) -> None:
    assert layer(tokens(0)).shape == (0, H)
    ids = torch.full((3, K), -1, dtype=torch.int32, device="cuda")
    y = layer.experts(tokens(3), ids, torch.ones(3, K, device="cuda"))
    assert torch.equal(y, torch.zeros_like(y))
