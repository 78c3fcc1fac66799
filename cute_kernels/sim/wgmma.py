"""wgmma: D (registers) = A (registers or shared memory) x B (shared memory) [+ D], m64nNk16 of bf16
with fp32 accumulators.

A warp of a warpgroup owns 16 of the 64 rows, so its part is an operation of its own; those of one
warp complete in order, between their issue and the wait_group that covers them. Until then the
accumulators are nobody's: their registers hold a signalling NaN, which must still be there when
they get their values. A wgmma must find the registers of A, and accumulators that none before it
has in flight, as the last wgmma.fence left them. Fragments (PTX ISA, "Register fragments for
wgmma.mma_async.m64nNk16") are those of mma.sync, 8 columns of D after the other. Products and the
sum over one instruction's K are formed in float64, then added with one rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from .access import lead, need, value
from .asyncops import AsyncOp
from .checks import (
    ByteSet,
    RegisterRace,
    UnsupportedInstruction,
    check_async_access,
    check_initialised,
)
from .descriptors import SmemDescriptor, decode_rows
from .mma import product
from .wait import Blocked, Signal
from .warp_mma import a_fragment

IN_FLIGHT = np.uint64(0x7F80DEAD)  # what an accumulator holds while a wgmma may still write it
_SHAPE = re.compile(r"m64n(\d+)k16$")
_LANES = np.arange(32)


@dataclass(eq=False)
class Accumulator:
    """fp32 (16, n) behind the registers ``rows``; ``steps``: operations not yet waited for."""

    rows: tuple[int, ...]
    values: np.ndarray
    steps: int = 0


@dataclass(eq=False)
class Step:
    """One operation of a warp. ``kept``: rows of registers that hold A, and what was in them."""

    instr: Any
    accumulator: Accumulator
    release: Callable[[], None]
    kept: tuple[list[int], np.ndarray] | None
    done: bool = False


@dataclass(eq=False)
class Warpgroup:
    """A warp's operations: not yet committed, and committed groups, oldest first."""

    open: list[Step] = field(default_factory=list)
    groups: list[list[Step]] = field(default_factory=list)
    accumulators: dict[tuple[int, ...], Accumulator] = field(default_factory=dict)
    fenced: np.ndarray | None = None  # all registers at the last wgmma.fence
    signal: Signal = field(default_factory=Signal)

    def covered(self, allowed: int) -> list[Step]:
        """The operations that wait_group ``allowed`` waits for."""
        return [s for group in self.groups[: max(0, len(self.groups) - allowed)] for s in group]

    def complete(self, allowed: int) -> bool:
        return all(step.done for step in self.covered(allowed))


def state_of(warp: Any) -> Warpgroup:
    if warp.agent.wgmma is None:
        warp.agent.wgmma = Warpgroup()
    state: Warpgroup = warp.agent.wgmma
    return state


def unfinished(warp: Any) -> Any:
    """The instruction of an operation that nobody has waited for, or None."""
    state = warp.agent.wgmma
    steps = [] if state is None else [*state.open, *(s for g in state.groups for s in g)]
    return steps[0].instr if steps else None


