"""Torch in, torch out for the SM90 grouped GEMM: checks, scratch memory, choice of configuration,
launch."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from cute_kernels.activations import Activation
from cute_kernels.launch import launch, multiprocessors
from cute_kernels.nvfp4 import check_expert_offsets
from cute_kernels.sm90 import layout
from cute_kernels.sm90.config import Sm90Config, choose_config, chunk_steps
from cute_kernels.sm90.weights import Sm90Weight

ARCH = "sm_90a"
_DTYPES = {torch.bfloat16: "BFloat16", torch.float32: "Float32"}


@dataclasses.dataclass(eq=False)
class Sm90Scratch:
    """Memory that launches on one stream may share, one after the other.

    counters  int32 zeros; every launch leaves zeros
    partial   float32, anything
    """

    counters: Tensor
    partial: Tensor

    @classmethod
    def for_calls(cls, device: torch.device | str, counters: int, partial: int) -> Sm90Scratch:
        return cls(
            torch.zeros(counters, dtype=torch.int32, device=device),
            torch.empty(partial, dtype=torch.float32, device=device),
        )


def scratch_sizes(weight_rows: int, k: int, num_rows: int, config: Sm90Config) -> tuple[int, int]:
    """(int32 counters, fp32 partial sums) one call needs."""
    if not config.split_k:
        return 2, 1
    padded_rows = -(-weight_rows // layout.TILE_ROWS) * layout.TILE_ROWS
    steps = -(-k // layout.TILE_K)
    chunks = -(-steps // chunk_steps(k, config))
    return 2, chunks * num_rows * padded_rows


def sm90_grouped_gemm(
    x: Tensor,
    weight: Sm90Weight,
    expert_offsets: Tensor,
    *,
    row_token: Tensor | None = None,
    activation: Activation | None = None,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    expert_scale: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    batch_invariant: bool = False,
    config: Sm90Config | None = None,
    scratch: Sm90Scratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[r] = epilogue(x[r] @ decode(weight[expert of r])^T) for R routed rows, expert-major.

    x                bf16 (R, K), contiguous; with row_token (tokens, K)
    expert_offsets   int32 (E + 1,): rows of expert e are expert_offsets[e] : expert_offsets[e + 1];
                     rows past the last are not written
    row_token        int32 (R,): routed row r reads x[row_token[r]]; entries past the last expert
                     are not read
    activation       None: out (R, rows) = acc * alpha. Gated: out (R, rows / 2) = act(gate, up);
                     not gated: out (R, rows) = act(acc * alpha)
    row_scale        float32, one per row of x: multiplies alpha (outer scale of quantised
                     activations)
    bias             float32 (E, rows) in packed row order (`weights.row_order`): added after alpha
    expert_scale     float32 (E,), instead of row_scale: the same for all rows of an expert
    out_scale        float32 (E,): outer scale with which the output is rounded to NVFP4 (numerics
                     section 2) in blocks of 16 features; stored is code x block scale, exact in
                     bf16: what `sm90_ops.stage_rows` makes of the fp32 output
    out_dtype        bfloat16 or float32
    batch_invariant  choose among configurations that give the same bits (not with ``config``)
    config           None: chosen from R; bits of DECODE differ from those of the others, see
                     README.md
    scratch          None: allocated here

    Nothing is read back from the device. Raises ValueError for shapes, dtypes or devices that
    disagree.
    """
    epilogue = _Epilogue(activation, row_scale, bias, out_dtype, expert_scale, out_scale)
    num_rows, features = _check(x, weight, expert_offsets, row_token, epilogue)
    if config is None:
        config = choose_config(num_rows, weight.num_experts, batch_invariant)
    counters, partial = scratch_sizes(weight.rows, weight.k, num_rows, config)
    if scratch is None:
        scratch = Sm90Scratch.for_calls(x.device, counters, partial)
    elif scratch.counters.numel() < counters or scratch.partial.numel() < partial:
        raise ValueError(
            f"scratch has {scratch.counters.numel()} counters and {scratch.partial.numel()} "
            f"partial sums, this call needs {counters} and {partial}"
        )
    if out is None:
        out = torch.empty((num_rows, features), dtype=out_dtype, device=x.device)
    elif (
        tuple(out.shape) != (num_rows, features)
        or out.dtype != out_dtype
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"out must be contiguous {out_dtype} ({num_rows}, {features}), got "
            f"{tuple(out.shape)} {out.dtype}"
        )
    if num_rows == 0:
        return out
    kernel = _kernel(config, row_token is not None, epilogue)
    pointers = [weight.blob, x, row_token, out, expert_offsets, scratch.counters, scratch.partial]
    tokens = row_token if row_scale is not None else None
    epilogue_pointers = [weight.alpha, row_scale, tokens, bias, expert_scale, out_scale]
    sizes = (weight.num_experts, num_rows, weight.k, weight.rows, chunk_steps(weight.k, config))
    ctas = multiprocessors(x.device) * config.ctas_per_sm
    launch(kernel, x.device, *pointers, *sizes, ctas, *epilogue_pointers)
    return out


