"""Which databases serve a call: the layers that a thread, a task or the whole process has laid over the user's own results.

Each stack of layers has its own memo of plans. A call reads one context variable to find the plans of what is in force there; all else
happens when layers come and go, and when a plan is missing.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Self

from flashtune.core.errors import InputError
from flashtune.dispatch.plans.known import Plans
from flashtune.dispatch.resolve.memo import Memo, Settings

MOST_MEMOS = 32
"""So many stacks of layers are remembered; beyond it the one that was used longest ago is forgotten."""


class Use:
    """Databases, or a choice, in force from the call of `use` until `remove`, or until the end of a `with` that it stands in."""

    __slots__ = ("alone", "database", "everywhere", "removed", "unmeasured")

    def __init__(self, database: str | None, *, alone: bool, everywhere: bool, unmeasured: bool | None) -> None:
        self.database, self.alone, self.everywhere, self.unmeasured = database, alone, everywhere, unmeasured
        self.removed = False

    def remove(self) -> None:
        """Take it out again, wherever in the stack it lies; of no effect where that was done before.

        Raises InputError in a thread or task whose calls it isn't for.
        """
        global _everywhere
        if self.everywhere:
            with _lock:
                _everywhere = tuple(use for use in _everywhere if use is not self)
            _changed()
            return
        uses = STACK.get().uses
        if self not in uses and not self.removed:
            raise InputError(
                "these databases are used by another thread or task alone: remove them there, or use them with everywhere=True"
            )
        self.removed = True
        if self in uses:
            _lay(tuple(use for use in uses if use is not self))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


class Stack:
    """The layers of a context, the topmost first, and the plans of all that is in force there.

    Contexts that were copied from one share it, so that what one of them finds out serves all. Plans that are no longer in force are
    empty: who finds nothing there asks `current`.
    """

    __slots__ = ("__weakref__", "plans", "uses")

    def __init__(self, uses: tuple[Use, ...] = ()) -> None:
        self.uses = uses
        self.plans = Plans()


_BOTTOM = Stack()
STACK: ContextVar[Stack] = ContextVar("flashtune.layers", default=_BOTTOM)
"""A thread begins at the bottom, a task of asyncio with what lies where it was made."""
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


def _lay(uses: tuple[Use, ...]) -> None:
    STACK.set(Stack(uses) if uses else _BOTTOM)
    current()


def use(database: str | Path | None = None, *, alone: bool = False, everywhere: bool = False, unmeasured: bool | None = None) -> Use:
    """Serve the calls of this thread, or task of asyncio, from `database` (a path or URL) first: a model's own file, say.

        with dispatch.use("model/tuned.sqlite"):
            model(x)

    It is in force at once, over what was laid before it, `FLASHTUNE_DB`, the user's own results and the shipped ones, until the `with` ends
    or `remove` of what is returned is called. Its measured rows go before those of lower layers for the same key. `alone` hides all
    lower layers. `everywhere` is for all threads and tasks, also those of data loaders and servers; their own layers lie over those. A
    context variable holds the others: tasks that begin meanwhile have them to their end, and so has a thread that runs in a copy of this
    context. Gradients are computed under what was in force for the forward, in whichever thread; activation checkpoints, which are
    recomputed in torch's own threads on a GPU, need `everywhere`. `unmeasured` says whether kernels may serve behind which nothing was
    measured on the GPU's architecture; by default the environment does (FLASHTUNE_UNMEASURED=1).

    Raises DatabaseError where there is no such database or it is damaged, InputError where neither a database nor `unmeasured` is given.
    """
    global _everywhere
    if database is None and unmeasured is None:
        raise InputError("nothing to use: give the path or URL of a database")
    added = Use(_located(database), alone=alone, everywhere=everywhere, unmeasured=unmeasured)
    own = () if everywhere else STACK.get().uses
    with _lock:
        memo = _memo_of(_settings((added, *own, *_everywhere)))
    memo.read()
    if everywhere:
        with _lock:
            _everywhere = (added, *_everywhere)
        _changed()
    else:
        _lay((added, *own))
    return added


def current() -> Memo:
    """The memo of what is in force here, which the next calls then find at once."""
    stack = STACK.get()
    with _lock:
        memo = _pinned or _memo_of(_settings((*stack.uses, *_everywhere)))
        stack.plans = memo.plans
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
    """Make everybody look anew at the next call: the dicts that stacks hold are left empty."""
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
