"""Timelines of the Hopper kernel: what was recorded on an H200, and that ranges cost nothing unless
asked for."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cute_kernels import compile as compiler
from cute_kernels import toolchain
from profiling import timeline
from profiling.timeline_sm90 import Span, flatten, from_iket

RECORDED = Path(__file__).parent / "reports" / "iket_sm90.json"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
dsl = pytest.mark.skipif(
    not toolchain.check_compiler(toolchain.installed()), reason="needs the CuTe DSL 4.8.1"
)


def test_a_recorded_launch() -> None:
    drawn = from_iket(json.loads(RECORDED.read_text()), 1, "t")
    assert drawn.clock == "ns" and drawn.end == 66000
    assert drawn.rows() == [(0, "producer"), (0, "consumer 0"), (0, "consumer 4")]
    for key in drawn.rows():
        mine = sorted((s for s in drawn.slices if (s.cta, s.row) == key), key=lambda s: s.start)
        assert all(a.end == b.start for a, b in itertools.pairwise(mine)), "no gap, no overlap"
    loop = next(s for s in drawn.slices if s.row == "consumer 0" and s.name == "main loop")
    assert (loop.start, loop.duration) == (1440, 54272), "the first tile, of the second launch"
    issued = [s for s in drawn.slices if s.name == "issue rows"]
    assert len(issued) > 50 and {s.row for s in issued} == {"producer"}
    assert {s.kind for s in drawn.slices if s.name == "load tile"} == {"wait"}


def test_only_the_last_launch_of_our_kernel_counts() -> None:
    trace = json.loads(RECORDED.read_text())
    assert len(trace["launches"]) == 2, "one launch warms up"
    trace["launches"].append({"kernelName": "another", "ranges": []})
    assert from_iket(trace, 1, "t").end == 66000
    trace["launches"] = trace["launches"][2:]
    with pytest.raises(ValueError, match="no launch of a kernel"):
        from_iket(trace, 1, "t")
    assert from_iket(json.loads(RECORDED.read_text()), 0, "t").slices == ()


def test_flatten() -> None:
    spans = [Span("a", 0, 10), Span("b", 2, 5), Span("c", 3, 4), Span("b", 5, 6), Span("d", 12, 13)]
    assert [tuple(s) for s in flatten(spans)] == [
        ("a", 0, 2), ("b", 2, 3), ("c", 3, 4), ("b", 4, 5), ("b", 5, 6), ("a", 6, 10),
        ("d", 12, 13),
    ]  # fmt: skip
    assert flatten([]) == []


@pytest.mark.skipif(HOPPER, reason="says what is missing where there is no Hopper GPU")
def test_without_the_gpu(capsys: pytest.CaptureFixture) -> None:
    assert timeline.main(["sm90"]) == 2
    assert "needs a GPU of compute capability 9.0" in capsys.readouterr().err


CODE = """
import dataclasses, sys
from cute_kernels import compile as compiler
from cute_kernels.sm90.config import MIDDLE
from cute_kernels.sm90.epilogues import StoreRows
from profiling.marked_sm90 import MarkedGemm, MarkedRows
config = dataclasses.replace(MIDDLE, token_sizes=(48,))
sys.stdout.write(compiler.dump(MarkedGemm(MarkedRows(), StoreRows(), config), "sm_90a").ptx)
"""


@dsl
def test_ranges_are_compiled_in_on_request_alone() -> None:
    """As usual: the code of the plain kernel. With the DSL's option: every range is there."""
    import dataclasses

    from cute_kernels.sm90.config import MIDDLE
    from cute_kernels.sm90.epilogues import StoreRows
    from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm
    from cute_kernels.sm90.loads import ContiguousRows
    from profiling.marked_sm90 import MarkedGemm, MarkedRows
    from tests.sm90.test_kernels_compile import HGMMA, WARPGROUP, opcodes

    config = dataclasses.replace(MIDDLE, token_sizes=(48,))
    plain = compiler.dump(Sm90GroupedGemm(ContiguousRows(), StoreRows(), config), "sm_90a")
    marked = compiler.dump(MarkedGemm(MarkedRows(), StoreRows(), config), "sm_90a")
    assert opcodes(marked.cubin) == opcodes(plain.cubin) and "iket" not in marked.ptx
    assert opcodes(plain.cubin).count(HGMMA) > 0 < opcodes(plain.cubin).count(WARPGROUP)
    done = subprocess.run(
        ["env", "CUTE_DSL_COMPILER_OPT=iket", "NVFP4_MEGAMOE_CACHE_DIR=off", sys.executable,
         "-c", CODE], capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in ("main_loop", "load_tile", "find_tile", "issue_rows", "wait_ab_full"):
        assert f"__iket_range_decl_{name}" in done.stdout, name


@pytest.mark.sm90
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_on_the_gpu(tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    sizes = ["--rows", "96", "--experts", "8", "--case", "qwen3-30b-a3b", "--ctas", "2"]
    assert timeline.main(["sm90", *sizes, "--json", str(out)]) == 0
    names = {e["name"] for e in json.loads(out.read_text())["traceEvents"]}
    assert {"main loop", "finish", "issue rows", "find tile"} <= names
