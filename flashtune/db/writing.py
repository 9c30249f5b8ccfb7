"""Search results as checked rows, and their insertion: shared by `Store.save` and `Store.export`."""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Insert, insert, select

from flashtune.core.errors import InputError
from flashtune.core.results import SearchResult
from flashtune.db import rows
from flashtune.db.rows import Row, RowError
from flashtune.db.schema import ProblemRow, RunRow, TrialRow


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRows:
    """One search result as the rows of the three tables, without their ids."""

    problem: dict[str, Any]
    run: dict[str, Any]
    trials: list[dict[str, Any]]

    @classmethod
    def of(cls, result: SearchResult) -> "ResultRows":
        """The rows of `result`; raises InputError where they could not be read back, such as a time of zero."""
        key = rows.key_row(result.problem.key(result.gpu))
        run = rows.run_row(result)
        trials = [rows.trial_row(outcome, number) for number, outcome in enumerate(result.outcomes)]
        try:
            rows.read_problem(Row(run), rows.read_key(Row(key)))
            rows.read_provenance(Row(run))
            rows.read_baseline(Row(run))
            for trial in trials:
                rows.read_outcome(Row(trial))
        except RowError as error:
            raise InputError(f"this search result can't be kept: {error}") from error
        return cls(problem=key, run=run, trials=trials)

    def insert(self, connection: Connection) -> None:
        """Add them to the open transaction; a problem that is there already is used again."""
        same_key = [getattr(ProblemRow, name) == value for name, value in self.problem.items()]
        problem_id = connection.execute(select(ProblemRow.id).where(*same_key)).scalar()
        if problem_id is None:
            problem_id = _inserted(connection, insert(ProblemRow).values(**self.problem))
        run_id = _inserted(connection, insert(RunRow).values(**self.run, problem_id=problem_id))
        if self.trials:
            connection.execute(insert(TrialRow), [{**trial, "run_id": run_id} for trial in self.trials])


def _inserted(connection: Connection, statement: Insert) -> int:
    """The id of the row that `statement` adds."""
    key = connection.execute(statement).inserted_primary_key
    assert key is not None
    return int(key[0])
