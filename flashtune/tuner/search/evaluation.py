"""Evaluations that turn a compiled candidate into a time: measured on the local GPU, or predicted for an absent one."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Baseline, CompileFacts, Conditions, Fate, Measurement, Outcome
from flashtune.core.system.errors import EnvironmentProblem, first_line
from flashtune.core.system.threads import begun
from flashtune.templates.cost import predict_us
from flashtune.tuner.children import tasks
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.replies import Beside, Called, Checked, Compiled, Failed, Raced, Ready, Rounds, Spent, Timed, logger
from flashtune.tuner.timing.conditions import GpuWatch, race_undisturbed
from flashtune.tuner.timing.racing import Contest

CallsTask = Callable[[list[tasks.Source], Problem, Target, int, float, Beside], Called | Failed]
"""Task that times whole calls of some sources, for so many seconds, on the GPU of its process, and of others beside them; dispatch defines
a call."""

CALLS_S = 0.2
"""Seconds of timing whole calls."""

PROVIDERS_S = 120.0
"""Seconds in which PyTorch or other providers compile, are checked and timed."""

PATIENCE = 1.5
"""Slowdown over the incumbent in the first launches beyond which a candidate isn't timed further."""

Verdicts = dict[tuple[object, ...], Checked | Failed]
"""Interpreter's verdict on each code path of a spec, at any N."""


def begin_compiling(
    workers: Workers, candidate: Candidate, problem: Problem, target: Target, facts: CompileFacts | None, *, limit_s: float
) -> Pending[Compiled] | Failed:
    """Compilation of a candidate that begins now, or the failure of its template; with known `facts` there may be machine code already."""
    try:
        source = tasks.Source.of(candidate.family, candidate.variant(problem.spec()))
    except Exception as error:
        return Failed(fate=Fate.COMPILE, reason=first_line(error))
    fixed = (source, problem, target, *([] if facts is None else [facts]))
    return workers.submit("compile", tasks.compile_candidate, *fixed, limit_s=limit_s)


class Evaluation:
    """Source of times for one problem's compiled candidates; this one has no preparations, no races and no calls.

    `spent` are seconds of the GPU's process by purpose.
    """

    spent: Spent

    def prepare(self) -> None:
        """Start preparing `evaluate` and `race`, unless that was begun, without waiting.

        `evaluate` and `race` raise EnvironmentProblem where the preparation failed.
        """

    def compile(self, facts: Mapping[Candidate, CompileFacts | None]) -> None:
        """Start compiling candidates side by side, without waiting; those with known `facts` may have machine code already."""

    def compiled(self, candidate: Candidate) -> Compiled | Failed | None:
        """Result of `compile`, once it is there; None where that wasn't begun."""
        return None

    def evaluate(self, candidate: Candidate, facts: CompileFacts, incumbent: tuple[Candidate, Measurement] | None) -> Timed | Failed:
        """Check a candidate and time it; the time is in the scale of the incumbent's."""
        raise NotImplementedError

    def expect_race(self) -> None:
        """Start the preparations of a race during the last trials."""

    def close(self) -> None:
        """End the preparations of `prepare` and `expect_race`, where there was no race."""

    def race(self, candidates: Sequence[Candidate], *, pytorch: bool) -> tuple[Raced | Failed | None, Conditions | None]:
        """Time the final candidates once more, interleaved, with `pytorch` also with its call, with the GPU's conditions; None where there
        is no race."""
        return None, None

    def call(self, candidates: Sequence[Candidate], *, beside: bool = False) -> Called | None:
        """Time whole calls of these candidates, host included, and with `beside` of PyTorch and other providers; None where that isn't
        possible."""
        return None


