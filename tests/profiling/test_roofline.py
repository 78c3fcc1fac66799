"""Work of the stages against hand counts, published arithmetic and the layer's own buffers."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from cute_kernels import nvfp4
from moe import ExpertWeights, MoEConfig, ReLU2, ranges
from moe.explain import MODELS
from profiling import roofline
from profiling.roofline import FLOWS, PEAKS, REACHED, Share, stages
from tests.cases import ROUTINGS, route, uniform

SMALL = MoEConfig(64, 32, 4, 2)
PRO = MODELS["deepseek-v4-pro"]


def named(cfg: MoEConfig, share: Share, flow: str = "static") -> dict[str, roofline.Stage]:
    return {s.name: s for s in stages(cfg, share, flow)}


def test_a_call_counted_by_hand() -> None:
    """3 tokens, 2 slots each, 6 rows on 3 of 4 experts: H 64, I 32."""
    work = named(SMALL, Share(tokens=3, rows=6, active=3, padded_rows=3 * 128))
    l1, l2 = work["L1"], work["L2"]
    assert l1.flop == 6 * 64 * 64 * 2 and l2.flop == 6 * 32 * 64 * 2
    assert l1.read == {
        "x": 3 * 32, "x scales": 384 * 4, "outer scales": 12, "row_token": 24,
        "weights": 3 * (64 * 32 + 128 * 4),
    }  # fmt: skip
    assert l1.written == {"h": 6 * 16, "h scales": 384 * 4}  # 2 groups of I, stored as 4
    assert l2.read == {"h": 6 * 16, "h scales": 384 * 4, "weights": 3 * (64 * 16 + 128 * 4)}
    assert l2.written == {"o": 6 * 64 * 2}
    assert work["quantize x"].nbytes == 3 * 64 * 2 + 24 + 3 * 32 + 384 * 4 + 12
    assert work["combine"].nbytes == 6 * 128 + 48 + 3 * 128
    assert work["combine"].flop == 0 and work["combine"].intensity == 0


def test_flows_differ_where_they_should() -> None:
    share = Share(3, 6, 3, 384)
    static, per_row, decoded, bf16 = (named(SMALL, share, flow) for flow in FLOWS)
    acc = {"accumulators": 4 * 6 * 64}
    assert per_row["L1"].written == acc == per_row["quantize h"].read
    assert per_row["L1"].read == static["L1"].read
    assert per_row["L2"].read["outer scales"] == 4 * 6
    assert decoded["quantize x"].written["x"] == 2 * 6 * 64 == decoded["L1"].read["x"]
    assert decoded["L1"].written == {"h fp32": 4 * 6 * 32} == decoded["quantize h"].read
    assert decoded["L2"].read["h"] == 2 * 6 * 32 and decoded["L1"].kind == "bf16"
    assert "quantize x" not in bf16 and bf16["L1"].read["x"] == 2 * 3 * 64
    assert bf16["L2"].read["h"] == 2 * 6 * 32
    assert {s.kind for s in bf16.values() if s.flop} == {"bf16"}
    for flow in FLOWS:
        assert {s.range for s in stages(SMALL, share, flow)} <= set(ranges.STAGES)
    with pytest.raises(ValueError, match="flow must be one of"):
        stages(SMALL, share, "fp8")


@pytest.mark.parametrize("gated", [True, False])
def test_weight_bytes_are_those_of_the_packed_tensors(gated: bool) -> None:
    """Odd sizes: 96 rows and 6 groups are stored as 128 and 8."""
    up = torch.zeros(3, 96, 80) if gated else None
    act = {} if gated else {"activation": ReLU2()}
    cfg = MoEConfig(80, 96, 3, 1, **act)
    weights = ExpertWeights.from_bf16(torch.zeros(3, 96, 80), up, torch.zeros(3, 80, 96))
    work = named(cfg, Share(5, 5, 3, 384))
    for stage, data, scale in (
        ("L1", weights.l1_data, weights.l1_scale),
        ("L2", weights.l2_data, weights.l2_scale),
    ):
        assert work[stage].read["weights"] == data.nbytes + scale.nbytes, stage


@pytest.mark.parametrize("routing", ROUTINGS, ids=lambda f: f.__name__)
def test_the_share_of_a_call(routing) -> None:
    ids, _ = route(routing, 70, 12, 3)
    share = Share.of(ids, 4, 4)
    counts = [int((ids == e).sum()) for e in range(4, 8)]
    assert share.rows == sum(counts) and share.active == sum(c > 0 for c in counts)
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]).int()
    assert share.padded_rows == int(nvfp4.grouped_scale_offsets(offsets)[-1])
    assert share.tokens == sum(any(4 <= e < 8 for e in row) for row in ids.tolist())


@pytest.mark.parametrize(("tokens", "top_k"), [(2, 3), (40, 12)])
def test_the_expectation_is_the_mean_of_many_calls(tokens: int, top_k: int) -> None:
    """Few rows: some experts stay idle. About 120 an expert: some need a second scale tile."""
    want = Share.expected(MoEConfig(64, 32, 16, top_k), tokens, ranks=4)
    calls = [Share.of(route(uniform, 4 * tokens, 16, top_k, seed)[0], 4, 4) for seed in range(300)]
    for field in dataclasses.fields(Share):
        values = torch.tensor([float(getattr(c, field.name)) for c in calls])
        expected = getattr(want, field.name)
        error = abs(float(values.mean()) - expected)
        assert error <= 5 * float(values.std()) / math.sqrt(300) + 1e-3 * expected, field.name
    assert len({c.active if top_k == 3 else c.padded_rows for c in calls}) > 1


@pytest.mark.parametrize(
    ("tokens", "rows", "active", "weights_mb", "gflop"),
    [(1, 6, 5.7, 211, 0.8), (16, 96, 41.6, 1546, 13), (64, 384, 48, 1783, 51),
     (8192, 49152, 48, 1784, 6494)],
)  # fmt: skip
def test_against_published_arithmetic(tokens, rows, active, weights_mb, gflop) -> None:
    """DeepSeek-V4-Pro on 8 ranks, counted by others (weights at 4.5 bits)."""
    share = Share.expected(PRO, tokens, ranks=8)
    work = named(PRO, share)
    assert share.rows == rows and share.active == pytest.approx(active, abs=0.05)
    both = work["L1"].read["weights"] + work["L2"].read["weights"]
    assert both / 1e6 == pytest.approx(weights_mb, rel=0.005)
    assert sum(s.flop for s in work.values()) / 1e9 == pytest.approx(gflop, rel=0.05)


def test_roofs() -> None:
    peaks = roofline.Peaks("x", memory=10.0, bf16=100.0, fp4=400.0, source="")
    stage = roofline.Stage("L1", "moe.l1", 800.0, {"a": 30.0}, {"b": 10.0})
    assert stage.memory_seconds(peaks) == 4 and stage.math_seconds(peaks) == 2
    assert stage.seconds(peaks) == 4 and stage.intensity == 20
    bf16 = dataclasses.replace(stage, kind="bf16")
    no_fp4 = dataclasses.replace(peaks, fp4=None)
    assert bf16.math_seconds(peaks) == stage.math_seconds(no_fp4) == 8
    assert roofline.roof_seconds([stage, bf16], peaks) == 12, "stages do not overlap"


@pytest.mark.parametrize("flow", FLOWS)
def test_more_work_is_never_faster(flow: str) -> None:
    for peaks in (*PEAKS.values(), *REACHED.values()):
        times = [
            roofline.roof_seconds(stages(PRO, Share.expected(PRO, t, 8), flow), peaks)
            for t in (0, 1, 3, 64, 500)
        ]
        assert times == sorted(times) and times[0] == 0 < times[1]


def test_reached_is_below_the_datasheet() -> None:
    for name, reached in REACHED.items():
        sheet = PEAKS[name]
        assert reached.memory < sheet.memory and reached.bf16 <= sheet.bf16
        assert (reached.fp4 is None) == (sheet.fp4 is None)
    assert all(p.source for p in (*PEAKS.values(), *REACHED.values()))


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out, png = tmp_path / "r.json", tmp_path / "r.png"
    points = tmp_path / "bench.json"
    row = {
        "tokens": 8,
        "backend": "x",
        "stages": [{"name": "L1", "flop": 1e9, "bytes": 1e6, "us": 9}],
    }
    points.write_text(json.dumps({"rows": [row]}))
    arguments = ["--case", "qwen3-30b-a3b", "--tokens", "8", "--ranks", "4", "--json", str(out)]
    assert roofline.main([*arguments, "--png", str(png), "--points", str(points)]) == 0
    shown = capsys.readouterr().out
    assert "8 TB/s" in shown and "L1" in shown and "vendor datasheet" in shown
    (saved,) = json.loads(out.read_text())["rows"]
    assert saved["roof_us"] == pytest.approx(sum(s["roof_us"] for s in saved["stages"]))
    assert png.read_bytes().startswith(b"\x89PNG")
    for bad in (["--ranks", "7"], ["--case", "no-such"], ["--gpu", "h100", "--reached"]):
        assert roofline.main(bad) == 2
        assert capsys.readouterr().err.startswith("error: ")
