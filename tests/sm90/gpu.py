"""Cases, inputs and references of the SM90 GPU tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.sm90 import config as configs
from cute_kernels.sm90 import host, weights

MARKS = [
    pytest.mark.gpu,
    pytest.mark.sm90,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]

CONFIGS = configs.CONFIGS


def fewer_sizes(config: configs.Sm90Config) -> configs.Sm90Config:
    """Three of its main loops, for tests of what surrounds them: a third of the compile time."""
    sizes = config.token_sizes
    few = (sizes[0], sizes[len(sizes) // 2], sizes[-1])
    return config if len(sizes) <= 6 else dataclasses.replace(config, token_sizes=few)


EDGES = tuple(map(fewer_sizes, CONFIGS))


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows per expert, and the weight's rows and K."""

    counts: tuple[int, ...]
    rows: int
    k: int


CASES = (
    Case((16,), 128, 128),
    Case((3, 0), 128, 256),
    Case((0, 5, 37, 1), 384, 1024),  # an odd number of 128-row tiles
    Case((300, 0, 17, 64, 259), 256, 1920),  # several token tiles of one expert
    Case((0,) * 35 + (9, 0, 70, 0, 1), 512, 896),  # more than 32 experts, most of them empty
    Case((33, 8, 129), 176, 2880),  # padded weight rows and padded K
    Case((0, 0, 513, 0), 256, 512),  # one expert takes all
    Case(tuple(range(1, 50)), 144, 208),
)


def offsets(counts: tuple[int, ...]) -> Tensor:
    return torch.tensor(
        (0, *torch.tensor(counts).cumsum(0).tolist()), dtype=torch.int32, device="cuda"
    )


def make_weight(case: Case, exact: bool, gated: bool = False) -> nvfp4.Nvfp4Tensor:
    """Random codes; exact: scales 1, 2, 4, 8 and global scale 1, so that every partial sum is exact
    in fp32."""
    generator = torch.Generator("cuda").manual_seed(1)
    experts, make = (
        len(case.counts),
        {"dtype": torch.uint8, "device": "cuda", "generator": generator},
    )
    data = torch.randint(0, 256, (experts, case.rows, case.k // 2), **make)
    scale = torch.randint(0, 4, (experts, case.rows, case.k // 16), **make) * 8 + 56
    if not exact:
        scale = torch.randint(1, 100, (experts, case.rows, case.k // 16), **make)
    shape = (experts, 2) if gated else (experts,)
    g = torch.rand(shape, device="cuda", generator=generator) + 0.5
    return nvfp4.Nvfp4Tensor(data, scale, torch.ones_like(g) if exact else g)


def make_rows(case: Case, exact: bool) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(2)
    shape = (sum(case.counts), case.k)
    if exact:
        return torch.randint(-4, 5, shape, device="cuda", generator=generator).bfloat16()
    return torch.randn(shape, device="cuda", generator=generator).bfloat16()


def exact_sums(
    x: Tensor, weight: nvfp4.Nvfp4Tensor, counts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """fp64 (num_rows, rows): sums without global scales, and sums of absolute values."""
    values = nvfp4.decode(weight, torch.float32)
    sums, sizes, first = [], [], 0
    for e, count in enumerate(counts):
        a, b = x[first : first + count].double(), values[e].double()
        sums.append(a @ b.T)
        sizes.append(a.abs() @ b.abs().T)
        first += count
    return torch.cat(sums), torch.cat(sizes)


def per_row(value: Tensor, counts: tuple[int, ...]) -> Tensor:
    return value.repeat_interleave(torch.tensor(counts, device=value.device), dim=0)


def run(
    x: Tensor, weight: weights.Sm90Weight, counts: tuple[int, ...], features: int, **options: object
) -> Tensor:
    """Output poisoned with NaN between two guard rows that must stay NaN."""
    token, dtype = options.get("row_token"), options.get("out_dtype", torch.bfloat16)
    num_rows = x.shape[0] if token is None else token.numel()  # type: ignore[attr-defined]
    shape = (num_rows + 2, features)
    guarded = torch.full(shape, float("nan"), dtype=dtype, device="cuda")  # type: ignore[call-overload]
    out = host.sm90_grouped_gemm(x, weight, offsets(counts), out=guarded[1:-1], **options)  # type: ignore[arg-type]
    torch.cuda.synchronize()
    assert bool(guarded[0].isnan().all()) and bool(guarded[-1].isnan().all()), (
        "wrote outside of the output"
    )
    return out
