"""The cost model's predictions, the space of a problem's candidates, and what a study asks for."""

import json
import math
from dataclasses import replace
from typing import Any

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashtune.core.gpu.target import find_target
from flashtune.core.problems.config import Config
from flashtune.core.problems.problem import Features, Problem
from flashtune.core.records.results import CompileFacts, Fate, Measurement, Outcome
from flashtune.core.system.errors import InputError
from flashtune.templates import families, family
from flashtune.templates.cost import predict_us
from flashtune.tuner.propose.space import Candidate, SearchSpace
from flashtune.tuner.propose.study import Study, outcome_as_json, outcome_from_json
from flashtune.tuner.timing.racing import ranked

FACTS = CompileFacts(registers=128, spills=0, shared_bytes=65536, threads=128, tensor_core_ops=10)
CONFIG = Config.of(BLOCK_M=64, BLOCK_N=64, num_warps=4, num_stages=2)
BIG = Problem(batch=4, heads=32, kv_heads=32, n_q=4096, n_kv=4096, d=64, d_v=64, dtype="fp16")


def test_the_cost_model_is_slower_with_spills_and_infinite_where_nothing_fits() -> None:
    target = find_target("a100")
    plain = predict_us(CONFIG, FACTS, BIG, target)
    assert predict_us(CONFIG, replace(FACTS, spills=256), BIG, target) > plain
    assert math.isinf(predict_us(CONFIG, replace(FACTS, registers=255, threads=1024), BIG, target))


def test_few_tiles_of_a_triangle_take_as_long_as_the_longest_of_them() -> None:
    """Eight heads of 2865 rows have 120 tiles of 192, and 184 of 128: these took 60.4 us, those 80.9
    (benchmarks/results/2026-11-23-h200-unprepared/seed59.json)."""
    target, hopper = find_target("h200"), families()["flash_fwd_hopper"]

    def times(heads: int) -> list[float]:
        problem = Problem(
            batch=1, heads=heads, kv_heads=heads, n_q=2865, n_kv=2865, d=192, d_v=192, dtype="bf16", features=Features(causal=True)
        )
        one = hopper.default(problem.spec(), target).replace(
            BLOCK_N=64,
            maximum="first",
            num_stages=2,
            ctas_per_sm=1,
            order="fixed",
            pingpong=False,
            section=8,
            tiles="one",
            v_columns="pieces",
        )
        tiles = [one.replace(BLOCK_M=128, intra_wg_overlap=1), one.replace(BLOCK_M=192, intra_wg_overlap=0)]
        facts = [hopper.expected(config, problem.spec(), target) or FACTS for config in tiles]
        return [predict_us(config, found, problem, target) for config, found in zip(tiles, facts, strict=True)]

    few, many = times(8), times(512)
    assert few[1] > 1.25 * few[0] and many[1] < 1.25 * many[0]
    assert few[1] > 2 * many[1] * 8 / 512


@given(st.sampled_from(["a100", "h200", "rtx4090", "mi300x"]), st.sampled_from([512, 2048, 16384]))
def test_no_prediction_beats_the_roofline(slug: str, n: int) -> None:
    target, problem = find_target(slug), replace(BIG, n_q=n, n_kv=n)
    floor_us = max(problem.flops() / target.peak_tflops["fp16"] / 1e6, problem.io_bytes() / target.bandwidth_gbs / 1e3)
    assert predict_us(CONFIG, FACTS, problem, target) >= floor_us


STEP = Problem(batch=16, heads=32, kv_heads=8, n_q=1, n_kv=4096, d=128, d_v=128, dtype="bf16")
SPLIT = Config.of(BLOCK_M=16, BLOCK_N=64, num_warps=4, num_stages=3, programs=2, combine="kernel", loads="pointer")
SPLIT_FACTS = CompileFacts(registers=128, spills=0, shared_bytes=38912, threads=128, tensor_core_ops=32)


@given(
    slug=st.sampled_from(["a100", "h200", "rtx4090", "mi300x"]),
    batch=st.sampled_from([1, 16, 128]),
    n=st.integers(1, 100_000),
    n_q=st.integers(1, 64),
    programs=st.sampled_from([1, 2, 8]),
    combine=st.sampled_from(["kernel", "last", "rows"]),
    features=st.sampled_from([Features(), Features(causal=True), Features(window=(100, 0)), Features(alibi=True)]),
)
def test_decoding_takes_at_least_the_time_to_read_memory(
    slug: str, batch: int, n: int, n_q: int, programs: int, combine: str, features: Features
) -> None:
    target, problem = find_target(slug), replace(STEP, batch=batch, n_kv=n, n_q=n_q, features=features)
    time_us = predict_us(SPLIT.replace(programs=programs, combine=combine), SPLIT_FACTS, problem, target)
    assert problem.io_bytes() / target.bandwidth_gbs / 1e3 <= time_us < 1e6


def test_a_lone_long_sequence_is_predicted_to_need_its_keys_split_and_loads_in_flight() -> None:
    target, lone = find_target("h200"), replace(STEP, batch=1, n_kv=65536)
    deep = predict_us(SPLIT.replace(programs=1), SPLIT_FACTS, lone, target)
    assert predict_us(SPLIT.replace(programs=1, num_stages=1), SPLIT_FACTS, lone, target) > 1.3 * deep
    whole = predict_us(CONFIG.replace(BLOCK_M=16), replace(SPLIT_FACTS, registers=255), lone, target)
    assert whole > 5 * deep
    assert predict_us(SPLIT, SPLIT_FACTS, replace(lone, n_kv=4096), target) < deep / 3


