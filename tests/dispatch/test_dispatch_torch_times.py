"""When torch serves near records: by its gains there, by what it keeps busy, and by whole calls where the GPU waits for the host."""

import json
import math
import statistics
from collections import defaultdict
from dataclasses import replace

import policy_rows
import pytest
from policy_rows import FAMILIES, H200, PROBLEM, SHIPPED, decoding, record, sized

from benchmarks.cases import archive
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import TuningRecord
from flashtune.dispatch.policy import choose as policy
from flashtune.dispatch.policy import torch_times
from flashtune.templates import families

nothing_learned = policy_rows.nothing_learned


def test_torch_serves_near_decoding_steps_alone_where_the_worse_of_the_gains_is_a_loss() -> None:
    """Of more rows it serves the keys of records that it won."""
    for gpu_us, call_us, serves in ((80.0, 80.0, True), (100.1, 50.0, False), (50.0, 103.0, False), (97.0, 60.0, True)):
        for near, problem in ((sized(1024), PROBLEM), (sized(1024, n_q=1), sized(4096, n_q=1))):
            row = record(near, time_us=gpu_us, framework_us=100.0)
            baseline = replace(row.baseline, call_us=100.0) if row.baseline is not None else None
            row = replace(row, outcome=replace(row.outcome, call_us=call_us), baseline=baseline)
            found = policy.choose(problem, H200, [row], FAMILIES)
            assert found.kind == ("near_n" if serves or problem.n_q > 1 else "framework") and found.record is row
            assert policy.choose(problem, H200, [row], FAMILIES, framework_serves=False).kind == "near_n"
            own = policy.choose(near, H200, [row], FAMILIES).kind
            assert own == ("exact" if call_us < 100.0 else "framework"), "its own key goes by whole calls"


def test_a_long_decoding_step_serves_half_as_many_keys() -> None:
    long = [row for row in SHIPPED if row.key.n >= 8192 and row.key == decoding(1, row.key.n).key("h200")]
    assert policy.choose(decoding(1, 8192), H200, long, families()).kind == "exact"
    assert policy.choose(decoding(1, 4096), H200, long, families()).kind == "near_n"


def test_a_decoding_step_whose_gpu_waits_for_the_host_goes_by_whole_calls_alone() -> None:
    """A row whose kernel is a little slower than torch's and whose calls, of one launch, are far shorter."""
    row = record(replace(PROBLEM, n_q=1, n_kv=4096), time_us=10.2, framework_us=10.0)
    assert row.baseline is not None
    row = replace(row, outcome=replace(row.outcome, call_us=15.0), baseline=replace(row.baseline, call_us=20.0))
    waiting = [(4000, 1, 4), (2048, 1, 4), (5500, 1, 4), (4096, 1, 1)]
    for n, n_q, batch in [*waiting, (2000, 1, 4), (4000, 4, 4), (6500, 1, 4), (4096, 1, 16)]:
        found = policy.choose(sized(n, n_q=n_q, batch=batch), H200, [row], FAMILIES)
        assert (found.kind == "near_n") is ((n, n_q, batch) in waiting), (n, n_q, batch, found.note)


@pytest.mark.parametrize(
    ("gpu_us", "call_us", "serves"), [(8.9, 101.0, True), (8.9, 103.0, False), (9.9, 101.0, False), (10.1, 101.0, False), (8.9, 99.0, True)]
)
def test_whole_calls_that_a_host_at_work_may_have_lengthened_leave_it_to_the_gpus_time(gpu_us: float, call_us: float, serves: bool) -> None:
    row = record(PROBLEM, time_us=gpu_us, framework_us=10.0)
    assert row.baseline is not None
    row = replace(row, outcome=replace(row.outcome, call_us=call_us), baseline=replace(row.baseline, call_us=100.0))
    assert (policy.choose(PROBLEM, H200, [row], FAMILIES).kind == "exact") is serves


def test_what_wins_by_its_calls_at_a_few_hundred_keys_serves_every_shorter_step() -> None:
    """There torch has no shorter path for its calls to take."""
    row = record(replace(PROBLEM, n_q=1, n_kv=512), time_us=10.2, framework_us=10.0)
    assert row.baseline is not None
    row = replace(row, outcome=replace(row.outcome, call_us=15.0), baseline=replace(row.baseline, call_us=20.0))
    for n, serves in ((500, True), (200, True), (64, True), (1, True), (700, True), (2048, False)):
        found = policy.choose(sized(n, n_q=1, batch=4), H200, [row], FAMILIES)
        assert (found.kind == "near_n") is serves, (n, found.note)


