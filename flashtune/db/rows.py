"""Conversion of core values to database rows and back. Rows are untrusted: every value is checked before it becomes a core value.

The same checks run when a result is saved, so that everything written can be read again. Free text (reasons, commands, driver names) is
tidied when it is saved: control characters become blanks and long texts are cut.
"""

import math
from dataclasses import asdict, fields
from datetime import UTC, datetime
from typing import Any

from flashtune.core.gpu import limits
from flashtune.core.problems.config import RUNNING, Config, settles
from flashtune.core.problems.lengths import LAWS, Lengths
from flashtune.core.problems.problem import Features, Problem, ProblemKey
from flashtune.core.records import versions
from flashtune.core.records.results import (
    PROVIDERS,
    SOURCES,
    Baseline,
    CompileFacts,
    Conditions,
    Ending,
    Fate,
    Finding,
    Measurement,
    Outcome,
    Provenance,
    SearchResult,
    Source,
)
from flashtune.core.system.errors import InputError
from flashtune.core.system.words import canonical, shown
from flashtune.db.values import FEATURES_LENGTH, IDENTIFIER, LARGEST, NAME_LENGTH, TEXT_LENGTH, UNPRINTABLE, Row, RowError, tidy

SHORTEST_TIME_US = 1e-3
"""Smallest time in microseconds, about two clocks of a GPU; ratios of times in these bounds are finite."""
LONGEST_TIME_US = 1e12
MOST_WATTS = 1e6
COLDEST_C = -273
REASONS_LENGTH = 255

RUNNING_PATTERN = f"%{RUNNING.as_json()[1:-1]}%"
"""SQL LIKE pattern of configs with the online softmax, whose kernels update the row max in every block."""

TIMES = tuple(field.name for field in fields(Measurement))
FACTS = tuple(field.name for field in fields(CompileFacts))
PROBLEM = tuple(field.name for field in fields(ProblemKey))
_TEXTS = {
    **dict.fromkeys(("flashtune", "torch", "triton"), NAME_LENGTH),
    **dict.fromkeys(("driver", "gpu_name", "clocks", "command"), TEXT_LENGTH),
}
"""Most characters of a provenance's texts."""
PROVENANCE = (*_TEXTS, "seed")
RUN = (
    *("batch", "heads", "kv_heads", "features", "law", "longest", "created_at", "baseline_backend"),
    *(f"baseline_{name}" for name in TIMES),
    "baseline_call_us",
    *(f"race_{field.name}" for field in fields(Conditions)),
    *("ended_by", "expected_regret", "candidates"),
)
CANDIDATE = ("template", "config")
TRIAL = (
    *("number", "template_hash", "variant_id", "fate", "source", "reason"),
    *TIMES,
    *FACTS,
    *("max_error", "finalist", "rank"),
    *(f"trial_{name}" for name in TIMES),
    "call_us",
)
"""Columns of the tables, without ids. A row of a run holds its provenance's too, and a row of a trial its candidate's."""

SETTLED = '"maximum":"first"'
"""Part of the text of configs with frozen row maxima, which have fallback kernels."""

_QUANTILES = ("min_us", "q10_us", "median_us", "q90_us")
FATES = tuple(str(fate) for fate in Fate)
"""Words of `Fate` in rows."""


def run_row(result: SearchResult) -> dict[str, object]:
    """Columns of `run` and `provenance` (without ids)."""
    problem, provenance, baseline = result.problem, result.provenance, result.baseline
    # Features.as_json omits an alignment without effect; the run keeps it, so that the problem read back is equal.
    aligned = {} if problem.features.alignment == "top_left" else {"alignment": problem.features.alignment}
    return {
        "batch": problem.batch,
        "heads": problem.heads,
        "kv_heads": problem.kv_heads,
        "features": canonical({**problem.features.as_json(), **aligned}),
        **({"law": None, "longest": None} if problem.lengths is None else asdict(problem.lengths)),
        **{name: tidy(getattr(provenance, name), limit) for name, limit in _TEXTS.items()},
        "seed": provenance.seed,
        "created_at": provenance.created_at,
        "baseline_backend": tidy(baseline.backend, NAME_LENGTH) if baseline else None,
        **_measurement_columns(baseline.measurement if baseline else None, "baseline_"),
        "baseline_call_us": baseline.call_us if baseline else None,
        **{f"race_{field.name}": getattr(provenance.conditions, field.name, None) for field in fields(Conditions)},
        "ended_by": result.ending.reason if result.ending else None,
        "expected_regret": result.ending.regret if result.ending else None,
        "candidates": result.ending.candidates if result.ending else None,
    }


