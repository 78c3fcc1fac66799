"""Specimens compiled, with arguments bound and a reference: what the end-to-end tests run."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cute_kernels import compile as kernels
from cute_kernels import nvfp4, sim

Tensor = torch.Tensor


@dataclass
class Program:
    """A compiled specimen on one problem.

    `outputs` are poisoned before a run and compared with `want` (fp64 or integers, exact) after it.
    """

    name: str
    call: Callable[[], None]
    outputs: tuple[Tensor, ...]
    want: tuple[Tensor, ...]
    fill: float | int | None = None

    def run(self, seed: int = 0, schedule: str = "random", **options: Any) -> Any:
        """One simulated run; returns the Simulator, raises what it reports."""
        for tensor in self.outputs:
            if self.fill is None:
                tensor.view(torch.uint8).fill_(0xFF)
            else:
                tensor.fill_(self.fill)
        with sim.Simulator(seed=seed, schedule=schedule, **options) as simulator:
            self.call()
        return simulator

    def mismatch(self) -> str | None:
        """Where the outputs differ from the reference, NaN included; None when they do not."""
        for i, (got, want) in enumerate(zip(self.outputs, self.want)):
            bad = ~(got.to(want.dtype) == want)
            if bool(bad.any()):
                index = tuple(int(v) for v in bad.nonzero()[0])
                return (
                    f"{self.name}, output {i}: {int(bad.sum())} of {bad.numel()} elements differ, "
                    f"first at {index}: expected {want[index].item()}, got {got[index].item()}"
                )
        return None

    def bits(self) -> list[Tensor]:
        """Copies of the outputs, as bytes."""
        return [tensor.view(torch.uint8).clone() for tensor in self.outputs]


def schedules(count: int) -> Iterator[tuple[int, str]]:
    """(seed, policy): lazy, eager, then `count` - 2 seeded random ones."""
    yield from ((0, "lazy"), (0, "eager"))[:count]
    yield from ((seed, "random") for seed in range(count - 2))


def _dsl() -> tuple[Any, Any, Any, Any]:
    kernels.enable_simulator()
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.runtime import from_dlpack

    return cutlass, cute, cuda.CUstream(0), from_dlpack


def bind(kernel: Any, *arguments: Any) -> Callable[[], None]:
    """Compile `kernel` for tensors of any first extent and bind these arguments."""
    cutlass, cute, stream, from_dlpack = _dsl()
    types = {
        torch.float32: cutlass.Float32,
        torch.float16: cutlass.Float16,
        torch.int32: cutlass.Int32,
    }

    def example(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return cute.runtime.make_fake_compact_tensor(
            types[value.dtype],
            (cute.sym_int(), *value.shape[1:]),
            stride_order=tuple(reversed(range(value.ndim))),
            assumed_align=16,
        )

    def actual(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        order = tuple(range(value.ndim))
        tensor = from_dlpack(value, assumed_align=16)
        return tensor.mark_compact_shape_dynamic(mode=0, stride_order=order)

    compiled = cute.compile(kernel, *map(example, arguments), stream)
    bound = [actual(value) for value in arguments]
    return lambda: compiled(*bound, stream)


# ---- the NVFP4 GEMM


@dataclass(frozen=True)
class GemmCase:
    """Shape of the problem and of the kernel; `omit` names the synchronisation left out."""

    m: int
    n: int
    k: int
    tile_n: int = 128
    tile_k: int = 256
    num_ab_stage: int = 2
    pair: bool = False
    cluster_m: int | None = None
    omit: str | None = None


def _operand(generator: torch.Generator, rows: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (rows, K/2), row-major scales (rows, K/16) and the fp64 values.

    Scales are 1/2, 1 or 2: fp32 accumulation is exact in any order up to K = 4096.
    """
    codes = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
    exponent = torch.randint(-1, 2, (rows, k // 16), generator=generator)
    scale = (2.0**exponent).to(torch.float8_e4m3fn)
    values = nvfp4.decode_e2m1(nvfp4.unpack(codes), torch.float64)
    return codes, scale, values * scale.double().repeat_interleave(16, -1)


@functools.lru_cache(maxsize=64)
def gemm(case: GemmCase) -> Program:
    """The specimen GEMM for one case, its inputs fixed by the shape."""
    cutlass, cute, stream, _ = _dsl()
    from cutlass.cute.runtime import make_ptr

    from tests.sim.specimens.gemm import Nvfp4Gemm

    generator = torch.Generator().manual_seed(case.m + case.n + case.k)
    a, a_scale, a_values = _operand(generator, case.m, case.k)
    b, b_scale, b_values = _operand(generator, case.n, case.k)
    sfa, sfb = nvfp4.swizzle(a_scale), nvfp4.swizzle(b_scale)
    out = torch.empty(case.m, case.n)
    types = (*[cutlass.Float4E2M1FN] * 2, *[cutlass.Float8E4M3FN] * 2, cutlass.Float32)
    tensors = (a, b, sfa, sfb, out)
    bound = [
        make_ptr(t, x.data_ptr(), cute.AddressSpace.gmem, assumed_align=32)
        for t, x in zip(types, tensors)
    ]
    problem = tuple(cutlass.Int32(extent) for extent in (case.m, case.n, case.k))
    kernel = Nvfp4Gemm(
        case.tile_n, case.tile_k, case.num_ab_stage, case.pair, case.cluster_m, case.omit
    )
    compiled = cute.compile(kernel, *bound, problem, stream)

    def call() -> None:
        assert len(tensors) == 5  # keeps the operands alive as long as the program
        compiled(*bound, problem, stream)

    return Program(str(case), call, (out,), (a_values @ b_values.T,))


# ---- the small kernels: name -> builder(omit), each with its omissions


def _integers(generator: torch.Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def axpy(omit: str | None = None) -> Program:
    from tests.sim.specimens import basics

    g = torch.Generator().manual_seed(0)
    x = _integers(g, 300, dtype=torch.float32)
    start = _integers(g, 300, dtype=torch.float32)
    y = start.clone()
    cutlass = _dsl()[0]
    launch = bind(basics.axpy, x, y, cutlass.Float32(3.0))

    def call() -> None:
        y.copy_(start)  # the kernel updates in place
        launch()

    return Program("axpy", call, (y,), ((3 * x + start).double(),))


def row_sum(omit: str | None = None) -> Program:
    from tests.sim.specimens import basics

    x = _integers(torch.Generator().manual_seed(0), 5, 256, dtype=torch.float32)
    out = torch.empty(5)
    return Program("row_sum", bind(basics.RowSum(omit), x, out), (out,), (x.double().sum(1),))


def tma_ring(omit: str | None = None) -> Program:
    from tests.sim.specimens import basics

    x = _integers(torch.Generator().manual_seed(0), 128, 256, dtype=torch.float32)
    out = torch.empty_like(x)
    call = bind(basics.TmaRing(omit), x, out)
    return Program("tma_ring", call, (out,), (2 * x.double() + 1,))


def cluster_gather(omit: str | None = None) -> Program:
    from tests.sim.specimens import micro

    x = _integers(torch.Generator().manual_seed(0), 12, dtype=torch.int32)
    out = torch.empty(12, 4, dtype=torch.int32)
    want = x.view(3, 1, 4).expand(3, 4, 4).reshape(12, 4)
    return Program("cluster_gather", bind(micro.ClusterGather(4, omit), x, out), (out,), (want,))


def remote_stores(omit: str | None = None) -> Program:
    from tests.sim.specimens import micro

    x = _integers(torch.Generator().manual_seed(0), 8, dtype=torch.int32)
    out = torch.empty(8, dtype=torch.int32)
    want = x.view(2, 4).sum(1).repeat_interleave(4).to(torch.int32)
    return Program("remote_stores", bind(micro.RemoteStores(omit), x, out), (out,), (want,))


def async_copy(omit: str | None = None) -> Program:
    from tests.sim.specimens import micro

    x = _integers(torch.Generator().manual_seed(0), 3, 128, 4, dtype=torch.float32)
    out = torch.empty_like(x)
    return Program("async_copy", bind(micro.AsyncCopy(omit), x, out), (out,), (x.flip(1),))


def bulk_reduce(omit: str | None = None) -> Program:
    from tests.sim.specimens import micro

    x = _integers(torch.Generator().manual_seed(0), 6, 32, dtype=torch.float32)
    out = torch.empty(1, 32)
    want = x.double().sum(0, keepdim=True)
    return Program("bulk_reduce", bind(micro.BulkReduce(omit), x, out), (out,), (want,), fill=0.0)


def gather4(omit: str | None = None) -> Program:
    from tests.sim.specimens import micro

    g = torch.Generator().manual_seed(0)
    x = _integers(g, 50, 64, dtype=torch.float16)
    index = torch.randint(0, 50, (64,), generator=g, dtype=torch.int32)
    index[5], index[40] = -1, 50  # out of bounds: zeros
    out = torch.empty(64, 64, dtype=torch.float16)
    inside = ((index >= 0) & (index < 50))[:, None]
    want = torch.where(inside, x[index.clamp(0, 49).long()], torch.zeros((), dtype=x.dtype))
    return Program("gather4", bind(micro.Gather4(omit), x, index, out), (out,), (want,))


def work_stealing(omit: str | None = None) -> Program:
    from tests.sim.specimens import micro

    out = torch.empty(40, dtype=torch.int32)
    taken = torch.empty(40, dtype=torch.int32)
    launch = bind(micro.WorkStealing(omit), out, taken)
    return Program("work_stealing", launch, (out,), (torch.ones(40, dtype=torch.int32),), fill=0)


def dependent_launch(omit: str | None = None) -> Program:
    from tests.sim.specimens import micro

    x = _integers(torch.Generator().manual_seed(0), 256, dtype=torch.int32)
    y, z = torch.empty_like(x), torch.empty_like(x)
    call = bind(micro.DependentLaunch(omit), x, y, z)
    return Program("dependent_launch", call, (y, z), (x + 1, 2 * (x + 1)))


SMALL: dict[str, Callable[..., Program]] = {
    build.__name__: build
    for build in (
        axpy,
        row_sum,
        tma_ring,
        cluster_gather,
        remote_stores,
        async_copy,
        bulk_reduce,
        gather4,
        work_stealing,
        dependent_launch,
    )
}

SMALL_OMISSIONS: dict[str, tuple[str, ...]] = {
    "row_sum": ("barrier",),
    "tma_ring": ("full_wait", "empty_wait", "proxy_fence", "store_barrier", "store_read_wait"),
    "cluster_gather": ("arrive_wait", "exit_sync"),
    "remote_stores": ("wait",),
    "async_copy": ("wait_group", "barrier"),
    "bulk_reduce": ("proxy_fence", "barrier"),
    "gather4": ("wait",),
    "work_stealing": ("wait",),
    "dependent_launch": ("wait", "one"),
}
