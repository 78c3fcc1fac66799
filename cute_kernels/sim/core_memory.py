"""Loads, stores, atomics and matrix moves of the compiled core, with the shadow checks of shared
memory.

`ctx` is the state that a warp shares with the core, an int64 array with the fields below. Process
memory is read and written through its addresses; every access is checked against the live
ranges, the
window, or the stack frame first, for all lanes, so that a faulting instruction has done nothing
yet.
"""

from __future__ import annotations

import numpy as np

from cute_kernels.sim.core_bits import (
    all_ones,
    any_set,
    jit,
    load,
    load16,
    low_mask,
    sign_extend,
    store,
    store8,
    store16,
    store64,
    ult,
)
from cute_kernels.sim.core_float import ADD as F_ADD
from cute_kernels.sim.core_float import FTZ, MAX, MIN, float_op
from cute_kernels.sim.core_int import IADD, IMAX, IMIN, extend, int_op

# fields of ctx
PC, LANES, ACTIVE, FAULT, FAULT_LANE, FAULT_ADDRESS, EXECUTED = range(7)
GLOBAL_LOADED, GLOBAL_STORED, SHARED_LOADED, SHARED_STORED, CLOCK, EPOCH, THREAD = range(7, 14)
RANK, RANKS, WINDOW, LOCAL, LOCAL_BYTES, CHECKS, RANGE, LIVE, PARKED = range(14, 23)
TABLE = 24  # per rank: addresses of data, init, writer, async_reads, async_writes; ended
ROW = 6
DATA, INIT, WRITER, READS, WRITES, ENDED = range(ROW)
CONTEXT_SIZE = TABLE + 16 * ROW
# bits of ctx[CHECKS]
CHECK_INIT, CHECK_RACE, CHECK_OVERWRITE = 1, 2, 4
# faults
NO_RANK, WINDOW_END, MISALIGNED, NO_RANGE, STACK_END, FRESH, RACE, OVERWRITE, ENDED_CTA = range(
    1, 10
)
NOT_MEMBER = 10
# spaces
GENERIC, SHARED, GLOBAL, LOCAL_SPACE = range(4)
# columns of a decoded instruction
KIND, GUARD, NEGATED, DST, A, B, C, D, OP, MODE, BITS, SIGNED, CUT, DST2 = range(14)
AUX, MEETS, MEMBER, FIRST, COUNT, EXTRA = range(14, 20)
COLUMNS = 20
# atomic operations
A_ADD, A_MIN, A_MAX, A_AND, A_OR, A_XOR, A_EXCH, A_CAS, A_INC, A_DEC = range(10)
REMOTE = 2047


@jit
def in_range(address, size, ranges, ctx):
    """Is [address, address + size) inside one row of `ranges`? Remembers the row."""
    i = ctx[RANGE]
    if i < ranges.shape[0] and ranges[i, 0] <= address and address + size <= ranges[i, 1]:
        return True
    low, high = 0, ranges.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if ranges[middle, 0] <= address:
            low = middle + 1
        else:
            high = middle
    i = low - 1
    if i >= 0 and address + size <= ranges[i, 1]:
        ctx[RANGE] = i
        return True
    return False


@jit
def check_shared(row, offset, total, write, ctx):
    """Fault of an access to shared bytes, or 0. `row` is the rank's entry in the table."""
    checks = ctx[CHECKS]
    if not write and checks & CHECK_INIT:
        start = ctx[row + INIT] + offset
        step = min(total, 8)
        for i in range(0, total, step):
            if not all_ones(start + i, step):
                return FRESH
    if checks & CHECK_RACE and any_set(ctx[row + WRITES] + 2 * offset, 2 * total):
        return RACE
    if write and checks & CHECK_OVERWRITE and any_set(ctx[row + READS] + 2 * offset, 2 * total):
        return OVERWRITE
    return 0


