"""How near the problems of two keys are: one distance for the search's first trials and for dispatch's stand-ins."""

import math
from dataclasses import replace

import pytest
from db_samples import outcome, problem, result

from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.nearness import distance, nearest
from flashtune.tuner.propose.space import record_of

HERE = problem(4096)


def apart(other: Problem, gpu: str = "h200", than: Problem = HERE) -> float:
    there, back = distance(than.key("h200"), other.key(gpu)), distance(other.key(gpu), than.key("h200"))
    assert there == back
    return there


def test_a_key_is_at_no_distance_from_itself_and_at_some_from_every_other() -> None:
    assert apart(HERE) == 0
    window = Features(causal=True, window=(1024, 0))
    others = (problem(2048), problem(4096, d=128), problem(4096, dtype="fp16"), problem(4096, features=window), problem(4096, batch=8))
    assert all(apart(other) > 0 for other in others)


@pytest.mark.parametrize(
    ("nearer", "farther"),
    [
        (problem(2048, batch=4), problem(512, batch=16)),
        (problem(4096, dtype="fp16"), problem(4096, dtype="fp8")),
        (problem(4096, dtype="fp16"), problem(2048)),
        (problem(2048, batch=4), problem(2048, batch=1)),
        (problem(1024), problem(4096, d=128, d_v=128)),
        (problem(4096, features=Features(causal=True, softcap=True)), problem(4096, features=Features(softcap=True))),
        (problem(4096, n_q=2048), problem(4096, n_q=1)),
    ],
    ids=lambda p: p.label(),
)
def test_what_changes_the_winner_less_is_nearer(nearer: Problem, farther: Problem) -> None:
    assert 0 < apart(nearer) < apart(farther) < math.inf


def test_windows_are_as_near_as_their_widths() -> None:
    wide, wider, none = (problem(4096, features=Features(causal=True, window=(w, 0) if w else None)) for w in (1024, 2048, 0))
    assert 0 < apart(wider, than=wide) < apart(none, than=wide)


def test_only_gpus_of_one_architecture_are_near() -> None:
    assert 0 < apart(HERE, gpu="h100") < math.inf
    assert apart(HERE, gpu="a100") == math.inf
    assert apart(HERE, gpu="unheard_of") == math.inf


def test_the_nearest_come_first_and_equals_stay_in_their_order() -> None:
    rows = [record_of(result(outcome(f"{n:016x}"), of=problem(n), gpu=gpu)) for n, gpu in ((512, "h200"), (2048, "h200"), (4096, "a100"))]
    rows += [replace(rows[1], origin="later")]  # type: ignore[type-var]
    found = nearest(HERE.key("h200"), [row for row in rows if row is not None])
    assert [row for _, row in found] == [rows[1], rows[3], rows[0]]
