"""The compiled core: runs one warp until its quantum ends, it exits, faults, or meets a host
instruction.

Every lane has its own program counter; the lanes at the lowest one run together, so groups that
have
diverged meet again by themselves. An instruction that names lanes (`.sync`, `.aligned`) waits
until those
that are alive stand at it.
"""

# ruff: noqa: SIM109 (plain loops and comparisons are what numba compiles best)
from __future__ import annotations

from cute_kernels.sim.core_bits import bits_of_f64, jit, low_mask
from cute_kernels.sim.core_float import F32_FORMAT, RELU, SAT, as_double, float_op, round_to
from cute_kernels.sim.core_int import (
    UE8M0_FORMAT,
    compare_float,
    compare_int,
    element_bits,
    extend,
    float_to_float,
    float_to_int,
    from_narrow,
    halves,
    int_op,
    int_to_float,
    integral_float,
    narrow_one,
)
from cute_kernels.sim.core_lanes import lanes_op
from cute_kernels.sim.core_memory import (
    ACTIVE,
    AUX,
    BITS,
    CLOCK,
    COUNT,
    CUT,
    DST,
    DST2,
    EXECUTED,
    EXTRA,
    FAULT,
    FAULT_LANE,
    FIRST,
    GUARD,
    KIND,
    LANES,
    LIVE,
    MEETS,
    MEMBER,
    MODE,
    NEGATED,
    NOT_MEMBER,
    OP,
    PARKED,
    PC,
    SIGNED,
    A,
    B,
    C,
    D,
    do_atomic,
    do_load,
    do_matrix,
    do_store,
)

# kinds of instructions
INT, FLOAT, COMPARE_INT, COMPARE_FLOAT, CONVERT, LOAD, STORE, ATOMIC, MATRIX, CROSS = range(10)
BRANCH, BRANCH_TABLE, EXIT, HOST, TRAP, PACK, UNPACK, READ_CLOCK, NOTHING, HALVES = range(10, 20)
PACK_ROWS = 20
# conversions
TO_INT, TO_FLOAT, FLOAT_FLOAT, INTEGRAL, INT_INT, TO_PACKED, FROM_PACKED, REPACK = range(8)
# what a comparison is combined with
ALONE, WITH_AND, WITH_OR, WITH_XOR = range(4)
# results; the first four are those of `Warp.run`
R_QUANTUM, R_HOST, R_EXITED, R_STALLED, R_FAULT, R_TRAP = range(6)
_FAR = 1 << 60


@jit
def convert_pair(instr, a, b):
    """cvt with packed formats of two values."""
    op, flags, mode = instr[OP], instr[MODE], instr[AUX]
    source, fmt = instr[FIRST], instr[COUNT]
    if op == TO_PACKED:  # two fp32 operands: the first is the upper half
        bits = instr[BITS]
        if bits == 16:
            high = float_to_float(source, fmt, a, flags, mode)
            low = float_to_float(source, fmt, b, flags, mode)
            if instr[EXTRA]:  # satfinite
                high = round_to(bits_of_f64(as_double(source, a)), fmt, mode, True)
                low = round_to(bits_of_f64(as_double(source, b)), fmt, mode, True)
        else:
            high = narrow_one(fmt, as_double(source, a), flags, mode)
            low = narrow_one(fmt, as_double(source, b), flags, mode)
        return (high << bits) | low
    if op == FROM_PACKED:  # narrow to f16x2 or bf16x2
        bits = element_bits(source)
        low = from_narrow(source, a & low_mask(bits))
        high = from_narrow(source, (a >> bits) & low_mask(bits))
        x = round_to(bits_of_f64(low), fmt, mode, False)
        y = round_to(bits_of_f64(high), fmt, mode, False)
        if flags & RELU:
            x = 0 if x & 0x8000 else x
            y = 0 if y & 0x8000 else y
        return x | (y << 16)
    bits = element_bits(fmt)  # REPACK: f16x2 or bf16x2 to narrow
    low = narrow_one(fmt, as_double(source, a & 0xFFFF), flags, mode)
    high = narrow_one(fmt, as_double(source, (a >> 16) & 0xFFFF), flags, mode)
    return low | (high << bits)


@jit
def convert(instr, a, b):
    op, flags, mode, bits, signed = instr[OP], instr[MODE], instr[AUX], instr[BITS], instr[SIGNED]
    if op >= TO_PACKED:
        return convert_pair(instr, a, b)
    if op == TO_FLOAT:
        return int_to_float(instr[FIRST], instr[COUNT], a, mode, bits, signed)
    if op == FLOAT_FLOAT:
        return float_to_float(instr[FIRST], instr[COUNT], a, flags, mode) << instr[EXTRA]
    if op == INTEGRAL:
        return integral_float(instr[FIRST], instr[COUNT], a, mode)
    if op == TO_INT:
        return float_to_int(instr[FIRST], a, flags, mode, bits, signed)
    # INT_INT: bits and signed describe the source, FIRST and COUNT the destination
    value = extend(a, bits, signed)
    if flags & SAT:
        out, out_signed = instr[FIRST], instr[COUNT]
        if out_signed:
            limit = low_mask(out - 1)
            negative = signed and value < 0
            if negative:
                value = max(value, ~limit)
            elif value < 0 or value > limit:  # an unsigned value with the top bit set
                value = limit
        else:
            if signed and value < 0:
                value = 0
            elif out < 64 and (value < 0 or value > low_mask(out)):
                value = low_mask(out)
        return value
    return extend(value, instr[FIRST], instr[COUNT])


