"""Which row of a database is the best of its key, and how rows are filtered and ordered."""

import math
from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pytest

from flashtune.core.problems.problem import Features
from flashtune.core.records.results import Fate
from flashtune.db.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "best.sqlite", writable=True)


KEY = samples.PROBLEM.key("h200")


def best_id(store: Store) -> str | None:
    record = store.best(KEY)
    assert store.records() == ([record] if record else [])
    return record.outcome.variant_id if record else None


def test_rank_one_of_the_closing_race_is_a_runs_candidate(store: Store) -> None:
    store.save(samples.result(samples.outcome("fast", 90.0), samples.outcome("won", 95.0, rank=1), samples.outcome("second", 91.0, rank=2)))
    assert best_id(store) == "won"


def test_the_fastest_correct_outcome_is_the_candidate_of_a_run_without_a_race(store: Store) -> None:
    store.save(samples.result(samples.outcome("slow", 99.0), samples.outcome("broken", None), samples.outcome("fast", 90.0)))
    assert best_id(store) == "fast"


def test_ties_go_to_the_smaller_variant_id(store: Store) -> None:
    store.save(samples.result(samples.outcome("b", 90.0), samples.outcome("a", 90.0), samples.outcome("c", 90.0)))
    store.save(samples.result(samples.outcome("0", 90.0)))
    assert best_id(store) == "0"


def test_between_runs_the_lower_ratio_to_the_framework_wins_not_the_lower_time(store: Store) -> None:
    store.save(samples.result(samples.outcome("cool-gpu", 100.0), framework_us=130.0))
    store.save(samples.result(samples.outcome("hot-gpu", 120.0), framework_us=180.0))
    store.save(samples.result(samples.outcome("idle-gpu", 80.0), framework_us=90.0))
    assert best_id(store) == "hot-gpu"


def test_a_measured_run_beats_every_prediction(store: Store) -> None:
    store.save(samples.result(samples.outcome("measured", 500.0), framework_us=100.0, created_at="2026-01-01T00:00:00+00:00"))
    store.save(
        samples.result(samples.outcome("predicted", 1.0, source="predicted"), framework_us=None, created_at="2026-11-01T00:00:00+00:00")
    )
    assert best_id(store) == "measured"


def test_a_run_without_the_frameworks_time_comes_after_those_with_it(store: Store) -> None:
    store.save(samples.result(samples.outcome("interrupted", 10.0), framework_us=None))
    assert best_id(store) == "interrupted"
    store.save(samples.result(samples.outcome("complete", 100.0), framework_us=50.0))
    assert best_id(store) == "complete"


def test_of_predictions_the_newest_run_wins_whatever_the_order_of_saving(store: Store) -> None:
    for name, created_at in (("new", "2026-11-02T00:00:00+00:00"), ("newest", "2026-11-02T03:00:00-05:00"), ("undated", "")):
        store.save(samples.result(samples.outcome(name, 50.0, source="predicted"), framework_us=None, created_at=created_at))
    assert best_id(store) == "newest"


def test_a_run_without_a_correct_outcome_has_no_best(store: Store) -> None:
    store.save(samples.result(samples.outcome("x", None), samples.outcome("y", None, fate=Fate.CORRECTNESS, max_error=math.nan)))
    assert best_id(store) is None
    assert [(outcome.fate, outcome.max_error) for outcome in store.results()[0].outcomes] == [
        (Fate.COMPILE, None),
        (Fate.CORRECTNESS, math.inf),
    ]


def test_records_are_filtered_and_in_order_of_keys(store: Store) -> None:
    for gpu in ("h200", "a100"):
        for n in (4096, 512):
            for dtype in ("fp16", "bf16"):
                store.save(samples.result(samples.outcome("v", 500.0), gpu=gpu, of=samples.problem(n, dtype=dtype)))
    keys = [(r.key.gpu, r.key.n, r.key.dtype) for r in store.records()]
    assert keys == sorted((gpu, n, dtype) for gpu in ("a100", "h200") for n in (512, 4096) for dtype in ("bf16", "fp16"))
    assert [r.key.n for r in store.records(gpu="a100", dtype="bf16", d=None)] == [512, 4096]
    assert store.records(gpu="h200", n=512, d=64, dtype="fp16", direction="fwd", d_v=64, n_q=512, gqa_ratio=4, bh_bucket=32)
    assert store.records(d=65) == []
    assert len(store.results(gpu="h200")) == 4


def test_keys_that_differ_in_any_column_are_kept_apart(store: Store) -> None:
    changes = [{"n_q": 7}, {"d": 128}, {"d_v": 128}, {"dtype": "fp16"}, {"batch": 4}, {"kv_heads": 16}, {"features": Features()}]
    for number, change in enumerate(changes):
        store.save(samples.result(samples.outcome(f"v{number}"), of=replace(samples.PROBLEM, **change)))
    assert len(store.records()) == len(changes)
    for number, change in enumerate(changes):
        found = store.best(replace(samples.PROBLEM, **change).key("h200"))
        assert found is not None and found.outcome.variant_id == f"v{number}"
    assert store.best(KEY) is None
