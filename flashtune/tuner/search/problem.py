"""Search of one problem: its trials, its closing races, and its decision."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import optuna

from flashtune.core.problems.config import KernelSpec, settles
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Baseline, Conditions, Ending, Outcome, Provenance, SearchResult
from flashtune.core.system.errors import FlashtuneError
from flashtune.core.system.words import counted
from flashtune.tuner.children.workers import Workers
from flashtune.tuner.propose.space import Candidate, SearchSpace, record_of, stored, transfer_candidates
from flashtune.tuner.propose.study import Study
from flashtune.tuner.publish.winners import Winners
from flashtune.tuner.replies import Spent, logger
from flashtune.tuner.search.closing import Closing, closed, time_of
from flashtune.tuner.search.evaluation import Evaluation, MeasuredEvaluation, PredictedEvaluation, Verdicts, learn
from flashtune.tuner.search.plan import Schedule, SearchListener, SearchPlan, Stage
from flashtune.tuner.search.stopping import Reason, StoppingRule, ending_of
from flashtune.tuner.search.trials import Compiling, Proposals, Trials
from flashtune.tuner.timing.racing import to_race

LIKELY = 6
"""Number of the fastest trials that are compiled for later calls before the last race is decided."""

AHEAD = 12
"""Most candidates of a measured search that are compiled ahead of timing: early proposals rest on few observations."""

UNLEARNING = ("random", "exhaustive")
"""Samplers whose proposals don't depend on observations, so that every compiler may work ahead."""


class Shared:
    """State that the problems of one search share on all GPUs: plan, listener, schedule, known records and compilations."""

    def __init__(
        self,
        plan: SearchPlan,
        *,
        storage: optuna.storages.BaseStorage,
        provenance: Provenance,
        save: Callable[[SearchResult], None],
        listener: SearchListener,
    ) -> None:
        self.plan, self.storage, self.provenance = plan, storage, provenance
        self.save, self.listener = save, listener
        self.records = list(plan.known)
        # Variants with facts by the installed Triton may have cached machine code.
        self.facts = {
            record.outcome.variant_id: record.outcome.facts
            for record in plan.known
            if plan.source == "measured" and record.outcome.facts is not None and record.provenance.triton == provenance.triton
        }
        self.schedule, self.winners = Schedule(plan), Winners(plan.target, plan.limits.compile_s, kept=plan.keep)
        self.lock, self.stopping = threading.RLock(), threading.Event()
        self._compiled: dict[KernelSpec, dict[str, Compiling]] = {}
        self._verdicts: dict[KernelSpec, Verdicts] = {}
        drawn = time.time_ns() % (1 << 31)
        self._seed = next(seed for seed in (plan.input_seed, plan.seed, drawn) if seed is not None)

    def space(self, problem: Problem) -> SearchSpace:
        """Search space of a problem."""
        return SearchSpace(self.plan.families, problem, self.plan.target, only_suited=self.plan.only_suited)

    def study(self, problem: Problem, suffix: str) -> Study:
        """Study of a problem in the run of the plan that `suffix` names; verdicts of its trials serve all problems of its spec."""
        plan = self.plan
        space = self.space(problem)
        # Without a candidate there is nothing to learn from.
        how = {"sampler": plan.sampler if space.families else "exhaustive", "seed": plan.seed, "source": plan.source}
        study = Study(space, problem, storage=self.storage, plan=suffix, **how)  # type: ignore[arg-type]
        learn(self.verdicts(problem), study.outcomes)
        return study

    def verdicts(self, problem: Problem) -> Verdicts:
        """The interpreter's verdicts on code paths of a problem's spec, at any N."""
        return self._verdicts.setdefault(problem.spec(), {})

    def compiled(self, spec: KernelSpec) -> dict[str, Compiling]:
        """Known and running compilations of a spec by variant id, which serve every N."""
        return self._compiled.setdefault(spec, {})

    def evaluation(self, problem: Problem, workers: Workers, device: int, waited: Spent) -> Evaluation:
        """Evaluation of a problem's candidates, measured or predicted; `waited` gets the seconds that it waits for the GPU's process."""
        plan = self.plan
        if plan.source == "predicted":
            verdicts = self.verdicts(problem)
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
            waited=waited,
        )


