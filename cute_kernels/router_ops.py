"""The router on torch tensors: exact logits, and which experts a token goes to; see
`cute_kernels.launch`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import torch_router
from cute_kernels.config import clusters_at_once
from cute_kernels.device.sizes import ROUTER_STEP, ROUTER_TILE
from cute_kernels.launch import (
    DSL_TYPES,
    FLOATS,
    Buffer,
    allocate,
    check_matrix,
    check_out,
    check_rows,
    check_vector,
    flat,
    launch,
    multiprocessors,
    register,
)
from cute_kernels.scoring import SCORINGS
from cute_kernels.torch_router import Selection, row_scale

INTEGERS = (torch.int32, torch.int64)
MAX_EXPERTS, MAX_SLOTS = 1024, 32
MAX_HIDDEN = 2**14  # whose sums of digits fit in int32
W_BITS = 22
W_DIGITS = 3
FEW_TOKENS = 64  # up to which clusters take 16 tokens x 16 experts each
TILE_TOKENS, TILE_EXPERTS = 64, 64
PASS_COST = 0.1  # of the pass for row maxima, in tiles of experts
SPLITS = (1, 2, 4, 8)


class RouterWeights(NamedTuple):
    """A router's weight (E, H) as the kernels read it; made by `pack_weights`.

    digits  int32 (ceil(E / 16), ceil(H / 32), 3, 32, 4): bytes of the fixed-point weights, in the
            order of MMA fragments; rows and columns past the last are 0
    scale   fp64 (E,): value of one unit, a power of two; NaN for a row with NaN or Inf
    """

    digits: Tensor
    scale: Tensor


def pack_weights(weight: Tensor) -> RouterWeights:
    """weight (E, H) floating point -> `RouterWeights` on its device.

    W = round(weight / scale), |W| <= 2^22, is written in balanced base 256: three signed digits,
    the lowest first. Word (h, n) of lane 4 g + q of a step and digit holds columns 8 q + 4 h .. + 3
    of the step, of expert 8 n + g of the tile. Raises ValueError for another shape or H > 2^14.
    """
    if weight.dim() != 2 or weight.shape[1] > MAX_HIDDEN:
        raise ValueError(
            f"weight must be (E, H) with H up to {MAX_HIDDEN}, past which sums of digits may leave "
            f"int32, got {tuple(weight.shape)}"
        )
    experts, hidden = weight.shape
    scale = row_scale(weight, W_BITS)
    whole = torch.nan_to_num((weight.double() / scale).round(), nan=0.0).long()
    tiles, steps = -(-experts // ROUTER_TILE), -(-hidden // ROUTER_STEP)
    padded = whole.new_zeros(tiles * ROUTER_TILE, steps * ROUTER_STEP)
    padded[:experts, :hidden] = whole
    digits = []
    for _ in range(W_DIGITS):
        digits.append(((padded + 128) & 255) - 128)
        padded = (padded - digits[-1]) >> 8
    # (digit, tile, n, g, step, q, h, byte) -> (tile, step, digit, g, q, n, h, byte)
    split = torch.stack(digits).to(torch.int8).view(W_DIGITS, tiles, 2, 8, steps, 4, 2, 4)
    words = split.permute(1, 4, 0, 3, 5, 2, 6, 7).contiguous().view(torch.int32)
    return RouterWeights(words.view(tiles, steps, W_DIGITS, 32, 4), scale.squeeze(-1))


def router_logits(x: Tensor, weights: RouterWeights, bias: Tensor | None = None) -> Tensor:
    """x (T, H) bf16, fp16 or fp32, H a multiple of 8 -> fp32 logits (T, E), exact up to one
    rounding: the same bits in any batch.

    Both operands are fixed point relative to the largest of their row, x with 31 bits, weights with
    22; their integer products are summed exactly, rounded to fp64 and then to fp32, and ``bias``
    fp32 (E,) is added. A NaN or Inf in a row of x or of the weights makes all its logits NaN.
    Raises TypeError or ValueError before anything is allocated.
    """
    _check_logits(x, weights.digits, weights.scale, bias)
    (logits,) = allocate(_logits_buffers(x, weights.scale), x.device)
    torch.ops.nvfp4_megamoe.router_logits(x, weights.digits, weights.scale, bias, logits)
    return logits


def _logits_buffers(x: Tensor, scale: Tensor) -> list[Buffer]:
    return [Buffer("logits", (x.shape[0], scale.shape[0]), torch.float32)]


def router_topk(
    logits: Tensor,
    how: Selection,
    selection_bias: Tensor | None = None,
    tid2eid: Tensor | None = None,
    input_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 logits (T, E) -> topk_ids int32 (T, k), topk_weights fp32 (T, k), the bits of
    `cute_kernels.torch_router.select`.

    selection_bias  fp32 (E,): added to the scores that choose; the weights are without it
    tid2eid         int32 or int64 (vocabulary, k): ids = tid2eid[input_ids], weights from the
                    scores
    input_ids       int32 or int64 (T,); a negative one is padding: ids -1, weights 0. On a GPU one
                    past the vocabulary is padding too, on a CPU it is an IndexError

    Ties choose the lower id, NaN comes first. E up to 1024, k and the groups up to 32: a warp keeps
    a token's scores in registers. Raises TypeError or ValueError before anything is allocated.
    """
    _check_topk(logits, how, selection_bias, tid2eid, input_ids)
    ids, weights = allocate(_topk_buffers(logits, how.top_k), logits.device)
    torch.ops.nvfp4_megamoe.router_topk(
        logits, selection_bias, tid2eid, input_ids, *dataclasses.astuple(how), ids, weights
    )
    return ids, weights


