"""How quantised and plain tensors of checkpoints become `Nvfp4Tensor`s, one projection of one
expert at a time.

| dialect | codes | block scales | global scale |
|---|---|---|---|
| modelopt | weight uint8 (N, K/2) | weight_scale E4M3 (N, K/16) | weight_scale_2, a multiplier |
| compressed-tensors | weight_packed | weight_scale, the same | weight_global_scale, a divisor |
| mxfp4 | weight, or blocks (N, K/32, 16) | scale or scales, E8M0 (N, K/32) | none |
| bf16 | weight bf16, fp16 or fp32 (N, K) | | |

The dialect is decided by dtypes and shapes of what is there (``weight_scale`` may be called
``scale``), the reading of a global scale by its name. Magnitudes decide nothing. `plan` looks at
headers alone, `read` then reads.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import BLOCK, Nvfp4Tensor
from moe.tensor_files import CheckpointError, Stored

MODELOPT, COMPRESSED, MXFP4, PLAIN = "modelopt", "compressed-tensors", "mxfp4", "bf16"
MX_BLOCK = 32  # elements that share one E8M0 scale
PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_BYTE_DTYPES = (torch.uint8, torch.int8)
_BLOCK_SCALES = ("weight_scale", "scale", "weight_scale_inv")
_INPUT_SCALES = ("input_scale", "input_global_scale")
_IGNORED = {"weight_shape", "bias", *_INPUT_SCALES}
_QUANTIZE_ELEMENTS = 1 << 20  # of a bf16 weight that are quantised at a time
# A global scale may be 2^-100 at least (the quantiser's floor), the largest UE4M3 power is 2^8.
_MX_TOP = 8
_MX_BOTTOM = -9
_MX_LOWEST_TOP = -100 + _MX_TOP


@dataclasses.dataclass(frozen=True)
class Projection:
    """The tensors of one projection of one expert by their last name: {"weight": ...,
    "weight_scale": ...}.

    where       "layer 3 expert 5 gate", for messages
    rows, cols  N and K of the weight
    """

    where: str
    rows: int
    cols: int
    tensors: dict[str, Stored]

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {message}")

    def want(self, last: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> Stored:
        """Tensor ``last`` if it has one of these dtypes and this shape."""
        stored = self.tensors.get(last)
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        if stored is None:
            raise self.fail(
                f"{last} is missing, expected {names} {shape}; found {sorted(self.tensors)}"
            )
        if stored.dtype not in dtypes or stored.shape != shape:
            raise self.fail(
                f"{stored.name} must be {names} {shape}, got "
                f"{str(stored.dtype).removeprefix('torch.')} {stored.shape}"
            )
        return stored


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a projection will be read: decided from headers, before anything is read."""

    projection: Projection
    dialect: str
    codes: str  # last names of the tensors
    scale: str | None = None
    global_scale: str | None = None


def plan(p: Projection) -> Plan:
    """Decide the dialect and check names, dtypes and shapes.

    Raises CheckpointError for what is missing, of another dtype or shape, ambiguous, or unknown.
    """
    t = p.tensors
    if "weight_scale_2" in t and "weight_global_scale" in t:
        raise p.fail(
            f"has {t['weight_scale_2'].name} (a multiplier) and {t['weight_global_scale'].name} "
            "(a divisor): ambiguous"
        )
    if "blocks" in t or "scales" in t:
        result = Plan(p, MXFP4, "blocks", "scales")
    elif "weight_packed" in t or "weight_global_scale" in t:
        packed = "weight_packed" if "weight_packed" in t else "weight"
        result = Plan(p, COMPRESSED, packed, _scale_name(p), "weight_global_scale")
    elif "weight" not in t:
        raise p.fail(f"no weight tensor; found {sorted(t) or 'nothing'}")
    elif t["weight"].dtype in PLAIN_DTYPES:
        result = Plan(p, PLAIN, "weight")
    elif t["weight"].dtype in _BYTE_DTYPES:
        result = _plan_packed(p)
    else:
        raise p.fail(
            f"{t['weight'].name} is {t['weight'].dtype}: experts are read from NVFP4, MXFP4, bf16, "
            "fp16 or fp32 only"
        )
    _check(result)
    return result


def _scale_name(p: Projection) -> str:
    return next((n for n in _BLOCK_SCALES if n in p.tensors), "weight_scale")


