"""The policy as a pure function: the order of its steps, ties, rows that can't serve."""

import itertools
import random
from dataclasses import replace
from typing import Any

import policy_rows
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_rows import A100, FAMILIES, H100, H200, HOPPER, PROBLEM, SHIPPED, choose, family, rank, record, sized, tiled

from flashtune import dispatch
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.nearness import distance
from flashtune.core.records.results import Fate, TuningRecord
from flashtune.dispatch.policy import choose as policy
from flashtune.dispatch.policy import records
from flashtune.dispatch.policy.choose import COMPARED, COMPILING, Choice, Refusal
from flashtune.dispatch.policy.offers import provider_choice
from flashtune.templates import cost, families
from flashtune.templates.expected import LOG_HOST, left_out, log_us

nothing_learned = policy_rows.nothing_learned
STEPS = {"exact": 0, "near_n": 1, "stand_in": 1, "near_gpu": 1, "predicted": 2, "default": 3}
EXACT = record(time_us=900.0)
NEAR_N = record(sized(2048), time_us=800.0)
NEAR_GPU = record(gpu=H100, time_us=700.0)
PREDICTED = record(source="predicted", time_us=600.0)
PREDICTED_NEAR = record(sized(8192), source="predicted", time_us=500.0)
PREDICTED_GPU = record(gpu=H100, source="predicted", time_us=1.0)


def test_each_step_serves_when_those_before_it_have_nothing() -> None:
    """However slow they are: a measured row beats a predicted one, the same size on another GPU another size."""
    waiting = [EXACT, NEAR_GPU, NEAR_N, PREDICTED, PREDICTED_GPU, PREDICTED_NEAR]
    expected = ["exact", "near_gpu", "near_n", "predicted", "predicted", "predicted"]
    while waiting:
        shuffled = random.Random(len(waiting)).sample(waiting, len(waiting))
        found = choose(PROBLEM, H200, shuffled, FAMILIES)
        assert (found.kind, found.record) == (expected[0], waiting[0])
        del waiting[0], expected[0]
    found = choose(PROBLEM, H200, [], FAMILIES)
    assert (found.kind, found.family, found.config) == ("default", FAMILIES["first"], Config.of(BLOCK_M=32, SHARED=0))
    assert choose(PROBLEM, H200, [], {"none": family("none", unsupported="it can't")}).kind == "framework"


def test_a_full_ranking_ends_with_each_default_and_the_framework() -> None:
    found = [c for c in rank(PROBLEM, H200, [PREDICTED_NEAR, NEAR_GPU, EXACT], FAMILIES) if isinstance(c, Choice)]
    assert [(c.kind, c.family.name if c.family else None) for c in found] == [
        ("exact", "first"),
        ("near_gpu", "first"),
        ("predicted", "first"),
        ("default", "first"),
        ("default", "second"),
        ("framework", None),
    ]


def test_the_nearest_n_is_nearest_by_ratio() -> None:
    # All of them fill the GPU.
    records = [record(sized(n, batch=64), variant_id=f"{n:016x}") for n in (512, 1024, 4096, 16384)]
    for n, nearest in [
        (1, 512),
        (600, 512),
        (700, 512),
        (800, 1024),
        (2100, 4096),
        (2000, 1024),
        (3000, 4096),
        (9000, 16384),
        (99999, 16384),
    ]:
        served = choose(sized(n, batch=64), H200, records, FAMILIES)
        # Few rows are decoding, for which nothing of these stands.
        assert served.kind == ("near_n" if n > 16 else "default")
        assert served.record is None if n <= 16 else served.record is not None and served.record.key.n == nearest


def test_how_full_the_gpu_is_weighs_more_than_how_the_rows_come_about() -> None:
    near_n, near_rows, near_work = record(sized(4096, n_q=512)), record(sized(2048, n_q=1024)), record(sized(4096, n_q=512, batch=8))
    wanted = sized(4096, n_q=1024)
    assert choose(wanted, H200, [near_n, near_rows], FAMILIES).record is near_rows
    assert choose(wanted, H200, [near_n, near_work], FAMILIES).record is near_work


