"""Records as JSON objects and as tables; field names, once shipped, are kept."""

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

from rich.console import Console

from flashtune.cli.console import console, fitted, messages
from flashtune.core.records.results import Fate, TuningRecord
from flashtune.core.system.secrets import mask_url
from flashtune.templates import unservable
from flashtune.templates.expected import Likely, likely

PREDICTED_NOTE = (
    "predicted: ranked by a cost model from the compiler's figures for that GPU (registers, spills, shared memory) and the GPU's "
    "datasheet; nothing was run there. In the range lie eight in ten of the problems that were measured on an H100 or H200. Run the same "
    "search on the GPU to measure; measured records always come first."
)


POWER_LIMITED = "power-limited"
"""A measured record's remark that the card's power limit, and nothing else, lowered its clocks."""

DOUBTS = {
    "unservable": "can't be used on its own GPU, however fast it is, for the reason below; exports leave it out.",
    "unchecked": "predicted, without a check of its results: no interpreter runs its template. `flashtune verify` on the GPU checks it.",
    POWER_LIMITED: "the card's power limit lowered its clocks while it was timed, as under any sustained load; ratios hold (--json has the "
    "clocks).",
    "throttled": "the GPU's clocks were throttled while it was timed; --json has the cause. Search again when the GPU is cool and free.",
    "shared": "another process used the GPU while it was timed. Search again when the GPU is free.",
}
"""Doubts about a record and their explanations."""

NAMED = 5
"""Number of unservable records that are listed with the reason."""


NARROW = 100
"""Width in characters below which a table leaves out the doubts behind a record's source."""

COLUMNS = ("problem", "B x H", "template", "us", "call us", "TFLOP/s", "vs PyTorch", "as calls", "source", "config")
"""Columns of a table; some are left out where no record has a value."""
EXPLAINED = {
    "us": "the kernel's time in microseconds (~: predicted, with its likely range)",
    "call us": "that of a whole call, host included",
    "vs PyTorch": "PyTorch's time over the kernel's, with PyTorch's backend",
    "as calls": "the same for whole calls, by which calls are decided",
}
"""Columns that need an explanation, and it."""
RISING: dict[str, Callable[[TuningRecord], str | float | None]] = {
    "problem": lambda record: record.problem.label(),
    "us": lambda record: record.median_us,
    "call us": lambda record: record.outcome.call_us,
}
"""Columns in whose order records may be printed, the least value first."""
FALLING: dict[str, Callable[[TuningRecord], float | None]] = {
    "TFLOP/s": lambda record: record.tflops,
    "vs PyTorch": lambda record: record.framework_us and record.framework_us / record.median_us,
    "as calls": lambda record: record.framework_call_us and record.outcome.call_us and record.framework_call_us / record.outcome.call_us,
}
"""Those of the greatest value first."""
SPARED = ("call us", "as calls", "TFLOP/s", "B x H", "vs PyTorch")
"""Columns that a narrow terminal lacks, in the order in which they are left out: problems that are cut look alike."""
WHOLE = 1 << 16
"""Width of what is printed in full, so that the terminal may break lines."""
WORDS = ("B x H", "template", "vs PyTorch", "source", "config")


def likely_of(record: TuningRecord) -> Likely | None:
    """Range of a predicted record's time; None for a measured one."""
    outcome = record.outcome
    return None if outcome.source == "measured" else likely(outcome.template, record.key.direction, record.median_us)


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
        "likely_us": None if (range_us := likely_of(record)) is None else [round(us, 3) for us in range_us],
        "tflops": round(record.tflops, 2),
        "framework_us": _rounded(record.framework_us),
        "framework": record.baseline.backend if record.baseline else None,
        "d_v": key.d_v,
        "n_q": key.n_q,
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "law": problem.lengths.law if problem.lengths else None,
        "longest": problem.lengths.longest if problem.lengths else None,
        "template_hash": outcome.template_hash,
        "origin": record.origin,
        "fate": str(outcome.fate),
        "call_us": _rounded(outcome.call_us),
        "framework_call_us": _rounded(record.framework_call_us),
        "unservable": unservable(record),
        "trial_us": _rounded(outcome.trial.median_us if outcome.trial else None),
        "provenance": record.provenance.as_json(),
        "ended_by": record.ending.reason if record.ending else None,
        "expected_regret": record.ending.regret if record.ending else None,
        "candidates": record.ending.candidates if record.ending else None,
        "provider": record.fastest(lambda name: True),
        "providers_call_us": {name: _rounded(us) for name, us in record.provider_times().items()},
    }


