"""The policy as a pure function: the order of its steps, ties, rows that can't serve."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashtune.core.config import Config
from flashtune.core.problem import Features, Problem
from flashtune.core.results import Baseline, Fate, Measurement, Outcome, Provenance, Source, TuningRecord
from flashtune.core.target import Target, find_target
from flashtune.dispatch.policy import Choice, Refusal, choose, rank
from flashtune.templates import families
from flashtune.templates.family import Axis, Constraint, Family

H200, H100, A100 = find_target("h200"), find_target("h100"), find_target("a100")
PROBLEM = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))

ORDER = ("exact", "near_n", "near_gpu", "predicted", "default", "framework")


def family(name: str, *, unsupported: str | None = None, most_rows: int | None = None) -> Family:
    return Family(
        name=name,
        axes=(Axis(name="BLOCK_M", values=(32, 64, 128), why="rows"), Axis(name="SHARED", values=(0, 200_000), why="bytes")),
        constraints=(
            Constraint(
                name="shared_fits",
                holds=lambda config, spec, target: config.number("SHARED") <= target.shared_bytes_per_block,
                why="the blocks fit into shared memory",
            ),
        ),
        supports=lambda spec, target: unsupported,
        default=lambda spec, target: Config.of(BLOCK_M=32, SHARED=0),
        starts=lambda spec, target: [],
        interpretable=True,
        suits=lambda problem, target: None if most_rows is None or problem.n_q <= most_rows else f"{problem.n_q} rows are too many",
    )


FAMILIES = {"first": family("first"), "second": family("second")}


def record(
    problem: Problem = PROBLEM,
    gpu: Target | str = H200,
    *,
    source: Source = "measured",
    time_us: float = 100.0,
    framework_us: float | None = None,
    template: str = "first",
    config: Config | None = None,
    variant_id: str = "a" * 16,
    origin: str = "shipped",
    fate: Fate = Fate.CORRECT,
) -> TuningRecord:
    baseline = None if framework_us is None else Baseline(backend="cudnn", measurement=Measurement.of([framework_us]))
    return TuningRecord(
        key=problem.key(gpu if isinstance(gpu, str) else gpu.slug),
        problem=problem,
        outcome=Outcome(
            template=template,
            template_hash="0" * 16,
            variant_id=variant_id,
            config=config or Config.of(BLOCK_M=128, SHARED=0),
            fate=fate,
            source=source,
            measurement=Measurement.of([time_us]) if fate is Fate.CORRECT else None,
        ),
        provenance=Provenance(flashtune="0", torch="2", triton="3"),
        baseline=baseline,
        origin=origin,
    )


def sized(n: int, *, n_q: int | None = None, batch: int = 4) -> Problem:
    return replace(PROBLEM, n_kv=n, n_q=n_q or n, batch=batch)


EXACT = record(time_us=900.0)
NEAR_N = record(sized(2048), time_us=800.0)
NEAR_GPU = record(gpu=H100, time_us=700.0)
PREDICTED = record(source="predicted", time_us=600.0)
PREDICTED_NEAR = record(sized(8192), source="predicted", time_us=500.0)
PREDICTED_GPU = record(gpu=H100, source="predicted", time_us=1.0)


def test_each_step_serves_when_those_before_it_have_nothing() -> None:
    """However slow they are: a measured row beats a predicted one, this GPU another, this size another."""
    waiting = [EXACT, NEAR_N, NEAR_GPU, PREDICTED, PREDICTED_NEAR, PREDICTED_GPU]
    expected = ["exact", "near_n", "near_gpu", "predicted", "predicted", "predicted"]
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
    records = [record(sized(n), variant_id=f"{n:016x}") for n in (512, 1024, 4096, 16384)]
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
        served = choose(sized(n), H200, records, FAMILIES)
        # Few rows are decoding, for which nothing of these stands.
        assert served.kind == ("near_n" if n > 16 else "default")
        assert served.record is None if n <= 16 else served.record is not None and served.record.key.n == nearest


def test_n_weighs_more_than_rows_and_rows_more_than_heads() -> None:
    near_n, near_rows, near_heads = record(sized(4096, n_q=512)), record(sized(2048, n_q=1024)), record(sized(2048, batch=64))
    wanted = sized(4096, n_q=1024)
    assert choose(wanted, H200, [near_rows, near_n], FAMILIES).record is near_n
    wanted = sized(2048, n_q=1500)
    assert choose(wanted, H200, [near_heads, near_rows], FAMILIES).record is near_rows


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


def test_a_measured_split_serves_its_own_key_and_leaves_its_neighbours_to_the_rule() -> None:
    small = sized(2048, batch=1)
    splits = record(small, template="flash_decode", config=families()["flash_decode"].default(small.spec(), H200))
    assert families()["flash_decode"].suits(small, H200) is not None
    assert choose(small, H200, [splits], families()).record is splits
    # The same bucket of heads is the same key.
    assert choose(replace(small, heads=12, kv_heads=12), H200, [splits], families()).record is splits
    for other in (sized(2000, batch=1), sized(2048, batch=2)):
        found = choose(other, H200, [splits], families())
        assert (found.kind, found.family) == ("default", families()["flash_fwd_hopper"])


@pytest.mark.parametrize("gpu", ["a100", "h200", "b200", "rtx4090", "mi300x"])
def test_an_untuned_decoding_step_is_served_by_the_family_that_splits_keys(gpu: str) -> None:
    step = Problem(batch=16, heads=32, kv_heads=8, n_q=1, n_kv=4096, d=128, d_v=128, dtype="bf16")
    served: dict[str, Family | None] = {}
    for name, problem in {
        "step": step,
        "draft": replace(step, n_q=16, features=Features(causal=True, alignment="bottom_right")),
        "few rows": replace(step, batch=1, n_q=64, n_kv=65536),
        "prefill": replace(step, n_q=4096),
        "short": replace(step, batch=1, heads=8, n_q=64, n_kv=256),
        "dropout": replace(step, features=Features(dropout=True)),
    }.items():
        found = choose(problem, find_target(gpu), [], families())
        assert found.kind == "default"
        served[name] = found.family
    assert {name for name, family in served.items() if family is families()["flash_decode"]} == {"step", "draft", "few rows"}


def test_what_won_a_decoding_step_never_serves_prefill_nor_the_reverse() -> None:
    step = replace(sized(4096, n_q=1), features=Features())
    prefill = replace(sized(4096), features=Features())
    splits = families()["flash_decode"].default(step.spec(), H200)
    whole = families()["flash_fwd"].default(prefill.spec(), H200)
    decoded, filled = record(step, template="flash_decode", config=splits), record(prefill, template="flash_fwd", config=whole)
    assert choose(prefill, H200, [decoded], families()).kind == "default"
    assert choose(step, H200, [filled], families()).kind == "default"
    assert choose(replace(step, n_kv=9000), H200, [decoded, filled], families()).record is decoded
    # Few rows that don't fill the GPU are splits' business too, but what won there is no guide for more of them.
    some = replace(prefill, batch=1, n_q=64)
    assert choose(prefill, H200, [record(some, template="flash_decode", config=splits)], families()).kind == "default"


@pytest.mark.parametrize(
    "other",
    [
        replace(PROBLEM, d=64),
        replace(PROBLEM, d_v=64),
        replace(PROBLEM, dtype="fp16"),
        replace(PROBLEM, kv_heads=4),
        replace(PROBLEM, features=Features()),
        replace(PROBLEM, features=Features(causal=True, dropout=True)),
        replace(PROBLEM, features=Features(causal=True, window=(1024, 0))),
        replace(PROBLEM, features=Features(causal=True, alibi=True)),
        replace(PROBLEM, dtype="fp8"),
    ],
    ids=lambda problem: problem.label(),
)
def test_records_of_another_kind_of_problem_never_serve(other: Problem) -> None:
    assert choose(PROBLEM, H200, [record(other), record(other, H100)], FAMILIES).kind == "default"


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
    steps = [ORDER.index(c.kind) for c in choices if c.kind != "framework"]
    assert steps == sorted(steps)
    assert choices[-1].kind == "framework" and choices[-1].record is None
    for choice in choices:
        if choice.family is not None and choice.config is not None:
            choice.family.validate(choice.config)
            assert choice.family.violated(choice.config, choice.spec, target) is None
        if choice.record is not None:
            assert (choice.kind == "predicted") <= (choice.record.outcome.source == "predicted")
            assert choice.kind != "framework" or serves
    again = list(rank(PROBLEM, target, order.sample(records, len(records)), FAMILIES, framework_serves=serves))
    assert again == ranked
