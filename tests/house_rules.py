"""Rules of the house as functions of one source file: each returns what breaks it.

Budgets keep files readable, layers keep the packages apart. tests/test_house_rules.py applies them
to the repository and shows on a snippet that each can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

FILE_LINES = 600
FUNCTION_LINES = 120
DEVICE_ENTRY_LINES = 250  # a function decorated with cute.kernel
EPILOGUE_LINES = 150
PARAMETERS = 8  # besides self and cls
MAINLOOPS = {  # one mainloop may be longer than another file
    "cute_kernels/sm100/grouped_gemm.py": 900,
    "cute_kernels/sm90/grouped_gemm.py": 900,
}
# Names that users type: their signatures are part of the design (keywords with defaults).
WIDE_SIGNATURES = {
    "moe/layer.py": {"MoE.__init__"},
}
DOORS = {"ops", "gemm_ops", "nvfp4", "activations", "torch_math"}  # what moe may import of cute_kernels
# Other imports of cute_kernels by a module of moe, each with its reason.
DOOR_EXCEPTIONS: dict[str, set[str]] = {}
KERNEL_PACKAGES = ("cute_kernels/device/", "cute_kernels/sm100/", "cute_kernels/sm90/")
COMPILER = "cute_kernels/compile.py"
FORBIDDEN = [
    r"(?<![\w.])/(?:work|root|opt|home|tmp)/\w",  # paths of one machine; tests have tmp_path
    r"(?:pypi|pythonhosted)\.(?:org|io)|artifactory|index-url",  # whoever installs has their own
    r"(?i)\bco-authored-by\b",  # that is for the history
]

Rule = Callable[[str, str], list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """(qualified name, node) of every function, nested ones too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function):
            yield prefix + node.name, node
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        else:
            yield from functions(node, prefix)


def dotted(node: ast.AST) -> str:
    """ "cute.kernel" of the expression cute.kernel or cute.kernel(...)."""
    if isinstance(node, ast.Call):
        return dotted(node.func)
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(path: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, module) of every import at any depth; ``from a import b`` gives both a and a.b."""
    package = PurePosixPath(path).parent.parts
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package[: len(package) - node.level + 1]
                base = ".".join((*up, base)).rstrip(".")
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module"):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield node.lineno, name.value


def inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def package_of(path: str) -> str:
    return PurePosixPath(path).parts[0]


# ---- budgets -------------------------------------------------------------------------------------


def file_budget(path: str, source: str) -> list[str]:
    lines, most = source.count("\n"), MAINLOOPS.get(path, FILE_LINES)
    return [f"{path}: {lines} lines, at most {most}"] if lines > most else []


def function_budget(path: str, source: str) -> list[str]:
    out = []
    for name, node in functions(ast.parse(source)):
        entry = any(dotted(d) == "cute.kernel" for d in node.decorator_list)
        most = DEVICE_ENTRY_LINES if entry else FUNCTION_LINES
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > most:
            out.append(f"{path}:{node.lineno}: {name} has {lines} lines, at most {most}")
    return out


def epilogue_budget(path: str, source: str) -> list[str]:
    """An epilogue is a class with a method store_row or store_col."""
    out = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if methods & {"store_row", "store_col"} and lines > EPILOGUE_LINES:
            out.append(f"{path}:{node.lineno}: epilogue {node.name} has {lines} lines")
    return out


def parameter_budget(path: str, source: str) -> list[str]:
    """Parameters besides self and cls, *args and **kwargs one each. Functions that run on the
    device, and kernels' entries, get their tensors one by one: they are not counted."""
    out = []
    for name, node in functions(ast.parse(source)):
        if any(dotted(d).startswith("cute.") for d in node.decorator_list):
            continue
        a = node.args
        names = [p.arg for p in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
        count = len([n for n in names if n not in ("self", "cls")])
        count += (a.vararg is not None) + (a.kwarg is not None)
        if count > PARAMETERS and name not in WIDE_SIGNATURES.get(path, ()):
            out.append(f"{path}:{node.lineno}: {name} has {count} parameters, at most {PARAMETERS}")
    return out


# ---- layers --------------------------------------------------------------------------------------


def kernels_know_no_layer(path: str, source: str) -> list[str]:
    """cute_kernels knows nothing of the layer, of profiling or of tests."""
    if package_of(path) != "cute_kernels":
        return []
    outer = ("moe", "profiling", "tests")
    return [
        f"{path}:{line}: cute_kernels must not import {m}"
        for line, m in imported(path, source)
        if any(inside(m, p) for p in outer)
    ]


def layer_uses_the_doors(path: str, source: str) -> list[str]:
    """moe reaches cute_kernels through its doors only, and never tests or profiling."""
    if package_of(path) != "moe":
        return []
    allowed = DOORS | DOOR_EXCEPTIONS.get(path, set())
    out = []
    for line, module in imported(path, source):
        parts = module.split(".")
        if parts[0] in ("tests", "profiling"):
            out.append(f"{path}:{line}: moe must not import {module}")
        if parts[0] == "cute_kernels" and len(parts) > 1 and parts[1] not in allowed:
            out.append(f"{path}:{line}: moe must not import {module}, only {sorted(allowed)}")
    return out


def kernels_know_no_torch(path: str, source: str) -> list[str]:
    """Device code is traced: device/ and sm100/ never import torch; in sm90/ no module that imports
    the DSL does (its weights are laid out by torch on the host)."""
    if not path.startswith(KERNEL_PACKAGES):
        return []
    found = list(imported(path, source))
    host = path.startswith("cute_kernels/sm90/") and not any(inside(m, "cutlass") for _, m in found)
    return (
        []
        if host
        else [
            f"{path}:{line}: device code must not import {m}"
            for line, m in found
            if inside(m, "torch")
        ]
    )


def simulator_knows_no_kernel(path: str, source: str) -> list[str]:
    if not path.startswith("cute_kernels/sim/"):
        return []
    kernels = ("cute_kernels.device", "cute_kernels.sm100", "cute_kernels.sm90", "cute_kernels.ops")
    return [
        f"{path}:{line}: the simulator must not import {m}"
        for line, m in imported(path, source)
        if any(inside(m, k) for k in kernels)
    ]


def one_compiler(path: str, source: str) -> list[str]:
    """cute.compile and the environment belong to one module."""
    if path == COMPILER:
        return []
    out = []
    for node in ast.walk(ast.parse(source)):
        name = dotted(node) if isinstance(node, ast.Attribute | ast.Call) else ""
        if name in ("os.environ", "os.getenv", "os.putenv") and isinstance(node, ast.Attribute):
            out.append(f"{path}:{node.lineno}: only {COMPILER} touches the environment")
        if isinstance(node, ast.Call) and name == "cute.compile":
            out.append(f"{path}:{node.lineno}: only {COMPILER} calls cute.compile")
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            hidden = {a.name for a in node.names} & {"environ", "getenv", "putenv"}
            out += [f"{path}:{node.lineno}: only {COMPILER} imports {n}" for n in sorted(hidden)]
    return out


def no_prints(path: str, source: str) -> list[str]:
    return [
        f"{path}:{node.lineno}: print"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and dotted(node.func) in ("print", "builtins.print")
    ]


# ---- words ---------------------------------------------------------------------------------------


def forbidden_words(path: str, text: str) -> list[str]:
    return [
        f"{path}:{number}: {match.group()!r}"
        for number, line in enumerate(text.splitlines(), 1)
        for pattern in FORBIDDEN
        if (match := re.search(pattern, line))
    ]
