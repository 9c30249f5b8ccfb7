"""Databases merged into one lose no best row, and what ships beside weights says its licence and its hash."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import db_samples as samples
import pytest
from commands import flashtune

from flashtune import dispatch
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config, Variant
from flashtune.core.problems.problem import Direction
from flashtune.core.records.results import Baseline, Ending, Fate, Outcome, SearchResult, TuningRecord
from flashtune.core.records.versions import versions_in
from flashtune.core.system.errors import DatabaseError, InputError, NoKernelFound
from flashtune.db.card import card_path, check_card, checked_licence, write_card
from flashtune.db.library import Library
from flashtune.db.merging import add, best_of_each, merge
from flashtune.db.store import Store
from flashtune.templates import BITS, family, unservable, without_kernel

POINTERS = family("flash_fwd")
CONFIG = POINTERS.default(samples.PROBLEM.spec(), find_target("h200"))


def one(variant: str, n: int, time_us: float, framework_us: float | None = 120.0, **changes: Any) -> SearchResult:
    return samples.result(
        samples.outcome(variant, time_us, **{"config": CONFIG, **changes}), framework_us=framework_us, of=samples.problem(n)
    )


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Each has one best row, and rows that others have better, measured where another's is predicted, or have, too."""
    same = one("everywhere", 512, 50.0)
    contents = {
        "a": (one("a1", 1024, 60.0), one("a2", 2048, 90.0), one("a4", 8192, 1.0, None, source="predicted"), same),
        # Faster by the clock, on a machine whose framework was faster, too.
        "b": (one("b1", 1024, 50.0, 80.0), one("b2", 2048, 70.0), one("b3", 4096, 100.0, None), same),
        "c": (
            one("c1", 1024, 110.0),
            one("c3", 4096, 119.0),
            one("c4", 8192, 300.0, None),
            one("c9", 16384, 9.0, None, source="predicted"),
        ),
    }
    return [samples.write(tmp_path / f"{name}.sqlite", results) for name, results in contents.items()]


def best_of(paths: list[Path]) -> list[TuningRecord]:
    from flashtune.db.library import Layer

    return [replace(record, origin="") for record in Library([Layer(location=path) for path in paths]).records()]


def test_a_merge_of_three_databases_loses_no_best_row_and_says_what_gave_way(three: list[Path], tmp_path: Path) -> None:
    merged = merge(three, tmp_path / "all.sqlite")
    written = Library.of(tmp_path / "all.sqlite")
    assert [r.outcome.variant_id for r in written.records()] == ["everywhere", "a1", "b2", "c3", "c4", "c9"]
    assert [replace(record, origin="") for record in written.records()] == best_of(three), "with provenance and the framework's time"
    assert len(written.winners()) == len(merged.kept) == 6
    assert sorted((lost.outcome.variant_id, best.outcome.variant_id) for lost, best in merged.lost) == [
        ("a2", "b2"), ("a4", "c4"), ("b1", "a1"), ("b3", "c3"), ("c1", "a1"),
    ]  # fmt: skip
    assert {Path(lost.origin).stem for lost, _ in merged.lost} == {"a", "b", "c"}


def test_a_merged_row_keeps_its_fallback_and_how_its_search_ended(tmp_path: Path) -> None:
    first, running = (replace(CONFIG, items=(*CONFIG.items, ("maximum", value))) for value in ("first", "running"))
    searched = samples.result(samples.outcome("settles", 100.0, config=first, rank=1), samples.outcome("runs", 110.0, config=running))
    path = samples.write(tmp_path / "a.sqlite", (replace(searched, ending=Ending(reason="gain", regret=0.01)),))
    merge([path], tmp_path / "b.sqlite")
    [record], [merged] = (Library.of(one).records() for one in (path, tmp_path / "b.sqlite"))
    assert record.fallback is not None and record.ending is not None
    assert replace(merged, origin="") == replace(record, origin="")


