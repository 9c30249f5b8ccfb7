"""Whether this machine may have a GPU, asked without torch: importing that costs seconds, and most profiles need none."""

import ctypes
from pathlib import Path


def gpu_may_be_present() -> bool:
    """False only where no NVIDIA driver sees a GPU (`CUDA_VISIBLE_DEVICES` counts) and no AMD driver is loaded."""
    return _cuda_devices() > 0 or Path("/dev/kfd").exists()


def _cuda_devices() -> int:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
