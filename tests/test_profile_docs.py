"""docs/background.md: every console block is what its command prints, and every figure in the prose stands in one of them.

The linked report tells of the kernels that ship.
"""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from flashtune.db.library import Library, shipped_path

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
BACKGROUND = Path(__file__).resolve().parent.parent / "docs" / "background.md"
BLOCK = re.compile(r"```console\n\$ (?P<command>[^\n]+)\n(?P<output>.*?)```", re.DOTALL)
FIGURE = re.compile(r"(\d[\d.,]*)(?:\s*%|\s+(?:MiB|MB|GB/s|TFLOP/s|T exp/s|GFLOP|FLOP/byte|us|times)\b)")
REFUTED = "2.8"
"""An intensity that write-ups quote and that the text says is wrong; no command prints it."""


@cache
def printed_by(command: str) -> str:
    """Output of a shell for `command`, on a machine whose GPUs are hidden."""
    script = f'set -o pipefail; flashtune() {{ "{sys.executable}" -m flashtune.cli.main "$@"; }}; {command}'
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env={**os.environ, **hidden}).stdout


def regenerated(text: str) -> str:
    return BLOCK.sub(lambda block: f"```console\n$ {block['command']}\n{printed_by(block['command'])}```", text)


def test_every_block_is_what_its_command_prints(request: pytest.FixtureRequest) -> None:
    text = BACKGROUND.read_text()
    now = regenerated(text)
    if request.config.getoption("--update-golden"):
        BACKGROUND.write_text(now)
    else:
        assert now == text, "run `make golden`, and review what changed in docs/background.md"
    assert len(BLOCK.findall(text)) >= 6
    assert text.count("```") == 2 * len(BLOCK.findall(text)), "a block without its command can't be checked"


def unproven(text: str) -> list[str]:
    """Figures of the prose that no block prints."""
    printed = set(re.findall(r"\d[\d.]*\d|\d", " ".join(block["output"] for block in BLOCK.finditer(text))))
    figures = [found.rstrip(".,") for found in FIGURE.findall(BLOCK.sub("", text))]
    assert len(figures) >= 20
    return [figure for figure in figures if figure not in printed]


def test_every_figure_of_the_prose_stands_in_a_block() -> None:
    assert unproven(BACKGROUND.read_text()) == [REFUTED]


def test_a_wrong_figure_would_be_noticed() -> None:
    text = BACKGROUND.read_text()
    block = BLOCK.search(text)
    assert block is not None
    start = block.start("output")
    assert regenerated(f"{text[:start]}wrong{text[start:]}") == regenerated(text)
    assert unproven(text.replace("94.1% are S", "94.2% are S")) == ["94.2", REFUTED]


# --- the report that benchmarks/README.md links ---------------------------------------------------------------------------------------

ROOT = BACKGROUND.parent.parent
REPORT = ROOT / "docs" / "reports" / "h200-b4-h16-n4096-d128-bf16.html"
REPEATS = 0.05
"""Two runs on different machines of one kind differ by less in a kernel's rate, and in the ratio of two that are timed together."""


def told() -> dict[str, tuple[float, float]]:
    """B=4 H=16 N=4096 D=128 bf16 as each place tells it: the framework's time over the tuned kernel's, and that one's TFLOP/s."""
    found = json.loads(REPORT.with_suffix(".json").read_text())
    p = found["problem"]
    assert (p["batch"], p["heads"], p["n"], p["d"], p["dtype"], p["causal"]) == (4, 16, 4096, 128, "bf16", False)
    kinds = {kind["name"]: kind for kind in found["measured"]["attention"]}
    tip, rate = (
        re.search(words, REPORT.read_text())
        for words in (r"framework / tuned at N = 4096: (\d\.\d\d)", r"<b>(\d+) TFLOP/s</b>tuned kernel")
    )
    cell = re.search(r"\| D=128, full \|[^\n]*", (ROOT / "benchmarks" / "README.md").read_text())
    assert tip is not None and rate is not None and cell is not None
    tflops, ratio = re.findall(r"(\d+) \((\d\.\d\d)x\)", cell[0])[LENGTHS.index(4096)]
    [row] = [
        record
        for record in Library.of(shipped_path()).records(gpu="h200", n=4096, d=128, dtype="bf16", features="{}")
        if (record.problem.direction, record.problem.batch, record.problem.heads, record.problem.kv_heads) == ("fwd", 4, 16, 16)
    ]
    assert row.framework_us is not None
    return {
        "database": (row.framework_us / row.median_us, row.tflops),
        "table": (float(ratio), float(tflops)),
        "report": (kinds["framework"]["time_us"] / kinds["tuned"]["time_us"], kinds["tuned"]["tflops"]),
        "page": (float(tip[1]), float(rate[1])),
    }


def test_report_table_and_database_tell_of_the_same_kernels() -> None:
    """A search of new rows, or a new table, asks for a new report: the command is in benchmarks/results/2026-11-21-h200/README.md."""
    found = told()
    assert found == {name: pytest.approx(found["database"], rel=REPEATS) for name in found}


def test_the_report_would_be_found_out_that_tells_of_earlier_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The one that was linked before: 1.05 where the table said 1.19."""
    earlier = json.loads(REPORT.with_suffix(".json").read_text())
    kinds = earlier["measured"]["attention"]
    tuned = next(kind for kind in kinds if kind["name"] == "tuned")
    tuned["time_us"] = next(kind["time_us"] for kind in kinds if kind["name"] == "framework") / 1.05
    (tmp_path / "old.json").write_text(json.dumps(earlier))
    (tmp_path / "old.html").write_text(REPORT.read_text())
    monkeypatch.setattr(sys.modules[__name__], "REPORT", tmp_path / "old.html")
    with pytest.raises(AssertionError):
        test_report_table_and_database_tell_of_the_same_kernels()
