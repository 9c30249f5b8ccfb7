"""Search of one problem: its trials, its closing races, and its decision."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

from flashtune.core.config import settles
from flashtune.core.errors import FlashtuneError
from flashtune.core.results import Baseline, Conditions, Ending, Measurement, Outcome, SearchResult
from flashtune.core.words import counted
from flashtune.tuner.children.study_writer import StudyWriter
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.propose.space import Candidate, SearchSpace
from flashtune.tuner.propose.study import Study
from flashtune.tuner.propose.transfer import record_of, stored, transfer_candidates
from flashtune.tuner.replies import Compiled, Raced
from flashtune.tuner.search.plan import Stage
from flashtune.tuner.search.proposing import Proposals
from flashtune.tuner.search.shared import Shared
from flashtune.tuner.search.stopping import Reason, StoppingRule
from flashtune.tuner.search.trials import Trials
from flashtune.tuner.spent import Spent, logger
from flashtune.tuner.timing.final_candidates import fallback_ahead, first_by_calls, ranked, to_call, to_race

LIKELY = 6
"""Number of the fastest trials that are compiled for later calls before the last race is decided."""

AHEAD = 12
"""Most candidates of a measured search that are compiled ahead of timing: early proposals rest on few observations."""


class ProblemSearch:
    """Search of one problem."""

    def __init__(self, shared: Shared, index: int, workers: Workers, suffix: str, device: int, writer: StudyWriter | None = None) -> None:
        self.shared, self.index, self.workers = shared, index, workers
        self.plan = shared.plan
        self.problem = problem = self.plan.problems[index]
        self.space = SearchSpace(self.plan.families, problem, self.plan.target, only_suited=self.plan.only_suited)
        self.study = Study(
            self.space,
            problem,
            sampler=self.plan.sampler,
            seed=self.plan.seed,
            source=self.plan.source,
            storage=shared.storage,
            plan=suffix,
            opened=None if writer is None else writer.record,
        )
        self.evaluation = shared.evaluation(problem, workers, device)
        self.rule = StoppingRule(self.plan.until if self.plan.sampler != "exhaustive" else None)
        self.stored = stored(self.space, problem, shared.records)
        self.deadline: float | None = None
        self.incumbent: tuple[Candidate, Outcome] | None = None
        self.timed: list[Outcome] = []
        self.stopped: Reason = "trials"
        self.proposals: Proposals | None = None
        self.predicted: list[Pending[Compiled]] = []
        self.decided = self.study.decided(problem)
        self.learned: set[Candidate] = set()
        self.spent = Spent()
        compiled = shared.state(problem.spec()).compiled
        self.trials = Trials(self.plan, problem, workers, compiled, self.evaluation, self.spent, self.at, facts=shared.facts)
        self._catch_up()

    def begin(self) -> None:
        """Claim the first candidates and start compiling them; the GPU isn't used yet."""
        if self.decided is None and self.proposals is None:
            # A measured search must not keep its GPU waiting; a predicted one uses none and must be reproducible.
            beside = self.plan.source == "measured"
            transferred = transfer_candidates(self.space, self.problem, self.shared.records, self.plan.source)
            self.study.enqueue(transferred)
            self._catch_up()
            if beside:
                # Claims take a while to be stored; compilation starts before them.
                self.compile_ahead(transferred)
            limit = None if self.plan.sampler == "exhaustive" else self.plan.trials
            ahead = max(4, 2 * self.plan.jobs)
            self.proposals = Proposals(
                self.study,
                self.trials.compile,
                ahead=min(ahead, AHEAD) if beside else ahead,
                limit=limit,
                beside=beside,
                compile_ahead=self.plan.sampler == "gp",
                free=self.workers.free_compilers,
            )

    def compile_ahead(self, transferred: Sequence[Candidate] = ()) -> None:
        """Start compiling the candidates that `begin` will probably claim; claims nothing."""
        if self.decided is None:
            first = [*transferred, *self.study.sampler.initial_candidates][:AHEAD]
            untried = [candidate for candidate in first if candidate not in self.study.outcomes]
            self.predicted += [found for candidate in untried if isinstance(found := self.trials.compile(candidate), Pending)]

    def abandon(self) -> None:
        """Release the claims of `begin`."""
        proposals, self.proposals = self.proposals, None
        if proposals is not None:
            with suppress(FlashtuneError):
                proposals.close()
        self._forget_predicted()
        self.evaluation.close()
        with suppress(FlashtuneError):
            self.study.leave()

    def run(self, *, again: bool = False, meanwhile: Callable[[], None] | None = None) -> SearchResult | None:
        """Run trials until the stopping rule, the count, the deadline or the space ends them; then the closing races, with `meanwhile` run
        beside them.

        None where other processes are still busy with the rest, or the result couldn't be saved: call again with `again`.
        """
        total, shared = len(self.plan.problems), self.shared
        result = self.decided = self.decided or self.study.decided(self.problem)
        known = result is not None and not again
        if result is not None and self.proposals is not None:
            # Another process decided after this one began.
            self.abandon()
        if result is None:
            if self.deadline is None:
                self.deadline = shared.schedule.deadline(self.index)
            if not again:
                with shared.lock:
                    shared.listener.problem_started(self.problem, self.index, total, len(self.study.outcomes))
            result = self.decided = self._searched(meanwhile)
        if result is None:
            return None
        # Saved or not, the next problem's search starts from this winner.
        if (record := record_of(result)) is not None:
            shared.records.insert(0, record)
        if not self._publish(result, final=again):
            return None
        with shared.lock:
            if not shared.schedule.end(self.index, result):
                return result
            if record is not None and not known:
                shared.winners.won(record, self.workers)
            if known:
                shared.listener.problem_known(result, self.index, total)
            else:
                shared.listener.problem_finished(result)
        return result

    def _searched(self, meanwhile: Callable[[], None] | None) -> SearchResult | None:
        """Decided result; None where other processes are still busy, or will decide."""
        begun = time.monotonic()
        try:
            with self.spent.on("begin"):
                if self.plan.source == "measured":
                    self.at("preparing")
                    self.evaluation.prepare()
                self.begin()
            self._trials()
            tried = time.monotonic()
            with self.spent.on("keep"):
                self.study.leave()
                if self.study.elsewhere or not self.study.may_decide():
                    self.evaluation.close()
                    return None
                self.study.refresh()
            with ThreadPoolExecutor(1) as beside:
                # In another thread, since the GPU is racing meanwhile.
                ending = beside.submit(self._beside_race, meanwhile)
                self.at("racing")
                result = self._race()
                with self.spent.on("after the race"):
                    result = replace(result, ending=ending.result())
            with self.spent.on("keep"):
                self.study.decide(result)
            self.shared.schedule.followed(time.monotonic() - tried)
            summary = f"{counted(len(result.outcomes), 'trial')}, {time.monotonic() - begun:.2f} s"
            logger.debug("%s: %s; here: %s; on the GPU: %s", self.problem.label(), summary, self.spent, self.evaluation.spent)
            return result
        except BaseException as error:
            self.abandon()
            if isinstance(error, KeyboardInterrupt | FlashtuneError):
                known = self._result(tuple(self.study.in_order().values()), None)
                if known.outcomes:
                    self.shared.save(known)
                with self.shared.lock:
                    self.shared.listener.problem_finished(known)
            raise

    def _beside_race(self, meanwhile: Callable[[], None] | None) -> Ending:
        """Start the next problem, and return why this problem's trials ended."""
        if meanwhile is not None and self.plan.source == "measured":
            # The best so far is as good a start for the next problem as the winner will be.
            if (record := record_of(self._result(tuple(self.study.in_order().values()), None))) is not None:
                self.shared.records.insert(0, record)
            meanwhile()
        if self.index == len(self.plan.problems) - 1:
            # The compilers are idle after the last problem.
            self._compile_likely_winners(LIKELY)
        return self._ending()

    def _compile_likely_winners(self, most: int = 1) -> None:
        """Start compiling likely winners for later calls: up to `most` of the fastest trials, as many as compilers are free, and the
        fallback kernel, the fastest of the first one's family with the ordinary online softmax.

        Near the end the first one and its fallback kernel don't wait for free compilers.
        """
        free = self.workers.free_compilers() or int(self.rule.nearly)
        timed = sorted(self.timed, key=lambda outcome: _time(outcome).median_us)
        if free and timed and self.plan.keep is not None:
            running = [outcome for outcome in timed if outcome.template == timed[0].template and not settles(outcome.config)]
            records = (record_of(self._result((outcome,), None)) for outcome in [*timed[: min(most, free)], *running[:1]])
            self.shared.winners.compile_ahead([record for record in records if record is not None], self.workers)

    def _publish(self, result: SearchResult, *, final: bool) -> bool:
        """Save the result and return True where that worked; an error is raised only when `final`."""
        try:
            if result.outcomes:
                self.shared.save(result)
        except FlashtuneError as error:
            if final:
                raise
            with self.shared.lock:
                self.shared.listener.save_failed(self.problem, error)
            return False
        return True

    def at(self, stage: Stage) -> None:
        """Report the present stage to the listener."""
        with self.shared.lock:
            self.shared.listener.stage_started(self.problem, stage, len(self.study.outcomes))

    def late(self) -> bool:
        """True once the time is up and one candidate was timed, so that a tight budget still yields a record."""
        return self.deadline is not None and time.monotonic() > self.deadline and self.incumbent is not None

    def _trials(self) -> None:
        """Run trials in the order of proposing until one ends with a reason to stop."""
        proposals, self.proposals = self.proposals, None
        assert proposals is not None, "it has begun"
        try:
            while (reason := self._tried(proposals)) is None:
                if self.shared.stopping.is_set():
                    raise KeyboardInterrupt
            self.stopped = reason
        except BaseException:
            with suppress(FlashtuneError):
                proposals.close()
            raise
        proposals.close()
        self._forget_predicted()

    def _forget_predicted(self) -> None:
        """Stop compiling predicted candidates that weren't claimed."""
        found, self.predicted = self.predicted, []
        for compiling in found:
            compiling.forget()

    def _tried(self, proposals: Proposals) -> Reason | None:
        """Run one trial; the reason where there is none to run, else None."""
        if self.late():
            return "budget"
        with self.spent.on("wait for compilers"):
            proposal = proposals.next(lambda: self.at("compiling"), lambda: self._enough(proposals) is not None)
        if proposal is None:
            if (enough := self._enough(proposals)) is not None:
                return enough
            limited = self.plan.sampler != "exhaustive" and len(self.study.outcomes) + self.study.elsewhere >= self.plan.trials
            return "trials" if limited else "space"
        for candidate, outcome in proposal.news:
            self._learn(candidate, outcome)
        if (enough := self._enough(proposals)) is not None:
            proposals.put_back(proposal)
            return enough
        if self.rule.nearly:
            self.evaluation.expect_race()
        proposals.begin(proposal.candidate)
        incumbent = (self.incumbent[0], _time(self.incumbent[1])) if self.incumbent else None
        outcome = self.trials.outcome(proposal.candidate, proposal.compiling, incumbent)
        proposals.tell(proposal.candidate, outcome)
        self.learned.add(proposal.candidate)
        self._consider(proposal.candidate, outcome)
        self.rule.add(outcome)
        if self.plan.source == "measured":
            self._compile_likely_winners()
        with self.shared.lock:
            self.shared.listener.trial_finished(outcome, self.incumbent[1] if self.incumbent else None)
        return None

    def _enough(self, proposals: Proposals) -> Reason | None:
        """Reason why no further trial is worth its time, by present knowledge; None to go on."""
        return self.rule.verdict(proposals.left, proposals.left_in_all)

    def _catch_up(self) -> None:
        """Take over the outcomes of an earlier run or other processes, in the order of proposing; only while no proposals are made."""
        for candidate, outcome in self.study.in_order().items():
            if candidate not in self.learned:
                self._learn(candidate, outcome)

    def _learn(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take over an outcome of an earlier run or another process, with its consequences for other candidates."""
        self.learned.add(candidate)
        self._consider(candidate, outcome)
        self.rule.add(outcome)
        self.evaluation.learn(candidate, outcome)

    def _consider(self, candidate: Candidate, outcome: Outcome) -> None:
        if not outcome.fate.timed or outcome.measurement is None:
            return
        self.timed.append(outcome)
        best = self.incumbent[1].measurement if self.incumbent else None
        if best is None or outcome.measurement.median_us < best.median_us:
            self.incumbent = candidate, outcome

    def _race(self) -> SearchResult:
        """Time the best few and PyTorch once more, all interleaved, and rank them."""
        outcomes = self.study.in_order()
        correct = [c for c, o in outcomes.items() if o.measurement is not None and o.fate.timed and c not in self.trials.duplicates]
        correct.sort(key=lambda c: (_time(outcomes[c]).median_us, outcomes[c].variant_id))
        wide = max(self.problem.d, self.problem.d_v)
        final_candidates = to_race(correct, [_time(outcomes[c]).median_us for c in correct], wide)
        with self.spent.on("race"):
            raced, conditions = self.evaluation.race(final_candidates) if final_candidates else (None, None)
        baseline, behind = None, None
        if isinstance(raced, Raced):
            baseline, behind = raced.baseline, raced.standing.behind
            for candidate, measurement in zip(final_candidates, raced.times, strict=True):
                outcomes[candidate] = replace(outcomes[candidate], measurement=measurement, finalist=True)
        ranks = ranked([(c, outcomes[c]) for c in final_candidates], behind=behind, known=self.stored)
        medians = {c: _time(outcomes[c]).median_us for c in final_candidates}
        ranks = fallback_ahead(ranks, medians, wide)
        for rank, candidate in enumerate(ranks, start=1):
            outcomes[candidate] = replace(outcomes[candidate], rank=rank)
        timed = to_call(ranks)
        with self.spent.on("whole calls"):
            called = self.evaluation.call(timed) if baseline is not None else None
        if baseline is not None and called is not None:
            for candidate, call_us in zip(timed, called.times, strict=False):
                outcomes[candidate] = replace(outcomes[candidate], call_us=call_us)
            baseline = replace(baseline, call_us=called.framework)
            ranks.insert(0, ranks.pop(ranks.index(timed[first_by_calls(called.times)])))
            ranks = fallback_ahead(ranks, medians, wide)
            for rank, candidate in enumerate(ranks, start=1):
                outcomes[candidate] = replace(outcomes[candidate], rank=rank)
        return self._result(tuple(outcomes.values()), baseline, conditions)

    def _ending(self) -> Ending:
        """Reason why the trials ended, with the expected regret."""
        regret = 0.0 if self.stopped == "space" else self.study.expected_regret()
        return Ending(reason=self.stopped, regret=regret if math.isfinite(regret) else None)

    def _result(self, outcomes: tuple[Outcome, ...], baseline: Baseline | None, conditions: Conditions | None = None) -> SearchResult:
        return SearchResult(
            gpu=self.plan.target.slug,
            problem=self.problem,
            outcomes=outcomes,
            provenance=replace(self.shared.provenance, conditions=conditions),
            baseline=baseline,
        )


def _time(outcome: Outcome) -> Measurement:
    assert outcome.measurement is not None, "only outcomes with a time are ranked"
    return outcome.measurement
