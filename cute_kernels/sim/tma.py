"""cp.async.bulk.tensor: tiled loads (multicast, gather4), stores (scatter4), reductions.

A load is issued with its checks and in-flight marks at once; its pieces (groups of box rows) then
land in any order,
each with its own share of the transaction bytes. Out-of-bounds elements read as zero (or NaN) and
still count.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np

from .access import address, need, once, signed32, target, value
from .asyncops import AsyncOp
from .bulk import (
    GENERIC_SHARED_TAG,
    find_global,
    finished,
    put_async,
    reading,
    reduce_into,
    reduction_of,
)
from .checks import (
    ByteSet,
    IllegalInstruction,
    TensorMapError,
    UnsupportedInstruction,
    check_async_access,
    check_initialised,
)
from .control import check_map_acquired
from .descriptors import swizzle
from .sync import barrier_at
from .tensormap import TensorMap

_NAN = {"f16": 0x7FFF, "bf16": 0x7FFF, "f32": 0x7FFFFFFF, "f64": 0x7FFFFFFFFFFFFFFF}


@lru_cache(maxsize=2048)
def box_chunks(offset: int, rows: int, row_bytes: int, layout: int) -> np.ndarray:
    """16-byte chunk indices (rows, row_bytes / 16) of a box whose shared address is `offset`,
    after swizzling."""
    linear = offset + np.arange(rows * row_bytes // 16) * 16
    return (swizzle(linear, layout) >> 4).reshape(rows, -1)


@dataclass(frozen=True)
class Slab:
    """The in-bounds part of a box: where it lies in the tile, and a strided window of global
    memory."""

    tile: tuple[slice, ...]  # index of the tile (outermost dim first; last axis in bytes)
    base: int  # byte address of its first element
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def extent(self) -> int:
        return sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + 1


def clip(tensor: TensorMap, coords: tuple[int, ...]) -> Slab | None:
    """The part of the box at `coords` that lies inside the tensor; None if nothing does."""
    tile, shape, strides, base = [], [], [], tensor.address
    for dim in range(tensor.rank):
        size, step, c = tensor.sizes[dim], tensor.steps[dim] if dim else 1, coords[dim]
        count = -(-tensor.box[dim] // step)
        lo = max(0, -(c // step)) if c < 0 else 0
        hi = min(count, -(-(size - c) // step))
        if lo >= hi:
            return None
        if dim == 0:
            unit = tensor.bits
            if (lo * unit) % 8 or (hi * unit) % 8 or ((c + lo) * unit) % 8:
                raise TensorMapError(f"coordinate {c} of a 4-bit map must be even")
            lo, hi = lo * unit // 8, hi * unit // 8
            base += (c * unit) // 8 + lo
            strides.append(1)
        else:
            base += (c + lo * step) * tensor.strides[dim - 1]
            strides.append(step * tensor.strides[dim - 1])
        tile.append(slice(lo, hi))
        shape.append(hi - lo)
    return Slab(tuple(tile[::-1]), base, tuple(shape[::-1]), tuple(strides[::-1]))


def tile_shape(tensor: TensorMap) -> tuple[int, ...]:
    """(outer box extents ..., bytes of a packed row)."""
    outer = tuple(-(-b // s) for b, s in zip(tensor.box[:0:-1], tensor.steps[:0:-1], strict=True))
    return (*outer, tensor.transaction_row_bytes())


def window(sim: Any, slab: Slab, write: bool, what: str) -> np.ndarray:
    """The strided window of global memory; every row is checked to lie in a live allocation."""
    flat = find_global(sim, slab.base, slab.extent, write, what)
    return np.lib.stride_tricks.as_strided(flat, slab.shape, slab.strides)


def read_tile(sim: Any, tensor: TensorMap, coords: tuple[int, ...], what: str) -> np.ndarray:
    """uint8 (rows, row bytes): the box at `coords`, out-of-bounds elements filled."""
    shape = tile_shape(tensor)
    slab = clip(tensor, coords)
    if tensor.nan_fill and tensor.element in _NAN:
        width = tensor.bits // 8
        fill = np.frombuffer(_NAN[tensor.element].to_bytes(width, "little"), np.uint8)
        tile = np.tile(fill, int(np.prod(shape)) // width).reshape(shape)
    else:
        tile = np.zeros(shape, np.uint8)
    if slab is not None:
        tile[slab.tile] = window(sim, slab, False, what)
    return tile.reshape(-1, shape[-1])


def _pad(rows: np.ndarray) -> np.ndarray:
    """8 packed bytes -> 16 bytes (8 data, 8 zeros)."""
    out = np.zeros((rows.shape[0], rows.shape[1] // 8, 16), np.uint8)
    out[:, :, :8] = rows.reshape(rows.shape[0], -1, 8)
    return out.reshape(rows.shape[0], -1)


# ---- the instruction
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Request:
    """One tensor copy: map, coordinates, and the boxes it consists of (one, or four rows of
    gather4/scatter4)."""

    tensor: TensorMap
    boxes: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        return len(self.boxes) * int(np.prod(tile_shape(self.tensor)[:-1]))


def _request(sim: Any, warp: Any, instr: Any, operand: Any, lane: int) -> Request:
    where = address(warp, operand.map, lane)
    need(where % 64 == 0, f"a tensor map must be 64-byte aligned, got {where:#x}")
    check_map_acquired(sim, warp, where)
    tensor = sim.maps.get(find_global(sim, where, 128, False, "the tensor map").tobytes())
    coords = tuple(signed32(value(warp, c, lane)) for c in operand.coords)
    dims = next(int(m[0]) for m in instr.mods if len(m) == 2 and m[1] == "d")
    need(dims == tensor.rank, f"a {dims}d copy with a tensor map of rank {tensor.rank}")
    if any(m.startswith("im2col") for m in instr.mods):
        raise UnsupportedInstruction("im2col modes are not modelled")
    if any(m.endswith(("gather4", "scatter4")) for m in instr.mods):
        need(dims == 2 and len(coords) == 5, "gather4/scatter4 need a 2-d map and five coordinates")
        need(tensor.box[1] == 1, f"gather4/scatter4 need a box of one row, got {tensor.box[1]}")
        return Request(tensor, tuple((coords[0], r) for r in coords[1:]))
    need(len(coords) == dims, f"a {dims}d copy with {len(coords)} coordinates")
    return Request(tensor, (coords,))


def tensor_copy(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Loads and stores; the direction follows from the order of the state spaces."""
    spaces = [m for m in instr.mods if m in ("global", "shared::cta", "shared::cluster")]
    if len(spaces) != 2:
        raise UnsupportedInstruction(f"form of {instr.opcode} is not modelled")
    flat: list[Any] = []
    for operand in instr.operands:
        flat += [operand.map, *operand.coords] if hasattr(operand, "coords") else [operand]
    for lane in once(warp, flat, mask):
        if spaces[0] == "global":
            _store(sim, warp, instr, lane)
        else:
            _load(sim, warp, instr, lane)


