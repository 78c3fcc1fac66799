"""NVFP4 operands with known values, scale layouts of the peers, and fp64 references.

Scales are powers of two, codes arbitrary: every partial sum of a K up to 4096 is a multiple of 1/16
below 2**20, so fp32 accumulation is exact in any order and a bf16 result has one right answer.
"""

from dataclasses import dataclass

import torch

from cute_kernels import nvfp4

Tensor = torch.Tensor
TILE = 128


@dataclass(frozen=True)
class Operand:
    """codes (..., rows, K/2) uint8, scale (..., rows, K/16) UE4M3, values (..., rows, K) fp64."""

    codes: Tensor
    scale: Tensor

    @property
    def values(self) -> Tensor:
        codes = nvfp4.decode_e2m1(nvfp4.unpack(self.codes), torch.float64)
        return codes * self.scale.to(torch.float64).repeat_interleave(16, -1)

    @property
    def fp4(self) -> Tensor:
        """The codes as torch's packed FP4."""
        return self.codes.view(torch.float4_e2m1fn_x2)


def operand(generator: torch.Generator, *shape: int) -> Operand:
    """Random operand of logical shape (..., rows, K)."""
    *lead, k = shape
    codes = torch.randint(0, 256, (*lead, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.tensor([0.5, 1.0, 2.0]).to(torch.float8_e4m3fn).view(torch.uint8)
    index = torch.randint(0, 3, (*lead, k // 16), generator=generator)
    return Operand(codes, scales[index].view(torch.float8_e4m3fn))


def powers_of_two(generator: torch.Generator, *shape: int) -> Tensor:
    """fp32 values out of 1/4, 1/2, 1, 2."""
    return 2.0 ** torch.randint(-2, 2, shape, generator=generator).float()


def offsets(counts: list[int]) -> Tensor:
    """int32 (E + 1,) first row of each expert."""
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def expert_of_row(counts: list[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))


def tiled_scales(scale: Tensor) -> Tensor:
    """(..., rows, groups) -> (..., rows / 128, groups / 4, 32, 4, 4) tiles, zero padded."""
    tiles = nvfp4.swizzle(scale)
    *lead, rows, groups = tiles.shape
    return tiles.view(*lead, rows // TILE, groups // 4, 32, 4, 4)


def ragged_scale_rows(counts: list[int]) -> Tensor:
    """Row of each routed row in a buffer where expert e starts at tile offsets[e] // 128 + e."""
    start = offsets(counts)
    parts = [
        (int(start[e]) // TILE + e) * TILE + torch.arange(count) for e, count in enumerate(counts)
    ]
    return torch.cat(parts)


def ragged_scales(scale: Tensor, counts: list[int], fill: int = 0x7F) -> Tensor:
    """(rows, groups) -> (1, tiles, groups / 4, 32, 4, 4); `fill` between experts."""
    rows, groups = scale.shape
    tiles = -(-rows // TILE) + len(counts)
    plain = torch.full((tiles * TILE, groups), fill, dtype=torch.uint8)
    plain[ragged_scale_rows(counts)] = scale.view(torch.uint8)
    return tiled_scales(plain.view(scale.dtype))[None]


def matmul(a: Operand, b: Operand, counts: list[int]) -> Tensor:
    """fp64 (rows, N): row r of a against b[expert of r] (E, N, K)."""
    av, bv, start = a.values, b.values, offsets(counts).tolist()
    out = torch.zeros(av.shape[0], bv.shape[1], dtype=torch.float64)
    for e in range(len(counts)):
        out[start[e] : start[e + 1]] = av[start[e] : start[e + 1]] @ bv[e].T
    return out


class Mismatch(AssertionError):
    """A peer's result is not what fp64 says."""


def check_equal(got: Tensor, want: Tensor, what: str) -> None:
    """Bit equality, NaN never equal."""
    same = got == want
    if not bool(same.all()):
        index = tuple(int(i) for i in (~same).nonzero()[0])
        raise Mismatch(
            f"{what}: {int((~same).sum())} of {same.numel()} differ, first at {index}: "
            f"expected {want[index].item()}, got {got[index].item()}"
        )


def check_close(got: Tensor, want: Tensor, bound: Tensor, what: str) -> None:
    """|got - want| <= bound, element by element."""
    error = (got.double() - want).abs()
    bad = ~(error <= bound)
    if bool(bad.any()):
        index = tuple(int(i) for i in bad.nonzero()[0])
        raise Mismatch(
            f"{what}: {int(bad.sum())} of {bad.numel()} beyond the bound, first at {index}: "
            f"expected {want[index].item()}, got {got[index].item()}, bound {bound[index].item()}"
        )


def check_quantised(codes: Tensor, scale: Tensor, h: Tensor, norm: float, what: str) -> float:
    """codes (rows, K/2), scale (rows, K/16) against fp64 h: scale = e4m3(amax * norm / 6), code =
    e2m1(h * norm / scale).

    The approximate exponential leaves h known to 2**-20, and divisions by reciprocals add 2**-21: a
    byte is right if a value this close to the exact one rounds to it. Returns the share of bytes
    that are equal to the rounding of the exact value.
    """
    slack = 2.0**-19
    blocks = h.unflatten(-1, (-1, 16))
    exact = blocks.abs().amax(-1) * norm / 6

    def e4m3(x: Tensor) -> Tensor:
        return x.clamp(max=448.0).float().to(torch.float8_e4m3fn).view(torch.uint8)

    got = scale.view(torch.uint8)
    ok = (got == e4m3(exact * (1 - slack))) | (got == e4m3(exact * (1 + slack)))
    if not bool(ok.all()):
        index = tuple(int(i) for i in (~ok).nonzero()[0])
        raise Mismatch(
            f"{what}: {int((~ok).sum())} of {ok.numel()} scales differ, first at {index}: exact "
            f"{exact[index].item()}, got {scale[index].float().item()}"
        )
    factor = torch.where(scale.double() == 0, 0.0, norm / scale.double()).repeat_interleave(16, -1)
    value = h * factor

    def e2m1(x: Tensor) -> Tensor:
        return nvfp4.decode_e2m1(nvfp4.encode_e2m1(x.float()), torch.float64)

    decoded = nvfp4.decode_e2m1(nvfp4.unpack(codes), torch.float64)
    ok = (decoded == e2m1(value * (1 - slack))) | (decoded == e2m1(value * (1 + slack)))
    if not bool(ok.all()):
        index = tuple(int(i) for i in (~ok).nonzero()[0])
        raise Mismatch(
            f"{what}: {int((~ok).sum())} of {ok.numel()} codes differ, first at {index}: exact "
            f"{value[index].item()}, got {decoded[index].item()}"
        )
    return float((decoded == e2m1(value)).double().mean())


def silu_product(gate: Tensor, up: Tensor) -> Tensor:
    """fp64 up * gate * sigmoid(gate)."""
    return up * gate * torch.sigmoid(gate)
