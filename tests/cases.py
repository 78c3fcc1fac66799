"""Shapes and routings that tests share: explicit lists, small enough for a CPU, and the edges in
them said by name.

Sizes of public models come from the table in test_model_shapes.py, layers known by hand from
layers.py (`unit_layer`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from tests.layers import poison_new_tensors
from tests.test_model_shapes import MODELS, Model, reduced


@dataclasses.dataclass(frozen=True)
class Case:
    """One grouped GEMM: rows (sum(counts), k) of len(counts) experts against weights (E, n, k).

    ``spare`` rows lie behind the last expert and belong to nobody.
    """

    name: str
    counts: tuple[int, ...]
    n: int = 128
    k: int = 256
    spare: int = 0

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.spare

    @property
    def offsets(self) -> list[int]:
        return [0, *itertools.accumulate(self.counts)]

    def expert_offsets(self, device: torch.device | str = "cpu") -> Tensor:
        return torch.tensor(self.offsets, dtype=torch.int32, device=device)

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("no-rows", (0, 0, 0)),
    Case("one-row", (1,)),
    Case("row-below-the-tile", (127,)),
    Case("one-tile", (128,)),
    Case("row-over-the-tile", (129,)),
    Case("tile-edges", (1, 127, 129, 0, 128)),  # 640 padded rows, not 512
    Case("eight-of-one", (1,) * 8),  # 1024 padded rows, not 128
    Case("empty-first-and-last", (0, 5, 0, 3, 0)),
    Case("all-to-one", (0, 0, 260, 0)),
    Case("one-beside-many", (1, 200, 1, 0, 1)),
    Case("spare-rows", (3, 0, 2), spare=9),
    Case("smallest-k", (3, 2), n=16, k=16),
    Case("k-groups-of-5", (3, 2), n=48, k=80),
    Case("k-groups-of-22", (3, 2), n=352, k=352),
    Case("n-over-a-tile", (3, 2), n=144, k=64),
    Case("sixty-experts", (0, 1, 2) * 20, n=32, k=32),
]


def model_cases(m: Model, counts: tuple[int, ...] = (3, 0, 2)) -> tuple[Case, Case]:
    """L1 and L2 of a public model with H and I reduced, remainders kept."""
    h, i = reduced(m.hidden), reduced(m.inter)
    projections = 2 if m.activation.gated else 1
    return Case(f"{m}-l1", counts, projections * i, h), Case(f"{m}-l2", counts, h, i)


def model_case_list() -> list[Case]:
    """Both GEMMs of every public model, each shape once."""
    seen = {(c.n, c.k): c for m in MODELS for c in model_cases(m)}
    return list(seen.values())


# ---- routing: (tokens, experts, top_k, generator) -> ids int32 (T, K) ----------------------------

Routing = Callable[[int, int, int, torch.Generator], Tensor]


def uniform(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """Distinct experts of each token, all equally likely."""
    return torch.rand(tokens, experts, generator=gen).argsort(dim=-1)[:, :top_k].int()


def skewed(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """Distinct experts of each token, expert e about 1 / (e + 1)^1.5 as likely as the first."""
    share = torch.arange(1, experts + 1).pow(-1.5)
    key = torch.rand(tokens, experts, generator=gen).log() / share  # Efraimidis and Spirakis 2006
    return key.argsort(dim=-1, descending=True)[:, :top_k].int()


def few_experts(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """Only the last ``top_k`` experts have rows."""
    return uniform(tokens, top_k, top_k, gen) + (experts - top_k)


def one_expert(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """Every slot of every token on the middle expert, as no router would do it."""
    return torch.full((tokens, top_k), experts // 2, dtype=torch.int32)


def some_padding(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """`uniform`, about a third of the slots -1 and every fourth token without any slot."""
    ids = uniform(tokens, experts, top_k, gen)
    ids[torch.rand(tokens, top_k, generator=gen) < 1 / 3] = -1
    ids[::4] = -1
    return ids


def all_padding(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    return torch.full((tokens, top_k), -1, dtype=torch.int32)


ROUTINGS: list[Routing] = [uniform, skewed, few_experts, one_expert, some_padding, all_padding]


def route(
    routing: Routing, tokens: int, experts: int, top_k: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """ids int32 (T, K) and weights fp32 (T, K) in 0.1 .. 1.1."""
    gen = torch.Generator().manual_seed(seed)
    ids = routing(tokens, experts, top_k, gen)
    return ids, torch.rand(ids.shape, generator=gen) + 0.1


# ---- poison --------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, tensors that torch does not initialise hold NaN, 0x7F or the largest integer."""
    with pytest.MonkeyPatch.context() as patch:
        poison_new_tensors(patch)
        yield
