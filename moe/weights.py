"""Expert weights in the one canonical layout that every backend reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cute_kernels import nvfp4
from cute_kernels.nvfp4 import ROW_MAJOR, SWIZZLE_32_4_4, Nvfp4Tensor

ORDERS = ("gate_up", "up_gate", "interleaved")


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertWeights:
    """E local experts of width I on hidden size H; P = 2 projections with a gate, 1 without.

    l1_data   uint8 (E, P*I, H/2)  gate and up interleaved row by row (g0, u0, g1, u1, ...), K-major
              E2M1
    l1_scale  float8_e4m3fn (E, P*I padded to 128, H/16 padded to 4), SWIZZLE_32_4_4 per expert
    g13       float32 (E, P)       global scale of gate and of up (they may differ)
    l2_data   uint8 (E, H, I/2)    down projection
    l2_scale  float8_e4m3fn (E, H padded to 128, I/16 padded to 4), SWIZZLE_32_4_4 per expert
    g2        float32 (E,)
    gh        float32 (E,) or None: static scale of the intermediate h; None: one per row, from its
              amax
    gx        float32 () or None: static scale of x, the maximum over all experts of all ranks
    b13, b2   float32 (E, P*I) interleaved and (E, H), or None: biases, added right after the global
              scales
    first_expert  global id of local expert 0
    """

    l1_data: Tensor
    l1_scale: Tensor
    g13: Tensor
    l2_data: Tensor
    l2_scale: Tensor
    g2: Tensor
    gh: Tensor | None = None
    gx: Tensor | None = None
    b13: Tensor | None = None
    b2: Tensor | None = None
    first_expert: int = 0

    def __post_init__(self) -> None:
        if self.l1_data.dim() != 3 or self.l2_data.dim() != 3 or self.g13.dim() != 2:
            raise ValueError(
                "l1_data, l2_data and g13 must be (E, P*I, H/2), (E, H, I/2) and (E, P), got "
                f"{tuple(self.l1_data.shape)}, {tuple(self.l2_data.shape)}, {tuple(self.g13.shape)}"
            )
        experts, rows, half = self.l1_data.shape
        hidden, inter = half * 2, self.l2_data.shape[2] * 2
        parts = self.g13.shape[1]
        want: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "l1_data": (torch.uint8, (experts, parts * inter, half)),
            "l1_scale": (torch.float8_e4m3fn, _swizzled_shape(experts, rows, hidden)),
            "g13": (torch.float32, (experts, parts)),
            "l2_data": (torch.uint8, (experts, hidden, inter // 2)),
            "l2_scale": (torch.float8_e4m3fn, _swizzled_shape(experts, hidden, inter)),
            "g2": (torch.float32, (experts,)),
            "gh": (torch.float32, (experts,)),
            "gx": (torch.float32, ()),
            "b13": (torch.float32, (experts, parts * inter)),
            "b2": (torch.float32, (experts, hidden)),
        }
        for name, tensor in self.tensors():
            dtype, shape = want[name]
            if tensor.dtype != dtype or tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} must be {dtype} {shape} for {experts} experts, H={hidden}, I={inter}, "
                    f"got {tensor.dtype} {tuple(tensor.shape)}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
            if tensor.device != self.l1_data.device:
                raise ValueError(f"{name} is on {tensor.device}, l1_data on {self.l1_data.device}")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every tensor that is set."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                yield field.name, value

    def __repr__(self) -> str:
        """Sizes, not contents: a layer has billions of codes."""
        last = self.first_expert + self.num_experts
        present = [name for name in ("gh", "gx", "b13", "b2") if getattr(self, name) is not None]
        return (
            f"ExpertWeights(experts={self.first_expert}:{last}, hidden={self.hidden}, "
            f"intermediate={self.intermediate}, gated={self.gated}, with={present}, "
            f"{self.nbytes} bytes on {self.device})"
        )

    @property
    def num_experts(self) -> int:
        """Local experts."""
        return self.l1_data.shape[0]

    @property
    def hidden(self) -> int:
        return self.l2_data.shape[1]

    @property
    def intermediate(self) -> int:
        return self.l2_data.shape[2] * 2

    @property
    def gated(self) -> bool:
        return self.g13.shape[1] == 2

    @property
    def device(self) -> torch.device:
        return self.l1_data.device

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for _, t in self.tensors())

    def to(self, device: torch.device | str) -> ExpertWeights:
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors()}
        return dataclasses.replace(self, **moved)

    def select(self, first: int, end: int) -> ExpertWeights:
        """Copies of the experts with global ids first : end, which may be none.

        Raises ValueError when they are not all here.
        """
        start = self.first_expert
        if not start <= first <= end <= start + self.num_experts:
            raise ValueError(
                f"experts {first}:{end} are not all among the local experts "
                f"{start}:{start + self.num_experts}"
            )
        part = slice(first - start, end - start)
        chosen: dict[str, Any] = {n: t[part].clone() for n, t in self.tensors() if n != "gx"}
        return dataclasses.replace(self, **chosen, first_expert=first)

    def l1(self) -> Nvfp4Tensor:
        """Interleaved gate/up codes and scales (E, P*I, H) with global scale 1: g13 differs by
        row.
        """
        one = torch.ones((), dtype=torch.float32, device=self.device)
        return Nvfp4Tensor(self.l1_data, self.l1_scale, one, SWIZZLE_32_4_4)

    def l2(self) -> Nvfp4Tensor:
        """Down projection (E, H, I)."""
        return Nvfp4Tensor(self.l2_data, self.l2_scale, self.g2, SWIZZLE_32_4_4)

    @classmethod
    def from_bf16(
        cls,
        gate: Tensor,
        up: Tensor | None,
        down: Tensor,
        *,
        share_gate_up: bool = True,
        biases: tuple[Tensor, Tensor | None, Tensor] | None = None,
        gh: Tensor | None = None,
        gx: Tensor | None = None,
        first_expert: int = 0,
    ) -> ExpertWeights:
        """Quantise gate (E, I, H), up (E, I, H) or None (no gate: ``gate`` is the only projection)
        and down (E, H, I), bf16/fp16/fp32, one expert at a time with exact division (ModelOpt's
        bytes).

        share_gate_up  one global scale for gate and up of an expert, as ModelOpt does; else one
                       each
        biases         (gate (E, I), up (E, I) or None, down (E, H)), gh (E,), gx (): see the class
        """
        _check_projections(gate, up, down)
        experts, inter, hidden = gate.shape
        if biases is not None and len(biases) != 3:
            raise ValueError(f"biases must be those of gate, up and down, got {len(biases)}")
        _check_count("biases", biases or (), experts)
        _check_count("gh", (gh,), experts)
        builder = ExpertWeightsBuilder(
            experts,
            hidden,
            inter,
            gated=up is not None,
            first_expert=first_expert,
            device=gate.device,
        )
        for e in range(experts):
            parts = [gate[e]] if up is None else [gate[e], up[e]]
            shared = (
                torch.stack([_weight_scale(p) for p in parts]).amax() if share_gate_up else None
            )
            q = [_quantize_weight(p, shared) for p in parts]
            bias = (
                None
                if biases is None
                else (biases[0][e], None if biases[1] is None else biases[1][e], biases[2][e])
            )
            builder.set_expert(
                e,
                q[0],
                q[1] if up is not None else None,
                _quantize_weight(down[e], None),
                biases=bias,
                h_scale=None if gh is None else gh[e],
            )
        return builder.finish(gx=gx)

    @classmethod
    def from_nvfp4(
        cls,
        w13: Nvfp4Tensor,
        w2: Nvfp4Tensor,
        order: str = "gate_up",
        granularity: int = 1,
        h_scale: Tensor | None = None,
        biases: tuple[Tensor, Tensor] | None = None,
        first_expert: int = 0,
    ) -> ExpertWeights:
        """Re-lay quantised weights; no code and no scale changes its value.

        w13    (E, 2I, H), global scale (), (E,) or (E, 2) = (gate, up); or (E, I, H) when there is
               no gate
        w2     (E, H, I), global scale () or (E,)
        order  of the rows of w13: "gate_up" (all gate rows, then all up rows), "up_gate", or
               "interleaved" in turns of ``granularity`` rows, gate first
        biases (b13 (E, 2I) in the same order as w13, b2 (E, H)); h_scale (E,) fp32: static scale of
        h
        """
        if order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
        if not (isinstance(w13, Nvfp4Tensor) and isinstance(w2, Nvfp4Tensor)):
            raise TypeError(
                f"w13 and w2 must be Nvfp4Tensor, got {type(w13).__name__} and "
                f"{type(w2).__name__}; from_bf16 takes plain tensors"
            )
        if len(w13.shape) != 3 or len(w2.shape) != 3 or w13.shape[0] != w2.shape[0]:
            raise ValueError(f"w13 and w2 must be (E, rows, K), got {w13.shape} and {w2.shape}")
        experts, rows, hidden = w13.shape
        inter = w2.shape[2]
        if w2.shape[1] != hidden or rows not in (inter, 2 * inter):
            raise ValueError(
                f"w13 must be (E, 2I, H) or (E, I, H) for w2 (E, H, I), got {w13.shape} and "
                f"{w2.shape}"
            )
        gated = rows == 2 * inter
        split = _row_split(order, granularity, inter) if gated else [torch.arange(inter)]
        if biases is not None and tuple(biases[0].shape) != (experts, rows):
            raise ValueError(f"b13 must be ({experts}, {rows}), got {tuple(biases[0].shape)}")
        _check_count("biases", biases or (), experts)
        _check_count("h_scale", (h_scale,), experts)
        g13, g2 = _per_expert(w13, experts, len(split)), _per_expert(w2, experts, 1)
        builder = ExpertWeightsBuilder(
            experts, hidden, inter, gated=gated, first_expert=first_expert, device=w13.device
        )
        s13, s2 = w13.row_major_scale(), w2.row_major_scale()
        for e in range(experts):
            parts = []
            for p, index in enumerate(split):
                index = index.to(w13.device)
                picked = s13[e].view(torch.uint8)[index]
                parts.append(Nvfp4Tensor(w13.data[e][index], picked, g13[e, p]))
            bias: tuple[Tensor, Tensor | None, Tensor] | None = None
            if biases is not None:
                b = [biases[0][e][index.to(biases[0].device)] for index in split]
                bias = (b[0], b[1] if gated else None, biases[1][e])
            builder.set_expert(
                e,
                parts[0],
                parts[1] if gated else None,
                Nvfp4Tensor(w2.data[e], s2[e], g2[e, 0]),
                biases=bias,
                h_scale=None if h_scale is None else h_scale[e],
            )
        return builder.finish()


class ExpertWeightsBuilder:
    """Fills an `ExpertWeights` one expert at a time: peak memory is the result plus one expert.

    Raises ValueError for a wrong shape, an expert that was never set, or an h_scale that only some
    experts have.
    """

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        *,
        gated: bool = True,
        first_expert: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.hidden, self.intermediate, self.gated = hidden, intermediate, gated
        self.first_expert = first_expert
        parts = 2 if gated else 1
        rows = parts * intermediate

        def new(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._l1 = new((num_experts, rows, hidden // 2), torch.uint8)
        self._l1_scale = new(_swizzled_shape(num_experts, rows, hidden), torch.uint8)
        self._l2 = new((num_experts, hidden, intermediate // 2), torch.uint8)
        self._l2_scale = new(_swizzled_shape(num_experts, hidden, intermediate), torch.uint8)
        self._g13 = new((num_experts, parts), torch.float32)
        self._g2 = new((num_experts,), torch.float32)
        self._gh: list[Tensor | None] = [None] * num_experts
        self._bias: list[tuple[Tensor, Tensor] | None] = [None] * num_experts
        self._set = [False] * num_experts

    def set_expert(
        self,
        e: int,
        gate: Nvfp4Tensor,
        up: Nvfp4Tensor | None,
        down: Nvfp4Tensor,
        *,
        biases: tuple[Tensor, Tensor | None, Tensor] | None = None,
        h_scale: Tensor | float | None = None,
    ) -> None:
        """Local expert e: gate and up (I, H), down (H, I), any scale layout but the grouped one,
        scalar global scales.

        Without a gate: ``gate`` is the only projection and ``up`` is None.

        Raises ValueError, too, for a scale or a bias that is not finite, and for a block scale that
        is no UE4M3 byte: they would spoil every token of the expert.
        """
        parts = [gate] if up is None else [gate, up]
        if len(parts) != self._g13.shape[1]:
            raise ValueError(
                f"expert {e}: {'gate and up' if self.gated else 'one projection and up=None'} "
                f"expected, got up={'None' if up is None else 'a tensor'}"
            )
        for name, q, want in (
            *((n, p, (self.intermediate, self.hidden)) for n, p in zip(("gate", "up"), parts)),
            ("down", down, (self.hidden, self.intermediate)),
        ):
            if q.shape != want or q.global_scale.numel() != 1:
                raise ValueError(
                    f"expert {e}: {name} must be {want} with one global scale, got {q.shape} with "
                    f"{tuple(q.global_scale.shape)}"
                )
            _check_values(f"expert {e}: {name}", q)
        bias = self._bias_of(e, biases)
        if h_scale is not None:
            h_scale = torch.as_tensor(h_scale, dtype=torch.float32)
            _check_positive(f"expert {e}: h_scale", h_scale)
        step = len(parts)
        scale13 = self._interleave([p.row_major_scale().view(torch.uint8) for p in parts])
        for i, part in enumerate(parts):
            self._l1[e, i::step] = part.data.to(self._l1.device)
            self._g13[e, i] = part.global_scale.reshape(())
        self._l1_scale[e] = nvfp4.swizzle(scale13.to(self._l1.device))
        self._l2[e] = down.data.to(self._l2.device)
        self._l2_scale[e] = nvfp4.swizzle(
            down.row_major_scale().view(torch.uint8).to(self._l2.device)
        )
        self._g2[e] = down.global_scale.reshape(())
        self._gh[e], self._bias[e] = h_scale, bias
        self._set[e] = True

    def _bias_of(
        self, e: int, biases: tuple[Tensor, Tensor | None, Tensor] | None
    ) -> tuple[Tensor, Tensor] | None:
        """Biases of expert e as `finish` stacks them."""
        if biases is None:
            return None
        gate, up, down = biases
        parts = [gate] if up is None else [gate, up]
        shapes = [tuple(b.shape) for b in (*parts, down)]
        want = [(self.intermediate,)] * self._g13.shape[1] + [(self.hidden,)]
        if shapes != want:
            raise ValueError(f"expert {e}: biases must be {want}, got {shapes}")
        if not all(bool(torch.isfinite(b).all()) for b in (*parts, down) if not b.is_meta):
            raise ValueError(f"expert {e}: biases must be finite: one NaN or Inf spoils its tokens")
        return self._interleave(parts).float(), down.float()

    @staticmethod
    def _interleave(parts: list[Tensor]) -> Tensor:
        return torch.stack(parts, dim=1).flatten(0, 1)

    def finish(self, gx: Tensor | float | None = None) -> ExpertWeights:
        """The result; ``gx`` () is the static scale of x, if there is one."""
        missing = [e for e, done in enumerate(self._set) if not done]
        if missing:
            raise ValueError(f"experts {missing} were never set")
        if gx is not None:
            gx = torch.as_tensor(gx, dtype=torch.float32)
            _check_positive("gx", gx)
        gh = self._all_or_none("h_scale", self._gh)
        bias = self._all_or_none("biases", self._bias)
        device = self._l1.device
        return ExpertWeights(
            self._l1,
            self._l1_scale.view(torch.float8_e4m3fn),
            self._g13,
            self._l2,
            self._l2_scale.view(torch.float8_e4m3fn),
            self._g2,
            gh=None if gh is None else torch.stack([g.reshape(()) for g in gh]).to(device),
            gx=None if gx is None else gx.reshape(()).to(device),
            b13=None if bias is None else torch.stack([b[0] for b in bias]).to(device),
            b2=None if bias is None else torch.stack([b[1] for b in bias]).to(device),
            first_expert=self.first_expert,
        )

    @staticmethod
    def _all_or_none(what: str, values: list) -> list | None:
        without = [e for e, v in enumerate(values) if v is None]
        if len(without) == len(values):
            return None
        if without:
            raise ValueError(
                f"experts {without} have no {what} while the others do: their rows would be "
                "computed differently; give all or none"
            )
        return values


def _swizzled_shape(experts: int, rows: int, k: int) -> tuple[int, int, int]:
    groups = k // nvfp4.BLOCK
    return experts, -(-rows // nvfp4.TILE_ROWS) * nvfp4.TILE_ROWS, -(-groups // 4) * 4


def _check_positive(what: str, scale: Tensor) -> None:
    """One outer scale."""
    if scale.numel() != 1:
        raise ValueError(f"{what} must be one number, got {tuple(scale.shape)}")
    if not scale.is_meta and not 0 < float(scale) < math.inf:
        raise ValueError(
            f"{what} must be positive and finite, got {float(scale)}: products with it would be "
            "zero or not finite"
        )


def _check_values(what: str, q: Nvfp4Tensor) -> None:
    """Outer scale and block scales of one projection."""
    _check_positive(f"global scale of {what}", q.global_scale)
    if not q.scale.is_meta and bool(nvfp4.invalid_scales(q.row_major_scale()).any()):
        raise ValueError(
            f"{what} has a block scale that is NaN or negative: quantised from NaN, or bytes of "
            "another format"
        )


def _check_count(name: str, tensors: tuple[Tensor | None, ...], experts: int) -> None:
    """Every tensor has a first dimension of one entry per expert."""
    for tensor in tensors:
        if tensor is not None and (tensor.dim() == 0 or tensor.shape[0] != experts):
            raise ValueError(
                f"{name} must have one entry for each of {experts} experts, got "
                f"{tuple(tensor.shape)}"
            )


def _check_projections(gate: Tensor, up: Tensor | None, down: Tensor) -> None:
    if not isinstance(gate, Tensor):
        raise TypeError(
            f"gate must be a tensor (E, I, H), got {type(gate).__name__}: without a gate the "
            "only projection is given as gate, and up is None"
        )
    if gate.dim() != 3 or down.dim() != 3:
        raise ValueError(
            f"gate must be (E, I, H) and down (E, H, I), got {tuple(gate.shape)} and "
            f"{tuple(down.shape)}"
        )
    experts, inter, hidden = gate.shape
    if tuple(down.shape) != (experts, hidden, inter):
        raise ValueError(
            f"down must be (E, H, I) = {(experts, hidden, inter)}, got {tuple(down.shape)}"
        )
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"up must be (E, I, H) = {tuple(gate.shape)}, got {tuple(up.shape)}")


def _weight_scale(w: Tensor) -> Tensor:
    """ModelOpt's weight_scale_2: amax / (6 * 448), fp32 ()."""
    g = w.abs().amax().float() / (nvfp4.E2M1_MAX * nvfp4.UE4M3_MAX)
    return g.clamp(min=nvfp4.GLOBAL_MIN)


def _quantize_weight(w: Tensor, g: Tensor | None) -> Nvfp4Tensor:
    scale = _weight_scale(w) if g is None else g
    return nvfp4.quantize(w, scale, ROW_MAJOR, exact_division=True)


def _row_split(order: str, granularity: int, inter: int) -> list[Tensor]:
    """Row indices of gate and of up in w13 (2I rows)."""
    row = torch.arange(2 * inter)
    if order == "interleaved":
        if granularity < 1 or inter % granularity:
            raise ValueError(f"granularity must divide I = {inter}, got {granularity}")
        is_up = (row // granularity) % 2 == 1
        return [row[~is_up], row[is_up]]
    first, second = row[:inter], row[inter:]
    return [first, second] if order == "gate_up" else [second, first]


def _per_expert(q: Nvfp4Tensor, experts: int, parts: int) -> Tensor:
    """Global scale as fp32 (E, parts)."""
    g = q.global_scale
    if g.dim() == 2 and g.shape == (experts, parts):
        return g
    if g.dim() > 1:
        raise ValueError(
            f"global scale must be (), ({experts},) or ({experts}, {parts}), got {tuple(g.shape)}"
        )
    return g.reshape(-1, 1).expand(experts, parts)
