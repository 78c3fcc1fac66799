"""Formulas and invariants of the B200 forecast."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from profiling import model_validation as validation
from profiling.events import Event, Op, Stream, mufu_per_kb
from profiling.model_constants import TABLE, Machine, knobs
from profiling.model_grid import Family, Model, Shape, Steady, between, routed, spread
from profiling.replay import mma_clocks, replay
from tests.profiling.conftest import PAIR

M = Machine()
RATE = M.share(148)


# ---- constants


def test_every_constant_is_inside_its_range_and_has_a_source() -> None:
    for name, c in TABLE.items():
        assert c.low <= c.value <= c.high, name
        assert c.source or not c.unit, name
    assert {n for n, _, _ in knobs()} >= {"fabric", "hbm", "issue"}
    assert "mufu" not in {n for n, _, _ in knobs()}


def test_a_machine_refuses_unknown_constants() -> None:
    assert M.with_(hbm=7.1).hbm == 7.1
    assert M.hbm == TABLE["hbm"].value
    with pytest.raises(KeyError, match="no constant"):
        M.with_(hbmm=7.1)


def test_more_active_sms_have_less_each() -> None:
    shares = [M.share(n) for n in (1, 40, 74, 148)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == M.fill
    assert M.share(148) * 148 * M.clock == pytest.approx(M.fabric * 1e3)
    assert (M.usable_sms(2), M.usable_sms(4), M.usable_sms(8)) == (148, 132, 120)


@pytest.mark.parametrize(
    ("n", "copies", "published"),
    [
        (64, 1, 48.2),
        (128, 1, 64.2),
        (256, 1, 128.2),
        (64, 2, 43.5),
        (128, 2, 64.2),
        (256, 2, 128.2),
    ],
)
def test_mma_intervals_are_the_published_ones(n: int, copies: int, published: float) -> None:
    assert mma_clocks(Op("mma", n, copies), M) == pytest.approx(published, rel=0.09)


# ---- replay


def pipeline(size: int = 16384, steps: int = 8, instructions: int = 10) -> Stream:
    """A warp that loads into two stages, a warp that waits, multiplies, commits and releases."""
    ops: list[Op] = []
    load, mma = [], []
    for step in range(steps):
        stage, phase = step % 2, step // 2
        if phase:
            load.append(Event(instructions, "wait", (2 + stage, phase - 1)))
        ops.append(Op("load", size, 1, (1, step), [(stage, phase, 1)]))
        load.append(Event(instructions, "issue", (), [len(ops) - 1]))
        ops += [Op("mma", 256, 1), Op("commit", 0, 1, (), [(2 + stage, phase, 1)])]
        mma.append(Event(instructions, "wait", (stage, phase)))
        mma.append(Event(0, "issue", (), [len(ops) - 2]))
        mma.append(Event(0, "issue", (), [len(ops) - 1]))
    return Stream("k", 1, 1, [(0, 0), (0, 1)], [load, mma], ops)


def test_one_load_takes_issue_bytes_latency_and_wake() -> None:
    stream = pipeline(steps=1)
    got = replay(stream, M, 10.0, latency=500.0)
    begin = 10 * M.issue + M.tma_issue + 16384 / 10 + 500 + M.hop
    assert got.mma_ends == (pytest.approx(begin + 128),)
    assert got.fabric == 16384
    assert got.mma_busy == 128


def test_loads_queue_for_the_fabric() -> None:
    slow = replay(pipeline(steps=2), M, 10.0, latency=500.0).mma_ends
    assert slow[1] - slow[0] == pytest.approx(16384 / 10)


def test_two_stages_hide_no_more_than_two_loads() -> None:
    """With nothing but latency, two loads a round trip: the MMA frees a stage, the load returns."""
    ends = replay(pipeline(size=1, steps=12), M, 1e9, latency=5000.0).mma_ends
    assert (ends[11] - ends[3]) / 4 == pytest.approx(5000, rel=0.1)


@pytest.mark.parametrize("change", ["size", "rate", "latency", "issue"])
def test_more_of_anything_is_never_faster(change: str) -> None:
    times = []
    for factor in (1, 2, 4):
        stream = pipeline(size=4096 * (factor if change == "size" else 1))
        machine = M.with_(issue=float(factor)) if change == "issue" else M
        latency = 700.0 * (factor if change == "latency" else 1)
        rate = 60.0 / (factor if change == "rate" else 1)
        times.append(replay(stream, machine, rate, latency).end)
    assert times == sorted(times)
    assert times[0] < times[2]


def test_stored_bytes_hold_up_loads() -> None:
    stream = pipeline()
    stream.warps[0][0].stored = 10**6
    plain, stored = replay(pipeline(), M, RATE), replay(stream, M, RATE)
    assert stored.fabric - plain.fabric == pytest.approx(10**6 * M.store_weight)
    assert stored.mma_ends[-1] - plain.mma_ends[-1] > 0.9 * 10**6 * M.store_weight / RATE


def test_a_box_in_flight_in_the_other_sm_is_not_loaded_again() -> None:
    ops = [Op("load", 4096, 1, (1, 0), [(cta, 0, 1)]) for cta in (0, 1)]
    warps = [[Event(1, "issue", (), [cta]), Event(0, "wait", (cta, 0))] for cta in (0, 1)]
    stream = Stream("k", 1, 2, [(0, 0), (1, 0)], warps, ops)
    assert replay(stream, M, RATE).fabric == 4096
    ops[1].box = (1, 8)
    assert replay(stream, M, RATE).fabric == 8192


def test_tiles_must_divide_the_mmas() -> None:
    timing = replay(pipeline(), M, RATE)
    assert timing.tile_ends(4)[-1] == timing.mma_ends[-1]
    with pytest.raises(ValueError, match="equal tiles"):
        timing.tile_ends(3)


def test_barriers_hold_every_member() -> None:
    late = [Event(1000, "sync", (7, 0)), Event(0, "other")]
    early = [Event(1, "sync", (7, 0)), Event(0, "other")]
    got = replay(Stream("k", 1, 1, [(0, 0), (0, 1)], [late, early], []), M, RATE)
    assert got.end == pytest.approx(1000 * M.issue + M.named_barrier)
    cluster = [Event(5, "cluster_arrive"), Event(0, "cluster_wait"), Event(0, "other")]
    slow = [dataclasses.replace(e, instructions=e.instructions * 10) for e in cluster]
    got = replay(Stream("k", 2, 2, [(0, 0), (1, 0)], [cluster, slow], []), M, RATE)
    assert got.end == pytest.approx(50 * M.issue + M.cluster_hop)


def test_special_functions_slow_the_instructions_behind_a_tmem_load() -> None:
    events = [Event(0, "ld", (4096,)), Event(10, "wait_ld"), Event(100, "other")]
    plain = Stream("k", 1, 1, [(0, 0)], [events], [])
    special = dataclasses.replace(plain, mufu_per_kb=8.0)
    assert replay(special, M, RATE).end - replay(plain, M, RATE).end == pytest.approx(
        4 * 8 * M.mufu - 100 * M.issue
    )


def test_special_functions_are_counted_per_byte_of_tmem() -> None:
    class Instr:
        def __init__(self, base: str, *mods: str) -> None:
            self.base, self.mods = base, mods

    text = [Instr("tcgen05", "ld", "sync", "aligned", "32x32b", "x32", "b32")]
    text += [Instr("ex2", "approx", "ftz", "f32")] * 3 + [Instr("add", "f32")]
    assert mufu_per_kb(text) == pytest.approx(3 * 1024 / 4096)
    assert mufu_per_kb(text[1:]) == 0.0


# ---- the grid


class Fixed(Model):
    """A kernel that takes 100 clocks a tile, and nothing else."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))

    def steady(
        self, family: Family, k: int, machine: Machine, rate: float, latency: float
    ) -> Steady:
        return Steady(0.0, 100.0, 0.0, 1000.0, 10.0)


