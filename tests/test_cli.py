"""`python -m moe`: every command, its tables, and errors as one line with exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe import MoE, MoEConfig, load_checkpoint
from moe import __main__ as cli
from moe.demo import heavy_tailed, run_demo
from moe.explain import MODELS, explain, multiply_adds, packed_bytes
from moe.inspect_checkpoint import HEADINGS, inspect
from tests.checkpoints import (
    QWEN,
    E,
    H,
    I,
    K,
    compressed,
    dividing,
    e4m3,
    expert_tensors,
    layer,
    write,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    gen = torch.Generator().manual_seed(0)
    router = {"model.layers.0.mlp.gate.weight": torch.randn(E, H, generator=gen)}
    return write(tmp_path / "model", expert_tensors(layer()) | router, QWEN)


def run(*arguments: object) -> int:
    return cli.main([str(a) for a in arguments])


def save_x(path: Path, **more: torch.Tensor) -> Path:
    x = torch.randn(5, H, generator=torch.Generator().manual_seed(1)).bfloat16()
    save_file({"x": x, **more}, str(path))
    return path


def test_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = save_x(tmp_path / "x.safetensors")
    out = tmp_path / "y.safetensors"
    assert run("run", "--checkpoint", folder, "--layer", 0, "--input", source, "--out", out) == 0
    cfg, weights, extras = load_checkpoint(folder, 0)
    want = MoE(cfg, weights, **extras.router())(load_file(source)["x"])
    assert torch.equal(load_file(out)["y"], want)
    shown = capsys.readouterr().out
    for part in ("modelopt", "SwiGLU", "torch", f"(5, {H}) bfloat16", "nvfp4, per_token"):
        assert part in shown, part


def test_run_with_routing_of_the_caller(folder: Path, tmp_path: Path) -> None:
    ids = torch.tensor([[0, 1]] * 5)
    mix = torch.full((5, K), 0.5)
    source = save_x(tmp_path / "x.safetensors", topk_ids=ids, topk_weights=mix)
    out = tmp_path / "y.safetensors"
    given = ("run", "--checkpoint", folder, "--layer", 0, "--input", source, "--out", out)
    assert run(*given, "--backend", "reference", "--activations", "bf16") == 0
    cfg, weights, _ = load_checkpoint(folder, 0)
    moe = MoE(cfg, weights, backend="reference", activations="bf16")
    assert torch.equal(load_file(out)["y"], moe.experts(load_file(source)["x"], ids, mix))


def test_activations_are_those_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    write(folder, load_file(folder / "model.safetensors"),
          QWEN | {"quantization_config": {"quant_algo": "W4A16_NVFP4"}})  # fmt: skip
    source, out = save_x(tmp_path / "x.safetensors"), tmp_path / "y.safetensors"
    assert run("run", "--checkpoint", folder, "--layer", 0, "--input", source, "--out", out) == 0
    cfg, weights, extras = load_checkpoint(folder, 0)
    moe = MoE(cfg, weights, activations="bf16", **extras.router())
    assert torch.equal(load_file(out)["y"], moe(load_file(source)["x"]))


def test_inspect(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    want = dividing(layer())
    want.down[0][2, 4, :24] = 0x80  # 3 blocks of zeros
    want.down[1][0, :2, 1] = 0x7E  # 448, twice
    tensors = expert_tensors(want, compressed) | expert_tensors(
        layer(), prefix="model.layers.5.mlp."
    )
    folder = write(tmp_path, tensors, QWEN)
    tables = list(inspect(folder))
    assert [t.title for t in tables] == [
        f"layer 0: {E} experts, compressed-tensors",
        f"layer 5: {E} experts, modelopt",
    ]
    assert [row[0] for row in tables[0].rows] == ["gate", "up", "down"]
    down = dict(zip(HEADINGS, tables[0].rows[2], strict=True))
    g = want.down[2]
    in_use = e4m3(want.down[1]).float()
    in_use[2, 4, :3] = float("nan")
    in_use = in_use[~in_use.isnan()]
    assert down["N x K"] == f"{H} x {I}" and down["blocks"] == str(E * H * I // 16)
    assert down["zero"] == "3" and down["at 448"] == "2" and down["inexact"] == "0"
    assert down["block scale"] == f"{float(in_use.min()):.3g}..448"
    assert down["global scale"] == f"{g.min():.3g}..{g.max():.3g}"
    assert down["input scale"] == "none"
    assert run("inspect", folder, "--layer", 5) == 0
    shown = capsys.readouterr().out
    assert "layer 5" in shown and "layer 0" not in shown


def test_inspect_reads_the_shapes_of_a_model_it_does_not_know(tmp_path: Path) -> None:
    folder = write(tmp_path, expert_tensors(layer(gated=False)), {"model_type": "of_tomorrow"})
    (table,) = inspect(folder)
    assert [row[:2] for row in table.rows] == [("up", f"{I} x {H}"), ("down", f"{H} x {I}")]


def test_inspect_of_plain_weights(tmp_path: Path) -> None:
    """The scales are those that loading gives: gate and up share theirs."""
    gen = torch.Generator().manual_seed(0)
    tensors = {}
    for e in range(E):
        for name, shape in (("gate", (I, H)), ("up", (I, H)), ("down", (H, I))):
            tensors[f"model.layers.0.mlp.experts.{e}.{name}_proj.weight"] = torch.randn(
                shape, generator=gen
            )
    folder = write(tmp_path, tensors, QWEN)
    (table,) = inspect(folder)
    weights = load_checkpoint(folder, 0)[1]
    column = HEADINGS.index("global scale")
    for row, g in zip(table.rows, (weights.g13[:, 0], weights.g13[:, 1], weights.g2), strict=True):
        assert row[column] == f"{float(g.min()):.3g}..{float(g.max()):.3g}"


def test_backends(capsys: pytest.CaptureFixture) -> None:
    assert run("backends", "--device", "cpu") == 0
    shown = capsys.readouterr().out
    for name in ("sm100", "sm90", "sim", "torch", "reference"):
        assert name in shown


@pytest.mark.parametrize("model", list(MODELS))
def test_explain(model: str, capsys: pytest.CaptureFixture) -> None:
    assert run("explain", model, "--tokens", 3) == 0
    shown = capsys.readouterr().out
    assert f"{MODELS[model].num_experts} experts" in shown and "combine" in shown


def test_explain_counts(folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert packed_bytes(2, 32) == 2 * 16 + 2 * 2
    steps = {s.name: s.nbytes for s in explain(MoEConfig(32, 16, 4, 2), 3)}
    assert steps["tokens"] == 3 * 32 * 2
    assert steps["quantise x"] == 3 * (16 + 2 + 4)
    assert steps["L1"] == 4 * 32 * (16 + 2)  # 6 rows: all 4 experts
    assert {s.name: s.nbytes for s in explain(MoEConfig(32, 16, 4, 2), 1)}["L1"] == 2 * 32 * 18
    assert multiply_adds(MoEConfig(32, 16, 4, 2), 3) == 6 * (32 * 32 + 16 * 32)
    assert run("explain", folder) == 0
    assert f"{E} experts, top {K}" in capsys.readouterr().out


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("demo", "--folder", tmp_path, "--tokens", 8) == 0
    shown = capsys.readouterr().out
    assert "quantise x" in shown and "backend torch" in shown
    result = run_demo(tmp_path)
    assert result.differing == 0 and result.distance == 0  # a CPU: the bits of the specification
    errors = {r.stage: r.error for r in result.rows if r.error == r.error}
    assert all(0 < e < 0.25 for e in errors.values()), errors
    assert errors["combine"] == errors["whole layer (torch)"]


def test_the_demo_fails_when_the_layer_is_wrong(tmp_path: Path, monkeypatch) -> None:
    original = MoE.forward
    monkeypatch.setattr(MoE, "forward", lambda self, x: original(self, x) * 1.01)
    assert run("demo", "--folder", tmp_path, "--tokens", 8) == 2


def test_heavy_tails() -> None:
    """The outliers are there: the demo would prove little on normal weights."""
    w = heavy_tailed((512, 512), torch.Generator().manual_seed(0), 1.0)
    normal = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    assert float(w.abs().max() / w.std()) > 2 * float(normal.abs().max() / normal.std())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("inspect", "nowhere"), "error: nowhere does not exist"),
        (("explain", "no-such-model"), "error: 'no-such-model' is neither a path nor one of"),
        (("explain", "--tokens", "-1"), "error: --tokens must be 0 or more"),
        (("demo", "--tokens", "0"), "error: --tokens must be 1 or more, got 0"),
        (
            ("run", "--checkpoint", "nowhere", "--layer", 0, "--input", "none", "--out", "y"),
            "error: ",
        ),
    ],
)
def test_errors_are_one_line(arguments: tuple, message: str, capsys) -> None:
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(message) and shown.err.count("\n") == 1 and not shown.out


def test_run_refuses_an_input_it_cannot_use(folder: Path, tmp_path: Path, capsys) -> None:
    source, out = tmp_path / "x.safetensors", tmp_path / "y.safetensors"
    given = ("run", "--checkpoint", folder, "--layer", 0, "--input", source, "--out", out)
    for tensors, message in (
        ({"y": torch.ones(2, H)}, "must hold x"),
        ({"x": torch.ones(2, H), "topk_ids": torch.zeros(2, K)}, "must hold x"),
        ({"x": torch.ones(2, H + 1)}, rf"x must be (T, {H})"),
        ({"x": torch.ones(2, H, dtype=torch.float64)}, "x must be bfloat16"),
    ):
        save_file(tensors, str(source))
        assert run(*given) == 2
        assert message in capsys.readouterr().err
    source.write_bytes(b"not a safetensors file")
    assert run(*given) == 2
    assert not out.exists()
    without = write(tmp_path / "routerless", expert_tensors(layer()), QWEN)
    save_x(source)
    given = ("run", "--checkpoint", without, "--layer", 0, "--input", source, "--out", out)
    assert run(*given) == 2
    assert "has no router" in capsys.readouterr().err


def test_as_a_program() -> None:
    """No traceback; argparse's own errors have the same exit code."""
    for arguments in (["inspect", "nowhere"], ["run"], ["dance"]):
        done = subprocess.run(
            [sys.executable, "-m", "moe", *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
