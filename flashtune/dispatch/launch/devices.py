"""Where kernels run: the GPU behind a torch device as a `Target`, whether Triton or its interpreter is there, and whether a row is from
such a machine."""

import functools
import importlib.metadata
import importlib.util
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashtune.core.errors import InputError
from flashtune.core.results import Provenance
from flashtune.core.target import Target, find_target, targets

TRITON = importlib.util.find_spec("triton") is not None
"""Whether Triton is installed."""

INTERPRETING = TRITON and os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter was on when this was imported: kernels then run on CPU tensors."""

INTERPRETED_AS = "l4"
"""The GPU whose default configs the interpreter runs, the plainest that takes every element type; it has no limits of its own."""

_DRIVER = Path("/proc/driver/nvidia/version")


def target_of(device: torch.device) -> Target:
    """The GPU behind a CUDA or ROCm device.

    One that the table doesn't have (a partition of a GPU, a new model) takes its sizes from the driver and its other figures from the
    table's GPU of the same architecture with the nearest number of SMs; where there is none of that architecture, they are 0. For the CPU
    it is the one that the interpreter stands for.
    """
    return _interpreted() if device.type == "cpu" else _gpu(device.index)


@functools.cache
def _interpreted() -> Target:
    return find_target(INTERPRETED_AS)


@functools.cache
def _gpu(index: int) -> Target:
    name = torch.cuda.get_device_name(index)
    try:
        return find_target(name)
    except InputError:
        return described(name, torch.cuda.get_device_properties(index), amd=torch.version.hip is not None)


def described(name: str, properties: object, *, amd: bool) -> Target:
    """The target that the driver's `properties` (torch.cuda.get_device_properties) describe; its slug is made of its name."""

    def number(field: str, default: int = 0) -> int:
        return int(getattr(properties, field, 0) or default)

    arch = str(getattr(properties, "gcnArchName", "")).split(":")[0] if amd else f"{number('major')}{number('minor')}"
    sms = number("multi_processor_count", 1)
    told: dict[str, Any] = {
        "slug": "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split()),
        "name": name,
        "sms": sms,
        "shared_bytes_per_block": number("shared_memory_per_block_optin", number("shared_memory_per_block", 49152)),
        "driver_names": (name,),
        "aliases": (),
        "sources": ("the driver",),
    }
    if alike := [target for target in targets().values() if target.arch == arch]:
        return replace(min(alike, key=lambda target: (abs(target.sms - sms), target.slug)), **told)
    return Target(
        **told,
        vendor="amd" if amd else "nvidia",
        arch=arch,
        shared_bytes_per_sm=number("shared_memory_per_multiprocessor", number("shared_memory_per_block", 49152)),
        registers_per_sm=number("regs_per_multiprocessor", 65536),
        max_threads_per_sm=number("max_threads_per_multi_processor", 1024),
        warp_size=number("warp_size", 64 if amd else 32),
        l2_bytes=number("L2_cache_size"),
        bandwidth_gbs=0.0,
        boost_mhz=0,
        exp_per_clock=16,
        peak_tflops={},
        compilable=amd or number("major") >= 8,
    )


class Here(NamedTuple):
    """What this machine has; empty where it doesn't tell."""

    triton: str
    driver: str
    gpu_name: str


@functools.cache
def here(index: int) -> Here:
    """The machine around a GPU."""
    triton = driver = ""
    with suppress(importlib.metadata.PackageNotFoundError):
        triton = importlib.metadata.version("triton")
    with suppress(OSError):
        found = re.search(r"Kernel Module\D*?(\d+\.[\d.]+)", _DRIVER.read_text())
        driver = found[1] if found is not None else ""
    return Here(triton=triton, driver=driver, gpu_name=torch.cuda.get_device_name(index))


def differing(provenance: Provenance, machine: Here) -> tuple[str, ...]:
    """What is another there than here, of what both tell: `Triton 3.5.1 (here 3.6.0)`."""
    both = [
        ("Triton", provenance.triton, machine.triton),
        ("driver", provenance.driver, machine.driver),
        ("card", provenance.gpu_name, machine.gpu_name),
    ]
    return tuple(f"{name} {theirs} (here {ours})" for name, theirs, ours in both if theirs and ours and theirs != ours)
