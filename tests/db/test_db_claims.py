"""Claims that can't be true give a record no precedence: dates ahead of now, versions that don't exist, findings about others' records."""

import itertools
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import db_samples as samples
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune import dispatch
from flashtune.core.records.results import REQUALIFIED, Ending, Outcome, SearchResult, TuningRecord
from flashtune.db import library, preference
from flashtune.db.library import Library
from flashtune.db.merging import merge
from flashtune.db.preference import by_preference, latest, refutation

KEY = samples.PROBLEM.key("h200")


def ago(**words: float) -> str:
    """A date that long before now."""
    return (datetime.now(UTC) - timedelta(**words)).isoformat(timespec="seconds")


def ahead(**words: float) -> str:
    return ago(**{name: -value for name, value in words.items()})


def run(variant: str, time_us: float | None, *, ended_by: str = "", **provenance: str) -> SearchResult:
    """A run of 120 us of PyTorch's; it failed without a time."""
    found = samples.result(samples.outcome(variant, time_us), framework_us=None if time_us is None else 120.0)
    given = replace(samples.PROVENANCE, **{"created_at": ago(days=30), **provenance})
    return replace(found, provenance=given, ending=Ending(reason=ended_by) if ended_by else None)


def record_of(result: SearchResult, **changes: object) -> TuningRecord:
    fixed = {"key": KEY, "problem": result.problem, "outcome": result.outcomes[0], "provenance": result.provenance}
    return TuningRecord(**fixed, baseline=result.baseline, ending=result.ending, **changes)  # type: ignore[arg-type]


impossible_versions = st.tuples(st.integers(3, 9999) | st.just(9999), st.integers(0, 9999)).map(lambda parts: f"{parts[0]}.{parts[1]}.0")
dates_ahead = st.timedeltas(timedelta(minutes=6), timedelta(days=300_000)).map(lambda ahead: (datetime.now(UTC) + ahead).isoformat())


@given(
    st.lists(st.tuples(st.sampled_from(["", "2.6.0", "2.9.1", "2.11.0", "2.13.0"]), st.floats(10.0, 100.0)), min_size=1, max_size=5),
    st.floats(101.0, 400.0),
    impossible_versions,
    st.booleans(),
)
def test_no_claimed_version_brings_a_slower_record_before_an_honest_one(
    honest: list[tuple[str, float]], slower_us: float, version: str, torch: bool
) -> None:
    found = [record_of(run(f"honest{n}", time_us, torch=one)) for n, (one, time_us) in enumerate(honest)]
    named = {"torch": version} if torch else {"torch": "", "triton": version}
    claimed = record_of(run("claimed", slower_us, **named))
    unversioned = [one for one in found if not one.provenance.torch and not torch]
    ordered = by_preference([claimed, *found])
    # Honest records without a version have a Triton that exists.
    assert unversioned or ordered[-1] is claimed
    assert [one for one in ordered if one is not claimed] == by_preference(found)


@given(dates_ahead, st.sampled_from(["", REQUALIFIED]))
def test_no_date_ahead_of_now_brings_a_record_before_another(date: str, ended_by: str) -> None:
    honest = [record_of(run(f"{days}", 100.0, created_at=ago(days=days))) for days in (0.0, 5.0, 500.0)]
    claimed = record_of(run("claimed", 110.0, created_at=date, ended_by=ended_by))
    assert by_preference([claimed, *honest])[-1] is claimed
    # Among predictions and untimed runs the newest goes first.
    for changes in ({"source": "predicted"}, {}):
        untimed = [replace(one, baseline=None, outcome=replace(one.outcome, **changes)) for one in (claimed, *honest)]  # type: ignore[arg-type]
        assert [one.outcome.variant_id for one in by_preference(untimed)] == ["0.0", "5.0", "500.0", "claimed"]


@given(dates_ahead)
def test_no_date_ahead_of_now_refutes_a_record_or_saves_one(date: str) -> None:
    wrong = preference.Finding(gpu="h200", variant_id="v", found_at=date, reason="correctness: off")
    for created_at in ("", ago(days=3), ago(seconds=1)):
        assert not refutation(latest([wrong]), "h200", "v", record_of(run("v", 100.0, created_at=created_at)))
    honest = replace(wrong, found_at=ago(days=1))
    assert refutation(latest([wrong, honest]), "h200", "v", record_of(run("v", 100.0, created_at=ago(days=2))))
    assert refutation(latest([honest]), "h200", "v", record_of(run("v", 100.0, created_at=date)))


def test_on_a_machine_whose_clock_is_behind_dates_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preference.time, "time", lambda: 0.0)
    old, new = (record_of(run(name, 100.0, created_at=ago(days=days))) for name, days in (("old", 9), ("new", 2)))
    found = preference.Finding(gpu="h200", variant_id="v", found_at=ago(days=5), reason="compile: no")
    assert refutation(latest([found]), "h200", "v", old) and not refutation(latest([found]), "h200", "v", new)