@jit
def locate(address, space, total, lane, write, atomic, ranges, ctx, where):
    """Fills where[:, lane] with (process address, table row or -1, offset); returns a fault or
    0."""
    if address & (total - 1):
        return MISALIGNED
    if space == GENERIC:
        top = address >> 56
        if top == 1:
            space = SHARED
            address &= 0xFFFFFFFF
        elif top == 2:
            space = LOCAL_SPACE
            address &= (1 << 56) - 1
        else:
            space = GLOBAL
    where[1, lane] = -1
    if space == GLOBAL:
        if not in_range(address, total, ranges, ctx):
            return NO_RANGE
        where[0, lane] = address
        return 0
    if space == LOCAL_SPACE:
        address &= (1 << 56) - 1
        if address + total > ctx[LOCAL_BYTES]:
            return STACK_END
        where[0, lane] = ctx[LOCAL] + lane * ctx[LOCAL_BYTES] + address
        return 0
    rank = (address >> 24) & 0xFF
    offset = address & 0xFFFFFF
    if rank >= ctx[RANKS]:
        return NO_RANK
    if offset + total > ctx[WINDOW]:
        return WINDOW_END
    row = TABLE + ROW * rank
    if rank != ctx[RANK] and ctx[row + ENDED]:
        return ENDED_CTA
    where[0, lane] = ctx[row + DATA] + offset
    where[1, lane] = row
    where[2, lane] = offset
    if atomic:
        fault = check_shared(row, offset, total, False, ctx)
        if fault:
            return fault
    return check_shared(row, offset, total, write, ctx)


@jit
def mark_written(row, offset, total, pc, lane, ctx):
    """Records the writer of shared bytes for initialisation and proxy fences."""
    thread = ctx[THREAD] + lane if row == TABLE + ROW * ctx[RANK] else REMOTE
    entry = (pc << 40) | ((ctx[EPOCH] & 0x1FFFFFFF) << 11) | thread
    for i in range(total):
        store8(ctx[row + INIT] + offset + i, 1)
        store64(ctx[row + WRITER] + 8 * (offset + i), entry)


@jit
def locate_all(instr, active, total, write, atomic, regs, ranges, ctx, where):
    """`locate` for every active lane; True when there was no fault."""
    base, offset, space = instr[A], instr[AUX], instr[OP]
    for lane in range(32):
        if (active >> lane) & 1:
            address = regs[base, lane] + offset
            if instr[EXTRA]:  # a 32-bit register wraps in 32 bits
                address &= 0xFFFFFFFF
            fault = locate(address, space, total, lane, write, atomic, ranges, ctx, where)
            if fault:
                ctx[FAULT], ctx[FAULT_LANE], ctx[FAULT_ADDRESS] = fault, lane, address
                return False
    return True


@jit
def count(instr, active, total, write, ctx, where):
    """Adds the bytes of an access to the counters."""
    for lane in range(32):
        if (active >> lane) & 1:
            if where[1, lane] >= 0:
                ctx[SHARED_STORED if write else SHARED_LOADED] += total
            elif instr[OP] != LOCAL_SPACE and not instr[MODE]:
                ctx[GLOBAL_STORED if write else GLOBAL_LOADED] += total


@jit
def do_load(instr, active, regs, vec, ranges, ctx, where):
    """ld; False on a fault."""
    size, parts, first = instr[BITS] >> 3, instr[COUNT], instr[FIRST]
    total = size * parts
    if not locate_all(instr, active, total, False, False, regs, ranges, ctx, where):
        return False
    count(instr, active, total, False, ctx, where)
    signed, cut = instr[SIGNED], instr[CUT]
    for j in range(parts):
        row = vec[first + j]
        for lane in range(32):
            if (active >> lane) & 1:
                value = load(where[0, lane] + j * size, size)
                if signed:
                    value = sign_extend(value, instr[BITS]) & low_mask(cut)
                regs[row, lane] = value
    return True


