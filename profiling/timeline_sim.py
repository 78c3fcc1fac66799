"""Timelines of our SM100 kernel from the simulator."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4
from cute_kernels.activations import SwiGLU
from cute_kernels.config import GemmConfig
from profiling.timeline import Slice, Timeline

_BARRIER = re.compile(r"mbarrier (0x[0-9a-f]+) of cta")


@dataclasses.dataclass(frozen=True)
class Specimen:
    """One launch: rows of each expert, weights (E, n, k), where rows come from, what happens to
    the accumulators. Operands are random; results are other tests' business."""

    config: GemmConfig
    rows: tuple[int, ...]
    n: int
    k: int
    gathered: bool = False
    activated: bool = False
    clusters: int = 1

    def __post_init__(self) -> None:
        if min(self.rows, default=-1) < 0 or self.n % 16 or self.k % 32 or self.clusters < 1:
            raise ValueError(
                "rows must be 0 or more, n a multiple of 16, k of 32 and clusters 1 or more, got "
                f"{self.rows}, {self.n}, {self.k}, {self.clusters}"
            )


def config_of(text: str) -> GemmConfig:
    """``ctas=2,tile_n=256`` -> `GemmConfig`. Raises ValueError for a field it does not have."""
    known: dict[str, Any] = {f.name: type(f.default) for f in dataclasses.fields(GemmConfig)}
    given = dict(part.partition("=")[::2] for part in text.split(",") if part)
    if not given.keys() <= known.keys():
        raise ValueError(f"--config takes {sorted(known)}, got {sorted(given)}")
    values: dict[str, Any] = {name: known[name](int(value)) for name, value in given.items()}
    return GemmConfig(**values)


