"""Workloads of a model: forwards, padded batches, decoding steps and training steps of stated sizes. Importing it brings no torch."""

import re
from dataclasses import dataclass
from typing import Literal, get_args

from flashtune.core.system.errors import InputError

Kind = Literal["forward", "padded", "decode", "train"]

KINDS: tuple[Kind, ...] = get_args(Kind)

DECODED = 16
"""Tokens of one timed run of a `decode` workload: its keys grow by one with each."""

PADDING = 0.25
"""Share of a `padded` workload's tokens that are padding: rows end at lengths spread evenly around it."""

MOST = 1 << 20
"""Largest batch and largest number of tokens that are taken."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One way of running a model: `batch` sequences of `n` tokens (None: the model's own size, as of images).

    `forward` computes without gradients, `padded` does so on sequences of unequal lengths, `decode` generates `DECODED` tokens after `n`,
    and `train` computes gradients, too.
    """

    kind: Kind
    batch: int
    n: int | None = None

    def __str__(self) -> str:
        return f"{self.kind}:{self.batch}" + ("" if self.n is None else f"x{self.n}")

    @property
    def trains(self) -> bool:
        """True if gradients are computed."""
        return self.kind == "train"


def parse(text: str) -> Workload:
    """The workload that a text such as `forward:1x4096` or `train:8` names; raises InputError for any other text."""
    found = re.fullmatch(r"([a-z]+):(\d{1,7})(?:x(\d{1,7}))?", text.strip())
    kind: Kind | None = next((one for one in KINDS if found is not None and one == found[1]), None)
    if found is None or kind is None:
        raise InputError(f"{text!r} is no workload: write KIND:BATCHxTOKENS with a kind of {', '.join(KINDS)}, as decode:8x4096")
    batch, n = int(found[2]), None if found[3] is None else int(found[3])
    if not 0 < batch <= MOST or (n is not None and not 0 < n <= MOST):
        raise InputError(f"{text!r} has a size outside of 1 to {MOST}: write sizes that the model takes")
    return Workload(kind, batch, n)


def lengths(workload: Workload, n: int) -> list[int]:
    """Tokens of each sequence of a padded batch, `n` at most, whose mean is 1 - `PADDING` of `n` where there are several."""
    if workload.batch == 1:
        return [n]
    least = 1 - 2 * PADDING
    return [max(1, round(n * (least + (1 - least) * i / (workload.batch - 1)))) for i in range(workload.batch)]
