"""A search for timers is silent unless it fails, with its progress and records in a file; what predicted records are good for is said."""

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import db_samples as samples
import pytest
from click.testing import Result
from commands import flashtune

from flashtune.cli.console import log_of
from flashtune.core.records.results import TuningRecord

WORDS = (
    "search",
    "--gpu-name",
    "a100",
    "--d",
    "64",
    "--n",
    "1024",
    "--full",
    "--dtype",
    "fp16",
    "--trials",
    "2",
    "--seed",
    "3",
    "--predict",
)
UNMEASURED = "Predicted records are not used by default. To use them: dispatch.use("


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory, quick: None) -> tuple[Path, Result, str]:
    """A quiet search, what it printed, and its log."""
    folder = tmp_path_factory.mktemp("logs")
    result = flashtune(*WORDS, "--db", str(folder / "x.sqlite"), "--quiet", "--log", str(folder / "log"))
    return folder / "x.sqlite", result, (folder / "log").read_text()


def test_a_quiet_search_prints_nothing_and_logs_progress_and_records_with_their_times(searched: tuple[Path, Result, str]) -> None:
    path, result, log = searched
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    lines = log.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    assert "n1024-d64-fp16-full: " in log and " us, likely " in log and " (predicted), " in log
    assert "Best known on NVIDIA A100" in log
    assert lines[-1].endswith(f"{UNMEASURED}{str(path)!r}, unmeasured=True), or FLASHTUNE_UNMEASURED=1 in the environment.")


def test_a_quiet_search_without_a_log_still_answers_in_json_alone(searched: tuple[Path, Result, str]) -> None:
    result = flashtune(*WORDS, "--db", str(searched[0]), "--quiet", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    assert [row["source"] for row in json.loads(result.stdout)] == ["predicted"]


def test_a_search_that_fails_says_so_on_standard_error_and_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("2026-11-22T10:00:00Z before\n")
    result = flashtune(*WORDS, "--db", str(tmp_path), "--quiet", "--log", str(log))
    assert result.exit_code == 3
    assert result.stdout == "" and result.stderr.startswith(f"flashtune: {tmp_path}")
    first, *_, last = log.read_text().splitlines()
    assert first == "2026-11-22T10:00:00Z before"
    assert last.split(" ", 1)[1] == result.stderr.removeprefix("flashtune: ").rstrip("\n")


def test_a_search_that_finds_no_kernel_ends_with_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtune.cli import search

    monkeypatch.setattr(search, "run_search", lambda *_, **__: [])
    result = flashtune(*WORDS, "--quiet", "--log", str(tmp_path / "log"))
    assert (result.exit_code, result.stdout) == (5, "")
    assert "no correct kernel was found for 1 problem" in result.stderr
    assert "no correct kernel was found for 1 problem" in (tmp_path / "log").read_text()


def test_a_log_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    result = flashtune(*WORDS, "--db", str(tmp_path / "x.sqlite"), "--log", str(tmp_path / "none" / "log"))
    assert result.exit_code == 4
    assert f"{tmp_path}/none/log can't be read or written" in result.stderr
    assert not (tmp_path / "x.sqlite").exists()


def test_a_line_that_comes_in_parts_has_one_time(tmp_path: Path) -> None:
    with log_of(tmp_path / "log", clock=lambda: datetime(2026, 11, 27, 3, 0, 1, tzinfo=UTC)) as log:
        log.print("half", end="")
        log.print(" and half\nnext \x1b[31mred")
    assert (tmp_path / "log").read_text() == "2026-11-27T03:00:01Z half and half\n2026-11-27T03:00:01Z next  [31mred\n"


@pytest.mark.parametrize("sources", [("measured",), ("measured", "predicted"), ("predicted", "predicted")])
@pytest.mark.parametrize("words", [("export",), ("merge", "--out")])
def test_a_file_to_ship_says_how_many_of_its_records_are_predicted(
    words: tuple[str, ...], sources: tuple[str, ...], tmp_path: Path
) -> None:
    from test_export_hub import PLAIN, found

    results = []
    for place, source in enumerate(sources):
        result = found("flash_fwd", replace(PLAIN, n_q=64 << place, n_kv=64 << place), source=source)
        results.append(result if source == "measured" else replace(result, baseline=None))
    database, out = samples.write(tmp_path / "a.sqlite", results), str(tmp_path / "out.sqlite")
    command = ("export", out, "--db", str(database)) if words[0] == "export" else ("merge", str(database), "--out", out)
    predicted = sources.count("predicted")
    told = flashtune(*command)
    assert told.exit_code == 0, told.output
    assert (f"{predicted} of them predicted. {UNMEASURED}{out!r}, unmeasured=True)" in told.stdout) is bool(predicted)
    in_json = flashtune(*command, "--json", "--force")
    assert json.loads(in_json.stdout)["predicted"] == predicted


def test_measured_records_are_shown_without_a_word_about_predicted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashtune.cli import search

    [result] = samples.FIXTURE_RESULTS[:1]
    best = result.best
    assert best is not None
    record = TuningRecord(
        key=result.problem.key("h200"), problem=result.problem, outcome=best, provenance=result.provenance, baseline=result.baseline
    )
    for source, said in (("measured", False), ("predicted", True)):
        row = replace(record, outcome=replace(best, source=source))
        monkeypatch.setattr(search, "run_search", lambda *_, row=row, **__: [row])
        told = flashtune(*WORDS).stdout
        assert told.count(f"{UNMEASURED}unmeasured=True)") == said
        if said:
            assert told.splitlines()[-1].startswith("Predicted records are not used by default")
