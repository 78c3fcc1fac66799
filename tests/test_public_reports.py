"""Bugs that users of other libraries reported, as small inputs, H01 to H58.

`WHERE` says where each entry is tested; a test of an entry names it at the start of its docstring.
"""

from __future__ import annotations

import ast
import dataclasses
import gc
import math
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.activations import ReLU2, SwiGLU
from cute_kernels.nvfp4 import SWIZZLE_32_4_4
from cute_kernels.torch_math import TORCH_MATH
from moe import ExpertWeights, MoE, MoEConfig, Workspace, experts, make_plan
from tests import oracle
from tests.layers import (
    OP,
    assert_rows,
    build,
    codes_of_one,
    ids_of,
    poison_new_tensors,
    routing,
    same_bits,
    slice_layer,
    tokens,
    unit_layer,
)
from tests.test_reference import Case

HERE = "test_public_reports.py"
FORMAT = "test_public_reports_format.py"
KERNELS = "test_kernel_reports.py"
CHECKPOINT = "test_checkpoint.py"

WHERE: dict[int, tuple[str, ...]] = {
    1: (HERE,),
    2: ("test_router.py",),
    3: (HERE, KERNELS),
    4: (HERE, KERNELS),
    5: ("test_plan.py",),
    6: ("test_plan.py", HERE),
    7: ("test_plan.py", HERE),
    8: ("test_plan.py", HERE),
    9: ("test_plan.py", HERE),
    10: ("test_router.py",),
    11: ("test_router.py",),
    12: ("test_router.py",),
    13: ("test_router.py", HERE),
    14: (HERE,),
    15: (FORMAT, CHECKPOINT),
    16: (CHECKPOINT,),
    17: (CHECKPOINT,),
    18: (CHECKPOINT,),
    19: (CHECKPOINT,),
    20: ("test_weights.py", CHECKPOINT),
    21: (FORMAT,),
    22: (FORMAT,),
    23: (FORMAT,),
    24: (FORMAT,),
    25: (FORMAT,),
    26: (FORMAT,),
    27: (FORMAT, KERNELS),
    28: ("test_weights.py",),
    29: ("test_weights.py",),
    30: ("test_weights.py", CHECKPOINT),
    31: ("test_gemm_ops.py",),
    32: ("test_plan.py", "test_kernel_reports.py"),
    33: ("test_gemm_ops.py",),
    34: (HERE, KERNELS),
    35: ("test_plan.py", HERE),
    36: ("test_plan.py", HERE),
    37: ("test_plan.py", "parallel/test_layers.py"),
    38: ("test_compile.py",),
    39: ("test_compile.py",),
    40: ("test_compile.py",),
    41: ("test_compile.py",),
    42: ("test_compile.py",),
    43: ("test_compile.py",),
    44: ("test_compile.py",),
    45: ("test_layer.py", KERNELS),
    46: ("test_layer_compile.py",),
    47: (KERNELS,),
    48: (HERE,),
    49: (HERE,),
    50: ("parallel/test_layers.py",),
    51: (HERE, "parallel/test_exchange.py"),
    52: (HERE, "parallel/test_layers.py", "parallel/test_modes.py"),
    53: (HERE,),
    54: ("test_layer_compile.py",),
    55: (CHECKPOINT,),
    56: (KERNELS,),
    57: (KERNELS,),
    58: (HERE,),
}
# Files of this table whose tests do not name the entry in a docstring.
OWN_NAMES = {CHECKPOINT, "test_compile.py"}
SILU1 = 1.0 / (1.0 + math.exp(-1.0))