def predicted_only(location: str | None) -> str:
    """The way to use the predicted records of a database (None: the user's own), in two sentences."""
    database = "" if location is None else f"{mask_url(location)!r}, "
    return (
        "Predicted records are not used by default. To use them: "
        f"dispatch.use({database}unmeasured=True), or FLASHTUNE_UNMEASURED=1 in the environment."
    )


def servable(records: Sequence[TuningRecord], reason: Callable[[TuningRecord], str | None] = unservable) -> list[TuningRecord]:
    """Records that this version can use; those with a `reason` why not are listed with it on standard error."""
    found = []
    for record in records:
        if why := reason(record):
            messages().print(f"left out: {record.key.gpu} {record.problem.label()}: {why}")
        else:
            found.append(record)
    return found


def _rounded(time_us: float | None) -> float | None:
    return None if time_us is None else round(time_us, 3)


def ordered(records: Sequence[TuningRecord], column: str | None, most: int | None) -> list[TuningRecord]:
    """At most so many records in the order of a column, those without a value last."""
    if column is None:
        return list(records[:most])
    values = [((RISING | FALLING)[column](record), record) for record in records]
    known = [(value, record) for value, record in values if value is not None]
    known.sort(key=itemgetter(0), reverse=column in FALLING)
    return [*(record for _, record in known), *(record for value, record in values if value is None)][:most]


def print_records(
    records: Sequence[TuningRecord], *, title: str | None = None, wide: bool = False, out: Console | None = None, explained: bool = False
) -> None:
    """Print records as a table, and explanations of its terms; `wide` adds columns that don't fit a terminal, such as the config.

    The ratios are PyTorch's time over ours: on the GPU alone, and as whole calls, host included. `explained` adds what the columns mean.
    """
    rows = [(record, unservable(record)) for record in records]
    whole = True
    for gpu in dict.fromkeys(record.key.gpu for record in records):
        whole &= _print_table([row for row in rows if row[0].key.gpu == gpu], title=title or gpu, wide=wide, out=out)
    if notes := _notes(rows, whole=whole):
        (out or console()).print(notes)
    if explained:
        (out or console()).print("; ".join(f"{name}: {meaning}" for name, meaning in EXPLAINED.items()) + ".")


def _print_table(rows: Sequence[tuple[TuningRecord, str | None]], *, title: str, wide: bool, out: Console | None) -> bool:
    """Print the records of one GPU, each with the reason if it can't be used; False where the terminal lacks room for a column."""
    calls = any(record.outcome.call_us is not None for record, _ in rows)
    left_out = {*(() if wide else ("template", "config")), *(() if calls else ("call us", "as calls"))}
    columns = [name for name in COLUMNS if name not in left_out]
    out = console(width=WHOLE) if wide else out or console()
    lines = [cells_of(record, why, wide) for record, why in rows]
    if out.width < NARROW:
        lines = [{**line, "source": line["source"].partition(",")[0]} for line in lines]
    cells = [[line[name] for name in columns] for line in lines]
    marked = {line["source"] for line in lines} - {"measured"}
    # Where problems of one label differ in batch and heads, that column stays, and what has no room goes on below.
    alike = len({line["problem"] for line in lines}) < len(lines)
    spared = [name for name in SPARED if not (alike and name == "B x H")]
    table = fitted(title, columns, cells, width=out.width, words=WORDS, marked=marked, blanks=1, spared=spared, least=WHOLE, folded=True)
    out.print(table)
    return len(table.columns) == len(columns)


