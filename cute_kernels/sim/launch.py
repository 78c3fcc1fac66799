"""What has to be in place before the first kernel is compiled, and which PTX a loaded image came
from.
"""

from __future__ import annotations

import ctypes
import hashlib
import tempfile
from pathlib import Path
from typing import Any

from cute_kernels.sim import shim
from cute_kernels.sim.memory import TensorRanges
from cute_kernels.sim.program import Program
from cute_kernels.sim.ptx import Function, Module, parse
from cute_kernels.sim.runtime import Handles, elf_size


class Preparation:
    """Once per process: the shim, and the folder in which the DSL leaves its PTX and cubin
    files.
    """

    def __init__(self) -> None:
        cache = Path.home() / ".cache" / "nvfp4-megamoe" / "sim"
        self.shim_path = shim.build(cache)
        self.library: ctypes.CDLL = shim.load(self.shim_path)
        self._scratch = tempfile.TemporaryDirectory(prefix="nvfp4-sim-")
        self.dump = Path(self._scratch.name)
        self.known: dict[str, str] = {}  # sha256 of a cubin -> PTX text
        self._seen: set[Path] = set()
        self.handles = Handles()
        self.tensors = TensorRanges()
        self._modules: dict[str, Module] = {}
        self._programs: dict[int, Program] = {}
        self._codes: dict[int, Any] = {}

    def variables(self) -> dict[str, str]:
        return {
            "CUTE_DSL_LIBS": str(self.shim_path),
            "CUTE_DSL_KEEP": "ptx,cubin",
            "CUTE_DSL_DUMP_DIR": str(self.dump),
            "CUTE_DSL_ARCH": "sm_100a",
        }

    def register(self, cubin: bytes, text: str) -> None:
        self.known[_digest(cubin)] = text

    def module(self, image: bytes) -> Module:
        """The parsed PTX that the cubin inside ``image`` was made from.

        Raises RuntimeError when that PTX is not among the files the DSL has kept.
        """
        cubin = elf_of(image)
        digest = _digest(cubin)
        if digest not in self._modules:
            if digest not in self.known:
                self._scan()
            if digest not in self.known:
                raise RuntimeError(
                    "the PTX of a launched kernel is unknown: it was compiled before the "
                    "simulator was enabled; call cute_kernels.compile.enable_simulator() before "
                    "the first compile"
                )
            self._modules[digest] = parse(self.known[digest])
        return self._modules[digest]

    def program(self, function: Function) -> Program:
        """The translated instructions of ``function``, kept as long as its module."""
        if id(function) not in self._programs:
            self._programs[id(function)] = Program(function)
        return self._programs[id(function)]

    def code(self, function: Function) -> Any:
        """``function`` as a `decode_operands.Code`, kept as long as its module."""
        if id(function) not in self._codes:
            from cute_kernels.sim.decode import lower  # needs numba

            self._codes[id(function)] = lower(function)
        return self._codes[id(function)]

    def _scan(self) -> None:
        """Pair new cubin files with the PTX file written beside them (same name but for the
        ending).
        """
        for path in self.dump.rglob("*.cubin"):
            text = path.with_suffix(".ptx")
            if text.exists():  # one name may be written again by a later compile: always read
                self.register(path.read_bytes(), text.read_text())


def _digest(cubin: bytes) -> str:
    return hashlib.sha256(cubin).hexdigest()


def elf_of(image: bytes) -> bytes:
    """The ELF object inside a fat binary, by its own headers."""
    start = image.find(b"\x7fELF")
    if start < 0:
        raise RuntimeError("the loaded image holds no cubin (ELF): a compressed fat binary?")
    return image[start : start + elf_size(image[start : start + 64])]


_prepared: list[Preparation] = []  # the environment of a process is prepared once


def preparation() -> Preparation:
    if not _prepared:
        _prepared.append(Preparation())
    return _prepared[0]


def prepare() -> dict[str, str]:
    """Environment variables that `cute_kernels.compile.enable_simulator` sets before the first
    compile.
    """
    return preparation().variables()