def _topk_buffers(logits: Tensor, top_k: int) -> list[Buffer]:
    shape = (logits.shape[0], top_k)
    return [
        Buffer("topk_ids", shape, torch.int32),
        Buffer("topk_weights", shape, torch.float32),
    ]


def unsupported(num_experts: int, how: Selection) -> str:
    """Why `router_topk` refuses these sizes, or ''."""
    if num_experts > MAX_EXPERTS or how.top_k > MAX_SLOTS or how.num_groups > MAX_SLOTS:
        return (
            f"a warp keeps up to {MAX_EXPERTS} scores, {MAX_SLOTS} slots and {MAX_SLOTS} groups of "
            f"a token, got {num_experts} experts, {how.top_k} slots and {how.num_groups} groups"
        )
    return ""


def _check_topk(logits: Tensor, how: Selection, bias: Any, table: Any, input_ids: Any) -> None:
    check_matrix(logits, "logits", (torch.float32,), 1)
    tokens, experts = logits.shape
    check_rows(tokens, "rows of logits")
    if how.scoring not in SCORINGS:
        raise ValueError(f"scoring must be one of {SCORINGS}, got {how.scoring!r}")
    if not 0 < how.top_k <= experts or experts % how.num_groups:
        raise ValueError(
            f"top_k must be 1 to {experts} and groups must divide {experts} experts, got "
            f"{how.top_k} and {how.num_groups}"
        )
    if reason := unsupported(experts, how):
        raise ValueError(reason)
    if bias is not None:
        check_vector(bias, "selection_bias", torch.float32, experts, logits.device)
    if table is None:
        return
    if table.dtype not in INTEGERS or table.dim() != 2 or table.shape[1] != how.top_k:
        raise ValueError(
            f"tid2eid must be int32 or int64 (vocabulary, {how.top_k}), got {table.dtype} "
            f"{tuple(table.shape)}"
        )
    if input_ids is None or input_ids.dtype not in INTEGERS or input_ids.shape != (tokens,):
        given = None if input_ids is None else (input_ids.dtype, tuple(input_ids.shape))
        raise ValueError(f"input_ids must be int32 or int64 ({tokens},), got {given}")
    if {table.device, input_ids.device} != {logits.device}:
        raise ValueError(
            f"tid2eid is on {table.device}, input_ids on {input_ids.device}, logits on "
            f"{logits.device}"
        )


def _check_topk_out(*args: Any) -> None:
    logits, how, rest = _topk_arguments(args)
    _check_topk(logits, how, *rest)
    check_out(args[-2:], _topk_buffers(logits, how.top_k), logits.device)


def _topk_arguments(args: tuple[Any, ...]) -> tuple[Tensor, Selection, tuple[Any, ...]]:
    return args[0], Selection(*args[4:10]), args[1:4]


def _topk_kernel(*args: Any) -> None:
    from cute_kernels.device.topk import RouterTopK

    logits, how, (bias, table, input_ids) = _topk_arguments(args)
    if logits.shape[0] == 0:
        return
    hashed = table is not None
    kernel = RouterTopK(
        logits.shape[1],
        how.top_k,
        how.scoring,
        (1, 1) if hashed else (how.num_groups, how.top_groups),
        how.renormalize,
        biased=bias is not None and not hashed,
        table=DSL_TYPES[table.dtype] if hashed else "",
        tokens=DSL_TYPES[input_ids.dtype] if hashed else "Int64",
    )
    pointers = [table.contiguous(), input_ids.contiguous()] if hashed else [bias, None]
    if bias is not None and not hashed:
        pointers = [bias.contiguous(), None]
    vocabulary = table.shape[0] if hashed else 0
    inputs = (logits.contiguous(), *pointers)
    launch(kernel, logits.device, *inputs, *args[-2:], logits.shape[0], vocabulary, how.factor)


def _plain_topk(*args: Any) -> Any:
    logits, how, rest = _topk_arguments(args)
    return torch_router.select(logits, how, *rest)


