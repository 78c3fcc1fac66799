"""A warp run by the compiled core (numba), with the same interface as `warp.Warp`.

`core.run` executes registers, control flow and memory; this class hands it the state, turns its
faults
into errors with a place, and gives handlers their operands.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_kernels.sim import checks, core
from cute_kernels.sim import core_memory as m
from cute_kernels.sim.decode_operands import Code
from cute_kernels.sim.ptx import Addr, Imm, Not, Reg, Special, Sym

_LANE_BITS = 1 << np.arange(32, dtype=np.int64)
_LANES = np.arange(32)
_MASK64 = (1 << 64) - 1


def mask_of(lanes: np.ndarray) -> int:
    """Row of booleans -> bit mask."""
    return int((_LANE_BITS * lanes).sum())


def lanes_of(mask: int) -> np.ndarray:
    """Bit mask -> row of booleans."""
    return (mask >> _LANES & 1).astype(bool)


class CompiledWarp:
    """One warp: ``registers`` (rows, 32) uint64 with the constants of the kernel behind the
    registers."""

    def __init__(self, cta: Any, warp_id: int, code: Code, lanes: int) -> None:
        self.cta, self.warp_id, self.name = cta, warp_id, ""
        self.launch, self.sim = cta.launch, cta.launch.sim
        self.code = code
        self.registers = np.zeros((code.rows, 32), np.uint64)
        self._signed = self.registers.view(np.int64)
        self.pcs = np.zeros(32, np.int64)
        self.local = np.zeros((32, max(self.launch.local_bytes, 16)), np.uint8)
        self.scratch = np.zeros((3, 32), np.int64)
        self.context = m.new_context()
        self.context[m.LIVE] = (1 << lanes) - 1
        self._ready = False

    def _prepare(self) -> None:
        """Fills constants and the table of shared windows; the cluster is complete by now."""
        code, context, checks_on = self.code, self.context, self.sim.checks
        self.registers[code.first :] = code.fixed
        for row, name in code.specials:
            self.registers[row] = np.asarray(self.launch.special(self, name), np.int64).view(
                np.uint64
            )
        for row, name in code.symbols:
            self.registers[row] = self.launch.symbol(self, name)
        ctas = self.cta.cluster.ctas
        context[m.THREAD], context[m.RANK], context[m.RANKS] = (
            1 + 32 * self.warp_id, self.cta.rank, len(ctas))  # fmt: skip
        context[m.WINDOW] = self.cta.shared.size
        context[m.LOCAL], context[m.LOCAL_BYTES] = self.local.ctypes.data, self.local.shape[1]
        context[m.CHECKS] = (
            m.CHECK_INIT * checks_on.uninitialised
            | m.CHECK_RACE * checks_on.shared_race
            | m.CHECK_OVERWRITE * checks_on.shared_overwrite
        )
        for rank, cta in enumerate(ctas):
            at, shared = m.TABLE + m.ROW * rank, cta.shared
            arrays = (
                shared.data,
                shared.init,
                shared.writer,
                shared.async_reads,
                shared.async_writes,
            )
            context[at : at + 5] = [a.ctypes.data for a in arrays]
        self._ready = True

    # ---- running

    def run(self, quantum: int) -> int:
        """Execute up to ``quantum`` instructions: QUANTUM, HOST (standing at a host
        instruction), EXITED, or
        STALLED (no lane can go on by itself)."""
        if not self._ready:
            self._prepare()
        context, launch = self.context, self.launch
        context[m.EPOCH], context[m.CLOCK] = launch.epoch, launch.time
        ctas = self.cta.cluster.ctas
        if len(ctas) > 1:
            for rank, cta in enumerate(ctas):
                context[m.TABLE + m.ROW * rank + m.ENDED] = cta.warps_left == 0
        while True:
            status = core.run(
                self.code.code, self.code.vec, self._signed, self.pcs,
                self.sim.global_memory.ranges, context, self.scratch, quantum,
            )  # fmt: skip
            launch.time = int(context[m.CLOCK])
            if status <= core.R_STALLED:
                return int(status)
            if status == core.R_TRAP:
                raise checks.IllegalInstruction("trap").at(self, self.host_instr)
            if not self._may_retry():
                raise self._fault()

    def _may_retry(self) -> bool:
        """True if the address belongs to a tensor that was not known yet."""
        context = self.context
        if context[m.FAULT] != m.NO_RANGE:
            return False
        address = int(context[m.FAULT_ADDRESS]) & _MASK64
        return bool(self.sim.global_memory.search(address, self._access_bytes()))

    def _access_bytes(self) -> int:
        row = self.code.code[self.context[m.PC]]
        if row[m.KIND] == core.MATRIX:
            return 16
        return int(row[m.BITS] >> 3) * int(row[m.COUNT])

    def _fault(self) -> Exception:
        context, size = self.context, self._access_bytes()
        address = int(context[m.FAULT_ADDRESS]) & _MASK64
        offset, rank = address & 0xFFFFFF, address >> 24 & 0xFF
        kind, message = {
            m.NO_RANK: (checks.OutOfBounds, f"shared address names rank {rank} of a cluster of "
                        f"{len(self.cta.cluster.ctas)}"),
            m.WINDOW_END: (checks.OutOfBounds, f"shared address {offset:#x} leaves the window of "
                           f"{self.cta.shared.size:#x} bytes"),
            m.MISALIGNED: (checks.Misaligned, f"address {address:#x} must be a multiple of {size}"),
            m.NO_RANGE: (checks.OutOfBounds, f"[{address:#x}, {address + size:#x}) is in no live "
                         "allocation"),
            m.STACK_END: (checks.OutOfBounds, "local memory access outside the stack frame"),
            m.FRESH: (checks.UninitialisedRead, f"shared bytes [{offset:#x}, {offset + size:#x}) "
                      "were not all written before this read"),
            m.RACE: (checks.SharedRace, f"shared bytes [{offset:#x}, {offset + size:#x}): some are "
                     "being written by a bulk copy"),
            m.OVERWRITE: (checks.SharedOverwrite,
                          f"shared bytes [{offset:#x}, {offset + size:#x}): "
                          "some may still be read by an asynchronous operation"),
            m.ENDED_CTA: (checks.SharedRace, f"shared memory of rank {rank}, whose CTA has ended"),
            m.NOT_MEMBER: (checks.IllegalInstruction, "an executing lane is not in its membermask"),
        }[int(context[m.FAULT])]  # fmt: skip
        return kind(message).at(self, self.host_instr, int(context[m.FAULT_LANE]))

    # ---- host instructions

    @property
    def live(self) -> np.ndarray:
        return lanes_of(int(self.context[m.LIVE]))

    @property
    def host_instr(self) -> Any:
        return self.code.function.instrs[int(self.context[m.PC])]

    @property
    def host_lanes(self) -> np.ndarray:
        return lanes_of(int(self.context[m.LANES]))

    @property
    def host_mask(self) -> np.ndarray:
        return lanes_of(int(self.context[m.ACTIVE]))

    @property
    def executed(self) -> int:
        return int(self.context[m.EXECUTED])

    @property
    def global_load_bytes(self) -> int:
        return int(self.context[m.GLOBAL_LOADED])

    @property
    def global_store_bytes(self) -> int:
        return int(self.context[m.GLOBAL_STORED])

    @property
    def shared_load_bytes(self) -> int:
        return int(self.context[m.SHARED_LOADED])

    @property
    def shared_store_bytes(self) -> int:
        return int(self.context[m.SHARED_STORED])

    def retire(self) -> None:
        """The host instruction is done: its lanes go on."""
        self.context[m.EXECUTED] += 1
        self.pcs[lanes_of(int(self.context[m.LANES]))] = self.context[m.PC] + 1

    def park(self, lanes: np.ndarray) -> None:
        """These lanes wait at the host instruction; they will execute it again."""
        self.context[m.PARKED] |= mask_of(lanes)

    def unpark(self, lanes: np.ndarray) -> None:
        self.context[m.PARKED] &= ~mask_of(lanes)

    # ---- operands, for handlers

    @property
    def register_rows(self) -> np.ndarray:
        """uint64 (registers and constants, 32): the row of a register is its id."""
        return self.registers

    def read(self, operand: Any) -> np.ndarray:
        """(32,) uint64: a register, literal, or the address that `[base + offset]` denotes; (2,
        32) for b128."""
        if isinstance(operand, Reg):
            if operand.type == "b128":
                return self.registers[operand.id : operand.id + 2].copy()
            return self.registers[operand.id].copy()
        if isinstance(operand, Imm):
            return np.full(32, np.uint64(operand.bits & _MASK64))
        if isinstance(operand, Addr):
            total = self.read(operand.base) + np.uint64(operand.offset & _MASK64)
            if isinstance(operand.base, Reg) and operand.base.type in ("b32", "u32", "s32"):
                total &= np.uint64(0xFFFFFFFF)
            return total
        if isinstance(operand, Not):
            return self.registers[operand.reg.id] ^ np.uint64(1)
        if isinstance(operand, Sym):
            return np.full(32, self.launch.symbol(self, operand.name), np.uint64)
        if isinstance(operand, Special):
            return np.asarray(self.launch.special(self, operand.name), np.int64).astype(np.uint64)
        raise checks.UnsupportedInstruction(f"operand {operand} cannot be read")

    def write(self, operand: Any, values: Any, mask: np.ndarray) -> None:
        """Bits into a register, in the lanes of ``mask``."""
        row = self.registers[operand.id]
        np.copyto(row, np.asarray(values).astype(np.uint64), where=mask)
