"""LightMoE's grouped GEMM: bf16 rows, or SwiGLU and requantisation; one or two CTAs."""

from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as cuda
import cutlass.torch as cutlass_torch
import lightmoe.kernels.grouped.runtime as runtime
import torch
from cutlass.cute.runtime import from_dlpack

from tests.conformance import data
from tests.conformance.case import Case
from tests.conformance.host import _Relabelled, as_device


def _seed(dtype: Any, mode0: int, mode1: int, mode0_major: bool = False) -> tuple[Any, Any]:
    """The package makes small sample tensors on the GPU to compile with; make them here."""
    width = {4: 2, 8: 1, 16: 1, 32: 1}[dtype.width]
    storage = {4: torch.uint8, 8: torch.uint8, 16: torch.bfloat16, 32: torch.float32}[dtype.width]
    if mode0_major:
        tensor = torch.zeros(1, mode1, mode0, dtype=storage).permute(2, 1, 0)
    else:
        tensor = torch.zeros(1, mode0, mode1 // width, dtype=storage)
        tensor = tensor.view(torch.float4_e2m1fn_x2) if width == 2 else tensor
        tensor = tensor.permute(1, 2, 0)
    sample = from_dlpack(_Relabelled(tensor), assumed_align=16, enable_tvm_ffi=True)
    sample.element_type = dtype
    leading = cutlass_torch.get_leading_dim(tensor)
    return sample.mark_layout_dynamic(leading_dim=leading), tensor


runtime._seed_tensor = _seed


def _compile(
    experts: int, n: int, k: int, tile: tuple[int, int], activation: str | None, **more: Any
) -> Any:
    """The package's own compile function; ``more`` replaces defaults of the prefill kernels."""
    arguments = {
        "experts": experts,
        "n": n,
        "k": k,
        "tile_m": tile[0],
        "tile_n": tile[1],
        "device": 0,
        "output_dtype": torch.float4_e2m1fn_x2 if activation else torch.bfloat16,
        "activation": activation,
        "dactivation": None,
        "save_preact": False,
        "gated_clamp_limit": 0.0,
        "activation_sigmoid_alpha": 1.0,
        "activation_up_bias": 0.0,
        "use_dynamic_sched": True,
        "per_expert_alpha": True,
        "use_pdl": True,
        "swap_ab": False,
        "fast_decode_sched": False,
        "direct_routes": 0,
        "broadcast_a": False,
        "gather_b": False,
        "ab_stages": 0,
        "direct_c_store": False,
        "decode_grid_mode": runtime.DECODE_GRID_PERSISTENT,
    }
    return runtime._compile_grouped(**{**arguments, **more})


def _case(
    name: str, counts: list[int], n: int, k: int, tile: tuple[int, int], activation: str | None
) -> Case:
    generator = torch.Generator().manual_seed(len(name))
    experts, rows = len(counts), sum(counts)
    compiled, seeds, *_ = _compile(experts, n, k, tile, activation)
    a, b = data.operand(generator, rows, k), data.operand(generator, experts, n, k)
    alpha = data.powers_of_two(generator, experts)
    norm = 0.25
    if activation:
        alpha = alpha / 64  # keeps the gates where a sigmoid is neither 0 nor 1
    sfa = data.ragged_scales(a.scale, counts)
    sfb = data.tiled_scales(b.scale)
    columns = n // 2 if activation else n
    out = torch.empty(rows, columns // (2 if activation else 1), dtype=torch.uint8)
    out = (
        out.view(torch.float4_e2m1fn_x2)
        if activation
        else torch.empty(rows, n, dtype=torch.bfloat16)
    )
    tiles = sfa.shape[1]
    out_sf = torch.empty(1, tiles, columns // 64, 32, 4, 4, dtype=torch.uint8)
    out_sf = out_sf.view(torch.float8_e4m3fn)
    counter = torch.zeros(1, dtype=torch.int32)
    unused = torch.zeros(1, 2 * n, dtype=torch.bfloat16)
    cu = data.offsets(counts)
    scale = torch.tensor([1 / norm, norm]) if activation else torch.ones(2)
    arguments = [a.fp4, b.fp4, out, unused, unused[:, :n], sfa, sfb, cu, counter, cu, cu]
    arguments += [alpha, out_sf if activation else sfa, scale]
    bound = [as_device(argument) for argument in arguments]

    def launch() -> None:
        counter.zero_()
        compiled(*seeds, *bound, cuda.CUstream(0))

    acc = data.matmul(a, b, counts) * alpha[data.expert_of_row(counts)][:, None].double()

    def check() -> str:
        if not activation:
            data.check_equal(out, acc.to(torch.bfloat16), name)
            return "bit-equal"
        h = data.silu_product(acc[:, 0::2], acc[:, 1::2])
        from cute_kernels import nvfp4

        flat = out_sf.view(torch.uint8).reshape(tiles * 128, columns // 16)
        plain = nvfp4.unswizzle(flat, tiles * 128, columns // 16)
        plain = plain[data.ragged_scale_rows(counts)].view(torch.float8_e4m3fn)
        share = data.check_quantised(out.view(torch.uint8), plain, h, norm, name)
        return f"{share:.4%} of the codes equal to exact rounding"

    outputs = {"out": out, "out_sf": out_sf} if activation else {"out": out}
    return Case(name, launch, outputs, check, macs=rows * n * k)


def cases() -> Iterator[Case]:
    """bf16 and swiglu_fp4, one and two CTAs, ragged counts with an empty expert."""
    for tile in ((256, 256), (128, 128), (256, 128)):
        label = f"{tile[0]}x{tile[1]}"
        for activation in (None, "swiglu"):
            kind = activation or "bf16"
            yield _case(f"lightmoe.{kind}.{label}", [256], 256, 512, tile, activation)
            yield _case(
                f"lightmoe.{kind}.{label}.ragged", [70, 0, 200, 1], 512, 256, tile, activation
            )
