"""Whether this machine may have a GPU, asked without torch: importing that costs seconds, and most profiles need none."""

from pathlib import Path

from flashtune.tuner.machine import started_driver


def gpu_may_be_present() -> bool:
    """False only where no NVIDIA driver sees a GPU (`CUDA_VISIBLE_DEVICES` counts) and no AMD driver is loaded."""
    started = started_driver()
    return (started is not None and started[1] > 0) or Path("/dev/kfd").exists()
