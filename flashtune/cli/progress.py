"""How a running search looks: a live display in a terminal, plain lines elsewhere."""

import time
from collections import Counter
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from flashtune.cli.records import short_config
from flashtune.core.errors import FlashtuneError
from flashtune.core.problem import Problem
from flashtune.core.results import Fate, Outcome, SearchResult
from flashtune.core.secrets import mask_secrets


class SearchProgress:
    """Draws a search: the incumbent, trials by fate, and the time left; a context manager and a SearchListener."""

    def __init__(self, console: Console, *, trials: int | None, quiet: bool) -> None:
        self._console, self._trials, self._quiet = console, trials, quiet
        self._bars = Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)
        self._problems = self._bars.add_task("problems", total=None)
        self._tries = self._bars.add_task("trials", total=trials)
        self._fates: Counter[Fate] = Counter()
        self._label, self._best, self._left = "", "", ""
        self._started = time.monotonic()
        self._live = Live(get_renderable=self._view, console=console, refresh_per_second=4) if console.is_terminal and not quiet else None

    def __enter__(self) -> "SearchProgress":
        if self._live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def _view(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        grid.add_row(self._bars)
        grid.add_row(f"{self._label}  best {self._best or 'none yet'}")
        fates = ", ".join(f"{fate} {count}" for fate, count in sorted(self._fates.items()))
        grid.add_row(f"trials by fate: {fates or 'none yet'}   {self._left}")
        return grid

    def problem_started(self, problem: Problem, index: int, total: int, resumed: int) -> None:
        """A problem begins."""
        self._label, self._best = problem.label(), ""
        self._bars.update(self._problems, total=total, completed=index)
        self._bars.reset(self._tries, total=self._trials, completed=resumed)
        if index:
            seconds = (time.monotonic() - self._started) / index * (total - index)
            self._left = f"about {seconds / 60:.0f} min left" if seconds > 90 else f"about {seconds:.0f} s left"
        if self._live is None and not self._quiet and resumed:
            self._console.print(f"[{index + 1}/{total}] {problem.label()}: resuming after {resumed} trials")

    def trial_finished(self, outcome: Outcome, incumbent: Outcome | None) -> None:
        """One trial ended."""
        self._fates[outcome.fate] += 1
        self._bars.advance(self._tries)
        if incumbent is not None and incumbent.measurement is not None:
            config = short_config(incumbent.config.as_dict())
            self._best = f"{incumbent.measurement.median_us:.1f} us {incumbent.source} {incumbent.template} {config}"

    def problem_known(self, result: SearchResult, index: int, total: int) -> None:
        """A problem that this plan is done with."""
        self._bars.update(self._problems, total=total, completed=index + 1)
        if self._live is None and not self._quiet:
            self._console.print(f"[{index + 1}/{total}] {result.problem.label()}: done before ({len(result.outcomes)} trials)")

    def save_failed(self, problem: Problem, error: FlashtuneError) -> None:
        """A result couldn't be saved."""
        self._console.print(f"{problem.label()}: not saved yet, tried again at the end ({mask_secrets(str(error))})", markup=False)

    def problem_finished(self, result: SearchResult) -> None:
        """A problem's result was saved."""
        self._bars.advance(self._problems)
        if self._live is not None or self._quiet:
            return
        best = result.best
        if best is None or best.measurement is None:
            self._console.print(f"{result.problem.label()}: no correct kernel in {len(result.outcomes)} trials")
            return
        fates = Counter(outcome.fate for outcome in result.outcomes)
        others = ", ".join(f"{count} {fate}" for fate, count in sorted(fates.items()) if fate is not Fate.CORRECT)
        ratio = ""
        if result.baseline is not None:
            ratio = f", {result.baseline.measurement.median_us / best.measurement.median_us:.2f}x the framework ({result.baseline.backend})"
        self._console.print(
            f"{result.problem.label()}: {best.measurement.median_us:.1f} us {best.source}{ratio}, {best.template} "
            f"{short_config(best.config.as_dict())} ({len(result.outcomes)} trials{', ' + others if others else ''})"
        )
