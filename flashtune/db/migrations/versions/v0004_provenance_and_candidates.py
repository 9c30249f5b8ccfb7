"""Tables of provenances and of candidates, which many runs and trials share."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

PROVENANCE = {
    **dict.fromkeys(("flashtune", "torch", "triton"), sa.String(64)),
    **dict.fromkeys(("driver", "gpu_name", "clocks", "command"), sa.Text()),
}


def upgrade() -> None:
    """Move what many rows repeat to tables of its own."""
    op.create_table(
        "provenance",
        sa.Column("id", sa.Integer(), nullable=False),
        *(sa.Column(name, kind, nullable=False) for name, kind in PROVENANCE.items()),
        sa.Column("seed", sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_provenance"),
    )
    op.create_table(
        "candidate",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("template", sa.String(64), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_candidate"),
    )
    op.drop_index("ix_run_problem_id", table_name="run")
    op.drop_index("ix_trial_best", table_name="trial")
    _share("run", "provenance", (*PROVENANCE, "seed"), sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_run_problem_id"))
    _share(
        *("trial", "candidate", ("template", "config")),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_trial_run_id"),
        sa.UniqueConstraint("run_id", "number", name="uq_trial_run_id"),
    )
    op.create_index("ix_run_problem_id", "run", ["problem_id"])


def _share(name: str, other: str, columns: tuple[str, ...], *constraints: sa.Constraint) -> None:
    """Move these columns of a table, which has these constraints, to rows of another, which it points to."""
    bind, number = op.get_bind(), f"{other}_id"
    table, shared = (sa.Table(one, sa.MetaData(), autoload_with=bind, resolve_fks=False) for one in (name, other))
    moved = [table.c[column] for column in columns]
    op.execute(shared.insert().from_select(columns, sa.select(*moved).group_by(*moved).order_by(sa.func.min(table.c.id))))
    op.create_index("ix_shared", other, [columns[-2] if name == "run" else columns[-1]])
    # A seed may be NULL, and no seed is so small.
    same = [
        sa.func.coalesce(shared.c[column.name], -1) == sa.func.coalesce(column, -1)
        if column.name == "seed"
        else shared.c[column.name] == column
        for column in moved
    ]
    found = sa.select(sa.func.min(shared.c.id)).where(*same).scalar_subquery()
    points = sa.ForeignKeyConstraint([number], [f"{other}.id"], name=f"fk_{name}_{number}")
    if bind.dialect.name == "sqlite":
        # It can neither add a key to a table nor, before 3.35, drop a column.
        stay = [column for column in table.c if column.name not in columns]
        made = op.create_table(
            "made",
            *(sa.Column(column.name, column.type, nullable=column.nullable) for column in stay),
            sa.Column(number, sa.Integer(), nullable=False),
            *(sa.PrimaryKeyConstraint("id", name=f"pk_{name}"), *constraints, points),
        )
        op.execute(made.insert().from_select([*(column.name for column in stay), number], sa.select(*stay, found)))
        op.drop_table(name)
        op.rename_table("made", name)
    else:
        op.add_column(name, sa.Column(number, sa.Integer(), nullable=True))
        table.append_column(sa.Column(number, sa.Integer()))
        op.execute(table.update().values({number: found}))
        op.alter_column(name, number, existing_type=sa.Integer(), nullable=False)
        op.create_foreign_key(str(points.name), name, other, [number], ["id"])
        for column in columns:
            op.drop_column(name, column)
    op.drop_index("ix_shared", table_name=other)
