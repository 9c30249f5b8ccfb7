"""The store keeps everything that it is given and serves the best of it."""

import math
import os
from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashtune.core.config import Config
from flashtune.core.dtypes import DTYPES
from flashtune.core.errors import DatabaseError, FlashtuneError, InputError, NoKernelFound
from flashtune.core.problem import ALIGNMENTS, MASK_KINDS, Features, Problem
from flashtune.core.results import SOURCES, Baseline, CompileFacts, Fate, Measurement, Outcome, Provenance, SearchResult
from flashtune.db.rows import LARGEST, TEXT_LENGTH, tidy
from flashtune.db.store import Store

# --- any result -------------------------------------------------------------------------------------------------------------------

sides = st.none() | st.integers(0, 2**30)
counts = st.integers(0, LARGEST)
positive = st.floats(min_value=0, max_value=1e12, exclude_min=True)
words = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}", fullmatch=True)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,63}", fullmatch=True)
free_text = st.text(max_size=200)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    dtype = draw(st.sampled_from(DTYPES))
    kv_heads = draw(st.integers(1, 64))
    return Problem(
        batch=draw(st.integers(1, 1024)),
        heads=kv_heads * draw(st.integers(1, 64)),
        kv_heads=kv_heads,
        n_q=draw(st.integers(1, LARGEST)),
        n_kv=draw(st.integers(1, LARGEST)),
        d=draw(st.integers(1, 256)),
        d_v=draw(st.integers(1, 256)),
        dtype=dtype,
        features=Features(
            causal=draw(st.booleans()),
            alignment=draw(st.sampled_from(ALIGNMENTS)),
            window=draw(st.none() | st.tuples(sides, sides)),
            mask=draw(st.sampled_from(MASK_KINDS)),
            dropout=draw(st.booleans()),
            softcap=draw(st.booleans()),
            tf32=dtype == "fp32" and draw(st.booleans()),
            alibi=draw(st.booleans()),
        ),
    )


@st.composite
def measurements(draw: st.DrawFn, source: str = "measured") -> Measurement:
    if source == "predicted":
        return Measurement.predicted(draw(positive))
    least, q10, median, q90 = sorted(draw(st.lists(positive, min_size=4, max_size=4)))
    return Measurement(median_us=median, q10_us=q10, q90_us=q90, min_us=least, samples=draw(st.integers(1, LARGEST)))


configs = st.builds(
    Config.of,
    st.dictionaries(names, st.integers(-LARGEST, LARGEST) | st.booleans() | st.from_regex(r"[ -~é]{0,64}", fullmatch=True), max_size=6),
)
facts = st.builds(CompileFacts, registers=counts, spills=counts, shared_bytes=counts, threads=counts, tensor_core_ops=counts)


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    fate, source = draw(st.sampled_from(list(Fate))), draw(st.sampled_from(SOURCES))
    timed = fate is Fate.CORRECT and draw(st.booleans())
    finite = st.floats(0, allow_infinity=False)
    return Outcome(
        template=draw(names),
        template_hash=draw(words),
        variant_id=draw(words),
        config=draw(configs),
        fate=fate,
        source=source,
        reason=draw(free_text),
        measurement=draw(measurements(source)) if timed else None,
        facts=draw(st.none() | facts),
        max_error=draw(st.none() | (finite if fate is Fate.CORRECT else finite | st.just(math.inf))),
        finalist=draw(st.booleans()),
        rank=draw(st.none() | st.integers(1, LARGEST)) if timed else None,
    )


provenances = st.builds(
    Provenance,
    flashtune=free_text.map(lambda text: text[:64]),
    torch=free_text.map(lambda text: text[:64]),
    triton=free_text.map(lambda text: text[:64]),
    driver=free_text,
    gpu_name=free_text,
    clocks=free_text,
    command=free_text,
    seed=st.none() | st.integers(-(2**63), 2**63 - 1),
    created_at=st.just("") | st.datetimes(timezones=st.none() | st.timezones()).map(lambda time: time.isoformat()),
)
results = st.builds(
    SearchResult,
    gpu=st.sampled_from(["h200", "a100-80g", "mi300x"]) | words,
    problem=problems(),
    outcomes=st.lists(outcomes(), max_size=4).map(tuple),
    provenance=provenances,
    baseline=st.none() | st.builds(Baseline, backend=words, measurement=measurements()),
)


