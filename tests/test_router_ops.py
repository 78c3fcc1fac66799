"""The router's operations on CPU tensors, the generated code, and the layer on its kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import router_ops, toolchain, torch_router
from cute_kernels.device.sizes import ROUTER_TILE
from cute_kernels.router_ops import RouterWeights, pack_weights
from cute_kernels.torch_router import Selection
from moe import MoE, MoEConfig
from moe.router import RouterKernels, route, router_logits
from tests.router_cases import hostile, hostile_logits, router_weight, selections
from tests.sm90.test_kernels_compile import LDL, STL, opcodes
from tests.small_kernels import assert_same

OPS = torch.ops.nvfp4_megamoe
IMMA = 0x237  # opcode of sm_90 SASS


# ---- digits and logits


@pytest.mark.parametrize(("experts", "hidden"), [(1, 8), (10, 72), (33, 256)])
def test_digits_make_up_the_fixed_point_weights(experts: int, hidden: int) -> None:
    """Unpacked lane by lane as an MMA reads them."""
    weight = router_weight(experts, hidden)
    digits, scale = pack_weights(weight)
    whole = torch.zeros(-(-experts // ROUTER_TILE) * ROUTER_TILE, -(-hidden // 32) * 32)
    whole = whole.long()
    bytes_ = digits.view(torch.int8).view(*digits.shape[:4], 2, 2, 4).long()
    for lane in range(32):
        group, member = lane // 4, lane % 4
        for n in range(2):
            for h in range(2):
                for j in range(3):
                    rows = bytes_[:, :, j, lane, n, h] * 256**j  # (tiles, steps, 4)
                    column = 8 * member + 4 * h
                    at = whole[8 * n + group :: 16].unflatten(1, (-1, 32))
                    at[:, :, column : column + 4] += rows
    assert not whole[experts:].any() and not whole[:, hidden:].any()
    finite = weight.isfinite().all(dim=1)
    want = (weight.double() / scale[:, None]).round()[finite]
    assert torch.equal(whole[:experts, :hidden][finite].double(), want)
    assert want.abs().max() <= 2**22 and scale[~finite].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_plain_logits_are_those_of_the_router(tokens: int, dtype: torch.dtype) -> None:
    x, weight, bias = hostile(tokens, 136, dtype), router_weight(30, 136), torch.randn(30)
    got = router_ops.router_logits(x, pack_weights(weight), bias)
    assert_same(got, router_logits(x, weight, bias), "logits")


def test_a_wrong_digit_is_seen() -> None:
    """Meta-test: the lowest bit of one digit changes a logit."""
    x, weight = torch.randn(3, 64), router_weight(4, 64)
    packed = pack_weights(weight)
    packed.digits.view(-1)[0] ^= 1 << 16
    with pytest.raises(AssertionError):
        assert_same(router_ops.router_logits(x, packed), router_logits(x, weight), "logits")


def test_columns_of_tiles_end_first() -> None:
    assert router_ops.best_columns(8192, 4, 132) == 1  # 128 CTAs, one wave
    assert router_ops.best_columns(1088, 4, 132) == 4  # 17 tiles of tokens
    assert router_ops.best_columns(64 * 133, 4, 132) == 4  # one wave of one column would be two
    assert router_ops.best_columns(1, 1, 132) == 1


def test_columns_are_shared_while_clusters_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    split = [router_ops.best_split(t, 4, 132) for t in (65, 128, 256, 512, 1024, 2048, 8192)]
    assert split == [8, 8, 4, 2, 2, 1, 1]
    monkeypatch.setattr(router_ops, "multiprocessors", lambda _: 132)
    sizes = router_ops.kernel_sizes(8192, 256, torch.device("cpu"))
    assert [router_ops.best_split(t, 4, 132) for t in sizes[1:]] == [8, 4, 2, 1]
    assert sizes[:2] == [1, 65] and router_ops.kernel_sizes(64, 256, torch.device("cpu")) == [1]


# ---- checks


def arguments(tokens: int) -> tuple[Tensor, RouterWeights, Tensor]:
    return torch.randn(tokens, 64), pack_weights(torch.randn(10, 64)), torch.randn(10)


@pytest.mark.parametrize("tokens", [0, 5])
def test_opcheck(tokens: int) -> None:
    x, packed, bias = arguments(tokens)
    out = torch.empty(tokens, 10)
    torch.library.opcheck(OPS.router_logits, (x, *packed, bias, out))
    table, ids = torch.randint(0, 10, (7, 2)), torch.randint(-1, 7, (tokens,))
    results = (torch.empty(tokens, 2, dtype=torch.int32), torch.empty(tokens, 2))
    how = (2, "sigmoid", 5, 2, True, 1.5)
    torch.library.opcheck(OPS.router_topk, (out.zero_(), bias, None, None, *how, *results))
    torch.library.opcheck(OPS.router_topk, (out, None, table, ids, *how, *results))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": torch.zeros(3, 64, dtype=torch.float64)}, TypeError, "x must be"),
        ({"x": torch.zeros(3, 60)}, ValueError, "multiple of 8"),
        ({"x": torch.zeros(3, 96)}, ValueError, "digits of the router weights must be"),
        ({"bias": torch.zeros(9)}, ValueError, r"bias must be \(10,\)"),
        ({"bias": torch.zeros(10).double()}, TypeError, "bias must be"),
    ],
)
def test_logits_refuse(change: dict[str, Any], error: type[Exception], text: str) -> None:
    x, packed, bias = arguments(3)
    with pytest.raises(error, match=text):
        router_ops.router_logits(change.get("x", x), packed, change.get("bias", bias))


def test_weights_refuse_too_many_columns() -> None:
    with pytest.raises(ValueError, match="may leave int32"):
        pack_weights(torch.zeros(1, 2**14 + 8))


@pytest.mark.parametrize(
    ("how", "rest", "text"),
    [
        (Selection(2, "tanh"), (), "scoring must be one of"),
        (Selection(0), (), "top_k must be 1 to 10"),
        (Selection(11), (), "top_k must be 1 to 10"),
        (Selection(2, num_groups=3), (), "groups must divide"),
        (Selection(2), (torch.zeros(9),), "selection_bias must be"),
        (Selection(2), (None, torch.zeros(4, 3).int()), "tid2eid must be"),
        (Selection(2), (None, torch.zeros(4, 2).int()), "input_ids must be"),
        (Selection(2), (None, torch.zeros(4, 2).int(), torch.zeros(3)), "input_ids must be"),
    ],
)
def test_topk_refuses(how: Selection, rest: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        router_ops.router_topk(torch.zeros(5, 10), how, *rest)


def test_topk_says_what_a_warp_cannot_hold() -> None:
    with pytest.raises(ValueError, match="1032 experts"):
        router_ops.router_topk(torch.zeros(1, 1032), Selection(2))
    cfg = MoEConfig(64, 64, 1032, 2)
    assert RouterKernels.of("sim", cfg) is None and RouterKernels.of("torch", cfg) is None


# ---- generated code


@pytest.mark.skipif(
    not toolchain.check_compiler(toolchain.installed()), reason="needs the CuTe DSL 4.8.1"
)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_code(arch: str) -> None:
    from cute_kernels.device.router import RouterFew
    from cute_kernels.device.router_tile import RouterTile
    from cute_kernels.device.topk import RouterTopK

    for kernel, multiplications in (
        (RouterFew(4096), 2 * 2 * 12),
        (RouterFew(7168, "Float32", biased=True), 4 * 2 * 12),
        (RouterTile(4096), 4 * 2 * 2 * 12),
        (RouterTile(4096, "Float32", split=1), 4 * 2 * 2 * 12),
        (RouterTopK(256, 8, "sqrtsoftplus", biased=True), 0),
        (RouterTopK(256, 8, "sigmoid", (8, 4)), 0),
    ):
        dump = compiler.dump(kernel, arch)
        unsigned = dump.ptx.count("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32")
        signed = dump.ptx.count("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")
        assert unsigned + signed == multiplications and unsigned == 3 * signed, kernel.name
        assert ".local" not in dump.ptx, kernel.name
        assert "griddepcontrol.wait" in dump.ptx, kernel.name
        if arch == "sm_90a":
            code = opcodes(dump.cubin)
            assert code.count(IMMA) == multiplications, kernel.name
            assert code.count(LDL) == code.count(STL) == 0, f"{kernel.name} spills registers"


# ---- the layer


def config(**options: Any) -> MoEConfig:
    return MoEConfig(64, 64, 10, 3, routed_scaling_factor=2.5, **options)


def test_router_kernels_equal_route_and_the_factor() -> None:
    logits_of = hostile(33, 64, torch.bfloat16), router_weight(10, 64)
    bias, chooses = torch.randn(10).bfloat16(), torch.randn(10)
    for how in selections(10, 3):
        cfg = config(scoring=how.scoring, renormalize=how.renormalize)
        router = RouterKernels.of("sm90", cfg)
        assert router is not None
        got = router(logits_of[0], (logits_of[1], bias, chooses, None), None)
        want = route(router_logits(*logits_of, bias), cfg, chooses)
        assert_same(got[0], want[0], "ids")
        assert_same(got[1], want[1] * 2.5, "weights")


def test_token_ids_of_any_integer_type_and_shape() -> None:
    cfg = config(scoring="sigmoid")
    x, weight = torch.randn(6, 64), torch.randn(10, 64)
    table, ids = torch.randint(0, 10, (9, 3)), torch.tensor([[0, 8, -1], [3, 2, 1]])
    router = RouterKernels.of("sim", cfg)
    assert router is not None
    want = route(router_logits(x, weight), cfg, None, table, ids)
    for dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        got = router(x, (weight, None, None, table), ids.to(dtype))
        assert_same(got[0], want[0], "ids")
        assert_same(got[1], want[1] * 2.5, "weights")
    with pytest.raises(ValueError, match="pass input_ids"):
        router(x, (weight, None, None, table), None)
    with pytest.raises(TypeError, match=r"integers, got torch\.bool"):
        router(x, (weight, None, None, table), ids > 0)


def test_a_weight_of_another_number_of_experts_is_refused() -> None:
    """It would route to experts that do not exist."""
    with pytest.raises(ValueError, match=r"router_weight must be \(10, 64\), got \(11, 64\)"):
        RouterKernels(config()).weights(torch.randn(11, 64))


def test_digits_follow_the_weight() -> None:
    """A new tensor, and one written to, in the same memory, which a CUDA graph may read."""
    router = RouterKernels(config())
    weight = torch.randn(10, 64)
    first = router.weights(weight)
    addresses = [t.data_ptr() for t in first]
    assert router.weights(weight) is first
    for changed in (weight.mul_(-1), torch.randn(10, 64)):
        now = router.weights(changed)
        assert [t.data_ptr() for t in now] == addresses
        for got, want in zip(now, pack_weights(changed)):
            assert_same(got.view(torch.int32), want.view(torch.int32), "digits")
    weight = torch.ones(10, 64)
    router.weights(weight)
    weight.data = torch.full((10, 64), 3.0)
    assert torch.equal(router.weights(weight).digits, pack_weights(weight).digits)
    with torch.inference_mode():
        ones = torch.ones(10, 64)
        assert torch.equal(router.weights(ones).digits, pack_weights(ones).digits)
        ones.mul_(-1)
        router.refresh(ones)
        assert torch.equal(router.weights(ones).digits, pack_weights(ones).digits)


def test_writes_that_do_not_show_count_from_the_next_warmup_on() -> None:
    router, weight = RouterKernels(config()), torch.randn(10, 64)
    old = router.weights(weight).digits.clone()
    weight.data.neg_()
    assert torch.equal(router.weights(weight).digits, old)  # if this fails, the docstring is wrong
    router.warmup(0, (weight, None, None, None))
    assert torch.equal(router.weights(weight).digits, pack_weights(weight).digits)
    assert not torch.equal(router.weights(weight).digits, old)


def test_the_router_follows_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer on "auto" that moves to a GPU takes the kernels of that GPU for its router too."""
    moved = layer("auto")
    assert moved.backend == "torch" and moved._router is None
    monkeypatch.setattr(MoE, "_usable", lambda self, name, device: "sm90")
    moved.to("cpu")
    assert moved.backend == "sm90" and moved._router is not None
    monkeypatch.setattr(MoE, "_usable", lambda self, name, device: "torch")
    moved.to("cpu")
    assert moved.backend == "torch" and moved._router is None


