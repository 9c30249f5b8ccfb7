"""Estimate of a search's remaining time."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flashtune.core.config import KernelSpec
from flashtune.core.problem import Problem

ENOUGH = 3
"""Trials of a kind of problem before its rate is used."""

SLOWLY_S = 15.0
"""Time constant of the smoothed estimate, in seconds."""

DOUBLING_S = 10.0
"""Seconds in which the shown estimate at most doubles or halves, beside the time that passes."""


@dataclass
class _Rate:
    """Total seconds of a number of events."""

    seconds: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        self.seconds += seconds
        self.count += 1

    @property
    def mean(self) -> float:
        return self.seconds / self.count if self.count else 0.0


class TimeLeft:
    """Estimator of a search's remaining seconds from the events it observed.

    Problems are of two kinds: the first of a kernel spec, whose candidates are compiled and checked, and later ones at other N, which reuse
    much of that and can be twenty times faster. There is no estimate before trials of every kind that is still to come were observed. The
    very first trial is left out, since it starts child processes.
    """

    def __init__(
        self, problems: Sequence[Problem], *, trials: int | None, clock: Callable[[], float], budget_s: float | None = None
    ) -> None:
        self._todo = list(dict.fromkeys(problems))
        self._trials, self._clock = trials, clock
        self._since = clock()
        self._ends = None if budget_s is None else self._since + budget_s
        self._current: Problem | None = None
        self._known = 0
        self._later = False
        self._met: set[KernelSpec] = set()
        self._rates = {False: _Rate(), True: _Rate()}
        self._closing, self._lengths = _Rate(), _Rate()
        self._started = False
        self._shown: tuple[float, float] | None = None

    def begin(self, problem: Problem, known: int) -> None:
        """Record that a problem begins or resumes with `known` of its trials done."""
        if problem != self._current:
            self._current, self._since = problem, self._clock()
            self._later = problem.spec() in self._met
        self._known = known

    def trial(self) -> None:
        """Record that a trial of the current problem ended."""
        now = self._clock()
        if self._started and self._current is not None:
            self._rates[self._later].add(now - self._since)
        self._started, self._since = True, now
        self._known += 1

    def done(self, problem: Problem, trials: int) -> None:
        """Record that a problem ended after so many trials, here or in another process."""
        now = self._clock()
        if problem == self._current:
            self._closing.add(now - self._since)
            self._lengths.add(trials)
            self._met.add(problem.spec())
            self._current = None
        self._since = now
        if problem in self._todo:
            self._todo.remove(problem)

    def seconds(self) -> float | None:
        """The remaining seconds; None where too little was observed."""
        now, reckoned = self._clock(), self._reckoned()
        if reckoned is None:
            self._shown = None
            return None
        if self._shown is not None:
            shown, then = self._shown
            passed = now - then
            expected = max(1.0, shown - passed)
            followed = expected + (reckoned - expected) * (1 - math.exp(-passed / SLOWLY_S))
            most = 2 ** (passed / DOUBLING_S)
            reckoned = max(expected / most, min(max(1.0, shown) * most, followed))
        self._shown = reckoned, now
        return reckoned

    def words(self) -> str:
        """The remaining time in words, rounded to its accuracy; without an estimate the budget's bound, or an empty text."""
        seconds, bound = self.seconds(), math.inf if self._ends is None else max(0.0, self._ends - self._clock())
        if seconds is not None:
            return f"{_roughly(min(seconds, bound))} left"
        return f"at most {lasting(bound)} left" if self._todo and bound < math.inf else ""

    def _reckoned(self) -> float | None:
        if self._trials is None or not self._todo:
            return None
        passed = self._clock() - self._since
        length = self._lengths.mean or self._trials
        left, met = 0.0, set(self._met)
        for problem in self._todo:
            mine = problem == self._current
            rate = self._rates[self._later if mine else problem.spec() in met]
            if rate.count < ENOUGH:
                return None
            met.add(problem.spec())
            each = rate.mean
            if self._current is not None and rate is self._rates[self._later]:
                # The current trial counts as soon as it takes longer than the mean.
                each += max(0.0, passed - each) / (rate.count + 1)
            trials = max(0.0, max(length, self._known) - self._known) if mine else length
            left += each * trials + self._closing.mean
            if mine and trials:
                left -= min(passed, each)
        return left


def _roughly(seconds: float) -> str:
    if seconds < 5:
        return "a few seconds"
    if seconds < 90:
        return f"about {5 * round(seconds / 5)} s"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} min"
    return f"about {seconds / 3600:.1f} h"


def lasting(seconds: float) -> str:
    """A duration in words: 4 s, 2 min 5 s, 1 h 10 min."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
