"""The policy as a pure function: the order of its steps, ties, rows that can't serve."""

import itertools
import json
import math
import random
import statistics
from collections import defaultdict
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.cases import archive
from benchmarks.shared.cells import cells
from flashtune import dispatch
from flashtune.core.config import Config
from flashtune.core.dtypes import DType
from flashtune.core.nearness import distance
from flashtune.core.problem import Features, Problem, ProblemKey
from flashtune.core.results import Baseline, Fate, Measurement, Outcome, Provenance, Source, TuningRecord
from flashtune.core.target import Target, find_target
from flashtune.db.library import Library, shipped_path
from flashtune.dispatch import choose as policy
from flashtune.dispatch import records, torch_times
from flashtune.dispatch.choose import COMPARED, COMPILING, Choice, Refusal
from flashtune.dispatch.resolve import explained
from flashtune.templates import cost, families
from flashtune.templates.expected import LOG_HOST, left_out, log_us
from flashtune.templates.family import Axis, Constraint, Family
from flashtune.templates.learned.residual import Residual

H200, H100, A100 = find_target("h200"), find_target("h100"), find_target("a100")
PROBLEM = Problem(batch=4, heads=16, kv_heads=16, n_q=4096, n_kv=4096, d=128, d_v=128, dtype="bf16", features=Features(causal=True))

# With all steps: kernels that nothing was measured of serve by request alone.
choose, rank = partial(policy.choose, unmeasured=True), partial(policy.rank, unmeasured=True)

STEPS = {"exact": 0, "near_n": 1, "stand_in": 1, "near_gpu": 1, "predicted": 2, "default": 3}


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
        refuses=lambda spec, target: unsupported,
        tried_first=lambda spec, target: [Config.of(BLOCK_M=32, SHARED=0)],
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
    """One distance for both (flashtune.core.nearness), which counts how full the GPU is; but for ragged biases."""
    wanted = Problem(batch=8, heads=8, kv_heads=4, n_q=1024, n_kv=n, d=128, d_v=128, dtype="bf16", features=Features(causal=True))
    key = wanted.key("h200")
    pool = policy.Pool(key, H200, [row for row in SHIPPED if row.key.gpu == "h200" and row.key.d == 128], families())
    found = [distance(key, row.key) for row in pool.near(key, frozenset()) if not records.unaligned(row.key)]
    assert found == pytest.approx(sorted(found)) and len(found) > 5


HOPPER = families()["flash_fwd_hopper"]


def tiled(problem: Problem, rows: int, keys: int = 128, **axes: Any) -> TuningRecord:
    """A row of the Hopper family with tiles of this size."""
    config = HOPPER.default(problem.spec(), H200).replace(BLOCK_M=rows, BLOCK_N=keys, tiles="one", order="fixed", **axes)
    return record(problem, template=HOPPER.name, config=config)


