"""The call on a CUDA GPU: nothing waits, a graph replays new inputs, spoilt scales give NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe import mega
from tests.mega import data
from tests.mega.data import E, H, I, K, T

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


def fill(buffer: mega.SymmBuffer, seed: int) -> None:
    t = data.tokens(seed=seed)
    buffer.x.copy_(t.codes)
    buffer.x_sf.copy_(data.words(t.scale))
    buffer.topk_idx.copy_(t.ids)
    buffer.topk_weights.copy_(t.weights)


@pytest.fixture(scope="module")
def arguments() -> dict[str, Any]:
    of = data.layer(1.5)
    pairs = (tuple(t.cuda() for t in data.published(p)) for p in (data.gate_up(of), data.down(of)))
    l1, l2 = mega.transform_weights_for_mega_moe(*pairs)
    buffer = mega.get_symm_buffer_for_mega_moe(None, E, T, K, H, I, backend="torch")
    assert buffer.device.type == "cuda"
    fill(buffer, 1)
    g13, g2 = data.alphas(of)
    return {
        "l1_weights": l1,
        "l2_weights": l2,
        "sym_buffer": buffer,
        "l1_alphas": g13.cuda(),
        "l2_alphas": g2.cuda(),
        "a2_scales": torch.full((E,), 4e-3, device="cuda"),
        "activation_clamp": 1.5,
        "cumulative_local_expert_recv_stats": torch.zeros(E, dtype=torch.int32, device="cuda"),
    }


def call(arguments: dict[str, Any], **changed: Any) -> torch.Tensor:
    y = torch.full((T, H), torch.nan, dtype=torch.bfloat16, device="cuda")
    mega.fp4_fp4_mega_moe(y, **(arguments | changed))
    return y


def test_nothing_waits_for_the_device(arguments: dict[str, Any]) -> None:
    call(arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = call(arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(y).all()


def test_a_graph_replays_new_inputs(arguments: dict[str, Any]) -> None:
    buffer, stats = arguments["sym_buffer"], arguments["cumulative_local_expert_recv_stats"]
    call(arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(arguments)
    fill(buffer, 2)
    stats.zero_()
    graph.replay()
    assert torch.equal(stats.cpu(), data.counts(data.tokens(seed=2)))
    want = call(arguments)
    assert torch.equal(y, want) and bool(want.any())
    fill(buffer, 1)


def test_a_scale_that_is_not_positive_gives_nan_for_its_expert(arguments: dict[str, Any]) -> None:
    scales = arguments["a2_scales"].clone()
    scales[3] = 0
    y = call(arguments, a2_scales=scales)
    reached = (data.tokens(seed=1).ids == 3).any(dim=1).cuda()
    assert torch.equal(torch.isnan(y).all(dim=1), reached)
    assert torch.isfinite(y[~reached]).all()