def read_run(row: Row, key: ProblemKey) -> dict[str, Any]:
    """Fields of a run with this key, without its trials, by their names in `TuningRecord` and `SearchResult`."""
    return {
        "problem": read_problem(row, key),
        "provenance": read_provenance(row),
        "baseline": read_baseline(row),
        "ending": read_ending(row),
    }


def read_problem(row: Row, key: ProblemKey) -> Problem:
    """Exact problem of a run with this key; raises RowError where the two don't agree."""
    heads, kv_heads = row.integer("heads", 1), row.integer("kv_heads", 1)
    if heads % kv_heads:
        raise RowError("kv_heads", f"is {kv_heads}, which does not divide {heads} heads")
    try:
        features = Features.from_json(row.json("features", FEATURES_LENGTH))
        problem = Problem(
            batch=row.integer("batch", 1),
            heads=heads,
            kv_heads=kv_heads,
            n_q=key.n_q,
            n_kv=key.n,
            d=key.d,
            d_v=key.d_v,
            dtype=key.dtype,
            features=features,
            direction=key.direction,
            lengths=_read_lengths(row),
        )
    except InputError as error:
        raise RowError("features", f"makes no sense: {error}") from error
    if features.window is not None and any(side is not None and side > LARGEST for side in features.window):
        raise RowError("features", "has a window that is too large")
    if features.page > LARGEST:
        raise RowError("features", "has a page that is too large")
    expected = problem.key(key.gpu)
    if expected != key:
        name = next(field.name for field in fields(ProblemKey) if getattr(expected, field.name) != getattr(key, field.name))
        found, right = getattr(key, name), getattr(expected, name)
        raise RowError(name, f"of the problem is {shown(found)}, but the run's sizes and features give {shown(right)}")
    return problem


def _read_lengths(row: Row) -> Lengths | None:
    if row.missing("law"):
        if not row.missing("longest"):
            raise RowError("longest", "is set, but law is missing")
        return None
    return Lengths(law=row.one_of("law", LAWS), longest=row.integer("longest", 1))


def read_provenance(row: Row) -> Provenance:
    """Provenance of a run."""
    texts = {name: row.text(name, limit=limit, empty=True) for name, limit in _TEXTS.items()}
    return Provenance(
        **texts,
        seed=None if row.missing("seed") else row.integer("seed", -(2**63), 2**63 - 1),
        created_at=read_created_at(row),
        conditions=_read_conditions(row),
    )


def _read_conditions(row: Row) -> Conditions | None:
    if row.missing("race_samples"):
        stray = next((name for field in fields(Conditions) if not row.missing(name := f"race_{field.name}")), None)
        if stray is not None:
            raise RowError("race_samples", f"is missing, but {stray} is set")
        return None

    def integer(name: str, low: int) -> int | None:
        return None if row.missing(name) else row.integer(name, low)

    return Conditions(
        samples=row.integer("race_samples", 1),
        sm_clock_mhz=integer("race_sm_clock_mhz", 0),
        memory_clock_mhz=integer("race_memory_clock_mhz", 0),
        power_w=None if row.missing("race_power_w") else row.real("race_power_w", zero=True, most=MOST_WATTS),
        temperature_c=integer("race_temperature_c", COLDEST_C),
        throttled_by=None if row.missing("race_throttled_by") else row.text("race_throttled_by", limit=REASONS_LENGTH, empty=True),
        other_processes=integer("race_other_processes", 0),
    )


def read_created_at(row: Row) -> str:
    """Time at which a run began; empty where it is missing."""
    text = row.text("created_at", limit=NAME_LENGTH, empty=True)
    try:
        moment(text)
    except ValueError as error:
        raise RowError("created_at", f"is {shown(text)}, not a time in ISO 8601") from error
    return text


