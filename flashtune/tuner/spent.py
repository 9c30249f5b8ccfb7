"""Where wall time goes: seconds by what they were spent on."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger("flashtune.search")
"""At level DEBUG it gets a line for each problem that has been searched."""


class Spent:
    """Adds up seconds by what they were spent on, within one thread."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count what the block takes."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - begun

    def add(self, seconds: Mapping[str, float]) -> None:
        """Count what another process has counted."""
        for what, number in seconds.items():
            self._seconds[what] += number

    def take(self) -> dict[str, float]:
        """What was counted since this was last called."""
        found = dict(self._seconds)
        self._seconds.clear()
        return found

    def __str__(self) -> str:
        """One line, the longest first; what took no hundredth of a second is left out."""
        longest = sorted(self._seconds.items(), key=lambda entry: -entry[1])
        return ", ".join(f"{what} {number:.2f}" for what, number in longest if number >= 0.01)
