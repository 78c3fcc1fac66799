"""Launches on file, the command line, and launches that cannot work."""

from __future__ import annotations

import gc
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from cute_kernels import sim
from cute_kernels.sim.__main__ import main
from cute_kernels.sim.grid import Cluster, Cta
from cute_kernels.sim.memory import SharedMemory
from cute_kernels.sim.ptx import parse
from cute_kernels.sim.saved import SavedLaunch, capture
from cute_kernels.sim.tmem import Tmem
from tests.sim.onewarp import kernel, u32


def saved_add(
    source: torch.Tensor, out: torch.Tensor, body: str = "add.s32 %d, %a0, 5;"
) -> SavedLaunch:
    text = kernel(body, [4], 4)
    params = struct.pack("<2Q", out.data_ptr(), source.data_ptr())
    simulator = sim.Simulator(core="numpy")

    class Shape:
        grid, block, cluster, smem_bytes = (1, 1, 1), (32, 1, 1), (1, 1, 1), 0

    return capture(simulator.global_memory, parse(text), "k", params, Shape)


def test_a_saved_launch_runs_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    saved_add(source, out).save(tmp_path / "launch.npz")
    loaded = SavedLaunch.load(tmp_path / "launch.npz")
    assert len(loaded.memory) == 2 and loaded.block == (32, 1, 1)
    trace = tmp_path / "trace.json"
    assert main([str(tmp_path / "launch.npz"), "--schedules", "3", "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert text.count("k ran in") == 3 and "differ" not in text
    assert trace.exists()
    assert not out.any(), "the saved copy ran, not the tensors of this process"


def test_pointers_move_with_their_allocations() -> None:
    source, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    saved = saved_add(source, out)
    moved = saved.rebased({a: a + 4096 for a in saved.memory})
    assert struct.unpack("<2Q", moved) == (out.data_ptr() + 4096, source.data_ptr() + 4096)


def test_a_fault_gives_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = torch.arange(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    saved_add(source, out, "trap;").save(tmp_path / "launch.npz")
    assert main([str(tmp_path / "launch.npz")]) == 1
    assert "IllegalInstruction: trap" in capsys.readouterr().out


def test_a_file_that_is_no_launch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    assert main([str(tmp_path / "other.npz")]) == 2
    assert main([str(tmp_path / "missing.npz")]) == 2
    assert "no saved launch" in capsys.readouterr().err


@pytest.mark.parametrize("core", ["numpy", "compiled"])
def test_ended_clusters_give_their_memory_back(core: str) -> None:
    """At once: what waited for the collector of cycles was gigabytes after a thousand launches."""
    if core == "compiled":
        pytest.importorskip("numba", reason="the compiled core needs numba")
    source, out = torch.arange(384, dtype=torch.int32), torch.zeros(384, dtype=torch.int32)
    module = parse(kernel("add.s32 %d, %a0, 5;", [4], 4))
    params = struct.pack("<2Q", out.data_ptr(), source.data_ptr())

    class Shape:
        grid, block, cluster, smem_bytes = (12, 1, 1), (32, 1, 1), (2, 1, 1), 4096

    gc.collect()
    gc.disable()
    try:
        simulator = sim.Simulator(core=core)
        simulator.run_module(module, module.functions["k"], params, Shape)
        parts = (Cluster, Cta, SharedMemory, Tmem)
        left = [type(o).__name__ for o in gc.get_objects() if isinstance(o, parts)]
    finally:
        gc.enable()
    assert out.tolist() == list(range(5, 389))
    assert left == []


def test_one_simulator_at_a_time() -> None:
    with sim.Simulator(), pytest.raises(RuntimeError, match="already active"), sim.Simulator():
        pass
    with pytest.raises(ValueError, match="schedule must be one of"):
        sim.Simulator(schedule="never")
    with pytest.raises(ValueError, match="core must be one of"):
        sim.Simulator(core="fpga")


def test_helpers_are_bits() -> None:
    assert u32(-1).tolist() == [0xFFFFFFFF]
