"""Shipped records that have a kernel of ours: those of larger heads are of libraries alone."""

from typing import Any

from flashtune.core.records.results import TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.templates import without_kernel


def with_kernels(**where: Any) -> list[TuningRecord]:
    return [one for one in Library.of(shipped_path()).records(passed_over=without_kernel, **where) if without_kernel(one) is None]
