"""Schedule of a plan's problems over the GPUs, and each problem's share of the time."""

import math
import statistics
import threading
import time
from collections import Counter

from flashtune.core.config import KernelSpec
from flashtune.core.results import SearchResult
from flashtune.tuner.search.plan import SearchPlan


class Schedule:
    """Problems of a plan, by their places in it; any thread may use it. `found` are the results of finished ones."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan, self._started = plan, time.monotonic()
        self._taken: list[int] = []
        self._after_trials: list[float] = []
        self._lock = threading.RLock()
        self.found: dict[int, SearchResult] = {}

    def take(self, spec: KernelSpec | None) -> int | None:
        """Next problem for a device worker whose last one had `spec`, if any; each goes to one worker."""
        with self._lock:
            if (index := self._next(spec)) is not None:
                self._taken.append(index)
            return index

    def _next(self, spec: KernelSpec | None) -> int | None:
        """Place of the next problem. A single GPU follows the plan's order; of several each keeps to its spec, of which it has verdicts and
        near winners, then takes one that nobody has begun, the fewest features first, and in the end helps where most is left.

        Winners of plain problems save those with features a third of their trials (benchmarks/results/2026-11-23-lanes).
        """
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
        """True where the next problem of a worker with `spec` has a spec that nobody has begun."""
        with self._lock:
            index, problems = self._next(spec), self._plan.problems
            return index is not None and all(problems[taken].spec() != problems[index].spec() for taken in self._taken)

    def deadline(self, index: int) -> float | None:
        """Time (`time.monotonic`) at which a problem's trials have to end, so that later problems get their share; None without a budget.

        Races and other work after the trials are estimated from earlier problems.
        """
        if self._plan.budget_s is None:
            return None
        now, device_workers = time.monotonic(), max(1, len(self._plan.devices))
        left = max(0.0, self._plan.budget_s - (now - self._started))
        with self._lock:
            share = left / math.ceil((len(self._plan.problems) - self._taken.index(index)) / device_workers)
            after = statistics.median(self._after_trials) if self._after_trials else 0.0
        return now + max(0.0, share - after)

    def followed(self, seconds: float) -> None:
        """Add the seconds of the work after a problem's trials."""
        with self._lock:
            self._after_trials.append(seconds)

    def end(self, index: int, result: SearchResult) -> bool:
        """Store a problem's result and return True for its first; another worker may have searched it, too."""
        with self._lock:
            first = index not in self.found
            self.found.setdefault(index, result)
            return first