def _plan_packed(p: Projection) -> Plan:
    """Packed codes: NVFP4 with a global scale, or MXFP4, whose scales are E8M0 per 32."""
    name = _scale_name(p)
    scale = p.tensors.get(name)
    if "weight_scale_2" in p.tensors:
        return Plan(p, MODELOPT, "weight", name, "weight_scale_2")
    if scale is None:
        raise p.fail(
            f"{p.tensors['weight'].name} holds packed codes, but no {_BLOCK_SCALES[0]} is there; "
            f"found {sorted(p.tensors)}"
        )
    if scale.dtype == torch.float8_e4m3fn or scale.shape == (p.rows, p.cols // BLOCK):
        raise p.fail(
            f"{scale.name} has one scale per {BLOCK}, so the weight is NVFP4, but its global scale "
            "is missing (weight_scale_2 or weight_global_scale)"
        )
    return Plan(p, MXFP4, "weight", name)


def _check(plan: Plan) -> None:
    p = plan.projection
    rows, cols = p.rows, p.cols
    if plan.dialect == PLAIN:
        p.want(plan.codes, PLAIN_DTYPES, (rows, cols))
    elif plan.dialect == MXFP4:
        groups = cols // MX_BLOCK
        if cols % MX_BLOCK:
            raise p.fail(f"K = {cols} is no multiple of {MX_BLOCK}, which MXFP4 needs")
        blocks = plan.codes == "blocks"
        shape = (rows, groups, MX_BLOCK // 2) if blocks else (rows, cols // 2)
        p.want(plan.codes, _BYTE_DTYPES, shape)
        p.want(str(plan.scale), (torch.float8_e8m0fnu, torch.uint8), (rows, groups))
    else:
        p.want(plan.codes, _BYTE_DTYPES, (rows, cols // 2))
        p.want(str(plan.scale), (torch.float8_e4m3fn, torch.uint8), (rows, cols // BLOCK))
        name = str(plan.global_scale)
        if name not in p.tensors:
            raise p.fail(f"{name} is missing; found {sorted(p.tensors)}")
        if p.tensors[name].shape not in ((), (1,), (1, 1)):
            raise p.fail(f"{p.tensors[name].name} must be one number, got {p.tensors[name].shape}")
    if "bias" in p.tensors:
        p.want("bias", PLAIN_DTYPES, (rows,))
    used = {plan.codes, plan.scale, plan.global_scale}
    unknown = sorted(set(p.tensors) - used - _IGNORED)
    if unknown:
        raise p.fail(
            f"{p.tensors[unknown[0]].name} does not belong to a {plan.dialect} weight: leaving it "
            f"out would change values (unknown: {unknown})"
        )


def read(plan: Plan, shared_scale: Tensor | None = None) -> tuple[Nvfp4Tensor, int]:
    """The projection as NVFP4 (rows, cols) with one global scale, and the number of blocks of 16
    whose values could not be kept exactly. Only MXFP4 can have any; the quantisation of a plain
    weight does not count.

    shared_scale  global scale of a plain weight (gate and up share one), or None: its own

    Raises CheckpointError for a scale or weight that is NaN, negative, zero or infinite.
    """
    p = plan.projection
    if plan.dialect == PLAIN:
        g = plain_scale(plan) if shared_scale is None else shared_scale
        return _quantize(p.tensors[plan.codes].read(), g), 0
    if plan.dialect == MXFP4:
        return _read_mxfp4(plan)
    scale = p.tensors[str(plan.scale)].read().view(torch.float8_e4m3fn)
    _check_scales(p, p.tensors[str(plan.scale)].name, scale)
    value = _scalar(p, str(plan.global_scale))
    # compressed-tensors stores (6 * 448) / amax: inverted here, once, in fp32
    g = torch.reciprocal(value) if plan.dialect == COMPRESSED else value
    return Nvfp4Tensor(p.tensors[plan.codes].read().view(torch.uint8), scale, g), 0


def plain_scale(plan: Plan) -> Tensor:
    """ModelOpt's weight_scale_2 of a plain weight: amax / (6 * 448), fp32 ()."""
    stored = plan.projection.tensors[plan.codes]
    low, high = torch.aminmax(stored.read())  # unlike abs() this makes no copy of the weight
    amax = torch.maximum(-low.float(), high.float())
    if not bool(torch.isfinite(amax)):
        raise plan.projection.fail(f"{stored.name} holds NaN or Inf")
    return (amax / (nvfp4.E2M1_MAX * nvfp4.UE4M3_MAX)).clamp(min=nvfp4.GLOBAL_MIN)


def _quantize(weight: Tensor, g: Tensor) -> Nvfp4Tensor:
    """(N, K) with exact division (ModelOpt's bytes), some rows at a time to keep copies small."""
    step = max(1, _QUANTIZE_ELEMENTS // weight.shape[1])
    parts = [nvfp4.quantize(rows, g, exact_division=True) for rows in weight.split(step)]
    if len(parts) == 1:
        return parts[0]
    data = torch.cat([q.data for q in parts])
    scale = torch.cat([q.scale.view(torch.uint8) for q in parts])
    return Nvfp4Tensor(data, scale, parts[0].global_scale)


def _scalar(p: Projection, last: str) -> Tensor:
    """A positive, finite number as fp32 ()."""
    stored = p.tensors[last]
    value = stored.read().float().reshape(())
    if not 0.0 < float(value) < float("inf"):
        raise p.fail(f"{stored.name} must be positive and finite, got {float(value)}")
    return value.clone()


def _check_scales(p: Projection, name: str, scale: Tensor) -> None:
    bad = nvfp4.invalid_scales(scale)
    if bool(bad.any()):
        row, block = (int(i) for i in bad.nonzero()[0])
        byte = int(scale.view(torch.uint8)[row, block])
        kind = "NaN" if byte & 0x7F == nvfp4.UE4M3_NAN else "negative"
        raise p.fail(f"{name} has a {kind} scale, byte {byte:#04x}, at row {row} block {block}")


def _read_mxfp4(plan: Plan) -> tuple[Nvfp4Tensor, int]:
    """E2M1 with one power of two per 32: the same codes, and every scale twice, as far as UE4M3
    holds them.

    UE4M3 has the powers 2^-9 .. 2^8. The global scale is the power of two that puts the largest
    scale in use at 2^8; blocks more than 17 binary orders below it get the scale 2^-9 and codes
    rounded again (nearest even), and are counted if that changed a value. Blocks of zeros fit
    always.
    """
    p = plan.projection
    data = p.tensors[plan.codes].read().view(torch.uint8).reshape(p.rows, p.cols // 2)
    stored = p.tensors[str(plan.scale)]
    raw = stored.read().view(torch.uint8)
    if bool((raw == 0xFF).any()):
        row, block = (int(i) for i in (raw == 0xFF).nonzero()[0])
        raise p.fail(f"{stored.name} has a NaN scale, byte 0xff, at row {row} block {block}")
    exponent = (raw.int() - 127).repeat_interleave(MX_BLOCK // BLOCK, dim=1)  # (rows, cols/16)
    bytes_of = data.unflatten(-1, (-1, BLOCK // 2))  # (rows, cols/16, 8)
    empty = ((bytes_of & 0x77) == 0).all(dim=-1)  # both codes +0 or -0
    lowest = torch.iinfo(torch.int32).min
    top = max(int(torch.where(empty, lowest, exponent).amax()), _MX_LOWEST_TOP)
    relative = torch.where(empty, 0, exponent - (top - _MX_TOP))  # 8 for the largest
    low = relative < _MX_BOTTOM
    inexact = 0
    if bool(low.any()):
        shift = (relative[low] - _MX_BOTTOM).unsqueeze(-1).double()
        values = nvfp4.decode_e2m1(nvfp4.unpack(bytes_of[low]), torch.float64) * 2.0**shift
        again = nvfp4.encode_e2m1(values.float())
        kept = (nvfp4.decode_e2m1(again, torch.float64) == values).all(dim=-1)
        inexact = int((~kept).sum())
        bytes_of = bytes_of.clone()
        bytes_of[low] = nvfp4.pack(again)
    kept_exponent = relative.clamp(min=_MX_BOTTOM)
    scale = torch.ldexp(torch.ones_like(kept_exponent, dtype=torch.float32), kept_exponent)
    g = torch.tensor(2.0 ** (top - _MX_TOP), dtype=torch.float32)
    return Nvfp4Tensor(bytes_of.flatten(-2), scale.to(torch.float8_e4m3fn), g), inexact
