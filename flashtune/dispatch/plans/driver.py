"""Calls of NVIDIA's driver that a launch needs, through ctypes, without Triton or a compiler."""

import ctypes
import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flashtune.core.system.errors import EnvironmentProblem

NO_CONTEXT = (3, 201)
"""CUDA_ERROR_NOT_INITIALIZED and CUDA_ERROR_INVALID_CONTEXT: errors in a thread that made no call of the CUDA runtime before."""

NO_RESOURCES = (1, 98, 200, 209, 218, 701)
"""Errors caused by the kernel, not by the data or the process: wrong values, images and shared memory or registers that don't fit."""

_SHARED_SIZE_ATTRIBUTE = 8
_PREFER_SHARED = 1
_NON_BLOCKING_STREAM = 1
_RELAXED_CAPTURE = 2
_PROGRAMMATIC_SERIALIZATION = 6
_COOPERATIVE = 2
_CLUSTER_DIMENSION = 4
_PORTABLE = 1
_MAPPED = 2


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an identifier and a union of 64 bytes, of which at most three integers are used."""

    _fields_ = (("id", ctypes.c_uint), ("_pad", ctypes.c_uint), ("value", ctypes.c_uint * 16))


class DriverError(RuntimeError):
    """Failure of a driver call; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        super().__init__(f"CUDA error {code} in {call}: {_error_text(code)}")
        self.code = code


@functools.cache
def library() -> ctypes.CDLL:
    """Handle of libcuda; raises EnvironmentProblem where there is none."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise EnvironmentProblem(f"NVIDIA's driver could not be loaded ({error}): install it, or run on a machine with a GPU") from None
    pointer = ctypes.c_void_p
    # A call with declared types takes a third of the time of one whose arguments ctypes has to inspect.
    found.cuLaunchKernelEx.argtypes = (pointer, pointer, pointer, pointer)
    found.cuTensorMapReplaceAddress.argtypes = (pointer, pointer)
    return found


def driven(device: torch.device) -> bool:
    """True where CUDA's driver launches kernels; elsewhere Triton does."""
    return device.type == "cuda" and torch.version.cuda is not None


def checked(call: str, *arguments: Any) -> None:
    """Make a driver call by its name; raises DriverError where it fails."""
    code = getattr(library(), call)(*arguments)
    if code:
        raise DriverError(call, code)


def use_context(device: int) -> None:
    """Make a GPU's primary context, which PyTorch's runtime uses too, current in this thread."""
    checked("cuCtxSetCurrent", _context(device))


