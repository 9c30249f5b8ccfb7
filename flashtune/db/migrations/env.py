"""Environment that Alembic runs for every command, on the connection of `flashtune.db.migrations.upgrade`."""

from alembic import context
from sqlalchemy import Connection

from flashtune.db.schema import METADATA
from flashtune.db.values import VERSION_TABLE

connection: Connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=METADATA, version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
