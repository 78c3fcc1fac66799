"""config.json of each public model type, as far as the experts go, and the MoEConfig it means."""

from __future__ import annotations

from typing import Any

import pytest

from moe import MoEConfig, ReLU2, SwiGLU, SwiGLUOAI
from moe.explain import MODELS
from moe.model_config import fused, moe_config
from moe.tensor_files import CheckpointError

Config = dict[str, Any]

CASES: dict[str, tuple[Config, MoEConfig]] = {
    "deepseek_v3": (
        {
            "hidden_size": 7168,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
        },
        MoEConfig(7168, 2048, 256, 8, "sigmoid", 8, 4, True, 2.5),
    ),
    "deepseek_v4": (
        {
            "hidden_size": 4096,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "swiglu_limit": 10.0,
        },
        MoEConfig(
            4096, 2048, 256, 6, "sqrtsoftplus", routed_scaling_factor=1.5, activation=SwiGLU(10.0)
        ),
    ),
    "qwen3_moe": (
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        MoEConfig(2048, 768, 128, 8),
    ),
    "qwen3_next": (
        {
            "hidden_size": 2048,
            "moe_intermediate_size": 512,
            "num_experts": 512,
            "num_experts_per_tok": 10,
        },
        MoEConfig(2048, 512, 512, 10),
    ),
    "gpt_oss": (
        {
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 128,
            "experts_per_token": 4,
            "swiglu_limit": 7.0,
        },
        MoEConfig(2880, 2880, 128, 4, activation=SwiGLUOAI(limit=7.0)),
    ),
    "glm4_moe": (
        {
            "hidden_size": 5120,
            "moe_intermediate_size": 1536,
            "n_routed_experts": 160,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        },
        MoEConfig(5120, 1536, 160, 8, "sigmoid", routed_scaling_factor=2.5),
    ),
    "minimax": (
        {
            "hidden_size": 3072,
            "intermediate_size": 1536,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
            "scoring_func": "sigmoid",
            "hidden_act": "silu",
        },
        MoEConfig(3072, 1536, 256, 8, "sigmoid"),
    ),
    "minimax_m3": (
        {
            "hidden_size": 6144,
            "intermediate_size": 3072,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "routed_scaling_factor": 2.0,
        },
        MoEConfig(6144, 3072, 128, 4, "sigmoid", routed_scaling_factor=2.0, activation=SwiGLUOAI()),
    ),
    "nemotron_h": (
        {
            "hidden_size": 4096,
            "moe_latent_size": 1024,
            "moe_intermediate_size": 2688,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 5.0,
        },
        MoEConfig(1024, 2688, 512, 22, "sigmoid", routed_scaling_factor=5.0, activation=ReLU2()),
    ),
    "mixtral": (
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        MoEConfig(4096, 14336, 8, 2),
    ),
    "llama4_text": (
        {
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
        },
        MoEConfig(5120, 8192, 16, 1, "sigmoid", renormalize=False, weight_on_input=True),
    ),
}


@pytest.mark.parametrize("kind", list(CASES))
def test_public_model_types(kind: str) -> None:
    config, want = CASES[kind]
    assert moe_config({"model_type": kind, **config}) == want
    assert fused({"model_type": kind}).order == ("interleaved" if kind == "gpt_oss" else "gate_up")


@pytest.mark.parametrize(("kind", "want"), [("qwen3_moe", False), ("qwen3_next", True)])
def test_what_a_config_leaves_out_is_the_default_of_its_class(kind: str, want: bool) -> None:
    config = dict(CASES["qwen3_moe"][0])
    del config["norm_topk_prob"]
    assert moe_config({"model_type": kind, **config}).renormalize is want
    assert not moe_config({"model_type": kind, **config, "norm_topk_prob": False}).renormalize


def test_limits_that_are_switched_off() -> None:
    config = {"model_type": "deepseek_v4", **CASES["deepseek_v4"][0]}
    for off in (None, 0):
        assert moe_config({**config, "swiglu_limit": off}).activation == SwiGLU()


@pytest.mark.parametrize("kind", list(CASES))
def test_a_field_that_is_missing_or_impossible_is_named(kind: str) -> None:
    config, _ = CASES[kind]
    with pytest.raises(CheckpointError, match=rf"{kind} model lacks 'hidden_size'"):
        moe_config({"model_type": kind, **{k: v for k, v in config.items() if k != "hidden_size"}})
    with pytest.raises(CheckpointError, match=rf"{kind} model: .*multiple of 16"):
        moe_config({"model_type": kind, **config, "hidden_size": 100, "moe_latent_size": None})


def test_the_models_of_explain_are_those_of_their_configs() -> None:
    for name, kind in (
        ("deepseek-v3", "deepseek_v3"),
        ("deepseek-v4-flash", "deepseek_v4"),
        ("gpt-oss-120b", "gpt_oss"),
        ("llama-4-scout", "llama4_text"),
        ("minimax-m2", "minimax"),
        ("mixtral-8x7b", "mixtral"),
        ("qwen3-30b-a3b", "qwen3_moe"),
        ("glm-4.5", "glm4_moe"),
    ):
        assert MODELS[name] == CASES[kind][1], name