def moment(created_at: str) -> datetime:
    """Creation time for comparisons; a missing one counts as the oldest, and one without a zone as UTC."""
    if not created_at:
        return datetime.min.replace(tzinfo=UTC)
    found = datetime.fromisoformat(created_at)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def read_baseline(row: Row) -> Baseline | None:
    """PyTorch's time in a run, or None where it was not timed."""
    measurement = _read_measurement(row, "baseline_")
    if measurement is None:
        for column in ("baseline_backend", "baseline_call_us"):
            if not row.missing(column):
                raise RowError(column, "is set, but PyTorch's times are missing")
        return None
    backend = row.text("baseline_backend", limit=NAME_LENGTH)
    return Baseline(backend=backend, measurement=measurement, call_us=_read_time(row, "baseline_call_us"))


def read_ending(row: Row) -> Ending | None:
    """Reason why a run's trials ended, or None where it wasn't recorded."""
    if row.missing("ended_by"):
        for column in ("expected_regret", "candidates"):
            if not row.missing(column):
                raise RowError(column, "is set, but ended_by is missing")
        return None
    regret = None if row.missing("expected_regret") else row.real("expected_regret", zero=True)
    candidates = None if row.missing("candidates") else row.integer("candidates", 0)
    return Ending(reason=row.word("ended_by"), regret=regret, candidates=candidates)


def trial_row(outcome: Outcome, number: int) -> dict[str, object]:
    """Columns of `trial` and `candidate` (without ids); a NaN error is stored as infinity, since databases have no NaN."""
    error = outcome.max_error
    return {
        "number": number,
        "template": outcome.template,
        "template_hash": outcome.template_hash,
        "variant_id": outcome.variant_id,
        "config": outcome.config.as_json(),
        "fate": str(outcome.fate),
        "source": outcome.source,
        "reason": tidy(outcome.reason),
        **_measurement_columns(outcome.measurement),
        **{name: getattr(outcome.facts, name, None) for name in FACTS},
        "max_error": math.inf if error is not None and math.isnan(error) else error,
        "finalist": int(outcome.finalist),
        "rank": outcome.rank,
        **_measurement_columns(outcome.trial, "trial_"),
        "call_us": outcome.call_us,
    }


def read_outcome(row: Row) -> Outcome:
    """Outcome in a row of `trial`; raises RowError where its values contradict each other."""
    fate = Fate(row.one_of("fate", FATES))
    source: Source = row.one_of("source", SOURCES)
    measurement = _read_measurement(row)
    trial = _read_measurement(row, "trial_")
    if fate is Fate.UNCHECKED and source != "predicted":
        raise RowError("fate", f"is {fate}, but the trial's source is {source}")
    if measurement is not None and not fate.timed:
        raise RowError("median_us", f"is set, but the trial's fate is {fate}")
    if measurement is not None and (measurement.samples > 0) != (source == "measured"):
        raise RowError("samples", f"is {measurement.samples}, but the trial's source is {source}")
    if trial is not None and (trial.samples == 0 or source != "measured"):
        raise RowError("trial_samples", f"is {trial.samples}, but the trial's source is {source}")
    for column in ("rank", "trial_median_us", "call_us"):
        if not row.missing(column) and measurement is None:
            raise RowError(column, "is set, but the trial has no time")
    if not row.missing("call_us") and source != "measured":
        raise RowError("call_us", f"is set, but the trial's source is {source}")
    name = row.values["template"]
    if name in PROVIDERS and fate.timed and row.missing("call_us"):
        raise RowError("template", f"is {name}, of which whole calls are timed, and there is no such time")
    if name in PROVIDERS and name != "flex" and not versions.is_versions(row.json("config", TEXT_LENGTH)):
        raise RowError("template", f"is {name}, whose config holds versions alone")
    return Outcome(
        template=row.text("template", limit=NAME_LENGTH, pattern=IDENTIFIER),
        template_hash=row.word("template_hash"),
        variant_id=row.word("variant_id"),
        config=_read_config(row),
        fate=fate,
        source=source,
        reason=row.text("reason", limit=TEXT_LENGTH, empty=True),
        measurement=measurement,
        facts=_read_facts(row),
        max_error=None if row.missing("max_error") else row.real("max_error", zero=True, infinite=not fate.timed),
        finalist=row.integer("finalist", 0, 1) == 1,
        rank=None if row.missing("rank") else row.integer("rank", 1),
        trial=trial,
        call_us=_read_time(row, "call_us"),
    )


