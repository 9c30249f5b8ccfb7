"""When a search has tried enough, and what it then expects to have missed."""

import math
from dataclasses import dataclass
from typing import Literal

from flashtune.core.results import Ending, Outcome

Reason = Literal["trials", "budget", "space", "gain", "patience"]

UNTIL = 0.005
"""What a further candidate must be expected to gain, as a share of the best time, unless the user says otherwise."""

PATIENCE = 12
"""So many trials in a row without that gain end a search; twice as many where the surrogate expects it of the next one, or much of all."""

LEFT = 0.02
"""What all candidates together may be expected to gain where none alone is worth a trial: many small chances are a good one."""

NEARLY = 4
"""So many trials before that a search may begin what its end needs."""


_WORDS = {
    "trials": "all trials done",
    "budget": "time is up",
    "space": "the whole space was tried",
    "gain": "nothing untried is expected to gain enough",
    "patience": f"{PATIENCE} trials or more without a gain",
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
        self._since = 0

    def add(self, outcome: Outcome) -> None:
        """Take a trial that has ended, in the order of asking."""
        self._since += 1
        time_us = outcome.measurement.median_us if outcome.fate.timed and outcome.measurement is not None else math.inf
        if time_us < self._reference * (1 - (self.until or 0.0)):
            self._reference, self._since = time_us, 0

    @property
    def nearly(self) -> bool:
        """Whether a few more trials without a gain may end it."""
        return self._reference != math.inf and self._since >= self.patience - NEARLY

    def verdict(self, left_to_gain: float, left_in_all: float = 0.0) -> Reason | None:
        """Why to stop before the next trial, of which the surrogate expects this gain (infinite where it can't say), and of the best of all
        `left_in_all`; None to go on.

        Neither is believed alone: a surrogate that expects nothing, while trials still gain, nor a few trials without luck.
        """
        if not self.until or self._reference == math.inf or self._since < self.patience:
            return None
        if left_to_gain < self.until and left_in_all < max(LEFT, self.until):
            return "gain"
        return "patience" if left_to_gain == math.inf or self._since >= 2 * self.patience else None
