"""Lengths of packed sequences: their spread in the key, their law and the longest one in the run."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

KEY = ("gpu", "n", "d", "dtype", "direction", "d_v", "n_q", "features", "gqa_ratio", "bh_bucket")


def upgrade() -> None:
    """Add the columns; no earlier row is of packed sequences."""
    op.add_column("run", sa.Column("law", sa.String(16), nullable=True))
    op.add_column("run", sa.Column("longest", sa.Integer(), nullable=True))
    bind = op.get_bind()
    unique = sa.UniqueConstraint(*KEY, "spread", name="uq_problem_gpu")
    if bind.dialect.name == "sqlite":
        # It can neither add a column that is never NULL without a default nor change a constraint.
        table = sa.Table("problem", sa.MetaData(), autoload_with=bind)
        columns = [sa.Column(column.name, column.type, nullable=False) for column in table.c]
        key = sa.PrimaryKeyConstraint("id", name="pk_problem")
        made = op.create_table("made", *columns, sa.Column("spread", sa.Integer(), nullable=False), key, unique)
        op.execute(made.insert().from_select([*table.c.keys(), "spread"], sa.select(*table.c, sa.literal(0))))
        op.drop_table("problem")
        op.rename_table("made", "problem")
    else:
        op.add_column("problem", sa.Column("spread", sa.Integer(), nullable=True))
        op.execute("UPDATE problem SET spread = 0")
        op.alter_column("problem", "spread", existing_type=sa.Integer(), nullable=False)
        op.drop_constraint("uq_problem_gpu", "problem", type_="unique")
        op.create_unique_constraint("uq_problem_gpu", "problem", [*KEY, "spread"])
