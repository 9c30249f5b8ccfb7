"""Pages of `search --plot` and `bench --plot`: whole, self-contained, and with the run that they show."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from pages import checked
from planted import PLANTED_PROBLEM
from test_cli_bench import OnTheGpu, bench
from test_cli_progress import PROVENANCE, correct

from flashtune.bench.page import Axis, Bars, Points, Series, page
from flashtune.cli import plots
from flashtune.core.records.results import Fate


def test_a_bench_is_drawn_with_its_command_gpu_versions_and_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["flashtune", "bench", "--d", "128"])
    path = tmp_path / "a.html"
    found = bench(monkeypatch, OnTheGpu.called, "--plot", str(path))
    assert found.exit_code == 0, found.output
    text = checked(path.read_text())
    assert text.count("<svg") == 2 and "NVIDIA H200" in text and "Command: flashtune bench --d 128" in text
    assert re.search(r"Versions: flashtune \S+, torch \S+", text) and re.search(r"Date: \d{4}-\d\d-\d\dT", text)
    # Whole calls of 125 and 150 us: the longest bar is whole, the other one its share.
    assert 'width="83.33%"' in text and 'width="100.0%"' in text and "math left out, too slow" in text


def test_a_search_is_drawn_by_seconds_and_families(tmp_path: Path) -> None:
    trials = [
        (1.0, correct(80.0)),
        (2.0, replace(correct(90.0), template="flash_other")),
        (3.0, replace(correct(1.0), fate=Fate.COMPILE, measurement=None)),
        (4.0, correct(40.0)),
    ]
    picture = plots._trials(PLANTED_PROBLEM, trials)
    best, *families = picture.series
    assert [(x, y) for x, y, _ in best.points] == [(1, 80), (2, 80), (2, 80), (4, 80), (4, 40), (4, 40)]
    assert {one.name: [(x, y) for x, y, _ in one.points] for one in families} == {
        "flash_fwd": [(1, 80), (4, 40)],
        "flash_other": [(2, 90)],
    }
    assert picture.note.startswith("1 trial of 4 ended without a time")
    path = tmp_path / "s.html"
    plots.write_search(path, {PLANTED_PROBLEM: trials}, [], replace(PROVENANCE, command="flashtune search <x>"), "a <GPU>")
    text = checked(path.read_text())
    assert "flashtune search &lt;x&gt;" in text and "a &lt;GPU&gt;" in text and text.count("<circle") == 3 and "flash_other" in text


@pytest.mark.parametrize("trials", [[], [(0.5, replace(correct(1.0), fate=Fate.TIMEOUT, measurement=None))], [(0.0, correct(5.0))]])
def test_a_search_of_hardly_any_trials_is_drawn_all_the_same(trials: list[object], tmp_path: Path) -> None:
    plots.write_search(tmp_path / "s.html", {PLANTED_PROBLEM: trials} if trials else {}, [], PROVENANCE, "H200")  # type: ignore[dict-item]
    checked((tmp_path / "s.html").read_text())


@pytest.mark.parametrize("command", [("bench",), ("search", "--gpu-name", "h200", "--predict")])
@pytest.mark.parametrize("name", ["a.png", "nowhere/a.html", "thesis.html"])
def test_a_page_that_cannot_be_written_is_refused_before_any_work(command: tuple[str, ...], name: str, tmp_path: Path) -> None:
    from commands import flashtune

    (tmp_path / "thesis.html").write_text("my thesis")
    found = flashtune(*command, "--d", "64", "--n", "512", "--plot", str(tmp_path / name))
    assert found.exit_code == 2 and f"--plot {tmp_path / name}" in found.stderr
    assert (tmp_path / "thesis.html").read_text() == "my thesis"


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("values", [(), (3.0,), (0.2, 0.3), (1.0, 2e6), (5.0, 5.1, 5.2)])
def test_every_value_and_tick_of_an_axis_lies_within_it(values: tuple[float, ...], log: bool) -> None:
    axis = Axis.of(values, log=log)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 12 and ticks == sorted(ticks)
    assert all(-0.01 <= axis.share(x) <= 1.01 for x in (*values, *ticks))


def test_pictures_lie_within_the_page_at_any_width() -> None:
    """Across everything is a share of the width; texts keep their size."""
    points = Points(title="p", x_label="x", y_label="y", series=[Series(name="s", points=[(0.0, 1.0, "a"), (9.0, 7.0, "b")])])
    text = checked(page("t", [points, Bars(title="b", groups=[("g", [("tuned", 1.0), ("none", 0.0)])])], "w"))
    shares = [float(x) for x in re.findall(r'(?:x|cx|x1|x2|width)="([\d.]+)%"', text)]
    assert shares and max(shares) <= 100
    assert all(x == "0" for x in re.findall(r' (?:x|cx|x1|x2|width)="([^"%]+)"', text))
