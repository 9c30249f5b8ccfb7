"""Facts of the schema (its versions, its tables, the marks by which a file is known), and the checked values of rows."""

from typing import Final

from flashtune.core.records.checked import (
    FEATURES_LENGTH,
    IDENTIFIER,
    LARGEST,
    NAME_LENGTH,
    TEXT_LENGTH,
    UNPRINTABLE,
    Row,
    RowError,
    read_key,
    tidy,
)

__all__ = ["FEATURES_LENGTH", "IDENTIFIER", "LARGEST", "NAME_LENGTH", "TEXT_LENGTH", "UNPRINTABLE", "Row", "RowError", "read_key", "tidy"]

SCHEMA_VERSION: Final = "0006"
"""Newest Alembic revision; revisions are four digits that count upwards."""

OLDEST_VERSION: Final = "0005"
"""The first migration's revision; only flashtunes before 0.1.0 wrote earlier ones."""

VERSION_TABLE: Final = "flashtune_schema"
"""Table with Alembic's revision; its name is our own, so that no other application's database is mistaken for ours."""

APPLICATION_ID: Final = 0x464C5455
"""SQLite's `application_id` of a tuned database ("FLTU"): bytes 68 to 71 of the file."""

TABLES: Final = ("problem", "run", "trial", "provenance", "candidate")
"""The tables of flashtune.db.schema."""
