"""The SM90 grouped GEMM on a Hopper GPU: bits where sums are exact, the bound of an fp32 sum
elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cute_kernels import activations
from cute_kernels.sm90 import config as configs
from cute_kernels.sm90 import host, weights
from cute_kernels.torch_math import TORCH_MATH
from tests import check
from tests.sm90 import gpu
from tests.sm90.gpu import (
    CASES,
    CONFIGS,
    EDGES,
    Case,
    exact_sums,
    make_rows,
    make_weight,
    offsets,
    per_row,
    run,
)

pytestmark = gpu.MARKS


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_exact_sums_are_equal(case: Case, config: configs.Sm90Config) -> None:
    weight, x = make_weight(case, exact=True), make_rows(case, exact=True)
    out = run(x, weights.pack_weight(weight), case.counts, case.rows, config=config)
    want, _ = exact_sums(x, weight, case.counts)
    check.assert_bytes_equal(out, want.to(torch.bfloat16))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_random_sums_are_within_the_bound(case: Case, config: configs.Sm90Config) -> None:
    weight, x = make_weight(case, exact=False), make_rows(case, exact=False)
    out = run(x, weights.pack_weight(weight), case.counts, case.rows, config=config)
    sums, sizes = exact_sums(x, weight, case.counts)
    alpha = per_row(weight.global_scale, case.counts).double().unsqueeze(1)
    check.assert_gemm_close(out, sums * alpha, sizes, case.k, alpha)
    check.assert_slopes(out, sums * alpha, offsets(case.counts))


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
def test_row_scale_and_bias(config: configs.Sm90Config) -> None:
    case = Case((0, 5, 37, 1), 384, 1024)
    weight, x = make_weight(case, exact=True), make_rows(case, exact=True)
    num_rows = x.shape[0]
    row_scale = torch.rand(num_rows, device="cuda") + 0.5
    bias = torch.randn(len(case.counts), case.rows, device="cuda")
    out = run(
        x,
        weights.pack_weight(weight),
        case.counts,
        case.rows,
        config=config,
        row_scale=row_scale,
        bias=bias,
    )
    sums, _ = exact_sums(x, weight, case.counts)
    want = sums.float() * row_scale.unsqueeze(1) + per_row(
        bias, case.counts
    )  # product rounded, then the sum
    check.assert_bytes_equal(out, want.to(torch.bfloat16))


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
@pytest.mark.parametrize(
    "activation",
    [
        activations.SwiGLU(),
        activations.SwiGLU(limit=2.0),
        activations.SwiGLUOAI(),
        activations.GeGLU(),
    ],
    ids=lambda a: type(a).__name__,
)
def test_gated_activation(activation: activations.Activation, config: configs.Sm90Config) -> None:
    case = Case((0, 5, 37, 1, 200), 384, 512)
    weight, x = make_weight(case, exact=True, gated=True), make_rows(case, exact=True)
    weight = dataclasses.replace(weight, global_scale=torch.rand(5, 2, device="cuda") * 0.01)
    out = run(
        x,
        weights.pack_weight(weight, gated=True),
        case.counts,
        case.rows // 2,
        config=config,
        activation=activation,
    )
    sums, _ = exact_sums(x, weight, case.counts)
    alpha = per_row(weight.global_scale, case.counts)
    gate, up = sums[:, 0::2].float() * alpha[:, :1], sums[:, 1::2].float() * alpha[:, 1:]
    want = activation(TORCH_MATH, gate, up).double()
    # the sums are exact: what is left is bf16 and the device's exp and reciprocal (a few fp32 ulp),
    # or its tanh (2^-11, PTX ISA: tanh.approx.f32)
    small = 2.0**-11 if isinstance(activation, activations.GeGLU) else 2.0**-20
    bound = want.abs() * 2.0**-8 + (gate.abs() * (up.abs() + 1)).double() * small
    error = (out.double() - want).abs()
    assert bool((error <= bound).all()), f"worst {float((error / bound).max())}"


def test_not_gated_activation() -> None:
    case = Case((5, 0, 20), 128, 256)
    weight, x = make_weight(case, exact=True), make_rows(case, exact=True)
    out = run(
        x, weights.pack_weight(weight), case.counts, case.rows, activation=activations.ReLU2()
    )
    sums, _ = exact_sums(x, weight, case.counts)
    check.assert_bytes_equal(out, (sums.clamp(min=0).float() ** 2).to(torch.bfloat16))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_repeats_and_batches_give_the_same_bits(config: configs.Sm90Config) -> None:
    case = Case((3, 0, 40, 8, 1, 170), 1024, 7168)
    weight, x = weights.pack_weight(make_weight(case, exact=False)), make_rows(case, exact=False)
    scratch = host.Sm90Scratch.for_calls(
        "cuda", *host.scratch_sizes(case.rows, case.k, x.shape[0], config)
    )
    first = run(x, weight, case.counts, case.rows, config=config, scratch=scratch)
    for _ in range(20):
        scratch.partial.fill_(float("nan"))
        check.assert_bytes_equal(
            run(x, weight, case.counts, case.rows, config=config, scratch=scratch), first
        )
    assert not bool(scratch.counters.any()), "a launch must leave the counters at zero"
    alone = run(x[3:43].contiguous(), weight, (0, 0, 40, 0, 0, 0), case.rows, config=config)
    check.assert_bytes_equal(alone, first[3:43])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_rows_past_the_last_expert_are_not_written(config: configs.Sm90Config) -> None:
    case = Case((4, 0, 9), 256, 256)
    weight = weights.pack_weight(make_weight(case, exact=True))
    x = torch.ones((40, 256), dtype=torch.bfloat16, device="cuda")
    out = torch.full((40, 256), float("nan"), dtype=torch.bfloat16, device="cuda")
    host.sm90_grouped_gemm(x, weight, offsets(case.counts), config=config, out=out)
    assert bool(out[13:].isnan().all()) and bool(out[:13].isfinite().all())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_graph_replays_with_new_routing(config: configs.Sm90Config) -> None:
    case = Case((5, 0, 30), 256, 1024)
    weight, x = make_weight(case, exact=True), make_rows(case, exact=True)
    packed, where = weights.pack_weight(weight), offsets(case.counts)
    scratch = host.Sm90Scratch.for_calls(
        "cuda", *host.scratch_sizes(case.rows, case.k, x.shape[0], config)
    )
    out = torch.empty((35, 256), dtype=torch.bfloat16, device="cuda")
    host.sm90_grouped_gemm(x, packed, where, config=config, scratch=scratch, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        host.sm90_grouped_gemm(x, packed, where, config=config, scratch=scratch, out=out)
    for counts in ((35, 0, 0), (1, 20, 14)):
        where.copy_(offsets(counts))
        out.fill_(float("nan"))
        graph.replay()
        want, _ = exact_sums(x, weight, counts)
        check.assert_bytes_equal(out, want.to(torch.bfloat16))


def test_no_rows() -> None:
    weight = weights.pack_weight(make_weight(Case((0, 0), 128, 128), exact=True))
    out = host.sm90_grouped_gemm(
        torch.empty((0, 128), dtype=torch.bfloat16, device="cuda"), weight, offsets((0, 0))
    )
    assert tuple(out.shape) == (0, 128)


def test_more_than_2_31_codes() -> None:
    """49 experts of 6144 x 7168: the last expert's blob starts past 2^30 bytes, its codes past
    2^31."""
    rows, k, experts = 6144, 7168, 49
    blob = torch.zeros((experts, *weights.blob_shape(rows, k)), dtype=torch.uint8, device="cuda")
    case = Case((1,), rows, k)
    one = make_weight(case, exact=True)
    blob[-1] = weights.pack_weight(one).blob[0]
    weight = weights.Sm90Weight(
        blob, torch.full((experts, 2), 128.0, device="cuda"), rows, k, False
    )
    x = make_rows(Case((9,), rows, k), exact=True)
    counts = (0,) * (experts - 1) + (9,)
    want, _ = exact_sums(x, one, (9,))
    for config in CONFIGS:
        check.assert_bytes_equal(
            run(x, weight, counts, rows, config=config), want.to(torch.bfloat16)
        )


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(4, 64)}, "x must be contiguous bf16"),
        ({"expert_offsets": torch.zeros(5, dtype=torch.int32)}, "expert_offsets"),
        ({"activation": activations.SwiGLU()}, "packed with gated=True"),
        ({"row_token": torch.zeros(3)}, "row_token must be contiguous torch.int32"),
        ({"out_dtype": torch.float16}, "out_dtype must be"),
        ({"out": torch.zeros(4, 128)}, "out must be contiguous torch.bfloat16"),
        ({"row_scale": torch.zeros(3)}, "row_scale must be contiguous torch.float32"),
        ({"bias": torch.zeros(3)}, "bias must be contiguous torch.float32"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_bad_arguments(change: dict, message: str) -> None:
    case = Case((2, 2), 128, 64)
    moved = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in change.items()}
    arguments = {
        "x": torch.zeros((4, 64), dtype=torch.bfloat16, device="cuda"),
        "weight": weights.pack_weight(make_weight(case, exact=True)),
        "expert_offsets": offsets(case.counts),
        **moved,
    }
    with pytest.raises(ValueError, match=message):
        host.sm90_grouped_gemm(**arguments)
