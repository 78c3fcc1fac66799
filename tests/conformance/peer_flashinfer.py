"""FlashInfer's CuTe DSL MoE kernels: L1 (gather, SwiGLU, requantise) and L2 (finalise)."""

from collections.abc import Iterator
from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.cute.runtime import make_ptr
from flashinfer.fused_moe.cute_dsl.blackwell import (
    blockscaled_contiguous_gather_grouped_gemm_act_fusion as l1,
)
from flashinfer.fused_moe.cute_dsl.blackwell import (
    blockscaled_contiguous_grouped_gemm_finalize_fusion as l2,
)

from cute_kernels import nvfp4
from tests.conformance import data
from tests.conformance.case import Case
from tests.conformance.host import NUM_SMS

_TYPES = {
    torch.uint8: cutlass.Float4E2M1FN,
    torch.float8_e4m3fn: cutlass.Float8E4M3FN,
    torch.float32: cutlass.Float32,
    torch.int32: cutlass.Int32,
    torch.bfloat16: cutlass.BFloat16,
}


def _pointer(tensor: torch.Tensor) -> Any:
    align = 32 if tensor.dtype in (torch.uint8, torch.bfloat16) else 4
    align = 16 if tensor.dtype == torch.float8_e4m3fn else align
    return make_ptr(
        _TYPES[tensor.dtype], tensor.data_ptr(), cute.AddressSpace.gmem, assumed_align=align
    )


class _Routing:
    """Rows permuted by expert, each padded to whole tiles; expanded index = token * top_k + j."""

    def __init__(
        self, generator: torch.Generator, tokens: int, top_k: int, experts: int, tile: int
    ):
        # expert 1 gets nothing
        usable = [e for e in range(experts) if e != 1 or experts == 1]
        chosen = []
        for _ in range(tokens):
            order = torch.randperm(len(usable), generator=generator)[:top_k]
            chosen.append([usable[i] for i in order])
        rows, groups, limits = [], [], []
        for expert in range(experts):
            mine = [
                t * top_k + j for t in range(tokens) for j in range(top_k) if chosen[t][j] == expert
            ]
            for first in range(0, len(mine), tile):
                part = mine[first : first + tile]
                groups.append(expert)
                limits.append(len(rows) + len(part))
                rows += part + [-1] * (tile - len(part))
        self.expanded = torch.tensor(rows, dtype=torch.int32)
        self.group = torch.tensor(groups, dtype=torch.int32)
        self.limit = torch.tensor(limits, dtype=torch.int32)
        self.tiles = torch.tensor([len(groups)], dtype=torch.int32)
        self.valid = self.expanded >= 0
        self.expert = self.group.repeat_interleave(tile).long()
        self.token = self.expanded.clamp(min=0).long() // top_k


