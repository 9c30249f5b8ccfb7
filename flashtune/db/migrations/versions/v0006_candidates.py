"""The number of candidates that a run's search had, beside the reason why its trials ended."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, empty for earlier runs."""
    op.add_column("run", sa.Column("candidates", sa.Integer()))
