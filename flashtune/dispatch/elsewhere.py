"""Whether a row is from such a machine as this: its Triton, its driver and its card."""

import functools
import importlib.metadata
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from flashtune.core.results import Provenance

_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
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
