"""Recorded attention problems of this process, for `flashtune search --calls`."""

import atexit
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashtune.core.problems.parameters import PER_HEAD
from flashtune.core.system.errors import FlashtuneError, InputError
from flashtune.dispatch.call.call import Call, trained_as
from flashtune.dispatch.call.inspection import GRADIENTS, ON_THE_CPU, PLAIN_TYPES, WITH_GRADIENTS
from flashtune.dispatch.call.parse import Arguments
from flashtune.dispatch.state.context import Memo

if TYPE_CHECKING:
    from pathlib import Path

    from flashtune.core.problems.problem import Problem

MOST_CALLS = 1024
"""Problems kept; beyond it they are thinned (flashtune.core.records.calls), and new ones are left out where that doesn't help."""


class Calls:
    """Problems in the order of their first calls.

    Later calls of a problem use the plan cache and never get here; changes of the databases in force, which empty that cache,
    change nothing here.
    """

    def __init__(self) -> None:
        self._met: dict[Problem, None] = {}
        self._lock = threading.Lock()
        self._full = self._looked = False

    def meet(self, problem: "Problem") -> None:
        """Record a problem, if it is new."""
        if problem in self._met:
            return
        with self._lock:
            if len(self._met) >= MOST_CALLS and not self._full:
                from flashtune.core.records.calls import thinned

                self._met = dict.fromkeys(thinned(self._met))
            self._full = len(self._met) >= MOST_CALLS
            if not self._full:
                self._met[problem] = None
            looked, self._looked = self._looked, True
        if not looked:
            _save_at_exit()

    def met(self) -> list["Problem"]:
        """All recorded problems; a RuntimeWarning says where some were left out."""
        with self._lock:
            found, full = list(self._met), self._full
        if full:
            warnings.warn(
                f"flashtune: more than {MOST_CALLS} kinds of calls were made, and later ones are not recorded", RuntimeWarning, stacklevel=3
            )
        return found

    def forget(self) -> None:
        """Remove all recorded problems."""
        with self._lock:
            self._met, self._full = {}, False

    def unlock(self) -> None:
        """Replace the lock in a forked child, where nobody would release one that another thread of the parent held."""
        self._lock = threading.Lock()


CALLS = Calls()
os.register_at_fork(after_in_child=CALLS.unlock)


def save_calls(path: "str | Path") -> None:
    """Add the attention problems that this process has called so far to the file at `path`, which `flashtune search --calls` reads.

    The file is JSON, a line for each problem, and is made if it is missing. Its contents stay: several processes or runs may add
    to one file, even at the same time. Remove it to begin again. FLASHTUNE_CALLS=PATH in the environment does the same when a process
    exits, but not if a signal or os._exit ends it.

    Problems are forwards, and backwards of calls whose gradient was requested: sizes, dtype and features, whatever ran them, on any
    device. On the CPU only the first call of its sizes records whether gradients are requested. Of compiled models the calls that kernels
    may run are recorded, not those that are traced into PyTorch's own operations.

    What no search could help is left out: head sizes over 1024, float64, nested tensors, tensor subclasses, transforms, modes, calls that
    sdpa_kernel keeps from flash attention, and over pages those with a number of splits, float8 caches or chunks of unlike lengths. Calls
    with functions that a kernel may run are recorded by the functions' hash: a search of them names the functions, too (`--score-mod`,
    `--mask-mod`).

    Of decoding steps the longest for each doubling of the keys is kept, of other calls the four longest
    (flashtune.core.records.calls.thinned).

    Args:
        path: the file.

    Raises:
        InputError: where it is another kind of file, or would grow beyond 4 MB.
        EnvironmentProblem: where it can't be written.
    """
    # Imported here to keep first calls fast.
    from pathlib import Path

    from flashtune.core.records.calls import add

    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a file of calls is named by its path, not {path!r}")
    add(Path(os.path.expanduser(path)), CALLS.met())


def _save_at_exit() -> None:
    """Save at exit where `FLASHTUNE_CALLS` names a file, resolved against the present working directory."""
    named = os.environ.get("FLASHTUNE_CALLS", "")
    if not named:
        return
    atexit.register(_saved, os.path.abspath(os.path.expanduser(named)))


def _saved(path: str) -> None:
    """Save; a failure is a warning, since nobody is left to catch an exception at exit."""
    try:
        save_calls(path)
    except FlashtuneError as error:
        warnings.warn(f"flashtune: the calls are not saved: {error}", RuntimeWarning, stacklevel=1)


def meet(memo: Memo, call: Call, arguments: Arguments, why_torch: str | None) -> None:
    """Record the problem of a call, and its backward's where gradients are requested, if kernels may run it, or might on a GPU.

    `why_torch` is the result of `why_torch_now`.
    """
    problem = call.problem
    if problem is None or memo.pinned or _packed.get() or not (why_torch is None or why_torch is ON_THE_CPU or why_torch in GRADIENTS):
        return
    others = {"attn_mask": arguments.attn_mask, **dict(zip(PER_HEAD, arguments.per_head or (), strict=False))}
    tensors = {name: x for name, x in others.items() if isinstance(x, Tensor)}
    every = (*arguments[:3], *tensors.values())
    if why_torch is ON_THE_CPU and any(type(x) not in PLAIN_TYPES for x in every):
        return
    requested = _requested(every, {name for name, x in tensors.items() if x.requires_grad})
    CALLS.meet(problem)
    if requested is not None:
        CALLS.meet(trained_as(problem, requested))


_packed: ContextVar[bool] = ContextVar("_packed", default=False)


def within_packed() -> bool:
    """True in a call that is one sequence of a packed call."""
    return _packed.get()


@contextmanager
def part_of_packed() -> Iterator[None]:
    """Context of calls that are one sequence of a packed call each: they aren't recorded."""
    token = _packed.set(True)
    try:
        yield
    finally:
        _packed.reset(token)


def meet_packed(memo: Memo, problem: "Problem | None", why_torch: str | None, trained: bool) -> None:
    """Record the problem of a call of packed sequences as `meet` does, and its backward's if it is `trained`: by what the host knows of
    its lengths, which nobody reads."""
    if problem is None or memo.pinned or not (why_torch is None or why_torch is ON_THE_CPU or why_torch in GRADIENTS):
        return
    CALLS.meet(problem)
    if trained:
        CALLS.meet(trained_as(problem, []))


def meet_coded(memo: Memo, problem: "Problem | None") -> None:
    """Record the problem of one pass of a call with functions, with the hash of these."""
    if problem is not None and not memo.pinned:
        CALLS.meet(problem)


def _requested(every: Sequence[Tensor], wanted: set[str]) -> list[str] | None:
    """Requested gradients beside dQ, dK and dV; None where there is no backward, or none that kernels compute."""
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in every) or not wanted <= WITH_GRADIENTS.keys():
        return None
    return [requested for name in wanted if (requested := WITH_GRADIENTS[name])]
