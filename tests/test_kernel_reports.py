"""Bugs that users of other libraries reported, on the compiled kernels: the part of
test_public_reports.py that needs them, in the simulator."""

from __future__ import annotations

import ctypes
import mmap

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import gemm_ops, launch, nvfp4, ops
from cute_kernels.activations import ReLU2
from cute_kernels.config import GemmConfig, choose_config
from cute_kernels.gemm_ops import Rows
from moe import MoE, reference
from tests.layers import assert_rows, ids_of, poison, poison_new_tensors, same_bits, unit_layer
from tests.sm100.harness import Problem
from tests.small_kernels import assert_same
from tests.test_gemm_ops import Cubed, Inputs, simulated
from tests.test_layer_sim import SHAPES, build

needs_simulator = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)
SILU1 = 0.7310585786300049


@needs_simulator
def test_experts_without_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """H03: 5 tokens on experts 2 and 5 only, all that torch allocates poisoned."""
    layer = unit_layer(128, 128, 8, 2, backend="sim")
    weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    args = (torch.ones(5, 128), ids_of([[2, 5]] * 5), weights)
    clean = layer.experts(*args)
    assert_rows(clean, [(3 * a + 6 * b) * SILU1 for a, b in weights.tolist()])
    poison_new_tensors(monkeypatch)
    assert same_bits(layer.experts(*args), clean)


@needs_simulator
@pytest.mark.parametrize(
    "counts",
    [[0] * 17 + [300] + [0] * 14, [1, 270, 1, 0, 1] + [0] * 26 + [1], [200] + [1] * 31],
    ids=["one", "edges", "many"],
)
def test_skewed_counts(counts: list[int]) -> None:
    """H04: 32 experts, nearly all rows with one of them; exact, under several schedules."""
    data = Inputs(Problem(tuple(counts), n=64, k=64))
    args = (data.a, data.weights, data.offsets, data.alpha)
    want = gemm_ops.grouped_gemm(*args, row_scale=data.gx)
    for seed in range(3):
        from cute_kernels.sim import Simulator

        with Simulator(seed=seed, schedule="random"):
            got = gemm_ops.grouped_gemm(*args, row_scale=data.gx)
        assert_same(got, want, f"schedule {seed}")


@needs_simulator
def test_padding_of_scales() -> None:
    """H27: 5 rows of K = 352 (22 groups in 24 columns, 128 rows): whatever lay in the buffer, the
    quantiser defines every byte and the GEMM gives the same finite bits."""
    x = torch.randn(5, 352, generator=torch.Generator().manual_seed(0))
    offsets = torch.tensor([0, 5], dtype=torch.int32)
    w = Inputs(Problem((5,), n=64, k=352)).weights
    seen = []
    for fill in (0x7F, 0x7E, 0x00):
        out = launch.allocate(ops.quantize_buffers(5, 352, 5, 1), x.device)
        for tensor in out:
            tensor.view(torch.uint8).fill_(fill)
        data, scale, gx = simulated(ops.quantize_rows, x, offsets, out=out)
        plain = nvfp4.unswizzle(scale, 128, 24)
        assert not plain[5:].any() and not plain[:, 22:].any()
        alpha = torch.ones(1)
        y = simulated(gemm_ops.grouped_gemm, Rows(data, scale), w, offsets, alpha, row_scale=gx)
        assert torch.isfinite(y).all()
        seen.append((plain, y))
    for plain, y in seen[1:]:
        assert_same(plain, seen[0][0], "scales")
        assert_same(y, seen[0][1], "y")


@needs_simulator
@pytest.mark.parametrize(("hidden", "count", "local"), [(128, 1, 8), (128, 3, 1), (32, 1, 1)])
def test_sizes_of_one(hidden: int, count: int, local: int) -> None:
    """H34: one token, one expert; 32 columns are the fewest that TMA can read."""
    layer = unit_layer(hidden, 32, local, 1, activation=ReLU2(), backend="sim")
    ids = torch.full((count, 1), local - 1)
    y = layer.experts(torch.ones(count, hidden), ids, torch.ones(count, 1))
    assert_rows(y, [float(local)] * count)


