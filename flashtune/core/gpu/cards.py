"""CUDA cards of this machine, as NVIDIA's driver describes them."""

import ctypes
from typing import Any, NamedTuple


class Facts(NamedTuple):
    """Attributes of one CUDA device: clocks in kHz, the memory bus in bits, the rest in bytes or as numbers."""

    name: str
    major: int
    minor: int
    sms: int
    clock: int
    memory_clock: int
    bus_width: int
    l2_bytes: int
    shared_bytes_per_block: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    max_threads_per_sm: int
    warp_size: int
    memory_bytes: int


_ATTRIBUTES = (75, 76, 16, 13, 36, 37, 38, 97, 81, 82, 39, 10)
"""Values of `CUdevice_attribute` (cuda.h), in the order of `Facts`."""


def started_driver() -> tuple[Any, int] | None:
    """NVIDIA's driver and its number of GPUs (within `CUDA_VISIBLE_DEVICES`); None where no driver starts."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return None if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) else (driver, count.value)


def here() -> tuple[Facts, ...]:
    """The cards of this machine in the driver's order, which is PyTorch's, without those that it doesn't describe."""
    started = started_driver()
    if started is None:
        return ()
    found = (_read(started[0], index) for index in range(started[1]))
    return tuple(facts for facts in found if facts is not None)


def _read(driver: Any, index: int) -> Facts | None:
    device, value, size, name = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(256)
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetName(name, len(name), device):
        return None
    values: list[int] = []
    for attribute in _ATTRIBUTES:
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        values.append(value.value)
    if driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return None
    return Facts._make([name.value.decode(), *values, size.value])
