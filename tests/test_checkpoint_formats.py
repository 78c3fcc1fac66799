"""MXFP4 and plain weights: what comes out, against numpy."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from moe import ExpertWeights, MoEConfig, SwiGLUOAI, load_checkpoint
from moe.tensor_files import CheckpointError
from tests import oracle
from tests.checkpoints import (
    F32,
    HF,
    W123,
    assert_biases,
    assert_swizzled,
    quantise_weight,
    tensor,
    write,
)
from tests.oracle import Array

E, K, H, I = 3, 2, 192, 96  # noqa: E741  multiples of 32, and H = 2I
CFG = MoEConfig(H, I, E, K)
DEEPSEEK = {
    "model_type": "deepseek_v4",
    "hidden_size": H,
    "moe_intermediate_size": I,
    "n_routed_experts": E,
    "num_experts_per_tok": K,
    "swiglu_limit": 10.0,
    "quantization_config": {"quant_method": "fp8"},
}
SHAPES = {"gate": (I, H), "up": (I, H), "down": (H, I)}
Mx = dict[str, tuple[Array, Array]]  # role -> codes (E, N, K/2), E8M0 bytes (E, N, K/32)


def mx_weights(seed: int = 0, low: int = 110, high: int = 127) -> Mx:
    """Exponents low .. high, both included."""
    gen = np.random.default_rng(seed)
    out = {}
    for role, (n, k) in SHAPES.items():
        codes = gen.integers(0, 256, (E, n, k // 2), dtype=np.uint8)
        out[role] = codes, gen.integers(low, high + 1, (E, n, k // 32)).astype(np.uint8)
    return out


def mx_values(codes: Array, scale: Array) -> Array:
    """fp64 (N, K)."""
    powers = np.exp2(scale.astype(np.float64) - 127)
    return oracle.decode_codes(codes) * np.repeat(powers, 32, axis=-1)


def deepseek(weights: Mx, scale_dtype: torch.dtype = torch.float8_e8m0fnu) -> dict[str, Tensor]:
    out = {}
    for role, (codes, scale) in weights.items():
        for e in range(E):
            name = f"layers.2.ffn.experts.{e}.{W123[role]}"
            out[f"{name}.weight"] = tensor(codes[e]).view(torch.int8)
            out[f"{name}.scale"] = tensor(scale[e]).view(scale_dtype)
    return out


def decoded(weights: ExpertWeights, e: int) -> dict[str, Array]:
    """fp64 values of the projections of an expert, read back by hand from the canonical layout."""
    l1 = np.zeros((2 * I, H // 16), np.uint8)
    l2 = np.zeros((H, I // 16), np.uint8)
    for out, scale in ((l1, weights.l1_scale[e]), (l2, weights.l2_scale[e])):
        flat = scale.view(torch.uint8).numpy().ravel()
        padded = -(-out.shape[1] // 4) * 4
        for r in range(out.shape[0]):
            for c in range(out.shape[1]):
                tile = r // 128 * 128 * padded + c // 4 * 512
                out[r, c] = flat[tile + r % 32 * 16 + r % 128 // 32 * 4 + c % 4]
    first = oracle.decode(weights.l1_data[e].numpy(), l1)
    g = weights.g13[e].double().numpy()
    down = oracle.decode(weights.l2_data[e].numpy(), l2) * float(weights.g2[e])
    return {"gate": first[0::2] * g[0], "up": first[1::2] * g[1], "down": down}


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_mxfp4_is_kept_exactly(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    """18 binary orders fit (2^-9 .. 2^8); each projection of each expert has its own window."""
    weights = mx_weights()
    for e, shift in enumerate((-80, 0, 60)):
        for _, scale in weights.values():
            scale[e] = (scale[e].astype(int) + shift).astype(np.uint8)
    write(tmp_path, deepseek(weights, scale_dtype), DEEPSEEK)
    cfg, loaded, extras = load_checkpoint(tmp_path, 2)
    assert cfg.activation.limit == 10.0 and cfg.scoring == "sqrtsoftplus"
    assert extras.report.dialect == "mxfp4" and extras.report.inexact_blocks == 0
    for e in range(E):
        got = decoded(loaded, e)
        for role, (codes, scale) in weights.items():
            assert np.array_equal(got[role], mx_values(codes[e], scale[e])), (e, role)
    assert np.array_equal(loaded.l2_data.numpy(), weights["down"][0])  # the codes themselves
    assert np.array_equal(loaded.l1_data[:, 1::2].numpy(), weights["up"][0])


def test_mxfp4_beyond_the_range_of_ue4m3(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Blocks far below the largest: rounded to nearest even and counted, in groups of 16, unless
    their codes still fit or are zero."""
    weights = mx_weights(low=120, high=127)
    codes, scale = weights["gate"]
    scale[1, 0, 0] = 127  # the window is 110 .. 127
    scale[1, 5, :4] = (109, 109, 100, 40)
    codes[1, 5, :64] = 0
    codes[1, 5, 0:16] = 0x22 | 0x88  # codes +-1.0, scale 2^-18: half of it is a code
    codes[1, 5, 16:24] = 0x13  # 1.5 and .5: halves .75 (tie: 1) and .25 (tie: 0)
    codes[1, 5, 24:32] = 0x44  # 2.0: half of it is a code
    codes[1, 5, 32:48] = 0x77  # 6.0 * 2^-10 of a step: rounds to 0
    codes[1, 5, 48:64] = 0x88  # -0
    write(tmp_path, deepseek(weights), DEEPSEEK)
    with caplog.at_level(logging.WARNING, "moe.checkpoint"):
        _, loaded, extras = load_checkpoint(tmp_path, 2)
    assert extras.report.inexact == (("layer 2 expert 1 gate", 3),)
    assert extras.report.inexact_blocks == 3 and "3 blocks of 16" in caplog.text
    want = mx_values(codes[1], scale[1])
    step = 2.0 ** (127 - 17 - 127)  # the smallest scale of the window
    low = np.repeat(scale[1] < 110, 32, axis=-1)
    want = np.where(low, oracle.round_e2m1((want / step).astype(F32)) * step, want)
    got = decoded(loaded, 1)["gate"]
    assert np.array_equal(got, want)
    assert got[5, 32] == step and got[5, 33] == 0.0  # .75 -> 1.0, .25 -> 0
    assert np.signbit(got[5, 96:128]).all()


