"""The operations on torch tensors: checked, registered with torch.library (namespace
``nvfp4_megamoe``), safe under CUDA graphs and torch.compile.

CUDA tensors run the kernels of `cute_kernels.device` on the stream and the device of the tensors;
CPU tensors run `cute_kernels.torch_ops`, or the kernels in the simulator while one is active.
Sizes of results depend on shapes alone, nothing waits for the device, zero tokens are valid
everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, torch_ops
from cute_kernels.nvfp4 import BLOCK, TILE_GROUPS, TILE_ROWS, grouped_scale_rows

_NAMESPACE = "nvfp4_megamoe"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_DSL_TYPES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float32: "Float32",
    torch.int32: "Int32",
    torch.int64: "Int64",
}
_INT32_ROWS = 2**31  # row indices are int32
ONE_CTA_PAIRS = 1024  # routes that one CTA sorts before another one joins
MAX_SORT_CTAS = 64
MAX_EXPERTS = 16384  # whose counters fit the shared memory of a CTA

_library = torch.library.Library(_NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


# ---- public functions


def quantize_rows(
    x: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None = None,
    global_scale: Tensor | str = "per_token",
    row_scale: Tensor | None = None,
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
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.nvfp4_megamoe.quantize_rows(
        x, expert_offsets, row_token, given, row_scale
    )
    return out


def sort_routes(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    pad_rows: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort (token, slot) pairs by local expert, stably, on the device.

    topk_ids      (T, K) int32 or int64, global ids; ids < 0, >= num_experts, or outside
                  first_expert : first_expert + num_local_experts have no row here
    topk_weights  (T, K) floating point
    pad_rows      further entries of row_token and row_weight, for loads past the last routed row

    Returns expert_offsets int32 (E+1,); row_token int32 and row_weight fp32 (T*K + pad_rows,), -1
    and 0 past the last routed row; token_rows int32 (T, K), -1 where a slot has no row.
    Raises TypeError or ValueError before anything is allocated.
    """
    local = num_experts - first_expert if num_local_experts is None else num_local_experts
    out: tuple[Tensor, Tensor, Tensor, Tensor] = torch.ops.nvfp4_megamoe.sort_routes(
        topk_ids, topk_weights, num_experts, first_expert, local, pad_rows
    )
    return out


def combine(
    rows: Tensor,
    token_rows: Tensor,
    weights: Tensor | None = None,
    shared: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y[t] = ((w0 * rows[r0]) + (w1 * rows[r1])) + ... + shared[t], r_j = token_rows[t, j], slots
    in order.

    rows        (R, H) bf16, fp16 or fp32, H a multiple of 8
    token_rows  int32 (T, K), negative = this slot adds nothing
    weights     fp32 (T, K); None: a plain sum
    shared      (T, H): added last
    out_dtype   default: dtype of rows

    fp32, each product and each sum rounded: the same bits in any batch. A token without a slot
    gets exactly 0 (plus its shared row). Raises TypeError or ValueError before anything is
    allocated.
    """
    out: Tensor = torch.ops.nvfp4_megamoe.combine(
        rows, token_rows, weights, shared, rows.dtype if out_dtype is None else out_dtype
    )
    return out


def permute_quantized_rows(
    data: Tensor, scale: Tensor, gx: Tensor, row_token: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Lay quantised rows that came from other ranks expert-major.

    data            uint8 (N, K/2) codes; scale uint8 or float8_e4m3fn (N, K/16) row-major; gx fp32
                    (N,)
    row_token       int32 (R,): input row of each routed row
    expert_offsets  int32 (E+1,)

    Returns data (R, K/2), scale in SWIZZLE_32_4_4_GROUPED with padding bytes 0, gx (R,). Rows past
    expert_offsets[E] are not written. Raises TypeError or ValueError before anything is allocated.
    """
    out: tuple[Tensor, Tensor, Tensor] = torch.ops.nvfp4_megamoe.permute_quantized_rows(
        data, scale.view(torch.uint8), gx, row_token, expert_offsets
    )
    return out


# ---- checks, shared by real and fake implementations


def _check_matrix(x: Tensor, name: str, dtypes: tuple[torch.dtype, ...], multiple: int) -> None:
    if x.dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] % multiple or x.shape[1] == 0:
        raise ValueError(
            f"{name} must be (rows, columns) with columns a multiple of {multiple}, got "
            f"{tuple(x.shape)}"
        )


