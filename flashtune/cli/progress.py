"""Display of a running search: live in a terminal, plain lines elsewhere."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from flashtune.cli.records import short_config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import PROVIDERS, Fate, Outcome, SearchResult
from flashtune.core.system.errors import FlashtuneError
from flashtune.core.system.secrets import mask_secrets
from flashtune.core.system.words import counted
from flashtune.templates.expected import likely
from flashtune.tuner.search.stopping import sentence
from flashtune.tuner.timing.racing import CALL_GAIN, TIE

if TYPE_CHECKING:
    from flashtune.tuner.search.plan import Stage

LINE_S = 10.0
"""Seconds between two lines about the current stage, where there is no terminal."""
RATE_S = 300.0
"""Seconds of trials that the estimate of the remaining time is made from."""

STAGES = {
    "preparing": "preparing the GPU",
    "racing": "racing the best",
    "comparing": "timing other providers",
    "waiting": "waiting for other processes",
}


class _Bars(Progress):
    """Progress bars with lines below them."""

    lines: Callable[[], Iterable[str]] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        """The bars of visible tasks, then the lines."""
        yield self.make_tasks_table(self.tasks)
        if self.lines is not None:
            yield from self.lines()


class SearchProgress:
    """Display of a search: its stage, the incumbent, trials by fate, and the time left; a context manager and a SearchListener.

    `problems` and `trials` are those of the plan, `budget_s` its wall time; `clock` is in seconds.
    """

    def __init__(
        self,
        console: Console,
        *,
        problems: Sequence[Problem],
        trials: int | None,
        quiet: bool,
        budget_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._trials, self._clock = console, trials, clock
        self._live, self._lines = console.is_terminal and not quiet, not console.is_terminal and not quiet
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        settings: dict[str, Any] = {"console": console, "get_time": clock, "refresh_per_second": 4, "disable": not self._live}
        self._bars = _Bars(*columns, speed_estimate_period=RATE_S, **settings)
        self._problems = self._bars.add_task("problems", total=len(problems))
        self._tries = self._bars.add_task("trials", total=trials)
        # Trials of all problems, for the time left.
        self._all = self._bars.add_task("all", total=None if trials is None else trials * len(set(problems)), visible=False)
        self._ends = None if budget_s is None else clock() + budget_s
        self._fates: Counter[Fate] = Counter()
        self._problem: Problem | None = None
        self._place, self._best = "", ""
        self._done: dict[Problem, int] = {}
        self._stage: tuple[Stage, int] | None = None
        self._begun = self._since = clock()
        self.timeline: dict[Problem, list[tuple[float, Outcome]]] = {}
        """Trials of each problem in this process, with the seconds from the start to their ends."""
        # Threads of their own update the display and print lines while the search waits for its workers.
        self._lock, self._over = threading.Lock(), threading.Event()
        self._ticker = threading.Thread(target=self._tick_on, daemon=True)
        self._bars.lines = self._state

    def __enter__(self) -> "SearchProgress":
        self._bars.start()
        if self._lines:
            self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._bars.stop()
        if self._lines:
            self._ticker.join()

    def _tick_on(self) -> None:
        while not self._over.wait(LINE_S):
            self.tick()

    def tick(self) -> None:
        """Print a line about the current stage, if there is one."""
        with self._lock:
            parts = (self._at(), self._best and f"best {self._best.partition(', ')[0]}", self._left())
            line = f"{self._place}: {'; '.join(filter(None, parts))}" if self._stage is not None else ""
        if line:
            self._console.print(line, soft_wrap=True)

    def _at(self) -> str:
        """The current stage and its time."""
        if self._stage is None:
            return ""
        stage, known = self._stage
        of = f" of {self._trials}" if self._trials is not None else ""
        return f"{STAGES.get(stage, f'{stage} {known + 1}{of}')}, {lasting(self._clock() - self._since)}"

    def _left(self) -> str:
        """The remaining time in words, by the rate of the latest trials, and at most until the budget's end."""
        task = self._bars.tasks[self._all]
        seconds = None if task.finished else task.time_remaining
        bound = None if self._ends is None else max(0.0, self._ends - self._clock())
        if seconds is not None and (bound is None or seconds < bound):
            return f"about {lasting(seconds)} left"
        return "" if bound is None or task.finished else f"at most {lasting(bound)} left"

    def _state(self) -> list[str]:
        with self._lock:
            fates = ", ".join(f"{fate} {count}" for fate, count in sorted(self._fates.items()))
            return [
                f"{self._place}  best {self._best or 'none yet'}",
                f"trials by fate: {fates or 'none yet'}",
                "; ".join(filter(None, (self._at(), self._left()))),
            ]

    def problem_started(self, problem: Problem, index: int, total: int, resumed: int) -> None:
        """Show that a problem begins."""
        with self._lock:
            self._enter(problem, f"[{index + 1}/{total}] {problem.label()}", resumed)
        # Outside of the lock, which a refresh takes.
        self._bars.reset(self._tries, total=self._trials, completed=resumed)
        if self._lines and resumed:
            self._console.print(f"{self._place}: resuming after {counted(resumed, 'trial')}")

    def _enter(self, problem: Problem, place: str, known: int) -> None:
        if problem != self._problem:
            self._problem, self._place, self._best, self._stage = problem, place, "", None
        if problem not in self._done:
            self._done[problem] = known
            # Trials of before took no time of this search.
            self._skip(known)

    def _skip(self, trials: int) -> None:
        """Leave out this number of trials from those that the time left is estimated for."""
        if trials and (total := self._bars.tasks[self._all].total) is not None:
            self._bars.update(self._all, total=max(0, total - trials))

    def stage_started(self, problem: Problem, stage: "Stage", known: int) -> None:
        """Show that a stage, which may take long, begins."""
        with self._lock:
            self._enter(problem, problem.label(), known)
            self._bars.update(self._tries, completed=known)
            if (stage, known) != self._stage:
                self._stage = stage, known
                self._since = self._clock()

    def trial_finished(self, problem: Problem, outcome: Outcome, incumbent: Outcome | None) -> None:
        """Show that a trial ended."""
        with self._lock:
            self._fates[outcome.fate] += 1
            self.timeline.setdefault(problem, []).append((self._clock() - self._begun, outcome))
            if problem in self._done:
                self._done[problem] += 1
            self._bars.advance(self._tries)
            self._bars.advance(self._all)
            if incumbent is not None and incumbent.measurement is not None:
                config = short_config(incumbent.config.as_dict())
                self._best = f"{incumbent.measurement.median_us:.1f} us {incumbent.source}, {incumbent.template} {config}"

    def problem_known(self, result: SearchResult, index: int, total: int) -> None:
        """Show that a problem of this plan was finished before."""
        self._end(result)
        if self._lines:
            self._console.print(f"[{index + 1}/{total}] {result.problem.label()}: done before ({_trials(result)})")

    def _end(self, result: SearchResult) -> None:
        with self._lock:
            done, trials = self._done.pop(result.problem, None), self._trials or 0
            if done is None:
                self._skip(trials)
            else:
                # Ends before the last trial are a part of the rate: later problems will have such, too.
                self._bars.advance(self._all, max(0, trials - done))
            self._bars.advance(self._problems)
            self._stage = None

    def save_failed(self, problem: Problem, error: FlashtuneError) -> None:
        """Show that a result couldn't be saved."""
        self._console.print(f"{problem.label()}: not saved yet, tried again at the end ({mask_secrets(str(error))})", markup=False)

    def problem_finished(self, result: SearchResult) -> None:
        """Show that a problem's result was saved."""
        self._end(result)
        why = why_slower(result)
        if not self._lines:
            if self._live and why:
                self._console.print(f"{result.problem.label()}: {why}", soft_wrap=True)
            return
        best = result.best
        if best is None or best.measurement is None:
            found = f"no correct kernel in {_trials(result)}" if result.outcomes else "stopped before its first trial"
            self._console.print(f"{result.problem.label()}: {found}")
            return
        fates = Counter(outcome.fate for outcome in result.outcomes)
        others = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items()) if fate is not Fate.CORRECT)
        ratio = ""
        if result.baseline is not None:
            ratio = f", {result.baseline.measurement.median_us / best.measurement.median_us:.2f}x PyTorch ({result.baseline.backend})"
        measured = best.source == "measured"
        ended = "" if result.ending is None else f"; stopped: {sentence(result.ending)}"
        us = best.measurement.median_us
        time_us = f"{us:.1f} us measured" if measured else f"{likely(best.template, result.problem.direction, us)} (predicted)"
        ended += f"; {why}" if why else ""
        self._console.print(
            f"{result.problem.label()}: {time_us}{ratio}, {best.template} "
            f"{short_config(best.config.as_dict())} ({_trials(result)}{', ' + others if others else ''}{ended})",
            soft_wrap=True,
        )


