"""The figures page's numbers agree with the committed results and the shipped records."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import readme
from benchmarks.cases.archive import folder
from flashtune.core.results import TuningRecord
from flashtune.db.library import Library, shipped_path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "README.md"
CALLS = folder() / "2026-11-22-h200-calls"


@cache
def shipped() -> tuple[TuningRecord, ...]:
    return tuple(Library.of(shipped_path()).records(gpu="h200"))


def one_line(path: Path) -> str:
    return " ".join(path.read_text().split())


def results(part: str) -> list[dict[str, Any]]:
    """A part's rows, of its run and of the one that measured what there was no time for."""
    files = sorted(CALLS.glob(f"{part}.json")) + (sorted(CALLS.glob("models_gemma2.json")) if part == "models" else [])
    return [row for file in files for row in json.loads(file.read_text())[part]]


def test_figures_of_calls_are_those_of_the_committed_runs() -> None:
    grid = results("grid")
    prefill = [one["speedup"] for one in grid if one["cell"] != "decoding"]
    decoding = [one["speedup"] for one in grid if one["cell"] == "decoding"]
    mean = math.exp(sum(map(math.log, prefill)) / len(prefill))
    said = one_line(PAGE)
    assert (
        f"runs at {min(prefill):.2f} to {max(prefill):.2f} times torch's rate in prefill (geometric mean {mean:.2f} of {len(prefill)}); "
        f"decoding at {min(decoding):.2f} to {max(decoding):.2f}"
    ) in said
    for figure, words in (("tokens_ratio", "takes {} times as long as with torch's"), ("new_tokens_ratio", "cuDNN {} times as long")):
        ratios = [one[figure] for one in results("models") if figure in one]
        assert words.format(f"{min(ratios):.2f} to {max(ratios):.2f}") in said
    plain = [one["ratio"] for one in results("host") if one["case"] in ("plain", "causal", "gqa")]
    assert f"A call costs the host {min(plain):.1f} to {max(plain):.1f} times what torch's costs" in said


def test_figures_of_backwards_are_those_of_the_rows() -> None:
    gains: dict[bool, list[float]] = {True: [], False: []}
    dropped: list[float] = []
    asked: list[float] = []
    for row in shipped():
        features = row.problem.features
        if row.problem.direction == "bwd" and row.problem.d <= 128 and row.framework_us is not None:
            group = gains[features.label() in ("full", "causal")] if not features.dropout else dropped if features.mask == "none" else []
            group = asked if features.dbias or features.dslopes else group
            group.append(row.framework_us / row.median_us)
    said = one_line(PAGE)
    sizes = sorted({row.problem.d for row in shipped() if row.problem.direction == "bwd" and row.problem.d <= 128})
    assert f"tuned backwards of D = {', '.join(map(str, sizes[:-1]))} and {sizes[-1]} are" in said
    others = [
        row.framework_us / row.median_us
        for row in Library.of(shipped_path()).records(gpu="h100", direction="bwd")
        if row.problem.d <= 128 and row.framework_us is not None and row.problem.features.label() in ("full", "causal")
    ]
    assert f"those of D = 16 to 128 on an H100 {min(others):.2f} to {max(others):.2f} times" in said
    assert f"are {min(gains[True]):.2f} to {max(gains[True]):.2f} times as fast as cuDNN's for full and causal attention" in said
    assert (
        f"{min(gains[False]):.1f} to {max(gains[False]):.1f} times as fast as torch's choice with a mask, a bias, ALiBi or a window" in said
    )
    assert f"{min(asked):.1f} to {max(asked):.1f} times where a bias or slopes get gradients" in said
    assert f"and {min(dropped):.1f} to {max(dropped):.1f} times with dropout" in said
    wide = [
        row.framework_us / row.median_us
        for row in Library.of(shipped_path()).records(gpu="h200", direction="bwd")
        if row.problem.d == 256 and row.framework_us is not None and row.problem.features.label() in ("full", "causal")
    ]
    assert f"of D = 256 they are {min(wide):.2f} to {max(wide):.2f} times as fast as cuDNN's" in said


def test_tables_of_forwards_are_written_into_the_page_and_nothing_else_is_touched() -> None:
    before = (PAGE).read_text()
    # The fixtures are the results of a folder that stays as it is.
    rows = readme.rows_of(sorted((folder() / "2026-11-21-h200-forward").glob("forward_[pf]*.json")))
    plain, features = readme.plain_table(rows), readme.feature_table(rows)
    assert "| D=128, causal | 350 (1.09x) | 500 (1.19x)" in plain and plain.count("\n") == 7
    assert "| window 1024, causal | 454 | Flex (1.65x) | 570 | Flex (1.88x) |" in features
    after = readme.rewritten(before, [plain, features])
    assert plain in after and features in after
    assert [line for line in after.split("\n") if line[:1] != "|"] == [line for line in before.split("\n") if line[:1] != "|"]
    with pytest.raises(ValueError, match="has 0 tables"):
        readme.rewritten(after.replace("| N = 4096 |", "| n |"), [features])


def test_rates_in_the_page_are_of_cells_that_were_timed_and_right() -> None:
    [file] = (folder() / "2026-11-21-h200-forward").glob("forward_features.json")
    row = json.loads(file.read_text())["rows"][0]
    assert readme.feature_table([row]) != readme.feature_table([])
    for fault in ({"wrong": "max_abs is 1"}, {"failed": "killed"}, {"times": {}}):
        assert readme.rows_of([Faulty(row | fault)]) == []  # type: ignore[list-item]


class Faulty:
    """A file with one cell."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._row = row

    def read_text(self) -> str:
        return json.dumps({"rows": [self._row]})


def test_tables_of_forwards_are_what_one_run_wrote() -> None:
    said = (PAGE).read_text()
    rows = readme.rows_of([readme.PLAIN_RUN])
    assert readme.rewritten(said, [readme.plain_table(rows), readme.feature_table(rows)]) == said
