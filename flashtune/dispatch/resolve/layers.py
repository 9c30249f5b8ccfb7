"""Which databases serve a call: the layers that a thread or the whole process has laid over the user's own results.

Each stack of layers has its own memo of plans. A call reads one attribute of its thread to find the plans of what is in force there; all
else happens when layers come and go, and when a plan is missing.
"""

import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from flashtune.core.errors import InputError
from flashtune.dispatch.plans.known import Plans
from flashtune.dispatch.resolve.memo import Memo, Settings

MOST_MEMOS = 32
"""So many stacks of layers are remembered; beyond it the one that was used longest ago is forgotten."""


class Use:
    """Databases, or a choice, in force from the call of `use` until `remove`, or until the end of a `with` that it stands in."""

    __slots__ = ("__weakref__", "_thread", "alone", "database", "everywhere", "unmeasured")

    def __init__(self, database: str | None, *, alone: bool, everywhere: bool, unmeasured: bool | None) -> None:
        self.database, self.alone, self.everywhere, self.unmeasured = database, alone, everywhere, unmeasured
        self._thread = threading.get_ident()

    def remove(self) -> None:
        """Take it out again, wherever in the stack it lies; of no effect where that was done before.

        Raises InputError in another thread than the one whose calls it is for.
        """
        global _everywhere
        if self.everywhere:
            with _lock:
                _everywhere = tuple(use for use in _everywhere if use is not self)
            _changed()
            return
        if not self.of_this_thread():
            raise InputError("these databases are used by another thread alone: remove them there, or use them with everywhere=True")
        _lay(tuple(use for use in SERVING.stack if use is not self))
        _laid.discard(self)
        current()

    def of_this_thread(self) -> bool:
        """Whether it was made in the thread that asks."""
        return threading.get_ident() == self._thread

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


class _Serving(threading.local):
    """What serves this thread: plans by signature, and the thread's own layers. Where a thread has none, the class's values count."""

    plans = Plans()
    stack: tuple[Use, ...] = ()


class _HandedOn:
    """The class's value while any thread has layers: a thread of autograd is served by those of the thread that called backward."""

    def __get__(self, serving: _Serving | None, kind: type[_Serving] | None = None) -> Plans:
        return current().plans if _stack() else _plans


SERVING = _Serving()
_LAYERS: ContextVar[tuple[Use, ...]] = ContextVar("flashtune.layers", default=())
_HANDED_ON: Any = _HandedOn()
_plans: Plans = SERVING.plans
_laid: weakref.WeakSet[Use] = weakref.WeakSet()
_lock = threading.RLock()
_everywhere: tuple[Use, ...] = ()
_reloaded: Use | None = None
_memos: dict[Settings, Memo] = {}
_evicted: list[Memo] = []
_pinned: Memo | None = None


def _unlock() -> None:
    """In a process that was forked while another thread held one of these locks: nobody there would ever release it."""
    global _lock
    _lock = threading.RLock()
    for memo in _memos.values():
        memo.lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def _stack() -> tuple[Use, ...]:
    """This thread's layers, the topmost first; in a thread of autograd's own they lie over those of the thread that called backward."""
    own = SERVING.stack
    # Never an object of ours: one that is left there when a thread ends waits for the interpreter's lock for good.
    if not (_laid and torch._C._is_key_in_tls("context")):
        return own
    context: Context | None = torch._C._get_obj_in_tls("context")
    given = () if context is None else context.get(_LAYERS, ())
    # What was removed since, in another task or thread, serves nobody; and the thread that calls backward may be this one.
    stack = (*own, *(use for use in given if use in _laid and use not in own))
    # For a backward within this one, which is handed a copy of this thread's context.
    _LAYERS.set(stack)
    return stack


def _lay(stack: tuple[Use, ...]) -> None:
    SERVING.stack = stack
    # Torch hands on a copy of the context of who calls backward.
    _LAYERS.set(stack)


