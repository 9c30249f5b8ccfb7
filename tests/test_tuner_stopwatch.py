"""How many rounds a race has: what was seen a moment ago tells it as well as rounds of its own."""

from collections.abc import Sequence

from flashtune.tuner.stopwatch import Run, Stopwatch


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
