"""What this process has called so far, for `flashtune search --calls`: the attention problems of first calls."""

import atexit
import os
import threading
import warnings
from typing import TYPE_CHECKING

from flashtune.core.errors import FlashtuneError, InputError

if TYPE_CHECKING:
    from pathlib import Path

    from flashtune.core.problem import Problem

MOST_CALLS = 1024
"""So many problems are held; then they are thinned (flashtune.core.calls), and what is new where that doesn't help is left out."""


class Calls:
    """Problems in the order in which they were met. What is called again is known to the memo of plans and never gets here; changes of the
    databases in force, which empty that memo, change nothing here."""

    def __init__(self) -> None:
        self._met: dict[Problem, None] = {}
        self._lock = threading.Lock()
        self._full = self._looked = False

    def meet(self, problem: "Problem") -> None:
        """Hold it, if it is new."""
        if problem in self._met:
            return
        with self._lock:
            if len(self._met) >= MOST_CALLS and not self._full:
                from flashtune.core.calls import thinned

                self._met = dict.fromkeys(thinned(self._met))
            self._full = len(self._met) >= MOST_CALLS
            if not self._full:
                self._met[problem] = None
            looked, self._looked = self._looked, True
        if not looked:
            _save_at_exit()

    def met(self) -> list["Problem"]:
        """All of them; a RuntimeWarning says where there were more."""
        with self._lock:
            found, full = list(self._met), self._full
        if full:
            warnings.warn(
                f"flashtune: calls of more than {MOST_CALLS} kinds came; what was new beyond is left out", RuntimeWarning, stacklevel=3
            )
        return found

    def forget(self) -> None:
        """Begin anew."""
        with self._lock:
            self._met, self._full = {}, False

    def unlock(self) -> None:
        """In a process that was forked while another thread held the lock: nobody there would ever release it."""
        self._lock = threading.Lock()


CALLS = Calls()
os.register_at_fork(after_in_child=CALLS.unlock)


def save_calls(path: "str | Path") -> None:
    """Add the attention problems that this process has called so far to the file at `path`, which `flashtune search --calls` reads.

    The file is JSON, a line for each problem, and is made where it is missing. What it holds already stays, so that several processes, or
    runs, may add to one file, at the same time, too; remove it to begin anew. FLASHTUNE_CALLS=PATH in the environment of a process does
    the same when it exits (not where a signal, or os._exit, ends it).

    Problems are forwards, and backwards of calls whose gradient was asked for, as they were called: sizes, dtype and features, whoever
    served them, on whatever device. On the CPU only a first call of its sizes says whether gradients are asked for. Of compiled models
    those calls are there that aren't traced into torch's own operations: what kernels may serve. Left out is what no search could help:
    head sizes over 256, float64, nested tensors, tensor subclasses, transforms, modes, and what sdpa_kernel keeps from flash attention.
    Decoding steps are thinned to the longest of each octave of keys, other calls to the four longest (flashtune.core.calls.thinned).

    Raises InputError where `path` is another kind of file, or would grow beyond 4 MB, EnvironmentProblem where it can't be written.
    """
    # What a first call doesn't need isn't imported before it.
    from pathlib import Path

    from flashtune.core.calls import add

    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a file of calls is named by its path, not {path!r}")
    add(Path(os.path.expanduser(path)), CALLS.met())


def _save_at_exit() -> None:
    """Save when this process exits, where `FLASHTUNE_CALLS` names a file: from here on, whichever folder it then is in."""
    named = os.environ.get("FLASHTUNE_CALLS", "")
    if not named:
        return
    atexit.register(_saved, os.path.abspath(os.path.expanduser(named)))


def _saved(path: str) -> None:
    """At exit: a failure is said in a line, for nobody is left to catch it."""
    try:
        save_calls(path)
    except FlashtuneError as error:
        warnings.warn(f"flashtune: the calls are not saved: {error}", RuntimeWarning, stacklevel=1)
