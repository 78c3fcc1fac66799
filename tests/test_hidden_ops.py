"""Accumulators -> activation -> quantised rows: plain PyTorch against the pieces it is made of, the
kernel in the simulator bit for bit, registration, errors, generated code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import activations, gemm_ops, nvfp4, ops
from cute_kernels import compile as compiler
from cute_kernels.activations import GeGLU, ReLU2, SwiGLU, SwiGLUOAI
from cute_kernels.torch_math import TORCH_MATH
from tests.small_kernels import assert_same

pytest.importorskip("cutlass", reason="needs the DSL")
from tests.hidden import (
    Bilinear,
    Cubed,
    HiddenCase,
    assert_hidden,
    kernel_h,
    poisoned_hidden,
    quantized,
)

needs_simulator = pytest.mark.skipif(
    not compiler.simulated(), reason="needs a C compiler, and no GPU in this session"
)
CASES = [
    HiddenCase((3, 0, 130, 1), 352, SwiGLU(10.0), biased=True),
    HiddenCase((2, 5), 96, SwiGLU(), indexed=False, given=True),
    HiddenCase((0, 4), 2880, SwiGLUOAI(), biased=True, special=False),
    HiddenCase((5,), 16, GeGLU(), indexed=False, spare=0),
    HiddenCase((0, 0, 2, 3), 1856, ReLU2()),
    HiddenCase((1,) * 40, 64, Bilinear(), given=True),
    HiddenCase((2,), 704, Cubed(), biased=True),
]


def h_by_hand(case: HiddenCase, arguments: dict[str, Any]) -> Tensor:
    """Row by row."""
    acc, scales, bias = arguments["acc"], arguments["scales"], arguments["bias"]
    parts = 2 if case.activation.gated else 1
    out = torch.full((case.rows, case.inter), float("nan"))
    row = 0
    for e, count in enumerate(case.counts):
        for r in range(row, row + count):
            token = int(arguments["row_token"][r]) if case.indexed else r
            pre = []
            for p in range(parts):
                value = acc[r, p::parts] * (scales.gx[token] * scales.alpha[e, p])
                pre.append(value if bias is None else value + bias[e, p::parts])
            out[r] = case.activation(TORCH_MATH, *pre)
        row += count
    return out


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_is_activation_then_quantiser(case: HiddenCase) -> None:
    arguments = case.arguments()
    got = ops.quantize_hidden(**arguments)
    want = quantized(h_by_hand(case, arguments), arguments)
    used = sum(case.counts)
    assert_same(got[0].data[:used], want[0].data[:used], "codes")
    assert_same(got[0].scale, want[0].scale, "scales")
    assert_same(got[1][:used], want[1][:used], "outer scales")


@needs_simulator
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel_quantises_its_own_h_bit_for_bit(case: HiddenCase) -> None:
    arguments = case.arguments()
    with gemm_ops.kernels_on(torch.device("cpu")):
        got = poisoned_hidden(arguments)
        h = kernel_h(case, arguments)
    assert_hidden(got, quantized(h, arguments), arguments["expert_offsets"])
    want, used = h_by_hand(case, arguments)[: sum(case.counts)], h[: sum(case.counts)]
    if isinstance(case.activation, Bilinear | Cubed | ReLU2):
        assert_same(used, want, "h")  # nothing but products, sums and comparisons
    # exp(x) is ex2 of the rounded x log2(e): 2^-24 |x log2(e)| relative, and 2 ulp each for ex2
    # and division
    assert torch.allclose(used, want, rtol=2e-5, atol=1e-30, equal_nan=True)


@needs_simulator
def test_the_comparison_notices_every_kind_of_damage() -> None:
    case = CASES[0]
    arguments = case.arguments()
    with gemm_ops.kernels_on(torch.device("cpu")):
        got = poisoned_hidden(arguments)
        want = quantized(kernel_h(case, arguments), arguments)
    offsets = arguments["expert_offsets"]
    first = nvfp4.grouped_scale_offsets(offsets)[2]  # the first row of expert 2
    for spoil in (
        lambda r, g: r.data[40, 7].bitwise_xor_(1),
        lambda r, g: r.scale.view(-1)[int(first) * r.scale.shape[1]].bitwise_xor_(1),
        lambda r, g: g[5].mul_(1.01),
        lambda r, g: r.data[-1, 0].zero_(),
        lambda r, g: r.scale[100].zero_(),
    ):
        bad = (
            got[0]._replace(data=got[0].data.clone(), scale=got[0].scale.clone()),
            got[1].clone(),
        )
        spoil(*bad)
        with pytest.raises(AssertionError):
            assert_hidden(bad, want, offsets)


@needs_simulator
def test_schedules_do_not_change_a_bit() -> None:
    from cute_kernels.sim import Simulator

    case = CASES[1]
    arguments = case.arguments()
    results = []
    for seed in range(4):
        with Simulator(seed=seed, schedule="random"):
            results.append(poisoned_hidden(arguments))
    for rows, gh in results[1:]:
        assert torch.equal(rows.data, results[0][0].data)
        assert torch.equal(rows.scale, results[0][0].scale)
        assert_same(gh, results[0][1], "gh")


def op_inputs() -> tuple:
    case = HiddenCase((3, 0, 5), 64, SwiGLU(7.0), biased=True)
    a = case.arguments()
    out = [torch.zeros(b.shape, dtype=b.dtype) for b in ops.row_hidden_buffers(case.rows, 64, 3)]
    inputs = (a["acc"], a["expert_offsets"], a["row_token"], *a["scales"], a["bias"])
    return (*inputs, *activations.spec(case.activation), *out)


def test_opcheck() -> None:
    op = torch.ops.nvfp4_megamoe.quantize_hidden.default
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op, op_inputs(), test_utils=checks)


def test_under_torch_compile() -> None:
    def run(arguments: dict[str, Any]) -> tuple:
        rows, gh = ops.quantize_hidden(**arguments)
        return rows.data, rows.scale, gh + 1.0

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for counts in ((1, 2), (5, 130)):
        arguments = HiddenCase(counts, 32, SwiGLUOAI(), special=False, spare=0).arguments()
        for got, want in zip(compiled(arguments), run(arguments), strict=True):
            assert_same(got, want, str(counts))


def test_zero_rows() -> None:
    arguments = HiddenCase((0, 0), 32, SwiGLU(), spare=0, indexed=False, special=False).arguments()
    rows, gh = ops.quantize_hidden(**arguments)
    assert rows.data.shape == (0, 16) and rows.scale.shape == (0, 4) and gh.shape == (0,)


BAD: list[tuple[str, Any, str]] = [
    ("dtype", lambda a: {"acc": a["acc"].bfloat16()}, "acc must be float32"),
    ("width", lambda a: {"acc": a["acc"][:, :48].contiguous()}, "multiple of 32"),
    ("strides", lambda a: {"acc": a["acc"][:, :32]}, "acc must be contiguous"),
    ("offsets", lambda a: {"expert_offsets": a["expert_offsets"].long()}, "int32"),
    ("alpha", lambda a: {"scales": a["scales"]._replace(alpha=torch.ones(2))}, "alpha must be"),
    ("gx", lambda a: {"row_token": None}, r"gx must be float32 \(10,\)"),
    ("gh", lambda a: {"scales": a["scales"]._replace(gh=torch.ones(3))}, "gh must be"),
    ("bias", lambda a: {"bias": torch.ones(2, 32)}, r"bias must be float32 \(2, 64\)"),
]


@pytest.mark.parametrize(("name", "change", "message"), BAD, ids=[b[0] for b in BAD])
def test_bad_arguments_are_named(name: str, change: Any, message: str) -> None:
    arguments = HiddenCase((3, 4), 32, SwiGLU()).arguments()
    with pytest.raises((TypeError, ValueError), match=message):
        ops.quantize_hidden(**{**arguments, **change(arguments)})


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_generated_code(arch: str) -> None:
    from cute_kernels.device.hidden import QuantizeHidden

    hardware = arch != "sm_90a"
    for inter, act, loads in ((2048, SwiGLU(10.0), 8), (14336, ReLU2(), 8)):
        kernel = QuantizeHidden(inter, act, hardware=hardware)
        code = compiler.dump(kernel, arch, sass=True)
        assert re.search(rf"\.entry {kernel.name}_?\d*\(", code.ptx), "profilers need the name"
        assert code.ptx.count("ld.global.v4.u32") == loads
        assert ("cvt.rn.satfinite.e2m1x2" in code.ptx) == hardware and ".local" not in code.ptx
        assert "griddepcontrol.wait" in code.ptx and "launch_dependents" in code.ptx
        if code.sass is not None:
            assert not re.search(r"\b(LDL|STL)\b", code.sass), "local memory"
