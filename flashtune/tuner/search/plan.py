"""Options of a search, the listener to its progress, and the order of its problems."""

import math
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from flashtune.core.gpu.target import Target
from flashtune.core.problems.config import KernelSpec
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Outcome, SearchResult, Source, TuningRecord
from flashtune.core.system.errors import FlashtuneError
from flashtune.templates.family import Family
from flashtune.tuner.children.workers import Limits
from flashtune.tuner.search.evaluation import CallsTask


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """Options of a search. `trials` counts candidates per problem; `budget_s` bounds the whole plan's wall time, and `until` ends a problem
    where no trial is worth its time any more (see `StoppingRule`)."""

    target: Target
    problems: tuple[Problem, ...]
    families: Mapping[str, Family]
    source: Source
    trials: int = 60
    budget_s: float | None = None
    until: float | None = None
    sampler: str = "gp"
    """Name of a sampler (see `sampler_of`)."""
    seed: int | None = None
    input_seed: int | None = None
    """Seed of the inputs; None: `seed`, or without that one of this moment."""
    jobs: int = 1
    limits: Limits = field(default_factory=Limits)
    known: tuple[TuningRecord, ...] = ()
    """Records of other searches, the preferred first; the winners of those nearest to a problem are tried first."""
    only_suited: bool = True
    """True if families skip the problems whose sizes don't suit them (see `Family`)."""
    measure_s: float = 0.03
    """Seconds of timing per candidate."""
    race_s: float = 0.6
    """Seconds of timing per closing race."""
    devices: tuple[str, ...] = ()
    """GPUs that measure, as CUDA_VISIBLE_DEVICES names them; without any, PyTorch's default one."""
    calls: CallsTask | None = None
    """Task that times whole calls of the best."""
    keep: bool = False
    """True to compile each problem's winner into the user's cache while others are searched, for later calls."""


Stage = Literal["preparing", "compiling", "checking", "measuring", "racing", "comparing", "waiting"]
"""Stage of a search: inputs on the GPU; a candidate's stages; the closing race; other providers; or waiting for other processes."""


class SearchListener(Protocol):
    """Listener to a search's progress; the command line displays it."""

    def problem_started(self, problem: Problem, index: int, total: int, resumed: int) -> None:
        """A problem begins; `resumed` of its trials come from an interrupted search."""

    def stage_started(self, problem: Problem, stage: Stage, known: int) -> None:
        """A possibly long stage begins, while `known` trials of the problem are done; repeated while it waits for others."""

    def trial_finished(self, problem: Problem, outcome: Outcome, incumbent: Outcome | None) -> None:
        """One trial of a problem ended; `incumbent` is the problem's best so far."""

    def problem_finished(self, result: SearchResult) -> None:
        """A problem's result, after it was saved."""

    def problem_known(self, result: SearchResult, index: int, total: int) -> None:
        """Saved result of a problem that an earlier run of this plan, or another process, has searched."""

    def save_failed(self, problem: Problem, error: FlashtuneError) -> None:
        """A result couldn't be saved; saving is retried at the end."""


class Schedule:
    """Problems of a plan, by their places in it; any thread may use it. `found` are the results of finished ones."""

    def __init__(self, plan: SearchPlan) -> None:
        self._plan, self._started = plan, time.monotonic()
        self._begun: list[int] = []
        self._after_trials: list[float] = []
        self._lock = threading.RLock()
        self.found: dict[int, SearchResult] = {}

    def order(self, spec: KernelSpec | None) -> list[int]:
        """Problems that this process hasn't begun, in the order in which a device worker whose last one had `spec` should take them.

        A single GPU follows the plan's order; of several each keeps to its spec, of which it has verdicts and near winners, then takes one
        that nobody has begun, the fewest features first, and then helps where most is left. Winners of plain problems save those with
        features a third of their trials (benchmarks/results/2026-11-23-lanes).
        """
        problems = self._plan.problems
        with self._lock:
            left = [index for index in range(len(problems)) if index not in self._begun]
            if len(self._plan.devices) <= 1:
                return left
            begun, counts = {problems[index].spec() for index in self._begun}, Counter(problems[index].spec() for index in left)

        def rank(index: int) -> tuple[int, int]:
            mine = problems[index].spec()
            if mine == spec:
                return 0, 0
            if mine not in begun:
                return 1, len(problems[index].features.as_json().keys() - {"alignment"})
            return 2, -counts[mine]

        return sorted(left, key=rank)

    def begin(self, index: int) -> None:
        """Leave a problem out of `order`."""
        with self._lock:
            self._begun.append(index)

    def put_back(self, index: int) -> None:
        """Have a problem of `begin` in `order` again."""
        with self._lock:
            self._begun.remove(index)

    def deadline(self, index: int) -> float | None:
        """Time (`time.monotonic`) at which a problem's trials have to end, so that later problems get their share; None without a budget.

        Races and other work after the trials are estimated from earlier problems.
        """
        if self._plan.budget_s is None:
            return None
        now, device_workers = time.monotonic(), max(1, len(self._plan.devices))
        left = max(0.0, self._plan.budget_s - (now - self._started))
        with self._lock:
            share = left / math.ceil((len(self._plan.problems) - self._begun.index(index)) / device_workers)
            after = statistics.median(self._after_trials) if self._after_trials else 0.0
        return now + max(0.0, share - after)

    @property
    def late(self) -> bool:
        """True once the budget of the whole plan is spent."""
        return self._plan.budget_s is not None and time.monotonic() - self._started > self._plan.budget_s

    def followed(self, seconds: float) -> None:
        """Add the seconds of the work after a problem's trials."""
        with self._lock:
            self._after_trials.append(seconds)
