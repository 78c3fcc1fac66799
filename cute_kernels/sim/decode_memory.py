"""Lowering of addresses, memory accesses and instructions between lanes; see `decode`."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_kernels.sim import core as k
from cute_kernels.sim import core_int as i
from cute_kernels.sim import core_lanes as x
from cute_kernels.sim import core_memory as m
from cute_kernels.sim.checks import UnsupportedInstruction
from cute_kernels.sim.decode_operands import (
    BITS,
    KINDS,
    Builder,
    Code,
    float_flags,
    integer,
    is_signed,
    mask_of,
    set_sources,
    type_of,
)
from cute_kernels.sim.ptx import Addr, Instr, Not, Pair, Reg, Sink, Sym, Vec

# ---- addresses and memory

_SPACES = {"shared": m.SHARED, "global": m.GLOBAL, "local": m.LOCAL_SPACE, "param": m.GLOBAL,
           "const": m.GLOBAL}  # fmt: skip


def _space(instr: Instr) -> str:
    return next((x for x in (mod.split("::")[0] for mod in instr.mods) if x in _SPACES), "generic")


def build_cvta(code: Code, instr: Instr, row: np.ndarray) -> None:
    space = _space(instr)
    if space in ("global", "param", "const"):
        integer(code, instr, row, i.MOV)
    elif "to" in instr.mods:
        integer(code, instr, row, i.CVTA_TO)
    else:
        integer(code, instr, row, i.CVTA_FROM, 1 if space == "shared" else 2)


def build_isspacep(code: Code, instr: Instr, row: np.ndarray) -> None:
    d, a = instr.operands
    space = _space(instr)
    row[m.KIND], row[m.OP], row[m.DST], row[m.CUT] = k.INT, i.ISSPACE, code.target(d), 1
    row[m.MODE] = {"shared": 1, "local": 2}.get(space, 0)
    row[m.A] = code.source(a)


def build_mapa(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    integer(code, instr, row, i.MAPA, 0, (t, "u32"))


def build_getctarank(code: Code, instr: Instr, row: np.ndarray) -> None:
    integer(code, instr, row, i.GETRANK, 0, None, "u32")


def set_address(code: Code, instr: Instr, row: np.ndarray, operand: Any) -> None:
    if not isinstance(operand, Addr):
        raise UnsupportedInstruction(f"{operand} is not an address")
    space = _space(instr)
    row[m.OP] = _SPACES.get(space, m.GENERIC)
    row[m.A] = code.source(operand.base)
    row[m.AUX] = operand.offset
    narrow = isinstance(operand.base, Reg) and BITS[operand.base.type] == 32
    row[m.EXTRA] = int(narrow)
    if space == "param" and _is_call_param(code, operand):
        row[m.OP] = m.LOCAL_SPACE


def _is_call_param(code: Code, operand: Addr) -> bool:
    """A .param variable declared inside the body, for a call."""
    return isinstance(operand.base, Sym) and any(
        v.name == operand.base.name and v.space == "param" for v in code.function.variables
    )


def _items(operand: Any) -> list[Any]:
    return list(operand.items) if isinstance(operand, Vec) else [operand]


def _spread(t: str, rows: list[int]) -> tuple[int, list[int]]:
    """b128 elements are pairs of 64-bit rows."""
    if t != "b128":
        return BITS[t], rows
    return 64, [r for row in rows for r in (row, row + 1)]


def build_load(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    destination, address = instr.operands[:2]
    set_address(code, instr, row, address)
    items = _items(destination)
    bits, rows = _spread(t, [code.target(o) for o in items])
    row[m.KIND], row[m.BITS], row[m.SIGNED] = k.LOAD, bits, is_signed(t)
    row[m.CUT] = max((mask_of(o) for o in items if isinstance(o, Reg)), default=64)
    row[m.FIRST], row[m.COUNT] = code.list_of(rows), len(rows)
    row[m.MODE] = int(any(x in instr.mods for x in ("param", "const")))  # not counted as global


def build_store(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    address, source = instr.operands[:2]
    set_address(code, instr, row, address)
    bits, rows = _spread(t, [code.source(o, t) for o in _items(source)])
    row[m.KIND], row[m.BITS] = k.STORE, bits
    row[m.FIRST], row[m.COUNT] = code.list_of(rows), len(rows)
    row[m.MODE] = int("param" in instr.mods)


_ATOMIC = {
    "add": m.A_ADD, "min": m.A_MIN, "max": m.A_MAX, "and": m.A_AND, "or": m.A_OR, "xor": m.A_XOR,
    "exch": m.A_EXCH, "cas": m.A_CAS, "inc": m.A_INC, "dec": m.A_DEC,
}  # fmt: skip


def build_atomic(code: Code, instr: Instr, row: np.ndarray) -> None:
    t = type_of(instr)
    if t == "b128":
        raise UnsupportedInstruction(f"{instr.opcode} is not modelled")
    operands = list(instr.operands)
    destination = operands.pop(0) if instr.base == "atom" else Sink()
    set_address(code, instr, row, operands[0])
    row[m.KIND], row[m.BITS], row[m.SIGNED] = k.ATOMIC, BITS[t], is_signed(t)
    row[m.C] = next(_ATOMIC[x] for x in instr.mods if x in _ATOMIC)
    row[m.D] = KINDS.get(t, -1)
    row[m.DST] = int(t == "f32")  # fp32 in global memory flushes subnormals
    values = _items(operands[1])
    rows = [code.source(o, t) for o in values]
    if instr.has("cas"):
        rows += [code.source(o, t) for o in _items(operands[2])]
    row[m.FIRST], row[m.COUNT] = code.list_of(rows), len(values)
    if not isinstance(destination, Sink):
        row[m.DST2] = code.list_of([code.target(o) for o in _items(destination)])


def build_matrix(code: Code, instr: Instr, row: np.ndarray) -> None:
    if not instr.has("m8n8", "b16"):
        raise UnsupportedInstruction(f"{instr.opcode}: only m8n8.b16 is modelled")
    store = instr.base == "stmatrix"
    registers, address = reversed(instr.operands) if store else instr.operands
    set_address(code, instr, row, address)
    row[m.OP] = m.SHARED if "shared" in _space(instr) else m.GENERIC
    row[m.KIND], row[m.MEETS] = k.MATRIX, 1
    row[m.MODE] = int(store) | 2 * int("trans" in instr.mods)
    items = _items(registers)
    rows = [code.source(o) if store else code.target(o) for o in items]
    row[m.FIRST], row[m.COUNT] = code.list_of(rows), len(rows)


# ---- lanes


def cross(code: Code, row: np.ndarray, op: int, member: Any) -> None:
    row[m.KIND], row[m.OP] = k.CROSS, op
    row[m.DST] = row[m.DST2] = -1
    if member is not None:
        row[m.MEETS], row[m.MEMBER] = 2, code.source(member, "b32")


def two_targets(code: Code, row: np.ndarray, destination: Any) -> None:
    first = destination.first if isinstance(destination, Pair) else destination
    if not isinstance(first, Sink):
        row[m.DST] = code.target(first)
    if isinstance(destination, Pair) and not isinstance(destination.second, Sink):
        row[m.DST2] = code.target(destination.second)


def build_shfl(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, a, b, c, member = instr.operands
    cross(code, row, x.SHFL, member)
    row[m.MODE] = {"up": x.UP, "down": x.DOWN, "bfly": x.BUTTERFLY, "idx": x.INDEX}[instr.mods[1]]
    two_targets(code, row, destination)
    set_sources(code, row, (a, b, c), ("b32",) * 3)


def build_vote(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, predicate, member = instr.operands
    cross(code, row, x.VOTE, member)
    row[m.MODE] = {"ballot": x.BALLOT, "all": x.ALL, "any": x.ANY, "uni": x.UNIFORM}[instr.mods[1]]
    row[m.EXTRA] = int(isinstance(predicate, Not))
    source = predicate.reg if isinstance(predicate, Not) else predicate
    row[m.A] = code.source(source, "pred")
    two_targets(code, row, destination)


def build_elect(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, member = instr.operands
    cross(code, row, x.ELECT, member)
    if not isinstance(destination, Pair):
        destination = Pair(Sink(), destination)
    two_targets(code, row, destination)


def build_match(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, a, member = instr.operands
    cross(code, row, x.MATCH, member)
    row[m.MODE] = x.MATCH_ANY if "any" in instr.mods else x.MATCH_ALL
    row[m.BITS] = BITS[type_of(instr)]
    row[m.A] = code.source(a, type_of(instr))
    two_targets(code, row, destination)


def build_redux(code: Code, instr: Instr, row: np.ndarray) -> None:
    destination, a, member = instr.operands
    t = type_of(instr)
    cross(code, row, x.REDUX, member)
    ops = {"add": x.R_ADD, "min": x.R_MIN, "max": x.R_MAX, "and": x.R_AND, "or": x.R_OR,
           "xor": x.R_XOR}  # fmt: skip
    row[m.MODE] = ops[instr.mods[1]]
    row[m.SIGNED], row[m.CUT] = is_signed(t), 32
    row[m.EXTRA] = float_flags(instr) if t == "f32" else -1
    row[m.A] = code.source(a, t)
    two_targets(code, row, destination)


def build_activemask(code: Code, instr: Instr, row: np.ndarray) -> None:
    cross(code, row, x.ACTIVE_MASK, None)
    two_targets(code, row, instr.operands[0])


def build_bar_warp(code: Code, instr: Instr, row: np.ndarray) -> None:
    row[m.KIND] = k.NOTHING
    row[m.MEETS], row[m.MEMBER] = 2, code.source(instr.operands[0], "b32")


BUILDERS: dict[str, Builder] = {
    "cvta": build_cvta, "isspacep": build_isspacep, "mapa": build_mapa,
    "getctarank": build_getctarank, "ld": build_load, "ldu": build_load, "st": build_store,
    "atom": build_atomic, "red": build_atomic, "ldmatrix": build_matrix, "stmatrix": build_matrix,
    "shfl": build_shfl, "vote": build_vote, "elect": build_elect, "match": build_match,
    "redux": build_redux, "activemask": build_activemask, "bar": build_bar_warp,
}  # fmt: skip
