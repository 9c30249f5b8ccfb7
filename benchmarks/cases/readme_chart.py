"""Chart of the README: rates of the plain forward beside torch's own choice (extra `plot`).

The figures are those of the table in benchmarks/README.md, from one committed run of the case `forward`.
"""

from pathlib import Path

from benchmarks.cases.readme_table import PLAIN_RUN, rows_of
from benchmarks.shared.environment import argument_parser

CHART = Path(__file__).parent.parent.parent / "docs" / "images" / "forward-h200.svg"
COLOURS = {64: "#1b9e77", 128: "#d95f02", 256: "#7570b3"}


def main() -> None:
    """Write the chart; the same run gives the same bytes."""
    argument_parser(__doc__).parse_args()
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    pyplot.rcParams["svg.hashsalt"] = "flashtune"
    pyplot.rcParams["svg.fonttype"] = "none"
    rows = [row for row in rows_of([PLAIN_RUN]) if row["group"] == "plain" and row["problem"]["dtype"] == "bf16"]
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