class ProblemSearch:
    """Search of one problem that this process has claimed; `held` is False once it has lost the claim."""

    def __init__(
        self, shared: Shared, index: int, workers: Workers, device: int, suffix: str, held: Callable[[], bool] = lambda: True
    ) -> None:
        self.shared, self.index, self.workers, self._held = shared, index, workers, held
        self.plan = shared.plan
        self.problem = problem = self.plan.problems[index]
        self.space, self.study = shared.space(problem), shared.study(problem, suffix)
        self.rule = StoppingRule(self.plan.until if self.plan.sampler != "exhaustive" else None)
        self.stored = stored(self.space, problem, shared.records)
        self.deadline: float | None = None
        self.incumbent: tuple[Candidate, Outcome] | None = None
        self.timed: list[Outcome] = []
        self.stopped: Reason = "trials"
        self.proposals: Proposals | None = None
        self.spent = Spent()
        self.evaluation = shared.evaluation(problem, workers, device, self.spent)
        compiled = shared.compiled(problem.spec())
        self.trials = Trials(self.plan, problem, workers, compiled, self.evaluation, self.spent, self.at, facts=shared.facts)
        for candidate, outcome in self.study.outcomes.items():
            self._consider(candidate, outcome)

    def begin(self) -> None:
        """Propose the first candidates and start compiling them; the GPU isn't used yet."""
        if self.proposals is not None:
            return
        # A measured search must not keep its GPU waiting; a predicted one uses none and must be reproducible.
        beside = self.plan.source == "measured"
        known = transfer_candidates(self.space, self.problem, self.shared.records, self.plan.source)
        self.study.enqueue([*known, *self.space.of_sizes()])
        ahead = max(4, 2 * self.plan.jobs)
        self.proposals = Proposals(
            self.study,
            self.trials.compile,
            ahead=min(ahead, AHEAD) if beside and self.plan.sampler not in UNLEARNING else ahead,
            limit=None if self.plan.sampler == "exhaustive" else self.plan.trials,
            beside=beside,
            compile_ahead=self.plan.sampler == "gp",
            free=self.workers.free_compilers,
        )

    def abandon(self) -> None:
        """End the work of `begin`."""
        proposals, self.proposals = self.proposals, None
        if proposals is not None:
            with suppress(FlashtuneError):
                proposals.close()
        self.evaluation.close()

    def run(self, meanwhile: Callable[[], None]) -> SearchResult | None:
        """Run trials until the stopping rule, the count, the deadline or the space ends them; then the closing races, with `meanwhile` run
        beside them. None where the claim was lost.

        An interruption, and errors, pass through after the present outcomes were saved.
        """
        shared = self.shared
        if (decided := self.study.decided(self.problem)) is not None:
            # Its process ended before it could say so.
            return decided
        self.deadline = shared.schedule.deadline(self.index)
        with shared.lock:
            shared.listener.problem_started(self.problem, self.index, len(self.plan.problems), len(self.study.outcomes))
        try:
            # Whatever has no part of its own is a part, so that all add up to the wall time.
            with self.spent.on("rest"):
                self._prepare()
                self._run_trials()
                if not self._held():
                    self.abandon()
                    return None
                tried = time.monotonic()
                result = self._decide(meanwhile)
        except BaseException as error:
            self.abandon()
            if isinstance(error, KeyboardInterrupt | FlashtuneError):
                self._save_present()
            raise
        shared.schedule.followed(time.monotonic() - tried)
        summary = f"{counted(len(self.study.outcomes), 'trial')}, {self.spent.total:.2f} s"
        logger.debug("%s: %s; here: %s; on the GPU: %s", self.problem.label(), summary, self.spent, self.evaluation.spent)
        return result

    def _prepare(self) -> None:
        with self.spent.on("begin"):
            if self.plan.source == "measured":
                self.at("preparing")
                self.evaluation.prepare()
            self.begin()

    def _decide(self, meanwhile: Callable[[], None]) -> SearchResult:
        with ThreadPoolExecutor(1) as beside:
            # In another thread, since the GPU is racing meanwhile.
            ending = beside.submit(self._beside_race, meanwhile)
            self.at("racing")
            logger.debug("trials ended: %s", self.stopped)
            result = self._race(ending)
        with self.spent.on("keep"):
            self.study.decide(result)
        return result

    def _save_present(self) -> None:
        known = self._result(tuple(self.study.outcomes.values()), None)
        if known.outcomes:
            self.shared.save(known)
        with self.shared.lock:
            self.shared.listener.problem_finished(known)

    def _beside_race(self, meanwhile: Callable[[], None]) -> Ending:
        """Start the next problem, and return why this problem's trials ended."""
        if self.plan.source == "measured":
            # The best so far is as good a start for the next problem as the winner will be.
            if (record := record_of(self._result(tuple(self.study.outcomes.values()), None))) is not None:
                self.shared.records.insert(0, record)
            meanwhile()
        if self.index == len(self.plan.problems) - 1:
            # The compilers are idle after the last problem.
            self._compile_likely_winners(LIKELY)
        candidates = sum(1 for _ in self.space.every())
        return ending_of(self.stopped, None if self.stopped == "space" else self.study.regrets(), candidates)

    def _compile_likely_winners(self, most: int = 1) -> None:
        """Start compiling likely winners for later calls: up to `most` of the fastest trials, as many as compilers are free, and the
        fallback kernel, the fastest of the first one's family with the ordinary online softmax.

        Near the end the first one and its fallback kernel don't wait for free compilers.
        """
        free = self.workers.free_compilers() or int(self.rule.nearly)
        timed = sorted(self.timed, key=lambda outcome: time_of(outcome).median_us)
        if free and timed and self.plan.keep:
            running = [outcome for outcome in timed if outcome.template == timed[0].template and not settles(outcome.config)]
            records = (record_of(self._result((outcome,), None)) for outcome in [*timed[: min(most, free)], *running[:1]])
            self.shared.winners.compile_ahead([record for record in records if record is not None], self.workers)

    def at(self, stage: Stage) -> None:
        """Report the present stage to the listener."""
        with self.shared.lock:
            self.shared.listener.stage_started(self.problem, stage, len(self.study.outcomes))

    def _run_trials(self) -> None:
        """Run trials in the order of proposing until one ends with a reason to stop, or the claim is lost."""
        proposals, self.proposals = self.proposals, None
        assert proposals is not None, "it has begun"
        reason: Reason | None = None
        try:
            while self._held() and (reason := self._tried(proposals)) is None:
                if self.shared.stopping.is_set():
                    raise KeyboardInterrupt
            self.stopped = reason or "trials"
        except BaseException:
            with suppress(FlashtuneError):
                proposals.close()
            raise
        proposals.close()

    def _tried(self, proposals: Proposals) -> Reason | None:
        """Run one trial; the reason where there is none to run, else None."""
        # A tight budget, too, yields a record.
        if self.deadline is not None and time.monotonic() > self.deadline and self.incumbent is not None:
            return "budget"

        def enough() -> Reason | None:
            return self.rule.verdict(proposals.left, proposals.left_in_all)

        with self.spent.on("wait for compilers"):
            proposal = proposals.next(lambda: self.at("compiling"), lambda: enough() is not None)
        if proposal is None:
            limited = self.plan.sampler != "exhaustive" and len(self.study.outcomes) >= self.plan.trials
            return enough() or ("trials" if limited else "space")
        if (reason := enough()) is not None:
            proposals.put_back(proposal)
            return reason
        if self.rule.nearly:
            self.evaluation.expect_race()
        candidate = proposal.candidate
        self.study.begin(candidate)
        incumbent = (self.incumbent[0], time_of(self.incumbent[1])) if self.incumbent else None
        outcome = self.trials.outcome(candidate, proposal.compiling, incumbent)
        proposals.tell(candidate, outcome)
        self._consider(candidate, outcome)
        if self.plan.source == "measured":
            self._compile_likely_winners()
        with self.shared.lock:
            self.shared.listener.trial_finished(self.problem, outcome, self.incumbent[1] if self.incumbent else None)
        return None

    def _consider(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take over an outcome, in the order of trials."""
        self.rule.add(outcome)
        if not outcome.fate.timed or outcome.measurement is None:
            return
        self.timed.append(outcome)
        if self.incumbent is None or outcome.measurement.median_us < time_of(self.incumbent[1]).median_us:
            self.incumbent = candidate, outcome

    def _race(self, ending: Future[Ending]) -> SearchResult:
        """Time the best few once more, all interleaved, and rank them; then time PyTorch and other providers beside the winner."""
        outcomes = dict(self.study.outcomes)
        correct = [c for c, o in outcomes.items() if o.measurement is not None and o.fate.timed]
        correct.sort(key=lambda c: (time_of(outcomes[c]).median_us, outcomes[c].variant_id))
        final_candidates = to_race(correct, [time_of(outcomes[c]).median_us for c in correct], max(self.problem.d, self.problem.d_v))
        finalists = {candidate: outcomes[candidate] for candidate in final_candidates}

        def result_of(closing: Closing) -> SearchResult:
            every = (*{**outcomes, **closing.outcomes}.values(), *closing.providers)
            with self.spent.on("after the race"):
                return replace(self._result(every, closing.baseline, closing.conditions), ending=ending.result())

        def picked(closing: Closing) -> None:
            # Providers that compile for seconds neither change the winner nor keep it waiting.
            found = result_of(closing)
            logger.debug("picked")
            with suppress(FlashtuneError):
                self.shared.save(found)
            self.at("comparing")

        closing = closed(self.evaluation, self.problem, finalists, self.spent, known=self.stored, picked=picked)
        return result_of(closing)

    def _result(self, outcomes: tuple[Outcome, ...], baseline: Baseline | None, conditions: Conditions | None = None) -> SearchResult:
        return SearchResult(
            gpu=self.plan.target.slug,
            problem=self.problem,
            outcomes=outcomes,
            provenance=replace(self.shared.provenance, conditions=conditions),
            baseline=baseline,
        )
