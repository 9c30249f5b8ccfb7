"""Tables: `problem` (one row per key), `run` (one search of one problem) and `trial` (one outcome of a run); runs share rows of
`provenance`, and trials those of `candidate`.

Values that must be read back exactly (features, configs) are stored as canonical JSON text, and flags as 0 or 1, so that
`flashtune.db.rows` validates the raw values of the file. Times are microseconds.
"""

from typing import Annotated

from sqlalchemy import BigInteger, Float, ForeignKey, Index, Integer, MetaData, SmallInteger, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

PrimaryKey = Annotated[int, mapped_column(Integer, primary_key=True)]
Word = Annotated[str, mapped_column(String(64))]
"""A slug, an identifier or a hash."""
Json = Annotated[str, mapped_column(Text)]
"""Canonical JSON: sorted keys, no blanks."""
FreeText = Annotated[str, mapped_column(Text)]
Count = Annotated[int, mapped_column(Integer)]
OptionalCount = Annotated[int | None, mapped_column(Integer)]
BigNumber = Annotated[int | None, mapped_column(BigInteger)]
Flag = Annotated[int, mapped_column(SmallInteger)]
Microseconds = Annotated[float | None, mapped_column(Float(53))]
Watts = Annotated[float | None, mapped_column(Float(53))]
Ratio = Annotated[float | None, mapped_column(Float(53))]


class Base(DeclarativeBase):
    """Parent of all tables, which names every constraint, so that migrations can name them on any database."""

    metadata = MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_name)s",
            "fk": "fk_%(table_name)s_%(column_0_name)s",
            "pk": "pk_%(table_name)s",
        }
    )


class ProblemRow(Base):
    """Row of one `ProblemKey`, columns in the key's order; the unique index serves look-ups by any leading columns."""

    __tablename__ = "problem"
    __table_args__ = (UniqueConstraint("gpu", "n", "d", "dtype", "direction", "d_v", "n_q", "features", "gqa_ratio", "bh_bucket"),)

    id: Mapped[PrimaryKey]
    gpu: Mapped[Word]
    n: Mapped[Count]
    d: Mapped[Count]
    dtype: Mapped[str] = mapped_column(String(16))
    direction: Mapped[str] = mapped_column(String(16))
    d_v: Mapped[Count]
    n_q: Mapped[Count]
    features: Mapped[str] = mapped_column(String(255))
    gqa_ratio: Mapped[Count]
    bh_bucket: Mapped[Count]


class ProvenanceRow(Base):
    """Row of one command on one machine: the fields of `Provenance` that its runs share."""

    __tablename__ = "provenance"

    id: Mapped[PrimaryKey]
    flashtune: Mapped[Word]
    torch: Mapped[Word]
    triton: Mapped[Word]
    driver: Mapped[FreeText]
    gpu_name: Mapped[FreeText]
    clocks: Mapped[FreeText]
    command: Mapped[FreeText]
    seed: Mapped[BigNumber]


class RunRow(Base):
    """Row of one search of one problem: fields of the `Problem` that the key lacks, conditions and PyTorch's time."""

    __tablename__ = "run"
    __table_args__ = (Index(None, "problem_id"),)

    id: Mapped[PrimaryKey]
    problem_id: Mapped[int] = mapped_column(ForeignKey("problem.id"))
    provenance_id: Mapped[int] = mapped_column(ForeignKey("provenance.id"))
    batch: Mapped[Count]
    heads: Mapped[Count]
    kv_heads: Mapped[Count]
    features: Mapped[Json]
    """Exact features; the key's are rounded."""
    created_at: Mapped[Word]
    """UTC, ISO 8601, or empty."""
    baseline_backend: Mapped[str | None] = mapped_column(String(64))
    baseline_median_us: Mapped[Microseconds]
    baseline_q10_us: Mapped[Microseconds]
    baseline_q90_us: Mapped[Microseconds]
    baseline_min_us: Mapped[Microseconds]
    baseline_samples: Mapped[OptionalCount]
    baseline_call_us: Mapped[Microseconds]
    race_samples: Mapped[OptionalCount]
    """Number of GPU readings during the closing race, which the following columns summarize."""
    race_sm_clock_mhz: Mapped[OptionalCount]
    race_memory_clock_mhz: Mapped[OptionalCount]
    race_power_w: Mapped[Watts]
    race_temperature_c: Mapped[OptionalCount]
    race_throttled_by: Mapped[str | None] = mapped_column(String(255))
    race_other_processes: Mapped[OptionalCount]
    ended_by: Mapped[str | None] = mapped_column(String(64))
    """Reason why the trials ended (`Ending`)."""
    expected_regret: Mapped[Ratio]


class CandidateRow(Base):
    """Row of one template with one config; two writers at once may add it twice."""

    __tablename__ = "candidate"

    id: Mapped[PrimaryKey]
    template: Mapped[Word]
    config: Mapped[Json]


class TrialRow(Base):
    """Row of one outcome; `number` is its place in the run."""

    __tablename__ = "trial"
    __table_args__ = (UniqueConstraint("run_id", "number"),)

    id: Mapped[PrimaryKey]
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    candidate_id: Mapped[int] = mapped_column(ForeignKey("candidate.id"))
    number: Mapped[Count]
    template_hash: Mapped[Word]
    variant_id: Mapped[Word]
    fate: Mapped[str] = mapped_column(String(16))
    source: Mapped[str] = mapped_column(String(16))
    reason: Mapped[FreeText]
    median_us: Mapped[Microseconds]
    q10_us: Mapped[Microseconds]
    q90_us: Mapped[Microseconds]
    min_us: Mapped[Microseconds]
    samples: Mapped[OptionalCount]
    registers: Mapped[OptionalCount]
    spills: Mapped[OptionalCount]
    shared_bytes: Mapped[OptionalCount]
    threads: Mapped[OptionalCount]
    tensor_core_ops: Mapped[OptionalCount]
    max_error: Mapped[Ratio]
    finalist: Mapped[Flag]
    rank: Mapped[OptionalCount]
    trial_median_us: Mapped[Microseconds]
    """Time of a measured candidate among the trials, comparable with other trials. `median_us` and its companions are from the closing
    races for final candidates, else the same as this."""
    trial_q10_us: Mapped[Microseconds]
    trial_q90_us: Mapped[Microseconds]
    trial_min_us: Mapped[Microseconds]
    trial_samples: Mapped[OptionalCount]
    call_us: Mapped[Microseconds]
