"""A kernel's instructions, ready to run: one closure each, and what the warp must know of control
flow.
"""

from __future__ import annotations

from typing import Any

from cute_kernels.sim import alu, convert, lanes, loadstore
from cute_kernels.sim.checks import SimError, UnsupportedInstruction
from cute_kernels.sim.handlers import is_host
from cute_kernels.sim.operands import Closure, getter
from cute_kernels.sim.ptx import Function

ALU, BRANCH, BRANCH_INDEXED, HOST, EXIT, TRAP = range(6)
_BUILDERS = {**alu.BUILDERS, **convert.BUILDERS, **lanes.BUILDERS, **loadstore.BUILDERS}
_EXITS = ("exit", "ret")


class Program:
    """Arrays indexed by instruction: kind, closure, guard (register, negated) or None, branch
    target, and whether the lanes of the warp have to meet there.

    Raises UnsupportedInstruction, with the PTX line, for an instruction that is not modelled.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.instrs = function.instrs
        self.kinds: list[int] = []
        self.ops: list[Closure | Any] = []
        self.guards = [i.guard for i in function.instrs]
        self.targets = [i.target for i in function.instrs]
        self.meets = [self._meets(i) for i in function.instrs]
        for instr in function.instrs:
            try:
                kind, op = self._translate(instr)
            except SimError as error:
                raise error.at(None, instr) from None
            except (KeyError, ValueError, IndexError, TypeError, StopIteration) as error:
                raise UnsupportedInstruction(
                    f"instruction {instr.opcode} with operands {instr.operands} is not modelled "
                    f"({error!r})"
                ).at(None, instr) from error
            self.kinds.append(kind)
            self.ops.append(op)

    def _translate(self, instr: Any) -> tuple[int, Any]:
        if instr.base == "bra":
            return BRANCH, None
        if instr.base == "brx":
            return BRANCH_INDEXED, getter(instr.operands[0], "u32")
        if instr.base in _EXITS:
            return EXIT, None
        if instr.base in ("trap", "brkpt"):
            return TRAP, None
        if is_host(instr.base, instr.mods):
            return HOST, None
        builder = _BUILDERS.get(instr.base)
        if builder is None:
            raise UnsupportedInstruction(f"instruction {instr.opcode} is not modelled")
        return ALU, builder(instr)

    @staticmethod
    def _meets(instr: Any) -> bool:
        if is_host(instr.base, instr.mods):
            aligned = "aligned" in instr.mods or instr.base in ("bar", "setmaxnreg")
            cluster_barrier = instr.base == "barrier" and instr.mods[:1] != ("arrive",)
            return aligned or cluster_barrier
        return lanes.meets(instr)
