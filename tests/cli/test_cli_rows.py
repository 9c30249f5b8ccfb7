"""Rows as the commands show them: nothing predicted as measured, nothing unchecked as correct, nothing disturbed as quiet."""

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import db_samples as samples
import pytest
from click.testing import CliRunner
from commands import flashtune
from rich.console import Console

from flashtune.cli.functions import with_functions
from flashtune.cli.main import main
from flashtune.cli.records import doubts_of, print_records
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import Conditions, TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.db.store import Store
from flashtune.templates import family
from flashtune.templates.mods.known import NAMED
from flashtune.tuner import machine
from flashtune.tuner.publish import winners
from flashtune.tuner.publish.winners import variant_for
from flashtune.tuner.replies import Checked


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finalist raced while the GPU was at its power limit, and a prediction that nothing checked; both can be served."""
    config = family("flash_fwd").default(samples.PROBLEM.spec(), find_target("h200"))
    results = [replace(one, outcomes=tuple(replace(outcome, config=config) for outcome in one.outcomes)) for one in samples.RACED_RESULTS]
    return samples.write(tmp_path_factory.mktemp("rows") / "a.sqlite", tuple(results))


def test_json_holds_whole_calls_trials_fates_and_the_conditions_of_the_race(database: Path) -> None:
    raced, unchecked = json.loads(flashtune("show", "--db", str(database), "--json").stdout)
    assert (raced["fate"], raced["trial_us"], raced["call_us"], raced["framework_call_us"]) == ("correct", 81.0, 85.5, 130.25)
    assert raced["provenance"]["conditions"] == {
        "samples": 60,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 3201,
        "power_w": 640.5,
        "temperature_c": 61,
        "throttled_by": "SwPowerCap",
        "other_processes": 0,
    }
    assert (unchecked["fate"], unchecked["call_us"], unchecked["framework_call_us"]) == ("unchecked", None, None)
    assert unchecked["provenance"]["conditions"] is None


def test_a_predicted_time_is_a_range_and_a_measured_one_is_not(database: Path) -> None:
    measured, predicted = json.loads(flashtune("show", "--db", str(database), "--json").stdout)
    low, about, high = predicted["likely_us"]
    assert measured["likely_us"] is None and predicted["median_us"] < low < about < high
    [row] = [line for line in flashtune("show", "--db", str(database)).stdout.splitlines() if " ~" in line]
    assert f"~{about:.0f} ({low:.0f}-{high:.0f})" in row
    assert f"~{predicted['tflops'] * predicted['median_us'] / about:.0f} " in row


def test_plain_rows_say_what_was_not_checked_and_what_was_disturbed(database: Path) -> None:
    shown = flashtune("show", "--db", str(database)).stdout
    assert "unchecked: predicted, without a check of its results" in shown
    assert "power-limited: the card's power limit" in shown and "throttled" not in shown
    wide = flashtune("show", "--db", str(database), "--wide").stdout
    assert "predicted, unchecked" in wide and "measured, power-limited" in wide


@pytest.mark.parametrize(
    ("throttled_by", "others", "said"),
    [
        (None, None, ()),
        ("", 0, ()),
        ("SwPowerCap", 0, ("power-limited",)),
        ("SwPowerCap", 2, ("power-limited", "shared")),
        ("SwThermalSlowdown", 0, ("throttled",)),
        ("HwSlowdown,SwPowerCap", 0, ("throttled",)),
    ],
)
def test_a_cards_power_limit_is_told_from_other_reasons_for_lower_clocks(
    database: Path, throttled_by: str | None, others: int | None, said: tuple[str, ...]
) -> None:
    record = next(iter(Library.of(database).records()))
    conditions = Conditions(samples=3, throttled_by=throttled_by, other_processes=others)
    assert doubts_of(replace(record, provenance=replace(record.provenance, conditions=conditions)), None) == said


def test_the_source_of_a_kernel_is_shown_by_its_recorded_id_and_by_the_one_it_has_today(database: Path) -> None:
    record = next(iter(Library.of(database).records()))
    today = variant_for(record).id
    assert today != record.outcome.variant_id
    shown = [flashtune("show", "--db", str(database), "--kernel", one) for one in (record.outcome.variant_id, today)]
    assert [one.exit_code for one in shown] == [0, 0] and shown[0].stdout == shown[1].stdout and today in shown[0].stdout


def test_the_kernel_in_the_help_of_show_is_one_of_the_package() -> None:
    [example] = re.findall(r"--kernel ([0-9a-f]{16})", flashtune("show", "--help").stdout)
    assert f"Variant: {example}" in flashtune("show", "--db", str(shipped_path()), "--kernel", example).stdout


@pytest.mark.parametrize("columns", [80, 200])
def test_every_predicted_row_says_so_however_narrow_the_terminal(database: Path, columns: int) -> None:
    lines = on_a_terminal(columns, "show", "--db", str(database))
    rows = [line.rstrip() for line in lines if " ~" in line]
    assert rows and all(re.search(r" predicted(, unchecked)?$", row) for row in rows)
    assert all("unchecked" in row for row in rows) == (columns > 80)


@pytest.mark.parametrize("columns", [48, 60, 72, 80])
def test_no_two_rows_of_a_narrow_terminal_look_alike(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    records = Library.of(shipped_path()).records(d=128)
    told: list[str] = []
    for gpu in {record.key.gpu for record in records}:
        mine = [record for record in records if record.key.gpu == gpu]
        out = Console(file=io.StringIO(), width=columns, highlight=False, markup=False)
        print_records(mine, out=out)
        lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert max(map(len, lines[: 2 * len(mine)])) <= columns
        # A row begins with N, and goes on in lines of one cell.
        rule = next(place for place, line in enumerate(lines) if set(line.strip()) == {"─"})
        rows: list[str] = []
        for line in lines[rule + 1 :]:
            cells = line.split()
            if re.match(r"n\d", line):
                rows.append("")
            elif len(cells) != 1 or not rows:
                break
            rows[-1] += cells[0] + "".join(cell for cell in cells[1:] if re.fullmatch(r"\d+x\d+", cell))
        assert len(rows) == len(set(rows)) == len(mine), gpu
        told += rows
    assert len(told) == len(records)


@pytest.mark.parametrize("shape", ["--json", "plain"])
def test_verify_that_checked_nothing_does_not_succeed(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU no interpreter runs a Hopper kernel."""
    monkeypatch.setattr(machine, "local_gpu", lambda: None)
    hopper = next(record for record in Library.of(shipped_path()).records(d=64, n=512) if record.outcome.template == "flash_fwd_hopper")
    path = samples.write(tmp_path / "a.sqlite", (samples.result(hopper.outcome, gpu="h200", of=hopper.problem, framework_us=None),))
    words = ["verify", "--db", str(path), *(["--json"] if shape == "--json" else [])]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 4, result.output
    assert "none of 1 record could be checked" in result.stderr
    if shape == "--json":
        assert json.loads(result.stdout)["skipped"] == 1
    assert flashtune(*words, "--d", "32").exit_code == 5


