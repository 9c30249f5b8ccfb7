"""Search results as checked rows, and their insertion into a store or a new file."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Insert, insert, select

from flashtune.core.errors import InputError
from flashtune.core.results import SearchResult
from flashtune.db import rows
from flashtune.db.schema import ProblemRow, RunRow, TrialRow
from flashtune.db.sqlite_file import export_file
from flashtune.db.values import Row, RowError


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRows:
    """Rows of one search result in the three tables, without ids."""

    problem: dict[str, Any]
    run: dict[str, Any]
    trials: list[dict[str, Any]]

    @classmethod
    def of(cls, result: SearchResult) -> "ResultRows":
        """Rows of `result`; raises InputError where they could not be read back, such as a time of zero."""
        key = asdict(result.problem.key(result.gpu))
        run = rows.run_row(result)
        trials = [rows.trial_row(outcome, number) for number, outcome in enumerate(result.outcomes)]
        try:
            found = rows.read_run(Row(run), rows.read_key(Row(key)))
            for trial in trials:
                rows.refuse_impossible(result.gpu, result.problem, rows.read_outcome(Row(trial)), found["baseline"])
        except RowError as error:
            raise InputError(f"this search result can't be saved: {error}") from error
        return cls(problem=key, run=run, trials=trials)

    def insert(self, connection: Connection, *, once: bool = False) -> None:
        """Add the rows in the open transaction; an existing row of the problem is reused.

        With `once`, nothing is added where the same run is there already.
        """
        same_key = [getattr(ProblemRow, name) == value for name, value in self.problem.items()]
        problem_id = connection.execute(select(ProblemRow.id).where(*same_key).with_for_update()).scalar()
        if once and problem_id is not None and self._is_there(connection, problem_id):
            return
        if problem_id is None:
            problem_id = _inserted(connection, insert(ProblemRow).values(**self.problem))
        run_id = _inserted(connection, insert(RunRow).values(**self.run, problem_id=problem_id))
        if self.trials:
            connection.execute(insert(TrialRow), [{**trial, "run_id": run_id} for trial in self.trials])

    def _is_there(self, connection: Connection, problem_id: int) -> bool:
        """True if a run of this problem equals this one in all columns and trials."""
        same_run = [getattr(RunRow, name) == value for name, value in self.run.items()]
        for run_id in connection.execute(select(RunRow.id).where(RunRow.problem_id == problem_id, *same_run)).scalars().all():
            found = connection.execute(select(TrialRow.__table__).where(TrialRow.run_id == run_id).order_by(TrialRow.number)).mappings()
            trials = [{name: value for name, value in row.items() if name not in ("id", "run_id")} for row in found]
            if trials == self.trials:
                return True
        return False


def write_file(path: Path, results: Sequence[SearchResult], *, replace: bool) -> None:
    """Write a compact database with these results to a single file; `replace` allows it to replace another one."""
    prepared = [ResultRows.of(result) for result in results]

    def work(connection: Connection) -> None:
        for one in prepared:
            one.insert(connection)

    export_file(path, work, replace=replace)


def _inserted(connection: Connection, statement: Insert) -> int:
    """Insert a row and return its id."""
    key = connection.execute(statement).inserted_primary_key
    assert key is not None
    return int(key[0])
