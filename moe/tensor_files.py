"""Tensors of a checkpoint by name, read piece by piece from safetensors files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the tensor, the expert and what was
    expected.
    """


class TensorFiles:
    """A safetensors file, or a directory with one, several, or a sharded index.

    Nothing is read but headers until `get`; `get` reads one tensor or one slice of its first
    dimension.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                raise CheckpointError(f"{self.path} holds no *.safetensors file")
            self.directory = self.path
        elif self.path.is_file():
            files, self.directory = [self.path], self.path.parent
        else:
            raise CheckpointError(f"{self.path} does not exist")
        self._handles: dict[Path, Any] = {}
        self._file_of: dict[str, Path] = {}
        for file in files:
            names = self._open(file).keys()
            for name in names:
                if name in self._file_of:
                    raise CheckpointError(
                        f"tensor {name} is in both {self._file_of[name].name} and {file.name}"
                    )
                self._file_of[name] = file
        self._check_index()

    def _open(self, file: Path) -> Any:
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(str(file), "pt").__enter__()
            except SafetensorError as error:
                raise CheckpointError(f"{file} cannot be read (truncated?): {error}") from error
        return self._handles[file]

    def _check_index(self) -> None:
        index = self.directory / "model.safetensors.index.json"
        if self.path.is_dir() and index.exists():
            listed = json.loads(index.read_text())["weight_map"]
            missing = sorted(set(listed) - set(self._file_of))
            if missing:
                raise CheckpointError(
                    f"{index.name} lists {len(missing)} tensors that no file holds, first "
                    f"{missing[0]} in {listed[missing[0]]}"
                )

    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(self._file_of[name]).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' name: BF16, F32, U8, F8_E4M3, ..."""
        return str(self._open(self._file_of[name]).get_slice(name).get_dtype())

    def get(self, name: str, start: int | None = None, stop: int | None = None) -> Tensor:
        """The whole tensor, or rows start : stop of its first dimension."""
        handle = self._open(self._file_of[name])
        if start is None:
            return torch.as_tensor(handle.get_tensor(name))
        return torch.as_tensor(handle.get_slice(name)[start:stop])

    def config(self) -> dict[str, Any]:
        """config.json beside the tensors, the text part of a multi-modal one; {} if there is
        none.
        """
        file = self.directory / "config.json"
        if not file.exists():
            return {}
        config = json.loads(file.read_text())
        quantization = config.get("quantization_config")
        if "text_config" in config:
            config = {**config["text_config"]}
            config.setdefault("quantization_config", quantization)
        return dict(config)
