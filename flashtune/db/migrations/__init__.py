"""Alembic's environment, run from the installed package: no alembic.ini is needed."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

VERSION_FOLDERS: list[Path] = [Path(__file__).parent / "versions"]
"""Where revisions are found; the tests add a later one of their own."""


def alembic_config(connection: Connection) -> Config:
    """The settings of every Alembic command on this connection."""
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(map(str, VERSION_FOLDERS)).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection) -> None:
    """Bring the schema to the newest revision, inside the transaction that the caller has begun on `connection`."""
    command.upgrade(alembic_config(connection), "head")
