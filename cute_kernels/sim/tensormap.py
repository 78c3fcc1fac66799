"""The 128-byte tensor map: decoding, encoding (for tests and saved arguments) and
tensormap.replace.

Bit positions: simulator.md (found by experiment; checked against the driver's
cuTensorMapEncodeTiled).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .access import address, lead, need, target, value
from .bulk import find_global
from .checks import TensorMapError, UnsupportedInstruction

# code -> (name, bits of an element in global memory)
ELEMENT_TYPES = {
    0: ("u8", 8), 1: ("u16", 16), 2: ("u32", 32), 3: ("s32", 32), 4: ("u64", 64), 5: ("s64", 64),
    6: ("f16", 16), 7: ("f32", 32),
    8: ("f32", 32), 9: ("f64", 64), 10: ("bf16", 16), 11: ("b4x16", 4), 12: ("b4x16_p64", 4),
    13: ("b6x16_p32", 6),
}  # fmt: skip
_CODES = {"u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 9,
"bf16": 10, "b4x16": 11,
          "b4x16_p64": 12}  # fmt: skip
SWIZZLES = ("none", "32B", "64B", "128B")
_SPAN = {"none": 0, "32B": 32, "64B": 64, "128B": 128}


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory and the box that one copy moves.

    address     byte address of element 0
    element     name in `ELEMENT_TYPES`
    sizes       extent of dims 0.. in elements, dim 0 contiguous
    strides     bytes between neighbours of dims 1..
    box         box extents in elements
    steps       traversal stride per dim
    swizzle     "none", "32B", "64B", "128B"; `atom32`: 128B swizzle of 32-byte atoms
    nan_fill    out-of-bounds elements are NaN instead of zero
    """

    address: int
    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: str = "none"
    atom32: bool = False
    interleave: int = 0
    nan_fill: bool = False

    @property
    def rank(self) -> int:
        return len(self.sizes)

    @property
    def bits(self) -> int:
        return ELEMENT_TYPES[_CODES[self.element]][1]

    @property
    def padded(self) -> bool:
        """16 packed 4-bit elements become 16 bytes in shared memory."""
        return self.element == "b4x16_p64"

    @property
    def layout(self) -> int:
        """The swizzle as a layout code of matrix descriptors."""
        return {"none": 0, "32B": 6, "64B": 4, "128B": 1 if self.atom32 else 2}[self.swizzle]

    @classmethod
    def decode(cls, raw: bytes) -> TensorMap:
        """Reads a map.

        Raises:
            TensorMapError: for a map with impossible fields, or one of a kind that is not modelled.
        """
        lo = int.from_bytes(raw, "little")

        def bits(byte: int, shift: int, count: int) -> int:
            return lo >> (8 * byte + shift) & ((1 << count) - 1)

        rank, code = bits(8, 4, 3) + 1, bits(8, 7, 4)
        if not 1 <= rank <= 5 or code not in ELEMENT_TYPES or code == 13 or not any(raw):
            raise TensorMapError(
                f"no tensor map that can be used here: rank {rank}, element type {code}, bytes "
                f"{raw[:16].hex()}..."
            )
        strides = tuple(
            (bits(12 + 4 * i, 0, 32) | bits(28, 4 * i, 4) << 32) << 4 for i in range(rank - 1)
        )
        atomicity = bits(8, 19, 2)
        if atomicity > 1:
            raise TensorMapError(
                f"swizzle atomicity {atomicity} (32B with 8B flip, or 64B) is not modelled"
            )
        return cls(
            bits(0, 0, 64), ELEMENT_TYPES[code][0],
            tuple(bits(32 + 4 * i, 0, 32) + 1 for i in range(rank)), strides,
            tuple(bits(55 + i, 0, 8) + 1 for i in range(rank)),
            tuple(bits(52, 3 * i, 3) + 1 for i in range(rank)),
            SWIZZLES[bits(8, 13, 2)], atomicity == 1, bits(8, 11, 2), bool(bits(8, 15, 1)),
        )  # fmt: skip

    def encode(self) -> bytes:
        """The 128 bytes, for tests and for maps built by hand."""
        value = self.address
        word = (
            (self.rank - 1) << 4
            | _CODES[self.element] << 7
            | self.interleave << 11
            | SWIZZLES.index(self.swizzle) << 13
        )
        word |= int(self.nan_fill) << 15 | int(self.atom32) << 19
        value |= word << 64
        for i, stride in enumerate(self.strides):
            if stride % 16:
                raise TensorMapError(
                    f"stride of dimension {i + 1} must be a multiple of 16 bytes, got {stride}"
                )
            value |= (stride >> 4 & 0xFFFFFFFF) << 8 * (12 + 4 * i) | (stride >> 36 & 15) << (
                8 * 28 + 4 * i
            )
        for i in range(self.rank):
            value |= (
                (self.sizes[i] - 1) << 8 * (32 + 4 * i)
                | (self.steps[i] - 1) << (8 * 52 + 3 * i)
                | (self.box[i] - 1) << 8 * (55 + i)
            )
        return value.to_bytes(128, "little")

    def check(self) -> None:
        """Rules of cuTensorMapEncodeTiled that a usable map obeys.

        Raises:
            TensorMapError: naming field, value and rule.
        """
        if self.interleave:
            raise TensorMapError("interleaved layouts are not modelled")
        inner = self.box_row_bytes()
        if inner % 16:
            raise TensorMapError(f"the box is {inner} bytes wide, expected a multiple of 16")
        span = _SPAN[self.swizzle]
        if span and inner > span:
            raise TensorMapError(
                f"the box is {inner} bytes wide, which exceeds the {span}-byte swizzle span"
            )
        align = 32 if self.padded else 16
        if self.address % align:
            raise TensorMapError(f"global address {self.address:#x} must be a multiple of {align}")
        if any(s % align for s in self.strides):
            raise TensorMapError(f"strides {self.strides} must be multiples of {align} bytes")
        if any(b > 256 for b in self.box):
            raise TensorMapError(f"box {self.box} exceeds 256 elements")
        if self.padded and (self.box[0] != 128 or self.sizes[0] % 128):
            raise TensorMapError(
                "padded 4-bit maps need box[0] = 128 and sizes of multiples of 128, got "
                f"{self.box[0]}, {self.sizes[0]}"
            )

    def box_row_bytes(self) -> int:
        """Bytes of shared memory per row of the box."""
        return self.box[0] if self.padded else self.box[0] * self.bits // 8

    def transaction_row_bytes(self) -> int:
        """Bytes that the mbarrier counts per row: packed bytes for padded maps too."""
        return self.box[0] * self.bits // 8


