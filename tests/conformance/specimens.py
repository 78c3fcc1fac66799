"""Launches of the peers' kernels for `profiling.specimens`; runs where they are installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def launcher(specimen: Any) -> Callable[[], None]:
    """A function that runs the peer's kernel once, on a device of ``specimen.ctas`` SMs."""
    from tests.conformance import host

    host.NUM_SMS = specimen.ctas
    host.present_gpu()
    makers = {"lightmoe": _lightmoe, "fi_masked": _masked, "fi_l1": _l1, "fi_l2": _l2}
    return makers[specimen.source](specimen)


def _lightmoe(s: Any) -> Callable[[], None]:
    import cuda.bindings.driver as cuda
    import lightmoe.kernels.grouped.runtime as runtime

    from tests.conformance import peer_lightmoe
    from tests.conformance.host import as_device

    runtime._compile_grouped.cache_clear()  # it does not know that the device changes
    activation = "swiglu" if s.output == "fp4" else None
    # operands swapped, static: what the package runs at few rows, bar its scheduler
    more = {"swap_ab": True, "use_dynamic_sched": False} if s.decode else {}
    tile = (s.tile_m, s.tile_n)
    compiled, seeds, *_ = peer_lightmoe._compile(1, s.n, s.k, tile, activation, **more)
    tiles, columns = -(-s.rows // 128) + 1, s.n // 2 if activation else s.n
    fp4, fp8 = torch.float4_e2m1fn_x2, torch.float8_e4m3fn
    a = torch.zeros(s.rows, s.k // 2, dtype=torch.uint8).view(fp4)
    b = torch.zeros(1, s.n, s.k // 2, dtype=torch.uint8).view(fp4)
    groups = -(-s.k // 64)
    sfa = torch.zeros(1, tiles, groups, 32, 4, 4, dtype=torch.uint8).view(fp8)
    sfb = torch.zeros(1, -(-s.n // 128), groups, 32, 4, 4, dtype=torch.uint8).view(fp8)
    out = torch.empty(s.rows, s.n, dtype=torch.bfloat16)
    if activation:
        out = torch.empty(s.rows, columns // 2, dtype=torch.uint8).view(fp4)
    out_sf = torch.empty(1, tiles, columns // 64, 32, 4, 4, dtype=torch.uint8).view(fp8)
    counter = torch.zeros(1, dtype=torch.int32)
    unused = torch.zeros(1, 2 * s.n, dtype=torch.bfloat16)
    cu = torch.tensor([0, s.rows], dtype=torch.int32)
    arguments = [a, b, out, unused, unused[:, : s.n], sfa, sfb, cu, counter, cu, cu]
    arguments += [torch.ones(1), out_sf if activation else sfa, torch.ones(2)]
    bound = [as_device(argument) for argument in arguments]

    def launch() -> None:
        counter.zero_()
        compiled(*seeds, *bound, cuda.CUstream(0))

    return launch


def _masked(s: Any) -> Callable[[], None]:
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute
    import flashinfer.gemm.kernels.grouped_gemm_masked_blackwell as module
    from cutlass.cute.runtime import make_ptr

    module.get_max_active_clusters = lambda n: s.ctas // n
    cluster = (2, 1) if s.tile_m == 256 else (1, 1)
    kernel = module.MaskedBatchedMatmulCuteDSL(
        m=s.rows, n=s.n, k=s.k, l=1, a_major="k", b_major="k", c_major="n",
        ab_dtype=cutlass.Float4E2M1FN, sf_dtype=cutlass.Float8E4M3FN, c_dtype=cutlass.BFloat16,
        alpha_dtype=cutlass.Float32, sf_vec_size=16, mma_tiler_mn=(s.tile_m, s.tile_n),
        cluster_shape_mn=cluster, sm_count=s.ctas, sm_version="sm_100",
    )  # fmt: skip
    groups = -(-s.k // 64)
    tensors = [
        torch.zeros(s.rows, s.k // 2, dtype=torch.uint8),
        torch.zeros(s.n, s.k // 2, dtype=torch.uint8),
        torch.zeros(-(-s.rows // 128), groups, 512, dtype=torch.uint8),
        torch.zeros(-(-s.n // 128), groups, 512, dtype=torch.uint8),
        torch.empty(s.rows, s.n, dtype=torch.bfloat16),
        torch.tensor([s.rows], dtype=torch.int32),
        torch.ones(1),
    ]
    types = [cutlass.Float4E2M1FN] * 2 + [cutlass.Float8E4M3FN] * 2
    types += [cutlass.BFloat16, cutlass.Int32, cutlass.Float32]
    a, b, sfa, sfb, c, masked, alpha = (
        make_ptr(kind, t.data_ptr(), cute.AddressSpace.gmem, assumed_align=32 if i < 5 else 4)
        for i, (kind, t) in enumerate(zip(types, tensors, strict=True))
    )
    arguments = (a, b, sfa, sfb, c, masked, None, alpha, *[None] * 6, cuda.CUstream(0))
    compiled = cute.compile(kernel, *arguments)

    def launch(kept: Any = tensors) -> None:
        compiled(*arguments)  # addresses only: the tensors must outlive it

    return launch


def _l1(s: Any) -> Callable[[], None]:
    from tests.conformance import peer_flashinfer as peer

    peer.NUM_SMS = s.ctas
    return _kept(peer._layer1("specimen", s.rows, 1, 1, s.n, s.k, (s.tile_m, s.tile_n)))


def _l2(s: Any) -> Callable[[], None]:
    from tests.conformance import peer_flashinfer as peer

    peer.NUM_SMS = s.ctas
    return _kept(peer._layer2("specimen", s.rows, 1, 1, s.n, s.k, (s.tile_m, s.tile_n)))


def _kept(case: Any) -> Callable[[], None]:
    def launch() -> None:
        case.launch()  # the case holds the tensors whose addresses the launch passes

    return launch