def why_slower(result: SearchResult) -> str:
    """Reason why the winner's time is longer, by more than a tie, than the best trial's; empty where it isn't."""
    best = result.best
    if best is None or best.measurement is None:
        return ""
    timed = [(o, o.measurement) for o in result.outcomes if o.fate.timed and o.measurement is not None]
    first, raced = min(timed, key=lambda one: (one[0].trial or one[1]).median_us)
    trial_us, theirs, mine = (first.trial or raced).median_us, raced.median_us, best.measurement.median_us
    if mine <= trial_us * (1 + TIE):
        return ""
    if first.variant_id == best.variant_id:
        return f"the best trial's {trial_us:.1f} us were its own: the closing race times final candidates anew"
    if not first.finalist:
        return f"the best trial, of {trial_us:.1f} us, didn't run in the closing race"
    if theirs >= mine:
        return f"the best trial, of {trial_us:.1f} us, was no faster in the closing race ({theirs:.1f} us)"
    called = [(raced.median_us, o.call_us) for o, raced in timed if o.finalist and o.call_us is not None]
    fastest_call = min(called, default=(0.0, 0.0))[1]
    if best.call_us is not None and best.call_us < (1 - CALL_GAIN) * fastest_call:
        return f"whole calls decided: of the winner they take {best.call_us:.1f} us, of the fastest in the closing race {fastest_call:.1f}"
    if mine <= theirs * (1 + TIE):
        return f"a tie with the best trial, of {theirs:.1f} us in the closing race, goes to the stored record or to the simpler kernel"
    return ""


def _trials(result: SearchResult) -> str:
    tried = sum(outcome.template not in PROVIDERS for outcome in result.outcomes)
    known = result.ending.candidates if result.ending is not None else None
    return counted(tried, "trial") if known is None else f"{tried} of {counted(known, 'candidate')} tried"


def lasting(seconds: float) -> str:
    """A duration in words: 4 s, 2 min 5 s, 1 h 10 min."""
    whole = int(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
