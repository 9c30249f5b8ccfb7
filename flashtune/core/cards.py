"""CUDA cards that the table of GPUs lacks, as NVIDIA's driver describes them, under slugs made of their names."""

import ctypes
from typing import Any, NamedTuple

from flashtune.core.gpus import GPUS
from flashtune.core.target import Target, plain_words

MATRIX_TYPES = ("tf32", "bf16", "fp16", "fp8")

SLOWED = {"a10g": 0.5, "l20": 0.5, "l40": 0.5, "h20": 0.25}
"""Share of their architecture's matrix rate that these cards have, by their datasheets; no driver reports it."""

UNREPORTED_GBS = 250.0
"""GB/s of memory whose clock or width the driver doesn't report: that of laptops and boards that share it with the CPU."""


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


def slug_of(name: str) -> str:
    """Slug of a card by the name that its driver reports: `h100-nvl` of NVIDIA H100 NVL, a slice's profile (MIG) included."""
    return "-".join(plain_words(name))[:64]


def described(facts: Facts) -> Target:
    """The target of a card from its driver's facts; its matrix rate is its architecture's rate per SM and clock."""
    per_clock, exp_per_clock = _rates(10 * facts.major + facts.minor, facts.name)
    mhz = facts.clock / 1e3
    gbs = 2 * facts.memory_clock * facts.bus_width / 8 / 1e6
    memory = f"{facts.memory_bytes / 1e9:.0f} GB behind {facts.bus_width} bits at {facts.memory_clock / 1e3:.0f} MHz"
    return Target(
        slug=slug_of(facts.name),
        name=facts.name,
        vendor="nvidia",
        arch=f"{facts.major}{facts.minor}",
        sms=facts.sms,
        shared_bytes_per_block=facts.shared_bytes_per_block,
        shared_bytes_per_sm=facts.shared_bytes_per_sm,
        registers_per_sm=facts.registers_per_sm,
        max_threads_per_sm=facts.max_threads_per_sm,
        warp_size=facts.warp_size,
        l2_bytes=facts.l2_bytes,
        bandwidth_gbs=round(gbs, 1) or UNREPORTED_GBS,
        boost_mhz=round(mhz),
        exp_per_clock=exp_per_clock,
        peak_tflops={kind: round(rate * facts.sms * mhz / 1e6, 1) for kind, rate in per_clock.items()},
        compilable=facts.major >= 8,
        driver_names=(facts.name,),
        aliases=(),
        sources=(f"as NVIDIA's driver describes it: {memory}", "rates of an SM and clock: those of the table's cards of its architecture"),
    )


def _rates(arch: int, name: str) -> tuple[dict[str, float], int]:
    """Operations per SM and clock by type, and exponentials, from the table's card of this or the nearest architecture.

    GeForce cards have half the matrix rate of others of their architecture, with sums in float32.
    """
    geforce = "geforce" in name.lower()

    def apart(target: Target) -> tuple[bool, int, bool]:
        theirs = int(target.arch)
        return theirs // 10 != arch // 10, abs(theirs - arch), ("GeForce" in target.name) != geforce

    kin = min((target for target in GPUS if target.vendor == "nvidia"), key=apart)
    other = 1.0 if ("GeForce" in kin.name) == geforce else 0.5 if geforce else 2.0
    other *= next((SLOWED[word] for word in plain_words(name)[:1] if word in SLOWED), 1.0)
    clocks = kin.sms * kin.boost_mhz / 1e6
    return {kind: peak / clocks * (other if kind in MATRIX_TYPES else 1.0) for kind, peak in kin.peak_tflops.items()}, kin.exp_per_clock


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