def tidied(result: SearchResult) -> SearchResult:
    """What the store promises to keep of the free texts."""
    texts = {
        name: tidy(getattr(result.provenance, name)) for name in ("driver", "gpu_name", "clocks", "command", "flashtune", "torch", "triton")
    }
    return replace(
        result,
        provenance=replace(result.provenance, **texts),
        outcomes=tuple(replace(outcome, reason=tidy(outcome.reason)) for outcome in result.outcomes),
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return samples.write(tmp_path_factory.mktemp("store") / "any.sqlite", ())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(result=results)
def test_any_result_comes_back_equal(shared: Path, result: SearchResult) -> None:
    key = result.problem.key(result.gpu)
    expected = tidied(result)
    with Store.open(shared, writable=True) as store:
        before = store.outcomes(key)
        store.save(result)
        assert store.outcomes(key) == before + list(expected.outcomes)
        kept = [one for one in store.results(gpu=result.gpu, n=key.n) if one.problem.key(one.gpu) == key]
        assert kept[-1] == expected
        summary = store.runs(gpu=result.gpu, n=key.n, n_q=key.n_q)[-1]
        assert (summary.key, summary.provenance, summary.trials) == (key, expected.provenance, len(result.outcomes))
        if expected.best is not None and len(kept) == 1:
            best = store.best(key)
            assert best is not None
            assert (best.outcome.measurement, best.outcome.rank) == (expected.best.measurement, expected.best.rank)
            assert (best.key, best.problem, best.baseline, best.provenance) == (key, result.problem, result.baseline, expected.provenance)


def test_printable_text_is_kept_as_it_is() -> None:
    text = "ptxas: Ünïcode 🚀 -> 'x' \"y\" `z` ; DROP TABLE trial --"
    assert tidy(text) == text


def test_unprintable_text_becomes_one_bounded_line() -> None:
    assert tidy("two\nlines\x1b[31m\u202e\ud800.") == "two lines [31m  ."
    assert len(tidy("x" * 10**6)) == TEXT_LENGTH


# --- what is best -----------------------------------------------------------------------------------------------------------------


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
    assert [outcome.max_error for outcome in store.outcomes(KEY)] == [None, math.inf]
    assert store.runs()[0].fates == {Fate.COMPILE: 1, Fate.CORRECTNESS: 1}


def test_records_are_filtered_and_in_order_of_keys(store: Store) -> None:
    for gpu in ("h200", "a100"):
        for n in (4096, 512):
            for dtype in ("fp16", "bf16"):
                store.save(samples.result(samples.outcome("v"), gpu=gpu, of=samples.problem(n, dtype=dtype)))
    keys = [(r.key.gpu, r.key.n, r.key.dtype) for r in store.records()]
    assert keys == sorted((gpu, n, dtype) for gpu in ("a100", "h200") for n in (512, 4096) for dtype in ("bf16", "fp16"))
    assert [r.key.n for r in store.records(gpu="a100", dtype="bf16", d=None)] == [512, 4096]
    assert store.records(gpu="h200", n=512, d=64, dtype="fp16", direction="fwd", d_v=64, n_q=512, gqa_ratio=4, bh_bucket=32)
    assert store.records(d=65) == []
    assert len(store.runs(gpu="h200")) == 4


def test_keys_that_differ_in_any_column_are_kept_apart(store: Store) -> None:
    changes = [{"n_q": 7}, {"d": 128}, {"d_v": 128}, {"dtype": "fp16"}, {"batch": 4}, {"kv_heads": 16}, {"features": Features()}]
    for number, change in enumerate(changes):
        store.save(samples.result(samples.outcome(f"v{number}"), of=replace(samples.PROBLEM, **change)))
    assert len(store.records()) == len(changes)
    for number, change in enumerate(changes):
        found = store.best(replace(samples.PROBLEM, **change).key("h200"))
        assert found is not None and found.outcome.variant_id == f"v{number}"
    assert store.best(KEY) is None


@pytest.mark.parametrize(
    ("broken", "column"),
    [
        (samples.result(samples.outcome("v", 0.0)), "min_us"),
        (samples.result(samples.outcome("v", math.inf)), "min_us"),
        (samples.result(samples.outcome("v", math.nan)), "min_us"),
        (samples.result(samples.outcome("v", measurement=replace(samples.times(1.0), q10_us=2.0))), "median_us"),
        (samples.result(samples.outcome("v", source="predicted", measurement=samples.times(1.0))), "samples"),
        (samples.result(samples.outcome("v", fate=Fate.TIMEOUT)), "median_us"),
        (samples.result(samples.outcome("v", None, rank=1)), "rank"),
        (samples.result(samples.outcome("v", template="../x")), "template"),
        (samples.result(samples.outcome("v", config=Config.of(BLOCK_M=1.5))), "config"),
        (samples.result(samples.outcome("v", config=Config.of(BLOCK_M=2**40))), "config"),
        (samples.result(samples.outcome("v"), gpu="h 200"), "gpu"),
        (samples.result(samples.outcome("v"), created_at="yesterday"), "created_at"),
        (replace(samples.result(), provenance=replace(samples.PROVENANCE, seed=2**63)), "seed"),
    ],
)
def test_a_result_that_could_not_be_read_back_is_refused_and_leaves_nothing(store: Store, broken: SearchResult, column: str) -> None:
    with pytest.raises(InputError, match=column):
        store.save(broken)
    assert store.results() == []


# --- places -----------------------------------------------------------------------------------------------------------------------

STRANGE_NAMES = [
    "plain.sqlite",
    "a b.sqlite",
    "what?.sqlite",
    "a#b.sqlite",
    "100%41.sqlite",
    "Grüße-数据🚀.sqlite",
    "x&mode=memory",
    "-wal",
    "n" * 200,
]


@pytest.mark.parametrize("name", STRANGE_NAMES)
def test_any_file_name_works(tmp_path: Path, name: str) -> None:
    path = tmp_path / "new" / "odd ?#% ü" / name
    samples.write(path)
    assert [entry.name for entry in path.parent.iterdir()] == [name]
    with Store.open(str(path), writable=False) as store:
        assert tuple(store.results()) == samples.FIXTURE_RESULTS
        assert store.records()[0].origin == str(path)


def test_a_name_that_is_not_unicode_works(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe.sqlite"))
    samples.write(path)
    with Store.open(path, writable=False) as store:
        assert tuple(store.results()) == samples.FIXTURE_RESULTS


def test_sqlite_urls_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    samples.write(tmp_path / "absolute.sqlite")
    for location in (
        f"sqlite:///{tmp_path}/absolute.sqlite",
        "sqlite:///absolute.sqlite",
        "sqlite+pysqlite:///absolute.sqlite",
        "absolute.sqlite",
    ):
        with Store.open(location, writable=False) as store:
            assert len(store.records()) == 2
    with Store.open("sqlite:///sub/new.sqlite", writable=True) as store:
        store.save(samples.FIXTURE_RESULTS[0])
    assert (tmp_path / "sub" / "new.sqlite").is_file()


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    samples.write(Path("~/mine.sqlite"))
    assert (tmp_path / "mine.sqlite").is_file()


@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("", "empty path"),
        (":memory:", "lost"),
        ("sqlite://", "lost"),
        ("sqlite:///:memory:", "lost"),
        ("sqlite:///x.sqlite?mode=rwc", "plain path"),
        ("sqlite+aiosqlite:///x.sqlite", "driver"),
        ("nosuchdatabase://u:secret@host/x", "SQLAlchemy"),
        ("://", "URL"),
        ("post gres://u:secret@x", "URL"),
        ("a\0b", "NUL"),
    ],
)
@pytest.mark.parametrize("writable", [False, True])
def test_a_location_that_is_no_file_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, location: str, said: str, writable: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FlashtuneError, match=said) as caught:
        Store.open(location, writable=writable)
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_links_lead_to_the_real_file(tmp_path: Path) -> None:
    real = samples.write(tmp_path / "real" / "a.sqlite")
    link = tmp_path / "links" / "b.sqlite"
    link.parent.mkdir()
    link.symlink_to("../real/a.sqlite")
    with Store.open(link, writable=True) as store:
        store.save(samples.FIXTURE_RESULTS[0])
    assert link.is_symlink() and [entry.name for entry in link.parent.iterdir()] == ["b.sqlite"]
    with Store.open(real, writable=False) as store:
        assert len(store.results()) == 3


