"""Counters on kernels whose bytes are known, and the comparison built on them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from profiling import fabric
from profiling.events import Event, Op, Stream
from profiling.model_grid import Family, Shape
from profiling.model_validation import PROJECTIONS
from profiling.specimens import Specimen
from tests.profiling.conftest import PAIR, QUANTISED, TWO_PAIRS, K


@pytest.fixture(scope="module")
def counts(streams: Path) -> dict[Family, fabric.Count]:
    out = {}
    for family in (PAIR, TWO_PAIRS, QUANTISED):
        specimen = fabric.specimen_of(family, K)
        out[family] = fabric.count(Stream.load(specimen.file(streams)), specimen)
    return out


def operand_bytes(rows: int) -> int:
    """Codes and scales of rows of length K."""
    return rows * K // 2 + rows * K // 16


def test_a_pair_loads_each_operand_once(counts: dict[Family, fabric.Count]) -> None:
    got = counts[PAIR]
    assert got.loaded == 2 * operand_bytes(256)
    assert got.filled == got.loaded + 256 * K // 16  # both CTAs need all scales of B
    assert got.stored == 256 * 256 * 2
    assert got.mma == K // 64
    assert got.fabric == got.loaded + 2 * got.stored


def test_two_pairs_share_b(counts: dict[Family, fabric.Count]) -> None:
    assert counts[TWO_PAIRS].loaded == operand_bytes(512) + operand_bytes(256)
    assert counts[TWO_PAIRS].mma == 2 * counts[PAIR].mma
    assert counts[TWO_PAIRS].stored == 2 * counts[PAIR].stored


def test_quantised_output_is_codes_and_scales(counts: dict[Family, fabric.Count]) -> None:
    assert counts[QUANTISED].stored == 256 * 128 // 2 + 256 * 128 // 16
    assert counts[QUANTISED].loaded == counts[PAIR].loaded


def test_epilogue_instructions_are_those_of_eight_warps(
    counts: dict[Family, fabric.Count],
) -> None:
    stored_words = counts[PAIR].stored // 16 // 32  # one instruction stores 16 bytes a lane
    assert counts[PAIR].epilogue > 2 * stored_words
    assert counts[TWO_PAIRS].epilogue == pytest.approx(2 * counts[PAIR].epilogue, rel=0.05)


def test_bytes_in_flight_come_from_the_barriers() -> None:
    loads = [Op("load", 1000, arrivals=[(b, phase, 1)]) for phase in (0, 1) for b in (0, 1, 2)]
    assert fabric.in_flight(Stream(ctas=2, ops=loads)) == 3 * 1000 // 2
    assert fabric.in_flight(Stream(ctas=1, ops=[Op("store", 5)])) == 0


def test_instructions_before_the_accumulator_do_not_count() -> None:
    events = [Event(50, "wait"), Event(7, "ld"), Event(5, "arrive"), Event(900, "exit")]
    assert fabric.epilogue_instructions(Stream(warps=[events, [Event(3, "issue")]])) == 12


def entry(maker: str, output: str, per_tile: int) -> fabric.Entry:
    family = Family(maker, output, 256, 256)
    one = fabric.Count(per_tile, 0, per_tile, 8, 100, 1024, 65536)
    return fabric.Entry(maker, family, float(per_tile), one)


def test_a_goal_can_be_missed() -> None:
    row = next(r for r in PROJECTIONS if r.name == "GLM-5.2 down")
    for ours, met in ((86, True), (88, False)):
        found = [entry("ours", "bf16", ours), entry("lightmoe", "bf16", 100)]
        (line,) = fabric.compare(row, found)
        assert line["met"] is met
        assert line["ratio"] == pytest.approx(ours / 100)
        assert (" ! " in fabric.table([line]).splitlines()[1]) is not met


def test_short_k_has_no_goal() -> None:
    row = next(r for r in PROJECTIONS if r.k < 1024)
    found = [entry("ours", "bf16", 200), entry("lightmoe", "bf16", 100)]
    assert [x["met"] for x in fabric.compare(row, found)] == [True]


def test_rows_of_experts_are_rounded_up_to_tiles() -> None:
    shape = Shape((4682, 1, 0), 4096, 3584)
    assert shape.tiles(PAIR) == (19 + 1) * 16
    assert shape.tiles(TWO_PAIRS) == (10 + 1) * 16


def test_a_stream_survives_its_file(tmp_path: Path) -> None:
    stream = Stream(
        "k", 2, 2, [(0, 1)], [[Event(3, "wait", (4, 5), [0], [(1, 2, 3)], 16)]],
        [Op("load", 64, 2, (9, -1), [(4, 5, 1)])], {"mma": 1}, 0.5,
    )  # fmt: skip
    stream.save(tmp_path / "s")
    again = Stream.load(tmp_path / "s")
    assert again == stream


def test_files_of_different_specimens_differ(tmp_path: Path) -> None:
    a = Specimen("ours", "bf16", 256, 256, 256, 256, K)
    names = {
        dataclasses.replace(a, **change).file(tmp_path)
        for change in ({}, {"k": 1024}, {"pairs": 2}, {"decode": True})
    }
    assert len(names) == 4
