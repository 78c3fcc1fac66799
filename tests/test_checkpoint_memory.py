"""Memory while loading, as the operating system counts it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import oracle
from tests.checkpoints import HF, expert_tensors, layer, parts, write

E, H, I = 64, 512, 256  # noqa: E741
SLACK = (
    4 << 20
)  # heap of the interpreter, the allocator's rounding, headers; a quarter of the result

# Loads a tiny layer first, so that whatever is made once is there, then limits what the process may
# allocate besides. The mapping of the file counts there (it is private), though its pages are the
# page cache's: the limit has its size on top.
LOAD = """
import pathlib, resource, sys, torch
from moe import MoEConfig, load_checkpoint
torch.set_num_threads(1)
path, slack = sys.argv[1], int(sys.argv[2])
cfg = MoEConfig({h}, {i}, {e}, 2)
load_checkpoint(path, 0, expert_range=(0, 1), config=cfg)
size = load_checkpoint(path, 0, expert_range=(0, 8), config=cfg)[1].nbytes * {e} // 8
lines = pathlib.Path("/proc/self/status").read_text().splitlines()
used = next(int(n.split()[1]) * 1024 for n in lines if n.startswith("VmData"))
mapped = pathlib.Path(path, "model.safetensors").stat().st_size
resource.setrlimit(resource.RLIMIT_DATA, (used + mapped + size + slack, -1))
kept = []
if len(sys.argv) > 3:  # a careless loader: the codes once more
    kept.append(torch.ones({e} * {i} * {h}, dtype=torch.uint8))
try:
    weights = load_checkpoint(path, 0, config=cfg)[1]
except (MemoryError, RuntimeError) as error:
    full = isinstance(error, MemoryError) or "memory" in str(error)
    sys.stdout.write("no memory" if full else repr(error))
else:
    sys.stdout.write(f"loaded {{weights.nbytes - size}}")
"""


def plain(tmp: Path) -> Path:
    """bf16: every expert is four times its size in the file, and quantised on the way."""
    want = layer(sizes=(E, H, I))
    tensors = {}
    for role, (codes, scale, _) in parts(want).items():
        for e in range(E):
            name = f"model.layers.0.mlp.experts.{e}.{HF[role]}.weight"
            tensors[name] = torch.from_numpy(oracle.decode(codes[e], scale[e])).bfloat16()
    return write(tmp, tensors)


def packed(tmp: Path) -> Path:
    return write(tmp, expert_tensors(layer(sizes=(E, H, I))))


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts allocations on Linux only")
@pytest.mark.parametrize("make", [packed, plain])
def test_a_process_with_room_for_the_result_and_one_expert(tmp_path: Path, make) -> None:
    """H55: the whole layer loads within its final size, one expert and the interpreter's own; with
    the codes once more in memory the same limit is hit."""
    folder = make(tmp_path / "layer")
    expert = 3 * H * I * (4 if make is plain else 1)  # of a plain one, fp32 pieces
    code = LOAD.format(h=H, i=I, e=E)

    def load(*careless: str) -> str:
        run = subprocess.run(
            [sys.executable, "-c", code, str(folder), str(SLACK + expert), *careless],
            capture_output=True,
            text=True,
            cwd=Path(__file__).resolve().parent.parent,
            timeout=120,
        )
        assert run.returncode == 0, run.stderr
        return run.stdout

    assert load() == "loaded 0"
    assert load("careless") == "no memory"
