"""Single instructions as functions: what the DSL does not expose, or exposes with another rounding.

Addresses are Int64 in bytes. Every memory access here is one instruction of the width in its name.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

FULL_MASK = 0xFFFFFFFF


def _bits(value: Float32) -> Any:
    """An fp32 operand as its bits: registers have no type, and `inline_ptx` copies an fp32 operand
    first, since a constant would become an integer in the text. So this is for operands that are no
    constants, or are ones of the language already."""
    return value if isinstance(value.value, float) else value.bitcast(Uint32)


# ---- memory


def load_u32x4(address: Int64) -> tuple[Uint32, ...]:
    """16 bytes. Through L1, where neighbouring loads of one thread find the rest of their sectors:
    without (L1::no_allocate, .cg) the small kernels lose 3 to 25 % on an H200. Not the read-only
    path (.nc): its loads may be moved before the wait for the kernel that writes them."""
    return inline_ptx(
        "ld.global.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def load_u32x2(address: Int64) -> tuple[Uint32, ...]:
    return inline_ptx(
        "ld.global.v2.u32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Uint32] * 2,
        read_only_args=[address],
    )


def load_u32(address: Int64) -> Uint32:
    return inline_ptx(
        "ld.global.u32 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def load_u8(address: Int64) -> Uint32:
    return inline_ptx(
        "ld.global.u8 {$w0}, [{$r0}];", write_only_types=[Uint32], read_only_args=[address]
    )


def load_i32(address: Int64) -> Int32:
    return inline_ptx(
        "ld.global.s32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def load_f32(address: Int64) -> Float32:
    return inline_ptx(
        "ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def store_u32x4(address: Int64, words) -> None:
    inline_ptx(
        "st.global.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def store_u32x8(address: Int64, words) -> None:
    """32 bytes, aligned to 32 (instruction of sm_100): a whole sector of the L2."""
    words_text = ", ".join(f"{{$r{i + 1}}}" for i in range(8))
    inline_ptx(f"st.global.v8.b32 [{{$r0}}], {{{words_text}}};", read_only_args=[address, *words])


def stream_u32x4(address: Int64, words) -> None:
    """Store of what is not read again soon: it leaves the L2 to others (evict first)."""
    inline_ptx(
        "st.global.cs.v4.u32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def store_u32x2(address: Int64, words) -> None:
    inline_ptx("st.global.v2.u32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, *words])


def store_u32(address: Int64, word) -> None:
    inline_ptx("st.global.u32 [{$r0}], {$r1};", read_only_args=[address, word])


def store_u16(address: Int64, word: Uint32) -> None:
    """The low half of ``word``."""
    inline_ptx(
        "{ .reg .b16 h; cvt.u16.u32 h, {$r1}; st.global.u16 [{$r0}], h; }",
        read_only_args=[address, word],
    )


def store_u8(address: Int64, byte: Uint32) -> None:
    inline_ptx("st.global.u8 [{$r0}], {$r1};", read_only_args=[address, byte])


def store_f32(address: Int64, value: Float32) -> None:
    inline_ptx("st.global.f32 [{$r0}], {$r1};", read_only_args=[address, value])


def reduce_f32x4(address: Int64, values) -> None:
    """Add four fp32 to memory, each atomically, in no given order."""
    inline_ptx(
        "red.global.add.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *values],
    )


def reduce_bf16x8(address: Int64, words) -> None:
    """Add eight bf16 (four words) to memory, each rounded to nearest, in no given order."""
    inline_ptx(
        "red.global.add.noftz.v4.bf16x2 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def add_i64(address: Int64, value: Int64) -> None:
    """Add to a 64-bit word, atomically."""
    inline_ptx("red.global.add.u64 [{$r0}], {$r1};", read_only_args=[address, value])


def max_i64(address: Int64, value: Int64) -> None:
    """The larger of a 64-bit word and ``value``, atomically."""
    inline_ptx("red.global.max.s64 [{$r0}], {$r1};", read_only_args=[address, value])


def count_shared(pointer) -> None:
    """Add one to a word of shared memory, atomically."""
    inline_ptx("red.shared.add.u32 [{$r0}], 1;", read_only_args=[Int32(pointer.toint())])


# ---- arithmetic, each rounded once: the compiler never contracts these into an fma


def mul(a: Float32, b: Float32) -> Float32:
    return inline_ptx(
        "mul.rn.f32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Float32],
        read_only_args=[_bits(a), _bits(b)],
    )


def mul_pair(a, b) -> tuple[Float32, Float32]:
    """(a0 * b0, a1 * b1) in one instruction of sm_100."""
    return cutlass.cute.arch.mul_packed_f32x2(a, b, rnd="rn", ftz=False)


def add(a: Float32, b: Float32) -> Float32:
    return inline_ptx(
        "add.rn.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[a, b]
    )


def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def abs_f32(a: Float32) -> Float32:
    return (a.bitcast(Uint32) & 0x7FFFFFFF).bitcast(Float32)


def max_abs3(a: Float32, b: Float32, c: Float32) -> Float32:
    """max(|a|, |b|, |c|), NaN if one of them is (instruction of sm_100)."""
    return inline_ptx(
        "max.NaN.abs.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[_bits(a), _bits(b), _bits(c)],
    )


def max_u16x2(a: Uint32, b: Uint32) -> Uint32:
    """Maximum of both 16-bit halves; of non-negative bf16 or fp16 bits it is their maximum, NaN on
    top."""
    return inline_ptx(
        "max.u16x2 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[a, b]
    )


def prmt(a: Uint32, b: Uint32, selector: int) -> Uint32:
    """Bytes of (a, b) picked by the nibbles of ``selector``, lowest first."""
    return inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, 0x{selector:x};",
        write_only_types=[Uint32],
        read_only_args=[a, b],
    )


def redux_max_u32(value: Uint32) -> Uint32:
    """Maximum over the warp; all 32 lanes must be here."""
    return inline_ptx(
        f"redux.sync.max.u32 {{$w0}}, {{$r0}}, 0x{FULL_MASK:x};",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def redux_min_u32(value: Uint32) -> Uint32:
    """Minimum over the warp; all 32 lanes must be here."""
    return inline_ptx(
        f"redux.sync.min.u32 {{$w0}}, {{$r0}}, 0x{FULL_MASK:x};",
        write_only_types=[Uint32],
        read_only_args=[value],
    )


def redux_add_i32(value: Int32) -> Int32:
    """Sum over the warp; all 32 lanes must be here."""
    return inline_ptx(
        f"redux.sync.add.s32 {{$w0}}, {{$r0}}, 0x{FULL_MASK:x};",
        write_only_types=[Int32],
        read_only_args=[value],
    )


def half_to_f32(word: Uint32, upper: bool) -> Float32:
    """fp16 in the lower or upper half of ``word`` -> fp32 (exact)."""
    lanes = "mov.b32 {_, h}, {$r0};" if upper else "mov.b32 {h, _}, {$r0};"
    return inline_ptx(
        "{ .reg .b16 h; " + lanes + " cvt.f32.f16 {$w0}, h; }",
        write_only_types=[Float32],
        read_only_args=[word],
    )


# ---- conversions between number formats


def pack_bf16x2(low: Float32, high: Float32) -> Uint32:
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[_bits(low), _bits(high)],
    )


def pack_f16x2(low: Float32, high: Float32) -> Uint32:
    return inline_ptx(
        "cvt.rn.f16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[_bits(low), _bits(high)],
    )


def encode_e4m3(value: Float32) -> Uint32:
    """fp32 -> E4M3 byte, round to nearest even, saturating; NaN becomes 0x7F."""
    return inline_ptx(
        "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, {$r0}; cvt.u32.u16 {$w0}, h; }",
        write_only_types=[Uint32],
        read_only_args=[_bits(value)],
    )


def decode_ue4m3(byte: Uint32) -> Float32:
    """Finite UE4M3 byte -> fp32: its bits at the top of an fp32 fraction are the value times
    2^-120."""
    return mul((byte << 20).bitcast(Float32), Float32(2.0**120))


def decode_e4m3(byte: Uint32) -> Float32:
    """E4M3 byte -> fp32 (exact, NaN included)."""
    return inline_ptx(
        "{ .reg .b16 h, l; .reg .b32 p; cvt.u16.u32 h, {$r0}; cvt.rn.f16x2.e4m3x2 p, h; "
        "mov.b32 {l, _}, p; cvt.f32.f16 {$w0}, l; }",
        write_only_types=[Float32],
        read_only_args=[byte],
    )


def encode_e2m1x8(values) -> Uint32:
    """Eight fp32 -> eight E2M1 codes, the first in the lowest nibble (instruction of sm_100)."""
    pairs = "".join(
        f"cvt.rn.satfinite.e2m1x2.f32 b{i}, {{$r{2 * i + 1}}}, {{$r{2 * i}}}; " for i in range(4)
    )
    return inline_ptx(
        "{ .reg .b8 b0, b1, b2, b3; " + pairs + "mov.b32 {$w0}, {b0, b1, b2, b3}; }",
        write_only_types=[Uint32],
        read_only_args=[_bits(v) for v in values],
    )


_TWO22 = 2.0**22
_CODE_BIAS = 2 * (127 + 22)  # what the exponent of the shifted value adds to a code


def _shifted_code(value: Float32) -> Uint32:
    """E2M1 magnitude index of ``value`` plus _CODE_BIAS in the low 23 bits; junk above them.

    With m = 2^max(exponent, 0) of |value| <= 6, |value| + 2^22 m rounds |value| to multiples of
    m/2, the E2M1 grid at that exponent, ties to even. The low bits are that multiple n, and the
    code is n + 2 * exponent.
    """
    magnitude = cutlass.cute.arch.fmin(abs_f32(value), 6.0)
    binade = cutlass.cute.arch.fmax(magnitude, 1.0).bitcast(Uint32) & 0x7F800000
    bits = fma(binade.bitcast(Float32), Float32(_TWO22), magnitude).bitcast(Uint32)
    return bits + (bits >> 22)


def encode_e2m1x8_integer(values) -> Uint32:
    """`encode_e2m1x8` for chips without the instruction; NaN is not handled (its block is)."""
    halves = []
    for half in (values[:4], values[4:]):
        word = _shifted_code(half[3])
        for value in (half[2], half[1], half[0]):
            word = (word << 4) + _shifted_code(value)
        halves.append(word - _CODE_BIAS * 0x1111)
    codes = prmt(halves[0], halves[1], 0x5410)
    bits = [v.bitcast(Uint32) for v in values]
    even = prmt(prmt(bits[0], bits[2], 0x73), prmt(bits[4], bits[6], 0x73), 0x5410)
    odd = prmt(prmt(bits[1], bits[3], 0x73), prmt(bits[5], bits[7], 0x73), 0x5410)
    return codes | ((even >> 4) & 0x08080808) | (odd & Uint32(0x80808080))


# ---- order between kernels


def wait_for_previous_kernel() -> None:
    """Programmatic dependent launch: what the previous kernel wrote is certain to be visible only
    after this, and nothing that it reads may be written before. Every kernel waits, also one that
    needs nothing of the previous one: the next kernel waits for this one alone."""
    cutlass.cute.arch.griddepcontrol_wait()


def before_thread_sync() -> None:
    """Orders this thread's tcgen05.ld, which have been waited for, before the signal that follows
    (PTX ISA, "Specialized inter-thread synchronization for tcgen05 instructions"). A commit needs
    none."""
    inline_ptx("tcgen05.fence::before_thread_sync;")


def after_thread_sync() -> None:
    """Orders the tcgen05 operations that follow behind the wait before it: without, a load of an
    accumulator may start before the barrier that announces it."""
    inline_ptx("tcgen05.fence::after_thread_sync;")


def allow_next_kernel() -> None:
    """The next kernel may start its prologue once all CTAs have been here or have ended; it still
    waits for this one to end. Stands behind the wait, so that what a prologue reads of older
    kernels is complete."""
    cutlass.cute.arch.griddepcontrol_launch_dependents()


def select(condition, yes, no):
    """``yes`` where the condition holds; of the type of ``no``."""
    return type(no)(cutlass.select_(condition, yes, no))
