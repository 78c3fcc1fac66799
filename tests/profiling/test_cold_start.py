"""A second process compiles nothing: all that the first one compiled comes from the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cute_kernels import compile as compiler
from profiling import cold_start


@pytest.mark.skipif(not compiler.simulated(), reason="the simulator needs the DSL and a C compiler")
def test_the_second_process_finds_every_kernel(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "times.json"
    cold_start.main(["--max-tokens", "1", "--hidden", "64", "--json", str(file)])
    times = json.loads(file.read_text())
    first, second = times["first"], times["second"]
    # sort of int32 and int64, codes of three dtypes, scales, two GEMMs, combine with and without a
    # shared expert for three dtypes
    assert first["compiles"] == 2 + 3 + 1 + 2 + 6 and first["from_disk"] == 0
    assert second["compiles"] == 0 and second["from_disk"] == first["compiles"]
    assert "second process" in capsys.readouterr().out


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="multiple of"):
        cold_start.measure(1, 24, dynamic=False)
