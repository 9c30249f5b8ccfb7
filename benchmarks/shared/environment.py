"""Surroundings of a case: its command, the folder of its results, this machine's GPU, and options that several cases have."""

import math
import os
import shlex
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from flashtune.core.gpu.target import Target
from flashtune.tuner.machine import local_gpu, provenance

Name = TypeVar("Name", bound=str)


def argument_parser(description: str | None) -> ArgumentParser:
    """An argument parser that keeps the description's lines."""
    return ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)


def command() -> str:
    """The command line that is running, for results."""
    return f"python {sys.argv[0]} {shlex.join(sys.argv[1:])}".strip()


def made_by(seed: int | None = 0) -> dict[str, Any]:
    """Software, GPU, command and time of a run, as JSON."""
    found: dict[str, Any] = provenance(command=command(), seed=seed, measured=True).as_json()
    return found


def output_folder() -> Path:
    """The folder that OUT names, made where it is missing, or the current one."""
    folder = Path(os.environ.get("OUT", "."))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def this_gpu() -> Target:
    """This machine's GPU; raises SystemExit where there is none that flashtune knows."""
    gpu = local_gpu()
    if gpu is None or gpu.target is None:
        raise SystemExit(f"{sys.argv[0]} runs on a GPU that flashtune knows and found none: run it on the GPU's machine")
    return gpu.target


def cell_options(description: str | None, *, limit: float, jobs: int) -> ArgumentParser:
    """A parser with the options of cases that check cells side by side and then time one after another."""
    parser = argument_parser(description)
    parser.add_argument("--d", type=numbers_of, help="only these head sizes, with commas between them")
    parser.add_argument("--n", type=numbers_of, help="only these numbers of keys, with commas between them")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only cells whose name this regular expression finds")
    parser.add_argument("--seconds", type=float, default=0.5, help="timing per cell (default: %(default)s)")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="seconds for everything; cells beyond it are left out")
    parser.add_argument("--limit", type=float, default=limit, help="seconds after which a cell is killed (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=jobs, help="cells checked at once (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def names_of(text: str, known: Sequence[Name], kind: str) -> tuple[Name, ...]:
    """Comma-separated names from the command line, in the order of `known`; raises ArgumentTypeError for others."""
    names = set(text.split(","))
    if strange := names - set(known):
        raise ArgumentTypeError(f"unknown {kind} {', '.join(sorted(strange))}: use {', '.join(known)}")
    return tuple(name for name in known if name in names)


def numbers_of(text: str) -> tuple[int, ...]:
    """Comma-separated whole numbers from the command line; raises ArgumentTypeError for anything else."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not a number, nor numbers with commas between them") from None