def use(database: str | Path | None = None, *, alone: bool = False, everywhere: bool = False, unmeasured: bool | None = None) -> Use:
    """Serve this thread's calls from `database` (a path or URL) first: a model's own file, say.

        with dispatch.use("model/tuned.sqlite"):
            model(x)

    It is in force at once, over what was laid before it, `FLASHTUNE_DB`, the user's own results and the shipped ones, until the `with` ends
    or `remove` of what is returned is called. Its measured rows go before those of lower layers for the same key. `alone` hides all
    lower layers. `everywhere` is for all threads, also those of data loaders and servers; a thread's own layers lie over those. Threads
    of autograd have those of the thread that called backward where torch hands its context on (2.13 does, 2.11 doesn't); elsewhere
    activation checkpoints, which are recomputed there on a GPU, need `everywhere`. `unmeasured` says whether kernels may serve behind
    which nothing was measured on the GPU's architecture; by default the environment does (FLASHTUNE_UNMEASURED=1).

    Raises DatabaseError where there is no such database or it is damaged, InputError where neither a database nor `unmeasured` is given.
    """
    global _everywhere
    if database is None and unmeasured is None:
        raise InputError("nothing to use: give the path or URL of a database")
    added = Use(_located(database), alone=alone, everywhere=everywhere, unmeasured=unmeasured)
    if everywhere:
        with _lock:
            memo = _memo_of(_settings((added, *_everywhere)))
        memo.read()
        with _lock:
            _everywhere = (added, *_everywhere)
        _changed()
    else:
        with _lock:
            memo = _memo_of(_settings((added, *_stack(), *_everywhere)))
        memo.read()
        _lay((added, *SERVING.stack))
        _laid.add(added)
        current()
    return added


def current() -> Memo:
    """The memo of what is in force in this thread, which its next calls then find at once."""
    global _plans
    with _lock:
        stack = _stack()
        memo = _pinned or _memo_of(_settings((*stack, *_everywhere)))
        if stack and stack[0].of_this_thread():
            SERVING.plans = memo.plans
        else:
            SERVING.__dict__.pop("plans", None)
        if not stack:
            _plans = memo.plans
        _Serving.plans = _HANDED_ON if _laid else _plans
        evicted, _evicted[:] = _evicted[:], []
    # A memo's own lock is never waited for under the one of all: who decides holds it, and may come to ask what is in force.
    for one in evicted:
        one.move()
    return memo


def reload(database: str | Path | None = None, *, alone: bool = False) -> None:
    """Forget every choice and read the records anew at the next call, as after a search. What is in `use` stays so.

    `database` is from then on laid under what is in use everywhere, until the next `reload`, or stands `alone` there.
    """
    global _reloaded
    with _lock:
        _reloaded = None if database is None else Use(_located(database), alone=alone, everywhere=True, unmeasured=None)
        old = list(_memos.values())
        _memos.clear()
    _changed(old)


@contextmanager
def serving(memo: Memo) -> Iterator[None]:
    """Let this memo's choices serve the calls of all threads meanwhile: with one that has a kernel pinned, that is measured as it would
    serve."""
    global _pinned
    before, _pinned = _pinned, memo
    _changed()
    try:
        yield
    finally:
        _pinned = before
        _changed([memo])


def _settings(stack: tuple[Use, ...]) -> Settings:
    """What these layers, the topmost first, come to."""
    stack = stack if _reloaded is None else (*stack, _reloaded)
    databases: list[str] = []
    alone = False
    for one in stack:
        if one.database is not None and not alone:
            databases.append(one.database)
        alone = alone or one.alone
    said = next((one.unmeasured for one in stack if one.unmeasured is not None), None)
    return Settings(databases=tuple(dict.fromkeys(databases)), alone=alone, unmeasured=said)


def _memo_of(settings: Settings) -> Memo:
    """The memo of these settings; one that was made before, where it is still known."""
    memo = _memos.pop(settings, None)
    if memo is None:
        while len(_memos) >= MOST_MEMOS:
            _evicted.append(_memos.pop(next(iter(_memos))))
        memo = Memo(settings)
    # The last of them was used last.
    _memos[settings] = memo
    return memo


def _changed(others: list[Memo] | None = None) -> None:
    """Make every thread look anew at its next call: the dicts that threads hold are left empty."""
    with _lock:
        memos = [*_memos.values(), *(others or [])]
    for memo in memos:
        memo.move()
    current()


def _located(database: str | Path | None) -> str | None:
    """An absolute path, or the URL as it is."""
    if database is None:
        return None
    if not isinstance(database, str | os.PathLike):
        raise InputError(f"a database is named by its path or URL, not {database!r}")
    text = os.fspath(database)
    return text if isinstance(database, str) and "://" in text else os.path.abspath(os.path.expanduser(text))
