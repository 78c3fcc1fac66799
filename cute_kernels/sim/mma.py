"""tcgen05.mma: D (TMEM) = A (shared memory or TMEM) x B (shared memory) [+ D], with block scales
from TMEM.

The operation is issued, checked and marked when the instruction executes; it reads its operands
and writes D when its
pipe's turn comes, at the latest before the arrival of the commit that covers it. Products and the
sum over one
instruction's K are formed in float64, then added to the fp32 accumulator with one rounding
(simulator.md, Numerics).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .access import address, lead, need, value
from .asyncops import AsyncOp
from .checks import (
    ByteSet,
    ScaleFactorError,
    UninitialisedRead,
    UnsupportedInstruction,
    check_async_access,
    check_initialised,
)
from .descriptors import BITS, UE4M3, UE8M0, InstrDescriptor, SmemDescriptor, decode_rows
from .tcgen05 import group_of, pair, pipe_of
from .tmem import Region, Tmem, split

try:
    from .core_mma import product
except ImportError:  # no numba

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a @ b.T"""
        return a @ b.T


KINDS = ("f16", "tf32", "f8f6f4", "mxf8f6f4", "mxf4", "mxf4nvf4")
# kind -> K elements per scale factor by default, and what the instruction may say instead
_BLOCK = {"mxf8f6f4": 32, "mxf4": 32, "mxf4nvf4": 0}


@dataclass(frozen=True)
class Share:
    """What one CTA of the group contributes and receives.

    a: bytes of its A rows, or None when A is in TMEM; b: bytes of its B rows; d: TMEM rectangles
    of its part of D.
    """

    cta: Any
    a: ByteSet | None
    b: ByteSet
    d: tuple[Region, ...]
    reads: tuple[Region, ...]  # TMEM that the operation reads: A, scale factors


@dataclass(frozen=True)
class Mma:
    """One decoded operation."""

    idesc: InstrDescriptor
    group: int
    block: int  # K elements per scale factor, 0 without scales
    a_tmem: tuple[int, int] | None
    sfa: int  # TMEM columns of the scale factors
    sfb: int
    d: tuple[int, int]
    accumulate: bool
    scale_d: float
    lanes_off: np.ndarray | None
    shares: tuple[Share, ...]

    @property
    def rows(self) -> int:
        """Rows of A and D that one CTA holds."""
        return self.idesc.m // self.group


def _kind(instr: Any) -> str:
    kind = next((m[6:] for m in instr.mods if m.startswith("kind::")), "")
    if (
        kind not in KINDS
        or "sp" in instr.mods
        or "ws" in instr.mods
        or any("ashift" in m for m in instr.mods)
    ):
        raise UnsupportedInstruction(
            f"{instr.opcode} is not modelled (kinds: {', '.join(KINDS)}; no .sp, .ws, .ashift)"
        )
    return kind


def _block(instr: Any, kind: str, idesc: InstrDescriptor) -> int:
    """K elements per scale factor."""
    if "block_scale" not in instr.mods:
        need(kind not in _BLOCK, f"kind::{kind} needs .block_scale")
        return 0
    need(kind in _BLOCK, f"kind::{kind} has no .block_scale")
    mods = instr.mods
    if any(m in ("block16", "scale_vec::4X") for m in mods):
        block = 16
    elif any(m in ("block32", "scale_vec::2X", "scale_vec::1X") for m in mods):
        block = 32
    else:
        block = _BLOCK[kind]
    need(
        block in ((16, 32) if kind == "mxf4nvf4" else (32,)),
        f"kind::{kind} cannot use this scale vector size",
    )
    need(block == 32 or kind == "mxf4nvf4", f"block16 belongs to kind::mxf4nvf4, not {kind}")
    need(
        not (block == 32 and idesc.scale == "ue4m3"),
        "blocks of 32 take UE8M0 scales only, the descriptor says UE4M3",
    )
    return block


def _check_shape(kind: str, group: int, d: InstrDescriptor) -> None:
    """PTX ISA 9.7.16.2, Table 39."""
    scaled = kind in _BLOCK
    ms = ((128,) if scaled else (64, 128)) if group == 1 else (128, 256)
    need(d.m in ms, f"M must be one of {ms} for kind::{kind} with cta_group::{group}, got {d.m}")
    step = 8 * group
    need(0 < d.n <= 256 and d.n % step == 0, f"N must be a multiple of {step} up to 256, got {d.n}")


