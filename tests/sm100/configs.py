"""The configurations under test."""

from __future__ import annotations

from cute_kernels.config import GemmConfig

DECODE = GemmConfig(1, 64, decode=True)
# what `choose_config` returns
MAIN = [
    DECODE, GemmConfig(1, 128), GemmConfig(2, 128), GemmConfig(2, 128, columns=2),
    GemmConfig(2, 256), GemmConfig(2, 256, columns=2), GemmConfig(2, 256, columns=4),
]  # fmt: skip
# what a caller may ask for besides
OTHER = [
    GemmConfig(1, 64), GemmConfig(1, 256), GemmConfig(1, 128, 2), GemmConfig(1, 128, columns=2),
    GemmConfig(2, 128, 2), GemmConfig(2, 256, 2), GemmConfig(2, 128, columns=4),
]  # fmt: skip


def names(value: object) -> str | None:
    return value.name if isinstance(value, GemmConfig) else None