def test_a_row_far_in_keys_gives_a_decoding_step_to_torch_only_with_one_that_is_near_in_them() -> None:
    """The row of 512 keys has the head size and the config; of as many keys there are only those of other head sizes."""

    def row(n: int, d: int, gpu_us: float) -> TuningRecord:
        """Where torch takes 10 us."""
        return record(replace(step, n_kv=n, d=d, d_v=d), time_us=gpu_us, framework_us=10.0)

    step = replace(PROBLEM, n_q=1, n_kv=8192, features=Features())
    for little, much, kind in ((10.1, 8.0, "near_n"), (8.0, 10.5, "near_n"), (8.0, 8.0, "near_n"), (10.1, 10.5, "framework")):
        # What torch takes for large heads says nothing of what it takes for these.
        rows = [row(512, 128, little), row(8192, 64, much), row(8192, 256, 18.0 - much)]
        found = policy.choose(step, H200, rows, FAMILIES)
        assert (found.kind, found.record) == (kind, rows[0]), found.note
    # One far in keys isn't asked of shorter steps, either; several that are near decide by their mean.
    near = [row(512, 128, 10.5), row(8192, 64, 8.0)]
    assert policy.choose(replace(step, n_kv=600), H200, near, FAMILIES).kind == "framework"
    for second, third, kind in ((8.0, 9.0, "near_n"), (8.0, 13.0, "framework")):
        rows = [*near, row(700, 112, second), row(800, 96, third)]
        assert policy.choose(replace(step, n_kv=600), H200, rows, FAMILIES).kind == kind
    assert policy.choose(step, H200, [row(512, 128, 10.1), row(8192, 256, 8.0)], FAMILIES).kind == "framework", "no row is near"


def test_rows_of_keys_that_begin_amid_a_sector_tell_what_torch_takes_for_such_steps() -> None:
    """Of D = 72 and 3006 keys torch took 286.6 us and a kernel 330.6 (benchmarks/results/2026-11-23-h200-unprepared/seed59.json), where
    the row that serves, of D = 96, says that the kernel is the faster."""

    def row(n: int, d: int, gpu_us: float) -> TuningRecord:
        return record(replace(step, n_kv=n, d=d, d_v=d), time_us=gpu_us, framework_us=10.0)

    step = replace(PROBLEM, n_q=1, n_kv=3006, d=72, d_v=72, features=Features())
    assert torch_times.odd_rows(step.key("h200")) and not torch_times.odd_rows(replace(step, d=96, d_v=96).key("h200"))
    for odd, kind in ((11.4, "framework"), (9.0, "stand_in")):
        rows = [row(3008, 96, 9.6), row(2048, 40, odd), row(3006, 256, 18.0)]
        found = policy.choose(step, H200, rows, FAMILIES)
        assert (found.kind, found.record) == (kind, rows[0]), found.note
        assert ("time is that of records of n=2048 d=40" in found.note) is (kind == "framework")
    assert policy.choose(step, H200, rows[:1], FAMILIES).kind == "stand_in", "no such row says otherwise"


@pytest.mark.parametrize(
    ("d", "heads", "busy"),
    [
        *(
            (72, heads, busy)
            for heads, busy in ((1, 1.0), (32, 128 / 132), (66, 1.0), (72, 72 / 132), (132, 1.0), (140, 0.752), (224, 1.0))
        ),
        *((72, heads, busy) for heads, busy in ((300, 0.806), (2048, 1.0))),
        *((64, heads, busy) for heads, busy in ((140, 0.752), (224, 1.0), (300, 1.0), (400, 1.0))),
        *((160, heads, busy) for heads, busy in ((64, 128 / 132), (80, 80 / 132), (140, 140 / 264))),
        *((128, heads, busy) for heads, busy in ((40, 1.0), (72, 1.0), (140, 1.0), (300, 0.806))),
    ],
)
def test_torch_reads_by_how_many_key_heads_each_sm_has(d: int, heads: int, busy: float) -> None:
    step = Problem(batch=1, heads=heads * 4, kv_heads=heads, n_q=1, n_kv=8192, d=d, d_v=d, dtype="bf16")
    assert torch_times.torch_fills(step, H200.sms) == pytest.approx(busy, abs=1e-3)
    assert 0.5 < torch_times.torch_fills(replace(step, batch=977), H200.sms) <= 1.0