def _check_logits(x: Tensor, digits: Tensor, scale: Tensor, bias: Tensor | None) -> None:
    check_matrix(x, "x", FLOATS, 8)
    check_rows(x.shape[0], "rows of x")
    experts, hidden = scale.shape[0], x.shape[1]
    if hidden > MAX_HIDDEN:
        raise ValueError(f"hidden up to {MAX_HIDDEN} keeps the router's sums exact, got {hidden}")
    check_vector(scale, "scale of the router weights", torch.float64, (), x.device)
    tiles, steps = -(-experts // ROUTER_TILE), -(-hidden // ROUTER_STEP)
    shape = (tiles, steps, W_DIGITS, 32, 4)
    check_out((digits,), (Buffer("digits of the router weights", shape, torch.int32),), x.device)
    if bias is not None:
        check_vector(bias, "bias", torch.float32, experts, x.device)


def _check_logits_out(x: Tensor, digits: Tensor, scale: Tensor, bias: Any, logits: Tensor) -> None:
    _check_logits(x, digits, scale, bias)
    check_out((logits,), _logits_buffers(x, scale), x.device)


def _logits_kernel(x: Tensor, digits: Tensor, scale: Tensor, bias: Any, logits: Tensor) -> None:
    from cute_kernels.device.router import RouterFew
    from cute_kernels.device.router_tile import RouterTile

    tokens, experts = logits.shape
    if tokens == 0 or experts == 0:
        return
    fields = (x.shape[1], DSL_TYPES[x.dtype], bias is not None)
    bias = None if bias is None else bias.contiguous()
    inputs = (flat(x), digits, scale.contiguous(), bias)
    columns = -(-experts // TILE_EXPERTS)
    kernel: RouterFew | RouterTile
    if tokens <= FEW_TOKENS:
        kernel, last = RouterFew(*fields), digits.shape[0]
    else:
        sms = multiprocessors(x.device)
        split = best_split(tokens, columns, sms)
        last = columns if split > 1 else best_columns(tokens, columns, sms)
        kernel = RouterTile(*fields, split=split)
    launch(kernel, x.device, *inputs, logits, tokens, experts, last)


def kernel_sizes(max_tokens: int, experts: int, device: torch.device) -> list[int]:
    """A number of tokens for each kernel that calls with up to ``max_tokens`` take."""
    columns, sms = -(-experts // TILE_EXPERTS), multiprocessors(device)
    sizes, seen = [1], 0
    tokens = FEW_TOKENS + 1
    while tokens <= max_tokens and seen != 1:
        if seen != (seen := best_split(tokens, columns, sms)):
            sizes.append(tokens)
        tokens = tokens // TILE_TOKENS * TILE_TOKENS + TILE_TOKENS + 1
    return [n for n in sizes if n <= max_tokens]


def best_split(tokens: int, columns: int, sms: int) -> int:
    """CTAs that share the columns of a tile: as many as run at the same time."""
    tiles = -(-tokens // TILE_TOKENS) * columns
    fits = [s for s in SPLITS if tiles <= clusters_at_once(sms, s)]
    return max(fits, default=1)


def best_columns(tokens: int, columns: int, sms: int) -> int:
    """CTAs side by side over ``columns`` tiles of experts, for each tile of tokens: the number that
    ends first, a CTA's own tiles one after another, after a pass over its tokens."""
    tiles = -(-tokens // TILE_TOKENS)

    def time(side: int) -> float:
        return -(-tiles * side // sms) * (-(-columns // side) + PASS_COST)

    return min(range(1, columns + 1), key=time)


def _plain_logits(x: Tensor, digits: Tensor, scale: Tensor, bias: Any, *_: Tensor) -> Any:
    """The same sums in fp64, in two parts that are exact each."""
    tiles, steps = digits.shape[:2]
    split = digits.contiguous().view(torch.int8).view(tiles, steps, W_DIGITS, 8, 4, 2, 2, 4)
    split = split.permute(2, 0, 5, 3, 1, 4, 6, 7).reshape(
        W_DIGITS, tiles * ROUTER_TILE, steps * ROUTER_STEP
    )
    w = split[0].double()
    for j in range(1, W_DIGITS):
        w = w + split[j].double() * 256.0**j
    w = w[: scale.shape[0], : x.shape[1]].t()
    step = row_scale(x, 31)
    whole = (x.double() / step).round()
    high = torch.floor(whole * 2.0**-16)
    low = whole - high * 2.0**16
    total = (high @ w) * 2.0**16 + low @ w
    logits = (total * step * scale).float()
    return (logits if bias is None else logits + bias,)


register(
    "router_topk(Tensor logits, Tensor? selection_bias, Tensor? tid2eid, Tensor? input_ids, "
    "int top_k, str scoring, int num_groups, int top_groups, bool renormalize, float factor, "
    "Tensor(a!) ids, Tensor(b!) weights)",
    _check_topk_out,
    _plain_topk,
    _topk_kernel,
)
register(
    "router_logits(Tensor x, Tensor digits, Tensor scale, Tensor? bias, Tensor(a!) logits)",
    _check_logits_out,
    _plain_logits,
    _logits_kernel,
)