def _check_vector(
    v: Tensor, name: str, dtype: torch.dtype, length: int | tuple[int, ...], device: torch.device
) -> None:
    if v.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {v.dtype}")
    lengths = length if isinstance(length, tuple) else (length,)
    if v.dim() != 1 or (lengths and v.shape[0] not in lengths):
        wanted = " or ".join(f"({n},)" for n in lengths) or "one-dimensional"
        raise ValueError(f"{name} must be {wanted}, got {tuple(v.shape)}")
    if v.device != device:
        raise ValueError(f"{name} is on {v.device}, the rows are on {device}")


def _check_rows(rows: int, what: str) -> None:
    if rows >= _INT32_ROWS:
        raise ValueError(f"{what} must be below 2^31 (row indices are int32), got {rows}")


def _check_quantize(
    x: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    given: Tensor | None,
    row_scale: Tensor | None,
) -> None:
    _check_matrix(x, "x", _FLOATS, BLOCK)
    nvfp4.check_expert_offsets(expert_offsets, x.device)
    _check_rows(x.shape[0], "rows of x")
    if row_token is not None:
        _check_vector(row_token, "row_token", torch.int32, (), x.device)
        _check_rows(row_token.shape[0], "routed rows")
    if given is not None:
        _check_vector(given, "global_scale", torch.float32, (1, x.shape[0]), x.device)
    if row_scale is not None:
        _check_vector(row_scale, "row_scale", torch.float32, x.shape[0], x.device)


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
    _check_rows(ids.shape[0] * ids.shape[1] + pad, "T * K + pad_rows")


