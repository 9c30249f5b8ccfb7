"""Databases from strangers, and odd paths, before every command that reads one: one line and an exit code, nothing forged, nothing run."""

import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import db_samples as samples
import pytest
from click.testing import CliRunner
from commands import flashtune
from test_db_hostile import plain

from flashtune.cli.main import main
from flashtune.core.gpu.target import find_target
from flashtune.db.store import Store
from flashtune.templates import family


def edited(path: Path, statement: str, *values: object) -> Path:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement, values)
    return path


FAMILY = family("flash_fwd")
SERVED = FAMILY.default(samples.PROBLEM.spec(), find_target("h200"))


def readers(path: Path, out: Path) -> list[tuple[str, ...]]:
    """Every command that reads a database."""
    explain = ("explain", "--gpu-name", "h200", "--d", "64", "--n", "512", "--db", str(path))
    commands = [("show",), ("show", "--json"), ("verify",), ("export", str(out / "e.sqlite")), ("generate", "--out", str(out / "g"))]
    return [*((*words, "--db", str(path)) for words in commands), explain]


@pytest.mark.parametrize("version", ["0000", "0004", "9999", "000", "abcd"])
def test_a_schema_that_no_release_wrote_is_one_line_in_every_command(tmp_path: Path, version: str) -> None:
    path = edited(plain(tmp_path / "a.sqlite", samples.FIXTURE_RESULTS[0]), "UPDATE flashtune_schema SET version_num = ?", version)
    search = ("search", "--gpu-name", "a100", "--d", "64", "--n", "512", "--trials", "1", "--db", str(path))
    for words in [*readers(path, tmp_path), search]:
        result = flashtune(*words)
        assert result.exit_code == 3, (words, result.output)
        assert len(result.stderr.strip().splitlines()) == 1, result.stderr
        assert version in result.stderr and result.stdout == ""


MARKUP = ("[/red]", "[link=https://example.invalid]here[/link]", "[bold red]measured[/]", ":boom:", "[on white]")


@pytest.mark.parametrize("text", MARKUP)
def test_markup_in_a_value_is_shown_as_it_is(tmp_path: Path, text: str) -> None:
    path = plain(tmp_path / "a.sqlite", samples.result(samples.outcome("aaaa000000000001", config=SERVED.replace(BLOCK_M=text))))
    for words in (("show", "--wide"), ("generate", "--out", str(tmp_path / "g"))):
        result = flashtune(*words, "--db", str(path))
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert text in " ".join(result.output.split()), words


@pytest.mark.parametrize("name", ["[red].sqlite", "[link=x].sqlite", "a\x1b[31mred.sqlite", "two\nlines.sqlite", "reversed\u202e.sqlite"])
def test_an_odd_path_neither_breaks_nor_colours_the_output(tmp_path: Path, name: str) -> None:
    path = plain(tmp_path / "plain.sqlite", samples.result(samples.outcome("aaaa000000000001", config=SERVED)))
    path = path.rename(tmp_path / name)
    missing = tmp_path / f"missing{name}"
    for words in (("show", "--db", str(path)), ("doctor",), ("export", str(tmp_path / f"out{name}"), "--db", str(path))):
        result = CliRunner(env={"FLASHTUNE_OWN_DB": str(path)}).invoke(main, list(words))
        assert result.exit_code in (0, 4), (words, result.output, result.exception)
        assert "\x1b" not in result.output and "\u202e" not in result.output
    assert not name.startswith("[") or name in result.output.replace("\n", "")
    result = flashtune("show", "--db", str(missing))
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1 and result.stderr.strip().isprintable()


@pytest.mark.parametrize("time_us", [1e-300, 5e-324, 1e-4])
def test_a_time_that_no_clock_can_tell_is_refused(tmp_path: Path, time_us: float) -> None:
    path = plain(tmp_path / "a.sqlite", samples.FIXTURE_RESULTS[0])
    edited(path, "UPDATE trial SET median_us = ?1, q10_us = ?1, q90_us = ?1, min_us = ?1 WHERE median_us IS NOT NULL", time_us)
    for words in (("show",), ("show", "--json"), ("verify",)):
        result = flashtune(*words, "--db", str(path))
        assert result.exit_code == 3 and "nanosecond" in result.stderr, result.output
        assert len(result.stderr.strip().splitlines()) == 1


OUTSIDE = {
    "an unknown template": replace(samples.outcome("aaaa000000000001"), template="flash_of_a_stranger"),
    "an axis that isn't declared": samples.outcome("aaaa000000000001", config=SERVED.replace(evil=1)),
    "a value outside the space": samples.outcome("aaaa000000000001", config=SERVED.replace(BLOCK_M=12345)),
}


@pytest.mark.parametrize("case", OUTSIDE)
def test_rows_that_cannot_be_served_are_marked_where_they_are_listed_and_left_out_of_exports(tmp_path: Path, case: str) -> None:
    served = samples.result(samples.outcome("bbbb000000000001", config=SERVED), of=samples.problem(4096))
    path = plain(tmp_path / "a.sqlite", samples.result(OUTSIDE[case]), served)
    shown = flashtune("show", "--db", str(path))
    assert "can't be used" in shown.stdout
    told = json.loads(flashtune("show", "--db", str(path), "--json").stdout)
    stranger = next(row for row in told if row["variant"] == "aaaa000000000001")
    assert stranger["unservable"]
    out = tmp_path / "out.sqlite"
    exported = flashtune("export", str(out), "--db", str(path))
    assert "left out: h200 n1024-d64-bf16-causal-gqa4: " in exported.stderr
    assert exported.exit_code == 0
    assert [row["variant"] for row in json.loads(flashtune("show", "--db", str(out), "--json").stdout)] == ["bbbb000000000001"]
    everything = tmp_path / "all.sqlite"
    assert flashtune("export", str(everything), "--db", str(path), "--all-trials").exit_code == 0
    with Store.open(everything, writable=False) as store:
        assert len(store.results()) == 2


def test_where_no_row_can_be_served_explain_names_the_one_that_was_asked_for(tmp_path: Path) -> None:
    refused = [replace(OUTSIDE["a value outside the space"], variant_id=f"aaaa00000000{n:04}") for n in (512, 1024, 4096)]
    path = plain(
        tmp_path / "a.sqlite", *(samples.result(one, of=samples.problem(n)) for one, n in zip(refused, (512, 1024, 4096), strict=True))
    )
    for n in ("512", "1024", "4096"):
        words = ("--heads", "16", "--kv-heads", "4", "--batch", "2", "--d", "64", "--n", n, "--causal", "--gpu-name", "h200")
        result = flashtune("explain", *words, "--db", str(path))
        assert result.exit_code == 0, result.output
        assert f"(gpu h200, n {n}, d 64, bf16): BLOCK_M=12345" in " ".join(result.stdout.split())


def test_links_in_a_circle_are_no_database_to_merge(tmp_path: Path) -> None:
    circle = tmp_path / "circle.sqlite"
    circle.symlink_to(circle)
    result = flashtune("merge", str(circle), "--out", str(tmp_path / "out.sqlite"))
    assert result.exit_code == 4 and "symbolic links" in result.stderr, result.exception
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_folder_that_is_gone_is_one_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    before = os.getcwd()
    os.chdir(gone)
    gone.rmdir()
    try:
        result = flashtune("show", "--db", "a.sqlite")
    finally:
        os.chdir(before)
    assert result.exit_code == 4 and "working directory" in result.stderr, result.exception
    assert len(result.stderr.strip().splitlines()) == 1
