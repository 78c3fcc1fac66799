"""Small launches of the three configurations, for a memory or race checker:

    compute-sanitizer --tool racecheck python -m tests.sm90.sanitize
    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.sm90.sanitize

K is long enough for every ring of stages to turn.
"""

from __future__ import annotations

import dataclasses
import sys

import torch

from cute_kernels import nvfp4
from cute_kernels.sm90 import config as configs
from cute_kernels.sm90 import host, weights


def main() -> None:
    rows, k, counts = 384, 1536, (7, 0, 53)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (3, rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 100, (3, rows, k // 16), dtype=torch.uint8, generator=generator)
    packed = weights.pack_weight(nvfp4.Nvfp4Tensor(data, scale, torch.ones(3)))
    weight = dataclasses.replace(packed, blob=packed.blob.cuda(), alpha=packed.alpha.cuda())
    x = torch.randn(sum(counts), k, generator=generator).bfloat16().cuda()
    offsets = torch.tensor((0, 7, 7, 60), dtype=torch.int32, device="cuda")
    prefill = dataclasses.replace(configs.PREFILL, token_sizes=(16, 64), epilogue_tokens=64)
    for config in (configs.DECODE, configs.MIDDLE, prefill):
        host.sm90_grouped_gemm(x, weight, offsets, config=config)
        torch.cuda.synchronize()
        sys.stdout.write(f"{config.name} ran\n")


if __name__ == "__main__":
    main()
