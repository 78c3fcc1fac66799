"""Kernel object + arguments + target -> something to launch.

The only caller of ``cute.compile``, the only reader and writer of ``os.environ``.

A kernel is a frozen dataclass whose fields are its compile-time constants:

    @dataclasses.dataclass(frozen=True)
    class Scale:
        columns: int
        @property
        def name(self): return f"scale_c{self.columns}"           # what profilers show
        @property
        def arguments(self): return (Ptr("Float32"), Ptr("Float32"), "i32")
        @cute.jit
        def __call__(self, x, y, rows, stream): ...

    launch = load(Scale(7168), "sm_100a")                 # memory, then disk, then the compiler
    launch(x.data_ptr(), y.data_ptr(), rows, stream)      # about a microsecond of Python

Key: source of the modules involved, DSL version, CUDA version of the compiler, target, host
machine, repr of the kernel, argument types. Nothing that depends on a token count belongs in a
kernel's fields.

Environment: ``NVFP4_MEGAMOE_CACHE_DIR`` (default ``$XDG_CACHE_HOME/nvfp4-megamoe``; empty or
``off``: memory only).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import inspect
import logging
import os
import platform
import shlex
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from cute_kernels import config, toolchain
from cute_kernels.disk_cache import DiskCache, Entry

logger = logging.getLogger("cute_kernels.compile")

SYMBOL = "nvfp4_megamoe"  # prefix of the symbols in a stored object


@dataclasses.dataclass(frozen=True)
class Ptr:
    """Argument type: address in global memory. ``dtype`` names a DSL type, ``align`` (bytes) is a
    promise of the caller."""

    dtype: str
    align: int = 16


# Every scalar argument takes eight bytes of the argument buffer; the callee reads the low ones.
_SCALARS = {"i32": "i4x", "i64": "q", "f32": "f4x"}
_SCALAR_TYPES = {"i32": "Int32", "i64": "Int64", "f32": "Float32"}


@dataclasses.dataclass
class Stats:
    """Counts since the process started (or `reset_stats`): calls of the compiler, entries read from
    disk, and the seconds both took."""

    compiles: int = 0
    disk_hits: int = 0
    seconds: float = 0.0


class _State:
    """The one piece of mutable module state: the compile cache and what belongs to it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # cute.compile from two threads at once crashes the process
        self.kernels: dict[tuple[Any, str], Launcher] = {}
        self.recipes: dict[tuple[Any, Any], Launcher] = {}  # what `load_made` found
        self.stats = Stats()
        self.disk: DiskCache | None = None
        self.archs: dict[int, str] = {}  # per CUDA device
        self.clusters: dict[tuple[Any, int], int] = {}  # per device and size of a cluster
        self.warming = 0
        self.preparing = 0
        self.simulated = False
        self.target = "sm_100a"  # of CPU tensors: that of the simulator `simulating` has seen last
        self.runtime_loaded = False


_state = _State()


def setting(name: str, default: str) -> str:
    """Value of the environment variable NVFP4_MEGAMOE_<name>."""
    return os.environ.get(f"NVFP4_MEGAMOE_{name}", default)


def stats() -> Stats:
    """A copy of the counters."""
    return dataclasses.replace(_state.stats)


def reset_stats() -> None:
    _state.stats = Stats()


def clear_memory() -> None:
    """Forget compiled kernels of this process (not those on disk); tests use it."""
    with _state.lock:
        _state.kernels.clear()
        _state.recipes.clear()
        _state.disk = None


