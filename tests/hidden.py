"""Inputs for `ops.quantize_hidden`, and a kernel that shows the h it quantises."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from cutlass import Int64
from torch import Tensor

from cute_kernels import launch, nvfp4, ops
from cute_kernels.activations import Activation
from cute_kernels.device import ptx
from cute_kernels.device.hidden import VALUES, QuantizeHidden, owner
from cute_kernels.gemm_ops import HiddenScales, Rows
from tests.small_kernels import assert_same


@dataclasses.dataclass(frozen=True)
class Cubed(Activation):
    """max(x, 0)^3 / 2: written by a user, no exp, so that both sides round alike."""

    gated = False

    def __call__(self, m: Any, gate: Any, up: Any = None) -> Any:
        positive = m.maximum(gate, 0.0)
        return positive * positive * positive * 0.5


@dataclasses.dataclass(frozen=True)
class Bilinear(Activation):
    """gate * up, gated and without exp."""

    def __call__(self, m: Any, gate: Any, up: Any = None) -> Any:
        return gate * up


@dataclasses.dataclass(frozen=True)
class HiddenValues(QuantizeHidden):
    """The same kernel up to h, which it writes as fp32 (R, I) in the place of the codes."""

    @property
    def name(self) -> str:
        return f"values_{super().name}"

    def quantize_row(self, inputs, outputs, num_experts, row, tid):
        words = self.load_row(inputs.acc.toint(), row, tid)
        expert, _ = owner(inputs.offsets.toint(), num_experts, row)
        alphas = self.alphas(inputs, expert, row)
        base = outputs.data.toint() + Int64(row) * (self.inter * 4)
        for i in range(self.steps):
            piece = self.piece(i, tid)
            h = self.values(inputs, words[i], alphas, expert, piece)
            for j in range(VALUES):
                ptx.store_f32(base + (piece * VALUES + j) * 4, h[j])


@dataclasses.dataclass(frozen=True)
class HiddenCase:
    """Rows per expert, ``spare`` rows past the last expert, and the width of h."""

    counts: tuple[int, ...]
    inter: int
    activation: Activation
    indexed: bool = True
    given: bool = False
    biased: bool = False
    spare: int = 3
    special: bool = True  # rows of zeros, NaN, Inf, tiny and huge values

    @property
    def rows(self) -> int:
        return sum(self.counts) + self.spare

    def arguments(self, device: torch.device | str = "cpu") -> dict[str, Any]:
        g = torch.Generator().manual_seed(self.inter + len(self.counts))
        parts, experts = 2 if self.activation.gated else 1, len(self.counts)
        acc = torch.randn(self.rows, self.inter * parts, generator=g) * 400.0
        acc *= 2.0 ** torch.randint(-6, 7, (self.rows, 1), generator=g)
        if self.special:
            values = (0.0, float("nan"), float("inf"), 1e-38, 1e30)
            for i, value in enumerate(values[: self.rows]):
                acc[(7 * i) % self.rows, (3 * i) % 16 :: 17] = value
            acc[self.rows // 2] = 0.0
        offsets = torch.tensor([0, *self.counts]).cumsum(0).int()
        alpha = torch.rand(experts, parts, generator=g) * 1e-2 + 1e-3
        tokens = max(self.rows // 2, 1)
        gx = torch.rand(tokens if self.indexed else self.rows, generator=g) + 0.1
        token = torch.randint(0, tokens, (self.rows,), generator=g).int()
        gh = torch.rand(experts, generator=g) * 1e-2 + 1e-4
        bias = torch.randn(experts, self.inter * parts, generator=g)
        token[sum(self.counts) :] = -1

        def move(t: Tensor, use: bool = True) -> Tensor | None:
            return t.to(device) if use else None

        return {
            "acc": move(acc),
            "expert_offsets": move(offsets),
            "activation": self.activation,
            "scales": HiddenScales(move(alpha), move(gx), move(gh, self.given)),
            "row_token": move(token, self.indexed),
            "bias": move(bias, self.biased),
        }


def kernel_h(case: HiddenCase, arguments: dict[str, Any]) -> Tensor:
    """h (R, I) fp32 as the kernel's own arithmetic gives it; NaN past the last expert."""
    acc, device = arguments["acc"], arguments["acc"].device
    h = torch.full((case.rows, case.inter), float("nan"), device=device)
    options = (case.indexed, case.given, case.biased, launch.arch_of(device) != "sm_90a")
    kernel = HiddenValues(case.inter, case.activation, *options)
    scales, offsets = arguments["scales"], arguments["expert_offsets"]
    inputs = (acc, offsets, arguments["row_token"], *scales, arguments["bias"])
    launch.launch(kernel, device, *inputs, h, h, h, len(case.counts), case.rows)
    return h


def quantized(h: Tensor, arguments: dict[str, Any]) -> tuple[Rows, Tensor]:
    """What h must become, in plain PyTorch on the CPU."""
    from cute_kernels import torch_gemm

    gh, offsets = arguments["scales"].gh, arguments["expert_offsets"].cpu()
    gh = None if gh is None else gh.cpu()
    data, scale, row_gh = torch_gemm.quantized(h.cpu(), offsets, gh)
    return Rows(data, scale), row_gh


def assert_hidden(got: tuple[Rows, Tensor], want: tuple[Rows, Tensor], offsets: Tensor) -> None:
    """Every byte of real rows equal, bytes that pad K 0; rows past the last expert untouched (255,
    NaN)."""
    offsets, used = offsets.cpu(), int(offsets[-1])
    rows = len(got[1])
    assert_same(got[0].data[:used], want[0].data[:used], "codes")
    assert_same(got[1][:used], want[1][:used], "outer scales")
    real = nvfp4.grouped_rows(offsets, rows)[:used]
    groups = got[0].scale.shape[1]
    plain = [nvfp4.unswizzle(r.scale.cpu(), r.scale.shape[0], groups) for r, _ in (got, want)]
    assert_same(plain[0][real], plain[1][real], "scales")
    assert bool((got[0].data[used:] == 255).all()), "codes past the last expert were written"
    assert bool(got[1][used:].isnan().all()), "outer scales past the last expert were written"
    others = torch.ones(len(plain[0]), dtype=torch.bool)
    others[real] = False
    assert bool((plain[0][others] == 255).all()), "scales of padding rows were written"


def poisoned_hidden(arguments: dict[str, Any]) -> tuple[Rows, Tensor]:
    """`ops.quantize_hidden` into tensors of 255 and NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        return ops.quantize_hidden(**arguments)
    finally:
        torch.use_deterministic_algorithms(False)
