"""Replies of tasks in child processes: one type per task, or `Failed`; and wall time by purpose."""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from flashtune.core.code.binaries import Manifest
from flashtune.core.problems.config import Config
from flashtune.core.records.results import Baseline, CompileFacts, Fate, Measurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Stage and reason of a task's failure. `poisoned` is True where the process must not be used again (a sticky GPU error),
    `inconclusive` where it says nothing about the kernel: memory or a disk that others filled, a process that was killed."""

    fate: Fate
    reason: str
    facts: CompileFacts | None = None
    error: float | None = None
    poisoned: bool = False
    inconclusive: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Compiler's facts of a candidate."""

    facts: CompileFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """Kernel for later calls: its text, and machine code as files with their manifest; no manifest where the user's cache has them
    already."""

    text: str = ""
    manifest: Manifest | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Report that the GPU's process has a problem's inputs and oracles; `gpu` is the GPU's id for nvidia-smi, `spent` are seconds by
    purpose."""

    gpu: str = "0"
    spent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """Agreement with the oracle; `error` is the largest error over its tolerance."""

    error: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Time of a candidate, and the incumbent's from the same rounds; `error` is None where nothing compared its numbers (a prediction)."""

    time: Measurement
    error: float | None
    incumbent: Measurement | None = None
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the GPU's process by purpose."""

    @property
    def fate(self) -> Fate:
        """Fate of a trial that ended so."""
        return Fate.UNCHECKED if self.error is None else Fate.CORRECT


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """One race: the times of each racer in every round, in microseconds; last PyTorch's, where `backend` names its backend. `began` and
    `ended` are seconds since the epoch in the process `pid`, `spent` its seconds by purpose."""

    times: tuple[tuple[float, ...], ...]
    backend: str | None
    began: float
    ended: float
    pid: int
    spent: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """Result of all races: the final candidates' times, in their order, all in one scale, their distances `behind` the fastest as shares,
    and PyTorch's time where it has the problem; `began` of the first race and `ended` of the last."""

    times: tuple[Measurement, ...]
    behind: tuple[float, ...]
    baseline: Baseline | None
    began: float
    ended: float
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Verdict on another provider, with the `versions` of what decides its numbers: `CORRECT` with its largest error over its tolerance and
    the time of its whole calls, unless it wasn't timed, `CORRECTNESS` with the smallest wrong case, `CONSTRAINT` where it refuses the
    problem, `RUNTIME` where it fails."""

    fate: Fate
    versions: Config
    reason: str = ""
    error: float | None = None
    time: Measurement | None = None


Beside = Literal["none", "pytorch", "all"]
"""Whole calls that are timed beside a kernel's: none, PyTorch's, or also those of the other providers that are right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Called:
    """Median microseconds of a whole call, host included, of each requested candidate, and the time of PyTorch's where it was timed.

    `providers` are verdicts on others by name, and `backend` is the name of PyTorch's own choice.
    """

    times: tuple[float, ...]
    pytorch: Measurement | None
    providers: Mapping[str, Judged] = field(default_factory=dict)
    backend: str = ""
    spent: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the GPU's process by purpose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Times by name (`tuned`, `default`, a backend), and reasons for those without one."""

    times: Mapping[str, Measurement]
    left_out: Mapping[str, str]


Answer = Compiled | MachineCode | Ready | Checked | Timed | Rounds | Judged | Called | Compared


logger = logging.getLogger("flashtune.search")
"""Logger of `flashtune.search`: at level DEBUG it gets a line for each problem that has been searched."""


class Spent:
    """Sum of seconds by purpose, within one thread. Of blocks within blocks the inner ones alone count, so that the parts of a block for
    all else add up to its time."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._within: list[float] = []

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the block's seconds for a purpose."""
        begun = self._clock()
        self._within.append(0.0)
        try:
            yield
        finally:
            whole, inner = self._clock() - begun, self._within.pop()
            self._seconds[what] += whole - inner
            if self._within:
                self._within[-1] += whole

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add another process's seconds."""
        for what, number in seconds.items():
            self._seconds[what] += number

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by purpose."""
        found = dict(self._seconds)
        self._seconds.clear()
        return found

    @property
    def total(self) -> float:
        """Seconds of all purposes."""
        return sum(self._seconds.values())

    def __str__(self) -> str:
        """One line, the longest first; purposes below 5 ms are left out."""
        longest = sorted(self._seconds.items(), key=lambda entry: -entry[1])
        return ", ".join(f"{what} {number:.2f}" for what, number in longest if number >= 0.005)