def test_the_order_of_the_databases_does_not_matter(three: list[Path], tmp_path: Path) -> None:
    merge(three, tmp_path / "x.sqlite")
    merge(three[::-1], tmp_path / "y.sqlite")
    assert (tmp_path / "x.sqlite").read_bytes() == (tmp_path / "y.sqlite").read_bytes()


def test_a_merge_never_writes_over_what_it_reads_nor_nothing(three: list[Path], tmp_path: Path) -> None:
    before = three[0].read_bytes()
    with pytest.raises(DatabaseError, match="one of the databases to merge"):
        merge(three, three[0], replace=True)
    with pytest.raises(NoKernelFound, match="no record that could be used"):
        merge(three, tmp_path / "none.sqlite", passed_over=lambda record: True)
    merge(three[:1], tmp_path / "there.sqlite")
    with pytest.raises(DatabaseError, match=r"there\.sqlite"):
        merge(three, tmp_path / "there.sqlite")
    assert three[0].read_bytes() == before and not (tmp_path / "none.sqlite").exists()


TRAINED = samples.problem(4096, batch=8, kv_heads=16, direction="bwd")
"""A backward problem, of which flash_bwd_hopper's kernels write other bits each time."""


def trained(
    variant: str, time_us: float, framework_us: float | None = None, *, n: int = 4096, repeats: bool, **changes: Any
) -> SearchResult:
    """A search of TRAINED, of n keys, among kernels of the one family or the other."""
    chosen, problem = family("flash_bwd_hopper_split" if repeats else "flash_bwd_hopper"), replace(TRAINED, n_q=n, n_kv=n)
    config = chosen.default(problem.spec(), find_target("h200"))
    found = samples.outcome(variant, time_us, **{"template": chosen.name, "config": config, **changes})
    return samples.result(found, framework_us=framework_us, of=problem)


def names(path: Path) -> list[str]:
    return [record.outcome.variant_id for record in Library.of(path).winners()]


def lost_to(done: Any) -> list[tuple[str, str]]:
    assert done.exit_code == 0, done.output
    return [(one["lost"]["variant_id"], one["kept"]["variant_id"]) for one in json.loads(done.stdout)["lost"]]


def serving(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """The families that serve TRAINED by this database alone: in a usual call, and in one that wants the same bits every time."""
    found = []
    for asked in (False, True):
        # As torch.use_deterministic_algorithms does, which imports its compiler.
        monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda asked=asked: asked)
        with dispatch.use(path, alone=True):
            found.append(dispatch.explain_problem(TRAINED, "h200").template)
    return found


def test_what_ships_beside_weights_keeps_the_row_that_deterministic_calls_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = trained("fast", 2000.0, 2400.0, repeats=False), trained("same_bits", 2600.0, repeats=True)
    both, other = samples.write(tmp_path / "both.sqlite", results), samples.write(tmp_path / "other.sqlite", (one("o", 512, 50.0),))
    merged, exported = tmp_path / "merged.sqlite", tmp_path / "exported.sqlite"
    done = flashtune("merge", str(both), str(other), "--out", str(merged), "--json", "--licence", "Apache-2.0")
    assert lost_to(done) == []
    assert (names(merged), json.loads(done.stdout)["rows"]) == (["o", "fast", "same_bits"], 3)
    assert json.loads(card_path(merged).read_text())["rows"] == 3
    sent = flashtune("export", str(exported), "--db", str(both), "--json", "--licence", "Apache-2.0")
    assert sent.exit_code == 0, sent.output
    assert (names(exported), json.loads(sent.stdout)["rows"]) == (["fast", "same_bits"], 2)
    assert json.loads(card_path(exported).read_text())["rows"] == 2
    for path in (both, merged, exported):
        assert serving(path, monkeypatch) == ["flash_bwd_hopper", "flash_bwd_hopper_split"]


