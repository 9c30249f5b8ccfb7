"""The winners of the database inside the package, read with sqlite3 alone: a new process's first call doesn't wait for SQLAlchemy."""

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from flashtune.core.results import TuningRecord
from flashtune.db import rows
from flashtune.db.rows import Row

_TABLES = ("problem", "run", "trial")

# What Store.winners asks for; a test compares the two.
_FIRST_OF_EACH_RUN = f"""
    WITH ranked AS (
        SELECT id, row_number() OVER (PARTITION BY run_id ORDER BY coalesce(rank, {rows.LARGEST}), median_us, variant_id, number) AS place
        FROM trial WHERE {{which}}
    )
    SELECT {{columns}} FROM ranked JOIN trial ON trial.id = ranked.id
"""
_WINNERS = f"""
    {_FIRST_OF_EACH_RUN} JOIN run ON run.id = trial.run_id JOIN problem ON problem.id = run.problem_id
    WHERE place = 1 ORDER BY run.id DESC
"""
_TWINS = f"{_FIRST_OF_EACH_RUN} WHERE place = 1"


def winners(path: Path) -> list[TuningRecord]:
    """The candidate of every run in the package's own database, newest run first, each value checked as always.

    Raises sqlite3.Error or RowError where the file isn't what was shipped.
    """
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro&immutable=1", uri=True)) as connection:
        names = {table: [row[1] for row in connection.execute(f"PRAGMA table_info({table})")] for table in _TABLES}
        columns = ", ".join(f"{table}.{name}" for table in _TABLES for name in names[table])
        found = connection.execute(_WINNERS.format(which="median_us IS NOT NULL OR rank IS NOT NULL", columns=columns)).fetchall()
        trial_columns = ", ".join(f"trial.{name}" for name in names["trial"])
        asked = _TWINS.format(which=f"median_us IS NOT NULL AND config LIKE '{rows.RUNNING_PATTERN}'", columns=trial_columns)
        running = [dict(zip(names["trial"], values, strict=True)) for values in connection.execute(asked)]
    twins = {fields["run_id"]: Row(fields) for fields in running}
    records = []
    for values in found:
        rest = iter(values)
        problem_row, run, trial = (Row({name: next(rest) for name in names[table]}) for table in _TABLES)
        key, outcome = rows.read_key(problem_row), rows.read_outcome(trial)
        records.append(
            TuningRecord(
                key=key,
                problem=rows.read_problem(run, key),
                outcome=outcome,
                provenance=rows.read_provenance(run),
                baseline=rows.read_baseline(run),
                ending=rows.read_ending(run),
                twin=rows.twin_of(outcome, twins.get(trial.values["run_id"])),
                origin=str(path),
            )
        )
    return records
