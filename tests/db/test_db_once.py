"""A run that is saved twice, by a writer that couldn't know that it had been saved, is there once."""

from dataclasses import replace
from pathlib import Path

import db_samples as samples
from sqlalchemy import make_url

from flashtune.db.server import Server
from flashtune.db.store import Store


def test_the_very_same_run_is_kept_once_and_any_other_is_kept(tmp_path: Path) -> None:
    access = Server(make_url(f"sqlite:///{tmp_path}/server.db"), writable=True)
    access.open()
    first = samples.numbered(1, 0)
    others = [
        replace(first, provenance=replace(first.provenance, created_at="2026-11-21T10:00:01+00:00")),
        replace(first, outcomes=first.outcomes[:-1]),
        replace(first, outcomes=tuple(reversed(first.outcomes))),
        replace(first, baseline=None),
        samples.numbered(1, 3),
    ]
    for store in (Store.open(tmp_path / "x.sqlite", writable=True), Store(access, writable=True)):
        for result in (first, *others, first, *others, *samples.FIXTURE_RESULTS, *samples.FIXTURE_RESULTS):
            store.save(result, once=True)
        assert store.results() == [first, *others, *samples.FIXTURE_RESULTS]
        store.save(first)
        assert len(store.results()) == 3 + len(others) + 1


def test_a_run_that_was_saved_before_its_last_trials_is_completed(tmp_path: Path) -> None:
    """As a search saves its winner before other providers are timed."""
    whole = samples.numbered(1, 0)
    assert whole.baseline is not None
    before = replace(whole, outcomes=whole.outcomes[:-1], baseline=None)
    with Store.open(tmp_path / "x.sqlite", writable=True) as store:
        for result in (samples.numbered(1, 3), before, replace(before, baseline=whole.baseline), whole, whole):
            store.save(result, once=True)
        assert store.results() == [samples.numbered(1, 3), whole]
