"""A layer over ranks as a module: scratch memory, files, copies, groups of its own, and the SM100
kernels in the simulator."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cute_kernels import compile as compiler
from cute_kernels import exchange_ops, gemm_ops
from moe import (
    Capacity,
    Exchange,
    ExpertParallel,
    ExpertWeights,
    MoE,
    MoEConfig,
    Workspace,
    dispatch,
)
from moe.exchange import Wire
from moe.experts import Numerics
from moe.failures import RankError
from moe.workspace import total_bytes
from tests import test_reference as ref
from tests.layers import same_bits, unit_layer
from tests.parallel import jobs
from tests.parallel.jobs import Call
from tests.parallel.ranks import run_ranks, values
from tests.test_reference import Case

MEMORY_MODES = {
    "counts": Exchange(),
    "summed": Exchange(pre_reduce=True),
    "places": Exchange(capacity=Capacity(5, 11)),
    "summed places": Exchange(True, Capacity(5)),
    "two parts": Exchange(split=2),
    "places of two parts": Exchange(capacity=Capacity(5, 11), split=2),
}


def layer_of(call: Call, mode: Any, **options: Any) -> tuple[MoE, jobs.Given]:
    parallel = ExpertParallel(None, call.experts, mode=mode)
    cfg, weights = jobs.build(call)
    local = parallel.local(weights)
    layer = jobs.make_layer(call, local, cfg, parallel=parallel, **options)
    return layer, jobs.given(call, parallel.rank, parallel.size)


def memory(rank: int, size: int) -> dict[str, Any]:
    """Buffers of two calls: every slot of every rank to rank 0, and every token to every rank."""
    out: dict[str, Any] = {}
    before = dispatch.allocate
    for name, mode in MEMORY_MODES.items():
        taken = []
        for routing in ("all to the first", "spread"):
            call = Call("memory", counts=(5,), routing=routing)
            layer, part = layer_of(call, mode)

            def seen(buffers: Any, *rest: Any, taken: list[Any] = taken) -> Any:
                taken.append([b.nbytes for b in buffers])
                return before(buffers, *rest)

            dispatch.allocate = seen
            y = jobs.run_layer(layer, call, part)
            dispatch.allocate = before
            plan = layer.plan_memory(5)
            layer.workspace = Workspace(plan)
            again = jobs.run_layer(layer, call, part)
            assert same_bits(again, y)
        error = None
        if mode.capacity is not None:
            layer.workspace = Workspace(plan - 1)
            with pytest.raises((ValueError, RankError)) as caught:
                jobs.run_layer(layer, call, part)
            error = str(caught.value)
        exchange = layer._call(layer.parallel)
        buffers = [b.nbytes for b in exchange.buffers([exchange.worst(5)] * mode.split)]
        out[name] = {"plan": plan, "buffers": buffers, "taken": taken, "error": error}
    return out


def test_h37_the_plan_is_what_the_worst_calls_take(tmp_path: Path) -> None:
    """H37: with a capacity every call takes the plan, to the byte. Else each buffer is as large as
    some routing makes it, and no larger."""
    ranks = values(run_ranks(3, memory, path=tmp_path))
    for name, mode in MEMORY_MODES.items():
        for rank, got in enumerate(r[name] for r in ranks):
            plan, buffers, taken = got["plan"], got["buffers"], got["taken"]
            assert plan == sum(-(-n // 256) * 256 for n in buffers)
            if mode.capacity is not None:
                assert taken == [buffers, buffers] and plan == ranks[0][name]["plan"]
                assert f"needs {plan}: size it with MoE.plan_memory" in ranks[0][name]["error"]
            elif rank == 0 and mode.split == 1:  # 5 tokens are not twice as many
                assert [max(pair) for pair in zip(*taken, strict=True)] == buffers
            else:
                assert all(n <= most for t in taken for n, most in zip(t, buffers, strict=True))


def planned(parallel_size: int, tokens: int, mode: Exchange) -> int:
    """`MoE.plan_memory` of a layer of rank 0 among so many, without a group: DeepSeek-V4-Pro."""
    cfg = MoEConfig(7168, 3072, 384, 6)
    empty = unit_layer(64, 64, 4, 2).weights.select(0, 1)
    fake = ExpertParallel.__new__(ExpertParallel)
    fake.size, fake.num_experts = parallel_size, 384
    local = dispatch.LocalExperts(cfg, empty, Numerics(), "reference")  # no scratch of its own
    call = dispatch.ExchangeCall(fake, 1, local, mode)
    return total_bytes(call.buffers([call.worst(tokens)]))


def test_large_calls_share_few_sizes_of_memory() -> None:
    """Without a capacity, and without a workspace; an eighth more at most."""
    local = dispatch.LocalExperts(*small_local(), Numerics(), "reference")
    fake = ExpertParallel.__new__(ExpertParallel)
    call = dispatch.ExchangeCall(fake, 1, local, Exchange())
    cpu = torch.device("cpu")
    assert call._block(dispatch._LARGE - 1, cpu) is None
    fixed = dispatch.ExchangeCall(fake, 1, local, Exchange(capacity=Capacity(4)))
    assert fixed._block(2**27, cpu) is None
    sizes = set()
    for nbytes in range(dispatch._LARGE, 2 * dispatch._LARGE, 2**20 + 13):
        block = call._block(nbytes, cpu)
        assert block is not None and nbytes <= block.nbytes <= 1.125 * nbytes
        sizes.add(block.nbytes)
    assert len(sizes) == 9


def small_local() -> tuple[MoEConfig, ExpertWeights]:
    return MoEConfig(64, 64, 4, 2), unit_layer(64, 64, 4, 2).weights


def test_h37_bytes_follow_the_formula_and_grow_with_the_ranks() -> None:
    """1024 tokens a rank, top 6, H 7168: sent rows min(6, W) T, received W T, computed 6 W T,
    returned 6 T; nothing multiplies by the ranks twice."""
    tokens, row, back = 1024, Wire(7168, 6, True, False).row_bytes, 2 * 7168
    sizes = {}
    for ranks in (1, 2, 4, 8, 16, 32):
        want = tokens * (row * (min(6, ranks) + ranks) + back * (6 * ranks + 6))
        sizes[ranks] = planned(ranks, tokens, Exchange())
        assert sizes[ranks] == want
        fixed = planned(ranks, tokens, Exchange(capacity=Capacity(tokens, 6 * tokens)))
        assert fixed == ranks * tokens * (2 * row + 2 * back * 6)
    assert sizes[32] < 32 * sizes[1]
    table = (Path(__file__).parents[2] / "docs" / "expert_parallel.md").read_text()
    for ranks, size in sizes.items():
        assert f"| {ranks} | {size / 2**20:.0f} |" in table
    places = {2: (1024, 6144, 352), 8: (1024, 1536, 400), 32: (358, 384, 425)}
    for ranks, (places_of, rows, mebibytes) in places.items():
        size = planned(ranks, tokens, Exchange(capacity=Capacity(places_of, rows)))
        assert f"{size / 2**20:.0f}" == str(mebibytes)
        assert f" {mebibytes} |\n" in table


# ---- a module ------------------------------------------------------------------------------------


def module(rank: int, size: int, path: str) -> None:
    call = Call("module", counts=(6, 2), form="routed")
    layer, part = layer_of(call, Exchange())
    y = jobs.run_layer(layer, call, part)
    assert f"rank {rank} of 2, experts {3 * rank}:{3 * rank + 3} of 6" in repr(layer.parallel)
    twin = copy.deepcopy(layer)
    assert twin.parallel is layer.parallel
    assert same_bits(jobs.run_layer(twin, call, part), y)
    assert layer.state_dict()["l1_data"].shape[0] == 3
    file = f"{path}/{rank}.safetensors"
    layer.save_packed(file)
    parallel = ExpertParallel(dist.group.WORLD, 6, max_tokens=6, timeout=30.0)
    back = MoE.load_packed(file, backend="torch", parallel=parallel)
    assert same_bits(jobs.run_layer(back, call, part), y)
    parallel.close()
    with pytest.raises(RankError, match=r"refused after a failure \(closed\)"):
        jobs.run_layer(back, call, part)
    assert same_bits(jobs.run_layer(layer, call, part), y), "the other group goes on"


def test_files_copies_and_a_group_of_its_own(tmp_path: Path) -> None:
    values(run_ranks(2, module, str(tmp_path), path=tmp_path / "ranks"))


def h50(rank: int, size: int) -> list[torch.Tensor]:
    parallel = ExpertParallel(None, 4)
    cfg = unit_layer(128, 64, 4, 1).cfg
    weights = parallel.local(unit_layer(128, 64, 4, 1).weights)
    layer = MoE(cfg, weights, backend="torch", parallel=parallel)
    count = 4 if rank == 0 else 0
    x = torch.ones(count, 128)
    return [
        layer.experts(x, torch.full((count, 1), expert), torch.ones(count, 1)) for expert in (1, 3)
    ]


def test_h50_a_rank_without_tokens(tmp_path: Path) -> None:
    """H50: 4 tokens on rank 0 for experts of rank 0, then for experts of rank 1; none on rank 1."""
    mine, other = values(run_ranks(2, h50, path=tmp_path, timeout=30.0))
    assert [y.shape for y in other] == [(0, 128), (0, 128)]
    silu = 1 / (1 + torch.e**-1)
    for y, expert in zip(mine, (1, 3), strict=True):
        want = torch.full((4, 128), (expert + 1) * silu)
        torch.testing.assert_close(y, want, rtol=1e-2, atol=0)


def h52(rank: int, size: int, same: bool) -> Any:
    """Static scale of x; without ``same`` each rank has the maximum of its own experts."""
    _, cfg, weights = ref.build(Case(mode="static"))
    per_expert = torch.tensor([1.0, 2, 3, 4, 4, 8]) * 1e-3
    parallel = ExpertParallel(None, 6)
    first, end = parallel.expert_range
    local = parallel.local(weights)
    gx = per_expert.max() if same else per_expert[first:end].max()
    local = ExpertWeights(**dict(local.tensors()) | {"gx": gx}, first_expert=first)
    layer = MoE(cfg, local, backend="torch", activation_scale="static", parallel=parallel)
    b = ref.batch(Case(), seed=rank)
    return layer.experts(b.x, b.ids, b.weights)


def test_h52_one_scale_for_all_ranks(tmp_path: Path) -> None:
    """H52: the maximum over all experts gives the bits of one rank; one maximum per rank is refused
    at construction."""
    _, cfg, weights = ref.build(Case(mode="static"))
    weights = ExpertWeights(**dict(weights.tensors()) | {"gx": torch.tensor(8e-3)})
    whole = MoE(cfg, weights, backend="torch", activation_scale="static")
    for rank, y in enumerate(values(run_ranks(2, h52, True, path=tmp_path / "same"))):
        b = ref.batch(Case(), seed=rank)
        assert same_bits(y, whole.experts(b.x, b.ids, b.weights))
    for outcome in run_ranks(2, h52, False, path=tmp_path / "own"):
        assert outcome.error is not None
        assert "ranks disagree about gx (rank 0: 0.003" in outcome.error


# ---- kernels -------------------------------------------------------------------------------------


def small_layer(static: bool, parallel: ExpertParallel | None = None) -> MoE:
    """Of a size that the kernels take."""
    gen = torch.Generator().manual_seed(0)
    gate, up = (torch.randn(4, 64, 64, generator=gen) * 0.1 for _ in range(2))
    gh = torch.full((4,), 2e-3) if static else None
    weights = ExpertWeights.from_bf16(gate, up, gate.mT.contiguous(), gh=gh)
    weights = weights if parallel is None else parallel.local(weights)
    return MoE(MoEConfig(64, 64, 4, 2), weights, backend="sim", parallel=parallel)


def small_batch(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(rank)
    count = 3 - rank
    ids = torch.rand(count, 4, generator=gen).argsort(dim=1)[:, :2].int()
    ids[0] = torch.tensor([3 * rank, 3 - 3 * rank])  # one expert here, one there
    return (
        torch.randn(count, 64, generator=gen).bfloat16(),
        ids,
        torch.rand(count, 2, generator=gen),
    )


SIMULATED = {  # mode, and whether h has a static scale
    "counts": (Exchange(), False),
    "places": (Exchange(capacity=Capacity(4, 6), split=2), True),
    "summed": (Exchange(pre_reduce=True, capacity=Capacity(4)), True),
}


def on_the_simulator(rank: int, size: int, warm: bool) -> dict[str, torch.Tensor]:
    out = {}
    for name, (mode, static) in SIMULATED.items():
        layer = small_layer(static, ExpertParallel(None, 4, mode=mode))
        if warm:
            layer.warmup(3)
        before = compiler.stats()
        out[name] = layer.experts(*small_batch(rank))
        assert (compiler.stats() == before) == warm, "does the call compile or load a kernel?"
        assert layer.parallel is not None
        layer.parallel.check()
    return out


@pytest.mark.skipif(not compiler.simulated(), reason="the simulator needs the DSL and a C compiler")
@pytest.mark.parametrize(
    "warm", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["cold", "warm"]
)
def test_the_kernels_compute_what_they_receive(warm: bool, tmp_path: Path) -> None:
    """Tokens quantised by the kernels of one rank, computed by those of another: the bits of the
    kernels on one rank. After `warmup` a call compiles nothing."""
    ranks = values(run_ranks(2, on_the_simulator, warm, path=tmp_path, timeout=300.0))
    for rank in range(2):
        want = small_layer(False).experts(*small_batch(rank))
        assert same_bits(ranks[rank]["counts"], want)
        want = small_layer(True).experts(*small_batch(rank))
        assert same_bits(ranks[rank]["places"], want)
        want = want.float()
        assert 0 < want.abs().amax() < 64
        error = (ranks[rank]["summed"].float() - want).abs()
        assert (error <= 2.0**-6 * want.abs().amax()).all()


@pytest.mark.skipif(not compiler.simulated(), reason="the simulator needs the DSL and a C compiler")
@pytest.mark.parametrize("mode", [Exchange(), Exchange(capacity=Capacity(4, 6))], ids=str)
def test_after_a_warm_up_no_routing_compiles_a_kernel(
    mode: Exchange, monkeypatch: pytest.MonkeyPatch
) -> None:
    """int32 and int64 ids, of one CTA and of several, in places that suffice and that may not."""
    monkeypatch.setattr(exchange_ops, "ONE_CTA_TOKENS", 3)
    fake = ExpertParallel.__new__(ExpertParallel)
    fake.size, fake.num_experts, fake.rank = 2, 4, 0
    local = dispatch.LocalExperts(*small_local(), Numerics(), "sim")
    call = dispatch.ExchangeCall(fake, 1, local, mode)
    compiler.clear_memory()
    call.warmup(7)
    before, overflow = compiler.stats(), torch.zeros(3, dtype=torch.int64)
    with gemm_ops.without_launches():
        for count in range(1, 8):
            for dtype in (torch.int32, torch.int64):
                ids = torch.zeros((count, 2), dtype=dtype)
                for room in ((4, 6), (7, 14)) if mode.capacity else (None,):
                    call.steps.book(ids, room, overflow)
    assert compiler.stats() == before


@pytest.mark.skipif(not compiler.simulated(), reason="the simulator needs the DSL and a C compiler")
@pytest.mark.parametrize("mode", [Exchange(), Exchange(capacity=Capacity(4, 6))], ids=str)
@pytest.mark.parametrize("experts", [2, 0])
def test_after_a_warm_up_no_tokens_compile_a_kernel(experts: int, mode: Exchange) -> None:
    """Of every dtype; a rank without experts sends and combines like the others."""
    fake = ExpertParallel.__new__(ExpertParallel)
    fake.size, fake.num_experts, fake.rank = 3, 4, 2
    cfg, weights = small_local()
    weights = weights.select(4 - experts, 4)
    call = dispatch.ExchangeCall(
        fake, 1, dispatch.LocalExperts(cfg, weights, Numerics(), "sim"), mode
    )
    compiler.clear_memory()
    cold = compiler.stats()
    call.warmup(5)
    before = compiler.stats()
    assert before != cold
    with gemm_ops.without_launches():
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, ids = torch.zeros((3, 64), dtype=dtype), torch.zeros((3, 2), dtype=torch.int32)
            for shared in (None, x):
                call._alone(x, ids, torch.ones(3, 2), shared)
    assert compiler.stats() == before
