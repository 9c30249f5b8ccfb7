"""Stopping rule of a search, and its end in words."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from flashtune.core.records.results import Ending, Outcome

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Reason = Literal["trials", "budget", "space", "gain", "patience"]

UNTIL = 0.005
"""Default least expected gain of a further candidate, as a share of the best time."""

PATIENCE = 8
"""Trials in a row without that gain that end a search; twice as many where the surrogate expects it of the next one, or much of all."""

LEFT = 0.01
"""Largest expected gain of all candidates together at which a search stops when none alone is worth a trial (benchmarks/run.py stops)."""

NEARLY = 4
"""Trials before the earliest end at which the preparations of a race may begin."""


_WORDS = {
    "trials": "all trials done",
    "budget": "time is up",
    "space": "the whole space was tried",
    "gain": "nothing untried is expected to gain enough",
    "patience": f"{PATIENCE} trials or more without a gain",
}


def sentence(ending: Ending) -> str:
    """Short reason why a search stopped. What may be left is not told: too few recorded sweeps end with a regret to calibrate a share or a
    percentile (benchmarks/run.py stops)."""
    return _WORDS.get(ending.reason, ending.reason)


def ending_of(reason: Reason, regrets: "NDArray[np.float64] | None", candidates: int) -> Ending:
    """The end of a search of so many candidates by its reason and samples of its best one's regret; without any nothing is left where the
    whole space was tried, and elsewhere nothing is known."""
    none_left = 0.0 if reason == "space" else None
    return Ending(reason=reason, regret=none_left if regrets is None else float(regrets.mean()), candidates=candidates)


@dataclass
class StoppingRule:
    """Stopping rule that counts a problem's trials. `until` is the least gain that is worth a trial, as a share of the best time; None or 0
    never stops."""

    until: float | None
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        self._reference = math.inf
        self._since = 0

    def add(self, outcome: Outcome) -> None:
        """Add a finished trial, in the order of proposing."""
        self._since += 1
        time_us = outcome.measurement.median_us if outcome.fate.timed and outcome.measurement is not None else math.inf
        if time_us < self._reference * (1 - (self.until or 0.0)):
            self._reference, self._since = time_us, 0

    @property
    def nearly(self) -> bool:
        """True where a few more trials without a gain may end the search."""
        return self._reference != math.inf and self._since >= self.patience - NEARLY

    def verdict(self, left_to_gain: float, left_in_all: float = 0.0) -> Reason | None:
        """Reason to stop before the next trial, whose expected gain is `left_to_gain` (infinite where unknown), with `left_in_all` that of
        the best of all; None to go on.

        It takes both: a surrogate that expects no gain, and a series of trials without one.
        """
        if not self.until or self._reference == math.inf or self._since < self.patience:
            return None
        if left_to_gain < self.until and left_in_all < max(LEFT, self.until):
            return "gain"
        return "patience" if left_to_gain == math.inf or self._since >= 2 * self.patience else None