class MapCache:
    """Decoded maps by content."""

    def __init__(self) -> None:
        self._maps: dict[bytes, TensorMap] = {}

    def get(self, raw: bytes) -> TensorMap:
        found = self._maps.get(raw)
        if found is None:
            found = TensorMap.decode(raw)
            found.check()
            self._maps[raw] = found
        return found


# ---- tensormap instructions
# -----------------------------------------------------------------------------------------

_ELEMTYPE = {
    0: 0,
    1: 1,
    2: 2,
    3: 3,
    4: 4,
    5: 5,
    6: 6,
    7: 7,
    8: 8,
    9: 9,
    10: 10,
    13: 11,
    14: 12,
    15: 13,
}


def _locate(sim: Any, warp: Any, instr: Any, lane: int) -> tuple[np.ndarray, int | None]:
    """(128 bytes to change, global address or None for shared memory)."""
    addr = address(warp, instr.operands[0], lane)
    if "shared::cta" in instr.mods:
        cta, offset = target(warp, addr, 128, 64)
        if sim.checks.uninitialised and not cta.shared.init[offset : offset + 128].all():
            raise TensorMapError("tensormap.replace of shared memory that holds no tensor map yet")
        return cta.shared.data[offset : offset + 128], None
    need(addr % 64 == 0, f"a tensor map must be 64-byte aligned, got {addr:#x}")
    return find_global(sim, addr, 128, True, "tensormap.replace"), addr