@pytest.mark.parametrize(("tiles", "waves"), [(1, 0), (74, 0), (75, 1), (148, 1), (149, 2)])
def test_tiles_run_in_waves_over_the_clusters(tiles: int, waves: int) -> None:
    shape = Shape((256 * tiles,), 256, 512)
    got = Fixed().forecast(PAIR, shape, M)
    assert got.tiles == tiles
    assert got.us == pytest.approx(M.launch + waves * 100 / M.clock / 1e3)


def test_empty_experts_cost_nothing() -> None:
    assert Shape((0, 0, 256), 512, 512).tiles(PAIR) == 2
    weights = 512 * 512 * 9 / 16
    rows = 256 * (512 * 9 / 16 + 512 * 2)
    assert Shape((0, 0, 256), 512, 512).dram_bytes("bf16") == weights + rows


def test_in_between_the_larger_bound_holds() -> None:
    full, alone = Steady(100, 80, 10, 800, 5), Steady(50, 40, 5, 800, 5)
    assert between(full, alone, (10.0, 100.0), 10.0).first == pytest.approx(100)
    assert between(full, alone, (10.0, 100.0), 100.0).first == pytest.approx(50)
    assert between(full, alone, (10.0, 100.0), 16.0).period == pytest.approx(50)
    assert between(full, alone, (10.0, 100.0), 40.0).period == pytest.approx(40)


