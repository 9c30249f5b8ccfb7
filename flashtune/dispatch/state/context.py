"""Dispatch state in force for a call: databases in layers, and for each stack of them its plans, records and failures."""

import functools
import os
import threading
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import torch

from flashtune.core.code.launching import LoadedKernel
from flashtune.core.gpu.target import Target, targets
from flashtune.core.problems.config import Direction
from flashtune.core.problems.problem import Problem, ProblemKey
from flashtune.core.pytorch import devices
from flashtune.core.records.results import TuningRecord
from flashtune.core.system.collector import held_off
from flashtune.core.system.errors import InputError
from flashtune.dispatch.plans.gradients import Backward
from flashtune.dispatch.plans.kernels import Kernels
from flashtune.dispatch.plans.plan import Plan, Plans
from flashtune.dispatch.policy.choose import Choice, Pool, group_of
from flashtune.dispatch.state.frozen import Frozen, Met
from flashtune.dispatch.state.settings import Settings, located, seen_of
from flashtune.templates import families
from flashtune.templates.family import Family

if TYPE_CHECKING:
    from flashtune.db.library import Library

MOST_PLANS = 8192
"""Most cached plans: growing sequences make a new signature with each token. Beyond it all are dropped and chosen anew."""

MOST_POOLS = 64
"""Groups of problems with sorted records at a time."""

_ON, _OFF = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
"""Values of FLASHTUNE_UNMEASURED."""