@pytest.fixture
def nothing_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost model alone."""
    monkeypatch.setattr(Residual, "of", lambda self, problem, configs, target, **words: [0.0] * len(configs))


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


def reason_of(choice: Choice, problem: Problem) -> str:
    """Explanation of a kernel that serves."""
    assert choice.family is not None and choice.config is not None
    return explained(choice, problem, H200, ()).reason


def test_in_another_problems_place_tiles_hold_as_many_heads_as_the_calls_sizes_ask_for() -> None:
    hopper = {"flash_fwd_hopper": families()["flash_fwd_hopper"]}
    many = replace(PROBLEM, batch=16, kv_heads=2, features=Features(causal=True, alignment="bottom_right"))
    alone = hopper["flash_fwd_hopper"].default(many.spec(), H200).replace(BLOCK_M=128)
    row = record(many, template="flash_fwd_hopper", config=alone)
    few = replace(many, n_q=32)
    found = choose(few, H200, [row], hopper)
    assert (found.kind, found.config) == ("near_n", alone.replace(packed_heads=4))
    assert "with packed_heads 1 to 4 to fill its tiles" in found.note
    # And the other way round, of a row of few queries; neither moves a row of the call's own key.
    packed = record(few, template="flash_fwd_hopper", config=alone.replace(packed_heads=4))
    assert choose(many, H200, [packed], hopper).config == alone
    for problem, config in ((few, alone), (many, alone.replace(packed_heads=8))):
        own = record(problem, template="flash_fwd_hopper", config=config)
        assert (choose(problem, H200, [own], hopper).kind, choose(problem, H200, [own], hopper).config) == ("exact", config)
    # What each head has of its own isn't packed.
    hidden = replace(few, features=replace(few.features, mask="bool"))
    assert choose(hidden, H200, [packed], hopper).config == alone


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
    ("other", "difference"),
    [
        (replace(PROBLEM, d=64), "d=64 for 128"),
        (replace(PROBLEM, d_v=64), "d_v=64 for 128"),
        (replace(PROBLEM, dtype="fp16"), "fp16 for bf16"),
        (replace(PROBLEM, kv_heads=4), "heads to a key head=4 for 1"),
        (replace(PROBLEM, features=Features()), "full for causal"),
        (replace(PROBLEM, features=Features(causal=True, dropout=True)), "causal+dropout for causal"),
        (replace(PROBLEM, features=Features(causal=True, window=(1024, 0))), "causal+window1024 for causal"),
    ],
    ids=lambda x: x.label() if isinstance(x, Problem) else "",
)
def test_a_record_of_another_kind_stands_in_and_says_for_which_difference(other: Problem, difference: str) -> None:
    for gpu in (H200, H100):
        found = choose(PROBLEM, H200, [record(other, gpu)], FAMILIES)
        assert (found.kind, found.differences) == ("stand_in", (difference,))
        assert difference in found.note
        assert "estimated" not in found.note and "%" not in found.note, "no estimate of what is lost is calibrated"
        assert "cost model" not in found.note
        assert ("the cost of features that differ" in found.note) is (other.features != PROBLEM.features)
    assert choose(PROBLEM, H200, [record(other), record(sized(512))], FAMILIES).record is not None


def test_the_estimate_beside_a_predicted_row_says_whose_time_that_is() -> None:
    said = "; nothing was measured: its own time is the cost model's"
    for stranger in (PREDICTED_NEAR, PREDICTED_GPU):
        assert said in choose(PROBLEM, H200, [stranger], FAMILIES).note
    assert said not in choose(PROBLEM, H200, [PREDICTED], FAMILIES).note


@pytest.mark.parametrize("dtype", ["fp8", "fp32"])
def test_records_of_types_of_another_size_never_serve(dtype: DType) -> None:
    other = replace(PROBLEM, dtype=dtype)
    assert choose(PROBLEM, H200, [record(other), record(other, H100)], FAMILIES).kind == "default"


def of(batch: int, heads: int, n: int, d: int, **changes: Any) -> Problem:
    return replace(PROBLEM, batch=batch, heads=heads, kv_heads=heads, n_q=n, n_kv=n, d=d, d_v=d, **changes)


def kind_of(key: ProblemKey) -> ProblemKey:
    """A key without sizes and GPU."""
    return replace(key, gpu="", n=1, n_q=1, bh_bucket=1)


SHIPPED = Library.of(shipped_path()).records()
USUAL = {replace(cell.problem, dtype=dtype) for cell in cells() for dtype in (cell.problem.dtype, "fp16")}
ONE_HEAD_SIZE = [row for row in SHIPPED if row.key.gpu == "h200" and row.problem in USUAL]
"""Rows of an H200 of D = 64, 128 and 256: those of other head sizes stand for such calls themselves."""


@pytest.mark.parametrize(
    ("problem", "wanted"),
    [
        (of(4, 16, 4096, 96, features=Features()), of(4, 16, 4096, 128, features=Features())),
        (of(4, 32, 4096, 40), of(4, 32, 4096, 64)),
        (replace(of(4, 16, 4096, 128), d=192), of(4, 16, 4096, 128)),
        (replace(of(4, 16, 4096, 128), kv_heads=2), replace(of(4, 16, 4096, 128), kv_heads=4)),
        (of(4, 16, 4096, 128, dtype="fp16", features=Features(mask="bool")), of(4, 16, 4096, 128, features=Features(mask="bool"))),
        (
            of(4, 16, 2048, 128, features=Features(causal=True, softcap=True)),
            of(4, 16, 4096, 128, features=Features(causal=True, softcap=True)),
        ),
        (
            of(4, 16, 4096, 112, features=Features(causal=True, alibi=True)),
            of(4, 16, 4096, 128, features=Features(causal=True, alibi=True)),
        ),
    ],
    ids=lambda problem: problem.label(),
)
def test_the_nearest_stand_in_for_what_has_no_row(problem: Problem, wanted: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    # Where nothing else is expected to be faster.
    monkeypatch.setattr(policy, "logs_us", lambda them, *_, **__: [6.0] * len(them))
    found = policy.choose(problem, H200, ONE_HEAD_SIZE, families())
    # Of whichever 16-bit type and sizes: the cost model may prefer another row of the kind.
    assert found.record is not None
    assert kind_of(replace(found.record.key, dtype="bf16")) == kind_of(wanted.key("h200"))
    assert found.family is not None and found.config is not None
    found.family.validate(found.config)
    assert found.family.unfit(found.config, problem.spec(), H200) is None
    # By the same rules for a GPU of the architecture.
    assert policy.choose(problem, H100, ONE_HEAD_SIZE, families()).config == found.config


def test_a_config_that_breaks_constraints_in_its_new_place_is_moved_and_that_is_said() -> None:
    wide = replace(of(4, 16, 4096, 128), d=192)
    found = policy.choose(wide, H200, ONE_HEAD_SIZE, families())
    row = found.record
    assert row is not None and found.family is not None and found.config is not None
    assert found.family.violated(found.family.completed(row.outcome.config), wide.spec(), H200) is not None
    assert "tiles chained to loop" in found.note and found.config["tiles"] == "loop"


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


def decoding(batch: int, n: int) -> Problem:
    return Problem(batch=batch, heads=32, kv_heads=8, n_q=1, n_kv=n, d=128, d_v=128, dtype="bf16")


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
