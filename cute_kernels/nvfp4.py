"""The NVFP4 format: E2M1 codes, one UE4M3 scale per 16 of them, one fp32 scale per row or tensor.

    value[r, k] = e2m1(code[r, k]) * ue4m3(scale[r, k // 16]) * global_scale[r]

Codes are packed two per byte along K, the even k in the low nibble. ``global_scale`` is a
multiplier (ModelOpt's ``weight_scale_2``), never a divisor. The magnitudes of E2M1 are {0, .5, 1,
1.5, 2, 3, 4, 6}; the format and its constants are those of the OCP MX v1.0 E2M1 element type and of
PTX ISA 9.1 table 56.

Everything here is plain PyTorch and runs on any device; nothing synchronises with the host.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

BLOCK = 16  # codes that share one UE4M3 scale
TILE_ROWS = 128  # rows of one swizzled scale tile
TILE_GROUPS = 4  # scales along K of one swizzled scale tile
E2M1_MAX = 6.0
UE4M3_MAX = 448.0
UE4M3_MIN = 2.0**-9  # the smallest subnormal; a block scale is never 0
GLOBAL_MIN = 2.0**-100  # keeps 1 / (scale * global_scale) finite in fp32
UE4M3_NAN = 0x7F

# (midpoint, does the midpoint itself round up?): ties go to the code whose lowest bit is 0
_E2M1_MIDPOINTS = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)


class ScaleLayout(enum.Enum):
    """Where the scale of (row r, group c) lies; Gp = groups padded to 4.

    ROW_MAJOR               (rows, K/16), byte r * K/16 + c
    SWIZZLE_32_4_4          rows padded to 128, groups to 4; byte (r//128)*128*Gp + (c//4)*512
                            + (r%32)*16 + ((r%128)//32)*4 + c%4: the tile of cuBLAS, PyTorch and
                            tcgen05
    SWIZZLE_32_4_4_GROUPED  the same tile, and the rows of every expert start at a multiple of 128
    """

    ROW_MAJOR = "row_major"
    SWIZZLE_32_4_4 = "swizzle_32_4_4"
    SWIZZLE_32_4_4_GROUPED = "swizzle_32_4_4_grouped"


ROW_MAJOR = ScaleLayout.ROW_MAJOR
SWIZZLE_32_4_4 = ScaleLayout.SWIZZLE_32_4_4
SWIZZLE_32_4_4_GROUPED = ScaleLayout.SWIZZLE_32_4_4_GROUPED

GlobalScale = Literal["per_token", "per_tensor"] | float | Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Nvfp4Tensor:
    """A tensor of logical shape (..., rows, K) in NVFP4.

    data          uint8 (..., rows, K/2): two E2M1 codes per byte, even k in the low nibble
    scale         float8_e4m3fn, sign bit 0. ROW_MAJOR: (..., rows, K/16). SWIZZLE_32_4_4:
                  (..., rows padded to 128, K/16 padded to 4), bytes in tile order.
                  SWIZZLE_32_4_4_GROUPED: (padded rows, K/16 padded to 4), see `grouped_scale_rows`
    global_scale  float32 multiplier whose shape is a prefix of data.shape[:-1]: () for the tensor,
                  (E,) for experts, (rows,) for rows; or (E, 2) = (gate, up) for the rows of W13
    scale_layout  ScaleLayout
    expert_offsets  int32 (E+1,), only with SWIZZLE_32_4_4_GROUPED: rows of expert e are
                  expert_offsets[e] : expert_offsets[e+1]

    Raises ValueError when shapes or dtypes disagree; nothing is read from the device for that.
    """

    data: Tensor
    scale: Tensor
    global_scale: Tensor
    scale_layout: ScaleLayout = ROW_MAJOR
    expert_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        if self.scale.dtype == torch.uint8:
            object.__setattr__(self, "scale", self.scale.view(torch.float8_e4m3fn))
        if self.data.dtype != torch.uint8 or self.data.dim() < 1:
            raise ValueError(
                "data must be uint8 (..., K/2) with two codes per byte, got "
                f"{tuple(self.data.shape)} {self.data.dtype}"
            )
        if self.scale.dtype != torch.float8_e4m3fn:
            raise ValueError(f"scale must be float8_e4m3fn or uint8, got {self.scale.dtype}")
        grouped = self.scale_layout is SWIZZLE_32_4_4_GROUPED
        if grouped != (self.expert_offsets is not None):
            raise ValueError(
                "expert_offsets go with SWIZZLE_32_4_4_GROUPED and with nothing else, got layout "
                f"{self.scale_layout.name} and expert_offsets "
                f"{'set' if self.expert_offsets is not None else 'None'}"
            )
        if self.shape[-1] % BLOCK:
            raise ValueError(f"K must be a multiple of {BLOCK}, got data {tuple(self.data.shape)}")
        if not self.data.device == self.scale.device == self.global_scale.device:
            raise ValueError(
                f"data is on {self.data.device}, scale on {self.scale.device}, global_scale on "
                f"{self.global_scale.device}"
            )
        lead = tuple(self.data.shape[:-1])
        g = tuple(self.global_scale.shape)
        gate_up = len(lead) == 2 and g == (lead[0], 2)
        if self.global_scale.dtype != torch.float32 or not (gate_up or g == lead[: len(g)]):
            raise ValueError(
                f"global_scale must be float32 with a prefix of {lead} as shape (or (E, 2) for "
                f"gate and up), got {g} {self.global_scale.dtype}"
            )
        if tuple(self.scale.shape) != self._scale_shape():
            raise ValueError(
                f"scale of codes {tuple(self.data.shape)} in {self.scale_layout.name} must have "
                f"shape {self._scale_shape()}, got {tuple(self.scale.shape)}"
            )

    def _scale_shape(self) -> tuple[int, ...]:
        *lead, half = self.data.shape
        groups = half * 2 // BLOCK
        if self.scale_layout is ROW_MAJOR:
            return (*lead, groups)
        if self.expert_offsets is not None:
            if len(lead) != 1:
                raise ValueError(f"grouped data must be (rows, K/2), got {tuple(self.data.shape)}")
            return (
                grouped_scale_rows(lead[0], self.expert_offsets.numel() - 1),
                _round_up(groups, TILE_GROUPS),
            )
        rows = lead[-1] if lead else 1
        return (*lead[:-1], _round_up(rows, TILE_ROWS), _round_up(groups, TILE_GROUPS))

    def __repr__(self) -> str:
        """Sizes, not contents: a weight has millions of codes."""
        shape = (*self.data.shape[:-1], self.data.shape[-1] * 2)
        return (
            f"Nvfp4Tensor(shape={shape}, scale_layout={self.scale_layout.name}, "
            f"global_scale={tuple(self.global_scale.shape)}, device={self.data.device})"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape (..., rows, K)."""
        return (*self.data.shape[:-1], self.data.shape[-1] * 2)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def row_major_scale(self) -> Tensor:
        """Scales as float8_e4m3fn (..., rows, K/16), whatever the layout."""
        rows = self.data.shape[-2] if self.data.dim() > 1 else 1
        groups = self.shape[-1] // BLOCK
        if self.scale_layout is ROW_MAJOR:
            return self.scale
        if self.expert_offsets is not None:
            target = grouped_rows(self.expert_offsets, rows)
            flat = unswizzle(self.scale, self.scale.shape[-2], groups)
            return flat.view(torch.uint8)[target].view(torch.float8_e4m3fn)
        plain = unswizzle(self.scale, rows, groups)
        return plain.reshape(groups) if self.data.dim() == 1 else plain

    def with_layout(self, layout: ScaleLayout) -> Nvfp4Tensor:
        """The same tensor with its scales in ROW_MAJOR or SWIZZLE_32_4_4."""
        if layout is self.scale_layout:
            return self
        if layout is SWIZZLE_32_4_4_GROUPED:
            raise ValueError("SWIZZLE_32_4_4_GROUPED needs expert_offsets: use group_rows(...)")
        scale = self.row_major_scale()
        if layout is SWIZZLE_32_4_4:
            scale = swizzle(scale.unsqueeze(0) if self.data.dim() == 1 else scale)
        return Nvfp4Tensor(self.data, scale, self.global_scale, layout)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values (..., rows, K): (code * scale) * global_scale; the first product is exact, then
        one rounding in fp32 (float64: none), then the cast to ``dtype``."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        g = self.global_scale.to(wide)
        if tuple(g.shape) != tuple(self.data.shape[: g.dim()]):
            raise ValueError(
                f"global_scale {tuple(g.shape)} belongs to gate and up rows whose order only "
                "ExpertWeights.from_nvfp4 knows: dequantise the projections apart"
            )
        values = decode(self, wide)
        return (values * g.reshape(*g.shape, *([1] * (values.dim() - g.dim())))).to(dtype)

    def to(self, device: torch.device | str) -> Nvfp4Tensor:
        move = {f: getattr(self, f).to(device) for f in ("data", "scale", "global_scale")}
        offsets = self.expert_offsets
        offsets = None if offsets is None else offsets.to(device)
        return dataclasses.replace(self, **move, expert_offsets=offsets)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def pack(codes: Tensor) -> Tensor:
    """E2M1 codes uint8 (..., K) in 0..15 -> uint8 (..., K/2); K even. Inverse of `unpack`."""
    if codes.dtype != torch.uint8 or codes.dim() < 1 or codes.shape[-1] % 2:
        raise ValueError(
            f"codes must be uint8 (..., even K), got {tuple(codes.shape)} {codes.dtype}"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(data: Tensor) -> Tensor:
    """Packed bytes uint8 (..., K/2) -> E2M1 codes uint8 (..., K). Inverse of `pack`."""
    if data.dtype != torch.uint8 or data.dim() < 1:
        raise ValueError(f"data must be uint8 (..., K/2), got {tuple(data.shape)} {data.dtype}")
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def encode_e2m1(x: Tensor) -> Tensor:
    """fp32 (any shape) -> E2M1 codes uint8, round to nearest even, saturating at 6.

    -0.0 keeps its sign bit; NaN becomes +6 (code 7), as cvt.rn.satfinite.e2m1x2 does (PTX ISA 9.1,
    cvt).
    """
    magnitude = x.abs()
    index = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for midpoint, up in _E2M1_MIDPOINTS:
        index += (magnitude >= midpoint) if up else (magnitude > midpoint)
    sign = torch.signbit(x).to(torch.uint8) << 3
    return torch.where(torch.isnan(x), 7, index | sign)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """E2M1 codes uint8 in 0..15 -> values (exact in every float type of 16 bits or more)."""
    # Arithmetic, not a table from the host: a copy to the device would wait for it.
    index = codes.int() & 7
    quarters = torch.where(index < 2, 2 * index, (2 + (index & 1)) << (index >> 1))
    magnitude = quarters.to(dtype) * 0.25
    return torch.where(codes > 7, -magnitude, magnitude)


class DecodeTables(NamedTuple):
    """What every byte decodes to, for those who decode often: making them takes 20 small steps.

    values  (256,) of a type that carries the two E2M1 values of a byte
    scales  (256,): UE4M3
    """

    values: Tensor
    scales: Tensor


def decode_tables(device: torch.device, dtype: torch.dtype) -> DecodeTables:
    """For values of ``dtype`` on ``device``; nothing waits for it."""
    every_byte = torch.arange(256, device=device, dtype=torch.int32).to(torch.uint8)
    pairs = decode_e2m1(unpack(every_byte.unsqueeze(-1)), dtype)  # (256, 2)
    values = pairs.view(_PAIR_CARRIER[dtype.itemsize]).squeeze(-1)  # (256,)
    return DecodeTables(values, every_byte.view(torch.float8_e4m3fn).to(dtype))


_EXACT = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def decode(
    q: Nvfp4Tensor, dtype: torch.dtype = torch.float32, tables: DecodeTables | None = None
) -> Tensor:
    """code * scale without the global scale, (..., rows, K), in float64, float32, float16 or
    bfloat16: exact in each (a product of an E2M1 and a UE4M3 value has at most 6 significant bits
    and is 2^-10 to 2688). ``tables``: those of ``dtype``. Raises TypeError for another dtype.
    """
    if dtype not in _EXACT:
        raise TypeError(f"dtype must be one of {_EXACT}, got {dtype}")
    tables = decode_tables(q.device, dtype) if tables is None else tables
    values = _lookup(tables.values, q.data).view(dtype)  # one gather per byte
    scales = _lookup(tables.scales, q.row_major_scale())
    blocks = values.unflatten(-1, (values.shape[-1] // BLOCK, BLOCK))
    return blocks.mul_(scales.unsqueeze(-1)).flatten(-2)


def _lookup(table: Tensor, data: Tensor) -> Tensor:
    """table (256,) indexed by the bytes of ``data``: several times faster than converting them."""
    index = data.view(torch.uint8).int().reshape(-1)
    return table.index_select(0, index).reshape(data.shape)


# a type that carries two values of so many bytes through one gather
_PAIR_CARRIER = {2: torch.int32, 4: torch.int64, 8: torch.complex128}


def _outer_scale(x: Tensor, global_scale: GlobalScale) -> Tensor:
    """fp32 outer scale, shape a prefix of x.shape[:-1], at least 2^-100 (NaN stays NaN)."""
    if isinstance(global_scale, Tensor):
        g = global_scale.to(device=x.device, dtype=torch.float32)
        if g.numel() == 1:
            g = g.reshape(())
        if tuple(g.shape) != tuple(x.shape[: g.dim()]) or g.dim() >= x.dim():
            raise ValueError(
                f"global_scale must have one element or a prefix of {tuple(x.shape[:-1])} as "
                f"shape, got {tuple(g.shape)}"
            )
    elif isinstance(global_scale, str):
        if global_scale not in ("per_token", "per_tensor"):
            raise ValueError(
                "global_scale must be 'per_token', 'per_tensor', a float or a Tensor, got "
                f"{global_scale!r}"
            )
        amax = (
            torch.zeros(x.shape[:-1], device=x.device) if x.shape[-1] == 0 else x.abs().amax(dim=-1)
        )
        if global_scale == "per_tensor":
            amax = amax.amax() if amax.numel() else amax.new_zeros(())
        # A tensor, not a number: CUDA divides by a number through its reciprocal, which rounds
        # otherwise.
        largest = torch.full((), E2M1_MAX * UE4M3_MAX, dtype=torch.float32, device=x.device)
        g = amax.float() / largest
    else:
        value = float(global_scale)
        if not 0.0 < value < float("inf"):
            raise ValueError(f"global_scale must be positive and finite, got {value}")
        g = torch.full((), value, dtype=torch.float32, device=x.device)
    return g.clamp(min=GLOBAL_MIN)


def _check_quantize_input(x: Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"x must be bfloat16, float16 or float32, got {x.dtype}: cast it explicitly"
        )
    if x.dim() < 1 or x.shape[-1] % BLOCK:
        raise ValueError(
            f"the last dimension of x must be a multiple of {BLOCK} (one scale per {BLOCK} codes), "
            f"got {tuple(x.shape)}"
        )


def encode_ue4m3(x: Tensor) -> Tensor:
    """fp32 -> UE4M3 as float8_e4m3fn: clamp to [2^-9, 448], round to nearest even; NaN becomes
    0x7F.
    """
    # The clamp comes before the cast: older PyTorch builds turn an overflowing cast into NaN.
    rounded = x.clamp(UE4M3_MIN, UE4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(torch.isnan(x), UE4M3_NAN, rounded).view(torch.float8_e4m3fn)


def quantize(
    x: Tensor,
    global_scale: GlobalScale = "per_token",
    scale_layout: ScaleLayout = ROW_MAJOR,
    exact_division: bool = False,
) -> Nvfp4Tensor:
    """Quantise (..., K) bf16/fp16/fp32 to NVFP4; K a multiple of 16, any strides, zero rows
    allowed.

    global_scale    "per_token": g[row] = max(amax(row) / 2688, 2^-100), shape x.shape[:-1];
                    "per_tensor": one amax for all rows, shape (); a float or a Tensor whose shape
                    is a prefix of x.shape[:-1]: used as given (at least 2^-100)
    scale_layout    ROW_MAJOR or SWIZZLE_32_4_4 (the last two dimensions are rows and K; the rest is
                    kept)
    exact_division  False: multiply by fp32 reciprocals, as kernels do; True: divide (offline
                    weights, ModelOpt's bytes)

    Per block of 16, in IEEE fp32 with g the outer scale:

        s    = e4m3_rne(clamp(amax * (1 / (6 g)), 2^-9, 448))
        code = e2m1_rne_sat(x * (1 / (float(s) g)))

    The element is divided by the *rounded* block scale. Values beyond 6 s g saturate. A NaN makes
    the scale of its block 0x7F; with "per_token" it (and Inf) also makes g of its row NaN (Inf) and
    touches no other row.

    Raises TypeError for another dtype, ValueError for another shape, global scale or layout.
    """
    _check_quantize_input(x)
    if scale_layout is SWIZZLE_32_4_4_GROUPED:
        raise ValueError(
            "SWIZZLE_32_4_4_GROUPED needs expert_offsets: call quantize_grouped(x, expert_offsets)"
        )
    g = _outer_scale(x, global_scale)
    codes, scale = _quantize_blocks(x.float(), g, exact_division)
    if scale_layout is SWIZZLE_32_4_4:
        scale = swizzle(scale if x.dim() > 1 else scale.unsqueeze(0))
    return Nvfp4Tensor(pack(codes), scale, g, scale_layout)


def _quantize_blocks(x: Tensor, g: Tensor, exact_division: bool) -> tuple[Tensor, Tensor]:
    """fp32 (..., K) and its outer scale -> codes uint8 (..., K), scales float8_e4m3fn (...,
    K/16).
    """
    blocks = x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))  # (..., K/16, 16)
    per_block = g.reshape(
        *g.shape, *([1] * (blocks.dim() - 1 - g.dim()))
    )  # (..., 1) against (..., K/16)
    amax = blocks.abs().amax(dim=-1)  # (..., K/16)
    six_g = E2M1_MAX * per_block
    scale = encode_ue4m3(amax / six_g if exact_division else amax * (1.0 / six_g))
    step = (scale.float() * per_block).unsqueeze(-1)  # (..., K/16, 1)
    codes = encode_e2m1(blocks / step if exact_division else blocks * (1.0 / step))
    return codes.flatten(-2), scale


def dequantize(q: Nvfp4Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values (..., rows, K) of an `Nvfp4Tensor`; see `Nvfp4Tensor.dequantize`."""
    return q.dequantize(dtype)


def swizzle(scale: Tensor) -> Tensor:
    """ROW_MAJOR scales (..., rows, groups), one byte each -> SWIZZLE_32_4_4 (..., rows padded to
    128, groups padded to 4).

    Padding bytes are 0: the MMA multiplies by those that pad K. Inverse of `unswizzle`.
    """
    if scale.dim() < 2 or scale.dtype.itemsize != 1:
        raise ValueError(
            f"scale must be (..., rows, groups) of one byte each, got {tuple(scale.shape)} "
            f"{scale.dtype}"
        )
    *lead, rows, groups = scale.shape
    rows_p, groups_p = _round_up(rows, TILE_ROWS), _round_up(groups, TILE_GROUPS)
    out = torch.zeros((*lead, rows_p, groups_p), dtype=torch.uint8, device=scale.device)
    out[..., :rows, :groups] = scale.view(torch.uint8)
    tiles = out.reshape(
        *lead, rows_p // 128, 4, 32, groups_p // 4, 4
    )  # (..., tile_r, quarter, r%32, tile_c, c%4)
    d = len(lead)
    order = (
        *range(d),
        d,
        d + 3,
        d + 2,
        d + 1,
        d + 4,
    )  # -> (..., tile_r, tile_c, r%32, quarter, c%4)
    return tiles.permute(order).reshape(*lead, rows_p, groups_p).view(scale.dtype)


def unswizzle(scale: Tensor, rows: int, groups: int) -> Tensor:
    """SWIZZLE_32_4_4 scales (..., rows padded to 128, groups padded to 4) -> ROW_MAJOR (..., rows,
    groups).
    """
    *lead, rows_p, groups_p = scale.shape
    if rows_p % TILE_ROWS or groups_p % TILE_GROUPS or rows > rows_p or groups > groups_p:
        raise ValueError(
            f"swizzled scales of {rows} rows x {groups} groups must have shape (..., "
            f"{_round_up(rows, TILE_ROWS)}, {_round_up(groups, TILE_GROUPS)}), got "
            f"{tuple(scale.shape)}"
        )
    tiles = scale.view(torch.uint8).reshape(*lead, rows_p // 128, groups_p // 4, 32, 4, 4)
    d = len(lead)
    order = (*range(d), d, d + 3, d + 2, d + 1, d + 4)  # its own inverse
    plain = tiles.permute(order).reshape(*lead, rows_p, groups_p)
    return plain[..., :rows, :groups].contiguous().view(scale.dtype)


def grouped_scale_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a SWIZZLE_32_4_4_GROUPED scale buffer that is enough for any split of ``num_rows``
    over experts.

    sum_e ceil(c_e / 128) * 128 <= num_rows + 127 * min(num_experts, num_rows), rounded down to a
    tile.
    """
    bound = num_rows + (TILE_ROWS - 1) * min(num_experts, num_rows)
    return bound // TILE_ROWS * TILE_ROWS


def grouped_scale_offsets(expert_offsets: Tensor) -> Tensor:
    """int32 (E+1,): first scale row of each expert, ceil(count / 128) * 128 apart; the last is the
    total.
    """
    counts = expert_offsets.diff()
    padded = (counts + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
    return torch.cat((padded.new_zeros(1), padded.cumsum(0))).to(torch.int32)


def grouped_rows(expert_offsets: Tensor, num_rows: int) -> Tensor:
    """int64 (num_rows,): scale row of each routed row. Rows past the last expert map to row 0 of
    the buffer (they have no place in it): mask them."""
    row = torch.arange(num_rows, device=expert_offsets.device, dtype=torch.int32)
    last = expert_offsets.numel() - 2
    expert = torch.searchsorted(expert_offsets[1:].contiguous(), row, right=True).clamp(
        max=max(last, 0)
    )
    target = grouped_scale_offsets(expert_offsets)[expert] + (row - expert_offsets[expert])
    return torch.where(row < expert_offsets[-1], target, 0).long()


def group_scales(scale: Tensor, expert_offsets: Tensor) -> Tensor:
    """ROW_MAJOR scales (rows, groups) of expert-major rows -> SWIZZLE_32_4_4_GROUPED bytes
    (`grouped_scale_rows`, groups padded to 4); padding bytes are 0, rows past the last expert are
    dropped."""
    rows, groups = scale.shape
    total = grouped_scale_rows(rows, expert_offsets.numel() - 1)
    plain = torch.zeros((total + 1, groups), dtype=torch.uint8, device=scale.device)
    target = grouped_rows(expert_offsets, rows)
    inside = torch.arange(rows, device=scale.device) < expert_offsets[-1]
    plain[torch.where(inside, target, total)] = scale.view(
        torch.uint8
    )  # row `total` takes what has no place
    return swizzle(plain[:total]).view(scale.dtype)


def group_rows(q: Nvfp4Tensor, expert_offsets: Tensor) -> Nvfp4Tensor:
    """ROW_MAJOR (rows, K) whose rows are expert-major -> the same codes with grouped scales."""
    check_expert_offsets(expert_offsets, q.device)
    if q.data.dim() != 2:
        raise ValueError(f"grouped tensors are (rows, K), got {q.shape}")
    scale = group_scales(q.row_major_scale(), expert_offsets)
    return Nvfp4Tensor(q.data, scale, q.global_scale, SWIZZLE_32_4_4_GROUPED, expert_offsets)


def check_expert_offsets(expert_offsets: Tensor, device: torch.device) -> None:
    """Raises ValueError unless int32 (E+1,) on ``device``. Values are not read: that would wait for
    the device.
    """
    if (
        expert_offsets.dtype != torch.int32
        or expert_offsets.dim() != 1
        or expert_offsets.numel() < 2
    ):
        raise ValueError(
            f"expert_offsets must be int32 (num_experts + 1,), got {tuple(expert_offsets.shape)} "
            f"{expert_offsets.dtype}"
        )
    if expert_offsets.device != device:
        raise ValueError(f"expert_offsets are on {expert_offsets.device}, the rows on {device}")


def quantize_grouped(
    x: Tensor,
    expert_offsets: Tensor,
    global_scale: GlobalScale = "per_token",
    exact_division: bool = False,
) -> Nvfp4Tensor:
    """Quantise expert-major rows (rows, K); scales in SWIZZLE_32_4_4_GROUPED, see `quantize`.

    expert_offsets  int32 (E+1,), on the device of x: rows of expert e are expert_offsets[e] :
                    expert_offsets[e+1]
    """
    if x.dim() != 2:
        raise ValueError(f"x must be (rows, K), got {tuple(x.shape)}")
    check_expert_offsets(expert_offsets, x.device)
    return group_rows(quantize(x, global_scale, exact_division=exact_division), expert_offsets)


def invalid_scales(scale: Tensor) -> Tensor:
    """bool, shape of ``scale``: bytes that no UE4M3 scale may have (0x7F is NaN, bit 7 is not part
    of the format).
    """
    return scale.view(torch.uint8) >= UE4M3_NAN
