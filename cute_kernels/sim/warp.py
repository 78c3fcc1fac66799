"""One warp: its registers, its groups of lanes that share a program counter, and the loop that runs
them.

Lanes diverge at branches and join again when their program counters meet: of several groups the one
with the lowest counter runs first, so that groups wait for each other at the end of an `if`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_kernels.sim.checks import IllegalInstruction, OutOfBounds, SimError
from cute_kernels.sim.memory import raw_view
from cute_kernels.sim.operands import Registers, getter
from cute_kernels.sim.program import ALU, BRANCH, BRANCH_INDEXED, EXIT, HOST, Program
from cute_kernels.sim.ptx import Addr, Imm, Reg
from cute_kernels.sim.scheduler import EXITED, QUANTUM, STALLED
from cute_kernels.sim.scheduler import HOST as AT_HOST

_NEVER = 1 << 60


class Group:
    """Lanes at one program counter. ``held``: they wait there for the other lanes of the warp."""

    __slots__ = ("held", "mask", "pc")

    def __init__(self, pc: int, mask: np.ndarray) -> None:
        self.pc, self.mask, self.held = pc, mask, False


class Warp:
    """See `simulator` for who calls what; ``executed`` counts warp instructions."""

    def __init__(self, cta: Any, warp_id: int, program: Program, lanes: int) -> None:
        self.cta, self.warp_id, self.program, self.name = cta, warp_id, program, ""
        self.launch = cta.launch
        self.sim = cta.launch.sim
        self.regs = Registers(program.function.num_regs)
        self.live = np.arange(32) < lanes
        self.groups = [Group(0, self.live.copy())]
        self.parked: list[Group] = []
        self.current: Group | None = None
        self.executed = 0
        self.global_load_bytes = self.global_store_bytes = 0
        self.shared_load_bytes = self.shared_store_bytes = 0
        self.local = np.zeros((32, max(self.launch.local_bytes, 8)), np.uint8)
        self._specials: dict[str, np.ndarray] = {}

    # ---- running

    def run(self, quantum: int) -> int:
        """Execute up to ``quantum`` instructions: QUANTUM, HOST (standing at a host instruction),
        EXITED, or STALLED (no lane can go on by itself)."""
        budget = quantum
        while True:
            group = self._choose()
            if group is None:
                return STALLED if self.live.any() else EXITED
            status, budget = self._run_group(group, budget)
            if status >= 0:
                return status

    def _choose(self) -> Group | None:
        groups = self.groups
        if len(groups) > 1:
            self._merge()
            groups = self.groups
        for group in groups:
            if not group.held:
                return group
        if groups and not self.parked:  # every lane that could join is here or gone
            groups[0].held = False
            return groups[0]
        return None

    def _merge(self) -> None:
        """Sort by program counter and join groups that have met."""
        self.groups.sort(key=lambda g: g.pc)
        merged: list[Group] = []
        for group in self.groups:
            if merged and merged[-1].pc == group.pc:
                merged[-1].mask = merged[-1].mask | group.mask
                merged[-1].held = False
            else:
                merged.append(group)
        self.groups = merged

    def _run_group(self, group: Group, budget: int) -> tuple[int, int]:
        """Run until the budget is spent, a host instruction, an exit, or a point where groups may
        join (-1).
        """
        program, regs = self.program, self.regs
        kinds, ops, guards, meets = program.kinds, program.ops, program.guards, program.meets
        alone = len(self.groups) == 1 and not self.parked
        mask = None if alone else group.mask
        limit = min(
            (g.pc for g in self.groups if g is not group and g.pc > group.pc), default=_NEVER
        )
        pc = group.pc
        try:
            while budget > 0:
                if meets[pc] and mask is not None and self._must_hold(group, pc):
                    group.pc, group.held = pc, True
                    return -1, budget
                budget -= 1
                kind, guard = kinds[pc], guards[pc]
                if kind == ALU:
                    self.executed += 1
                    if guard is None:
                        ops[pc](self, mask)
                    else:
                        taken = regs.pred[guard[0]] ^ guard[1]
                        inside = taken & (self.live if mask is None else mask)
                        if inside.any():
                            everyone = mask is None and (inside == self.live).all()
                            ops[pc](self, None if everyone else inside)
                    pc += 1
                elif kind == HOST:
                    group.pc = pc
                    self.current = group
                    return AT_HOST, budget
                else:
                    self.executed += 1
                    group.pc = pc
                    self._control(group, kind, guard)
                    if group.mask.any() and group in self.groups and len(self.groups) == 1:
                        pc = group.pc
                        mask = None if not self.parked else group.mask
                        continue
                    return -1, budget
                if pc >= limit:
                    group.pc = pc
                    return -1, budget
        except SimError as error:
            raise error.at(self, program.instrs[pc]) from None
        group.pc = pc
        return QUANTUM, 0

    def _must_hold(self, group: Group, pc: int) -> bool:
        """Other lanes of the warp are still on their way to this instruction."""
        others = any(g is not group and not g.held for g in self.groups)
        return others or bool(self.parked)

    def _control(self, group: Group, kind: int, guard: Any) -> None:
        """Branches, exit and trap of a group standing at ``group.pc``."""
        pc, program = group.pc, self.program
        lanes = group.mask
        if guard is not None:
            lanes = lanes & (self.regs.pred[guard[0]] ^ guard[1])
        rest = group.mask & ~lanes
        if kind == BRANCH:
            targets = [(program.targets[pc], lanes)]
        elif kind == BRANCH_INDEXED:
            index = np.broadcast_to(program.ops[pc](self), 32)
            table = program.instrs[pc].targets
            where = [table[int(i)] if i < len(table) else -1 for i in index]
            targets = [(t, lanes & (np.array(where) == t)) for t in sorted(set(where))]
        elif kind == EXIT:
            self.live = self.live & ~lanes
            targets = []
        elif lanes.any():
            raise IllegalInstruction("trap").at(self, program.instrs[pc])
        else:
            targets = []
        self.groups.remove(group)
        if rest.any():
            targets.append((pc + 1, rest))
        for target, mask in targets:
            if mask.any():
                same = len(targets) == 1 or (mask == group.mask).all()
                new = group if same else Group(target, mask)
                new.pc, new.mask, new.held = target, mask, False
                self.groups.append(new)

    # ---- host instructions

    @property
    def host_instr(self) -> Any:
        assert self.current is not None
        return self.program.instrs[self.current.pc]

    @property
    def host_lanes(self) -> np.ndarray:
        assert self.current is not None
        return self.current.mask & self.live

    @property
    def host_mask(self) -> np.ndarray:
        guard = self.host_instr.guard
        lanes = self.host_lanes
        return lanes if guard is None else lanes & (self.regs.pred[guard[0]] ^ guard[1])

    def retire(self) -> None:
        """The host instruction is done: its lanes go on."""
        assert self.current is not None
        self.executed += 1
        self.current.pc += 1

    def park(self, lanes: np.ndarray) -> None:
        """The lanes at the host instruction wait; they will execute it again."""
        group = self.current
        assert group is not None
        self.groups.remove(group)
        self.parked.append(group)

    def unpark(self, lanes: np.ndarray) -> None:
        for group in [g for g in self.parked if (g.mask & lanes).any()]:
            self.parked.remove(group)
            group.held = False
            self.groups.append(group)
        if len(self.groups) > 1:
            self._merge()

    # ---- operands, for handlers

    @property
    def register_rows(self) -> np.ndarray:
        """uint64 (registers, 32): the row of a register is its id."""
        return self.regs.raw

    def read(self, operand: Any) -> np.ndarray:
        """(32,) uint64: a register, literal, or the address that `[base + offset]` denotes; (2, 32)
        for b128.
        """
        if isinstance(operand, Reg):
            if operand.type == "b128":
                return self.regs.u64[operand.id : operand.id + 2].copy()
            small = {"b32", "u32", "s32", "f32", "f16x2", "bf16x2"}
            if operand.type in small:
                return self.regs.u32[operand.id].astype(np.uint64)
            if operand.type == "pred":
                return self.regs.pred[operand.id].astype(np.uint64)
            if operand.type in ("b16", "u16", "s16", "f16", "bf16"):
                return self.regs.u16[operand.id].astype(np.uint64)
            if operand.type in ("b8", "u8", "s8"):
                return self.regs.u8[operand.id].astype(np.uint64)
            return self.regs.u64[operand.id].copy()
        if isinstance(operand, Imm):
            return np.full(32, np.uint64(operand.bits & (2**64 - 1)))
        if isinstance(operand, Addr):
            total = self.read(operand.base) + np.uint64(operand.offset & (2**64 - 1))
            if isinstance(operand.base, Reg) and operand.base.type in ("b32", "u32", "s32"):
                total &= np.uint64(0xFFFFFFFF)
            return total
        return np.broadcast_to(getter(operand, "u64")(self), 32).astype(np.uint64)

    def write(self, operand: Any, values: Any, mask: np.ndarray) -> None:
        """Bits into a register, in the lanes of ``mask``."""
        row = self.regs.raw[operand.id]
        np.copyto(row, np.asarray(values).astype(np.uint64), where=mask)

    # ---- the machine around it

    def symbol(self, name: str) -> int:
        """Address of a variable or parameter in its own space."""
        return int(self.launch.symbol(self, name))

    def special(self, name: str) -> np.ndarray:
        """A special register, by its PTX name without the percent sign."""
        if name in ("clock", "clock64", "globaltimer", "clock_hi", "globaltimer_lo"):
            return np.full(32, self.launch.next_time(), np.uint64)
        if name not in self._specials:
            self._specials[name] = np.asarray(self.launch.special(self, name), np.uint64)
        return self._specials[name]

    def find_global(self, address: int, size: int, instr: Any) -> tuple[int, np.ndarray]:
        """(first address, bytes) of the allocation around [address, address + size)."""
        for low, high, raw in self.launch.known_ranges:
            if low <= address and address + size <= high:
                return low, raw
        try:
            low, high = self.sim.global_memory.range_of(address, size)
        except OutOfBounds as error:
            raise error.at(self, instr) from None
        self.launch.known_ranges.append((low, high, raw_view(low, high - low)))
        return low, self.launch.known_ranges[-1][2]

    def count_load(self, space: str, size: int) -> None:
        if space == "global":
            self.global_load_bytes += size
        elif space == "shared":
            self.shared_load_bytes += size

    def count_store(self, space: str, size: int) -> None:
        if space == "global":
            self.global_store_bytes += size
        elif space == "shared":
            self.shared_store_bytes += size
