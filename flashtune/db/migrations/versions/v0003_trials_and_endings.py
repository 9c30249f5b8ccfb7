"""Times among the trials for all candidates and not for finalists alone; why trials ended, and the regret that was expected."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; what didn't race was timed among the trials alone."""
    op.add_column("run", sa.Column("ended_by", sa.String(64), nullable=True))
    op.add_column("run", sa.Column("expected_regret", sa.Float(53), nullable=True))
    names = ("median_us", "q10_us", "q90_us", "min_us", "samples")
    copied = ", ".join(f"trial_{name} = {name}" for name in names)
    op.execute(f"UPDATE trial SET {copied} WHERE finalist = 0 AND source = 'measured' AND trial_median_us IS NULL")
