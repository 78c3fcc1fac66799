"""Instructions in which lanes see each other, in the compiled core."""

from __future__ import annotations

from cute_kernels.sim.core_bits import jit, low_mask, sign_extend, ult
from cute_kernels.sim.core_float import ABSOLUTE, MAX, MIN, minmax32
from cute_kernels.sim.core_memory import (
    BITS,
    CUT,
    DST,
    DST2,
    EXTRA,
    MODE,
    OP,
    SIGNED,
    A,
    B,
    C,
)

# operations
SHFL, VOTE, ELECT, MATCH, REDUX, ACTIVE_MASK = range(6)
UP, DOWN, BUTTERFLY, INDEX = range(4)
BALLOT, ALL, ANY, UNIFORM = range(4)
MATCH_ANY, MATCH_ALL = range(2)
R_ADD, R_MIN, R_MAX, R_AND, R_OR, R_XOR = range(6)


@jit
def lowest(mask):
    """Index of the lowest set bit; 32 for none."""
    for lane in range(32):
        if (mask >> lane) & 1:
            return lane
    return 32


@jit
def shuffle(instr, active, regs, scratch):
    mode = instr[MODE]
    for lane in range(32):
        scratch[0, lane] = regs[instr[A], lane]
    for lane in range(32):
        if not (active >> lane) & 1:
            continue
        b, c = regs[instr[B], lane] & 31, regs[instr[C], lane]
        segment, bound = (c >> 8) & 31, c & 31
        top, low = (lane & segment) | (bound & ~segment), lane & segment
        if mode == UP:
            source = lane - b
            inside = source >= top
        elif mode == DOWN:
            source = lane + b
            inside = source <= top
        elif mode == BUTTERFLY:
            source = lane ^ b
            inside = source <= top
        else:
            source = low | (b & ~segment)
            inside = source <= top
        if not inside:
            source = lane
        if instr[DST] >= 0:
            regs[instr[DST], lane] = scratch[0, source & 31]
        if instr[DST2] >= 0:
            regs[instr[DST2], lane] = 1 if inside else 0


@jit
def vote(instr, active, member, regs):
    true = 0
    for lane in range(32):
        if (member >> lane) & 1 and (regs[instr[A], lane] & 1) != instr[EXTRA]:
            true |= 1 << lane
    mode = instr[MODE]
    if mode == BALLOT:
        value = true
    elif mode == ALL:
        value = 1 if true == member else 0
    elif mode == ANY:
        value = 1 if true != 0 else 0
    else:
        value = 1 if true == member or true == 0 else 0
    put(instr[DST], active, value, regs)


@jit
def put(row, active, value, regs):
    if row >= 0:
        for lane in range(32):
            if (active >> lane) & 1:
                regs[row, lane] = value


@jit
def match(instr, active, member, regs):
    row = instr[A]
    mask = low_mask(instr[BITS])
    leader = lowest(member)
    for lane in range(32):
        if not (active >> lane) & 1:
            continue
        same = 0
        for other in range(32):
            if (member >> other) & 1 and ((regs[row, other] ^ regs[row, lane]) & mask) == 0:
                same |= 1 << other
        if instr[MODE] == MATCH_ANY:
            regs[instr[DST], lane] = same
        else:
            equal = leader < 32 and same == member
            regs[instr[DST], lane] = member if equal else 0
            if instr[DST2] >= 0:
                regs[instr[DST2], lane] = 1 if equal else 0


@jit
def reduce_two(op, x, y, signed, is_float, flags):
    if is_float:
        return minmax32(MIN if op == R_MIN else MAX, flags, x, y, 0)
    if op == R_ADD:
        return x + y
    if op == R_AND:
        return x & y
    if op == R_OR:
        return x | y
    if op == R_XOR:
        return x ^ y
    less = sign_extend(x, 32) < sign_extend(y, 32) if signed else ult(x, y)
    return x if less == (op == R_MIN) else y


@jit
def reduction(instr, active, member, regs):
    is_float, flags = instr[EXTRA] >= 0, instr[EXTRA]
    first = True
    total = 0
    for lane in range(32):
        if (member >> lane) & 1:
            value = regs[instr[A], lane]
            if is_float and flags & ABSOLUTE:
                value &= 0x7FFFFFFF
            if first:
                # x with itself: a NaN becomes canonical
                total = reduce_two(instr[MODE], value, value, 0, True, flags) if is_float else value
                first = False
            else:
                total = reduce_two(instr[MODE], total, value, instr[SIGNED], is_float, flags)
    put(instr[DST], active, total & low_mask(instr[CUT]), regs)


@jit
def lanes_op(instr, active, member, regs, scratch):
    """One instruction; `active` executes it, `member` are the live lanes its membermask names."""
    op = instr[OP]
    if op == SHFL:
        shuffle(instr, active, regs, scratch)
    elif op == VOTE:
        vote(instr, active, member, regs)
    elif op == ELECT:
        chosen = lowest(member)
        put(instr[DST], active, chosen, regs)
        put(instr[DST2], active, 0, regs)
        if (active >> chosen) & 1 and instr[DST2] >= 0:
            regs[instr[DST2], chosen] = 1
    elif op == MATCH:
        match(instr, active, member, regs)
    elif op == REDUX:
        reduction(instr, active, member, regs)
    else:
        put(instr[DST], active, active, regs)
