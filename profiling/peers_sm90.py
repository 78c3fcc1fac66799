"""Other libraries' NVFP4 x bf16 grouped GEMM on Hopper, for `profiling.bench_sm90`.

A peer takes part when it can be imported; otherwise, or when it fails, the bench says why. Weights
are random bits of the peer's own layout: times do not depend on them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Op = Callable[[], object]


class Unavailable(RuntimeError):
    """A peer that cannot take part, with the reason."""


def torch_bf16(shape: tuple[int, int, int], xs: list[Tensor], offsets: list[Tensor]) -> list[Op]:
    """`torch._grouped_mm` with bf16 weights (E, N, K) of ``shape``: the same products, 3.6 times
    the bytes."""
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    ends = [o[1:].contiguous() for o in offsets]
    return [functools.partial(torch._grouped_mm, x, weight, offs=e) for x, e in zip(xs, ends)]


def humming(shape: tuple[int, int, int], xs: list[Tensor], offsets: list[Tensor]) -> list[Op]:
    """humming-kernels, grouped by contiguous rows, its own choice of tiles."""
    layers = _import("humming.layer")
    experts, n, k = shape
    config = {
        "dtype": "float4e2m1",
        "scale_dtype": "float8e4m3",
        "group_size": 16,
        "scale_2_type": "tensor",
    }
    layer = layers.HummingLayer(
        shape_n=n,
        shape_k=k,
        weight_config=config,
        num_experts=experts,
        torch_dtype=torch.bfloat16,
    ).cuda()
    for parameter in layer.parameters():
        _randomise(parameter.data)
    layer.transform(allow_inplace=True)
    layouts = [o.long() for o in offsets]

    def run(x: Tensor, layout: Tensor) -> Any:
        return layer(
            x,
            expert_layout=layout,
            valid_shape_m=x.shape[0],
            compute_config={"gemm_type": "grouped_contiguous"},
        )

    if not bool(run(xs[0], layouts[0]).isfinite().all()):
        raise Unavailable("its output is not finite")
    return [functools.partial(run, x, layout) for x, layout in zip(xs, layouts)]


PEERS: dict[str, Callable[..., list[Op]]] = {
    "torch bf16": torch_bf16,
    "humming": humming,
}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a package that is there may fail while it is imported
        raise Unavailable(f"{type(error).__name__}: {error}") from error


def _randomise(data: Tensor) -> None:
    """Random codes, block scales between 0.5 and 2, global scales of 0.01."""
    if data.dtype == torch.float8_e4m3fn:
        data.view(torch.uint8).copy_(torch.randint(0x30, 0x40, data.shape, device=data.device))
    elif data.dtype in (torch.float32, torch.bfloat16):
        data.fill_(0.01)
    else:
        info = torch.iinfo(data.dtype)
        data.copy_(torch.randint(info.min, info.max, data.shape, device=data.device))
