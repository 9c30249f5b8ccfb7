"""Queries for runs and their winners, in plain SQL that sqlite3 and every server understand, and the values of their rows."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from flashtune.core.problems.problem import ProblemKey
from flashtune.core.records.results import PROVIDERS, REQUALIFIED, Fate, Finding, Outcome, SearchResult, TuningRecord, fastest_in_graphs
from flashtune.db import rows
from flashtune.db.inspection import row_named
from flashtune.db.values import LARGEST, Row, read_key

Values = Sequence[Any]
Execute = Callable[[str, Mapping[str, object]], Sequence[Values]]
"""Runs a query with named parameters (`:name`), and returns its rows."""

_PROBLEM = ("problem.id", *(f"problem.{name}" for name in rows.PROBLEM))
_RUN = ("run.id", *(f"run.{name}" for name in rows.RUN), *(f"provenance.{name}" for name in rows.PROVENANCE))
_TRIAL = (
    *("trial.id", "trial.run_id"),
    *(f"trial.{name}" for name in rows.TRIAL),
    *(f"candidate.{name}" for name in rows.CANDIDATE),
)
_RUNS = "run JOIN provenance ON provenance.id = run.provenance_id JOIN problem ON problem.id = run.problem_id"
_TRIALS = "trial JOIN candidate ON candidate.id = trial.candidate_id"
_OF_RUNS = "trial.run_id IN (SELECT run.id FROM run JOIN problem ON problem.id = run.problem_id WHERE {where})"
_FIRST_OF_EACH_RUN = f"""
    WITH ranked AS (
        SELECT trial.id, row_number() OVER (
            PARTITION BY run_id ORDER BY coalesce(rank, {LARGEST}), median_us, variant_id, number
        ) AS place
        FROM {{source}} WHERE ({{which}}) AND {_OF_RUNS}
    )
    SELECT {{columns}} FROM ranked JOIN {_TRIALS.replace("trial JOIN", "trial ON trial.id = ranked.id JOIN", 1)}
"""
# By time or rank, not by fate, so that an impossible fate is read and refused.
_WINNERS = f"""
    {_FIRST_OF_EACH_RUN} JOIN {_RUNS.replace("run JOIN", "run ON run.id = trial.run_id JOIN", 1)}
    WHERE ranked.place = 1 ORDER BY run.id DESC
"""
_FALLBACKS = f"{_FIRST_OF_EACH_RUN} WHERE ranked.place = 1"
_OF_PROVIDERS = f"candidate.template IN {PROVIDERS}"
_WRONG = f"trial.fate = '{Fate.CORRECTNESS}' AND {_OF_PROVIDERS}"
_CALLED = f"SELECT {', '.join(_TRIAL)} FROM {_TRIALS} WHERE trial.call_us IS NOT NULL AND {_OF_RUNS}"


_FAILURE = (
    *("trial.id", "trial.variant_id", "trial.fate", "trial.reason", "problem.gpu", "run.created_at"),
    *("candidate.template", "candidate.config", "provenance.torch", "provenance.triton", "provenance.driver"),
)
_FAILURES = f"""
    {_RUNS} JOIN trial ON trial.run_id = run.id JOIN candidate ON candidate.id = trial.candidate_id
    WHERE trial.median_us IS NULL AND {{which}}