@jit
def straight(instr, kind, active, regs):
    """Instructions in which each lane computes from its own registers."""
    dst, cut = instr[DST], low_mask(instr[CUT])
    ra, rb, rc, rd = instr[A], instr[B], instr[C], instr[D]
    op, mode, bits, signed = instr[OP], instr[MODE], instr[BITS], instr[SIGNED]
    if kind == INT:
        for lane in range(32):
            if (active >> lane) & 1:
                value = int_op(op, mode, regs[ra, lane], regs[rb, lane], regs[rc, lane],
                               regs[rd, lane], bits, signed)  # fmt: skip
                regs[dst, lane] = value & cut
    elif kind == FLOAT:
        for lane in range(32):
            if (active >> lane) & 1:
                regs[dst, lane] = float_op(
                    bits, op, mode, regs[ra, lane], regs[rb, lane], regs[rc, lane]
                )
    elif kind == CONVERT:
        for lane in range(32):
            if (active >> lane) & 1:
                regs[dst, lane] = convert(instr, regs[ra, lane], regs[rb, lane]) & cut
    elif kind == HALVES:
        for lane in range(32):
            if (active >> lane) & 1:
                regs[dst, lane] = halves(op, mode, regs[ra, lane], regs[rb, lane], signed)
    else:
        compare(instr, kind, active, regs)


@jit
def compare(instr, kind, active, regs):
    """setp and set."""
    dst, dst2 = instr[DST], instr[DST2]
    for lane in range(32):
        if not (active >> lane) & 1:
            continue
        a, b = regs[instr[A], lane], regs[instr[B], lane]
        if kind == COMPARE_INT:
            result = compare_int(instr[OP], a, b, instr[BITS], instr[SIGNED])
        else:
            result = compare_float(instr[OP], instr[BITS], instr[SIGNED], a, b)
        other = not result
        if instr[MODE] != ALONE:
            third = (regs[instr[C], lane] & 1) != instr[EXTRA]
            if instr[MODE] == WITH_AND:
                result, other = result and third, other and third
            elif instr[MODE] == WITH_OR:
                result, other = result or third, other or third
            else:
                result, other = result != third, other != third
        if dst >= 0:
            regs[dst, lane] = instr[CUT] if result else 0
        if dst2 >= 0:
            regs[dst2, lane] = 1 if other else 0


@jit
def pack(instr, kind, active, regs, vec):
    """mov between a register and a vector of its parts."""
    bits, parts, first = instr[BITS], instr[COUNT], instr[FIRST]
    mask = low_mask(bits)
    for lane in range(32):
        if not (active >> lane) & 1:
            continue
        if kind == PACK_ROWS:  # b128: lists of target and source rows
            low, high = regs[vec[first + 2], lane], regs[vec[first + 3], lane]
            regs[vec[first], lane], regs[vec[first + 1], lane] = low, high
        elif kind == PACK:
            value = 0
            for j in range(parts):
                value |= (regs[vec[first + j], lane] & mask) << (bits * j)
            regs[instr[DST], lane] = value
        else:
            value = regs[instr[A], lane]
            for j in range(parts):
                row = vec[first + j]
                if row >= 0:
                    regs[row, lane] = (value >> (bits * j)) & mask


@jit
def choose(pcs, waiting, ctx):
    """Lowest program counter among lanes that can run; -1 if there is none."""
    free = ctx[LIVE] & ~ctx[PARKED] & ~waiting
    best = _FAR
    for lane in range(32):
        if (free >> lane) & 1 and pcs[lane] < best:
            best = pcs[lane]
    return best if best < _FAR else -1


@jit
def lanes_at(pc, pcs, ctx):
    free = ctx[LIVE] & ~ctx[PARKED]
    mask = 0
    for lane in range(32):
        if (free >> lane) & 1 and pcs[lane] == pc:
            mask |= 1 << lane
    return mask


@jit
def next_other(pc, mask, pcs, waiting, ctx):
    """Lowest program counter above `pc` of the lanes outside `mask` that are not parked."""
    others = ctx[LIVE] & ~ctx[PARKED] & ~mask
    best = _FAR
    for lane in range(32):
        if (others >> lane) & 1 and pcs[lane] < best:
            best = pcs[lane]
    return best


@jit
def guarded(instr, mask, regs):
    """The lanes of `mask` whose guard is true."""
    row = instr[GUARD]
    if row < 0:
        return mask
    active = 0
    for lane in range(32):
        if (mask >> lane) & 1 and (regs[row, lane] & 1) != instr[NEGATED]:
            active |= 1 << lane
    return active


