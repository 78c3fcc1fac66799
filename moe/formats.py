"""How quantised and plain tensors of checkpoints become `Nvfp4Tensor`s, one projection of one
expert at a time.

The dialect is decided by dtypes and shapes of what is there, the reading of a global scale by its
name:
``weight_scale_2`` multiplies, ``weight_global_scale`` divides. Magnitudes decide nothing.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import BLOCK, Nvfp4Tensor
from moe.tensor_files import CheckpointError

MODELOPT, COMPRESSED, MXFP4, PLAIN = "modelopt", "compressed-tensors", "mxfp4", "bf16"
MX_BLOCK = 32  # elements that share one E8M0 scale
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_IGNORED = {"weight_shape", "input_scale", "input_global_scale", "bias", "k_scale", "v_scale"}


@dataclasses.dataclass(frozen=True)
class Projection:
    """The tensors of one projection of one expert, by their last name: {"weight": ...,
    "weight_scale": ...}.
    """

    where: str  # "layer 3 expert 5 gate", for messages
    rows: int
    cols: int
    tensors: dict[str, Tensor]

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def take(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Tensor ``name`` if it has this dtype (uint8 also as int8) and shape."""
        if name not in self.tensors:
            raise self.fail(
                f"{name} is missing, expected {dtype} {shape}; found {sorted(self.tensors)}"
            )
        tensor = self.tensors[name]
        if tensor.dtype == torch.int8 and dtype == torch.uint8:
            tensor = tensor.view(torch.uint8)
        if tensor.dtype != dtype or tuple(tensor.shape) != shape:
            raise self.fail(
                f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
        return tensor

    def scalar(self, name: str) -> float:
        """A positive, finite fp32 scalar, stored as () or (1,)."""
        if name not in self.tensors:
            raise self.fail(f"{name} is missing; found {sorted(self.tensors)}")
        tensor = self.tensors[name]
        if tensor.numel() != 1:
            raise self.fail(f"{name} must be one number, got shape {tuple(tensor.shape)}")
        value = float(tensor.float().reshape(()))
        if not 0.0 < value < float("inf"):
            raise self.fail(f"{name} must be positive and finite, got {value}")
        return value


def dialect(p: Projection) -> str:
    """Which of MODELOPT, COMPRESSED, MXFP4 and PLAIN the tensors are.

    Raises CheckpointError for two global scales, unknown dtypes and unknown names.
    """
    t = p.tensors
    if "weight_scale_2" in t and "weight_global_scale" in t:
        raise p.fail(
            "has weight_scale_2 (a multiplier) and weight_global_scale (a divisor): ambiguous"
        )
    if "weight_packed" in t or "weight_global_scale" in t:
        found, used = COMPRESSED, {"weight_packed", "weight_scale", "weight_global_scale"}
    elif "weight_scale_2" in t:
        found, used = MODELOPT, {"weight", "weight_scale", "weight_scale_2"}
    elif "blocks" in t or "scales" in t:
        found, used = MXFP4, {"blocks", "scales"}
    elif "weight" not in t:
        raise p.fail(f"no weight tensor; found {sorted(t) or 'nothing'}")
    elif t["weight"].dtype in _PLAIN_DTYPES:
        found, used = PLAIN, {"weight"}
    elif t["weight"].dtype in (torch.uint8, torch.int8):
        found, used = _packed_dialect(p)
    else:
        raise p.fail(f"weight has dtype {t['weight'].dtype}, which no dialect uses")
    unknown = sorted(set(t) - used - _IGNORED)
    if unknown:
        raise p.fail(f"tensors {unknown} do not belong to the {found} dialect")
    return found


def _packed_dialect(p: Projection) -> tuple[str, set[str]]:
    """Packed codes with one kind of scale: E8M0 per 32 (DeepSeek), or NVFP4 without its global
    scale.
    """
    for name in ("scale", "weight_scale", "weight_scale_inv"):
        scale = p.tensors.get(name)
        if scale is None:
            continue
        e8m0 = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
        if e8m0 and tuple(scale.shape) == (p.rows, p.cols // MX_BLOCK):
            return MXFP4, {"weight", name}
        if scale.dtype == torch.float8_e4m3fn:
            raise p.fail(
                f"{name} is E4M3, so the weight is NVFP4, but its global scale is missing "
                "(weight_scale_2 or weight_global_scale)"
            )
        raise p.fail(
            f"{name} must be E8M0 {(p.rows, p.cols // MX_BLOCK)} (MXFP4), got {scale.dtype} "
            f"{tuple(scale.shape)}"
        )
    raise p.fail(f"packed weight without a scale; found {sorted(p.tensors)}")


def read(p: Projection, shared_scale: Tensor | None = None) -> tuple[Nvfp4Tensor, int]:
    """The projection as NVFP4 (rows, cols) with one global scale, and the number of blocks of 16
    whose values could not be kept exactly (only MXFP4 can have any; bf16 is quantised, which does
    not count).

    shared_scale  global scale for a PLAIN projection (gate and up share one), or None: its own amax
                  / 2688
    """
    kind = dialect(p)
    if kind == PLAIN:
        weight = p.tensors["weight"]
        if tuple(weight.shape) != (p.rows, p.cols):
            raise p.fail(f"weight must be {(p.rows, p.cols)}, got {tuple(weight.shape)}")
        if not bool(torch.isfinite(weight).all()):
            raise p.fail("weight holds NaN or Inf")
        g = plain_scale(weight) if shared_scale is None else shared_scale
        return nvfp4.quantize(weight, g, exact_division=True), 0
    if kind == MXFP4:
        return _read_mxfp4(p)
    packed = "weight_packed" if kind == COMPRESSED else "weight"
    data = p.take(packed, torch.uint8, (p.rows, p.cols // 2))
    scale = p.take("weight_scale", torch.float8_e4m3fn, (p.rows, p.cols // BLOCK))
    _check_scales(p, "weight_scale", scale)
    if kind == COMPRESSED:
        multiplier = 1.0 / p.scalar("weight_global_scale")
    else:
        multiplier = p.scalar("weight_scale_2")
    return Nvfp4Tensor(data, scale, torch.tensor(multiplier, dtype=torch.float32)), 0


def plain_scale(weight: Tensor) -> Tensor:
    """ModelOpt's weight_scale_2 of a plain weight: amax / (6 * 448), fp32 ()."""
    amax = weight.abs().amax().float()
    return (amax / (nvfp4.E2M1_MAX * nvfp4.UE4M3_MAX)).clamp(min=nvfp4.GLOBAL_MIN)


def _check_scales(p: Projection, name: str, scale: Tensor) -> None:
    bad = nvfp4.invalid_scales(scale)
    if bool(bad.any()):
        row, block = (int(i) for i in bad.nonzero()[0])
        byte = int(scale.view(torch.uint8)[row, block])
        kind = "NaN" if byte & 0x7F == 0x7F else "negative"
        raise p.fail(f"{name} has a {kind} scale, byte {byte:#04x}, at row {row} block {block}")


def _read_mxfp4(p: Projection) -> tuple[Nvfp4Tensor, int]:
    """E2M1 with one power of two per 32: the same codes, each scale twice, if all scales fit UE4M3
    at once.

    UE4M3 holds 2^-9 .. 2^8. The global scale is the power of two that puts the largest scale at
    2^8; blocks more than 17 binary orders below are rounded again and counted, unless they are all
    zero.
    """
    if "blocks" in p.tensors:  # gpt-oss: (rows, cols/32, 16) bytes
        data = p.take("blocks", torch.uint8, (p.rows, p.cols // MX_BLOCK, MX_BLOCK // 2)).flatten(1)
        raw = p.take("scales", torch.uint8, (p.rows, p.cols // MX_BLOCK))
    else:
        data = p.take("weight", torch.uint8, (p.rows, p.cols // 2))
        name = next(n for n in ("scale", "weight_scale", "weight_scale_inv") if n in p.tensors)
        raw = p.tensors[name].view(torch.uint8)
    if bool((raw == 0xFF).any()):
        row, block = (int(i) for i in (raw == 0xFF).nonzero()[0])
        raise p.fail(f"scale has a NaN (0xff) at row {row} block of 32 {block}")
    exponent = (raw.int() - 127).repeat_interleave(MX_BLOCK // BLOCK, dim=1)  # (rows, cols/16)
    codes = nvfp4.unpack(data).unflatten(-1, (-1, BLOCK))  # (rows, cols/16, 16)
    empty = ((codes & 7) == 0).all(dim=-1)
    used = exponent[~empty]
    top = int(used.max()) if used.numel() else 0
    top = max(top, -100 + 8)  # keep the global scale at or above 2^-100
    relative = torch.where(empty, 0, exponent - (top - 8))  # 8 for the largest
    low = relative < -9
    if bool(low.any()):
        values = nvfp4.decode_e2m1(codes[low], torch.float64) * 2.0 ** (
            relative[low] + 9
        ).unsqueeze(-1)
        again = nvfp4.encode_e2m1(values.float())
        exact = (nvfp4.decode_e2m1(again, torch.float64) == values).all(dim=-1)
        codes = codes.clone()
        codes[low] = again
        inexact = int((~exact).sum())
    else:
        inexact = 0
    scale = torch.ldexp(torch.ones(relative.shape), relative.clamp(min=-9))
    g = torch.tensor(2.0 ** (top - 8), dtype=torch.float32)
    packed = nvfp4.pack(codes.flatten(-2))
    return Nvfp4Tensor(packed, scale.to(torch.float8_e4m3fn), g), inexact