def test_only_families_that_suit_a_problem_are_searched() -> None:
    target = find_target("h200")
    assert "flash_decode" in SearchSpace(families(), STEP, target).families
    assert "flash_decode" not in SearchSpace(families(), replace(STEP, n_q=4096), target).families
    with pytest.raises(InputError, match="fill"):
        SearchSpace({"flash_decode": family("flash_decode")}, BIG, target)
    forward = [name for name in families() if "_bwd" not in name and "wide" not in name]
    assert list(SearchSpace(families(), BIG, target, only_suited=False).families) == forward
    assert list(SearchSpace(families(), replace(BIG, direction="bwd"), target).families) == [
        "flash_bwd_hopper",
        "flash_bwd_hopper_split",
        "flash_bwd",
    ]
    dropout = replace(BIG, features=Features(dropout=True))
    with pytest.raises(InputError, match="dropout"):
        SearchSpace({"flash_decode": family("flash_decode")}, dropout, target, only_suited=False)


def outcome(config: Config, median_us: float | None, variant_id: str = "00") -> Outcome:
    return Outcome(
        template="flash_fwd",
        template_hash="h",
        variant_id=variant_id,
        config=config,
        fate=Fate.CORRECT if median_us else Fate.COMPILE,
        source="measured",
        reason="" if median_us else "planted",
        measurement=Measurement.of([median_us]) if median_us else None,
        facts=FACTS,
    )


def study(storage: optuna.storages.BaseStorage, sampler: Any = "tpe") -> tuple[Study, SearchSpace]:
    target = find_target("a100")
    space = SearchSpace({"flash_fwd": family("flash_fwd")}, BIG, target)
    return Study(space, BIG, sampler=sampler, seed=0, source="measured", storage=storage), space


@pytest.mark.parametrize("sampler", ["gp", "tpe", "random", "exhaustive"])
def test_a_study_never_asks_the_same_twice_and_only_for_valid_candidates(sampler: Any) -> None:
    found, space = study(optuna.storages.InMemoryStorage(), sampler)
    found.enqueue(space.starts())
    seen: list[Candidate] = []
    for _ in range(6):
        batch = found.ask(5)
        assert len(batch) == 5
        for candidate in batch:
            assert candidate.family.violated(candidate.config, space.spec, space.target) is None
            candidate.family.validate(candidate.config)
            found.tell(candidate, outcome(candidate.config, 10.0 + len(seen) if len(seen) % 3 else None))
            seen.append(candidate)
    assert len(set(seen)) == 30
    assert seen[: len(space.starts())] == space.starts()[:30]


def test_another_problems_winner_is_tried_only_where_its_family_is_in_the_space() -> None:
    found, space = study(optuna.storages.InMemoryStorage())
    own = Candidate(family=space.families["flash_fwd"], config=family("flash_fwd").default(BIG.spec(), space.target))
    found.enqueue([Candidate(family=family("flash_decode"), config=SPLIT), own])
    assert found.ask(1) == [own]


def test_an_exhausted_space_ends_the_asking() -> None:
    target = find_target("a100")
    whole = SearchSpace({"flash_fwd": family("flash_fwd")}, BIG, target)
    found = Study(whole, BIG, sampler="exhaustive", seed=0, source="measured", storage=optuna.storages.InMemoryStorage())
    everything = found.ask(10**6)
    assert len(everything) == len(set(everything)) == sum(1 for _ in whole.every())
    assert found.ask(1) == []


def test_outcomes_survive_json() -> None:
    for one in (outcome(CONFIG, 3.5), outcome(CONFIG, None)):
        assert outcome_from_json(json.loads(json.dumps(outcome_as_json(one)))) == one


def test_candidates_that_tie_are_ordered_by_a_fixed_rule() -> None:
    entries = [
        (Candidate(family=family("flash_fwd"), config=Config.of(x=i)), t, v)
        for i, (t, v) in enumerate([(100.4, "b"), (100.0, "c"), (100.3, "a"), (100.8, "0")])
    ]
    finalists = [(c, outcome(c.config, t, v)) for c, t, v in entries]
    assert [c.config["x"] for c in ranked(finalists)] == [2, 0, 1, 3]
    assert [c.config["x"] for c in ranked(finalists, known=entries[1][0])] == [1, 2, 0, 3], "the stored row first"
    simple = CompileFacts(registers=64, spills=0, shared_bytes=1024, threads=128)
    finalists[0] = (entries[0][0], replace(finalists[0][1], facts=simple))
    finalists[2] = (entries[2][0], replace(finalists[2][1], facts=replace(simple, threads=256)))
    assert [c.config["x"] for c in ranked(finalists)] == [0, 1, 2, 3], "then the simplest"


def test_a_space_without_a_family_says_why() -> None:
    only = {"flash_fwd_hopper": families()["flash_fwd_hopper"]}
    with pytest.raises(InputError, match="flash_fwd_hopper"):
        SearchSpace(only, BIG, find_target("a100"))
