"""Experts over the ranks of a torch.distributed process group."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import itertools
import json
import secrets
from collections.abc import Callable, Hashable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from moe.failures import WATCHDOG, Notes, RankError, Recorded, Watch, abort, drained
from moe.weights import ExpertWeights

_T = TypeVar("_T")

_FINGERPRINT_BYTES = 4096  # of one rank at construction
_VERSION = 2  # of the wire format
_DRAIN = 3.0  # s that a rank which raised gives its own collectives to finish


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Fixed places of the exchange for each pair of ranks, so that no size depends on the routing.

    tokens  C: tokens that one rank can send to one rank
    rows    S: slots of them; None: C * top_k, always enough for C tokens
    """

    tokens: int
    rows: int | None = None

    def problem(self) -> str | None:
        if self.tokens < 1 or (self.rows is not None and self.rows < 1):
            return f"capacity must be positive, got {self}"
        return None


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Tokens live on one rank each and travel to their experts.

    pre_reduce  False: one bf16 row comes back per (token, slot) and the owner sums in slot order:
                the bits of one rank. True: each rank weights and sums its slots of a token in fp32
                and sends one bf16 row; not the same bits (see `ExpertParallel`)
    capacity    None: sizes follow the routing, and every call waits for the device once. A
                `Capacity`: sizes are fixed and nothing waits (CUDA graphs); tokens that find no
                place come out as NaN and are counted (see `ExpertParallel.check`)
    split       parts of a batch, in the order of its tokens: one travels while another is computed.
                The same bits. Experts read their weights once for each part. A capacity is shared
                out to the parts, rounded up, with rows for one token at least
    """

    pre_reduce: bool = False
    capacity: Capacity | None = None
    split: int = 1

    def problem(self) -> str | None:
        if self.split < 1:
            return f"split must be positive, got {self.split}"
        return None if self.capacity is None else self.capacity.problem()


@dataclasses.dataclass(frozen=True)
class Replicated:
    """Every rank has all tokens and computes its experts.

    reduce  False: a rank returns its own experts' part, the caller sums (the shared expert is part
            of rank 0's). True: parts are summed in fp32 over the ranks, then the shared expert
    """

    reduce: bool = False


class CapacityError(RuntimeError):
    """Tokens found no place in a fixed capacity; their rows of y are NaN."""


def split_experts(num_experts: int, ranks: int) -> list[tuple[int, int]]:
    """Contiguous ranges (first, end) whose sizes differ by one at most, larger ones first.

    >>> split_experts(30, 8)[:2], split_experts(30, 8)[-2:]
    ([(0, 4), (4, 8)], [(24, 27), (27, 30)])
    >>> split_experts(3, 5)
    [(0, 1), (1, 2), (2, 3), (3, 3), (3, 3)]
    """
    size, rest = divmod(num_experts, ranks)
    bounds = [r * size + min(r, rest) for r in range(ranks + 1)]
    return list(itertools.pairwise(bounds))


class ExpertParallel:
    """The experts of a layer, split over the ranks of ``group`` in contiguous ranges.

        parallel = ExpertParallel(group, num_experts=384)
        cfg, w, extras = load_checkpoint(path, layer=3, expert_range=parallel.expert_range)
        layer = MoE(cfg, w, parallel=parallel, **extras.router())
        y = layer(x)                   # the tokens of this rank, any number of them, also none

    group        process group (or one-dimensional DeviceMesh) of the ranks; None: the default one.
                 gloo for layers on a CPU, NCCL for layers on GPUs
    num_experts  of the layer, any number: ranks beyond it own none
    mode         `Exchange` (default) or `Replicated`
    max_tokens   largest number of tokens of any rank in one call; None: no limit. More are refused
    timeout      seconds that a rank waits for others. None: the timeout of ``group``. A number
                 makes a process group of its own, with new communicators

    Construction is collective, as is that of every layer that uses the object, in the same order on
    every rank: fingerprints of the configuration are compared, and every rank raises ValueError if
    one differs. Several layers may share it. Calls are collective too, in `Replicated` mode only
    with reduce=True.

    Bytes between ranks, of one call and one rank, n_d = tokens with a slot on rank d, s_d = slots
    there (sums over the *other* ranks d; K slots a token, hidden H, ranks W; r16 rounds up to 16):

        header    (16 * split + 8) * (W - 1)                      (not with a capacity)
        dispatch  r16(9 H / 16 + 8 + 4 K) * sum n_d               nvfp4; bf16: r16(2 H + 4 + 4 K)
        return    2 H * sum s_d                                   what comes back

    With pre_reduce a dispatched row has 4 K - 4 bytes more (the weights, and no place of its first
    row), and 2 H * sum n_d come back.
    With a capacity n_d = C and s_d = S, full or not. `bytes_sent` counts what this rank really
    sends, by phase; what comes back to it is the "return" of the others. `Replicated` with reduce
    hands 4 H T bytes to one all-reduce.

    pre_reduce changes y: with p_r the sum of a token's slots on rank r, one rounding to bf16 of
    each p_r and another order of the sum,

        |y' - y| <= (2^-8 + (K + W) 2^-23) sum_j |w_j o_j|, before y is rounded to its own type.

    A rank that raises in a call, dies, or does not answer within the timeout makes every other rank
    raise `RankError`, which names rank and phase; afterwards the object refuses all calls, and a
    new one on a new group is needed. gloo: in every wait. NCCL: where the host waits, for the
    counts (`Exchange` without capacity) and in `check`. What the group still had under way on the
    device is aborted then, so that the process can go on or end. Elsewhere the host finds its
    stream stuck: the watchdog of the process group ends the process after the group's timeout
    (TORCH_NCCL_ASYNC_ERROR_HANDLING), but does not watch the collectives of a CUDA graph.

    Tensor parallelism inside an expert is not supported: each expert lies whole on one rank.
    """

    def __init__(
        self,
        group: Any,
        num_experts: int,
        *,
        mode: Exchange | Replicated = Exchange(),
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> None:
        self.group, self._owned = _process_group(group), False
        self.num_experts, self.mode, self.max_tokens = num_experts, mode, max_tokens
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.ranges = split_experts(num_experts, self.size)
        self.bytes_sent: collections.Counter[str] = collections.Counter()
        self.failure: str | None = None
        # int32 (E_local + 1,): expert_offsets of the rows that this rank computed in the latest
        # exchange
        self.received: Tensor | None = None
        self._layers = self._calls = self._received_in = 0
        self._phase, self._inside = "construction", False
        self._overflow: Tensor | None = None  # see `overflow`
        self._kept: dict[Hashable, Any] = {}
        limit = _group_limit(self.group) if timeout is None else timeout
        store = _group_store(self.group)
        turn = Notes(store, "", self.rank, self.size).count("moe/constructions")
        self._watch = Watch(Notes(store, f"moe/construction/{turn}", self.rank, self.size), limit)
        fields = {
            "version": _VERSION,
            "num_experts": num_experts,
            "mode": repr(mode),
            "max_tokens": repr(max_tokens),  # None is an answer here
            "timeout": repr(timeout),
            "problem": _problem(num_experts, mode, max_tokens, timeout),
        }
        with self._guard():
            nonces = self._compare(fields, secrets.token_hex(8))
        self._watch = Watch(Notes(store, f"moe/{nonces[0]}", self.rank, self.size), limit)
        if timeout is not None:
            self.group, self._owned = _with_timeout(self.group, timeout)

    # ---- what this rank owns

    @property
    def expert_range(self) -> tuple[int, int]:
        """(first, end) global ids of the experts of this rank; first == end where it has none."""
        return self.ranges[self.rank]

    def local(self, weights: ExpertWeights) -> ExpertWeights:
        """This rank's share of the weights of all experts, copied so that the rest can be freed."""
        if weights.first_expert != 0 or weights.num_experts != self.num_experts:
            raise ValueError(
                f"weights must hold all {self.num_experts} experts, got experts "
                f"{weights.first_expert} : {weights.first_expert + weights.num_experts}"
            )
        return weights.select(*self.expert_range)

    def keep(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What ``make`` gives, of the first call with this key: constants on a device."""
        if key in self._kept:
            return self._kept[key]
        value = make()
        if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._kept[key] = value  # what a graph makes exists in its replays alone
        return value

    # ---- failures

    @contextlib.contextmanager
    def call(self, phase: str = "route") -> Iterator[None]:
        """One collective call: an exception inside is reported to the other ranks and closes the
        object. Raises RankError when it is closed already.
        """
        if self._inside:
            yield
            return
        if self.failure is not None:
            raise RankError(
                f"expert parallel calls are refused after a failure ({self.failure}): make a new "
                "ExpertParallel on a new process group"
            )
        self._calls += 1
        self._phase, self._inside = phase, True
        try:
            with self._guard():
                yield
        except RankError:
            raise
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            self.failure = f"rank {self.rank} raised in {self._where()}: {text}"
            self._watch.notes.post(True, self._where(), text)
            device = self._control_device()
            if device.type == "cuda" and not drained(device, _DRAIN):
                abort(self.group, device)
            raise
        finally:
            self._inside = False

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """A RankError inside closes the object and leaves nothing under way on the device."""
        try:
            yield
        except RankError as error:
            self.failure = str(error)
            device = self._control_device()
            if device.type == "cuda":
                abort(self.group, device)
            raise

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Names what this rank does, for messages of errors."""
        before, self._phase = self._phase, name
        yield  # an exception leaves the name of its phase behind
        self._phase = before

    def _where(self) -> str:
        return f"phase {self._phase!r} of call {self._calls}"

    def check_tokens(self, count: int) -> None:
        """Raises ValueError for more tokens than ``max_tokens``."""
        if self.max_tokens is not None and count > self.max_tokens:
            raise ValueError(f"{count} tokens on rank {self.rank}, max_tokens is {self.max_tokens}")

    def check(self) -> None:
        """Raises `CapacityError` if tokens of this rank found no place since the last check; waits
        for the device. Their rows of y are NaN. No token is lost without a capacity.

        Raises `RankError` when the device waits for a rank that raised or is gone, also inside a
        CUDA graph, where nothing else finds out.
        """
        if self._overflow is None:
            return
        if self._overflow.is_cuda and self.failure is None:
            with self._guard():
                work = Recorded(self._overflow.device)
                self._watch.wait_device(work, f"parallel.check() after call {self._calls}")
        lost, tokens, rows = self._overflow.tolist()
        if lost:
            self._overflow.zero_()
            raise CapacityError(
                f"{lost} tokens of rank {self.rank} found no place in {self.mode}: a pair of ranks "
                f"needed up to {tokens} tokens and {rows} rows; their results are NaN"
            )

    def count_received(self, expert_offsets: Tensor) -> None:
        """int32 (E_local + 1,) of one part of this call: those of several parts add up."""
        if self.received is None or self._received_in != self._calls:
            self.received, self._received_in = expert_offsets, self._calls
        else:
            self.received = self.received + expert_offsets

    def overflow(self, device: torch.device) -> Tensor:
        """int64 (3,) on ``device``, what `check` reads: tokens lost for want of capacity, and the
        largest numbers of tokens and slots that any pair of ranks needed."""
        if self._overflow is None or self._overflow.device != device:
            self._overflow = torch.zeros(3, dtype=torch.int64, device=device)
        return self._overflow

    # ---- collectives: the same ones, in the same order, on every rank

    def attach(self, fields: Mapping[str, Any], device: torch.device) -> int:
        """Compare the configuration of one layer over the ranks. ``fields``: JSON values, None
        where this rank has nothing to say. Returns the number of the layer.

        Raises ValueError on every rank when one differs or cannot use this group.
        """
        with self.call(), self.phase("construction"):
            backend = dist.get_backend_config(self.group)
            usable = device.type == "cpu" or f"{device.type}:nccl" in backend
            problem = None if usable else f"layers on {device} need NCCL, the group has {backend}"
            self._compare({**fields, "problem": problem}, "")
        self.overflow(device)  # made here: what a CUDA graph makes exists in its replays alone
        self._layers += 1
        return self._layers

    def _compare(self, fields: Mapping[str, Any], nonce: str) -> list[str]:
        """All-gather ``fields``, return the nonces of all ranks. Raises ValueError with what
        differs.
        """
        text = json.dumps({**fields, "nonce": nonce}, default=str)
        if len(text.encode()) > _FINGERPRINT_BYTES:  # a long repr: compare what stands for it
            digest = hashlib.sha256(json.dumps(dict(fields), default=str).encode()).hexdigest()
            text = json.dumps({"digest": digest, "nonce": nonce, "problem": fields["problem"]})
        host = torch.zeros(_FINGERPRINT_BYTES, dtype=torch.uint8)
        data = text.encode()[:_FINGERPRINT_BYTES]
        host[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = host.to(self._control_device())
        theirs = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(theirs, mine, group=self.group, async_op=True)
        self._wait(work, on_host=True)
        tables = [json.loads(bytes(t.cpu().tolist()).rstrip(b"\0")) for t in theirs]
        _refuse_differences(tables)
        return [table["nonce"] for table in tables]

    def exchange_counts(
        self, counts: Tensor, layer: int
    ) -> tuple[list[list[int]], list[list[int]], Tensor]:
        """counts int32 (W, 2 * parts), tokens and slots for each rank -> host lists
        [[tokens, slots, tokens, ...], ...] of what goes to, and of what comes from, each rank, and
        the latter as int64 (W, 2 * parts) on the device, rows apart. Waits for the device.

        Raises RuntimeError when another rank is in a call of another layer.
        """
        with self.phase("counts"):
            width = counts.shape[1]
            table = counts.new_full((2, self.size, width + 1), layer, dtype=torch.int64)
            mine, theirs = table.unbind()
            mine[:, :width] = counts
            self._wait(self._all_to_all(theirs, mine), on_host=True)
            there, here = table.tolist()
        wrong = [f"rank {r} in layer {row[-1]}" for r, row in enumerate(here) if row[-1] != layer]
        if wrong:
            raise RuntimeError(
                f"ranks call different layers: this one is in layer {layer} (by order of "
                f"construction), {', '.join(wrong)}"
            )
        return [row[:-1] for row in there], [row[:-1] for row in here], theirs[:, :width]

    def start(
        self,
        phase: str,
        out: Tensor,
        rows: Tensor,
        out_rows: list[int] | None = None,
        in_rows: list[int] | None = None,
    ) -> Callable[[], None]:
        """Send rows for each rank, one rank after the other; ``out`` takes what comes. Without
        lists every rank gets as many. Returns what waits for it: with NCCL the stream.
        """
        with self.phase(phase):
            work = self._all_to_all(out, rows, out_rows, in_rows)

        def finish() -> None:
            with self.phase(phase):
                self._wait(work)

        return finish

    def _all_to_all(
        self,
        out: Tensor,
        rows: Tensor,
        out_rows: list[int] | None = None,
        in_rows: list[int] | None = None,
    ) -> Any:
        count = rows.shape[0]
        kept = count // self.size if in_rows is None else in_rows[self.rank]
        row_bytes = rows.nbytes // count if count else 0
        self.bytes_sent[self._phase] += (count - kept) * row_bytes
        return dist.all_to_all_single(out, rows, out_rows, in_rows, group=self.group, async_op=True)

    def max_over_ranks(self, value: Tensor) -> Tensor:
        """Maximum of fp32 () over the ranks; NaN wins, whatever the reduction of the backend."""
        with self.phase("scale"):
            theirs = [torch.empty_like(value) for _ in range(self.size)]
            work = dist.all_gather(theirs, value.contiguous(), group=self.group, async_op=True)
            self._wait(work)
            return torch.stack(theirs).amax()

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Rows (n, ...) of all ranks, rank by rank, n of its own on each; waits for the device."""
        with self.phase("gather"):
            count = torch.full((1,), rows.shape[0], dtype=torch.int64, device=rows.device)
            counts = [torch.empty_like(count) for _ in range(self.size)]
            work = dist.all_gather(counts, count, group=self.group, async_op=True)
            self._wait(work, on_host=True)
            sizes = torch.cat(counts).tolist()
            padded = rows.new_zeros((max(sizes), *rows.shape[1:]))
            padded[: rows.shape[0]] = rows
            theirs = [torch.empty_like(padded) for _ in sizes]
            self._wait(dist.all_gather(theirs, padded, group=self.group, async_op=True))
            return torch.cat([part[:n] for part, n in zip(theirs, sizes)])

    def sum_over_ranks(self, rows: Tensor) -> Tensor:
        """``rows`` summed over the ranks, in place."""
        with self.phase("reduce"):
            self._wait(dist.all_reduce(rows, group=self.group, async_op=True))
            return rows

    def _wait(self, work: Any, on_host: bool = False) -> None:
        if self._control_device().type == "cpu":
            self._watch.wait(work, self._where())
        elif on_host:
            self._watch.wait_device(work, self._where())
        else:
            work.wait()  # the stream waits, not the host

    def _control_device(self) -> torch.device:
        """Where collectives of this group find host data: NCCL moves device memory only."""
        if not _on_nccl(self.group):
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    def close(self) -> None:
        """No further calls; destroys the process group that a ``timeout`` has made of all ranks."""
        self.failure = self.failure or "closed"
        if self._owned:
            self._owned = False
            dist.destroy_process_group(self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertParallel:
        return self  # a copy of a layer talks to the same ranks

    def __reduce__(self) -> Any:
        raise TypeError("ExpertParallel cannot be pickled: it holds a process group")

    def __repr__(self) -> str:
        first, end = self.expert_range
        return (
            f"ExpertParallel(rank {self.rank} of {self.size}, experts {first}:{end} of "
            f"{self.num_experts}, {self.mode})"
        )


def _process_group(group: Any) -> Any:
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("ExpertParallel needs torch.distributed: call init_process_group first")
    if group is None:
        return dist.group.WORLD
    if hasattr(group, "mesh_dim_names") or hasattr(group, "get_all_groups"):  # a DeviceMesh
        if group.ndim != 1:
            raise ValueError(
                f"group must be one-dimensional, got a mesh of {group.ndim} dimensions: experts "
                "are split over one, tensor parallelism inside an expert is not supported"
            )
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"group must be a ProcessGroup that this rank belongs to, or None, got {group!r}"
        )
    return group


def _with_timeout(group: Any, timeout: float) -> tuple[Any, bool]:
    """A process group of the same ranks with a timeout of its own, and whether it may be destroyed.

    torch names groups that only their members create by the number of groups there are, so that one
    made after another was destroyed could find the other's addresses in the store: those stay.
    """
    ranks = dist.get_process_group_ranks(group)
    everyone = ranks == list(range(dist.get_world_size()))
    made = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout + (WATCHDOG if _on_nccl(group) else 0.0)),
        backend=dist.get_backend_config(group),
        use_local_synchronization=not everyone,
    )
    return made, everyone


def _problem(
    num_experts: int, mode: Any, max_tokens: int | None, timeout: float | None
) -> str | None:
    """What is wrong with the arguments of one rank: every rank hears of it."""
    if num_experts < 1:
        return f"num_experts must be positive, got {num_experts}"
    if not isinstance(mode, Exchange | Replicated):
        return f"mode must be Exchange(...) or Replicated(...), got {mode!r}"
    if max_tokens is not None and max_tokens < 0:
        return f"max_tokens must not be negative, got {max_tokens}"
    if timeout is not None and timeout <= 0:
        return f"timeout must be positive, got {timeout}"
    return mode.problem() if isinstance(mode, Exchange) else None


def _refuse_differences(tables: list[dict[str, Any]]) -> None:
    problems = [f"rank {r}: {t['problem']}" for r, t in enumerate(tables) if t["problem"]]
    if problems:
        raise ValueError("; ".join(problems))
    different = []
    for name in sorted({n for t in tables for n in t} - {"nonce", "problem"}):
        values = [t.get(name) for t in tables]
        known = [v for v in values if v is not None]
        if any(v != known[0] for v in known):
            ranks = ", ".join(f"rank {r}: {v}" for r, v in enumerate(values) if v is not None)
            different.append(f"{name} ({ranks})")
    if different:
        raise ValueError(f"ranks disagree about {'; '.join(different)}")


def _group_store(group: Any) -> Any:
    """Store of a process group, or None where this torch does not show it."""
    try:
        return group.get_group_store()
    except (AttributeError, RuntimeError):
        return None


def _on_nccl(group: Any) -> bool:
    return "nccl" in dist.get_backend_config(group)


def _group_limit(group: Any) -> float | None:
    """Seconds that a rank may wait for others in this group, or None where it does not tell. NCCL's
    watchdog ends the process after the group's timeout: a Python exception must come before.
    """
    try:
        nccl = _on_nccl(group)
        options = group._get_backend(torch.device("cuda" if nccl else "cpu")).options
        timeout = float(options._timeout.total_seconds())
    except (AttributeError, RuntimeError):
        return None
    return max(timeout - WATCHDOG, timeout / 2) if nccl else timeout
