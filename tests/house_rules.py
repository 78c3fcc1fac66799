"""Rules of the house as functions of one source file: each returns what breaks it.

Budgets keep files readable, layers keep the packages apart. tests/test_house_rules.py applies them
to the repository and shows on a snippet that each can fail.
"""

from __future__ import annotations

import ast
import functools
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
    # published names: callers of DeepGEMM and nvfp4_megamoe_kernel bring these arguments
    "moe/mega/buffer.py": {
        "SymmBuffer.__init__",
        "get_symm_buffer_for_mega_moe",
        "get_symm_buffer",
    },
    "moe/mega/call.py": {"fp4_fp4_mega_moe"},
    "moe/mega/stages.py": {
        "cutlass_grouped_nvfp4_gemm",
        "nvfp4_mega_moe_l1",
        "nvfp4_mega_moe_l2",
    },
    "cute_kernels/sm90/host.py": {"sm90_grouped_gemm"},  # optional parts of one GEMM, by keyword
    # numba passes arrays one by one: a tuple of mixed types would be unpacked at every call
    "cute_kernels/sim/core.py": {"execute"},
    "cute_kernels/sim/core_memory.py": {"locate", "locate_all"},
}
# What moe may import of cute_kernels. Hopper's operations are a door of their own: they read
# another weight layout, which the layer packs when it is built.
DOORS = {
    "ops", "gemm_ops", "sm90_ops", "router_ops", "exchange_ops",
    "nvfp4", "activations", "torch_math", "torch_ops", "torch_router",
}  # fmt: skip
# Other imports of cute_kernels by a module of moe, each with its reason.
DOOR_EXCEPTIONS: dict[str, set[str]] = {}
# Imports of profiling by a module of moe, each with its reason.
PROFILING_EXCEPTIONS = {
    "moe/__main__.py": {"profiling.plan"},  # a program for people; imported when it explains a plan
}
KERNEL_PACKAGES = ("cute_kernels/device/", "cute_kernels/sm100/", "cute_kernels/sm90/")
COMPILER = "cute_kernels/compile.py"
# Names at module level that functions may change, besides the compile cache, each with its reason.
STATE_EXCEPTIONS = {
    "cute_kernels/sim/launch.py": {"_prepared"},  # a process can be prepared for the simulator once
}
MUTATORS = {
    "append", "extend", "insert", "remove", "pop", "popitem", "clear", "update", "setdefault",
    "add", "discard", "sort", "reverse", "appendleft", "popleft",
}  # fmt: skip
ENVIRONMENT = ("environ", "getenv", "putenv", "unsetenv")
FORBIDDEN = [
    r"(?<![\w.])/(?:work|root|opt|home|tmp)/\w",  # paths of one machine; tests have tmp_path
    r"(?:pypi|pythonhosted)\.(?:org|io)|artifactory|index-url",  # whoever installs has their own
    r"(?i)\bco-authored-by\b",  # that is for the history
]

Rule = Callable[[str, str], list[str]]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


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
    for node in ast.walk(parse(source)):
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
    for name, node in functions(parse(source)):
        entry = any(dotted(d) == "cute.kernel" for d in node.decorator_list)
        most = DEVICE_ENTRY_LINES if entry else FUNCTION_LINES
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > most:
            out.append(f"{path}:{node.lineno}: {name} has {lines} lines, at most {most}")
    return out


def epilogue_budget(path: str, source: str) -> list[str]:
    """An epilogue is a class with a method store_row."""
    out = []
    for node in ast.walk(parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if "store_row" in methods and lines > EPILOGUE_LINES:
            out.append(f"{path}:{node.lineno}: epilogue {node.name} has {lines} lines")
    return out


def parameter_budget(path: str, source: str) -> list[str]:
    """Parameters besides self and cls, *args and **kwargs one each."""
    out = []
    for name, node in functions(parse(source)):
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
        planned = PROFILING_EXCEPTIONS.get(path, set())
        if parts[0] in ("tests", "profiling") and not any(inside(module, p) for p in planned):
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
    for node in ast.walk(parse(source)):
        # an attribute, so that cute.compile[options](...) and a name bound to it are seen too
        name = dotted(node) if isinstance(node, ast.Attribute) else ""
        if name in {f"os.{n}" for n in ENVIRONMENT}:
            out.append(f"{path}:{node.lineno}: only {COMPILER} touches the environment")
        if inside(name, "cute.compile") or name.endswith(".cute.compile"):
            out.append(f"{path}:{node.lineno}: only {COMPILER} uses cute.compile")
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "cutlass.cute"):
            hidden = {a.name for a in node.names} & {*ENVIRONMENT, "compile"}
            out += [f"{path}:{node.lineno}: only {COMPILER} imports {n}" for n in sorted(hidden)]
    return out


def no_module_state(path: str, source: str) -> list[str]:
    """No function changes what a module holds: neither ``global``, nor an item, an attribute or a
    mutating method of a name assigned at module level. Tables are filled at module level."""
    if path == COMPILER:
        return []
    tree = parse(source)
    held = {n for node in tree.body for n in assigned(node)} - STATE_EXCEPTIONS.get(path, set())
    out = []
    for name, function in functions(tree):
        own = {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
        for node in ast.walk(function):
            own |= assigned(node)
        for node in ast.walk(function):
            changed = set(node.names) if isinstance(node, ast.Global) else mutated(node) - own
            out += [f"{path}:{node.lineno}: {name} changes {n}" for n in sorted(changed & held)]
    return out


def assigned(node: ast.AST) -> set[str]:
    """Plain names that this one statement binds."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.NamedExpr):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        inner = [i for t in targets for i in (t.elts if isinstance(t, ast.Tuple) else [t])]
        return {t.id for t in inner if isinstance(t, ast.Name)}
    return set()


def mutated(node: ast.AST) -> set[str]:
    """Names whose value this one statement or call changes in place."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        targets = [node.func] if node.func.attr in MUTATORS else []
    changed = [t.value for t in targets if isinstance(t, ast.Attribute | ast.Subscript)]
    return {v.id for v in changed if isinstance(v, ast.Name)}


def no_prints(path: str, source: str) -> list[str]:
    return [
        f"{path}:{node.lineno}: print"
        for node in ast.walk(parse(source))
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
