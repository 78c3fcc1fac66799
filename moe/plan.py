"""Routing decisions turned into expert-major rows. Global expert ids become local ones here and
nowhere else.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from cute_kernels import torch_ops
from cute_kernels.ops import check_routing


@dataclasses.dataclass(frozen=True, eq=False)
class RoutingPlan:
    """Rows of a batch in expert-major order. R = T * K; every size depends on T and K alone.

    expert_offsets  int32 (E+1,): rows of local expert e are expert_offsets[e] : expert_offsets[e+1]
    row_token       int32 (R,): token of each row; -1 past expert_offsets[E]
    row_weight      float32 (R,): its top-k weight; 0 past expert_offsets[E]
    token_rows      int32 (T, K): row of each (token, slot); -1 when the slot is not computed here
    counter         int32 zeros for the GEMMs that follow: (1,) for a dynamic schedule on SM100,
                    (2,) on SM90; None: a static schedule, or what the GEMMs set themselves

    Two tokens, two slots, three local experts; token 1 has an empty slot:

    >>> import torch
    >>> ids = torch.tensor([[2, 0], [2, -1]])
    >>> plan = make_plan(ids, torch.tensor([[0.75, 0.25], [1.0, 0.5]]), num_experts=3)
    >>> plan.expert_offsets.tolist()    # expert 0 has one row, expert 1 none, expert 2 two
    [0, 1, 1, 3]
    >>> plan.row_token.tolist()         # row 0 is token 0 (slot 1), rows 1 and 2 are tokens 0 and 1
    [0, 0, 1, -1]
    >>> plan.row_weight.tolist()
    [0.25, 0.75, 1.0, 0.0]
    >>> plan.token_rows.tolist()
    [[1, 0], [2, -1]]
    """

    expert_offsets: Tensor
    row_token: Tensor
    row_weight: Tensor
    token_rows: Tensor
    counter: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_rows.shape[0]

    @property
    def num_experts(self) -> int:
        """Local experts."""
        return self.expert_offsets.numel() - 1


def make_plan(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    first_expert: int = 0,
    num_local_experts: int | None = None,
) -> RoutingPlan:
    """Sort (token, slot) pairs by local expert, stably; nothing waits for the device.

    topk_ids, topk_weights  (T, K), global ids int32/int64. A slot whose id is negative, >=
                            num_experts, or not in first_expert : first_expert + num_local_experts
                            has no row here.

    Raises TypeError or ValueError for other shapes, dtypes and devices, and for local experts that
    are not all among num_experts.
    """
    check_routing(topk_ids, topk_weights)
    local = num_experts - first_expert if num_local_experts is None else num_local_experts
    if first_expert < 0 or local < 0 or first_expert + local > num_experts:
        raise ValueError(
            f"local experts {first_expert} : {first_expert + local} are not all among the "
            f"{num_experts} experts: their rows would be lost"
        )
    rows = topk_ids.shape[0] * topk_ids.shape[1]
    plan = torch_ops.sort_routes(topk_ids, topk_weights, num_experts, first_expert, local, rows)
    return RoutingPlan(*plan)
