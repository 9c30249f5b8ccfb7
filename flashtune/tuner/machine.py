"""This machine as a search sees it: which GPU is here, and what goes into a record's provenance."""

import importlib.metadata
import os
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime

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
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    return LocalGpu(name=name, target=_target_of(name))


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
    import torch

    count = torch.cuda.device_count()
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
        name = torch.cuda.get_device_name(index)
        if _target_of(name) != target:
            raise EnvironmentProblem(f"GPU {index} of this machine is {name}, not {target.name}: name those that are with --gpus")
    # Inside a container or a job some may be hidden; those that remain keep their names.
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return tuple(names[index] if index < len(names) else str(index) for index in chosen)


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
    facts = _nvidia_smi() if measured else {}
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


def _nvidia_smi() -> dict[str, str]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    names = ["name", "driver_version", "clocks.max.sm", "power.limit"]
    asked = subprocess.run([tool, f"--query-gpu={','.join(names)}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30)
    if asked.returncode != 0:
        return {}
    values = [value.strip() for value in asked.stdout.splitlines()[0].split(",")]
    return dict(zip(names, values, strict=False))
