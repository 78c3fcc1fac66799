"""Without a GPU the kernels of a test session run in the simulator, which must be enabled first."""

from __future__ import annotations

import pytest
import torch

from cute_kernels import compile as compiler


def pytest_configure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        try:
            compiler.enable_simulator()
        except (RuntimeError, ImportError):  # no DSL or no C compiler: tests that need them say so
            return
