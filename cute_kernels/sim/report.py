"""The state of a stuck launch in words: every warp, barrier, allocation and operation in flight."""

from __future__ import annotations

from typing import Any

_MOST = 64  # lines per section


def describe(scheduler: Any) -> str:
    """Report for Deadlock and Livelock."""
    lines: list[str] = []
    for cluster in scheduler.clusters:
        for cta in cluster.ctas:
            lines += _cta(cta)
        lines.append(f"  {cluster.barrier}")
    pending = scheduler.ops.pending()
    lines.append(f"operations in flight: {len(pending)}")
    for op in pending[:_MOST]:
        warp, instr = op.origin
        lines.append(
            f"  {op.agent} {op.label} of warp {warp.warp_id}, PTX line {instr.line}: "
            f"{instr.text[:100]}"
        )
    return "\n".join(lines)


def _cta(cta: Any) -> list[str]:
    name = f"cta {tuple(int(c) for c in cta.coords)} (cluster rank {cta.rank})"
    lines = [name]
    for warp in cta.warps:
        lines.append("  " + _warp(warp))
    waited = {
        id(p.blocked.signal)
        for warp in cta.warps
        for p in warp.agent.parked
        if p.blocked.signal is not None
    }
    for offset in sorted(cta.barriers):
        barrier = cta.barriers[offset]
        lines.append(f"  {barrier}" + ("   <- waited for" if id(barrier.signal) in waited else ""))
    for number in sorted(cta.named):
        if cta.named[number].arrived:
            lines.append(f"  {cta.named[number]}")
    if cta.tmem.allocations:
        lines.append(f"  {cta.tmem}")
    return lines[:1] + lines[1 : _MOST + 1] + (["  ..."] if len(lines) > _MOST + 1 else [])


def _warp(warp: Any) -> str:
    agent = warp.agent
    role = f" ({warp.name})" if getattr(warp, "name", "") else ""
    head = f"warp {warp.warp_id}{role}: "
    if agent.done:
        return head + "exited"
    if not agent.parked:
        return head + "running"
    parts = []
    for p in agent.parked:
        lanes = int(p.mask.sum())
        where = f" source {p.instr.source[0]}:{p.instr.source[1]}" if p.instr.source else ""
        parts.append(
            f"{lanes} lanes at PTX line {p.instr.line}{where}: {p.instr.text[:90]} | waits for "
            f"{p.blocked.why}"
        )
    return head + "; ".join(parts)
