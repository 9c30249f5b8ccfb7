"""Versions of Python, PyTorch and Triton that flashtune was run with: the table of docs/support.md, behind `flashtune doctor`."""

import sys
from collections.abc import Callable
from typing import NamedTuple


class Run(NamedTuple):
    """Versions that were run together, and what ran; `transformers` is empty where it wasn't installed."""

    python: str
    torch: str
    triton: str
    transformers: str
    what: str


RUNS = (
    Run("3.11", "2.10.0", "3.6.0", "5.24.0", "install, imports, calls, gradients, functions, integrations"),
    Run("3.11", "2.11.0", "3.6.0", "5.24.0", "install, imports, calls, gradients, functions, integrations"),
    *(Run("3.11", "2.13.0", "3.6.0", other, "integrations") for other in ("5.14.1", "5.17.0", "5.20.2", "5.23.0")),
    Run("3.11", "2.13.0", "3.6.0", "5.24.0", "all tests"),
    Run("3.11", "2.14.1", "3.8.0", "5.24.0", "install, imports, calls, gradients, functions, integrations"),
    Run("3.11", "2.14.1", "3.9.0", "5.24.0", "`make newest`"),
    Run("3.13", "2.14.1", "3.8.0", "", "install, `flashtune doctor`, the README's lines"),
    Run("3.11", "2.15.0", "3.9.0", "5.24.0", "install, imports, calls, gradients, torch.compile, functions"),
)
"""In the order of PyTorch's versions."""

LOWEST = {"torch": "2.10", "triton": "3.6"}
"""Lowest versions that the package allows: PyTorch 2.10 is the first to come with a Triton from 3.6 on."""

LOWEST_TRANSFORMERS = "5.14"
"""Lowest version that the integration takes: earlier ones ask for whole masks beside a static cache, which hide sequences in a row."""


def minor(version: str) -> tuple[int, int]:
    """Major and minor version, as of `2.13.0+cpu`; (0, 0) of a text that has none."""
    parts = version.split("+")[0].split(".")
    numbers = [int(part) for part in parts[:2] if part.isdigit()]
    return (numbers[0], numbers[1]) if len(numbers) == 2 else (0, 0)


def too_old(version_of: Callable[[str], str]) -> tuple[str, str] | None:
    """Package and version of one that is older than what the package allows, None where there is none."""
    return next(((name, found) for name, lowest in LOWEST.items() if minor(found := version_of(name)) < minor(lowest)), None)


def python() -> str:
    """Major and minor version of this Python."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def not_run(version_of: Callable[[str], str]) -> str | None:
    """The versions here that no run had, beside those that runs had, as a clause; None where runs had all."""
    here = {"Python": python(), "torch": version_of("torch"), "triton": version_of("triton")}
    had = {"Python": [run.python for run in RUNS], "torch": [run.torch for run in RUNS], "triton": [run.triton for run in RUNS]}
    told = [
        f"{name} {found}, of which {shortest(had[name])} were run"
        for name, found in here.items()
        if minor(found) not in set(map(minor, had[name]))
    ]
    return " and ".join(told) or None


def shortest(versions: list[str]) -> str:
    """Different minor versions in order, as `2.10, 2.11`."""
    return ", ".join(f"{major}.{part}" for major, part in sorted(set(map(minor, versions))))
