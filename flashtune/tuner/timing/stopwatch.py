"""Timing on the GPU: candidates interleaved, L2 flushed before every launch, medians over rounds."""

import random
from collections.abc import Callable, Iterator, Sequence

import torch

from flashtune.core.results import Measurement

_NAP = 200_000
"""Clocks that the GPU sleeps before each timed launch: about 0.1 ms, more than a launch costs a host that is at rest."""

_LONGEST_NAP = 16 * _NAP
"""The same for a host that is at work: some 1.6 ms."""

_HEAD_START = 10_000_000
"""Clocks that the GPU sleeps before the first one, for a host that is held up for once: about 5 ms."""

Run = Callable[[], object]
"""Enqueues one candidate's work on the current stream."""


class Stopwatch:
    """Times callables with CUDA events on one device; holds the buffer that flushes L2.

    It is read, not written: written lines would still be on their way to memory while a candidate runs, as many bytes as L2 holds. Its sum
    is of its own type: to add up in another, torch would first write a copy.

    Before each start event the GPU sleeps, so that the host has enqueued the launch by the time it is reached: what the host needs
    to prepare a launch stays out of the figures. Where it was reached before, the launch is timed again, after a longer sleep.
    """

    _nap = _NAP
    """How long the GPU sleeps now: the longer, the more the host has to do."""

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self._device = device
        self._flush = torch.zeros(max(l2_bytes, 1 << 26), dtype=torch.float32, device=device)
        self._read = torch.zeros((), dtype=torch.float32, device=device)

    def rounds(self, runs: Sequence[Run], count: int) -> list[list[float]]:
        """`count` times in microseconds for each of `runs`: every round runs all of them, in an order of its own (see `orders`)."""
        events = [[(_event(), _event()) for _ in range(count)] for _ in runs]
        self._nap = max(_NAP, self._nap // 2)
        torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]
        for turn, order in enumerate(orders(len(runs), count)):
            for index in order:
                start, stop = events[index][turn]
                while self._waited(runs[index], start, stop) and self._nap < _LONGEST_NAP:
                    self._nap = min(2 * self._nap, _LONGEST_NAP)
        torch.cuda.synchronize(self._device)
        return [[start.elapsed_time(stop) * 1e3 for start, stop in row] for row in events]

    def _waited(self, run: Run, start: torch.cuda.Event, stop: torch.cuda.Event) -> bool:
        """Flush L2 and enqueue a timed launch; whether the GPU may have waited for the host meanwhile."""
        torch.sum(self._flush, dim=0, out=self._read)
        torch.cuda._sleep(self._nap)  # type: ignore[no-untyped-call]
        start.record()
        run()
        waited = bool(start.query())  # type: ignore[no-untyped-call]
        stop.record()
        return waited

    def race(
        self, runs: Sequence[Run], *, budget_s: float, least: int = 7, most: int = 100, seen: Sequence[Sequence[float]] = ()
    ) -> list[Measurement]:
        """Medians of interleaved rounds, see `samples`."""
        return [Measurement.of(times) for times in self.samples(runs, budget_s=budget_s, least=least, most=most, seen=seen)]

    def samples(
        self, runs: Sequence[Run], *, budget_s: float, least: int = 7, most: int = 100, seen: Sequence[Sequence[float]] = ()
    ) -> list[list[float]]:
        """Interleaved rounds; their number fits `budget_s`: estimated from what was `seen` of each of `runs` a moment ago, or else from two
        rounds after a warm-up."""
        if not seen:
            self.rounds(runs, 1)
        estimate = seen or self.rounds(runs, 2)
        # A flush and a nap are reckoned with 200 us, where the host is at rest.
        round_s = sum(min(times) + 100 + 100 * self._nap / _NAP for times in estimate) * 1e-6
        count = max(least, min(most, int(budget_s / round_s)))
        return self.rounds(runs, count)


def orders(runs: int, count: int) -> Iterator[list[int]]:
    """The orders of so many rounds: one at random, then the same the other way round. Who has the same neighbours in every round is timed
    beside these alone, and each race has others."""
    rng, order = random.Random(0), list(range(runs))
    for turn in range(count):
        if turn % 2 == 0:
            rng.shuffle(order)
        else:
            order.reverse()
        yield list(order)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
