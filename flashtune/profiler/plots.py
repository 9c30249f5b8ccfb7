"""Plots of a profile with matplotlib: bytes and time by step, roofline, latency against N, and a ratio of latencies.

Each `draw_*` fills one Axes; its bars and points have tooltips with name and value. Nothing here touches pyplot's global state, and
the same profile gives the same bytes.
"""

import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import escape, unescape
from typing import Any

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flashtune.profiler.accounting import Step
from flashtune.profiler.measured import Series
from flashtune.profiler.strategies import at_length
from flashtune.profiler.summary import Profile
from flashtune.profiler.tables import heading

SCORES, OTHER, FUSED, FRAMEWORK, PROJECTIONS, GREY = "#d1495b", "#30638e", "#2a9d62", "#edae49", "#7d5ba6", "#6b7280"
KIND_COLOURS = {"eager": SCORES, "framework": FRAMEWORK, "tuned": FUSED, "projections": PROJECTIONS}
KIND_LABELS = {"eager": "eager", "framework": "PyTorch's fused", "tuned": "tuned", "projections": "projections"}
STRATEGY_COLOURS = {"standard": SCORES, "fused": FUSED, "window": FRAMEWORK, "low_rank": PROJECTIONS}
MARKERS = {
    # Q K^T and P V often coincide: two triangles that leave each other visible.
    "qk": ">",
    "pv": "<",
    "elementwise": "o",
    "scale_mask": "s",
    "softmax": "o",
    "dropout": "D",
    "PyTorch's fused": "P",
    "fused kernel": "*",
    "tuned": "*",
}
LEAST_N, REACH_N, MOST_N = 128, 16384, 65536

THEMED = {
    "#ffffff": "--card",
    "#374151": "--ink",
    "#111827": "--strong",
    "#000000": "--strong",
    "#6b7280": "--muted",
    "#e5e7eb": "--line",
}
"""Neutral colours of the plots and the CSS variables that replace them in a page."""

_TIP = "tip: "
_TIPPED = re.compile(rf'<g id="{_TIP}([^"]*)">')

Draw = Callable[[Profile, Axes], None]

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica", "sans-serif"],
    "font.size": 10.0,
    "axes.titlesize": 12.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": "#374151",
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    # Text stays text: smaller files, and a reader can search and copy it.
    "svg.fonttype": "none",
}


def draw_bytes(found: Profile, ax: Axes) -> None:
    """Counted bytes of each step, S and P apart from the other tensors."""
    steps = [*(row.step for row in found.steps), found.fused.step]
    unit, scale = ("GiB", 2**30) if max(step.bytes for step in steps) >= 10 * 2**30 else ("MiB", 2**20)
    names = [step.name for step in steps[:-1]] + ["fused kernel"]
    scores = [step.score_bytes / scale for step in steps]
    others = [(step.bytes - step.score_bytes) / scale for step in steps]
    of_scores = ax.barh(names, scores, color=SCORES, label="S and P = softmax(S)")
    of_others = ax.barh(names, others, left=scores, color=OTHER, label="Q, K, V, O")
    for bars, sizes, what in ((of_scores, scores, "S and P"), (of_others, others, "Q, K, V, O")):
        for bar, name, size in zip(bars, names, sizes, strict=True):
            _tip(bar, f"{name}, {what}: {size:,.2f} {unit}")
    _label_bars(ax, [step.bytes / scale for step in steps], "{:,.2f} " + unit)
    ax.set_title("Bytes by step")
    ax.set_xlabel(f"read and written, {unit} (counted)")
    ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.02))


def draw_time(found: Profile, ax: Axes) -> None:
    """Measured time of each step and of whole attentions, floors as marks; without a GPU only floors."""
    names, times, floors, colours = _times(found)
    for bar, name, time_us, least in zip(ax.barh(names, times, color=colours), names, times, floors, strict=True):
        _tip(bar, f"{name}: {time_us:,.1f} us" + (f", floor {least:,.1f} us" if found.measured else " at least"))
    _label_bars(ax, times, "{:,.1f} µs")
    if found.measured:
        ax.scatter(
            floors, range(len(names)), marker="|", s=220, color="#111827", linewidths=2, label=f"floor on {found.target.slug}", zorder=3
        )
        ax.legend(loc="lower right", bbox_to_anchor=(1.0, 0.02))
        ax.set_title("Time by step, measured")
        ax.set_xlabel(f"median on {found.measured.device}, microseconds")
    else:
        ax.set_title("Time by step, floor (not measured)")
        ax.set_xlabel(f"least time on {found.target.name}, microseconds")