@lru_cache(maxsize=64)
def _places(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Row and column (registers, lanes) of a warp's accumulators."""
    q = np.arange(n // 2)[:, None]
    return _LANES // 4 + q // 2 % 2 * 8 + 0 * q, q // 4 * 8 + _LANES % 4 * 2 + q % 2


def descriptor(raw: int) -> SmemDescriptor:
    """Matrix descriptor of wgmma (PTX ISA, "Matrix descriptor format"): as on sm_100, but for
    two bits of swizzle.

    Raises IllegalInstruction for a base offset.
    """
    need(raw >> 49 & 7 == 0, f"matrix descriptor {raw:#018x}: a base offset is not modelled")
    layout = (0, 2, 4, 6)[raw >> 62 & 3]
    return SmemDescriptor(
        (raw & 0x3FFF) << 4, (raw >> 16 & 0x3FFF) << 4, (raw >> 32 & 0x3FFF) << 4, layout
    )


def mma_async(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Issues a warp's part of one operation."""
    need(bool(mask.all()), f"{instr.opcode} needs all 32 lanes")
    d, a_op, b_op, scale_d, scale_a, scale_b, *transposed = instr.operands
    n = _columns(instr, transposed, d)
    signs = [np.int64(value(warp, s, 0) & 0xFFFFFFFF).astype(np.int32) for s in (scale_a, scale_b)]
    need(all(s in (1, -1) for s in signs), f"imm-scale must be 1 or -1, got {signs}")
    state, raw = state_of(warp), warp.register_rows
    rows = tuple(item.id for item in d.items)
    b = _shared(sim, warp, b_op, slice(0, n), n, "B")
    reads, kept, a = [b], None, None
    if hasattr(a_op, "items"):
        a_rows = [item.id for item in a_op.items]
        kept = a_rows, raw[a_rows].copy()
        a = a_fragment(kept[1])
        _check_registers(sim, state, raw, a_rows, "A")
    else:
        first = warp.warp_id % 4 * 16
        reads.append(_shared(sim, warp, a_op, slice(first, first + 16), 64, "A"))
    accumulator = _accumulator(sim, state, raw, rows, n)
    add = bool(value(warp, scale_d, 0) & 1)
    for part in reads:
        part.add(warp.cta.shared.async_reads, 1)

    def release() -> None:
        for part in reads:
            part.add(warp.cta.shared.async_reads, -1)

    step = Step(instr, accumulator, release, kept)

    def run() -> None:
        left = _read(sim, warp, reads[1], "A") if a is None else a
        right = _read(sim, warp, b, "B")
        with np.errstate(all="ignore"):
            total = product(left * float(signs[0] * signs[1]), right)
            if add:
                total = total + accumulator.values
            accumulator.values = total.astype(np.float32)
        step.done = True
        state.signal.notify()

    state.open.append(step)
    accumulator.steps += 1
    sim.counters.mma(warp, 16 * n * 16)
    op = AsyncOp("tensor", run, (warp, instr), pipe=("wgmma", id(warp)), label="wgmma")
    sim.async_ops.add(op)


def _columns(instr: Any, transposed: list[Any], d: Any) -> int:
    """N. Raises UnsupportedInstruction for what is not modelled."""
    shape = _SHAPE.match(instr.mods[3])
    if shape is None or instr.mods[4:] != ("f32", "bf16", "bf16"):
        raise UnsupportedInstruction(f"{instr.opcode}: only m64nNk16 of bf16 is modelled")
    if any(getattr(t, "bits", 1) for t in transposed):
        raise UnsupportedInstruction(f"{instr.opcode}: operands that are not K-major")
    n = int(shape.group(1))
    need(n % 8 == 0 and 8 <= n <= 256, f"N must be a multiple of 8 up to 256, got {n}")
    need(len(d.items) == n // 2, f"D of N {n} has {n // 2} registers, got {len(d.items)}")
    return n


def _shared(sim: Any, warp: Any, operand: Any, part: slice, rows: int, name: str) -> ByteSet:
    """Rows ``part`` of a K-major operand of ``rows`` rows: 32 bytes each."""
    chunks = descriptor(value(warp, operand, 0)).rows(rows, 2)[part]
    out = ByteSet(chunks=chunks)
    need(out.end <= warp.cta.shared.size, f"the descriptor of {name} leaves shared memory")
    check_async_access(sim, warp.cta, out, f"wgmma.mma_async (operand {name})", False)
    return out


def _read(sim: Any, warp: Any, part: ByteSet, name: str) -> np.ndarray:
    """float64 (rows, 16)."""
    check_initialised(sim, warp.cta, part, f"wgmma.mma_async (operand {name})")
    raw = part.get(warp.cta.shared.data)
    return decode_rows(raw.reshape(raw.shape[0], -1), "bf16")


def _check_registers(sim: Any, state: Warpgroup, raw: np.ndarray, rows: Any, name: str) -> None:
    if not sim.checks.wgmma_registers:
        return
    if any(not held.isdisjoint(rows) for held in map(set, state.accumulators)):
        raise RegisterRace(
            f"registers of {name} are accumulators of a wgmma in flight: wait for its group first"
        )
    if state.fenced is None or not np.array_equal(raw[list(rows)], state.fenced[list(rows)]):
        raise RegisterRace(
            f"registers of {name} were written after the last wgmma.fence, or there was none: the "
            "operation may read what was there before"
        )


def _accumulator(
    sim: Any, state: Warpgroup, raw: np.ndarray, rows: tuple[int, ...], n: int
) -> Accumulator:
    found = state.accumulators.get(rows)
    if found is None:
        _check_registers(sim, state, raw, rows, "D")
        values = np.empty((16, n), np.float32)
        bits = raw[list(rows)] & np.uint64(0xFFFFFFFF)
        values[_places(n)] = bits.astype(np.uint32).view(np.float32)
        found = state.accumulators[rows] = Accumulator(rows, values)
        raw[list(rows)] = IN_FLIGHT
    return found


def fence(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    if sim.checks.wgmma_registers:
        state_of(warp).fenced = warp.register_rows.copy()


def commit_group(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    state = state_of(warp)
    state.groups.append(state.open)
    state.open = []


def wait_group(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> Any:
    state, allowed = state_of(warp), value(warp, instr.operands[0], lead(mask))
    if not state.complete(allowed):
        return Blocked(lambda: state.complete(allowed), f"wgmma.wait_group {allowed}", state.signal)
    for step in state.covered(allowed):
        _finish(sim, warp, state, step)
    state.groups = state.groups[max(0, len(state.groups) - allowed) :] if allowed else []
    return None


def _finish(sim: Any, warp: Any, state: Warpgroup, step: Step) -> None:
    """The warp has waited for ``step``: what it read may be written, its registers are its own."""
    raw, held = warp.register_rows, step.accumulator
    step.release()
    if sim.checks.wgmma_registers and step.kept is not None:
        rows, before = step.kept
        if not np.array_equal(raw[rows], before):
            raise RegisterRace(
                f"registers of A were written while {step.instr.opcode} (PTX line "
                f"{step.instr.line}) was in flight"
            )
    held.steps -= 1
    if held.steps:
        return
    del state.accumulators[held.rows]
    rows = list(held.rows)
    if sim.checks.wgmma_registers and not (raw[rows] == IN_FLIGHT).all():
        raise RegisterRace(
            f"accumulators were written while {step.instr.opcode} (PTX line {step.instr.line}) "
            "was in flight"
        )
    bits = np.ascontiguousarray(held.values[_places(2 * len(rows))]).view(np.uint32)
    raw[rows] = bits.astype(np.uint64)
    if state.fenced is not None:  # from one wgmma to the next an accumulator needs no fence
        state.fenced[rows] = raw[rows]


HANDLERS = {
    "wgmma.fence": fence,
    "wgmma.mma_async": mma_async,
    "wgmma.commit_group": commit_group,
    "wgmma.wait_group": wait_group,
}
