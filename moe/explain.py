"""`python -m moe explain`: the data flow of one layer in plain words, with shapes and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from cute_kernels.activations import ReLU2, SwiGLU, SwiGLUOAI
from moe.config import MoEConfig
from moe.model_config import moe_config
from moe.tensor_files import CheckpointError, TensorFiles

_V3 = {"scoring": "sigmoid", "num_groups": 8, "top_groups": 4, "routed_scaling_factor": 2.5}
MODELS: dict[str, MoEConfig] = {
    "deepseek-v3": MoEConfig(7168, 2048, 256, 8, **_V3),  # type: ignore[arg-type]
    "deepseek-v4-flash": MoEConfig(
        4096, 2048, 256, 6, "sqrtsoftplus", routed_scaling_factor=1.5, activation=SwiGLU(10.0)
    ),
    "deepseek-v4-pro": MoEConfig(
        7168, 3072, 384, 6, "sqrtsoftplus", routed_scaling_factor=2.5, activation=SwiGLU(10.0)
    ),
    "glm-4.5": MoEConfig(5120, 1536, 160, 8, "sigmoid", routed_scaling_factor=2.5),
    "glm-4.5-air": MoEConfig(4096, 1408, 128, 8, "sigmoid"),
    "glm-5": MoEConfig(6144, 2048, 256, 8, "sigmoid", routed_scaling_factor=2.5),
    "gpt-oss-20b": MoEConfig(2880, 2880, 32, 4, activation=SwiGLUOAI()),
    "gpt-oss-120b": MoEConfig(2880, 2880, 128, 4, activation=SwiGLUOAI()),
    "kimi-k2": MoEConfig(7168, 2048, 384, 8, "sigmoid", routed_scaling_factor=2.827),
    "llama-4-scout": MoEConfig(
        5120, 8192, 16, 1, "sigmoid", renormalize=False, weight_on_input=True
    ),
    "minimax-m2": MoEConfig(3072, 1536, 256, 8, "sigmoid"),
    "minimax-m3": MoEConfig(6144, 3072, 128, 4, activation=SwiGLUOAI()),
    "mixtral-8x7b": MoEConfig(4096, 14336, 8, 2),
    "nemotron-3-nano": MoEConfig(2688, 1856, 128, 6, "sigmoid", activation=ReLU2()),
    "qwen3-30b-a3b": MoEConfig(2048, 768, 128, 8),
    "qwen3-235b-a22b": MoEConfig(4096, 1536, 128, 8),
    "qwen3-next-80b-a3b": MoEConfig(2048, 512, 512, 10),
}


class Step(NamedTuple):
    """One line of the walk; ``nbytes`` are read or written once."""

    name: str
    words: str
    shape: str
    nbytes: int


def find_config(name: str) -> MoEConfig:
    """A name of `MODELS`, or a folder or file beside a config.json.

    Raises ValueError for anything else.
    """
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    if Path(name).exists():
        return moe_config(TensorFiles(name).config())
    raise CheckpointError(f"{name!r} is neither a path nor one of {sorted(MODELS)}")


def packed_bytes(rows: int, k: int) -> int:
    """NVFP4: half a byte per element and one byte per 16 of them."""
    return rows * k // 2 + rows * (k // 16)


def explain(cfg: MoEConfig, tokens: int) -> list[Step]:
    """The walk for ``tokens`` tokens, uniform routing assumed where it matters."""
    t, h, i, e, k = tokens, cfg.hidden, cfg.intermediate, cfg.num_experts, cfg.top_k
    rows, parts = t * k, cfg.projections
    used = min(e, rows)  # experts whose weights are read, at most
    first = "gate and up" if parts == 2 else "up"
    score = {"sqrtsoftplus": "sqrt(softplus)"}.get(cfg.scoring, cfg.scoring)
    groups = (
        f", from the best {cfg.top_groups} of {cfg.num_groups} groups" if cfg.num_groups > 1 else ""
    )
    norm = ", scaled to sum to 1" if cfg.renormalize else ""
    factor = cfg.routed_scaling_factor
    times = f", times {factor:g}" if factor != 1.0 else ""
    mix = "x is multiplied by its weight before it is quantised; " if cfg.weight_on_input else ""
    return [
        Step("tokens", "what the attention block hands over", f"({t}, {h}) bf16", 2 * t * h),
        Step(
            "route",
            f"scores of all experts ({score}); each token takes the best {k}{groups}; the scores "
            f"of these{norm}{times} are its weights",
            f"({t}, {e}) -> ({t}, {k})",
            4 * t * e + 8 * rows,
        ),
        Step(
            "plan",
            "sort the pairs (token, expert) by expert, so that each expert finds its rows side by "
            "side",
            f"({rows},) rows, {e + 1} offsets",
            8 * rows + 4 * rows + 4 * (e + 1),
        ),
        Step(
            "quantise x",
            f"{mix}per token one fp32 scale, per 16 elements one 8-bit scale, 4 bits an element",
            f"({t}, {h})",
            packed_bytes(t, h) + 4 * t,
        ),
        Step(
            "L1",
            f"each row times the {first} weights of its expert (at most {used} experts are read), "
            "summed in fp32; the global scales are applied to the sums",
            f"({rows}, {h}) x ({parts * i}, {h})",
            used * packed_bytes(parts * i, h),
        ),
        Step(
            "activation",
            f"{cfg.activation} in fp32, no rounding before or after",
            f"({rows}, {parts * i}) -> ({rows}, {i})",
            0,
        ),
        Step(
            "quantise h",
            "as x, with the expert's static scale or one per row",
            f"({rows}, {i})",
            packed_bytes(rows, i) + 4 * rows,
        ),
        Step(
            "L2",
            "each row times the down weights of its expert, one bf16 row per (token, slot)",
            f"({rows}, {i}) x ({h}, {i})",
            used * packed_bytes(h, i) + 2 * rows * h,
        ),
        Step(
            "combine",
            ("the only row of each token" if cfg.weight_on_input else "weight times row")
            + ", summed over the slots in order, in fp32; the shared expert, if any, is added last",
            f"({rows}, {h}) -> ({t}, {h}) bf16",
            2 * t * h,
        ),
    ]


def multiply_adds(cfg: MoEConfig, tokens: int) -> int:
    return tokens * cfg.top_k * cfg.hidden * cfg.intermediate * (cfg.projections + 1)