def _check_combine(
    rows: Tensor,
    token_rows: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    _check_matrix(rows, "rows", _FLOATS, 8)
    if out_dtype not in _FLOATS:
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
        _check_matrix(shared, "shared", _FLOATS, 8)
        if tuple(shared.shape) != (token_rows.shape[0], rows.shape[1]):
            raise ValueError(
                f"shared must be {(token_rows.shape[0], rows.shape[1])}, got {tuple(shared.shape)}"
            )
    for name, tensor in tensors.items():
        if tensor.device != rows.device:
            raise ValueError(f"{name} is on {tensor.device}, rows are on {rows.device}")


def _check_permute(
    data: Tensor, scale: Tensor, gx: Tensor, row_token: Tensor, expert_offsets: Tensor
) -> None:
    _check_matrix(data, "data", (torch.uint8,), BLOCK // 2)
    if scale.dtype != torch.uint8:
        raise TypeError(f"scale must be uint8 or float8_e4m3fn, got {scale.dtype}")
    expected = (data.shape[0], data.shape[1] * 2 // BLOCK)
    if tuple(scale.shape) != expected or scale.device != data.device:
        raise ValueError(
            f"scale must be row-major {expected} on {data.device}, got {tuple(scale.shape)} on "
            f"{scale.device}"
        )
    _check_vector(gx, "gx", torch.float32, data.shape[0], data.device)
    _check_vector(row_token, "row_token", torch.int32, (), data.device)
    nvfp4.check_expert_offsets(expert_offsets, data.device)
    _check_rows(max(data.shape[0], row_token.shape[0]), "rows")


# ---- launching


def _flat(x: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes, as the kernels read it; a copy only when it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _arch(device: torch.device) -> str:
    """Compile target of the device. Raises RuntimeError with the reason when it has none."""
    if device.type == "cpu":
        return compiler.device_arch(-1, None)
    index = torch.cuda.current_device() if device.index is None else device.index
    return compiler.device_arch(index, torch.cuda.get_device_capability)


def _launch(kernel: Any, device: torch.device, *values: float | Tensor | None) -> None:
    """Launch on the current stream of ``device``. Tensors become addresses, None is left out."""
    launcher = compiler.load(kernel, _arch(device))
    numbers = [v.data_ptr() if isinstance(v, Tensor) else v for v in values if v is not None]
    if device.type == "cpu":
        launcher(*numbers, 0)
    elif device.index in (None, torch.cuda.current_device()):
        launcher(*numbers, torch.cuda.current_stream().cuda_stream)
    else:
        with torch.cuda.device(device):
            launcher(*numbers, torch.cuda.current_stream().cuda_stream)


def _grouped_scales(rows: int, experts: int, groups: int, device: torch.device) -> Tensor:
    shape = (grouped_scale_rows(rows, experts), -(-groups // TILE_GROUPS) * TILE_GROUPS)
    return torch.empty(shape, dtype=torch.uint8, device=device)


def _quantize_rows_kernel(
    x: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    given: Tensor | None,
    row_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    from cute_kernels.device.quantize import GroupScales, QuantizeRows, scale_pitch

    _check_quantize(x, expert_offsets, row_token, given, row_scale)
    tokens, hidden = x.shape
    experts = expert_offsets.shape[0] - 1
    routed = tokens if row_token is None else row_token.shape[0]
    data = torch.empty((tokens, hidden // 2), dtype=torch.uint8, device=x.device)
    gx = torch.empty(tokens, dtype=torch.float32, device=x.device)
    grouped = _grouped_scales(routed, experts, hidden // BLOCK, x.device)
    if tokens == 0:
        return data, grouped.zero_(), gx
    x, expert_offsets = _flat(x), expert_offsets.contiguous()
    pitch = scale_pitch(hidden)
    scale = torch.empty((tokens, pitch), dtype=torch.uint8, device=x.device)
    kernel = QuantizeRows(
        hidden=hidden,
        dtype=_DSL_TYPES[x.dtype],
        given=given is not None,
        weighted=row_scale is not None,
        bounded=row_token is None,
        hardware=_arch(x.device) != "sm_90a",
    )
    limit = expert_offsets[experts:] if row_token is None else None
    stride = 0 if given is not None and given.shape[0] == 1 else 1
    _launch(kernel, x.device, x, given, row_scale, limit, data, scale, gx, tokens, stride)
    if grouped.numel():
        tiles = grouped.shape[0] // TILE_ROWS
        group = GroupScales(hidden // BLOCK, pitch, indexed=row_token is not None)
        _launch(group, x.device, scale, row_token, expert_offsets, grouped, experts, tiles)
    return data, grouped, gx


def _sort_routes_kernel(
    ids: Tensor, weights: Tensor, num_experts: int, first: int, local: int, pad: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from cute_kernels.device.routing import CountRoutes, SortRoutes

    _check_sort(ids, weights, num_experts, first, local, pad)
    tokens, slots = ids.shape
    pairs = tokens * slots
    device, i32 = ids.device, torch.int32
    offsets = torch.empty(local + 1, dtype=i32, device=device)
    row_token = torch.empty(pairs + pad, dtype=i32, device=device)
    row_weight = torch.empty(pairs + pad, dtype=torch.float32, device=device)
    token_rows = torch.empty((tokens, slots), dtype=i32, device=device)
    if pairs == 0:
        return offsets.zero_(), row_token.fill_(-1), row_weight.zero_(), token_rows
    ids, weights = ids.contiguous(), weights.float().contiguous()
    ctas = min(-(-pairs // ONE_CTA_PAIRS), MAX_SORT_CTAS)
    dtype = _DSL_TYPES[ids.dtype]
    counts = None
    if ctas > 1:
        counts = torch.empty((ctas, local), dtype=i32, device=device)
        count = CountRoutes(local, dtype)
        _launch(count, device, ids, counts, pairs, ctas, first, num_experts)
    kernel = SortRoutes(local, dtype, top_k=slots, spread=ctas > 1)
    outputs = (offsets, row_token, row_weight, token_rows)
    inputs = (ids, weights, counts, first, num_experts)
    _launch(kernel, device, *inputs, *outputs, pairs, pairs + pad, ctas)
    return outputs


def _combine_kernel(
    rows: Tensor,
    token_rows: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    from cute_kernels.device.combine import Combine

    _check_combine(rows, token_rows, weights, shared, out_dtype)
    tokens, slots = token_rows.shape
    y = torch.empty((tokens, rows.shape[1]), dtype=out_dtype, device=rows.device)
    if tokens == 0:
        return y
    kernel = Combine(
        hidden=rows.shape[1],
        top_k=slots,
        rows_dtype=_DSL_TYPES[rows.dtype],
        out_dtype=_DSL_TYPES[out_dtype],
        shared_dtype="" if shared is None else _DSL_TYPES[shared.dtype],
        weighted=weights is not None,
    )
    rows, token_rows = _flat(rows), token_rows.contiguous()
    weights = None if weights is None else weights.contiguous()
    shared = None if shared is None else _flat(shared)
    _launch(kernel, rows.device, rows, token_rows, weights, shared, y, tokens)
    return y


def _permute_kernel(
    data: Tensor, scale: Tensor, gx: Tensor, row_token: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from cute_kernels.device.combine import PermuteRows
    from cute_kernels.device.quantize import GroupScales

    _check_permute(data, scale, gx, row_token, expert_offsets)
    routed, experts, groups = row_token.shape[0], expert_offsets.shape[0] - 1, scale.shape[1]
    out = torch.empty((routed, data.shape[1]), dtype=torch.uint8, device=data.device)
    out_gx = torch.empty(routed, dtype=torch.float32, device=data.device)
    grouped = _grouped_scales(routed, experts, groups, data.device)
    if routed == 0 or data.shape[0] == 0:
        return out, grouped.zero_(), out_gx
    data, scale, gx = _flat(data), _flat(scale), gx.contiguous()
    row_token, expert_offsets = row_token.contiguous(), expert_offsets.contiguous()
    rows = (row_token, expert_offsets[experts:], out, out_gx, routed)
    _launch(PermuteRows(data.shape[1]), data.device, data, gx, *rows)
    tiles = grouped.shape[0] // TILE_ROWS
    kernel = GroupScales(groups, groups, indexed=True)
    _launch(kernel, data.device, scale, row_token, expert_offsets, grouped, experts, tiles)
    return out, grouped, out_gx


# ---- registration


def _on_cpu(check: Any, plain: Any, kernel: Any) -> Any:
    """Implementation for CPU tensors: plain PyTorch, or the kernel while a simulator is active."""

    def run(*args: Any) -> Any:
        if compiler.simulating():
            return kernel(*args)
        check(*args)
        return plain(*args)

    return run


def _fake_quantize(x: Tensor, expert_offsets: Tensor, row_token: Any, given: Any, w: Any) -> Any:
    _check_quantize(x, expert_offsets, row_token, given, w)
    tokens, hidden = x.shape
    routed = tokens if row_token is None else row_token.shape[0]
    scale = _grouped_scales(routed, expert_offsets.shape[0] - 1, hidden // BLOCK, x.device)
    data = x.new_empty((tokens, hidden // 2), dtype=torch.uint8)
    return data, scale, x.new_empty(tokens, dtype=torch.float32)


def _fake_sort(ids: Tensor, weights: Tensor, experts: int, first: int, local: int, pad: int) -> Any:
    _check_sort(ids, weights, experts, first, local, pad)
    rows = ids.shape[0] * ids.shape[1] + pad
    i32 = torch.int32
    return (
        ids.new_empty(local + 1, dtype=i32),
        ids.new_empty(rows, dtype=i32),
        ids.new_empty(rows, dtype=torch.float32),
        ids.new_empty(tuple(ids.shape), dtype=i32),
    )


def _fake_combine(rows: Tensor, token_rows: Tensor, weights: Any, shared: Any, dtype: Any) -> Any:
    _check_combine(rows, token_rows, weights, shared, dtype)
    return rows.new_empty((token_rows.shape[0], rows.shape[1]), dtype=dtype)


def _fake_permute(data: Tensor, scale: Tensor, gx: Tensor, row_token: Tensor, off: Tensor) -> Any:
    _check_permute(data, scale, gx, row_token, off)
    routed = row_token.shape[0]
    grouped = _grouped_scales(routed, off.shape[0] - 1, scale.shape[1], data.device)
    return data.new_empty((routed, data.shape[1])), grouped, gx.new_empty(routed)


def _plain_sort(
    ids: Tensor, weights: Tensor, experts: int, first: int, local: int, pad: int
) -> Any:
    rows = ids.shape[0] * ids.shape[1] + pad
    return torch_ops.sort_routes(ids, weights, experts, first, local, rows)


_OPERATIONS = (
    (
        "quantize_rows(Tensor x, Tensor expert_offsets, Tensor? row_token, Tensor? global_scale, "
        "Tensor? row_scale) -> (Tensor, Tensor, Tensor)",
        (_check_quantize, torch_ops.quantize_rows, _quantize_rows_kernel, _fake_quantize),
    ),
    (
        "sort_routes(Tensor topk_ids, Tensor topk_weights, int num_experts, int first_expert, "
        "int num_local_experts, int pad_rows) -> (Tensor, Tensor, Tensor, Tensor)",
        (_check_sort, _plain_sort, _sort_routes_kernel, _fake_sort),
    ),
    (
        "combine(Tensor rows, Tensor token_rows, Tensor? weights, Tensor? shared, "
        "ScalarType out_dtype) -> Tensor",
        (_check_combine, torch_ops.combine, _combine_kernel, _fake_combine),
    ),
    (
        "permute_quantized_rows(Tensor data, Tensor scale, Tensor gx, Tensor row_token, "
        "Tensor expert_offsets) -> (Tensor, Tensor, Tensor)",
        (_check_permute, torch_ops.permute_quantized_rows, _permute_kernel, _fake_permute),
    ),
)


def _register() -> None:
    for schema, (check, plain, kernel, fake) in _OPERATIONS:
        name = schema[: schema.index("(")]
        _library.define(schema)  # type: ignore[no-untyped-call]
        _library.impl(name, kernel, "CUDA")  # type: ignore[no-untyped-call]
        on_cpu = _on_cpu(check, plain, kernel)
        _library.impl(name, on_cpu, "CPU")  # type: ignore[no-untyped-call]
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=_library)


_register()
