"""The small kernels on a real GPU: every byte equal to the plain PyTorch implementation on the CPU.

Buffers are poisoned: `torch.empty` fills them with NaN and maximal integers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, ops, torch_gemm, torch_ops
from cute_kernels.activations import GeGLU, ReLU2, SwiGLU, SwiGLUOAI
from tests.hidden import (
    Bilinear,
    Cubed,
    HiddenCase,
    assert_hidden,
    kernel_h,
    poisoned_hidden,
    quantized,
)
from tests.small_kernels import (
    Case,
    assert_quantized,
    assert_same,
    guarded,
    plan,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_buffers_are_poisoned() -> None:
    assert torch.empty(100, device=CUDA).isnan().all()
    assert (torch.empty(100, dtype=torch.uint8, device=CUDA) == 255).all()


def cuda(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(v.to(CUDA) for v in values)


ROUTES = [
    *(Case(t, experts=e, top_k=k) for t in (1, 2, 31, 33, 257) for e, k in ((8, 2), (3, 1))),
    *(
        Case(t, routing=r, first=f)
        for t in (5, 700)
        for r in ("one", "holes", "nowhere")
        for f in (0, 5)
    ),
    *(
        Case(77, experts=e, top_k=3, routing="holes")
        for e in (1, 2, 3, 5, 7, 40, 60, 160, 385, 2000)
    ),
    Case(4096, experts=256, top_k=8),
    Case(8192, experts=384, top_k=8, routing="holes", ids=torch.int32),
    Case(3001, experts=129, top_k=6, ids=torch.int32),
    Case(16384, experts=16, top_k=1, routing="one"),
]


@pytest.mark.parametrize("case", ROUTES, ids=str)
def test_sort_routes(case: Case) -> None:
    ids, weights = case.routes()
    wide = torch.zeros((case.tokens, case.top_k + 3), dtype=ids.dtype, device=CUDA)
    wide[:, : case.top_k] = ids.to(CUDA)  # a strided view, as callers slice them
    got = ops.sort_routes(
        wide[:, : case.top_k], weights.to(CUDA), case.all_experts, case.first, case.experts, 100
    )
    for g, w, name in zip(
        got, plan(case, 100), ("offsets", "row_token", "row_weight", "token_rows")
    ):
        assert_same(g, w, name)


QUANTIZE = [
    *(Case(t, hidden=h, routing="holes") for t in (1, 20, 130) for h in (16, 64, 352, 704, 2880)),
    *(
        Case(40, hidden=h, dtype=d)
        for h in (32, 1856, 4096)
        for d in (torch.float16, torch.float32)
    ),
    Case(64, hidden=7168, experts=256, top_k=8),
    Case(300, hidden=16384, experts=5, top_k=2, dtype=torch.float32),
    Case(33, hidden=20480, routing="one"),
    Case(2000, hidden=1024, experts=385, top_k=8, routing="holes"),
]


@pytest.mark.parametrize("mode", ["per_token", "static", "per_tensor", "per_row", "weighted"])
@pytest.mark.parametrize("case", QUANTIZE, ids=str)
def test_quantize_rows(case: Case, mode: str) -> None:
    case = dataclasses.replace(case, special=mode != "per_tensor")
    offsets, row_token, _, _ = plan(case)
    x = case.x()
    given: Tensor | str = "per_token"
    weight = None
    if mode == "static":
        given = torch.tensor(0.0123)
    elif mode == "per_tensor":
        given = "per_tensor"
    elif mode == "per_row":
        given = torch.rand(case.tokens, generator=case.generator())
    elif mode == "weighted":
        weight = torch.rand(case.tokens, generator=case.generator())
    want = ops.quantize_rows(x, offsets, row_token, given, weight)
    moved = given.to(CUDA) if isinstance(given, Tensor) else given
    on_gpu = (guarded(offsets.to(CUDA)), guarded(row_token.to(CUDA)))
    got = ops.quantize_rows(x.to(CUDA), *on_gpu, moved, None if weight is None else weight.to(CUDA))
    assert_quantized(got, want, offsets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [64, 2880])
def test_quantize_expert_major_rows_skips_those_past_the_last_expert(
    hidden: int, dtype: torch.dtype
) -> None:
    case = Case(333, hidden=hidden, dtype=dtype)
    offsets = torch.tensor([0, 0, 130, 131, 131, 200], dtype=torch.int32)
    x = case.x()
    want = ops.quantize_rows(x, offsets)
    got = ops.quantize_rows(x.to(CUDA), guarded(offsets.to(CUDA)))
    real = int(offsets[-1])
    assert_same(got[0][:real], want[0][:real], "codes")
    assert (got[0][real:] == 255).all(), "rows past the last expert were written"
    assert_same(got[2][:real], want[2][:real], "gx")
    rows = int(nvfp4.grouped_scale_offsets(offsets)[-1])
    assert_same(got[1][:rows], want[1][:rows], "scales")
    assert (got[1][rows:] == 255).all(), "tiles past the last expert were written"


def test_every_bf16_pattern_and_every_rounding_boundary() -> None:
    offsets = torch.tensor([0, 4096], dtype=torch.int32)
    patterns = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for g in (1.0, 2.0**-100, 2.0**90, 0.37):
        given = torch.tensor([g])
        x = patterns.reshape(4096, 16)
        want = ops.quantize_rows(x, offsets, None, given)
        got = ops.quantize_rows(x.to(CUDA), offsets.to(CUDA), None, given.to(CUDA))
        assert_quantized(got, want, offsets)
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = middles.view(torch.int32)[:, None] + torch.arange(-40, 41, dtype=torch.int32)
    values = near.view(torch.float32).reshape(-1)
    values = torch.cat((values, -values, torch.rand(16 * 60000 - 14 * 81) * 12 - 6))
    values = values[torch.randperm(values.numel(), generator=torch.Generator().manual_seed(3))]
    x = torch.nn.functional.pad(values.reshape(-1, 15), (0, 1), value=6.0)  # every block scale is 1
    offsets = torch.tensor([0, x.shape[0]], dtype=torch.int32)
    want = ops.quantize_rows(x, offsets, None, torch.ones(1))
    assert (want[1].view(-1)[:1] == 0x38).all()
    got = ops.quantize_rows(x.to(CUDA), offsets.to(CUDA), None, torch.ones(1, device=CUDA))
    assert_quantized(got, want, offsets)


COMBINE = [
    *(
        Case(t, hidden=h, top_k=k, routing="holes")
        for t in (1, 33)
        for h, k in ((64, 1), (2880, 4))
    ),
    Case(100, hidden=7168, experts=256, top_k=8),
    Case(50, hidden=24, top_k=10, routing="nowhere"),
    Case(1000, hidden=704, top_k=6, routing="one"),
]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.float16, torch.float32, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("case", COMBINE, ids=str)
def test_combine(case: Case, dtypes: tuple, weighted: bool, shared: bool) -> None:
    rows_dtype, out_dtype, shared_dtype = dtypes
    _, _, _, token_rows = plan(case)
    weights = case.routes()[1] if weighted else None
    g = case.generator()
    rows = torch.randn((case.tokens * case.top_k, case.hidden), generator=g).to(rows_dtype)
    rows[0, 0], rows[-1, 1] = float("inf"), float("nan")
    extra = torch.randn((case.tokens, case.hidden), generator=g).to(shared_dtype)
    inputs = (rows, token_rows, weights, extra if shared else None)
    want = ops.combine(*inputs, out_dtype)
    there = tuple(None if t is None else t.to(CUDA) for t in inputs)
    assert_same(ops.combine(*there, out_dtype), want, "y")
    lost = torch.rand(case.tokens, generator=g) < 0.3
    got = ops.combine(*there, out_dtype, lost=lost.to(CUDA))
    assert_same(got, want.masked_fill(lost[:, None], torch.nan), "y of lost tokens")


@pytest.mark.parametrize("hidden", [16, 48, 352, 2880, 7168])
@pytest.mark.parametrize("routing", ["random", "holes", "nowhere"])
def test_permute_quantized_rows(hidden: int, routing: str) -> None:
    case = Case(150, hidden=hidden, routing=routing, experts=7)
    offsets, row_token, _, _ = plan(case)
    q = nvfp4.quantize(case.x())
    scale = q.scale.view(torch.uint8)
    want = ops.permute_quantized_rows(q.data, scale, q.global_scale, row_token, offsets)
    inputs = cuda((q.data, scale, q.global_scale))
    got = ops.permute_quantized_rows(
        *inputs, guarded(row_token.to(CUDA)), guarded(offsets.to(CUDA))
    )
    real = int(offsets[-1])
    whole = tuple(
        torch.cat((g[:real], w[real:].to(CUDA))) if i != 1 else g
        for i, (g, w) in enumerate(zip(got, want))
    )
    assert (got[0][real:] == 255).all(), "rows past the last expert were written"
    assert_quantized(whole, want, offsets)


HIDDEN = [
    HiddenCase((3, 0, 130, 1), 352, SwiGLU(10.0), biased=True),
    HiddenCase((200, 5, 0, 41), 2880, SwiGLUOAI(), biased=True),
    HiddenCase((2, 5), 96, SwiGLU(), indexed=False, given=True),
    HiddenCase((5,), 16, GeGLU(), indexed=False, spare=0),
    HiddenCase((7,) * 300, 2048, SwiGLU(10.0), spare=77),
    HiddenCase((0, 0, 2, 300), 1856, ReLU2()),
    HiddenCase((1,) * 40, 64, Bilinear(), given=True),
    HiddenCase((20,), 14336, SwiGLU(), special=False),
    HiddenCase((100,), 704, Cubed(), biased=True),
]


@pytest.mark.parametrize("case", HIDDEN, ids=str)
def test_quantize_hidden(case: HiddenCase) -> None:
    """Bytes equal those of the kernel's own h, and h that of torch within the error of the
    device's exp and division."""
    arguments, on_cpu = case.arguments(CUDA), case.arguments()
    got, h = poisoned_hidden(arguments), kernel_h(case, arguments)
    assert_hidden(got, quantized(h, arguments), arguments["expert_offsets"])
    row_gx = on_cpu["scales"].gx
    if case.indexed:
        row_gx = row_gx[on_cpu["row_token"].clamp(min=0).long()]
    alpha, bias = on_cpu["scales"].alpha, on_cpu["bias"]
    offsets, used = on_cpu["expert_offsets"], sum(case.counts)
    want = torch_gemm.hidden(on_cpu["acc"], offsets, (alpha, row_gx), bias, case.activation)
    h, want = h[:used].cpu(), want[:used]
    if isinstance(case.activation, Bilinear | Cubed | ReLU2):
        assert_same(h, want, "h")
    # tanh.approx is within 2^-11, and what it is multiplied by is below 1000 here
    absolute = 0.5 if isinstance(case.activation, GeGLU) else 1e-30
    assert torch.allclose(h, want, rtol=2e-5, atol=absolute, equal_nan=True)


