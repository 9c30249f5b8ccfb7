"""Masks of FlexAttention that stand for a problem's band and packed sequences."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from flashtune.core.problems.band import diagonal_of
from flashtune.core.problems.problem import Problem
from flashtune.core.pytorch.flex import band_mod


def mask_mod_of(problem: Problem, device: torch.device) -> Callable[..., Tensor] | None:
    """The mask of a problem's band and packed sequences (FlexAttention's document mask) as a function; None where all pairs are visible."""
    if problem.lengths is None or problem.batch == 1:
        return band_mod(problem.band) if problem.band.bounded else None
    sequences = problem.sequences()
    of_queries, of_keys = ([lengths[side] for lengths in sequences] for side in (0, 1))
    queries, keys = (_repeated(range(len(sequences)), lengths, device) for lengths in (of_queries, of_keys))
    # The distance of a query from a key counts from their own sequence's diagonal.
    begins_q, begins_k = ([0, *accumulate(lengths)][:-1] for lengths in (of_queries, of_keys))
    shifts = [diagonal_of(problem.features.alignment, n_q, n_kv) for n_q, n_kv in sequences]
    moved = [k - q + shift for q, k, shift in zip(begins_q, begins_k, shifts, strict=True)]
    of_band = band_mod(problem.band, _repeated(moved, of_queries, device))

    def of_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return queries[i] == keys[j]

    return (lambda b, h, i, j: of_document(b, h, i, j) & of_band(b, h, i, j)) if problem.band.bounded else of_document


def _repeated(values: Sequence[int], lengths: Sequence[int], device: torch.device) -> Tensor:
    found = torch.repeat_interleave(torch.tensor(list(values)), torch.tensor(list(lengths)))
    return found.to(device=device, dtype=torch.int32)
