"""How long things take: CUDA graphs, rotating inputs, contestants in turn, medians.

    race = Race(torch.device("cuda"))
    race.add("ours", [lambda b=b: ours(b) for b in buffers])     # the same work on other buffers
    race.add("theirs", [lambda b=b: theirs(b) for b in buffers])
    race.run()["ours"].median                                    # microseconds of one operation

On a GPU every contestant is one CUDA graph that runs all its operations, so that launches cost what
they cost in a served model, and a buffer comes round again only after the others have passed
through the L2 (`rotations` says how many that takes). The graphs are replayed in turn: what drifts
(clocks, temperature, neighbours) hits all alike. On a CPU the operations are called one by one.
"""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Op = Callable[[], object]
FLUSH = 3  # a rotation passes this many times the L2


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds of one operation, one sample per round.

    method  "graph": replays of a CUDA graph. "eager": launches from Python, because the operation
            cannot be captured (``why`` says the reason). "wall": wall clock, on a CPU
    """

    samples: tuple[float, ...]
    method: str
    why: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def quantile(self, share: float) -> float:
        """Sample below which ``share`` of the samples lie (the nearest one)."""
        ordered = sorted(self.samples)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)]

    def as_json(self) -> dict[str, Any]:
        return {
            "us": self.median,
            "us_p10": self.quantile(0.1),
            "us_p90": self.quantile(0.9),
            "rounds": len(self.samples),
            "method": self.method,
            **({"why": self.why} if self.why else {}),
        }


def rotations(nbytes: float, l2_bytes: int, most: int = 64) -> int:
    """Sets of inputs of ``nbytes`` each that flush the L2 `FLUSH` times before one comes again;
    at least 2."""
    if nbytes <= 0:
        return most
    return max(2, min(most, -(-FLUSH * l2_bytes // int(max(nbytes, 1)))))


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 of a GPU; 0 for a CPU, whose caches are not flushed."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


class _Contestant:
    """Runs all operations once and says how long one took, in microseconds."""

    method = "wall"
    why = ""

    def __init__(self, operations: Sequence[Op]) -> None:
        self.operations = operations
        operations[0]()  # compile, load, allocate: not part of the time

    def lap(self) -> float:
        start = time.perf_counter()
        for operation in self.operations:
            operation()
        return (time.perf_counter() - start) * 1e6 / len(self.operations)


class _OnDevice(_Contestant):
    """Events around a graph, or around plain launches where a graph cannot be captured."""

    def __init__(self, operations: Sequence[Op]) -> None:
        super().__init__(operations)
        torch.cuda.synchronize()
        self.method, self.graph = "graph", torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        state = generator.clone_state()
        try:
            with torch.cuda.graph(self.graph):
                for operation in operations:
                    operation()
        except RuntimeError as error:
            self.method, self.why = "eager", str(error).splitlines()[0]
            torch.cuda.synchronize()
            # a capture that fails leaves the generator waiting for its end: it draws nothing more
            generator.graphsafe_set_state(state)

    def lap(self) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        if self.method == "graph":
            self.graph.replay()
        else:
            for operation in self.operations:
                operation()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / len(self.operations)


class Race:
    """Contestants timed in turn on ``device``: ``rounds`` laps each, after ``warmup`` laps."""

    def __init__(self, device: torch.device, rounds: int = 15, warmup: int = 2) -> None:
        if rounds < 1 or warmup < 0:
            raise ValueError(
                f"rounds must be 1 or more and warmup 0 or more, got {rounds}, {warmup}"
            )
        self.device, self.rounds, self.warmup = device, rounds, warmup
        self._contestants: dict[str, _Contestant] = {}

    def add(self, name: str, operations: Sequence[Op]) -> None:
        """``operations`` do the same work on different buffers.

        Raises ValueError for no operations or a name that is taken.
        """
        if not operations or name in self._contestants:
            raise ValueError(f"{name!r} needs operations and a name of its own")
        kind = _OnDevice if self.device.type == "cuda" else _Contestant
        self._contestants[name] = kind(operations)

    def run(self) -> dict[str, Times]:
        """Name -> `Times`, in the order of `add`."""
        samples: dict[str, list[float]] = {name: [] for name in self._contestants}
        for i in range(self.warmup + self.rounds):
            for name, contestant in self._contestants.items():
                lap = contestant.lap()
                if i >= self.warmup:
                    samples[name].append(lap)
        return {
            name: Times(tuple(samples[name]), c.method, c.why)
            for name, c in self._contestants.items()
        }


@dataclasses.dataclass(frozen=True)
class Roofs:
    """Rates of this GPU now: bytes/s of a large copy (read + written), FLOP/s of an 8192^3 bf16
    product."""

    copy: float
    dense: float


def measured_roofs(device: torch.device, copy_bytes: int = 2 << 30, size: int = 8192) -> Roofs:
    """Both roofs, measured with the same method as everything else. Random data: zeros are faster.

    Raises RuntimeError without a CUDA device.
    """
    if device.type != "cuda":
        raise RuntimeError(f"roofs are measured on a CUDA device, not on {device.type}")
    a = torch.randn(copy_bytes // 4, device=device)
    b = torch.empty_like(a)
    m, n = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    out = torch.empty(size, size, dtype=torch.bfloat16, device=device)
    race = Race(device, rounds=7)
    race.add("copy", [lambda: torch.add(a, 1, out=b)] * 4)
    race.add("dense", [lambda: torch.mm(m, n, out=out)] * 4)
    times = race.run()
    return Roofs(
        2 * copy_bytes / times["copy"].median * 1e6, 2 * size**3 / times["dense"].median * 1e6
    )


def device_state() -> dict[str, str]:
    """Clocks, power and temperature as nvidia-smi reads them; empty without it."""
    fields = ("driver_version", "clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "-i", "0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(fields, (v.strip() for v in done.stdout.split(","))))
