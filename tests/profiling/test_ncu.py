"""Commands and parser of Nsight Compute; the report in reports/ was recorded on an H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe import ranges
from profiling import ncu

REPORT = Path(__file__).parent / "reports" / "ncu_h200.csv"


def test_a_recorded_report() -> None:
    gather, gemm, copy = ncu.parse(REPORT.read_text())
    assert gather.name == "native::_scatter_gather_elementwise_kernel"
    assert (gemm.name, gemm.range) == ("cutlass::device_kernel", "moe.l2")
    assert copy.range == "moe.combine" and copy.name == "native::vectorized_elementwise_kernel"
    assert gemm.values == pytest.approx(
        {"us": 28.8, "tensor %": 22.67, "DRAM %": 38.28, "DRAM read": 50637824.0,
         "DRAM written": 2328320.0, "L2 %": 42.03, "L2 hit %": 18.27, "registers": 168,
         "smem kB": 207.872, "warps %": 16.45}
    )  # fmt: skip
    assert list(gemm.stalls)[:3] == ["long_scoreboard", "wait", "barrier"]
    assert gemm.stalls["gmma"] == 0.03 and all(v > 0 for v in gemm.stalls.values())


def test_table_of_a_report(capsys: pytest.CaptureFixture) -> None:
    assert ncu.main(["--parse", str(REPORT)]) == 0
    shown = capsys.readouterr().out
    assert "moe.l2" in shown and "28.80" in shown and "207.9" in shown
    assert "1.84" in shown  # (50.6 + 2.3) MB in 28.8 us


def test_units_and_missing_counters() -> None:
    """Other units, a counter that this chip lacks, and n/a cells."""
    header = '"ID","Process ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum"'
    text = f'{header}\n"","","","msecond","Mbyte"\n"0","7","k(int)","1,2.5","n/a"\n'
    (kernel,) = ncu.parse(text)
    assert kernel.values == {"us": 12500.0} and kernel.range == "" and kernel.stalls == {}
    text = text.replace('"Mbyte"', '"Gbyte"').replace("n/a", "2")
    assert ncu.parse(text)[0].values["DRAM read"] == 2e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "may not read"),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "cannot initialise"),
        ("==WARNING== No kernels were profiled.", "inside the chosen ranges"),
        ("==ERROR== unrecognised option '--communicator'.", "needs Nsight Compute 2026.1"),
        ("something else", "ncu gave no table: something else"),
        ("", "no output"),
    ],
)
def test_failures_are_one_clear_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ncu.parse(text)
    assert "\n" not in ncu.explain_failure(text)


def test_names() -> None:
    assert ncu.short_name("void a::b<int, c<2>>(float *, int)") == "a::b"
    assert ncu.short_name("sm90_w4a16_decode_store(int)") == "sm90_w4a16_decode_store"
    assert ncu.short_name("sm90_middle_kernel_cutlass_kernel_Sm90Gro") == "sm90_middle"
    assert ncu.short_name("combine_h2048_k8_0") == "combine_h2048_k8"
    assert ncu.short_name("plain") == "plain" and len(ncu.short_name("x" * 99)) == 60


def test_command_line(capsys: pytest.CaptureFixture) -> None:
    case = ["--case", "qwen3-30b-a3b", "--tokens", "8", "--device", "cpu"]
    assert ncu.main([*case, "--dry-run", "--ranges", "moe.l1"]) == 0
    line = capsys.readouterr().out.split()
    assert line[0] == "ncu" and line[line.index("--nvtx-include") + 1] == "moe.l1/"
    assert line.count("--nvtx-include") == 1 and "--communicator" not in line
    assert line[line.index("--clock-control") + 1] == "none", "clocks are not ours to change"
    assert "profiling.workload" in line and line[line.index("--tokens") + 1] == "8"
    assert ncu.main(["--dry-run", "--processes", "4", "--", "torchrun", "-m", "x"]) == 0
    line = capsys.readouterr().out.split()
    assert line[-3:] == ["torchrun", "-m", "x"] and "--lockstep-kernel-launch" in line
    assert line[line.index("--communicator-shmem-num-peers") + 1] == "4"
    assert line.count("--nvtx-include") == len(ranges.STAGES)


def test_the_tool_is_missing(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(ncu.shutil, "which", lambda name: None)
    assert ncu.main(["--case", "qwen3-30b-a3b"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ncu") and shown.count("\n") == 1


def test_a_run_prints_the_table(monkeypatch, tmp_path: Path, capsys) -> None:
    """The whole path, with a program that behaves like ncu."""
    fake = tmp_path / "ncu"
    fake.write_text(
        "#!/bin/sh\nwhile [ $# -gt 0 ]; do\n"
        f'  if [ "$1" = --log-file ]; then cp {REPORT} "$2"; fi\n  shift\ndone\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kept = tmp_path / "kept.csv"
    assert ncu.main(["--csv", str(kept)]) == 0
    assert "cutlass::device_kernel" in capsys.readouterr().out
    assert kept.read_text() == REPORT.read_text()
    fake.write_text("#!/bin/sh\necho '==ERROR== ERR_NVGPUCTRPERM'\nexit 1\n")
    assert ncu.main([]) == 2
    assert "run as root" in capsys.readouterr().err


def test_a_recorded_report_of_our_kernels() -> None:
    """Names are those that the kernels gave themselves."""
    l1, combine = ncu.parse(REPORT.with_name("ncu_h200_sm90.csv").read_text())
    assert (l1.range, l1.name) == ("moe.l1", "sm90_w4a16_middle_swiglu_f32")
    assert (combine.range, combine.name) == ("moe.combine", "combine_h2048_k8_bfloat16_bfloat16")
    assert l1.values["registers"] == 80 and l1.values["us"] == pytest.approx(62.88)