def _times(found: Profile) -> tuple[list[str], list[float], list[float], list[str]]:
    """Names, times, floors and colours of the bars."""
    rows = [(row.step.name, row.floor_us, row.floor_us, OTHER) for row in found.steps]
    rows.append(("fused kernel", found.fused.floor_us, found.fused.floor_us, FUSED))
    if found.measured:
        separate = {row.step.name: row.floor_us for row in with_separate_steps(found).steps}
        rows = [(step.name, step.time_us, separate[step.name], OTHER) for step in found.measured.steps]
        whole = {"eager": sum(us for name, us in separate.items() if name != "dropout")}
        rows += [
            (KIND_LABELS[kind.name], kind.time_us, whole.get(kind.name, found.fused.floor_us), KIND_COLOURS[kind.name])
            for kind in found.measured.kinds
        ]
    names, times, floors, colours = zip(*rows, strict=True)
    return list(names), list(times), list(floors), list(colours)


def with_separate_steps(found: Profile) -> Profile:
    """The profile counted with one pass per elementwise step, as they are measured."""
    return replace(found, elementwise="separate")


def draw_roofline(found: Profile, ax: Axes) -> None:
    """Roofline of the target with every step: at its measured rate, else on the roof.

    Steps with a matrix product are placed by its operations alone, since the roof is that of the matrix units.
    """
    target, peak = found.target, found.peak_tflops
    points = _points(found)
    bandwidth = target.bandwidth_gbs / 1e3
    left = min(0.3, *(intensity / 2 for _, intensity, _, _ in points))
    right = max(8 * found.crossover, *(intensity * 2 for _, intensity, _, _ in points))
    ax.plot([left, found.crossover, right], [left * bandwidth, peak, peak], color="#111827", linewidth=2)
    ax.axvline(found.crossover, color=GREY, linewidth=1, linestyle=":")
    corner, middle = (found.crossover, left * bandwidth), (left * 3, left * 3 * bandwidth)
    _note(ax, f"crossover {found.crossover:.1f} FLOP/byte", corner, (5, 0), ha="left", va="bottom")
    _note(ax, f"{target.bandwidth_gbs:g} GB/s", middle, (8, -4), ha="left", va="top")
    _note(ax, f"{peak:g} TFLOP/s {found.problem.dtype}", (found.crossover, peak), (5, 3), ha="left", va="bottom")
    fused = found.fused.step
    limit = fused.matmul_flops / fused.exps * target.exp_per_second / 1e12
    span = [found.crossover / 3, right]
    ax.plot(span, [limit, limit], color=FRAMEWORK, linestyle="--", linewidth=1.2, label="exp unit's limit for the fused kernel")
    for name, intensity, tflops, colour in points:
        point = ax.scatter(
            intensity, tflops, marker=MARKERS[name], s=90, facecolor=colour, edgecolor="white", linewidths=0.6, label=name, zorder=3
        )
        _tip(point, f"{name}: {tflops:,.2f} TFLOP/s at {intensity:,.2f} FLOP/byte")
    ax.set_xscale("log")
    ax.set_yscale("log")
    # The decade above the highest line has space for the legend.
    ax.set_ylim(min(left * bandwidth, *(tflops for _, _, tflops, _ in points)) / 2, max(peak, limit) * 15)
    ax.minorticks_off()
    ax.grid(True, which="major")
    ax.set_title("Roofline, " + ("measured" if found.measured else "floor (not measured)"))
    ax.set_xlabel("FLOP per byte (counted)")
    ax.set_ylabel("TFLOP/s")
    ax.legend(loc="upper left", ncols=2)


