"""The epilogue of the SM90 kernel in the simulator: every accumulator register ends in the right
place, scaled by its own row, bit for bit. No wgmma is needed for that."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cute_kernels import compile as compiler
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


SMALL = dataclasses.replace(configs.PREFILL, token_sizes=(16, 64), epilogue_tokens=32, box_rows=16)
PAIR = dataclasses.replace(SMALL, name="pair", warpgroups=1)
CONFIGS = {"prefill": SMALL, "middle": configs.MIDDLE, "pair": PAIR}
ACTIVATIONS: dict[str, Activation | None] = {"store": None, "gated": Sum(), "relu2": ReLU2()}
EXPERT, EXPERTS, ROW0 = 1, 3, 5


@dataclasses.dataclass(frozen=True)
class Inputs:
    acc: Tensor
    alpha: Tensor
    row_scale: Tensor | None
    row_token: Tensor | None
    bias: Tensor | None


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
    }
    epilogue = StoreRows(**options)
    if activation is not None:
        epilogue = Activate(**options, activation=activation)
    features = rows // 2 if activation is not None and activation.gated else rows
    out = torch.full((ROW0 + tokens + 4, features), float("nan"), dtype=dtype)
    kernel = Finish(epilogue, config)
    with Simulator(schedule="random", seed=1) as s:
        arguments = (i.acc, out, rows, i.alpha, i.row_scale, i.row_token, i.bias)
        launch(kernel, out.device, *arguments, EXPERT, ROW0, tokens)
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


def test_the_comparison_sees_a_neighbours_scale() -> None:
    c = CONFIGS["prefill"]
    i = make(c, 128, "scaled")
    got = run(c, i, 128, 40, None, torch.float32)
    assert i.row_scale is not None
    moved = dataclasses.replace(i, row_scale=i.row_scale.roll(1))
    with pytest.raises(AssertionError, match="entries differ"):
        assert_same(got, expected(moved, 128, 40, None), "rows")
