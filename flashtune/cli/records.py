"""Records as JSON rows and as tables; field names, once shipped, are kept."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from flashtune.core.results import Fate, TuningRecord

PREDICTED_NOTE = (
    "predicted: ranked by a cost model over what the compiler said for that GPU (registers, spills, shared memory) and the GPU's "
    "datasheet; nothing was run there. Run the same search on the GPU to measure; measured rows always come first."
)


def record_row(record: TuningRecord) -> dict[str, Any]:
    """One record as `show --json` prints it."""
    key, problem, outcome = record.key, record.problem, record.outcome
    return {
        "gpu": key.gpu,
        "n": key.n,
        "d": key.d,
        "dtype": key.dtype,
        "direction": key.direction,
        "features": problem.features.as_json(),
        "template": outcome.template,
        "variant": outcome.variant_id,
        "config": outcome.config.as_dict(),
        "source": outcome.source,
        "median_us": round(record.median_us, 3),
        "tflops": round(record.tflops, 2),
        "framework_us": _rounded(record.framework_us),
        "framework": record.baseline.backend if record.baseline else None,
        "d_v": key.d_v,
        "n_q": key.n_q,
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "template_hash": outcome.template_hash,
        "origin": record.origin,
        "fate": str(outcome.fate),
        "call_us": _rounded(outcome.call_us),
        "framework_call_us": _rounded(record.framework_call_us),
        "trial_us": _rounded(outcome.trial.median_us if outcome.trial else None),
        "provenance": record.provenance.as_json(),
    }


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 3)


def record_table(records: Sequence[TuningRecord], title: str | None = None) -> Table:
    """Records for people; the ratio is the framework's time over ours."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in ("gpu", "problem", "B x H", "template", "config", "source"):
        table.add_column(name, overflow="fold")
    for name in ("us", "call us", "TFLOP/s", "vs framework"):
        table.add_column(name, justify="right")
    for r in records:
        framework = "" if r.framework_us is None or r.baseline is None else f"{r.framework_us / r.median_us:.2f}x {r.baseline.backend}"
        heads = f"{r.problem.batch} x {r.problem.heads}"
        source = source_of(r) if r.outcome.source == "measured" else f"[yellow]{source_of(r)}[/yellow]"
        time_us = f"{r.median_us:.1f}" if r.outcome.source == "measured" else f"~{r.median_us:.0f}"
        call = "" if r.outcome.call_us is None else f"{r.outcome.call_us:.1f}"
        config = short_config(r.outcome.config.as_dict())
        table.add_row(r.key.gpu, r.problem.label(), heads, r.outcome.template, config, source, time_us, call, f"{r.tflops:.0f}", framework)
    return table


def source_of(record: TuningRecord) -> str:
    """Where a record's time comes from, and what speaks against it: `measured`, `measured, throttled`, `predicted, unchecked`."""
    conditions = record.provenance.conditions
    unchecked = (str(Fate.UNCHECKED),) if record.outcome.fate is Fate.UNCHECKED else ()
    return ", ".join((record.outcome.source, *unchecked, *(conditions.doubts if conditions else ())))


def short_config(values: dict[str, Any]) -> str:
    """`128x64 w4 s3`, then the other axes by name."""
    rest = dict(values)
    parts = []
    if "BLOCK_M" in rest and "BLOCK_N" in rest:
        parts.append(f"{rest.pop('BLOCK_M')}x{rest.pop('BLOCK_N')}")
    parts += [f"{short}{rest.pop(name)}" for name, short in (("num_warps", "w"), ("num_stages", "s")) if name in rest]
    return " ".join([*parts, *(f"{name}={value}" for name, value in rest.items())])
