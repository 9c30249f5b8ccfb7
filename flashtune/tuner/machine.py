"""This machine as a search sees it: which GPU is here, and what goes into a record's provenance."""

import importlib.metadata
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache

import flashtune
from flashtune.core.errors import EnvironmentProblem, InputError
from flashtune.core.results import Provenance
from flashtune.core.target import Target, find_target


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpu:
    """The GPU that torch sees as device 0; `target` is None where the table doesn't know it."""

    name: str
    target: Target | None


def cores() -> int:
    """How many cores this process may run on: jobs and containers are often given some of a machine's."""
    known = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if known is None else len(known(0))


def local_gpu() -> LocalGpu | None:
    """The GPU of this machine, or None where there is none (or torch was built without GPU support)."""
    names = gpu_names()
    return LocalGpu(name=names[0], target=_target_of(names[0])) if names else None


def gpu_names() -> tuple[str, ...]:
    """The GPUs that torch sees, in its order.

    The driver's tool says them, as long as torch could only say the same; torch itself takes seconds to be imported and to start a GPU.
    """
    if (told := _told_names()) is not None:
        return told
    import torch

    return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))


def _told_names() -> tuple[str, ...] | None:
    """What the driver's tool says of them; None where torch may say otherwise: built for no CUDA, GPUs of several kinds or in slices (whose
    order and names are torch's own), and a choice of GPUs in words."""
    gpus = driver_facts()
    built_for = _version("torch").partition("+")[2] or "cuda"
    if not built_for.startswith("cu") or len({gpu["name"] for gpu in gpus}) != 1:
        return None
    if any(gpu.get("mig.mode.current") == "Enabled" for gpu in gpus):
        return None
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = range(len(gpus)) if chosen is None else [int(word) if word.strip().isdecimal() else -1 for word in chosen.split(",")]
    return tuple(gpus[0]["name"] for _ in indices) if all(0 <= index < len(gpus) for index in indices) else None


def _target_of(name: str) -> Target | None:
    try:
        return find_target(name)
    except InputError:
        return None


def devices_of(which: str, target: Target) -> tuple[str, ...]:
    """The GPUs that `which` names (`all`, a number of them, or indices with commas), as CUDA_VISIBLE_DEVICES names them; none for one GPU
    that nobody chose. Raises InputError for a word that is none of these or a GPU that isn't there, EnvironmentProblem where one of them is
    no `target`."""
    if which == "1":
        return ()
    found = gpu_names()
    count = len(found)
    if which == "all":
        chosen = list(range(count))
    elif "," in which and all(part.isdecimal() for part in which.split(",")):
        chosen = list(dict.fromkeys(int(part) for part in which.split(",")))
    elif which.isdecimal() and int(which) > 0:
        chosen = list(range(int(which)))
    else:
        raise InputError(f"--gpus {which!r} names no GPUs: write all, a number, or indices with commas between them (0,2)")
    if missing := [index for index in chosen if index >= count]:
        raise InputError(f"--gpus {which} asks for GPU {missing[0]}, and this machine has {count}, counted from 0: ask for fewer")
    for index in chosen:
        if _target_of(found[index]) != target:
            raise EnvironmentProblem(f"GPU {index} of this machine is {found[index]}, not {target.name}: name those that are with --gpus")
    # Inside a container or a job some may be hidden; those that remain keep their names.
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(names[index] if index < len(names) else str(index) for index in chosen)


def require_triton() -> None:
    """Raise EnvironmentProblem where Triton is missing, or can't be imported."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        raise EnvironmentProblem(f"Triton can't be imported ({error}): pip install triton, and see `flashtune doctor`") from error


def require_interpreter() -> None:
    """Raise EnvironmentProblem where Triton's interpreter can't run here: Triton 3.6's fails under NumPy 2.4 and later."""
    triton, numpy = (_release(_version(package)) for package in ("triton", "numpy"))
    if not triton or not numpy:
        missing = "triton" if not triton else "numpy"
        raise EnvironmentProblem(
            f"a search without the GPU checks numbers in Triton's interpreter, and {missing} is missing: pip install {missing}"
        )
    if triton < (3, 7) and numpy >= (2, 4):
        raise EnvironmentProblem(
            f"a search without the GPU checks numbers in the interpreter of Triton {_version('triton')}, which fails under "
            f"NumPy {_version('numpy')}: pip install 'numpy<2.4'"
        )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def provenance(*, command: str, seed: int | None, measured: bool) -> Provenance:
    """Versions, driver and limits of this machine; the GPU's own facts only for a `measured` record.

    Clocks under load are what `flashtune.tuner.conditions` reads while finalists race: a GPU that waits for a search to start is idle.
    """
    facts = next(iter(driver_facts()), {}) if measured else {}
    return Provenance(
        flashtune=flashtune.__version__,
        torch=_version("torch"),
        triton=_version("triton"),
        driver=facts.get("driver_version", ""),
        gpu_name=facts.get("name", ""),
        clocks=", ".join(f"{name} {facts[name]}" for name in ("clocks.max.sm", "power.limit") if name in facts),
        command=command,
        seed=seed,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def driver_facts() -> tuple[Mapping[str, str], ...]:
    """What NVIDIA's tool says of each GPU of the machine, by its own words; nothing where there is no such tool, or no GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    names = ["name", "driver_version", "clocks.max.sm", "power.limit", "mig.mode.current"]
    asked = subprocess.run([tool, f"--query-gpu={','.join(names)}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    if asked.returncode != 0:
        return ()
    return tuple(dict(zip(names, map(str.strip, line.split(",")), strict=False)) for line in asked.stdout.splitlines())
