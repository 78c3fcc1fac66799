"""The CUDA runtime that compiled host code sees: one small device, libraries, kernels, launches.

Host code builds tensor maps by itself and hands over plain parameters, so this is all it needs.
Layouts of the structures are those of the CUDA 13 runtime headers.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import struct
from collections.abc import Callable

from cute_kernels.sim.shim import ENTRY_POINTS

logger = logging.getLogger("cute_kernels.sim")

SUCCESS, LAUNCH_FAILURE = 0, 719
NUM_SMS = 4  # few, so that persistent kernels loop
SMEM_PER_BLOCK_OPTIN = 232448
_ENTRY = ctypes.CFUNCTYPE(ctypes.c_long, *[ctypes.c_long] * 8)

# cudaDeviceAttr -> what a small B200 answers; anything else is 0
DEVICE_ATTRIBUTES = {
    1: 1024,  # threads per block
    8: 49152,  # shared memory per block
    10: 32,  # warp size
    12: 65536,  # registers per block
    13: 1965000,  # clock, kHz
    16: NUM_SMS,
    38: 126 << 20,  # L2
    39: 2048,  # threads per multiprocessor
    75: 10,  # compute capability, major
    76: 0,  # minor
    81: 233472,  # shared memory per multiprocessor
    82: 65536,  # registers per multiprocessor
    95: 1,  # cooperative launch
    97: SMEM_PER_BLOCK_OPTIN,
    106: 32,  # blocks per multiprocessor
    111: 1024,  # shared memory reserved per block
    120: 1,  # cluster launch
}
_CLUSTER_DIMENSION, _PROGRAMMATIC = 4, 6  # cudaLaunchAttributeID
_ATTRIBUTE_SIZE, _ATTRIBUTE_VALUE = 72, 8


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """One launch as host code asked for it. ``params`` holds the address of each parameter."""

    image: bytes  # what cudaLibraryLoadData was given: the fat binary with the kernel's cubin
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    smem_bytes: int
    params: int
    programmatic: bool = False  # may start before its predecessor has ended


class Handles:
    """What compiled host code has loaded; it keeps the handles as long as the process lives."""

    def __init__(self) -> None:
        self.libraries: list[int] = []  # addresses of their images
        self.kernels: list[tuple[int, str]] = []  # (library, name)


class Runtime:
    """Answers the entry points; ``on_launch(request)`` runs kernels and may raise.

    An exception cannot pass through compiled host code: it is kept in ``error`` and the call
    returns a CUDA error, so that the host code stops; `Simulator` raises it on leaving the call.
    """

    def __init__(self, handles: Handles, on_launch: Callable[[LaunchRequest], None]) -> None:
        self.handles, self.on_launch = handles, on_launch
        self.error: BaseException | None = None
        self._entries = [_ENTRY(self._guard(name)) for name in ENTRY_POINTS]

    def connect(self, shim: ctypes.CDLL) -> None:
        for i, entry in enumerate(self._entries):
            shim.nvfp4_sim_set(ctypes.c_int(i), entry)

    def disconnect(self, shim: ctypes.CDLL) -> None:
        """Takes the callbacks back: a launch outside of a simulator is an error, not a jump to
        nowhere."""
        for i in range(len(self._entries)):
            shim.nvfp4_sim_set(ctypes.c_int(i), None)

    def _guard(self, name: str) -> Callable[..., int]:
        answer: Callable[..., int | None] = getattr(self, name.lstrip("_"))

        def call(*args: int) -> int:
            try:
                return answer(*args) or SUCCESS
            except BaseException as error:
                self.error = self.error or error
                return LAUNCH_FAILURE

        return call

    # ---- entry points, in the order of their declarations in cuda_runtime_api.h

    def cudaGetDevice(self, device: int, *_: int) -> None:
        _store_int(device, 0)

    def cudaSetDevice(self, *_: int) -> None:
        return None

    def cudaGetDeviceCount(self, count: int, *_: int) -> None:
        _store_int(count, 1)

    def cudaDeviceGetAttribute(self, value: int, attribute: int, *_: int) -> None:
        _store_int(value, DEVICE_ATTRIBUTES.get(attribute & 0xFFFFFFFF, 0))

    def cudaLibraryLoadData(self, library: int, code: int, *_: int) -> None:
        self.handles.libraries.append(code)
        _store_pointer(library, len(self.handles.libraries))

    def cudaLibraryGetKernel(self, kernel: int, library: int, name: int, *_: int) -> None:
        text = ctypes.string_at(name).decode()
        self.handles.kernels.append((library, text))
        _store_pointer(kernel, len(self.handles.kernels))

    def cudaLibraryUnload(self, *_: int) -> None:
        return None

    def cudaKernelSetAttributeForDevice(self, *_: int) -> None:
        return None

    def cudaFuncSetAttribute(self, *_: int) -> None:
        return None

    def cuKernelGetAttribute(self, value: int, *_: int) -> None:
        _store_int(value, 0)

    def cudaOccupancyMaxActiveBlocksPerMultiprocessor(self, count: int, *_: int) -> None:
        _store_int(count, 1)

    def cudaDeviceSynchronize(self, *_: int) -> None:
        return None

    def cudaStreamSynchronize(self, *_: int) -> None:
        return None

    def cudaLaunchKernel(self, *_: int) -> int:
        raise RuntimeError("host code that launches through cudaLaunchKernel is not simulated")

    def cudaLaunchKernelEx(self, config: int, kernel: int, params: int, *_: int) -> int | None:
        if self.error is not None:
            return LAUNCH_FAILURE
        library, name = self.handles.kernels[kernel - 1]
        # cudaLaunchConfig_t: gridDim, blockDim (3 x u32 each), dynamicSmemBytes, stream, attrs,
        # numAttrs
        raw = ctypes.string_at(config, 56)
        gx, gy, gz, bx, by, bz, smem, _stream, attributes, count = struct.unpack("<6I4Q", raw)
        cluster, programmatic = (1, 1, 1), False
        for i in range(count & 0xFFFFFFFF):
            at = attributes + i * _ATTRIBUTE_SIZE
            (kind,) = struct.unpack("<I", ctypes.string_at(at, 4))
            if kind == _CLUSTER_DIMENSION:
                value = ctypes.string_at(at + _ATTRIBUTE_VALUE, 12)
                cluster = struct.unpack("<3I", value)
            elif kind == _PROGRAMMATIC:
                programmatic = ctypes.string_at(at + _ATTRIBUTE_VALUE, 1) != b"\0"
        if smem > SMEM_PER_BLOCK_OPTIN:
            raise RuntimeError(
                f"{name} wants {smem} bytes of dynamic shared memory, a CTA may have "
                f"{SMEM_PER_BLOCK_OPTIN}: the launch would be refused"
            )
        image = _image(self.handles.libraries[library - 1])
        grid, block = (gx, gy, gz), (bx, by, bz)
        self.on_launch(LaunchRequest(image, name, grid, block, cluster, smem, params, programmatic))
        return None


def _store_int(address: int, value: int) -> None:
    ctypes.c_int.from_address(address).value = value


def _store_pointer(address: int, value: int) -> None:
    ctypes.c_uint64.from_address(address).value = value


_FATBIN_MAGIC = 0xBA55ED50


def _image(address: int) -> bytes:
    """The bytes behind the pointer: a fat binary (its header says how long) or a bare ELF."""
    head = ctypes.string_at(address, 16)
    magic, _version, header, size = struct.unpack("<IHHQ", head)
    if magic == _FATBIN_MAGIC:
        return ctypes.string_at(address, header + size)
    if head[:4] == b"\x7fELF":
        return ctypes.string_at(address, elf_size(ctypes.string_at(address, 64)))
    raise RuntimeError(f"unknown kernel image, starts with {head[:8].hex()}")


def elf_size(header: bytes) -> int:
    """Bytes of a 64-bit ELF object, from its first 64: it ends with its section or its program
    headers."""
    programs, sections = struct.unpack_from("<QQ", header, 32)
    program_size, programs_count, section_size, sections_count = struct.unpack_from(
        "<4H", header, 54
    )
    return max(programs + program_size * programs_count, sections + section_size * sections_count)
