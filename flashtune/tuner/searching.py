"""Search: for every problem, propose, compile, verify, measure or predict, and keep what was learned.

Problem x Target -> SearchSpace -> Candidate -> Variant -> render -> compile -> verify -> measure -> Outcome -> best -> SearchResult.
A failing candidate is an Outcome; nothing that a candidate does ends a search.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Literal, Protocol

import optuna

from flashtune.core.config import KernelSpec
from flashtune.core.errors import FlashtuneError, NoKernelFound
from flashtune.core.problem import Problem
from flashtune.core.results import Baseline, Conditions, Fate, Measurement, Outcome, Provenance, SearchResult, Source, TuningRecord
from flashtune.core.target import Target
from flashtune.templates.family import Family
from flashtune.tuner import tasks
from flashtune.tuner.carrying import carried, record_of, stored
from flashtune.tuner.evaluation import Evaluation, MeasuredEvaluation, PredictedEvaluation, Verdicts
from flashtune.tuner.racing import behind_by_times, placed
from flashtune.tuner.replies import Compiled, Failed, Raced, Timed
from flashtune.tuner.sampling import Sampler
from flashtune.tuner.space import Candidate, SearchSpace
from flashtune.tuner.study import Plan, Study, fingerprint
from flashtune.tuner.workers import Limits, Pending, Workers

FINALISTS = 12
"""Candidates in the closing races; their neighbours' times are noise apart."""

WITHIN = 0.1
"""Who was slower than the best trial by more than this doesn't race."""

POLL_S = 1.0
"""How often a search that has nothing left to do looks whether other processes are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchPlan:
    """What to search and how. `trials` counts candidates per problem; `budget_s` bounds the whole plan's wall time."""

    target: Target
    problems: tuple[Problem, ...]
    families: Mapping[str, Family]
    source: Source
    trials: int = 60
    budget_s: float | None = None
    sampler: Sampler = "gp"
    seed: int | None = None
    jobs: int = 1
    limits: Limits = field(default_factory=Limits)
    known: tuple[TuningRecord, ...] = ()
    """Rows of other searches, the preferred first; the winners of those nearest to a problem are tried first."""
    only_suited: bool = True
    """Whether families sit out the problems whose sizes don't suit them (see `Family`)."""
    measure_s: float = 0.06
    """Seconds of timing that one candidate gets."""
    race_s: float = 0.6
    """Seconds of timing that the closing race gets."""


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


@dataclass
class _SpecState:
    """What one compiled spec shares over every N: facts and numeric checks by variant id."""

    compiled: dict[str, Compiled | Failed]
    verdicts: Verdicts


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
    ) -> None:
        self._plan, self._storage, self._provenance = plan, storage, provenance
        self._save, self._listener = save, listener
        self._states: dict[KernelSpec, _SpecState] = {}
        self._rows = list(plan.known)
        self._seed = plan.seed if plan.seed is not None else time.time_ns() % (1 << 31)

    def run(self) -> list[SearchResult]:
        """Search every problem in turn; raises NoKernelFound where one ends without a correct candidate.

        KeyboardInterrupt, and errors of the storage, pass through after what is known so far was saved. A result that can't be
        saved ends nothing: it is kept in the storage, saving is tried again at the end, and again by the next run of the same plan.
        """
        plan, total = self._plan, len(self._plan.problems)
        run = Plan(self._storage, self._words())
        started = time.monotonic()
        found: dict[int, SearchResult] = {}
        with Workers(jobs=plan.jobs, limits=plan.limits) as workers:
            todo: deque[_ProblemSearch] = deque()
            for index in range(total):
                deadline = None
                if plan.budget_s is not None:
                    left = plan.budget_s - (time.monotonic() - started)
                    deadline = time.monotonic() + max(0.0, left) / (total - index)
                one = _ProblemSearch(self, index, workers, run.suffix, deadline)
                result = one.run()
                if result is None:
                    todo.append(one)
                else:
                    found[index] = result
            # What others were still busy with, and what couldn't be saved.
            while todo:
                one = todo.popleft()
                result = one.run(again=True)
                if result is not None:
                    found[one.index] = result
                elif not one.late():
                    todo.append(one)
                    one.at("waiting")
                    time.sleep(POLL_S / len(todo))
        if len(found) == total:
            run.finish()
        results = [found[index] for index in sorted(found)]
        failed = [result for result in results if result.best is None]
        if failed:
            why = next((o.reason for o in failed[0].outcomes if o.reason), "no candidate was tried: give more trials or a larger budget")
            names = ", ".join(result.problem.label() for result in failed)
            raise NoKernelFound(f"no correct kernel found for {names} on {plan.target.slug}; first reason: {why}")
        return results

    def _words(self) -> list[object]:
        """What makes two plans the same: GPU, problems, families as they are, trials, sampler, seed, and who measures or predicts."""
        plan, made_by = self._plan, self._provenance
        spaces = (SearchSpace(plan.families, problem, plan.target, only_suited=plan.only_suited) for problem in plan.problems)
        problems = [fingerprint(space, problem) for space, problem in zip(spaces, plan.problems, strict=True)]
        return [plan.target.slug, problems, plan.source, plan.sampler, plan.seed, plan.trials, made_by.triton, made_by.gpu_name]

    def _state(self, spec: KernelSpec) -> _SpecState:
        return self._states.setdefault(spec, _SpecState({}, {}))

    def _evaluation(self, problem: Problem, workers: Workers) -> Evaluation:
        plan, verdicts = self._plan, self._state(problem.spec()).verdicts
        if plan.source == "predicted":
            return PredictedEvaluation(problem=problem, target=plan.target, workers=workers, seed=self._seed, verdicts=verdicts)
        return MeasuredEvaluation(
            problem=problem, target=plan.target, workers=workers, seed=self._seed, measure_s=plan.measure_s, race_s=plan.race_s
        )