def test_a_link_to_nothing_is_filled_where_it_points(tmp_path: Path) -> None:
    link = tmp_path / "link.sqlite"
    link.symlink_to(tmp_path / "elsewhere" / "a.sqlite")
    with pytest.raises(DatabaseError, match="no database"):
        Store.open(link, writable=False)
    samples.write(link)
    assert link.is_symlink() and (tmp_path / "elsewhere" / "a.sqlite").is_file()


def test_an_empty_file_counts_as_a_missing_database(tmp_path: Path) -> None:
    path = tmp_path / "mktemp"
    path.touch()
    with pytest.raises(DatabaseError, match="empty"):
        Store.open(path, writable=False)
    samples.write(path)
    with Store.open(path, writable=False) as store:
        assert tuple(store.results()) == samples.FIXTURE_RESULTS


def test_a_database_removed_during_a_search_is_written_again(tmp_path: Path) -> None:
    with Store.open(tmp_path / "a.sqlite", writable=True) as store:
        (tmp_path / "a.sqlite").unlink()
        store.save(samples.FIXTURE_RESULTS[0])
        assert len(store.results()) == 1


def test_a_store_for_reading_does_not_save(tmp_path: Path) -> None:
    with Store.open(samples.write(tmp_path / "a.sqlite"), writable=False) as store, pytest.raises(DatabaseError, match="reading only"):
        store.save(samples.FIXTURE_RESULTS[0])


