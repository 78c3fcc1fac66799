"""`fp4_fp4_mega_moe` and `nvfp4_mega_moe_full` on every backend, bit for bit against the reference
on weights laid out without them; every argument that is accepted has an effect."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo  # before a test replaces torch.empty: it looks functions up at import
import torch.nn.functional as F
from torch import Tensor

from cute_kernels import compile as compiler
from moe import mega
from moe.mega import SymmBuffer
from tests.layers import poison_new_tensors, same_bits
from tests.mega import data
from tests.mega.data import E, H, I, K, T, Tokens
from tests.oracle import OracleLayer
from tests.test_layer_compile import HostRead, NoPythonReads, NoSyncingOps

needs_simulator = pytest.mark.skipif(
    not compiler.simulated(), reason="the simulator needs the DSL and a C compiler"
)
BACKENDS = ["reference", "torch", pytest.param("sim", marks=needs_simulator)]


def buffer_of(t: Tokens, backend: str = "torch", **options: Any) -> SymmBuffer:
    """A buffer with ``t`` in its first rows and rubbish behind them."""
    buffer = mega.get_symm_buffer_for_mega_moe(
        None, E, t.count + 3, K, H, I, backend=backend, **options
    )
    assert buffer.x[t.count :].numel()
    buffer.x.fill_(0x77)
    buffer.x_sf.fill_(0x7F7F7F7F)
    buffer.topk_idx.fill_(1)
    buffer.topk_weights.fill_(torch.nan)
    n = t.count
    buffer.x[:n].copy_(t.codes)
    buffer.x_sf[:n].copy_(data.words(t.scale))
    buffer.topk_idx[:n].copy_(t.ids)
    buffer.topk_weights[:n].copy_(t.weights)
    return buffer


def weights_of(of: OracleLayer) -> tuple[mega.MegaWeights, mega.MegaWeights]:
    pair = mega.transform_weights_for_mega_moe(
        data.published(data.gate_up(of)), data.published(data.down(of))
    )
    assert isinstance(pair[0], mega.MegaWeights) and isinstance(pair[1], mega.MegaWeights)
    return pair


def scales_of(of: OracleLayer) -> dict[str, Tensor]:
    g13, g2 = data.alphas(of)
    scales = {"l1_alphas": g13, "l2_alphas": g2}
    return scales if of.gh is None else scales | {"a2_scales": data.tensor(of.gh)}


def empty_y(count: int = T) -> Tensor:
    return torch.full((count, H), torch.nan, dtype=torch.bfloat16)


def call(of: OracleLayer, t: Tokens, backend: str = "torch", **options: Any) -> Tensor:
    y = empty_y(t.count)
    buffer = buffer_of(t, backend)
    mega.fp4_fp4_mega_moe(y, *weights_of(of), buffer, **(scales_of(of) | options))
    return y


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("static", [False, True], ids=["dynamic_h", "a2"])
def test_y_is_the_reference(backend: str, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    of, t = data.layer(1.5, gh=static), data.tokens()
    poison_new_tensors(monkeypatch)
    y = call(of, t, backend, activation_clamp=1.5)
    want = data.stages(of, t, 1.5).y
    if backend == "sim" and static:  # the device's exponential may flip a code of h
        error = (y.float() - want.float()).norm() / want.float().norm()
        assert error < 2e-3, f"{error:.2e}"
    else:
        assert same_bits(y, want)


def test_the_backend_is_visible_and_nothing_falls_back() -> None:
    assert buffer_of(data.tokens(), "auto").backend == "torch"
    assert buffer_of(data.tokens(), "reference").backend == "reference"
    with pytest.raises(RuntimeError, match="'sm100' cannot run on cpu"):
        buffer_of(data.tokens(), "sm100")
    with pytest.raises(ValueError, match="backend must be"):
        buffer_of(data.tokens(), "cutlass")


@pytest.mark.parametrize("limit", [None, float("inf"), 0.25])
def test_the_clamp_is_on_both_sides_and_before_the_product(limit: float | None) -> None:
    finite = limit if limit == 0.25 else None
    of, t = data.layer(finite), data.tokens()
    y = call(of, t, activation_clamp=limit)
    assert same_bits(y, data.stages(of, t, finite).y)
    if finite:
        assert not same_bits(y, data.stages(data.layer(), t).y)


def test_statistics_are_added_for_local_experts() -> None:
    of, t = data.layer(), data.tokens()
    stats = torch.arange(E, dtype=torch.int32)
    for times in (1, 2):
        call(of, t, cumulative_local_expert_recv_stats=stats)
        assert torch.equal(stats, torch.arange(E, dtype=torch.int32) + times * data.counts(t))
    assert 0 < data.counts(t).sum() < t.ids.numel()


def test_a_repeated_expert_counts_and_adds_twice() -> None:
    of, t = data.layer(), data.tokens()
    t.ids[0] = torch.tensor([2, 2, -1])
    stats = torch.zeros(E, dtype=torch.int32)
    y = call(of, t, cumulative_local_expert_recv_stats=stats)
    assert same_bits(y, data.stages(of, t).y)
    assert torch.equal(stats, data.counts(t))


def test_nobody_and_everybody_on_one_expert() -> None:
    of, t = data.layer(), data.tokens()
    t.ids[:] = -1
    assert not call(of, t).any()
    t.ids[:] = E - 1
    assert same_bits(call(of, t), data.stages(of, t).y)


def test_the_scaling_factor_multiplies_the_routing_weights_once() -> None:
    of, t = data.layer(), data.tokens()
    y = call(of, t, routed_scaling_factor=2.5)
    assert same_bits(y, data.stages(of, t, factor=2.5).y)


def test_fast_math_changes_no_bit() -> None:
    of, t = data.layer(), data.tokens()
    assert same_bits(call(of, t, fast_math=True), call(of, t, fast_math=False))


@pytest.mark.parametrize("kind", ["number", "element", "rows"])
def test_outer_scales_of_x(kind: str) -> None:
    of = data.layer()
    t = data.tokens(scaled=kind == "rows")
    if kind != "rows":
        t.gx.fill_(0.375)
    buffer, y = buffer_of(t), empty_y()
    assert (buffer.input_global_scale == 1).all()
    buffer.input_global_scale = {"number": 0.375, "element": t.gx[:1], "rows": t.gx}[kind]
    mega.fp4_fp4_mega_moe(y, *weights_of(of), buffer, **scales_of(of))
    assert same_bits(y, data.stages(of, t).y)
    with pytest.raises(ValueError, match="input_global_scale must be"):
        buffer.input_global_scale = torch.ones(T + 4)


@pytest.mark.parametrize("count", [1, 2])
def test_shared_experts_are_added_last(count: int) -> None:
    of, t = data.layer(), data.tokens()
    gen = torch.Generator().manual_seed(4)
    l1 = (torch.randn(2 * count * I, H, generator=gen) / 8).bfloat16()
    l2 = (torch.randn(H, count * I, generator=gen) / 8).bfloat16()
    x = torch.randn(T + 2, H, generator=gen).bfloat16()
    shared = mega.transform_weights_for_mega_moe(l1, l2)
    gate, up = F.linear(x[:T], l1).float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=0.5), up.clamp(-0.5, 0.5)
    h = (gate / (1 + torch.exp(-gate)) * up).bfloat16()
    want = data.stages(data.layer(0.5), t, 0.5, shared=F.linear(h, l2)).y
    buffer, y = buffer_of(t, num_shared_experts=count), empty_y()
    mega.fp4_fp4_mega_moe(
        y, *weights_of(of), buffer, *shared, x, activation_clamp=0.5, **scales_of(of)
    )
    assert same_bits(y, want)
    with pytest.raises(ValueError, match=f"the buffer has {count} shared experts, got none"):
        mega.fp4_fp4_mega_moe(y, *weights_of(of), buffer, **scales_of(of))


def test_full_takes_the_scales_from_the_weights_and_the_buffer() -> None:
    of, t = data.layer(2.0), data.tokens(scaled=True)
    (w13, s13), (w2, s2), (g13, g2) = data.gate_up(of), data.down(of), data.alphas(of)
    buffer = mega.get_symm_buffer(None, E, T, K, H, I, backend="torch")
    assert buffer.experts_start_idx == 0 and buffer.num_experts_per_rank == E
    buffer.x.copy_(t.codes.view(torch.int8))  # the original keeps codes as int8
    buffer.x_sf.copy_(data.words(t.scale))
    buffer.topk_idx.copy_(t.ids)
    buffer.topk_weights.copy_(t.weights)
    buffer.input_global_scale = t.gx
    l1, l2 = mega.finalize_weights(w13, s13, w2, s2, g13, g2)
    y = empty_y()
    assert mega.nvfp4_mega_moe_full(y, l1, l2, buffer, activation_clamp=2.0, fast_math=True) is None
    assert same_bits(y, data.stages(of, t, 2.0).y)


def test_one_buffer_serves_many_layers_and_forgets_those_that_are_gone() -> None:
    t = data.tokens()
    buffer = buffer_of(t)
    layers = [data.layer(seed=s) for s in range(3)]
    prepared = [weights_of(of) for of in layers]
    for _ in range(2):
        for of, pair in zip(layers, prepared):
            y = empty_y()
            mega.fp4_fp4_mega_moe(y, *pair, buffer, **scales_of(of))
            assert same_bits(y, data.stages(of, t).y)
    gone = weakref.ref(prepared[0][0].data)
    del prepared[0], pair
    gc.collect()
    assert gone() is None  # the buffer kept nothing of it
    assert len(buffer.layers) == 2


def test_scales_and_clamp_may_change_between_calls() -> None:
    of, t = data.layer(), data.tokens()
    buffer, pair, y = buffer_of(t), weights_of(of), empty_y()
    for limit, gh in ((None, False), (0.5, True), (None, True), (0.5, False)):
        other = data.layer(limit, gh)
        mega.fp4_fp4_mega_moe(y, *pair, buffer, activation_clamp=limit, **scales_of(other))
        assert same_bits(y, data.stages(other, t, limit).y), (limit, gh)


def test_scales_reach_a_backend_that_packs_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Hopper the weights of a layer are laid out anew, its scales with them; the operators of
    that backend run in plain PyTorch here, with sums in fp64."""
    monkeypatch.setattr("moe.mega.buffer.choose_backend", lambda name, device: name)
    monkeypatch.setattr("moe.layer.choose_backend", lambda name, device: name)
    of, t = data.layer(), data.tokens(scaled=True)
    buffer, pair, y = buffer_of(t, "sm90"), weights_of(of), empty_y()
    buffer.input_global_scale = t.gx
    for limit, gh in ((None, False), (0.5, True)):
        mine = data.layer(limit, gh)
        other = dataclasses.replace(mine, gate=_twice(mine.gate), down=_twice(mine.down))
        for layer in (mine, other, mine):
            mega.fp4_fp4_mega_moe(y, *pair, buffer, activation_clamp=limit, **scales_of(layer))
            assert same_bits(y, data.stages(layer, t, limit).y)
    scales = scales_of(data.layer())
    scales["l1_alphas"].mul_(2)  # in place, as a graph's caller would
    mega.fp4_fp4_mega_moe(y, *pair, buffer, **scales)
    both = dataclasses.replace(of, gate=_twice(of.gate), up=_twice(of.up))
    assert same_bits(y, data.stages(both, t).y)


