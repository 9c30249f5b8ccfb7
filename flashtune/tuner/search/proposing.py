"""What is tried next, asked for and sent to the compilers ahead of time; in a thread of its own where a GPU must not wait for the sampler.

Nor does a GPU wait for one compiler while another is done: what is compiled goes first, and nobody is overtaken by more than `OVERTAKEN`.
The sampler is asked when so many outcomes are known, not when so much time has passed. Without the thread, what a search tries depends on
its seed and its outcomes alone, and an interrupted search asks for what it would have asked for.
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
"""So many that were asked for later, at most, are tried before a candidate that is still being compiled."""

Compiling = Pending[Compiled] | Compiled | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A candidate that is this process's to try. `news` are outcomes of others (an earlier run, another process) that were found before it
    was asked for."""

    candidate: Candidate
    compiling: Compiling
    news: tuple[tuple[Candidate, Outcome], ...]


class Proposals:
    """Candidates of one study, in the order of asking; up to `ahead` of them are being compiled or tried at a time.

    With `beside`, asking and keeping happen in a thread, whose errors are raised by whatever is called next, and who is compiled needn't
    wait for who isn't; with `foresee` what the sampler would propose next is compiled, too: as many as are asked for at a time, and more
    while compilers are `free`, as far as that tells how many. `left` is what the sampler expected the next candidates to gain when it was
    last asked, and `left_in_all` what the best of all would; without a thread that is 0, for nothing is measured then.
    """

    def __init__(
        self,
        study: Study,
        compile_one: Callable[[Candidate], Compiling],
        *,
        ahead: int,
        limit: int | None,
        beside: bool,
        foresee: bool = False,
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
        self._foresee, self._free = foresee and beside, free
        self._foreseen: dict[Candidate, Pending[Compiled]] = {}
        self.left, self.left_in_all = math.inf, 0.0
        self._told: SimpleQueue[tuple[Candidate, Outcome | None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="proposals", daemon=True) if beside else None
        if self._thread is not None:
            self._thread.start()
        else:
            self._ask()

    def next(self, waiting: Callable[[], None] | None = None, enough: Callable[[], bool] = lambda: False) -> Proposal | None:
        """The next candidate; None when there is nothing more for this process to try, and where it would have to wait for one although
        `enough` were tried by now. `waiting` is called where it waits for compilers."""
        while True:
            # All that has come, and at least one thing where nobody can be taken yet.
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
        """The place of the one to take: the first that is compiled, unless one before it was overtaken too often; None to wait."""
        for place, waiting in enumerate(self._waiting):
            if self._thread is None or not isinstance(waiting.compiling, Pending) or waiting.compiling.done:
                return place
            if self._overtaken.get(waiting.candidate, 0) >= OVERTAKEN:
                return None
        return None

    def put_back(self, proposal: Proposal) -> None:
        """Give back what `next` gave and nobody began."""
        self._waiting.insert(0, proposal)

    def begin(self, candidate: Candidate) -> None:
        """Say that it is a candidate's turn."""
        self._hand(candidate, None)

    def tell(self, candidate: Candidate, outcome: Outcome) -> None:
        """Hand over what became of a candidate; it is kept at once, or with `beside` by the time that `close` returns."""
        self._hand(candidate, outcome)

    def _hand(self, candidate: Candidate, outcome: Outcome | None) -> None:
        if self._thread is None:
            self._take(candidate, outcome)
        else:
            self._told.put((candidate, outcome))
            self._raise()

    def close(self) -> None:
        """End the thread, after it has kept all that it was told; what nobody took stays claimed, and isn't compiled any more."""
        if self._thread is not None:
            self._closing = True
            self._told.put(None)
            self._thread.join()
        while not self._out.empty():
            left = self._out.get()
            if isinstance(left, Proposal):
                self._waiting.append(left)
        for compiling in self._foreseen.values():
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
            if self._foresee:
                self._study.sampler.warm_up()
            while (told := self._told.get()) is not None:
                self._take(*told)
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
        # In the end nobody would take what is asked for.
        if not self._closing:
            self._ask()

    def _ask(self) -> None:
        """Give out as many candidates as are due by now, and at the end None."""
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
        # Compilers are at work meanwhile.
        if self._thread is not None:
            self.left_in_all = study.expected_regret()
        self.left = study.left_to_gain()
        self._out.put("expected")
        if self._foresee:
            self._compile_foreseen()

    def _compile_foreseen(self) -> None:
        """Have compiled what may be asked for next, a few at a time: by the time that it is, it may be done."""
        # Those that are free, but for as many as are asked for next: a compilation takes as long as a dozen trials.
        most = max(self._stride, min(self._free() - self._stride, self._ahead))
        room = most - sum(not compiling.done for compiling in self._foreseen.values())
        for candidate in self._study.foreseen(room) if room > 0 else []:
            if candidate not in self._foreseen and isinstance(compiling := self._compile(candidate), Pending):
                self._foreseen[candidate] = compiling
