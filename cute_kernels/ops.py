"""The operations on torch tensors: checked, registered with torch.library (namespace
``nvfp4_megamoe``), safe under CUDA graphs and torch.compile.

CUDA tensors run the kernels of `cute_kernels.device` on the stream and the device of the tensors;
CPU tensors run `cute_kernels.torch_ops`, or the kernels in the simulator while one is active.
Sizes of results depend on shapes alone, nothing waits for the device, zero tokens are valid
everywhere.

Every operation takes ``out``, the tensors that its ``*_buffers`` function lists, or allocates
them. GEMMs: `cute_kernels.gemm_ops`; of `Nvfp4Tensor`s: `cute_kernels.nvfp4_gemm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cute_kernels import nvfp4, torch_ops
from cute_kernels.device.sizes import piece_width, scale_pitch
from cute_kernels.gemm_ops import grouped_gemm_act_quant, grouped_gemm_scatter_add
from cute_kernels.hidden_ops import quantize_hidden, row_hidden_buffers
from cute_kernels.launch import (
    ALIGNMENT,
    DSL_TYPES,
    FLOATS,
    Buffer,
    Written,
    allocate,
    arch_of,
    check_count,
    check_matrix,
    check_out,
    check_rows,
    check_vector,
    check_written,
    flat,
    grouped_scales,
    launch,
    pitched,
    register,
)
from cute_kernels.nvfp4 import BLOCK, TILE_ROWS
from cute_kernels.nvfp4_gemm import blockscaled_gemm, grouped_gemm

__all__ = [
    "Buffer",
    "allocate",
    "blockscaled_gemm",
    "check_routing",
    "combine",
    "grouped_gemm",
    "grouped_gemm_act_quant",
    "grouped_gemm_scatter_add",
    "permute_quantized_rows",
    "quantize_hidden",
    "quantize_rows",
    "row_hidden_buffers",
    "sort_routes",
]

ONE_CTA_PAIRS = 1024  # routes that one CTA sorts before another one joins
MAX_SORT_CTAS = 64
MAX_EXPERTS = 16384  # whose counters fit the shared memory of a CTA


# ---- public functions


def quantize_rows(
    x: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None = None,
    global_scale: Tensor | str = "per_token",
    row_scale: Tensor | None = None,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise tokens to NVFP4: codes once per token, block scales once per routed row (numerics
    section 2).

    x               (T, K) bf16, fp16 or fp32, K a multiple of 16; strided rows are copied first
    expert_offsets  int32 (E+1,): routed rows of expert e are expert_offsets[e] :
                    expert_offsets[e+1]
    row_token       int32 (R,): token of each routed row. None: x itself is expert-major, R = T,
                    and rows past expert_offsets[E] are not quantised
    global_scale    'per_token' (amax of the row / 2688), 'per_tensor', or fp32 with one element or
                    (T,)
    row_scale       fp32 (T,): x is multiplied by it first (top-k weights on the input)

    Returns data uint8 (T, K/2); scale uint8 (grouped_scale_rows(R, E), K/16 padded to 4) in
    SWIZZLE_32_4_4_GROUPED, padding bytes 0 (tiles past the last expert's are not written); gx fp32
    (T,).
    Raises TypeError or ValueError before anything is allocated.
    """
    given: Tensor | None
    if isinstance(global_scale, str):
        if global_scale not in ("per_token", "per_tensor"):
            raise ValueError(
                f"global_scale must be 'per_token', 'per_tensor' or a tensor, got {global_scale!r}"
            )
        given = None
        if global_scale == "per_tensor":
            values = x if row_scale is None else x.float() * row_scale[:, None]
            amax = values.abs().amax() if x.numel() else x.new_zeros(())
            largest = torch.full_like(amax, nvfp4.E2M1_MAX * nvfp4.UE4M3_MAX, dtype=torch.float32)
            given = (amax.float() / largest).reshape(1)  # by a number: CUDA rounds it otherwise
    else:
        given = global_scale.reshape(-1)
    if out is None:
        _check_quantize(x, expert_offsets, row_token, given, row_scale)
        tokens, hidden = x.shape
        routed = tokens if row_token is None else row_token.shape[0]
        buffers = quantize_buffers(tokens, hidden, routed, expert_offsets.shape[0] - 1)
        out = allocate(buffers, x.device)
    data, scale, gx, scratch = check_count(out, ("x_data", "x_scale", "gx", "x_row_scale"))
    _quantize_rows_op(x, expert_offsets, row_token, given, row_scale, data, scale, gx, scratch)
    return data, scale, gx


