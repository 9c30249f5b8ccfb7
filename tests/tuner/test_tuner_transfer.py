"""Winners of other problems are tried first, moved to where the constraints of this one hold."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import optuna
import pytest
from planted import PLANTED_PROBLEM, Listener, planted_family, planted_plan

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Fate, Measurement, Outcome, Provenance, Source, TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.templates import families, family
from flashtune.templates.family import Constraint
from flashtune.tuner.propose.space import SearchSpace, stored, transfer_candidates
from flashtune.tuner.searching import Search

PROVENANCE = Provenance(flashtune="0", torch="0", triton="0")
A100, H200 = find_target("a100"), find_target("h200")
HOPPER = family("flash_fwd_hopper")
SHIPPED = Library.of(shipped_path()).winners()


def row(problem: Problem, config: Config, *, source: Source = "measured", template: str = "planted_right") -> TuningRecord:
    outcome = Outcome(
        template=template,
        template_hash="0",
        variant_id="0",
        config=config,
        fate=Fate.CORRECT,
        source=source,
        measurement=Measurement.predicted(10.0),
    )
    return TuningRecord(key=problem.key("a100"), problem=problem, outcome=outcome, provenance=PROVENANCE)


def choice(number: int) -> Config:
    return Config.of(CHOICE=number, BLOCK_M=1, BLOCK_N=64)


def at(n: int) -> Problem:
    return replace(PLANTED_PROBLEM, n_q=n, n_kv=n)


RIGHT = planted_family("right", 9)
SPACE = SearchSpace({RIGHT.name: RIGHT}, PLANTED_PROBLEM, A100)


def test_the_winners_of_the_nearest_rows_come_first_each_once() -> None:
    rows = [row(at(64 << octave), choice(octave)) for octave in (5, 1, 3, 4, 2)] + [row(at(128), choice(1))]
    found = transfer_candidates(SPACE, PLANTED_PROBLEM, rows, "measured")
    assert [candidate.config["CHOICE"] for candidate in found] == [1, 2, 3, 4]


def test_predictions_and_what_no_family_declares_say_nothing_to_a_search_that_measures() -> None:
    rows = [
        row(at(64), choice(1), source="predicted"),
        row(at(64), choice(99)),
        row(at(64), choice(2), template="unheard_of"),
        row(at(4096), choice(3)),
    ]
    assert [candidate.config["CHOICE"] for candidate in transfer_candidates(SPACE, PLANTED_PROBLEM, rows, "measured")] == [3]
    assert [candidate.config["CHOICE"] for candidate in transfer_candidates(SPACE, PLANTED_PROBLEM, rows, "predicted")] == [1, 3]


def test_a_config_that_breaks_a_constraint_is_moved_by_as_little_as_possible() -> None:
    odd = replace(RIGHT, constraints=(Constraint(name="odd", holds=lambda c, s, t: c.number("CHOICE") % 4 == 3, why="for this test"),))
    spec = PLANTED_PROBLEM.spec()
    assert odd.refitted(choice(3), spec, A100) == choice(3)
    assert odd.refitted(choice(6), spec, A100) == choice(7)
    assert odd.refitted(choice(0), spec, A100) == choice(3)
    none = replace(RIGHT, constraints=(Constraint(name="none", holds=lambda c, s, t: False, why="for this test"),))
    assert none.refitted(choice(0), spec, A100) is None


def test_a_config_is_moved_to_the_nearest_of_all_valid_ones() -> None:
    """By every config of the space: fewest axes changed, then fewest steps, then those changed that are declared last."""
    kind, dice = family("flash_decode"), random.Random(0)
    points = list(itertools.product(*(range(len(axis.values)) for axis in kind.axes)))
    for d, dtype in ((256, "bf16"), (200, "fp16"), (64, "fp32")):
        spec = replace(PLANTED_PROBLEM, n_q=1, d=d, d_v=d, dtype=dtype).spec()
        configs = {point: Config.of({axis.name: axis.values[i] for axis, i in zip(kind.axes, point, strict=True)}) for point in points}
        valid = [point for point in points if kind.violated(configs[point], spec, A100) is None]
        for point in dice.sample(points, 12):

            def moved(other: tuple[int, ...], start: tuple[int, ...] = point) -> tuple[object, ...]:
                changed = [place for place, (a, b) in enumerate(zip(start, other, strict=True)) if a != b]
                return len(changed), sum(abs(a - b) for a, b in zip(start, other, strict=True)), [-place for place in changed], other

            assert kind.refitted(configs[point], spec, A100) == configs[min(valid, key=moved)]


def test_winners_of_one_head_size_fit_another() -> None:
    """Winners at D = 64 and 128 break constraints at 256; those that take their place are valid and share most axes with them."""
    forwards = (record.problem for record in SHIPPED if record.problem.direction == "fwd")
    wide = next(problem for problem in forwards if problem.d == 256 and problem.features.causal)
    narrow = [record for record in SHIPPED if record.problem.d in (64, 128) and record.outcome.template == HOPPER.name]
    space = SearchSpace(families(), wide, H200)
    found = transfer_candidates(space, wide, narrow, "measured")
    assert len(found) == 4
    assert all(candidate.family.violated(candidate.config, space.spec, H200) is None for candidate in found)
    moved = {c.config for c in found} - {record.outcome.config for record in narrow}
    assert moved, "at least one was moved"
    for config in moved:
        assert any(sum(config[axis] != r.outcome.config[axis] for axis in config) <= 4 for r in narrow)


def test_the_stored_row_is_that_of_exactly_this_key() -> None:
    rows = [row(at(128), choice(1)), row(at(64), choice(2)), row(at(64), choice(3))]
    found = stored(SPACE, PLANTED_PROBLEM, rows)
    assert found is not None and found.config == choice(2)
    assert stored(SPACE, PLANTED_PROBLEM, rows[:1]) is None
    assert stored(SPACE, PLANTED_PROBLEM, [row(at(64), choice(99))]) is None


def test_the_stored_row_races_as_it_is_where_others_are_moved_to_the_problems_sizes() -> None:
    few = Problem(batch=16, heads=32, kv_heads=4, n_q=24, n_kv=4096, d=128, d_v=128, dtype="bf16")
    space = SearchSpace({HOPPER.name: HOPPER}, few, H200)
    alone = HOPPER.default(few.spec(), H200)
    own, other = (row(problem, alone, template=HOPPER.name) for problem in (few, replace(few, n_q=32)))
    known = [replace(record, key=record.problem.key("h200")) for record in (own, other)]
    found = stored(space, few, known)
    assert found is not None and found.config == alone != HOPPER.resized(alone, few, H200)
    assert [candidate.config for candidate in transfer_candidates(space, few, known[1:], "measured")] == [HOPPER.resized(alone, few, H200)]


@pytest.mark.usefixtures("quick")
def test_a_search_begins_with_what_other_searches_and_its_own_problems_found(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planted_plan((at(64), at(128)), choices=40, trials=6)
    known = row(at(64), choice(31), source="predicted")
    listener = Listener()
    save: Callable[[object], None] = lambda result: None  # noqa: E731
    storage = optuna.storages.InMemoryStorage()
    results = Search(replace(plan, known=(known,)), storage=storage, provenance=PROVENANCE, save=save, listener=listener).run()
    first, second = results
    assert first.outcomes[0].config == choice(31)
    assert first.best is not None and second.outcomes[0].config == first.best.config
