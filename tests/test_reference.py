"""The reference against a second implementation of section 3 (tests/oracle.py), stage by stage on
the same input, so that a rounding flip in h neither hides nor fakes an error."""

from __future__ import annotations

import dataclasses
import itertools
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels.activations import Activation, GeGLU, ReLU2, SwiGLU, SwiGLUOAI
from moe import ExpertWeights, MoEConfig, reference
from tests import oracle
from tests.oracle import OracleLayer

F32 = np.float32
T, E, K, H, I = 9, 6, 3, 96, 80  # noqa: E741

ACTIVATIONS: dict[str, tuple[Activation, oracle.Callable]] = {
    "swiglu": (SwiGLU(), oracle.swiglu),
    "swiglu-limit": (SwiGLU(limit=1.5), oracle.swiglu_limit(1.5)),
    "oai": (SwiGLUOAI(), oracle.swiglu_oai),
    "geglu": (GeGLU(), oracle.geglu),
    "relu2": (ReLU2(), oracle.relu2),
}


@dataclasses.dataclass(frozen=True)
class Case:
    activation: str = "swiglu"
    dtype: torch.dtype = torch.bfloat16
    mode: str = "per_token"
    activations: str = "nvfp4"
    biases: bool = False
    static_h: bool = False
    weight_on_input: bool = False

    def __str__(self) -> str:
        on = [f for f in ("biases", "static_h", "weight_on_input") if getattr(self, f)]
        dtype = str(self.dtype).removeprefix("torch.")
        return "-".join([self.activation, dtype, self.mode, self.activations, *on])


CASES = [
    *(Case(activation=a) for a in ACTIVATIONS),
    *(Case(activation=a, activations="bf16") for a in ACTIVATIONS),
    *(Case(activation=a, biases=True, static_h=True) for a in ("oai", "relu2", "swiglu")),
    *(
        Case(dtype=d, activations=a)
        for d in (torch.float16, torch.float32)
        for a in ("nvfp4", "bf16")
    ),
    *(Case(mode=m, static_h=s) for m in ("static", "per_tensor") for s in (False, True)),
    *(Case(weight_on_input=True, mode=m) for m in ("per_token", "static", "per_tensor")),
    Case(weight_on_input=True, activations="bf16"),
    Case(activation="oai", biases=True, activations="bf16", dtype=torch.float32),
]


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Tensor
    ids: Tensor
    weights: Tensor


def batch(case: Case, hidden: int = H, tokens: int = T, seed: int = 0) -> Batch:
    """Rows of different magnitude, a zero row, padding slots and a token without any slot."""
    gen = torch.Generator().manual_seed(seed)
    top_k = 1 if case.weight_on_input else K
    x = torch.randn(tokens, hidden, generator=gen) * torch.logspace(-2, 1, tokens).unsqueeze(1)
    x[2] = 0
    x[:, 5] *= 30
    ids = torch.stack([torch.randperm(E, generator=gen)[:top_k] for _ in range(tokens)]).int()
    ids[1, 0] = -1
    ids[4] = -1
    ids[6, -1] = E
    return Batch(x.to(case.dtype), ids, torch.rand(tokens, top_k, generator=gen) + 0.1)


def build(case: Case, seed: int = 0) -> tuple[OracleLayer, MoEConfig, ExpertWeights]:
    act, formula = ACTIVATIONS[case.activation]
    gh = np.linspace(2e-3, 9e-3, E).astype(F32) if case.static_h else None
    layer = oracle.random_layer(
        seed,
        E,
        H,
        I,
        formula,
        act.gated,
        gh=gh,
        biases=oracle.random_biases(seed, E, H, I, act.gated) if case.biases else None,
        weight_on_input=case.weight_on_input,
        w4a16=case.activations == "bf16",
    )
    top_k = 1 if case.weight_on_input else K
    cfg = MoEConfig(H, I, E, top_k, activation=act, weight_on_input=case.weight_on_input)
    weights = oracle.to_library(layer)
    if case.mode == "static":
        weights = dataclasses.replace(weights, gx=torch.tensor(3e-3))
    return layer, cfg, weights


def outer_scale(case: Case, layer: OracleLayer, b: Batch) -> F32 | None:
    """The fp32 outer scale of x in modes with one scale for all tokens."""
    if case.mode == "static":
        return F32(3e-3)
    if case.mode == "per_tensor":
        x = oracle.numpy32(b.x)
        if layer.weight_on_input:
            x = x * b.weights.numpy()
        return oracle.static_scale(x, b.ids.numpy(), E)
    return None