def _layer1(
    name: str, tokens: int, top_k: int, experts: int, n: int, k: int, tile: tuple[int, int]
) -> Case:
    generator = torch.Generator().manual_seed(len(name))
    routing = _Routing(generator, tokens, top_k, experts, tile[0])
    m = routing.expanded.numel()
    a, b = data.operand(generator, tokens, k), data.operand(generator, experts, n, k)
    alpha = data.powers_of_two(generator, experts) / 64
    norm = torch.tensor([0.25])
    out = torch.empty(m, n // 4, dtype=torch.uint8)
    out_sf = torch.empty(m, n // 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    sfb = data.tiled_scales(b.scale)
    cluster = (2, 1) if tile[0] == 256 else (1, 1)
    kernel = l1.BlockScaledContiguousGatherGroupedGemmKernel(
        sf_vec_size=16,
        mma_tiler_mn=tile,
        cluster_shape_mn=cluster,
        vectorized_f32=True,
        topk=top_k,
        raster_along_m=False,
        enable_pdl=True,
    )
    tensors = [a.codes, b.codes, a.scale, sfb, out, out_sf, alpha, routing.group, routing.limit]
    tensors += [routing.expanded, routing.tiles, norm]
    pointers = [_pointer(t) for t in tensors]
    sizes = (tokens, m, n, k, experts)
    compiled = cute.compile(
        kernel.wrapper,
        *pointers,
        None,
        *sizes,
        tile_size=tile[0],
        scaling_vector_size=16,
        max_active_clusters=NUM_SMS // cluster[0],
        stream=cuda.CUstream(0),
    )

    def launch() -> None:
        compiled(*pointers, None, *sizes, stream=cuda.CUstream(0))

    av, bv = a.values[routing.token], b.values
    acc = torch.stack([av[r] @ bv[routing.expert[r]].T for r in range(m)])
    acc = acc * alpha[routing.expert][:, None].double()
    up, gate = acc.unflatten(1, (-1, 2, 64)).unbind(2)  # 64 columns of up, 64 of gate, ...
    h = data.silu_product(gate, up).flatten(1)[routing.valid]

    def check() -> str:
        plain = nvfp4.unswizzle(out_sf.view(torch.uint8), m, n // 32)[routing.valid]
        plain = plain.view(torch.float8_e4m3fn)
        share = data.check_quantised(out[routing.valid], plain, h, float(norm), name)
        return f"{share:.4%} of the codes equal to exact rounding"

    outputs = {"out": out, "out_sf": out_sf}
    return Case(name, launch, outputs, check, macs=m * n * k, keep=tensors)


def _layer2(
    name: str, tokens: int, top_k: int, experts: int, n: int, k: int, tile: tuple[int, int]
) -> Case:
    generator = torch.Generator().manual_seed(len(name))
    routing = _Routing(generator, tokens, top_k, experts, tile[0])
    m = routing.expanded.numel()
    a, b = data.operand(generator, m, k), data.operand(generator, experts, n, k)
    alpha = data.powers_of_two(generator, experts)
    weights = data.powers_of_two(generator, tokens, top_k)
    out = torch.empty(tokens, n, dtype=torch.bfloat16)
    sfa, sfb = data.tiled_scales(a.scale), data.tiled_scales(b.scale)
    cluster = (2, 1) if tile[0] == 256 else (1, 1)
    kernel = l2.Sm100BlockScaledContiguousGroupedGemmFinalizeFusionKernel(
        sf_vec_size=16,
        mma_tiler_mn=tile,
        cluster_shape_mn=cluster,
        raster_along_m=False,
        enable_pdl=True,
    )
    tensors = [a.codes, b.codes, sfa, sfb, out, alpha, routing.group, routing.limit]
    tensors += [routing.expanded, routing.tiles, weights]
    pointers = [_pointer(t) for t in tensors]
    sizes = (m, n, k, experts, tokens, top_k)
    compiled = cute.compile(
        kernel.wrapper,
        *pointers,
        None,
        *sizes,
        tile_size=tile[0],
        scaling_vector_size=16,
        max_active_clusters=NUM_SMS // cluster[0],
        stream=cuda.CUstream(0),
    )

    def launch() -> None:
        compiled(*pointers, None, *sizes, stream=cuda.CUstream(0))

    av, bv = a.values, b.values
    want = torch.zeros(tokens, n, dtype=torch.float64)
    size = torch.zeros(tokens, n, dtype=torch.float64)
    for r in routing.valid.nonzero()[:, 0].tolist():
        expanded, expert = int(routing.expanded[r]), int(routing.expert[r])
        scale = float(weights.view(-1)[expanded]) * float(alpha[expert])
        part = (av[r] @ bv[expert].T) * scale
        want[expanded // top_k] += part
        size[expanded // top_k] += part.abs()

    def check() -> str:
        if top_k == 1:
            data.check_equal(out, want.to(torch.bfloat16), name)
            return "bit-equal"
        # every addend and every partial sum is rounded to bf16 (2**-9 relative), in any order
        data.check_close(out, want, size * (2 * top_k) * 2.0**-9, name)
        return "within bf16 partial sums"

    return Case(
        name,
        launch,
        {"out": out},
        check,
        fill={"out": 0},
        ordered=top_k == 1,
        macs=m * n * k,
        keep=tensors,
    )


def cases() -> Iterator[Case]:
    """Both layers, one and two CTAs per MMA, several tile widths, an expert without tokens."""
    yield _layer1("flashinfer.l1.2cta", 96, 2, 3, 256, 512, (256, 256))
    yield _layer1("flashinfer.l1.2cta.n128", 40, 2, 4, 512, 256, (256, 128))
    yield _layer1("flashinfer.l1.1cta", 40, 2, 3, 256, 512, (128, 128))
    yield _layer1("flashinfer.l1.1cta.n256", 150, 1, 2, 512, 256, (128, 256))
    yield _layer2("flashinfer.l2.2cta.top1", 150, 1, 2, 256, 512, (256, 256))
    yield _layer2("flashinfer.l2.2cta", 96, 2, 3, 512, 256, (256, 128))
    yield _layer2("flashinfer.l2.1cta.top1", 150, 1, 2, 256, 512, (128, 128))
    yield _layer2("flashinfer.l2.1cta", 40, 2, 4, 512, 256, (128, 256))
