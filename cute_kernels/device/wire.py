"""A token on its way to the experts of another rank: the layout that host and device agree on.

Imports nothing: memory is planned without the DSL.
"""

from __future__ import annotations

import dataclasses

from cute_kernels.device.sizes import BLOCK

ROW_ALIGNMENT = 16  # bytes: rows are read and written in pieces of so many


@dataclasses.dataclass(frozen=True)
class Wire:
    """One row, ``row_bytes`` in this order:

        codes H/2 | block scales H/16 | padding to 4 | gx 4 | head | padding to 16       nvfp4
        bf16 2 H | head | padding to 16                                                  bf16

    The head is ``first`` 4 | ids 4 K, or, where the experts' rank sums (``weighted``), ids 4 K |
    weights 4 K. ``first`` is the place of the token's first row among those that go back from this
    rank to its owner. Padding holds anything.
    """

    hidden: int
    top_k: int
    quantized: bool
    weighted: bool

    @property
    def data_bytes(self) -> int:
        return self.hidden // 2 if self.quantized else 2 * self.hidden

    @property
    def scale_at(self) -> int:
        return self.data_bytes

    @property
    def gx_at(self) -> int:
        scales = self.hidden // BLOCK if self.quantized else 0
        return -(-(self.data_bytes + scales) // 4) * 4

    @property
    def first_at(self) -> int:
        return self.gx_at + 4 * self.quantized

    @property
    def ids_at(self) -> int:
        return self.first_at + 4 * (not self.weighted)

    @property
    def weights_at(self) -> int:
        return self.ids_at + 4 * self.top_k

    @property
    def row_bytes(self) -> int:
        size = self.weights_at + 4 * self.top_k * self.weighted
        return -(-size // ROW_ALIGNMENT) * ROW_ALIGNMENT
