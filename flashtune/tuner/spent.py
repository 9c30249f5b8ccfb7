"""Wall time by purpose, in seconds."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger("flashtune.search")
"""Logger of `flashtune.search`: at level DEBUG it gets a line for each problem that has been searched."""


class Spent:
    """Sum of seconds by purpose, within one thread."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Count the block's seconds for a purpose."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[what] += time.perf_counter() - begun

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add another process's seconds."""
        for what, number in seconds.items():
            self._seconds[what] += number

    def take(self) -> dict[str, float]:
        """Seconds since the last call, by purpose."""
        found = dict(self._seconds)
        self._seconds.clear()
        return found

    def __str__(self) -> str:
        """One line, the longest first; purposes below 0.01 s are left out."""
        longest = sorted(self._seconds.items(), key=lambda entry: -entry[1])
        return ", ".join(f"{what} {number:.2f}" for what, number in longest if number >= 0.01)