@dataclass(slots=True, kw_only=True)
class MeasuredEvaluation(Evaluation):
    """Evaluation on this machine's GPU number `device`, in a child process; `calls` is the task that times whole calls there, and
    `waited` counts the seconds that this process waits for its preparations."""

    problem: Problem
    target: Target
    workers: Workers
    seed: int
    measure_s: float
    race_s: float
    device: int = 0
    calls: CallsTask | None = None
    spent: Spent = field(default_factory=Spent)
    waited: Spent = field(default_factory=Spent)
    _preparing: Pending[Ready] | None = None
    _ready: Ready | None = None
    _watch: Future[GpuWatch] | None = None
    _compiling: dict[Candidate, Pending[Compiled] | Failed] = field(default_factory=dict)

    def prepare(self) -> None:
        """Have the inputs and oracles made on the GPU."""
        if self._preparing is None:
            self._preparing = self.workers.preparing(self.problem, self.target, self.seed, device=self.device)

    def _wait(self) -> None:
        if self._ready is not None:
            return
        self.prepare()
        assert self._preparing is not None, "it was begun"
        with self.waited.on("wait for inputs"):
            reply = self.workers.prepared(self.problem, self._preparing)
        if isinstance(reply, Failed):
            raise EnvironmentProblem(reply.reason)
        logger.debug("inputs are on the GPU")
        self.spent.add(reply.spent)
        self._ready = reply

    def _doubt(self, reply: Failed) -> None:
        """Prepare again after a failure that may have ended the process, so that no later task's time limit includes new inputs."""
        if reply.fate in (Fate.RUNTIME, Fate.TIMEOUT):
            self._preparing, self._ready = None, None

    def compile(self, facts: Mapping[Candidate, CompileFacts | None]) -> None:
        """Have compilers fill Triton's cache, where `evaluate` finds machine code."""
        limit_s = self.workers.limits.compile_s
        for candidate, known in facts.items():
            self._compiling[candidate] = begin_compiling(self.workers, candidate, self.problem, self.target, known, limit_s=limit_s)

    def compiled(self, candidate: Candidate) -> Compiled | Failed | None:
        """Result of its compiler."""
        found = self._compiling.get(candidate)
        return found if found is None or isinstance(found, Failed) else found.reply()

    def evaluate(self, candidate: Candidate, facts: CompileFacts, incumbent: tuple[Candidate, Measurement] | None) -> Timed | Failed:
        """Check and time on the GPU. The time is put in the incumbent's scale: clocks drift between trials, ratios don't."""
        self._wait()
        sources = self._source(candidate), self._source(incumbent[0]) if incumbent else None
        fixed = (self.problem, self.target, self.seed, self.measure_s, PATIENCE)
        limit_s = self.workers.limits.device_s
        reply = self.workers.submit("device", tasks.evaluate_candidate, *sources, *fixed, limit_s=limit_s, device=self.device).reply()
        if isinstance(reply, Failed):
            self._doubt(reply)
            return reply
        self.spent.add(reply.spent)
        if incumbent is None or reply.incumbent is None:
            return reply
        return replace(reply, time=reply.time.scaled(incumbent[1].median_us / reply.incumbent.median_us))

    def race(self, candidates: Sequence[Candidate], *, pytorch: bool) -> tuple[Raced | Failed | None, Conditions | None]:
        """Race all of them in one process, until each is decided, while the GPU is watched."""
        self._wait()
        sources = [self._source(candidate) for candidate in candidates]
        self.expect_race()
        assert self._watch is not None, "it was begun"
        try:
            return race_undisturbed(lambda: self._raced(sources, pytorch), self._watch.result())
        finally:
            self._unwatch()

    def expect_race(self) -> None:
        """Start the tool that watches the GPU, which takes as long as some trials; its process supplies the GPU's id."""
        if self._watch is None and self._ready is not None:
            gpu = self._ready.gpu
            # In a thread of its own, so that nobody waits before the race.
            self._watch = begun(lambda: GpuWatch(gpu).__enter__())

    def close(self) -> None:
        """Stop that tool; another problem's inputs may have replaced this one's by the time that its search resumes."""
        self._unwatch()
        self._preparing, self._ready = None, None

    def _unwatch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None and watch.exception() is None:
            watch.result().__exit__(None, None, None)

    def call(self, candidates: Sequence[Candidate], *, beside: bool = False) -> Called | None:
        """Time whole calls in the same process, after the races; a fault costs these times alone."""
        # The whole calls that are timed are given no functions.
        if self.calls is None or self.problem.features.mods:
            return None
        self._wait()
        sources = [self._source(candidate) for candidate in candidates]
        others: Beside = "all" if beside else "none"
        fixed = (self.problem, self.target, self.seed, CALLS_S, others)
        limit_s = (PROVIDERS_S if beside else self.workers.limits.device_s) + 10 * CALLS_S
        reply = self.workers.submit("device", self.calls, sources, *fixed, limit_s=limit_s, device=self.device).reply()
        if isinstance(reply, Failed):
            logger.debug("no whole calls: %s", reply.reason)
            self._doubt(reply)
            return None
        self.spent.add(reply.spent)
        return reply

    def _raced(self, sources: list[tasks.Source], beside_pytorch: bool) -> Raced | Failed:
        limit_s = (PROVIDERS_S if beside_pytorch else self.workers.limits.device_s) + 10 * self.race_s
        fixed = (self.problem, self.target, self.seed, self.race_s, beside_pytorch)
        contest, pytorch = Contest(len(sources)), len(sources)
        races: list[Rounds] = []
        while racers := contest.racers():
            raced = [sources[place] for place in racers]
            reply = self.workers.submit("device", tasks.race_finalists, raced, *fixed, limit_s=limit_s, device=self.device).reply()
            if isinstance(reply, Failed):
                self._doubt(reply)
                if not races:
                    return reply
                # Earlier races stay valid.
                break
            self.spent.add(reply.spent)
            contest.add([*racers, *([pytorch] if reply.backend else [])], reply.times)
            races.append(reply)
        backend = races[0].backend
        return Raced(
            times=tuple(contest.measurement(place) for place in range(len(sources))),
            behind=contest.behind(),
            baseline=Baseline(backend=backend, measurement=contest.measurement(pytorch)) if backend else None,
            began=races[0].began,
            ended=races[-1].ended,
            pid=races[-1].pid,
        )

    def _source(self, candidate: Candidate) -> tasks.Source:
        return tasks.Source.of(candidate.family, candidate.variant(self.problem.spec()))


