"""A caller written against the published NVFP4 call sequence of DeepGEMM: make the buffer,
transform the weights once, copy the inputs, call, read y. Only the module it imports is another."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import moe.mega as deep_gemm
from tests.check import assert_blocks_close
from tests.layers import poison_new_tensors, same_bits
from tests.mega import data
from tests.mega.data import E, H, I, K, T, Tokens
from tests.oracle import OracleLayer

LIMIT = 1.5


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """The caller's own cast: codes int8 and int32 words, no outer scale, all by plain PyTorch."""
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    blocks = x.float().unflatten(-1, (-1, 16))
    sf = (blocks.abs().amax(-1) / 6).clamp_min(2.0**-9).to(torch.float8_e4m3fn)
    scaled = blocks / sf.float().unsqueeze(-1)
    code = (scaled.abs().unsqueeze(-1) - grid).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = code.flatten(-2).to(torch.uint8).unflatten(-1, (-1, 2))
    return (pairs[..., 0] | (pairs[..., 1] << 4)).view(torch.int8), sf.view(torch.int32)


def run(
    group: dist.ProcessGroup, of: OracleLayer, x: tuple[Tensor, Tensor], t: Tokens, repeats: int = 1
) -> tuple[Tensor, Tensor]:
    """y and the statistics of ``repeats`` calls that started from 5."""
    num_tokens = t.count
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(
        group, E, T + 7, K, H, I, num_shared_experts=0, mma_type="fp4xfp4"
    )
    transformed_l1, transformed_l2 = deep_gemm.transform_weights_for_mega_moe(
        data.published(data.gate_up(of)), data.published(data.down(of))
    )
    l1_alphas, l2_alphas = data.alphas(of)
    stats = torch.full((E,), 5, dtype=torch.int32)
    for _ in range(repeats):
        buffer.x[:num_tokens].copy_(x[0].view(torch.uint8))
        buffer.x_sf[:num_tokens].copy_(x[1])
        buffer.topk_idx[:num_tokens].copy_(t.ids)
        buffer.topk_weights[:num_tokens].copy_(t.weights)
        y = torch.empty((num_tokens, H), dtype=torch.bfloat16)
        deep_gemm.fp4_fp4_mega_moe(
            y=y,
            l1_weights=transformed_l1,
            l2_weights=transformed_l2,
            sym_buffer=buffer,
            shared_l1_weights=None,
            shared_l2_weights=None,
            x_bf16=None,
            cumulative_local_expert_recv_stats=stats,
            activation_clamp=LIMIT,
            fast_math=False,
            l1_alphas=l1_alphas,
            l2_alphas=l2_alphas,
            a2_scales=None if of.gh is None else data.tensor(of.gh),
            routed_scaling_factor=1.0,
        )
    assert buffer.buffer.nbytes > 0
    buffer.destroy()
    return y, stats


@pytest.mark.parametrize("static", [False, True], ids=["no_a2", "a2"])
def test_published_call_sequence(
    group: dist.ProcessGroup, static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison_new_tensors(monkeypatch)
    of = data.layer(LIMIT, gh=static)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(3)).bfloat16()
    codes, sf = quantise(x)
    t = dataclasses.replace(
        data.tokens(), codes=codes.view(torch.uint8), scale=sf.view(torch.uint8)
    )
    y, stats = run(group, of, (codes, sf), t, repeats=3)
    assert same_bits(y, data.stages(of, t, LIMIT).y)
    assert torch.equal(stats, 5 + 3 * data.counts(t))
    assert_blocks_close(y, data.oracle_y(of, t))
    assert not y[1].any() and (t.ids[1] < 0).all()


def test_a_corrupted_y_is_noticed(group: dist.ProcessGroup) -> None:
    of, t = data.layer(LIMIT), data.tokens()
    y, _ = run(group, of, (t.codes, data.words(t.scale)), t)
    want, other = data.stages(of, t, LIMIT).y, data.oracle_y(of, t)
    assert same_bits(y, want)
    assert_blocks_close(y, other)
    lost_block, scaled, lost_row = y.clone(), y.clone(), y.clone()
    lost_block[:, 16:32] = 0
    scaled *= 0.98
    lost_row[4] = 0
    for broken in (lost_block, scaled, lost_row):
        assert not same_bits(broken, want)
        with pytest.raises(AssertionError):
            assert_blocks_close(broken, other)


def test_readme_sequence_with_positions(group: dist.ProcessGroup) -> None:
    """The short form of the README: positions only, no keyword."""
    of, t = data.layer(), data.tokens()
    buffer = deep_gemm.get_symm_buffer_for_mega_moe(group, E, T, K, H, I)
    l1, l2 = deep_gemm.transform_weights_for_mega_moe(
        data.published(data.gate_up(of)), data.published(data.down(of))
    )
    buffer.x[:T].copy_(t.codes)
    buffer.x_sf[:T].copy_(data.words(t.scale))
    buffer.topk_idx[:T].copy_(t.ids)
    buffer.topk_weights[:T].copy_(t.weights)
    y = torch.empty((T, H), dtype=torch.bfloat16)
    assert deep_gemm.fp4_fp4_mega_moe(y, l1, l2, buffer) is None
    ones = dataclasses.replace(of, gate=_unit(of.gate), up=_unit(of.up), down=_unit(of.down))
    assert same_bits(y, data.stages(ones, t).y)


def _unit(part):
    return part[0], part[1], part[2] * 0 + 1


def test_a_rank_without_tokens_calls_too(group: dist.ProcessGroup) -> None:
    t = data.tokens(0)
    y, stats = run(group, data.layer(LIMIT), (t.codes, data.words(t.scale)), t)
    assert y.shape == (0, H)
    assert torch.equal(stats, torch.full((E,), 5, dtype=torch.int32))
