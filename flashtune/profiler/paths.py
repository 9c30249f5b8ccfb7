"""Checks of plot paths and of matplotlib, made before any work for plots."""

import importlib.util
import os
import tempfile
from pathlib import Path

from flashtune.core import files
from flashtune.core.errors import EnvironmentProblem, InputError

SUFFIXES = (".html", ".png", ".svg")


def check_plot_path(path: Path) -> Path:
    """The checked `path`; raises InputError unless its ending is known and a file can be created there."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--plot {path} has no known ending: use {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise InputError(f"--plot {path} is a directory: name a file in it")
    if path.exists() and not os.access(path, os.W_OK):
        raise InputError(f"--plot {path} can't be written: permission denied")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise InputError(f"--plot {path} can't be written: {error.strerror or error}") from error


def require_matplotlib() -> None:
    """Raise EnvironmentProblem where matplotlib isn't installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentProblem("--plot needs matplotlib, which is not installed: pip install 'flashtune[plot]'")


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` atomically; raises InputError where that fails (on a full disk, say)."""
    try:
        files.write_whole(path, data)
    except OSError as error:
        raise InputError(f"--plot {path} can't be written: {error.strerror or error}") from error