@pytest.mark.parametrize("tokens", [0])
def test_zero_tokens(tokens: int) -> None:
    ids = torch.empty((0, 2), dtype=torch.int64, device=CUDA)
    offsets, row_token, row_weight, token_rows = ops.sort_routes(ids, ids.float(), 8, pad_rows=3)
    assert offsets.tolist() == [0] * 9 and row_token.tolist() == [-1] * 3
    assert row_weight.tolist() == [0.0] * 3 and token_rows.shape == (0, 2)
    x = torch.empty((0, 64), dtype=torch.bfloat16, device=CUDA)
    data, scale, gx = ops.quantize_rows(x, offsets, row_token[:0])
    assert data.shape == (0, 32) and scale.shape == (0, 4) and gx.shape == (0,)
    assert ops.combine(x, token_rows).shape == (0, 64)
    assert ops.combine(torch.ones((4, 64), device=CUDA), token_rows).shape == (0, 64)


def run_chain(case: Case, ids: Tensor, weights: Tensor, x: Tensor, rows: Tensor) -> tuple:
    offsets, row_token, row_weight, token_rows = ops.sort_routes(
        ids, weights, case.all_experts, case.first, case.experts, 16
    )
    quantized = ops.quantize_rows(x, offsets, row_token[: ids.numel()])
    y = ops.combine(rows, token_rows, weights, x)
    return (offsets, row_token, row_weight, token_rows, *quantized, y)


