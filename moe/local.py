"""The experts of one rank as steps, for tokens that may come from other ranks: what the backends
share with `moe.exchange`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels import nvfp4, ops
from cute_kernels.exchange_ops import Source
from cute_kernels.gemm_ops import kernels_on
from cute_kernels.nvfp4 import BLOCK, DecodeTables, Nvfp4Tensor
from moe import experts, kernels, kernels_sm90, reference
from moe.config import MoEConfig
from moe.experts import Numerics, row_buffers
from moe.kernels_sm90 import PackedExperts
from moe.plan import RoutingPlan, make_plan
from moe.reference import Tokens
from moe.weights import ExpertWeights
from moe.workspace import Buffer


@dataclasses.dataclass(frozen=True, eq=False)
class TokenRows:
    """T tokens as experts read them.

    data    uint8 (T, H/2) E2M1 codes, or bf16 (T, H)
    scale   uint8 (T, H/16), row-major UE4M3 bytes; None for bf16
    gx      fp32 (T,), outer scales; None for bf16
    tables  to decode to bf16 with, or None: made anew

    Rows may be apart, as on the wire.
    """

    data: Tensor
    scale: Tensor | None = None
    gx: Tensor | None = None
    tables: DecodeTables | None = None

    def decode(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Exact values code * scale (T, H), and gx (T,); ones for bf16."""
        if self.scale is None or self.gx is None:
            one = torch.ones(self.data.shape[0], device=self.data.device)
            return self.data.to(dtype).contiguous(), one
        tables = self.tables if dtype == torch.bfloat16 else None
        return nvfp4.decode(Nvfp4Tensor(self.data, self.scale, self.gx), dtype, tables), self.gx


