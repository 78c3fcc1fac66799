"""NVFP4 codes to bf16 in registers: 14 instructions per 8 codes, scales included. The bits are
those of `layout`."""

from cutlass import Uint32
from cutlass.cute.arch import inline_ptx, shf

from cute_kernels.device.ptx import prmt
from cute_kernels.sm90 import layout


def _rotl(word: Uint32, by: int) -> Uint32:
    """Rotated as far as `layout.CODE_MASK` can tell: its lowest bit is 6, so up to there a shift
    will do, which the assembler may turn into a multiplication (the ALU pipe is the narrow one
    here)."""
    return shf(word, word, by, "l") if by > 6 else word << by


def _select(mask: int, a: Uint32, b: Uint32) -> Uint32:
    """Bits ``mask`` of a, the others of b: one lop3 with an immediate."""
    return inline_ptx(
        f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{mask:x}, 0xe4;",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def _scaled(codes: Uint32, scales: Uint32, upper: bool) -> Uint32:
    """Both bf16 of ``codes`` times the lower or upper bf16 of ``scales`` (HMUL2 takes either half
    as it is). Subnormal inputs count: half a unit is 2^-127 before scaling."""
    lanes = "mov.b32 {_, s}, {$r1};" if upper else "mov.b32 {s, _}, {$r1};"
    return inline_ptx(
        "{ .reg .b16 s; .reg .b32 ss; "
        + lanes
        + " mov.b32 ss, {s, s}; mul.bf16x2 {$w0}, {$r0}, ss; }",
        write_only_types=[Uint32],
        read_only_args=[codes, scales],
    )


def decode_step(
    words: tuple[Uint32, Uint32], scales: Uint32, exponent: Uint32, step: int
) -> list[Uint32]:
    """The even (``step`` 0) or odd k16 step of two code words and one scale word -> R0..R3, bf16x2,
    times 2^-7.

    exponent  `layout.SCALE_EXPONENT` in a register: lop3 has room for one immediate, which is the
              mask
    """
    own, other = words[step], words[1 - step]
    pair = prmt(scales, scales, 0x2301) if step else scales
    pair = (pair & Uint32(layout.SCALE_MASK)) | exponent
    out = []
    for i in range(4):
        if i < 3:
            codes = _rotl(own, layout.ROTATE[step][i])
        else:
            codes = _rotl(_select(layout.SPLIT_MASK[step], own, other), layout.SPLIT_ROTATE[step])
        out.append(_scaled(codes & Uint32(layout.CODE_MASK), pair, upper=i % 2 == 1))
    return out
