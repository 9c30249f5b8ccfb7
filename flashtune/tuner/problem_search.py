"""The search of one problem: its trials, its closing races, and what was decided."""

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashtune.core.config import settles
from flashtune.core.errors import FlashtuneError
from flashtune.core.results import Baseline, Conditions, Ending, Fate, Measurement, Outcome, SearchResult
from flashtune.tuner import tasks
from flashtune.tuner.carrying import carried, record_of, stored
from flashtune.tuner.evaluation import Verdicts
from flashtune.tuner.proposing import Compiling, Proposals
from flashtune.tuner.racing import behind_by_times, first_by_calls, placed
from flashtune.tuner.replies import Compiled, Failed, Raced, Timed
from flashtune.tuner.space import Candidate, SearchSpace
from flashtune.tuner.spent import Spent, logger
from flashtune.tuner.stopping import Reason, StoppingRule
from flashtune.tuner.study import Study
from flashtune.tuner.workers import Pending, Workers

if TYPE_CHECKING:
    from flashtune.tuner.searching import Search, Stage

FINALISTS = 12
"""Candidates in the closing races; their neighbours' times are noise apart."""

WITHIN = 0.1
"""Who was slower than the best trial by more than this doesn't race."""

HOST_US = 15.0
"""What the host needs for a call, or so: kernels that take the GPU less are told apart by how often they launch."""

CALLED = 3
"""So many of the first, the race's winner among them, have whole calls timed (see `to_call`)."""

LIKELY = 6
"""So many of the fastest in trials are compiled for later calls before the last race is decided."""

AHEAD = 12
"""Candidates of a measured search that are compiled before they are timed, at most: what is proposed early is proposed knowing little."""


@dataclass
class SpecState:
    """What one compiled spec shares over every N: facts and numeric checks by variant id, what is being compiled included."""

    compiled: dict[str, Compiling]
    verdicts: Verdicts