@dataclass(slots=True, kw_only=True)
class PredictedEvaluation(Evaluation):
    """Evaluation without a GPU: checked in Triton's interpreter, where it can run there, and timed by the cost model."""

    problem: Problem
    target: Target
    workers: Workers
    seed: int
    verdicts: Verdicts
    spent: Spent = field(default_factory=Spent)

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

    def _checked(self, candidate: Candidate) -> Checked | Failed:
        path = _path(candidate)
        if path not in self.verdicts:
            problem, limit_s = tasks.interpretable(self.problem), self.workers.limits.interpret_s
            source = tasks.Source.of(candidate.family, candidate.variant(problem.spec()))
            self.verdicts[path] = self.workers.submit(
                "interpret", tasks.interpret_candidate, source, problem, self.seed, limit_s=limit_s
            ).reply()
        return self.verdicts[path]


def learn(verdicts: Verdicts, outcomes: Mapping[Candidate, Outcome]) -> None:
    """Take over the verdicts of earlier predicted trials, each of which serves every candidate of its code path."""
    for candidate, outcome in outcomes.items():
        error, ran = outcome.max_error, outcome.facts is not None
        if outcome.fate is Fate.CORRECTNESS or (ran and outcome.fate in (Fate.RUNTIME, Fate.TIMEOUT)):
            verdicts.setdefault(_path(candidate), Failed(fate=outcome.fate, reason=outcome.reason, error=error))
        elif error is not None:
            verdicts.setdefault(_path(candidate), Checked(error=error))


def _path(candidate: Candidate) -> tuple[object, ...]:
    return candidate.family.name, *(candidate.config[axis] for axis in candidate.family.path_axes)
