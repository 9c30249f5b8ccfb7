"""Search results as checked rows, and their insertion into a store or a new file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Table, delete, insert, or_, select

from flashtune.core.records.results import SearchResult
from flashtune.core.system.errors import InputError
from flashtune.db import rows
from flashtune.db.schema import CANDIDATE, PROBLEM, PROVENANCE, RUN, TRIAL
from flashtune.db.sqlite_file import export_file
from flashtune.db.values import Row, RowError, read_key

AT_ONCE = 500
"""Number of configs of one query; old SQLite allows 999 parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRows:
    """Rows of one search result in the tables, without ids."""

    problem: dict[str, Any]
    provenance: dict[str, Any]
    run: dict[str, Any]
    trials: list[dict[str, Any]]
    """Rows of `trial`, each with the columns of its row of `candidate`."""

    @classmethod
    def of(cls, result: SearchResult) -> "ResultRows":
        """Rows of `result`; raises InputError where they could not be read back, such as a time of zero."""
        key = asdict(result.problem.key(result.gpu))
        run = rows.run_row(result)
        trials = [rows.trial_row(outcome, number) for number, outcome in enumerate(result.outcomes)]
        try:
            found = rows.read_run(Row(run), read_key(Row(key)))
            for trial in trials:
                rows.refuse_impossible(result.gpu, result.problem, rows.read_outcome(Row(trial)), found["baseline"])
        except RowError as error:
            raise InputError(f"this search result can't be saved: {error}") from error
        provenance = {name: run.pop(name) for name in rows.PROVENANCE}
        return cls(problem=key, provenance=provenance, run=run, trials=trials)

    def insert(self, connection: Connection, *, once: bool = False, replacing: bool = False) -> None:
        """Add the rows in the open transaction; existing rows of the problem, provenance and candidates are reused.

        With `once`, nothing is added where the same run is there already, and one without the last of these trials or the baseline is
        replaced; with `replacing`, all other runs of the problem are deleted.
        """
        problem_id = _found_or_added(connection, PROBLEM, self.problem)
        if replacing:
            _delete(connection, list(connection.execute(select(RUN.c.id).where(RUN.c.problem_id == problem_id)).scalars()))
        saved = self._saved(connection, problem_id) if once else {}
        if any(saved.values()):
            return
        _delete(connection, list(saved))
        provenance_id = _found_or_added(connection, PROVENANCE, self.provenance)
        run_id = _added(connection, RUN, {**self.run, "problem_id": problem_id, "provenance_id": provenance_id})
        candidates = _candidate_ids(connection, [(one["template"], one["config"]) for one in self.trials])
        trials = [
            {name: one[name] for name in rows.TRIAL} | {"run_id": run_id, "candidate_id": candidates[one["template"], one["config"]]}
            for one in self.trials
        ]
        if trials:
            connection.execute(insert(TRIAL), trials)

    def _saved(self, connection: Connection, problem_id: int) -> dict[int, bool]:
        """Ids of runs of this problem that equal this one in all columns and trials that they have, True for those with all of them."""
        found: dict[int, bool] = {}
        same_run = [
            or_(RUN.c[name] == value, RUN.c[name].is_(None)) if name.startswith("baseline_") else RUN.c[name] == value
            for name, value in self.run.items()
        ]
        same_run += [PROVENANCE.c[name] == value for name, value in self.provenance.items()]
        runs = select(RUN.c.id, RUN.c.baseline_backend, RUN.c.baseline_call_us).join(PROVENANCE)
        columns = [*(TRIAL.c[name] for name in rows.TRIAL), *(CANDIDATE.c[name] for name in rows.CANDIDATE)]
        baseline = self.run["baseline_backend"], self.run["baseline_call_us"]
        for run_id, *its_baseline in connection.execute(runs.where(RUN.c.problem_id == problem_id, *same_run)).all():
            trials = select(*columns).select_from(TRIAL).join(CANDIDATE).where(TRIAL.c.run_id == run_id).order_by(TRIAL.c.number)
            rows_there = [dict(one) for one in connection.execute(trials).mappings()]
            if rows_there == self.trials[: len(rows_there)]:
                found[run_id] = len(rows_there) == len(self.trials) and tuple(its_baseline) == baseline
        return found


def _delete(connection: Connection, runs: list[int]) -> None:
    """Delete these runs with their trials."""
    connection.execute(delete(TRIAL).where(TRIAL.c.run_id.in_(runs)))
    connection.execute(delete(RUN).where(RUN.c.id.in_(runs)))


def _found_or_added(connection: Connection, table: Table, values: dict[str, Any]) -> int:
    """Id of the row with these values, which is added where there is none."""
    same = [table.c[name] == value for name, value in values.items()]
    found = connection.execute(select(table.c.id).where(*same).limit(1).with_for_update()).scalar()
    return _added(connection, table, values) if found is None else int(found)


def _added(connection: Connection, table: Table, values: dict[str, Any]) -> int:
    """Id of a new row."""
    key = connection.execute(insert(table).values(values)).inserted_primary_key
    assert key is not None
    return int(key[0])


def _candidate_ids(connection: Connection, wanted: list[tuple[str, str]]) -> dict[tuple[str, str], int]:
    """Ids of the rows of `candidate` with these templates and configs; those that are missing are added."""
    found: dict[tuple[str, str], int] = {}
    distinct = list(dict.fromkeys(wanted))
    for start in range(0, len(distinct), AT_ONCE):
        configs = {config for _, config in distinct[start : start + AT_ONCE]}
        there = select(CANDIDATE.c.id, CANDIDATE.c.template, CANDIDATE.c.config).where(CANDIDATE.c.config.in_(configs))
        found.update({(template, config): number for number, template, config in connection.execute(there)})
    for template, config in distinct:
        if (template, config) not in found:
            found[template, config] = _added(connection, CANDIDATE, {"template": template, "config": config})
    return found


def write_file(path: Path, results: Sequence[SearchResult], *, replace: bool) -> None:
    """Write a compact database with these results to a single file; `replace` allows it to replace another one."""
    prepared = [ResultRows.of(result) for result in results]

    def work(connection: Connection) -> None:
        for one in prepared:
            one.insert(connection)

    export_file(path, work, replace=replace)
