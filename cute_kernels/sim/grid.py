"""A launch as a grid of clusters, CTAs and warps, and what is the same for all of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from cute_kernels.sim.checks import IllegalInstruction
from cute_kernels.sim.memory import RESERVED, SharedMemory
from cute_kernels.sim.ptx import Function
from cute_kernels.sim.runtime import NUM_SMS

Dim3 = tuple[int, int, int]
_LANES = np.arange(32)
_TICK = 16  # cycles that a read of the clock advances it by


class Cta:
    """One CTA; the scheduler adds its barriers, TMEM and fences."""

    def __init__(self, cluster: Cluster, rank: int, coords: Dim3) -> None:
        self.cluster, self.rank, self.coords = cluster, rank, coords
        self.launch = cluster.launch
        self.num_threads = int(np.prod(self.launch.block))
        self.shared = SharedMemory(self.launch.window_bytes)
        count = -(-self.num_threads // 32)
        self.warps = [
            self.launch.new_warp(self, i, min(32, self.num_threads - 32 * i)) for i in range(count)
        ]


class Cluster:
    """CTAs that start together; ``ctas[rank]``."""

    def __init__(self, launch: Launch, first: Dim3) -> None:
        self.launch, self.first_ctaid = launch, first
        cx, cy, cz = launch.cluster_dims
        self.ctas: list[Cta] = []
        for rank, (z, y, x) in enumerate(itertools.product(range(cz), range(cy), range(cx))):
            self.ctas.append(Cta(self, rank, (first[0] + x, first[1] + y, first[2] + z)))

    def end(self) -> None:
        """Cut the cycles through this cluster, of which nothing is asked any more: its shared
        memory, TMEM, registers and shadow state, tens of megabytes, go now and not when Python's
        collector next looks at old objects."""
        for cta in self.ctas:
            vars(cta).update(warps=[], barriers={}, named={}, tmem=None)
        vars(self).update(ctas=[], barrier=None)


class Launch:
    """One kernel launch.

    params      the parameter block, as host code passes it
    smem_bytes  dynamic shared memory

    Raises IllegalInstruction for a grid that is no multiple of the cluster, and
    UnsupportedInstruction for an instruction that is not modelled.
    """

    def __init__(
        self,
        sim: Any,
        function: Function,
        params: bytes,
        *,
        grid: Dim3,
        block: Dim3,
        cluster: Dim3 = (1, 1, 1),
        smem_bytes: int = 0,
    ) -> None:
        if any(g % c for g, c in zip(grid, cluster)):
            raise IllegalInstruction(f"grid {grid} is no multiple of the cluster {cluster}")
        self.sim, self.function, self.name = sim, function, function.name
        self.grid, self.block, self.cluster_dims = grid, block, cluster
        self.new_warp = sim.warps(function)
        self.instrs = function.instrs
        self.epoch = 1
        self.known_ranges: list[tuple[int, int, np.ndarray]] = []
        self.time = 0
        self._place_variables(smem_bytes)
        self._place_params(params)
        self._waiting = self._clusters()

    def _place_variables(self, smem_bytes: int) -> None:
        """Static shared variables after the reserved bytes, dynamic memory after them; local
        variables from 0.
        """
        self.shared_offsets: dict[str, int] = {}
        self.local_offsets: dict[str, int] = {}
        shared, local = RESERVED, 0
        variables = [*self.function.variables, *self.sim.module_variables(self.function)]
        for v in variables:
            align = max(v.align, 1)
            if v.space == "shared" and not v.extern:
                shared = -(-shared // align) * align
                self.shared_offsets[v.name] = shared
                shared += v.size
            elif v.space == "local":
                local = -(-local // align) * align
                self.local_offsets[v.name] = local
                local += v.size
        dynamic = shared
        for v in variables:
            if v.space == "shared" and v.extern:
                dynamic = -(-shared // max(v.align, 16)) * max(v.align, 16)
                self.shared_offsets[v.name] = dynamic
        self.dynamic_bytes = smem_bytes
        self.window_bytes = dynamic + smem_bytes
        self.local_bytes = -(-local // 16) * 16

    def _place_params(self, params: bytes) -> None:
        self.param_addresses: dict[str, int] = {}
        base = self.sim.global_memory.own(max(len(params), 1), params, align=128)
        self.param_base = base
        offset = 0
        for v in self.function.params:
            offset = -(-offset // max(v.align, 1)) * max(v.align, 1)
            self.param_addresses[v.name] = base + offset
            offset += v.size

    def release(self) -> None:
        """Give the parameter block back."""
        self.sim.global_memory.release(self.param_base)

    def _clusters(self) -> Iterator[Dim3]:
        (gx, gy, gz), (cx, cy, cz) = self.grid, self.cluster_dims
        for z, y, x in itertools.product(range(0, gz, cz), range(0, gy, cy), range(0, gx, cx)):
            yield x, y, z

    def next_cluster(self) -> Cluster | None:
        """Start the next cluster of the grid, x fastest; None after the last."""
        first = next(self._waiting, None)
        return None if first is None else Cluster(self, first)

    def cancel_cluster(self) -> Dim3 | None:
        """Take away a cluster that has not started (clusterlaunchcontrol)."""
        return next(self._waiting, None)

    def next_time(self) -> int:
        self.time += _TICK
        return self.time

    def symbol(self, warp: Any, name: str) -> int:
        """Address of a variable or parameter in its own space."""
        if name in self.param_addresses:
            return self.param_addresses[name]
        if name in self.shared_offsets:
            return int(warp.cta.rank << 24 | self.shared_offsets[name])
        if name in self.local_offsets:
            return self.local_offsets[name]
        raise IllegalInstruction(f"symbol {name} has no address")

    def special(self, warp: Any, name: str) -> Any:
        """Value of a special register: one number for the warp, or a row."""
        cta = warp.cta
        if name.startswith("tid."):
            linear = 32 * warp.warp_id + _LANES
            bx, by, _ = self.block
            parts = {"x": linear % bx, "y": linear // bx % by, "z": linear // (bx * by)}
            return parts[name[-1]]
        axis = "xyz".find(name[-1]) if name[-2:-1] == "." else -1
        inside = tuple(c - f for c, f in zip(cta.coords, cta.cluster.first_ctaid))
        number = tuple(f // c for f, c in zip(cta.cluster.first_ctaid, self.cluster_dims))
        clusters = tuple(g // c for g, c in zip(self.grid, self.cluster_dims))
        vectors = {
            "ntid": self.block, "ctaid": cta.coords, "nctaid": self.grid, "clusterid": number,
            "nclusterid": clusters, "cluster_ctaid": inside, "cluster_nctaid": self.cluster_dims,
        }  # fmt: skip
        if axis >= 0 and name[:-2] in vectors:
            return np.full(32, vectors[name[:-2]][axis])
        scalars: dict[str, Any] = {
            "laneid": _LANES, "warpid": warp.warp_id, "nwarpid": len(cta.warps),
            "cluster_ctarank": cta.rank, "cluster_nctarank": len(cta.cluster.ctas),
            "smid": cta.coords[0] % NUM_SMS, "nsmid": NUM_SMS, "gridid": 0,
            "is_explicit_cluster": int(self.cluster_dims != (1, 1, 1)),
            "dynamic_smem_size": self.dynamic_bytes, "total_smem_size": self.window_bytes,
            "lanemask_eq": 1 << _LANES, "lanemask_lt": (1 << _LANES) - 1,
            "lanemask_le": (2 << _LANES) - 1, "lanemask_gt": 0xFFFFFFFF ^ ((2 << _LANES) - 1),
            "lanemask_ge": 0xFFFFFFFF ^ ((1 << _LANES) - 1),
        }  # fmt: skip
        if name not in scalars:
            raise IllegalInstruction(f"special register %{name} is not modelled")
        return np.broadcast_to(np.asarray(scalars[name]), 32)
