"""How many rounds a race has, and in which orders: what was seen a moment ago tells it as well as rounds of its own."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from flashtune.tuner.timing import stopwatch
from flashtune.tuner.timing.stopwatch import Run, Stopwatch, orders


class Counted(Stopwatch):
    """Runs take 800 us each, of which no GPU is asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def rounds(self, runs: Sequence[Run], count: int) -> list[list[float]]:
        self.asked.append(count)
        return [[800.0] * count for _ in runs]


def test_a_race_is_as_long_as_its_time_allows_and_needs_no_estimate_of_what_was_seen() -> None:
    runs: list[Run] = [lambda: None] * 2
    unseen, seen = Counted(), Counted()
    found = [unseen.samples(runs, budget_s=0.02), seen.samples(runs, budget_s=0.02, seen=[[900.0, 800.0], [800.0, 850.0]])]
    assert (unseen.asked, seen.asked) == ([1, 2, 10], [10])
    assert found == [[[800.0] * 10] * 2] * 2
    assert len(seen.race(runs, budget_s=9.0, most=50, seen=[[800.0], [800.0]])) == 2 and seen.asked[-1] == 50


def test_every_two_rounds_are_mirrored_and_neighbours_change() -> None:
    found = list(orders(6, 40))
    assert all(sorted(order) == list(range(6)) for order in found)
    assert all(second == first[::-1] for first, second in zip(found[::2], found[1::2], strict=True))
    before = {order[order.index(3) - 1] for order in found if order[0] != 3}
    assert before == {0, 1, 2, 4, 5}
    assert [*orders(1, 2)] == [[0], [0]]


class Clocks:
    """A host and a GPU that takes what is enqueued in its order, by their microseconds; a flush takes 50, a kernel 16."""

    def __init__(self, launch_us: float) -> None:
        self.host = self.gpu = 0.0
        self.launch_us, self.launches = launch_us, 0

    def enqueue(self, us: float) -> float:
        self.host += 5.0
        self.gpu = max(self.gpu, self.host) + us
        return self.gpu

    def launch(self) -> None:
        self.launches += 1
        self.host += self.launch_us
        self.enqueue(16.0)


class Event:
    """Of such clocks."""

    def __init__(self, clocks: Clocks) -> None:
        self.clocks, self.at = clocks, 0.0

    def record(self) -> None:
        self.at = self.clocks.enqueue(0.0)

    def query(self) -> bool:
        return self.at <= self.clocks.host

    def elapsed_time(self, other: "Event") -> float:
        return (other.at - self.at) / 1e3


@pytest.mark.parametrize("launch_us", [20.0, 400.0, 1000.0])
def test_what_a_busy_host_needs_for_a_launch_stays_out_of_its_time(launch_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(launch_us)
    cuda = SimpleNamespace(synchronize=lambda device: None)
    monkeypatch.setattr(stopwatch, "torch", SimpleNamespace(cuda=cuda, sum=lambda *_, **__: clocks.enqueue(50.0)))
    monkeypatch.setattr(stopwatch, "gpu_sleep", lambda count: clocks.enqueue(count / 2000))
    monkeypatch.setattr(stopwatch, "_event", lambda: Event(clocks))
    watch = object.__new__(Stopwatch)
    watch._device = watch._flush = watch._read = None  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
    found = watch.rounds([clocks.launch] * 3, 30)
    assert [time for row in found for time in row] == pytest.approx([16.0] * 90)
    assert clocks.launches <= 90 + 4, "it learns how long to sleep"
