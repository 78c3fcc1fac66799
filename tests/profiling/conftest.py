"""Recordings of our kernel that the tests of this package share; made in a process of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiling import fabric
from profiling.model_grid import Family
from profiling.specimens import collect

K = 512
PAIR = Family("ours", "bf16", 256, 256)
TWO_PAIRS = Family("ours", "bf16", 256, 256, 2)
QUANTISED = Family("ours", "fp4", 256, 256)


@pytest.fixture(scope="session")
def streams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One output tile of three kernels, and the recordings of the model for one of them."""
    folder = tmp_path_factory.mktemp("streams")
    wanted = [fabric.specimen_of(f, K) for f in (PAIR, TWO_PAIRS, QUANTISED)]
    wanted += [PAIR.specimen(k) for k in (512, 1024)]
    assert collect(wanted, folder, None) == wanted
    return folder