def tensormap_replace(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """tensormap.replace.tile.<field>.<space>.b1024.<type> [addr], {ordinal,} value."""
    lane = lead(mask)
    raw, where = _locate(sim, warp, instr, lane)
    fieldname = instr.mods[2]
    values = [value(warp, o, lane) for o in instr.operands[1:]]
    number = int.from_bytes(raw.tobytes(), "little")
    number = _replaced(number, fieldname, values)
    raw[:] = np.frombuffer(number.to_bytes(128, "little"), np.uint8)
    if where is not None:
        touched(sim, where)
        warp.cta.acquired_maps.pop(where, None)


def touched(sim: Any, where: int) -> None:
    """The map at a global address has changed: users must acquire it through the tensormap
    proxy."""
    sim.changed_maps[where] = sim.changed_maps.get(where, 0) + 1


def _replaced(number: int, fieldname: str, values: list[int]) -> int:
    def put(number: int, byte: int, shift: int, count: int, field: int) -> int:
        at = 8 * byte + shift
        return number & ~(((1 << count) - 1) << at) | (field & ((1 << count) - 1)) << at

    if fieldname == "global_address":
        return put(number, 0, 0, 64, values[0])
    if fieldname == "rank":
        return put(number, 8, 4, 3, values[0])
    if fieldname == "elemtype":
        need(values[0] in _ELEMTYPE, f"unknown element type {values[0]}")
        return put(number, 8, 7, 4, _ELEMTYPE[values[0]])
    if fieldname == "interleave_layout":
        return put(number, 8, 11, 2, values[0])
    if fieldname == "swizzle_mode":
        return put(number, 8, 13, 2, values[0])
    if fieldname == "swizzle_atomicity":
        return put(number, 8, 19, 2, values[0])
    if fieldname == "fill_mode":
        return put(number, 8, 15, 1, values[0])
    ordinal, new = values
    need(0 <= ordinal < 5, f"dimension ordinal must be 0..4, got {ordinal}")
    if fieldname == "box_dim":
        return put(number, 55 + ordinal, 0, 8, new - 1)
    if fieldname == "global_dim":
        return put(number, 32 + 4 * ordinal, 0, 32, new - 1)
    if fieldname == "element_stride":
        return put(number, 52, 3 * ordinal, 3, new - 1)
    if fieldname == "global_stride":
        need(
            new % 16 == 0 and ordinal < 4,
            f"global stride {ordinal} must be a multiple of 16 bytes, got {new}",
        )
        number = put(number, 12 + 4 * ordinal, 0, 32, new >> 4)
        return put(number, 28, 4 * ordinal, 4, new >> 36)
    raise UnsupportedInstruction(f"tensormap.replace of field {fieldname!r} is not modelled")


def cp_fenceproxy(sim: Any, warp: Any, instr: Any, mask: np.ndarray) -> None:
    """Copies a map from shared to global memory and releases it to the tensormap proxy."""
    lane = lead(mask)
    dst, src = (address(warp, o, lane) for o in instr.operands[:2])
    size = value(warp, instr.operands[2], lane)
    need(size == 128, f"tensormap.cp_fenceproxy copies 128 bytes, got {size}")
    cta, offset = target(warp, src, 128, 128)
    find_global(sim, dst, 128, True, instr.base)[:] = cta.shared.data[offset : offset + 128]
    touched(sim, dst)


HANDLERS = {"tensormap.replace": tensormap_replace, "tensormap.cp_fenceproxy": cp_fenceproxy}