@contextlib.contextmanager
def warming_up() -> Iterator[None]:
    """Compiles inside are expected: they are logged at DEBUG, not as a stall of a first request."""
    _state.warming += 1
    try:
        yield
    finally:
        _state.warming -= 1


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Inside, operations compile the kernels that they would launch, load them onto the device, and
    launch nothing: what they would write stays as it is."""
    _state.preparing += 1
    try:
        with warming_up():
            yield
    finally:
        _state.preparing -= 1


def preparing() -> bool:
    """Is a `without_launches` block active?"""
    return _state.preparing > 0


def status(capability: tuple[int, int] | None) -> toolchain.Status:
    """Can kernels be compiled and launched for a device of this compute capability?"""
    if _state.simulated:
        return toolchain.Status(True, "simulated", arch="sm_100a")
    ready = toolchain.check_driver(toolchain.installed())
    return toolchain.target(capability) if ready else ready


def enable_simulator() -> None:
    """From now on this process runs kernels in `cute_kernels.sim`, on CPU tensors.

    Call it before the first compile: the CUDA runtime that a compile makes known to the process
    cannot be taken back. Raises RuntimeError otherwise.
    """
    with _state.lock:
        if _state.simulated:
            return
        if _state.runtime_loaded:
            raise RuntimeError(
                "the simulator must be enabled before the first compile, and this process has "
                f"compiled {_state.stats.compiles} kernels for a GPU: start a new process"
            )
        toolchain.check_compiler(toolchain.installed()).check()
        from cute_kernels.sim.launch import prepare

        variables = prepare()
        os.environ.update(variables)
        _state.simulated = True
        _state.kernels.clear()  # those from the disk were linked to the CUDA runtime
        _state.recipes.clear()
        if "cutlass.cutlass_dsl" in sys.modules:  # it has read its environment already
            settings = _dsl().envar
            settings.shared_libs = variables["CUTE_DSL_LIBS"]
            settings.dump_dir = variables["CUTE_DSL_DUMP_DIR"]
            settings.keep_tokens = frozenset(variables["CUTE_DSL_KEEP"].split(","))
            settings.keep_ptx = settings.keep_cubin = True
            settings.arch = variables["CUTE_DSL_ARCH"]


def device_arch(index: int, capability: Callable[[int], tuple[int, int]] | None) -> str:
    """Compile target of CUDA device ``index``, asked once; ``capability`` None: CPU tensors.

    Raises RuntimeError with the reason when kernels cannot run there.
    """
    if _state.simulated:
        return simulated_arch()
    arch = _state.archs.get(index)
    if arch is None:
        found = status(None if capability is None else capability(index)).check()
        arch = _state.archs[index] = found.arch
    return arch


def clusters_at_once(device: Any, cluster: int, multiprocessors: Callable[[Any], int]) -> int:
    """Clusters of ``cluster`` CTAs that ``device`` runs at once; its SMs are asked for once."""
    found = _state.clusters.get((device, cluster))
    if found is None:
        found = config.clusters_at_once(multiprocessors(device), cluster)
        _state.clusters[device, cluster] = found
    return found


def simulating() -> bool:
    """Do kernel launches on CPU tensors run right now, that is, is a simulator active?"""
    module = sys.modules.get("cute_kernels.sim.simulator")  # nobody imported it: none is active
    active = None if module is None else module.Simulator.active
    _state.target = "sm_100a" if active is None else active.arch
    return active is not None


def simulated() -> bool:
    """Does this process run kernels in the simulator?"""
    return _state.simulated


def simulated_arch() -> str:
    """Compile target of CPU tensors: that of the active simulator."""
    simulating()
    return _state.target


# ---- keys


def _modules_of(kernel: object) -> set[ModuleType]:
    """Modules whose source decides what the kernel does: those of the kernel, of its fields, and
    whatever these import from the same top-level packages."""
    this = sys.modules[__name__]
    pending, roots, seen = [], set(), set()
    stack: list[object] = [kernel]
    while stack:
        value = stack.pop()
        module = sys.modules.get(type(value).__module__)
        if module is None or module.__name__ == "builtins":
            continue
        pending.append(module)
        roots.add(module.__name__.partition(".")[0])
        if dataclasses.is_dataclass(value):
            stack += [getattr(value, f.name) for f in dataclasses.fields(value)]
    while pending:
        module = pending.pop()
        if module in seen or module is this or module.__name__.partition(".")[0] not in roots:
            continue
        seen.add(module)
        for value in vars(module).values():
            owner = (
                value
                if inspect.ismodule(value)
                else sys.modules.get(getattr(value, "__module__", None) or "")
            )
            if owner is not None and owner not in seen:
                pending.append(owner)
    return seen


def source_hash(kernel: object) -> str | None:
    """sha256 over the sources involved; None when one has no file (typed at a prompt)."""
    digest = hashlib.sha256()
    for module in sorted(_modules_of(kernel), key=lambda m: m.__name__):
        file = getattr(module, "__file__", None)
        if file is None or not Path(file).is_file():
            if hasattr(module, "__path__"):  # a namespace package has no source of its own
                continue
            return None
        digest.update(module.__name__.encode() + b"\0" + Path(file).read_bytes() + b"\0")
    return digest.hexdigest()


def key(kernel: Any, arch: str) -> str | None:
    """Hex key of the disk cache, or None when the kernel cannot be stored."""
    sources = source_hash(kernel)
    if sources is None:
        return None
    from cutlass.base_dsl.version_info import CUDA_VERSION

    parts = (
        sources,
        toolchain.installed().dsl,
        f"cu{CUDA_VERSION.major}.{CUDA_VERSION.minor}",
        arch,
        platform.machine(),
        repr(kernel),
        repr(kernel.arguments),
    )
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def _disk() -> DiskCache:
    if _state.disk is None:
        default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nvfp4-megamoe"
        root = setting("CACHE_DIR", str(default))
        _state.disk = DiskCache(None if root in ("", "off") else Path(root))
    return _state.disk


# ---- load


def load(kernel: Any, arch: str) -> Launcher:
    """The compiled kernel for ``arch`` ('sm_100a', ...), from memory, disk or the compiler.

    Raises ValueError for an unknown target, RuntimeError when the DSL is missing or another
    version.
    """
    found = _state.kernels.get((kernel, arch))
    if found is not None:
        return found
    if arch not in toolchain.ARCHES:
        raise ValueError(
            f"arch must be one of {sorted(toolchain.ARCHES)}, got {arch!r}; "
            "a target without its suffix lacks the tensor-core instructions"
        )
    with _state.lock:
        found = _state.kernels.get((kernel, arch))
        if found is None:
            toolchain.check_compiler(toolchain.installed()).check()
            found = _load(kernel, arch)
            if _state.simulated:
                from cute_kernels.sim.launch import preparation

                preparation().register(found.entry.files["kernel.cubin"], found.ptx)
            _state.kernels[(kernel, arch)] = found
        return found


def load_made(recipe: tuple[Any, ...], device: Any, arch_of: Callable[[Any], str]) -> Launcher:
    """`load` of the kernel object that ``recipe`` = (function, *arguments) makes, for the target of
    ``device``. Both are asked once: a call that finds its kernel hashes a few numbers and strings,
    nothing else.

    The arguments are compile-time constants, as the fields of the kernel are.
    """
    where = _state.target if _state.simulated else device
    found = _state.recipes.get((recipe, where))
    if found is None:
        make, *arguments = recipe
        found = _state.recipes[recipe, where] = load(make(*arguments), arch_of(device))
    return found


def _load(kernel: Any, arch: str) -> Launcher:
    started = time.perf_counter()
    identity = key(kernel, arch)
    disk = _disk() if identity is not None else DiskCache(None)
    name = f"{kernel.name}-{arch}-{identity[:32]}" if identity is not None else kernel.name
    launcher = _from_disk(kernel, arch, disk, name)
    if launcher is None:
        with disk.builder(name):
            launcher = _from_disk(
                kernel, arch, disk, name
            )  # another process may have built it meanwhile
            if launcher is None:
                launcher = _build(kernel, arch, disk, name)
                seconds = time.perf_counter() - started
                _state.stats.compiles += 1
                _state.stats.seconds += seconds
                level = logging.DEBUG if _state.warming else logging.INFO
                hint = (
                    ""
                    if _state.warming
                    else "; warmup(max_tokens) does this before the first request"
                )
                logger.log(
                    level, "compiled %s for %s in %.2f s%s", kernel.name, arch, seconds, hint
                )
                return launcher
    _state.stats.disk_hits += 1
    _state.stats.seconds += time.perf_counter() - started
    return launcher


def _from_disk(kernel: Any, arch: str, disk: DiskCache, name: str) -> Launcher | None:
    entry = disk.find(name)
    if entry is None:
        return None
    import cutlass.cute.runtime

    assert entry.path is not None
    try:
        function = getattr(cutlass.cute.runtime.load_module(str(entry.path)), SYMBOL)
    except Exception as error:  # the loader raises its own types for an object it cannot link
        logger.warning(
            "kernel cache entry %s does not load (%s): built again", entry.path.parent, error
        )
        return None
    return Launcher(kernel, arch, function, entry)


def _build(kernel: Any, arch: str, disk: DiskCache, name: str) -> Launcher:
    import cutlass.cute as cute

    _load_runtime()
    with tempfile.TemporaryDirectory(prefix="nvfp4-megamoe-") as scratch:
        with _target(arch):
            options = f"--gpu-arch {arch} --keep-ptx --keep-cubin --dump-dir {shlex.quote(scratch)}"
            function = cute.compile(
                kernel, *_examples(kernel.arguments), _fake_stream(), options=options
            )
        ptx, cubin = function.__ptx__, function.__cubin__
    files = {
        "kernel.o": function.dump_to_object(SYMBOL),
        "kernel.ptx": (ptx or "").encode(),
        "kernel.cubin": cubin if isinstance(cubin, bytes) else b"",
    }
    meta: dict[str, object] = {
        "kernel": repr(kernel),
        "arguments": repr(kernel.arguments),
        "arch": arch,
    }
    return Launcher(kernel, arch, function, disk.store(name, files, meta))


@contextlib.contextmanager
def _target(arch: str) -> Iterator[None]:
    """For the simulator: the DSL runs what is compiled for the target of its environment alone."""
    if not _state.simulated:
        yield
        return
    settings = _dsl().envar
    before, settings.arch = settings.arch, arch
    try:
        yield
    finally:
        settings.arch = before


def _dsl() -> Any:
    from cutlass.cutlass_dsl import CuTeDSL

    return CuTeDSL._get_dsl()


def _load_runtime() -> None:
    """Make the DSL's runtime symbols global: writing an object resolves them in the process, not in
    the library that the engine was given."""
    if not _state.runtime_loaded:
        for library in _dsl().get_shared_libs():
            ctypes.CDLL(library, ctypes.RTLD_GLOBAL)
        _state.runtime_loaded = True


def _fake_stream() -> Any:
    from cutlass.cute.runtime import make_fake_stream

    return make_fake_stream()


def _examples(arguments: tuple[Any, ...]) -> list[Any]:
    """Example values for the compiler; nested (named) tuples stay what they are."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_ptr

    def example(spec: Any) -> Any:
        if isinstance(spec, Ptr):
            dtype = getattr(cutlass, spec.dtype)
            return make_ptr(dtype, 4096, cute.AddressSpace.gmem, assumed_align=spec.align)
        if isinstance(spec, str):
            return getattr(cutlass, _SCALAR_TYPES[spec])(1)
        if isinstance(spec, tuple):
            items = [example(s) for s in spec]
            return type(spec)(*items) if hasattr(spec, "_fields") else tuple(items)
        if spec is None:
            return None
        raise TypeError(
            f"an argument type is a Ptr, one of {sorted(_SCALARS)}, None or a tuple of these, "
            f"got {spec!r}"
        )

    return [example(spec) for spec in arguments]