def test_mxfp4_of_zeros_and_of_tiny_values(tmp_path: Path) -> None:
    weights = mx_weights()
    weights["up"][0][0] = 0x80
    weights["up"][1][0] = 254  # the scale of zeros does not matter
    weights["gate"][1][2] = 0  # 2^-127: below what the fp32 global scale may be (2^-100)
    write(tmp_path, deepseek(weights), DEEPSEEK)
    _, loaded, extras = load_checkpoint(tmp_path, 2)
    assert not decoded(loaded, 0)["up"].any()
    assert [where for where, _ in extras.report.inexact] == ["layer 2 expert 2 gate"]
    assert np.abs(decoded(loaded, 2)["gate"]).max() < 2.0**-108


def test_mxfp4_blocks_of_zeros_have_no_say_in_the_range(tmp_path: Path) -> None:
    """+0 and -0 under the largest and the smallest scale: the others stay exact, the sign stays."""
    weights = mx_weights()
    codes, scale = weights["up"]
    for row, (byte, exponent) in enumerate(((0x00, 254), (0x88, 254), (0x80, 0), (0x08, 0))):
        codes[:, row, 16:32] = byte
        scale[:, row, 1] = exponent
    write(tmp_path, deepseek(weights), DEEPSEEK)
    _, loaded, extras = load_checkpoint(tmp_path, 2)
    assert extras.report.inexact == ()
    for e in range(E):
        got, want = decoded(loaded, e)["up"], mx_values(codes[e], scale[e])
        assert np.array_equal(got, want) and np.array_equal(np.signbit(got), np.signbit(want))


def test_mxfp4_scale_that_is_nan(tmp_path: Path) -> None:
    weights = mx_weights()
    weights["down"][1][2, 7, 1] = 0xFF
    write(tmp_path, deepseek(weights), DEEPSEEK)
    match = r"expert 2 down: layers\.2\.ffn\.experts\.2\.w2\.scale has a NaN .*row 7 block 1$"
    with pytest.raises(CheckpointError, match=match):
        load_checkpoint(tmp_path, 2)


