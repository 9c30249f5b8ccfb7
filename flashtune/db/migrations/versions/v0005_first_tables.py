"""The first tables: problem, run and trial, and those of provenances and candidates, which many runs and trials share."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = None
branch_labels = None
depends_on = None

Kinds = dict[str, sa.types.TypeEngine[Any]]

KEY: Kinds = {
    "gpu": sa.String(64),
    **dict.fromkeys(("n", "d"), sa.Integer()),
    **dict.fromkeys(("dtype", "direction"), sa.String(16)),
    **dict.fromkeys(("d_v", "n_q"), sa.Integer()),
    "features": sa.String(255),
    **dict.fromkeys(("gqa_ratio", "bh_bucket", "spread"), sa.Integer()),
}
PROVENANCE: Kinds = {
    **dict.fromkeys(("flashtune", "torch", "triton"), sa.String(64)),
    **dict.fromkeys(("driver", "gpu_name", "clocks", "command"), sa.Text()),
}
RUN: Kinds = {
    **dict.fromkeys(("problem_id", "batch", "heads", "kv_heads"), sa.Integer()),
    "features": sa.Text(),
    "created_at": sa.String(64),
    "provenance_id": sa.Integer(),
}
RUN_OPTIONS: Kinds = {
    "baseline_backend": sa.String(64),
    **dict.fromkeys(("baseline_median_us", "baseline_q10_us", "baseline_q90_us", "baseline_min_us"), sa.Float(53)),
    "baseline_samples": sa.Integer(),
    "baseline_call_us": sa.Float(53),
    **dict.fromkeys(("race_samples", "race_sm_clock_mhz", "race_memory_clock_mhz"), sa.Integer()),
    "race_power_w": sa.Float(53),
    "race_temperature_c": sa.Integer(),
    "race_throttled_by": sa.String(255),
    "race_other_processes": sa.Integer(),
    "ended_by": sa.String(64),
    "expected_regret": sa.Float(53),
    "law": sa.String(16),
    "longest": sa.Integer(),
}
TRIAL: Kinds = {
    **dict.fromkeys(("run_id", "number"), sa.Integer()),
    **dict.fromkeys(("template_hash", "variant_id"), sa.String(64)),
    **dict.fromkeys(("fate", "source"), sa.String(16)),
    "reason": sa.Text(),
    "finalist": sa.SmallInteger(),
    "candidate_id": sa.Integer(),
}
TRIAL_OPTIONS: Kinds = {
    **dict.fromkeys(("median_us", "q10_us", "q90_us", "min_us"), sa.Float(53)),
    **dict.fromkeys(("samples", "registers", "spills", "shared_bytes", "threads", "tensor_core_ops"), sa.Integer()),
    "max_error": sa.Float(53),
    "rank": sa.Integer(),
    **dict.fromkeys(("trial_median_us", "trial_q10_us", "trial_q90_us", "trial_min_us"), sa.Float(53)),
    "trial_samples": sa.Integer(),
    "call_us": sa.Float(53),
}


def upgrade() -> None:
    """Create the tables, and mark a SQLite file as ours."""
    if op.get_bind().dialect.name == "sqlite":
        op.execute(f"PRAGMA application_id = {0x464C5455}")
    _create("problem", KEY, {}, sa.UniqueConstraint(*KEY, name="uq_problem_gpu"))
    _create("provenance", PROVENANCE, {"seed": sa.BigInteger()})
    _create("run", RUN, RUN_OPTIONS, _points("run", "problem"), _points("run", "provenance"))
    op.create_index("ix_run_problem_id", "run", ["problem_id"])
    _create("candidate", {"template": sa.String(64), "config": sa.Text()}, {})
    once = sa.UniqueConstraint("run_id", "number", name="uq_trial_run_id")
    _create("trial", TRIAL, TRIAL_OPTIONS, _points("trial", "run"), _points("trial", "candidate"), once)


def _create(name: str, columns: Kinds, options: Kinds, *others: sa.Constraint) -> None:
    """Create a table with an id and these columns, of which the options may be NULL."""
    op.create_table(
        name,
        sa.Column("id", sa.Integer(), nullable=False),
        *(sa.Column(column, kind, nullable=False) for column, kind in columns.items()),
        *(sa.Column(column, kind, nullable=True) for column, kind in options.items()),
        sa.PrimaryKeyConstraint("id", name=f"pk_{name}"),
        *others,
    )


def _points(name: str, other: str) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint([f"{other}_id"], [f"{other}.id"], name=f"fk_{name}_{other}_id")
