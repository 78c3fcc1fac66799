"""What the layer needs besides the plain GEMM on a Hopper GPU: gathered rows, fp32 outputs, rows
rounded to NVFP4, W4A4, bits that do not depend on the batch, streams and devices."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cute_kernels import activations, nvfp4, sm90_ops
from cute_kernels.sm90 import config as configs
from cute_kernels.sm90 import host, weights
from cute_kernels.torch_math import TORCH_MATH
from tests import check
from tests.sm90 import gpu
from tests.sm90.gpu import (
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

GATHER_CASES = (
    Case((3, 0), 128, 256),
    Case((0, 5, 37, 1), 384, 1024),
    Case((300, 0, 17, 64, 259), 256, 1920),
    Case((33, 8, 129), 176, 2880),  # padded weight rows and padded K
    Case(tuple(range(1, 50)), 144, 208),
)


def scattered(x: Tensor, copies: int = 2) -> tuple[Tensor, Tensor]:
    """Tokens in another order, every second one NaN, and the row_token that undoes it; ends in -1:
    a row past the last expert."""
    generator = torch.Generator().manual_seed(3)
    where = torch.randperm(x.shape[0], generator=generator).cuda() * copies
    tokens = x.new_full((x.shape[0] * copies, x.shape[1]), float("nan"))
    tokens[where] = x
    return tokens, torch.cat((where, where.new_full((3,), -1))).int()


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
@pytest.mark.parametrize("case", GATHER_CASES, ids=str)
def test_gathered_rows_give_the_bits_of_contiguous_ones(
    case: Case, config: configs.Sm90Config
) -> None:
    weight, x = weights.pack_weight(make_weight(case, exact=False)), make_rows(case, exact=False)
    tokens, row_token = scattered(x)
    want = run(x, weight, case.counts, case.rows, config=config)
    for _ in range(3):
        out = run(tokens, weight, case.counts, case.rows, config=config, row_token=row_token)
        assert bool(out[x.shape[0] :].isnan().all()), "rows past the last expert were written"
        check.assert_bytes_equal(out[: x.shape[0]], want)


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
def test_gathered_exact_with_row_scale_and_bias(config: configs.Sm90Config) -> None:
    case = Case((0, 5, 37, 1, 70), 384, 1024)
    weight, x = make_weight(case, exact=True), make_rows(case, exact=True)
    tokens, row_token = scattered(x)
    row_scale = torch.rand(tokens.shape[0], device="cuda") + 0.5
    bias = torch.randn(len(case.counts), case.rows, device="cuda")
    options = {"config": config, "row_token": row_token, "row_scale": row_scale, "bias": bias}
    sums, _ = exact_sums(x, weight, case.counts)
    scale = row_scale[row_token[: x.shape[0]].long()].unsqueeze(1)
    want = sums.float() * scale + per_row(bias, case.counts)
    packed = weights.pack_weight(weight)
    for dtype in (torch.bfloat16, torch.float32):
        out = run(tokens, packed, case.counts, case.rows, out_dtype=dtype, **options)
        check.assert_bytes_equal(out[: x.shape[0]], want.to(dtype))


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
@pytest.mark.parametrize("case", GATHER_CASES, ids=str)
def test_fp32_output_is_exact(case: Case, config: configs.Sm90Config) -> None:
    weight, x = make_weight(case, exact=True), make_rows(case, exact=True)
    out = run(
        x,
        weights.pack_weight(weight),
        case.counts,
        case.rows,
        config=config,
        out_dtype=torch.float32,
    )
    check.assert_bytes_equal(out, exact_sums(x, weight, case.counts)[0].float())


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
def test_fp32_activation_is_what_bf16_rounds(config: configs.Sm90Config) -> None:
    case = Case((0, 5, 37, 1, 200), 384, 512)
    weight, x = make_weight(case, exact=True, gated=True), make_rows(case, exact=True)
    weight = dataclasses.replace(weight, global_scale=torch.rand(5, 2, device="cuda") * 0.01)
    packed = weights.pack_weight(weight, gated=True)
    options = {"config": config, "activation": activations.SwiGLU(limit=2.0)}
    half = case.rows // 2
    wide = run(x, packed, case.counts, half, out_dtype=torch.float32, **options)
    check.assert_bytes_equal(run(x, packed, case.counts, half, **options), wide.to(torch.bfloat16))


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
@pytest.mark.parametrize("activation", [activations.SwiGLU(limit=9.0), activations.ReLU2(), None])
def test_rounded_output_is_what_staging_makes_of_fp32(
    config: configs.Sm90Config, activation: activations.Activation | None
) -> None:
    """Weight rows that end inside a tile, tokens of NaN, outer scales that saturate h, fit it and
    are too small; then L2 with a scale per expert and with the same scale per row."""
    counts, gated = (3, 5, 200, 1, 70), activation is not None and activation.gated
    first = Case(counts, 416 if gated else 208, 1040)
    weight, x = make_weight(first, False, gated), make_rows(first, exact=False)
    x[6] = float("nan")
    packed, where = weights.pack_weight(weight, gated), offsets(counts)
    outer = torch.tensor([9.0, 1e-2, 3.0, 1e-38, 30.0], device="cuda")
    options = {"config": config, "activation": activation}
    wide = run(x, packed, counts, 208, out_dtype=torch.float32, **options)
    want, gh = torch.empty_like(wide).bfloat16(), torch.empty_like(wide[:, 0])
    sm90_ops.stage_rows(wide, where, want, gh, outer=outer)
    got = run(x, packed, counts, 208, out_scale=outer, **options)
    assert bool(want[6].isnan().all()) and int(want.isnan().any(1).sum()) == 1
    assert bool(((want[8:] != 0) & (want[8:].abs() < 2688)).any())
    check.assert_bytes_equal(got.isnan(), want.isnan())
    check.assert_bytes_equal(got.nan_to_num(9.0), want.nan_to_num(9.0))
    second = weights.pack_weight(make_weight(Case(counts, 144, 208), exact=False))
    by_row = run(got, second, counts, 144, config=config, row_scale=gh)
    by_expert = run(got, second, counts, 144, config=config, expert_scale=outer)
    check.assert_bytes_equal(by_expert.nan_to_num(9.0), by_row.nan_to_num(9.0))
    assert int(by_expert.isnan().any(1).sum()) == 1


@pytest.mark.parametrize(
    "case", [Case((3, 0, 40, 8, 1, 170), 1024, 7168), Case((257, 30), 256, 3072)], ids=str
)
def test_batch_invariant_configurations_give_the_same_bits(case: Case) -> None:
    """The configurations that `batch_invariant` chooses from, and every token tile in them."""
    weight, x = weights.pack_weight(make_weight(case, exact=False)), make_rows(case, exact=False)
    middle = run(x, weight, case.counts, case.rows, config=configs.MIDDLE)
    for other in (configs.TRIO, configs.DUO, configs.PREFILL):
        got = run(x, weight, case.counts, case.rows, config=other)
        check.assert_bytes_equal(got, middle, other.name)
    chosen = run(x[:1], weight, (1,) + (0,) * (len(case.counts) - 1), case.rows)
    pinned = run(
        x[:1], weight, (1,) + (0,) * (len(case.counts) - 1), case.rows, batch_invariant=True
    )
    check.assert_bytes_equal(pinned, middle[:1])
    check.assert_slopes(chosen, pinned, offsets((1,)))


# ---- W4A4


def stage_rows(x: Tensor, end: Tensor | None = None, **options: Tensor) -> tuple[Tensor, Tensor]:
    """x as rows of one expert (up to ``end``) -> values and outer scales."""
    where = torch.zeros(2, dtype=torch.int32, device="cuda")
    where[1:] = x.shape[0] if end is None else end
    values = torch.empty(x.shape, dtype=torch.bfloat16, device="cuda")
    gx = torch.empty(x.shape[0], dtype=torch.float32, device="cuda")
    sm90_ops.stage_rows(x, where, values, gx, **options)
    return values, gx


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("hidden", [16, 208, 2880, 7168])
def test_staged_rows_are_quantised_and_decoded(hidden: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(70, hidden, generator=generator)
    x *= 2.0 ** torch.randint(-12, 8, (70, 1), generator=generator)
    x[3], x[4, : hidden // 2], x[5, 1] = 0.0, 0.0, float("nan")
    x, outer = x.to(dtype), torch.rand(1, generator=generator) + 1e-3
    weight = torch.rand(70, generator=generator)
    end = torch.tensor(64, device="cuda")
    for given, factor in ((None, None), (outer, None), (None, weight)):
        source = x if factor is None else x.float() * factor[:, None]
        want = nvfp4.quantize(source, "per_token" if given is None else given[0])
        options = {} if given is None else {"outer": given.cuda()}
        if factor is not None:
            options["row_scale"] = factor.cuda()
        values, gx = stage_rows(x.cuda(), end, **options)
        real = nvfp4.decode(want, torch.float32)[:64]
        got = values[:64].float().cpu()
        assert bool(got.isnan().any())
        check.assert_bytes_equal(got.isnan(), real.isnan())
        check.assert_bytes_equal(got.nan_to_num(9.0), real.nan_to_num(9.0))
        g = want.global_scale.expand(70)[:64]
        check.assert_bytes_equal(gx[:64].cpu().nan_to_num(9.0), g.nan_to_num(9.0))


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
def test_w4a4_chain(config: configs.Sm90Config) -> None:
    """Each of x -> L1 -> h -> L2 against fp64 on the same quantised input (numerics section 6)."""
    hidden, inter, tokens, counts = 1024, 512, 40, (0, 5, 37, 1, 70)
    first = Case(counts, 2 * inter, hidden)
    second = Case(counts, hidden, inter)
    w1, w2 = make_weight(first, exact=False, gated=True), make_weight(second, exact=False)
    w1 = dataclasses.replace(w1, global_scale=w1.global_scale * 2.0**-8)
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    row_token = torch.randint(0, tokens, (sum(counts),), device="cuda").int()
    where, token = offsets(counts), row_token.long()
    act = activations.SwiGLU(limit=10.0)
    xv, gx = stage_rows(x)
    xq = nvfp4.quantize(x, "per_token")
    check.assert_bytes_equal(gx, xq.global_scale)
    packed = weights.pack_weight(w1, gated=True)
    options = {"config": config, "row_token": row_token, "row_scale": gx}
    h = run(xv, packed, counts, inter, activation=act, out_dtype=torch.float32, **options)
    sums, sizes = exact_sums(nvfp4.decode(xq, torch.float32)[token].bfloat16(), w1, counts)
    alpha = gx[token, None].double() * per_row(w1.global_scale, counts).double()
    gate, up = sums[:, 0::2] * alpha[:, :1], sums[:, 1::2] * alpha[:, 1:]
    want = act(TORCH_MATH, gate, up)
    # silu is 1.1-Lipschitz, so the bound of gate and of up carry over as products do
    k64 = 4.0 * (hidden / 64 + 1) * 2.0**-24
    d_gate, d_up = k64 * sizes[:, 0::2] * alpha[:, :1], k64 * sizes[:, 1::2] * alpha[:, 1:]
    bound = 1.1 * (d_gate * up.abs() + d_up * gate.abs() + d_gate * d_up)
    bound += 2.0**-20 * gate.abs() * (up.abs() + 1)
    assert bool(((h.double() - want).abs() <= bound).all())
    check.assert_slopes(h, want, where)
    hv, gh = stage_rows(h, where[-1])
    hq = nvfp4.quantize(h, "per_token")
    check.assert_bytes_equal(hv.float(), nvfp4.decode(hq, torch.float32))
    o = run(hv, weights.pack_weight(w2), counts, hidden, config=config, row_scale=gh)
    sums, sizes = exact_sums(hv, w2, counts)
    alpha = gh[:, None].double() * per_row(w2.global_scale, counts).double().unsqueeze(1)
    check.assert_gemm_close(o, sums * alpha, sizes, inter, alpha)
    check.assert_slopes(o, sums * alpha, where)


# ---- streams, graphs, devices


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_streams_do_not_disturb_each_other(config: configs.Sm90Config) -> None:
    case = Case((5, 0, 60), 512, 2048)
    packed, where = weights.pack_weight(make_weight(case, exact=False)), offsets(case.counts)
    rows = [torch.randn(65, 2048, device="cuda").bfloat16() for _ in range(4)]
    want = [host.sm90_grouped_gemm(x, packed, where, config=config) for x in rows]
    streams = [torch.cuda.Stream() for _ in rows]
    torch.cuda.synchronize()
    outs = []
    for _ in range(5):
        for x, stream in zip(rows, streams):
            with torch.cuda.stream(stream):
                outs.append(host.sm90_grouped_gemm(x, packed, where, config=config))
    torch.cuda.synchronize()
    for i, out in enumerate(outs):
        check.assert_bytes_equal(out, want[i % len(want)])


@pytest.mark.parametrize("config", EDGES, ids=lambda c: c.name)
def test_chain_in_a_graph(config: configs.Sm90Config) -> None:
    """Launches that depend on each other and overlap (programmatic dependent launch), replayed on
    new inputs: each must see what the one before wrote."""
    counts, hidden, inter = (5, 0, 30), 512, 1024
    w1 = weights.pack_weight(make_weight(Case(counts, 2 * inter, hidden), False, True), gated=True)
    w2 = weights.pack_weight(make_weight(Case(counts, hidden, inter), False))
    where, token = offsets(counts), torch.randint(0, 20, (35,), device="cuda").int()
    x = torch.randn(20, hidden, device="cuda").bfloat16()

    def chain() -> Tensor:
        xv, gx = stage_rows(x)
        h = host.sm90_grouped_gemm(
            xv,
            w1,
            where,
            row_token=token,
            row_scale=gx,
            activation=activations.SwiGLU(),
            out_dtype=torch.float32,
            config=config,
        )
        hv, gh = stage_rows(h)
        return host.sm90_grouped_gemm(hv, w2, where, row_scale=gh, config=config)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain()
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        x.normal_(generator=generator)
        token.copy_(torch.randint(0, 20, (35,), device="cuda", generator=generator))
        graph.replay()
        got = out.clone()
        check.assert_bytes_equal(got, chain())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_other_devices(config: configs.Sm90Config) -> None:
    """Tensors of device 1 while device 0 is current."""
    case = Case((5, 0, 60), 512, 2048)
    packed, x = weights.pack_weight(make_weight(case, exact=False)), make_rows(case, exact=False)
    want = host.sm90_grouped_gemm(x, packed, offsets(case.counts), config=config)
    moved = dataclasses.replace(packed, blob=packed.blob.to(1), alpha=packed.alpha.to(1))
    out = host.sm90_grouped_gemm(x.to(1), moved, offsets(case.counts).to(1), config=config)
    torch.cuda.synchronize(1)
    check.assert_bytes_equal(out.to(0), want)
