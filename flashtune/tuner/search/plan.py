"""Options of a search, and the listener to its progress."""

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
    """Options of a search. `trials` counts candidates per problem; `budget_s` bounds the whole plan's wall time, and `until` ends a problem
    where no trial is worth its time any more (see `StoppingRule`)."""

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
    keep: Keeping | None = None
    """Compilation of each problem's winner for later calls while others are searched."""


Stage = Literal["preparing", "compiling", "checking", "measuring", "racing", "waiting"]
"""Stage of a search: inputs on the GPU; a candidate's stages; the closing race; or waiting for other processes."""


class SearchListener(Protocol):
    """Listener to a search's progress; the command line displays it."""

    def problem_started(self, problem: Problem, index: int, total: int, resumed: int) -> None:
        """A problem begins; `resumed` of its trials come from an interrupted search."""

    def stage_started(self, problem: Problem, stage: Stage, known: int) -> None:
        """A possibly long stage begins, while `known` trials of the problem are done; repeated while it waits for others."""

    def trial_finished(self, outcome: Outcome, incumbent: Outcome | None) -> None:
        """One trial ended; `incumbent` is the best so far."""

    def problem_finished(self, result: SearchResult) -> None:
        """A problem's result, after it was saved."""

    def problem_known(self, result: SearchResult, index: int, total: int) -> None:
        """Saved result of a problem that an earlier run of this plan, or another process, has searched."""

    def save_failed(self, problem: Problem, error: FlashtuneError) -> None:
        """A result couldn't be saved; saving is retried at the end."""
