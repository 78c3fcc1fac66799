"""Stand-ins for the GPU that the peers' host code asks about.

Nothing here changes a kernel: the functions answer what a B200 (or an H200) would answer, and a
DLPack capsule of a CPU tensor gets the device type CUDA, because the compiled host code insists on
it.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import torch

NUM_SMS = 4  # a small device, so that persistent kernels loop

_KDL_CUDA = 2
_DEVICE_OFFSET = 8  # of DLTensor.device, after the data pointer


class _Properties:
    major, minor = 10, 0
    multi_processor_count = NUM_SMS
    name = "NVIDIA B200"
    total_memory = 180 << 30
    L2_cache_size = 126 << 20
    shared_memory_per_block_optin = 232448
    max_threads_per_multi_processor = 2048


class _Stream:
    cuda_stream = 0


class _HardwareInfo:
    def __init__(self, *args: Any) -> None:
        pass

    def get_max_active_clusters(self, size: int, *args: Any, **kwargs: Any) -> int:
        return max(1, NUM_SMS // size)

    def get_device_multiprocessor_count(self) -> int:
        return NUM_SMS


def present_gpu(capability: tuple[int, int] = (10, 0)) -> None:
    """Answer torch's and the DSL's questions about the device as a small B200 would, or a small
    H200 (9, 0)."""
    import cutlass

    _Properties.major, _Properties.minor = capability
    _Properties.name = "NVIDIA H200" if capability == (9, 0) else "NVIDIA B200"
    answers = {
        "get_device_capability": lambda *a, **k: capability,
        "get_device_properties": lambda *a, **k: _Properties(),
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "get_device_name": lambda *a, **k: _Properties.name,
        "device": lambda *a, **k: contextlib.nullcontext(),
        "current_stream": lambda *a, **k: _Stream(),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    cutlass.utils.HardwareInfo = _HardwareInfo


class _Relabelled:
    """Something with a DLPack capsule that says CUDA."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _KDL_CUDA, 0

    def __dlpack__(self, **kwargs: Any) -> Any:
        capsule = self._tensor.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        address = get(capsule, b"dltensor") + _DEVICE_OFFSET
        ctypes.c_int32.from_address(address).value = _KDL_CUDA
        return capsule


def as_device(value: Any) -> Any:
    """The same value with every CPU tensor in it, also inside tuples, presented as CUDA memory."""
    import tvm_ffi

    if isinstance(value, torch.Tensor):
        return tvm_ffi.from_dlpack(_Relabelled(value))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(as_device(item) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(as_device(item) for item in value)
    return value


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the peers' warnings about the machine."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
