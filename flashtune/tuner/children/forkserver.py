"""The process that a search's children are forked off; imports nothing heavy, so that it can be started before anything else.

A child must not inherit a started GPU or the parent's threads, so it is forked off a server that has neither, and that has imported what
takes a child the longest.
"""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker

from flashtune.core import folders
from flashtune.core.errors import EnvironmentProblem

PRELOADED = ["torch"]
"""What the server has imported."""

FOR_SEARCHES = ["flashtune.tuner.children.preloaded"]
"""What it imports before that where a search starts it."""

HELD_BACK = (signal.SIGINT, signal.SIGTERM)
"""The signals that interrupt a search, which its children are started without."""


def start_server() -> None:
    """Begin to import in the server what children need; whoever knows that there will be some needn't wait for the first task."""
    with serving(FOR_SEARCHES):
        pass


def _let_triton_write() -> None:
    try:
        folders.let_triton_write()
    except OSError as error:
        remedy = "free some space, or point TRITON_CACHE_DIR or TMPDIR at a folder that can be written"
        raise EnvironmentProblem(f"Triton can't keep what it compiles ({error.strerror}): {remedy}") from error


@contextmanager
def serving(first: Sequence[str] = ()) -> Iterator[None]:
    """The server runs, and within the block it may be asked for children; where it is started here, it imports these modules `first`."""
    # The server, and through it the children until they withdraw, take over what this thread holds back.
    with held_back():
        # Children take over this environment.
        _let_triton_write()
        multiprocessing.set_forkserver_preload([*first, *PRELOADED])
        forkserver.ensure_running()
        yield


@contextmanager
def held_back() -> Iterator[None]:
    """Processes that are started within the block have the signals held back until they withdraw."""
    # The tracker of resources unblocks these signals where it is started.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