def test_measured_rates_of_torchs_steps_are_alike_where_what_it_fills_is_counted() -> None:
    """98 steps on an H200 (benchmarks/results/2026-11-24-h200-splits)."""
    kept = json.loads((archive.folder() / "2026-11-24-h200-splits/split_counts.json").read_text())
    rates: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for step in kept:
        problem = Problem(**step["sizes"], features=Features())
        rate = math.log(problem.io_bytes() / step["torch_us"])
        rates[problem.d, problem.n_kv].append((rate, rate - math.log(torch_times.torch_fills(problem, H200.sms))))
    # Of 4096 keys and D = 64 the least steps are too short to tell of reading alone.
    for d, n in ((64, 4096), (64, 8192), (72, 12288), (160, 8192), (128, 12288)):
        plain, filled = (statistics.pstdev(one[place] for one in rates[d, n]) for place in (0, 1))
        assert filled < (0.19 if n == 4096 else 0.13) and (filled < plain or d == 128), (d, n, plain, filled)


def test_a_row_that_torch_won_keeps_no_step_from_a_kernel_that_leaves_torch_half_of_the_gpu() -> None:
    row = record(Problem(batch=16, heads=16, kv_heads=4, n_q=1, n_kv=12288, d=72, d_v=72, dtype="bf16"), time_us=81.2, framework_us=69.6)
    for heads, served in ((20, "kernel"), (16, "framework")):
        step = Problem(batch=16, heads=heads, kv_heads=heads // 4, n_q=1, n_kv=11000, d=72, d_v=72, dtype="bf16")
        found = policy.choose(step, H200, [row], FAMILIES)
        assert ("framework" if found.kind == "framework" else "kernel") == served
    # And the reverse: what won beside half a GPU of torch's says little of a whole one.
    won = record(Problem(batch=16, heads=20, kv_heads=5, n_q=1, n_kv=12288, d=72, d_v=72, dtype="bf16"), time_us=99.0, framework_us=143.8)
    assert policy.choose(replace(row.problem, n_kv=11000), H200, [won], FAMILIES).kind == "framework"


def test_a_row_of_the_key_with_other_heads_tells_of_torch_by_how_busy_it_kept_the_gpu() -> None:
    few = Problem(batch=16, heads=20, kv_heads=5, n_q=1, n_kv=12288, d=72, d_v=72, dtype="bf16")
    many = replace(few, heads=32, kv_heads=8)
    assert few.key("h200") == many.key("h200")
    won, lost = record(few, time_us=99.0, framework_us=143.8), record(many, time_us=110.0, framework_us=100.0)
    kept = policy.choose(many, H200, [won], FAMILIES)
    assert kept.kind == "framework" and "read at 1.60 times its rate there" in kept.note
    assert policy.choose(few, H200, [won], FAMILIES).kind == policy.choose(few, H200, [lost], FAMILIES).kind == "exact"
    assert policy.choose(many, H200, [lost], FAMILIES).kind == "framework"
    # Of several query rows nothing is known.
    several = replace(few, n_q=8, heads=160, kv_heads=20), replace(few, n_q=8, heads=128, kv_heads=16)
    row = record(replace(several[1], batch=1), time_us=105.0, framework_us=100.0)
    assert policy.choose(replace(several[0], batch=1, n_kv=12000), H200, [row], FAMILIES).kind == "framework"


def test_what_torch_kept_busy_on_another_gpu_is_counted_with_its_sms() -> None:
    smaller = find_target("h100-pcie")
    step = Problem(batch=1, heads=smaller.sms, kv_heads=smaller.sms, n_q=1, n_kv=8192, d=128, d_v=128, dtype="bf16")
    row = record(step, smaller, time_us=90.0, framework_us=100.0)
    assert policy.choose(replace(step, heads=132, kv_heads=132), H200, [row], FAMILIES).kind == "near_gpu"


def test_a_long_step_of_few_heads_is_not_judged_by_what_torch_takes_for_a_short_one() -> None:
    """Torch took 31 us for it in an earlier run of benchmarks/run.py calls, three times what it takes where its row is of."""
    step = Problem(batch=1, heads=12, kv_heads=12, n_q=1, n_kv=8192, d=64, d_v=64, dtype="bf16")
    known = {replace(step, batch=4, n_kv=512).key("h200"), decoding(1, 8192).key("h200")}
    rows = [row for row in SHIPPED if row.key in known]
    found = policy.choose(step, H200, rows, families())
    assert found.family is not None and found.record is not None and found.record.key.d == 64, found.note