@pytest.mark.parametrize("capability", [(9, 0), (11, 0), (12, 0), (12, 1)])
def test_other_kinds_of_gpu(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """H45: the SM100 backend says no before any work, and names what it found."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    found = gemm_ops.sm100_available(torch.device("cuda", 0))
    assert not found.usable and str(capability) in found.reason and "10.x" in found.reason


class Recorder:
    """Stands for CUDA: notes on which device and stream a kernel is launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.launches = 0, []
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "current_device", lambda: self.current)
        raw = "_cuda_getCurrentRawStream"  # missing from a torch that knows no GPU
        monkeypatch.setattr(torch._C, raw, lambda index: 1000 + index, raising=False)
        monkeypatch.setattr(cuda, "device", lambda d: Switched(self, d.index))
        monkeypatch.setattr(compiler, "device_arch", lambda index, _: f"arch of {index}")
        monkeypatch.setattr(compiler, "load", lambda kernel, arch: lambda *a: self.note(arch, a))

    def note(self, arch: str, arguments: tuple) -> None:
        self.launches.append((arch, self.current, arguments[-1]))


class Switched:
    def __init__(self, owner: Recorder, index: int) -> None:
        self.owner, self.index, self.before = owner, index, owner.current

    def __enter__(self) -> None:
        self.owner.current = self.index

    def __exit__(self, *_: object) -> None:
        self.owner.current = self.before


def test_launch_on_the_device_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """H47: tensors on cuda:1 while device 0 is current: its target, its stream, and the current
    device as before."""
    seen = Recorder(monkeypatch)
    for index in (1, 0):
        launch.launch(object(), torch.device("cuda", index), 5, None)
    assert seen.launches == [("arch of 1", 1, 1001), ("arch of 0", 0, 1000)]
    assert seen.current == 0


def test_tokens_and_experts_on_two_devices() -> None:
    """H47: an error that names both."""
    layer = unit_layer(128, 128, 4, 1)
    x = torch.ones(2, 128, device="meta")
    with pytest.raises(ValueError, match="x is on meta, the weights are on cpu"):
        layer.experts(x, ids_of([[0], [1]]), torch.ones(2, 1))
    data = Inputs(Problem((2,), n=32, k=64))
    rows = data.a._replace(data=data.a.data.to("meta"))
    with pytest.raises(ValueError, match=r"on (cpu|meta).*on (meta|cpu)"):
        gemm_ops.grouped_gemm(rows, data.weights, data.offsets, data.alpha)


# ---- tiles


def selectable() -> list[GemmConfig]:
    """Every configuration that `choose_config` returns for some size."""
    rows, columns = (1, 65, 129, 1000), (64, 128, 256, 384, 512, 1024, 4096)
    sizes = [(r, n, k) for r in rows for n in columns for k in (512, 2048, 8192)]
    return list(dict.fromkeys(choose_config(r, 1, n, k) for r, n, k in sizes))


def assert_blocks(got: Tensor, want: Tensor) -> None:
    """Relative L2 error per row and per block of 16 columns, 1e-2; outputs are of order 1."""
    error, size = (got - want).unflatten(1, (-1, 16)), want.unflatten(1, (-1, 16))
    assert 0.1 < float(want.abs().mean()) < 10
    for dims, what in (((1, 2), "rows"), ((0, 2), "blocks")):
        worst = (error.norm(dim=dims) / size.norm(dim=dims).clamp(min=1e-3)).max()
        assert worst < 1e-2, f"{what}: {worst:.1e}"


