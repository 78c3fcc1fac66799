"""Numbers of the SM90 weight layout that packing (torch) and decoding (device) must agree on.

A block is 64 weight rows x 64 k: what one warpgroup feeds to four m64nNk16 wgmma steps from
registers.

    bytes 0..2047      thread t of 128, 16 bytes each: its codes of four k16 steps, two words for
                       two steps
    bytes 2048..2303   slot s of 32, 8 bytes each: the scales of rows r and r + 8 for four k16
                       steps, r = 16 (s // 8) + s % 8

Thread t = 32 w + l owns rows r = 16 w + l // 4 and r + 8 and, of every k16 step, k = 2 (l % 4) +
{0, 1, 8, 9}: the register-A fragment of wgmma (PTX ISA, "Register fragments for
wgmma.mma_async.m64nNk16", matrix A):

    R0 = (r, k k+1)   R1 = (r+8, k k+1)   R2 = (r, k+8 k+9)   R3 = (r+8, k+8 k+9)

with the even k in the low half.

Blocks lie in memory as (expert, m128, k64, m64 of 2, 2304): a stage of 128 rows is one run of bytes
for any number of k64, so one bulk copy fetches it and an expert is plain 64-bit pointer arithmetic.

Codes. The bits of a code sit at positions 15 (sign) and 8..6 of each half of a register: as a bf16
that is the value times 2^-126. Two 32-bit words carry 16 codes = 8 registers; register i is

    rotl(w0, ROTATE[0][i]) & CODE_MASK                      i = 0, 1, 2
    rotl(bits SPLIT_MASK[0] of w0, the others of w1; SPLIT_ROTATE[0]) & CODE_MASK        i = 3
    rotl(w1, ROTATE[1][i - 4]) & CODE_MASK                  i = 4, 5, 6
    rotl(bits SPLIT_MASK[1] of w1, the others of w0; SPLIT_ROTATE[1]) & CODE_MASK        i = 7

Registers 0..3 are R0..R3 of the even k16 step of the pair, 4..7 those of the odd one.

Scales. UE5M3 byte b = bf16 (b << 4) | 0x7000 = scale x 2^119: every UE4M3 scale from 2^-9 to 448
has one (b = 0x68 .. 0xF6, subnormals normalised). A scale of 0 has none: its codes are packed as 0.
code x scale is therefore 2^-7 too small, exactly, and the fp32 alpha of the epilogue carries
`ALPHA_FACTOR`. In a half of a scale word the even step's byte lies at bits 11..4 and the odd step's
at bits 15..12 (low nibble) and 3..0 (high nibble): where the same mask finds it after the two bytes
of the half are swapped.
"""

from __future__ import annotations

BLOCK_K = 64
TILE_ROWS = 128  # rows of two blocks side by side; weight rows are padded to it
TILE_K = 128  # K of a packed weight is padded to it
CODE_BYTES = 2048
SCALE_BYTES = 256
BLOCK_BYTES = CODE_BYTES + SCALE_BYTES

CODE_MASK = 0x81C081C0
ROTATE = ((0, 4, 10), (2, 8, 12))
SPLIT_MASK = (0x00030003, 0x01020102)
SPLIT_ROTATE = (6, 14)

SCALE_MASK = 0x0FF00FF0
SCALE_EXPONENT = 0x70007000
SCALE_ONE = 0xB0  # UE5M3 of 1.0
ALPHA_FACTOR = 128.0


def register_sources() -> tuple[tuple[tuple[int, int], ...], ...]:
    """Where the bits of the 8 registers of two words come from.

    Returns 8 tuples, one per register, each of 8 pairs (bit of the register, bit of w0 | w1 << 32),
    lowest register bit first. The 64 source bits are all different (tests/sm90/test_layout.py).
    """
    out = []
    for i in range(8):
        own, j = divmod(i, 4)
        rotate = ROTATE[own][j] if j < 3 else SPLIT_ROTATE[own]
        pairs = []
        for bit in range(32):
            if not CODE_MASK >> bit & 1:
                continue
            source = (bit - rotate) % 32
            word = own
            if j == 3 and not SPLIT_MASK[own] >> source & 1:
                word = 1 - own
            pairs.append((bit, source + 32 * word))
        out.append(tuple(pairs))
    return tuple(out)
