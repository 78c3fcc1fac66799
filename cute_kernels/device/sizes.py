"""Sizes that host and device agree on. Imports nothing of the DSL: memory is planned without it."""

from __future__ import annotations

BLOCK = 16


def scale_pitch(hidden: int) -> int:
    """Bytes between rows of row-major scales of ``hidden`` columns: whole 16-byte accesses."""
    return -(-hidden // BLOCK // 16) * 16


def piece_width(size: int) -> int:
    """Bytes of one access to whole pieces of ``size`` bytes: a power of two up to 16."""
    return min(16, size & -size)


ROUTER_STEP = 32  # columns of one integer MMA of the router
ROUTER_TILE = 16  # experts whose digits lie together
