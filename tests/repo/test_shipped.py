"""The shipped data: the tuned records are complete, safe and current, and the kernels are exactly what the templates render."""

import pytest
from shipped_rows import with_kernels

from flashtune import dispatch
from flashtune.core.code.shipped import PACKAGE, shipped_index
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import TuningRecord
from flashtune.db.library import Library, shipped_path
from flashtune.templates import BITS, family, unservable
from flashtune.tuner.publish.winners import variant_for

H200 = find_target("h200")
CELLS = [
    (d, n, dtype, causal)
    for d in (64, 128, 256)
    for n in (512, 1024, 2048, 4096, 8192, 16384)
    for dtype in ("bf16", "fp16")
    for causal in (False, True)
]


def cell(d: int, n: int, dtype: str, causal: bool) -> Problem:
    heads = 2048 // d
    return Problem(
        batch=16384 // n,
        heads=heads,
        kv_heads=heads,
        n_q=n,
        n_kv=n,
        d=d,
        d_v=d,
        dtype=dtype,  # type: ignore[arg-type]
        features=Features(causal=causal),
    )


@pytest.fixture(scope="module")
def records() -> list[TuningRecord]:
    return with_kernels(gpu="h200")


def test_every_promised_cell_is_measured_and_served(records: list[TuningRecord]) -> None:
    for problem in (cell(*one) for one in CELLS):
        [record] = [r for r in records if r.key == problem.key("h200")]
        assert record.outcome.source == "measured"
        assert record.framework_us is not None
        assert record.outcome.max_error is not None
        assert record.outcome.max_error <= 1
        served = dispatch.explain_problem(problem, "h200")
        if record.framework_us < record.median_us:
            assert served.kind == "framework", problem.label()
        else:
            assert served.kind == "exact", problem.label()
            assert served.variant_id == record.outcome.variant_id


def test_rows_and_their_fallbacks_are_of_the_installed_templates_and_inside_the_declared_space(records: list[TuningRecord]) -> None:
    assert len(records) > 1000
    for record in records:
        for one in (record, record.as_fallback()):
            if one is not None:
                variant = variant_for(one)
                assert variant.id == one.outcome.variant_id, record.problem.label()
                assert family(variant.template).violated(variant.config, variant.spec, H200) is None, record.problem.label()


def test_machine_code_ships_of_what_serves_deterministic_calls(records: list[TuningRecord]) -> None:
    index = shipped_index(PACKAGE)
    beside = [row for row in with_kernels(gpu="h200", bits=BITS) if row not in records]
    assert len(beside) == 10 and all(BITS.repeats(row) for row in beside)
    for row in beside:
        variant = variant_for(row)
        assert variant.id in {kernel.variant_id for kernel in index.kernels}, row.problem.label()


def test_wide_heads_have_kernels_of_ours() -> None:
    large = [row for row in Library.of(shipped_path()).records(gpu="h200") if row.problem.d > 256]
    assert len(large) == 12
    for row in large:
        assert row.outcome.template == f"flash_{row.problem.direction}_hopper_wide" and unservable(row) is None
        assert row.framework_us is not None and row.framework_us / row.median_us > (3 if row.problem.direction == "fwd" else 12)
