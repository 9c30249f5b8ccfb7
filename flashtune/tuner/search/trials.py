"""Trials of one problem: candidates proposed and compiled ahead of their turn, then each through the stages, any of which can end it.

A GPU waits neither for the sampler, which has a thread of its own there, nor for one compiler while another is done: compiled candidates go
first, and none is overtaken by more than `OVERTAKEN`. The sampler is queried after a number of outcomes, not after a time. Without the
thread, proposals depend on the seed and the outcomes alone, and an interrupted search repeats the proposals of an uninterrupted one.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import CompileFacts, Measurement, Outcome
from flashtune.templates.rendering import text_hash
from flashtune.tuner.children.workers import Pending, Workers
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.propose.study import Study
from flashtune.tuner.replies import Compiled, Failed, Spent, Timed
from flashtune.tuner.search.evaluation import Evaluation, begin_compiling
from flashtune.tuner.search.plan import SearchPlan, Stage

OVERTAKEN = 12
"""Most later candidates that are tried before one that is still being compiled."""

Compiling = Pending[Compiled] | Compiled | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Candidate to be tried, with its compilation."""

    candidate: Candidate
    compiling: Compiling


class Proposals:
    """Candidates of one study, in the order of proposing; up to `ahead` of them are being compiled or tried at a time.

    With `beside`, proposing and storing happen in a thread, whose errors are raised by the next call of any method, and compiled candidates
    may overtake others. With `compile_ahead` the sampler's predicted next candidates are compiled, too: as many as are proposed at a time,
    and more while compilers are `free`. `left` is the expected gain of the next candidates at the sampler's last query, and `left_in_all`
    that of the best of all; without a thread that is 0, for nothing is measured then.
    """

    def __init__(
        self,
        study: Study,
        compile_one: Callable[[Candidate], Compiling],
        *,
        ahead: int,
        limit: int | None,
        beside: bool,
        compile_ahead: bool = False,
        free: Callable[[], int] = lambda: 0,
    ) -> None:
        self._study, self._compile, self._limit = study, compile_one, limit
        self._ahead, self._stride = ahead, max(1, ahead // 4)
        self._more, self._closing = True, False
        self._out: SimpleQueue[Proposal | Literal["compiled", "expected"] | None] = SimpleQueue()
        self._waiting: list[Proposal] = []
        self._overtaken: dict[Candidate, int] = {}
        self._compile_ahead, self._free = compile_ahead and beside, free
        self._predicted: dict[Candidate, Pending[Compiled]] = {}
        self.left, self.left_in_all = math.inf, 0.0
        self._outcomes: SimpleQueue[tuple[Candidate, Outcome] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="proposals", daemon=True) if beside else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._ask()

    def next(self, waiting: Callable[[], None] | None = None, enough: Callable[[], bool] = lambda: False) -> Proposal | None:
        """Next candidate; None when nothing is left to try, and where it would have to wait although `enough` were tried
        by now. `waiting` is called where it waits for compilers."""
        while True:
            # Drain the queue, and block on it while no candidate can be taken yet.
            while not self._out.empty() or self._first() is None:
                if self._out.empty() and enough():
                    self._raise()
                    return None
                if waiting is not None and self._waiting and self._out.empty():
                    waiting()
                came = self._out.get()
                if came is None:
                    self._raise()
                    return None
                if isinstance(came, Proposal):
                    self._waiting.append(came)
                    if self._thread is not None and isinstance(came.compiling, Pending):
                        came.compiling.when_done(lambda: self._out.put("compiled"))
            self._raise()
            if (place := self._first()) is not None:
                for other in self._waiting[:place]:
                    self._overtaken[other.candidate] = self._overtaken.get(other.candidate, 0) + 1
                return self._waiting.pop(place)

    def _first(self) -> int | None:
        """Place of the candidate to take: the first compiled one, unless one before it was overtaken too often; None to wait."""
        for place, waiting in enumerate(self._waiting):
            if self._thread is None or not isinstance(waiting.compiling, Pending) or waiting.compiling.done:
                return place
            if self._overtaken.get(waiting.candidate, 0) >= OVERTAKEN:
                return None
        return None

    def put_back(self, proposal: Proposal) -> None:
        """Return a candidate of `next` that wasn't begun."""
        self._waiting.insert(0, proposal)

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Store the outcome of a candidate, at once, or with `beside` by the time that `close` returns."""
        if self._thread is None:
            self._take(candidate, outcome)
        else:
            self._outcomes.put((candidate, outcome))
            self._raise()

    def close(self) -> None:
        """End the thread once it has stored all outcomes; unused candidates aren't compiled any more."""
        if self._thread is not None:
            self._closing = True
            self._outcomes.put(None)
            self._thread.join()
        while not self._out.empty():
            left = self._out.get()
            if isinstance(left, Proposal):
                self._waiting.append(left)
        for compiling in self._predicted.values():
            compiling.forget()
        for waiting in self._waiting:
            if isinstance(waiting.compiling, Pending):
                waiting.compiling.forget()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self) -> None:
        try:
            if self._compile_ahead:
                # Before any compiler is asked for: the first one waits for the fork server's imports.
                _ = self._study.sampler.initial_candidates
            self._ask()
            if self._compile_ahead:
                self._study.sampler.warm_up()
            while (entry := self._outcomes.get()) is not None:
                self._take(*entry)
        except BaseException as error:
            self._error = error
            self._out.put(None)

    def _take(self, candidate: Candidate, outcome: Outcome) -> None:
        self._study.tell(candidate, outcome)
        # While closing nobody would take new candidates.
        if not self._closing:
            self._ask()

    def _ask(self) -> None:
        """Propose as many candidates as are due by now, and put None at the end."""
        if not self._more:
            return
        study = self._study
        due = self._ahead + self._stride * (len(study.outcomes) // self._stride) - study.claimed
        proposed = False
        # One at a time, since the first ones, winners of near records, needn't wait until the sampler has seen the whole space.
        for candidate in self._proposed(due):
            proposed = True
            self._out.put(Proposal(candidate=candidate, compiling=self._compile(candidate)))
        if not proposed:
            if not study.pending:
                self._more = False
                self._out.put(None)
            return
        # The compilers work meanwhile, so the estimate costs no waiting.
        if self._thread is not None:
            regrets = study.regrets()
            self.left_in_all = math.inf if regrets is None else float(regrets.mean())
        self.left = study.left_to_gain()
        self._out.put("expected")
        if self._compile_ahead:
            self._compile_predicted()

    def _proposed(self, count: int) -> Iterator[Candidate]:
        """Up to so many candidates; without a thread as an uninterrupted search proposes them, each from as many outcomes as it has by
        then."""
        for _ in range(count):
            strides = (self._study.claimed - self._ahead) // self._stride + 1
            known = max(0, self._stride * strides) if self._thread is None else None
            yield from self._study.ask(1, limit=self._limit, known=known)

    def _compile_predicted(self) -> None:
        """Compile predicted next candidates, a few at a time, so that they may be ready once they are proposed."""
        # Leaves as many free compilers as the next proposals need, since a compilation takes as long as a dozen trials.
        most = max(self._stride, min(self._free() - self._stride, self._ahead))
        room = most - sum(not compiling.done for compiling in self._predicted.values())
        for candidate in self._study.predicted_next(room) if room > 0 else []:
            if candidate not in self._predicted and isinstance(compiling := self._compile(candidate), Pending):
                self._predicted[candidate] = compiling


class Trials:
    """Trials of one problem. `compiled` are the known and the running compilations by variant; `at` receives the stages. `facts` are those
    of variants that the installed Triton compiled before, whose machine code may be cached."""

    def __init__(
        self,
        plan: SearchPlan,
        problem: Problem,
        workers: Workers,
        compiled: dict[str, Compiling],
        evaluation: Evaluation,
        spent: Spent,
        at: Callable[[Stage], None],
        *,
        facts: Mapping[str, CompileFacts],
    ) -> None:
        self._plan, self._problem, self._spec = plan, problem, problem.spec()
        self._workers, self._compiled, self._evaluation = workers, compiled, evaluation
        self._spent, self._at, self._facts = spent, at, facts
        self._measured = plan.source == "measured"

    def compile(self, candidate: Candidate) -> Compiling:
        """Start compiling a candidate, unless that was begun; its result where that is known."""
        variant = candidate.variant(self._spec)
        known = self._compiled.get(variant.id)
        if known is not None and (not isinstance(known, Pending) or known.shared()):
            return known
        facts, limit_s = self._facts.get(variant.id), self._plan.limits.compile_s
        found = begin_compiling(self._workers, candidate, self._problem, self._plan.target, facts, limit_s=limit_s)
        if self._measured and isinstance(found, Pending):
            self._compiled[variant.id] = found
        return found

    def outcome(self, candidate: Candidate, compiling: Compiling, incumbent: tuple[Candidate, Measurement] | None) -> Outcome:
        """Run one candidate through the stages; `incumbent` is the best so far with its time, in whose scale the candidate's is."""
        variant = candidate.variant(self._spec)
        self._at("compiling")
        with self._spent.on("wait for compilers"):
            compiled = compiling if isinstance(compiling, Compiled | Failed) else compiling.reply()
        self._compiled[variant.id] = compiled
        reply: Timed | Failed
        if isinstance(compiled, Failed):
            reply = compiled
        else:
            self._at("measuring" if self._measured else "checking")
            with self._spent.on("trials"):
                reply = self._evaluation.evaluate(candidate, compiled.facts, incumbent)
        time = None if isinstance(reply, Failed) else reply.time
        return Outcome(
            template=variant.template,
            template_hash=text_hash(candidate.family, variant),
            variant_id=variant.id,
            config=candidate.config,
            fate=reply.fate,
            source=self._plan.source,
            reason=reply.reason if isinstance(reply, Failed) else "",
            measurement=time,
            trial=time if self._measured else None,
            facts=compiled.facts,
            max_error=reply.error,
        )
