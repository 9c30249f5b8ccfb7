"""benchmarks/give_way.py: which rows other races speak against, and what they say."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from flashtune.core.config import Value
from flashtune.core.results import Measurement, Outcome, SearchResult
from flashtune.core.target import find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import give_way
from race_twins import is_rendered
from race_work import of_changed


@pytest.fixture(scope="module")
def row() -> SearchResult:
    """A shipped row whose race tried both units."""
    with Store.open(shipped_path(), writable=False) as store:
        rows = store.results(gpu="h100", d=80)
    return next(r for r in rows if {give_way.value_of("column_unit", o) for o in r.outcomes} == {16, 32} and r.problem.direction == "fwd")


def raced(row: SearchResult, times: Callable[[Value], float], gpu: str = "h100") -> SearchResult:
    """The same race with other times, by the unit."""
    outcomes = [replace(o, measurement=Measurement.predicted(times(o.config["column_unit"])), rank=None) for o in row.outcomes]
    return replace(row, gpu=gpu, outcomes=tuple(outcomes))


def only(row: SearchResult, unit: int) -> SearchResult:
    return replace(row, outcomes=tuple(o for o in row.outcomes if o.config["column_unit"] == unit))


@pytest.mark.parametrize(("us", "gives_way"), [(90.0, True), (98.0, False), (110.0, False)])
def test_a_row_gives_way_to_what_it_never_tried_where_that_was_faster_by_more_than_gpus_differ(
    row: SearchResult, us: float, gives_way: bool
) -> None:
    old, other = only(raced(row, lambda _: 100.0, "h200"), 32), raced(row, lambda unit: us if unit == 16 else 100.0)
    gone = list(give_way.leaving([old, other], "h200", "h100", "column_unit"))
    assert [result.gpu for result, _ in gone] == ["h200"] * gives_way
    # One that tried both keeps its own opinion, and another problem's race says nothing.
    assert not list(give_way.leaving([raced(row, lambda _: 100.0, "h200"), other], "h200", "h100", "column_unit"))
    elsewhere = replace(other, problem=replace(other.problem, n_q=32768, n_kv=32768))
    assert not list(give_way.leaving([old, elsewhere], "h200", "h100", "column_unit"))


def test_a_row_whose_text_has_changed_gives_way_to_a_later_one_or_to_another_gpus(row: SearchResult) -> None:
    def stale(result: SearchResult) -> SearchResult:
        def changed(outcome: Outcome) -> Outcome:
            return replace(outcome, template_hash="0" * len(outcome.template_hash))

        return replace(result, outcomes=tuple(map(changed, result.outcomes)))

    assert is_rendered(row) and not is_rendered(stale(row))
    theirs = replace(row, gpu="h200")
    for results, gone in (
        ([stale(theirs), theirs], ["h200"]),
        ([stale(theirs), row], ["h200"]),
        ([stale(row), row, theirs], ["h100"]),
        ([stale(theirs)], []),
    ):
        assert [result.gpu for result, _ in give_way.leaving(results, "h200", "h100", "column_unit")] == gone
    [(problem, racing)] = of_changed([stale(row), theirs], find_target("h100"), most=2)
    assert problem == row.problem and not callable(racing) and 1 <= len(racing) <= 2
    assert racing[0].config == row.outcomes[0].config


def test_what_a_value_is_worth_is_said_by_pass_and_head_size(row: SearchResult) -> None:
    results = [raced(row, lambda unit, share=share: share if unit == 16 else 1.0) for share in (0.5, 1.0, 2.0)]  # type: ignore[misc]
    assert list(give_way.worth(results, "column_unit")) == ["fwd d=80 d_v=80 column_unit=16: 3 races, median 1.000, 0.500 to 2.000"]
    assert not list(give_way.worth([only(row, 32)], "column_unit"))


def test_every_shipped_row_is_of_a_text_that_is_rendered_today() -> None:
    with Store.open(shipped_path(), writable=False) as store:
        assert not [result.problem.label() for result in store.results() if not is_rendered(result)]
