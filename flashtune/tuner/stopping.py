"""When a search has tried enough, and what it then expects to have missed."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from flashtune.core.results import Ending, Outcome

Reason = Literal["trials", "budget", "space", "gain", "patience"]
REASONS: tuple[Reason, ...] = get_args(Reason)

UNTIL = 0.005
"""What a further candidate must be expected to gain, as a share of the best time, unless the user says otherwise."""

PATIENCE = 12
"""So many trials without that gain end a search, too: where no surrogate says what is left, and where one is wrong."""


_WORDS = {
    "trials": "all trials done",
    "budget": "time is up",
    "space": "the whole space was tried",
    "gain": "nothing untried is expected to gain enough",
    "patience": f"{PATIENCE} trials without a gain",
}


def sentence(ending: Ending) -> str:
    """Why a search stopped, and what a longer one is expected to have gained, in a few words."""
    why = _WORDS.get(ending.reason, ending.reason)
    return why if ending.regret is None else f"{why}; {ending.regret:.1%} expected to be left"


@dataclass
class StoppingRule:
    """Counts a problem's trials. `until` is the least gain that is worth a trial, as a share of the best time; None or 0 never stops."""

    until: float | None
    patience: int = PATIENCE

    def __post_init__(self) -> None:
        self._reference = math.inf
        self._since = self._count = 0

    def add(self, outcome: Outcome) -> None:
        """Take a trial that has ended, in the order of asking."""
        self._since, self._count = self._since + 1, self._count + 1
        time_us = outcome.measurement.median_us if outcome.fate.timed and outcome.measurement is not None else math.inf
        if time_us < self._reference * (1 - (self.until or 0.0)):
            self._reference, self._since = time_us, 0

    def verdict(self, left_to_gain: float) -> Reason | None:
        """Why to stop before the next trial, of which the surrogate expects this gain (infinite where it can't say); None to go on.

        A surrogate that has seen fewer trials than patience has isn't believed.
        """
        if not self.until or self._reference == math.inf or self._count < self.patience:
            return None
        if left_to_gain < self.until:
            return "gain"
        return "patience" if self._since >= self.patience else None
