"""Two ways from a compiled candidate to a time: measured on the GPU that is here, or predicted for one that isn't."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from flashtune.core.errors import EnvironmentProblem
from flashtune.core.problem import Problem
from flashtune.core.results import Baseline, CompileFacts, Conditions, Fate, Measurement, Outcome
from flashtune.core.target import Target
from flashtune.tuner import tasks
from flashtune.tuner.conditions import GpuWatch, gpu_id, race_undisturbed
from flashtune.tuner.cost import predict_us
from flashtune.tuner.racing import Contest
from flashtune.tuner.replies import Called, Checked, Failed, Raced, Ready, Rounds, Timed
from flashtune.tuner.space import Candidate
from flashtune.tuner.workers import Pending, Workers

CallsTask = Callable[[list[tasks.Source], Problem, Target, int, float], Called | Failed]
"""Times whole calls of some sources, for so many seconds, on the GPU of the process that it runs in. What a call is, dispatch knows."""

CALLS_S = 0.2
"""Seconds of timing whole calls."""

PATIENCE = 1.5
"""A candidate this many times slower than the incumbent at first look is not timed further."""

Verdicts = dict[tuple[object, ...], Checked | Failed]
"""What the interpreter said of each code path of a spec, at any N."""


class Evaluation(Protocol):
    """Gives candidates of one problem, that compiled, their times."""

    def prepare(self) -> None:
        """Begin to make ready what `evaluate` and `race` need, unless it was begun, and wait for nothing.

        `evaluate` and `race` raise EnvironmentProblem where it couldn't be had.
        """

    def learn(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take over what an earlier outcome says of other candidates."""

    def evaluate(self, candidate: Candidate, facts: CompileFacts, incumbent: tuple[Candidate, Measurement] | None) -> Timed | Failed:
        """Check a candidate and time it; the time is in the scale of the incumbent's."""
        ...

    def race(self, finalists: Sequence[Candidate]) -> tuple[Raced | Failed | None, Conditions | None]:
        """Time the finalists once more, interleaved with the framework, and say what the GPU did; None where there is no race."""
        ...

    def call(self, candidates: Sequence[Candidate]) -> Called | None:
        """Time whole calls of these candidates and of the framework, host included; None where that can't be."""
        ...


