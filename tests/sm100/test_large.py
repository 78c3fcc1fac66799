"""Weights of more than 2^32 bytes: a sparse file stands for the memory of the experts without rows,
so that no more than the last expert's pages exist."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cute_kernels import sim
from cute_kernels.config import GemmConfig
from cute_kernels.device.epilogues import StoreRows
from tests.sm100.configs import DECODE, MAIN, names
from tests.sm100.harness import Data, Problem

EXPERTS, N, K = 4200, 256, 8192


def sparse(path: Path, size: int) -> torch.Tensor:
    with path.open("wb") as f:
        f.truncate(size)
    return torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, zeros but for the last expert."""
    folder = tmp_path_factory.mktemp("weights")
    codes = sparse(folder / "codes", EXPERTS * N * K // 2)
    scales = sparse(folder / "scales", EXPERTS * N * K // 16)
    assert codes.numel() > 2**32 and codes.numel() * 2 > 2**33
    return codes, scales


@pytest.mark.parametrize("gathered", [False, True], ids=["rows", "gather"])
@pytest.mark.parametrize("config", [DECODE, GemmConfig(1, 128), MAIN[-1]], ids=names)
def test_the_last_expert(
    weights: tuple[torch.Tensor, torch.Tensor], config: GemmConfig, gathered: bool
) -> None:
    data = Data(Problem((37,), N, K, gathered=gathered))
    codes, scales = weights
    codes[-data.w_data.numel() :] = data.w_data.flatten()
    scales[-data.w_scale.numel() :] = data.w_scale.flatten()
    data.w_data, data.w_scale = codes, scales
    data.offsets = torch.zeros(EXPERTS + 1, dtype=torch.int32)
    data.offsets[-1] = 37
    data.problem = Problem((0,) * (EXPERTS - 1) + (37,), N, K, gathered=gathered)
    alpha = torch.full((EXPERTS,), float("nan"))
    alpha[-1] = 1
    out = torch.full((37, N), float("nan"))
    with sim.Simulator(seed=0, schedule="lazy"):
        data.call(data.kernel(config, StoreRows("Float32")), [out.data_ptr(), alpha.data_ptr()])
    error = (out.double() - data.acc.double()).abs()
    # K = 8192: sums need not be exact any more; numerics section 6
    bound = 4 * (K / 64 + 1) * 2.0**-24 * data.size
    assert bool((error <= bound).all())
    assert float(data.acc.abs().min(dim=1).values.max()) > 0


def test_a_32_bit_offset_would_be_noticed() -> None:
    """The last expert lies past 2^32 bytes: an offset modulo 2^32 is that of zeros."""
    last = (EXPERTS - 1) * N * K // 2
    assert last > 2**32
    assert last % 2**32 + N * K // 2 <= last, "a wrapped offset must not reach the last expert"
