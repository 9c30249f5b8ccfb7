"""Facts about this machine for a search: its GPUs, and the provenance of records."""

import ctypes
import importlib.metadata
import importlib.util
import os
import runpy
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import flashtune
from flashtune.core.gpu.cards import started_driver
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.records.results import Provenance
from flashtune.core.system.errors import EnvironmentProblem, InputError

ANSWER_S = 30.0
"""Seconds to wait for nvidia-smi: a GPU that has failed may block it forever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalGpu:
    """GPU that PyTorch sees; `target` is None for one that is neither in the table nor NVIDIA's."""

    name: str
    target: Target | None


def cores() -> int:
    """Number of cores that this process may run on: jobs and containers often get some of a machine's."""
    known = getattr(os, "sched_getaffinity", None)
    return (os.cpu_count() or 1) if known is None else len(known(0))


def local_gpu() -> LocalGpu | None:
    """First GPU of this machine in PyTorch's order, or None where there is none (or PyTorch was built without GPU support)."""
    return next(iter(local_gpus()), None)


def local_gpus() -> tuple[LocalGpu, ...]:
    """GPUs of this machine, in PyTorch's order."""
    return tuple(LocalGpu(name=name, target=target_of(name)) for name in gpu_names())


def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs that PyTorch sees, in its order.

    They come from NVIDIA's driver where possible; PyTorch itself takes seconds to import and to start a GPU.
    """
    if (named := _driver_names()) is not None:
        return named
    import torch

    return tuple(map(torch.cuda.get_device_name, range(torch.cuda.device_count())))


def gpu_may_be_present() -> bool:
    """False only where no NVIDIA driver sees a GPU and no AMD driver is loaded; works without PyTorch, which most profiles don't need."""
    started = started_driver()
    return (started is not None and started[1] > 0) or Path("/dev/kfd").exists()


def _driver_names() -> tuple[str, ...] | None:
    """Names of the GPUs by the driver; None where PyTorch may see others: where it can't start the driver, or was built for a later one."""
    built_for, version, started = _built_for(), ctypes.c_int(), started_driver()
    if built_for is None or started is None:
        return None
    driver, count = started
    if driver.cuDriverGetVersion(ctypes.byref(version)) or version.value // 1000 < built_for:
        return None
    names = []
    for index in range(count):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetName(name, len(name), device):
            return None
        names.append(name.value.decode())
    return tuple(names)


def _built_for() -> int | None:
    """Major version of CUDA that PyTorch was built for, read without importing it; None where it was built for none."""
    found = importlib.util.find_spec("torch")
    places = [] if found is None else found.submodule_search_locations or []
    cuda = next((runpy.run_path(str(path)).get("cuda") for place in places if (path := Path(place) / "version.py").is_file()), None)
    return int(cuda.partition(".")[0]) if cuda else None


def target_of(name: str) -> Target | None:
    """The GPU of a name; None for one that neither the table nor this machine has."""
    try:
        return find_target(name)
    except InputError:
        return None


def numbered(which: str) -> Sequence[int] | None:
    """Indices of the GPUs that `which` names: a number of GPUs, or indices with commas; None for `all`. Raises InputError for any other
    word."""
    if which == "all":
        return None
    parts = which.split(",")
    # Python refuses to convert thousands of digits.
    if all(part.isdecimal() and len(part) < 100 for part in parts):
        if len(parts) > 1:
            return list(dict.fromkeys(map(int, parts)))
        if int(which) > 0:
            return range(int(which))
    raise InputError(f"--gpus {which[:60]!r} names no GPUs: write all, a number, or indices with commas between them (0,2)")


def devices_of(which: str, target: Target) -> tuple[str, ...]:
    """GPUs that `which` names (see `numbered`), as names for CUDA_VISIBLE_DEVICES: of a number of them the first that are a `target`; empty
    for a single default GPU, which PyTorch takes anyway. Raises InputError for a word that names none or a GPU that isn't there,
    EnvironmentProblem where one of them is no `target`."""
    chosen, found = numbered(which), gpu_names()
    count = len(found)
    if chosen is None:
        chosen = range(count)
    elif isinstance(chosen, range) and len(chosen) <= max(1, count):
        fitting = [index for index in range(count) if target_of(found[index]) == target]
        chosen = fitting[: len(chosen)] if len(fitting) >= len(chosen) else chosen
        if list(chosen) == [0]:
            return ()
    if (missing := next((index for index in chosen if index >= count), None)) is not None:
        raise InputError(f"--gpus {which} asks for GPU {missing}, and this machine has {count}, counted from 0: ask for fewer")
    for index in chosen:
        if target_of(found[index]) != target:
            raise EnvironmentProblem(f"GPU {index} of this machine is {found[index]}, not {target.name}: name those that are with --gpus")
    # A container or job may hide some GPUs; the others keep their names.
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


def provenance(*, command: str, seed: int | None, measured: bool, target: Target | None = None) -> Provenance:
    """Versions, driver and limits of this machine; the GPU's own facts only for a `measured` record: of the first that is a `target`.

    Clocks under load come from `flashtune.tuner.timing.conditions` during the closing races: a GPU is idle before a search.
    """
    gpus = local_gpus() if measured else ()
    gpu = next((gpu for gpu in gpus if gpu.target == target), next(iter(gpus), None))
    known = driver_facts() if gpu is not None else ()
    # nvidia-smi has an order of its own, and also lists GPUs that are hidden from PyTorch.
    facts = next((one for one in known if gpu is not None and one["name"] == gpu.name), {})
    return Provenance(
        flashtune=flashtune.__version__,
        torch=_version("torch"),
        triton=_version("triton"),
        driver=next((one["driver_version"] for one in known), ""),
        gpu_name="" if gpu is None else gpu.name,
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
    """Facts of each GPU of the machine by nvidia-smi's field names; empty where there is no such tool, no GPU, or no answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    names = ["name", "driver_version", "clocks.max.sm", "power.limit"]
    command = [tool, f"--query-gpu={','.join(names)}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    values = [[value.strip() for value in line.split(",")] for line in lines]
    # A line without a value for each name is a message about a lost GPU.
    return tuple(dict(zip(names, found, strict=True)) for found in values if len(found) == len(names))
