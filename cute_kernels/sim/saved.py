"""Launches on file: what a kernel was given, so that it can run again without the program that
launched it.

A file is a numpy archive (.npz): the PTX text, kernel name, grid, block, cluster, shared bytes, the
parameter block, and the allocations that the parameters point into, with their addresses. On
loading,
the allocations get new memory and every parameter word that pointed into one is moved along,
tensor maps
included (their first eight bytes are the address). Pointers stored inside the allocations are
not moved.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from cute_kernels.sim.checks import OutOfBounds
from cute_kernels.sim.ptx import Module, parse

_FORMAT = 1
Dim3 = tuple[int, int, int]


@dataclasses.dataclass
class SavedLaunch:
    """A launch with the memory it may read. ``memory`` maps the address an allocation had to its
    bytes."""

    ptx: str
    name: str
    grid: Dim3
    block: Dim3
    cluster: Dim3
    smem_bytes: int
    params: bytes
    memory: dict[int, np.ndarray]

    def save(self, path: str | Path) -> None:
        """Write an .npz file."""
        shape = [*self.grid, *self.block, *self.cluster, self.smem_bytes]
        arrays: dict[str, Any] = {
            "format": np.array(_FORMAT),
            "ptx": np.frombuffer(self.ptx.encode(), np.uint8),
            "name": np.frombuffer(self.name.encode(), np.uint8),
            "shape": np.array(shape, np.int64),
            "params": np.frombuffer(self.params, np.uint8),
            "addresses": np.array(sorted(self.memory), np.uint64),
        }
        for i, address in enumerate(sorted(self.memory)):
            arrays[f"memory{i}"] = self.memory[address]
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> SavedLaunch:
        """Read an .npz file.

        Raises:
            ValueError: the file is no saved launch.
        """
        try:
            with np.load(path) as data:
                if int(data["format"]) != _FORMAT:
                    raise ValueError(f"{path} has format {data['format']}, expected {_FORMAT}")
                numbers = [int(v) for v in data["shape"]]
                memory = {
                    int(a): data[f"memory{i}"].copy() for i, a in enumerate(data["addresses"])
                }
                return cls(
                    data["ptx"].tobytes().decode(),
                    data["name"].tobytes().decode(),
                    (numbers[0], numbers[1], numbers[2]),
                    (numbers[3], numbers[4], numbers[5]),
                    (numbers[6], numbers[7], numbers[8]),
                    numbers[9],
                    data["params"].tobytes(),
                    memory,
                )
        except (KeyError, OSError, IndexError) as error:
            raise ValueError(f"{path} is no saved launch: {error}") from error

    def module(self) -> Module:
        return parse(self.ptx)

    def rebased(self, moved: dict[int, int]) -> bytes:
        """The parameter block with its pointers into ``memory`` moved to the addresses in
        ``moved``."""
        usable = len(self.params) // 8 * 8
        words = np.frombuffer(self.params[:usable], np.uint64).copy()
        for i, word in enumerate(words.tolist()):
            for old, raw in self.memory.items():
                if old <= word < old + len(raw):
                    words[i] = moved[old] + word - old
        return words.tobytes() + self.params[usable:]


def capture(memory: Any, module: Module, name: str, params: bytes, shape: Any) -> SavedLaunch:
    """The launch that is about to happen; ``shape`` has grid, block, cluster and smem_bytes."""
    memory.refresh(scan=True)
    words = np.frombuffer(params[: len(params) // 8 * 8], np.uint64)
    kept: dict[int, np.ndarray] = {}
    for word in set(words.tolist()):
        if word and memory.contains(word, 1):
            try:
                first, end = memory.range_of(word, 1)
            except OutOfBounds:
                continue
            kept[first] = memory.find(first, end - first).copy()
    return SavedLaunch(
        module.text, name, shape.grid, shape.block, shape.cluster, shape.smem_bytes, params, kept
    )
