"""Alembic's environment, run from the installed package: no alembic.ini is needed."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection

FOLDER = Path(__file__).parent
"""Holds env.py and the revisions; the tests point it at a copy with a later revision."""


def alembic_config(connection: Connection) -> Config:
    """The settings of every Alembic command on this connection."""
    config = Config()
    config.set_main_option("script_location", str(FOLDER).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection) -> None:
    """Bring the schema to the newest revision, inside the transaction that the caller has begun on `connection`."""
    command.upgrade(alembic_config(connection), "head")