class _ProblemSearch:
    """The search of one problem."""

    def __init__(self, search: Search, index: int, workers: Workers, suffix: str, deadline: float | None) -> None:
        self.search, self.index, self.workers, self.deadline = search, index, workers, deadline
        self.plan = search._plan
        self.problem = problem = self.plan.problems[index]
        self.space = SearchSpace(self.plan.families, problem, self.plan.target, only_suited=self.plan.only_suited)
        self.state = search._state(problem.spec())
        self.study = Study(
            self.space,
            problem,
            sampler=self.plan.sampler,
            seed=self.plan.seed,
            source=self.plan.source,
            storage=search._storage,
            plan=suffix,
        )
        self.evaluation = search._evaluation(problem, workers)
        self.incumbent: tuple[Candidate, Outcome] | None = None
        self.learned = 0
        self._learn()

    def run(self, *, again: bool = False) -> SearchResult | None:
        """Trials until the count, the deadline or the space ends; then the closing race.

        None where other processes are still busy with the rest, or the result couldn't be saved: it is to be called `again`.
        """
        total, listener = len(self.plan.problems), self.search._listener
        result = self.study.decided(self.problem)
        known = result is not None and not again
        if result is None:
            if not again:
                listener.problem_started(self.problem, self.index, total, len(self.study.outcomes))
                self.study.enqueue(carried(self.space, self.problem, self.search._rows, self.plan.source))
            result = self._searched()
        if result is None:
            return None
        # Whether or not it can be saved: what is searched next begins with it.
        if (row := record_of(result)) is not None:
            self.search._rows.insert(0, row)
        if not self._publish(result, final=again):
            return None
        if known:
            listener.problem_known(result, self.index, total)
        else:
            listener.problem_finished(result)
        return result

    def _searched(self) -> SearchResult | None:
        """The decided result; None where others are still busy, or it is theirs to decide."""
        try:
            self._trials()
            self.study.leave()
            if self.study.others or not self.study.may_decide():
                return None
            self.at("racing")
            self.evaluation.prepare()
            result = self._race()
            self.study.decide(result)
            return result
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | FlashtuneError):
                known = self._result(tuple(self.study.in_order().values()), None)
                if known.outcomes:
                    self.search._save(known)
                self.search._listener.problem_finished(known)
            self.study.leave()
            raise

    def _publish(self, result: SearchResult, *, final: bool) -> bool:
        """Whether the result was saved; a fault passes through when it is `final`."""
        try:
            if result.outcomes:
                self.search._save(result)
        except FlashtuneError as error:
            if final:
                raise
            self.search._listener.save_failed(self.problem, error)
            return False
        return True

    def at(self, stage: Stage) -> None:
        """Tell what this problem is at."""
        self.search._listener.stage_started(self.problem, stage, len(self.study.outcomes))

    def late(self) -> bool:
        """Whether the time is up. One candidate is always tried, so that a tight budget still yields a row."""
        return self.deadline is not None and time.monotonic() > self.deadline and self.incumbent is not None

    def _trials(self) -> None:
        """Compile ahead of measuring, so that neither waits for the other."""
        ahead = max(4, 2 * self.plan.jobs)
        waiting: deque[tuple[Candidate, Pending[Compiled] | Compiled | Failed]] = deque()
        limit = None if self.plan.sampler == "exhaustive" else self.plan.trials
        while not self.late():
            batch = self.study.ask(ahead - len(waiting), limit=limit)
            self._learn()
            if batch:
                self.at("preparing")
                self.evaluation.prepare()
            waiting.extend([(candidate, self._compile(candidate)) for candidate in batch])
            if not waiting:
                return
            candidate, compiling = waiting.popleft()
            self.study.begin(candidate)
            outcome = self._outcome(candidate, compiling)
            self.study.tell(candidate, outcome)
            self._consider(candidate, outcome)
            self.search._listener.trial_finished(outcome, self.incumbent[1] if self.incumbent else None)

    def _learn(self) -> None:
        """Take over outcomes of an earlier run or of another process, with what they say of other candidates."""
        for candidate, outcome in islice(self.study.outcomes.items(), self.learned, None):
            self._consider(candidate, outcome)
            self.evaluation.learn(candidate, outcome)
        self.learned = len(self.study.outcomes)

    def _consider(self, candidate: Candidate, outcome: Outcome) -> None:
        if not outcome.fate.timed or outcome.measurement is None:
            return
        best = self.incumbent[1].measurement if self.incumbent else None
        if best is None or outcome.measurement.median_us < best.median_us:
            self.incumbent = candidate, outcome

    def _compile(self, candidate: Candidate) -> Pending[Compiled] | Compiled | Failed:
        variant = candidate.variant(self.space.spec)
        known = self.state.compiled.get(variant.id)
        if known is not None:
            return known
        try:
            source = tasks.Source.of(candidate.family, variant)
        except Exception as error:
            return Failed(fate=Fate.COMPILE, reason=tasks.one_line(error))
        limit_s = self.plan.limits.compile_s
        return self.workers.submit("compile", tasks.compile_candidate, source, self.problem, self.plan.target, limit_s=limit_s)

    def _outcome(self, candidate: Candidate, compiling: Pending[Compiled] | Compiled | Failed) -> Outcome:
        """Take one candidate through the stages; each can end it."""
        variant = candidate.variant(self.space.spec)
        self.at("compiling")
        compiled = compiling if isinstance(compiling, Compiled | Failed) else compiling.reply()
        self.state.compiled[variant.id] = compiled
        reply: Timed | Failed
        if isinstance(compiled, Failed):
            reply = compiled
        else:
            self.at("measuring" if self.plan.source == "measured" else "checking")
            incumbent = (self.incumbent[0], _time(self.incumbent[1])) if self.incumbent else None
            reply = self.evaluation.evaluate(candidate, compiled.facts, incumbent)
        return Outcome(
            template=variant.template,
            template_hash=variant.template_hash,
            variant_id=variant.id,
            config=candidate.config,
            fate=reply.fate,
            source=self.plan.source,
            reason=reply.reason if isinstance(reply, Failed) else "",
            measurement=None if isinstance(reply, Failed) else reply.time,
            trial=None if isinstance(reply, Failed) or self.plan.source == "predicted" else reply.time,
            facts=compiled.facts,
            max_error=reply.error,
        )

    def _race(self) -> SearchResult:
        """Time the best few and the framework once more, all interleaved, and rank them."""
        self.study.refresh()
        outcomes = self.study.in_order()
        correct = [c for c, o in outcomes.items() if o.measurement is not None and o.fate.timed]
        correct.sort(key=lambda c: (_time(outcomes[c]).median_us, outcomes[c].variant_id))
        finalists = [c for c in correct[:FINALISTS] if _time(outcomes[c]).median_us <= (1 + WITHIN) * _time(outcomes[correct[0]]).median_us]
        raced, conditions = self.evaluation.race(finalists) if finalists else (None, None)
        baseline, behind = None, None
        if isinstance(raced, Raced):
            baseline, behind = raced.baseline, raced.standing.behind
            for candidate, measurement in zip(finalists, raced.times, strict=True):
                outcomes[candidate] = replace(outcomes[candidate], measurement=measurement, finalist=True)
        known = stored(self.space, self.problem, self.search._rows)
        ranks = ranked([(c, outcomes[c]) for c in finalists], behind=behind, known=known)
        for rank, candidate in enumerate(ranks, start=1):
            outcomes[candidate] = replace(outcomes[candidate], rank=rank)
        return self._result(tuple(outcomes.values()), baseline, conditions)

    def _result(self, outcomes: tuple[Outcome, ...], baseline: Baseline | None, conditions: Conditions | None = None) -> SearchResult:
        return SearchResult(
            gpu=self.plan.target.slug,
            problem=self.problem,
            outcomes=outcomes,
            provenance=replace(self.search._provenance, conditions=conditions),
            baseline=baseline,
        )


def _time(outcome: Outcome) -> Measurement:
    assert outcome.measurement is not None, "only outcomes with a time are ranked"
    return outcome.measurement


def ranked(
    finalists: Sequence[tuple[Candidate, Outcome]], *, behind: Sequence[float] | None = None, known: Candidate | None = None
) -> list[Candidate]:
    """The winner first (see `placed`): by how far each is `behind` the fastest, or by their times alone; `known` is the stored row's."""
    outcomes = [outcome for _, outcome in finalists]
    behind = behind_by_times(outcomes) if behind is None else behind
    is_known = {outcome.variant_id for candidate, outcome in finalists if candidate == known}
    order = placed(outcomes, behind, is_stored=lambda outcome: outcome.variant_id in is_known)
    return [finalists[place][0] for place in order]
