"""Time one call of the layer on this machine's CPU at the size of a public model.

python -m profiling.layer_cpu [--model deepseek-v4-flash] [--tokens 1 8] [--threads 2] [--json
out.json]

Weights are random bytes (every code and a realistic range of scales): values do not change the
work. Measured wall time, median of --repeats calls after one warm-up, with fresh tokens each time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from cute_kernels import nvfp4
from moe import ExpertWeights, MoE, MoEConfig, SwiGLU

MODELS = {
    "deepseek-v4-flash": MoEConfig(
        4096, 2048, 256, 6, scoring="sqrtsoftplus", activation=SwiGLU(limit=10.0)
    ),
    "qwen3-30b-a3b": MoEConfig(2048, 768, 128, 8),
}


def random_weights(cfg: MoEConfig, seed: int = 0) -> ExpertWeights:
    """Random codes, block scales 0.5 to 1.9, global scales 1e-3."""
    g = torch.Generator().manual_seed(seed)

    def packed(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (cfg.num_experts, rows, k // 2)
        data = torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)
        groups = (cfg.num_experts, rows, k // nvfp4.BLOCK)
        return data, nvfp4.swizzle(
            torch.randint(0x30, 0x40, groups, dtype=torch.uint8, generator=g)
        )

    l1, s1 = packed(cfg.projections * cfg.intermediate, cfg.hidden)
    l2, s2 = packed(cfg.hidden, cfg.intermediate)
    e4m3 = torch.float8_e4m3fn
    g13 = torch.full((cfg.num_experts, cfg.projections), 1e-3)
    return ExpertWeights(l1, s1.view(e4m3), g13, l2, s2.view(e4m3), g13[:, 0].clone())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m profiling.layer_cpu", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="deepseek-v4-flash")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    cfg = MODELS[args.model]
    layer = MoE(cfg, random_weights(cfg), backend="torch")
    rows = []
    for tokens in args.tokens:
        times = [one_call(layer, tokens, seed) for seed in range(args.repeats + 1)][1:]
        rows.append({"tokens": tokens, "median_s": statistics.median(times), "all_s": times})
        sys.stdout.write(f"{args.model} {tokens} tokens: {rows[-1]['median_s']:.2f} s (measured)\n")
    if args.json:
        result = {"model": args.model, "threads": args.threads, "rows": rows}
        args.json.write_text(json.dumps(result))
    return 0


def one_call(layer: MoE, tokens: int, seed: int) -> float:
    g = torch.Generator().manual_seed(seed)
    cfg = layer.cfg
    x = torch.randn(tokens, cfg.hidden, generator=g).bfloat16()
    logits = torch.rand(tokens, cfg.num_experts, generator=g)
    weights, ids = logits.topk(cfg.top_k)
    start = time.perf_counter()
    layer.experts(x, ids, weights)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
