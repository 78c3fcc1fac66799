"""The GEMM operations on torch tensors: plain PyTorch against exact sums, kernels against plain
PyTorch, registration, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import activations, gemm_ops, nvfp4, ops
from cute_kernels import compile as compiler
from cute_kernels.activations import Activation, ReLU2, SwiGLU, SwiGLUOAI
from cute_kernels.gemm_ops import HiddenScales, Rows, ScatterTarget, Weights
from tests.sm100.harness import Data, Problem
from tests.small_kernels import assert_same

needs_simulator = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)


@dataclasses.dataclass(frozen=True)
class Cubed(Activation):
    """max(x, 0)^3: written by a user."""

    gated = False
    factor: float = 0.5

    def __call__(self, m: Any, gate: Any, up: Any = None) -> Any:
        positive = m.maximum(gate, 0.0)
        return positive * positive * positive * self.factor


class Inputs(Data):
    """The operands of a `Problem` as the operations take them."""

    @property
    def a(self) -> Rows:
        if self.problem.gathered:
            return Rows(self.tokens.data, self.scale, self.row_token)
        return Rows(self.rows, self.scale)

    @property
    def weights(self) -> Weights:
        return Weights(self.w.data, self.w.scale)

    @property
    def alpha(self) -> Tensor:
        return torch.linspace(0.5, 1.5, len(self.problem.counts))

    def scales(self, parts: int) -> HiddenScales:
        experts = len(self.problem.counts)
        gx = self.tokens.global_scale if self.problem.gathered else self.gx
        alpha = torch.linspace(1e-3, 9e-3, experts * parts).reshape(experts, parts)
        return HiddenScales(alpha, gx, torch.linspace(1e-4, 8e-4, experts))


GATHERED = Problem((3, 0, 130, 1), n=96, k=320, gathered=True, biased=True)
PLAIN = Problem((3, 0, 20, 1), n=96, k=64)


def poisoned(operation: Any, *args: Any, **kwargs: Any) -> Any:
    """The result; tensors that torch does not initialise hold NaN or the largest integer."""
    torch.use_deterministic_algorithms(True)
    try:
        return operation(*args, **kwargs)
    finally:
        torch.use_deterministic_algorithms(False)


def simulated(operation: Any, *args: Any, **kwargs: Any) -> Any:
    with gemm_ops.kernels_on(torch.device("cpu")) as s:
        out = poisoned(operation, *args, **kwargs)
    assert s.launches, "nothing was launched: the plain implementation ran instead"
    return out


# ---- values


@pytest.mark.parametrize("problem", [GATHERED, PLAIN], ids=["gathered", "plain"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_grouped_gemm_is_the_exact_sum_rounded_step_by_step(
    problem: Problem, dtype: torch.dtype
) -> None:
    data = Inputs(problem)
    args = (data.a, data.weights, data.offsets, data.alpha)
    got = gemm_ops.grouped_gemm(*args, row_scale=data.gx, bias=data.bias, out_dtype=dtype)
    want = data.acc * (data.gx * data.alpha[data.expert])[:, None]
    want = want if data.bias is None else want + data.bias[data.expert]
    assert_same(got, want.to(dtype), "out")
    got[5, 16:32] = 0
    with pytest.raises(AssertionError):
        assert_same(got, want.to(dtype), "out")


@needs_simulator
@pytest.mark.parametrize("problem", [GATHERED, PLAIN], ids=["gathered", "plain"])
def test_the_kernel_gives_the_plain_result(problem: Problem) -> None:
    data = Inputs(problem)
    args = (data.a, data.weights, data.offsets, data.alpha)
    options: dict[str, Any] = {"row_scale": data.gx, "bias": data.bias}
    want = gemm_ops.grouped_gemm(*args, **options)
    assert_same(simulated(gemm_ops.grouped_gemm, *args, **options), want, "out")


@needs_simulator
@pytest.mark.parametrize("activation", [ReLU2(), Cubed()], ids=repr)
def test_activation_and_quantiser_give_the_plain_bytes(activation: Activation) -> None:
    """Without exp and division every step is rounded once on both sides."""
    data = Inputs(GATHERED)
    args = (data.a, data.weights, data.offsets, activation, data.scales(1), data.bias)
    want = gemm_ops.grouped_gemm_act_quant(*args)
    got = simulated(gemm_ops.grouped_gemm_act_quant, *args)
    assert_same(got.data, want.data, "codes")
    real = nvfp4.grouped_rows(data.offsets, len(data.rows))
    plain = [nvfp4.unswizzle(r.scale, r.scale.shape[0], 6)[real] for r in (got, want)]
    assert_same(plain[0], plain[1], "scales")


# ---- scatter


def scatter_want(
    data: Inputs, start: Tensor, token: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """fp64 sums of the addends that the contract rounds to bf16 and weights in fp32, and the sums
    of their magnitudes."""
    o = data.acc * (data.gx * data.alpha[data.expert])[:, None]
    o = (o if data.bias is None else o + data.bias[data.expert]).bfloat16().float()
    terms = o if weight is None else weight[:, None] * o
    sums = (start.double(), terms.double()), (start.double().abs(), terms.double().abs())
    total, size = (a.index_add(0, token.long(), b) for a, b in sums)
    return total, size


def scatter(
    data: Inputs, y: Tensor, token: Tensor, weight: Tensor | None, run: Any = poisoned
) -> Tensor:
    target = ScatterTarget(y.clone(), token, weight)
    args = (data.a, data.weights, data.offsets, data.alpha, target)
    return run(gemm_ops.grouped_gemm_scatter_add, *args, row_scale=data.gx, bias=data.bias)


def assert_sums(got: Tensor, want: tuple[Tensor, Tensor], slots: int) -> None:
    """Each sum of ``slots`` terms and a start, in any order, each step rounded; per element."""
    step = 2.0**-24 if got.dtype == torch.float32 else 2.0**-8
    total, size = want
    assert bool(((got.double() - total).abs() <= (slots + 1) * step * size).all()), "sums"


RUNS = [poisoned, pytest.param(simulated, marks=needs_simulator)]


@pytest.mark.parametrize("run", RUNS, ids=["plain", "kernel"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("problem", [GATHERED, PLAIN], ids=["gathered", "plain"])
def test_scatter_add(problem: Problem, dtype: torch.dtype, weighted: bool, run: Any) -> None:
    data = Inputs(problem)
    rows, tokens = len(data.rows), 50
    g = torch.Generator().manual_seed(1)
    token = (torch.arange(rows) % tokens)[torch.randperm(rows, generator=g)].int()
    weight = torch.rand(rows, generator=g) if weighted else None
    y = torch.randn(tokens + 2, problem.n, generator=g).to(dtype)
    got = scatter(data, y, token, weight, run)
    want = scatter_want(data, y, token, weight)
    assert_sums(got, want, -(-rows // tokens))
    assert_same(got[tokens:], y[tokens:], "tokens without a row")
    for spoil in (lambda t: t[3].zero_(), lambda t: t[:, 16:32].zero_(), lambda t: t.mul_(0.98)):
        bad = got.clone()
        spoil(bad)
        with pytest.raises(AssertionError):
            assert_sums(bad, want, -(-rows // tokens))


@needs_simulator
def test_two_slots_add_up_to_the_same_bits_in_any_order() -> None:
    data = Inputs(PLAIN)
    token = (torch.arange(24) % 12).int()
    y, weight = torch.zeros(12, 96), torch.rand(24)
    assert_same(scatter(data, y, token, weight, simulated), scatter(data, y, token, weight), "y")


@needs_simulator
def test_the_scatter_adds_sixteen_bytes_at_a_time() -> None:
    from cute_kernels.config import GemmConfig
    from cute_kernels.device.scatter import ScatterAdd
    from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
    from cute_kernels.sm100.loads import ContiguousRows

    for dtype, count, code in (
        ("Float32", 8, "red.global.add.v4.f32"),
        ("BFloat16", 4, "red.global.add.noftz.v4.bf16x2"),
    ):
        kernel = Sm100GroupedGemm(ContiguousRows(), ScatterAdd(dtype, True, True), GemmConfig())
        ptx = compiler.dump(kernel, "sm_100a").ptx
        # of 32 columns: once for tiles that lie inside, once for those with the last columns
        assert ptx.count(code) == ptx.count("red.global") == 2 * count
        assert ".local" not in ptx


# ---- the names that users type


def test_grouped_gemm_of_nvfp4_tensors() -> None:
    g = torch.Generator().manual_seed(0)
    offsets = torch.tensor([0, 3, 3, 20], dtype=torch.int32)
    a = nvfp4.quantize_grouped(torch.randn(20, 64, generator=g), offsets)
    w = torch.randn(3, 48, 64, generator=g)
    b = nvfp4.quantize(w, torch.tensor([0.01, 0.02, 0.03]), nvfp4.SWIZZLE_32_4_4)
    y = ops.grouped_gemm(a, b, offsets, torch.float32)
    wide, narrow = b.dequantize(torch.float64), a.dequantize(torch.float64)
    want = torch.cat([narrow[:3] @ wide[0].t(), narrow[3:] @ wide[2].t()])
    assert torch.allclose(y.double(), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="SWIZZLE_32_4_4_GROUPED"):
        ops.grouped_gemm(nvfp4.quantize(torch.randn(20, 64)), b, offsets)


@pytest.mark.parametrize("run", RUNS, ids=["plain", "kernel"])
@pytest.mark.parametrize("rows", [0, 1, 130])
def test_dense_gemm(rows: int, run: Any) -> None:
    g = torch.Generator().manual_seed(0)
    swizzled = nvfp4.SWIZZLE_32_4_4
    a = nvfp4.quantize(torch.randn(rows, 96, generator=g), scale_layout=swizzled)
    b = nvfp4.quantize(torch.randn(64, 96, generator=g), "per_tensor", swizzled)
    if rows == 0:
        run = poisoned  # nothing is launched
    y = run(ops.blockscaled_gemm, a, b, torch.float32)
    want = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    assert y.shape == (rows, 64)
    assert torch.allclose(y.double(), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="one global scale"):
        ops.blockscaled_gemm(a, nvfp4.quantize(torch.randn(64, 96), scale_layout=swizzled))


# ---- registration


def op_inputs(name: str) -> tuple:
    data = Inputs(GATHERED)
    operands = (*data.a, *data.weights, data.offsets)
    operands = tuple(t.view(torch.uint8) if t.element_size() == 1 else t for t in operands)
    operands = (*operands, torch.zeros(1, dtype=torch.int32))  # the counter
    n, rows = GATHERED.n, len(data.rows)
    store = (*operands, data.alpha, data.gx, data.bias)
    if name == "grouped_gemm":
        return (*store, torch.zeros(rows, n))
    if name == "grouped_gemm_scatter_add":
        return (*store, data.row_token, data.gx, torch.zeros(len(data.tokens.data), n))
    out = [torch.zeros(b.shape, dtype=b.dtype) for b in gemm_ops.hidden_buffers(rows, n // 2, 4)]
    return (*operands, *data.scales(2), data.bias, *activations.spec(SwiGLU(7.0)), *out)


NAMES = ["grouped_gemm", "grouped_gemm_act_quant", "grouped_gemm_scatter_add"]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    op = getattr(torch.ops.nvfp4_megamoe, name).default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, op_inputs(name), test_utils=checks)
    torch.library.opcheck(op, op_inputs(name), test_utils="test_aot_dispatch_dynamic")


def two_gemms(a: Rows, w: Weights, scales: HiddenScales, ends: Tensor, y: Tensor) -> Tensor:
    h = ops.grouped_gemm_act_quant(a, w, ends, SwiGLU(limit=7.0), scales)
    o = gemm_ops.grouped_gemm(h, w2_of(h), ends, scales.gh)
    target = ScatterTarget(y.clone(), torch.arange(o.shape[0], dtype=torch.int32))
    return ops.grouped_gemm_scatter_add(h, w2_of(h), ends, scales.gh, target) + o


def w2_of(h: Rows) -> Weights:
    data = torch.full((3, 32, h.data.shape[1]), 0x22, dtype=torch.uint8)
    return Weights(data, torch.full((3, 128, h.scale.shape[1]), 0x38, dtype=torch.uint8))


def test_gemms_under_torch_compile() -> None:
    compiled = torch.compile(two_gemms, fullgraph=True, backend="aot_eager", dynamic=True)
    for counts in ((1, 0, 2), (5, 130, 1)):
        data = Inputs(Problem(counts, n=128, k=64))
        args = (data.a, data.weights, data.scales(2), data.offsets, torch.ones(sum(counts), 32))
        assert_same(compiled(*args), two_gemms(*args), str(counts))


@pytest.mark.parametrize("activation", [SwiGLU(), SwiGLU(10.0), SwiGLUOAI(), Cubed(2)], ids=repr)
def test_an_activation_survives_as_a_string(activation: Activation) -> None:
    text, numbers = activations.spec(activation)
    assert activations.from_spec(text, tuple(numbers)) == activation


def test_activations_that_no_string_can_name() -> None:
    class Local(Cubed):
        pass

    with pytest.raises(ValueError, match="top level of a module"):
        activations.spec(Local())
    with pytest.raises(ValueError, match="must be numbers, strings"):
        activations.from_spec(activations.spec(Cubed(object()))[0], ())
    with pytest.raises(ValueError, match="no Activation"):
        activations.from_spec("builtins:dict:{}", ())


# ---- what is refused


def shifted(tensor: Tensor) -> Tensor:
    """The same values in memory that starts at an odd address."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
    memory[1:] = tensor.reshape(-1)
    return memory[1:].view(tensor.shape)


