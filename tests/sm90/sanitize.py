"""Small launches of every configuration, load and way to store, for a memory or race checker:

    compute-sanitizer --tool memcheck --report-api-errors no python -m tests.sm90.sanitize
    compute-sanitizer --tool racecheck python -m tests.sm90.sanitize [NAME ...]

K is long enough for every ring of stages to turn. ``--early``: must be reported; every stage is
released before it is read.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

import torch

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, sm90_ops
from cute_kernels.activations import ReLU2
from cute_kernels.sm90 import config as configs
from cute_kernels.sm90 import host, weights

# fewer main loops to compile; 64 rows per expert at most
FEW = {
    "trio": {"token_sizes": (8, 64)},
    "duo": {"token_sizes": (16, 64)},
    "prefill": {"token_sizes": (16, 64), "epilogue_tokens": 64},
}


def early_class() -> Any:
    """A kernel with a race: it releases its stages when they are full. Imports the DSL."""
    from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm

    @dataclasses.dataclass(frozen=True)
    class Early(Sm90GroupedGemm):
        def wait_full(self, shared: Any, stage: Any, phase: Any) -> None:
            Sm90GroupedGemm.wait_full(self, shared, stage, phase)
            Sm90GroupedGemm.release(self, stage, shared)

        def release(self, stage: Any, shared: Any) -> None:
            pass

    return Early


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="decode, middle, ...; default: all")
    parser.add_argument("--early", action="store_true")
    options = parser.parse_args(argv)
    rows, k, counts = 384, 1536, (7, 0, 53)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, 256, (3, rows, k // 2), dtype=torch.uint8, generator=generator)
    scale = torch.randint(1, 100, (3, rows, k // 16), dtype=torch.uint8, generator=generator)
    packed = weights.pack_weight(nvfp4.Nvfp4Tensor(data, scale, torch.ones(3)))
    weight = dataclasses.replace(packed, blob=packed.blob.cuda(), alpha=packed.alpha.cuda())
    x = torch.randn(sum(counts), k, generator=generator).bfloat16().cuda()
    offsets = torch.tensor((0, 7, 7, 60), dtype=torch.int32, device="cuda")
    token = torch.randint(0, x.shape[0], x.shape[:1], generator=generator).int().cuda()
    launches: dict[str, dict[str, Any]] = {
        "contiguous": {},
        "gathered": {"row_token": token},
        "rounded": {"out_scale": torch.ones(3, device="cuda"), "activation": ReLU2()},
    }
    if options.early:
        made, other = host._kernel, early_class()
        host._kernel = lambda *a: other(**vars(made(*a)))  # type: ignore[assignment]
    for config in configs.CONFIGS:
        config = dataclasses.replace(config, **FEW.get(config.name, {}))  # type: ignore[arg-type]
        if options.names and config.name not in options.names:
            continue
        for what, parts in launches.items():
            host.sm90_grouped_gemm(x, weight, offsets, config=config, **parts)
            torch.cuda.synchronize()
            sys.stdout.write(f"{config.name} {what} ran; {compiler.stats().compiles} compiled\n")
    sm90_ops.stage_rows(x, offsets, torch.empty_like(x), torch.empty_like(x[:, 0].float()))
    torch.cuda.synchronize()
    sys.stdout.write("stage_rows ran\n")


if __name__ == "__main__":
    main()