def _flatten(arguments: Any) -> Iterator[Any]:
    for spec in arguments:
        if isinstance(spec, tuple):
            yield from _flatten(spec)
        elif spec is not None:
            yield spec


# ---- launch


class Launcher:
    """A compiled kernel. Call it with one number per argument (addresses for `Ptr`; nested tuples
    flattened, None left out), then the stream handle. Thread-safe; a CUDA graph captures it.

    Raises RuntimeError with the CUDA error when the launch is refused.
    """

    def __init__(self, kernel: Any, arch: str, function: Any, entry: Entry) -> None:
        self.kernel, self.arch, self.entry = kernel, arch, entry
        self._function = function
        specs = list(_flatten(kernel.arguments))
        self._format = (
            "<" + "".join("Q" if isinstance(s, Ptr) else _SCALARS[s] for s in specs) + "Q"
        )
        self._arity = len(specs) + 1
        self._pack: Callable[..., None] = struct.Struct(self._format).pack_into
        self._executor: Any = None
        self._call: Any = None
        self._local = threading.local()

    @property
    def name(self) -> str:
        return str(self.kernel.name)

    @property
    def ptx(self) -> str:
        return self.entry.files["kernel.ptx"].decode()

    def to_device(self) -> None:
        """Load the code onto the devices now instead of at the first launch."""
        if self._call is None:
            with _state.lock:
                if _state.simulated:  # the count is asked of the driver, not of the linked runtime
                    self._function.num_devices = 1
                self._executor = self._function.to()
                self._call = self._executor.jit_module.capi_func

    def __call__(self, *values: float) -> None:
        local = self._local
        try:
            buffer, packed, result = local.frame
        except AttributeError:
            self.to_device()
            buffer, packed, result = local.frame = self._frame()
        self._pack(buffer, 0, *values)
        self._call(packed)
        if result.value:
            raise RuntimeError(
                f"launch of {self.name} ({self.arch}) failed: {_cuda_error(result.value)}"
            )

    def _frame(self) -> tuple[Any, Any, Any]:
        """Argument buffer of one thread, the array of addresses into it, and the callee's
        status."""
        buffer = ctypes.create_string_buffer(8 * self._arity)
        result = ctypes.c_int32(0)
        base = ctypes.addressof(buffer)
        addresses = [base + 8 * i for i in range(self._arity)] + [ctypes.addressof(result)]
        return buffer, (ctypes.c_void_p * len(addresses))(*addresses), result