def layer(backend: str, seed: int = 0) -> MoE:
    from moe import ExpertWeights

    g = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) * 0.1

    weights = ExpertWeights.from_bf16(rand(10, 64, 64), rand(10, 64, 64), rand(10, 64, 64))
    return MoE(config(), weights, router_weight=rand(10, 64), backend=backend)


@pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)
def test_layer_routes_by_kernels_and_follows_a_loaded_router() -> None:
    from cute_kernels.sim import Simulator

    one, other, x = layer("sim"), layer("sim", 1), torch.randn(5, 64).bfloat16()
    with Simulator(schedule="lazy") as s:
        ids, _ = one._route(x, None)
    names = " ".join(launch.name for launch in s.launches)
    assert "router_few" in names and "router_topk" in names
    state = one.state_dict()
    assert not [n for n in state if "digits" in n]
    before, _ = other._route(x, None)
    other.load_state_dict(state)
    again, _ = other._route(x, None)
    assert torch.equal(again, ids) and not torch.equal(before, ids)
    copied = copy.deepcopy(one)
    copied.router_weight.neg_()
    assert not torch.equal(copied._route(x, None)[0], ids)
    assert torch.equal(one._route(x, None)[0], ids)
    one.warmup(70)
    compiler.reset_stats()
    one._route(torch.randn(70, 64).half(), None)
    assert compiler.stats().compiles == 0


# ---- scores


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_scores_are_within_a_few_ulp_of_fp64(kind: str) -> None:
    """Over every binade of logits, subnormal results too."""
    x = torch.cat((torch.linspace(-110, 110, 20001), hostile_logits(16, 64).flatten()))
    x = x[x.isfinite()].unsqueeze(-1)
    if kind == "softmax":
        x = torch.cat((x, torch.zeros_like(x)), -1)
    wide = x.double()
    want = {
        "softmax": lambda: wide.softmax(-1),
        "sigmoid": lambda: 1 / (1 + torch.exp(-wide)),
        "sqrtsoftplus": lambda: torch.nn.functional.softplus(wide, threshold=1e9).sqrt(),
    }[kind]()
    if kind == "sqrtsoftplus":  # fp64's log1p(exp(x)) of a very negative x is exp(x)
        want = torch.where(wide < -30, torch.exp(wide / 2), want)
    got = torch_router.scores(x, kind).double()
    ulp = torch.clamp(want.abs() * 2.0**-23, min=2.0**-149)
    if kind == "sqrtsoftplus":  # the root of a subnormal number has few bits
        got, want, ulp = (t[wide > -87] for t in (got, want, ulp))
    assert ((got - want).abs() / ulp).max() < 4
