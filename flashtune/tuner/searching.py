"""Search: for every problem, propose, compile, verify, measure or predict, and keep what was learned.

Problem x Target -> SearchSpace -> Candidate -> Variant -> render -> compile -> verify -> measure -> Outcome -> best -> SearchResult.
A failing candidate is an Outcome; nothing that a candidate does ends a search.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, Protocol

import optuna

from flashtune.core.config import KernelSpec
from flashtune.core.errors import FlashtuneError, NoKernelFound
from flashtune.core.problem import Problem
from flashtune.core.results import Outcome, Provenance, SearchResult, Source, TuningRecord
from flashtune.core.target import Target
from flashtune.templates.family import Family
from flashtune.tuner.evaluation import CallsTask, Evaluation, MeasuredEvaluation, PredictedEvaluation
from flashtune.tuner.problem_search import ProblemSearch, SpecState
from flashtune.tuner.sampling import Sampler, import_surrogate
from flashtune.tuner.schedule import Schedule
from flashtune.tuner.space import SearchSpace
from flashtune.tuner.study import Plan, fingerprint
from flashtune.tuner.winners import Keeping, Winners
from flashtune.tuner.workers import Limits, Workers

POLL_S = 1.0
"""How often a search that has nothing left to do looks whether other processes are done."""


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


class Search:
    """Runs a plan; `save` receives each problem's result as soon as it is complete (or the search is interrupted).

    What is tried is kept in `storage`. A plan that was interrupted goes on where it was, problems that it has done included; any number of
    processes may run one plan at the same time. `save` may get a result that it got before (from a process that died just then).
    """

    def __init__(
        self,
        plan: SearchPlan,
        *,
        storage: optuna.storages.BaseStorage,
        provenance: Provenance,
        save: Callable[[SearchResult], None],
        listener: SearchListener,
        workers: Workers | None = None,
    ) -> None:
        """`workers` are taken where the plan's would be started, and go on running."""
        self.plan, self.storage, self.provenance = plan, storage, provenance
        self.save, self.listener = save, listener
        self._states: dict[KernelSpec, SpecState] = {}
        self.rows = list(plan.known)
        # By variant, what the Triton of today made of it: where that is known, its machine code may be at hand.
        self.facts = {
            row.outcome.variant_id: row.outcome.facts
            for row in plan.known
            if plan.source == "measured" and row.outcome.facts is not None and row.provenance.triton == provenance.triton
        }
        self._given = workers
        self.schedule, self.winners = Schedule(plan), Winners(plan.keep, plan.target, plan.limits.compile_s)
        self.lock, self.stopping = threading.RLock(), threading.Event()
        self._seed = plan.seed if plan.seed is not None else time.time_ns() % (1 << 31)

    def run(self) -> list[SearchResult]:
        """Search every problem in turn; raises NoKernelFound where one ends without a correct candidate.

        KeyboardInterrupt, and errors of the storage, pass through after what is known so far was saved. A result that can't be
        saved ends nothing: it is kept in the storage, saving is tried again at the end, and again by the next run of the same plan.
        """
        plan = self.plan
        run = Plan(self.storage, self._words())
        self.schedule = Schedule(plan)
        if plan.sampler == "gp" and plan.source == "measured":
            # Beside the start of the children; the thread that asks the sampler would take a second for it between two trials.
            threading.Thread(target=import_surrogate, name="surrogate", daemon=True).start()
        with ExitStack() as stack:
            workers = self._given or stack.enter_context(Workers(jobs=plan.jobs, limits=plan.limits, devices=plan.devices))
            lanes = [_Lane(self, device, workers, run.suffix) for device in range(max(1, len(plan.devices)))]
            if len(lanes) == 1:
                lanes[0].run()
            else:
                self._run_all(lanes)
            self.winners.put()
        found = self.schedule.found
        if len(found) == len(plan.problems):
            run.finish()
        results = [found[index] for index in sorted(found)]
        failed = [result for result in results if result.best is None]
        if failed:
            why = next((o.reason for o in failed[0].outcomes if o.reason), "no candidate was tried: give more trials or a larger budget")
            names = ", ".join(result.problem.label() for result in failed)
            raise NoKernelFound(f"no correct kernel found for {names} on {plan.target.slug}; first reason: {why}")
        return results

    def _run_all(self, lanes: "Sequence[_Lane]") -> None:
        """Each lane in a thread of its own; an interruption, or an error of one, ends all of them."""
        errors: list[BaseException] = []

        def run(lane: _Lane) -> None:
            try:
                lane.run()
            except BaseException as error:
                errors.append(error)
                self.stopping.set()

        threads = [threading.Thread(target=run, args=(lane,), name=f"gpu {lane.device}", daemon=True) for lane in lanes]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self.stopping.set()
            for thread in threads:
                thread.join()
            raise
        if errors:
            # A lane that was only told to stop hides nothing.
            raise next((error for error in errors if not isinstance(error, KeyboardInterrupt)), errors[0])

    def _words(self) -> list[object]:
        """What makes two plans the same: GPU, problems, families as they are, trials, sampler, seed, and who measures or predicts."""
        plan, made_by = self.plan, self.provenance
        spaces = (SearchSpace(plan.families, problem, plan.target, only_suited=plan.only_suited) for problem in plan.problems)
        problems = [fingerprint(space, problem) for space, problem in zip(spaces, plan.problems, strict=True)]
        return [plan.target.slug, problems, plan.source, plan.sampler, plan.seed, plan.trials, made_by.triton, made_by.gpu_name] + (
            [] if plan.until is None else [plan.until]
        )

    def state(self, spec: KernelSpec) -> SpecState:
        """What is shared by all problems of a spec."""
        return self._states.setdefault(spec, SpecState({}, {}))

    def evaluation(self, problem: Problem, workers: Workers, device: int) -> Evaluation:
        """What gives candidates of a problem their times."""
        plan, verdicts = self.plan, self.state(problem.spec()).verdicts
        if plan.source == "predicted":
            return PredictedEvaluation(problem=problem, target=plan.target, workers=workers, seed=self._seed, verdicts=verdicts)
        return MeasuredEvaluation(
            problem=problem,
            target=plan.target,
            workers=workers,
            seed=self._seed,
            measure_s=plan.measure_s,
            race_s=plan.race_s,
            device=device,
            calls=plan.calls,
        )