def _note(ax: Axes, text: str, place: tuple[float, float], offset: tuple[int, int], *, ha: Any, va: Any) -> None:
    ax.annotate(text, place, xytext=offset, textcoords="offset points", color=GREY, fontsize=9, ha=ha, va=va)


def _points(found: Profile) -> list[tuple[str, float, float, str]]:
    """Name, FLOP per byte, TFLOP/s and colour of each point on the roofline."""
    timed: list[tuple[str, Step, float, str]] = [(row.step.name, row.step, row.floor_us, SCORES) for row in found.steps]
    timed.append(("fused kernel", found.fused.step, found.fused.floor_us, FUSED))
    if found.measured:
        separate = {row.step.name: row.step for row in with_separate_steps(found).steps}
        timed = [(step.name, separate[step.name], step.time_us, SCORES) for step in found.measured.steps]
        fused = [kind for kind in found.measured.kinds if kind.name != "eager"]
        timed += [(KIND_LABELS[kind.name], found.fused.step, kind.time_us, KIND_COLOURS[kind.name]) for kind in fused]
    points = []
    for name, step, time_us, colour in timed:
        flops = step.matmul_flops or step.flops
        points.append((name, flops / step.bytes, flops / time_us / 1e6, colour))
    return points


def draw_latency(found: Profile, ax: Axes) -> None:
    """Latency against N: measured, with fitted exponents; without a GPU each strategy's floor."""
    if found.measured:
        for series in found.measured.scaling:
            exponent = "" if series.exponent is None else f", ~N^{series.exponent:.2f}"
            _curve(ax, series, KIND_COLOURS[series.name], KIND_LABELS[series.name] + exponent)
        ax.set_title("Latency against N, measured")
        ax.set_ylabel("median, microseconds")
    else:
        for series in floors_against_n(found):
            _curve(ax, series, STRATEGY_COLOURS[series.name], series.name)
        ax.set_title("Latency against N, floor (not measured)")
        ax.set_ylabel(f"least time on {found.target.slug}, microseconds")
    ax.set_yscale("log")
    _along_n(ax, found)
    ax.set_xlabel(f"N (B={found.problem.batch}, H={found.problem.heads}, D={found.problem.d}; dotted: this profile's)")
    ax.legend(loc="upper left")


def draw_ratio(found: Profile, ax: Axes) -> None:
    """Ratio of PyTorch's fused attention's time to the tuned kernel's, against N; without a GPU standard over fused floors.

    On the logarithmic axes of `draw_latency` the two curves coincide.
    """
    if found.measured:
        above, below = "framework", "tuned"
        series = {one.name: dict(one.points) for one in found.measured.scaling}
        ax.set_title("PyTorch's time over the tuned kernel's, measured")
        colour, label = FUSED, "PyTorch / tuned"
    else:
        above, below = "standard", "fused"
        series = {one.name: dict(one.points) for one in floors_against_n(found)}
        ax.set_title("Standard over fused, floor (not measured)")
        colour, label = SCORES, "standard / fused"
    ratios = {n: us / series[below][n] for n, us in series.get(above, {}).items() if n in series.get(below, {})}
    ax.axhline(1.0, color=GREY, linewidth=1, linestyle="--")
    if ratios:
        ax.plot(list(ratios), list(ratios.values()), color=colour, marker="o", markersize=5, linewidth=1.8, label=label)
        for n, ratio in ratios.items():
            _tip(ax.scatter([n], [ratio], s=120, alpha=0.0), f"{label} at N = {n}: {ratio:.2f}")
            ax.annotate(f"{ratio:.2f}", (n, ratio), xytext=(0, 7), textcoords="offset points", ha="center", fontsize=9)
        ax.set_ylim(min(0.9, *ratios.values()) * 0.97, max(1.1, *ratios.values()) * 1.06)
        ax.legend(loc="upper left")
    _along_n(ax, found)
    ax.set_xlabel("N (above 1: the second is faster)")
    ax.set_ylabel("ratio of times")


def _along_n(ax: Axes, found: Profile) -> None:
    """Make x an axis of sequence lengths, with a dotted line at the profiled one."""
    ax.axvline(found.problem.n_kv, color=GREY, linewidth=1, linestyle=":")
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda n, _: f"{n:g}"))
    ax.minorticks_off()
    ax.grid(True, which="major")


