"""Report of a profile's document: paragraphs and tables in reading order, a chart, and both as a file.

1 MiB = 2^20 bytes, 1 MB = 10^6 bytes.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashtune.bench.page import Bars, Points, Series, Table, origin, page
from flashtune.bench.profiling import Document
from flashtune.core.system.files import write_whole

SUFFIXES = (".html", ".png", ".svg")

CHOSEN = {"name": "named", "device": "this machine's GPU", "default": "the default; name another with --gpu-name"}
KINDS = {
    "eager": "eager, one operation after another",
    "framework": "PyTorch's fused attention",
    "tuned": "flashtune's tuned kernel",
    "projections": "projections Q, K, V and output",
}
"""Names of measured kinds in words."""

ERROR_NOTE = (
    "error: ||x - exact|| / ||exact|| on random inputs; a window and untrained projections are approximations, which models are trained for"
)


def shape(found: Document) -> str:
    """Sizes of the problem; Hkv and Nq only where they differ from H and N, the law and the longest of packed sequences."""
    p = found["problem"]
    heads = f"H={p['heads']}" + (f" Hkv={p['kv_heads']}" if p["kv_heads"] != p["heads"] else "")
    sizes = f"N={p['n']}" + (f" Nq={p['n_q']}" if p["n_q"] != p["n"] else "")
    packed = f", packed {p['law']} with N at most {p['longest']}" if p["law"] else ""
    return f"B={p['batch']} {heads} {sizes} D={p['d']} {p['dtype']}" + (" causal" if p["causal"] else "") + packed


def parts(found: Document) -> Iterator[str | Table]:
    """Paragraphs and tables of the report."""
    p, target, measured = found["problem"], found["target"], found["measured"]
    yield (
        f"Attention {'forward' if p['direction'] == 'fwd' else 'backward'}: {shape(found)}, elementwise steps {p['elementwise']}\n"
        f"Target: {target['name']} ({CHOSEN[target['chosen_by']]}): {target['peak_tflops']:g} TFLOP/s {p['dtype']}, "
        f"{target['bandwidth_gbs']:g} GB/s, {target['exp_per_second'] / 1e12:.2f} T exp/s; crossover {target['crossover']:.1f} FLOP/byte"
    )
    tensors = [(name, *_sizes(size)) for name, size in found["tensors"].items()]
    yield Table(title="Tensors", columns=("tensor", "MiB", "MB"), rows=tensors)
    standard, fused = found["standard"], found["fused"]
    columns = ("step", "read MiB", "write MiB", "total MiB", "total MB", "GFLOP", "FLOP/byte", "bound", "floor us")
    steps = [*found["steps"], standard | {"name": "standard, all steps"}, fused | {"name": "fused kernel"}]
    yield Table(title="Counted bytes and operations, and the target's floor", columns=columns, rows=[_counted(row) for row in steps])
    size, scores = _bytes(standard), standard["score_bytes"]
    yield (
        f"S is {standard['score_share']:.1%} of the standard pipeline's traffic: {_sizes(scores)[0]} of {_sizes(size)[0]} MiB "
        f"({_sizes(scores)[1]} of {_sizes(size)[1]} MB).\n"
        f"Fusing moves {size / _bytes(fused):.1f} times fewer bytes; the floor falls from {standard['floor_us']:.1f} "
        f"to {fused['floor_us']:.1f} us, and the bound of the fused kernel is {fused['bound']}."
    )
    yield _strategies(found)
    if measured is None:
        yield f"Nothing was measured: {found['not_measured']}."
        return
    yield f"Measured on {measured['device']}: medians, L2 flushed before each launch."
    yield from _measured(found)
    for reason in measured["skipped"]:
        yield f"Left out: {reason}."


def _measured(found: Document) -> Iterator[Table]:
    """Tables of measured steps, whole attentions, latency against N, and the transformer layer."""
    measured, target, p = found["measured"], found["target"], found["problem"]

    def achieved(row: Document) -> tuple[str, ...]:
        tflops, tbs = row["tflops"], row["tbs"]
        return (f"{tflops:.1f}", f"{tflops / target['peak_tflops']:.1%}", f"{tbs:.2f}", f"{tbs * 1e3 / target['bandwidth_gbs']:.1%}")

    rates = ("TFLOP/s", "of peak", "TB/s", "of bandwidth")
    if measured["steps"]:
        rows = [(row["name"], _us(row["time_us"]), f"{row['share']:.1%}", *achieved(row)) for row in measured["steps"]]
        yield Table(title="Steps of the standard pipeline, each timed by itself", columns=("step", "us", "share", *rates), rows=rows)
    rows = [(KINDS[row["name"]], _us(row["time_us"]), *achieved(row)) for row in measured["attention"]]
    note = f"the tuned call was run by {measured['served_by']}"
    yield Table(title="Whole attentions", columns=("attention", "us", *rates), rows=rows, note=note)
    times = {one["name"]: {point["n"]: _us(point["time_us"]) for point in one["points"]} for one in measured["scaling"]}
    sizes = sorted({n for points in times.values() for n in points})
    powers = {one["name"]: "-" if one["exponent"] is None else f"{one['exponent']:.2f}" for one in measured["scaling"]}
    rows = [(KINDS[name], *(points.get(n, "-") for n in sizes), powers[name]) for name, points in times.items()]
    note = "exponent p of time ~ N^p, fitted to the three largest N"
    yield Table(title="Latency against N", columns=("us at N =", *map(str, sizes), "exponent"), rows=rows, note=note)
    if layer := measured["layer"]:
        others = (_us(layer["projections_us"]), _us(layer["mlp_us"]))
        yield Table(
            title=f"One transformer layer of width {p['heads'] * p['d']}",
            columns=("attention", "attention us", "projections us", "MLP us", "attention's share"),
            rows=[(KINDS[name], _us(one["time_us"]), *others, f"{one['share']:.1%}") for name, one in layer["attention"].items()],
            note="norms and residuals are not counted",
        )


def _strategies(found: Document) -> Table:
    columns = ("strategy", "total MiB", "total MB", "GFLOP", "FLOP/byte", "bound", "floor us")
    rows = [(f"{row['name']}: {row['what']}", *_counted(row)[3:]) for row in found["strategies"]]
    if found["measured"] is None:
        return Table(title="Strategies side by side", columns=columns, rows=rows)
    for place, row in enumerate(found["strategies"]):
        timed = ("-", "-") if row["time_us"] is None else (_us(row["time_us"]), f"{row['relative_error']:.1e}")
        rows[place] = (*rows[place], *timed)
    return Table(title="Strategies side by side", columns=(*columns, "measured us", "error"), rows=rows, note=ERROR_NOTE)


def _bytes(row: Document) -> int:
    return int(row["read_bytes"] + row["write_bytes"])


def _sizes(count: int) -> tuple[str, str]:
    """Bytes in MiB and in MB."""
    return f"{count / 2**20:.2f}", f"{count / 1e6:.2f}"


def _us(time_us: float) -> str:
    return f"{time_us:.1f}"


def _counted(row: Document) -> tuple[str, ...]:
    sizes = (_sizes(row["read_bytes"])[0], _sizes(row["write_bytes"])[0], *_sizes(_bytes(row)))
    return (row["name"], *sizes, f"{row['flops'] / 1e9:.3f}", f"{row['intensity']:.2f}", row["bound"], _us(row["floor_us"]))


def write(found: Document, path: Path) -> None:
    """Write the chart (.png, .svg), which needs matplotlib, or the whole report (.html); raises OSError where the file can't be written."""
    kind = path.suffix.lower()
    write_whole(path, html(found).encode() if kind == ".html" else chart(found, kind.removeprefix(".")))