def test_clocks_of_hosts_may_differ_by_minutes() -> None:
    newest = record_of(replace(run("newest", 100.0, created_at=ahead(minutes=2)), baseline=None))
    older = record_of(replace(run("older", 100.0), baseline=None))
    assert by_preference([older, newest])[0] is newest


@pytest.mark.parametrize(
    "claim", [{"torch": "9999.0"}, {"triton": "9999.0"}, {"torch": "3.0.0"}, {"created_at": "2999-01-01T00:00:00+00:00"}]
)
def test_a_claim_serves_and_is_kept_by_a_merge_no_sooner(tmp_path: Path, claim: dict[str, str], own_database: Path) -> None:
    claim = {"torch": "2.10.0", "ended_by": REQUALIFIED if "created_at" in claim else "", **claim}
    paths = [
        samples.write(tmp_path / "claimed.sqlite", (run("claimed", 255.0, **claim),)),
        samples.write(tmp_path / "honest.sqlite", (run("honest", 80.0, torch="2.10.0"),)),
    ]
    for number, order in enumerate(itertools.permutations(paths)):
        merge(order, tmp_path / f"{number}.sqlite")
        [kept] = Library.of(tmp_path / f"{number}.sqlite").records()
        assert kept.outcome.variant_id == "honest"
    samples.write(own_database, (run("claimed", 255.0, **claim), run("honest", 80.0, torch="2.10.0")))
    best = Library.default().best(KEY)
    assert best is not None and best.outcome.variant_id == "honest"


def test_a_newer_torch_than_the_newest_known_counts_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    newer, older = (record_of(run(name, us, torch=torch)) for name, us, torch in (("newer", 100.0, "3.1.0"), ("older", 50.0, "2.11.0")))
    assert by_preference([newer, older])[0] is older
    monkeypatch.setattr(preference, "_installed", lambda package: (3, 1))
    assert by_preference([newer, older])[0] is newer


# --- findings ---------------------------------------------------------------------------------------------------------------------


def failed(variant: str) -> SearchResult:
    """A run that timed a record again and found its kernel wrong."""
    wrong: Outcome = samples.outcome(variant, None)
    return replace(run(variant, None, ended_by=REQUALIFIED, created_at=ago(days=1)), outcomes=(wrong,))


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = samples.write(tmp_path / "shipped.sqlite", (run("kernel", 80.0),))
    monkeypatch.setattr(library, "shipped_path", lambda: path)
    return path


@pytest.mark.parametrize("named", ["use", "environment"])
def test_findings_of_a_named_database_refute_its_own_records_alone(
    named: str, tmp_path: Path, shipped: Path, own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(run("kernel", 70.0), problem=samples.problem(2048))
    path = samples.write(tmp_path / "theirs.sqlite", (failed("kernel"), other))
    if named == "environment":
        monkeypatch.setenv("FLASHTUNE_DB", str(path))
    found = Library.default() if named == "environment" else Library.over([path])
    refuted = {(record.origin, bool(record.refuted)) for record in found.winners()}
    assert refuted == {("shipped", False), (str(path), True)}
    assert refutation(found.findings, "h200", "kernel") == "", "nor a config that no record leads to"


def test_the_users_own_findings_refute_the_records_of_every_layer(tmp_path: Path, shipped: Path, own_database: Path) -> None:
    path = samples.write(tmp_path / "theirs.sqlite", (run("kernel", 70.0),))
    samples.write(own_database, (failed("kernel"),))
    found = Library.over([path])
    assert {(record.origin, bool(record.refuted)) for record in found.winners()} == {("shipped", True), (str(path), True)}
    assert "correctness" not in refutation(found.findings, "h200", "kernel") != ""


def test_findings_of_one_named_database_refute_no_records_of_another(tmp_path: Path, shipped: Path, own_database: Path) -> None:
    shipped.unlink()
    paths = [samples.write(tmp_path / "a.sqlite", (failed("kernel"),)), samples.write(tmp_path / "b.sqlite", (run("kernel", 70.0),))]
    for order in itertools.permutations(paths):
        assert not any(record.refuted for record in Library.over(order).winners())


def test_findings_of_a_named_database_change_nothing_of_what_serves_a_call(tmp_path: Path, own_database: Path) -> None:
    [record] = Library.of(library.shipped_path()).records(
        gpu="h200", n=4096, d=128, dtype="bf16", direction="fwd", features="{}", gqa_ratio=1
    )[:1]
    before = dispatch.explain_problem(record.problem, "h200")
    wrong = replace(samples.outcome(record.outcome.variant_id, None), template=record.outcome.template, config=record.outcome.config)
    theirs = replace(failed("x"), outcomes=(wrong,), problem=record.problem)
    with dispatch.use(samples.write(tmp_path / "theirs.sqlite", (theirs,))):
        within = dispatch.explain_problem(record.problem, "h200")
    assert before.kind == within.kind == "exact" and before.config == within.config