@dataclasses.dataclass(frozen=True, eq=False)
class LocalExperts:
    """Local experts on one backend. Every value has the bits that one rank alone would give it,
    where the backend is batch-invariant (all but "torch" on CUDA)."""

    cfg: MoEConfig
    weights: ExpertWeights | PackedExperts  # the latter: backend "sm90"
    numerics: Numerics
    backend: str

    @property
    def on_kernels(self) -> bool:
        return self.backend in kernels.ALL_KERNEL_BACKENDS

    def kernels_on(self, device: torch.device) -> Any:
        """Where kernels run; those of "sm90" have no simulator."""
        return contextlib.nullcontext() if self.backend == "sm90" else kernels_on(device)

    def source(
        self,
        x: Tokens,
        topk_ids: Tensor,
        topk_weights: Tensor,
        over_ranks: Callable[[Tensor], Tensor],
    ) -> Source:
        """x (T, H) and what it takes to quantise it, or its codes if it comes quantised.

        over_ranks  maximum of a fp32 () over all ranks: "per_tensor" scales by the largest token
                    of all of them
        """
        cfg, mode = self.cfg, self.numerics.activation_scale
        if isinstance(x, Nvfp4Tensor):
            gx = x.global_scale.expand(x.shape[0]).contiguous()
            return Source(x.data, x.scale.view(torch.uint8), gx)
        weight = topk_weights[:, 0].float() if cfg.weight_on_input else None
        if self.numerics.activations == "bf16":
            return Source(x, weight=weight)
        weighted = x
        if weight is not None and mode == "per_tensor":
            weighted = x.float() * weight[:, None]
        g = reference.input_scale(weighted, topk_ids, cfg, self.weights, mode)  # type: ignore[arg-type]
        if mode == "per_tensor":
            assert isinstance(g, Tensor)
            g = over_ranks(g)
        assert isinstance(g, str | Tensor)
        return Source(x, None, None if isinstance(g, str) else g.reshape(1), weight)

    def stage(
        self,
        x: Tokens,
        topk_ids: Tensor,
        topk_weights: Tensor,
        over_ranks: Callable[[Tensor], Tensor],
    ) -> TokenRows:
        """The tokens of `source` as experts read them: quantised, or rounded to bf16."""
        x, scale, outer, weight = self.source(x, topk_ids, topk_weights, over_ranks)
        if scale is not None:
            return TokenRows(x, scale, outer)
        if self.numerics.activations == "bf16":
            return TokenRows((x if weight is None else x.float() * weight[:, None]).bfloat16())
        if not self.on_kernels:
            weighted = x if weight is None else x.float() * weight[:, None]
            q = nvfp4.quantize(weighted, "per_token" if outer is None else outer)
            gx = q.global_scale.expand(x.shape[0]).contiguous()
            return TokenRows(q.data, q.scale.view(torch.uint8), gx)
        with self.kernels_on(x.device):
            # one "expert" that owns every row: its grouped scales are the plain swizzle
            last = max(x.shape[0], 1)
            offsets = torch.arange(0, last + 1, last, device=x.device, dtype=torch.int32)
            if x.shape[0] == 0:
                offsets.zero_()
            g = "per_token" if outer is None else outer
            data, scale, gx = ops.quantize_rows(x, offsets, None, g, weight)
        return TokenRows(data, nvfp4.unswizzle(scale, x.shape[0], x.shape[1] // BLOCK), gx)

    def plan(self, topk_ids: Tensor, topk_weights: Tensor, rows: int) -> RoutingPlan:
        """The local rows of ids (N, K), of which there are at most ``rows``."""
        plan = self._sort(topk_ids, topk_weights)
        return dataclasses.replace(
            plan, row_token=plan.row_token[:rows], row_weight=plan.row_weight[:rows]
        )

    def _sort(self, ids: Tensor, weights: Tensor) -> RoutingPlan:
        w = self.weights
        experts = (self.cfg.num_experts, w.first_expert, w.num_experts)
        if not (self.on_kernels and w.num_experts and ids.numel()):
            return make_plan(ids, weights, *experts)
        counter, counters = None, int(self.numerics.schedule == "dynamic")
        if isinstance(w, PackedExperts):
            counters = kernels_sm90.COUNTERS
        if counters:
            counter = torch.empty(counters, dtype=torch.int32, device=ids.device)
        with self.kernels_on(ids.device):
            rows = ops.sort_routes(ids, weights, *experts, counter=counter)
        return RoutingPlan(*rows, counter)

    def buffers(self, rows: int) -> list[Buffer]:
        """Scratch of `rows` for that many rows."""
        if not self.weights.num_experts:
            return []
        if isinstance(self.weights, PackedExperts):
            return kernels_sm90.received_buffers(rows, self.cfg, self.weights, self.numerics)
        if self.on_kernels:
            return kernels.received_buffers(rows, self.cfg, kernels.Experts.of(self.weights))
        if self.backend != "torch":
            return []
        return row_buffers(rows, self.cfg, self.weights)

    def warmup(self, run: kernels.Run, max_tokens: int, rows: int) -> None:
        """Compile what this rank runs for up to ``max_tokens`` tokens of its own and ``rows``
        received rows. ``run``: a call without its collectives, (x, ids, weights, shared) -> y.
        """
        if not self.on_kernels:
            return
        cfg, weights = self.cfg, self.weights
        count = max(max_tokens, -(-rows // cfg.top_k))
        if isinstance(weights, PackedExperts):
            kernels_sm90.warmup(run, count, cfg, self.numerics, weights.l1.alpha)
        else:
            kernels.warmup(run, count, cfg, kernels.Experts.of(weights))

    def rows(self, tokens: TokenRows, plan: RoutingPlan, scratch: list[Tensor]) -> Tensor:
        """o (R, H) bf16: one row per routed row of ``plan``; rows past expert_offsets[E] are
        unspecified.
        """
        count, cfg, weights = plan.row_token.numel(), self.cfg, self.weights
        if count == 0 or weights.num_experts == 0:
            return torch.zeros(
                (count, weights.hidden), dtype=torch.bfloat16, device=tokens.data.device
            )
        if isinstance(weights, PackedExperts):
            given = (tokens.data, tokens.scale, tokens.gx)
            return kernels_sm90.run_received(given, plan, weights, self.numerics, scratch)
        if self.on_kernels:
            assert tokens.scale is not None and tokens.gx is not None  # these are W4A4 only
            given = (tokens.data, tokens.scale, tokens.gx)
            return kernels.run_received(*given, plan, cfg, kernels.Experts.of(weights), scratch)
        if self.backend == "reference":
            values, gx = tokens.decode(torch.float64)
            mode = self.numerics.activations
            return reference.expert_rows(values, gx, plan, cfg, weights, mode).o
        values, gx = tokens.decode(torch.bfloat16)
        return experts.expert_rows(values, gx, plan, cfg, weights, self.numerics, scratch)

    def combine(
        self,
        rows: Tensor,
        token_rows: Tensor,
        topk_weights: Tensor | None,
        dtype: torch.dtype,
        shared: Tensor | None = None,
        lost: Tensor | None = None,
    ) -> Tensor:
        """rows (R >= 1, H), token_rows int32 (T, K) with -1 for nothing -> y (T, H): slots in
        order, ``shared`` last. Without weights a plain sum. NaN where ``lost``, bool (T,).
        """
        if self.on_kernels:
            weights = None if topk_weights is None else topk_weights.float()
            with self.kernels_on(rows.device):
                return ops.combine(rows, token_rows, weights, shared, dtype, lost=lost)
        if topk_weights is None:
            topk_weights = torch.ones(token_rows.shape, device=rows.device)
        nothing = token_rows.new_zeros(2)
        plan = RoutingPlan(nothing, nothing, nothing.float(), token_rows)
        y = reference.combine(rows, plan, topk_weights, dtype, shared)
        return y if lost is None else y.masked_fill_(lost.unsqueeze(1), torch.nan)