class Memo:
    """Plans by signature, choices of decode steps by length bucket (None for steps chosen singly), records by group, and `kernels`.

    `pinned` is a pass and a kernel that runs every call of it which it accepts, for measurements. Reading a plan takes no lock; choosing
    one holds `lock`.
    """

    def __init__(self, settings: Settings | None = None, *, pinned: tuple[Direction, LoadedKernel] | None = None) -> None:
        self.lock = threading.RLock()
        self.plans = Plans()
        self.backwards: dict[Hashable, Backward] = {}
        self.buckets: dict[Hashable, Choice | None] = {}
        self.deciding: dict[Hashable, TuningRecord | None] = {}
        self.packed: dict[Hashable, Any] = {}
        self.confirmed: set[ProblemKey] = set()
        self.kernels = Kernels(self.warn_once, self.forget)
        self.met = Met()
        self.settings = settings or Settings()
        self.pinned: dict[Direction, LoadedKernel] = {} if pinned is None else dict([pinned])
        self._library: Library | None = None
        self._pools: dict[Hashable, Pool] = {}
        self._warned: set[str] = set()
        self._warned_of: set[str] = set()

    @functools.cached_property
    def unmeasured(self) -> bool:
        """True where kernels without measurements on the GPU's architecture may run calls."""
        if self.settings.unmeasured is not None:
            return self.settings.unmeasured
        said = os.environ.get("FLASHTUNE_UNMEASURED", "").strip().lower()
        if said not in (*_ON, *_OFF):
            self.warn_once(f"flashtune: FLASHTUNE_UNMEASURED is {said!r}: set it to 1 or 0 (it counts as 0)")
        return said in _ON

    def keep(self, signature: Hashable, plan: Plan) -> None:
        """Cache the plan of a signature."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
            self.buckets.clear()
            self.deciding.clear()
        self.plans[signature] = plan

    def forget(self) -> None:
        """Drop all plans."""
        with self.lock:
            self.plans.clear()
            self.buckets.clear()
            self.deciding.clear()
            self.backwards.clear()
            self.packed.clear()

    def read(self) -> None:
        """Read the library, if that wasn't done; raises DatabaseError where a database is missing or damaged."""
        with self.lock, held_off():
            if self._library is None:
                # The import is slow, so that only calls that need records pay for it.
                from flashtune.db.library import Library

                self._library = Library.over(self.settings.databases, alone=self.settings.alone)

    def share(self, other: "Memo") -> None:
        """Take over what another state with the same settings has read; records are sorted once for both."""
        self._library, self._pools = other.library(), other._pools

    def library(self) -> "Library":
        """The library of these databases, read at its first use."""
        self.read()
        assert self._library is not None, "it was just read"
        return self._library

    def renew(self) -> None:
        """Read the library anew at the next choice; plans stay."""
        self._library = None
        self._pools.clear()
        self.deciding.clear()

    def warn_of_missing(self) -> None:
        """Warn where `FLASHTUNE_DB` names no file, for calls that need no records; for others `read` raises."""
        named = os.environ.get("FLASHTUNE_DB", "")
        path = named.removeprefix("sqlite:///")
        if path and "://" not in path and not self.settings.alone and not os.path.isfile(os.path.expanduser(path)):
            wrong = f"{named!r} is no file" if os.path.exists(os.path.expanduser(path)) else f"there is no database at {named!r}"
            self.warn_once(f"flashtune: {wrong}, which FLASHTUNE_DB names: check the path")

    def surroundings(self, device: torch.device, problem: Problem) -> tuple[Target, Mapping[str, Family], Pool | Sequence[TuningRecord]]:
        """Target, families that run there and records; the interpreter runs default configs alone, since its times mean nothing."""
        target = devices.target_of(device)
        if device.type == "cpu":
            return target, {name: family for name, family in families().items() if family.interpretable}, []
        return target, families(), self.pool(problem.key(target.slug), target)

    def pool(self, key: ProblemKey, target: Target) -> Pool:
        """Records that may be used for `key` on this GPU; the first call reads the library."""
        library = self.library()
        # A large library is read per key, since looking at all of it would take too long.
        group: Hashable = key if library.large else group_of(key)
        if group not in self._pools:
            while len(self._pools) >= MOST_POOLS:
                del self._pools[next(iter(self._pools))]
            with held_off():
                gpus = [gpu for gpu, known in targets().items() if known.arch == target.arch] or [target.slug]
                self._pools[group] = Pool(key, target, library.near(key, gpus), families(), library.findings)
        return self._pools[group]

    def warn_of_elsewhere(self, record: TuningRecord, device: torch.device) -> None:
        """Warn, once for each database, where a record that is used on this GPU was measured on another machine; shipped records are from
        another one anyway."""
        if record.origin == "shipped" or record.origin in self._warned_of or record.outcome.source != "measured":
            return
        if differences := devices.differing(record.provenance, devices.here(device.index)):
            self._warned_of.add(record.origin)
            said = f"records of {record.origin} were measured elsewhere: {', '.join(differences)}"
            self.warn_once(f"flashtune: {said}; they are used, and a search here compares them")

    def warn_once(self, message: str) -> None:
        """Issue a RuntimeWarning, the first time that this message comes up."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)


MOST_MEMOS = 32
"""Stacks of layers with a plan cache; beyond it the least recently used one is dropped."""


class Use:
    """Database, or an option, in force from the call of `use` until `remove`, or until the end of its `with` block."""

    __slots__ = ("alone", "confirm", "database", "everywhere", "plan", "removed", "seen", "unmeasured")

    def __init__(
        self,
        database: str | None,
        *,
        alone: bool,
        everywhere: bool,
        unmeasured: bool | None,
        confirm: bool = False,
        plan: Frozen | None = None,
    ) -> None:
        self.confirm, self.plan = confirm, plan
        self.database, self.alone, self.everywhere, self.unmeasured = database, alone, everywhere, unmeasured
        self.seen = seen_of(database)
        self.removed = False

    @property
    def digest(self) -> str | None:
        """SHA-256 of the plan in force, to compare ranks; None without one."""
        return None if self.plan is None else self.plan.digest

    def remove(self) -> None:
        """Remove this layer, wherever in the stack it is; no effect if that was done before.

        Raises InputError in a thread or task that doesn't have it.
        """
        global _everywhere
        if self.everywhere:
            with _lock:
                _everywhere = tuple(use for use in _everywhere if use is not self)
                _look_up_anew()
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
    """Layers of a context, the topmost first, and their plan cache, which is empty until `current` was called.

    Copied contexts share it, so that a plan is in force in all of them.
    """

    __slots__ = ("__weakref__", "plans", "uses")

    def __init__(self, uses: tuple[Use, ...] = ()) -> None:
        self.uses = uses
        self.plans = Plans()
        with _lock:
            _stacks.add(self)


_lock = threading.RLock()
_stacks: WeakSet[Stack] = WeakSet()
_everywhere: tuple[Use, ...] = ()
_reloaded: Use | None = None
_memos: dict[Settings, Memo] = {}
_pinned: Memo | None = None
_BOTTOM = Stack()
STACK: ContextVar[Stack] = ContextVar("flashtune.layers", default=_BOTTOM)
"""Stack of this context: a thread starts with the bottom one, a task of asyncio with its creator's."""


def _unlock() -> None:
    """Replace locks in a forked child, where nobody would release one that another thread of the parent held."""
    global _lock
    _lock = threading.RLock()
    for memo in _memos.values():
        memo.lock = threading.RLock()


os.register_at_fork(after_in_child=_unlock)


def _lay(uses: tuple[Use, ...]) -> None:
    STACK.set(Stack(uses) if uses else _BOTTOM)
    current()