def test_a_store_for_reading_sees_what_others_save(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "a.sqlite")
    with Store.open(path, writable=False) as reader, Store.open(path, writable=True) as writer:
        for count in range(3, 6):
            writer.save(samples.FIXTURE_RESULTS[0])
            assert len(reader.results()) == count


# --- export -----------------------------------------------------------------------------------------------------------------------


def filled(path: Path) -> Path:
    results = [samples.numbered(writer, run) for writer in range(2) for run in range(6)]
    return samples.write(path, (*results, *samples.FIXTURE_RESULTS))


def test_an_export_of_everything_holds_everything(tmp_path: Path) -> None:
    with Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store:
        assert store.export(tmp_path / "out" / "b.sqlite", winners_only=False) == 14
        with Store.open(tmp_path / "out" / "b.sqlite", writable=False) as exported:
            assert sorted(map(repr, exported.results())) == sorted(map(repr, store.results()))
            assert [r.outcome for r in exported.records()] == [r.outcome for r in store.records()]
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["b.sqlite"]


def test_an_export_of_winners_holds_the_best_row_of_each_key_that_passes(tmp_path: Path) -> None:
    with Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store:
        assert store.export(tmp_path / "b.sqlite", winners_only=True, gpu="h200") == 3
        with Store.open(tmp_path / "b.sqlite", writable=False) as exported:
            assert exported.runs()[0].trials == 1
            own = [replace(record, origin="") for record in exported.records()]
            assert own == [replace(record, origin="") for record in store.records(gpu="h200")]


@pytest.mark.parametrize("winners_only", [True, False])
def test_an_export_of_nothing_is_refused(winners_only: bool, tmp_path: Path) -> None:
    with (
        Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store,
        pytest.raises(NoKernelFound, match="holds nothing of d 250 to export"),
    ):
        store.export(tmp_path / "b.sqlite", winners_only=winners_only, d=250)
    assert not (tmp_path / "b.sqlite").exists()


def test_equal_contents_export_to_equal_bytes_without_a_write_ahead_log(tmp_path: Path) -> None:
    with Store.open(filled(tmp_path / "a.sqlite"), writable=True) as store:
        for winners_only in (True, False):
            store.export(tmp_path / "b.sqlite", winners_only=winners_only)
            store.export(tmp_path / "c.sqlite", winners_only=winners_only)
            content = (tmp_path / "b.sqlite").read_bytes()
            assert content == (tmp_path / "c.sqlite").read_bytes()
            # Bytes 18 and 19 are 1 for a rollback journal, 2 for a write-ahead log.
            assert content[18:20] == b"\1\1"
            (tmp_path / "b.sqlite").unlink()
            (tmp_path / "c.sqlite").unlink()


def test_an_export_replaces_another_database_only_when_asked(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "b.sqlite", samples.FIXTURE_RESULTS[:1])
    before = path.read_bytes()
    with Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store:
        with pytest.raises(DatabaseError, match="exists already"):
            store.export(path, winners_only=True)
        assert path.read_bytes() == before
        store.export(path, winners_only=True, replace=True)
        with Store.open(path, writable=False) as exported:
            assert len(exported.records()) == len(store.records())


def test_an_export_never_replaces_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("a hundred words " * 20)
    with Store.open(filled(tmp_path / "a.sqlite"), writable=False) as store:
        for target in (tmp_path / "notes.txt", tmp_path, "postgresql://host/x"):
            with pytest.raises(DatabaseError):
                store.export(target, winners_only=True, replace=True)
    assert (tmp_path / "notes.txt").read_text() == "a hundred words " * 20
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.sqlite", "notes.txt"]


def test_a_database_is_never_replaced_by_its_own_export(tmp_path: Path) -> None:
    path = filled(tmp_path / "a.sqlite")
    (tmp_path / "link").symlink_to(path)
    before = path.read_bytes()
    with Store.open(path, writable=False) as store, pytest.raises(DatabaseError, match="itself"):
        store.export(tmp_path / "link", winners_only=True, replace=True)
    assert path.read_bytes() == before