def html(found: Document) -> str:
    """Report as a page that loads no other."""
    first, *others = parts(found)
    measured = found["measured"]
    written = origin(measured["provenance"]) if measured else f"Written by flashtune {found['flashtune']}."
    title = f"Where attention's time and bytes go: {found['target']['slug']}"
    return page(title, (first, _times(found), _roofline(found), *others), f"1 MiB = 2^20 bytes, 1 MB = 10^6 bytes.\n{written}")


def _times(found: Document) -> Bars:
    """Picture of the times by step."""
    kind = "measured medians" if found["measured"] else "least possible times: nothing was measured"
    times = [(KINDS.get(name, name), us) for name, us, *_ in _timed(found)]
    return Bars(title="Time by step, microseconds", groups=[("", times)], ours=KINDS["tuned"] if found["measured"] else "fused", note=kind)


def _roofline(found: Document) -> Points:
    """Picture of the roofline with every step."""
    points = _placed(found)
    roof = Series(name="roofline", points=[(x, y, "") for x, y in _roof(found, points)], line=True)
    # Points often coincide: each is smaller than the one before.
    steps = [
        Series(name=KINDS.get(name, name), points=[(x, y, f"{KINDS.get(name, name)}: {y:.1f} TFLOP/s")], radius=4 + len(points) - place)
        for place, (name, x, y) in enumerate(points)
    ]
    note = f"crossover {found['target']['crossover']:.1f} FLOP/byte"
    series, across = [roof, *steps], "FLOP per byte (counted)"
    return Points(title="Roofline", x_label=across, y_label="TFLOP/s", series=series, log_x=True, note=note)


