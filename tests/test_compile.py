"""The compile cache: keys, processes, damage, messages. No GPU is needed to compile."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cute_kernels import compile as compiler
from cute_kernels import toolchain
from cute_kernels.disk_cache import DiskCache
from cute_kernels.toolchain import Installed

pytestmark = pytest.mark.skipif(
    not toolchain.check_compiler(toolchain.installed()),
    reason="needs the CuTe DSL to compile kernels",
)
ROOT = Path(__file__).parent.parent
ARCH = "sm_100a"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache directory; kernels that this process compiled before are forgotten."""
    monkeypatch.setenv("NVFP4_MEGAMOE_CACHE_DIR", str(tmp_path / "cache"))
    compiler.clear_memory()
    yield tmp_path / "cache"
    compiler.clear_memory()


def toy(threads: int = 32) -> Any:
    from tests.toy_kernel import Toy

    return Toy(threads)


def counts() -> tuple[int, int]:
    s = compiler.stats()
    return s.compiles, s.disk_hits


def entries(cache: Path) -> list[Path]:
    return sorted(p for p in cache.iterdir() if p.name != "locks")


def child(code: str, cache: Path, **environment: str) -> subprocess.Popen[str]:
    """A fresh process with ``load`` and ``toy`` at hand; prints what ``code`` prints."""
    head = (
        "import json, os, sys, time\n"
        "from cute_kernels import compile as compiler\n"
        "from tests.toy_kernel import Toy\n"
    )
    env = {k: v for k, v in os.environ.items() if not k.startswith("CUTE_DSL_")}
    env |= {"NVFP4_MEGAMOE_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", head + code],
        cwd=ROOT,
        env={**env, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


REPORT = (
    "s = compiler.stats()\n"
    "print(json.dumps([s.compiles, s.disk_hits, l.ptx.count('.entry'), s.seconds]))\n"
)


def test_memory_then_disk_then_compiler(cache: Path) -> None:
    before = counts()
    first = compiler.load(toy(), ARCH)
    assert compiler.load(toy(), ARCH) is first
    assert counts() == (before[0] + 1, before[1])
    compiler.clear_memory()
    again = compiler.load(toy(), ARCH)
    assert again is not first and again.ptx == first.ptx
    assert counts() == (before[0] + 1, before[1] + 1)


def test_h38_second_process_does_not_compile(cache: Path) -> None:
    code = f"l = compiler.load(Toy(), {ARCH!r})\n" + REPORT
    compiles, hits, kernels, _ = finish(child(code, cache))
    assert (compiles, hits, kernels) == (1, 0, 1)
    compiles, hits, kernels, seconds = finish(child(code, cache))
    assert (compiles, hits, kernels) == (0, 1, 1)
    assert seconds < 1.0


def test_h39_eight_cold_processes_build_once(cache: Path, tmp_path: Path) -> None:
    flag = tmp_path / "go"
    code = (
        f"import cutlass.cute\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        f"l = compiler.load(Toy(), {ARCH!r})\n" + REPORT
    )
    processes = [child(code, cache) for _ in range(8)]
    time.sleep(1.0)
    flag.touch()
    results = [finish(p) for p in processes]
    assert sum(r[0] for r in results) == 1, results
    assert all(r[0] + r[1] == 1 and r[2] == 1 for r in results)
    assert len(entries(cache)) == 1


def test_h39_a_builder_killed_while_writing_leaves_no_entry(cache: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "write = Path.write_bytes\n"
        "def stall(self, data):\n"
        "    write(self, data[: len(data) // 2])\n"
        "    print('writing', flush=True)\n"
        "    time.sleep(600)\n"
        "Path.write_bytes = stall\n"
        f"compiler.load(Toy(), {ARCH!r})\n"
    )
    victim = child(code, cache)
    assert victim.stdout is not None
    assert victim.stdout.readline().strip() == "writing"
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert all(p.name.startswith(".") for p in entries(cache))
    before = counts()
    compiler.load(toy(), ARCH)
    assert counts() == (before[0] + 1, before[1])
    assert [p.name.startswith(".") for p in entries(cache)] == [False], "left-overs were kept"


def damage_zero(entry: Path) -> None:
    (entry / "kernel.o").write_bytes(b"")


def damage_truncate(entry: Path) -> None:
    data = (entry / "kernel.o").read_bytes()
    (entry / "kernel.o").write_bytes(data[: len(data) // 2])


def damage_flip(entry: Path) -> None:
    data = bytearray((entry / "kernel.o").read_bytes())
    data[len(data) // 2] ^= 1
    (entry / "kernel.o").write_bytes(bytes(data))


def damage_meta(entry: Path) -> None:
    (entry / "meta.json").write_text("{")


def damage_missing(entry: Path) -> None:
    (entry / "kernel.ptx").unlink()


@pytest.mark.parametrize(
    "damage", [damage_zero, damage_truncate, damage_flip, damage_meta, damage_missing]
)
def test_h39_damaged_entries_are_built_again(cache: Path, damage: Any) -> None:
    compiler.load(toy(), ARCH)
    (entry,) = entries(cache)
    good = (entry / "kernel.ptx").read_bytes()
    damage(entry)
    compiler.clear_memory()
    before = counts()
    compiler.load(toy(), ARCH)
    assert counts() == (before[0] + 1, before[1])
    assert (entry / "kernel.ptx").read_bytes() == good
    compiler.clear_memory()
    compiler.load(toy(), ARCH)
    assert counts() == (before[0] + 1, before[1] + 1), "the rebuilt entry was not stored"


def test_an_object_that_does_not_link_is_built_again(cache: Path) -> None:
    import hashlib

    compiler.load(toy(), ARCH)
    (entry,) = entries(cache)
    (entry / "kernel.o").write_bytes(b"not an object")
    meta = json.loads((entry / "meta.json").read_text())
    meta["sha256"]["kernel.o"] = hashlib.sha256(b"not an object").hexdigest()
    (entry / "meta.json").write_text(json.dumps(meta))
    compiler.clear_memory()
    before = counts()
    compiler.load(toy(), ARCH)
    assert counts() == (before[0] + 1, before[1])


def test_h39_directory_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file where the directory should be: unwritable for root as well."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NVFP4_MEGAMOE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    compiler.clear_memory()
    with caplog.at_level(logging.WARNING):
        first = compiler.load(toy(), ARCH)
        compiler.load(toy(64), ARCH)
    compiler.clear_memory()
    assert "toy" in first.ptx
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "memory only" in warnings[0].getMessage()


def test_h39_read_only_directory_is_read(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import tempfile

    compiler.load(toy(), ARCH)
    compiler.clear_memory()

    real = tempfile.TemporaryFile

    def refuse(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dir") == cache:
            raise PermissionError("read-only file system")
        return real(*args, **kwargs)

    before = counts()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(tempfile, "TemporaryFile", refuse)
        compiler.load(toy(), ARCH)
        compiler.load(toy(64), ARCH)
    assert counts() == (before[0] + 1, before[1] + 1)
    assert len([r for r in caplog.records if "memory only" in r.getMessage()]) == 1
    assert len(entries(cache)) == 1


def test_a_directory_that_others_may_write_is_not_used(tmp_path: Path) -> None:
    root = tmp_path / "open"
    root.mkdir()
    root.chmod(0o777)
    disk = DiskCache(root)
    assert not disk.writable and disk.root is None


def test_memory_only(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVFP4_MEGAMOE_CACHE_DIR", "off")
    compiler.clear_memory()
    before = counts()
    compiler.load(toy(), ARCH)
    assert counts() == (before[0] + 1, before[1]) and not cache.exists()


def test_h41_architecture_is_part_of_the_key(cache: Path) -> None:
    from cute_kernels.compile import key

    targets = ["sm_90a", "sm_100a", "sm_100f", "sm_103a"]
    launchers = [compiler.load(toy(), a) for a in targets]
    assert len({id(launcher) for launcher in launchers}) == 4 and len(entries(cache)) == 4
    for launcher, arch in zip(launchers, targets):
        assert re.search(rf"^\.target {arch}\b", launcher.ptx, re.M)
    assert len({key(toy(), a) for a in targets}) == 4
    assert toolchain.target((10, 0)).arch != toolchain.target((10, 3)).arch


def test_key_follows_source_and_constants(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import tests.toy_kernel as module

    first = compiler.key(toy(), ARCH)
    assert compiler.key(toy(), ARCH) == first
    assert compiler.key(toy(64), ARCH) != first
    assert module.__file__ is not None
    edited = tmp_path / "toy_kernel.py"
    edited.write_text(Path(module.__file__).read_text() + "# another comment\n")
    monkeypatch.setattr(module, "__file__", str(edited))
    assert compiler.key(toy(), ARCH) != first
    monkeypatch.setattr(module, "__file__", None)
    assert compiler.key(toy(), ARCH) is None, "a kernel without a source file must not be stored"


def test_key_covers_the_modules_a_kernel_uses() -> None:
    from cute_kernels.device import ptx, quantize, scheduler

    modules = compiler._modules_of(quantize.GroupScales(4, 4))
    assert {quantize, ptx, scheduler} <= modules
    assert compiler not in modules, "an edit of the cache itself would rebuild everything"


def test_h42_threads_do_not_pile_up(cache: Path) -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    compiler.load(toy(32), ARCH)
    before = threads()
    for n in range(2, 27):
        compiler.load(toy(32 * n), ARCH)
    assert threads() <= before + 1


def test_threads_compile_one_at_a_time(cache: Path) -> None:
    """Two compilers at once crash the process; 'one kernel per key' must hold for threads as
    well."""
    before = counts()
    results: list[Any] = []
    sizes = [32, 64, 96, 128] * 2

    def work(n: int) -> None:
        results.append((n, compiler.load(toy(n), ARCH)))

    workers = [threading.Thread(target=work, args=(n,)) for n in sizes]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert len(results) == 8 and len({id(launcher) for _, launcher in results}) == 4
    assert counts()[0] == before[0] + 4


def test_h43_first_compile_logs_one_line(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="cute_kernels"):
        compiler.load(toy(), ARCH)
        compiler.load(toy(), ARCH)
    (line,) = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(r"compiled toy_t32 for sm_100a in \d+\.\d\d s; warmup.*", line)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="cute_kernels"), compiler.warming_up():
        compiler.load(toy(64), ARCH)
    assert not caplog.records


GOOD = Installed(dsl="4.8.1", runtimes=(13,), bindings="13.4.4", driver=(13, 0))


@pytest.mark.parametrize(
    ("found", "parts"),
    [
        ({"dsl": None}, ["found none", "pip install", "4.8.1"]),
        ({"dsl": "4.2.0"}, ["found 4.2.0", "need", "4.8.1", "pip install"]),
        ({"runtimes": ()}, ["without its compiler libraries", "pip install"]),
        ({"bindings": None}, ["cuda-python", "found none", "pip install"]),
        ({"driver": None}, ["no NVIDIA driver"]),
        ({"driver": (12, 8)}, ["12.8", "CUDA 13", "driver", "pip install"]),
        ({"driver": (12, 8), "runtimes": (12,)}, ["cuda-bindings 13.4.4", "12.8", "pip install"]),
        ({"platform": "darwin"}, ["Linux", "darwin"]),
    ],
    ids=str,
)
def test_h44_messages_say_found_needed_and_what_to_do(found: dict, parts: list[str]) -> None:
    status = toolchain.check_driver(dataclasses.replace(GOOD, **found))
    assert not status
    for part in parts:
        assert part in status.reason
    with pytest.raises(RuntimeError, match=re.escape(status.reason)):
        status.check()


def test_h44_a_good_machine_passes() -> None:
    assert toolchain.check_driver(GOOD)


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((11, 0), "sm_110a")],
)
def test_h45_supported_devices(capability: tuple[int, int], arch: str) -> None:
    assert toolchain.target(capability).arch == arch


@pytest.mark.parametrize("capability", [(8, 0), (12, 0), (12, 1), None])
def test_h45_other_devices_get_one_sentence(capability: tuple[int, int] | None) -> None:
    status = toolchain.target(capability)
    assert not status and ("10.0" in status.reason or "no CUDA device" in status.reason)


def test_plain_sm_100_is_no_target(cache: Path) -> None:
    with pytest.raises(ValueError, match="sm_100a"):
        compiler.load(toy(), "sm_100")


def test_importing_needs_no_compiler() -> None:
    code = (
        "import sys, cute_kernels\nfrom cute_kernels import ops, compile, nvfp4, activations\n"
        "assert not [m for m in sys.modules if m.split('.')[0] == 'cutlass']\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_only_compile_reads_the_environment() -> None:
    for path in (ROOT / "cute_kernels").rglob("*.py"):
        text = path.read_text()
        if path.name != "compile.py" and "sim" not in path.parts:
            assert "environ" not in text and "getenv" not in text, path


def test_launch_without_a_driver_names_the_error(cache: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a driver")
    with pytest.raises(Exception, match="cuda"):
        compiler.load(toy(), ARCH)(0, 0, 1, 1.0, 0, 0)


@pytest.mark.gpu
def test_launch_on_a_gpu(cache: Path) -> None:
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    arch = toolchain.target(torch.cuda.get_device_capability()).check().arch
    x = torch.arange(100, dtype=torch.float32, device="cuda")
    for _ in range(2):  # compiled here, then loaded from disk
        out = torch.full((128,), float("nan"), device="cuda")
        stream = torch.cuda.current_stream().cuda_stream
        compiler.load(toy(), arch)(x.data_ptr(), out.data_ptr(), 100, 2.0, -1, stream)
        want = torch.arange(100, dtype=torch.float32) * 3
        assert torch.equal(out[:100].cpu(), want) and out[100:].isnan().all()
        compiler.clear_memory()
