"""The epilogue of the SM90 kernel in the simulator: every accumulator register ends in the right
place, scaled by its own row, bit for bit. No wgmma is needed for that."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4
from cute_kernels.activations import Activation, ReLU2
from cute_kernels.launch import launch
from cute_kernels.sm90 import config as configs
from tests.small_kernels import assert_same

pytestmark = pytest.mark.skipif(
    not compiler.simulated(), reason="needs the DSL, a C compiler, and no GPU in this session"
)


@dataclasses.dataclass(frozen=True)
class Sum(Activation):
    """Gated and exact: what is compared is where values go."""

    def __call__(self, m: Any, gate: Any, up: Any = None) -> Any:
        return gate + up * 2.0


SMALL = dataclasses.replace(configs.PREFILL, token_sizes=(16, 64), epilogue_tokens=32)
PAIR = dataclasses.replace(SMALL, name="pair", warpgroups=1)
CONFIGS = {"prefill": SMALL, "middle": configs.MIDDLE, "pair": PAIR}
TRIO = dataclasses.replace(configs.TRIO, token_sizes=(8, 48))
# as many tokens are staged at a time as several stores of each thread take
PASSES = dataclasses.replace(SMALL, name="passes", token_sizes=(16, 96), epilogue_tokens=64)
NAN = float("nan")
ACTIVATIONS: dict[str, Activation | None] = {"store": None, "gated": Sum(), "relu2": ReLU2()}
EXPERT, EXPERTS, ROW0 = 1, 3, 5


@dataclasses.dataclass(frozen=True)
class Inputs:
    acc: Tensor
    alpha: Tensor
    row_scale: Tensor | None
    row_token: Tensor | None
    bias: Tensor | None
    expert_scale: Tensor | None = None
    out_scale: Tensor | None = None


def make(config: configs.Sm90Config, rows: int, kind: str, seed: int = 0) -> Inputs:
    """``kind``: '' plain, 'scaled' rows, 'gathered' (the scale through row_token), each with a bias
    but the first."""
    g = torch.Generator().manual_seed(seed)
    n = config.max_tokens
    acc = torch.randn((config.blocks64, n // 2, 128 * config.warpgroups), generator=g)
    alpha = torch.rand((EXPERTS, 2), generator=g) + 0.5
    count = ROW0 + n
    scale = torch.rand(count if kind == "scaled" else 3 * count, generator=g) + 0.5
    token = torch.randperm(3 * count, generator=g)[:count].int()
    bias = torch.randn((EXPERTS, rows), generator=g)
    return Inputs(
        acc,
        alpha,
        scale if kind else None,
        token if kind == "gathered" else None,
        bias if kind else None,
    )


def expected(i: Inputs, rows: int, tokens: int, activation: Activation | None) -> Tensor:
    """fp32 (tokens, features) from the fragment layout of wgmma's accumulators (PTX ISA)."""
    from cute_kernels.torch_math import TORCH_MATH

    blocks, registers, threads = i.acc.shape
    values = torch.empty((registers * 2, blocks * threads // 2))  # (token, packed row)
    thread, v = torch.arange(threads)[None], torch.arange(registers)[:, None]
    lane, group = thread % 32, thread // 32 % 4 + thread // 128 * 4
    token = (v // 4 * 8 + lane % 4 * 2 + v % 2).expand(registers, threads)
    row = group * 16 + lane // 4 + v // 2 % 2 * 8
    for m in range(blocks):  # side by side: the warpgroups, then the next block of each
        values[token, m * threads // 2 + row] = i.acc[m]
    values = values[:tokens, :rows]
    alpha = i.alpha[EXPERT][torch.arange(rows) // 8 % 2]
    if i.expert_scale is not None:
        alpha = i.expert_scale[EXPERT].clamp(min=nvfp4.GLOBAL_MIN) * alpha
    if i.row_scale is not None:
        index = torch.arange(ROW0, ROW0 + tokens)
        g = i.row_scale[index if i.row_token is None else i.row_token[index].long()]
        alpha = g[:, None] * alpha
    values = values * alpha
    if i.bias is not None:
        values = values + i.bias[EXPERT]
    if activation is None:
        return values
    if not activation.gated:
        return activation(TORCH_MATH, values)  # type: ignore[no-any-return]
    pairs = values.unflatten(1, (rows // 16, 2, 8))
    h: Tensor = activation(TORCH_MATH, pairs[:, :, 0], pairs[:, :, 1])
    return h.flatten(1)


def run(
    config: configs.Sm90Config,
    i: Inputs,
    rows: int,
    tokens: int,
    activation: Activation | None,
    dtype: torch.dtype,
) -> Tensor:
    """Output between guard rows, which must stay NaN."""
    from cute_kernels.sim import Simulator
    from cute_kernels.sm90.epilogues import Activate, StoreRows
    from tests.sm90.finish_kernel import Finish

    options: dict[str, Any] = {
        "row_scale": i.row_scale is not None,
        "bias": i.bias is not None,
        "indexed": i.row_token is not None,
        "dtype": "Float32" if dtype == torch.float32 else "BFloat16",
        "by_expert": i.expert_scale is not None,
        "rounded": i.out_scale is not None,
    }
    epilogue = StoreRows(**options)
    if activation is not None:
        epilogue = Activate(**options, activation=activation)
    features = rows // 2 if activation is not None and activation.gated else rows
    out = torch.full((ROW0 + tokens + 4, features), float("nan"), dtype=dtype)
    kernel = Finish(epilogue, config)
    with Simulator(schedule="random", seed=1) as s:
        scales = (i.row_scale, i.row_token, i.bias, i.expert_scale, i.out_scale)
        launch(kernel, out.device, i.acc, out, rows, i.alpha, *scales, EXPERT, ROW0, tokens)
    assert s.launches
    assert out[:ROW0].isnan().all() and out[ROW0 + tokens :].isnan().all()
    return out[ROW0 : ROW0 + tokens]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("kind", ["", "scaled", "gathered"])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("config", list(CONFIGS))
def test_every_register_has_its_place(
    config: str, name: str, kind: str, dtype: torch.dtype
) -> None:
    c, activation = CONFIGS[config], ACTIVATIONS[name]
    rows = 128 * c.row_tiles - (48 if kind else 0)  # weight rows that end inside a tile
    for tokens in (c.max_tokens, c.max_tokens - 3, 1):
        i = make(c, rows, kind)
        got = run(c, i, rows, tokens, activation, dtype)
        assert_same(got, expected(i, rows, tokens, activation).to(dtype), f"{tokens} tokens")


def hard_values(i: Inputs) -> Inputs:
    """Accumulators around every tie of E2M1, zeros of both signs, beyond the largest value, NaN and
    infinity, in blocks of every size."""
    g = torch.Generator().manual_seed(5)
    ties = torch.tensor([0.0, -0.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 448.0 * 6, 1e30])
    acc = i.acc.flatten()
    some = torch.rand(acc.shape, generator=g)
    tie = ties[torch.randint(len(ties), acc.shape, generator=g)] * 2.0 ** torch.randint(
        -12, 3, acc.shape, generator=g
    )
    tie = torch.where(torch.rand(acc.shape, generator=g) < 0.5, tie, -tie)
    acc = torch.where(some < 0.4, tie, acc * torch.exp2(torch.randn(acc.shape, generator=g) * 6))
    acc[some > 0.99] = float("nan")
    acc[(some > 0.98) & (some < 0.985)] = float("-inf")
    return dataclasses.replace(i, acc=acc.view_as(i.acc))


@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("config", [*CONFIGS, "trio", "passes"])
def test_rounded_to_the_bytes_of_the_quantiser(config: str, name: str) -> None:
    """Whole tiles, tiles that end inside, and weight rows that end inside a tile; values of every
    kind, outer scales of every kind."""
    c, activation = (CONFIGS | {"trio": TRIO, "passes": PASSES})[config], ACTIVATIONS[name]
    seen = []
    for rows, kind, outer in ((0, "", 0.02), (96, "scaled", 1.0), (32, "", 1e-38), (0, "", NAN)):
        i = hard_values(make(c, 128 * c.row_tiles - rows, kind))
        scale = torch.tensor([9.0, outer, 7.0])
        by_expert = None if kind else torch.tensor([3.0, 0.7, 1e-38])
        i = dataclasses.replace(i, out_scale=scale, expert_scale=by_expert)
        for tokens in (c.max_tokens, 13):
            got = run(c, i, 128 * c.row_tiles - rows, tokens, activation, torch.bfloat16)
            exact = expected(i, 128 * c.row_tiles - rows, tokens, activation)
            want = nvfp4.decode(nvfp4.quantize(exact, scale[EXPERT]), torch.bfloat16)
            assert_same(got, want, f"{tokens} tokens, {rows} rows less, scale {outer}")
            seen.append(got.isfinite().float().mean().item())
    assert min(seen) == 0 and 0.4 < max(seen) < 1, "some blocks hold NaN, and not all"


def test_the_comparison_sees_a_block_of_another_amax() -> None:
    """Meta-test: halves of blocks that were rounded for themselves."""
    c = CONFIGS["prefill"]
    i = dataclasses.replace(make(c, 128, ""), out_scale=torch.ones(EXPERTS))
    got = run(c, i, 128, 40, Sum(), torch.bfloat16)
    halves = expected(i, 128, 40, Sum()).unflatten(1, (-1, 1, 8)).repeat(1, 1, 2, 1).flatten(1)
    rounded = nvfp4.decode(nvfp4.quantize(halves, i.out_scale[EXPERT]), torch.bfloat16)
    with pytest.raises(AssertionError, match="entries differ"):
        assert_same(got, rounded.unflatten(1, (-1, 2, 8))[:, :, 0].flatten(1), "rows")


def test_the_comparison_sees_a_neighbours_scale() -> None:
    c = CONFIGS["prefill"]
    i = make(c, 128, "scaled")
    got = run(c, i, 128, 40, None, torch.float32)
    assert i.row_scale is not None
    moved = dataclasses.replace(i, row_scale=i.row_scale.roll(1))
    with pytest.raises(AssertionError, match="entries differ"):
        assert_same(got, expected(moved, 128, 40, None), "rows")
