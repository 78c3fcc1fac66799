"""The layer on a Hopper GPU against the specification, stage by stage on the same quantised input
(docs/numerics.md, section 6): bytes of quantiser and combine, the bound of an fp32 sum for the two
GEMMs."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, sm90_ops
from cute_kernels.torch_math import TORCH_MATH
from moe import (
    ExpertWeights,
    MoE,
    MoEConfig,
    ReLU2,
    SwiGLU,
    SwiGLUOAI,
    Workspace,
    kernels_sm90,
    make_plan,
    reference,
)
from moe.backends import backend_status
from tests import check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
CUDA = torch.device("cuda:0")

MODELS = {
    "deepseek-v4": MoEConfig(
        4096, 2048, 32, 6, "sqrtsoftplus", routed_scaling_factor=1.5, activation=SwiGLU(10.0)
    ),
    "qwen3": MoEConfig(2048, 768, 128, 8),
    "gpt-oss": MoEConfig(2880, 2880, 32, 4, activation=SwiGLUOAI()),
    "nemotron": MoEConfig(2688, 1856, 32, 6, "sigmoid", activation=ReLU2()),
}


def random_weights(
    cfg: MoEConfig, first: int = 0, experts: int | None = None, *, biases: bool = False
) -> ExpertWeights:
    """Random codes and block scales; global scales that keep h and y near 1."""
    g = torch.Generator(CUDA).manual_seed(cfg.hidden + cfg.intermediate)
    count = cfg.num_experts if experts is None else experts
    parts = cfg.projections

    def layout(rows: int, k: int) -> tuple[Tensor, Tensor]:
        data = torch.randint(
            0, 256, (count, rows, k // 2), dtype=torch.uint8, device=CUDA, generator=g
        )
        shape = (count, -(-rows // 128) * 128, -(-k // 64) * 4)
        scale = torch.randint(40, 64, shape, dtype=torch.uint8, device=CUDA, generator=g)
        return data, scale.view(torch.float8_e4m3fn)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, device=CUDA, generator=g) + 0.5

    b13 = (rand(count, parts * cfg.intermediate) - 1) if biases else None
    b2 = (rand(count, cfg.hidden) - 1) if biases else None
    l1, l1_scale = layout(parts * cfg.intermediate, cfg.hidden)
    l2, l2_scale = layout(cfg.hidden, cfg.intermediate)
    g13 = rand(count, parts) * cfg.hidden**-0.5 * 0.5
    g2 = rand(count) * cfg.intermediate**-0.5 * 0.5
    return ExpertWeights(l1, l1_scale, g13, l2, l2_scale, g2, b13=b13, b2=b2, first_expert=first)


def inputs(cfg: MoEConfig, count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x bf16 with rows of different size, ids with padding slots and a token without a slot."""
    g = torch.Generator(CUDA).manual_seed(seed)
    x = torch.randn(count, cfg.hidden, device=CUDA, generator=g)
    x *= torch.logspace(-1, 1, count, device=CUDA)[:, None]
    scores = torch.rand(count, cfg.num_experts, device=CUDA, generator=g)
    ids = scores.argsort(dim=-1)[:, : cfg.top_k].int()
    if count > 4:
        ids[1, 0] = -1
        ids[3] = -1
    return x.bfloat16(), ids, torch.rand(count, cfg.top_k, device=CUDA, generator=g)


