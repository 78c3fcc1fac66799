"""The shared object that JIT-compiled host code links instead of the CUDA runtime.

Each entry point of the runtime becomes a stub that calls a function pointer, which `runtime` fills
with a ctypes callback. The JIT's own symbol table cannot carry this: it belongs to an engine object
that exists only inside the compiler. The object is built once by the machine's C compiler and
cached.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

# Every stub passes eight integer or pointer arguments on: cudaLibraryLoadData has the most.
ENTRY_POINTS = (
    "_cudaGetDevice",
    "_cudaSetDevice",
    "_cudaGetDeviceCount",
    "_cudaDeviceGetAttribute",
    "_cudaLibraryLoadData",
    "_cudaLibraryGetKernel",
    "_cudaLibraryUnload",
    "_cudaKernelSetAttributeForDevice",
    "_cudaFuncSetAttribute",
    "_cuKernelGetAttribute",
    "_cudaLaunchKernelEx",
    "_cudaLaunchKernel",
    "_cudaOccupancyMaxActiveBlocksPerMultiprocessor",
    "_cudaDeviceSynchronize",
    "_cudaStreamSynchronize",
)
# What host code compiled with --enable-tvm-ffi wants besides: `init` and `load` are functions of
# its own module, `raise` is tvm_ffi's way to set a Python error.
_TVM_FFI = """
typedef void (*raise_message)(const char *kind, const char *text);
typedef void (*raise_parts)(const char *kind, const char **parts, int count);
int cuda_dialect_init_library_once(void **state, int (*init)(void **), int (*load)(void **, int),
                                   raise_message raise) {
    void *library = 0;
    int code = 0;
    if (*state) return 0;
    code = init(&library);
    if (!code && load) code = load(&library, 0);
    if (code) {
        raise("RuntimeError", "the simulated device refused: is a Simulator active?");
        return -1;
    }
    *state = library;
    return 0;
}
void cuda_dialect_unload_library_once(void **state) { *state = 0; }
const char *cuda_dialect_get_error_name(int code) {
    return code ? "simulated launch failure" : "success";
}
void CuteDSLRT_TVMFFISetRaisedCudaError(raise_parts raise, int code) {
    const char *part = cuda_dialect_get_error_name(code);
    raise("RuntimeError", &part, 1);
}
"""
_NOT_RUNNING = 100  # cudaErrorNoDevice: a launch outside of `with Simulator()`


def source() -> str:
    """C source of the shim."""
    count = len(ENTRY_POINTS)
    lines = [
        "typedef long (*entry)(long, long, long, long, long, long, long, long);",
        f"static entry table[{count}];",
        "void nvfp4_sim_set(int index, entry function) { table[index] = function; }",
    ]
    for i, name in enumerate(ENTRY_POINTS):
        lines.append(
            f"int {name}(long a, long b, long c, long d, long e, long f, long g, long h) "
            f"{{ return table[{i}] ? (int)table[{i}](a, b, c, d, e, f, g, h) : {_NOT_RUNNING}; }}"
        )
    return "\n".join(lines) + "\n" + _TVM_FFI


def build(cache: Path) -> Path:
    """Path of the shim in ``cache``, built if it is not there.

    Raises RuntimeError when the machine has no C compiler or it fails.
    """
    text = source()
    target = cache / f"libnvfp4_sim_{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if target.exists():
        return target
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError(
            "the simulator needs a C compiler once, to build a small shared object, and found "
            "none of cc, gcc and clang: install one (on Debian: apt-get install gcc)"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        c_file, so_file = Path(scratch) / "shim.c", Path(scratch) / "shim.so"
        c_file.write_text(text)
        command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(so_file), str(c_file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
        os.replace(so_file, target)  # atomic: another process may build it at the same time
    return target


def load(path: Path) -> ctypes.CDLL:
    """The shim in this process, symbols visible to code that is linked later."""
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
