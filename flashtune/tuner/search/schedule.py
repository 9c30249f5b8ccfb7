"""Which problem of a plan a GPU takes next, and how much of the time is its."""

import math
import statistics
import threading
import time
from collections import Counter

from flashtune.core.config import KernelSpec
from flashtune.core.results import SearchResult
from flashtune.tuner.search.plan import SearchPlan


class Schedule:
    """The problems of a plan, by their places in it; any thread may ask. `found` are the results of those that have ended."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan, self._started = plan, time.monotonic()
        self._taken: list[int] = []
        self._after_trials: list[float] = []
        self._lock = threading.RLock()
        self.found: dict[int, SearchResult] = {}

    def take(self, spec: KernelSpec | None) -> int | None:
        """The next problem for a lane that had one of `spec`, if it had any; each is given to one lane."""
        with self._lock:
            if (index := self._next(spec)) is not None:
                self._taken.append(index)
            return index

    def _next(self, spec: KernelSpec | None) -> int | None:
        """Which problem that would be. A GPU goes through a plan in its order; of several each keeps to its spec, of which it has verdicts
        and near winners, then takes one that nobody has begun, the fewest features first, and in the end helps where most is left.

        What plain problems came to spares those with features a third of their trials, which two that begin at once can't tell one another
        (benchmarks/results/2026-11-23-lanes)."""
        problems = self._plan.problems
        left = [index for index in range(len(problems)) if index not in self._taken]
        if not left or len(self._plan.devices) <= 1:
            return left[0] if left else None
        begun, counts = {problems[index].spec() for index in self._taken}, Counter(problems[index].spec() for index in left)
        own = [index for index in left if problems[index].spec() == spec]
        new = [index for index in left if problems[index].spec() not in begun]
        new.sort(key=lambda index: len(problems[index].features.as_json().keys() - {"alignment"}))
        return (own or new or sorted(left, key=lambda index: -counts[problems[index].spec()]))[0]

    def next_is_new(self, spec: KernelSpec | None) -> bool:
        """Whether nobody has begun a problem of the spec of the one that a lane of `spec` takes next."""
        with self._lock:
            index, problems = self._next(spec), self._plan.problems
            return index is not None and all(problems[taken].spec() != problems[index].spec() for taken in self._taken)

    def deadline(self, index: int) -> float | None:
        """When the trials of a problem that begins now have to end, so that those after it have their share of the time.

        Races and what else follows the trials are reckoned with what they took of the problems before.
        """
        if self._plan.budget_s is None:
            return None
        now, lanes = time.monotonic(), max(1, len(self._plan.devices))
        left = max(0.0, self._plan.budget_s - (now - self._started))
        with self._lock:
            share = left / math.ceil((len(self._plan.problems) - self._taken.index(index)) / lanes)
            after = statistics.median(self._after_trials) if self._after_trials else 0.0
        return now + max(0.0, share - after)

    def followed(self, seconds: float) -> None:
        """What followed a problem's trials took so long."""
        with self._lock:
            self._after_trials.append(seconds)

    def end(self, index: int, result: SearchResult) -> bool:
        """Whether this is the first to end a problem; another lane may have worked on it, too."""
        with self._lock:
            first = index not in self.found
            self.found.setdefault(index, result)
            return first