class _Lane:
    """What one GPU does, or the one predicting process: problem after problem; at the end it helps with what other lanes have begun."""

    def __init__(self, search: Search, device: int, workers: Workers, suffix: str) -> None:
        self.search, self.device, self.workers, self.suffix = search, device, workers, suffix
        self._following: ProblemSearch | None = None
        self._foreseen: ProblemSearch | None = None
        self._spec: KernelSpec | None = None

    def run(self) -> None:
        """All problems that this lane can get."""
        search, todo = self.search, deque[ProblemSearch]()
        try:
            while (one := self._following or self._next()) is not None:
                self._following = None
                result = one.run(meanwhile=self._begin_next)
                if result is None:
                    todo.append(one)
        except BaseException:
            if self._following is not None:
                self._following.abandon()
            raise
        total = len(search.plan.problems)
        if len(search.plan.devices) > 1:
            mine = {one.index for one in todo}
            todo.extend(self._problem(index) for index in range(total) if index not in search.schedule.found and index not in mine)
        # What others were still busy with, and what couldn't be saved.
        while todo:
            if search.stopping.is_set():
                raise KeyboardInterrupt
            one = todo.popleft()
            if one.index in search.schedule.found:
                continue
            if one.run(again=True) is None and not one.late():
                todo.append(one)
                one.at("waiting")
                time.sleep(POLL_S / len(todo))

    def _problem(self, index: int) -> "ProblemSearch":
        return ProblemSearch(self.search, index, self.workers, self.suffix, self.device)

    def _next(self) -> "ProblemSearch | None":
        if self._foreseen is not None:
            found, self._foreseen = self._foreseen, None
            return found
        index = self.search.schedule.take(self._spec)
        if index is None:
            return None
        self._spec = self.search.plan.problems[index].spec()
        return self._problem(index)

    def _begin_next(self) -> None:
        """The compilers have nothing to do while finalists race: let them begin with the next problem."""
        self._following = self._next()
        if self._following is not None:
            self._following.begin()
            self._foresee(self._following.problem.spec())

    def _foresee(self, spec: KernelSpec) -> None:
        """Have compiled what the problem after the next begins with, where nobody has compiled any of it: its spec is new."""
        if self.search.schedule.next_is_new(spec):
            self._foreseen = self._next()
            if self._foreseen is not None:
                self._foreseen.foresee()
