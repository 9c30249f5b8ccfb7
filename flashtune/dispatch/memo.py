"""The one piece of state at run time: what was decided so far, and the records that decisions are made from."""

import threading
import warnings
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path

from flashtune.core.problem import ProblemKey
from flashtune.core.results import TuningRecord
from flashtune.dispatch.plans import FrameworkPlan, KernelPlan
from flashtune.dispatch.policy import group_of

Plan = FrameworkPlan | KernelPlan

MOST_PLANS = 8192
"""Growing sequences make a new signature with each token; beyond so many, all are forgotten and decided anew."""


class Memo:
    """Plans by signature, the library's records by group, kernels that failed, warnings given.

    `database` is laid over the user's and the shipped results.
    Reading a plan takes no lock; everything that decides holds `lock`.
    """

    def __init__(self, database: str | Path | None = None) -> None:
        self.lock = threading.RLock()
        self.plans: dict[Hashable, Plan] = {}
        self.broken: dict[tuple[str, str], str] = {}
        self._database = database
        self._groups: dict[tuple[object, ...], list[TuningRecord]] | None = None
        self._warned: set[str] = set()

    def keep(self, signature: Hashable, plan: Plan) -> None:
        """Remember the plan of a signature."""
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        self.plans[signature] = plan

    def records(self, key: ProblemKey) -> list[TuningRecord]:
        """The records that may stand in for `key`; the library is read when this is first called."""
        if self._groups is None:
            # SQLAlchemy takes a while to import: only those who need records pay for it.
            from flashtune.db.library import Layer, Library

            library = Library.default()
            if self._database is not None:
                library = Library([Layer(location=self._database), *library.layers])
            groups: dict[tuple[object, ...], list[TuningRecord]] = defaultdict(list)
            for record in library.winners():
                groups[group_of(record.key)].append(record)
            self._groups = dict(groups)
        return self._groups.get(group_of(key), [])

    def warn_once(self, message: str) -> None:
        """A RuntimeWarning, the first time that this message comes up."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, RuntimeWarning, stacklevel=2)
