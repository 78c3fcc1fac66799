"""Shared-memory matrix descriptors, instruction descriptors and the element formats of tcgen05.

Formulas: PTX ISA 9.1, 9.7.16.3-9.7.16.4. All positions are handled as indices of 16-byte chunks of
the CTA's window.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from .access import need

# layout code of the descriptor -> (swizzle span in bytes, first bit changed, number of bits)
_LAYOUTS = {0: (16, 0, 0), 1: (128, 5, 2), 2: (128, 4, 3), 4: (64, 4, 2), 6: (32, 4, 1)}


def swizzle(addresses: np.ndarray, layout: int) -> np.ndarray:
    """XORs address bits [bit, bit + n) with bits [7, 7 + n) of the absolute shared address."""
    _, bit, count = _LAYOUTS[layout]
    if not count:
        return addresses
    return addresses ^ ((addresses >> 7 & ((1 << count) - 1)) << bit)


@dataclass(frozen=True)
class SmemDescriptor:
    """Matrix descriptor: start address, leading and stride byte offsets, layout code."""

    start: int
    lbo: int
    sbo: int
    layout: int

    @classmethod
    def decode(cls, raw: int) -> SmemDescriptor:
        """Raises IllegalInstruction for reserved or unmodelled fields."""
        layout = raw >> 61 & 7
        need(layout in _LAYOUTS, f"matrix descriptor {raw:#018x}: swizzle code {layout} is invalid")
        need(
            raw >> 46 & 7 == 1,
            f"matrix descriptor {raw:#018x}: bits 46-48 must be 0b001, got {raw >> 46 & 7:#05b}",
        )
        need(
            raw >> 49 & 7 == 0,
            f"matrix descriptor {raw:#018x}: a base offset is not modelled, align the pattern to "
            "its period",
        )
        need(
            raw >> 52 & 1 == 0,
            f"matrix descriptor {raw:#018x}: the absolute leading-dimension mode does not exist on "
            "sm_100",
        )
        return cls(
            (raw & 0x3FFF) << 4, (raw >> 16 & 0x3FFF) << 4, (raw >> 32 & 0x3FFF) << 4, layout
        )

    def rows(self, rows: int, chunks: int) -> np.ndarray:
        """K-major: chunk indices (rows, chunks) of `chunks` 16-byte chunks of each row."""
        return _k_major(self, rows, chunks)

    def columns(self, chunks: int, k: int) -> np.ndarray:
        """MN-major: chunk indices (k, chunks) of 16-byte chunks along MN for each k."""
        return _mn_major(self, chunks, k)


@lru_cache(maxsize=4096)
def _k_major(desc: SmemDescriptor, rows: int, chunks: int) -> np.ndarray:
    pitch = _LAYOUTS[desc.layout][0]
    r, c = np.arange(rows)[:, None], np.arange(chunks)[None]
    step = desc.lbo if desc.layout == 0 else 16
    return swizzle(desc.start + r % 8 * pitch + r // 8 * desc.sbo + c * step, desc.layout) >> 4


@lru_cache(maxsize=1024)
def _mn_major(desc: SmemDescriptor, chunks: int, k: int) -> np.ndarray:
    span = _LAYOUTS[desc.layout][0]
    kk, m = np.arange(k)[:, None], 16 * np.arange(chunks)[None]
    if desc.layout == 0:
        where = m // 16 * desc.sbo + kk % 8 * 16 + kk // 8 * desc.lbo
    else:
        group = 4 if desc.layout == 1 else 8
        where = m % span + m // span * desc.lbo + kk % group * span + kk // group * desc.sbo
    return swizzle(desc.start + where, desc.layout) >> 4


# ---- element formats
# ------------------------------------------------------------------------------------------------


def _float_table(exponent: int, mantissa: int, special: str = "") -> np.ndarray:
    """float64 values of all codes of a sign-exponent-mantissa format; `special`: "" none, "nan"
    all-ones, "ieee"."""
    codes = np.arange(1 << (1 + exponent + mantissa))
    sign = np.where(codes >> (exponent + mantissa) & 1, -1.0, 1.0)
    e, m = codes >> mantissa & ((1 << exponent) - 1), codes & ((1 << mantissa) - 1)
    bias = (1 << (exponent - 1)) - 1
    normal = (1 + m / (1 << mantissa)) * 2.0 ** (e - bias)
    table = sign * np.where(e == 0, m / (1 << mantissa) * 2.0 ** (1 - bias), normal)
    top = e == (1 << exponent) - 1
    if special == "ieee":
        table[top] = np.where(m[top] == 0, sign[top] * np.inf, np.nan)
    elif special == "nan":
        table[top & (m == (1 << mantissa) - 1)] = np.nan
    return table


E2M1 = _float_table(2, 1)
E4M3 = _float_table(4, 3, "nan")
E5M2 = _float_table(5, 2, "ieee")
E2M3 = _float_table(2, 3)
E3M2 = _float_table(3, 2)
UE4M3 = E4M3[np.arange(256) & 0x7F]  # bit 7 is ignored
UE8M0 = np.where(np.arange(256) == 255, np.nan, 2.0 ** (np.arange(256) - 127.0))
_E2M1_PAIRS = np.stack([E2M1[np.arange(256) & 15], E2M1[np.arange(256) >> 4]], 1)


def decode_rows(raw: np.ndarray, fmt: str) -> np.ndarray:
    """uint8 (rows, bytes) of K-major operand memory -> float64 (rows, elements).

    `fmt`: "e2m1" packed; "e2m1_p64" 16 codes in 8 of 16 bytes; "e2m3", "e3m2" 16 codes in 12 of 16
    bytes; "e4m3",
    "e5m2"; "f16", "bf16", "tf32".
    """
    rows = raw.shape[0]
    if fmt == "e2m1":
        return _E2M1_PAIRS[raw].reshape(rows, -1)
    if fmt == "e2m1_p64":
        return _E2M1_PAIRS[raw.reshape(rows, -1, 16)[:, :, :8]].reshape(rows, -1)
    if fmt in ("e2m3", "e3m2"):
        bits = np.unpackbits(raw.reshape(rows, -1, 16)[:, :, :12], axis=2, bitorder="little")
        codes = np.packbits(bits.reshape(rows, -1, 6), axis=2, bitorder="little")[:, :, 0]
        return (E2M3 if fmt == "e2m3" else E3M2)[codes]
    if fmt in ("e4m3", "e5m2"):
        return (E4M3 if fmt == "e4m3" else E5M2)[raw]
    raw = np.ascontiguousarray(raw)
    if fmt == "f16":
        return raw.view(np.float16).astype(np.float64)
    if fmt == "bf16":
        values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            return values.astype(np.float64)
    if fmt == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    raise AssertionError(fmt)


BITS = {
    "e2m1": 4,
    "e2m1_p64": 8,
    "e2m3": 8,
    "e3m2": 8,
    "e4m3": 8,
    "e5m2": 8,
    "f16": 16,
    "bf16": 16,
    "tf32": 32,
}


@dataclass(frozen=True)
class InstrDescriptor:
    """The 32-bit instruction descriptor of a tcgen05.mma, decoded for one kind."""

    m: int
    n: int
    k: int
    a: str
    b: str
    negate_a: bool
    negate_b: bool
    a_mn_major: bool
    b_mn_major: bool
    scale: str  # "", "ue4m3", "ue8m0"
    scale_id_a: int
    scale_id_b: int
    d: str

    @classmethod
    def decode(cls, raw: int, kind: str) -> InstrDescriptor:
        """Raises IllegalInstruction for formats, sizes or flags that the kind does not have."""
        return _decode_idesc(raw, kind)


_FP8_FORMATS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1_p64"}
_FORMATS = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "f8f6f4": _FP8_FORMATS,
    "mxf8f6f4": _FP8_FORMATS,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
_K = {"f16": 16, "tf32": 8, "f8f6f4": 32, "mxf8f6f4": 32, "mxf4": 64, "mxf4nvf4": 64}


@lru_cache(maxsize=256)
def _decode_idesc(raw: int, kind: str) -> InstrDescriptor:
    where = f"instruction descriptor {raw:#010x} of kind::{kind}"
    formats = _FORMATS[kind]
    need(raw >> 2 & 1 == 0, f"{where}: sparsity is not modelled")
    fp4 = kind in ("mxf4", "mxf4nvf4")
    block = fp4 or kind == "mxf8f6f4"
    a, b = raw >> 7 & 7, raw >> 10 & (3 if fp4 else 7)
    need(a in formats and b in formats, f"{where}: element types {a}, {b} are not of this kind")
    need(not (fp4 and raw >> 31), f"{where}: K = 96 needs sm_103a")
    n = (raw >> 17 & 63) << 3
    m = (raw >> 27 & 3) << 7 if block else (raw >> 24 & 31) << 4
    major_a, major_b = bool(raw >> 15 & 1), bool(raw >> 16 & 1)
    if fp4:
        need(not (major_a or major_b), f"{where}: FP4 operands must be K-major")
    scale = ("ue8m0" if raw >> 23 & 1 else "ue4m3") if block else ""
    if kind in ("mxf4", "mxf8f6f4"):
        need(scale == "ue8m0", f"{where}: this kind takes UE8M0 scales only")
    ids = (raw >> 29 & 3, raw >> 4 & 3) if block else (0, 0)
    d = "f32" if block else {0: "f16", 1: "f32"}.get(raw >> 4 & 3, "?")
    need(d in ("f32", "f16"), f"{where}: accumulator type {raw >> 4 & 3} is not of this kind")
    return InstrDescriptor(
        m,
        n,
        _K[kind],
        formats[a],
        formats[b],
        bool(raw >> 13 & 1),
        bool(raw >> 14 & 1),
        major_a,
        major_b,
        scale,
        *ids,
        d,
    )