"""
_ANY_PROVIDER = f"SELECT 1 FROM candidate WHERE {_OF_PROVIDERS} LIMIT 1"


class Found(NamedTuple):
    """Values of the winners of runs, newest run first, of the best trials of RUNNING_PATTERN, and of trials with times of whole calls."""

    winners: Sequence[Values]
    fallbacks: Sequence[Values]
    called: Sequence[Values]


def winners(execute: Execute, where: str = "TRUE", parameters: Mapping[str, object] | None = None, most: int | None = None) -> Found:
    """Winners of the runs (at most so many) of those rows of `problem` that meet the condition.

    Each run's winner is rank 1 of its closing race, or else its fastest correct outcome (ties by variant id).
    """
    first, running = _winning(where, most)
    given = {**(parameters or {}), "running": rows.RUNNING_PATTERN}
    found = execute(first, given)
    settled = any(rows.SETTLED in str(values[-1]) for values in found)
    return Found(found, execute(running, given) if settled else (), execute(_CALLED.format(where=where), parameters or {}))


@functools.cache
def _winning(where: str, most: int | None) -> tuple[str, str]:
    """Queries for winners and for their fallback kernels."""
    limit = "" if most is None else f" LIMIT {most}"
    timed = "median_us IS NOT NULL OR rank IS NOT NULL"
    first = _WINNERS.format(source="trial", which=timed, where=where, columns=", ".join((*_PROBLEM, *_RUN, *_TRIAL)))
    online = "median_us IS NOT NULL AND config LIKE :running"
    running = _FALLBACKS.format(source=_TRIALS, which=online, where=where, columns=", ".join(_TRIAL))
    return first + limit, running + limit


def records(found: Found, name: str) -> list[TuningRecord]:
    """Records of winners; raises DatabaseError, which names the database, for a value that flashtune would not write."""
    fallbacks = {fallback.values["run_id"]: fallback for fallback in (_row(_TRIAL, values) for values in found.fallbacks)}
    called: dict[object, list[Row]] = {}
    for one in (_row(_TRIAL, values) for values in found.called):
        called.setdefault(one.values["run_id"], []).append(one)
    read = (_record(values, fallbacks, called, name) for values in found.winners)
    return [record for record in read if not rows.outdated(record.outcome)]


def _record(values: Values, fallbacks: Mapping[object, Row], called: Mapping[object, Sequence[Row]], name: str) -> TuningRecord:
    key, run, rest = _read_run(values, name)
    trial = _row(_TRIAL, rest)
    with row_named(name, "trial", trial.values["id"]):
        outcome = rows.read_outcome(trial)
        rows.refuse_impossible(key.gpu, run["problem"], outcome, run["baseline"])
    fallback = fallbacks.get(trial.values["run_id"])
    with row_named(name, "trial", "" if fallback is None else fallback.values["id"]):
        running = rows.fallback_of(outcome, fallback)
    mine = called.get(trial.values["run_id"], ())
    with row_named(name, "trial", f"of run {trial.values['run_id']}"):
        in_graphs = _in_graphs_of(outcome, [row for row in mine if row.values["template"] not in PROVIDERS])
        if in_graphs is not None:
            rows.refuse_impossible(key.gpu, run["problem"], in_graphs, None)
    others = []
    for row in mine:
        if row.values["template"] in PROVIDERS:
            with row_named(name, "trial", row.values["id"]):
                others.append(rows.read_outcome(row))
                rows.refuse_impossible(key.gpu, run["problem"], others[-1], None)
    return TuningRecord(key=key, outcome=outcome, fallback=running, in_graphs=in_graphs, providers=tuple(others), origin=name, **run)


def _in_graphs_of(winner: Outcome, called: Sequence[Row]) -> Outcome | None:
    """Kernel that CUDA graphs run in place of a run's winner, from the run's trials whose whole calls were timed, or None."""
    most_us = winner.measurement.median_us if winner.measurement is not None else 0.0
    # Nearly every winner is the fastest, and a look at one number costs less than reading a row.
    faster = (row for row in called if not (isinstance(us := row.values["median_us"], float) and us >= most_us))
    return fastest_in_graphs(winner, map(rows.read_outcome, faster))


def findings(execute: Execute, name: str) -> list[Finding]:
    """Kernels that failed in runs that timed records again, and providers that were wrong in any; raises DatabaseError as `records`
    does."""
    which = [f"run.ended_by = '{REQUALIFIED}' AND NOT {_OF_PROVIDERS}"]
    # All trials are looked at for providers, whose candidates hardly any database has.
    which += [_WRONG] if execute(_ANY_PROVIDER, {}) else []
    found = []
    for one in which:
        for values in execute(f"SELECT {', '.join(_FAILURE)} FROM {_FAILURES.format(which=one)}", {}):
            row = _row(_FAILURE, values)
            with row_named(name, "trial", row.values["id"]):
                found.append(rows.read_finding(row, name))
    return found


class FoundRuns(NamedTuple):
    """Values of runs, oldest first, and of their trials in order."""

    runs: Sequence[Values]
    trials: Sequence[Values]


def runs(execute: Execute, where: str, parameters: Mapping[str, object]) -> FoundRuns:
    """All runs, with all trials, of those rows of `problem` that meet the condition."""
    return FoundRuns(
        execute(f"SELECT {', '.join((*_PROBLEM, *_RUN))} FROM {_RUNS} WHERE {where} ORDER BY run.id", parameters),
        execute(
            f"SELECT {', '.join(_TRIAL)} FROM {_TRIALS} WHERE {_OF_RUNS.format(where=where)} ORDER BY trial.run_id, number", parameters
        ),
    )


def results(found: FoundRuns, name: str) -> list[SearchResult]:
    """Results as they were saved; raises DatabaseError as `records` does."""
    outcomes: dict[object, list[Outcome]] = {}
    for trial in (_row(_TRIAL, values) for values in found.trials):
        with row_named(name, "trial", trial.values["id"]):
            outcomes.setdefault(trial.values["run_id"], []).append(rows.read_outcome(trial))
    place = len(_PROBLEM)
    read = ((values[place], *_read_run(values, name)) for values in found.runs)
    return [
        SearchResult(gpu=key.gpu, outcomes=tuple(outcomes.get(number, ())), **run)
        for number, key, run, _ in read
        if not any(map(rows.outdated, outcomes.get(number, ())))
    ]


def _read_run(values: Values, name: str) -> tuple[ProblemKey, dict[str, Any], Values]:
    """Key and fields of a run, and the values that follow its columns."""
    problem, run = _row(_PROBLEM, values), _row(_RUN, values[len(_PROBLEM) :])
    with row_named(name, "problem", problem.values["id"]):
        key = read_key(problem)
    with row_named(name, "run", run.values["id"]):
        return key, rows.read_run(run, key), values[len(_PROBLEM) + len(_RUN) :]


@functools.cache
def _names(columns: tuple[str, ...]) -> tuple[str, ...]:
    """Columns without their tables."""
    return tuple(column.partition(".")[2] for column in columns)


def _row(columns: tuple[str, ...], values: Values) -> Row:
    return Row(dict(zip(_names(columns), values, strict=False)))