def quantize_buffers(tokens: int, hidden: int, routed: int, experts: int) -> list[Buffer]:
    """What `quantize_rows` writes: its three results and its scratch memory."""
    return [Buffer(*b) for b in _quantized(tokens, hidden, routed, experts)]


def _quantized(tokens: int, hidden: int, routed: int, experts: int) -> tuple[Written, ...]:
    return (
        ("x_data", (tokens, hidden // 2), torch.uint8),
        grouped_scales("x_scale", routed, experts, hidden),
        ("gx", (tokens,), torch.float32),
        ("x_row_scale", (tokens, scale_pitch(hidden)), torch.uint8),
    )


def sort_routes(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    pad_rows: int = 0,
    out: Sequence[Tensor] | None = None,
    counter: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort (token, slot) pairs by local expert, stably, on the device.

    topk_ids      (T, K) int32 or int64, global ids; ids < 0, >= num_experts, or outside
                  first_expert : first_expert + num_local_experts have no row here. Tokens may be
                  apart, as on the wire between ranks: a kernel of its own reads them there
    topk_weights  (T, K) floating point
    pad_rows      further entries of row_token and row_weight, for loads past the last routed row
    counter       int32 (1,) or (2,), set to 0: that of `gemm_ops.WorkItems`, or those of
                  `sm90_ops.Sums`

    Returns expert_offsets int32 (E+1,); row_token int32 and row_weight fp32 (T*K + pad_rows,), -1
    and 0 past the last routed row; token_rows int32 (T, K), -1 where a slot has no row.
    Raises TypeError or ValueError before anything is allocated.
    """
    local = num_experts - first_expert if num_local_experts is None else num_local_experts
    if out is None:
        _check_sort(topk_ids, topk_weights, num_experts, first_expert, local, pad_rows)
        tokens, slots = topk_ids.shape
        out = allocate(sort_buffers(tokens, slots, local, pad_rows), topk_ids.device)
    offsets, row_token, row_weight, token_rows, counts = check_count(
        out, ("expert_offsets", "row_token", "row_weight", "token_rows", "sort_counts")
    )
    results = (offsets, row_token, row_weight, token_rows)
    _sort_routes_op(topk_ids, topk_weights, num_experts, first_expert, *results, counter, counts)
    return results


def sort_buffers(tokens: int, slots: int, experts: int, pad_rows: int = 0) -> list[Buffer]:
    """What `sort_routes` writes for ``experts`` local ones: its four results and its scratch."""
    return [Buffer(*b) for b in _sorted(tokens, slots, experts, pad_rows)]


def _sorted(tokens: int, slots: int, experts: int, pad_rows: int) -> tuple[Written, ...]:
    rows, i32 = tokens * slots + pad_rows, torch.int32
    ctas = _sort_ctas(tokens * slots)
    return (
        ("expert_offsets", (experts + 1,), i32),
        ("row_token", (rows,), i32),
        ("row_weight", (rows,), torch.float32),
        ("token_rows", (tokens, slots), i32),
        ("sort_counts", (ctas if ctas > 1 else 0, experts), i32),
    )


def _sort_ctas(pairs: int) -> int:
    return min(-(-pairs // ONE_CTA_PAIRS), MAX_SORT_CTAS)


def combine(
    rows: Tensor,
    token_rows: Tensor,
    weights: Tensor | None = None,
    shared: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    lost: Tensor | None = None,
) -> Tensor:
    """y[t] = ((w0 * rows[r0]) + (w1 * rows[r1])) + ... + shared[t], r_j = token_rows[t, j], slots
    in order.

    rows        (R, H) bf16, fp16 or fp32, H a multiple of 8
    token_rows  int32 (T, K), negative = this slot adds nothing
    weights     fp32 (T, K); None: a plain sum
    shared      (T, H): added last
    out_dtype   default: dtype of rows
    lost        bool (T,): y of these tokens is NaN

    fp32, each product and each sum rounded: the same bits in any batch. A token without a slot
    gets exactly 0 (plus its shared row). Raises TypeError or ValueError before anything is
    allocated.
    """
    if out is None:
        _check_combine(rows, token_rows, weights, shared, out_dtype or rows.dtype, lost)
        shape = (token_rows.shape[0], rows.shape[1])
        out = torch.empty(shape, dtype=out_dtype or rows.dtype, device=rows.device)
    _combine_op(rows, token_rows, weights, shared, lost, out)
    return out


def permute_quantized_rows(
    data: Tensor,
    scale: Tensor,
    gx: Tensor,
    row_token: Tensor,
    expert_offsets: Tensor,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay quantised rows that came from other ranks expert-major.

    data            uint8 (N, K/2) codes; scale uint8 or float8_e4m3fn (N, K/16) row-major; gx fp32
                    (N,); rows may be apart, as on the wire between ranks
    row_token       int32 (R,): input row of each routed row
    expert_offsets  int32 (E+1,)

    Returns data (R, K/2), scale in SWIZZLE_32_4_4_GROUPED with padding bytes 0, gx (R,). Rows past
    expert_offsets[E] are not written. Raises TypeError or ValueError before anything is allocated.
    """
    scale = scale.view(torch.uint8)
    if out is None:
        _check_permute(data, scale, gx, row_token, expert_offsets)
        routed, experts = row_token.shape[0], expert_offsets.shape[0] - 1
        out = allocate(permute_buffers(data.shape[1] * 2, routed, experts), data.device)
    rows, grouped, row_gx = check_count(out, ("row_data", "row_scale", "row_gx"))
    _permute_quantized_rows_op(data, scale, gx, row_token, expert_offsets, rows, grouped, row_gx)
    return rows, grouped, row_gx


def permute_buffers(hidden: int, routed: int, experts: int) -> list[Buffer]:
    """What `permute_quantized_rows` writes."""
    return [
        Buffer("row_data", (routed, hidden // 2), torch.uint8),
        Buffer(*grouped_scales("row_scale", routed, experts, hidden)),
        Buffer("row_gx", (routed,), torch.float32),
    ]


# ---- checks


def _check_quantize(
    x: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    given: Tensor | None,
    row_scale: Tensor | None,
) -> None:
    check_matrix(x, "x", FLOATS, BLOCK)
    nvfp4.check_expert_offsets(expert_offsets, x.device)
    check_rows(x.shape[0], "rows of x")
    if row_token is not None:
        check_vector(row_token, "row_token", torch.int32, (), x.device)
        check_rows(row_token.shape[0], "routed rows")
    if given is not None:
        check_vector(given, "global_scale", torch.float32, (1, x.shape[0]), x.device)
    if row_scale is not None:
        check_vector(row_scale, "row_scale", torch.float32, x.shape[0], x.device)


def _check_quantize_out(x: Tensor, offsets: Tensor, row_token: Any, *rest: Any) -> None:
    _check_quantize(x, offsets, row_token, *rest[:2])
    routed = x.shape[0] if row_token is None else row_token.shape[0]
    tokens, hidden = x.shape
    check_out(rest[2:], _quantized(tokens, hidden, routed, offsets.shape[0] - 1), x.device)


def check_routing(topk_ids: Tensor, topk_weights: Tensor) -> None:
    """Raises TypeError or ValueError unless ids are int32/int64 (T, K) and weights floats of the
    same shape and device. Strided views are fine."""
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"topk_ids must be int32 or int64, got {topk_ids.dtype}")
    if not topk_weights.dtype.is_floating_point:
        raise TypeError(f"topk_weights must be floating point, got {topk_weights.dtype}")
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape:
        raise ValueError(
            f"topk_ids and topk_weights must both be (T, K), got {tuple(topk_ids.shape)} and "
            f"{tuple(topk_weights.shape)}"
        )
    if topk_ids.device != topk_weights.device:
        raise ValueError(
            f"topk_ids are on {topk_ids.device}, topk_weights on {topk_weights.device}"
        )


def _check_sort(
    ids: Tensor, weights: Tensor, num_experts: int, first: int, local: int, pad: int
) -> None:
    check_routing(ids, weights)
    if not (first >= 0 and 1 <= local <= MAX_EXPERTS and first + local <= num_experts):
        raise ValueError(
            f"local experts must be 1 to {MAX_EXPERTS} of the {num_experts} experts, got "
            f"{first} : {first + local}"
        )
    if pad < 0:
        raise ValueError(f"pad_rows must not be negative, got {pad}")
    check_rows(ids.shape[0] * ids.shape[1] + pad, "T * K + pad_rows")


def _check_sort_out(ids: Tensor, weights: Tensor, num_experts: int, first: int, *rest: Any) -> None:
    *out, counter, counts = rest
    if counter is not None:
        check_vector(counter, "counter", torch.int32, min(counter.numel(), 2) or 1, ids.device)
    local, pad = out[0].shape[0] - 1, out[1].shape[0] - ids.numel()
    _check_sort(ids, weights, num_experts, first, local, pad)
    tokens, slots = ids.shape
    check_out((*out, counts), _sorted(tokens, slots, local, pad), ids.device)


def _check_combine(
    rows: Tensor,
    token_rows: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    out_dtype: torch.dtype,
    lost: Tensor | None,
) -> None:
    check_matrix(rows, "rows", FLOATS, 8)
    if out_dtype not in FLOATS:
        raise TypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if token_rows.dtype != torch.int32:
        raise TypeError(f"token_rows must be int32, got {token_rows.dtype}")
    if token_rows.dim() != 2 or token_rows.shape[1] == 0:
        raise ValueError(f"token_rows must be (T, K) with K >= 1, got {tuple(token_rows.shape)}")
    tensors = {"token_rows": token_rows}
    if weights is not None:
        tensors["weights"] = weights
        if weights.dtype != torch.float32 or weights.shape != token_rows.shape:
            raise ValueError(
                f"weights must be float32 {tuple(token_rows.shape)}, got {tuple(weights.shape)} "
                f"{weights.dtype}"
            )
    if shared is not None:
        tensors["shared"] = shared
        check_matrix(shared, "shared", FLOATS, 8)
        if tuple(shared.shape) != (token_rows.shape[0], rows.shape[1]):
            raise ValueError(
                f"shared must be {(token_rows.shape[0], rows.shape[1])}, got {tuple(shared.shape)}"
            )
    for name, tensor in tensors.items():
        if tensor.device != rows.device:
            raise ValueError(f"{name} is on {tensor.device}, rows are on {rows.device}")
    if lost is not None:
        check_vector(lost, "lost", torch.bool, token_rows.shape[0], rows.device)


def _check_combine_out(rows: Tensor, token_rows: Tensor, *rest: Any) -> None:
    weights, shared, lost, y = rest
    _check_combine(rows, token_rows, weights, shared, y.dtype, lost)
    check_written(y, "y", (token_rows.shape[0], rows.shape[1]), y.dtype, rows.device)


def _check_permute(
    data: Tensor,
    scale: Tensor,
    gx: Tensor,
    row_token: Tensor,
    expert_offsets: Tensor,
) -> None:
    check_matrix(data, "data", (torch.uint8,), BLOCK // 2)
    if scale.dtype != torch.uint8:
        raise TypeError(f"scale must be uint8 or float8_e4m3fn, got {scale.dtype}")
    expected = (data.shape[0], data.shape[1] * 2 // BLOCK)
    if tuple(scale.shape) != expected or scale.device != data.device:
        raise ValueError(
            f"scale must be row-major {expected} on {data.device}, got {tuple(scale.shape)} on "
            f"{scale.device}"
        )
    check_vector(gx, "gx", torch.float32, data.shape[0], data.device)
    check_vector(row_token, "row_token", torch.int32, (), data.device)
    nvfp4.check_expert_offsets(expert_offsets, data.device)
    check_rows(max(data.shape[0], row_token.shape[0]), "rows")


def _check_permute_out(data: Tensor, scale: Tensor, gx: Tensor, *rest: Tensor) -> None:
    row_token, offsets, *out = rest
    _check_permute(data, scale, gx, row_token, offsets)
    buffers = permute_buffers(data.shape[1] * 2, row_token.shape[0], offsets.shape[0] - 1)
    check_out(out, buffers, data.device)


# ---- launching


def _quantize_rows_of(
    hidden: int, dtype: torch.dtype, given: bool, weighted: bool, bounded: bool, hardware: bool
) -> Any:
    from cute_kernels.device.quantize import QuantizeRows

    return QuantizeRows(hidden, DSL_TYPES[dtype], given, weighted, bounded, hardware)


def _group_scales(groups: int, pitch: int, indexed: bool) -> Any:
    from cute_kernels.device.quantize import GroupScales

    return GroupScales(groups, pitch, indexed)


def _quantize_rows_kernel(
    x: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    given: Tensor | None,
    row_scale: Tensor | None,
    *out: Tensor,
) -> None:
    data, grouped, gx, scale = out
    tokens, hidden = x.shape
    experts = expert_offsets.shape[0] - 1
    if tokens == 0:
        grouped.zero_()
        return
    x, expert_offsets = flat(x), expert_offsets.contiguous()
    flags = (given is not None, row_scale is not None, row_token is None)
    kernel = (_quantize_rows_of, hidden, x.dtype, *flags, arch_of(x.device) != "sm_90a")
    limit = expert_offsets[experts:] if row_token is None else None
    stride = 0 if given is not None and given.shape[0] == 1 else 1
    launch(kernel, x.device, x, given, row_scale, limit, data, scale, gx, tokens, stride)
    if grouped.numel():
        tiles = grouped.shape[0] // TILE_ROWS
        group = (_group_scales, hidden // BLOCK, scale_pitch(hidden), row_token is not None)
        launch(group, x.device, scale, row_token, expert_offsets, grouped, experts, tiles)


def _count_routes(experts: int, ids: torch.dtype, *apart: Any) -> Any:
    from cute_kernels.device.routing import CountRoutes

    return CountRoutes(experts, DSL_TYPES[ids], *apart)


def _sort_routes_of(experts: int, ids: torch.dtype, *flags: Any) -> Any:
    from cute_kernels.device.routing import SortRoutes

    return SortRoutes(experts, DSL_TYPES[ids], *flags)


def _sort_routes_kernel(
    ids: Tensor, weights: Tensor, num_experts: int, first: int, *out: Any
) -> None:
    offsets, row_token, row_weight, _, counter, counts = out
    slots, local = ids.shape[1], offsets.shape[0] - 1
    pairs, rows = ids.shape[0] * slots, row_token.shape[0]
    if pairs == 0:
        offsets.zero_()
        row_token.fill_(-1)
        row_weight.zero_()
        if counter is not None:
            counter.zero_()
        return
    weights = weights.float().contiguous()
    apart = not ids.is_contiguous() and ids.stride(1) == 1 and ids.stride(0) > 0
    ids = ids if apart else ids.contiguous()
    pitch = ids.stride(0)
    ctas, device = _sort_ctas(pairs), ids.device
    spread = ctas > 1
    if spread:
        count = (_count_routes, local, ids.dtype, *((slots, True) if apart else ()))
        launch(count, device, ids, pitch, counts, pairs, ctas, first, num_experts)
    counters = 0 if counter is None else counter.numel()
    kernel = (_sort_routes_of, local, ids.dtype, slots, apart, spread, counters)
    inputs = (ids, weights, counts if spread else None, first, num_experts, pitch)
    launch(kernel, device, *inputs, *out[:5], pairs, rows, ctas)


def _combine_of(
    hidden: int, slots: int, dtypes: tuple[torch.dtype | None, ...], weighted: bool, lossy: bool
) -> Any:
    """``dtypes``: of rows, y and shared."""
    from cute_kernels.device.combine import Combine

    rows, y, shared = ("" if dtype is None else DSL_TYPES[dtype] for dtype in dtypes)
    return Combine(hidden, slots, rows, y, shared, weighted, lossy)


def _combine_kernel(rows: Tensor, token_rows: Tensor, *rest: Any) -> None:
    weights, shared, lost, y = rest
    tokens, slots = token_rows.shape
    if tokens == 0:
        return
    dtypes = (rows.dtype, y.dtype, None if shared is None else shared.dtype)
    flags = (weights is not None, lost is not None)
    kernel = (_combine_of, rows.shape[1], slots, dtypes, *flags)
    rows, token_rows = flat(rows), token_rows.contiguous()
    weights = None if weights is None else weights.contiguous()
    shared = None if shared is None else flat(shared)
    lost = None if lost is None else lost.contiguous()
    launch(kernel, rows.device, rows, token_rows, weights, shared, lost, y, tokens)


def _permute_rows(row_bytes: int, *pitches: int) -> Any:
    from cute_kernels.device.combine import PermuteRows

    return PermuteRows(row_bytes, *pitches)


def _permute_kernel(
    data: Tensor,
    scale: Tensor,
    gx: Tensor,
    row_token: Tensor,
    expert_offsets: Tensor,
    *out: Tensor,
) -> None:
    rows, grouped, row_gx = out
    routed, experts = row_token.shape[0], expert_offsets.shape[0] - 1
    if routed == 0 or data.shape[0] == 0:
        grouped.zero_()
        return
    row_bytes = data.shape[1]
    data, *rest = pitched(data, ALIGNMENT if row_bytes % ALIGNMENT == 0 else 8)
    scale, pitch = pitched(scale, piece_width(scale.shape[1]))
    gx, gx_pitch = pitched(gx, 4)
    inputs = (data, gx, scale)
    plan = (row_token.contiguous(), expert_offsets.contiguous())
    sizes = (routed, experts, grouped.shape[0] // TILE_ROWS)
    kernel = (_permute_rows, row_bytes, *rest, pitch, gx_pitch)
    launch(kernel, data.device, *inputs, *plan, rows, row_gx, grouped, *sizes)


# ---- registration


def _plain_sort(ids: Tensor, weights: Tensor, experts: int, first: int, *out: Tensor) -> Any:
    local, rows, counter = out[0].shape[0] - 1, out[1].shape[0], out[4]
    zeros = torch.zeros(1 if counter is None else counter.numel(), dtype=torch.int32)
    return (*torch_ops.sort_routes(ids, weights, experts, first, local, rows), zeros.to(ids.device))


def _plain_combine(rows: Tensor, token_rows: Tensor, *rest: Any) -> Any:
    weights, shared, lost, y = rest
    out = torch_ops.combine(rows, token_rows, weights, shared, y.dtype)
    return (out if lost is None else out.masked_fill_(lost.unsqueeze(1), torch.nan),)


_quantize_rows_op = register(
    "quantize_rows(Tensor x, Tensor expert_offsets, Tensor? row_token, Tensor? global_scale, "
    "Tensor? row_scale, Tensor(a!) data, Tensor(b!) scale, Tensor(c!) gx, Tensor(d!) scratch)",
    _check_quantize_out,
    lambda *args: torch_ops.quantize_rows(*args[:5]),
    _quantize_rows_kernel,
)
_sort_routes_op = register(
    "sort_routes(Tensor topk_ids, Tensor topk_weights, int num_experts, int first_expert, "
    "Tensor(a!) expert_offsets, Tensor(b!) row_token, Tensor(c!) row_weight, "
    "Tensor(d!) token_rows, Tensor(e!)? counter, Tensor(f!) scratch)",
    _check_sort_out,
    _plain_sort,
    _sort_routes_kernel,
)
_combine_op = register(
    "combine(Tensor rows, Tensor token_rows, Tensor? weights, Tensor? shared, Tensor? lost, "
    "Tensor(a!) y)",
    _check_combine_out,
    _plain_combine,
    _combine_kernel,
)
_permute_quantized_rows_op = register(
    "permute_quantized_rows(Tensor data, Tensor scale, Tensor gx, Tensor row_token, "
    "Tensor expert_offsets, Tensor(a!) rows, Tensor(b!) row_scale, Tensor(c!) row_gx)",
    _check_permute_out,
    lambda *args: torch_ops.permute_quantized_rows(*args[:5]),
    _permute_kernel,
)