def cells_of(r: TuningRecord, why: str | None = None, wide: bool = False) -> dict[str, str]:
    """Texts of one record by column."""
    range_us = likely_of(r)
    measured = range_us is None
    said = (r.outcome.source, *doubts_of(r, why))
    if not wide:
        # Predicted records always show their source; measured ones only their weightiest doubt, which a power limit is none of.
        weighty = tuple(word for word in said if word != POWER_LIMITED)
        said = weighty[:2][-1:] if measured else weighty[:2]
    faster = f" < {provider}" if (provider := r.fastest(lambda name: True)) else ""
    return {
        "problem": r.problem.label() + _named(r),
        "B x H": f"{r.problem.batch}x{r.problem.heads}",
        "template": r.outcome.template,
        "us": f"{r.median_us:.1f}" if range_us is None else f"~{range_us.about:.0f} ({range_us.low:.0f}-{range_us.high:.0f})",
        "call us": "" if r.outcome.call_us is None else f"{r.outcome.call_us:.{1 if r.outcome.call_us < 100 else 0}f}",
        "TFLOP/s": f"{r.tflops:.0f}" if range_us is None else f"~{r.tflops * r.median_us / range_us.about:.0f}",
        "vs PyTorch": ""
        if r.baseline is None
        else f"{_times(r.baseline.measurement.median_us / r.median_us)} {r.baseline.backend}{faster}",
        "as calls": _times(r.framework_call_us / r.outcome.call_us) if r.framework_call_us and r.outcome.call_us else "",
        "source": ", ".join(said),
        "config": short_config(r.outcome.config.as_dict()),
    }


def _named(record: TuningRecord) -> str:
    """Names of a record's functions, where this process was given their files: a database holds only their hash."""
    if not record.problem.features.mods:
        return ""
    from flashtune.templates.mods.known import NAMED

    found = NAMED.get(record.problem.features.mods)
    return "" if found is None else f" ({', '.join(text.rpartition(':')[2] for text in found if text)})"


def _times(ratio: float) -> str:
    return f"{ratio:.{2 if ratio < 9.995 else 1}f}x"


def _notes(rows: Sequence[tuple[TuningRecord, str | None]], *, whole: bool) -> str:
    """A line for each term of the table that needs an explanation, for unservable records, and for columns that were left out."""
    doubts = {doubt for record, why in rows for doubt in doubts_of(record, why)}
    lines = [PREDICTED_NOTE] if any(record.outcome.source == "predicted" for record, _ in rows) else []
    lines += ["< NAME: that provider's whole calls were faster"] if any(record.fastest(lambda name: True) for record, _ in rows) else []
    lines += [f"{doubt}: {note}" for doubt, note in DOUBTS.items() if doubt in doubts]
    refused = [f"  {record.key.gpu} {record.problem.label()}: {why}" for record, why in rows if why]
    more = [f"  and {len(refused) - NAMED} more (--json names all)"] if len(refused) > NAMED else []
    rest = [] if whole else ["show --wide has the other columns."]
    return "\n".join([*lines, *refused[:NAMED], *more, *rest])


def doubts_of(record: TuningRecord, unservable: str | None) -> tuple[str, ...]:
    """Doubts about a record, keys of `DOUBTS`, the weightiest first."""
    conditions = record.provenance.conditions
    return (
        *(("unservable",) if unservable else ()),
        *((str(Fate.UNCHECKED),) if record.outcome.fate is Fate.UNCHECKED else ()),
        *(
            (POWER_LIMITED if doubt == "throttled" and conditions.power_limited else doubt for doubt in conditions.doubts)
            if conditions
            else ()
        ),
    )


def short_config(values: dict[str, Any]) -> str:
    """Short text of a config: `128x64 w4 s3`, then the other axes by name."""
    rest = dict(values)
    parts = []
    if "BLOCK_M" in rest and "BLOCK_N" in rest:
        parts.append(f"{rest.pop('BLOCK_M')}x{rest.pop('BLOCK_N')}")
    parts += [f"{short}{rest.pop(name)}" for name, short in (("num_warps", "w"), ("num_stages", "s")) if name in rest]
    return " ".join([*parts, *(f"{name}={value}" for name, value in rest.items())])