def test_a_merge_of_three_databases_loses_no_best_row_of_either_kind(tmp_path: Path) -> None:
    same = trained("everywhere", 2700.0, 2500.0, repeats=True)
    contents = (
        # Of 1024 keys the repeatable kernel is the fastest one, so that it serves all calls.
        (trained("fast_a", 2000.0, 2400.0, repeats=False), same, trained("one", 300.0, 450.0, n=1024, repeats=True)),
        (trained("fast_b", 1900.0, 2400.0, repeats=False), trained("alone_b", 700.0, repeats=True), same),
        (
            trained("guessed", 1.0, repeats=False, source="predicted"),
            trained("two", 310.0, 400.0, n=1024, repeats=False),
            trained("three", 300.0, n=1024, repeats=True),
            trained("only", 900.0, n=2048, repeats=True),
        ),
    )
    paths = [samples.write(tmp_path / f"{number}.sqlite", results) for number, results in enumerate(contents)]
    merged = merge(paths, tmp_path / "all.sqlite", passed_over=unservable, bits=BITS)
    assert names(tmp_path / "all.sqlite") == ["one", "only", "fast_b", "everywhere"]
    assert [record.outcome.variant_id for record in merged.kept] == names(tmp_path / "all.sqlite")
    assert sorted((lost.outcome.variant_id, best.outcome.variant_id) for lost, best in merged.lost) == [
        ("alone_b", "everywhere"), ("fast_a", "fast_b"), ("guessed", "fast_b"), ("three", "one"), ("two", "one"),
    ]  # fmt: skip
    merge(paths[::-1], tmp_path / "reversed.sqlite", passed_over=unservable, bits=BITS)
    assert (tmp_path / "reversed.sqlite").read_bytes() == (tmp_path / "all.sqlite").read_bytes()
    merge([tmp_path / "all.sqlite"], tmp_path / "again.sqlite", passed_over=unservable, bits=BITS)
    assert (tmp_path / "again.sqlite").read_bytes() == (tmp_path / "all.sqlite").read_bytes()


