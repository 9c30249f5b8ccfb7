"""Tables and sentences of a profile, for both the terminal and the report.

1 MiB = 2^20 bytes, 1 MB = 10^6 bytes.
"""

from dataclasses import dataclass

from flashtune.profiler.measured import Measured, Timed
from flashtune.profiler.summary import Profile, Row

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Table of text cells: words in the first column, figures in the others. The last `summary_rows` rows sum up the others."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    summary_rows: int = 0


def heading(profile: Profile) -> str:
    """Heading with the problem in one line."""
    name = "forward" if profile.problem.direction == "fwd" else "backward"
    return f"Attention {name}: {shape(profile)}, elementwise steps {profile.elementwise}"


def shape(profile: Profile) -> str:
    """Sizes of the problem; Hkv and Nq only where they differ from H and N."""
    p = profile.problem
    heads = f"H={p.heads}" + (f" Hkv={p.kv_heads}" if p.kv_heads != p.heads else "")
    sizes = f"N={p.n_kv}" + (f" Nq={p.n_q}" if p.n_q != p.n_kv else "")
    return f"B={p.batch} {heads} {sizes} D={p.d} {p.dtype}" + (" causal" if p.features.causal else "")


def target_line(profile: Profile) -> str:
    """The target with the three rates that bound a step, and its crossover."""
    target = profile.target
    return (
        f"Target: {target.name} ({CHOSEN[profile.chosen_by]}): {profile.peak_tflops:g} TFLOP/s {profile.problem.dtype}, "
        f"{target.bandwidth_gbs:g} GB/s, {target.exp_per_second / 1e12:.2f} T exp/s; crossover {profile.crossover:.1f} FLOP/byte"
    )


def verdict(profile: Profile) -> tuple[str, ...]:
    """Conclusions from the counts, in sentences."""
    standard, fused = profile.standard, profile.fused
    step = standard.step
    return (
        f"S is {step.score_share:.1%} of the standard pipeline's traffic: {mib(step.score_bytes)} of {mib(step.bytes)} MiB "
        f"({mb(step.score_bytes)} of {mb(step.bytes)} MB).",
        f"Fusing moves {step.bytes / fused.step.bytes:.1f} times fewer bytes; the floor falls from {standard.floor_us:.1f} "
        f"to {fused.floor_us:.1f} us, and the bound of the fused kernel is {fused.bound}.",
    )


def counted_tables(profile: Profile) -> tuple[Table, ...]:
    """Tables of tensors, steps and strategies; the last with measurements where there are any."""
    tensors = tuple((name, mib(size), mb(size)) for name, size in profile.tensors.items())
    steps = (
        *(_counted(row, row.step.name) for row in profile.steps),
        _counted(profile.standard, "standard, all steps"),
        _counted(profile.fused, "fused kernel"),
    )
    columns = ("read MiB", "write MiB", "total MiB", "total MB", "GFLOP", "FLOP/byte", "bound", "floor us")
    return (
        Table(title="Tensors", columns=("tensor", "MiB", "MB"), rows=tensors),
        Table(title="Counted bytes and operations, and the target's floor", columns=("step", *columns), rows=steps, summary_rows=2),
        _strategies(profile),
    )


def measured_tables(profile: Profile, measured: Measured) -> tuple[Table, ...]:
    """Tables of measured steps, whole attentions, latency against N, and the transformer layer."""
    achieved = ("TFLOP/s", "of peak", "TB/s", "of peak")
    found = []
    if measured.steps:
        rows = tuple(
            (step.name, us(step.time_us), f"{step.time_us / measured.steps_us:.1%}", *_achieved(profile, step)) for step in measured.steps
        )
        title = "Steps of the standard pipeline, each timed by itself"
        found.append(Table(title=title, columns=("step", "us", "share", *achieved), rows=rows))
    kinds = tuple((KINDS[kind.name], us(kind.time_us), *_achieved(profile, kind)) for kind in measured.kinds)
    note = f"the tuned kernel was served by {measured.served_by}"
    found.append(Table(title="Whole attentions", columns=("attention", "us", *achieved), rows=kinds, note=note))
    sizes = sorted({n for series in measured.scaling for n, _ in series.points})
    scaling = []
    for series in measured.scaling:
        times = dict(series.points)
        cells = [us(times[n]) if n in times else "-" for n in sizes]
        scaling.append((KINDS[series.name], *cells, "-" if series.exponent is None else f"{series.exponent:.2f}"))
    columns = ("us at N =", *(str(n) for n in sizes), "exponent")
    note = "exponent p of time ~ N^p, fitted to the three largest N"
    found.append(Table(title="Latency against N", columns=columns, rows=tuple(scaling), note=note))
    if measured.layer:
        found.append(_layer(profile, measured))
    return tuple(found)


def mib(count: int) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.2f}"


def mb(count: int) -> str:
    """Bytes in MB."""
    return f"{count / 1e6:.2f}"


def us(time_us: float) -> str:
    """Microseconds."""
    return f"{time_us:.1f}"


def _counted(row: Row, name: str) -> tuple[str, ...]:
    step = row.step
    sizes = (mib(step.read_bytes), mib(step.write_bytes), mib(step.bytes), mb(step.bytes))
    return (name, *sizes, f"{step.flops / 1e9:.3f}", f"{step.intensity:.2f}", row.bound, us(row.floor_us))


def _strategies(profile: Profile) -> Table:
    rows = []
    for strategy in profile.strategies:
        row, run = profile.row(strategy), profile.run_of(strategy)
        name, *counted = _counted(row, f"{strategy.name}: {strategy.what}")
        measured = (us(run.measurement.median_us), f"{run.relative_error:.1e}") if run else ("-", "-")
        rows.append((name, *counted[2:], *(measured if profile.measured else ())))
    columns = ("strategy", "total MiB", "total MB", "GFLOP", "FLOP/byte", "bound", "floor us")
    if not profile.measured:
        return Table(title="Strategies side by side", columns=columns, rows=tuple(rows))
    return Table(title="Strategies side by side", columns=(*columns, "measured us", "error"), rows=tuple(rows), note=ERROR_NOTE)


def _layer(profile: Profile, measured: Measured) -> Table:
    layer = measured.layer
    assert layer is not None, "the caller checked that the layer was measured"
    others = (us(layer.projections_us), us(layer.mlp_us))
    rows = tuple((KINDS[name], us(time_us), *others, f"{layer.share(name):.1%}") for name, time_us in layer.attention_us.items())
    width = profile.problem.heads * profile.problem.d
    return Table(
        title=f"One transformer layer of width {width}",
        columns=("attention", "attention us", "projections us", "MLP us", "attention's share"),
        rows=rows,
        note="norms and residuals are not counted",
    )


def _achieved(profile: Profile, timed: Timed) -> tuple[str, ...]:
    bandwidth = profile.target.bandwidth_gbs / 1e3
    return (
        f"{timed.tflops:.1f}",
        f"{timed.tflops / profile.peak_tflops:.1%}",
        f"{timed.tbs:.2f}",
        f"{timed.tbs / bandwidth:.1%}",
    )
