"""The operations on CPU tensors against loops written from the contract, their registration, and
the generated code of the kernels behind them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, ops, toolchain
from tests.small_kernels import Case, assert_quantized, assert_same, guarded, plan, used_scales

needs_dsl = pytest.mark.skipif(
    not toolchain.check_compiler(toolchain.installed()),
    reason="needs the CuTe DSL to compile kernels",
)


# ---- sort_routes


def loop_plan(ids: list[list[int]], weights: Tensor, first: int, local: int) -> tuple:
    """Offsets, row_token, row_weight, token_rows by appending to one list per expert."""
    experts: list[list[tuple[int, int]]] = [[] for _ in range(local)]
    for t, slots in enumerate(ids):
        for j, e in enumerate(slots):
            if first <= e < first + local:
                experts[e - first].append((t, j))
    offsets, row_token, row_weight = [0], [], []
    token_rows = [[-1] * len(slots) for slots in ids]
    for pairs in experts:
        for t, j in pairs:
            token_rows[t][j] = len(row_token)
            row_token.append(t)
            row_weight.append(float(weights[t, j]))
        offsets.append(len(row_token))
    return offsets, row_token, row_weight, token_rows


def check_plan(case: Case, pad: int = 5) -> None:
    ids, weights = case.routes()
    offsets, row_token, row_weight, token_rows = ops.sort_routes(
        ids, weights, case.all_experts, case.first, case.experts, pad
    )
    want = loop_plan(ids.tolist(), weights, case.first, case.experts)
    real = len(want[1])
    assert offsets.tolist() == want[0] and token_rows.tolist() == want[3]
    assert row_token.tolist() == want[1] + [-1] * (ids.numel() + pad - real)
    assert row_weight.tolist() == want[2] + [0.0] * (ids.numel() + pad - real)


def test_h05_every_token_count_from_1_to_257() -> None:
    for tokens in range(1, 258):
        check_plan(Case(tokens))


@pytest.mark.parametrize("routing", ["one", "holes", "nowhere"])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_sort_routes_with_holes(routing: str, ids: torch.dtype) -> None:
    for first in (0, 3):
        check_plan(Case(37, top_k=3, experts=5, routing=routing, first=first, ids=ids))


@pytest.mark.parametrize("experts", [1, 2, 3, 5, 7, 40, 60, 160, 385])
def test_h32_expert_counts(experts: int) -> None:
    check_plan(Case(50, experts=experts, top_k=4, routing="holes"))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32])
def test_h08_other_id_types_are_refused_by_name(dtype: torch.dtype) -> None:
    ids = torch.zeros((2, 2), dtype=dtype)
    with pytest.raises(TypeError, match="int32 or int64"):
        ops.sort_routes(ids, torch.zeros(2, 2), 8)


def test_h09_views_of_wider_tensors() -> None:
    wide = torch.arange(64).reshape(8, 8) % 8
    weights = torch.rand(8, 8)
    for view in (wide[:, :2], wide.t()[:8, :2]):
        a = ops.sort_routes(view, weights[:, :2], 8)
        b = ops.sort_routes(view.contiguous(), weights[:, :2].contiguous(), 8)
        for x, y in zip(a, b):
            assert_same(x, y, "plan of a view")


# ---- quantize_rows


def scale_byte(row: int, group: int, groups: int) -> int:
    """Byte of (row, group) in SWIZZLE_32_4_4, the formula of the contract."""
    padded = -(-groups // 4) * 4
    tile = (row // 128) * 128 * padded + (group // 4) * 512
    return tile + (row % 32) * 16 + ((row % 128) // 32) * 4 + group % 4


@pytest.mark.parametrize("routing", ["random", "holes", "one"])
def test_quantize_rows_places_the_scales_of_each_token(routing: str) -> None:
    case = Case(150, hidden=352, experts=5, routing=routing, special=False)
    offsets, row_token, _, _ = plan(case)
    x = case.x()
    data, scale, gx = ops.quantize_rows(x, offsets, row_token)
    q = nvfp4.quantize(x)
    assert_same(data, q.data, "codes")
    assert_same(gx, q.global_scale, "gx")
    plain = q.scale.view(torch.uint8)
    rows = used_scales(scale, offsets)
    assert rows.shape[0] == sum(-(-int(c) // 128) * 128 for c in offsets.diff())
    expected = np.zeros(rows.numel(), dtype=np.uint8)
    start = 0
    for e in range(case.experts):
        for r in range(int(offsets[e]), int(offsets[e + 1])):
            for c in range(22):
                byte = scale_byte(start + r - int(offsets[e]), c, 22)
                expected[byte] = plain[int(row_token[r]), c]
        start += -(-int(offsets[e + 1] - offsets[e]) // 128) * 128
    assert_same(rows.reshape(-1), torch.from_numpy(expected), "scales")


def test_h05_padded_scale_rows() -> None:
    for counts, rows in (((1, 127, 129, 0, 128), 640), ((1,) * 8, 1024)):
        offsets = torch.tensor((0, *np.cumsum(counts).tolist()), dtype=torch.int32)
        _, scale, _ = ops.quantize_rows(torch.randn(sum(counts), 64), offsets)
        assert used_scales(scale, offsets).shape[0] == rows


def test_quantize_rows_modes() -> None:
    case = Case(20, hidden=64, special=False)
    offsets, row_token, _, _ = plan(case)
    x, weight = case.x(), torch.rand(20)
    static = ops.quantize_rows(x, offsets, row_token, torch.tensor(0.5))
    assert (static[2] == 0.5).all()
    assert_same(static[0], nvfp4.quantize(x, 0.5).data, "static codes")
    tensor = ops.quantize_rows(x, offsets, row_token, "per_tensor")
    assert_same(tensor[0], nvfp4.quantize(x, "per_tensor").data, "per-tensor codes")
    weighted = ops.quantize_rows(x, offsets, row_token, row_scale=weight)
    assert_same(weighted[0], nvfp4.quantize(x.float() * weight[:, None]).data, "weighted codes")


def test_nan_and_inf_spoil_their_own_token_only() -> None:
    case = Case(12, hidden=64)
    clean = Case(12, hidden=64, special=False)
    offsets, row_token, _, _ = plan(case)
    x, good = case.x(), clean.x()
    data, _, gx = ops.quantize_rows(x, offsets, row_token)
    assert gx[11].isnan() and torch.isfinite(gx[::2]).all()
    assert_same(data[::2], nvfp4.quantize(good).data[::2], "codes of the other tokens")


# ---- combine


@pytest.mark.parametrize("shared", [False, True])
def test_combine_rounds_every_product_and_every_sum(shared: bool) -> None:
    case = Case(40, hidden=16, top_k=4, routing="holes")
    _, _, _, token_rows = plan(case)
    weights = case.routes()[1]
    rows = torch.randn(160, 16, generator=case.generator())
    extra = torch.randn(40, 16, generator=case.generator()) if shared else None
    y = ops.combine(rows, token_rows, weights, extra)
    for t in range(40):
        total = None
        for j in range(4):
            r = int(token_rows[t, j])
            if r >= 0:
                term = np.float32(weights[t, j].item()) * rows[r].numpy()
                total = term if total is None else total + term
        if extra is not None:
            total = extra[t].numpy() if total is None else total + extra[t].numpy()
        want = np.zeros(16, dtype=np.float32) if total is None else total
        assert_same(y[t], torch.from_numpy(want), f"token {t}")


def test_token_without_a_slot_is_exactly_zero_even_next_to_nan() -> None:
    rows = torch.full((2, 8), float("nan"))
    y = ops.combine(rows, torch.tensor([[-1, -1], [0, 1]], dtype=torch.int32), torch.ones(2, 2))
    assert (y[0].view(torch.int32) == 0).all() and y[1].isnan().all()


def test_permute_gives_what_quantize_rows_gives() -> None:
    case = Case(90, hidden=352, experts=5, routing="holes")
    offsets, row_token, _, _ = plan(case)
    q = nvfp4.quantize(case.x())
    want = ops.quantize_rows(case.x(), offsets, row_token)
    got = ops.permute_quantized_rows(q.data, q.scale, q.global_scale, row_token, offsets)
    assert_same(got[1], want[1], "scales")
    real = int(offsets[-1])
    assert_same(got[0][:real], want[0][row_token[:real].long()], "codes")
    assert_same(got[2][:real], want[2][row_token[:real].long()], "gx")


# ---- the comparison itself


def test_comparison_notices_every_kind_of_damage() -> None:
    case = Case(150, hidden=64)
    offsets, row_token, _, _ = plan(case)
    want = ops.quantize_rows(case.x(), offsets, row_token)
    assert_quantized(want, want, offsets)
    for part, damage in ((0, 1), (1, 1), (2, 1.0)):
        got = [t.clone() for t in want]
        got[part].view(-1)[0] += damage
        with pytest.raises(AssertionError):
            assert_quantized(tuple(got), want, offsets)
    y = torch.randn(8, 64).bfloat16()
    dropped, scaled = y.clone(), (y.float() * 0.98).bfloat16()
    dropped[3] = 0
    negative_zero = torch.zeros(4)
    for bad, good in ((dropped, y), (scaled, y), (-negative_zero, negative_zero)):
        with pytest.raises(AssertionError):
            assert_same(bad, good, "y")


# ---- registration


def outputs(buffers: list[ops.Buffer]) -> list[Tensor]:
    return [torch.zeros(b.shape, dtype=b.dtype) for b in buffers]


def op_inputs() -> dict[str, tuple]:
    case = Case(9, hidden=64, routing="holes")
    ids, weights = case.routes()
    offsets, row_token, _, token_rows = plan(case)
    q = nvfp4.quantize(case.x())
    rows = torch.randn(18, 64).bfloat16()
    *sorted_routes, counts = outputs(ops.sort_buffers(9, 2, 8, 3))
    counter = torch.ones(1, dtype=torch.int32)
    received = (q.data, q.scale.view(torch.uint8), q.global_scale, row_token, offsets)
    return {
        "sort_routes": (ids, weights, case.all_experts, 0, *sorted_routes, counter, counts),
        "quantize_rows": (
            *(case.x(), offsets, row_token, None, torch.rand(9)),
            *outputs(ops.quantize_buffers(9, 64, 18, 8)),
        ),
        "combine": (rows, token_rows, weights, case.x(), None, torch.zeros(9, 64).half()),
        "permute_quantized_rows": (*received, *outputs(ops.permute_buffers(64, 18, 8))),
    }


@pytest.mark.parametrize("name", list(op_inputs()))
def test_h53_opcheck(name: str) -> None:
    case = op_inputs()[name]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(getattr(torch.ops.nvfp4_megamoe, name).default, case, test_utils=checks)


@pytest.mark.parametrize("name", ["sort_routes", "quantize_rows", "combine"])
def test_opcheck_dynamic_shapes(name: str) -> None:
    op = getattr(torch.ops.nvfp4_megamoe, name).default
    torch.library.opcheck(op, op_inputs()[name], test_utils="test_aot_dispatch_dynamic")


def chain(ids: Tensor, weights: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    offsets, row_token, _, token_rows = ops.sort_routes(ids, weights, 24, 0, 8)
    data, scale, gx = ops.quantize_rows(x, offsets, row_token)
    moved = ops.permute_quantized_rows(data, scale[: len(x), :4], gx, row_token, offsets)
    y = ops.combine(x[row_token.clamp(min=0).long()], token_rows, weights, x)
    return (*moved, y)


def test_operations_under_torch_compile() -> None:
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (3, 40, 7):
        case = Case(tokens, hidden=64, routing="holes", special=False)
        arguments = (*case.routes(), case.x())
        for got, want in zip(compiled(*arguments), chain(*arguments), strict=True):
            assert got.stride() == want.stride()
            assert_same(got, want, f"{tokens} tokens")


def test_results_go_into_given_tensors() -> None:
    case = Case(9, hidden=64, routing="holes", special=False)
    ids, weights = case.routes()
    buffers = outputs(ops.sort_buffers(9, 2, 8))
    offsets, row_token, _, _ = ops.sort_routes(ids, weights, 24, 0, 8, out=buffers)
    assert offsets is buffers[0] and row_token is buffers[1]
    assert_same(row_token, plan(case)[1], "row_token")
    out = outputs(ops.quantize_buffers(9, 64, 18, 8))
    ops.quantize_rows(case.x(), offsets, row_token, out=out)
    assert_quantized(tuple(out), ops.quantize_rows(case.x(), offsets, row_token), offsets)
    y = torch.empty(9, 64)
    assert ops.combine(case.x().repeat(2, 1), plan(case)[3], weights, out=y) is y


@pytest.mark.parametrize("spoil", ["shape", "dtype", "strides", "count"])
def test_given_tensors_are_checked(spoil: str) -> None:
    """A kernel gets an address: what is behind it must be what its buffer says."""
    case = Case(9, hidden=64)
    offsets, row_token, _, _ = plan(case)
    out = outputs(ops.quantize_buffers(9, 64, 18, 8))
    if spoil == "shape":
        out[1] = out[1][:-128]
    elif spoil == "dtype":
        out[2] = out[2].double()
    elif spoil == "strides":
        out[0] = torch.zeros(32, 9, dtype=torch.uint8).t()
    else:
        out.pop()
    with pytest.raises(ValueError, match=r"must (be|hold)"):
        ops.quantize_rows(case.x(), offsets, row_token, out=out)


def test_zero_tokens() -> None:
    ids = torch.empty((0, 2), dtype=torch.int32)
    offsets, row_token, row_weight, token_rows = ops.sort_routes(ids, ids.float(), 8, pad_rows=2)
    assert offsets.tolist() == [0] * 9 and row_token.tolist() == [-1, -1]
    assert row_weight.tolist() == [0, 0] and token_rows.shape == (0, 2)
    x = torch.empty(0, 64)
    for mode in ("per_token", "per_tensor"):
        data, scale, gx = ops.quantize_rows(x, offsets, row_token[:0], mode)
        assert data.shape == (0, 32) and scale.shape == (0, 4) and gx.shape == (0,)
    assert ops.combine(x, token_rows).shape == (0, 64)


BAD: list[tuple[str, Any, str]] = [
    ("hidden not a multiple of 16", lambda o, r: ops.quantize_rows(torch.zeros(3, 24), o, r), "16"),
    ("float64", lambda o, r: ops.quantize_rows(torch.zeros(3, 32).double(), o, r), "bfloat16"),
    ("3-d", lambda o, r: ops.quantize_rows(torch.zeros(3, 2, 32), o, r), r"\(rows, columns\)"),
    ("offsets", lambda o, r: ops.quantize_rows(torch.zeros(3, 32), o.long(), r), "int32"),
    ("row_token", lambda o, r: ops.quantize_rows(torch.zeros(3, 32), o, r.long()), "row_token"),
    (
        "scale length",
        lambda o, r: ops.quantize_rows(torch.zeros(3, 32), o, r, torch.ones(2)),
        "global_scale",
    ),
    ("mode", lambda o, r: ops.quantize_rows(torch.zeros(3, 32), o, r, "per_row"), "per_token"),
    (
        "experts",
        lambda o, r: ops.sort_routes(torch.zeros(1, 1).int(), torch.zeros(1, 1), 4, 2, 3),
        "2 : 5",
    ),
    ("shapes", lambda o, r: ops.sort_routes(torch.zeros(1, 2).int(), torch.zeros(1, 1), 4), "T, K"),
    ("columns", lambda o, r: ops.combine(torch.zeros(3, 12), r[:2, None]), "multiple of 8"),
    ("lost", lambda o, r: ops.combine(torch.zeros(3, 16), r[:2, None], lost=r > 0), "lost must"),
    (
        "weights",
        lambda o, r: ops.combine(torch.zeros(3, 16), r[:2, None], torch.zeros(2, 2)),
        "weights",
    ),
    (
        "shared",
        lambda o, r: ops.combine(torch.zeros(3, 16), r[:2, None], None, torch.zeros(3, 16)),
        "shared",
    ),
]


@pytest.mark.parametrize(("name", "call", "message"), BAD, ids=[b[0] for b in BAD])
def test_bad_arguments_are_named(name: str, call: Any, message: str) -> None:
    offsets = torch.tensor([0, 2, 3], dtype=torch.int32)
    row_token = torch.tensor([0, 1, 2], dtype=torch.int32)
    with pytest.raises((TypeError, ValueError), match=message):
        call(offsets, row_token)


# ---- generated code


def kernels(arch: str) -> list[Any]:
    from cute_kernels.device.combine import Combine, PermuteRows
    from cute_kernels.device.quantize import GroupScales, QuantizeRows
    from cute_kernels.device.routing import CountRoutes, SortRoutes

    hardware = arch != "sm_90a"
    return [
        QuantizeRows(7168, hardware=hardware),
        QuantizeRows(2880, "Float32", given=True, bounded=True, hardware=hardware),
        GroupScales(448, 448),
        GroupScales(22, 22),
        CountRoutes(256),
        SortRoutes(256, top_k=8),
        SortRoutes(385, "Int64", top_k=8, spread=True),
        Combine(7168, 8, shared_dtype="BFloat16"),
        PermuteRows(3584),
    ]


@needs_dsl
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_103a"])
def test_generated_code(arch: str) -> None:
    for kernel in kernels(arch):
        code = compiler.dump(kernel, arch, sass=True)
        assert re.search(rf"\.entry {kernel.name}_?\d*\(", code.ptx), "profilers need the name"
        assert ".local" not in code.ptx, f"{kernel.name} keeps registers in local memory"
        assert "griddepcontrol.wait" in code.ptx and "launch_dependents" in code.ptx
        body = code.ptx[code.ptx.index("griddepcontrol.wait") :]
        assert body.count("ld.global") == code.ptx.count("ld.global"), "a load before the wait"
        assert ".nc" not in code.ptx
        if code.sass is not None:
            assert not re.search(r"\b(LDL|STL)\b", code.sass), f"{kernel.name} spills"


@needs_dsl
def test_quantiser_uses_the_instruction_where_it_exists() -> None:
    from cute_kernels.device.quantize import QuantizeRows

    on_sm100 = compiler.dump(QuantizeRows(7168), "sm_100a").ptx
    assert on_sm100.count("cvt.rn.satfinite.e2m1x2.f32") == 16  # two blocks of 16 per thread
    assert on_sm100.count("ld.global.v4.u32") == 4
    on_sm90 = compiler.dump(QuantizeRows(7168, hardware=False), "sm_90a").ptx
    assert "e2m1x2" not in on_sm90 and on_sm90.count("ld.global.v4.u32") == 4


@needs_dsl
def test_combine_never_fuses() -> None:
    from cute_kernels.device.combine import Combine

    code = compiler.dump(Combine(7168, 8), "sm_100a", sass=True)
    assert "fma" not in code.ptx
    assert code.ptx.count("mul.rn.f32") == 64 and code.ptx.count("add.rn.f32") == 64
    if code.sass is not None:
        assert "FFMA" not in code.sass


@needs_dsl
@pytest.mark.parametrize("experts", [1, 256, 512, 4000, ops.MAX_EXPERTS])
def test_sort_fits_shared_memory(experts: int) -> None:
    from cute_kernels.device.routing import SortRoutes

    warps = SortRoutes(experts).warps
    assert warps == 32 if experts <= 512 else warps >= 1
    assert 4 * (experts * (warps + 2) + warps) + 256 <= 227 * 1024


def test_guarded_view_is_not_a_copy_of_the_guard() -> None:
    view = guarded(torch.arange(5, dtype=torch.int32))
    assert view.tolist() == [0, 1, 2, 3, 4] and view._base is not None
    assert int(view._base[5]) == 0x7FFFFFFF
