"""Timeline and counters."""

from __future__ import annotations

import itertools
import json

import numpy as np

from cute_kernels.sim.asyncops import AsyncOps
from cute_kernels.sim.trace import Trace
from tests.sim.fakes import LANE0, Machine
from tests.sim.test_checks import STEPS, TILE_A, TILE_B, Pipeline


def traced(pipeline: Pipeline) -> Trace:
    trace = Trace()
    pipeline.m.trace = trace
    pipeline.m.async_ops = AsyncOps(trace)
    pipeline.run()
    return trace


def test_trace_is_valid_and_complete(tmp_path):
    trace = traced(Pipeline(seed=3))
    trace.save(tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    events = data["traceEvents"]
    for e in events:
        assert {"name", "ph", "pid", "tid"} <= set(e)
        assert e["ph"] in "MXi"
        if e["ph"] == "X":
            assert e["dur"] > 0 and e["ts"] >= 0
    names = [e["name"] for e in events if e.get("cat") == "async"]
    assert names.count("mma") == 4 * STEPS
    assert names.count("commit") == STEPS + 1
    assert names.count("load") >= 2 * STEPS
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {
        "warp 0",
        "tma",
        "tensor",
    }
    assert any(e.get("cat") == "wait" for e in events)


def test_slices_of_one_row_nest_or_follow():
    trace = traced(Pipeline(seed=5))
    rows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in trace.events:
        if e.get("cat") in ("async", "wait"):
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in rows.values():
        spans.sort()
        for (a, b), (c, d) in itertools.pairwise(spans):
            assert c >= b or d <= b or (a == c), "overlap without nesting"


def test_limit_counts_what_it_drops():
    trace = Trace(limit=5)
    p = Pipeline()
    p.m.trace, p.m.async_ops = trace, AsyncOps(trace)
    p.run()
    assert trace.dropped > 0 and trace.as_json()["otherData"]["dropped"] == trace.dropped


def test_counters_of_the_pipeline():
    p = Pipeline(seed=2)
    p.run()
    total = p.m.counters.total()
    assert total["mma"] == 4 * STEPS
    assert total["macs"] == 4 * STEPS * 128 * 32 * 16
    assert total["tma_loads"] == 2 * STEPS
    assert total["tma_load_bytes"] == total["tma_fill_bytes"] == STEPS * (TILE_A + TILE_B)
    assert total["tmem_load_bytes"] == 128 * 32 * 4
    rows = p.m.counters.by_warp()
    assert "mma" in rows[1] and "mma" not in rows[0]
    assert rows[0]["tma_loads"] == 2 * STEPS
    table = p.m.counters.table()
    assert "tma_load_bytes" in table and len(table.splitlines()) == 8
    assert sum(p.m.counters.waits_by.values()) == total["waits"]
    shown = repr(p.m.counters)
    assert shown.startswith("Counters(") and f"mma={total['mma']}" in shown


def test_instructions_come_from_the_interpreter():
    m = Machine()
    m.add(0, "nanosleep.u32 1;" * 3, LANE0)
    m.run()
    assert m.counters.total()["instructions"] == 3
    assert np.all([v >= 0 for v in m.counters.total().values()])
