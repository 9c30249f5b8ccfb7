"""Calls that a plan doesn't have; see test_frozen."""

from typing import Any

import torch
import ways

from flashtune import dispatch
from flashtune.core.system.errors import InputError


def main(path: str) -> list[str]:
    """Messages for calls that the plan doesn't have."""
    found = []
    with dispatch.use(plan=path):
        for way, call in ways.WAYS.items():
            words: dict[str, Any] = {"score_mod": _waved} if "functions" in way else {"softcap": 3.0}
            try:
                call(ways.tensors(), **words)
            except InputError as error:
                found.append(str(error))
        given = ways.tensors()
        longer = ways.Tensors(given.query, *(torch.cat([x] * 2, 2) for x in given[1:]))
        shorter = ways.Tensors(given.query, *(x[:, :, :20] for x in given[1:]))
        assert ways.dense(shorter).isfinite().all(), "an octave has one entry"
        try:
            ways.dense(longer)
        except InputError as error:
            found.append(str(error))
    assert ways.dense(longer).isfinite().all(), "without the plan it runs"
    return found


def _waved(score: torch.Tensor, b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
    return score * torch.cos(i - j)
