"""Work items of a cluster: one warp finds them, all other warps take them from a small ring.

The first item follows from the number of the cluster: every warp finds it by itself, and the first
loads do not wait for anyone. For the items after it the scheduler warp of the first CTA walks
`find_tile` ahead of everyone and stores each one into the shared memory of every CTA of its
cluster. Which item comes next is the one difference between the two ways to schedule:

    static   item + number of clusters
    dynamic  an atomic counter in global memory: a cluster that is done early takes more

| barrier (DEPTH of each) | arrivals                             | by                              |
|-------------------------|--------------------------------------|---------------------------------|
| work_full               | 1 + 32 bytes                         | the scheduler, in every CTA     |
| work_empty              | warps of the cluster that take items | each of them, in the first CTA  |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.arch import mbarrier_arrive, mbarrier_arrive_and_expect_tx, mbarrier_wait

from cute_kernels.device import ptx
from cute_kernels.device.scheduler import Tile

DEPTH = 4  # items that the scheduler may be ahead of the slowest warp; a power of two
WORDS = 8


class Ring(NamedTuple):
    """bars: work_full[DEPTH], work_empty[DEPTH]; slots int32 (WORDS, DEPTH) in shared memory."""

    bars: Any
    slots: Any


@cute.jit
def init_ring(ring, takers: cutlass.Constexpr):
    """One thread of every CTA; ``takers`` warps of the cluster take each item."""
    for s in cutlass.range_constexpr(DEPTH):
        cute.arch.mbarrier_init(ring.bars + s, 1)
        cute.arch.mbarrier_init(ring.bars + DEPTH + s, takers)


def slot_of(count):
    """(slot, parity of its barriers) of the ``count``-th item."""
    return count & (DEPTH - 1), (count >> (DEPTH.bit_length() - 1)) & 1


@cute.jit
def publish(ring, count, tile, cluster: cutlass.Constexpr):
    """Give the ``count``-th item after the first to every CTA, when the slot is free."""
    s, phase = slot_of(count)
    mbarrier_wait(ring.bars + DEPTH + s, phase ^ 1)
    slot = ring.slots[(None, s)].iterator
    full = ring.bars + s
    with cute.arch.elect_one():
        for rank in cutlass.range_constexpr(cluster):
            mbarrier_arrive_and_expect_tx(full, 4 * WORDS, rank)
            head = (Int32(tile.found), tile.expert, tile.row0, tile.end)
            cute.arch.store_async_dsmem(slot, head, full, rank)
            tail = (tile.sf_row0, tile.n_tile, tile.items, Int32(0))
            cute.arch.store_async_dsmem(slot + 4, tail, full, rank)


@cute.jit
def take(ring, count, cluster: cutlass.Constexpr):
    """The ``count``-th item after the first, for a whole warp."""
    s, phase = slot_of(count)
    mbarrier_wait(ring.bars + s, phase)
    words = cute.make_rmem_tensor(WORDS, Int32)
    cute.autovec_copy(ring.slots[(None, s)], words)
    cute.arch.sync_warp()  # every lane has read
    with cute.arch.elect_one():
        if cutlass.const_expr(cluster > 1):
            mbarrier_arrive(ring.bars + DEPTH + s, 0)
        else:
            mbarrier_arrive(ring.bars + DEPTH + s)
    return Tile(words[0] != 0, words[1], words[2], words[3], words[4], words[5], words[6])


@cute.jit
def next_item(item, clusters, counter):
    """The item after ``item``. A cluster whose first item exists asks until it gets one that does
    not exist, so T items mean T questions and the last answer is T - 1 (`reset`)."""
    if cutlass.const_expr(counter is None):
        return item + clusters
    asked = Int32(0)
    if cute.arch.lane_idx() == 0:
        asked = cute.arch.atomic_add(counter.llvm_ptr, Int32(1), sem="relaxed", scope="gpu")
    return clusters + cute.arch.shuffle_sync(asked, 0)


@cute.jit
def reset(item, clusters, counter, items):
    """The last of all questions puts the counter back to 0: the next launch finds it so. Clusters
    that never asked have ``item`` < ``clusters``; they meet the condition only if nobody asks."""
    if item - clusters == items - 1:
        with cute.arch.elect_one():
            ptx.store_u32(counter.toint(), Int32(0))
