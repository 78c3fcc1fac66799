"""The layer: route, run the experts, add the shared expert."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cute_kernels import nvfp4
from cute_kernels.activations import Activation
from cute_kernels.gemm_ops import start_simulator
from cute_kernels.nvfp4 import ROW_MAJOR, Nvfp4Tensor
from cute_kernels.ops import check_routing
from moe import kernels, kernels_sm90, packed_file, reference
from moe.backends import choose_backend
from moe.config import MoEConfig
from moe.dispatch import Batch, ExchangeCall, ReducedCall, join
from moe.experts import Numerics, run_torch, scratch_buffers
from moe.kernels import KERNEL_BACKENDS
from moe.layer_checks import (
    ROUTER_FIELDS,
    check_backend,
    check_helpers,
    check_max_tokens,
    check_router,
    check_router_device,
    check_scale,
    check_shared,
    check_tensor,
    check_tokens,
    check_weights,
    refuse_gradient,
)
from moe.local import LocalExperts
from moe.parallel import Exchange, ExpertParallel
from moe.ranges import stage
from moe.reference import Tokens
from moe.router import RouterKernels, route_tokens
from moe.weights import ExpertWeights
from moe.workspace import Workspace, total_bytes

_WEIGHT_FIELDS = tuple(
    f.name for f in dataclasses.fields(ExpertWeights) if f.name != "first_expert"
)


class MoE(nn.Module):
    """A Mixture-of-Experts layer with NVFP4 weights: y (T, H) = sum over slots of weight *
    expert(x) + shared(x).

    cfg, weights      `MoEConfig`, `ExpertWeights` (the local experts; ids of other experts
                      contribute nothing)
    router_weight     (num_experts, H) or None: without it only `experts` can be called. After a
                      write through its `.data`, call `warmup`: kernels keep it in another form
    router_bias       (num_experts,): part of the logits (gpt-oss)
    selection_bias    (num_experts,): changes which experts are chosen, never their weights
                      (DeepSeek-V3)
    tid2eid           (vocabulary, top_k) int: ids by token id (DeepSeek-V4's first layers)
    shared            callable (T, H) -> (T, H), for example a module; added last, without the
                      routed factor
    backend           "auto" or a name from `python -m moe backends`; the one in use is
                      `layer.backend`. "auto" follows `.to(device)`
    activations       "nvfp4": x and h are quantised (W4A4); "bf16": they are rounded to bf16
                      (W4A16)
    activation_scale  outer scale of x: "per_token", "static" (weights.gx) or "per_tensor"
    deterministic     False ("sm100" and "sim" alone): the second GEMM adds its rows straight into
                      their tokens, in an order that is not fixed; fewer bytes, and with three slots
                      or more the last bits of y may differ from call to call
    batch_invariant   True: a token has the same bits in any batch, whatever it costs. "sm90" sums
                      in another order for very few rows unless this pins one (over ranks it always
                      does); "torch" on a GPU refuses; the other backends do so anyway
    schedule          of the GEMMs of "sm100" and "sim". "static": a cluster strides over the tiles,
                      which cost about the same. "dynamic": clusters that are done early take more,
                      for GPUs that other kernels share. No bit depends on it
    parallel          `ExpertParallel`: this rank's experts of all ranks; None: one process owns
                      every expert it computes
    workspace         `Workspace` that several layers share, or None: scratch per call

    Every tensor is a buffer: `state_dict`, `to(device)` and `load_state_dict` work as usual. A
    change of dtype (`.half()`) leaves the quantised weights and their scales as they are. There is
    no autograd: inference only.
    """

    router_weight: Tensor | None
    router_bias: Tensor | None
    selection_bias: Tensor | None
    tid2eid: Tensor | None
    gh: Tensor | None
    gx: Tensor | None
    g13: Tensor

    def __init__(
        self,
        cfg: MoEConfig,
        weights: ExpertWeights,
        *,
        router_weight: Tensor | None = None,
        router_bias: Tensor | None = None,
        selection_bias: Tensor | None = None,
        tid2eid: Tensor | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        backend: str = "auto",
        activations: str = "nvfp4",
        activation_scale: str = "per_token",
        deterministic: bool = True,
        batch_invariant: bool = False,
        schedule: str = "static",
        parallel: ExpertParallel | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(parallel, ExpertParallel | None):
            raise ValueError(f"parallel must be an ExpertParallel or None, got {parallel!r}")
        self.parallel = parallel
        with contextlib.nullcontext() if parallel is None else parallel.call("construction"):
            check_weights(cfg, weights)
            router = (router_weight, router_bias, selection_bias, tid2eid)
            check_router(cfg, router)
            check_helpers(shared, workspace)
            self.cfg = cfg
            orders = (batch_invariant, deterministic, schedule)
            self.numerics = Numerics(activations, activation_scale, *orders)
            # a name is a promise; "auto" follows the tensors from device to device
            self._auto = backend == "auto" and parallel is None
            self.backend = self._usable(backend, weights.device)
            if parallel is not None:
                self._number = join(parallel, self._local(weights))
        if self.backend == "sim":
            start_simulator()
        self.shared = shared
        self.workspace, self._ones = workspace, kernels.Ones()
        self.first_expert = weights.first_expert
        self._keep(weights)
        for name, tensor in zip(ROUTER_FIELDS, router):
            self.register_buffer(name, None if tensor is None else tensor.detach())

    def _usable(self, backend: str, device: torch.device) -> str:
        """The backend on ``device``, or an error that says why this layer cannot run on it."""
        name = choose_backend(backend, device)
        check_backend(name, device, self.cfg, self.numerics, alone=self.parallel is None)
        return name

    def _keep(self, weights: ExpertWeights) -> None:
        """The buffers, and the router, that the backend wants."""
        self._router = RouterKernels.of(self.backend, self.cfg)
        packed = kernels_sm90.pack(weights, self.cfg) if self.backend == "sm90" else {}
        for name in kernels_sm90.PACKED:
            self._buffers.pop(name, None)
        for name, tensor in packed.items():
            self.register_buffer(name, tensor, persistent=False)
        for name in _WEIGHT_FIELDS:
            replaced = packed and name in kernels_sm90.CANONICAL
            tensor = None if replaced else getattr(weights, name)
            # float8 buffers are kept as bytes: a module-wide dtype change must not touch them
            if tensor is not None and tensor.dtype == torch.float8_e4m3fn:
                tensor = tensor.view(torch.uint8)
            self.register_buffer(name, tensor)

    def _local(self, weights: ExpertWeights | kernels_sm90.PackedExperts) -> LocalExperts:
        return LocalExperts(self.cfg, weights, self.numerics, self.backend)

    @property
    def weights(self) -> ExpertWeights:
        """The `ExpertWeights` in the buffers of this module: no copy, but for "sm90", which keeps
        them packed and makes the canonical layout anew at every access.
        """
        tensors: dict[str, Any] = {name: getattr(self, name) for name in _WEIGHT_FIELDS}
        if self.backend == "sm90":
            tensors |= kernels_sm90.unpack(self._buffers, self.cfg)
        for name in ("l1_scale", "l2_scale"):
            tensors[name] = tensors[name].view(torch.float8_e4m3fn)
        return ExpertWeights(**tensors, first_expert=self.first_expert)

    def set_scales(self, g13: Tensor, g2: Tensor, gh: Tensor | None) -> None:
        """Global scales of the calls to come: g13 (E, P), g2 (E,), and gh (E,) or None, contiguous
        fp32 on the layer's device, as in `ExpertWeights`.

        The tensors are kept, not copied: what is written into them later counts as well, on "sm90"
        from the next call of this method on. Nothing waits for the device, a CUDA graph may hold
        the call.
        """
        given = {"g13": g13, "g2": g2, "gh": gh}
        # an assignment to a module costs more than the comparison
        new = {n: scale for n, scale in given.items() if scale is not getattr(self, n)}
        for name, scale in new.items():  # all, before one is kept
            if scale is not None or name != "gh":
                shape = self.g13.shape if name == "g13" else self.g13.shape[:1]
                check_scale(name, scale, tuple(shape), self.g13.device)
        for name, scale in new.items():
            setattr(self, name, scale)
        if self.backend == "sm90":
            kernels_sm90.pack_alphas(self._buffers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> MoE:
        """Move buffers between devices, never change their dtype; the shared expert takes both.
        A backend that was left to "auto" is chosen anew, before anything moves, and `layer.backend`
        names it: weights made on a CPU get the kernels of the GPU they move to."""
        backend = self.backend
        if self._auto:
            backend = self._usable("auto", fn(self.g13).device)

        def keep_dtype(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        if recurse:
            for child in self.children():
                child._apply(fn)
        super()._apply(keep_dtype, recurse=False)
        if backend != self.backend:
            weights, self.backend = self.weights, backend
            self._keep(weights)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """The canonical layout whatever the backend keeps, so that any backend loads it."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.backend == "sm90":
            for name, tensor in kernels_sm90.unpack(self._buffers, self.cfg).items():
                destination[prefix + name] = tensor

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Weights of a state dict are canonical; "sm90" packs them into its own buffers."""
        if self.backend == "sm90":
            names = {n: prefix + n for n in kernels_sm90.CANONICAL}
            found = {n: state_dict.pop(key) for n, key in names.items() if key in state_dict}
            missing: list[str] = args[2]
            missing += [key for n, key in names.items() if n not in found]
            super()._load_from_state_dict(state_dict, prefix, *args)
            if len(found) == len(names):
                for name in kernels_sm90.PACKED:
                    old = self._buffers[name]
                    if old is not None and old.device != self.g13.device:  # assign=True moved it
                        self._buffers[name] = torch.empty_like(old, device=self.g13.device)
                kernels_sm90.repack(self._buffers, found, self.cfg)
        else:
            super()._load_from_state_dict(state_dict, prefix, *args)
        if self._router is not None:
            self._router.refresh(self.router_weight)

    def forward(self, x: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """x (T, H) or (B, S, H) bf16/fp16/fp32 -> the same shape and dtype.

        input_ids  token ids, one per token, for hash-routed layers (tid2eid); a negative one is
                   padding and reaches no expert

        Raises ValueError or TypeError for a wrong shape, dtype or device, before anything runs;
        `moe.failures.RankError` when another rank of ``parallel`` fails.
        """
        if self.parallel is None:
            return self._forward(x, input_ids)
        with self.parallel.call():
            return self._forward(x, input_ids)

    def _forward(self, x: Tensor, input_ids: Tensor | None) -> Tensor:
        flat = self._check_input(x)
        if self.router_weight is None:
            raise ValueError("this layer has no router_weight: use layer.experts(x, ids, weights)")
        with stage("moe.route"):
            ids, weights = self._route(flat, input_ids)
        shared = None
        if self.shared is not None:
            with torch.no_grad():  # its parameters may be trainable; this layer's result is not
                shared = self.shared(flat)
            check_shared(shared, tuple(flat.shape), flat.device)
        return self._run(flat, ids, weights, shared).reshape(x.shape)

    def _route(self, x: Tensor, input_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """topk_ids and topk_weights (T, top_k), times the routed factor."""
        choose, router = self._router or partial(route_tokens, cfg=self.cfg), self._router_tensors()
        check_router_device(router, x.device)
        return choose(x, router, input_ids)

    def _router_tensors(self) -> tuple[Tensor | None, ...]:
        return self.router_weight, self.router_bias, self.selection_bias, self.tid2eid

    def experts(
        self,
        x: Tokens,
        topk_ids: Tensor,
        topk_weights: Tensor,
        shared: Tensor | None = None,
    ) -> Tensor:
        """Experts only, routed by the caller: y (T, H) = sum over slots of topk_weights *
        expert(x) + shared.

        x                       (T, H) or (B, S, H) bf16/fp16/fp32, any strides; or tokens that are
                                quantised already, an `Nvfp4Tensor` (T, H) in ROW_MAJOR with outer
                                scale () or (T,): used as they are, y is bf16
        topk_ids, topk_weights  (T, top_k) or (B, S, top_k); int32/int64 global expert ids and
                                floats, any strides. An id that is negative, >= num_experts, or
                                another rank's contributes nothing; a token without a slot gets
                                exactly 0

        shared                  (T, H) or None: output of a shared expert, added last, before y is
                                rounded

        Weights are used as given: no scaling factor, and the layer's own shared expert is not run.
        """
        if self.parallel is None:
            return self._experts(x, topk_ids, topk_weights, shared)
        with self.parallel.call():
            return self._experts(x, topk_ids, topk_weights, shared)

    def _experts(
        self, x: Tokens, topk_ids: Tensor, topk_weights: Tensor, shared: Tensor | None
    ) -> Tensor:
        flat = self._check_quantised(x) if isinstance(x, Nvfp4Tensor) else self._check_input(x)
        ids, weights = self._check_ids(flat, topk_ids, topk_weights)
        refuse_gradient(weights, "topk_weights")
        if shared is not None:
            check_shared(shared, tuple(flat.shape), flat.device)
        y = self._run(flat, ids, weights, shared)
        return y if len(x.shape) == 2 else y.reshape(x.shape)

    def _check_quantised(self, x: Nvfp4Tensor) -> Nvfp4Tensor:
        hidden = self.cfg.hidden
        if len(x.shape) != 2 or x.shape[1] != hidden or x.scale_layout is not ROW_MAJOR:
            raise ValueError(
                f"quantised x must be (T, {hidden}) with scales in ROW_MAJOR, got {x.shape} in "
                f"{x.scale_layout.name}"
            )
        if self.numerics.activations != "nvfp4" or self.cfg.weight_on_input:
            raise ValueError(
                "quantised x needs activations='nvfp4' and weights that do not multiply x: the "
                "layer would have to quantise it anew"
            )
        if x.device != self.g13.device:
            raise ValueError(f"x is on {x.device}, the weights are on {self.g13.device}")
        return x

    def _check_ids(self, x: Tokens, ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Routing of the caller for x (T, H) as (T, top_k), or an error that says what is wrong."""
        check_tensor(ids, "topk_ids")
        check_tensor(weights, "topk_weights")
        if min(ids.dim(), weights.dim()) < 2 or ids.shape != weights.shape:
            raise ValueError(
                f"topk_ids and topk_weights must both be (T, {self.cfg.top_k}) or (B, S, "
                f"{self.cfg.top_k}), got {tuple(ids.shape)} and {tuple(weights.shape)}"
            )
        flat_ids, flat_weights = ids, weights
        if ids.dim() > 2:
            flat_ids, flat_weights = ids.flatten(0, -2), weights.flatten(0, -2)
        check_routing(flat_ids, flat_weights)
        if flat_ids.shape != (x.shape[0], self.cfg.top_k):
            raise ValueError(
                f"topk_ids must be ({x.shape[0]}, {self.cfg.top_k}) for {x.shape[0]} tokens, got "
                f"{tuple(ids.shape)}"
            )
        if ids.device != x.device:
            raise ValueError(f"topk_ids are on {ids.device}, x on {x.device}")
        return flat_ids, flat_weights

    def _check_input(self, x: Tensor) -> Tensor:
        check_tokens(x, self.cfg.hidden, self.g13.device)
        return x if x.dim() == 2 else x.flatten(0, -2)

    def _run(self, x: Tokens, ids: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
        needs_gx = self.numerics.activation_scale == "static" and isinstance(x, Tensor)
        if needs_gx and self.gx is None:
            raise ValueError(
                "activation_scale='static' needs a scale of x: the weights have no gx (a "
                "checkpoint's input_scale); call calibrate(x) first or choose 'per_token'"
            )
        ids = ids.contiguous()  # another kernel sorts ids apart: a warm-up knows of none
        if self.parallel is not None:
            self.parallel.check_tokens(x.shape[0])
            call = self._call(self.parallel)
            if call is not None:
                return call(Batch(x, ids, weights, shared))
            if self.parallel.rank:  # the caller sums: one part of the sum has the shared expert
                shared = None
        if self.backend == "reference":
            numerics = (self.numerics.activations, self.numerics.activation_scale)
            return reference.experts(
                x, ids, weights, self.cfg, self.weights, *numerics, shared=shared
            ).y
        if self.backend == "sm90":
            packed = self._packed_experts()
            return kernels_sm90.run_sm90(
                x, ids, weights, self.cfg, packed, self.numerics, shared, self.workspace
            )
        if self.backend in KERNEL_BACKENDS:
            local = self._kernel_experts()
            return kernels.run_kernels(
                x, ids, weights, self.cfg, local, self.numerics, shared, self.workspace
            )
        return run_torch(
            x, ids, weights, self.cfg, self.weights, self.numerics, shared, self.workspace
        )

    def _call(self, parallel: ExpertParallel) -> ExchangeCall | ReducedCall | None:
        """What runs over the ranks; None where a rank computes its part alone."""
        weights = self._packed_experts() if self.backend == "sm90" else self.weights
        local, mode = self._local(weights), parallel.mode
        if isinstance(mode, Exchange):
            return ExchangeCall(parallel, self._number, local, mode, self.workspace)
        return ReducedCall(parallel, local, self.workspace) if mode.reduce else None

    def _packed_experts(self) -> kernels_sm90.PackedExperts:
        return kernels_sm90.experts_of(self._buffers, self.cfg, self.first_expert)

    def _kernel_experts(self) -> kernels.Experts:
        tensors: dict[str, Any] = self._buffers
        return kernels.experts_of(tensors, self.first_expert, self._ones.like(tensors["g2"]))

    def plan_memory(self, max_tokens: int) -> int:
        """Bytes of scratch that a call with up to ``max_tokens`` tokens takes: the size of a
        `Workspace`. 0 for backends that take nothing from one. With ``parallel``, ``max_tokens``
        is the largest number of any rank, and every buffer is large enough for the routing that
        is worst for it: every slot of every rank on this one. With a `Capacity` every call takes
        just these bytes, which can be far fewer.
        """
        check_max_tokens(max_tokens)
        call = None if self.parallel is None else self._call(self.parallel)
        if call is not None:
            return call.memory(max_tokens)
        if self.backend == "sm90":
            packed = self._packed_experts()
            return kernels_sm90.plan_memory(max_tokens, self.cfg, packed, self.numerics)
        if self.backend in KERNEL_BACKENDS:
            local = self._kernel_experts()
            return kernels.plan_memory(max_tokens, self.cfg, local, self.numerics)
        if self.backend != "torch":
            return 0
        return total_bytes(scratch_buffers(max_tokens, self.cfg, self.weights))

    def warmup(self, max_tokens: int) -> None:
        """Prepare every call with up to ``max_tokens`` tokens: afterwards nothing is compiled.

        "sm90" is run once per configuration, with tokens that reach no expert; "sm100" and "sim"
        are not run. The PyTorch backends compile nothing. Raises ValueError when the workspace is
        too small.
        """
        need = self.plan_memory(max_tokens)
        if self.workspace is not None and need > self.workspace.nbytes:
            raise ValueError(
                f"workspace of {self.workspace.nbytes} bytes is too small for {max_tokens} tokens, "
                f"which need {need}"
            )
        if self._router is not None:
            self._router.warmup(max_tokens, self._router_tensors())
        call = None if self.parallel is None else self._call(self.parallel)
        if call is not None:
            call.warmup(max_tokens)
        elif self.backend == "sm90":
            kernels_sm90.warmup(self._run, max_tokens, self.cfg, self.numerics, self.g13)
        elif self.backend in KERNEL_BACKENDS:
            kernels.warmup(self._run, max_tokens, self.cfg, self._kernel_experts())

    @torch.no_grad()
    def calibrate(
        self,
        x: Tensor,
        input_ids: Tensor | None = None,
        routing: tuple[Tensor, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Set the static scales gh (E,) and gx () from a sample x (T, H): amax / 2688 of what each
        expert sees. Before `warmup`: rows with static scales are rounded by other kernels.

        routing  (topk_ids, topk_weights) (T, top_k), or None: the layer's own router

        An expert that no row reaches takes the largest gh of the others. Returns {"gh", "gx"}.
        With ``parallel`` the call is collective: each rank gives its part of the sample, and scales
        are those of one rank with all of it. Raises ValueError when no expert is reached
        or a scale would not be finite.
        """
        if self.parallel is None:
            return self._calibrate(x, input_ids, routing)
        with self.parallel.call("calibrate"):
            return self._calibrate(x, input_ids, routing)

    def _calibrate(
        self, x: Tensor, input_ids: Tensor | None, routing: tuple[Tensor, Tensor] | None
    ) -> dict[str, Tensor]:
        flat = self._check_input(x)
        if routing is None:
            if self.router_weight is None:
                raise ValueError("this layer has no router_weight: pass routing=(ids, weights)")
            ids, weights = self._route(flat, input_ids)
        else:
            ids, weights = self._check_ids(flat, *routing)
        if self.parallel is not None and isinstance(self.parallel.mode, Exchange):
            flat, ids, weights = map(
                self.parallel.gather_rows, (flat.float(), ids.int(), weights.float())
            )
        stages = reference.experts(
            flat, ids, weights, self.cfg, self.weights, self.numerics.activations
        )
        offsets = stages.plan.expert_offsets.tolist()
        nothing = torch.tensor(-1.0, device=x.device)
        amax = [nothing] + [
            stages.h[a:b].abs().amax() if b > a else nothing for a, b in itertools.pairwise(offsets)
        ]
        largest = torch.stack(amax).amax()
        if self.parallel is not None:
            largest = self.parallel.max_over_ranks(largest)
        if bool(largest < 0):
            raise ValueError("no token of the sample reaches an expert of this layer")
        reached = torch.stack(amax)[1:]
        limit = nvfp4.E2M1_MAX * nvfp4.UE4M3_MAX
        gh = torch.where(reached < 0, largest, reached) / limit
        scaled = flat.float() * weights.float() if self.cfg.weight_on_input else flat.float()
        gx = scaled.abs().amax() / limit
        if not bool(torch.isfinite(gh).all() & torch.isfinite(gx)):
            raise ValueError(
                "the sample holds NaN or Inf, or overflows in an expert: such scales would spoil "
                "every later call; the layer keeps those that it has"
            )
        self.gh, self.gx = (g.clamp(min=nvfp4.GLOBAL_MIN) for g in (gh, gx))
        return {"gh": self.gh, "gx": self.gx}

    def save_packed(self, path: str | Path) -> None:
        """Write config and every buffer to one safetensors file; `load_packed` reads it back bit
        for bit.

        The shared expert is not part of the file. A user-written activation is stored by name only.
        """
        tensors = {k: v for k, v in self.state_dict().items() if not k.startswith("shared.")}
        packed_file.write(path, self.cfg, self.numerics, self.first_expert, tensors)

    @classmethod
    def load_packed(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        *,
        activation: Activation | None = None,
        shared: Callable[[Tensor], Tensor] | None = None,
        backend: str = "auto",
        parallel: ExpertParallel | None = None,
        workspace: Workspace | None = None,
    ) -> MoE:
        """Inverse of `save_packed`. ``activation`` is needed when the file names a user-written
        one.

        Raises ValueError for another kind of file, an unknown activation or a damaged file.
        """
        cfg, weights, options = packed_file.read(path, device, activation)
        fixed: dict[str, Any] = {"shared": shared, "backend": backend, "workspace": workspace}
        return cls(cfg, weights, parallel=parallel, **fixed, **options)

    def extra_repr(self) -> str:
        c = self.cfg
        return (
            f"hidden={c.hidden}, intermediate={c.intermediate}, "
            f"experts={self.g13.shape[0]}/{c.num_experts}, top_k={c.top_k}, {c.activation}, "
            f"backend={self.backend}, activations={self.numerics.activations}"
        )
