"""The first tables: problem, run and trial."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables, and mark a SQLite file as ours."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"PRAGMA application_id = {0x464C5455}")
    _create_problem()
    _create_run()
    _create_trial()


def _create_problem() -> None:
    op.create_table(
        "problem",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("gpu", sa.String(64), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("d", sa.Integer(), nullable=False),
        sa.Column("dtype", sa.String(16), nullable=False),
        sa.Column("direction", sa.String(16), nullable=False),
        sa.Column("d_v", sa.Integer(), nullable=False),
        sa.Column("n_q", sa.Integer(), nullable=False),
        sa.Column("features", sa.String(255), nullable=False),
        sa.Column("gqa_ratio", sa.Integer(), nullable=False),
        sa.Column("bh_bucket", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_problem"),
        sa.UniqueConstraint(
            "gpu", "n", "d", "dtype", "direction", "d_v", "n_q", "features", "gqa_ratio", "bh_bucket", name="uq_problem_gpu"
        ),
    )


def _create_run() -> None:
    op.create_table(
        "run",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("problem_id", sa.Integer(), nullable=False),
        sa.Column("batch", sa.Integer(), nullable=False),
        sa.Column("heads", sa.Integer(), nullable=False),
        sa.Column("kv_heads", sa.Integer(), nullable=False),
        sa.Column("features", sa.Text(), nullable=False),
        sa.Column("flashtune", sa.String(64), nullable=False),
        sa.Column("torch", sa.String(64), nullable=False),
        sa.Column("triton", sa.String(64), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("gpu_name", sa.Text(), nullable=False),
        sa.Column("clocks", sa.Text(), nullable=False),
        sa.Column("command", sa.Text(), nullable=False),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.String(64), nullable=False),
        sa.Column("baseline_backend", sa.String(64), nullable=True),
        sa.Column("baseline_median_us", sa.Float(53), nullable=True),
        sa.Column("baseline_q10_us", sa.Float(53), nullable=True),
        sa.Column("baseline_q90_us", sa.Float(53), nullable=True),
        sa.Column("baseline_min_us", sa.Float(53), nullable=True),
        sa.Column("baseline_samples", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_run_problem_id"),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
    )
    op.create_index("ix_run_problem_id", "run", ["problem_id"])


def _create_trial() -> None:
    op.create_table(
        "trial",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("template", sa.String(64), nullable=False),
        sa.Column("template_hash", sa.String(64), nullable=False),
        sa.Column("variant_id", sa.String(64), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("fate", sa.String(16), nullable=False),
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("median_us", sa.Float(53), nullable=True),
        sa.Column("q10_us", sa.Float(53), nullable=True),
        sa.Column("q90_us", sa.Float(53), nullable=True),
        sa.Column("min_us", sa.Float(53), nullable=True),
        sa.Column("samples", sa.Integer(), nullable=True),
        sa.Column("registers", sa.Integer(), nullable=True),
        sa.Column("spills", sa.Integer(), nullable=True),
        sa.Column("shared_bytes", sa.Integer(), nullable=True),
        sa.Column("threads", sa.Integer(), nullable=True),
        sa.Column("tensor_core_ops", sa.Integer(), nullable=True),
        sa.Column("max_error", sa.Float(53), nullable=True),
        sa.Column("finalist", sa.SmallInteger(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_trial_run_id"),
        sa.PrimaryKeyConstraint("id", name="pk_trial"),
        sa.UniqueConstraint("run_id", "number", name="uq_trial_run_id"),
    )
    op.create_index("ix_trial_best", "trial", ["run_id", "rank", "median_us"])
