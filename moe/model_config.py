"""config.json of public models -> `MoEConfig`."""

from __future__ import annotations

from typing import Any

from cute_kernels.activations import ReLU2, SwiGLU, SwiGLUOAI
from moe.config import MoEConfig
from moe.tensor_files import CheckpointError


def moe_config(config: dict[str, Any]) -> MoEConfig:
    """The experts' configuration of a model.

    Raises CheckpointError for a model type that is not known, or a field that is missing.
    """
    kind = str(config.get("model_type", ""))
    builder = _BUILDERS.get(kind)
    if builder is None:
        raise CheckpointError(
            f"model_type {kind!r} is not one of {sorted(_BUILDERS)}: pass config=MoEConfig(...)"
        )
    try:
        return builder(config)
    except KeyError as error:
        raise CheckpointError(f"config.json of a {kind} model lacks {error}") from error


def _sizes(c: dict[str, Any], experts: str, inter: str = "moe_intermediate_size") -> dict[str, Any]:
    top_k = c["num_experts_per_tok"] if "num_experts_per_tok" in c else c["experts_per_token"]
    return {
        "hidden": c["hidden_size"],
        "intermediate": c[inter],
        "num_experts": c[experts],
        "top_k": top_k,
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
        scoring=c.get("scoring_func", default),
        activation=SwiGLU(limit=c.get("swiglu_limit")),
    )


def _qwen(c: dict[str, Any]) -> MoEConfig:
    return MoEConfig(**_sizes(c, "num_experts"), renormalize=c.get("norm_topk_prob", True))


def _gpt_oss(c: dict[str, Any]) -> MoEConfig:
    act = SwiGLUOAI(limit=c.get("swiglu_limit", 7.0))
    return MoEConfig(**_sizes(c, "num_local_experts", "intermediate_size"), activation=act)


def _glm(c: dict[str, Any]) -> MoEConfig:
    return MoEConfig(**_sizes(c, "n_routed_experts"), **_groups(c), scoring="sigmoid")


def _minimax(c: dict[str, Any]) -> MoEConfig:
    oai = c.get("hidden_act") == "swigluoai" or c["model_type"] == "minimax_m3"
    return MoEConfig(
        **_sizes(c, "num_local_experts", "intermediate_size"),
        scoring=c.get("scoring_func", "sigmoid"),
        routed_scaling_factor=c.get("routed_scaling_factor") or 1.0,
        activation=SwiGLUOAI(limit=c.get("swiglu_limit", 7.0)) if oai else SwiGLU(),
    )


def _nemotron(c: dict[str, Any]) -> MoEConfig:
    sizes = _sizes(c, "n_routed_experts")
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
    "qwen3_moe": _qwen,
    "qwen3_next": _qwen,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm,
    "minimax": _minimax,
    "minimax_m2": _minimax,
    "minimax_m3": _minimax,
    "nemotron_h": _nemotron,
    "mixtral": _mixtral,
    "llama4": _llama4,
    "llama4_text": _llama4,
}
