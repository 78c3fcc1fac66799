"""Budgets, layers and words: the repository keeps the rules, and every rule can fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import house_rules as rules
from tests.house_rules import Rule

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("cute_kernels", "moe", "profiling")
TEXT = {".py", ".md", ".toml", ".txt", ".yml", ".yaml", ".cfg", ".sh", ""}
THIS = {"tests/house_rules.py", "tests/test_house_rules.py"}  # they spell what is forbidden
IMPORT_SECONDS = 0.3


def sources(*folders: str) -> dict[str, str]:
    """Path relative to the root -> text of every Python file."""
    files = sorted(f for folder in folders for f in (ROOT / folder).rglob("*.py"))
    return {f.relative_to(ROOT).as_posix(): f.read_text() for f in files}


def texts() -> dict[str, str]:
    """Every file that is part of the repository, code and documents."""
    top = [f for f in ROOT.iterdir() if f.is_file() and f.name != ".git"]  # of a worktree
    folders = (*PACKAGES, "tests", "docs", ".ci", ".github")
    deep = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.is_file()]
    kept = [f for f in (*top, *deep) if f.suffix in TEXT and "__pycache__" not in f.parts]
    return {f.relative_to(ROOT).as_posix(): f.read_text() for f in sorted(kept)}


def broken(rule: Rule, files: dict[str, str]) -> list[str]:
    return [line for path, text in files.items() for line in rule(path, text)]


EVERYWHERE: list[Rule] = [rules.file_budget, rules.function_budget, rules.epilogue_budget]
IN_PACKAGES: list[Rule] = [
    rules.parameter_budget,
    rules.kernels_know_no_layer,
    rules.layer_uses_the_doors,
    rules.kernels_know_no_torch,
    rules.simulator_knows_no_kernel,
    rules.one_compiler,
    rules.no_module_state,
    rules.no_prints,
]


def test_there_is_something_to_check() -> None:
    found = sources(*PACKAGES, "tests")
    assert {"moe/layer.py", "cute_kernels/nvfp4.py", "tests/test_house_rules.py"} <= set(found)
    assert len(found) > 60
    assert {"pyproject.toml", "README.md", "Makefile", "docs/numerics.md"} <= set(texts())


@pytest.mark.parametrize("rule", EVERYWHERE, ids=lambda r: r.__name__)
def test_code_and_tests_keep(rule: Rule) -> None:
    assert not broken(rule, sources(*PACKAGES, "tests"))


@pytest.mark.parametrize("rule", IN_PACKAGES, ids=lambda r: r.__name__)
def test_packages_keep(rule: Rule) -> None:
    assert not broken(rule, sources(*PACKAGES))


def test_the_repository_speaks_of_itself_alone() -> None:
    found = {path: text for path, text in texts().items() if path not in THIS}
    assert not broken(rules.forbidden_words, found)


def test_exceptions_are_still_needed() -> None:
    """An entry of a list of exceptions that nothing needs any more is taken out."""
    for path, names in rules.WIDE_SIGNATURES.items():
        source = (ROOT / path).read_text()
        without = rules.WIDE_SIGNATURES.copy()
        without.pop(path)
        wide = _with(rules, "WIDE_SIGNATURES", without, rules.parameter_budget, path, source)
        assert len(wide) == len(names), (path, wide)
    for path in rules.MAINLOOPS:
        assert (ROOT / path).exists(), path
    for path, names in rules.STATE_EXCEPTIONS.items():
        source = (ROOT / path).read_text()
        found = _with(rules, "STATE_EXCEPTIONS", {}, rules.no_module_state, path, source)
        assert all(any(line.endswith(f" {n}") for line in found) for n in names), (path, found)
    for path in rules.DOOR_EXCEPTIONS:
        source = (ROOT / path).read_text()
        assert _with(rules, "DOOR_EXCEPTIONS", {}, rules.layer_uses_the_doors, path, source)
    for path in rules.PROFILING_EXCEPTIONS:
        source = (ROOT / path).read_text()
        assert _with(rules, "PROFILING_EXCEPTIONS", {}, rules.layer_uses_the_doors, path, source)


def _with(module, name: str, value, rule: Rule, path: str, source: str) -> list[str]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        return rule(path, source)
    finally:
        setattr(module, name, before)


# ---- every rule can fail -------------------------------------------------------------------------

EIGHT = ", ".join(f"p{i}" for i in range(8))
LONG = "\n".join("    x = 1" for _ in range(120))
DEVICE = "\n".join("    x = 1" for _ in range(250))
STORE = "    def store_row(self): ...\n" + "\n".join("    x = 1" for _ in range(150))

BAD: list[tuple[Rule, str, str]] = [
    (rules.file_budget, "moe/a.py", "x = 1\n" * 601),
    (rules.file_budget, "cute_kernels/sm100/grouped_gemm.py", "x = 1\n" * 901),
    (rules.function_budget, "moe/a.py", f"def f():\n{LONG}\n"),
    (rules.function_budget, "moe/a.py", f"if 1:\n class A:\n  def f():\n{LONG}\n"),
    (rules.function_budget, "cute_kernels/a.py", f"@cute.kernel\ndef f():\n{DEVICE}\n"),
    (rules.function_budget, "cute_kernels/a.py", f"@cute.jit\ndef f():\n{LONG}\n"),
    (rules.epilogue_budget, "cute_kernels/device/a.py", f"class E:\n{STORE}\n"),
    (rules.parameter_budget, "moe/a.py", f"def f({EIGHT}, more): ..."),
    (rules.parameter_budget, "moe/a.py", f"class A:\n    def f(self, {EIGHT}, *, more): ..."),
    (rules.parameter_budget, "moe/a.py", f"def f({EIGHT}, **more): ..."),
    (rules.kernels_know_no_layer, "cute_kernels/a.py", "import moe.layer"),
    (rules.kernels_know_no_layer, "cute_kernels/sim/a.py", "def f():\n    from moe import MoE"),
    (rules.kernels_know_no_layer, "cute_kernels/a.py", "from ..moe import layer"),
    (rules.layer_uses_the_doors, "moe/a.py", "from cute_kernels import nvfp4, compile"),
    (rules.layer_uses_the_doors, "moe/a.py", "import cute_kernels.sm100.loads"),
    (
        rules.layer_uses_the_doors,
        "moe/a.py",
        "def f():\n    from cute_kernels.device.math import x",
    ),
    (rules.layer_uses_the_doors, "moe/a.py", "import_module('cute_kernels.sim')"),
    (rules.layer_uses_the_doors, "moe/a.py", "from tests import oracle"),
    (rules.layer_uses_the_doors, "moe/a.py", "from profiling.plan import make_plan"),
    (rules.layer_uses_the_doors, "moe/__main__.py", "from profiling import bench"),
    (rules.kernels_know_no_torch, "cute_kernels/device/a.py", "import torch"),
    (rules.kernels_know_no_torch, "cute_kernels/sm100/a.py", "def f():\n    from torch import nn"),
    (rules.kernels_know_no_torch, "cute_kernels/sm90/a.py", "import cutlass\nimport torch.nn"),
    (rules.simulator_knows_no_kernel, "cute_kernels/sim/a.py", "from cute_kernels import sm100"),
    (rules.simulator_knows_no_kernel, "cute_kernels/sim/a.py", "from ..device import ptx"),
    (rules.one_compiler, "cute_kernels/a.py", "cute.compile(f, 1)"),
    (rules.one_compiler, "moe/a.py", "import os\nx = os.environ.get('A')"),
    (rules.one_compiler, "moe/a.py", "import os\nx = os.getenv('A')"),
    (rules.one_compiler, "moe/a.py", "from os import environ"),
    (rules.one_compiler, "cute_kernels/a.py", "cutlass.cute.compile(k)"),
    (rules.one_compiler, "cute_kernels/a.py", "cute.compile[Level(2)](k)"),
    (rules.one_compiler, "cute_kernels/a.py", "from cutlass.cute import compile"),
    (rules.no_module_state, "moe/a.py", "N = 0\ndef f():\n    global N\n    N = 1"),
    (rules.no_module_state, "moe/a.py", "SEEN = []\ndef f(x):\n    SEEN.append(x)"),
    (rules.no_module_state, "moe/a.py", "SEEN: dict = {}\ndef f(x):\n    SEEN[x] = 1"),
    (
        rules.no_module_state,
        "moe/a.py",
        "SEEN = {}\nclass A:\n    def f(self):\n        del SEEN[0]",
    ),
    (rules.no_module_state, "moe/a.py", "STATE = State()\ndef f():\n    STATE.count += 1"),
    (rules.no_prints, "moe/a.py", "def f():\n    print('x')"),
    (rules.forbidden_words, "docs/a.md", "see /wo" + "rk/shared/a.md"),
    (rules.forbidden_words, "docs/a.md", "pip install --index" + "-url x"),
    (rules.forbidden_words, "moe/a.py", "# Co-authored-" + "By: x"),
]

GOOD: list[tuple[Rule, str, str]] = [
    (rules.file_budget, "moe/a.py", "x = 1\n" * 600),
    (rules.file_budget, "cute_kernels/sm90/grouped_gemm.py", "x = 1\n" * 900),
    (rules.function_budget, "moe/a.py", f"def f():\n{LONG[:-10]}\n"),
    (rules.function_budget, "cute_kernels/a.py", f"@cute.kernel\ndef f():\n{LONG}\n"),
    (rules.epilogue_budget, "cute_kernels/device/a.py", f"class E:\n{STORE.replace('row', 'x')}\n"),
    (rules.parameter_budget, "moe/a.py", f"class A:\n    def f(self, {EIGHT}): ..."),
    (rules.parameter_budget, "moe/layer.py", f"class MoE:\n    def __init__({EIGHT}, a): ..."),
    (rules.layer_uses_the_doors, "moe/a.py", "from cute_kernels import nvfp4, ops\nimport torch"),
    (rules.layer_uses_the_doors, "moe/a.py", "from cute_kernels.nvfp4 import BLOCK, quantize"),
    (rules.layer_uses_the_doors, "moe/__main__.py", "import profiling.plan"),
    (rules.kernels_know_no_torch, "cute_kernels/sm90/a.py", "import torch"),
    (rules.kernels_know_no_torch, "cute_kernels/ops.py", "import torch"),
    (rules.one_compiler, "cute_kernels/compile.py", "cute.compile(os.environ['A'])"),
    (rules.one_compiler, "cute_kernels/a.py", "re.compile('x')\nfrom re import compile"),
    (rules.no_module_state, "moe/a.py", "SEEN = []\nSEEN.append(1)\ndef f():\n    return SEEN[0]"),
    (rules.no_module_state, "moe/a.py", "x = []\ndef f(x):\n    x.append(1)\n    x[0] = 2"),
    (rules.no_module_state, "moe/a.py", "x = []\ndef f():\n    x = []\n    x.append(1)"),
    (rules.no_module_state, "cute_kernels/compile.py", "C = {}\ndef f():\n    C[0] = 1"),
    (rules.no_prints, "moe/a.py", "console.print('x')\ncute.printf('y')"),
    (rules.forbidden_words, "docs/a.md", "per token / work done, docs/work/a"),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD)
def test_a_violation_is_found(rule: Rule, path: str, source: str) -> None:
    assert rule(path, source)


@pytest.mark.parametrize(("rule", "path", "source"), GOOD)
def test_what_is_allowed_passes(rule: Rule, path: str, source: str) -> None:
    assert not rule(path, source)


def test_every_rule_is_tried() -> None:
    used = {*EVERYWHERE, *IN_PACKAGES, rules.forbidden_words}
    assert {rule for rule, _, _ in BAD} == used


# ---- imports -------------------------------------------------------------------------------------

TIMED = """
import sys, time, torch
before = set(sys.modules)
start = time.process_time()  # of this process: a busy machine does not count
import {package}
seconds = time.process_time() - start
roots = {{m.split(".")[0] for m in set(sys.modules) - before}}
heavy = roots & {{"cutlass", "numba", "triton", "cuda", "ml_dtypes", "pytest"{extra}}}
sys.stdout.write(f"{{seconds}} {{','.join(sorted(heavy))}}")
"""


def timed_import(package: str, extra: str = "") -> tuple[float, str]:
    code = TIMED.format(package=package, extra=extra)
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    seconds, _, heavy = run.stdout.partition(" ")
    return float(seconds), heavy


@pytest.mark.parametrize("package", ["moe", "cute_kernels", "cute_kernels.ops"])
def test_importing_is_quick_and_needs_no_dsl(package: str) -> None:
    """Beyond torch: less than 0.3 s (best of 3), and neither the DSL nor a compiler."""
    best = float("inf")
    for _ in range(3):
        seconds, heavy = timed_import(package)
        assert not heavy
        best = min(best, seconds)
        if best < IMPORT_SECONDS:
            break
    assert best < IMPORT_SECONDS, f"import {package}: {best:.2f} s beyond torch"


def test_the_import_check_sees_a_module() -> None:
    assert timed_import("json.tool", ', "json"')[1] == "json"