@jit
def named(instr, mask, regs, ctx):
    """The live lanes that have to stand at this instruction with the lanes of `mask`."""
    if instr[MEETS] == 1:
        return ctx[LIVE]
    for lane in range(32):
        if (mask >> lane) & 1:
            return regs[instr[MEMBER], lane] & ctx[LIVE]
    return 0


@jit
def set_pcs(pcs, mask, pc):
    for lane in range(32):
        if (mask >> lane) & 1:
            pcs[lane] = pc


@jit
def execute(instr, kind, pc, active, member, regs, vec, ranges, ctx, scratch):
    """One instruction that is not control flow; False on a fault."""
    if kind <= CONVERT or kind == HALVES:
        straight(instr, kind, active, regs)
        return True
    if kind == LOAD:
        return do_load(instr, active, regs, vec, ranges, ctx, scratch)
    if kind == STORE:
        return do_store(instr, active, regs, vec, ranges, ctx, scratch, pc)
    if kind == ATOMIC:
        return do_atomic(instr, active, regs, vec, ranges, ctx, scratch, pc)
    if kind == MATRIX:
        return do_matrix(instr, regs, vec, ranges, ctx, scratch, pc)
    if kind == CROSS:
        if instr[MEETS] and active & ~member:
            ctx[FAULT], ctx[FAULT_LANE] = NOT_MEMBER, 0
            return False
        lanes_op(instr, active, member & active, regs, scratch)
        return True
    if kind == PACK or kind == UNPACK or kind == PACK_ROWS:
        pack(instr, kind, active, regs, vec)
        return True
    if kind == READ_CLOCK:
        ctx[CLOCK] += 16
        for lane in range(32):
            if (active >> lane) & 1:
                regs[instr[DST], lane] = ctx[CLOCK] & low_mask(instr[CUT])
    return True


@jit
def branch_table(instr, mask, active, pc, regs, vec, pcs):
    """brx.idx: each lane goes to the entry its register names; False for an index out of the
    table."""
    for lane in range(32):
        if (active >> lane) & 1:
            index = regs[instr[A], lane] & 0xFFFFFFFF
            if index >= instr[COUNT]:
                return False
            pcs[lane] = vec[instr[FIRST] + index]
        elif (mask >> lane) & 1:
            pcs[lane] = pc + 1
    return True


@jit
def run(code, vec, regs, pcs, ranges, ctx, scratch, quantum):
    """Runs a warp for at most `quantum` instructions. At R_HOST, R_FAULT and R_TRAP, ctx[PC] is the
    instruction, ctx[LANES] the lanes that stand there, ctx[ACTIVE] those whose guard is true."""
    waiting = 0
    budget = quantum
    while True:
        pc = choose(pcs, waiting, ctx)
        forced = False
        if pc < 0:
            if ctx[LIVE] == 0:
                return R_EXITED
            if ctx[PARKED] or waiting == 0:
                return R_STALLED
            waiting = 0  # whoever could join has: go on with the lanes that are here
            forced = True
            pc = choose(pcs, waiting, ctx)
        mask = lanes_at(pc, pcs, ctx)
        limit = next_other(pc, mask, pcs, waiting, ctx)
        reselect = False
        while not reselect:
            if budget <= 0:
                set_pcs(pcs, mask, pc)
                return R_QUANTUM
            instr = code[pc]
            member = 0
            if instr[MEETS]:
                need = named(instr, mask, regs, ctx)
                member = need
                if need & ~mask and not forced:
                    set_pcs(pcs, mask, pc)
                    waiting |= mask
                    break
            waiting &= ~mask
            forced = False
            active = guarded(instr, mask, regs)
            kind = instr[KIND]
            if kind == HOST or (kind == TRAP and active):
                set_pcs(pcs, mask, pc)
                ctx[PC], ctx[LANES], ctx[ACTIVE] = pc, mask, active
                return R_HOST if kind == HOST else R_TRAP
            budget -= 1
            ctx[EXECUTED] += 1
            if kind == BRANCH:
                if active == mask:
                    pc = instr[AUX]
                    if limit < _FAR:
                        set_pcs(pcs, mask, pc)
                        reselect = True
                elif active == 0:
                    pc += 1
                else:
                    set_pcs(pcs, mask & ~active, pc + 1)
                    set_pcs(pcs, active, instr[AUX])
                    reselect = True
            elif kind == EXIT:
                ctx[LIVE] &= ~active
                set_pcs(pcs, mask & ~active, pc + 1)
                reselect = True
            elif kind == BRANCH_TABLE:
                if not branch_table(instr, mask, active, pc, regs, vec, pcs):
                    ctx[PC], ctx[LANES], ctx[ACTIVE] = pc, mask, active
                    return R_TRAP
                reselect = True
            else:
                if active and not execute(
                    instr, kind, pc, active, member, regs, vec, ranges, ctx, scratch
                ):
                    ctx[EXECUTED] -= 1
                    set_pcs(pcs, mask, pc)
                    ctx[PC], ctx[LANES], ctx[ACTIVE] = pc, mask, active
                    return R_FAULT
                pc += 1
            if not reselect and pc >= limit:
                set_pcs(pcs, mask, pc)
                reselect = True


__all__ = ["F32_FORMAT", "UE8M0_FORMAT", "run"]