def check_stages(
    stages: reference.Stages, layer: OracleLayer, b: Batch, g: F32 | None, dtype: torch.dtype
) -> None:
    """Every stage on the same input. Equal bit for bit, but h: an exponential may differ in its
    last bits."""
    x = oracle.numpy32(b.x)
    for t in range(x.shape[0]):
        xq, gx = oracle.stage_token(layer, x[t], F32(b.weights[t, 0]), g)
        np.testing.assert_array_equal(stages.x[t].numpy(), xq)
        assert stages.gx[t].item() == gx
        terms = []
        for k in range(b.ids.shape[1]):
            e, row = int(b.ids[t, k]), int(stages.plan.token_rows[t, k])
            if not 0 <= e < layer.num_experts:
                assert row == -1
                continue
            h = stages.h[row].numpy()
            want = oracle.run_slot(layer, xq, gx, e, h)
            np.testing.assert_array_equal(stages.gate[row].numpy(), want.gate)
            np.testing.assert_array_equal(stages.up[row].numpy(), want.up)
            check_hidden(h, want)
            np.testing.assert_array_equal(stages.hq[row].numpy(), want.hq)
            assert stages.gh[row].item() == want.gh
            np.testing.assert_array_equal(stages.o[row].float().numpy(), want.o)
            w = F32(1) if layer.weight_on_input else F32(b.weights[t, k])
            terms.append((w, want.o))
        y = torch.from_numpy(oracle.combine(terms, x.shape[1], None)).to(dtype)
        assert torch.equal(stages.y[t], y)


def check_hidden(h: np.ndarray, want: oracle.Slot) -> None:
    """h within 8 roundings of its fp64 formula: relative to |h|, and to |gate * up| * 2^-24 where
    GeGLU cancels (1 + tanh)."""
    scale = np.abs(want.h) + np.abs(want.gate * want.up) * 2.0**-3 + 2.0**-126
    assert (np.abs(h - want.h) <= 8 * 2.0**-24 * scale).all()


