"""Alembic migrations, run from the installed package without an alembic.ini."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

FOLDER = Path(__file__).parent
"""Folder of env.py and the revisions; tests replace it by a copy with a later revision."""


def alembic_config(connection: Connection) -> Config:
    """Alembic configuration for commands on this connection."""
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection) -> None:
    """Upgrade the schema to the newest revision, in the caller's open transaction on `connection`."""
    command.upgrade(alembic_config(connection), "head")
