"""Start of the child processes: a fork server, and children detached from the terminal and from Ctrl-C, tied to their parent's life.

A child must not inherit a started GPU or the parent's threads, so it is forked off a server that has neither, and that has done the slowest
imports. This module imports nothing heavy, so that the server can be started before anything else.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING

from flashtune.core.system import folders
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.threads import begun

if TYPE_CHECKING:
    from flashtune.templates.mods.known import Named

PRELOADED = ["flashtune.tuner.children.preloaded"]
"""Modules that the server has imported."""

HELD_BACK = (signal.SIGINT, signal.SIGTERM)
"""Signals that interrupt a search, blocked in its children while they start."""


def start_server() -> None:
    """Start the server's imports ahead of the first task."""
    with serving():
        pass


def _let_triton_write() -> None:
    try:
        folders.let_triton_write()
    except OSError as error:
        remedy = "free some space, or point TRITON_CACHE_DIR or TMPDIR at a folder that can be written"
        raise EnvironmentProblem(f"Triton can't write its cache ({error.strerror}): {remedy}") from error


@contextmanager
def serving() -> Iterator[None]:
    """Keep the server running, able to fork children within the block."""
    # The server, and through it the children until they withdraw, inherit this thread's signal mask.
    with held_back():
        # Children inherit this environment.
        _let_triton_write()
        multiprocessing.set_forkserver_preload(PRELOADED)
        forkserver.ensure_running()
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Block the interrupting signals in processes that are started within the block, until they withdraw."""
    # Starting the resource tracker unblocks these signals.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_PR_SET_PDEATHSIG = 1
"""Option of prctl(2), from <sys/prctl.h>: the signal that a process gets when its parent ends."""


def withdraw(environment: Mapping[str, str] | None = None) -> None:
    """Prepare a child process: its output is dropped, since compilers print intermediate code by the page when they fail; Ctrl-C in the
    terminal is the parent's to handle; and it ends with its parent, however that one ends.

    `environment` is the parent's present one, since the fork server has that of its own start.
    """
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with suppress(OSError):
        # Out of the group that Ctrl-C and `timeout` signal: a trial that dies with the search would count as failed.
        os.setpgid(0, 0)
    # Signals that arrived while they were blocked are dropped.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def with_functions(named: "Sequence[Named]", start: Callable[..., None], *arguments: object) -> None:
    """Prepare a process by `start` that knows the user's functions by file and name (flashtune.tuner.functions)."""
    start(*arguments)
    if named:
        from flashtune.tuner.functions import register

        register(named)


def start_device(environment: Mapping[str, str], name: str | None = None) -> None:
    """Prepare a process that sees one GPU alone, by its name in CUDA_VISIBLE_DEVICES (None: PyTorch's default one); must run before torch
    looks for GPUs."""
    withdraw(environment if name is None else {**environment, "CUDA_VISIBLE_DEVICES": name})
    # The driver takes as long to start as torch to import, and needs no lock of Python's.
    begun(_start_driver)


def _start_driver() -> None:
    """Start NVIDIA's driver and the first GPU's primary context, which torch then finds."""
    with suppress(OSError):
        driver, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
        if driver.cuInit(0) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)


def know_triton() -> None:
    """Have Triton hash its own compiler, a part of every kernel's key in its disk cache: hundreds of megabytes, about 1 s.

    With another version's layout the first use of that cache does it.
    """
    with suppress(Exception):
        from triton.runtime import cache

        cache.triton_key()


def start_interpreter(environment: Mapping[str, str]) -> None:
    """Prepare a process in which kernels are interpreted on the CPU; Triton is imported anew where the server had it."""
    withdraw({**environment, "TRITON_INTERPRET": "1"})
    forget_triton()


def forget_triton() -> None:
    """Have Triton's Python imported again at its next use, since its language reads TRITON_INTERPRET at import, and our module that has
    parts of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]
    sys.modules.pop("flashtune.tuner.children.compile", None)