class ProblemSearch:
    """The search of one problem."""

    def __init__(self, search: "Search", index: int, workers: Workers, suffix: str, device: int) -> None:
        self.search, self.index, self.workers = search, index, workers
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
        self.evaluation = search._evaluation(problem, workers, device)
        self.rule = StoppingRule(self.plan.until if self.plan.sampler != "exhaustive" else None)
        self.stored = stored(self.space, problem, search._rows)
        self.deadline: float | None = None
        self.incumbent: tuple[Candidate, Outcome] | None = None
        self.timed: list[Outcome] = []
        self.stopped: Reason = "trials"
        # What runs the very same is timed once: what was said of each machine code, and how candidates are launched.
        self.by_code: dict[str, list[tuple[Candidate, Timed]]] = {}
        self.launches: dict[Candidate, str | None] = {}
        self.twins: set[Candidate] = set()
        self.proposals: Proposals | None = None
        self.foreseen: list[Pending[Compiled]] = []
        self.decided = self.study.decided(problem)
        self.heard: set[Candidate] = set()
        self.spent = Spent()
        self._catch_up()

    def begin(self) -> None:
        """Ask for the first candidates and start compiling them; the GPU has no part in it yet."""
        if self.decided is None and self.proposals is None:
            # A measured search must not keep its GPU waiting; a predicted one has none, and repeats itself to the letter.
            beside = self.plan.source == "measured"
            wishes = carried(self.space, self.problem, self.search._rows, self.plan.source)
            self.study.enqueue(wishes)
            self._catch_up()
            if beside:
                # Claims take a while to be kept; whoever is claimed finds its compilation begun.
                self.foresee(wishes)
            limit = None if self.plan.sampler == "exhaustive" else self.plan.trials
            ahead = max(4, 2 * self.plan.jobs)
            self.proposals = Proposals(
                self.study,
                self._compile,
                ahead=min(ahead, AHEAD) if beside else ahead,
                limit=limit,
                beside=beside,
                foresee=self.plan.sampler == "gp",
                free=self.workers.free_compilers,
            )

    def foresee(self, wishes: Sequence[Candidate] = ()) -> None:
        """Start compiling what `begin` will ask for, as far as it can be told; nothing is claimed."""
        if self.decided is None:
            first = [candidate for candidate in [*wishes, *self.study.sampler.opening][:AHEAD] if candidate not in self.study.outcomes]
            self.foreseen += [found for candidate in first if isinstance(found := self._compile(candidate), Pending)]

    def abandon(self) -> None:
        """Give back what `begin` asked for."""
        proposals, self.proposals = self.proposals, None
        if proposals is not None:
            with suppress(FlashtuneError):
                proposals.close()
        self._forget_foreseen()
        self.evaluation.close()
        self.study.leave()

    def run(self, *, again: bool = False, meanwhile: Callable[[], None] | None = None) -> SearchResult | None:
        """Trials until there is no more to gain, the count, the deadline or the space ends; then the closing races, and `meanwhile` what
        else may begin.

        None where other processes are still busy with the rest, or the result couldn't be saved: it is to be called `again`.
        """
        total, search = len(self.plan.problems), self.search
        result = self.decided = self.decided or self.study.decided(self.problem)
        known = result is not None and not again
        if result is not None and self.proposals is not None:
            # Another process decided after this one began.
            self.abandon()
        if result is None:
            if self.deadline is None:
                self.deadline = search._deadline(self.index)
            if not again:
                with search.lock:
                    search._listener.problem_started(self.problem, self.index, total, len(self.study.outcomes))
            result = self.decided = self._searched(meanwhile)
        if result is None:
            return None
        # Whether or not it can be saved: what is searched next begins with it.
        if (row := record_of(result)) is not None:
            search._rows.insert(0, row)
        if not self._publish(result, final=again):
            return None
        with search.lock:
            if not search._end(self.index, result):
                return result
            if row is not None and not known:
                search._keep(row, self.workers)
            if known:
                search._listener.problem_known(result, self.index, total)
            else:
                search._listener.problem_finished(result)
        return result

    def _searched(self, meanwhile: Callable[[], None] | None) -> SearchResult | None:
        """The decided result; None where others are still busy, or it is theirs to decide."""
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
                if self.study.others or not self.study.may_decide():
                    self.evaluation.close()
                    return None
                self.study.refresh()
            with ThreadPoolExecutor(1) as beside:
                # In another thread where a GPU races meanwhile.
                ending = beside.submit(self._beside_race, meanwhile)
                self.at("racing")
                result = self._race()
                with self.spent.on("after the race"):
                    result = replace(result, ending=ending.result())
            with self.spent.on("keep"):
                self.study.decide(result)
            self.search._followed(time.monotonic() - tried)
            said = f"{len(result.outcomes)} trials, {time.monotonic() - begun:.2f} s"
            logger.debug("%s: %s; here: %s; on the GPU: %s", self.problem.label(), said, self.spent, self.evaluation.spent)
            return result
        except BaseException as error:
            self.abandon()
            if isinstance(error, KeyboardInterrupt | FlashtuneError):
                known = self._result(tuple(self.study.in_order().values()), None)
                if known.outcomes:
                    self.search._save(known)
                with self.search.lock:
                    self.search._listener.problem_finished(known)
            raise

    def _beside_race(self, meanwhile: Callable[[], None] | None) -> Ending:
        """Let others begin, and say how this problem's trials ended."""
        if meanwhile is not None and self.plan.source == "measured":
            # The best so far is as good a start for what follows as the winner will be.
            if (row := record_of(self._result(tuple(self.study.in_order().values()), None))) is not None:
                self.search._rows.insert(0, row)
            meanwhile()
        if self.index == len(self.plan.problems) - 1:
            # Nothing follows for the compilers.
            self._foresee_winners(LIKELY)
        return self._ending()

    def _foresee_winners(self, most: int = 1) -> None:
        """Have compiled for later calls what may win: `most` of the fastest trials so far, as many as there are free compilers, and the
        fastest of the first one's family that settles no row maxima, its twin.

        In the end the first one and its twin don't wait for compilers to be free.
        """
        free = self.workers.free_compilers() or int(self.rule.nearly)
        timed = sorted(self.timed, key=lambda outcome: _time(outcome).median_us)
        if free and timed and self.plan.keep is not None:
            running = [outcome for outcome in timed if outcome.template == timed[0].template and not settles(outcome.config)]
            rows = (record_of(self._result((outcome,), None)) for outcome in [*timed[: min(most, free)], *running[:1]])
            self.search._foresee_winners([row for row in rows if row is not None], self.workers)

    def _publish(self, result: SearchResult, *, final: bool) -> bool:
        """Whether the result was saved; a fault passes through when it is `final`."""
        try:
            if result.outcomes:
                self.search._save(result)
        except FlashtuneError as error:
            if final:
                raise
            with self.search.lock:
                self.search._listener.save_failed(self.problem, error)
            return False
        return True

    def at(self, stage: "Stage") -> None:
        """Tell what this problem is at."""
        with self.search.lock:
            self.search._listener.stage_started(self.problem, stage, len(self.study.outcomes))

    def late(self) -> bool:
        """Whether the time is up. One candidate is always tried, so that a tight budget still yields a row."""
        return self.deadline is not None and time.monotonic() > self.deadline and self.incumbent is not None

    def _trials(self) -> None:
        """Try what is proposed, in the order of asking, until something says that it is enough."""
        proposals, self.proposals = self.proposals, None
        assert proposals is not None, "it has begun"
        try:
            while (reason := self._tried(proposals)) is None:
                if self.search.stopping.is_set():
                    raise KeyboardInterrupt
            self.stopped = reason
        except BaseException:
            with suppress(FlashtuneError):
                proposals.close()
            raise
        proposals.close()
        self._forget_foreseen()

    def _forget_foreseen(self) -> None:
        """What was foreseen and nobody took isn't compiled any more."""
        found, self.foreseen = self.foreseen, []
        for compiling in found:
            compiling.forget()

    def _tried(self, proposals: Proposals) -> Reason | None:
        """One trial; why there is none, or None."""
        if self.late():
            return "budget"
        with self.spent.on("wait for compilers"):
            proposal = proposals.next(lambda: self.at("compiling"))
        if proposal is None:
            limited = self.plan.sampler != "exhaustive" and len(self.study.outcomes) + self.study.elsewhere >= self.plan.trials
            return "trials" if limited else "space"
        for candidate, outcome in proposal.news:
            self._learn(candidate, outcome)
        if (enough := self.rule.verdict(proposals.left)) is not None:
            proposals.put_back(proposal)
            return enough
        if self.rule.nearly:
            self.evaluation.expect_race()
        proposals.begin(proposal.candidate)
        outcome = self._outcome(proposal.candidate, proposal.compiling)
        proposals.tell(proposal.candidate, outcome)
        self.heard.add(proposal.candidate)
        self._consider(proposal.candidate, outcome)
        self.rule.add(outcome)
        if self.plan.source == "measured":
            self._foresee_winners()
        with self.search.lock:
            self.search._listener.trial_finished(outcome, self.incumbent[1] if self.incumbent else None)
        return None

    def _catch_up(self) -> None:
        """Take over what an earlier run or other processes have found, in the order of asking; only while no proposals are made."""
        for candidate, outcome in self.study.in_order().items():
            if candidate not in self.heard:
                self._learn(candidate, outcome)

    def _learn(self, candidate: Candidate, outcome: Outcome) -> None:
        """Take over an outcome of an earlier run or of another process, with what it says of other candidates."""
        self.heard.add(candidate)
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

    def _compile(self, candidate: Candidate) -> Compiling:
        variant = candidate.variant(self.space.spec)
        known = self.state.compiled.get(variant.id)
        if known is not None and (not isinstance(known, Pending) or known.shared()):
            return known
        try:
            source = tasks.Source.of(candidate.family, variant)
        except Exception as error:
            return Failed(fate=Fate.COMPILE, reason=tasks.one_line(error))
        limit_s = self.plan.limits.compile_s
        found = self.workers.submit("compile", tasks.compile_candidate, source, self.problem, self.plan.target, limit_s=limit_s)
        if self.plan.source == "measured":
            self.state.compiled[variant.id] = found
        return found

    def _outcome(self, candidate: Candidate, compiling: Compiling) -> Outcome:
        """Take one candidate through the stages; each can end it."""
        variant = candidate.variant(self.space.spec)
        self.at("compiling")
        compiled = compiling if isinstance(compiling, Compiled | Failed) else compiling.reply()
        self.state.compiled[variant.id] = compiled
        reply: Timed | Failed
        if isinstance(compiled, Failed):
            reply = compiled
        elif (twin := self._twin(candidate, compiled)) is not None:
            reply = twin
        else:
            self.at("measuring" if self.plan.source == "measured" else "checking")
            incumbent = (self.incumbent[0], _time(self.incumbent[1])) if self.incumbent else None
            with self.spent.on("trials"):
                reply = self.evaluation.evaluate(candidate, compiled.facts, incumbent)
            if compiled.code and isinstance(reply, Timed):
                self.by_code.setdefault(compiled.code, []).append((candidate, reply))
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

    def _twin(self, candidate: Candidate, compiled: Compiled) -> Timed | None:
        """The time of a candidate that runs the very same: equal machine code, launched alike. Only on a GPU is it the same."""
        if self.plan.source != "measured" or not compiled.code:
            return None
        for other, reply in self.by_code.get(compiled.code, []):
            if (launches := self._launches(candidate)) is not None and launches == self._launches(other):
                self.twins.add(candidate)
                return reply
        return None

    def _launches(self, candidate: Candidate) -> str | None:
        """How a candidate's kernels are launched; None where that can't be told."""
        if candidate not in self.launches:
            source = tasks.Source.of(candidate.family, candidate.variant(self.space.spec))
            fixed = (source, self.problem, self.plan.target)
            reply = self.workers.submit("compile", tasks.describe_launches, *fixed, limit_s=self.plan.limits.compile_s).reply()
            self.launches[candidate] = None if isinstance(reply, Failed) else reply.launches
        return self.launches[candidate]

    def _race(self) -> SearchResult:
        """Time the best few and the framework once more, all interleaved, and rank them."""
        outcomes = self.study.in_order()
        correct = [c for c, o in outcomes.items() if o.measurement is not None and o.fate.timed and c not in self.twins]
        correct.sort(key=lambda c: (_time(outcomes[c]).median_us, outcomes[c].variant_id))
        finalists = to_race(correct, [_time(outcomes[c]).median_us for c in correct])
        with self.spent.on("race"):
            raced, conditions = self.evaluation.race(finalists) if finalists else (None, None)
        baseline, behind = None, None
        if isinstance(raced, Raced):
            baseline, behind = raced.baseline, raced.standing.behind
            for candidate, measurement in zip(finalists, raced.times, strict=True):
                outcomes[candidate] = replace(outcomes[candidate], measurement=measurement, finalist=True)
        ranks = ranked([(c, outcomes[c]) for c in finalists], behind=behind, known=self.stored)
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
            for rank, candidate in enumerate(ranks, start=1):
                outcomes[candidate] = replace(outcomes[candidate], rank=rank)
        return self._result(tuple(outcomes.values()), baseline, conditions)

    def _ending(self) -> Ending:
        """Why the trials ended, and what they are expected to have missed."""
        regret = 0.0 if self.stopped == "space" else self.study.expected_regret()
        return Ending(reason=self.stopped, regret=regret if math.isfinite(regret) else None)

    def _result(
        self,
        outcomes: tuple[Outcome, ...],
        baseline: Baseline | None,
        conditions: Conditions | None = None,
    ) -> SearchResult:
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


