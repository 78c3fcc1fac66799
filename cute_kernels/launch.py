"""What the operations on torch tensors share: their torch.library namespace, checks of arguments,
buffers, and the launch of a kernel.

An operation is registered in one form: it writes into tensors that the caller gives, whose shapes
its ``*_buffers`` function names. The public functions of `cute_kernels.ops` allocate these, or
take them (``out``): a layer that planned its memory runs the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels import compile as compiler
from cute_kernels.nvfp4 import TILE_GROUPS, grouped_scale_rows

NAMESPACE = "nvfp4_megamoe"
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
DSL_TYPES = {
    torch.bfloat16: "BFloat16",
    torch.float16: "Float16",
    torch.float32: "Float32",
    torch.int32: "Int32",
    torch.int64: "Int64",
}
INT32_ROWS = 2**31  # row indices are int32
ALIGNMENT = 16  # bytes, of every address that a kernel gets

_CPU = torch.device("cpu")

_library = torch.library.Library(NAMESPACE, "DEF")  # type: ignore[no-untyped-call]


class Buffer(NamedTuple):
    """A tensor that an operation writes. Its size follows from shapes, never from routing."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


# A `Buffer` as a plain tuple: what every call checks is not built as a class.
Written = tuple[str, tuple[int, ...], torch.dtype]


def allocate(buffers: Sequence[Buffer], device: torch.device) -> list[Tensor]:
    """New tensors, uninitialised."""
    return [torch.empty(b.shape, dtype=b.dtype, device=device) for b in buffers]


def check_count(out: Sequence[Tensor], names: tuple[str, ...]) -> Sequence[Tensor]:
    """``out``, if it has a tensor for each of the names."""
    if len(out) != len(names):
        raise ValueError(f"out must hold {', '.join(names)}, got {len(out)} tensors")
    return out


def grouped_scales(name: str, rows: int, experts: int, columns: int) -> Written:
    """Scales of ``rows`` routed rows in SWIZZLE_32_4_4_GROUPED, enough for any routing."""
    groups = columns // 16
    padded = -(-groups // TILE_GROUPS) * TILE_GROUPS
    return name, (grouped_scale_rows(rows, experts), padded), torch.uint8


# ---- checks


def check_matrix(x: Tensor, name: str, dtypes: tuple[torch.dtype, ...], multiple: int) -> None:
    if x.dtype not in dtypes:
        wanted = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {x.dtype}")
    if x.dim() != 2 or x.shape[1] % multiple or x.shape[1] == 0:
        raise ValueError(
            f"{name} must be (rows, columns) with columns a multiple of {multiple}, got "
            f"{tuple(x.shape)}"
        )


def check_vector(
    v: Tensor, name: str, dtype: torch.dtype, length: int | tuple[int, ...], device: torch.device
) -> None:
    if v.dtype != dtype:
        raise TypeError(f"{name} must be {dtype}, got {v.dtype}")
    lengths = length if isinstance(length, tuple) else (length,)
    if v.dim() != 1 or (lengths and v.shape[0] not in lengths):
        wanted = " or ".join(f"({n},)" for n in lengths) or "one-dimensional"
        raise ValueError(f"{name} must be {wanted}, got {tuple(v.shape)}")
    if v.device != device:
        raise ValueError(f"{name} is on {v.device}, the rows are on {device}")


def check_rows(rows: int, what: str) -> None:
    if rows >= INT32_ROWS:
        raise ValueError(f"{what} must be below 2^31 (row indices are int32), got {rows}")


def check_written(
    tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError unless the tensor is this, row-major and on ``device``: kernels get an
    address and assume the rest."""
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"{name} must be {dtype} {shape}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
    if tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, strides {row_major(shape)}, and on {device}, got strides "
            f"{tuple(tensor.stride())} on {tensor.device}"
        )


def check_out(tensors: Sequence[Tensor], buffers: Sequence[Written], device: torch.device) -> None:
    """`check_written` of each tensor and what its buffer says."""
    for tensor, buffer in zip(tensors, buffers):
        check_written(tensor, *buffer, device)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides))


# ---- launching


def flat(x: Tensor) -> Tensor:
    """Contiguous and aligned to 16 bytes, as the kernels read it; a copy only when it is not."""
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def pitched(x: Tensor, align: int = ALIGNMENT) -> tuple[Tensor, int]:
    """(x, bytes from row to row): x itself where its rows are whole and aligned, else a copy."""
    pitch = x.stride(0) * x.element_size()
    whole = x.dim() == 1 or x.stride(1) == 1
    if whole and pitch >= x[:1].nbytes and pitch % align == 0 and x.data_ptr() % align == 0:
        return x, pitch
    x = flat(x)
    return x, x[:1].nbytes


def arch_of(device: torch.device) -> str:
    """Compile target of the device. Raises RuntimeError with the reason when it has none."""
    if device == _CPU:
        return compiler.device_arch(-1, None)
    index = torch.cuda.current_device() if device.index is None else device.index
    return compiler.device_arch(index, torch.cuda.get_device_capability)


def multiprocessors(device: torch.device) -> int:
    """SMs of the device, or of the simulated one."""
    if device == _CPU:
        from cute_kernels.sim.runtime import NUM_SMS

        return NUM_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def launch(kernel: Any, device: torch.device, *values: float | Tensor | None) -> None:
    """Launch on the current stream of ``device``. Tensors become addresses, None is left out.

    kernel  a kernel object, or what makes one: (function, *arguments), see `compile.load_made`
    """
    if type(kernel) is tuple:
        launcher = compiler.load_made(kernel, device, arch_of)
    else:
        launcher = compiler.load(kernel, arch_of(device))
    on_cpu = device == _CPU
    if compiler.preparing():
        if not on_cpu:
            launcher.to_device()
        return
    numbers = [v.data_ptr() if isinstance(v, Tensor) else v for v in values if v is not None]
    if on_cpu:
        launcher(*numbers, 0)
    elif device.index in (None, torch.cuda.current_device()):
        launcher(*numbers, _stream())
    else:
        with torch.cuda.device(device):
            launcher(*numbers, _stream())


def _stream() -> int:
    """The current stream of the current device, without a Python object for it."""
    return torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())


# ---- registration


def register(
    schema: str,
    check: Callable[..., None],
    plain: Callable[..., Sequence[Tensor]],
    kernel: Callable[..., None],
) -> Any:
    """Define ``nvfp4_megamoe::<name>(inputs, outputs) -> ()``; the outputs end the schema.

    check   all arguments; the fake implementation is this alone
    plain   all arguments -> values of the first outputs, in plain PyTorch: what CPU tensors get
    kernel  all arguments; CUDA tensors, and CPU tensors while a simulator is active

    Returns the operator without a choice of overloads, which a call would make anew.
    """
    name = schema[: schema.index("(")]
    outputs = schema.count("!)")

    def on_device(*args: Any) -> None:
        check(*args)
        kernel(*args)

    def on_cpu(*args: Any) -> None:
        check(*args)
        if compiler.simulating() or compiler.preparing():
            kernel(*args)
            return
        for out, value in zip(args[-outputs:], plain(*args)):  # scratch, at the end, stays
            if out is not None:
                out.copy_(value)

    def fake(*args: Any) -> None:
        check(*args)

    _library.define(f"{schema} -> ()")  # type: ignore[no-untyped-call]
    _library.impl(name, on_device, "CUDA")  # type: ignore[no-untyped-call]
    _library.impl(name, on_cpu, "CPU")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default
