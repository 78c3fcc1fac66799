"""What a Mixture-of-Experts layer computes: sizes, routing and activation, nothing about how or
where.
"""

from __future__ import annotations

import dataclasses
import math

from cute_kernels.activations import Activation, SwiGLU
from cute_kernels.nvfp4 import BLOCK

SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mathematics of one MoE layer.

    hidden, intermediate   H and I, the widths of the model and of one expert; multiples of 16
    num_experts, top_k     all experts of the layer (of all ranks) and how many each token takes
    scoring                "softmax", "sigmoid" or "sqrtsoftplus" = sqrt(softplus(logit)), fp32
    num_groups, top_groups DeepSeek-V3's node-limited routing: of ``num_groups`` equal groups only
                           the ``top_groups`` with the largest sum of their two best biased scores
                           are used
    renormalize            divide the chosen weights by their sum (0/0 -> 0)
    routed_scaling_factor  multiplies the chosen weights, once, in `MoE.forward`; not the shared
                           expert
    activation             an `Activation`; ``activation.gated`` says whether experts have a gate
    weight_on_input        Llama-4: the router weight multiplies x before quantisation; top_k must
                           be 1

    Raises TypeError or ValueError for values that cannot be: the message names the field and the
    consequence.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    scoring: str = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True
    routed_scaling_factor: float = 1.0
    activation: Activation = dataclasses.field(default_factory=SwiGLU)
    weight_on_input: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"{field.name} must be an int, got {value!r}")
            if field.type == "bool" and not isinstance(value, bool):
                raise TypeError(f"{field.name} must be True or False, got {value!r}")
        factor = self.routed_scaling_factor
        if not isinstance(factor, int | float) or not math.isfinite(factor):
            raise ValueError(
                f"routed_scaling_factor must be a finite number, got {factor!r}: it multiplies "
                "every weight"
            )
        for name in ("hidden", "intermediate"):
            size = getattr(self, name)
            if size < BLOCK or size % BLOCK:
                raise ValueError(
                    f"{name} must be a positive multiple of {BLOCK} (one NVFP4 scale covers "
                    f"{BLOCK} elements), got {size}"
                )
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k must be in 1..num_experts, got top_k={self.top_k}, "
                f"num_experts={self.num_experts}"
            )
        if self.scoring not in SCORINGS:
            raise ValueError(f"scoring must be one of {SCORINGS}, got {self.scoring!r}")
        if self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(
                f"num_groups must divide num_experts, got {self.num_groups} and {self.num_experts}"
            )
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"top_groups must be in 1..num_groups, got {self.top_groups} of {self.num_groups}"
            )
        if self.top_k > self.top_groups * (self.num_experts // self.num_groups):
            raise ValueError(
                f"top_k={self.top_k} experts do not fit into {self.top_groups} groups of "
                f"{self.num_experts // self.num_groups}: dropped experts would be chosen"
            )
        if self.weight_on_input and self.top_k != 1:
            raise ValueError(
                "weight_on_input multiplies x by the only weight of its token, so top_k must be "
                f"1, got {self.top_k}"
            )
        if not isinstance(self.activation, Activation):
            raise ValueError(
                "activation must be a cute_kernels.activations.Activation object such as "
                f"SwiGLU(), got {self.activation!r}"
            )

    @property
    def projections(self) -> int:
        """Projections before the activation: 2 with a gate, 1 without."""
        return 2 if self.activation.gated else 1
