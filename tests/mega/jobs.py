"""What the ranks of the tests run: the published call sequence, each rank with its own tokens and
its share of the experts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
import torch.distributed as dist

from moe import Capacity, Exchange, mega
from moe.failures import RankError
from tests.mega import data
from tests.mega.data import E, H, I, K, T, Tokens
from tests.oracle import OracleLayer

COUNTS = (5, 0, 9, 1, 3)  # tokens of each rank
LIMIT = 1.5


@dataclasses.dataclass(frozen=True)
class Sequence:
    """A buffer and some calls with it."""

    name: str
    mode: Exchange = Exchange()  # noqa: RUF009  a frozen value
    static: bool = False
    backend: str = "torch"
    calls: int = 2


SEQUENCES = [
    Sequence("counts"),
    Sequence("a2", static=True),
    Sequence("reference", backend="reference", calls=1),
    Sequence("capacity", Exchange(capacity=Capacity(tokens=T))),
]


def tokens_of(rank: int) -> Tokens:
    return data.tokens(COUNTS[rank], seed=10 + rank, scaled=True)


def layer_of(sequence: Sequence) -> OracleLayer:
    return data.layer(LIMIT, gh=sequence.static)


def share(of: OracleLayer, first: int, end: int) -> tuple[mega.MegaWeights, mega.MegaWeights]:
    pairs = [tuple(t[first:end] for t in p) for p in (data.gate_up(of), data.down(of))]
    return mega.transform_weights_for_mega_moe(*(data.published(p) for p in pairs))


def arguments(sequence: Sequence, rank: int) -> dict[str, Any]:
    """Buffer, weights, scales, y and statistics of one rank."""
    of, t = layer_of(sequence), tokens_of(rank)
    buffer = mega.get_symm_buffer_for_mega_moe(
        dist.group.WORLD, E, T, K, H, I, backend=sequence.backend, mode=sequence.mode
    )
    first, count = buffer.experts_start_idx, buffer.num_experts_per_rank
    g13, g2 = (a[first : first + count] for a in data.alphas(of))
    n = t.count
    buffer.x[:n].copy_(t.codes)
    buffer.x_sf[:n].copy_(data.words(t.scale))
    buffer.topk_idx[:n].copy_(t.ids)
    buffer.topk_weights[:n].copy_(t.weights)
    buffer.input_global_scale = t.gx
    l1, l2 = share(of, first, first + count)
    return {
        "y": torch.full((n, H), torch.nan, dtype=torch.bfloat16),
        "l1_weights": l1,
        "l2_weights": l2,
        "sym_buffer": buffer,
        "cumulative_local_expert_recv_stats": torch.full((count,), 7, dtype=torch.int32),
        "activation_clamp": LIMIT,
        "l1_alphas": g13,
        "l2_alphas": g2,
        "a2_scales": None if of.gh is None else data.tensor(of.gh)[first : first + count],
    }


def published_sequences(rank: int, size: int) -> dict[str, Any]:
    out = {}
    for sequence in SEQUENCES:
        given = arguments(sequence, rank)
        buffer = given["sym_buffer"]
        for _ in range(sequence.calls):
            given["y"].fill_(torch.nan)
            mega.fp4_fp4_mega_moe(**given)
        assert buffer.parallel is not None
        buffer.parallel.check()
        out[sequence.name] = {
            "y": given["y"],
            "stats": given["cumulative_local_expert_recv_stats"],
            "experts": (buffer.experts_start_idx, buffer.num_experts_per_rank),
        }
        buffer.destroy()
    return out


def one_rank_refuses(rank: int, size: int) -> dict[str, Any]:
    """Rank 1 brings a y of another type; then everybody brings good arguments."""
    given = arguments(SEQUENCES[0], rank)
    mega.fp4_fp4_mega_moe(**given)
    y = given["y"]
    before = y.clone()
    if rank == 1:
        given["y"] = y.float()
    start, errors = time.monotonic(), []
    for _ in range(2):
        try:
            mega.fp4_fp4_mega_moe(**given)
            errors.append("none")
        except (TypeError, RankError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        given["y"] = y
    seconds = time.monotonic() - start
    return {"errors": errors, "kept": torch.equal(y, before), "seconds": seconds}
