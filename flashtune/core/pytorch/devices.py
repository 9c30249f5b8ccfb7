"""Devices: the GPU behind a torch device as a `Target`, the presence of Triton or its interpreter, and the machine of a record."""

import functools
import importlib.metadata
import importlib.util
import os
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from flashtune.core.gpu.cards import Facts
from flashtune.core.gpu.target import Target, described_by_driver, find_target, know, targets
from flashtune.core.problems.config import Config
from flashtune.core.records import versions
from flashtune.core.records.checked import NAME_LENGTH, tidy
from flashtune.core.records.results import Provenance
from flashtune.core.system.errors import InputError

TRITON = importlib.util.find_spec("triton") is not None
"""Presence of Triton."""

INTERPRETING = TRITON and os.environ.get("TRITON_INTERPRET") == "1"
"""True if Triton's interpreter was on when this was imported: kernels then run on CPU tensors."""

INTERPRETED_AS = "l4"
"""GPU whose default configs the interpreter runs: the simplest with every element type, and the interpreter has no limits of its own."""

_DRIVER = Path("/proc/driver/nvidia/version")


def target_of(device: torch.device) -> Target:
    """Target of a CUDA or ROCm device; for the CPU the one whose configs the interpreter runs.

    NVIDIA GPUs missing from the table (a new model, a partition) are described by their driver; AMD's take their sizes from it, and their
    other figures from the table's GPU of the same architecture with the nearest number of units.
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
    """Target described by torch.cuda.get_device_properties, where the driver itself isn't available."""

    def number(field: str, default: int = 0) -> int:
        return int(getattr(properties, field, 0) or default)

    block = number("shared_memory_per_block_optin", number("shared_memory_per_block", 49152))
    facts = Facts(
        name=name,
        major=number("major"),
        minor=number("minor"),
        sms=number("multi_processor_count", 1),
        clock=number("clock_rate", 1_000_000),
        memory_clock=number("memory_clock_rate"),
        bus_width=number("memory_bus_width"),
        l2_bytes=number("L2_cache_size", 4 << 20),
        shared_bytes_per_block=block,
        shared_bytes_per_sm=number("shared_memory_per_multiprocessor", block + 1024),
        registers_per_sm=number("regs_per_multiprocessor", 65536),
        max_threads_per_sm=number("max_threads_per_multi_processor", 1024),
        warp_size=number("warp_size", 64 if amd else 32),
        memory_bytes=number("total_memory"),
    )
    target = described_by_driver(facts)
    if not amd:
        return know(target)
    arch = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    if alike := [other for other in targets().values() if other.arch == arch]:
        nearest = min(alike, key=lambda other: (abs(other.sms - facts.sms), other.slug))
        nearest = replace(nearest, slug=target.slug, name=name, driver_names=(name,), aliases=(), sources=("the driver",))
        return know(replace(nearest, sms=facts.sms, shared_bytes_per_block=block))
    return know(replace(target, vendor="amd", arch=arch, compilable=True))


class Here(NamedTuple):
    """Versions on this machine; empty where unknown."""

    triton: str
    driver: str
    gpu_name: str


@functools.cache
def here(index: int) -> Here:
    """Versions on the machine of a GPU."""
    return Here(triton=_installed("triton"), driver=_driver(), gpu_name=torch.cuda.get_device_name(index))


def _installed(package: str) -> str:
    """Version of a package; empty where there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """Version of NVIDIA's driver; empty where there is none."""
    with suppress(OSError):
        found = re.search(r"Kernel Module\D*?(\d+\.[\d.]+)", _DRIVER.read_text())
        return found[1] if found is not None else ""
    return ""


def torch_release() -> str:
    """Version of PyTorch without its build."""
    return versions.release(torch.__version__)


@functools.cache
def versions_of(provider: str) -> Config:
    """Versions here of all that decides what a provider computes, by the words of flashtune.core.records.versions; parts that aren't
    here are left out. Read once per process."""
    found = {"torch": torch_release(), "cuda": torch.version.cuda or torch.version.hip or "", "driver": _driver()}
    if provider in ("cudnn", "cudnn_fe"):
        number = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
        found["cudnn"] = f"{number // 10000}.{number % 10000 // 100}.{number % 100}" if number else ""
    found |= {name: _installed(versions.TITLES[name]) for name in versions.PACKAGES.get(provider, ())}
    # As the database keeps them.
    return Config.of({name: tidy(version, NAME_LENGTH) for name, version in found.items() if version})


def differing(provenance: Provenance, machine: Here) -> tuple[str, ...]:
    """Differences between a record's machine and this one, where both are known: `Triton 3.5.1 (here 3.6.0)`."""
    both = [
        ("Triton", provenance.triton, machine.triton),
        ("driver", provenance.driver, machine.driver),
        ("card", provenance.gpu_name, machine.gpu_name),
    ]
    return tuple(f"{name} {theirs} (here {ours})" for name, theirs, ours in both if theirs and ours and theirs != ours)


def slug_here(device: torch.device) -> str:
    """Slug of a GPU; the type of any other device, and of one that isn't here."""
    # Fake tensors may be on a GPU that doesn't exist here.
    return target_of(device).slug if device.type == "cuda" and torch.cuda.is_available() else device.type
