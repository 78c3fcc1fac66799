"""Commands and parser of Nsight Systems; the report is written by hand in the documented format."""

from __future__ import annotations

from pathlib import Path

import pytest

from profiling import nsys

REPORT = """\
NOTICE: Existing SQLite export found: layer.sqlite
NVTX Range,Style,PID,TID,NVTX Inst,Kern Inst,Total Time (ns),Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Kernel Name
:moe.l2,PushPop,9,9,5,5,150000,30000.0,29000.0,1,2,0.5,sm90_w4a16_decode_store
:moe.l1,PushPop,9,9,5,5,250000,50000.0,49000.0,1,2,0.5,sm90_w4a16_decode_swiglu
:moe.l1,PushPop,9,9,5,5,50000,10000.0,9000.0,1,2,0.5,"void combine<int, 2>(float *)"
other,PushPop,9,9,1,1,500000,500000.0,500000.0,1,2,0.5,memset
"""  # noqa: E501  lines of the report


def test_parse() -> None:
    rows = nsys.parse(REPORT)
    assert [(r.range, r.kernel) for r in rows] == [
        ("moe.l1", "sm90_w4a16_decode_swiglu"), ("moe.l1", "combine"),
        ("moe.l2", "sm90_w4a16_decode_store"), ("other", "memset"),
    ], "stages in their order, the longest kernel first"  # fmt: skip
    assert rows[0] == nsys.KernelSum("moe.l1", "sm90_w4a16_decode_swiglu", 5, 250.0, 49.0)


def test_another_report_is_refused() -> None:
    with pytest.raises(ValueError, match="no column 'Kern Inst'"):
        nsys.parse("NVTX Range,Kernel Name\nmoe.l1,k\n")
    with pytest.raises(ValueError, match="no kernels inside NVTX ranges"):
        nsys.parse("SKIPPED: layer.sqlite does not contain CUDA kernel data.")
    with pytest.raises(ValueError, match=r"open the .qdstrm elsewhere"):
        nsys.parse("Generated: layer.qdstrm\nQdstrmImporter is missing")


def test_command_line(capsys: pytest.CaptureFixture, tmp_path: Path) -> None:
    assert nsys.main(["--dry-run", "--device", "cpu", "--", "torchrun", "x.py"]) == 0
    record, stats = capsys.readouterr().out.splitlines()
    assert record.endswith("torchrun x.py") and "--trace=cuda,nvtx" in record
    assert "--capture-range=cudaProfilerApi" in record
    assert stats.startswith("nsys stats") and stats.endswith("layer.nsys-rep")
    kept = tmp_path / "r.csv"
    kept.write_text(REPORT)
    assert nsys.main(["--parse", str(kept)]) == 0
    shown = capsys.readouterr().out
    assert "sm90_w4a16_decode_swiglu" in shown and "0.263" in shown  # of 950 us


def test_the_tool_is_missing(monkeypatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(nsys.shutil, "which", lambda name: None)
    assert nsys.main([]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: nsys") and shown.count("\n") == 1


def test_a_run_prints_the_table(monkeypatch, tmp_path: Path, capsys) -> None:
    fake, name = tmp_path / "nsys", tmp_path / "layer"
    (tmp_path / "report").write_text(REPORT)
    fake.write_text(
        f'#!/bin/sh\nif [ "$1" = stats ]; then cp {tmp_path}/report {name}_nvtx_kern_sum.csv; fi\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert nsys.main(["--report", str(name)]) == 0
    assert "sm90_w4a16_decode_store" in capsys.readouterr().out
    fake.write_text("#!/bin/sh\necho 'Generated: x.qdstrm'\nexit 1\n")
    assert nsys.main(["--report", str(name)]) == 2
    assert "cannot import" in capsys.readouterr().err