class _Epilogue(NamedTuple):
    """Optional parts of an epilogue."""

    activation: Activation | None
    row_scale: Tensor | None
    bias: Tensor | None
    out_dtype: torch.dtype
    expert_scale: Tensor | None = None
    out_scale: Tensor | None = None


def _kernel(config: Sm90Config, gathered: bool, parts: _Epilogue) -> object:
    from cute_kernels.sm90.epilogues import Activate, StoreRows
    from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm
    from cute_kernels.sm90.loads import ContiguousRows, GatheredRows

    scaled, biased = parts.row_scale is not None, parts.bias is not None
    by_expert, rounded = parts.expert_scale is not None, parts.out_scale is not None
    dtype = _DTYPES[parts.out_dtype]
    epilogue = StoreRows(scaled, biased, gathered and scaled, dtype, by_expert, rounded)
    if parts.activation is not None:
        fields = {f.name: getattr(epilogue, f.name) for f in dataclasses.fields(epilogue)}
        epilogue = Activate(**fields, activation=parts.activation)
    return Sm90GroupedGemm(GatheredRows() if gathered else ContiguousRows(), epilogue, config)


def _check(
    x: Tensor,
    weight: Sm90Weight,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    parts: _Epilogue,
) -> tuple[int, int]:
    """(R, output features)."""
    activation, row_scale, bias, out_dtype, *_ = parts
    if out_dtype not in _DTYPES:
        raise ValueError(f"out_dtype must be bfloat16 or float32, got {out_dtype}")
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] != weight.k or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous bf16 (rows, {weight.k}), got {tuple(x.shape)} {x.dtype}"
        )
    check_expert_offsets(expert_offsets, x.device)
    if expert_offsets.numel() != weight.num_experts + 1 or weight.device != x.device:
        raise ValueError(
            f"weight has {weight.num_experts} experts on {weight.device}; expert_offsets has "
            f"{expert_offsets.numel()} entries and x is on {x.device}"
        )
    if row_token is not None:
        _check_vector(row_token, "row_token", row_token.shape, torch.int32, x.device)
    num_rows = x.shape[0] if row_token is None else row_token.numel()
    gated = activation is not None and activation.gated
    if gated != weight.gated:
        raise ValueError(
            f"activation {activation} needs weights packed with gated={gated}, got "
            f"gated={weight.gated}"
        )
    if row_scale is not None:
        _check_vector(row_scale, "row_scale", x.shape[:1], torch.float32, x.device)
    if bias is not None:
        shape = torch.Size((weight.num_experts, weight.rows))
        _check_vector(bias, "bias", shape, torch.float32, x.device)
    features = weight.rows // 2 if gated else weight.rows
    if features % 8 or weight.k % 16 or weight.rows % 16:
        raise ValueError(
            f"weight rows {weight.rows} must be a multiple of 16, K {weight.k} of 16 and output "
            f"features {features} of 8"
        )
    _check_scales(parts, weight.num_experts, features, x.device)
    return num_rows, features


def _check_scales(parts: _Epilogue, num_experts: int, features: int, device: torch.device) -> None:
    for name in ("expert_scale", "out_scale"):
        if (scale := getattr(parts, name)) is not None:
            _check_vector(scale, name, torch.Size((num_experts,)), torch.float32, device)
    if parts.expert_scale is not None and parts.row_scale is not None:
        raise ValueError("row_scale and expert_scale both scale the rows: pass one of them")
    if parts.out_scale is not None and (features % 16 or parts.out_dtype != torch.bfloat16):
        raise ValueError(
            f"out_scale rounds blocks of 16 features to bf16, got {features} features of "
            f"{parts.out_dtype}"
        )


def _check_vector(
    tensor: Tensor, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> None:
    """A tensor that the kernel reads by its address."""
    if (
        tensor.shape != shape
        or tensor.dtype != dtype
        or tensor.device != device
        or not tensor.is_contiguous()
    ):
        raise ValueError(
            f"{name} must be contiguous {dtype} {tuple(shape)} on {device}, got "
            f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
        )
