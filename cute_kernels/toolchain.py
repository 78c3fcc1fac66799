"""What is installed and what it can compile for: a Status with a reason, not an assertion deep
inside a compiler.

Nothing here compiles or imports the DSL: versions come from package metadata, and from the driver
when there is one.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import sys

DSL_PACKAGE = "nvidia-cutlass-dsl"
DSL_VERSION = (
    "4.8.1"  # every fact about the DSL that this package relies on was checked with this one
)

# compute capability -> compile target. 'sm_100' without a suffix is no target: tcgen05 needs one.
TARGETS: dict[tuple[int, int], str] = {
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (11, 0): "sm_110a",
}
ARCHES = frozenset({*TARGETS.values(), "sm_100f"})  # sm_100f: one object for the whole SM100 family


@dataclasses.dataclass(frozen=True)
class Status:
    """Answer to a support question: true or false, and why. ``arch``: the compile target, if
    any."""

    ok: bool
    reason: str = ""
    arch: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def check(self) -> Status:
        """Raises RuntimeError with the reason unless ok; returns itself."""
        if not self.ok:
            raise RuntimeError(self.reason)
        return self


@dataclasses.dataclass(frozen=True)
class Installed:
    """What was found on this machine; versions are None when the thing is absent.

    dsl          version of nvidia-cutlass-dsl
    runtimes     CUDA majors for which the DSL's compiler libraries are installed
    bindings     version of cuda-bindings (or cuda-python)
    driver       CUDA version of the driver as (major, minor)
    platform     sys.platform
    """

    dsl: str | None
    runtimes: tuple[int, ...]
    bindings: str | None
    driver: tuple[int, int] | None
    platform: str = "linux"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver_version() -> tuple[int, int] | None:
    try:
        from cuda.bindings import driver

        error, version = driver.cuDriverGetVersion()
    except Exception:  # no binding or no libcuda: the same answer, there is no driver to speak of
        return None
    return None if int(error) else (version // 1000, version % 1000 // 10)


def _compiler_runtimes() -> tuple[int, ...]:
    """CUDA majors of the DSL's compiler libraries, from the packages that carry them."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    found = [m for m in (12, 13) if _version(f"{DSL_PACKAGE}-libs-cu{m}") is not None]
    if not found and spec is not None and spec.submodule_search_locations:
        from pathlib import Path

        root = Path(next(iter(spec.submodule_search_locations)))
        found = [m for m in (12, 13) if any((root / f"cu{m}").glob("lib/*cute_dsl_runtime*"))]
    return tuple(found)


def installed() -> Installed:
    """Look at this machine. A few milliseconds; the DSL is not imported."""
    return Installed(
        dsl=_version(DSL_PACKAGE) or _version(f"{DSL_PACKAGE}-libs-core"),
        runtimes=_compiler_runtimes(),
        bindings=_version("cuda-bindings") or _version("cuda-python"),
        driver=_driver_version(),
        platform=sys.platform,
    )


def check_compiler(found: Installed) -> Status:
    """Can kernels be compiled here? No GPU and no driver are needed for that."""
    pip = f"pip install '{DSL_PACKAGE}[cu13]=={DSL_VERSION}'"
    if not found.platform.startswith("linux"):
        return Status(False, f"kernels need Linux, found {found.platform}; use backend='torch'")
    if found.dsl is None:
        return Status(False, f"kernels need {DSL_PACKAGE} {DSL_VERSION}, found none: {pip}")
    if found.dsl != DSL_VERSION:
        return Status(
            False,
            f"kernels need {DSL_PACKAGE} {DSL_VERSION}, found {found.dsl}; other versions differ "
            f"in generated code: {pip}",
        )
    if not found.runtimes:
        return Status(
            False,
            f"{DSL_PACKAGE} {found.dsl} is installed without its compiler libraries "
            f"({DSL_PACKAGE}-libs-cu12 or -cu13): {pip}",
        )
    if found.bindings is None:
        return Status(
            False, "kernels need cuda-python, found none: pip install 'cuda-python>=12.8'"
        )
    return Status(True)


def check_driver(found: Installed) -> Status:
    """Can compiled kernels be launched with this driver?"""
    status = check_compiler(found)
    if not status:
        return status
    if found.driver is None:
        return Status(False, "no NVIDIA driver found; backend='sim' and backend='torch' need none")
    major, minor = found.driver
    wanted = f"driver with CUDA {max(found.runtimes)}.0 or newer"
    if min(found.runtimes) > major:
        extra = (
            " or pip install 'nvidia-cutlass-dsl[cu12]==" + DSL_VERSION + "'" if major == 12 else ""
        )
        return Status(
            False,
            f"the driver supports CUDA {major}.{minor}, the installed compiler libraries are for "
            f"CUDA {min(found.runtimes)}: update to a {wanted}{extra}",
        )
    assert found.bindings is not None
    bindings_major = int(found.bindings.split(".")[0])
    if bindings_major > major:
        return Status(
            False,
            f"cuda-bindings {found.bindings} needs a driver with CUDA {bindings_major}, the driver "
            f"supports CUDA {major}.{minor}: pip install 'cuda-python<{major + 1}' or update it",
        )
    return Status(True)


def target(capability: tuple[int, int] | None) -> Status:
    """Compile target of a device of this compute capability (None: no GPU)."""
    if capability is None:
        return Status(False, "no CUDA device; backend='sim' and backend='torch' need none")
    arch = TARGETS.get((int(capability[0]), int(capability[1])))
    if arch is None:
        supported = ", ".join(f"{a}.{b} ({t})" for (a, b), t in TARGETS.items())
        return Status(
            False,
            f"no kernels for compute capability {capability[0]}.{capability[1]}, only for "
            f"{supported}; use backend='torch'",
        )
    return Status(True, arch=arch)
