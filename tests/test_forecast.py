"""The closed form: its terms against configurations, its invariants."""

from __future__ import annotations

import pytest

from cute_kernels import forecast as fc
from cute_kernels.config import FP4_HIDDEN, GemmConfig, choose_config

PAIR = GemmConfig(2, 256)
SHARED_ROWS = GemmConfig(2, 256, columns=2)
DECODE = GemmConfig(1, 64, decode=True)
K = 2048


def us(config: GemmConfig, counts: list[int], n: int = 4096, k: int = K, **more: object) -> float:
    return fc.forecast(config, counts, n, k, fp4_output=False, **more).us  # type: ignore[arg-type]


def test_fabric_bytes_of_a_pair() -> None:
    operands = (256 + 256) * (K // 2 + K // 16)
    assert fc.fabric_bytes(PAIR, K, False) == operands + 2 * 256 * 256 * 2
    assert fc.fabric_bytes(PAIR, K, True) == operands + 2 * 256 * 128 * (1 / 2 + 1 / 16)


def test_two_pairs_load_shared_rows_once() -> None:
    operands = (256 + 512) * (K // 2 + K // 16)
    assert fc.fabric_bytes(SHARED_ROWS, K, False) == operands + 2 * 256 * 512 * 2


def test_decode_bytes_grow_in_steps_of_rows() -> None:
    scales = 256 * K / 16
    for rows, step in ((1, 16), (16, 16), (17, 32), (64, 64)):
        loaded = fc.fabric_bytes(DECODE, K, False, rows) - 2 * 128 * rows * 2
        assert loaded == (128 + step) * K / 2 + scales


def test_mma_clocks_follow_the_port_at_small_n() -> None:
    assert fc.mma_clocks(PAIR, K) == K / 64 * 128
    assert fc.mma_clocks(GemmConfig(1, 64), K) == K / 64 * 48
    assert fc.mma_clocks(DECODE, K, 16) == K / 64 * 36


def test_more_work_is_never_faster() -> None:
    base = us(PAIR, [1024] * 8)
    assert us(PAIR, [1025] + [1024] * 7) >= base
    assert us(PAIR, [1024] * 9) > base
    assert us(PAIR, [1024] * 8, n=8192) > base
    assert us(PAIR, [1024] * 8, k=4096) > base
    assert us(PAIR, [1024] * 8, hbm=(0.5, 0.5)) > base


def test_fewer_sms_are_never_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [4096] * 8
    times = []
    for sms in (148, 132, 64, 8):
        monkeypatch.setattr(fc, "SMS", dict.fromkeys(fc.SMS, sms))
        times.append(us(PAIR, counts, k=256))
    assert times == sorted(times)


def test_empty_experts_cost_nothing_and_no_rows_are_refused() -> None:
    assert us(DECODE, [8, 0, 0, 8]) == us(DECODE, [8, 8])
    with pytest.raises(ValueError, match="needs rows"):
        fc.forecast(PAIR, [0, 0], 256, 512, fp4_output=False)


def test_decode_waits_for_dram_and_prefill_for_the_fabric() -> None:
    decode = fc.forecast(DECODE, [4] * 48, 7168, 3072, fp4_output=False)
    assert decode.limit == "HBM"
    weights = 48 * 7168 * 3072 * fc.FP4
    assert decode.us > weights / 5.15e6
    assert decode.low < weights / 7.1e6 + 15 < decode.high
    assert fc.forecast(PAIR, [4096] * 16, 4096, 6144, fp4_output=False).limit == "fabric"


def test_published_rows_are_met() -> None:
    """LightMoE's 256x256 pair moves the bytes of ours: GLM-5.2 gate/up 627.7 us, down 406.7 us."""
    assert us(PAIR, [4096] * 16, 4096, 6144) == pytest.approx(627.7, rel=0.05)
    assert us(PAIR, [4096] * 16, 6144, 2048) == pytest.approx(406.7, rel=0.05)


def test_every_chosen_configuration_has_a_forecast() -> None:
    for rows in (1, 64, 128, 4096):
        config, got = fc.forecast_chosen([rows] * 8, 4096, K, fp4_output=True)
        assert config == choose_config(rows * 8, 8, 4096, K, FP4_HIDDEN)
        assert got.low < got.us < got.high
        assert got.waves >= 1
        assert "not measured" in got.note