@dataclass(slots=True, kw_only=True)
class MeasuredEvaluation:
    """On this machine's GPU number `device`, in a child process; `calls` is the task that times whole calls there."""

    problem: Problem
    target: Target
    workers: Workers
    seed: int
    measure_s: float
    race_s: float
    device: int = 0
    calls: CallsTask | None = None
    _preparing: Pending[Ready] | None = None
    _ready: bool = False

    def prepare(self) -> None:
        """Have the inputs and oracles made on the GPU."""
        if self._preparing is None:
            self._preparing = self.workers.preparing(self.problem, self.target, self.seed, device=self.device)

    def _wait(self) -> None:
        self.prepare()
        if not self._ready and self._preparing is not None:
            ready = self.workers.prepared(self.problem, self._preparing)
            if isinstance(ready, Failed):
                raise EnvironmentProblem(ready.reason)
            self._ready = True

    def learn(self, candidate: Candidate, outcome: Outcome) -> None:
        """Nothing: every candidate is measured itself."""

    def evaluate(self, candidate: Candidate, facts: CompileFacts, incumbent: tuple[Candidate, Measurement] | None) -> Timed | Failed:
        """Check and time on the GPU. The time is put in the incumbent's scale: clocks drift between trials, ratios don't."""
        self._wait()
        sources = self._source(candidate), self._source(incumbent[0]) if incumbent else None
        fixed = (self.problem, self.target, self.seed, self.measure_s, PATIENCE)
        limit_s = self.workers.limits.device_s
        reply = self.workers.submit("device", tasks.evaluate_candidate, *sources, *fixed, limit_s=limit_s, device=self.device).reply()
        if isinstance(reply, Failed) or incumbent is None or reply.incumbent is None:
            return reply
        return replace(reply, time=reply.time.scaled(incumbent[1].median_us / reply.incumbent.median_us))

    def race(self, finalists: Sequence[Candidate]) -> tuple[Raced | Failed | None, Conditions | None]:
        """Races of all of them and the framework in one process, until each is decided, while the GPU is watched."""
        self._wait()
        sources = [self._source(candidate) for candidate in finalists]
        return race_undisturbed(lambda: self._raced(sources), GpuWatch(gpu_id(self.device)))

    def call(self, candidates: Sequence[Candidate]) -> Called | None:
        """In the same process, after the races; a fault costs no more than these times."""
        if self.calls is None:
            return None
        self._wait()
        sources = [self._source(candidate) for candidate in candidates]
        fixed = (self.problem, self.target, self.seed, CALLS_S)
        limit_s = self.workers.limits.device_s + 10 * CALLS_S
        reply = self.workers.submit("device", self.calls, sources, *fixed, limit_s=limit_s, device=self.device).reply()
        return None if isinstance(reply, Failed) else reply

    def _raced(self, sources: list[tasks.Source]) -> Raced | Failed:
        limit_s = self.workers.limits.device_s + 10 * self.race_s
        fixed = (self.problem, self.target, self.seed, self.race_s)
        contest, framework = Contest(len(sources)), len(sources)
        races: list[Rounds] = []
        while racers := contest.racers():
            raced = [sources[place] for place in racers]
            reply = self.workers.submit("device", tasks.race_finalists, raced, *fixed, limit_s=limit_s, device=self.device).reply()
            if isinstance(reply, Failed):
                if not races:
                    return reply
                # What earlier races said counts.
                break
            contest.add([*racers, *([framework] if reply.backend else [])], reply.times)
            races.append(reply)
        backend = races[0].backend
        return Raced(
            times=tuple(contest.measurement(place) for place in range(len(sources))),
            standing=contest.standing(),
            baseline=Baseline(backend=backend, measurement=contest.measurement(framework)) if backend else None,
            began=races[0].began,
            ended=races[-1].ended,
            pid=races[-1].pid,
        )

    def _source(self, candidate: Candidate) -> tasks.Source:
        return tasks.Source.of(candidate.family, candidate.variant(self.problem.spec()))


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedEvaluation:
    """Checked in Triton's interpreter, where it can run there, and timed by the cost model."""

    problem: Problem
    target: Target
    workers: Workers
    seed: int
    verdicts: Verdicts

    def prepare(self) -> None:
        """Nothing: the first check starts the interpreter."""

    def learn(self, candidate: Candidate, outcome: Outcome) -> None:
        """A check serves every candidate of its code path."""
        if outcome.max_error is not None:
            wrong = outcome.fate is Fate.CORRECTNESS
            found = Failed(fate=outcome.fate, reason=outcome.reason, error=outcome.max_error) if wrong else Checked(error=outcome.max_error)
            self.verdicts.setdefault(_path(candidate), found)

    def evaluate(self, candidate: Candidate, facts: CompileFacts, incumbent: tuple[Candidate, Measurement] | None) -> Timed | Failed:
        """The interpreter's verdict on the candidate's code path, then the cost model's time."""
        checked = self._checked(candidate) if candidate.family.interpretable else None
        if isinstance(checked, Failed):
            return checked
        error = None if checked is None else checked.error
        time_us = predict_us(candidate.config, facts, self.problem, self.target)
        if time_us == float("inf"):
            reason = f"needs {facts.registers} registers x {facts.threads} threads, more than an SM of {self.target.slug} has"
            return Failed(fate=Fate.CONSTRAINT, reason=reason, error=error)
        return Timed(time=Measurement.predicted(time_us), error=error)

    def race(self, finalists: Sequence[Candidate]) -> tuple[Raced | Failed | None, Conditions | None]:
        """None: nothing can be timed."""
        return None, None

    def call(self, candidates: Sequence[Candidate]) -> Called | None:
        """None: nothing can be timed."""
        return None

    def _checked(self, candidate: Candidate) -> Checked | Failed:
        path = _path(candidate)
        if path not in self.verdicts:
            # The interpreter multiplies the raw bits of bf16; the code path is the same in fp16.
            problem = replace(self.problem, dtype="fp16") if self.problem.dtype == "bf16" else self.problem
            source = tasks.Source.of(candidate.family, candidate.variant(problem.spec()))
            small, limit_s = replace(problem, batch=1), self.workers.limits.interpret_s
            self.verdicts[path] = self.workers.submit(
                "interpret", tasks.interpret_candidate, source, small, self.seed, limit_s=limit_s
            ).reply()
        return self.verdicts[path]


def _path(candidate: Candidate) -> tuple[object, ...]:
    return candidate.family.name, *(candidate.config[axis] for axis in candidate.family.path_axes)
