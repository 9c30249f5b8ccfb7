"""Switch between a plan's kernel and its fallback kernel, driven by a count of mispredicted softmax that the kernel keeps.

A kernel with a frozen row max is the fastest on most scores, and one of the slower ones where scores defeat the prediction (decision 0008).
It counts its mispredicting programs where the host can read them without waiting. Where many were, the fallback kernel, whose time doesn't
depend on scores, serves for a period; then one probe call finds out if scores still defeat the prediction.
"""

from typing import Protocol

FIRST_PERIOD = 64
"""Calls that the fallback kernel serves before the first probe; until its count is read, twice as many: the host runs ahead of the GPU."""

LONGEST_PERIOD = 1024
"""Most calls before a probe, and before its count is read: periods double with each probe that mispredicts. About the length of a GPU's
launch queue."""

SHARE = 4
"""A launch counts as mispredicted from 1 / SHARE of its programs on: such a program loses up to half of its speed, and the fallback kernel
is some 10 % slower than the others."""


FEW = 32
"""Minimum number of launches before the rate of mispredictions is evaluated.

The host runs ahead of the GPU, so that counts of unobserved launches arrive with those of the first observed ones: 128 launches with the
same 16th of their programs mispredicting, as near the top of a causal mask, must not trigger. Full misprediction triggers by the eighth.
"""

WATCHED = 256
"""Observed launches after which the weight of all so far is halved."""


class Word(Protocol):
    """Counter that the GPU advances: mispredicting programs so far, modulo 2^32."""

    value: int


class Misprediction:
    """State of the choice between a plan's two kernels. Threads share it without a lock: they may choose differently, and any choice is
    right."""

    __slots__ = (
        "_few",
        "_launches",
        "_left",
        "_limit",
        "_period",
        "_probed",
        "_programs",
        "_sum",
        "away",
        "busy",
        "seen",
        "times",
        "word",
    )

    def __init__(self, word: Word, programs: int) -> None:
        """`programs` is the number of programs of a launch."""
        self.word, self.seen = word, word.value
        self.away = False
        """True while the fallback kernel serves all calls but probes."""
        self.busy = False
        """True where each call has to ask `fallback_serves`; else only calls that find `word.value` unequal to `seen` do."""
        self.times = 0
        """Number of switches to the fallback kernel."""
        self._programs, self._limit = programs, -(-programs // SHARE)
        self._few = FEW
        # Observed launches, and the number of their programs that mispredicted.
        self._launches = self._sum = 0
        self._period = FIRST_PERIOD
        self._left = 0
        self._probed = False

    def fallback_serves(self) -> bool:
        """True where the fallback kernel serves this call; to be called once for each call that isn't on the fast path."""
        if not self.away:
            self._watch()
        elif self._left > 0:
            self._left -= 1
        elif not self._probed:
            # This call is the probe.
            self.seen = self.word.value
            self._probed, self._left = True, self._period
            return False
        elif self._grown() >= self._limit:
            self._few = FEW
            self._go()
        else:
            # The probe's count may arrive late; then it is counted from now on, and the next period is longer.
            self.away = self.busy = False
            self._few = min(4 * self._few, 2 * WATCHED)
        return self.away

    def _watch(self) -> None:
        """Add up the counts since the last call, and switch where too large a share of the launches' programs mispredicted."""
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
        """Switch to the fallback kernel, for a period that doubles each time."""
        self._left = self._period - 1
        self._period = min(2 * self._period, LONGEST_PERIOD)
        self._launches = self._sum = 0
        self._probed, self.away, self.busy = False, True, True

    def _grown(self) -> int:
        """Number of programs that mispredicted since the last call of this."""
        now = self.word.value
        grown, self.seen = (now - self.seen) % 2**32, now
        return grown
