"""The Hopper operations: staged rows in the simulator and in plain PyTorch against the format's own
quantiser; registration; what is refused. The GEMM kernel: tests/sm90."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, sm90_ops
from cute_kernels.activations import SwiGLU, spec
from cute_kernels.sm90 import host, weights
from cute_kernels.sm90.layout import ALPHA_FACTOR
from tests.layers import poison
from tests.small_kernels import Case, assert_same, guarded, plan

simulated = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)


def expected(
    x: Tensor, offsets: Tensor, row_token: Tensor | None, outer: Any, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Values and outer scales of the rows that exist, from the quantiser of the format."""
    x = x.float() if weight is None else x.float() * weight[:, None]
    end = int(offsets[-1])
    rows = x[:end] if row_token is None else x[row_token[:end].long()]
    if isinstance(outer, Tensor) and outer.numel() > 1:
        outer = outer[torch.searchsorted(offsets[1:].contiguous(), torch.arange(end), right=True)]
    q = nvfp4.quantize(rows, outer)
    return nvfp4.decode(q, torch.bfloat16), q.global_scale.expand(end)


def stage(
    x: Tensor, offsets: Tensor, row_token: Tensor | None, quantised: bool, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Into poisoned buffers; rows past the last expert must stay as they are."""
    count = x.shape[0] if row_token is None else row_token.shape[0]
    if "token_rows" in options:
        count = options["token_rows"].numel()
    values = poison(torch.empty((count, x.shape[1]), dtype=torch.bfloat16, device=x.device))
    gx = poison(torch.empty(count, device=x.device)) if quantised else None
    sm90_ops.stage_rows(x, offsets, values, gx, row_token=row_token, **options)
    end = int(offsets[-1])
    assert values[end:].isnan().all() and (gx is None or gx[end:].isnan().all())
    return values[:end], None if gx is None else gx[:end]


def simulate(*args: Any, **options: Any) -> Any:
    from cute_kernels.sim import Simulator

    with Simulator(schedule="lazy") as s:
        out = stage(*args, **options)
    assert s.launches, "nothing was launched: the plain implementation ran instead"
    return out


def places(case: Case, by_token: bool) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
    """(offsets, row_token, options) of a case whose tokens, or whose rows, say where they go."""
    offsets, row_token, _, token_rows = plan(case)
    if not by_token:
        return guarded(offsets), guarded(row_token), {}
    return guarded(offsets), None, {"token_rows": guarded(token_rows.view(-1)).view_as(token_rows)}


RUNS = [pytest.param(stage, id="plain"), pytest.param(simulate, id="kernel", marks=simulated)]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("by_token", [False, True], ids=["by_row", "by_token"])
@pytest.mark.parametrize("mode", ["per_row", "one", "weighted"])
@pytest.mark.parametrize(
    ("dtype", "hidden"),
    [(torch.bfloat16, 352), (torch.float16, 1040), (torch.float32, 48), (torch.bfloat16, 4112)],
)
def test_tokens_are_quantised_and_decoded(
    run: Any, dtype: torch.dtype, hidden: int, mode: str, by_token: bool
) -> None:
    """Odd and even numbers of blocks, one and two of them to a thread."""
    case = Case(17, hidden=hidden, experts=3, routing="holes", dtype=dtype)
    offsets, row_token, _, _ = plan(case)
    outer = torch.tensor([0.0123]) if mode == "one" else None
    weight = torch.rand(17) if mode == "weighted" else None
    *args, where = places(case, by_token)
    values, gx = run(case.x(), *args, True, outer=outer, row_scale=weight, **where)
    want = expected(case.x(), offsets, row_token, "per_token" if outer is None else outer, weight)
    assert_same(values, want[0], "values")
    assert_same(gx, want[1], "gx")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("scale", ["per_row", "per_expert"])
@pytest.mark.parametrize("experts", [1, 3, 70])
def test_rows_of_experts(run: Any, experts: int, scale: str) -> None:
    """h: expert-major fp32 rows; more experts than a warp has lanes, most of them empty."""
    case = Case(24, hidden=80, experts=experts, routing="holes", dtype=torch.float32)
    offsets, _, _, _ = plan(case)
    h = torch.cat((case.x(), case.x().flip(0)))
    outer = torch.rand(experts) + 0.1 if scale == "per_expert" else None
    values, gx = run(h, guarded(offsets), None, True, outer=outer)
    want = expected(h, offsets, None, "per_token" if outer is None else outer, None)
    assert_same(values, want[0], "values")
    assert_same(gx, want[1], "gx")


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("by_token", [False, True], ids=["by_row", "by_token"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_rounded_to_bf16(run: Any, dtype: torch.dtype, weighted: bool, by_token: bool) -> None:
    case = Case(11, hidden=48, experts=4, routing="holes", dtype=dtype)
    offsets, row_token, _, _ = plan(case)
    weight = torch.rand(11) if weighted else None
    *args, where = places(case, by_token)
    values, _ = run(case.x(), *args, False, row_scale=weight, **where)
    x = case.x() if weight is None else case.x().float() * weight[:, None]
    assert_same(values, x.bfloat16()[row_token[: int(offsets[-1])].long()], "values")


@pytest.mark.parametrize("run", RUNS)
def test_rounding_boundaries_and_every_scale(run: Any) -> None:
    """Values around every tie of E2M1, with block scales over the whole range of UE4M3."""
    middles = torch.tensor([0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = middles.view(torch.int32)[:, None] + torch.arange(-2, 3, dtype=torch.int32).clamp(min=0)
    near = torch.cat((near.view(torch.float32).reshape(-1), -near.view(torch.float32).reshape(-1)))
    x = torch.nn.functional.pad(near.reshape(-1, 8), (0, 8), value=6.0)
    x = (x[None] * 2.0 ** torch.arange(-12, 12)[:, None, None]).flatten(0, 1).contiguous()
    offsets = torch.tensor([0, x.shape[0]], dtype=torch.int32)
    values, gx = run(x, offsets, None, True, outer=torch.ones(1))
    want = expected(x, offsets, None, torch.ones(1), None)
    assert_same(values, want[0], "values")
    assert_same(gx, want[1], "gx")


def test_comparison_notices_damage() -> None:
    case = Case(17, hidden=32, experts=3)
    offsets, row_token, _, _ = plan(case)
    values, _ = stage(case.x(), offsets, row_token, True)
    for spoil in (lambda v: v[3].zero_(), lambda v: v.mul_(0.98), lambda v: v[:, :16].neg_()):
        bad = values.clone()
        spoil(bad)
        with pytest.raises(AssertionError):
            assert_same(bad, values, "values")


# ---- registration --------------------------------------------------------------------------------


def stage_arguments() -> tuple:
    case = Case(9, hidden=64, routing="holes")
    offsets, row_token, _, _ = plan(case)
    values, gx = torch.zeros(18, 64, dtype=torch.bfloat16), torch.zeros(18)
    return case.x(), offsets, row_token, None, None, torch.rand(9), values, gx


def token_arguments() -> tuple:
    x, offsets, _, _, *rest = stage_arguments()
    return x, offsets, None, plan(Case(9, hidden=64, routing="holes"))[3], *rest


def packed(rows: int = 32, k: int = 64, gated: bool = True) -> sm90_ops.Sm90Weight:
    g = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (8, rows, k // 2), dtype=torch.uint8, generator=g)
    scale = torch.randint(1, 100, (8, rows, k // 16), dtype=torch.uint8, generator=g)
    return weights.pack_weight(nvfp4.Nvfp4Tensor(data, scale, torch.rand(8, generator=g)), gated)


def gemm_arguments() -> tuple:
    case = Case(9, hidden=64, routing="holes", special=False)
    offsets, _, _, _ = plan(case)
    weight, x = packed(), torch.cat((case.x(), case.x()))
    scratch = (torch.zeros(2, dtype=torch.int32), torch.zeros(1))
    fixed = (weight.blob, weight.alpha, offsets, torch.rand(18), torch.rand(8, 32), None, None)
    return (x, None, *fixed, 32, *spec(SwiGLU()), "middle", torch.zeros(18, 16), *scratch)


def rounded_arguments() -> tuple:
    """Scales by expert: of the rows, and to round the output with."""
    x, token, blob, alpha, offsets, _, bias, _, _, *rest = gemm_arguments()
    scales = (torch.rand(8), torch.rand(8))
    rest[-3] = rest[-3].bfloat16()
    return (x, token, blob, alpha, offsets, None, bias, *scales, *rest)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("sm90_stage_rows", stage_arguments),
        ("sm90_stage_rows", token_arguments),
        ("sm90_grouped_gemm", gemm_arguments),
        ("sm90_grouped_gemm", rounded_arguments),
    ],
)
@pytest.mark.parametrize(
    "check",
    ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"],
)
def test_opcheck(name: str, arguments: Any, check: str) -> None:
    op = getattr(torch.ops.nvfp4_megamoe, name).default
    torch.library.opcheck(op, arguments(), test_utils=check)


def test_alpha_and_scratch() -> None:
    g = torch.rand(5, 2)
    assert torch.equal(sm90_ops.pack_alpha(g), g * ALPHA_FACTOR)
    assert torch.equal(sm90_ops.pack_alpha(g[:, :1]), (g[:, :1] * ALPHA_FACTOR).expand(5, 2))
    names = {sm90_ops.config_name(rows, 8) for rows in (1, 100, 10**5)}
    assert len(names) == 3
    for name in names:
        counters, partial = sm90_ops.gemm_scratch(7, packed(), name)
        assert counters > 0 and partial > 0
    with pytest.raises(ValueError, match="config must be one of"):
        sm90_ops.gemm_scratch(7, packed(), "big")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(4, 40)}, "multiple of 16"),
        ({"x": torch.zeros(4, 32, dtype=torch.int32)}, "x must be"),
        ({"expert_offsets": torch.zeros(3)}, "expert_offsets must be int32"),
        ({"values": torch.zeros(4, 32)}, "values must be torch.bfloat16"),
        ({"gx": torch.zeros(5)}, "gx must be torch.float32"),
        ({"outer": torch.zeros(3)}, "outer must be"),
        ({"outer": torch.zeros(1), "gx": None}, "pass gx"),
        ({"row_token": torch.zeros(4)}, "row_token must be"),
        ({"row_scale": torch.zeros(3)}, "row_scale must be"),
        ({"token_rows": torch.zeros(3, 1, dtype=torch.int32)}, "token_rows must be int32"),
        ({"token_rows": torch.zeros(4, 1)}, "token_rows must be int32"),
        ({"token_rows": torch.zeros(4, 2, dtype=torch.int32)}, "values must be"),
        ({"token_rows": torch.zeros(4, 1), "row_token": torch.zeros(4).int()}, "one of them"),
    ],
)
def test_what_stage_rows_refuses(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "x": torch.zeros(4, 32),
        "expert_offsets": torch.tensor([0, 1, 4], dtype=torch.int32),
        "values": torch.zeros(4, 32, dtype=torch.bfloat16),
        "gx": torch.zeros(4),
    }
    sm90_ops.stage_rows(**arguments)
    with pytest.raises((TypeError, ValueError), match=message):
        sm90_ops.stage_rows(**arguments | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_scale": torch.ones(7)}, r"out_scale must be .* \(8,\)"),
        ({"expert_scale": torch.ones(8).double()}, "expert_scale must be contiguous torch.float32"),
        ({"row_scale": torch.ones(18), "expert_scale": torch.ones(8)}, "pass one of them"),
        ({"out_scale": torch.ones(8), "out_dtype": torch.float32}, "to bf16, got 16 features"),
        ({"out_scale": torch.ones(8), "rows": 48}, "blocks of 16 features .* got 24 features"),
    ],
)
def test_what_the_gemm_refuses_of_scales(change: dict[str, Any], message: str) -> None:
    options = {"rows": 32} | change
    weight, offsets = packed(options.pop("rows")), torch.tensor([0] * 8 + [18], dtype=torch.int32)
    x = torch.zeros((18, 64), dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        host.sm90_grouped_gemm(x, weight, offsets, activation=SwiGLU(), **options)


def test_no_rows() -> None:
    offsets = torch.zeros(3, dtype=torch.int32)
    empty = torch.empty((0, 32), dtype=torch.bfloat16)
    sm90_ops.stage_rows(torch.empty(0, 32), offsets, empty, torch.empty(0))


def test_availability_says_why() -> None:
    found = sm90_ops.sm90_available(torch.device("cpu"))
    assert not found.usable and found.reason == "needs a Hopper GPU"