def test_a_row_that_raced_for_the_same_bits_drives_out_none_that_usual_calls_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no framework could race, the newer row is preferred, whatever the slower kernels gained by being alone."""
    results = (
        trained("fast", 2000.0, repeats=False),
        replace(trained("same_bits", 2600.0, repeats=True), provenance=replace(samples.PROVENANCE, created_at="2026-11-23T10:00:00+00:00")),
    )
    both = samples.write(tmp_path / "both.sqlite", results)
    merge([both], tmp_path / "merged.sqlite", passed_over=unservable, bits=BITS)
    with Store.open(both, writable=False) as store:
        store.export(tmp_path / "exported.sqlite", winners_only=True, passed_over=unservable, bits=BITS)
    for name in ("both", "merged", "exported"):
        assert serving(tmp_path / f"{name}.sqlite", monkeypatch) == ["flash_bwd_hopper", "flash_bwd_hopper_split"]


@pytest.mark.parametrize("direction", ["fwd", "bwd"])
def test_of_layers_those_rows_are_checked_and_compiled_that_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direction: Direction
) -> None:
    """Records that `verify` and `generate` read. In the upper layer no framework raced."""
    above, below = one("above", 4096, 100.0, None), one("below", 4096, 100.0, 200.0)
    if direction == "bwd":
        above, below = trained("above", 2600.0, repeats=True), trained("below", 2500.0, 2600.0, repeats=True)
    stack = [samples.write(tmp_path / f"{name}.sqlite", (result,)) for name, result in (("above", above), ("below", below))]
    served: list[str | None] = []
    for asked in (False, True):
        monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda asked=asked: asked)
        with dispatch.use(stack[1], alone=True), dispatch.use(stack[0]):
            served.append(dispatch.explain_problem(above.problem, "h200").origin)
    read = Library.over(stack, alone=True).records(bits=BITS)
    assert [record.outcome.variant_id for record in read] == (["above"] if direction == "fwd" else ["below", "above"])
    assert list(dict.fromkeys(served)) == [record.origin for record in read]


def test_rows_that_cannot_be_served_give_way_to_the_next_of_their_kind(tmp_path: Path) -> None:
    gone = Config.of(GONE=1)
    results = (
        trained("gone_fast", 700.0, 2400.0, repeats=False, config=gone),
        trained("fast", 2000.0, 2400.0, repeats=False),
        trained("gone_same", 700.0, 2400.0, repeats=True, config=gone),
        trained("same_bits", 2600.0, repeats=True),
        trained("gone_stranger", 700.0, repeats=True, template="flash_gone"),
        trained("gone_lone", 100.0, n=1024, repeats=True, config=gone),
        trained("lone", 300.0, n=1024, repeats=False),
    )
    done = flashtune("merge", str(samples.write(tmp_path / "a.sqlite", results)), "--out", str(tmp_path / "b.sqlite"), "--json")
    assert sorted(lost_to(done)) == [
        ("gone_fast", "fast"), ("gone_lone", "lone"), ("gone_same", "same_bits"), ("gone_stranger", "fast"),
    ]  # fmt: skip
    assert names(tmp_path / "b.sqlite") == ["lone", "fast", "same_bits"]
    assert json.loads(done.stdout)["left_out"] == []


def test_the_command_reports_what_lost_and_what_cannot_be_served(three: list[Path], tmp_path: Path) -> None:
    strange = samples.write(
        tmp_path / "strange.sqlite", (one("s1", 1024, 5.0, config=Config.of(GONE=1)), one("s2", 32768, 5000.0, config=Config.of(GONE=1)))
    )
    out = tmp_path / "model" / "tuned.sqlite"
    out.parent.mkdir()
    words = ["merge", *map(str, [*three, strange]), "--out", str(out)]
    done = flashtune(*words, "--json", "--licence", "Apache-2.0")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["rows"], found["bytes"]) == (6, out.stat().st_size)
    assert found["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert [(x["variant_id"], x["why"] is not None) for x in found["left_out"]] == [("s2", True)]
    assert {x["lost"]["variant_id"] for x in found["lost"]} == {"a2", "a4", "b1", "b3", "c1", "s1"}
    assert {x["kept"]["variant_id"] for x in found["lost"]} == {"a1", "b2", "c3", "c4"}
    taken = flashtune(*words)
    assert taken.exit_code == 3 and "replace it with --force" in taken.stderr
    stays = flashtune(*words, "--force")
    assert stays.exit_code == 2 and "tuned.sqlite.json is the metadata file of another database" in stays.stderr, (
        "what is written would be refused"
    )
    again = flashtune(*words, "--force", "--licence", "Apache-2.0")
    assert again.exit_code == 0 and "lost: h200 n2048-d64-bf16-causal-gqa4: 1.33x" in again.stdout and "to 1.71x" in again.stdout
    assert "left out: h200 n32768" in again.stderr
    assert flashtune(*words, "--licence", "Apache-2.0").exit_code == 3
    alone = flashtune("merge", str(three[0]), "--out", str(tmp_path / "alone.sqlite"))
    assert alone.stdout.startswith("4 records of 1 database in ")


def test_an_export_beside_weights_has_a_card_with_licence_and_hash_that_use_checks(three: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "weights" / "tuned.sqlite"
    out.parent.mkdir()
    done = flashtune("export", str(out), "--db", str(three[0]), "--licence", "Apache-2.0", "--json")
    assert done.exit_code == 0, done.output
    card = json.loads(card_path(out).read_text())
    assert json.loads(done.stdout)["sha256"] == card["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
    assert (card["licence"], card["file"], card["rows"], card["gpus"]) == ("Apache-2.0", "tuned.sqlite", 4, ["h200"])
    assert (card["triton"], card["driver"], card["gpu_name"]) == (["3.6.0"], ["575.57"], ["NVIDIA H200"])
    dispatch.use(out).remove()
    again = tmp_path / "again.sqlite"
    flashtune("export", str(again), "--db", str(three[0]))
    assert again.read_bytes() == out.read_bytes(), "equal contents have equal hashes"
    assert not card_path(again).exists()
    out.write_bytes(out.read_bytes() + b"\0")
    dispatch.reload()
    forced = flashtune("export", str(out), "--db", str(three[1]), "--force")
    assert forced.exit_code == 2 and "give --licence for a new one" in forced.stderr
    with pytest.raises(DatabaseError, match=r"isn't the file that .* beside it names"):
        dispatch.use(out)
    card_path(out).write_text("[]")
    with pytest.raises(DatabaseError, match="no metadata file of a tuned database"):
        check_card(out)


@pytest.mark.parametrize("text", ["", "  ", "two\nlines", "x" * 300])
def test_what_names_no_licence_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="names no licence"):
        checked_licence(text)


def test_adding_keeps_what_the_file_has_of_other_keys_and_gpus_and_the_best_of_the_same(tmp_path: Path) -> None:
    path = tmp_path / "tuned.sqlite"
    others = [replace(one(f"old{n}", n, 100.0), gpu=gpu) for n in (512, 1024) for gpu in ("h200", "a100")]
    samples.write(path, (*others, one("guess", 2048, 1.0, None, source="predicted"), one("good", 4096, 70.0)))
    new = Library.of(
        samples.write(
            tmp_path / "new.sqlite", (one("fast", 1024, 60.0), one("late", 2048, 90.0), one("slow", 4096, 100.0), one("first", 8192, 300.0))
        )
    ).winners()
    for _ in range(2):
        merged = add(new, path, passed_over=unservable, bits=BITS)
        found = {(record.key.gpu, record.key.n): record.outcome.variant_id for record in Library.of(path).winners()}
        assert found == {
            ("a100", 512): "old512", ("a100", 1024): "old1024", ("h200", 512): "old512", ("h200", 1024): "fast", ("h200", 2048): "late",
            ("h200", 4096): "good", ("h200", 8192): "first",
        }  # fmt: skip
        assert {record.outcome.variant_id for record in best_of_each(merged.kept).values()} == set(found.values())


def test_adding_keeps_what_another_version_serves(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "tuned.sqlite", (one("newer", 512, 50.0, template="flash_next"), one("x", 1024, 50.0)))
    before = Library.of(path).winners()
    merged = add([], path, passed_over=unservable, bits=BITS)
    assert Library.of(path).winners() == before and len(merged.passed_over) == 1


@pytest.mark.parametrize(
    "damage", ["cut off", "text", "another application's", "another than its metadata file names", "being written", "folder"]
)
def test_a_file_that_cant_be_added_to_is_one_sentence_and_stays_as_it_is(damage: str, tmp_path: Path) -> None:
    path = samples.write(tmp_path / "tuned.sqlite", (one("x", 1024, 50.0),))
    records = Library.of(path).winners()
    content = path.read_bytes()
    if damage == "cut off":
        path.write_bytes(content[: len(content) // 2 - 100])
    elif damage == "text":
        path.write_text("what a person wrote")
    elif damage == "another application's":
        path.write_bytes(content[:68] + b"abcd" + content[72:])
    elif damage == "another than its metadata file names":
        write_card(path, "MIT", records)
        samples.write(path, (one("y", 2048, 50.0),))
    elif damage == "being written":
        path.with_name("tuned.sqlite-journal").write_bytes(b"\0" * 512)
    else:
        path.unlink()
        path.mkdir()
    before = path.is_file() and path.read_bytes()
    with pytest.raises(DatabaseError) as caught:
        add(records, path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert (path.is_file() and path.read_bytes()) == before


@pytest.mark.parametrize("made", [False, True])
def test_adding_to_a_missing_or_empty_file_writes_it(made: bool, tmp_path: Path) -> None:
    records = Library.of(samples.write(tmp_path / "new.sqlite", (one("x", 1024, 50.0),))).winners()
    path = tmp_path / "tuned.sqlite"
    if made:
        path.touch()
    add(records, path)
    assert len(Library.of(path).winners()) == 1


def judged_wrong(us: float | None, **versions: str) -> Outcome:
    """An outcome of a library, with a time where it is right."""
    id = Variant(template="fa4", spec=samples.problem().spec(), config=Config.of()).id
    words: dict[str, Any] = {} if us is not None else {"fate": Fate.CORRECTNESS, "reason": "n1x77: output is off by 9 tolerances"}
    return Outcome.of_provider("fa4", id, None if us is None else samples.times(us), versions=Config.of(versions), **words)


@pytest.mark.parametrize("way", ["merge", "merge, the other first", "export", "add"])
def test_a_wrong_provider_stays_wrong_though_a_run_in_which_it_was_right_is_kept(tmp_path: Path, way: str) -> None:
    fast = samples.result(samples.outcome("fast", 50.0, rank=1), judged_wrong(20.0, torch="2.11.0"))
    slow = samples.result(samples.outcome("slow", 90.0, rank=1), judged_wrong(None, torch="2.12.0"))
    alone = samples.result(judged_wrong(None, torch="2.13.0"), framework_us=None)
    a, b = samples.write(tmp_path / "a.sqlite", (fast,)), samples.write(tmp_path / "b.sqlite", (slow, alone))
    out = tmp_path / "out.sqlite"
    if way == "export":
        both = samples.write(tmp_path / "both.sqlite", (fast, slow, alone))
        with Store.open(both, writable=False) as store:
            store.export(out, winners_only=True)
    elif way == "add":
        add(Library.of(a).winners(), samples.write(out, (slow, alone)))
    else:
        merge([a, b] if way == "merge" else [b, a], out)
    # Once more, so that what was carried over is carried on.
    merge([out], tmp_path / "again.sqlite")
    for path in (out, tmp_path / "again.sqlite"):
        library = Library.of(path)
        [record] = library.winners()
        assert record.outcome.variant_id == "fast" and record.provider_times() == {"fa4": 20.0}
        [found] = library.wrong.values()
        assert {one.versions["torch"] for one in found if one.versions} == {"2.12.0", "2.13.0"}
        assert {one.reason for one in found} == {"n1x77: output is off by 9 tolerances"}


def test_a_database_of_before_has_no_versions_of_providers_but_those_of_its_runs(tmp_path: Path) -> None:
    path = samples.write(tmp_path / "a.sqlite", (samples.result(samples.outcome("a", 50.0), judged_wrong(20.0)),))
    [record] = Library.of(path).winners()
    [one] = record.providers
    assert versions_in(record, one) == Config.of(torch="2.11.0", triton="3.6.0", driver="575.57")
    with pytest.raises(InputError, match="is fa4, whose config holds versions alone"), Store.open(path, writable=True) as store:
        store.save(samples.result(judged_wrong(20.0, BLOCK_M="64")))


def test_records_of_heads_that_only_others_take_are_merged_and_exported(tmp_path: Path) -> None:
    large = replace(samples.problem(512), d=512, d_v=512)
    variant = Variant(template="ffpa", spec=large.spec(), config=Config.of()).id
    timed = Outcome.of_provider("ffpa", variant, samples.times(50.0))
    baseline = Baseline(backend="efficient", measurement=samples.times(200.0), call_us=200.0)
    found = SearchResult(gpu="h200", problem=large, outcomes=(timed,), provenance=samples.PROVENANCE, baseline=baseline)
    path = samples.write(tmp_path / "a.sqlite", (found,))
    [record] = Library.of(path).winners()
    assert unservable(record) is None and without_kernel(record) == "ffpa runs its calls, and there is no kernel of it"
    merged, exported = tmp_path / "merged.sqlite", tmp_path / "exported.sqlite"
    for words in (("merge", str(path), "--out", str(merged)), ("export", str(exported), "--db", str(path))):
        done = flashtune(*words)
        assert done.exit_code == 0, done.output
    for written in (merged, exported):
        assert [one.outcome.template for one in Library.of(written).winners()] == ["ffpa"]
    done = flashtune("generate", str(tmp_path / "kernels"), "--db", str(path))
    assert done.exit_code != 0 and "Traceback" not in done.output