@pytest.fixture(autouse=True)
def poison() -> Any:
    """torch.empty gives NaN and the largest integers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Recorder:
    """What went into and came out of every operator of one call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stages: list[dict[str, Any]] = []
        self.gemms: list[dict[str, Any]] = []
        stage_rows, grouped_gemm = sm90_ops.stage_rows, sm90_ops.grouped_gemm

        def staged(x: Tensor, offsets: Tensor, values: Tensor, gx: Any, **kw: Any) -> None:
            stage_rows(x, offsets, values, gx, **kw)
            self.stages.append({"x": x, "values": values.clone(), "gx": copied(gx), **kw})

        def multiplied(x: Tensor, w: Any, offsets: Tensor, out: Tensor, *a: Any, **kw: Any) -> None:
            before, epilogue, wide = x.clone(), kw["epilogue"], None  # out may be the same memory
            if epilogue.out_scale is not None:  # what is rounded, in fp32
                wide = out.new_empty(out.shape, dtype=torch.float32)
                exact = epilogue._replace(out_scale=None)
                grouped_gemm(x, w, offsets, wide, *a, **kw | {"epilogue": exact})
            grouped_gemm(x, w, offsets, out, *a, **kw)
            token = kw.get("row_token")
            before = before if token is None else before[token.clamp(min=0).long()]
            scales = {n: getattr(epilogue, n) for n in ("row_scale", "expert_scale", "out_scale")}
            self.gemms.append({"x": before, "out": out.clone(), "wide": wide} | scales)

        monkeypatch.setattr(sm90_ops, "stage_rows", staged)
        monkeypatch.setattr(sm90_ops, "grouped_gemm", multiplied)


