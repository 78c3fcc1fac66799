"""Rows to NVFP4: codes and one outer scale per row, then block scales in the layout the MMA reads.

    g = max(amax(row) / 2688, 2^-100);  s = e4m3(clamp(amax(block) / (6 g), 2^-9, 448));  code =
    e2m1(x / (s g))

with the reciprocals of numerics section 2, bit for bit. Two kernels: `QuantizeRows` reads every
row once and writes its codes and its scales row-major; `GroupScales` puts scales of routed rows
into SWIZZLE_32_4_4_GROUPED (a row goes to several experts, and each expert's rows start at a
multiple of 128).
"""

from __future__ import annotations

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

from cute_kernels.compile import Ptr
from cute_kernels.device import ptx
from cute_kernels.device.scheduler import find_tile
from cute_kernels.device.sizes import BLOCK, piece_width, scale_pitch

E2M1_UE4M3_MAX = 6.0 * 448.0
GLOBAL_MIN = 2.0**-100
UE4M3_NAN = 0x7F
WARP = 32


@dataclasses.dataclass(frozen=True)
class QuantizeRows:
    """One CTA per row; a thread owns ``blocks_per_thread`` blocks of 16 elements and keeps them in
    registers between the row maximum and the codes, so a row is read once.

    hidden      K, a multiple of 16
    dtype       'BFloat16', 'Float16' or 'Float32'
    given       the outer scale is an input (static, per tensor), else per row from the data
    weighted    rows are multiplied by a weight first (fp32, rounded)
    bounded     rows at and past ``limit[0]`` are skipped (expert-major rows of which only some
                exist)
    hardware    cvt.e2m1x2 exists (sm_100); otherwise the same bits by integer arithmetic

    x (rows, K); outer fp32 (rows,) or one element (``outer_stride`` 0); weight fp32 (rows,);
    data uint8 (rows, K/2); scale uint8 (rows, scale_pitch), the bytes past K/16 are 0; gx fp32
    (rows,).
    """

    hidden: int
    dtype: str = "BFloat16"
    given: bool = False
    weighted: bool = False
    bounded: bool = False
    hardware: bool = True
    blocks_per_thread: int = 0

    @property
    def name(self) -> str:
        mode = "given" if self.given else "per_token"
        return f"quantize_rows_{mode}_h{self.hidden}_{self.dtype.lower()}"

    @property
    def arguments(self) -> tuple:
        f32 = Ptr("Float32", 4)
        limit = Ptr("Int32", 4) if self.bounded else None
        inputs = (
            Ptr(self.dtype),
            f32 if self.given else None,
            f32 if self.weighted else None,
            limit,
        )
        return (inputs, (Ptr("Uint8"), Ptr("Uint8"), f32), "i32", "i32")

    @property
    def groups(self) -> int:
        return self.hidden // BLOCK

    @property
    def blocks(self) -> int:
        """Blocks per thread."""
        if self.blocks_per_thread:
            return self.blocks_per_thread
        n = 1 if scale_pitch(self.hidden) < 256 else 2
        while scale_pitch(self.hidden) > 512 * n:
            n *= 2
        return n

    @property
    def threads(self) -> int:
        return -(-scale_pitch(self.hidden) // (self.blocks * WARP)) * WARP

    @cute.jit
    def __call__(self, inputs, outputs, rows, outer_stride, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(inputs, outputs, outer_stride).launch(
            grid=(rows, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, inputs, outputs, outer_stride):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        ptx.wait_for_previous_kernel()
        bound = row + 1
        if cutlass.const_expr(self.bounded):
            bound = ptx.load_i32(inputs[3].toint())
        if row < bound:
            self.quantize_row(inputs, outputs, row, tid, outer_stride)
        ptx.allow_next_kernel()

    @cute.jit
    def quantize_row(self, inputs, outputs, row, tid, outer_stride):
        x, outer, weight, _ = inputs
        gx = outputs[-1]
        words = self.load_row(x.toint(), row, tid)  # (blocks, words of a block)
        factor = None
        if cutlass.const_expr(self.weighted):
            factor = ptx.load_f32(weight.toint() + Int64(row) * 4)
        amaxes = [self.block_amax(w, factor) for w in words]
        if cutlass.const_expr(self.given):
            g = ptx.load_f32(outer.toint() + Int64(row) * outer_stride * 4)
        else:
            g = cta_max(tree(cutlass.max, amaxes), self.threads, tid).bitcast(Float32) / Float32(
                E2M1_UE4M3_MAX
            )
        g = cute.arch.fmax(g, Float32(GLOBAL_MIN), nan=True)
        c = Float32(1.0) / ptx.mul(g, Float32(6.0))
        if tid == 0:
            ptx.store_f32(gx.toint() + Int64(row) * 4, g)
        for i in cutlass.range_constexpr(self.blocks):
            byte, codes = self.encode_block(words[i], amaxes[i], g, c, factor)
            self.store_block(outputs, row, tid + i * self.threads, byte, codes)

    @cute.jit
    def store_block(self, outputs, row, block, byte, codes):
        """Codes and scale of block ``block`` of a row, or the zero scale of one past its end."""
        data, scale, _ = outputs
        scales = scale.toint() + Int64(row) * scale_pitch(self.hidden) + block
        if block < self.groups:
            ptx.store_u32x2(data.toint() + Int64(row) * (self.hidden // 2) + block * 8, codes)
            ptx.store_u8(scales, byte)
        elif block < scale_pitch(self.hidden):
            ptx.store_u8(scales, Uint32(0))

    def load_row(self, base, row, tid):
        """Words of this thread's blocks; all loads are issued before the first use. Blocks past
        the row repeat its last block: that changes no maximum and stores nothing."""
        size = BLOCK * (4 if self.dtype == "Float32" else 2)  # bytes of a block
        start = base + Int64(row) * (self.hidden // BLOCK * size)
        words = []
        for i in range(self.blocks):
            block = tid + i * self.threads
            if self.threads * self.blocks > self.groups:
                block = cutlass.min(block, Int32(self.groups - 1))
            address = start + block * size
            parts = [ptx.load_u32x4(address + 16 * j) for j in range(size // 16)]
            words.append([w for part in parts for w in part])
        return words

    def elements(self, words, factor):
        """The 16 values of a block in fp32 (weighted)."""
        if self.dtype == "Float32":
            values = [w.bitcast(Float32) for w in words]
        elif self.dtype == "BFloat16":
            values = [
                v
                for w in words
                for v in ((w << 16).bitcast(Float32), (w & Uint32(0xFFFF0000)).bitcast(Float32))
            ]
        else:
            values = [
                v for w in words for v in (ptx.half_to_f32(w, False), ptx.half_to_f32(w, True))
            ]
        return values if factor is None else [ptx.mul(v, factor) for v in values]

    def block_amax(self, words, factor):
        """Bits of the block's largest magnitude in fp32. Compared as integers, so NaN wins."""
        if self.dtype == "Float32" or factor is not None:
            bits = [v.bitcast(Uint32) & 0x7FFFFFFF for v in self.elements(words, factor)]
            return tree(cutlass.max, bits)
        pair = tree(ptx.max_u16x2, [w & 0x7FFF7FFF for w in words])
        if self.dtype == "BFloat16":
            return cutlass.max(pair << 16, pair & Uint32(0xFFFF0000))
        low = ptx.half_to_f32(pair, False).bitcast(Uint32)
        return cutlass.max(low, ptx.half_to_f32(pair, True).bitcast(Uint32))

    def encode_block(self, words, amax_bits, g, c, factor):
        """(scale byte, two words of codes) of a block."""
        amax = amax_bits.bitcast(Float32)
        raw = ptx.mul(amax, c)
        clamped = cute.arch.fmax(raw, Float32(2.0**-9), nan=True)
        byte = ptx.encode_e4m3(cute.arch.fmin(clamped, Float32(448.0), nan=True))
        r = Float32(1.0) / ptx.mul(ptx.decode_ue4m3(byte), g)
        values = [ptx.mul(v, r) for v in self.elements(words, factor)]
        encode = ptx.encode_e2m1x8 if self.hardware else ptx.encode_e2m1x8_integer
        codes = [encode(values[:8]), encode(values[8:])]
        # A NaN scale makes every code of its block that of NaN; its bits decode to a number above.
        nan = byte == UE4M3_NAN
        return byte, [ptx.select(nan, Uint32(0x77777777), w) for w in codes]


def tree(operation, values):
    """Balanced reduction: shorter dependency chains than a fold."""
    values = list(values)
    while len(values) > 1:
        pairs = [operation(a, b) for a, b in zip(values[::2], values[1::2])]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


@cute.jit
def cta_max(value, threads: cutlass.Constexpr, tid):
    """Maximum of a Uint32 over the CTA, in every thread; all its warps are whole and here."""
    total = ptx.redux_max_u32(value)
    warps = threads // WARP
    if cutlass.const_expr(warps > 1):
        words = -(-warps // 4) * 4  # read 16 bytes at a time: the last ones are written too
        sMax = cute.make_tensor(
            cute.arch.alloc_smem(Uint32, words, alignment=16), cute.make_layout(words)
        )
        if tid % WARP == 0:
            sMax[tid // WARP] = total
        if tid < words - warps:
            sMax[warps + tid] = Uint32(0)
        cute.arch.sync_threads()
        total = tree(cutlass.max, [sMax[w] for w in range(words)])
    return total


@dataclasses.dataclass(frozen=True)
class GroupScales:
    """Row-major scales to SWIZZLE_32_4_4_GROUPED: one CTA per tile of 128 scale rows.

    A thread reads 16 scales of the four rows r, r+32, r+64, r+96 and writes four 16-byte pieces,
    so both sides move whole sectors. Rows without a routed row, and columns past K/16, are written
    0. Tiles past the last expert are left alone.

    groups   K/16
    pitch    bytes between rows of the input
    indexed  routed row -> input row through ``row_token``; otherwise row r is row r
    zeros    bytes of the input between its scales and the next row are zero; otherwise anything

    scale uint8 (rows in, pitch); row_token int32 (R,); expert_offsets int32 (E+1,);
    grouped uint8 (tiles * 128, groups padded to 4)
    """

    groups: int
    pitch: int
    indexed: bool = True
    threads: int = 128
    zeros: bool = True

    @property
    def name(self) -> str:
        return f"group_scales_g{self.groups}_p{self.pitch}{'_indexed' if self.indexed else ''}"

    @property
    def arguments(self) -> tuple:
        i32 = Ptr("Int32", 4)
        align = self.width
        return (
            Ptr("Uint8", align),
            i32 if self.indexed else None,
            i32,
            Ptr("Uint8"),
            "i32",
            "i32",
        )

    @property
    def width(self) -> int:
        """Bytes of one load, none of which holds scales and what is none."""
        width = piece_width(self.pitch)
        return width if self.zeros else min(width, piece_width(self.groups))

    @property
    def padded(self) -> int:
        return -(-self.groups // 4) * 4

    @cute.jit
    def __call__(self, scale, row_token, expert_offsets, grouped, num_experts, tiles, stream):
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(scale, row_token, expert_offsets, grouped, num_experts).launch(
            grid=(tiles, 1, 1), block=(self.threads, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, scale, row_token, expert_offsets, grouped, num_experts):
        tile, _, _ = cute.arch.block_idx()
        ptx.wait_for_previous_kernel()
        self.group_tile(scale, grouped, (row_token, expert_offsets, num_experts), tile)
        ptx.allow_next_kernel()

    @cute.jit
    def group_tile(self, scale, grouped, plan, tile):
        """Scale tile ``tile``, by the first `threads` threads of a CTA. ``plan``: row_token,
        expert_offsets and the number of experts."""
        row_token, expert_offsets, experts = plan
        tid, _, _ = cute.arch.thread_idx()
        found, _, row0, end, *_ = find_tile(expert_offsets.toint(), experts, tile, 1, 128)
        if found:
            # lanes: 16 rows x 2 neighbouring pieces of 16 columns, so a warp reads 32-byte sectors.
            # A warp keeps its rows: the number of warps is even.
            lane, warp = tid % WARP, tid // WARP
            r32 = warp % 2 * 16 + lane // 2
            sources = self.row_addresses(scale, row_token, row0 + r32, end)
            base = grouped.toint() + Int64(tile) * (128 * self.padded)
            pieces = -(-self.padded // 16)
            stride = self.threads // WARP
            for pair in cutlass.range(warp // 2, -(-pieces // 2), stride // 2):
                piece = pair * 2 + lane % 2
                if piece < pieces:
                    rows = [self.load_piece(*source, piece) for source in sources]
                    self.store_tile(base, rows, piece, r32)

    def row_addresses(self, scale, row_token, row, end):
        """(address, exists) of the scales of rows row + 0, 32, 64, 96. A row that does not exist
        gets the address of one that does: its load is harmless, and no load waits for a branch."""
        routed = [row + 32 * q for q in range(4)]
        sources = [cutlass.min(r, end - 1) for r in routed]
        if self.indexed:
            sources = [ptx.load_i32(row_token.toint() + Int64(r) * 4) for r in sources]
        exists = [r < end for r in routed]
        addresses = [scale.toint() + Int64(cutlass.max(r, 0)) * self.pitch for r in sources]
        return list(zip(addresses, exists))

    def load_piece(self, address, exists, piece):
        """Four words: 16 scales from column 16 * piece on, 0 past the last."""
        address = address + piece * 16
        if self.width == 16:  # the pitch holds whole pieces, zero past the last scale
            words = list(ptx.load_u32x4(address))
        else:
            words = [self.load_word(address + 4 * w, piece * 16 + 4 * w) for w in range(4)]
        return [ptx.select(exists, w, Uint32(0)) for w in words]

    @cute.jit
    def load_word(self, address, column):
        word = Uint32(0)
        if cutlass.const_expr(self.width >= 4):
            if column < self.groups:
                word = ptx.load_u32(address)
        else:
            for b in cutlass.range_constexpr(4):
                if column + b < self.groups:
                    word = word | (ptx.load_u8(address + b) << (8 * b))
        return word

    @cute.jit
    def store_tile(self, base, rows, piece, r32):
        for w in cutlass.range_constexpr(4):
            column = piece * 4 + w  # in units of 4 scales
            if column < self.padded // 4:
                ptx.store_u32x4(base + column * 512 + r32 * 16, [rows[q][w] for q in range(4)])
