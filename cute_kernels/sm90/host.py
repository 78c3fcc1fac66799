"""Torch in, torch out for the SM90 grouped GEMM: checks, scratch memory, choice of configuration,
launch."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels.activations import Activation
from cute_kernels.nvfp4 import check_expert_offsets
from cute_kernels.sm90 import layout
from cute_kernels.sm90.config import Sm90Config, choose_config, chunk_steps
from cute_kernels.sm90.weights import Sm90Weight

ARCH = "sm_90a"


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
    activation: Activation | None = None,
    row_scale: Tensor | None = None,
    bias: Tensor | None = None,
    config: Sm90Config | None = None,
    scratch: Sm90Scratch | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """out[r] = epilogue(x[r] @ decode(weight[expert of r])^T), bf16.

    x               bf16 (num_rows, K), contiguous, rows expert-major
    expert_offsets  int32 (E + 1,): rows of expert e are expert_offsets[e] : expert_offsets[e + 1];
                    rows past the last are not written
    activation      None: out (num_rows, rows) = acc * alpha. Gated: out (num_rows, rows / 2) =
                    act(gate, up); not gated: out (num_rows, rows) = act(acc * alpha)
    row_scale       float32 (num_rows,): multiplies alpha (outer scale of quantised activations)
    bias            float32 (E, rows) in packed row order (`weights.row_order`): added after alpha
    config          None: chosen from num_rows; results of two configs differ in the last bits, see
                    README.md
    scratch         None: allocated here

    Nothing is read back from the device. Raises ValueError for shapes, dtypes or devices that
    disagree.
    """
    num_rows, features = _check(x, weight, expert_offsets, activation, row_scale, bias)
    if config is None:
        config = choose_config(num_rows, weight.num_experts)
    counters, partial = scratch_sizes(weight.rows, weight.k, num_rows, config)
    if scratch is None:
        scratch = Sm90Scratch.for_calls(x.device, counters, partial)
    elif scratch.counters.numel() < counters or scratch.partial.numel() < partial:
        raise ValueError(
            f"scratch has {scratch.counters.numel()} counters and {scratch.partial.numel()} "
            f"partial sums, this call needs {counters} and {partial}"
        )
    if out is None:
        out = torch.empty((num_rows, features), dtype=torch.bfloat16, device=x.device)
    elif (
        tuple(out.shape) != (num_rows, features)
        or out.dtype != torch.bfloat16
        or not out.is_contiguous()
    ):
        raise ValueError(
            f"out must be contiguous bf16 ({num_rows}, {features}), got {tuple(out.shape)} "
            f"{out.dtype}"
        )
    if num_rows == 0:
        return out
    launch = compiler.load(
        _kernel(config, activation, row_scale is not None, bias is not None), ARCH
    )
    pointers = [
        t.data_ptr()
        for t in (weight.blob, x, out, expert_offsets, scratch.counters, scratch.partial)
    ]
    optional = [t.data_ptr() for t in (row_scale, bias) if t is not None]
    properties = torch.cuda.get_device_properties(x.device)
    sizes = (weight.num_experts, num_rows, weight.k, weight.rows, chunk_steps(weight.k, config))
    ctas = properties.multi_processor_count * config.ctas_per_sm
    stream = torch.cuda.current_stream(x.device).cuda_stream
    with torch.cuda.device(x.device):
        launch(*pointers, *sizes, ctas, weight.alpha.data_ptr(), *optional, stream)
    return out


def _kernel(
    config: Sm90Config, activation: Activation | None, row_scale: bool, bias: bool
) -> object:
    from cute_kernels.sm90.epilogues import Activate, StoreRows
    from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm

    if activation is None:
        return Sm90GroupedGemm(StoreRows(row_scale, bias), config)
    return Sm90GroupedGemm(Activate(row_scale, bias, activation), config)


def _check(
    x: Tensor,
    weight: Sm90Weight,
    expert_offsets: Tensor,
    activation: Activation | None,
    row_scale: Tensor | None,
    bias: Tensor | None,
) -> tuple[int, int]:
    if x.dim() != 2 or x.dtype != torch.bfloat16 or x.shape[1] != weight.k or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous bf16 (num_rows, {weight.k}), got {tuple(x.shape)} {x.dtype}"
        )
    check_expert_offsets(expert_offsets, x.device)
    if expert_offsets.numel() != weight.num_experts + 1 or weight.device != x.device:
        raise ValueError(
            f"weight has {weight.num_experts} experts on {weight.device}; expert_offsets has "
            f"{expert_offsets.numel()} entries and x is on {x.device}"
        )
    num_rows = x.shape[0]
    gated = activation is not None and activation.gated
    if gated != weight.gated:
        raise ValueError(
            f"activation {activation} needs weights packed with gated={gated}, got "
            f"gated={weight.gated}"
        )
    if row_scale is not None and (
        tuple(row_scale.shape) != (num_rows,) or row_scale.dtype != torch.float32
    ):
        raise ValueError(
            f"row_scale must be float32 ({num_rows},), got {tuple(row_scale.shape)} "
            f"{row_scale.dtype}"
        )
    if bias is not None and (
        tuple(bias.shape) != (weight.num_experts, weight.rows) or bias.dtype != torch.float32
    ):
        raise ValueError(
            f"bias must be float32 ({weight.num_experts}, {weight.rows}), got {tuple(bias.shape)} "
            f"{bias.dtype}"
        )
    features = weight.rows // 2 if gated else weight.rows
    if features % 8 or weight.k % 16 or weight.rows % 16:
        raise ValueError(
            f"weight rows {weight.rows} must be a multiple of 16, K {weight.k} of 16 and output "
            f"features {features} of 8"
        )
    return num_rows, features
