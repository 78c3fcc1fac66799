"""What a launch did: instructions, copies, MMAs, bytes and waits, per warp and per role.

Counts are exact for the executed schedule; only waits depend on it. Names:
    instructions         warp instructions executed
    mma, macs            tcgen05.mma operations and multiply-accumulates (M * N * K, once per
    operation)
    tma_loads            tensor loads; tma_load_bytes once per load, tma_fill_bytes once per
    destination CTA
    tma_stores, tma_store_bytes, bulk_load_bytes, bulk_store_bytes, cp_async_bytes
    tmem_load_bytes, tmem_copy_bytes
    global_load_bytes, global_store_bytes, shared_load_bytes, shared_store_bytes    ordinary loads
    and stores
    waits                times a warp blocked, by mnemonic in `waits_by`
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

WarpKey = tuple[tuple[int, ...], int]


class Counters:
    """Counters of one launch."""

    def __init__(self) -> None:
        self.warps: dict[WarpKey, Counter[str]] = defaultdict(Counter)
        self.names: dict[int, str] = {}
        self.waits_by: Counter[str] = Counter()

    def _of(self, warp: Any) -> Counter[str]:
        return self.warps[(tuple(int(c) for c in warp.cta.coords), warp.warp_id)]

    def add(self, warp: Any, name: str, amount: int = 1) -> None:
        """Adds to one counter of a warp."""
        self._of(warp)[name] += int(amount)

    def mma(self, warp: Any, macs: int) -> None:
        mine = self._of(warp)
        mine["mma"] += 1
        mine["macs"] += int(macs)

    def tma(self, warp: Any, size: int, destinations: int) -> None:
        mine = self._of(warp)
        mine["tma_loads"] += 1
        mine["tma_load_bytes"] += int(size)
        mine["tma_fill_bytes"] += int(size) * destinations

    def wait(self, warp: Any, instr: Any) -> None:
        self._of(warp)["waits"] += 1
        self.waits_by[".".join((instr.base, *instr.mods[:1]))] += 1

    def finish(self, warp: Any) -> None:
        """Takes over what the interpreter counted for a warp that has exited."""
        mine = self._of(warp)
        for name in (
            "executed",
            "global_load_bytes",
            "global_store_bytes",
            "shared_load_bytes",
            "shared_store_bytes",
        ):
            amount = int(getattr(warp, name, 0))
            if amount:
                mine["instructions" if name == "executed" else name] += amount
        if getattr(warp, "name", ""):
            self.names[warp.warp_id] = warp.name

    def __repr__(self) -> str:
        return f"Counters({', '.join(f'{k}={v}' for k, v in sorted(self.total().items()))})"

    def total(self) -> dict[str, int]:
        """Sums over all warps."""
        out: Counter[str] = Counter()
        for mine in self.warps.values():
            out.update(mine)
        return dict(out)

    def by_warp(self) -> dict[int, dict[str, int]]:
        """Sums over all CTAs for each warp id: with warp specialisation, one row per role."""
        out: dict[int, Counter[str]] = defaultdict(Counter)
        for (_, warp_id), mine in self.warps.items():
            out[warp_id].update(mine)
        return {k: dict(v) for k, v in sorted(out.items())}

    def table(self) -> str:
        """Text table, warps as rows."""
        rows = self.by_warp()
        names = sorted({n for row in rows.values() for n in row})
        lines = ["warp " + " ".join(f"{n:>18}" for n in names)]
        for warp_id, row in rows.items():
            lines.append(
                f"{warp_id:>4} "
                + " ".join(f"{row.get(n, 0):>18}" for n in names)
                + f"  {self.names.get(warp_id, '')}"
            )
        lines.append("  sum" + "".join(f" {self.total().get(n, 0):>18}" for n in names)[1:])
        return "\n".join(lines)