def use(
    database: str | Path | None = None,
    *,
    alone: bool = False,
    everywhere: bool = False,
    unmeasured: bool | None = None,
    confirm: bool = False,
    plan: str | Path | None = None,
) -> Use:
    """Use a database: calls of this thread, or task of asyncio, look into it first.

        with dispatch.use("model/tuned.sqlite"):
            model(x)

    It is a layer over earlier ones, `FLASHTUNE_DB`, the user's own database and the shipped one, until the `with` ends or `remove` of the
    returned object is called. The file is read now. Later changes of it are read after `reload`, or when `use` names it again.

    Args:
        database: path or URL. For the same key, its measured records go before those of lower layers.
        alone: hide all lower layers.
        everywhere: apply to all threads and tasks, such as those of data loaders and servers; their own layers lie above it. Activation
            checkpoints on a GPU need it, since PyTorch computes them again in threads of its own.
        unmeasured: allow kernels without any measurement on the GPU's architecture, or forbid them. None leaves it to
            FLASHTUNE_UNMEASURED.
        confirm: measure at first calls. If a key has no measured record, the first call of `attention` times the two kernels that are
            likely the fastest, PyTorch and other providers, for 50 ms in all after compiling. The fastest runs such calls from then on,
            and the user's own database keeps it. Calls with gradients, with dropout, with features for which PyTorch needs all scores
            (soft caps, LSEs), in CUDA graphs or under a tracer aren't measured.
        plan: file of `freeze`. What it names runs the calls, whatever the records say, and never gives way to a fallback kernel. So ranks
            with the same plan have equal bits; `digest` of the returned object tells whether plans are the same. A call that the plan
            doesn't have is refused, and so is a plan of other versions or another GPU. A call uses the plan's kernel for its length, or
            for a length between the same powers of two.

    Returns:
        The layer: a context manager with `remove`. Without `everywhere`, tasks that start inside the block keep the layer until
            they end, and so do threads that run in a copied context. Gradients are computed under the layers of the forward.

    Raises:
        DatabaseError: if there is no such database, or it is damaged.
        InputError: without `database`, `unmeasured`, `confirm` and `plan`, and for a plan that can't run calls here.
    """
    global _everywhere
    if database is None and unmeasured is None and not confirm and plan is None:
        raise InputError("nothing to use: give the path or URL of a database, unmeasured, confirm=True or a plan")
    frozen = None if plan is None else Frozen.read(Path(str(located(plan))))
    added = Use(located(database), alone=alone, everywhere=everywhere, unmeasured=unmeasured, confirm=confirm, plan=frozen)
    own = () if everywhere else STACK.get().uses
    with _lock:
        memo = _memo_of((added, *own, *_everywhere))
    memo.read()
    if everywhere:
        with _lock:
            _everywhere = (added, *_everywhere)
            _look_up_anew()
    else:
        _lay((added, *own))
    return added


def current() -> Memo:
    """Context in force here; the next calls find its plans at once."""
    stack = STACK.get()
    with _lock:
        memo = _pinned or _memo_of((*stack.uses, *_everywhere))
        stack.plans = memo.plans
    return memo


def reload(database: str | Path | None = None, *, alone: bool = False) -> None:
    """Drop all cached choices and read the records anew at the next call, as after a search. Layers of `use` stay.

    Args:
        database: path or URL of a layer below those in use everywhere, until the next `reload`.
        alone: hide all layers below it.
    """
    global _reloaded
    path = located(database)
    with _lock:
        _reloaded = None if path is None else Use(path, alone=alone, everywhere=True, unmeasured=None)
        _memos.clear()
        _look_up_anew()


@contextmanager
def serving(memo: Memo) -> Iterator[None]:
    """Run the calls of all threads by this memo meanwhile: with one that pins a kernel, that is measured as calls would run it."""
    global _pinned
    before = _pinned
    try:
        with _lock:
            _pinned = memo
            _look_up_anew()
        yield
    finally:
        with _lock:
            _pinned = before
            _look_up_anew()


def _look_up_anew() -> None:
    """Make every thread look up its layers at the next call; to be called under `_lock`."""
    for stack in _stacks:
        stack.plans = Plans()


def _memo_of(uses: tuple[Use, ...]) -> Memo:
    """Memo of the settings of these layers, the topmost first, made where there is none; to be called under `_lock`."""
    databases: dict[str, Hashable] = {}
    alone = False
    for one in uses if _reloaded is None else (*uses, _reloaded):
        if one.database is not None and not alone:
            databases.setdefault(one.database, one.seen)
        alone = alone or one.alone
    said = next((one.unmeasured for one in uses if one.unmeasured is not None), None)
    plan = next((one.plan for one in uses if one.plan is not None), None)
    confirm = plan is None and any(one.confirm for one in uses)
    seen = tuple(databases.values())
    settings = Settings(databases=tuple(databases), seen=seen, alone=alone, unmeasured=said, confirm=confirm, plan=plan)
    # The dict is ordered by last use.
    memo = _memos.pop(settings, None) or Memo(settings)
    while len(_memos) >= MOST_MEMOS:
        del _memos[next(iter(_memos))]
    _memos[settings] = memo
    return memo