@pytest.mark.parametrize("n", [100, 1500])
def test_near_is_what_a_search_takes_for_near(n: int) -> None:
    """One distance for both (flashtune.core.records.nearness), which counts how full the GPU is; but for ragged biases."""
    wanted = Problem(batch=8, heads=8, kv_heads=4, n_q=1024, n_kv=n, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
    key = wanted.key("h200")
    pool = policy.Pool(key, H200, [row for row in SHIPPED if row.key.gpu == "h200" and row.key.d == 128], families())
    found = [distance(key, row.key) for row in pool.near(key, frozenset()) if not records.unaligned(row.key)]
    assert found == pytest.approx(sorted(found)) and len(found) > 5


@pytest.mark.usefixtures("nothing_learned")
def test_the_cost_model_prefers_a_config_that_fits_to_that_of_the_nearest_row() -> None:
    # Tiles of 128 rows are a third padding at 192.
    full = replace(sized(192, batch=128), features=Features())
    near, fits = (tiled(replace(full, n_q=n, n_kv=n), rows, 64, pingpong=False) for n, rows in ((256, 128), (768, 192)))
    found = choose(full, H200, [near, fits], families())
    assert found.record is fits and "preferred to n256" in found.note and "cost model" in found.note
    assert ", for another problem (n=" in found.note
    assert choose(replace(full, n_q=256, n_kv=250), H200, [near, fits], families()).record is near
    # Of so short a call that the GPU waits for the host, and where nothing is said of a family, the nearest serves.
    assert choose(replace(full, batch=1), H200, [near, fits], families()).record is near
    without = {name: replace(family, expected=lambda config, spec, target: None) for name, family in families().items()}
    assert choose(full, H200, [near, fits], without).record is near
    # Nor is it looked for farther than COMPARED configs.
    axes: Any = itertools.product((2, 3, 4), ("running", "first"), (0, 1), (1, 8, 32))
    others = [
        tiled(
            replace(full, n_q=256 + place, n_kv=256 + place),
            128,
            64,
            num_stages=a,
            maximum=b,
            rescale="grown" if b == "first" else "always",
            intra_wg_overlap=c,
            section=d,
            pingpong=False,
        )
        for place, (a, b, c, d) in enumerate(axes)
    ]
    assert len({one.outcome.config for one in others}) > COMPARED
    assert choose(full, H200, [*others, fits], families()).record is not fits


def test_the_cost_model_says_nothing_of_a_backward_and_counts_what_it_leaves_out() -> None:
    full = replace(sized(512, batch=64), features=Features())
    settling = HOPPER.default(full.spec(), H200).replace(maximum="first", BLOCK_N=128, section=1, ctas_per_sm=1)
    running = settling.replace(maximum="running")
    assert left_out(running, full) < left_out(settling, replace(full, n_q=4096, n_kv=4096)) < left_out(settling, full)
    assert left_out(settling, replace(full, features=Features(dropout=True))) > left_out(settling, full)
    in_turns, small = running.replace(intra_wg_overlap=0), replace(full, d=64, d_v=64)
    assert left_out(in_turns, small) < left_out(running, small) and left_out(in_turns, full) == left_out(running, full)
    assert left_out(running.replace(BLOCK_M=256), full) > 0.3 > left_out(running.replace(BLOCK_M=256), small)
    assert left_out(running.replace(pingpong=False), full) > left_out(running, full) < left_out(running.replace(tiles="one"), full)
    chained = running.replace(tiles="chained")
    assert left_out(chained.replace(tiles="loop"), full) < left_out(chained, full) < left_out(chained.replace(ctas_per_sm=2), full)
    # Rows of padding cost less than others; of a decoding step, which is nearly all padding, nothing was fitted.
    assert left_out(running, replace(full, n_q=520, n_kv=520)) < left_out(running, full)
    assert left_out(settling, replace(full, n_q=1)) == 0.0
    log = log_us(HOPPER, running, full, H200)
    assert log is not None and log > LOG_HOST


def test_a_bias_with_rows_that_the_copy_engine_takes_stands_for_such_a_one() -> None:
    biased = replace(PROBLEM, features=Features(mask="bias"))
    ragged, even = record(replace(biased, n_q=2001, n_kv=2001)), record(biased)
    assert choose(replace(biased, n_q=2048, n_kv=2048), H200, [ragged, even], FAMILIES).record is even
    assert choose(replace(biased, n_q=3001, n_kv=3001), H200, [ragged, even], FAMILIES).record is ragged


def test_no_row_of_a_bias_that_is_read_otherwise_is_preferred_by_the_cost_model() -> None:
    # What the model expects of Hopper's kernels leaves out the copy of a bias whose rows aren't aligned: at N = 2226 such a row was
    # preferred by 7 %, and served at 0.86 of a search's best (benchmarks/results/2026-11-23-h200-unprepared/seed127.json).
    rows = [row for row in SHIPPED if row.key.direction == "fwd"]
    features = Features(mask="bias")
    for n in (2226, 1113, 3003):
        for d in (64, 80, 112, 128):
            problem = Problem(batch=1, heads=12, kv_heads=3, n_q=n, n_kv=n, d=d, d_v=d, dtype="fp16", features=features)
            found = policy.choose(problem, H200, rows, families(), framework_serves=False).record
            assert found is not None and records.unaligned(found.key), (n, d)


def test_a_pool_remembers_nothing_of_the_families_that_it_was_asked_for() -> None:
    first, second = record(sized(2048)), record(sized(1024), template="second")
    pool = policy.Pool(PROBLEM.key("h200"), H200, [first, second], FAMILIES)
    for known, served in ((FAMILIES, first), ({"second": FAMILIES["second"]}, second), (FAMILIES, first)):
        assert choose(PROBLEM, H200, pool, known).record is served


def test_decoding_is_never_served_by_what_was_tuned_for_many_rows() -> None:
    decode, prefill = sized(4096, n_q=1), record(sized(4096))
    assert choose(decode, H200, [prefill], FAMILIES).kind == "default"
    assert choose(decode, H200, [prefill, record(sized(1024, n_q=8))], FAMILIES).kind == "near_n"


def test_a_family_serves_only_sizes_that_suit_it_and_gives_way_without_a_warning() -> None:
    known = {"first": family("first", most_rows=128), "second": family("second")}
    few = record(sized(4096, n_q=128))
    assert choose(sized(4096, n_q=64), H200, [few], known).record is few
    refusal, *others = rank(sized(4096, n_q=2048), H200, [few], known)
    assert isinstance(refusal, Refusal) and "too many" in refusal.reason and not refusal.invalid
    assert [c.family.name for c in others if isinstance(c, Choice) and c.family is not None] == ["second"]


def test_a_record_stands_in_only_where_every_family_that_suits_was_tried() -> None:
    known = {"first": family("first", most_rows=128), "second": family("second")}
    many = record(sized(4096, n_q=2048), template="second")
    assert choose(sized(4096, n_q=1024), H200, [many], known).record is many
    few = choose(sized(4096, n_q=64), H200, [many], known)
    assert few.kind == "default" and few.family is known["first"]


def test_what_was_measured_for_exactly_these_sizes_serves_them_whether_or_not_they_suit_its_family() -> None:
    known = {"first": family("first", most_rows=128), "second": family("second")}
    many, few = sized(4096, n_q=2048), sized(4096, n_q=64)
    beyond, before = record(many), record(few, template="second")
    found = choose(many, H200, [beyond, record(sized(2048), template="second", time_us=1.0)], known)
    assert (found.kind, found.record) == ("exact", beyond)
    assert choose(few, H200, [before], known).record is before, "though the family that suits was never tried"
    # A rule of thumb stands over whatever isn't a measurement of these sizes.
    other_gpu, estimate = record(many, H100), record(many, source="predicted")
    for refused, problem in ((beyond, sized(4096, n_q=2000)), (other_gpu, many), (estimate, many)):
        refusal = next(rank(problem, H200, [refused], known))
        assert isinstance(refusal, Refusal) and "too many" in refusal.reason and not refusal.invalid
        assert choose(problem, H200, [refused], known).family is known["second"]


def test_the_estimate_beside_a_predicted_row_says_whose_time_that_is() -> None:
    said = "; nothing was measured: its own time is the cost model's"
    for stranger in (PREDICTED_NEAR, PREDICTED_GPU):
        assert said in choose(PROBLEM, H200, [stranger], FAMILIES).note
    assert said not in choose(PROBLEM, H200, [PREDICTED], FAMILIES).note


def test_where_nothing_was_measured_on_the_architecture_torch_serves_unless_that_is_asked_for() -> None:
    for gpu in ("a100", "l4", "rtx4090", "b200", "mi300x"):
        target = find_target(gpu)
        predicted = record(
            gpu=target, source="predicted", template="flash_fwd", config=families()["flash_fwd"].default(PROBLEM.spec(), target)
        )
        for known in (SHIPPED, [*SHIPPED, predicted]):
            found = policy.choose(PROBLEM, target, known, families())
            assert (found.kind, found.record) == ("framework", None) and "FLASHTUNE_UNMEASURED=1" in found.note
        assert choose(PROBLEM, target, SHIPPED, families()).kind == "default"
        assert choose(PROBLEM, target, [predicted], families()).kind == "predicted"
        # What torch has no kernel for is still served by ours.
        assert policy.choose(PROBLEM, target, SHIPPED, families(), framework_serves=False).kind == "default"
    fp32 = replace(PROBLEM, dtype="fp32")
    assert policy.choose(fp32, H200, SHIPPED, families()).kind == "framework"


@pytest.mark.parametrize("features", [Features(causal=True), Features(alibi=True), Features(alibi=True, window=(64, 64))], ids=str)
def test_the_alignment_alone_makes_a_near_record_not_an_exact_one(features: Features) -> None:
    upper = replace(sized(4096, n_q=2048), features=features)
    lower = replace(upper, features=replace(features, alignment="bottom_right"))
    assert choose(lower, H200, [record(upper)], FAMILIES).kind == "near_n"
    same = record(lower, variant_id="f" * 16)
    assert choose(lower, H200, [record(upper), same], FAMILIES).record is same


def test_a_near_gpu_has_the_same_architecture() -> None:
    assert choose(PROBLEM, H200, [record(gpu=A100)], FAMILIES).kind == "default"
    assert choose(PROBLEM, H200, [record(gpu="unknown-gpu")], FAMILIES).kind == "default"
    unknown = replace(H200, slug="nvidia-h200-mig-3g", sms=60)
    assert choose(PROBLEM, unknown, [record(gpu=H200)], FAMILIES).kind == "near_gpu"


def test_a_family_that_outran_pytorch_in_a_committed_run_needs_no_record() -> None:
    def said(gpu: str, n: int, d: int = 512) -> str:
        wide = replace(PROBLEM, d=d, d_v=d, n_q=n, n_kv=n)
        chosen = policy.choose(wide, find_target(gpu), [], families())
        return chosen.kind if chosen.family is None else chosen.family.name

    assert said("h200", 2048) == said("h100", 4096, 320) == "flash_fwd_hopper_wide"
    untimed = replace(PROBLEM, d=512, d_v=512, features=Features(causal=True, window=(99, 0)))
    assert policy.choose(untimed, H200, [], families()).kind == "framework"
    # Fewer queries, other architectures and heads of up to 256 weren't in it.
    assert said("h200", 512) == said("a100", 2048) == said("b200", 2048) == said("h200", 2048, 256) == "framework"


def test_the_library_that_a_record_prefers_runs_wide_heads_where_it_is_installed() -> None:
    wide, target = replace(PROBLEM, d=512, d_v=512, n_q=4096, n_kv=4096, batch=4, heads=4, kv_heads=4), find_target("h200")
    [ours] = [one for one in SHIPPED if one.key == wide.key("h200")]
    won = replace(ours.outcome, template="cudnn_fe", config=Config.of(), call_us=ours.median_us)
    row = replace(ours, outcome=won, providers=(won,))
    words: Any = {"framework_serves": True, "families": families().values()}
    found = provider_choice(row, wide, target, lambda name: name == "cudnn_fe", **words)
    assert found is not None and found.provider == "cudnn_fe"
    assert provider_choice(row, wide, target, lambda name: False, **words) is None
    alone = provider_choice(row, wide, target, lambda name: False, framework_serves=True)
    assert alone is not None and alone.kind == "framework"


def test_where_the_framework_was_faster_it_serves_if_it_can() -> None:
    slower = record(time_us=100.0, framework_us=90.0)
    found = choose(PROBLEM, H200, [slower], FAMILIES)
    assert (found.kind, found.record, found.family) == ("framework", slower, None)
    assert "90.0 us" in found.note
    assert choose(PROBLEM, H200, [slower], FAMILIES, framework_serves=False).kind == "exact"
    assert choose(PROBLEM, H200, [record(time_us=100.0, framework_us=110.0)], FAMILIES).kind == "exact"


@pytest.mark.parametrize(
    ("row", "reason", "invalid"),
    [
        (record(config=Config.of(BLOCK_M=7, SHARED=0)), "BLOCK_M=7 is outside the declared space", True),
        (record(config=Config.of(BLOCK_M=128)), "lacks the axis 'SHARED'", True),
        (record(config=Config.of(BLOCK_M=True, SHARED=0)), "BLOCK_M=True is outside", True),
        (record(config=Config.of(BLOCK_M="__import__('os')", SHARED=0)), "outside the declared space", True),
        (record(config=Config.of(BLOCK_M=128, SHARED=0, EXTRA=1)), "undeclared axis 'EXTRA'", True),
        (record(template="gone"), "no template 'gone'", False),
        (record(fate=Fate.CORRECTNESS), "its fate is correctness", True),
        (record(time_us=float("nan")), "time of nan", True),
        (record(time_us=-1.0), "time of -1.0", True),
    ],
)
def test_an_invalid_row_is_refused_with_its_reason_and_the_next_serves(row: TuningRecord, reason: str, invalid: bool) -> None:
    found = list(rank(PROBLEM, H200, [row, NEAR_N], FAMILIES))
    refusal, served = found[0], found[1]
    assert isinstance(refusal, Refusal) and reason in refusal.reason and refusal.invalid is invalid and refusal.record is row
    assert isinstance(served, Choice) and served.record is NEAR_N


def test_a_config_too_large_for_this_gpu_is_passed_over_but_only_its_own_gpus_row_is_invalid() -> None:
    large = Config.of(BLOCK_M=128, SHARED=200_000)
    small = replace(H200, shared_bytes_per_block=99_000)
    own, other = (next(iter(rank(PROBLEM, small, [record(gpu=gpu, config=large)], FAMILIES))) for gpu in (H200, H100))
    assert isinstance(own, Refusal) and own.invalid and "shared_fits" in own.reason
    assert isinstance(other, Refusal) and not other.invalid
    assert choose(PROBLEM, small, [record(gpu=H100, config=large)], FAMILIES).kind == "default"
    assert choose(PROBLEM, H200, [record(gpu=H100, config=large)], FAMILIES).kind == "near_gpu"


def test_the_users_own_record_beats_the_shipped_one() -> None:
    shipped, own = record(time_us=10.0), record(time_us=20.0, origin="overlay")
    assert choose(PROBLEM, H200, [shipped, own], FAMILIES).record is own


RECORDS = st.lists(
    st.builds(
        record,
        problem=st.builds(
            sized, n=st.sampled_from([512, 1024, 4096, 5000]), n_q=st.sampled_from([None, 1, 64, 4096]), batch=st.sampled_from([1, 4])
        ),
        gpu=st.sampled_from([H200, H100, A100, "unknown-gpu"]),
        source=st.sampled_from(["measured", "predicted"]),
        time_us=st.sampled_from([0.0, 10.0, 20.0, float("inf")]),
        framework_us=st.sampled_from([None, 5.0, 15.0]),
        template=st.sampled_from(["first", "second", "gone"]),
        config=st.sampled_from(
            [
                Config.of(BLOCK_M=64, SHARED=0),
                Config.of(BLOCK_M=64, SHARED=200_000),
                Config.of(BLOCK_M=3),
                Config.of(BLOCK_M="64", SHARED=0),
            ]
        ),
        variant_id=st.sampled_from(["a" * 16, "b" * 16]),
        origin=st.sampled_from(["shipped", "overlay", "/x.sqlite"]),
        fate=st.sampled_from([Fate.CORRECT, Fate.CORRECT, Fate.TIMEOUT]),
    ),
    max_size=12,
    unique_by=lambda row: (row.key, row.origin, row.outcome.variant_id),
)


@settings(max_examples=150, deadline=None)
@given(records=RECORDS, target=st.sampled_from([H200, H100, A100]), serves=st.booleans(), order=st.randoms(use_true_random=False))
def test_any_library_is_ranked_without_a_crash_in_the_stated_order_and_whatever_its_order(
    records: list[TuningRecord], target: Target, serves: bool, order: random.Random
) -> None:
    ranked = list(rank(PROBLEM, target, records, FAMILIES, framework_serves=serves))
    choices = [c for c in ranked if isinstance(c, Choice)]
    steps = [STEPS[c.kind] for c in choices if c.kind != "framework"]
    assert steps == sorted(steps)
    assert choices[-1].kind == "framework" and choices[-1].record is None
    for choice in choices:
        if choice.family is not None and choice.config is not None:
            choice.family.validate(choice.config)
            assert choice.family.violated(choice.config, choice.spec, target) is None
        if choice.record is not None:
            assert (choice.kind == "predicted") <= (choice.record.outcome.source == "predicted")
            assert choice.kind != "framework" or serves
            assert bool(choice.differences) is (choice.record.key != replace(PROBLEM.key(target.slug), gpu=choice.record.key.gpu))
    again = list(rank(PROBLEM, target, order.sample(records, len(records)), FAMILIES, framework_serves=serves))
    assert again == ranked


@pytest.mark.usefixtures("nothing_learned")
def test_a_kernel_to_be_compiled_serves_only_where_it_gains_much(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [tiled(sized(n, batch=32), rows, 64, pingpong=False) for n, rows in ((2304, 64), (2560, 128))]
    asked = sized(2048, batch=32)
    for gain, at_hand, served in ((0.0, 1, 1), (0.0, 0, 0), (COMPILING / 2, 0, 0), (2 * COMPILING, 0, 1), (-2 * COMPILING, 1, 0)):
        logs = {rows[0].outcome.config["BLOCK_M"]: 8.0, rows[1].outcome.config["BLOCK_M"]: 8.0 - gain}
        monkeypatch.setattr(policy, "logs_us", lambda them, *_, logs=logs, **__: [logs[config["BLOCK_M"]] for _, config in them])
        has = rows[at_hand].outcome.config["BLOCK_M"]
        found = choose(asked, H200, rows, families(), compiled=lambda family, spec, config, has=has: config["BLOCK_M"] == has)
        assert found.record is rows[served], (gain, at_hand)
    # An exact row serves whether compiled or not, and without any machine code the fastest does.
    assert choose(rows[0].problem, H200, rows, families(), compiled=lambda *_: False).record is rows[0]


def test_no_list_is_made_of_millions_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of 1000 with 64 heads and 2 million rows took 230 s to explain."""

    def counted(problem: Problem, block_m: int, *_: Any) -> Any:
        raise AssertionError(f"{problem.batch * problem.heads * problem.n_q // block_m} tiles are listed")

    monkeypatch.setattr(cost, "_work", counted)
    huge = Problem(batch=1000, heads=64, kv_heads=64, n_q=1 << 21, n_kv=1 << 20, d=88, d_v=88, dtype="bf16")
    assert dispatch.explain_problem(huge, "h200").kind == "stand_in"
