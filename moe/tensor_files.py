"""Tensors of a checkpoint by name: headers first, bytes only when they are asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
_INDEX = "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the tensor, the expert and what was
    expected."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor, or a part of one, that is still in its file.

    name   of the tensor in the checkpoint, for messages
    read   fetches the part; it may share the mapped file, so copy what has to outlive the file
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    def part(self, shape: tuple[int, ...], view: Callable[[Tensor], Tensor]) -> Stored:
        """``view`` of what is read, which has ``shape``."""
        return Stored(self.name, self.dtype, shape, lambda: view(self.read()))

    def transposed(self) -> Stored:
        """The last two dimensions exchanged."""
        *lead, rows, cols = self.shape
        return self.part((*lead, cols, rows), lambda t: t.transpose(-2, -1))


class TensorFiles:
    """A safetensors file, or a directory that holds one, several, or a sharded index.

    Nothing but headers is read until `Stored.read`. With an index only the shards that are asked
    for are opened, so that a rank needs no others. Raises CheckpointError.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        if self.path.is_file():
            self.directory = self.path.parent
            self._add(self.path)
        elif self.path.is_dir():
            self.directory = self.path
            if (self.path / _INDEX).exists():
                self._read_index()
            else:
                self._add(*sorted(self.path.glob("*.safetensors")))
        else:
            raise CheckpointError(f"{self.path} does not exist")
        if not self._file_of:
            raise CheckpointError(f"{self.path} holds no tensors (*.safetensors)")

    def _add(self, *files: Path) -> None:
        for file in files:
            names = self._open(file).keys()  # not a dict: it cannot be iterated itself
            for name in names:
                if name in self._file_of:
                    first = self._file_of[name].name
                    raise CheckpointError(
                        f"tensor {name} is in both {first} and {file.name}: without an index "
                        f"({_INDEX}) nothing says which one counts"
                    )
                self._file_of[name] = file

    def _read_index(self) -> None:
        listed = _json(self.path / _INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise CheckpointError(f"{self.path / _INDEX} has no weight_map")
        for name, file in listed.items():
            if Path(file).name != file:
                raise CheckpointError(f"{_INDEX}: {name} is in {file!r}, not a name of a file here")
            self._file_of[name] = self.path / file

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            if not file.exists():
                raise CheckpointError(f"{file} does not exist, but {_INDEX} names it")
            try:
                self._handles[file] = safe_open(str(file), "pt").__enter__()
            except SafetensorError as error:
                raise CheckpointError(f"{file} cannot be read (truncated?): {error}") from error
        return self._handles[file]

    def names(self) -> list[str]:
        return list(self._file_of)

    def stored(self, name: str) -> Stored:
        """The tensor ``name``, unread."""
        _, dtype, shape = self._slice(name)
        handle = self._open(self._file_of[name])
        return Stored(name, dtype, shape, lambda: torch.as_tensor(handle.get_tensor(name)))

    def stored_rows(self, name: str, start: int, stop: int) -> Stored:
        """Rows start : stop of the first dimension, unread."""
        part, dtype, shape = self._slice(name)
        return Stored(
            name, dtype, (stop - start, *shape[1:]), lambda: torch.as_tensor(part[start:stop])
        )

    def _slice(self, name: str) -> tuple[Any, torch.dtype, tuple[int, ...]]:
        file = self._file_of[name]
        try:
            part = self._open(file).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"tensor {name} is not in {file.name}, where {_INDEX} has it"
            ) from error
        dtype = str(part.get_dtype())
        if dtype not in _DTYPES:
            raise CheckpointError(f"tensor {name} has dtype {dtype}, which cannot be read here")
        return part, _DTYPES[dtype], tuple(part.get_shape())

    def config(self) -> dict[str, Any]:
        """config.json beside the tensors, the text part of a multi-modal one; {} if there is
        none."""
        config = _json(self.directory / "config.json")
        text = config.get("text_config")
        # the text part does not always repeat the model type
        named = {"model_type": config.get("model_type")}
        return {**named, **text} if isinstance(text, dict) else config

    def quantization(self) -> dict[str, Any]:
        """What config.json (quantization_config) or hf_quant_config.json (quantization) say; {} if
        neither does."""
        config = _json(self.directory / "config.json")
        nested = config.get("text_config") or {}
        found = config.get("quantization_config") or nested.get("quantization_config") or {}
        other = _json(self.directory / "hf_quant_config.json").get("quantization") or {}
        return {**other, **found}


def _json(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} must hold an object, got {type(content).__name__}")
    return content
