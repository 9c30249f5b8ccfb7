"""Bands: how callers write them, and that counting and trimming agree with the mask that defines them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.problems import reference
from flashtune.core.problems.band import ALIGNMENTS, Band, Window, diagonal_of, parse_window
from flashtune.core.problems.problem import Features

sides = st.none() | st.integers(0, 30)
sizes = st.integers(1, 24)
bands = st.builds(Band, left=sides, right=sides, diagonal=st.integers(-30, 30))


@pytest.mark.parametrize(
    ("window", "expected"),
    [(None, (None, None)), (7, (7, 7)), (0, (0, 0)), (-1, (None, None)), ((3, None), (3, None)), ([-1, 0], (None, 0))],
    ids=str,
)
def test_a_window_is_a_size_or_two_sides(window: Any, expected: Window) -> None:
    assert parse_window(window) == expected


@given(bands, sizes, sizes)
def test_keys_and_pairs_are_those_of_the_mask(band: Band, n_q: int, n_kv: int) -> None:
    seen = reference.visible(band, n_q, n_kv)
    assert band.pairs(n_q, n_kv) == int(seen.sum())
    assert [[*band.keys(row, row, n_kv)] for row in range(n_q)] == [row.nonzero()[:, 0].tolist() for row in seen]
    assert [*band.keys(0, n_q - 1, n_kv)] == seen.any(0).nonzero()[:, 0].tolist() or not band.pairs(n_q, n_kv)


@given(bands, sizes, sizes, st.integers(0, 23))
def test_rows_counted_from_another_first_see_the_same_keys(band: Band, n_q: int, n_kv: int, first: int) -> None:
    assert torch.equal(reference.visible(band.from_row(first), n_q, n_kv), reference.visible(band, first + n_q, n_kv)[first:])


@given(sides, sides, st.sampled_from(ALIGNMENTS), sizes, sizes)
def test_trimming_drops_exactly_the_sides_that_hide_nothing(
    left: int | None, right: int | None, alignment: Any, n_q: int, n_kv: int
) -> None:
    band = Band(left=left, right=right, diagonal=diagonal_of(alignment, n_q, n_kv))
    found = band.trimmed(n_q, n_kv)
    assert torch.equal(reference.visible(found, n_q, n_kv), reference.visible(band, n_q, n_kv))
    for name, kept in (("left", found.left), ("right", found.right)):
        alone = Band(**{name: kept}, diagonal=band.diagonal)
        assert kept is None or alone.pairs(n_q, n_kv) < n_q * n_kv


@given(sides, sides, st.booleans(), st.sampled_from(ALIGNMENTS), sizes, sizes)
def test_the_features_of_a_band_have_that_band(
    left: int | None, right: int | None, alibi: bool, alignment: Any, n_q: int, n_kv: int
) -> None:
    band = Band(left=left, right=right, diagonal=diagonal_of(alignment, n_q, n_kv))
    features = Features.within(band, alibi=alibi)
    assert features.causal == (right == 0)
    found = features.band(n_q, n_kv)
    assert (found.left, found.right) == (left, right)
    assert found == band or not (band.bounded or alibi)
