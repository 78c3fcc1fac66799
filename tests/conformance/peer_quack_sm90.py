"""QuACK's Hopper kernels: NVFP4 weights decoded in registers and multiplied from there by wgmma,
and a bf16 GEMM whose operands both lie in shared memory, over ragged experts, by two warpgroups
that share a tile or take turns."""

from collections.abc import Iterator
from typing import Any

import cutlass.base_dsl.runtime.cuda as runtime
import quack.gemm as quack_gemm
import quack.gemm_runtime.host as quack_host
import quack.gemm_w4 as quack_w4
import torch
from quack.operand_transform.formats import decode_format

from tests.conformance import data
from tests.conformance.case import Case
from tests.conformance.host import NUM_SMS, as_device

SHARED_PER_SM = 228 * 1024
_launch_gemm = quack_host.launch_gemm


def _launch_on_device(plan: Any, *arguments: Any, **named: Any) -> None:
    named = {name: as_device(value) for name, value in named.items()}
    _launch_gemm(plan, *as_device(arguments), **named)


runtime.get_device_attribute = lambda *a, **k: SHARED_PER_SM  # launches that ask for CTAs per SM
for _module in (quack_gemm, quack_host):
    _module.launch_gemm = _launch_on_device
    _module.get_max_active_clusters = lambda size, *a, **k: NUM_SMS // size


def _weights(name: str, rows: int, n: int, k: int, **options: Any) -> Case:
    """NVFP4 weights (n, k) times bf16 rows."""
    generator = torch.Generator().manual_seed(len(name))
    weight = data.operand(generator, n, k)
    blob, scales = decode_format("nvfp4").prepare(weight.codes, weight.scale)
    x = torch.randint(-4, 5, (rows, k), generator=generator).bfloat16()
    out = torch.empty(rows, n, dtype=torch.bfloat16)
    want = (x.double() @ weight.values.T).to(torch.bfloat16)

    def launch() -> None:
        quack_w4.gemm_w4a16(x, blob, scales, out=out, wformat="nvfp4", **options)

    def check() -> str:
        data.check_equal(out, want, name)
        return "bit-equal"

    return Case(name, launch, {"out": out}, check, macs=rows * n * k)


def _bf16(name: str, counts: list[int], n: int, k: int, pingpong: bool) -> Case:
    """bf16 rows of experts times bf16 weights (experts, n, k)."""
    generator = torch.Generator().manual_seed(len(name))
    rows = sum(counts)
    a, b = (
        torch.randint(-4, 5, shape, generator=generator).bfloat16()
        for shape in ((rows, k), (len(counts), n, k))
    )
    out, cu = torch.empty(rows, n, dtype=torch.bfloat16), data.offsets(counts)
    parts = zip(a.double().split(counts), b.double(), strict=True)
    want = torch.cat([x @ w.T for x, w in parts]).to(torch.bfloat16)

    def launch() -> None:
        quack_gemm.gemm(a, b, out, None, None, 128, 128, 1, 1, pingpong=pingpong, cu_seqlens_m=cu)

    def check() -> str:
        data.check_equal(out, want, name)
        return "bit-equal"

    return Case(name, launch, {"out": out}, check, macs=rows * n * k)


def cases() -> Iterator[Case]:
    """Weights from registers: few and many rows, one that ends inside a tile, K split in two;
    operands from shared memory."""
    yield _weights("quack90.w4a16", 64, 128, 256)
    yield _weights("quack90.w4a16.ragged", 40, 256, 512)
    yield _weights("quack90.w4a16.few", 3, 256, 512, tile_m=64, tile_n=16)
    yield _weights("quack90.w4a16.large", 200, 256, 512, tile_m=128, tile_n=256)
    yield _weights("quack90.w4a16.split_k", 24, 128, 1024, split_k=2, tile_m=128, tile_n=32)
    yield _bf16("quack90.bf16", [70, 0, 200, 1], 256, 256, pingpong=False)
    yield _bf16("quack90.bf16.pingpong", [70, 0, 200, 1], 256, 256, pingpong=True)
