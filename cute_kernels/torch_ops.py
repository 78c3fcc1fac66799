"""The operations of `cute_kernels.ops` in plain PyTorch: what CPU tensors get, and what the
kernels must equal.

Any device, bit for bit; nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cute_kernels import nvfp4


def quantize_rows(
    x: Tensor,
    expert_offsets: Tensor,
    row_token: Tensor | None,
    global_scale: Tensor | None,
    row_scale: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `cute_kernels.ops.quantize_rows`."""
    values = x if row_scale is None else x.float() * row_scale[:, None]
    given: nvfp4.GlobalScale = "per_token" if global_scale is None else global_scale
    q = nvfp4.quantize(values, given)
    rows = row_source(expert_offsets, row_token, x.shape[0])
    scale = _gather(q.scale.view(torch.uint8), rows)
    grouped = nvfp4.group_scales(scale, expert_offsets).view(torch.uint8)
    return q.data, grouped, q.global_scale.expand(x.shape[0]).contiguous()


def row_source(expert_offsets: Tensor, row_token: Tensor | None, num_rows: int) -> Tensor:
    """int64 input row of each routed row, -1 past the last expert."""
    count = num_rows if row_token is None else row_token.shape[0]
    row = torch.arange(count, device=expert_offsets.device)
    source = row if row_token is None else row_token.long()
    return torch.where(row < expert_offsets[-1], source, -1)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], zeros where the index is negative."""
    padded = torch.cat((rows, rows.new_zeros((1, *rows.shape[1:]))))
    return padded[torch.where(index >= 0, index, rows.shape[0])]


def sort_routes(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    first_expert: int,
    num_local_experts: int,
    num_rows: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `cute_kernels.ops.sort_routes`; ``num_rows`` is the length of row_token and
    row_weight."""
    tokens, slots = topk_ids.shape
    ids = topk_ids.reshape(-1).long()
    local = ids - first_expert
    here = (ids >= 0) & (ids < num_experts) & (local >= 0) & (local < num_local_experts)
    order_key, order = torch.where(here, local, num_local_experts).sort(stable=True)
    bounds = torch.arange(num_local_experts + 1, device=ids.device)
    offsets = torch.searchsorted(order_key, bounds).int()
    real = order_key < num_local_experts
    row_token = torch.full((num_rows,), -1, dtype=torch.int32, device=ids.device)
    row_weight = torch.zeros(num_rows, dtype=torch.float32, device=ids.device)
    pairs = tokens * slots
    row_token[:pairs] = torch.where(real, order // max(slots, 1), -1).int()
    row_weight[:pairs] = torch.where(real, topk_weights.reshape(-1).float()[order], 0.0)
    row = torch.arange(pairs, device=ids.device)
    token_rows = torch.empty_like(row).scatter(0, order, torch.where(real, row, -1))
    return offsets, row_token, row_weight, token_rows.reshape(tokens, slots).int()


def combine(
    rows: Tensor,
    token_rows: Tensor,
    weights: Tensor | None,
    shared: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """See `cute_kernels.ops.combine`. Sums start from -0.0, which changes no term added to it."""
    tokens, slots = token_rows.shape
    total = torch.full((tokens, rows.shape[1]), -0.0, dtype=torch.float32, device=rows.device)
    for slot in range(slots):
        index = token_rows[:, slot].long()
        term = _gather(rows, index).float()
        if weights is not None:
            term = weights[:, slot, None] * term
        total = total + torch.where((index >= 0)[:, None], term, -0.0)
    if shared is not None:
        return (total + shared.float()).to(out_dtype)
    some = (token_rows >= 0).any(dim=1)
    return torch.where(some[:, None], total, 0.0).to(out_dtype)


def permute_quantized_rows(
    data: Tensor, scale: Tensor, gx: Tensor, row_token: Tensor, expert_offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `cute_kernels.ops.permute_quantized_rows`; rows past the last expert are 0 here."""
    source = row_source(expert_offsets, row_token, data.shape[0])
    grouped = nvfp4.group_scales(_gather(scale, source), expert_offsets).view(torch.uint8)
    return _gather(data, source), grouped, _gather(gx, source)
