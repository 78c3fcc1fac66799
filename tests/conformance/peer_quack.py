"""QuACK's block-scaled GEMM over ragged experts, scheduled by cluster launch control."""

from collections.abc import Iterator
from typing import Any

import quack.gemm as quack_gemm
import torch

from tests.conformance import data
from tests.conformance.case import Case
from tests.conformance.host import NUM_SMS, as_device

_launch_gemm = quack_gemm.launch_gemm


def _launch_on_device(plan: Any, *arguments: Any, **named: Any) -> None:
    named = {name: as_device(value) for name, value in named.items()}
    _launch_gemm(plan, *as_device(arguments), **named)


quack_gemm.launch_gemm = _launch_on_device
quack_gemm.get_device_capacity = lambda *a, **k: (10, 0)
quack_gemm.get_max_active_clusters = lambda size, *a, **k: NUM_SMS // size


def _case(
    name: str,
    counts: list[int],
    n: int,
    k: int,
    tile: tuple[int, int],
    dynamic: bool = True,
) -> Case:
    generator = torch.Generator().manual_seed(len(name))
    experts, rows = len(counts), sum(counts)
    a, b = data.operand(generator, rows, k), data.operand(generator, experts, n, k)
    sfa = data.ragged_scales(a.scale, counts)
    sfb = data.tiled_scales(b.scale)
    out = torch.empty(rows, n, dtype=torch.bfloat16)
    cu = data.offsets(counts)
    cluster_m = 2 if tile[0] == 256 else 1

    def launch() -> None:
        quack_gemm.gemm(
            a.fp4,
            b.fp4,
            out,
            None,
            None,
            *tile,
            cluster_m,
            1,
            persistent=True,
            is_dynamic_persistent=dynamic,
            cu_seqlens_m=cu,
            SFA=sfa,
            SFB=sfb,
            bs_format_a="nvfp4",
            bs_format_b="nvfp4",
        )

    acc = data.matmul(a, b, counts)

    def check() -> str:
        data.check_equal(out, acc.to(torch.bfloat16), name)
        return "bit-equal"

    return Case(name, launch, {"out": out}, check, macs=rows * n * k)


def cases() -> Iterator[Case]:
    """One and two CTAs, ragged rows, dynamic and static persistence."""
    yield _case("quack.varlen.2cta", [256], 256, 512, (256, 256))
    yield _case("quack.varlen.2cta.ragged", [70, 0, 200, 1], 512, 256, (256, 128))
    yield _case("quack.varlen.1cta", [256], 256, 512, (128, 128))
    yield _case("quack.varlen.2cta.static", [70, 0, 200, 1], 512, 256, (256, 256), dynamic=False)
