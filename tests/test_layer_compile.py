"""torch.compile, the registered operator and its CUDA branch, and no waiting for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cute_kernels import nvfp4
from moe import Workspace, experts, reference
from tests.layers import (
    OP,
    E,
    H,
    K,
    build,
    needs_grouped_mm,
    op_arguments,
    routed,
    routing,
    same_bits,
    tokens,
)
from tests.test_reference import Case

# ---- torch.compile and the registered op ---------------------------------------------------------


def test_compiled_layer_has_no_graph_break_and_the_same_bits() -> None:
    layer = routed(shared=nn.Identity())
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for count in (1, 7, 128, 0, 33):
            x = tokens(count)
            assert same_bits(compiled(x), layer(x)), count


def test_h54_compiled_experts_take_a_slice_of_recorded_routing() -> None:
    """H54: ids with row stride layers * k; no assertion on strides."""
    layer = build()
    compiled = torch.compile(layer.experts, fullgraph=True, backend="aot_eager")
    record = torch.randint(-1, E, (1, 64, 46, K), dtype=torch.int32)
    ids, weights, x = record[0, :, 3, :], torch.rand(64, K), tokens(64)
    assert ids.stride() == (46 * K, 1)
    with torch.no_grad():
        assert same_bits(compiled(x, ids, weights), layer.experts(x, ids, weights))


@pytest.mark.parametrize("count", [0, 1, 7])
def test_opcheck_passes_for_the_registered_op(count: int) -> None:
    torch.library.opcheck(OP, op_arguments(count))


# ---- the CUDA branch, on CPU tensors through torch's grouped_mm ----------------------------------


def exact_product(args: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """fp64 sums and sums of magnitudes, (R, N)."""
    rows, data, scale, offsets, out = args
    one = torch.ones(())
    w = nvfp4.decode(nvfp4.Nvfp4Tensor(data, scale, one, nvfp4.SWIZZLE_32_4_4), torch.float64)
    exact, size = torch.zeros(out.shape, dtype=torch.float64), torch.zeros_like(out).double()
    for e in range(data.shape[0]):
        r = slice(int(offsets[e]), int(offsets[e + 1]))
        exact[r] = rows[r].double() @ w[e].t()
        size[r] = rows[r].double().abs() @ w[e].abs().t()
    return exact, size


def assert_within_device_bound(args: tuple[Tensor, ...], out: Tensor) -> None:
    """One bf16 rounding of the accumulator, whose fp32 sum obeys section 6."""
    exact, size = exact_product(args)
    used = int(args[3][-1])
    depth = args[0].shape[1]
    bound = 4 * (depth / 64 + 1) * 2.0**-24 * size + exact.abs() * 2.0**-8 * (1 + 2.0**-8)
    assert ((out.double() - exact).abs() <= bound)[:used].all()


@needs_grouped_mm
@pytest.mark.parametrize("chunk", [1, 1 << 30])
@pytest.mark.parametrize("count", [1, 40])
def test_device_branch_is_within_its_documented_bound(monkeypatch, chunk: int, count: int) -> None:
    """``chunk`` 1: 128 rows of every expert at a time, the last piece shorter."""
    monkeypatch.setattr(experts, "_CUDA_CHUNK_BYTES", chunk)
    args = op_arguments(count)
    out = args[-1].fill_(float("nan"))
    experts._grouped_matmul_device(*args)
    assert_within_device_bound(args, out)
    host = torch.empty_like(out)
    experts._grouped_matmul_host(*args[:-1], host)
    assert same_bits(host, exact_product(args)[0].float())


@needs_grouped_mm
def test_the_device_bound_sees_a_lost_row_and_a_wrong_scale() -> None:
    args = op_arguments(40)
    experts._grouped_matmul_device(*args)
    for spoil in (lambda o: o[17].zero_(), lambda o: o[:, :16].zero_(), lambda o: o.mul_(0.98)):
        out = args[-1].clone()
        spoil(out)
        with pytest.raises(AssertionError):
            assert_within_device_bound(args, out)


@needs_grouped_mm
@pytest.mark.parametrize("case", [Case(), Case(activations="bf16"), Case(biases=True)], ids=str)
def test_layer_through_the_device_branch(monkeypatch, case: Case) -> None:
    """Both products are within the bound on their own input, and the first gets the input of the
    reference. End to end a bf16 accumulator moves some codes of h by a step: only a token as a
    whole is bounded."""
    calls = []

    def record(*args: Tensor) -> None:
        experts._grouped_matmul_device(*args)
        calls.append(tuple(a.clone() for a in args))

    monkeypatch.setattr(experts, "_grouped_matmul_host", record)
    x, (ids, weights) = tokens(30, dtype=torch.float32), routing(30)
    ids[4] = -1  # rows past the last expert are whatever the GEMM leaves there
    layer = build(case)
    got = layer.experts(x, ids, weights)
    want = reference.experts(x, ids, weights, layer.cfg, layer.weights, case.activations)
    assert len(calls) == 2
    for call in calls:
        assert_within_device_bound(call, call[-1])
    used = int(want.plan.expert_offsets[-1])
    x_rows = want.x[want.plan.row_token[:used].long()]
    assert torch.equal(calls[0][0][:used].double(), x_rows)
    difference = (got - want.y).norm(dim=-1)
    assert (difference > 0).any()  # the branch was taken
    assert (difference <= 0.15 * want.y.norm(dim=-1)).all()


# ---- host synchronisation ------------------------------------------------------------------------

_READS = ("item", "tolist", "__bool__", "cpu", "nonzero", "numpy", "__int__", "__float__")
_SYNCING_OPS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::is_nonzero",
    "aten::equal",
    "aten::_unique2",
    "aten::repeat_interleave.Tensor",
)


class HostRead(AssertionError):
    pass


class NoPythonReads(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in _READS:
            raise HostRead(func.__name__)
        return func(*args, **(kwargs or {}))


class NoSyncingOps(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        masks = name.startswith(("aten::index.", "aten::index_put")) and any(
            i is not None and i.dtype == torch.bool for i in args[1]
        )
        if name.startswith(_SYNCING_OPS) or masks:
            raise HostRead(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: bool(t),
        lambda t: float(t),
        lambda t: t.cpu(),
        lambda t: t.numpy(),
        lambda t: torch.nonzero(t),
        lambda t: t.reshape(1)[t.reshape(1) > 0],
        lambda t: torch.masked_select(t, t > 0),
        lambda t: torch.arange(3)[: t.long()],
    ],
)
def test_the_guard_sees_a_read(read) -> None:
    with pytest.raises(HostRead), NoSyncingOps(), NoPythonReads():
        read(torch.ones(()))


@needs_grouped_mm
@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(activations="bf16"),
        Case(mode="per_tensor"),
        Case(mode="static", static_h=True, activation="oai", biases=True),
        Case(weight_on_input=True),
    ],
    ids=str,
)
def test_h46_nothing_reads_the_device_on_the_default_path(monkeypatch, case: Case) -> None:
    """H46: routing, plan, quantiser, both GEMMs of the CUDA branch, combine."""
    monkeypatch.setattr(experts, "_grouped_matmul_host", experts._grouped_matmul_device)
    gen = torch.Generator().manual_seed(7)
    layer = build(
        case,
        router_weight=torch.randn(E, H, generator=gen),
        selection_bias=torch.randn(E, generator=gen),
        shared=lambda x: x,
        workspace=Workspace(1 << 20),
    )
    x = tokens(9)
    with NoSyncingOps(), NoPythonReads():
        layer(x)
