"""Rows of another kind that stand in for what has none: which, how their configs are moved, and what is said of it."""

from dataclasses import replace

import pytest
from policy_rows import FAMILIES, H100, H200, PROBLEM, SHIPPED, choose, of, record, sized

from benchmarks.shared.cells import cells
from flashtune.core.gpu.target import find_target
from flashtune.core.problems.dtypes import DType
from flashtune.core.problems.problem import Features, Problem, ProblemKey
from flashtune.dispatch.policy import choose as policy
from flashtune.templates import families
from flashtune.templates.family import Family


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


@pytest.mark.parametrize("dtype", ["fp8", "fp32"])
def test_records_of_types_of_another_size_never_serve(dtype: DType) -> None:
    other = replace(PROBLEM, dtype=dtype)
    assert choose(PROBLEM, H200, [record(other), record(other, H100)], FAMILIES).kind == "default"


def kind_of(key: ProblemKey) -> ProblemKey:
    """A key without sizes and GPU."""
    return replace(key, gpu="", n=1, n_q=1, bh_bucket=1)


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
    assert found.family.violated(row.outcome.config, wide.spec(), H200) is not None
    assert "tiles chained to loop" in found.note and found.config["tiles"] == "loop"
