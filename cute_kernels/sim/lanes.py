"""Instructions in which the lanes of a warp see each other: shfl, vote, match, elect, redux,
activemask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim.checks import IllegalInstruction
from cute_kernels.sim.operands import TYPES, Closure, getter, putter
from cute_kernels.sim.ptx import Pair

LANE = np.arange(32)
_BIT = np.uint32(1) << np.arange(32, dtype=np.uint32)


def bits_of(lanes: np.ndarray) -> np.uint32:
    """Ballot of a row of booleans."""
    return np.uint32((_BIT * lanes).sum())


def active(w: Any, m: Any) -> np.ndarray:
    return w.live if m is None else m


def _members(w: Any, m: Any, get: Any, instr: Any) -> np.ndarray:
    """Lanes named by the membermask of the first lane that executes."""
    lanes = active(w, m)
    named = np.broadcast_to(get(w), 32)[int(lanes.argmax())]
    member = (named & _BIT) != 0
    if not (member & lanes)[lanes].all():
        raise IllegalInstruction(
            f"{instr.opcode}: an executing lane is not in its membermask {named:#x}"
        )
    return member & w.live


def _shfl(instr: Any) -> Closure:
    mode = instr.mods[1]
    destination, a, b, c, mask = instr.operands
    put_value = putter(destination.first if isinstance(destination, Pair) else destination, "b32")
    put_pred = putter(destination.second, "pred") if isinstance(destination, Pair) else None
    ga, gb, gc, gm = (getter(x, "u32") for x in (a, b, c, mask))

    def shfl(w: Any, m: Any) -> None:
        _members(w, m, gm, instr)
        value = np.array(np.broadcast_to(ga(w), 32))
        lane_b = np.broadcast_to(gb(w), 32).astype(np.int64) & 31
        clamp = np.broadcast_to(gc(w), 32).astype(np.int64)
        segment, bound = clamp >> 8 & 31, clamp & 31
        top, low = (LANE & segment) | (bound & ~segment), LANE & segment
        if mode == "up":
            source = LANE - lane_b
            inside = source >= top
        elif mode == "down":
            source = LANE + lane_b
            inside = source <= top
        elif mode == "bfly":
            source = LANE ^ lane_b
            inside = source <= top
        else:
            source = low | (lane_b & ~segment)
            inside = source <= top
        source = np.where(inside, source, LANE) & 31
        put_value(w, m, value[source])
        if put_pred is not None:
            put_pred(w, m, inside)

    return shfl


def _vote(instr: Any) -> Closure:
    mode = instr.mods[1]
    d, p, mask = instr.operands
    get, gm = getter(p, "pred"), getter(mask, "u32")
    put = putter(d, "b32" if mode == "ballot" else "pred")

    def vote(w: Any, m: Any) -> None:
        member = _members(w, m, gm, instr) & active(w, m)
        value = np.broadcast_to(get(w), 32)
        if mode == "ballot":
            put(w, m, bits_of(value & member))
        elif mode == "all":
            put(w, m, bool(value[member].all()))
        elif mode == "any":
            put(w, m, bool(value[member].any()))
        else:
            put(w, m, bool(value[member].all() or not value[member].any()))

    return vote


def _elect(instr: Any) -> Closure:
    """elect.sync d|p, membermask: the lowest executing member is elected."""
    pair, mask = instr.operands
    put_d = putter(pair.first, "b32") if isinstance(pair, Pair) else (lambda w, m, v: None)
    put_p = putter(pair.second if isinstance(pair, Pair) else pair, "pred")
    gm = getter(mask, "u32")

    def elect(w: Any, m: Any) -> None:
        chosen = int((_members(w, m, gm, instr) & active(w, m)).argmax())
        put_d(w, m, np.uint32(chosen))
        put_p(w, m, chosen == LANE)

    return elect


def _match(instr: Any) -> Closure:
    t = instr.mods[-1]
    destination, a, mask = instr.operands
    first = destination.first if isinstance(destination, Pair) else destination
    put, get, gm = putter(first, "b32"), getter(a, t), getter(mask, "u32")
    put_pred = putter(destination.second, "pred") if isinstance(destination, Pair) else None

    def match(w: Any, m: Any) -> None:
        member = _members(w, m, gm, instr) & active(w, m)
        value = np.broadcast_to(get(w), 32)
        if instr.has("any"):
            same = (value[:, None] == value[None, :]) & member[None, :]
            put(w, m, (same * _BIT).sum(axis=1).astype(np.uint32))
            return
        equal = bool((value[member] == value[member][0]).all())
        put(w, m, bits_of(member) if equal else np.uint32(0))
        if put_pred is not None:
            put_pred(w, m, equal)

    return match


def _redux(instr: Any) -> Closure:
    op, t = instr.mods[1], instr.mods[-1]
    d, a, mask = instr.operands
    put, get, gm = putter(d, t), getter(a, t), getter(mask, "u32")
    fn: Callable[[Any], Any] = {
        "add": lambda v: np.add.reduce(v, dtype=TYPES[t][1]),
        "min": np.fmin.reduce, "max": np.fmax.reduce, "and": np.bitwise_and.reduce,
        "or": np.bitwise_or.reduce, "xor": np.bitwise_xor.reduce,
    }[op]  # fmt: skip
    if instr.has("NaN"):
        fn = np.minimum.reduce if op == "min" else np.maximum.reduce

    def redux(w: Any, m: Any) -> None:
        member = _members(w, m, gm, instr) & active(w, m)
        value = np.broadcast_to(get(w), 32)[member]
        put(w, m, fn(np.abs(value) if instr.has("abs") else value))

    return redux


def _activemask(instr: Any) -> Closure:
    put = putter(instr.operands[0], "b32")
    return lambda w, m: put(w, m, bits_of(active(w, m)))


def _nothing(instr: Any) -> Closure:
    """bar.warp.sync: its lanes meet (see `warp`), and there is nothing else to do."""
    return lambda w, m: None


BUILDERS: dict[str, Callable[[Any], Closure]] = {
    "shfl": _shfl,
    "vote": _vote,
    "elect": _elect,
    "match": _match,
    "redux": _redux,
    "activemask": _activemask,
    "bar": _nothing,
    "pmevent": _nothing,
}


def meets(instr: Any) -> bool:
    """Do all lanes of the warp (or of a membermask) have to be at this instruction together?"""
    if instr.base == "bar" and instr.mods[:1] == ("warp",):
        return True
    return instr.base in ("shfl", "vote", "elect", "match", "redux") or instr.has("aligned")
