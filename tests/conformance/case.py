"""What a peer hands to the runner."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass
class Case:
    """One peer kernel on one problem, compiled and with its arguments bound.

    `launch` runs the compiled host function; `outputs` are the tensors that it writes, refilled
    with `fill` before every run; `check` compares them with fp64 and raises data.Mismatch.
    `ordered=False`: the kernel adds in arrival order, so bits may differ between schedules.
    """

    name: str
    launch: Callable[[], None]
    outputs: dict[str, torch.Tensor]
    check: Callable[[], str]
    fill: dict[str, int] = field(default_factory=dict)
    ordered: bool = True
    macs: int = 0
    keep: list[torch.Tensor] = field(default_factory=list)  # arguments known only by address

    def reset(self) -> None:
        """Poison the outputs with 0xFF bytes (NaN), or the byte that the kernel starts from."""
        for name, tensor in self.outputs.items():
            tensor.view(torch.uint8).fill_(self.fill.get(name, 0xFF))

    def bits(self) -> list[torch.Tensor]:
        """Copies of the outputs as bytes."""
        return [tensor.view(torch.uint8).clone() for tensor in self.outputs.values()]
