"""What a search is asked for, and what it tells of its progress."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from flashtune.core.errors import FlashtuneError
from flashtune.core.problem import Problem
from flashtune.core.results import Outcome, SearchResult, Source, TuningRecord
from flashtune.core.target import Target
from flashtune.templates.family import Family
from flashtune.tuner.children.workers import Limits
from flashtune.tuner.propose.sampling import Sampler
from flashtune.tuner.publish.winners import Keeping
from flashtune.tuner.search.evaluation import CallsTask


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """What to search and how. `trials` counts candidates per problem; `budget_s` bounds the whole plan's wall time, and `until` ends a
    problem where no trial is worth it any more (see `StoppingRule`)."""

    target: Target
    problems: tuple[Problem, ...]
    families: Mapping[str, Family]
    source: Source
    trials: int = 60
    budget_s: float | None = None
    until: float | None = None
    sampler: Sampler = "gp"
    seed: int | None = None
    jobs: int = 1
    limits: Limits = field(default_factory=Limits)
    known: tuple[TuningRecord, ...] = ()
    """Rows of other searches, the preferred first; the winners of those nearest to a problem are tried first."""
    only_suited: bool = True
    """Whether families sit out the problems whose sizes don't suit them (see `Family`)."""
    measure_s: float = 0.03
    """Seconds of timing that one candidate gets."""
    race_s: float = 0.6
    """Seconds of timing that each closing race gets."""
    devices: tuple[str, ...] = ()
    """The GPUs that measure, as CUDA_VISIBLE_DEVICES names them; without any, the one that torch takes by itself."""
    calls: CallsTask | None = None
    """Times whole calls of the best."""
    keep: Keeping | None = None
    """Compiles each problem's winner while others are searched."""


Stage = Literal["preparing", "compiling", "checking", "measuring", "racing", "waiting"]
"""What a search is at: inputs on the GPU; a candidate, in stages; the closing race; or what other processes are still busy with."""


class SearchListener(Protocol):
    """Hears of a search's progress; the command line draws from it."""

    def problem_started(self, problem: Problem, index: int, total: int, resumed: int) -> None:
        """A problem begins; `resumed` trials of it are known from an interrupted search."""

    def stage_started(self, problem: Problem, stage: Stage, known: int) -> None:
        """Something that may take long begins, while `known` trials of the problem are done; more than once while it waits for others."""

    def trial_finished(self, outcome: Outcome, incumbent: Outcome | None) -> None:
        """One trial ended; `incumbent` is the best so far."""

    def problem_finished(self, result: SearchResult) -> None:
        """All that was learned of a problem, after it was saved."""

    def problem_known(self, result: SearchResult, index: int, total: int) -> None:
        """A problem of which this plan's search was done before, or by another process; its result is saved, too."""

    def save_failed(self, problem: Problem, error: FlashtuneError) -> None:
        """A result couldn't be saved; it will be tried again at the end."""
