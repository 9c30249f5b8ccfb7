"""Search: for every problem, propose, compile, verify, measure or predict, and keep what was learned.

Problem x Target -> SearchSpace -> Candidate -> Variant -> render -> compile -> verify -> measure -> Outcome -> best -> SearchResult.
A failing candidate is an Outcome; nothing that a candidate does ends a search.
"""

import math
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
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
from flashtune.tuner.replies import Failed, MachineCode
from flashtune.tuner.sampling import Sampler, import_surrogate
from flashtune.tuner.space import SearchSpace
from flashtune.tuner.study import Plan, fingerprint
from flashtune.tuner.workers import Limits, Pending, Workers

POLL_S = 1.0
"""How often a search that has nothing left to do looks whether other processes are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """How winners are made ready for later calls: `compile` is a task for the compilers, whose answer `put` keeps. A failure is no more
    than a reason to do it later."""

    compile: Callable[[TuningRecord, Target], MachineCode | Failed]
    put: Callable[[MachineCode], None]


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
        self._plan, self._storage, self._provenance = plan, storage, provenance
        self._save, self._listener = save, listener
        self._states: dict[KernelSpec, SpecState] = {}
        self._rows = list(plan.known)
        # By variant, what the Triton of today made of it: where that is known, its machine code may be at hand.
        self._facts = {
            row.outcome.variant_id: row.outcome.facts
            for row in plan.known
            if plan.source == "measured" and row.outcome.facts is not None and row.provenance.triton == provenance.triton
        }
        self._found: dict[int, SearchResult] = {}
        self._given, self._codes, self._winners = workers, dict[str, Pending[MachineCode]](), set[str]()
        self._taken: list[int] = []
        self._started = 0.0
        self._after_trials: list[float] = []
        self.lock, self.stopping = threading.RLock(), threading.Event()
        self._seed = plan.seed if plan.seed is not None else time.time_ns() % (1 << 31)

    def run(self) -> list[SearchResult]:
        """Search every problem in turn; raises NoKernelFound where one ends without a correct candidate.

        KeyboardInterrupt, and errors of the storage, pass through after what is known so far was saved. A result that can't be
        saved ends nothing: it is kept in the storage, saving is tried again at the end, and again by the next run of the same plan.
        """
        plan = self._plan
        run = Plan(self._storage, self._words())
        self._started = time.monotonic()
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
            self._put_codes()
        if len(self._found) == len(plan.problems):
            run.finish()
        results = [self._found[index] for index in sorted(self._found)]
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

    def _take(self, spec: KernelSpec | None) -> int | None:
        """The next problem for a lane that had one of `spec`, if it had any; each is given to one lane."""
        with self.lock:
            if (index := self._next(spec)) is not None:
                self._taken.append(index)
            return index

    def _next(self, spec: KernelSpec | None) -> int | None:
        """Which problem that would be. A GPU goes through a plan in its order; of several each keeps to its spec, of which it has verdicts
        and near winners, then takes one that nobody has begun, and in the end helps where most is left."""
        problems = self._plan.problems
        left = [index for index in range(len(problems)) if index not in self._taken]
        if not left or len(self._plan.devices) <= 1:
            return left[0] if left else None
        begun, counts = {problems[index].spec() for index in self._taken}, Counter(problems[index].spec() for index in left)
        own = [index for index in left if problems[index].spec() == spec]
        new = [index for index in left if problems[index].spec() not in begun]
        return (own or new or sorted(left, key=lambda index: -counts[problems[index].spec()]))[0]

    def _new_to_all(self, index: int) -> bool:
        """Whether nobody has begun a problem of this one's spec."""
        spec = self._plan.problems[index].spec()
        return all(self._plan.problems[taken].spec() != spec for taken in self._taken)

    def _deadline(self, index: int) -> float | None:
        """When the trials of a problem that begins now have to end, so that those after it have their share of the time.

        Races and what else follows the trials are reckoned with what they took of the problems before.
        """
        if self._plan.budget_s is None:
            return None
        now, lanes = time.monotonic(), max(1, len(self._plan.devices))
        left = max(0.0, self._plan.budget_s - (now - self._started))
        with self.lock:
            share = left / math.ceil((len(self._plan.problems) - self._taken.index(index)) / lanes)
            after = statistics.median(self._after_trials) if self._after_trials else 0.0
        return now + max(0.0, share - after)

    def _followed(self, seconds: float) -> None:
        """What followed a problem's trials took so long."""
        with self.lock:
            self._after_trials.append(seconds)

    def _end(self, index: int, result: SearchResult) -> bool:
        """Whether this is the first to end a problem; another lane may have worked on it, too."""
        with self.lock:
            first = index not in self._found
            self._found.setdefault(index, result)
            return first

    def _foresee_winners(self, rows: Sequence[TuningRecord], workers: Workers) -> None:
        """Have compiled for later calls what may win, each once."""
        keep, target = self._plan.keep, self._plan.target
        with self.lock:
            for row in rows:
                if keep is not None and row.outcome.variant_id not in self._codes:
                    pending = workers.submit("compile", keep.compile, row, target, limit_s=self._plan.limits.compile_s)
                    self._codes[row.outcome.variant_id] = pending

    def _keep(self, row: TuningRecord, workers: Workers) -> None:
        """Have a winner, and its twin, compiled for later calls; they are kept at the end."""
        twin = row.as_twin()
        rows = [replace(row, twin=None), *([] if twin is None else [twin])]
        self._foresee_winners(rows, workers)
        with self.lock:
            self._winners.update(one.outcome.variant_id for one in rows)

    def _put_codes(self) -> None:
        """Keep what was compiled of winners; nobody waits for the others."""
        for variant_id, pending in self._codes.items():
            if variant_id not in self._winners:
                pending.forget()
        for variant_id, pending in self._codes.items():
            if variant_id in self._winners and self._plan.keep is not None and isinstance(code := pending.reply(), MachineCode):
                self._plan.keep.put(code)

    def _words(self) -> list[object]:
        """What makes two plans the same: GPU, problems, families as they are, trials, sampler, seed, and who measures or predicts."""
        plan, made_by = self._plan, self._provenance
        spaces = (SearchSpace(plan.families, problem, plan.target, only_suited=plan.only_suited) for problem in plan.problems)
        problems = [fingerprint(space, problem) for space, problem in zip(spaces, plan.problems, strict=True)]
        return [plan.target.slug, problems, plan.source, plan.sampler, plan.seed, plan.trials, made_by.triton, made_by.gpu_name] + (
            [] if plan.until is None else [plan.until]
        )

    def _state(self, spec: KernelSpec) -> SpecState:
        return self._states.setdefault(spec, SpecState({}, {}))

    def _evaluation(self, problem: Problem, workers: Workers, device: int) -> Evaluation:
        plan, verdicts = self._plan, self._state(problem.spec()).verdicts
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
        total = len(search._plan.problems)
        if len(search._plan.devices) > 1:
            mine = {one.index for one in todo}
            todo.extend(self._problem(index) for index in range(total) if index not in search._found and index not in mine)
        # What others were still busy with, and what couldn't be saved.
        while todo:
            if search.stopping.is_set():
                raise KeyboardInterrupt
            one = todo.popleft()
            if one.index in search._found:
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
        index = self.search._take(self._spec)
        if index is None:
            return None
        self._spec = self.search._plan.problems[index].spec()
        return self._problem(index)

    def _begin_next(self) -> None:
        """The compilers have nothing to do while finalists race: let them begin with the next problem."""
        self._following = self._next()
        if self._following is not None:
            self._following.begin()
            self._foresee(self._following.problem.spec())

    def _foresee(self, spec: KernelSpec) -> None:
        """Have compiled what the problem after the next begins with, where nobody has compiled any of it: its spec is new."""
        search = self.search
        with search.lock:
            index = search._next(spec)
            new = index is not None and search._new_to_all(index)
        if new:
            self._foreseen = self._next()
            if self._foreseen is not None:
                self._foreseen.foresee()
