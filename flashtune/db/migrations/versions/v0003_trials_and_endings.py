"""Trial times of all candidates; the reason why trials ended, and the expected regret."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, and copy the times of candidates that weren't in a closing race, which are trial times."""
    op.add_column("run", sa.Column("ended_by", sa.String(64), nullable=True))
    op.add_column("run", sa.Column("expected_regret", sa.Float(53), nullable=True))
    names = ("median_us", "q10_us", "q90_us", "min_us", "samples")
    copied = ", ".join(f"trial_{name} = {name}" for name in names)
    op.execute(f"UPDATE trial SET {copied} WHERE finalist = 0 AND source = 'measured' AND trial_median_us IS NULL")