@needs_simulator
@pytest.mark.parametrize("config", selectable(), ids=lambda c: c.name)
def test_every_selectable_tile(config: GemmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """H56: activation and quantiser of each tile on data of order 1, per row and block; a block of
    zeros is seen."""
    monkeypatch.setattr(gemm_ops, "choose_config", lambda *_: config)
    data = Inputs(Problem((3, 40), n=512, k=64, seed=3))
    scales = data.scales(1)._replace(gh=torch.full((2,), 2.0**-8))
    size = data.acc.abs().mean()
    alpha = torch.full((2, 1), 1.5) / (size * data.gx.mean())
    args = (data.a, data.weights, data.offsets, Cubed(), scales._replace(alpha=alpha))
    want = gemm_ops.grouped_gemm_act_quant(*args)  # the plain implementation: any size, any tile
    got = simulated(gemm_ops.grouped_gemm_act_quant, *args)
    layout = (nvfp4.SWIZZLE_32_4_4_GROUPED, data.offsets)
    row_gh = scales.gh[data.expert]
    h = [nvfp4.Nvfp4Tensor(r.data, r.scale, row_gh, *layout).dequantize() for r in (got, want)]
    assert_blocks(*h)
    assert_same(got.data, want.data, "codes")
    spoilt = h[0].clone()
    spoilt[:, 16:32] = 0
    with pytest.raises(AssertionError):
        assert_blocks(spoilt, h[1])


# ---- the end of a mapping


class Edge:
    """Copies of tensors that end where a mapping ends: the next page may not be read."""

    def __init__(self) -> None:
        self.maps: list[mmap.mmap] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        page, size = mmap.PAGESIZE, tensor.nbytes
        used = -(-size // page) * page
        memory = mmap.mmap(-1, used + page)
        whole = torch.frombuffer(memory, dtype=torch.uint8, count=used)
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        assert protect(whole.data_ptr() + used, page, 0) == 0
        self.maps.append(memory)
        place = whole[used - size : used]
        place.copy_(tensor.contiguous().view(torch.uint8).view(-1))
        return place.view(tensor.dtype).view(tensor.shape)


@needs_simulator
@pytest.mark.parametrize("gathered", [False, True])
def test_no_read_past_the_last_row(gathered: bool) -> None:
    """H57: the last expert has one row and operands end at an unmapped page; and guard bytes behind
    them do not matter."""
    data = Inputs(Problem((17, 1), n=32, k=64, gathered=gathered))
    a, args = data.a, (data.offsets, data.alpha)
    want = gemm_ops.grouped_gemm(a, data.weights, *args)
    at_the_edge = Edge()
    index = None if a.row_token is None else at_the_edge(a.row_token)
    rows = Rows(at_the_edge(a.data), at_the_edge(a.scale.view(torch.uint8)), index)
    weights = data.weights._replace(data=at_the_edge(data.w.data))
    assert_same(simulated(gemm_ops.grouped_gemm, rows, weights, *args), want, "at the edge")
    for guard in (0x7F, 0x00):
        whole = torch.full((a.data.numel() + 65536,), guard, dtype=torch.uint8)
        whole[: a.data.numel()] = a.data.reshape(-1)
        near = a._replace(data=whole[: a.data.numel()].view(a.data.shape))
        got = simulated(gemm_ops.grouped_gemm, near, data.weights, *args)
        assert_same(got, want, f"guard {guard:#x}")


@needs_simulator
@pytest.mark.parametrize("experts", [1, 2, 31, 32, 33])
def test_no_read_past_the_last_offset(experts: int) -> None:
    """H32: expert_offsets of exactly E+1 elements end at an unmapped page."""
    counts = tuple(1 if e % 8 == 0 else 0 for e in range(experts))
    data = Inputs(Problem(counts, n=32, k=64))
    offsets = Edge()(data.offsets)
    args = (data.a, data.weights)
    got = simulated(gemm_ops.grouped_gemm, *args, offsets, data.alpha)
    assert_same(got, gemm_ops.grouped_gemm(*args, data.offsets, data.alpha), "GEMM")
    x = torch.randn(sum(counts), 64).bfloat16()
    for got, want in zip(
        simulated(ops.quantize_rows, x, offsets), ops.quantize_rows(x, data.offsets)
    ):
        assert_same(got, want, "quantiser")


@needs_simulator
def test_a_poisoned_workspace_reaches_nothing() -> None:
    """H03: what earlier calls left in shared scratch memory has no effect."""
    from moe import Workspace

    cfg, weights = build(SHAPES[2], static=False)
    layer = MoE(cfg, weights, backend="sim")
    layer.workspace = Workspace(layer.plan_memory(3))
    poison(layer.workspace._memory)
    x = torch.randn(3, cfg.hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids, mix = ids_of([[1, -1], [1, 3], [-1, -1]]), torch.ones(3, 2)
    y = layer.experts(x, ids, mix)
    want = reference.experts(x, ids, mix, cfg, weights).y
    assert torch.isfinite(y).all() and not y[2].any()
    assert torch.allclose(y.float(), want.float(), rtol=2e-2, atol=2e-2)
