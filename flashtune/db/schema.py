"""Tables: `problem` (one row per key), `run` (one search of one problem) and `trial` (one outcome of a run); runs share rows of
`provenance`, and trials those of `candidate`.

Values that must be read back exactly (features, configs) are stored as canonical JSON text, and flags as 0 or 1, so that
`flashtune.db.rows` validates the raw values of the file. Times are microseconds.
"""

from typing import Any

from sqlalchemy import BigInteger, Column, Float, ForeignKey, Index, Integer, MetaData, SmallInteger, String, Table, Text, UniqueConstraint
from sqlalchemy.types import TypeEngine

from flashtune.db import rows
from flashtune.db.values import NAME_LENGTH

# Every constraint has a name, so that migrations can name it on any database.
METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

_TYPES: dict[TypeEngine[Any], tuple[str, ...]] = {
    String(16): ("dtype", "direction", "fate", "source", "law"),
    String(NAME_LENGTH): (
        *("gpu", "flashtune", "torch", "triton", "created_at", "baseline_backend", "ended_by"),
        *("template", "template_hash", "variant_id"),
    ),
    String(255): ("race_throttled_by",),
    Text(): ("driver", "gpu_name", "clocks", "command", "config", "reason"),
    BigInteger(): ("seed",),
    SmallInteger(): ("finalist",),
    Float(53): ("race_power_w", "expected_regret", "max_error"),
}
"""Types of columns; those that end in `_us` are times, and all others are whole numbers."""

_TYPE_OF = {name: kind for kind, names in _TYPES.items() for name in names}
_OPTIONAL = {
    *("seed", "law", "longest", "ended_by", "expected_regret", "candidates", "max_error", "rank", "call_us", *rows.FACTS),
    *(name for name in rows.RUN if name.startswith(("baseline_", "race_"))),
    *(f"{prefix}{name}" for prefix in ("", "trial_") for name in rows.TIMES),
}


def _table(name: str, columns: tuple[str, ...], *others: Column[int] | UniqueConstraint | Index, **types: TypeEngine[Any]) -> Table:
    """Table with an id and these columns, of their own types or those given here."""
    return Table(
        name,
        METADATA,
        Column("id", Integer, primary_key=True),
        *(Column(column, types.get(column) or _TYPE_OF.get(column) or _number(column), nullable=column in _OPTIONAL) for column in columns),
        *others,
    )


def _number(column: str) -> TypeEngine[Any]:
    return Float(53) if column.endswith("_us") else Integer()


def _pointer(table: str) -> Column[int]:
    return Column(f"{table}_id", Integer, ForeignKey(f"{table}.id"), nullable=False)


# Columns in the key's order: the unique index serves look-ups by any leading columns.
PROBLEM = _table("problem", rows.PROBLEM, UniqueConstraint(*rows.PROBLEM), features=String(255))
PROVENANCE = _table("provenance", rows.PROVENANCE)
RUN = _table("run", rows.RUN, _pointer("problem"), _pointer("provenance"), Index(None, "problem_id"), features=Text())
# Two writers at once may add a candidate twice.
CANDIDATE = _table("candidate", rows.CANDIDATE)
TRIAL = _table("trial", rows.TRIAL, _pointer("run"), _pointer("candidate"), UniqueConstraint("run_id", "number"))