def read_finding(row: Row, origin: str) -> Finding:
    """Finding of a failed trial in a database of this name, with the template and the config of its candidate and its run's versions."""
    cause = row.text("reason", limit=TEXT_LENGTH, empty=True)
    fate, known = Fate(row.one_of("fate", FATES)), None
    if row.values["template"] in PROVIDERS:
        run = {name: row.text(name, limit=_TEXTS[name], empty=True) for name in ("torch", "triton", "driver")}
        known = versions.known_by(_read_config(row), **run)
    return Finding(
        gpu=row.word("gpu"),
        variant_id=row.word("variant_id"),
        found_at=read_created_at(row),
        reason=cause if known is not None else f"{fate}: {cause}",
        origin=origin,
        provider="" if known is None else str(row.values["template"]),
        versions=known,
    )


def outdated(outcome: Outcome) -> bool:
    """True for options of FlexAttention, which earlier versions tuned in runs of their own: such runs aren't read."""
    return outcome.template == "flex" and not versions.is_versions(outcome.config.as_dict())


def fallback_of(outcome: Outcome, row: Row | None) -> Outcome | None:
    """Fallback kernel of a run's winner from the best trial of RUNNING_PATTERN in the run, or None."""
    if row is None or not settles(outcome.config):
        return None
    fallback = read_outcome(row)
    return fallback if fallback.template == outcome.template and fallback.fate is Fate.CORRECT and fallback.source == "measured" else None


def refuse_impossible(gpu: str, problem: Problem, outcome: Outcome, baseline: Baseline | None) -> None:
    """Raise RowError for measured times below a kernel's lower bound on this GPU, or PyTorch's above its upper bound."""
    if outcome.source != "measured" or outcome.measurement is None:
        return
    least = limits.least_us(problem, gpu)
    for column, time_us in (("median_us", outcome.measurement.median_us), ("call_us", outcome.call_us)):
        if time_us is not None and time_us < least:
            raise RowError(
                column, f"is {time_us:g}, but on {gpu} no kernel computes {problem.label()} in less than {least:.3g} microseconds"
            )
    if baseline is None:
        return
    most = limits.most_framework_us(problem, gpu)
    for column, time_us in (("baseline_median_us", baseline.measurement.median_us), ("baseline_call_us", baseline.call_us)):
        if time_us is not None and time_us > most:
            raise RowError(column, f"is {time_us:g}, but on {gpu} torch computes {problem.label()} within {most:.3g} microseconds")


def _read_config(row: Row) -> Config:
    values = row.json("config", TEXT_LENGTH)
    for axis, value in values.items():
        if not IDENTIFIER.fullmatch(axis) or len(axis) > NAME_LENGTH:
            raise RowError("config", f"has the impossible axis {shown(axis)}")
        if type(value) is str:
            if len(value) > NAME_LENGTH or UNPRINTABLE.search(value):
                raise RowError("config", f"has {axis}={shown(value)}, which is no axis value")
        elif type(value) is int:
            if abs(value) > LARGEST:
                raise RowError("config", f"has {axis}={shown(value)}, which is too large")
        elif type(value) is not bool:
            raise RowError("config", f"has {axis}={shown(value)}, not a number, text or flag")
    return Config.of(values)


def _read_facts(row: Row) -> CompileFacts | None:
    if all(row.missing(name) for name in FACTS):
        return None
    return CompileFacts(**{name: row.integer(name, 0) for name in FACTS})


def _measurement_columns(measurement: Measurement | None, prefix: str = "") -> dict[str, object]:
    return {f"{prefix}{name}": getattr(measurement, name, None) for name in TIMES}


def _read_measurement(row: Row, prefix: str = "") -> Measurement | None:
    if all(row.missing(f"{prefix}{name}") for name in TIMES):
        return None
    times = {name: _time(row, f"{prefix}{name}") for name in _QUANTILES}
    ordered = [times[name] for name in _QUANTILES]
    if ordered != sorted(ordered):
        raise RowError(f"{prefix}median_us", f"and the other quantiles are out of order: {ordered}")
    return Measurement(**times, samples=row.integer(f"{prefix}samples", 0))


def _read_time(row: Row, column: str) -> float | None:
    return None if row.missing(column) else _time(row, column)


def _time(row: Row, column: str) -> float:
    time_us = row.real(column, most=LONGEST_TIME_US)
    if time_us < SHORTEST_TIME_US:
        raise RowError(column, f"is {time_us} microseconds, less than a nanosecond")
    return time_us