def test_cuda_graph_never_waits_and_follows_its_inputs() -> None:
    torch.use_deterministic_algorithms(False)
    cases = [Case(96, hidden=352, experts=20, top_k=4, routing="holes", seed=s) for s in range(3)]

    def inputs(case: Case) -> tuple[Tensor, ...]:
        g = case.generator()
        rows = torch.randn((96 * 4, 352), generator=g).bfloat16()
        return (*case.routes(), case.x(), rows)

    static = cuda(inputs(cases[0]))
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run_chain(cases[0], *static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    compiled = compiler.stats().compiles
    try:
        with torch.cuda.graph(graph, stream=stream):
            out = run_chain(cases[0], *static)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compiler.stats().compiles == compiled
    for case in cases:
        values = inputs(case)
        for buffer, value in zip(static, values):
            buffer.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        want = run_chain(case, *values)
        for i, (g, w) in enumerate(zip(out, want)):
            if i != 5:
                assert_same(g, w, f"result {i}")
        assert_quantized(out[4:7], want[4:7], want[0])


def test_same_bits_again_and_in_any_batch() -> None:
    case = Case(500, hidden=704, experts=16, top_k=4, special=False)
    ids, weights = cuda(case.routes())
    x = case.x().to(CUDA)
    rows = torch.randn((2000, 704), generator=case.generator()).bfloat16().to(CUDA)
    first = run_chain(case, ids, weights, x, rows)
    for _ in range(5):
        for a, b in zip(first, run_chain(case, ids, weights, x, rows)):
            assert_same(a, b, "second run")
    alone = run_chain(case, ids[77:78], weights[77:78], x[77:78], rows[:4])
    assert_same(alone[4], first[4][77:78], "codes of one token alone")
    assert_same(alone[6], first[6][77:78], "gx of one token alone")


def test_no_compile_for_another_token_count() -> None:
    sizes = (1, 7, 64, 500, 1100)

    def chain(tokens: int) -> None:
        case = Case(tokens, hidden=320, experts=12, top_k=4)
        rows = torch.zeros((tokens * 4, 320), dtype=torch.bfloat16, device=CUDA)
        run_chain(case, *cuda(case.routes()), case.x().to(CUDA), rows)

    chain(1)
    chain(1100)  # the other bucket of sort_routes
    before = compiler.stats()
    for tokens in sizes:
        chain(tokens)
    assert compiler.stats() == before


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_launches_on_the_device_of_the_tensors() -> None:
    case = Case(65, hidden=352, experts=5)
    other = torch.device("cuda:1")
    inputs = [t.to(other) for t in (*case.routes(), case.x())]
    rows = torch.randn((130, 352), generator=case.generator()).bfloat16()
    with torch.cuda.device(0):
        got = run_chain(case, *inputs, rows.to(other))
        assert torch.cuda.current_device() == 0
    want = run_chain(case, *case.routes(), case.x(), rows)
    assert all(t.device == other for t in got)
    assert_same(got[7], want[7], "y")
    assert_quantized(got[4:7], want[4:7], want[0])


def test_plain_implementation_gives_the_same_on_the_gpu() -> None:
    case = Case(129, hidden=352, routing="holes")
    offsets, row_token, _, _ = plan(case)
    x = case.x()
    want = torch_ops.quantize_rows(x, offsets, row_token, None, None)
    got = torch_ops.quantize_rows(*cuda((x, offsets, row_token)), None, None)
    assert_quantized(got, want, offsets)
