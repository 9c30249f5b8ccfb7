"""What a plan remembers of being misled: which of two kernels serves its calls, told by a count that the first one keeps.

A kernel that settles row maxima is the fastest there is on most scores, and one of the slower ones where scores mislead it (decision
0008). It counts its misled programs where the host can read them without waiting. Where many were, the kernel's twin, whose time doesn't
depend on scores, serves for a while; then one call asks whether scores still mislead.
"""

from typing import Protocol

FIRST_PERIOD = 64
"""Calls that the twin serves before the first question; until its answer is looked at, twice as many: the host runs ahead of the GPU."""

LONGEST_PERIOD = 1024
"""Calls before a question and before its answer, at most: they double each time that scores mislead again. A GPU's queue holds about so
many launches."""

SHARE = 4
"""A launch is misled where one of so many of its programs is: a program that is misled loses up to half of its speed, and the twin's are
some 10 % slower than those that aren't."""


FEW = 32
"""So many launches at least the share is of. The host runs ahead of the GPU, so that counts of launches that nobody watched come with those
of the first that are: of 128 in which the same 16th of the programs is misled, as near the top of a causal mask, they say nothing yet.
What misleads all programs is told by the eighth launch."""

WATCHED = 256
"""After so many launches each counts half as much."""


class Word(Protocol):
    """A number that changes by itself: how many programs were misled so far, modulo 2^32."""

    value: int


class Misled:
    """Which of a plan's two kernels serves. Threads share one without a lock: they may choose differently, and any choice is right."""

    __slots__ = ("_asked", "_few", "_launches", "_left", "_limit", "_period", "_programs", "_sum", "away", "busy", "seen", "times", "word")

    def __init__(self, word: Word, programs: int) -> None:
        """`programs` are those of a launch."""
        self.word, self.seen = word, word.value
        self.away = False
        """Whether the twin serves but for questions."""
        self.busy = False
        """Whether each call asks. A call is served as ever, and asks nothing, while this is False and `word.value` is `seen`."""
        self.times = 0
        """How often calls went over to the twin."""
        self._programs, self._limit = programs, -(-programs // SHARE)
        self._few = FEW
        # Launches that were watched, and how many programs of theirs were misled.
        self._launches = self._sum = 0
        self._period = FIRST_PERIOD
        self._left = 0
        self._asked = False

    def twin_serves(self) -> bool:
        """Whether the twin serves this call; each call that isn't served as ever asks once."""
        if not self.away:
            self._watch()
        elif self._left > 0:
            self._left -= 1
        elif not self._asked:
            # This call is the question.
            self.seen = self.word.value
            self._asked, self._left = True, self._period
            return False
        elif self._grown() >= self._limit:
            self._few = FEW
            self._go()
        else:
            # What is counted from now on says more than whether the answer was in time: if it wasn't, the next period is longer.
            self.away = self.busy = False
            self._few = min(4 * self._few, 2 * WATCHED)
        return self.away

    def _watch(self) -> None:
        """Adds up what was counted since the last look, and goes over where a share of the launches' programs was misled."""
        self._launches += 1
        self._sum += self._grown()
        self.busy = True
        if SHARE * self._sum >= self._programs * max(self._launches, self._few):
            self.times += 1
            self._go()
        elif self._launches >= WATCHED:
            self._launches, self._sum = self._launches // 2, self._sum // 2
            self.busy = self._sum > 0

    def _go(self) -> None:
        """To the twin, each time for longer."""
        self._left = self._period - 1
        self._period = min(2 * self._period, LONGEST_PERIOD)
        self._launches = self._sum = 0
        self._asked, self.away, self.busy = False, True, True

    def _grown(self) -> int:
        """How many programs were misled since this was last asked."""
        now = self.word.value
        grown, self.seen = (now - self.seen) % 2**32, now
        return grown
