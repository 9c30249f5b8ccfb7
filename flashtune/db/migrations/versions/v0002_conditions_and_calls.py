"""Times of whole calls, GPU conditions of the closing race, trial times of final candidates, and the fate `unchecked`."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns, and mark predicted trials without an error as unchecked."""
    for name, kind in (
        ("baseline_call_us", sa.Float(53)),
        ("race_samples", sa.Integer()),
        ("race_sm_clock_mhz", sa.Integer()),
        ("race_memory_clock_mhz", sa.Integer()),
        ("race_power_w", sa.Float(53)),
        ("race_temperature_c", sa.Integer()),
        ("race_throttled_by", sa.String(255)),
        ("race_other_processes", sa.Integer()),
    ):
        op.add_column("run", sa.Column(name, kind, nullable=True))
    for name in ("trial_median_us", "trial_q10_us", "trial_q90_us", "trial_min_us"):
        op.add_column("trial", sa.Column(name, sa.Float(53), nullable=True))
    op.add_column("trial", sa.Column("trial_samples", sa.Integer(), nullable=True))
    op.add_column("trial", sa.Column("call_us", sa.Float(53), nullable=True))
    # Every check recorded an error, so trials without one are of families that no interpreter runs.
    op.execute("UPDATE trial SET fate = 'unchecked' WHERE fate = 'correct' AND source = 'predicted' AND max_error IS NULL")
