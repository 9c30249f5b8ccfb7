"""Tables of rates in benchmarks/README.md and chart of the README, from committed results of the case `forward`.

Without files it takes the run that the page shows; `--write` puts the tables into the page, whose words stay as they are, and `--chart`
draws that run (extra `plot`). All cells of a table have one element type.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.cases.archive import folder
from benchmarks.shared.cells import LENGTHS
from benchmarks.shared.environment import argument_parser

RESULTS = folder()
PAGE = RESULTS.parent / "README.md"
PLAIN_RUN = RESULTS / "2026-11-22-h200-forward" / "forward_plain_features.json"
"""Run of the case `forward` that the page and the README's chart show."""
CHART = RESULTS.parent.parent / "docs" / "images" / "forward-h200.svg"
COLOURS = {64: "#1b9e77", 128: "#d95f02", 256: "#7570b3"}

CASES = {
    "mask": "boolean mask (1, 1, N, N)",
    "bias": "additive bias (1, H, N, N)",
    "dropout": "dropout 0.1, causal",
    "window": "window 1024, causal",
    "alibi": "ALiBi, causal",
    "softcap": "soft cap 30, causal",
    "gqa": "4 query heads to a key head, causal",
}
"""Feature cells by their names in the page."""

NAMES = {"cudnn": "cuDNN", "flash": "FA2", "efficient": "memory-efficient", "fa4": "FA4", "flex": "Flex"}
"""Peers by their names in the page; torch's own choice is one of the others."""

Row = dict[str, Any]
"""A cell of a result (`report.Row.as_json`)."""


def rows_of(files: Iterable[Path]) -> list[Row]:
    """All cells that were timed and found right."""
    rows = [row for path in files for row in json.loads(path.read_text())["rows"]]
    return [row for row in rows if row["times"] and not row["failed"] and not row["wrong"]]


def plain_table(rows: list[Row], dtype: str = "bf16") -> str:
    """TFLOP/s and in brackets the ratio to cuDNN, as Markdown; shapes that lack a length are left out."""
    found = {(row["problem"]["d"], row["case"], row["problem"]["n_kv"]): row for row in rows if _is(row, "plain", dtype)}
    lines = ["| N | " + " | ".join(str(n) for n in LENGTHS) + " |", "|---|" + "---|" * len(LENGTHS)]
    for d in (64, 128, 256):
        for case in ("full", "causal"):
            mine = [found.get((d, case, n)) for n in LENGTHS]
            cells = [
                f"{row['rates']['flashtune']:.0f} ({row['ratio_to']['cudnn']:.2f}x)" for row in mine if row and "cudnn" in row["ratio_to"]
            ]
            if len(cells) == len(LENGTHS):
                lines.append(f"| D={d}, {case} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def feature_table(rows: list[Row], dtype: str = "bf16") -> str:
    """TFLOP/s with features and the ratio to torch's own choice; beside it the fastest of all peers, and the ratio to that."""
    found = {(row["problem"]["d"], row["case"]): row for row in rows if _is(row, "features", dtype)}
    lines = ["| N = 4096 | D=64 | fastest peer | D=128 | fastest peer |", "|---|---|---|---|---|"]
    for case, name in CASES.items():
        cells = [_against(found[d, case]) if (d, case) in found else "|" for d in (64, 128)]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _is(row: Row, group: str, dtype: str) -> bool:
    return bool(row["group"] == group and row["problem"]["dtype"] == dtype)


def _against(row: Row) -> str:
    """Two columns: our rate beside torch's own choice, and the fastest peer."""
    ratios = {name: ratio for name, ratio in row["ratio_to"].items() if name != "default"}
    chosen = row["ratio_to"].get("default")
    ours = f"{row['rates']['flashtune']:.0f}" + (f" ({chosen:.2f}x)" if chosen else "")
    if not ratios:
        return f"{ours} |"
    best = min(ratios, key=lambda name: ratios[name])
    return f"{ours} | {NAMES[best]} ({ratios[best]:.2f}x)"


def rewritten(text: str, tables: Iterable[str]) -> str:
    """The page with these tables in place of those with the same first heading; raises ValueError where it has none, or several."""
    for table in tables:
        begin = "|".join(table.split("|")[:2]) + "|"
        lines = text.split("\n")
        starts = [i for i, line in enumerate(lines) if line.startswith(begin) and not lines[i - 1].startswith("|")]
        if len(starts) != 1:
            raise ValueError(f"the page has {len(starts)} tables that begin with {begin!r}, and should have one")
        end = next(i for i in range(starts[0], len(lines)) if not lines[i].startswith("|"))
        text = "\n".join([*lines[: starts[0]], table, *lines[end:]])
    return text


def draw(rows: list[Row]) -> None:
    """Write the chart of the plain cells beside torch's own choice; the same run gives the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "flashtune"
    pyplot.rcParams["svg.fonttype"] = "none"
    rows = [row for row in rows if _is(row, "plain", "bf16")]
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.2), sharey=True, layout="constrained")
    for panel, case in zip(panels, ("full", "causal"), strict=True):
        for d, colour in COLOURS.items():
            cells = sorted((row["problem"]["n_kv"], row) for row in rows if row["case"] == case and row["problem"]["d"] == d)
            lengths = [n for n, _ in cells]
            ours = [row["rates"]["flashtune"] for _, row in cells]
            torchs = [row["rates"]["flashtune"] / row["ratio_to"]["cudnn"] for _, row in cells]
            panel.plot(lengths, ours, color=colour, marker="o", markersize=4, label=f"flashtune, D={d}")
            panel.plot(lengths, torchs, color=colour, linestyle="--", label=f"torch (cuDNN), D={d}")
        panel.set_xscale("log", base=2, subs=[])
        panel.set_xticks(lengths, [str(n) for n in lengths])
        panel.set_title("full attention" if case == "full" else "causal attention", fontsize=10)
        panel.set_xlabel("sequence length N")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("TFLOP/s (higher is better)")
    panels[0].set_ylim(bottom=0)
    panels[1].legend(fontsize=7, ncols=2, loc="lower right")
    CHART.parent.mkdir(exist_ok=True)
    figure.savefig(CHART, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Print, write or draw."""
    parser = argument_parser(__doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--write", action="store_true", help="put the tables into benchmarks/README.md")
    parser.add_argument("--chart", action="store_true", help="draw docs/images/forward-h200.svg")
    options = parser.parse_args()
    rows = rows_of(options.files or [PLAIN_RUN])
    if options.chart:
        draw(rows)
    tables = [plain_table(rows), feature_table(rows)]
    if options.write:
        PAGE.write_text(rewritten(PAGE.read_text(), tables))
    else:
        print("\n\n".join(tables))