def call(data: Inputs, **changes: Any) -> Tensor:
    """`grouped_gemm` with some arguments replaced."""
    names = ("rows", "weights", "expert_offsets", "alpha", "row_scale", "bias", "out_dtype", "out")
    values = (data.a, data.weights, data.offsets, data.alpha, data.gx, data.bias, torch.float32)
    return gemm_ops.grouped_gemm(**{**dict(zip(names, values)), **changes})


def wide(data: Inputs) -> Rows:
    rows = data.a.data
    return data.a._replace(data=torch.cat((rows, rows), 1)[:, : rows.shape[1]])


BAD: list[tuple[str, Any, str]] = [
    ("offsets", lambda d: {"expert_offsets": d.offsets[:-1]}, "must have 5 entries"),
    ("row type", lambda d: {"rows": d.a._replace(data=d.a.data.float())}, "rows must be uint8"),
    ("row width", lambda d: {"rows": d.a._replace(data=d.a.data[:, 16:])}, r"\(rows, 160\)"),
    ("plain scales", lambda d: {"rows": d.a._replace(scale=d.a.scale[:128])}, "of the rows must"),
    ("weights", lambda d: {"weights": Weights(d.w.data[0], d.w.scale[0])}, r"\(E, N, K/2\)"),
    ("strided rows", lambda d: {"rows": wide(d)}, "rows must be contiguous"),
    ("alpha", lambda d: {"alpha": torch.ones(3)}, r"alpha must be float32 \(4,\)"),
    ("row_scale", lambda d: {"row_scale": d.gx.double()}, "row_scale must be float32"),
    ("bias", lambda d: {"bias": d.bias[:, :16]}, r"bias must be float32 \(4, 96\)"),
    ("dtype", lambda d: {"out_dtype": torch.float64}, "out_dtype must be"),
    ("out", lambda d: {"out": torch.zeros(134, 80)}, r"\(134, 96\)"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=[b[0] for b in BAD])
def test_bad_arguments_are_named(name: str, change: Any, message: str) -> None:
    data = Inputs(GATHERED)
    with pytest.raises((TypeError, ValueError), match=message):
        call(data, **change(data))


def test_output_with_experts_innermost_is_refused() -> None:
    """H31: the kernel writes rows of N; another order of strides would be overwritten in silence.
    An output of the right strides keeps experts apart, even next to NaN."""
    data = Inputs(Problem((128, 128), n=128, k=64))
    with pytest.raises(ValueError, match=r"strides \(128, 1\)"):
        call(data, out=torch.zeros(128, 256).t())
    clean = call(data)
    data.w.scale.view(torch.uint8)[0, 0, 0] = nvfp4.UE4M3_NAN
    dirty = call(data)
    assert dirty[:128].isnan().any() and not dirty[128:].isnan().any()
    assert_same(dirty[128:], clean[128:], "expert 1")


@needs_simulator
def test_one_expert_of_nan_leaves_the_other_alone_in_the_kernel() -> None:
    """H31: the same through the compiled kernel."""
    data = Inputs(Problem((128, 128), n=128, k=64))
    data.w.scale.view(torch.uint8)[0, 0, 0] = nvfp4.UE4M3_NAN
    assert_same(simulated(call, data), call(data), "out")


@pytest.mark.parametrize(("k", "fits"), [(1616, False), (1632, True)])
def test_rows_whose_pitch_tma_cannot_read(k: int, fits: bool) -> None:
    """H33: 1616 / 2 = 808 bytes are no multiple of 16, 1632 / 2 = 816 are."""
    data = Inputs(Problem((2, 1), n=32, k=k))
    if fits:
        assert call(data).shape == (3, 32)
    else:
        with pytest.raises(ValueError, match=r"K must be a multiple of 32 .*got K = 1616"):
            call(data)


def test_outputs_and_weights_that_tma_cannot_read() -> None:
    """H33: N = 1638 is no multiple of 16; a weight view with a pitch of 1640 bytes is refused."""
    data = Inputs(Problem((2,), n=32, k=64))
    odd = Weights(torch.zeros(1, 1638, 32, dtype=torch.uint8), data.w.scale)
    with pytest.raises(ValueError, match="N of 16, got K = 64, N = 1638"):
        call(data, weights=odd)
    view = torch.zeros(1, 32, 1640, dtype=torch.uint8)[:, :, :32]
    with pytest.raises(ValueError, match=r"weights must be contiguous .*1640"):
        call(data, weights=Weights(view, data.w.scale))


@needs_simulator
def test_operands_at_odd_addresses_are_refused_before_the_launch() -> None:
    """H33: a descriptor needs a base at a multiple of 16 bytes."""
    data = Inputs(PLAIN)
    for change in (
        {"rows": data.a._replace(data=shifted(data.a.data))},
        {"weights": data.weights._replace(data=shifted(data.w.data))},
    ):
        with pytest.raises(ValueError, match="multiple of 16 bytes"):
            simulated(call, data, **change)