def chart(found: Document, file_format: str) -> bytes:
    """Roofline with every step, and times by step, as the bytes of a `png` or `svg` file; the same document gives the same bytes.

    Steps are at their measured rates and times, or else at the floor. Those with a matrix product are placed by its operations alone,
    since the roof is that of the matrix units.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Text stays text, so that a reader can search it; a fixed salt gives clip paths the same ids in every run.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "flashtune", "axes.spines.top": False, "axes.spines.right": False}
    with mpl.rc_context(style):
        figure = Figure(figsize=(13.6, 5.2), layout="constrained")
        figure.suptitle(f"{shape(found)} on {found['target']['name']}" + ("" if found["measured"] else " (floors: not measured)"))
        left, right = figure.subplots(1, 2)
        _draw_roofline(found, left)
        _draw_times(found, right)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=file_format, dpi=130, metadata={"Date": None} if file_format == "svg" else {"Software": None})
    return buffer.getvalue()


def _timed(found: Document) -> list[tuple[str, float, float, float]]:
    """Name, microseconds, FLOP per byte and TFLOP/s of each bar and point; the last two are 0 for what has no place on the roofline."""
    if found["measured"]:
        rows = [*found["measured"]["steps"], *found["measured"]["attention"]]
        return [(row["name"], row["time_us"], row["tflops"] / row["tbs"], row["tflops"]) for row in rows]
    flops = [(row, row["matmul_flops"] or row["flops"]) for row in (*found["steps"], found["fused"])]
    return [(row["name"], row["floor_us"], done / _bytes(row), done / row["floor_us"] / 1e6) for row, done in flops]


def _placed(found: Document) -> list[tuple[str, float, float]]:
    """Name, FLOP per byte and TFLOP/s of each point of the roofline."""
    return [(name, intensity, tflops) for name, _, intensity, tflops in _timed(found) if tflops]


def _roof(found: Document, points: list[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """Corners of the target's roofline, FLOP per byte and TFLOP/s, beyond all points."""
    target, crossover = found["target"], found["target"]["crossover"]
    ends = min(0.3, *(x / 2 for _, x, _ in points)), max(8 * crossover, *(2 * x for _, x, _ in points))
    return [(ends[0], ends[0] * target["bandwidth_gbs"] / 1e3), (crossover, target["peak_tflops"]), (ends[1], target["peak_tflops"])]


def _draw_roofline(found: Document, ax: Any) -> None:
    crossover, points = found["target"]["crossover"], _placed(found)
    ax.loglog(*zip(*_roof(found, points), strict=True), color="black")
    ax.axvline(crossover, color="grey", linestyle=":", label=f"crossover {crossover:.1f} FLOP/byte")
    # Points often coincide: each is smaller than the one before.
    for place, (name, intensity, tflops) in enumerate(points):
        ax.scatter(intensity, tflops, s=300 / (place + 1), label=name, zorder=3)
    ax.set(title="Roofline", xlabel="FLOP per byte (counted)", ylabel="TFLOP/s")
    ax.legend(loc="lower right")


def _draw_times(found: Document, ax: Any) -> None:
    names, times, *_ = zip(*_timed(found), strict=True)
    ax.bar_label(ax.barh(names, times), fmt="{:,.1f}", padding=4)
    ax.margins(x=0.15)
    ax.invert_yaxis()
    ax.set(title="Time by step, microseconds", xlabel="measured median" if found["measured"] else "least possible time")
