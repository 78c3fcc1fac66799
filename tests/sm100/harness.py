"""Runs the SM100 grouped GEMM in the simulator on random NVFP4 data with poisoned surroundings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, sim
from cute_kernels.config import GemmConfig
from cute_kernels.device.epilogues import ActivationQuantize, StoreRows
from cute_kernels.device.scatter import ScatterAdd
from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
from cute_kernels.sm100.loads import ContiguousRows, GatheredRows
from cute_kernels.torch_math import TORCH_MATH

CHECKS = sim.Checks(mbarrier_init_fence=True, tcgen05_fence=True)
GUARD = 4096  # poisoned elements in front of and behind every buffer
NAN = float("nan")
BAD_INDEX = 1 << 30
BAD_CODES = 0x77  # 6 twice: E2M1 has no NaN, but the largest code with a NaN scale is one


@dataclass(frozen=True)
class Problem:
    """Rows per expert and the sizes of the weights."""

    counts: tuple[int, ...]
    n: int
    k: int
    gathered: bool = False
    biased: bool = False
    seed: int = 0


class Data:
    """Operands of a `Problem`, the exact accumulators, and addresses for the launch."""

    def __init__(self, problem: Problem) -> None:
        p, g = problem, torch.Generator().manual_seed(problem.seed)
        self.problem = problem
        self.inputs: list[tuple[Tensor, Tensor]] = []  # (buffer with its guards, what it held)
        experts, rows = len(p.counts), sum(p.counts)
        counts = torch.tensor(p.counts)
        self.offsets = self.guard(torch.cat((torch.zeros(1), counts.cumsum(0))).int(), -1)
        tokens = max(rows // 2, 1) if p.gathered else rows
        self.tokens = nvfp4.quantize(torch.randn(tokens, p.k, generator=g))
        self.token_data = self.guard(self.tokens.data, BAD_CODES)
        self.token_scale = self.guard(self.tokens.global_scale, NAN)
        index = torch.arange(rows)
        if p.gathered:
            index = torch.randint(0, tokens, (rows,), generator=g)
        self.row_token = self.guard(index.int(), BAD_INDEX)
        scales = self.tokens.scale.view(torch.uint8)[index]
        self.gx = self.guard(self.tokens.global_scale[index], NAN)
        self.rows = self.guard(self.tokens.data[index], BAD_CODES)
        self.scale = self.guard(self._poisoned_scales(scales), nvfp4.UE4M3_NAN)
        weights = torch.randn(experts, p.n, p.k, generator=g)
        self.w = nvfp4.quantize(weights, "per_tensor", nvfp4.SWIZZLE_32_4_4)
        self.w_data = self.guard(self.w.data, BAD_CODES)
        self.w_scale = self.guard(self.w.scale.view(torch.uint8), nvfp4.UE4M3_NAN)
        self.expert = torch.repeat_interleave(torch.arange(experts), counts)
        exact = nvfp4.Nvfp4Tensor(self.rows, scales, torch.ones(()))
        a, b = nvfp4.decode(exact, torch.float64), nvfp4.decode(self.w, torch.float64)
        self.acc = torch.cat([a[self.expert == e] @ b[e].t() for e in range(experts)]).float()
        # sum of |a b|: what the rounding of a sum is measured by (numerics section 6)
        size = [a[self.expert == e].abs() @ b[e].abs().t() for e in range(experts)]
        self.size = torch.cat(size)
        self.counter = self.guard(torch.zeros(1, dtype=torch.int32), -1)  # 0 again after a launch
        self.bias = None
        if p.biased:
            self.bias = self.guard(torch.randn(experts, p.n, generator=g), NAN)

    def guard(self, tensor: Tensor, poison: float) -> Tensor:
        """A copy in the middle of a poisoned buffer, which must stay as it is."""
        copy, whole = guarded(tuple(tensor.shape), tensor.dtype, poison)
        copy.copy_(tensor)
        self.inputs.append((whole, whole.clone()))
        return copy

    def assert_inputs_intact(self) -> None:
        for now, before in self.inputs:
            assert torch.equal(now.view(torch.uint8), before.view(torch.uint8)), (
                "the kernel wrote into or around an input"
            )

    def _poisoned_scales(self, scales: Tensor) -> Tensor:
        """Grouped scales whose padding rows are NaN: they must reach no result."""
        rows = scales.shape[0]
        grouped = nvfp4.group_scales(scales, self.offsets)
        plain = nvfp4.unswizzle(grouped, grouped.shape[0], grouped.shape[1])
        real = torch.zeros(grouped.shape[0], dtype=torch.bool)
        real[nvfp4.grouped_rows(self.offsets, rows)] = True
        plain[~real] = nvfp4.UE4M3_NAN
        return nvfp4.swizzle(plain).contiguous()

    def load_arguments(self) -> list[int]:
        if self.problem.gathered:
            return [
                self.token_data.data_ptr(), self.scale.data_ptr(), self.row_token.data_ptr(),
                self.tokens.data.shape[0], len(self.row_token), self.scale.shape[0],
            ]  # fmt: skip
        return [self.rows.data_ptr(), self.scale.data_ptr(), len(self.rows), self.scale.shape[0]]

    def launch(self, config: GemmConfig, epilogue: Any, outputs: list[int], **schedule: Any) -> Any:
        kernel = self.kernel(config, epilogue)
        with sim.Simulator(checks=CHECKS, **schedule) as s:
            self.call(kernel, outputs)
        self.assert_inputs_intact()
        return s.launches[0]

    def kernel(self, config: GemmConfig, epilogue: Any, pdl: bool = True) -> Sm100GroupedGemm:
        load = GatheredRows() if self.problem.gathered else ContiguousRows()
        return Sm100GroupedGemm(load, epilogue, config, pdl)

    def call(self, kernel: Sm100GroupedGemm, outputs: list[int], clusters: int = 0) -> None:
        """Launch in the simulator that is active; ``outputs``: arguments of the epilogue."""
        p, config = self.problem, kernel.config
        weights = [self.w_data.data_ptr(), self.w_scale.data_ptr(), self.offsets.data_ptr()]
        counter = [self.counter.data_ptr()] if config.dynamic else []
        compiler.load(kernel, "sm_100a")(
            *self.load_arguments(), *weights, *outputs,
            len(p.counts), p.n, p.k, *counter, clusters or max(4 // config.cluster, 2), 0,
        )  # fmt: skip


def guarded(shape: tuple[int, ...], dtype: torch.dtype, poison: float) -> tuple[Tensor, Tensor]:
    """(output, the buffer around it): both filled with ``poison``."""
    size = int(torch.tensor(shape).prod())
    whole = torch.full((size + 2 * GUARD,), poison, dtype=dtype)
    return whole[GUARD : GUARD + size].view(shape), whole


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def assert_guard_intact(whole: Tensor, poison: float) -> None:
    edges = torch.cat((whole[:GUARD], whole[-GUARD:]))
    same = torch.isnan(edges) if poison != poison else edges == poison
    assert bool(same.all()), "the kernel wrote outside its output"


def store_rows(
    data: Data, config: GemmConfig, dtype: str = "Float32", **schedule: Any
) -> tuple[Tensor, Tensor, Any]:
    """(result, exact expectation, launch) of the `StoreRows` epilogue."""
    p = data.problem
    torch_type = {"Float32": torch.float32, "BFloat16": torch.bfloat16, "Float16": torch.float16}
    out, whole = guarded((sum(p.counts), p.n), torch_type[dtype], float("nan"))
    alpha = data.guard(torch.linspace(0.5, 1.5, len(p.counts)), NAN)
    arguments = [out.data_ptr(), alpha.data_ptr(), data.gx.data_ptr()]
    want = data.acc * (data.gx * alpha[data.expert]).unsqueeze(1)
    if data.bias is not None:
        arguments.append(data.bias.data_ptr())
        want = want + data.bias[data.expert]
    epilogue = StoreRows(dtype, row_scaled=True, biased=p.biased)
    launch = data.launch(config, epilogue, arguments, **schedule)
    assert_guard_intact(whole, float("nan"))
    return out, want.to(torch_type[dtype]), launch


def scatter_add(
    data: Data, config: GemmConfig, dtype: str = "Float32", **schedule: Any
) -> tuple[Tensor, Tensor]:
    """(result, expectation) of `ScatterAdd` of every row into a token of its own, in a permuted
    order, so that sums have one order; y holds something before."""
    p = data.problem
    torch_type = {"Float32": torch.float32, "BFloat16": torch.bfloat16}[dtype]
    rows, g = sum(p.counts), torch.Generator().manual_seed(p.seed + 1)
    y, whole = guarded((rows + 1, p.n), torch_type, NAN)
    y.copy_(torch.randn(rows + 1, p.n, generator=g))
    before = y.clone()
    token = data.guard(torch.randperm(rows, generator=g).int(), BAD_INDEX)
    weight = data.guard(torch.rand(rows, generator=g), NAN)
    alpha = data.guard(torch.linspace(0.5, 1.5, len(p.counts)), NAN)
    value = data.acc * (data.gx * alpha[data.expert]).unsqueeze(1)
    if data.bias is not None:
        value = value + data.bias[data.expert]
    part = weight.unsqueeze(1) * value.bfloat16().float()
    want = before.clone()
    want[token.long()] += part.to(torch_type)
    arguments = [t.data_ptr() for t in (y, alpha, data.gx)]
    arguments += [] if data.bias is None else [data.bias.data_ptr()]
    arguments += [token.data_ptr(), weight.data_ptr()]
    epilogue = ScatterAdd(dtype, row_scaled=True, biased=p.biased)
    data.launch(config, epilogue, arguments, **schedule)
    assert_guard_intact(whole, NAN)
    return y, want


def activation_quantize(
    data: Data, config: GemmConfig, activation: Any, **schedule: Any
) -> tuple[nvfp4.Nvfp4Tensor, nvfp4.Nvfp4Tensor]:
    """(result, expectation given the same accumulators) of `ActivationQuantize`."""
    p = data.problem
    epilogue = ActivationQuantize(activation, indexed=p.gathered, biased=p.biased)
    parts, rows, experts = epilogue.parts, sum(p.counts), len(p.counts)
    inter = p.n // parts
    codes, whole = guarded((rows, inter // 2), torch.uint8, 0xA5)
    shape = (nvfp4.grouped_scale_rows(rows, experts), -(-inter // 64) * 4)
    scale, scale_whole = guarded(shape, torch.uint8, nvfp4.UE4M3_NAN)
    g13 = data.guard(torch.linspace(1e-4, 9e-4, experts * parts).reshape(experts, parts), NAN)
    gh = data.guard(torch.linspace(1e-4, 8e-4, experts), NAN)
    gx = data.token_scale if p.gathered else data.gx
    arguments = [codes.data_ptr(), scale.data_ptr(), g13.data_ptr(), gx.data_ptr()]
    arguments += [data.row_token.data_ptr()] if p.gathered else []
    arguments.append(gh.data_ptr())
    pre = []
    for i in range(parts):
        value = data.acc[:, i::parts] * (data.gx * g13[data.expert, i]).unsqueeze(1)
        pre.append(value if data.bias is None else value + data.bias[data.expert, i::parts])
    if data.bias is not None:
        arguments.append(data.bias.data_ptr())
    h = activation(TORCH_MATH, *pre)
    data.launch(config, epilogue, arguments, **schedule)
    assert_guard_intact(whole, 0xA5)
    assert_guard_intact(scale_whole, nvfp4.UE4M3_NAN)
    got = nvfp4.Nvfp4Tensor(
        codes, scale, gh[data.expert], nvfp4.SWIZZLE_32_4_4_GROUPED, data.offsets
    )
    return got, nvfp4.quantize_grouped(h, data.offsets, gh[data.expert])
