"""Timing on the GPU: candidates interleaved, L2 flushed before every launch, medians over rounds."""

import random
from collections.abc import Callable, Iterator, Sequence

import torch

from flashtune.core.pytorch.private import gpu_sleep
from flashtune.core.records.results import Measurement

_NAP = 200_000
"""GPU clocks of sleep before each timed launch: about 0.1 ms, more than a launch costs an idle host."""

_LONGEST_NAP = 16 * _NAP
"""Longest such sleep, for a busy host: about 1.6 ms."""

_HEAD_START = 10_000_000
"""GPU clocks of sleep before the first launch, for a single delay of the host: about 5 ms."""

Run = Callable[[], object]
"""Function that enqueues one candidate's work on the current stream."""


class Stopwatch:
    """Times callables with CUDA events on one device; owns the buffer that flushes L2.

    The buffer is read, not written: written lines would still be on their way to memory while a candidate runs, as many bytes as L2 holds.
    Its sum has its own type: for another PyTorch would first write a copy.

    Before each start event the GPU sleeps, so that the host has enqueued the launch by the time the event is reached: host time stays out
    of the figures. Where the event was reached before, the launch is timed again, after a longer sleep.
    """

    _nap = _NAP
    """Present sleep of the GPU in clocks, longer for a busier host."""

    def __init__(self, device: torch.device, l2_bytes: int) -> None:
        self._device = device
        self._flush = torch.zeros(max(l2_bytes, 1 << 26), dtype=torch.float32, device=device)
        self._read = torch.zeros((), dtype=torch.float32, device=device)

    def rounds(self, runs: Sequence[Run], count: int) -> list[list[float]]:
        """Times in microseconds, `count` for each of `runs`: every round runs all of them, in an order of its own (see `orders`)."""
        events = [[(_event(), _event()) for _ in range(count)] for _ in runs]
        self._nap = max(_NAP, self._nap // 2)
        gpu_sleep(_HEAD_START)
        for turn, order in enumerate(orders(len(runs), count)):
            for index in order:
                start, stop = events[index][turn]
                while self._waited(runs[index], start, stop) and self._nap < _LONGEST_NAP:
                    self._nap = min(2 * self._nap, _LONGEST_NAP)
        torch.cuda.synchronize(self._device)
        return [[start.elapsed_time(stop) * 1e3 for start, stop in row] for row in events]

    def _waited(self, run: Run, start: torch.cuda.Event, stop: torch.cuda.Event) -> bool:
        """Flush L2 and enqueue a timed launch; True where the GPU may have waited for the host meanwhile."""
        torch.sum(self._flush, dim=0, out=self._read)
        gpu_sleep(self._nap)
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
        """Times in microseconds of interleaved rounds; their number fits `budget_s` seconds, estimated from times just `seen` of each of
        `runs`, or else from two rounds after a warm-up."""
        if not seen:
            self.rounds(runs, 1)
        estimate = seen or self.rounds(runs, 2)
        # A flush and a sleep take about 200 us with an idle host.
        round_s = sum(min(times) + 100 + 100 * self._nap / _NAP for times in estimate) * 1e-6
        count = max(least, min(most, int(budget_s / round_s)))
        return self.rounds(runs, count)


def orders(runs: int, count: int) -> Iterator[list[int]]:
    """Orders of `count` rounds: a random one, then its reverse, and so on; fixed neighbours would bias each other's times."""
    rng, order = random.Random(0), list(range(runs))
    for turn in range(count):
        if turn % 2 == 0:
            rng.shuffle(order)
        else:
            order.reverse()
        yield list(order)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