def floors_against_n(found: Profile) -> list[Series]:
    """Floor of each strategy at powers of two from 128 to 16384, or to four times the profiled N (at most 65536), in microseconds."""
    sizes = {found.problem.n_kv}
    n = LEAST_N
    while n <= max(REACH_N, min(4 * found.problem.n_kv, MOST_N)):
        sizes.add(n)
        n *= 2
    points: dict[str, list[tuple[int, float]]] = {}
    for n in sorted(size for size in sizes if size >= found.problem.n_q or found.problem.n_q == found.problem.n_kv):
        at_n = replace(found, problem=at_length(found.problem, n), rank=min(found.rank, n))
        for strategy in at_n.strategies:
            points.setdefault(strategy.name, []).append((n, at_n.row(strategy).floor_us))
    return [Series(name=name, points=tuple(found)) for name, found in points.items()]


DRAWINGS: dict[str, Draw] = {
    "bytes": draw_bytes,
    "time": draw_time,
    "roofline": draw_roofline,
    "latency": draw_latency,
    "ratio": draw_ratio,
}
"""Plots by name, in reading order."""


def svg_of(found: Profile, name: str) -> str:
    """One plot as an `<svg>` element, to be embedded in a page with others.

    Tooltips show under the pointer, and screen readers read all of them. Neutral colours are the page's own (`THEMED`), so that they
    follow its theme.
    """
    with _style():
        figure = Figure(figsize=(6.6, 4.4), layout="constrained")
        DRAWINGS[name](found, figure.subplots())
        text = _saved(figure, "svg").decode()
    text = text[text.index("<svg") :]
    tips = [unescape(tip) for tip in _TIPPED.findall(text)]
    text = _TIPPED.sub(lambda found: f"<g><title>{escape(unescape(found[1]))}</title>", text)
    for colour, variable in THEMED.items():
        text = text.replace(colour, f"var({variable})")
    label = escape(f"{name}: {'; '.join(tips)}")
    # All plots use the same ids for groups and clip paths: the prefix makes them unique in a page.
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text).replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def figure_of(found: Profile, file_format: str) -> bytes:
    """All plots in one picture, as the bytes of a `png` or `svg` file."""
    with _style():
        figure = Figure(figsize=(13.6, 13.6), layout="constrained")
        figure.suptitle(f"{heading(found)}\n{found.target.name}", fontsize=12, color="#374151")
        places = figure.subplot_mosaic([["bytes", "time"], ["roofline", "latency"], ["ratio", "ratio"]])
        for name, draw in DRAWINGS.items():
            draw(found, places[name])
        return _saved(figure, file_format)


def _tip(artist: Artist, text: str) -> None:
    """Set the tooltip of `artist`: matplotlib writes it as the id of an SVG group, which `svg_of` turns into a title."""
    artist.set_gid(f"{_TIP}{text}")


def _saved(figure: Figure, file_format: str) -> bytes:
    buffer = io.BytesIO()
    metadata = {"Date": None} if file_format == "svg" else {"Software": None}
    figure.savefig(buffer, format=file_format, dpi=130, metadata=metadata)
    return buffer.getvalue()


@contextmanager
def _style() -> Iterator[None]:
    # A fixed salt gives clip paths the same ids in every run.
    style: Any = {**STYLE, "svg.hashsalt": "flashtune"}
    with mpl.rc_context(style):
        yield


def _curve(ax: Axes, series: Series, colour: str, label: str) -> None:
    sizes, times = zip(*series.points, strict=True)
    ax.plot(sizes, times, color=colour, marker="o", markersize=4, linewidth=1.8, label=label)
    for n, time_us in series.points:
        _tip(ax.scatter([n], [time_us], s=80, alpha=0.0), f"{label.split(',')[0]} at N = {n}: {time_us:,.1f} us")


def _label_bars(ax: Axes, values: list[float], template: str) -> None:
    longest = max(values)
    for place, value in enumerate(values):
        ax.annotate(template.format(value), (value, place), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
    ax.set_xlim(0, longest * 1.22)
    ax.invert_yaxis()
    ax.grid(True, axis="x")