@pytest.mark.parametrize("sample", [None, 2, 50])
def test_verify_counts_what_it_checks_and_folds_what_it_skips(
    sample: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without a GPU, where most records are of kernels that no interpreter runs."""
    config = family("flash_fwd").default(samples.PROBLEM.spec(), find_target("h200"))
    hopper = next(record for record in Library.of(shipped_path()).records(d=64, n=512) if record.outcome.template == "flash_fwd_hopper")
    able = [
        samples.result(replace(samples.outcome(f"{n:016x}"), config=config), gpu="h200", of=samples.problem(n), framework_us=None)
        for n in (64, 128, 192)
    ]
    others = [samples.result(hopper.outcome, gpu="h200", of=replace(hopper.problem, n_q=n, n_kv=n), framework_us=None) for n in (512, 640)]
    path = samples.write(tmp_path / "a.sqlite", (*able, *others))
    asked: list[Problem] = []

    def checked(records: Sequence[TuningRecord], **_: object) -> Iterator[tuple[TuningRecord, Checked]]:
        for record in records:
            asked.append(record.problem)
            yield record, Checked(error=0.5)

    monkeypatch.setattr(machine, "local_gpu", lambda: None)
    monkeypatch.setattr(winners, "recheck", checked)
    result = flashtune("verify", "--db", str(path), *(["--sample", str(sample)] if sample else []))
    count = min(sample or 3, 3)
    assert result.exit_code == 0 and len(asked) == count == len({problem.n_kv for problem in asked} & {64, 128, 192})
    first, *lines = result.stderr.splitlines()
    assert first.startswith(f"checking {count} records in Triton's interpreter; 2 skipped: no interpreter runs flash_fwd_hopper")
    assert ("1 left out by --sample" in first) == (count < 3)
    assert [line.split("]")[0].split(",")[0] for line in lines] == [f"[{n}/{count}" for n in range(1, count)] + [f"[{count}/{count}"]
    assert all(", about " in line for line in lines[:-1]) and f"{count} correct, 0 wrong, 2 skipped" in result.stdout


@pytest.mark.usefixtures("quick")
def test_a_prediction_of_a_family_that_no_interpreter_runs_is_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "local_gpu", lambda: None)
    where = ["--db", str(tmp_path / "a.sqlite")]
    words = ["--gpu-name", "h200", "--d", "64", "--n", "1024", "--causal", "--dtype", "fp16", "--softcap", "30", *where]
    searched = flashtune("search", *words, "--template", "flash_fwd_hopper", "--trials", "1", "--seed", "1", "--json")
    assert searched.exit_code == 0, searched.output
    [row] = json.loads(searched.stdout)
    assert (row["source"], row["fate"], row["unservable"]) == ("predicted", "unchecked", None)
    explained = flashtune("explain", *words)
    assert "neither measured nor checked" in " ".join(explained.stdout.split()), explained.output


def on_a_terminal(columns: int, *words: str) -> list[str]:
    """The lines that the command writes to a terminal so many columns wide."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (50, columns))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "FORCE_COLOR")}
    command = [sys.executable, "-m", "flashtune.cli.main", *words]
    process = subprocess.Popen(command, stdout=theirs, env={**environment, "TERM": "xterm", "NO_COLOR": "1"}, stdin=subprocess.DEVNULL)
    os.close(theirs)
    told = b""
    # A terminal whose other side has ended gives an error.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 1 << 16):
            told += part
    os.close(ours)
    assert process.wait(600) == 0
    return re.sub(r"\x1b\[[0-9;]*m", "", told.decode()).splitlines()


def test_hardly_any_row_is_more_than_one_line_of_a_terminal() -> None:
    columns = 80
    lines = on_a_terminal(columns, "show", "--db", str(shipped_path()))
    records = Library.of(shipped_path()).records()
    assert max(len(line) for line in lines) <= columns
    filled = [line for line in lines if line.strip()]
    reasons = [record.provenance.conditions.throttled_by for record in records if record.provenance.conditions]
    limited = reasons.count("SwPowerCap")
    throttled = sum(bool(reason) for reason in reasons) - limited
    # For each GPU its name, the columns' names and a rule stand before the rows, and at the end what power-limited means, if any row is.
    explained = ("< NAME: ", "power-limited: ", "show --wide has")
    legend = next((place for place, line in enumerate(filled) if line.startswith(explained)), len(filled))
    names = {record.key.gpu for record in records}
    measured = [line for line in filled[:legend] if line.strip() not in names and "TFLOP/s" not in line and "problem " not in line]
    measured = [line for line in measured if "──" not in line]
    assert len(filled[:legend]) == len(measured) + 3 * len(names)
    # A label that has no room goes on below, as most over pages.
    paged = sum(bool(record.problem.features.page) for record in records)
    rest = [place for place, line in enumerate(measured) if len(line.split()) == 1]
    labels = [
        line.split()[0] + (measured[place + 1].strip() if place + 1 in rest else "")
        for place, line in enumerate(measured)
        if place not in rest
    ]
    measured = [line for place, line in enumerate(measured) if place not in rest]
    assert len(measured) == len(records) and len(rest) - paged < 0.01 * len(records)
    # A power limit is no doubt.
    assert all(line.rstrip().endswith((" measured", " throttled")) for line in measured)
    assert len([line for line in measured if line.rstrip().endswith(" throttled")]) == throttled
    assert any(line.startswith("power-limited: ") for line in filled) == bool(limited)
    # Whole: labels that are cut look alike.
    shown = {(label, time) for label, line in zip(labels, measured, strict=True) for time in line.split()}
    assert all((record.problem.label(), f"{record.median_us:.1f}") in shown for record in records)


def test_wide_rows_hold_the_config_and_are_broken_by_the_terminal_alone() -> None:
    record = Library.of(shipped_path()).records(gpu="h200", d=64, n=4096)[0]
    lines = on_a_terminal(80, "show", "--db", str(shipped_path()), "--gpu-name", "h200", "--d", "64", "--n", "4096", "--wide")
    [row] = [line for line in lines if record.problem.label() + " " in line and f"{record.median_us:.1f}" in line]
    assert all(
        f"{axis}={value}" in row or axis in ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages") for axis, value in record.outcome.config.items
    )


def test_rows_of_each_gpu_have_a_table_of_their_own(tmp_path: Path) -> None:
    with Store.open(shipped_path(), writable=False) as shipped, Store.open(tmp_path / "two.sqlite", writable=True) as two:
        own = (result for result in shipped.results() if result.gpu == "h200" and result.baseline is not None)
        result = next(result for result in own if len(result.problem.label()) < 20)
        for gpu in ("h200", "h100"):
            two.save(replace(result, gpu=gpu))
    lines = [line.strip() for line in on_a_terminal(80, "show", "--db", str(tmp_path / "two.sqlite")) if line.strip()]
    assert [line for line in lines if line in ("h100", "h200")] == ["h100", "h200"]
    rows = [line for line in lines if line.startswith(result.problem.label()[:12])]
    assert len(rows) == 2 and rows[0] == rows[1] and "…" not in rows[0].removeprefix(result.problem.label()[:12])[1:]


@pytest.mark.parametrize("column", ["problem", "us", "TFLOP/s", "as calls"])
def test_records_are_shown_in_the_order_of_a_column_and_as_many_as_asked(column: str) -> None:
    where = ("show", "--db", str(shipped_path()), "--gpu-name", "h200", "--d", "80")
    every = json.loads(flashtune(*where, "--json").stdout)
    rows = json.loads(flashtune(*where, "--sort", column.upper(), "--json").stdout)
    fields = {"us": "median_us", "call us": "call_us", "TFLOP/s": "tflops"}
    ratios = {"vs PyTorch": ("framework_us", "median_us"), "as calls": ("framework_call_us", "call_us")}

    def value(row: dict[str, float]) -> float | None:
        if column in ratios:
            theirs, ours = (row[name] for name in ratios[column])
            return theirs / ours if theirs and ours else None
        return row[fields[column]]

    assert sorted(row["variant"] for row in rows) == sorted(row["variant"] for row in every) and len(rows) > 4
    if column != "problem":
        # Times are rounded in --json.
        found = [value(row) for row in rows]
        known = [x for x in found if x is not None]
        assert found[: len(known)] == known, "records without a value come last"
        pairs = pairwise(known)
        assert all((a <= b * 1.01) if column in fields and column != "TFLOP/s" else (b <= a * 1.01) for a, b in pairs)
    assert json.loads(flashtune(*where, "--sort", column, "--limit", "3", "--json").stdout) == rows[:3]
    shown = flashtune(*where, "--sort", column, "--limit", "3", COLUMNS="200").stdout
    assert f"3 of {len(rows)} records" in shown and "as calls: the same for whole calls" in shown


def test_functions_are_named_beside_their_hash_where_their_file_is_given(tmp_path: Path) -> None:
    file = Path(__file__).parents[2] / "examples" / "masks.py"
    of = with_functions(replace(samples.PROBLEM, features=Features()), None, f"{file}:dilated")
    path = samples.write(tmp_path / "a.sqlite", (samples.result(samples.outcome("0" * 16), of=of, framework_us=None),))
    label = of.label()
    assert f"mods-{of.features.mods}" in label
    NAMED.clear()
    plain = flashtune("show", "--db", str(path), COLUMNS="200").stdout
    named = flashtune("show", "--db", str(path), "--mask-mod", f"{file}:dilated", COLUMNS="200").stdout
    assert label in plain and "dilated" not in plain and f"{label} (dilated)" in named


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--n", "3000", "--heads", "32", "--kv-heads", "4"),
            r"No record for N=3000\. Using the kernel measured at N=2048 \([\d.]+ us there; your",
        ),
        (("--n", "3000"), r"at N=2048, 8 query heads per key head \([\d.]+ us there; your call is larger\)\.$"),
        (("--n", "4096"), ""),
    ],
)
def test_explain_says_where_the_kernel_of_a_near_record_was_measured(words: tuple[str, ...], said: str) -> None:
    where = ("explain", "--gpu-name", "h200", "--d", "128", "--causal", "--db", str(shipped_path()))
    found = flashtune(*where, *words, COLUMNS="200").stdout
    assert (re.search(said, found, re.MULTILINE) is not None) if said else "No record for" not in found