def to_race(correct: Sequence[Candidate], times: Sequence[float]) -> list[Candidate]:
    """Of candidates, the fastest first, those that race: the first few that are within reach, where the GPU would wait for the host the
    fastest of each other way to add up splits, for whole calls decide there, and beside kernels that settle row maxima the fastest that
    doesn't, which serves where scores mislead them."""
    found = [candidate for candidate, us in zip(correct[:FINALISTS], times, strict=False) if us <= (1 + WITHIN) * times[0]]
    for candidate, us in zip(correct, times, strict=True):
        if us <= HOST_US and all(candidate.config.get("combine", "") != other.config.get("combine", "") for other in found):
            found.append(candidate)
    settling = {candidate.family for candidate in found if settles(candidate.config)}
    running = [candidate for candidate in correct if candidate.family in settling and not settles(candidate.config)]
    return found + [candidate for candidate in running[:1] if candidate not in found]


def to_call(ranks: Sequence[Candidate]) -> list[Candidate]:
    """Of finalists, the best first, those whose whole calls are timed: the first few, and the first that adds up splits in each other way,
    since a second launch costs the host what no race sees."""
    found = list(ranks[:CALLED])
    for candidate in ranks[CALLED:]:
        if all(candidate.config.get("combine", "") != other.config.get("combine", "") for other in found):
            found.append(candidate)
    return found


def ranked(
    finalists: Sequence[tuple[Candidate, Outcome]], *, behind: Sequence[float] | None = None, known: Candidate | None = None
) -> list[Candidate]:
    """The winner first (see `placed`): by how far each is `behind` the fastest, or by their times alone; `known` is the stored row's."""
    outcomes = [outcome for _, outcome in finalists]
    behind = behind_by_times(outcomes) if behind is None else behind
    is_known = {outcome.variant_id for candidate, outcome in finalists if candidate == known}
    order = placed(outcomes, behind, is_stored=lambda outcome: outcome.variant_id in is_known)
    return [finalists[place][0] for place in order]
