"""Fences, grid dependencies, cluster launch control and the small control instructions."""

from __future__ import annotations

from typing import Any

import numpy as np

from .access import address, lead, need, target, threads, value
from .asyncops import AsyncOp
from .checks import (
    REMOTE_WRITER,
    ByteSet,
    MissingProxyFence,
    UnsupportedInstruction,
    check_async_access,
)
from .sync import barrier_at, publish_barriers

_PLAIN_FENCES = {"acq_rel", "sc", "acquire", "release", "mbarrier_init", "proxy"}


def nothing(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Instructions without a functional effect: prefetches, hints, register budgets, ordering of a
    sequential machine."""


def fence_proxy(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """fence.proxy.{async, tensormap, alias}."""
    kind = instr.mods[1]
    if kind == "async" or kind.startswith("async::"):
        if "global" not in instr.mods:
            _fence_async(warp, mask)
            publish_barriers(warp)
        return
    if kind.startswith("tensormap"):
        if "acquire" in instr.mods:
            acquire_map(sim, warp, address(warp, instr.operands[0], lead(mask)))
        return
    if kind != "alias":
        raise UnsupportedInstruction(f"unknown proxy in {instr.opcode}")


def _fence_async(warp: Any, mask: np.ndarray) -> None:
    cta = warp.cta
    epoch = cta.launch.epoch
    covered = cta.fences.fence(threads(warp, mask), epoch)
    for other in cta.cluster.ctas:
        if other is not cta:
            other.fences.cleared = max(other.fences.cleared, covered)
            other.fences.fenced[REMOTE_WRITER] = epoch


def acquire_map(sim: Any, warp: Any, addr: int) -> None:
    """Records that the CTA acquired the tensor map at `addr` in its present state."""
    warp.cta.acquired_maps[addr] = sim.changed_maps.get(addr)


def check_map_acquired(sim: Any, warp: Any, addr: int) -> None:
    """Raises MissingProxyFence for a tensor map changed on the device and not acquired since by
    this CTA."""
    version = sim.changed_maps.get(addr)
    if (
        version is not None
        and sim.checks.tensormap_fence
        and warp.cta.acquired_maps.get(addr) != version
    ):
        raise MissingProxyFence(
            f"the tensor map at {addr:#x} was changed by this or another kernel on the device and "
            "this CTA has not executed "
            "fence.proxy.tensormap::generic.acquire on it since"
        )


def fence(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """fence.{acq_rel, sc, mbarrier_init, ...}: memory is sequentially consistent here."""
    if instr.mods and instr.mods[0] not in _PLAIN_FENCES:
        raise UnsupportedInstruction(f"unknown fence {instr.opcode}")
    if "mbarrier_init" in instr.mods:
        publish_barriers(warp)


def griddep_wait(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    """The launches before this one have completed and what they wrote is visible."""
    return sim.overlap.wait(sim, warp, instr)


def griddep_launch(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """The next launch starts when this one has ended; see overlap.py for what it may see."""


def nanosleep(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Lets others go first."""
    warp.agent.yielded = True


def setmaxnreg(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    count = value(warp, instr.operands[0], lead(mask))
    need(
        24 <= count <= 256 and count % 8 == 0,
        f"setmaxnreg needs a multiple of 8 in 24..256, got {count}",
    )


# ---- clusterlaunchcontrol
# -------------------------------------------------------------------------------------------
# the opaque answer: word 0 = 1 + x of the first CTA (0: not cancelled), words 1, 2 = y, z, word 3
# = a marker
_ANSWER_MARK = 0x434C4331


def try_cancel(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Asks for a cluster that has not started; the answer is written asynchronously and counts 16
    bytes."""
    lane = lead(mask)
    where, barrier = (address(warp, o, lane) for o in instr.operands[:2])
    cta, offset = target(warp, where, 16, 16)
    bar_cta, bar_offset = target(warp, barrier, 8, 8)
    everyone = "multicast::cluster::all" in instr.mods
    ctas = list(cta.cluster.ctas) if everyone else [cta]
    launch = warp.cta.launch
    bytes_ = ByteSet(offset, offset + 16)
    for dest in ctas:
        check_async_access(sim, dest, bytes_, "the answer of clusterlaunchcontrol", True)
        bytes_.add(dest.shared.async_writes, 1)

    def run() -> None:
        first = launch.cancel_cluster()
        words = (
            [0, 0, 0, _ANSWER_MARK]
            if first is None
            else [1 + first[0], first[1], first[2], _ANSWER_MARK]
        )
        raw = np.array(words, np.uint32).view(np.uint8)
        for dest in ctas:
            shared = dest.shared
            bytes_.add(shared.async_writes, -1)
            bytes_.put(shared.data, raw)
            bytes_.put(shared.init, 1)
            bytes_.put(shared.writer, 0)
            barrier_at(dest if everyone else bar_cta, bar_offset).complete_tx(16)

    sim.async_ops.add(AsyncOp("clc", run, (warp, instr), label="try_cancel"))


def query_cancel(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Decodes an answer held in a b128 register (two rows of 32 values)."""
    result, handle = instr.operands
    raw = np.asarray(warp.read(handle), np.uint64)
    low, high = raw[0], raw[1]
    mask32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    marked = (high >> shift) == _ANSWER_MARK
    need(
        bool(marked[mask].all()),
        "the operand is no answer of clusterlaunchcontrol.try_cancel (not loaded, or not waited "
        "for)",
    )
    x, y, z = low & mask32, low >> shift, high & mask32
    what = instr.mods[1]
    if what == "is_canceled":
        warp.write(result, (x != 0).astype(np.uint64), mask)
        return
    # after a refusal the coordinates are undefined, not forbidden: kernels decode, then select
    refused = x == 0
    x, y, z = (np.where(refused, mask32, v) for v in (x - np.uint64(1), y, z))
    coords = {"x": x, "y": y, "z": z}
    if "::" in what:
        warp.write(result, coords[what.rsplit("::", 1)[1]], mask)
    else:
        for operand, axis in zip(result.items, "xyz", strict=False):
            warp.write(operand, coords[axis], mask)


HANDLERS = {
    "fence.proxy": fence_proxy,
    "fence": fence,
    "membar": nothing,
    "griddepcontrol.wait": griddep_wait,
    "griddepcontrol.launch_dependents": griddep_launch,
    "nanosleep": nanosleep,
    "setmaxnreg": setmaxnreg,
    "clusterlaunchcontrol.try_cancel": try_cancel,
    "clusterlaunchcontrol.query_cancel": query_cancel,
    "prefetch": nothing,
    "prefetchu": nothing,
    "applypriority": nothing,
    "discard": nothing,
}