def _cuda_error(code: int) -> str:
    try:
        from cuda.bindings import runtime

        error = runtime.cudaError_t(code)
        return f"{error.name} ({code}): {runtime.cudaGetErrorString(error)[1].decode()}"
    except Exception:  # naming the error must not hide it
        return f"CUDA error {code}"


# ---- dumps


@dataclasses.dataclass(frozen=True)
class Dump:
    """Generated code of one kernel. ``sass`` is None without a disassembler
    (nvidia-cuda-nvdisasm)."""

    name: str
    arch: str
    ptx: str
    cubin: bytes
    sass: str | None


def dump(kernel: Any, arch: str, sass: bool = False) -> Dump:
    """Compile (or fetch) and return the generated code; for tests and for people."""
    launcher = load(kernel, arch)
    files = launcher.entry.files
    text = _disassemble(files["kernel.cubin"]) if sass else None
    return Dump(launcher.name, arch, launcher.ptx, files["kernel.cubin"], text)


def _disassemble(cubin: bytes) -> str | None:
    from cutlass.base_dsl import env_manager

    try:
        binary = env_manager._find_nvdisasm_binary()
    except Exception:  # the DSL raises its own type when there is none or it is too old
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([binary, "-c", file.name], capture_output=True, text=True, check=True)
    return done.stdout
