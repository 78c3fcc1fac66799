"""config.json of public models -> `MoEConfig`, and how they store fused projections."""

from __future__ import annotations

from typing import Any, NamedTuple

from cute_kernels.activations import ReLU2, SwiGLU, SwiGLUOAI
from moe.config import MoEConfig
from moe.tensor_files import CheckpointError


class Fused(NamedTuple):
    """Order and granularity of the rows of a fused gate_up_proj, as in
    `ExpertWeights.from_nvfp4`."""

    order: str = "gate_up"
    granularity: int = 1


def fused(config: dict[str, Any]) -> Fused:
    """gpt-oss interleaves gate and up row by row, others have halves with the gate first."""
    return Fused("interleaved" if config.get("model_type") == "gpt_oss" else "gate_up")


def moe_config(config: dict[str, Any]) -> MoEConfig:
    """The experts' configuration of a model, from its config.json (text part).

    Raises CheckpointError for a model type that is not known, a field that is missing, or values
    that `MoEConfig` refuses.
    """
    kind = str(config.get("model_type", ""))
    builder = _BUILDERS.get(kind)
    if builder is None:
        raise CheckpointError(
            f"config.json has model_type {kind!r}, which is not one of {sorted(_BUILDERS)}: pass "
            "config=MoEConfig(...)"
        )
    try:
        return builder(config)
    except KeyError as error:
        raise CheckpointError(f"config.json of a {kind} model lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config.json of a {kind} model: {error}") from error


def _sizes(c: dict[str, Any], experts: str, inter: str = "moe_intermediate_size") -> dict[str, Any]:
    top_k = "num_experts_per_tok" if "num_experts_per_tok" in c else "experts_per_token"
    return {
        "hidden": c["hidden_size"],
        "intermediate": c[inter],
        "num_experts": c[experts],
        "top_k": c[top_k],
    }


def _groups(c: dict[str, Any]) -> dict[str, Any]:
    return {
        "num_groups": c.get("n_group") or 1,
        "top_groups": c.get("topk_group") or 1,
        "renormalize": c.get("norm_topk_prob", True),
        "routed_scaling_factor": c.get("routed_scaling_factor") or 1.0,
    }


def _deepseek(c: dict[str, Any]) -> MoEConfig:
    default = "sqrtsoftplus" if c["model_type"] == "deepseek_v4" else "sigmoid"
    return MoEConfig(
        **_sizes(c, "n_routed_experts"),
        **_groups(c),
        scoring=c.get("scoring_func") or default,
        activation=SwiGLU(limit=c.get("swiglu_limit") or None),
    )


def _qwen3(c: dict[str, Any]) -> MoEConfig:
    # the class default of Qwen3-MoE is False, that of Qwen3-Next True
    default = c["model_type"] != "qwen3_moe"
    return MoEConfig(**_sizes(c, "num_experts"), renormalize=c.get("norm_topk_prob", default))


def _gpt_oss(c: dict[str, Any]) -> MoEConfig:
    # top-k of the logits, then softmax over these: softmax over all, renormalised
    return MoEConfig(
        **_sizes(c, "num_local_experts", "intermediate_size"), activation=_swiglu_oai(c)
    )


def _swiglu_oai(c: dict[str, Any]) -> SwiGLUOAI:
    return SwiGLUOAI(alpha=c.get("swiglu_alpha", 1.702), limit=c.get("swiglu_limit", 7.0))


def _glm4(c: dict[str, Any]) -> MoEConfig:
    return MoEConfig(**_sizes(c, "n_routed_experts"), **_groups(c), scoring="sigmoid")


def _minimax(c: dict[str, Any]) -> MoEConfig:
    oai = c.get("hidden_act") == "swigluoai" or c["model_type"].startswith("minimax_m3")
    return MoEConfig(
        **_sizes(c, "num_local_experts", "intermediate_size"),
        scoring=c.get("scoring_func") or "sigmoid",
        routed_scaling_factor=c.get("routed_scaling_factor") or 1.0,
        activation=_swiglu_oai(c) if oai else SwiGLU(),
    )


def _nemotron_h(c: dict[str, Any]) -> MoEConfig:
    sizes = _sizes(c, "n_routed_experts")
    # Nemotron-3-Super's experts live in a narrower space; its router reads the full one
    sizes["hidden"] = c.get("moe_latent_size") or sizes["hidden"]
    return MoEConfig(**sizes, **_groups(c), scoring="sigmoid", activation=ReLU2())


def _mixtral(c: dict[str, Any]) -> MoEConfig:
    return MoEConfig(**_sizes(c, "num_local_experts", "intermediate_size"))


def _llama4(c: dict[str, Any]) -> MoEConfig:
    return MoEConfig(
        **_sizes(c, "num_local_experts", "intermediate_size"),
        scoring="sigmoid",
        renormalize=False,
        weight_on_input=True,
    )


_BUILDERS = {
    "deepseek_v3": _deepseek,
    "deepseek_v4": _deepseek,
    "qwen3_moe": _qwen3,
    "qwen3_next": _qwen3,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4,
    "minimax": _minimax,
    "minimax_m2": _minimax,
    "minimax_m3": _minimax,
    "minimax_m3_vl": _minimax,
    "nemotron_h": _nemotron_h,
    "mixtral": _mixtral,
    "llama4": _llama4,
    "llama4_text": _llama4,
}