def _twice(part: Any) -> Any:
    return part[0], part[1], part[2] * 2


def test_a_buffer_on_the_memory_of_another() -> None:
    t = data.tokens()
    first = mega.SymmBuffer(None, E, T, K, H, I, backend="torch")
    second = mega.SymmBuffer(None, E, T, K, H, I, base=first, backend="torch")
    first.x.copy_(t.codes)
    assert torch.equal(second.x, t.codes) and second.buffer is first.buffer
    with pytest.raises(ValueError, match="base must have the same num_max_tokens_per_rank"):
        mega.SymmBuffer(None, E, T + 1, K, H, I, base=first, backend="torch")


def test_sizes_of_the_buffer() -> None:
    buffer = mega.SymmBuffer(None, E, 5, K, H, I)
    assert buffer.x.shape == (5, H // 2) and buffer.x.dtype == torch.uint8
    assert buffer.x_sf.shape == (5, H // 64) and buffer.x_sf.dtype == torch.int32
    assert buffer.topk_idx.shape == (5, K) and buffer.topk_idx.dtype == torch.int64
    assert buffer.topk_weights.shape == (5, K) and buffer.topk_weights.dtype == torch.float32
    assert (buffer.topk_idx == -1).all()
    parts = [buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, buffer.x_scales]
    assert buffer.buffer is not None
    assert buffer.buffer.nbytes == sum(-(-p.nbytes // 256) * 256 for p in parts)
    storage = buffer.buffer.untyped_storage().data_ptr()
    assert all(p.untyped_storage().data_ptr() == storage for p in parts)
    spans = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parts)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_nothing_reads_the_device() -> None:
    """What would make the host wait for a GPU, and break a capture; a2_scales are read where they
    lie on the host, so they are left out."""
    of, t = data.layer(0.5), data.tokens()
    buffer, pair, y = buffer_of(t), weights_of(of), empty_y()
    stats = torch.zeros(E, dtype=torch.int32)
    options = scales_of(of) | {"activation_clamp": 0.5, "routed_scaling_factor": 2.0}
    with NoPythonReads(), NoSyncingOps():
        mega.fp4_fp4_mega_moe(y, *pair, buffer, cumulative_local_expert_recv_stats=stats, **options)
    assert same_bits(y, data.stages(of, t, 0.5, factor=2.0).y)
    with pytest.raises(HostRead), NoPythonReads(), NoSyncingOps():
        bool((stats > 0).any())


def test_compiled_caller_gives_the_same_bits() -> None:
    """The call itself is not traced (it looks its layer up); what is around it may be."""
    of, t = data.layer(), data.tokens()
    buffer, pair, scales = buffer_of(t), weights_of(of), scales_of(of)

    def step(y: Tensor) -> Tensor:
        mega.fp4_fp4_mega_moe(y, *pair, buffer, **scales)
        return y * 2

    compiled = torch.compile(step, backend="aot_eager")
    assert same_bits(compiled(empty_y()), data.stages(of, t).y * 2)


def test_no_autograd_graph() -> None:
    """Shared experts are often Parameters and y may be a leaf: nothing is recorded, and what is
    written is what it is without them."""
    of, t = data.layer(), data.tokens()
    gen = torch.Generator().manual_seed(5)
    w1, w2 = torch.randn(2 * I, H, generator=gen), torch.randn(H, I, generator=gen)
    x = torch.randn(T, H, generator=gen).bfloat16()
    results = []
    for grad in (False, True):
        parts = (torch.nn.Parameter(w.bfloat16(), requires_grad=grad) for w in (w1, w2))
        shared = dict(
            zip(
                ("shared_l1_weights", "shared_l2_weights"),
                mega.transform_weights_for_mega_moe(*parts),
            )
        )
        y, stats = empty_y().requires_grad_(grad), torch.zeros(E, dtype=torch.int32)
        buffer = buffer_of(t, num_shared_experts=1)
        options = {**scales_of(of), **shared, "x_bf16": x}
        options["cumulative_local_expert_recv_stats"] = stats
        mega.fp4_fp4_mega_moe(y, *weights_of(of), buffer, **options)
        assert y.grad_fn is None and y.requires_grad is grad
        assert torch.equal(stats, data.counts(t))
        results.append(y.detach())
    assert same_bits(*results) and results[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bit_7_of_a_token_scale_is_ignored(backend: str) -> None:
    """As the tensor cores do: a backend that decodes bytes must not see a negative scale."""
    of, t = data.layer(), data.tokens()
    want = data.stages(of, t).y
    t.scale[4, 5:7] |= 0x80
    t.scale[0, 0] |= 0x80
    assert same_bits(call(of, t, backend), want)
    t.scale[4, 5] = 0xFF
    assert call(of, t, backend).isnan().any(dim=1).nonzero().flatten().tolist() == [4]