@functools.cache
def _context(device: int) -> ctypes.c_void_p:
    context, handle = ctypes.c_void_p(), ctypes.c_int()
    checked("cuInit", 0)
    checked("cuDeviceGet", ctypes.byref(handle), device)
    checked("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


def load_function(image: bytes, entry: str, shared_bytes: int, device: int) -> int:
    """Handle of a kernel of a cubin, ready to be launched on this GPU with `shared_bytes` of dynamic shared memory.

    The module stays loaded as long as the process runs. Raises DriverError, also where the GPU has less shared memory.
    """
    use_context(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with relaxed_capture():
        checked("cuModuleLoadData", ctypes.byref(module), image)
        checked("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        if shared_bytes > 48 * 1024:
            checked("cuFuncSetCacheConfig", function, _PREFER_SHARED)
            checked("cuFuncSetAttribute", function, _SHARED_SIZE_ATTRIBUTE, shared_bytes)
    assert function.value is not None
    return function.value


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Allow this thread to load and allocate while one of its streams is being captured into a graph."""
    mode = ctypes.c_int(_RELAXED_CAPTURE)
    checked("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        checked("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def capture_id(stream: int) -> int:
    """Number of the graph capture on a stream, 0 where there is none."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    checked("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None)
    return number.value if status.value == 1 else 0


def attributes(*, pdl: bool, cooperative: bool, cluster: int) -> Any:
    """Array of launch attributes, as Triton's own launcher sets them."""
    found: list[LaunchAttribute] = []
    for wanted, number, values in (
        (pdl, _PROGRAMMATIC_SERIALIZATION, (1,)),
        (cooperative, _COOPERATIVE, (1,)),
        (cluster > 1, _CLUSTER_DIMENSION, (cluster, 1, 1)),
    ):
        if wanted:
            found.append(LaunchAttribute(id=number, value=(ctypes.c_uint * 16)(*values)))
    return (LaunchAttribute * len(found))(*found)


class StreamMemory:
    """Memory for the launches of one stream: counters, which are zero before and after each launch, and scratch, valid within one call.

    A captured graph, which may be replayed on any stream, has counters of its own. Threads may share a stream: a call of several launches
    that pass data on in scratch makes them in its `turn`.

    It is the driver's own allocation: memory from PyTorch's allocator could belong to a graph's pool, and be reused by others. Memory of a
    stream or a graph stays its own for as long as the process runs.
    """

    CHUNK = 4 << 20
    MOST_SCRATCH = 4 << 20
    """Most bytes of scratch for one stream."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int, int, int, int], int] = {}
        self._turns: dict[tuple[int, int], threading.Lock] = {}
        self._free: dict[int, tuple[int, int]] = {}

    def counters(self, device: int, stream: int, size: int, capturing: bool) -> int:
        """Address of at least `size` int32 counters."""
        return self._address("counters", device, stream, capture_id(stream) if capturing else 0, 4 * size)

    def scratch(self, device: int, stream: int, size: int, *, in_turn: bool = False) -> int:
        """Address of at least `size` bytes, a multiple of 256.

        Calls of several launches, which hold the stream's `turn`, ask `in_turn`: calls of one launch, which don't, never get their memory.
        """
        return self._address("scratch of turns" if in_turn else "scratch", device, stream, 0, size)

    def turn(self, device: int, stream: int) -> threading.Lock:
        """Lock around launches on a stream that no other thread's may interleave with."""
        return self._turns.get((device, stream)) or self._turns.setdefault((device, stream), threading.Lock())

    def _address(self, kind: str, device: int, stream: int, capture: int, size: int) -> int:
        room = max(256, 1 << (size - 1).bit_length())
        place = (kind, device, stream, capture, room)
        with self._lock:
            if place not in self._places:
                self._places[place] = self._take(device, room)
            return self._places[place]

    def _take(self, device: int, room: int) -> int:
        start, end = self._free.get(device, (0, 0))
        if end - start < room:
            size = max(self.CHUNK, room)
            start = resident(device, bytes(size))
            end = start + size
        self._free[device] = (start + room, end)
        return start


def resident(device: int, data: bytes) -> int:
    """Address of a copy of `data` in a GPU's memory, which stays there for as long as the process runs."""
    use_context(device)
    address, stream = ctypes.c_uint64(), ctypes.c_void_p()
    with relaxed_capture():
        checked("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(len(data)))
        # On a new stream, since the default one could be waiting for a capture.
        checked("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING_STREAM)
        checked("cuMemcpyHtoDAsync_v2", address, data, ctypes.c_size_t(len(data)), stream)
        checked("cuStreamSynchronize", stream)
        checked("cuStreamDestroy_v2", stream)
    return address.value


STREAM_MEMORY = StreamMemory()


def host_memory(device: int, size: int) -> int:
    """Address of zeroed host memory that every GPU accesses at the same address, for as long as the process runs."""
    use_context(device)
    address = ctypes.c_void_p()
    with relaxed_capture():
        checked("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), _PORTABLE | _MAPPED)
    assert address.value is not None
    ctypes.memset(address.value, 0, size)
    return address.value


def _error_text(code: int) -> str:
    text = ctypes.c_char_p()
    library().cuGetErrorString(code, ctypes.byref(text))
    return (text.value or b"an unknown error").decode()
