"""`Simulator`: run compiled kernels of this process on its CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from cute_kernels.sim.asyncops import AsyncOps
from cute_kernels.sim.checks import Checks
from cute_kernels.sim.counters import Counters
from cute_kernels.sim.grid import Launch
from cute_kernels.sim.handlers import find_handler
from cute_kernels.sim.launch import preparation
from cute_kernels.sim.memory import GlobalMemory, raw_view
from cute_kernels.sim.overlap import Overlap
from cute_kernels.sim.ptx import Function, Module, Variable
from cute_kernels.sim.runtime import LaunchRequest, Runtime
from cute_kernels.sim.saved import SavedLaunch, capture
from cute_kernels.sim.scheduler import Policy, Scheduler
from cute_kernels.sim.tensormap import MapCache
from cute_kernels.sim.trace import Trace
from cute_kernels.sim.warp import Warp

SCHEDULES = ("lazy", "eager", "random")
CORES = ("auto", "compiled", "numpy")
ARCHES = ("sm_100a", "sm_90a")


def _have_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@dataclasses.dataclass(frozen=True)
class LaunchResult:
    """One simulated launch. ``counters`` are simulated counts, ``seconds`` the wall time it took
    here.
    """

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    counters: Counters
    seconds: float


class Simulator:
    """Inside ``with Simulator(...) as s:`` every launch of this process runs here, on CPU tensors.

        compile.enable_simulator()               # once, before the first compile
        with Simulator(seed=7) as s:
            compiled(a, b, c)                    # an unmodified compiled @cute.jit function
        s.launches[0].counters.total()

    seed      of the random schedule and of nothing else
    schedule  "lazy": asynchronous operations as late as legal, deterministic; "eager": as early;
              "random"
    checks    `Checks`: which faults are errors (all by default)
    trace     True records events; `s.trace.save(path)` writes Chrome / Perfetto JSON
    resident  clusters that run at the same time
    core      what executes the warps: "compiled" (needs numba), "numpy" (slower, needs nothing), or
              "auto": compiled where numba is installed
    arch      what the operations on tensors compile their kernels for: "sm_100a" or "sm_90a"
    record    True keeps what every launch was given in ``requests`` (`saved.SavedLaunch`, to be
    saved and
              run again by `python -m cute_kernels.sim`)

    A fault raises a `SimError` that names kernel, CTA, warp and PTX line, out of the call that
    launched.
    Raises RuntimeError when another Simulator is active in this process.
    """

    active: Simulator | None = None

    def __init__(
        self,
        seed: int = 0,
        schedule: str = "random",
        *,
        checks: Checks | None = None,
        trace: bool = False,
        resident: int = 4,
        core: str = "auto",
        arch: str = "sm_100a",
        record: bool = False,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
        if core not in CORES:
            raise ValueError(f"core must be one of {CORES}, got {core!r}")
        if arch not in ARCHES:
            raise ValueError(f"arch must be one of {ARCHES}, got {arch!r}")
        self.core = ("compiled" if _have_numba() else "numpy") if core == "auto" else core
        self.seed, self.schedule, self.arch = seed, schedule, arch
        self.checks = checks or Checks()
        self.trace = Trace() if trace else None
        self.max_resident = resident
        self.launches: list[LaunchResult] = []
        self.requests: list[SavedLaunch] = []
        self.record = record
        self.policy = Policy(schedule, seed)
        self.global_memory = GlobalMemory(preparation().tensors)
        self.overlap = Overlap(self.global_memory)
        self.maps = MapCache()
        self.changed_maps: dict[int, int] = {}
        self.find_handler = find_handler
        self.async_ops = AsyncOps(self.trace)
        self.counters = Counters()
        self.tc_pipes: dict[Any, Any] = {}
        self.runtime = Runtime(preparation().handles, self._on_launch)
        self._module: Module | None = None

    def __enter__(self) -> Simulator:
        if Simulator.active is not None:
            raise RuntimeError("a Simulator is already active in this process")
        self.runtime.connect(preparation().library)
        self._ask_device_count = _answer_device_count()
        Simulator.active = self
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        Simulator.active = None
        self.runtime.disconnect(preparation().library)
        self._ask_device_count()
        if self.runtime.error is not None:
            # the host code saw a CUDA error, and may have raised its own: this is the cause
            raise self.runtime.error from error

    def _on_launch(self, request: LaunchRequest) -> None:
        module = preparation().module(request.image)
        function = module.functions.get(request.name)
        if function is None:
            raise RuntimeError(
                f"kernel {request.name} is not in its PTX, which has {sorted(module.functions)}"
            )
        params = read_params(function, request.params)
        if self.record:
            saved = capture(self.global_memory, module, request.name, params, request)
            self.requests.append(saved)
        self.run_module(module, function, params, request)

    def run_module(
        self, module: Module, function: Function, params: bytes, shape: Any
    ) -> LaunchResult:
        """`run` for a function with variables at module scope."""
        self._module = module
        return self.run(function, params, shape)

    def warps(self, function: Function) -> Callable[[Any, int, int], Any]:
        """Maker of the warps of a kernel, (cta, warp id, lanes) -> warp, on the core in use."""
        if self.core == "compiled":
            from cute_kernels.sim.compiled import CompiledWarp

            code = preparation().code(function)
            return lambda cta, warp_id, lanes: CompiledWarp(cta, warp_id, code, lanes)
        program = preparation().program(function)
        return lambda cta, warp_id, lanes: Warp(cta, warp_id, program, lanes)

    def module_variables(self, function: Function) -> list[Variable]:
        """Variables at module scope: where dynamic shared memory is declared."""
        return [] if self._module is None else list(self._module.variables.values())

    def run(self, function: Function, params: bytes, shape: Any) -> LaunchResult:
        """Run one kernel. ``shape`` has grid, block, cluster and smem_bytes (a `LaunchRequest`)."""
        self.async_ops = AsyncOps(self.trace)
        self.counters = Counters()
        self.tc_pipes = {}
        self.global_memory.refresh()
        launch = Launch(
            self,
            function,
            params,
            grid=shape.grid,
            block=shape.block,
            cluster=shape.cluster,
            smem_bytes=shape.smem_bytes,
        )
        started = time.perf_counter()
        late = self.schedule != "eager" and getattr(shape, "programmatic", False)
        self.overlap.begin(function.instrs, params, late)
        try:
            Scheduler(self, launch).run()
        finally:
            self.overlap.end()
            launch.release()
        result = LaunchResult(
            function.name,
            shape.grid,
            shape.block,
            shape.cluster,
            shape.smem_bytes,
            self.counters,
            time.perf_counter() - started,
        )
        self.launches.append(result)
        return result


def _answer_device_count() -> Callable[[], None]:
    """The loader asks the driver, through cuda.bindings, how many devices there are: one, while
    a simulator is active.
    Returns the function that takes the answer back."""
    from cuda.bindings import runtime

    asked = runtime.cudaGetDeviceCount
    runtime.cudaGetDeviceCount = lambda: (runtime.cudaError_t.cudaSuccess, 1)

    def restore() -> None:
        runtime.cudaGetDeviceCount = asked

    return restore


def read_params(function: Function, addresses: int) -> bytes:
    """The parameter block as the kernel sees it, from the array of addresses that a launch
    carries.
    """
    block = bytearray()
    pointers = raw_view(addresses, 8 * max(len(function.params), 1)).view(np.uint64)
    for i, variable in enumerate(function.params):
        align = max(variable.align, 1)
        block.extend(b"\0" * (-len(block) % align))
        block.extend(raw_view(int(pointers[i]), variable.size).tobytes())
    return bytes(block)
