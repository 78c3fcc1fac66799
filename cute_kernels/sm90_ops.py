"""The Hopper operations on torch tensors: packed weights, staged rows, the grouped GEMM on them.

A door of its own: Hopper reads another weight layout than `cute_kernels.gemm_ops` (decoded in
registers, `cute_kernels.sm90.layout`) and multiplies bf16 rows. Registered with torch.library, safe
under CUDA graphs and torch.compile. Results go to tensors of the caller. CUDA tensors run the
kernels; CPU tensors run plain PyTorch with sums in fp64 (`sm90_plain`), the same values for tests
and for machines without a GPU. Importing this module does not import the DSL.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import activations, sm90_plain
from cute_kernels import compile as compiler
from cute_kernels.activations import Activation
from cute_kernels.gemm_ops import Availability
from cute_kernels.launch import (
    DSL_TYPES,
    FLOATS,
    Buffer,
    arch_of,
    check_matrix,
    check_out,
    check_vector,
    flat,
    launch,
    register,
)
from cute_kernels.nvfp4 import BLOCK, check_expert_offsets
from cute_kernels.sm90 import host
from cute_kernels.sm90.config import CONFIGS, DECODE, MIDDLE, Sm90Config, choose_config
from cute_kernels.sm90.layout import ALPHA_FACTOR
from cute_kernels.sm90.weights import (
    Sm90Weight,
    blob_shape,
    pack_expert,
    row_order,
    unpack_expert,
)

__all__ = [
    "Epilogue",
    "Sm90Weight",
    "Sums",
    "blob_shape",
    "config_name",
    "gathers_well",
    "gemm_scratch",
    "grouped_gemm",
    "pack_alpha",
    "pack_expert",
    "row_order",
    "sm90_available",
    "stage_rows",
    "unpack_expert",
    "warming_up",
]
_ARCH = host.ARCH
warming_up = compiler.warming_up
_CONFIGS = {c.name: c for c in CONFIGS}


def sm90_available(device: torch.device) -> Availability:
    """Can the kernels run on this GPU, or on CPU tensors (inside a simulator of ``sm_90a``)?"""
    if device.type == "cpu" and compiler.simulating() and compiler.simulated_arch() == _ARCH:
        return Availability(True, "the compiled kernels, simulated")
    if device.type != "cuda" or not torch.cuda.is_available():
        return Availability(False, "needs a Hopper GPU")
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        return Availability(False, f"needs compute capability (9, 0), this GPU has {capability}")
    found = compiler.status(capability)
    return Availability(found.ok, found.reason or f"{found.arch}: NVFP4 weights times bf16 rows")


def pack_alpha(global_scale: Tensor) -> Tensor:
    """fp32 (E, 1), or (E, 2) = (gate, up) -> `Sm90Weight.alpha` (E, 2)."""
    return global_scale.expand(-1, 2) * ALPHA_FACTOR


# ---- configurations


def config_name(num_rows: int, num_experts: int, batch_invariant: bool = False) -> str:
    """Name of the configuration for ``num_rows`` routed rows; with ``batch_invariant`` one of those
    that sum in the same order."""
    return choose_config(num_rows, num_experts, batch_invariant).name


def gathers_well(config: str) -> bool:
    """Is L1 with ``row_token`` faster than rows laid out expert-major first? Few rows: one launch
    less. Many: cp.async costs the main loop more than the copy (sm90/README.md)."""
    return config in (DECODE.name, MIDDLE.name)


def gemm_scratch(num_rows: int, weight: Sm90Weight, config: str) -> tuple[int, int]:
    """(int32 counters, fp32 partial sums) that `grouped_gemm` needs."""
    return host.scratch_sizes(weight.rows, weight.k, num_rows, _config(config))


def _config(name: str) -> Sm90Config:
    if name not in _CONFIGS:
        raise ValueError(f"config must be one of {sorted(_CONFIGS)}, got {name!r}")
    return _CONFIGS[name]


# ---- rows


def stage_rows(
    x: Tensor,
    expert_offsets: Tensor,
    values: Tensor,
    gx: Tensor | None,
    *,
    row_token: Tensor | None = None,
    token_rows: Tensor | None = None,
    outer: Tensor | None = None,
    row_scale: Tensor | None = None,
) -> None:
    """Routed rows as bf16, expert-major: rounded to NVFP4 (values without the outer scale), or,
    without ``gx``, to bf16.

    x               (T, K) bf16, fp16 or fp32, K a multiple of 16; strided rows are copied first
    expert_offsets  int32 (E+1,); rows of ``values`` past expert_offsets[E] are not written
    values, gx      written: bf16 (R, K), and fp32 (R,): the outer scale of each row
    row_token       int32 (R,): token of each row; None: row r of x, R = T
    token_rows      int32 (T, slots), R = T * slots, instead of row_token: the rows of each token,
                    negative where a slot has none; every token is read and rounded once
    outer           None: one scale per row from its amax; fp32 with one element, or one per expert
                    (E,) when row_token is None
    row_scale       fp32 (T,): x is multiplied by it first, in fp32

    Raises TypeError or ValueError before anything is launched.
    """
    torch.ops.nvfp4_megamoe.sm90_stage_rows(
        x, expert_offsets, row_token, token_rows, outer, row_scale, values, gx
    )


def _check_stage(
    x: Tensor,
    offsets: Tensor,
    row_token: Tensor | None,
    token_rows: Tensor | None,
    outer: Tensor | None,
    row_scale: Tensor | None,
    values: Tensor,
    gx: Tensor | None,
) -> None:
    check_matrix(x, "x", FLOATS, BLOCK)
    check_expert_offsets(offsets, x.device)
    rows = x.shape[0] if row_token is None else row_token.shape[0]
    if row_token is not None:
        check_vector(row_token, "row_token", torch.int32, (), x.device)
    if token_rows is not None:
        _check_token_rows(token_rows, x, row_token)
        rows = token_rows.numel()
    if row_scale is not None:
        check_vector(row_scale, "row_scale", torch.float32, x.shape[0], x.device)
    if outer is not None:
        indexed = row_token is not None or token_rows is not None
        lengths = (1,) if indexed else (1, offsets.shape[0] - 1)
        check_vector(outer, "outer", torch.float32, lengths, x.device)
        if gx is None:
            raise ValueError("outer is the scale of quantised rows: pass gx, or no outer")
    buffers = [Buffer("values", (rows, x.shape[1]), torch.bfloat16)]
    outputs = [values]
    if gx is not None:
        buffers.append(Buffer("gx", (rows,), torch.float32))
        outputs.append(gx)
    check_out(outputs, buffers, x.device)


def _check_token_rows(token_rows: Tensor, x: Tensor, row_token: Tensor | None) -> None:
    if row_token is not None:
        raise ValueError("row_token and token_rows say the same: pass one of them")
    good = token_rows.dim() == 2 and token_rows.shape[0] == x.shape[0] and token_rows.shape[1] > 0
    if not good or token_rows.dtype != torch.int32 or token_rows.device != x.device:
        raise ValueError(
            f"token_rows must be int32 ({x.shape[0]}, slots) on {x.device}, got "
            f"{token_rows.dtype} {tuple(token_rows.shape)} on {token_rows.device}"
        )


def _stage_kernel(
    x: Tensor,
    offsets: Tensor,
    row_token: Tensor | None,
    token_rows: Tensor | None,
    outer: Tensor | None,
    row_scale: Tensor | None,
    values: Tensor,
    gx: Tensor | None,
) -> None:
    from cute_kernels.device.stage import StageRows

    ctas = values.shape[0] if token_rows is None else x.shape[0]
    if ctas == 0 or x.shape[0] == 0:
        return
    kernel = StageRows(
        hidden=x.shape[1],
        dtype=DSL_TYPES[x.dtype],
        given=outer is not None,
        weighted=row_scale is not None,
        quantised=gx is not None,
        indexed=row_token is not None,
        by_expert=outer is not None and outer.shape[0] != 1,
        slots=0 if token_rows is None else token_rows.shape[1],
    )
    places = offsets if token_rows is None else token_rows.contiguous()
    inputs = (flat(x), outer, row_scale, row_token, places)
    launch(kernel, x.device, *inputs, values, gx, ctas, offsets.shape[0] - 1)


# ---- the GEMM


class Epilogue(NamedTuple):
    """What becomes of a sum.

    activation    gated: out has rows / 2 features; None: the sum itself
    row_scale     fp32, one per row of x: multiplies the global scale
    bias          fp32 (E, rows) in packed row order (`row_order`), added after the scales
    expert_scale  fp32 (E,), instead of row_scale: one for all rows of an expert
    out_scale     fp32 (E,): outer scale with which the output is rounded to NVFP4; bf16, what
                  `stage_rows` makes of an fp32 output
    """

    activation: Activation | None = None
    row_scale: Tensor | None = None
    bias: Tensor | None = None
    expert_scale: Tensor | None = None
    out_scale: Tensor | None = None


class Sums(NamedTuple):
    """How a GEMM sums, and the memory for it.

    config    `config_name`
    counters  int32, at least as many as `gemm_scratch` says: zero before the first call, and every
              call leaves zeros
    partial   fp32, as many as `gemm_scratch` says, anything
    """

    config: str
    counters: Tensor
    partial: Tensor


def grouped_gemm(
    x: Tensor,
    weight: Sm90Weight,
    expert_offsets: Tensor,
    out: Tensor,
    sums: Sums,
    *,
    epilogue: Epilogue | None = None,
    row_token: Tensor | None = None,
) -> None:
    """out[r] = epilogue(x[r] @ decode(weight[expert of r])^T); see `sm90.host.sm90_grouped_gemm`.

    x           bf16 (R, K), expert-major; with row_token (T, K)
    out         written: (R, rows), or (R, rows / 2) with a gated activation, bf16 or fp32; rows
                past expert_offsets[E] are not
    sums        `Sums`
    row_token   int32 (R,): routed row r reads x[row_token[r]]

    Raises TypeError or ValueError before anything is launched.
    """
    activation, row_scale, bias, expert_scale, out_scale = epilogue or Epilogue()
    name, numbers = ("", []) if activation is None else activations.spec(activation)
    torch.ops.nvfp4_megamoe.sm90_grouped_gemm(
        x,
        row_token,
        weight.blob,
        weight.alpha,
        expert_offsets,
        row_scale,
        bias,
        expert_scale,
        out_scale,
        weight.rows,
        name,
        numbers,
        sums.config,
        out,
        sums.counters,
        sums.partial,
    )


class _Gemm(NamedTuple):
    """Arguments of the operator, in order."""

    x: Tensor
    row_token: Tensor | None
    blob: Tensor
    alpha: Tensor
    offsets: Tensor
    row_scale: Tensor | None
    bias: Tensor | None
    expert_scale: Tensor | None
    out_scale: Tensor | None
    rows: int
    name: str
    numbers: list[float]
    config: str
    out: Tensor
    counters: Tensor
    partial: Tensor

    @property
    def activation(self) -> Activation | None:
        return activations.from_spec(self.name, tuple(self.numbers)) if self.name else None

    @property
    def weight(self) -> Sm90Weight:
        gated = bool(self.name) and activations.class_of(self.name).gated
        return Sm90Weight(self.blob, self.alpha, self.rows, self.x.shape[1], gated)


def _check_gemm(*args: Any) -> None:
    """What the fake implementation needs too; the rest is checked before the launch."""
    a = _Gemm(*args)
    check_matrix(a.x, "x", (torch.bfloat16,), BLOCK)
    check_expert_offsets(a.offsets, a.x.device)
    if a.out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out must be bfloat16 or float32, got {a.out.dtype}")
    count = a.x.shape[0]
    if a.row_token is not None:
        check_vector(a.row_token, "row_token", torch.int32, (), a.x.device)
        count = a.row_token.shape[0]
    shape = (count, a.rows // 2 if a.weight.gated else a.rows)
    check_out([a.out], [Buffer("out", shape, a.out.dtype)], a.x.device)
    _config(a.config)


def _gemm_kernel(*args: Any) -> None:
    a = _Gemm(*args)
    if arch_of(a.x.device) != _ARCH:
        where = "the simulated device" if a.x.device.type == "cpu" else a.x.device
        raise ValueError(
            f"x is on {where}, no Hopper GPU: the kernel would not run there (a simulated one: "
            'sim.Simulator(arch="sm_90a"))'
        )
    host.sm90_grouped_gemm(
        flat(a.x),
        a.weight,
        a.offsets,
        row_token=a.row_token,
        activation=a.activation,
        row_scale=a.row_scale,
        bias=a.bias,
        expert_scale=a.expert_scale,
        out_scale=a.out_scale,
        out_dtype=a.out.dtype,
        config=_config(a.config),
        scratch=host.Sm90Scratch(a.counters, a.partial),
        out=a.out,
    )


def _plain_gemm(*args: Any) -> tuple[Tensor]:
    a = _Gemm(*args)
    x, row_scale = a.x, a.row_scale
    if a.row_token is not None:
        token = a.row_token.clamp(min=0).long()
        x, row_scale = x[token], None if row_scale is None else row_scale[token]
    parts = sm90_plain.Parts(a.activation, row_scale, a.bias, a.expert_scale, a.out_scale)
    return (sm90_plain.grouped_gemm(x, a.weight, a.offsets, a.out, parts),)


# ---- registration

register(
    "sm90_stage_rows(Tensor x, Tensor expert_offsets, Tensor? row_token, Tensor? token_rows, "
    "Tensor? outer, Tensor? row_scale, Tensor(a!) values, Tensor(b!)? gx)",
    _check_stage,
    sm90_plain.stage_rows,
    _stage_kernel,
)
register(
    "sm90_grouped_gemm(Tensor x, Tensor? row_token, Tensor blob, Tensor alpha, "
    "Tensor expert_offsets, Tensor? row_scale, Tensor? bias, Tensor? expert_scale, "
    "Tensor? out_scale, int rows, str activation, float[] numbers, str config, Tensor(a!) out, "
    "Tensor(b!) counters, Tensor(c!) partial)",
    _check_gemm,
    _plain_gemm,
    _gemm_kernel,
)
