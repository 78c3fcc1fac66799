"""cuDNN frontend's grouped GEMM "quant": bf16 rows times alpha per expert and prob per row."""

from collections.abc import Iterator

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cudnn.gemm.cutedsl.grouped.moe_utils import MoEWeightMode
from cudnn.gemm.cutedsl.grouped.quant.grouped_gemm_quant import (
    BlockScaledMoEGroupedGemmQuantKernel,
)
from cutlass.cute.nvgpu import OperandMajorMode
from cutlass.cute.runtime import make_ptr

from tests.conformance import data
from tests.conformance.case import Case
from tests.conformance.host import NUM_SMS, as_device

PAD = 256  # rows of an expert start at a multiple of this


def _fake(dtype: type, shape: tuple[int, ...], order: tuple[int, ...], align: int = 16) -> object:
    return cute.runtime.make_fake_compact_tensor(
        dtype, shape, stride_order=order, assumed_align=align
    )


def _fake_scales(rows: int, k: int, experts: int) -> object:
    tiles, groups = -(-rows // 128), k // 64
    return cute.runtime.make_fake_tensor(
        cutlass.Float8E4M3FN,
        (32, 4, tiles, 4, groups, experts),
        (16, 4, 512 * groups, 1, 512, 512 * groups * tiles),
        assumed_align=16,
    )


def _scales(scale: torch.Tensor) -> torch.Tensor:
    """(E, rows, groups) -> a (32, 4, tiles, 4, groups / 4, E) view of the tiles."""
    return data.tiled_scales(scale).permute(3, 4, 1, 5, 2, 0)


def _pointer(dtype: type, address: int, align: int) -> object:
    return make_ptr(dtype, address, cute.AddressSpace.gmem, assumed_align=align)


def _case(
    name: str,
    counts: list[int],
    n: int,
    k: int,
    pair: bool,
    row_scale: bool = False,
    dynamic: bool = True,
    discrete: bool = False,
) -> Case:
    """`discrete`: weights by an array of addresses; a first kernel builds a tensor map for each."""
    generator = torch.Generator().manual_seed(len(name))
    experts, rows = len(counts), sum(counts)
    tile_m = 256 if pair else 128
    kernel = BlockScaledMoEGroupedGemmQuantKernel(
        sf_vec_size=16,
        acc_dtype=cutlass.Float32,
        use_2cta_instrs=pair,
        mma_tiler_mn=(tile_m, 256),
        cluster_shape_mn=(2 if pair else 1, 1),
        vectorized_f32=True,
        generate_sfd=False,
        discrete_col_sfd=False,
        enable_bias=False,
        expert_cnt=experts,
        weight_mode=MoEWeightMode.DISCRETE if discrete else MoEWeightMode.DENSE,
        use_dynamic_sched=dynamic,
    )
    fp4, bf16, f32, i32 = cutlass.Float4E2M1FN, cutlass.BFloat16, cutlass.Float32, cutlass.Int32
    order = (1, 0, 2)
    workspace = torch.zeros(4096, dtype=torch.uint8)
    aligned = workspace.data_ptr() + (-workspace.data_ptr()) % 128
    pointer = _pointer(cutlass.Uint8, aligned, 128)
    a, b = data.operand(generator, rows, k), data.operand(generator, experts, n, k)
    b_scales = data.tiled_scales(b.scale)
    addresses = torch.tensor(
        [[b.codes[e].data_ptr() for e in range(experts)]]
        + [[b_scales[e].data_ptr() for e in range(experts)]]
    )
    b_addresses = [_pointer(cutlass.Int64, addresses[i].data_ptr(), 8) for i in range(2)]
    compiled = cute.compile(
        kernel,
        a=_fake(fp4, (rows, k, 1), order),
        b=b_addresses[0] if discrete else _fake(fp4, (n, k, experts), order),
        sfb=b_addresses[1] if discrete else _fake_scales(n, k, experts),
        n=cutlass.Int32(n),
        k=cutlass.Int32(k),
        b_stride_size=cutlass.Int64(k),
        b_major_mode=OperandMajorMode.K,
        workspace_ptr=pointer,
        d=_fake(bf16, (rows, n, 1), order),
        d_col=_fake(bf16, (rows, n, 1), order),
        sfa=_fake_scales(rows, k, 1),
        sfd_row_tensor=None,
        sfd_col_tensor=None,
        amax_tensor=None,
        norm_const_tensor=None,
        padded_offsets=_fake(i32, (experts,), (0,)),
        alpha=_fake(f32, (experts,), (0,)),
        row_scale=_fake(f32, (rows,), (0,), 4) if row_scale else None,
        bias=None,
        prob=_fake(f32, (rows, 1, 1), (0, 1, 2), 4),
        max_active_clusters=NUM_SMS // (2 if pair else 1),
        stream=cuda.CUstream(0),
        options="--enable-tvm-ffi",
    )
    alpha, prob = (
        data.powers_of_two(generator, experts),
        data.powers_of_two(generator, rows, 1, 1),
    )
    per_row = data.powers_of_two(generator, rows) if row_scale else None
    out = torch.empty(rows, n, 1, dtype=torch.bfloat16)
    out_col = torch.empty(rows, n, 1, dtype=torch.bfloat16)
    a4 = a.fp4.unsqueeze(-1)
    weights = b_addresses if discrete else [b.fp4.permute(1, 2, 0), _scales(b.scale)]
    arguments = [a4, *weights, n, k, k, pointer, out, out_col, _scales(a.scale[None])]
    arguments += [None, None, None, None, data.offsets(counts)[1:].clone(), alpha, per_row]
    arguments += [None, prob]
    bound = [as_device(argument) for argument in arguments]

    def launch() -> None:
        workspace.zero_()
        compiled(*bound, cuda.CUstream(0), None)

    acc = data.matmul(a, b, counts) * alpha[data.expert_of_row(counts)][:, None].double()
    acc = acc * prob[:, :, 0].double()
    if per_row is not None:
        acc = acc * per_row[:, None].double()

    def check() -> str:
        data.check_equal(out[:, :, 0], acc.to(torch.bfloat16), name)
        return "bit-equal"

    keep = [b.codes, b_scales, addresses]
    return Case(name, launch, {"out": out}, check, macs=rows * n * k, keep=keep)


def cases() -> Iterator[Case]:
    """Pairs and single CTAs, both schedulers, scales per row, maps made on the device."""
    yield _case("cudnn.quant.2cta", [256], 256, 512, True)
    yield _case("cudnn.quant.2cta.ragged", [256, 0, 512, 256], 512, 256, True, row_scale=True)
    yield _case("cudnn.quant.1cta", [256], 256, 512, False)
    yield _case("cudnn.quant.1cta.static", [256, 512], 512, 256, False, True, dynamic=False)
    yield _case("cudnn.quant.2cta.discrete", [256, 0, 256], 256, 256, True, discrete=True)
    yield _case("cudnn.quant.1cta.discrete", [256, 256], 512, 256, False, discrete=True)