def _operand_bytes(desc: SmemDescriptor, rows: int, k: int, fmt: str, mn_major: bool) -> ByteSet:
    size = BITS[fmt] * k // 8  # bytes of K per row
    if not mn_major:
        return ByteSet(chunks=desc.rows(rows, size // 16))
    need(fmt in ("f16", "bf16", "e4m3", "e5m2", "tf32"), f"MN-major {fmt} is not modelled")
    return ByteSet(chunks=desc.columns(rows * BITS[fmt] // 128, k))


def _d_regions(m_total: int, group: int, n: int, column: int, lane: int) -> tuple[Region, ...]:
    if group == 1 and m_total == 64:
        return tuple(Region(lane + 32 * i, 16, column, n) for i in range(4))
    if group == 2 and m_total == 128:
        return (Region(0, 64, column, n // 2), Region(64, 64, column, n // 2))
    return (Region(0, 128, column, n),)


def mma(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Issues one operation."""
    lane = lead(mask)
    op = _decode(sim, warp, instr, lane)
    pipe = pipe_of(sim, warp, lane)
    stamp = pipe.stamp()
    for share in op.shares:
        _issue_checks(sim, share, pipe.number, warp)
    for share in op.shares:
        for part in _parts(share):
            part.add(share.cta.shared.async_reads, 1)
        for area in share.d:
            share.cta.tmem.mark(area, True, stamp)
            share.cta.tmem.issued(area, warp)
        for area in share.reads:
            share.cta.tmem.mark(area, False, stamp)

    def release() -> None:
        for share in op.shares:
            for part in _parts(share):
                part.add(share.cta.shared.async_reads, -1)
            for area in share.d:
                share.cta.tmem.unmark(area, True, stamp)
            for area in share.reads:
                share.cta.tmem.unmark(area, False, stamp)

    pipe.uncommitted.append(release)
    sim.counters.mma(warp, op.idesc.m * op.idesc.n * op.idesc.k)
    sim.async_ops.add(
        AsyncOp(
            "tensor", lambda: execute(sim, op), (warp, instr), pipe=("tc", pipe.number), label="mma"
        )
    )


def _parts(share: Share) -> list[ByteSet]:
    return [share.b] if share.a is None else [share.a, share.b]


def _issue_checks(sim: Any, share: Share, pipe: int, warp: Any) -> None:
    for name, part in (("A", share.a), ("B", share.b)):
        if part is not None:
            need(
                part.end <= share.cta.shared.size,
                f"the descriptor of {name} leaves shared memory",
            )
            check_async_access(sim, share.cta, part, f"tcgen05.mma (operand {name})", False)
    for area in share.d:
        share.cta.tmem.check_write(area, "tcgen05.mma (D)", sim.checks, pipe, warp)
    for area in share.reads:
        share.cta.tmem.check_read(area, "tcgen05.mma (A or scale factors)", sim.checks, pipe)


def _decode(sim: Any, warp: Any, instr: Any, lane: int) -> Mma:
    kind, group = _kind(instr), group_of(instr)
    d_op, a_op, b_op, i_op, *rest = instr.operands
    idesc = InstrDescriptor.decode(value(warp, i_op, lane) & 0xFFFFFFFF, kind)
    _check_shape(kind, group, idesc)
    block = _block(instr, kind, idesc)
    sfa = sfb = 0
    if block:
        sfa, sfb = (split(address(warp, o, lane))[1] for o in rest[:2])
        rest = rest[2:]
        _check_scale_ids(idesc, block)
    off = None
    if rest and hasattr(rest[0], "items"):
        off, rest = _disabled_lanes(warp, rest[0], lane), rest[1:]
    enable = bool(warp.read(rest[0])[lane]) if rest else True
    scale_d = 2.0 ** -value(warp, rest[1], lane) if len(rest) > 1 else 1.0
    row, column = split(address(warp, d_op, lane))
    a_tmem = split(address(warp, a_op, lane)) if type(a_op).__name__ == "Addr" else None
    a_desc = None if a_tmem else SmemDescriptor.decode(value(warp, a_op, lane))
    b_desc = SmemDescriptor.decode(value(warp, b_op, lane))
    shares = []
    rows, b_rows = idesc.m // group, idesc.n // group
    for cta in pair(warp.cta, group):
        a = (
            None
            if a_desc is None
            else _operand_bytes(a_desc, rows, idesc.k, idesc.a, idesc.a_mn_major)
        )
        b = _operand_bytes(b_desc, b_rows, idesc.k, idesc.b, idesc.b_mn_major)
        reads = []
        if a_tmem:
            reads.append(Region(a_tmem[0], min(128, rows), a_tmem[1], 8))
        if block:
            reads.append(Region(0, 128, sfa, -(-rows // 32)))
            reads.append(Region(0, 128, sfb, -(-idesc.n // 32)))
        shares.append(
            Share(cta, a, b, _d_regions(idesc.m, group, idesc.n, column, row), tuple(reads))
        )
    return Mma(
        idesc, group, block, a_tmem, sfa, sfb, (row, column), enable, scale_d, off, tuple(shares)
    )


def _check_scale_ids(d: InstrDescriptor, block: int) -> None:
    allowed = (0,) if block == 16 else ((0, 2) if d.k == 64 else (0, 1, 2, 3))
    for name, sid in (("A", d.scale_id_a), ("B", d.scale_id_b)):
        need(sid in allowed, f"scale factor id of {name} must be one of {allowed} here, got {sid}")


def _disabled_lanes(warp: Any, vector: Any, lane: int) -> np.ndarray | None:
    words = np.array([value(warp, o, lane) for o in vector.items], np.uint32)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
    return bits if bits.any() else None


# ---- execution -----------------------------------------------------------------------------------


def execute(sim: Any, op: Mma) -> None:
    """Reads the operands, computes, writes D in every CTA of the group."""
    d = op.idesc
    b = np.concatenate(
        [
            _shared_operand(sim, s, s.b, d.b, d.n // op.group, d.k, d.b_mn_major, "B")
            for s in op.shares
        ]
    )
    if d.negate_b:
        b = -b
    for v, share in enumerate(op.shares):
        if share.a is None:
            a = _tmem_operand(sim, op, share.cta.tmem)
        else:
            a = _shared_operand(sim, share, share.a, d.a, op.rows, d.k, d.a_mn_major, "A")
        if d.negate_a:
            a = -a
        b_scaled = b
        if op.block:
            a = a * scale_factors(sim, share.cta.tmem, op, op.sfa, op.rows, d.scale_id_a)
            b_scaled = b * scale_factors(sim, share.cta.tmem, op, op.sfb, d.n, d.scale_id_b)
        with np.errstate(all="ignore"):
            _write_d(sim, op, share, product(a, b_scaled), v)


def _shared_operand(
    sim: Any, share: Share, part: ByteSet, fmt: str, rows: int, k: int, mn_major: bool, name: str
) -> np.ndarray:
    """float64 (rows, k)."""
    check_initialised(sim, share.cta, part, f"tcgen05.mma (operand {name})")
    raw = part.get(share.cta.shared.data)
    if not mn_major:
        return decode_rows(raw.reshape(rows, -1), fmt)
    return decode_rows(raw.reshape(k, -1), fmt).T


def _tmem_operand(sim: Any, op: Mma, tmem: Tmem) -> np.ndarray:
    """A from TMEM: row r in its lane, 32 bytes of K in 8 columns."""
    assert op.a_tmem is not None
    lane, column = op.a_tmem
    need(not op.idesc.a.endswith("p64"), "a 4-bit A of kind::f8f6f4 in TMEM is not modelled")
    if op.rows == 64 and op.group == 1:
        lanes = lane + np.concatenate([np.arange(16) + 32 * i for i in range(4)])
    else:
        lanes = lane + np.arange(op.rows)
    for first in range(int(lanes[0]), int(lanes[-1]) + 1, 32):
        tmem.check_written(Region(first, 16, column, 8), "tcgen05.mma (A in TMEM)", sim.checks)
    return decode_rows(tmem.data[lanes, column : column + 8].view(np.uint8), op.idesc.a)


def scale_factors(sim: Any, tmem: Tmem, op: Mma, column: int, rows: int, sid: int) -> np.ndarray:
    """float64 (rows, k): the factor of every element; row r sits in column r / 32, lane r % 32, of
    all four partitions."""
    columns = -(-rows // 32)
    area = Region(0, 128, column, columns)
    cells = tmem.data[area.index]
    used = (np.arange(32)[:, None] + 32 * np.arange(columns)) < rows  # (lane, column)
    written = tmem.written[area.index].reshape(4, 32, columns)
    if sim.checks.uninitialised and not written[0][used].all():
        lane, col = np.argwhere(~written[0] & used)[0]
        raise UninitialisedRead(
            f"tcgen05.mma (scale factors) reads TMEM lane {lane}, column {column + col}, "
            "which was never written"
        )
    if sim.checks.scale_duplication:
        copies = cells.reshape(4, 32, columns)
        bad = ((copies != copies[:1]) | ~written).any(0) & used
        if bad.any():
            lane, col = np.argwhere(bad)[0]
            raise ScaleFactorError(
                f"scale factors at TMEM column {column + col}, lane {lane} are not the same in all "
                "four 32-lane partitions (tcgen05.cp without .warpx4, or a store to one partition)"
            )
    raw = np.ascontiguousarray(cells[:32].T).view(np.uint8).reshape(columns * 32, 4)[:rows]
    count = op.idesc.k // op.block
    table = UE8M0 if op.idesc.scale == "ue8m0" else UE4M3
    return np.repeat(table[raw[:, sid : sid + count]], op.block, axis=1)


def _write_d(sim: Any, op: Mma, share: Share, product: np.ndarray, v: int) -> None:
    """Adds or stores (rows, n) into this CTA's part of D."""
    tmem = share.cta.tmem
    if op.idesc.d == "f16":
        raise UnsupportedInstruction("tcgen05.mma with an f16 accumulator is not modelled")
    row = 0
    for i, area in enumerate(share.d):
        if op.group == 2 and op.idesc.m == 128:
            part = product[:, i * area.columns : (i + 1) * area.columns]
        else:
            part = product[row : row + area.lanes]
            row += area.lanes
        cells = tmem.data[area.index]
        if op.accumulate:
            tmem.check_written(area, "tcgen05.mma (accumulator)", sim.checks)
            part = part + cells.view(np.float32).astype(np.float64) * op.scale_d
        result = part.astype(np.float32).view(np.uint32)
        if op.lanes_off is not None:
            keep = op.lanes_off[area.lane : area.lane + area.lanes, None]
            result = np.where(keep, cells, result)
        cells[...] = result
        tmem.written[area.index] = True


HANDLERS = {"tcgen05.mma": mma}