def _load(sim: Any, warp: Any, instr: Any, lane: int) -> None:
    dst_op, map_op, bar_op, *rest = instr.operands
    request = _request(sim, warp, instr, map_op, lane)
    tensor, what = request.tensor, "a tensor load"
    row_bytes, rows = tensor.box_row_bytes(), request.rows
    align = 16 if tensor.swizzle == "none" and not tensor.padded else 128
    cta, offset = target(
        warp, address(warp, dst_op, lane) & (GENERIC_SHARED_TAG - 1), rows * row_bytes, align
    )
    bar_cta, bar_offset = target(warp, address(warp, bar_op, lane) & (GENERIC_SHARED_TAG - 1), 8, 8)
    places = _destinations(warp, instr, (cta, bar_cta), rest, lane)
    for _, owner in places:
        barrier_at(owner, bar_offset, warp)
    chunks = box_chunks(offset, rows, row_bytes, tensor.layout)
    need(int(chunks.max()) * 16 + 16 <= cta.shared.size, "the swizzled box leaves shared memory")
    whole = ByteSet(chunks=chunks)
    for dest, _ in places:
        check_async_access(sim, dest, whole, what, True)
        whole.add(dest.shared.async_writes, 1)
    _check_mapped(sim, request, what)

    def run(lo: int, hi: int) -> None:
        tile = np.concatenate([read_tile(sim, tensor, c, what) for c in request.boxes])[lo:hi]
        if tensor.padded:
            tile = _pad(tile)
        part = ByteSet(chunks=chunks[lo:hi])
        for dest, owner in places:
            put_async(dest, part, tile.reshape(hi - lo, -1, 16))
            barrier_at(owner, bar_offset).complete_tx((hi - lo) * tensor.transaction_row_bytes())

    pieces = sim.policy.pieces(rows)
    edges = [rows * i // pieces for i in range(pieces + 1)]
    sim.counters.tma(warp, rows * tensor.transaction_row_bytes(), len(places))
    for lo, hi in itertools.pairwise(edges):
        if lo < hi:
            sim.async_ops.add(AsyncOp("tma", partial(run, lo, hi), (warp, instr), label="load"))


def _destinations(
    warp: Any, instr: Any, pair: tuple[Any, Any], rest: list[Any], lane: int
) -> list[tuple[Any, Any]]:
    """[(destination CTA, CTA of the mbarrier it signals), ...]; simulator.md on .cta_group::2 and
    multicast."""
    cta, bar_cta = pair
    paired = "cta_group::2" in instr.mods
    if "multicast::cluster" not in instr.mods:
        if not paired:
            need(
                bar_cta is cta,
                "without .cta_group::2 the mbarrier must be in the CTA of the destination",
            )
        else:
            need(
                bar_cta.rank // 2 == cta.rank // 2,
                "the mbarrier of a .cta_group::2 load must be in the CTA pair of the destination",
            )
        return [(cta, bar_cta)]
    ctas = cta.cluster.ctas
    bits = value(warp, rest[0], lane) & 0xFFFF
    if not bits or bits >> len(ctas):
        raise IllegalInstruction(
            f"the multicast mask {bits:#x} must name CTAs of the cluster of {len(ctas)}"
        )
    parity = bar_cta.rank & 1
    places = []
    for dest in ctas:
        if bits >> dest.rank & 1:
            owner = ctas[dest.rank & ~1 | parity] if paired else dest
            target(warp, dest.rank << 24, 1)  # the CTA must still be there
            places.append((dest, owner))
    return places


def _check_mapped(sim: Any, request: Request, what: str) -> None:
    """Out-of-allocation maps fail at the issue, where the instruction is known best."""
    for coords in request.boxes:
        slab = clip(request.tensor, coords)
        if slab is not None:
            find_global(sim, slab.base, slab.extent, False, what)


def _store(sim: Any, warp: Any, instr: Any, lane: int) -> None:
    map_op, src_op = instr.operands[:2]
    request = _request(sim, warp, instr, map_op, lane)
    tensor = request.tensor
    need(not tensor.padded, "padded 4-bit maps are for loads only")
    row_bytes, rows = tensor.box_row_bytes(), request.rows
    align = 16 if tensor.swizzle == "none" else 128
    cta, offset = target(
        warp, address(warp, src_op, lane) & (GENERIC_SHARED_TAG - 1), rows * row_bytes, align
    )
    need(cta is warp.cta, "a tensor store must read the CTA's own shared memory")
    chunks = box_chunks(offset, rows, row_bytes, tensor.layout)
    source = ByteSet(chunks=chunks)
    reduce = instr.base == "cp" and instr.mods[0] == "reduce"
    what = "a tensor reduction" if reduce else "a tensor store"
    op = reduction_of(instr) if reduce else ""
    transfer = reading(sim, warp, instr, lane, source, what)
    shape = tile_shape(tensor)

    def run() -> None:
        tiles = source.get(cta.shared.data).reshape(len(request.boxes), *shape)
        init = source.get(cta.shared.init).reshape(len(request.boxes), *shape)
        for coords, tile, known in zip(request.boxes, tiles, init, strict=True):
            slab = clip(tensor, coords)
            if slab is None:
                continue
            if not known[slab.tile].all():
                check_initialised(sim, cta, source, what)
            dest = window(sim, slab, True, what)
            if op:
                mixed = np.ascontiguousarray(dest)
                reduce_into(mixed.reshape(-1), tile[slab.tile], op, tensor.element)
                dest[...] = mixed
            else:
                dest[...] = tile[slab.tile]
        finished(warp, lane, transfer)

    sim.counters.add(warp, "tma_store_bytes", rows * row_bytes)
    sim.counters.add(warp, "tma_stores", 1)
    sim.async_ops.add(AsyncOp("tma", run, (warp, instr), label="reduce" if op else "store"))


HANDLERS = {"cp.async.bulk.tensor": tensor_copy, "cp.reduce.async.bulk.tensor": tensor_copy}