def run(case: Case) -> tuple[reference.Stages, OracleLayer, Batch, F32 | None]:
    layer, cfg, weights = build(case)
    b = batch(case)
    stages = reference.experts(b.x, b.ids, b.weights, cfg, weights, case.activations, case.mode)
    return stages, layer, b, outer_scale(case, layer, b)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_stage_equals_the_second_implementation(case: Case) -> None:
    stages, layer, b, g = run(case)
    check_stages(stages, layer, b, g, case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_end_to_end_few_codes_of_h_differ(case: Case) -> None:
    """The second implementation on its own: rows whose h codes agree have the same o."""
    stages, layer, b, g = run(case)
    differ = total = same = 0
    x = oracle.numpy32(b.x)
    for t in range(x.shape[0]):
        xq, gx = oracle.stage_token(layer, x[t], F32(b.weights[t, 0]), g)
        for k in range(b.ids.shape[1]):
            e, row = int(b.ids[t, k]), int(stages.plan.token_rows[t, k])
            if row < 0:
                continue
            own = oracle.run_slot(layer, xq, gx, e)
            wrong = own.hq != stages.hq[row].numpy()
            if case.activations == "bf16":  # GeGLU cancels where it is tiny: many bf16 steps
                wrong &= np.abs(own.hq) > 2.0**-8 * np.abs(own.hq).max()
            differ, total = differ + int(wrong.sum()), total + wrong.size
            if np.array_equal(own.hq, stages.hq[row].numpy()) and own.gh == stages.gh[row].item():
                same += 1
                np.testing.assert_array_equal(stages.o[row].float().numpy(), own.o)
                # and the o that nobody rounded: half an ulp of bf16, and fp32 roundings before it
                error = np.abs(stages.o[row].double().numpy() - own.o_exact)
                assert (error <= np.abs(own.o_exact) * 2.0**-8 + own.o_bound * 2.0**-22).all()
    assert differ <= max(2, 2e-3 * total)
    assert same >= 3


def test_rows_past_the_last_expert_are_zero() -> None:
    stages = run(Case())[0]
    used = int(stages.plan.expert_offsets[-1])
    assert used < stages.plan.row_token.numel() == T * K
    for value in (stages.gate, stages.up, stages.h, stages.hq, stages.o):
        assert not value[used:].any()
    assert not stages.y[4].any() and not torch.signbit(stages.y[4]).any()


def test_a_slice_of_the_experts_gives_the_rows_of_those_experts() -> None:
    """first_expert: gate, h and o of the local rows are those of the whole layer."""
    layer, cfg, weights = build(Case(biases=True))
    b = batch(Case())
    whole = reference.experts(b.x, b.ids, b.weights, cfg, weights)
    first, count = 2, 3
    local = dataclasses.replace(
        layer,
        **{
            n: tuple(a[first : first + count] for a in getattr(layer, n))
            for n in ("gate", "up", "down", "biases")
        },
    )
    part = reference.experts(b.x, b.ids, b.weights, cfg, oracle.to_library(local, first))
    seen = 0
    for t in range(T):
        for k in range(K):
            row, here = int(whole.plan.token_rows[t, k]), int(part.plan.token_rows[t, k])
            assert (here >= 0) == (first <= int(b.ids[t, k]) < first + count)
            if here >= 0:
                seen += 1
                assert torch.equal(part.h[here], whole.h[row])
                assert torch.equal(part.o[here], whole.o[row])
    assert seen > 5


def test_shared_output_is_added_last_in_fp32() -> None:
    """(w0 o0 + w1 o1) + shared, not in another order: values where the order shows."""
    o = torch.tensor([[1.0], [2.0**-8]]).bfloat16()
    plan = reference.make_plan(torch.tensor([[0, 1]]), torch.ones(1, 2), 2)
    weights = torch.tensor([[1.0, 2.0**-16]])
    shared = torch.tensor([[-1.0]])
    y = reference.combine(o, plan, weights, torch.float32, shared)
    assert y.item() == 0.0  # 1 + 2^-24 rounds to 1 first
    y = reference.combine(o, plan, torch.tensor([[1.0, 2.0**-15]]), torch.float32, shared)
    assert y.item() == 2.0**-23


def test_combine_rounds_the_product_before_the_sum() -> None:
    """No fma: w1 * o1 rounds to 1 and cancels; a fused product would leave its last bit."""
    o = torch.tensor([[-1.0], [1.0 + 2.0**-7]]).bfloat16()
    w = F32(1.0) / F32(1.0 + 2.0**-7)
    assert float(w) * (1 + 2.0**-7) != 1.0 and F32(w * F32(1 + 2.0**-7)) == 1.0
    plan = reference.make_plan(torch.tensor([[0, 1]]), torch.ones(1, 2), 2)
    y = reference.combine(o, plan, torch.tensor([[1.0, float(w)]]), torch.float32, None)
    assert y.item() == 0.0


def test_combine_adds_slots_in_order() -> None:
    """Slots in order even when experts are not: fp32 sums of three terms tell."""
    o = torch.tensor([[1.0], [2.0**-24], [-1.0]]).bfloat16()
    ids = torch.tensor([[2, 0, 1]])  # slot 0 is the last row
    plan = reference.make_plan(ids, torch.ones(1, 3), 3)
    rows = torch.tensor([plan.token_rows[0, k] for k in range(3)])
    placed = torch.empty_like(o)
    placed[rows] = o
    y = reference.combine(placed, plan, torch.ones(1, 3), torch.float32, None)
    assert y.item() == 0.0  # (1 + 2^-24) - 1; as 1 - 1 + 2^-24 it would be 2^-24


# ---- values known by hand ------------------------------------------------------------------------


@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_integer_layer_is_exact(activations: str) -> None:
    """relu2, codes and power-of-two scales: everything is exact and o is an integer matrix
    product."""
    gen = np.random.default_rng(3)
    ones = np.ones(2, F32)

    def part(rows: int, k: int) -> tuple:
        magnitude = gen.integers(0, 3, (2, rows, k)) * 2  # codes of 0, 1, 2
        sign = gen.integers(0, 2, (2, rows, k)) * 8
        codes = np.where(magnitude > 0, magnitude | sign, 0).astype(np.uint8)
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        return packed, np.full((2, rows, k // 16), 0x38, np.uint8), ones

    up, down = part(32, 64), part(64, 32)
    layer = OracleLayer(up, None, down, oracle.relu2, w4a16=activations == "bf16")
    cfg = MoEConfig(64, 32, 2, 1, activation=ReLU2())
    # eight nonzero elements of +-1; amax 1 and block scale 448: code 6 is exact only for 6 * 2^n
    x = np.zeros((4, 64), F32)
    x[:, ::8] = gen.choice([-1.0, 1.0], (4, 8))
    ids = torch.tensor([[0], [1], [1], [0]])
    stages = reference.experts(
        torch.from_numpy(x), ids, torch.ones(4, 1), cfg, oracle.to_library(layer), activations
    )
    for t in range(4):
        e, row = int(ids[t, 0]), int(stages.plan.token_rows[t, 0])
        w1 = oracle.decode_codes(up[0][e])
        np.testing.assert_allclose(stages.gate[row].numpy(), w1 @ x[t], rtol=1e-6, atol=1e-6)
        if activations == "bf16":
            h = np.maximum(w1 @ x[t], 0) ** 2  # integers up to 256: exact in bf16
            assert h.max() <= 256
            want = (oracle.decode_codes(down[0][e]) @ h).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(stages.o[row].float().numpy(), want.astype(F32))


def test_alpha_is_rounded_before_it_meets_the_sum() -> None:
    """gate = fp32(acc) * fp32(gx * g13): with these values another order gives other bits."""
    case = Case(activations="nvfp4")
    layer, cfg, weights = build(case)
    b = batch(case)
    stages = reference.experts(b.x, b.ids, b.weights, cfg, weights)
    other = 0
    for t in range(T):
        for k in range(K):
            row, e = int(stages.plan.token_rows[t, k]), int(b.ids[t, k])
            if row < 0:
                continue
            acc = oracle.decode(layer.gate[0][e], layer.gate[1][e]) @ stages.x[t].numpy()
            gx, g = F32(stages.gx[t]), layer.gate[2][e]
            np.testing.assert_array_equal(stages.gate[row].numpy(), acc.astype(F32) * (gx * g))
            other += int((stages.gate[row].numpy() != (acc.astype(F32) * gx) * g).sum())
    assert other > 0  # the order is visible in this data, so the equality above means something


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_output_has_the_dtype_of_x(dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    stages, *_ = run(case)
    assert stages.y.dtype == dtype and stages.o.dtype == torch.bfloat16


def test_static_scale_of_x_is_needed_in_static_mode() -> None:
    _, cfg, weights = build(Case())
    b = batch(Case())
    with pytest.raises(ValueError, match="input_scale"):
        reference.experts(b.x, b.ids, b.weights, cfg, weights, "nvfp4", "static")
    with pytest.raises(ValueError, match="activation_scale"):
        reference.experts(b.x, b.ids, b.weights, cfg, weights, "nvfp4", "per_row")


def test_per_tensor_scale_ignores_padding_tokens() -> None:
    """A huge (or NaN) token without any slot changes no other token in mode per_tensor."""
    _, cfg, weights = build(Case())
    b = batch(Case(mode="per_tensor"))
    clean = reference.experts(b.x, b.ids, b.weights, cfg, weights, "nvfp4", "per_tensor").y
    for bad, nowhere in itertools.product((1e6, math.inf, math.nan), (-1, E, 2**31 - 1)):
        x = b.x.clone()
        x[4], b.ids[4] = bad, nowhere
        y = reference.experts(x, b.ids, b.weights, cfg, weights, "nvfp4", "per_tensor").y
        assert torch.equal(y, clean)
    x = b.x.clone()
    x[3] *= 100  # a real token does change the scale
    y = reference.experts(x, b.ids, b.weights, cfg, weights, "nvfp4", "per_tensor").y
    assert not torch.equal(y[0], clean[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("activations", ["nvfp4", "bf16"])
def test_nan_in_one_token_stays_there(bad: float, activations: str) -> None:
    _, cfg, weights = build(Case())
    b = batch(Case())
    clean = reference.experts(b.x, b.ids, b.weights, cfg, weights, activations).y
    x = b.x.clone()
    x[3, 7] = bad
    y = reference.experts(x, b.ids, b.weights, cfg, weights, activations).y
    keep = [t for t in range(T) if t != 3]
    assert torch.equal(y[keep], clean[keep])
    assert y[3].isnan().all() if activations == "nvfp4" else not torch.isfinite(y[3]).all()


# ---- the comparison itself -----------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["x", "gx", "gate", "up", "h", "hq", "gh", "o", "y"])
def test_the_comparison_sees_one_wrong_element(stage: str) -> None:
    stages, layer, b, g = run(Case())
    value = getattr(stages, stage).clone()
    flat = value.view(-1)
    i = int(flat.float().abs().argmax())
    flat[i] = flat[i] * (1 + 2.0**-6)
    with pytest.raises(AssertionError):
        check_stages(stages._replace(**{stage: value}), layer, b, g, torch.bfloat16)
