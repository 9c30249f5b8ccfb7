"""Proposals of candidates, claimed and sent to the compilers ahead of time; in a thread of its own where a GPU must not wait for the
sampler.

A GPU doesn't wait for one compiler while another is done: compiled candidates go first, and none is overtaken by more than `OVERTAKEN`. The
sampler is queried after a number of outcomes, not after a time. Without the thread, proposals depend on the seed and the outcomes alone,
and an interrupted search repeats the proposals of an uninterrupted one.
"""

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

from flashtune.core.results import Outcome
from flashtune.tuner.children.workers import Pending
from flashtune.tuner.propose.space import Candidate
from flashtune.tuner.propose.study import Study
from flashtune.tuner.replies import Compiled, Failed

OVERTAKEN = 12
"""Most later candidates that are tried before one that is still being compiled."""

Compiling = Pending[Compiled] | Compiled | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Candidate claimed by this process. `news` are outcomes of others (an earlier run, another process) that were found before the
    claim."""

    candidate: Candidate
    compiling: Compiling
    news: tuple[tuple[Candidate, Outcome], ...]


class Proposals:
    """Candidates of one study, in the order of claims; up to `ahead` of them are being compiled or tried at a time.

    With `beside`, claiming and storing happen in a thread, whose errors are raised by the next call of any method, and compiled candidates
    may overtake others. With `compile_ahead` the sampler's predicted next candidates are compiled, too: as many as are claimed at a time,
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
        self._seen = len(study.outcomes)
        self._own: set[Candidate] = set()
        self._mine = 0
        self._more, self._closing = True, False
        self._out: SimpleQueue[Proposal | Literal["compiled", "expected"] | None] = SimpleQueue()
        self._waiting: list[Proposal] = []
        self._overtaken: dict[Candidate, int] = {}
        self._compile_ahead, self._free = compile_ahead and beside, free
        self._predicted: dict[Candidate, Pending[Compiled]] = {}
        self.left, self.left_in_all = math.inf, 0.0
        self._outcomes: SimpleQueue[tuple[Candidate, Outcome | None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="proposals", daemon=True) if beside else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._ask()

    def next(self, waiting: Callable[[], None] | None = None, enough: Callable[[], bool] = lambda: False) -> Proposal | None:
        """Next candidate; None when nothing is left for this process to try, and where it would have to wait although `enough` were tried
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

    def begin(self, candidate: Candidate) -> None:
        """Mark a candidate as running."""
        self._hand(candidate, None)

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Store the outcome of a candidate, at once, or with `beside` by the time that `close` returns."""
        self._hand(candidate, outcome)

    def _hand(self, candidate: Candidate, outcome: Outcome | None) -> None:
        if self._thread is None:
            self._take(candidate, outcome)
        else:
            self._outcomes.put((candidate, outcome))
            self._raise()

    def close(self) -> None:
        """End the thread once it has stored all outcomes; unused candidates stay claimed, and aren't compiled any more."""
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
            self._ask()
            if self._compile_ahead:
                self._study.sampler.warm_up()
            while (entry := self._outcomes.get()) is not None:
                self._take(*entry)
        except BaseException as error:
            self._error = error
            self._out.put(None)

    def _take(self, candidate: Candidate, outcome: Outcome | None) -> None:
        if outcome is None:
            self._study.begin(candidate)
            return
        self._own.add(candidate)
        self._study.tell(candidate, outcome)
        self._mine -= 1
        # While closing nobody would take new candidates.
        if not self._closing:
            self._ask()

    def _ask(self) -> None:
        """Claim as many candidates as are due by now, and put None at the end."""
        if not self._more:
            return
        study = self._study
        due = self._ahead + self._stride * (len(study.outcomes) // self._stride) - study.claimed + study.elsewhere
        count = min(due, self._ahead - self._mine)
        batch = study.ask(count, limit=self._limit) if count > 0 else []
        if not batch:
            if self._mine == 0:
                self._more = False
                self._out.put(None)
            return
        self._mine += len(batch)
        news = tuple(pair for pair in list(study.outcomes.items())[self._seen :] if pair[0] not in self._own)
        self._seen = len(study.outcomes)
        for candidate in batch:
            self._out.put(Proposal(candidate=candidate, compiling=self._compile(candidate), news=news))
            news = ()
        # The compilers work meanwhile, so the estimate costs no waiting.
        if self._thread is not None:
            self.left_in_all = study.expected_regret()
        self.left = study.left_to_gain()
        self._out.put("expected")
        if self._compile_ahead:
            self._compile_predicted()

    def _compile_predicted(self) -> None:
        """Compile predicted next candidates, a few at a time, so that they may be ready once they are claimed."""
        # Leaves as many free compilers as the next claims need, since a compilation takes as long as a dozen trials.
        most = max(self._stride, min(self._free() - self._stride, self._ahead))
        room = most - sum(not compiling.done for compiling in self._predicted.values())
        for candidate in self._study.predicted_next(room) if room > 0 else []:
            if candidate not in self._predicted and isinstance(compiling := self._compile(candidate), Pending):
                self._predicted[candidate] = compiling