def copied(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.clone()


def sums(rows: Tensor, w: nvfp4.Nvfp4Tensor, offsets: list[int]) -> tuple[Tensor, Tensor]:
    """fp64 (R, N): exact products of every row with its expert, and of the magnitudes."""
    exact = torch.zeros((offsets[-1], w.shape[1]), dtype=torch.float64, device=rows.device)
    size = torch.zeros_like(exact)
    for e in range(len(offsets) - 1):
        r = slice(offsets[e], offsets[e + 1])
        if r.start < r.stop:
            values = nvfp4.decode(reference.expert(w, e), torch.float64)
            exact[r] = rows[r].double() @ values.t()
            size[r] = rows[r].double().abs() @ values.abs().t()
    return exact, size


def hidden_bound(cfg: MoEConfig, gate: Tensor, up: Tensor | None, eg: Tensor, eu: Any) -> Tensor:
    """How far h may be off when gate and up are off by eg and eu: all built-in gates have a slope
    of at most 1.13; the device's exp and reciprocal add a few ulp."""
    if up is None:
        return 2 * (gate.abs() + eg) * eg + gate.square() * 2.0**-22
    small = 2.0**-19 * (gate.abs() + 1) * (up.abs() + 1)
    return 1.13 * eg * (up.abs() + 1 + eu) + 1.01 * (gate.abs() + eg) * eu + small


def check_layer(
    layer: MoE, x: Tensor, ids: Tensor, mix: Tensor, monkeypatch: pytest.MonkeyPatch
) -> float:
    """Every stage within section 6; returns the fraction of codes of h that differ from those of
    the exact h."""
    cfg, w, mode = layer.cfg, layer.weights, layer.numerics
    quantised = mode.activations == "nvfp4"
    with pytest.MonkeyPatch.context() as m:
        seen = Recorder(m)
        y = layer.experts(x, ids, mix)
    plan = make_plan(ids, mix, cfg.num_experts, w.first_expert, w.num_experts)
    offsets = plan.expert_offsets.tolist()
    end = offsets[-1]
    token = plan.row_token[:end].long()
    expert = torch.searchsorted(
        plan.expert_offsets[1:].contiguous(), torch.arange(end, device=CUDA), right=True
    )
    # x: bytes
    values, gx = reference.stage_input(x, ids, mix, cfg, w, mode.activations, mode.activation_scale)
    l1, l2 = seen.gemms
    check.assert_bytes_equal(l1["x"][:end], values.bfloat16()[token], "x")
    if quantised:
        check.assert_bytes_equal(l1["row_scale"][:end], gx[token].contiguous(), "gx")
    # L1 and activation: the bound
    acc, size = sums(l1["x"], w.l1(), offsets)
    step = cfg.projections
    parts, errors = [], []
    for p in range(step):
        alpha = (gx[token] * w.g13[expert, p]).double()[:, None]
        part = acc[:, p::step] * alpha
        parts.append(part if w.b13 is None else part + w.b13[expert, p::step].double())
        # the sum, then one rounding of product and bias each
        error = check.gemm_bound(size[:, p::step], cfg.hidden, alpha)
        errors.append(error + 2.0**-23 * (part.abs() + parts[-1].abs()))
    up = parts[1] if step == 2 else None
    want_h = cfg.activation(
        TORCH_MATH, parts[0].float(), None if up is None else up.float()
    ).double()
    bound = hidden_bound(cfg, parts[0], up, errors[0], errors[1] if step == 2 else None)
    static = quantised and w.gh is not None
    assert (l1["out_scale"] is not None) == (l2["expert_scale"] is not None) == static
    h = (l1["wide"] if static else l1["out"])[:end]
    assert h.dtype == (torch.float32 if quantised else torch.bfloat16)
    if not quantised:
        bound = bound + check.half_ulp(want_h.abs() + bound, torch.bfloat16)
    wrong = ~((h.double() - want_h).abs() <= bound)
    assert not bool(wrong.any()), f"h: {int(wrong.sum())} of {wrong.numel()} beyond the bound"
    check.assert_slopes(h.double(), want_h, plan.expert_offsets, rtol=4e-3)
    # h: bytes
    gh = torch.ones(end, device=CUDA)
    flipped = 0.0
    if quantised:
        outer: Any = "per_token" if w.gh is None else w.gh[expert]
        q, exact = nvfp4.quantize(h, outer), nvfp4.quantize(want_h.float(), outer)
        check.assert_bytes_equal(l2["x"][:end], nvfp4.decode(q, torch.bfloat16), "hq")
        gh = w.gh.clamp(min=nvfp4.GLOBAL_MIN)[expert] if static else l2["row_scale"][:end]
        check.assert_bytes_equal(gh, q.global_scale.expand(end).contiguous(), "gh")
        different = nvfp4.unpack(q.data) != nvfp4.unpack(exact.data)
        flipped = float(different.float().mean())
    # L2: the bound on the kernel's own h
    acc, size = sums(l2["x"], w.l2(), offsets)
    alpha = (gh * w.g2[expert]).double()[:, None]
    want_o = acc * alpha if w.b2 is None else acc * alpha + w.b2[expert].double()
    o = l2["out"]
    size = size if w.b2 is None else size + 2.0**-8 * w.b2[expert].double().abs() / alpha
    check.assert_gemm_close(o[:end], want_o, size, cfg.intermediate, alpha)
    check.assert_slopes(o[:end].double(), want_o, plan.expert_offsets, rtol=4e-3)
    # combine: bytes
    factors = torch.ones_like(mix) if cfg.weight_on_input else mix
    check.assert_bytes_equal(y, reference.combine(o, plan, factors, x.dtype, None), "y")
    return flipped


@pytest.mark.parametrize("count", [1, 40, 1000])
@pytest.mark.parametrize(
    ("name", "activations"),
    [*itertools.product(MODELS, ("nvfp4", "bf16")), ("gpt-oss", "nvfp4 static")],
)
def test_whole_layer(monkeypatch, name: str, activations: str, count: int) -> None:
    cfg = MODELS[name]
    weights = random_weights(cfg, biases=name == "gpt-oss")
    activations, _, static = activations.partition(" ")
    if static:
        gh = torch.linspace(5e-4, 2e-3, cfg.num_experts, device=CUDA)
        weights = dataclasses.replace(weights, gh=gh)
    layer = MoE(cfg, weights, backend="sm90", activations=activations)
    flipped = check_layer(layer, *inputs(cfg, count), monkeypatch)
    assert flipped < 1e-3, f"{flipped:.1e} of the codes of h differ"


@pytest.mark.parametrize("scale", ["per_token", "static", "per_tensor"])
@pytest.mark.parametrize("on_input", [False, True])
def test_scales_of_activations(monkeypatch, scale: str, on_input: bool) -> None:
    cfg = MoEConfig(512, 320, 16, 1 if on_input else 4, weight_on_input=on_input)
    weights = random_weights(cfg)
    gh = torch.rand(16, device=CUDA) * 1e-3 + 1e-3
    weights = dataclasses.replace(weights, gh=gh, gx=torch.tensor(4e-3, device=CUDA))
    layer = MoE(cfg, weights, backend="sm90", activation_scale=scale)
    for count in (2, 100):
        assert check_layer(layer, *inputs(cfg, count), monkeypatch) < 1e-3


def with_staged_h(monkeypatch: pytest.MonkeyPatch) -> None:
    """h leaves L1 in fp32, a kernel of its own rounds it, and L2 finds a scale per row."""
    grouped_gemm, scales = sm90_ops.grouped_gemm, []

    def gemm(x: Tensor, w: Any, offsets: Tensor, out: Tensor, sums: Any, **kw: Any) -> None:
        epilogue = kw.pop("epilogue")
        outer = epilogue.out_scale
        if epilogue.expert_scale is not None:
            epilogue = epilogue._replace(expert_scale=None, row_scale=scales.pop())
        kw["epilogue"] = epilogue._replace(out_scale=None)
        if outer is None:
            return grouped_gemm(x, w, offsets, out, sums, **kw)
        h = out.new_empty(out.shape, dtype=torch.float32)
        grouped_gemm(x, w, offsets, h, sums, **kw)
        scales.append(h.new_empty(h.shape[0]))
        return sm90_ops.stage_rows(h, offsets, out, scales[-1], outer=outer)

    monkeypatch.setattr(sm90_ops, "grouped_gemm", gemm)


@pytest.mark.parametrize("name", ["qwen3", "nemotron"])
def test_static_h_has_the_bits_of_staged_rows(name: str) -> None:
    """In every configuration, with NaN and infinity among the tokens and scales of h that saturate
    it, leave it at its smallest, or fit."""
    cfg = MODELS[name]
    weights = random_weights(cfg, biases=name == "gpt-oss")
    gh = torch.tensor([1e-3, 1e-6, 10.0, 0.0], device=CUDA).repeat(cfg.num_experts // 4)
    weights = dataclasses.replace(weights, gh=gh)
    layer = MoE(cfg, weights, backend="sm90")
    rows = (0.4, 20, 45, 100, 160)  # per expert
    counts = [max(int(r * cfg.num_experts / cfg.top_k), 2) for r in rows]
    used = {kernels_sm90.configuration(n, cfg, layer.numerics) for n in counts}
    assert used == {"decode", "middle", "trio", "duo", "prefill"}
    for count in counts:
        x, ids, mix = inputs(cfg, count)
        x[0, 5] = float("nan")
        if count > 4:
            x[count // 2, 7] = float("inf")
        y = layer.experts(x, ids, mix)
        with pytest.MonkeyPatch.context() as m:
            with_staged_h(m)
            want = layer.experts(x, ids, mix)
        nan = want.isnan()
        assert bool(nan.any()) and not bool(nan.all() or want.nan_to_num().eq(0).all())
        check.assert_bytes_equal(y.isnan(), nan, f"{count} tokens")
        check.assert_bytes_equal(y.nan_to_num(), want.nan_to_num(), f"{count} tokens")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda c: c["out"][:, :16].zero_(),
        lambda c: c["out"].mul_(0.98),
        lambda c: c["out"][5].zero_(),
    ],
    ids=["block", "scale", "row"],
)
@pytest.mark.parametrize("which", [0, 1])
def test_the_comparison_sees_damage(monkeypatch, spoil: Any, which: int) -> None:
    """Meta-test: what the operators return is spoilt before the layer goes on."""
    cfg = MODELS["qwen3"]
    layer = MoE(cfg, random_weights(cfg), backend="sm90")
    original, calls = sm90_ops.grouped_gemm, []

    def damaged(x: Tensor, w: Any, offsets: Tensor, out: Tensor, *a: Any, **kw: Any) -> None:
        original(x, w, offsets, out, *a, **kw)
        if len(calls) == which:
            spoil({"out": out})
        calls.append(1)

    monkeypatch.setattr(sm90_ops, "grouped_gemm", damaged)
    with pytest.raises(AssertionError):
        check_layer(layer, *inputs(cfg, 40), monkeypatch)


@pytest.mark.parametrize("experts", [48, 49])
def test_full_size_share(monkeypatch, experts: int) -> None:
    """DeepSeek-V4-Pro on 8 ranks: 48 of 384 experts; with 49, L1 has more than 2^31 codes. Rows of
    the first and the last expert are among those checked."""
    cfg = MoEConfig(7168, 3072, 384, 6, "sqrtsoftplus", activation=SwiGLU(10.0))
    weights = random_weights(cfg, 96, experts)
    if experts == 49:
        assert weights.l1_data.numel() * 2 > 2**31
    for activations in ("nvfp4", "bf16"):
        layer = MoE(cfg, weights, backend="sm90", activations=activations)
        x, ids, mix = inputs(cfg, 24)
        ids[0, 0], ids[2, 1], ids[5, 2] = 96, 96 + experts - 1, 96 + experts - 1
        assert check_layer(layer, x, ids, mix, monkeypatch) < 1e-3
        del layer
        torch.cuda.empty_cache()


# ---- bits ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen() -> MoE:
    cfg = MODELS["qwen3"]
    g = torch.Generator(CUDA).manual_seed(3)
    router = torch.randn(cfg.num_experts, cfg.hidden, device=CUDA, generator=g)
    return MoE(cfg, random_weights(cfg), router_weight=router, backend="sm90")


def test_auto_takes_it() -> None:
    status = {s.name: s for s in backend_status("cuda")}
    assert status["sm90"].usable and "sm_90a" in status["sm90"].reason
    cfg = MODELS["qwen3"]
    assert MoE(cfg, random_weights(cfg)).backend == "sm90"


@pytest.mark.parametrize("count", [4, 100, 2000])
def test_twenty_repeats_have_the_same_bits(qwen: MoE, count: int) -> None:
    x, ids, mix = inputs(qwen.cfg, count)
    first = qwen.experts(x, ids, mix)
    for _ in range(20):
        check.assert_bytes_equal(qwen.experts(x, ids, mix), first)


def test_batch_invariance(qwen: MoE) -> None:
    """Pinned: a token has the same bits alone and among thousands. Not pinned: within a
    configuration."""
    pinned = MoE(qwen.cfg, qwen.weights, backend="sm90", batch_invariant=True)
    for layer, count, sizes in ((pinned, 2000, (1, 40, 700)), (qwen, 600, (40, 300))):
        x, ids, mix = inputs(qwen.cfg, count)
        whole = layer.experts(x, ids, mix)
        for size in sizes:
            for start in (0, count // 3):
                s = slice(start, start + size)
                part = layer.experts(x[s], ids[s], mix[s])
                check.assert_bytes_equal(part, whole[s].contiguous(), f"{size} from {start}")


def test_dirty_workspace_changes_nothing(qwen: MoE) -> None:
    other = MoE(MODELS["nemotron"], random_weights(MODELS["nemotron"]), backend="sm90")
    wanted = [qwen.experts(*inputs(qwen.cfg, n)) for n in (3, 90, 900)]
    nbytes = max(qwen.plan_memory(900), other.plan_memory(900))
    workspace = Workspace(nbytes, CUDA)
    qwen.workspace = other.workspace = workspace
    try:
        for want, n in zip(wanted, (3, 90, 900)):
            workspace._memory.fill_(0x7F)
            other.experts(*inputs(other.cfg, n))
            check.assert_bytes_equal(qwen.experts(*inputs(qwen.cfg, n)), want)
    finally:
        qwen.workspace = None


# ---- host side -----------------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
@pytest.mark.parametrize("count", [2, 33, 1500])
def test_graph_replays_new_input_and_routing(qwen: MoE, activations: str, count: int) -> None:
    layer = MoE(
        qwen.cfg,
        qwen.weights,
        router_weight=qwen.router_weight,
        backend="sm90",
        activations=activations,
    )
    static = [t.clone() for t in inputs(qwen.cfg, count)]
    layer.experts(*static)
    layer(static[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, routed = layer.experts(*static), layer(static[0])
    for seed in (1, 2):
        for t, new in zip(static, inputs(qwen.cfg, count, seed)):
            t.copy_(new)
        y.fill_(float("nan"))
        routed.fill_(float("nan"))
        graph.replay()
        check.assert_bytes_equal(y, layer.experts(*static))
        check.assert_bytes_equal(routed, layer(static[0]))


def test_nothing_waits_and_nothing_compiles_after_warmup(qwen: MoE) -> None:
    qwen.warmup(2000)
    before = compiler.stats()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in (0, 1, 2, 7, 65, 129, 700, 2000):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                x, ids, mix = inputs_of(qwen.cfg, count, dtype)
                qwen.experts(x, ids, mix)
                qwen.experts(x, ids.long(), mix)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = compiler.stats()
    assert (after.compiles, after.disk_hits) == (before.compiles, before.disk_hits)


def inputs_of(cfg: MoEConfig, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(count, cfg.hidden, device=CUDA).to(dtype)
    ids = torch.arange(count * cfg.top_k, device=CUDA).reshape(count, cfg.top_k)
    ids = ids % cfg.num_experts
    return x, ids.int(), torch.ones(count, cfg.top_k, device=CUDA)


def test_calls_on_two_streams(qwen: MoE) -> None:
    batches = [inputs(qwen.cfg, n, seed=n) for n in (5, 80, 1200, 6)]
    wanted = [qwen.experts(*b) for b in batches]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for _ in range(5):
        got = []
        for stream, batch in zip(streams, batches):
            with torch.cuda.stream(stream):
                got.append(qwen.experts(*batch))
        torch.cuda.synchronize()
        for a, b in zip(got, wanted):
            check.assert_bytes_equal(a, b)


def test_planned_memory_is_what_a_call_takes(qwen: MoE) -> None:
    x, ids, mix = inputs(qwen.cfg, 3000)

    def peak() -> int:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        qwen.experts(x, ids, mix)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - base

    alone = peak()
    planned = qwen.plan_memory(3000)
    qwen.workspace = Workspace(planned, CUDA)
    try:
        with_workspace = peak()
    finally:
        qwen.workspace = None
    assert planned > 100 << 20
    assert abs(alone - with_workspace - planned) <= 8 << 20  # blocks of the allocator
    assert with_workspace <= x.nbytes + (4 << 20)  # y and the routing plan


def test_state_of_a_layer_on_the_gpu(qwen: MoE, tmp_path: Any) -> None:
    qwen.save_packed(tmp_path / "layer.safetensors")
    x, ids, mix = inputs(qwen.cfg, 30)
    want = qwen.experts(x, ids, mix)
    loaded = MoE.load_packed(tmp_path / "layer.safetensors", "cuda", backend="sm90")
    check.assert_bytes_equal(loaded.experts(x, ids, mix), want)
    state = {n: t.cpu() for n, t in qwen.state_dict().items()}
    for buffer in loaded.buffers():
        buffer.zero_()
    loaded.load_state_dict(state)
    check.assert_bytes_equal(loaded.experts(x, ids, mix), want)
    torch_layer = MoE.load_packed(tmp_path / "layer.safetensors", "cuda", backend="torch")
    y = torch_layer.experts(x, ids, mix).double()
    assert float((y - want.double()).norm() / y.norm()) < 0.06


def test_packing_needs_the_memory_of_one_expert() -> None:
    cfg = MoEConfig(4096, 2048, 64, 6)
    weights = random_weights(cfg)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer = MoE(cfg, weights, backend="sm90")
    packed = sum(b.nbytes for b in layer.buffers())
    extra = torch.cuda.max_memory_allocated() - base - packed
    one = weights.nbytes // cfg.num_experts
    assert extra < 40 * one, f"{extra} bytes of work for experts of {one}"