def entries_named_in(file: Path) -> set[int]:
    """Entries that a test of the file names at the start of its docstring."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            doc = ast.get_docstring(node) or ""
            if doc[:1] == "H" and doc[1:3].isdigit():
                found.add(int(doc[1:3]))
    return found


def test_the_table_covers_every_entry() -> None:
    assert sorted(WHERE) == list(range(1, 59))
    assert all(WHERE.values())


def test_every_file_of_the_table_names_its_entries() -> None:
    folder = Path(__file__).parent
    for name in {n for places in WHERE.values() for n in places} - OWN_NAMES:
        promised = {h for h, places in WHERE.items() if name in places}
        assert promised == entries_named_in(folder / name), name


# ---- poison --------------------------------------------------------------------------------------


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)


def test_the_poison_reaches_new_tensors(poisoned) -> None:
    assert torch.empty(3).isnan().all()
    assert torch.empty_like(torch.zeros(2, dtype=torch.uint8)).tolist() == [0x7F] * 2
    assert torch.zeros(1).new_empty(2, dtype=torch.int32).tolist() == [0x7FFFFFFF] * 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y[0, 16:32].zero_(),
        lambda y: y[0].mul_(0.98),
        lambda y: y[1].add_(1e-30),
        lambda y: y[0, 3:4].fill_(math.nan),
    ],
)
def test_the_comparison_sees_a_lost_block_a_scale_a_zero_and_a_nan(spoil) -> None:
    y = torch.tensor([[SILU1], [0.0]]).expand(2, 64).clone()
    assert_rows(y, [SILU1, 0.0])
    spoil(y)
    with pytest.raises(AssertionError):
        assert_rows(y, [SILU1, 0.0])


# ---- routing and shapes --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_zero_tokens(dtype: torch.dtype, backend: str) -> None:
    """H01: an empty batch has a shape and no error, in the layer and in the quantiser."""
    x = torch.ones(0, 128, dtype=dtype)
    for scale in ("per_token", "static", "per_tensor"):
        layer = unit_layer(128, 128, 8, 2, backend=backend, activation_scale=scale)
        layer.gx = torch.tensor(1.0)
        y = layer.experts(x, torch.zeros(0, 2, dtype=torch.int32), torch.zeros(0, 2))
        assert y.shape == (0, 128) and y.dtype == dtype
    for outer in ("per_tensor", "per_token", 1.0):
        q = nvfp4.quantize(x, outer)
        assert q.data.shape == (0, 64) and q.scale.shape == (0, 8)
        assert nvfp4.quantize(x, outer, SWIZZLE_32_4_4).scale.shape == (0, 8)
        assert q.dequantize().shape == (0, 128)
    grouped = nvfp4.quantize_grouped(x, torch.zeros(9, dtype=torch.int32))
    assert grouped.scale.shape == (0, 8)


def test_experts_without_rows(poisoned) -> None:
    """H03: 5 tokens on experts 2 and 5 only; nothing uninitialised reaches y."""
    layer = unit_layer(128, 128, 8, 2)
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    y = layer.experts(torch.ones(5, 128), ids_of([[2, 5]] * 5), weights)
    assert_rows(y, [(3 * a + 6 * b) * SILU1 for a, b in weights.tolist()])


def test_experts_without_rows_give_the_same_bits_unpoisoned(monkeypatch) -> None:
    """H03: and so does a run on clean memory."""
    x, (ids, weights) = tokens(5), routing(5, 3)
    ids[:] = ids_of([2, 5, -1])
    clean = build().experts(x, ids, weights)
    poison_new_tensors(monkeypatch)
    assert same_bits(build().experts(x, ids, weights), clean)


COUNTS = {
    "one": [4096 if e == 17 else 0 for e in range(32)],
    "edges": [1, 4095, 1, 0, 1] + [0] * 26 + [1],
    "many": [3000] + [1] * 31,
}


@pytest.mark.parametrize("name", COUNTS)
def test_all_tokens_to_one_expert(name: str) -> None:
    """H04: bookkeeping and values of strongly skewed counts, twice the same bits."""
    counts = COUNTS[name]
    ids = torch.arange(32, dtype=torch.int32).repeat_interleave(torch.tensor(counts))
    gen = torch.Generator().manual_seed(0)
    order = torch.randperm(len(ids), generator=gen)
    ids = ids[order].unsqueeze(1)
    plan = make_plan(ids, torch.ones(len(ids), 1), 32)
    assert plan.expert_offsets.diff().tolist() == counts
    source = oracle.random_layer(1, 32, 64, 32, oracle.swiglu)
    layer = MoE(MoEConfig(64, 32, 32, 1), oracle.to_library(source), backend="torch")
    x = torch.randn(len(ids), 64, generator=gen)
    one = torch.ones(len(ids), 1)
    y = layer.experts(x, ids, one)
    assert same_bits(layer.experts(x, ids, one), y)
    sample = sorted({0, len(ids) - 1, *(int((ids == e).int().argmax()) for e in range(0, 32, 5))})
    want = oracle.run(source, x[sample].numpy(), ids[sample].numpy(), one[sample].numpy())
    error = np.abs(y[sample].numpy() - want).max(axis=1) / np.abs(want).max(axis=1)
    assert error.max() < 0.05  # one code of h may have rounded the other way
    assert np.median(error) == 0.0


def test_minus_one_is_not_the_last_expert(poisoned) -> None:
    """H06: empty slots add nothing; a token with two of them is exactly 0."""
    ids, weights = (
        ids_of([[0, -1], [-1, -1], [3, 7]]),
        torch.tensor([[0.75, 0.25], [0.5, 0.5], [0.5, 0.5]]),
    )
    y = unit_layer(128, 128, 8, 2).experts(torch.ones(3, 128), ids, weights)
    assert_rows(y, [0.75 * SILU1, 0.0, 6 * SILU1])


def guarded(tensor: Tensor) -> Tensor:
    """The same contiguous tensor with 4 KiB of 0x7F before and after it."""
    size = tensor.nbytes
    memory = torch.full((size + 8192,), 0x7F, dtype=torch.uint8)
    view = memory[4096 : 4096 + size].view(tensor.dtype).view(tensor.shape)
    view.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return view


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_a_batch_of_padding(poisoned, backend: str, dtype: torch.dtype) -> None:
    """H07: zeros, and nothing outside of the weights is read."""
    layer = unit_layer(128, 128, 8, 6, backend=backend)
    w = layer.weights
    fields = {n: guarded(getattr(w, n)) for n in ("l1_data", "l1_scale", "l2_data", "l2_scale")}
    layer = MoE(layer.cfg, dataclasses.replace(w, **fields), backend=backend)
    x = torch.randn(16, 128)
    ids, weights = torch.full((16, 6), -1, dtype=dtype), torch.full((16, 6), 1 / 6)
    assert not layer.experts(x, ids, weights).any()
    ids[3, 2] = 0  # one real slot beside 95 empty ones, next to the guard
    y = layer.experts(torch.ones(16, 128), ids, weights)
    assert_rows(y, [SILU1 / 6 if t == 3 else 0.0 for t in range(16)])


def test_ids_of_other_integer_types() -> None:
    """H08: int32 and int64 agree, -1 included; others are one TypeError."""
    layer, x = unit_layer(128, 128, 8, 2), torch.ones(3, 128)
    rows, weights = [[5, 2], [7, 0], [-1, 3]], torch.full((3, 2), 0.5)
    want = layer.experts(x, ids_of(rows), weights)
    assert_rows(want, [4.5 * SILU1, 4.5 * SILU1, 2 * SILU1])
    assert same_bits(layer.experts(x, ids_of(rows, torch.int64), weights), want)
    for dtype in (torch.uint32, torch.int16, torch.uint8):
        with pytest.raises(TypeError, match="int32 or int64"):
            layer.experts(x[:2], torch.tensor(rows[:2]).to(dtype), weights[:2])


def test_routing_tensors_that_are_views() -> None:
    """H09: slices of wider tensors and a transposed one equal their copies."""
    layer, x = unit_layer(128, 128, 8, 2), torch.ones(8, 128)
    wide = (torch.arange(64).reshape(8, 8) * 5 // 3 % 8).int()
    weights = torch.rand(8, 8, generator=torch.Generator().manual_seed(0))
    for ids, w in ((wide[:, :2], weights[:, :2]), (wide.t()[:8, :2], weights.t()[:, 3:5])):
        y = layer.experts(x, ids, w)
        assert same_bits(y, layer.experts(x, ids.contiguous(), w.contiguous()))
        assert_rows(y, [((i + 1) * v).sum().item() * SILU1 for i, v in zip(ids, w)])


def test_scaling_factor_once_and_not_on_the_shared_expert() -> None:
    """H13: 2.5 (.5 * 1 + .5 * 2) silu(1) + 10; wrong: 11.0966, 16.8537, 27.7415."""
    router = torch.full((8, 128), -1.0)
    router[:2] = 1.0  # experts 0 and 1 tie at the top: weights .5 and .5
    layer = unit_layer(
        128,
        128,
        8,
        2,
        routed_scaling_factor=2.5,
        router_weight=router,
        shared=lambda x: torch.full_like(x, 10.0),
    )
    assert_rows(layer(torch.ones(1, 128)), [12.741470])
    given = layer.experts(torch.ones(1, 128), ids_of([[0, 1]]), torch.full((1, 2), 0.5))
    assert_rows(given, [1.5 * SILU1])


@pytest.mark.parametrize(("on_input", "want"), [(True, 0.0778074), (False, 0.4403985)])
@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_router_weight_on_the_input(on_input: bool, want: float, activations: str) -> None:
    """H14: gate 2, up 1, weight .25; on both sides it would be .0194519."""
    w13 = codes_of_one(1, 256, 128, torch.tensor([[2 / 128, 1 / 128]]))
    weights = ExpertWeights.from_nvfp4(w13, codes_of_one(1, 128, 128, torch.tensor([1 / 128])))
    cfg = MoEConfig(128, 128, 1, 1, weight_on_input=on_input)
    layer = MoE(cfg, weights, backend="torch", activations=activations)
    y = layer.experts(torch.ones(1, 128), ids_of([[0]]), torch.full((1, 1), 0.25))
    assert_rows(y, [want])


def test_router_weight_on_the_input_needs_top_1() -> None:
    """H14: with two weights there is no one input."""
    with pytest.raises(ValueError, match="weight_on_input"):
        MoEConfig(128, 128, 8, 2, weight_on_input=True)


# ---- sizes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hidden", "count", "local"), [(128, 1, 8), (128, 3, 1), (16, 1, 1)])
def test_sizes_of_one(hidden: int, count: int, local: int) -> None:
    """H34: one token, one expert, one block."""
    layer = unit_layer(hidden, 32, local, 1, activation=ReLU2())
    ids = torch.full((count, 1), local - 1)
    y = layer.experts(torch.ones(count, hidden), ids, torch.ones(count, 1))
    assert y.shape == (count, hidden)
    assert_rows(y, [float(local)] * count)


def test_the_last_of_a_hundred_large_experts() -> None:
    """H35: a stack of 2.2e9 bytes of codes (untouched pages cost nothing): expert 99 reads its own
    weights; an offset that wraps reads zeros."""
    count, hidden, inter = 100, 7168, 3072

    def zeros(*shape: int) -> Tensor:
        return torch.from_numpy(np.zeros(shape, np.uint8))

    l1, l1_scale = zeros(count, 2 * inter, hidden // 2), zeros(count, 2 * inter, hidden // 16)
    l2, l2_scale = zeros(count, hidden, inter // 2), zeros(count, hidden, inter // 16)
    for codes, scale in ((l1, l1_scale), (l2, l2_scale)):
        codes[99], scale[99] = 0x22, 0x38
    assert 99 * l1.stride(0) > 2**31
    scales = (s.view(torch.float8_e4m3fn) for s in (l1_scale, l2_scale))
    weights = ExpertWeights(
        l1,
        next(scales),
        torch.full((count, 2), 1 / hidden),
        l2,
        next(scales),
        torch.full((count,), 1 / inter),
    )
    layer = MoE(MoEConfig(hidden, inter, count, 1), weights, backend="torch")
    y = layer.experts(torch.ones(2, hidden), ids_of([[99], [-1]]), torch.ones(2, 1))
    assert_rows(y, [SILU1, 0.0])


def test_a_plan_for_64_tokens() -> None:
    """H36: 65 tokens are an error before anything runs; every split of 64 tokens fits."""
    layer = unit_layer(128, 128, 8, 8)
    layer.workspace = Workspace(layer.plan_memory(64))
    one = torch.ones(65, 8)
    with pytest.raises(ValueError, match="too small"):
        layer.experts(torch.ones(65, 128), torch.zeros(65, 8, dtype=torch.int32), one)
    y = layer.experts(torch.ones(64, 128), torch.full((64, 8), 3), one[:64])
    assert_rows(y, [8 * 4 * SILU1] * 64)
    ids = torch.arange(8).expand(64, 8).clone()
    ids[63] = torch.tensor([0, 0, 0, 0, 0, 0, 0, 1])  # 70, 64, 63, 63, ...
    y = layer.experts(torch.ones(64, 128), ids, one[:64])
    assert_rows(y, [36 * SILU1] * 63 + [9 * SILU1])


def test_scratch_does_not_grow_with_the_number_of_layers(monkeypatch) -> None:
    """H48: 8 layers, one call each: no scratch lives on."""
    alive: list[weakref.ref[Tensor]] = []
    original = experts.allocate

    def record(*args: Any) -> list[Tensor]:
        made = original(*args)
        alive.extend(weakref.ref(t) for t in made)
        return made

    monkeypatch.setattr(experts, "allocate", record)
    layers = [unit_layer(32, 16, 8, 8) for _ in range(8)]
    ids, weights = torch.arange(8).expand(1024, 8), torch.ones(1024, 8)
    results = [m.experts(torch.ones(1024, 32), ids, weights) for m in layers]
    gc.collect()
    assert len(alive) == 8 * 4 and not [r for r in alive if r() is not None]
    held = sum(b.nbytes for m in layers for b in m.buffers())
    assert held == 8 * layers[0].weights.nbytes
    del results


# ---- sums, ranks, compilation --------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_sums_are_deterministic_and_in_fp32(backend: str) -> None:
    """H49: 256 + 7 * .5 = 259.5, which rounds to 260 in bf16; summed in bf16 it stays 256."""
    experts_count, top_k, count = 16, 8, 64
    source = unit_layer(128, 64, experts_count, top_k)
    w = source.weights
    b2 = torch.full((experts_count, 128), 0.5)
    b2[0] = 256.0
    zero = dataclasses.replace(
        w, l2_data=torch.zeros_like(w.l2_data), b2=b2, b13=torch.zeros(experts_count, 128)
    )
    layer = MoE(source.cfg, zero, backend=backend)
    gen = torch.Generator().manual_seed(0)
    others = torch.stack([torch.randperm(15, generator=gen)[:7] + 1 for _ in range(count)])
    ids = torch.cat([torch.zeros(count, 1, dtype=torch.int64), others], dim=1)
    x = torch.randn(count, 128, generator=gen).bfloat16()
    y = layer.experts(x, ids, torch.ones(count, top_k))
    assert (y == 260).all() and y.dtype == torch.bfloat16
    for _ in range(9):
        assert same_bits(layer.experts(x, ids, torch.ones(count, top_k)), y)


@pytest.mark.parametrize(("count", "ranks"), [(30, 8), (23, 6), (5, 4), (3, 8)])
def test_experts_not_divisible_by_ranks(count: int, ranks: int) -> None:
    """H51: contiguous slices whose sizes differ by one; their sum is the single-rank result. With
    3 experts on 8 ranks five have none: they return zeros."""
    sizes = [count // ranks + (r < count % ranks) for r in range(ranks)]
    source = oracle.random_layer(0, count, 32, 16, oracle.swiglu)
    cfg = MoEConfig(32, 16, count, 2)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(20, 32, generator=gen)
    ids = torch.rand(20, count, generator=gen).argsort(dim=-1)[:, :2]
    weights = torch.rand(20, 2, generator=gen)
    whole = MoE(cfg, oracle.to_library(source), backend="torch").experts(x, ids, weights)
    total, first = torch.zeros_like(whole), 0
    for size in sizes:
        own = {
            n: tuple(a[first : first + size] for a in getattr(source, n))
            for n in ("gate", "up", "down")
        }
        part = oracle.to_library(dataclasses.replace(source, **own), first_expert=first)
        total += MoE(cfg, part, backend="torch").experts(x, ids, weights)
        first += size
    assert first == count
    assert torch.equal(total, whole)


def test_activation_scale_is_the_same_on_every_rank() -> None:
    """H52: static scales of 1e-3 to 8e-3 per expert: the maximum over all experts, on all ranks.
    The maximum over local experts gives other bits."""
    case = Case(mode="static")
    x, (ids, weights) = tokens(20, dtype=torch.float32), routing(20)
    ids[:, 2] = -1
    whole = build(case)
    ranks = [slice_layer(case, 0, 3), slice_layer(case, 3, 6)]
    per_expert = torch.tensor([1.0, 2, 3, 4, 4, 8]) * 1e-3
    whole.gx = per_expert.max()
    for rank in ranks:
        rank.gx = per_expert.max()
    y = whole.experts(x, ids, weights)
    assert torch.equal(sum(r.experts(x, ids, weights) for r in ranks), y)
    ranks[0].gx = per_expert[:3].max()
    assert not torch.equal(sum(r.experts(x, ids, weights) for r in ranks), y)


@pytest.mark.parametrize("hidden", [128, 2880])
def test_fake_and_real_agree(hidden: int) -> None:
    """H53: an output of 2880 columns is 2880 wide under torch.compile too; T = 1, 7, 128."""
    layer = unit_layer(hidden, 32, 4, 2, activation=SwiGLU(limit=10.0))
    compiled = torch.compile(layer.experts, fullgraph=True, backend="aot_eager", dynamic=True)
    w = layer.weights
    for count in (1, 7, 128):
        x = torch.ones(count, hidden)
        ids, weights = torch.arange(2 * count).reshape(count, 2) % 4, torch.ones(count, 2)
        want = layer.experts(x, ids, weights)
        y = compiled(x, ids, weights)
        assert same_bits(y, want) and y.stride() == want.stride() == (hidden, 1)
        offsets = make_plan(ids, weights, 4).expert_offsets
        rows, out = torch.ones(2 * count, 32).bfloat16(), torch.empty(2 * count, hidden)
        arguments = (rows, w.l2_data, w.l2_scale.view(torch.uint8), offsets, out)
        torch.library.opcheck(OP, arguments, test_utils=("test_schema", "test_faketensor"))


def test_the_clamp_comes_before_the_product() -> None:
    """H58: limit 10: gate from above only, up on both sides."""
    pairs = torch.tensor([(20.0, -30), (-50, 5), (3, 12), (20, 30), (-50, -30)])
    h = SwiGLU(limit=10.0)(TORCH_MATH, pairs[:, 0], pairs[:, 1])
    silu = [x / (1 + math.exp(-x)) for x in (10.0, -50.0, 3.0)]
    want = [silu[0] * -10, silu[1] * 5, silu[2] * 10, silu[0] * 10, silu[1] * -10]
    torch.testing.assert_close(h.double(), torch.tensor(want).double(), rtol=1e-6, atol=0)
    bad = torch.tensor([math.nan])
    assert SwiGLU(limit=10.0)(TORCH_MATH, bad, pairs[:1, 1]).isnan().all()
    assert SwiGLU(limit=10.0)(TORCH_MATH, pairs[:1, 0], bad).isnan().all()
