"""The names of DeepGEMM's NVFP4 mega MoE and of ``nvfp4_megamoe_kernel``, on this package's layer.

Adapters only: they check, convert layouts once, and call `moe.MoE`. docs/mega.md lists what each
does and how it differs from the original.
"""

from __future__ import annotations

from typing import NoReturn

from moe.mega.buffer import SymmBuffer, get_symm_buffer, get_symm_buffer_for_mega_moe
from moe.mega.call import fp4_fp4_mega_moe, nvfp4_mega_moe, nvfp4_mega_moe_full
from moe.mega.gemm import GEMM_BACKENDS, gemm_backend
from moe.mega.stages import (
    _quantize_to_e2m1,
    cutlass_grouped_nvfp4_gemm,
    cutlass_nvfp4_blockscaled_gemm,
    nvfp4_mega_moe_l1,
    nvfp4_mega_moe_l2,
    stage_activation,
    unpack_ue4m3_u32,
)
from moe.mega.weights import (
    LAYOUTS,
    MegaWeights,
    SharedWeights,
    finalize_weights,
    transform_weights_for_mega_moe,
)

__all__ = [
    "GEMM_BACKENDS",
    "LAYOUTS",
    "MegaWeights",
    "SharedWeights",
    "SymmBuffer",
    "_quantize_to_e2m1",
    "cutlass_grouped_nvfp4_gemm",
    "cutlass_nvfp4_blockscaled_gemm",
    "finalize_weights",
    "fp4_fp4_mega_moe",
    "gemm_backend",
    "get_symm_buffer",
    "get_symm_buffer_for_mega_moe",
    "nvfp4_mega_moe",
    "nvfp4_mega_moe_full",
    "nvfp4_mega_moe_l1",
    "nvfp4_mega_moe_l2",
    "stage_activation",
    "transform_weights_for_mega_moe",
    "unpack_ue4m3_u32",
]

_REFUSED = {
    "fp8_fp4_mega_moe": "FP8 tokens with per-32 power-of-two scales",
    "fp8_nvfp4_mega_moe": "FP8 tokens",
    "fp8_mega_moe": "FP8 tokens and weights",
    "bf16_mega_moe": "bf16 experts",
}


def __getattr__(name: str) -> NoReturn:
    if name in _REFUSED:
        raise AttributeError(
            f"{name} is not offered ({_REFUSED[name]}): this package multiplies NVFP4 by NVFP4, "
            "use fp4_fp4_mega_moe with an fp4xfp4 buffer"
        )
    raise AttributeError(f"module 'moe.mega' has no attribute {name!r}")