def test_gpt_oss(tmp_path: Path) -> None:
    """blocks and scales of all experts, rows of gate and up in turns, biases, a linear router
    bias."""
    weights = mx_weights()
    gen = np.random.default_rng(1)
    b13 = gen.normal(size=(E, 2 * I)).astype(ml_dtypes.bfloat16)
    b2 = gen.normal(size=(E, H)).astype(ml_dtypes.bfloat16)
    both = {
        i: np.stack([weights["gate"][i], weights["up"][i]], axis=2).reshape(E, 2 * I, -1)
        for i in (0, 1)
    }
    router = torch.randn(E, H, generator=torch.Generator().manual_seed(0)).bfloat16()
    p = "model.layers.0.mlp."
    tensors = {
        f"{p}experts.gate_up_proj_blocks": tensor(both[0].reshape(E, 2 * I, H // 32, 16)),
        f"{p}experts.gate_up_proj_scales": tensor(both[1]),
        f"{p}experts.gate_up_proj_bias": tensor(b13.astype(F32)).bfloat16(),
        f"{p}experts.down_proj_blocks": tensor(weights["down"][0].reshape(E, H, I // 32, 16)),
        f"{p}experts.down_proj_scales": tensor(weights["down"][1]),
        f"{p}experts.down_proj_bias": tensor(b2.astype(F32)).bfloat16(),
        f"{p}router.weight": router,
        f"{p}router.bias": torch.ones(E).bfloat16(),
    }
    config = {
        "model_type": "gpt_oss",
        "hidden_size": H,
        "intermediate_size": I,
        "num_local_experts": E,
        "num_experts_per_tok": K,
        "swiglu_limit": 7.0,
    }
    cfg, loaded, extras = load_checkpoint(write(tmp_path, tensors, config), 0)
    assert cfg == MoEConfig(H, I, E, K, activation=SwiGLUOAI(limit=7.0))
    for e in range(E):
        got = decoded(loaded, e)
        for role, (codes, scale) in weights.items():
            assert np.array_equal(got[role], mx_values(codes[e], scale[e])), (e, role)
    assert_biases(loaded, (b13[:, 0::2].astype(F32), b13[:, 1::2].astype(F32), b2.astype(F32)))
    assert torch.equal(extras.router_weight, router)
    assert torch.equal(extras.router_bias, torch.ones(E).bfloat16())
    assert extras.selection_bias is None


# ---- plain weights ------------------------------------------------------------------------------


def plain_weights(dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """role -> (E, N, K), heavy-tailed, with a block and a row of zeros."""
    gen = torch.Generator().manual_seed(seed)
    out = {}
    for i, (role, shape) in enumerate(SHAPES.items()):
        w = torch.randn(E, *shape, generator=gen) * 0.03 * (i + 1)
        w[:, :, ::37] *= 15
        w[:, 3] = 0
        w[1, 4, 16:32] = 0
        out[role] = w.to(dtype)
    return out


def assert_quantised(loaded: ExpertWeights, weights: dict[str, Tensor]) -> None:
    for e in range(E):
        rows = []
        for p, role in enumerate(("gate", "up")):
            amax = max(float(weights[r][e].abs().max()) for r in ("gate", "up"))  # shared
            g = F32(amax) / F32(2688)
            codes, scale = quantise_weight(weights[role][e].float().numpy(), g)
            assert float(loaded.g13[e, p]) == g
            assert np.array_equal(loaded.l1_data[e, p::2].numpy(), codes)
            rows.append(scale)
        assert_swizzled(loaded.l1_scale[e], np.stack(rows, axis=1).reshape(2 * I, -1))
        g = F32(float(weights["down"][e].abs().max())) / F32(2688)
        codes, scale = quantise_weight(weights["down"][e].float().numpy(), g)
        assert float(loaded.g2[e]) == g
        assert np.array_equal(loaded.l2_data[e].numpy(), codes)
        assert_swizzled(loaded.l2_scale[e], scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_are_quantised_as_modelopt_does(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of some rows: the bytes are those of the whole."""
    monkeypatch.setattr("moe.formats._QUANTIZE_ELEMENTS", 7 * H)
    weights = plain_weights(dtype)
    tensors = {
        f"model.layers.0.mlp.experts.{e}.{HF[role]}.weight": w[e]
        for role, w in weights.items()
        for e in range(E)
    }
    _, loaded, extras = load_checkpoint(write(tmp_path, tensors), 0, config=CFG)
    assert extras.report.dialect == "bf16" and extras.report.inexact == ()
    assert_quantised(loaded, weights)


@pytest.mark.parametrize("across", [True, False])
def test_plain_weights_fused_and_stored_either_way(tmp_path: Path, across: bool) -> None:
    """(E, 2I, H) and (E, H, I); or, as Llama-4 has them, (E, H, 2I) and (E, I, H). H = 2I: only
    the down projection says which."""
    weights = plain_weights(torch.bfloat16)
    both = torch.cat([weights["gate"], weights["up"]], dim=1)
    down = weights["down"]
    p = "model.layers.0.mlp.experts."
    tensors = {
        f"{p}gate_up_proj": both.mT if across else both,
        f"{p}down_proj": down.mT if across else down,
    }
    _, loaded, _ = load_checkpoint(write(tmp_path, tensors), 0, config=CFG)
    assert_quantised(loaded, weights)


def test_a_square_down_projection_follows_its_gate_up(tmp_path: Path) -> None:
    """H = I: only gate_up_proj says which way weights are stored."""
    n = 64
    cfg = MoEConfig(n, n, 1, 1)
    gen = torch.Generator().manual_seed(0)
    both, down = torch.randn(1, 2 * n, n, generator=gen), torch.randn(1, n, n, generator=gen)
    p = "model.layers.0.mlp.experts."
    results = []
    for name, turned in (("n_first", False), ("k_first", True)):
        tensors = {
            f"{p}gate_up_proj": both.mT if turned else both,
            f"{p}down_proj": down.mT if turned else down,
        }
        results.append(load_checkpoint(write(tmp_path / name, tensors), 0, config=cfg)[1])
    for (_, a), (_, b) in zip(*(r.tensors() for r in results), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_plain_weight_that_is_nan(tmp_path: Path) -> None:
    weights = plain_weights(torch.bfloat16)
    for value in (float("nan"), float("inf"), float("-inf")):
        weights["up"][1, 2, 3] = value
        tensors = {
            f"model.layers.0.mlp.experts.{e}.{HF[role]}.weight": w[e]
            for role, w in weights.items()
            for e in range(E)
        }
        write(tmp_path, tensors)
        with pytest.raises(CheckpointError, match=r"expert 1 up: .*weight holds NaN or Inf"):
            load_checkpoint(tmp_path, 0, config=CFG)


# ---- what the quantisation config says about activations ----------------------------------------

CT = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}
WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
CONFIGS = [
    ({"quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_algo": "W4A16_NVFP4"}, "bf16"),
    ({"quant_method": "fp8", "moe_quant_algo": "NVFP4"}, "nvfp4"),
    (CT | {"config_groups": {"g": {"weights": WEIGHTS, "input_activations": None}}}, "bf16"),
    (CT | {"config_groups": {"g": {"weights": WEIGHTS, "input_activations": WEIGHTS}}}, "nvfp4"),
    (None, "nvfp4"),
]


@pytest.mark.parametrize(("quantization", "activations"), CONFIGS)
def test_activations_from_the_quantisation_config(
    tmp_path: Path, quantization: dict | None, activations: str
) -> None:
    config = DEEPSEEK | {"quantization_config": quantization}
    write(tmp_path, deepseek(mx_weights()), config)
    assert load_checkpoint(tmp_path, 2)[2].report.activations == activations


@pytest.mark.parametrize("where", ["config.json", "hf_quant_config.json"])
def test_mixed_precision_names_its_layers(tmp_path: Path, where: str) -> None:
    layers = {
        "layers.2.ffn.experts.0.w1": {"quant_algo": "W4A16_NVFP4"},
        "layers.3.ffn.experts.0.w1": {"quant_algo": "NVFP4"},
        "layers.2.attn.q": {"quant_algo": "FP8"},
    }
    found = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    tensors = deepseek(mx_weights())
    tensors |= {n.replace("layers.2.", "layers.3."): t for n, t in tensors.items()}
    own = found if where == "config.json" else {"quant_algo": "MIXED_PRECISION"}
    write(tmp_path, tensors, DEEPSEEK | {"quantization_config": own})
    if where != "config.json":
        (tmp_path / where).write_text(json.dumps({"quantization": found}))
    assert load_checkpoint(tmp_path, 2)[2].report.activations == "bf16"
    assert load_checkpoint(tmp_path, 3)[2].report.activations == "nvfp4"