@jit
def do_store(instr, active, regs, vec, ranges, ctx, where, pc):
    """st; False on a fault."""
    size, parts, first = instr[BITS] >> 3, instr[COUNT], instr[FIRST]
    total = size * parts
    if not locate_all(instr, active, total, True, False, regs, ranges, ctx, where):
        return False
    count(instr, active, total, True, ctx, where)
    for lane in range(32):
        if (active >> lane) & 1:
            for j in range(parts):
                store(where[0, lane] + j * size, size, regs[vec[first + j], lane])
            if where[1, lane] >= 0:
                mark_written(where[1, lane], where[2, lane], total, pc, lane, ctx)
    return True


@jit
def combine(op, kind, old, value, compare, bits, signed, flush):
    """The new contents of an atomically updated element."""
    if op == A_EXCH:
        return value
    if op == A_CAS:
        return compare if old == (value & low_mask(bits)) else old
    if kind >= 0:
        flags = FTZ if flush else 0
        which = F_ADD if op == A_ADD else (MIN if op == A_MIN else MAX)
        return float_op(kind, which, flags, old, value, 0)
    if op == A_ADD:
        return int_op(IADD, 0, old, value, 0, 0, bits, signed)
    if op == A_MIN:
        return int_op(IMIN, 0, old, value, 0, 0, bits, signed)
    if op == A_MAX:
        return int_op(IMAX, 0, old, value, 0, 0, bits, signed)
    if op == A_AND:
        return old & value
    if op == A_OR:
        return old | value
    if op == A_XOR:
        return old ^ value
    value = extend(value, bits, False)
    if op == A_INC:
        return old + 1 if ult(old, value) else 0
    return value if old == 0 or ult(value, old) else old - 1


@jit
def do_atomic(instr, active, regs, vec, ranges, ctx, where, pc):
    """atom and red, one lane after the other; False on a fault. vec: values, comparands,
    results."""
    size, parts, first = instr[BITS] >> 3, instr[COUNT], instr[FIRST]
    total = size * parts
    if not locate_all(instr, active, total, True, True, regs, ranges, ctx, where):
        return False
    count(instr, active, total, True, ctx, where)
    op, kind = instr[C], instr[D]
    for lane in range(32):
        if (active >> lane) & 1:
            for j in range(parts):
                address = where[0, lane] + j * size
                old = load(address, size)
                value = regs[vec[first + j], lane]
                compare = regs[vec[first + parts + j], lane] if op == A_CAS else 0
                flush = where[1, lane] < 0 and instr[DST] == 1  # shared memory never flushes
                new = combine(op, kind, old, value, compare, instr[BITS], instr[SIGNED], flush)
                store(address, size, new)
                if instr[DST2] >= 0:
                    regs[vec[instr[DST2] + j], lane] = old
            if where[1, lane] >= 0:
                mark_written(where[1, lane], where[2, lane], total, pc, lane, ctx)
    return True


@jit
def do_matrix(instr, regs, vec, ranges, ctx, where, pc):
    """ldmatrix and stmatrix of 8 x 8 16-bit matrices: lane 8 j + i gives the address of row i of
    matrix j."""
    parts, first = instr[COUNT], instr[FIRST]
    stores, transposed = instr[MODE] & 1, instr[MODE] & 2
    active = low_mask(8 * parts)
    if not locate_all(instr, active, 16, stores != 0, False, regs, ranges, ctx, where):
        return False
    for j in range(parts):
        row = vec[first + j]
        for lane in range(32):
            value = 0
            for half in range(2):
                i, k = lane >> 2, 2 * (lane & 3) + half
                if transposed:
                    i, k = k, i
                source = 8 * j + i
                address = where[0, source] + 2 * k
                if stores:
                    store16(address, (regs[row, lane] >> (16 * half)) & 0xFFFF)
                    mark_written(where[1, source], where[2, source] + 2 * k, 2, pc, lane, ctx)
                else:
                    value |= load16(address) << (16 * half)
            if not stores:
                regs[row, lane] = value
    if stores:
        ctx[SHARED_STORED] += 128 * parts
    else:
        ctx[SHARED_LOADED] += 128 * parts
    return True


def new_context() -> np.ndarray:
    return np.zeros(CONTEXT_SIZE, np.int64)