def prepare(s: Specimen) -> tuple[Any, Callable[[], None]]:
    """(kernel object, function that launches it once) on CPU tensors; keeps its operands alive."""
    from cute_kernels.device.epilogues import ActivationQuantize, StoreRows
    from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
    from cute_kernels.sm100.loads import ContiguousRows, GatheredRows

    g = torch.Generator().manual_seed(0)
    experts, routed = len(s.rows), sum(s.rows)
    offsets = torch.tensor([0, *itertools.accumulate(s.rows)], dtype=torch.int32)
    groups = -(-s.k // 64) * 4

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=g)

    def scales(*shape: int) -> Tensor:
        return torch.randint(0x30, 0x40, shape, dtype=torch.uint8, generator=g)

    scale = scales(nvfp4.grouped_scale_rows(routed, experts), groups)
    tokens = max(routed // 2, 1) if s.gathered else routed
    row_token = torch.randint(0, tokens, (max(routed, 1),), generator=g).int()
    data = codes(max(tokens, 1), s.k // 2)
    weights = [codes(experts, s.n, s.k // 2), scales(experts, -(-s.n // 128) * 128, groups)]
    row_scale, one = torch.ones(max(routed, 1)), torch.ones(experts, 2)
    load: list[Any] = [data, scale, routed, scale.shape[0]]
    if s.gathered:
        load = [data, scale, row_token, tokens, routed, scale.shape[0]]
    epilogue: Any = StoreRows("BFloat16", row_scaled=True)
    out = [torch.empty(routed, s.n, dtype=torch.bfloat16), one, row_scale]
    if s.activated:
        epilogue = ActivationQuantize(SwiGLU(), indexed=s.gathered)
        inter = s.n // 2
        h_scale = torch.empty(scale.shape[0], -(-inter // 64) * 4, dtype=torch.uint8)
        out = [torch.empty(routed, inter // 2, dtype=torch.uint8), h_scale, one, row_scale]
        out += [row_token, one] if s.gathered else [one]
    kernel = Sm100GroupedGemm(
        GatheredRows() if s.gathered else ContiguousRows(), epilogue, s.config
    )
    launcher = compiler.load(kernel, "sm_100a")
    counter = [torch.zeros(1, dtype=torch.int32)] if s.config.dynamic else []
    arguments = [*load, *weights, offsets, *out, experts, s.n, s.k, *counter, s.clusters, 0]

    def launch() -> None:
        launcher(*(a.data_ptr() if isinstance(a, Tensor) else a for a in arguments))

    return kernel, launch


def roles(kernel: Any) -> dict[int, str]:
    """Warp id -> row of the timeline."""
    from cute_kernels.sm100.grouped_gemm import EPILOGUE_WARPS, LOAD_WARP, MMA_WARP

    out = {w: f"epilogue {w}" for w in range(EPILOGUE_WARPS)} | {MMA_WARP: "mma"}
    for w in range(kernel.load.warps):
        out[LOAD_WARP + w] = f"load {w}" if w else "load"
    return out | {kernel.schedule_warp: "schedule"}


def barrier_name(kernel: Any, index: int) -> str:
    """Name of the ``index``-th mbarrier of a CTA: they are allocated in this order."""
    from cute_kernels.sm100.schedule import DEPTH

    stages, accumulators = kernel.config.stages, kernel.acc_stages
    for name, count in (("ab_full", stages), ("ab_empty", stages),
                        ("acc_full", accumulators), ("acc_empty", accumulators),
                        ("work_full", DEPTH), ("work_empty", DEPTH)):  # fmt: skip
        if index < count:
            return f"{name}[{index}]"
        index -= count
    return f"barrier {index}"


def from_trace(events: list[dict[str, Any]], kernel: Any, title: str) -> Timeline:
    """Slices of a `cute_kernels.sim.trace.Trace`; its clock counts steps."""
    names = roles(kernel)
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    addresses = [int(m.group(1), 16) for e in events if (m := _BARRIER.search(detail_of(e)))]
    first = min(addresses, default=0)
    out = []
    for e in events:
        if e["ph"] != "X":
            continue
        engine = threads.get((e["pid"], e["tid"]), "")
        row = names.get(e["tid"], engine)
        name, kind, detail = e["name"], {"alu": "run"}.get(e["cat"], e["cat"]), detail_of(e)
        if kind == "async":
            row = {"load": "tma", "mma": "tensor", "st.async": "items"}.get(name, name)
        elif kind == "wait":
            found = _BARRIER.search(detail)
            index = (int(found.group(1), 16) - first) // 8 if found else -1
            name = barrier_name(kernel, index) if found else name.removeprefix("wait ")
        out.append(Slice(e["pid"] - 1, row, kind, name, e["ts"], e["dur"], detail))
    return Timeline(title, "steps", tuple(out))


def detail_of(event: dict[str, Any]) -> str:
    args = event.get("args", {})
    return str(args.get("for") or args.get("text") or "")


def title_of(s: Specimen, kernel: Any) -> str:
    return f"{kernel.name}: rows {', '.join(map(str, s.rows))}, N {s.n}, K {s.k}"


def record(args: argparse.Namespace) -> Timeline:
    """Compile, simulate, collect. Raises ValueError for sizes and configurations that cannot be,
    RuntimeError where the simulator cannot run."""
    specimen = Specimen(
        config_of(args.config), tuple(args.rows), args.n, args.k,
        args.load == "gathered", args.epilogue == "act", args.clusters,
    )  # fmt: skip
    if args.clock == "model":
        from profiling.timeline_model import modelled

        return modelled(specimen)
    return simulated(specimen, args.schedule, args.seed)


def simulated(specimen: Specimen, schedule: str = "lazy", seed: int = 0) -> Timeline:
    """One traced run; the clock is the simulator's count of steps."""
    from cute_kernels import sim

    compiler.enable_simulator()
    kernel, launch = prepare(specimen)
    with sim.Simulator(seed, schedule, trace=True, resident=specimen.clusters) as s:
        launch()
    assert s.trace is not None
    return from_trace(s.trace.events, kernel, title_of(specimen, kernel))