def test_forecasts_of_a_recorded_kernel_are_monotone(streams: Path) -> None:
    model = Model(streams)
    assert model.has(PAIR)
    base = Shape(spread(8192, 4), 1024, 768)
    us = model.forecast(PAIR, base, M).us
    assert model.forecast(PAIR, dataclasses.replace(base, k=1024), M).us > us
    assert model.forecast(PAIR, dataclasses.replace(base, n=2048), M).us > us
    assert model.forecast(PAIR, Shape(spread(16384, 4), 1024, 768), M).us > us
    assert model.forecast(PAIR, base, M.with_(fabric=14.9)).us < us
    assert model.forecast(PAIR, base, M.with_(sms=100)).us > us
    assert model.forecast(PAIR, base, M.with_(hbm=1.0)).us > us
    assert model.forecast(PAIR, base, M.with_(hbm=1.0)).limit == "HBM"


def test_a_kernel_without_recordings_is_refused(streams: Path) -> None:
    other = Family("ours", "bf16", 128, 64)
    assert not Model(streams).has(other)
    with pytest.raises(ValueError, match="two recordings"):
        Model(streams).forecast(other, Shape((256,), 256, 512), M)


def test_routings() -> None:
    assert spread(10, 4) == (3, 3, 2, 2)
    counts = routed(64, 4, 16)
    assert sum(counts) == 256
    assert counts == routed(64, 4, 16)
    assert max(routed(64, 16, 16)) == 64  # nobody is picked twice by a token


# ---- validation


def test_the_published_rows_are_all_there() -> None:
    sets = (validation.LIGHTMOE_POINTS, validation.FLASHINFER_POINTS, validation.MASKED_POINTS)
    assert [len(s) for s in sets] == [14, 5, 14]
    glm = next(r for r in validation.PROJECTIONS if r.name == "GLM-5.2 gate/up")
    assert glm.shape.counts == (4096,) * 16
    kimi = next(r for r in validation.PROJECTIONS if r.name == "Kimi-K3 down")
    assert sum(kimi.shape.counts) == 8192 * 16
    uneven = validation.MASKED_ROWS[0].shape.counts
    assert min(uneven) < 28 * 0.75
    assert max(uneven) > 28 * 1.2


def test_a_fit_finds_the_smallest_error_and_is_judged_on_other_rows() -> None:
    grid = {(13.0, 1.0): [0.0, 0.4, 0.0, 0.4], (14.0, 2.0): [0.1, 0.0, 0.1, 0.0]}
    assert validation.fit(grid, [0, 2]) == (13.0, 1.0)
    assert validation.fit(grid, [1, 3]) == (14.0, 2.0)
    assert max(validation.splits(grid)) == pytest.approx(0.4)
    assert validation.mean_abs([-0.1, 0.3]) == pytest.approx(0.2)


def test_a_report_names_every_row_and_the_wrong_order() -> None:
    point = validation.LIGHTMOE_POINTS[0]
    result = validation.Validation(
        13.5, 2.0, (13.3, 2.0), {"a set": [(point, 0.1)]}, [0.05, 0.07], [1.0, 3.0]
    )
    text = validation.report(result)
    assert "+10.0%" in text
    assert "NOT" not in text
    worse = dataclasses.replace(result, tile_us=[3.0, 1.0])
    assert "NOT the published order" in validation.report(worse)
