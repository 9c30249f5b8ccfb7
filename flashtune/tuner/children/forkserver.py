"""Fork server of a search's children; imports nothing heavy, so that it can be started before anything else.

A child must not inherit a started GPU or the parent's threads, so it is forked off a server that has neither, and that has done the slowest
imports.
"""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from flashtune.core import folders
from flashtune.core.errors import EnvironmentProblem

QUIET = "flashtune.tuner.children.quiet"
"""First module that the server imports: a command ended by a signal leaves the server in the midst of its imports."""

PRELOADED = ["torch"]
"""Modules that the server has imported."""

FOR_SEARCHES = ["flashtune.tuner.children.preloaded"]
"""Modules that it imports before those where a search starts it."""

HELD_BACK = (signal.SIGINT, signal.SIGTERM)
"""Signals that interrupt a search, blocked in its children while they start."""


def start_server() -> None:
    """Start the server's imports ahead of the first task."""
    with serving(FOR_SEARCHES):
        pass


def _let_triton_write() -> None:
    try:
        folders.let_triton_write()
    except OSError as error:
        remedy = "free some space, or point TRITON_CACHE_DIR or TMPDIR at a folder that can be written"
        raise EnvironmentProblem(f"Triton can't write its cache ({error.strerror}): {remedy}") from error


@contextmanager
def serving(first: Sequence[str] = ()) -> Iterator[None]:
    """Keep the server running, able to fork children within the block; where it is started here, it imports these modules `first`."""
    # The server, and through it the children until they withdraw, inherit this thread's signal mask.
    with held_back():
        # Children inherit this environment.
        _let_triton_write()
        multiprocessing.set_forkserver_preload([QUIET, *first, *PRELOADED])
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
