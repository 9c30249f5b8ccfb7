"""benchmarks/race_again.py without a GPU: what is raced in which order, and what becomes a row."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from children_here import Here

from flashtune import dispatch
from flashtune.core.config import Config, settles
from flashtune.core.limits import least_us
from flashtune.core.problem import DECODE_ROWS, Problem
from flashtune.core.results import Conditions, Fate, Measurement, Provenance
from flashtune.core.target import Target, find_target
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.dispatch.policy import choose
from flashtune.templates import families
from flashtune.tuner.machine import LocalGpu
from flashtune.tuner.propose.space import Candidate

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import race_again
import race_shapes
import race_twins
import race_work
import searches
import tune
from forward_report import LONG

H100, H200 = find_target("h100"), find_target("h200")


class NoWatch:
    """A GPU that nobody watches."""

    def __init__(self, gpu: str) -> None:
        pass

    def __enter__(self) -> "NoWatch":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def between(self, start: float, end: float, own: int) -> Conditions | None:
        return None


def check_problem(problem: Problem, candidates: race_again.Candidates, target: Target, seed: int) -> list[race_again.Checked]:
    if problem.n_kv == 1024:
        return []
    found = candidates() if callable(candidates) else candidates
    return [race_again.Checked(candidate=candidate, error=0.5, facts=None) for candidate in found]


def race_problem(problem: Problem, checked: list[race_again.Checked], *_: object) -> dict[str, Any]:
    """The last is the fastest; the framework takes twice as long."""
    slowest = 100.0 + 2.0 * least_us(problem, "h100")
    times = [Measurement.of([slowest * (1.0 - 0.01 * place)]) for place in range(len(checked))]
    calls, framework = [time.median_us for time in times], Measurement.of([2.0 * slowest])
    return {"times": [*times, framework], "calls": [*calls, framework.median_us], "backend": "cudnn", "began": 1.0, "ended": 2.0, "pid": 1}


def raced(monkeypatch: pytest.MonkeyPatch, target: Target, *words: str) -> list[str]:
    """What a run of race_again.py with these words asked of its child processes, on a machine with this GPU."""
    asked: list[str] = []
    gpu = LocalGpu(name=target.name, target=target)
    stand_ins: dict[str, Any] = {
        "Children": lambda **_: Here(asked),
        "check_problem": check_problem,
        "race_problem": race_problem,
        "GpuWatch": NoWatch,
        "gpu_id": str,
        "local_gpu": lambda: gpu,
        "provenance": lambda **_: Provenance(flashtune="0", torch="0", triton="0"),
    }
    for name, stand_in_for in stand_ins.items():
        monkeypatch.setattr(race_again, name, stand_in_for)
    monkeypatch.setattr(sys, "argv", ["race_again.py", *words])
    race_again.main()
    return asked


def test_rows_of_another_gpu_are_raced_on_this_one_the_plain_ones_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(shipped_path(), writable=False) as shipped, Store.open(tmp_path / "h200.sqlite", writable=True) as some:
        theirs = {
            result.problem: result
            for result in shipped.results()
            if result.gpu == "h200" and result.problem.d == 64 and result.problem.n_kv < 2048
        }
        for result in theirs.values():
            some.save(result)
    words = "--rows-of", "h200", "--rows", str(tmp_path / "h200.sqlite"), "--db", str(tmp_path / "h100.sqlite")
    asked = raced(monkeypatch, H100, *words)
    with Store.open(tmp_path / "h100.sqlite", writable=False) as store:
        mine = list(store.results())
    assert asked[1:] == ["check_problem"] * len(theirs) + ["race_problem"] * len(mine)
    assert {result.gpu for result in mine} == {"h100"}
    assert {result.problem for result in mine} == {problem for problem in theirs if problem.n_kv != 1024}, "what isn't right has no row"
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if " us " in line and " call " in line]
    assert all(re.fullmatch(r"n\d+-d64-bf16-(causal|full)", label) for label in printed[:4])
    assert len(theirs) > 12 and "-bwd" in "".join(printed[4:])
    for result in mine:
        best = theirs[result.problem].best
        assert result.best is not None and best is not None and result.baseline is not None
        assert best.variant_id in {outcome.variant_id for outcome in result.outcomes}
        assert (
            result.best.fate is Fate.CORRECT and result.best.variant_id == min(result.outcomes, key=lambda o: o.call_us or 0.0).variant_id
        )


def test_most_important_are_plain_problems_in_bf16_then_fp16_decoding_gradients_and_all_else() -> None:
    with Store.open(shipped_path(), writable=False) as store:
        problems = sorted((result.problem for result in store.results() if result.gpu == "h200"), key=race_work.importance)
    kinds = [
        (p.dtype, p.direction, p.n_q <= DECODE_ROWS and p.n_q < p.n_kv, bool(p.features.as_json().keys() - {"causal"})) for p in problems
    ]
    seen = list(dict.fromkeys(kinds))
    assert seen[:3] == [("bf16", "fwd", False, False), ("fp16", "fwd", False, False), ("bf16", "fwd", True, False)]
    plain = [p.d for p in problems if p.direction == "fwd" and p.dtype == "bf16" and p.n_q == p.n_kv and not p.features.as_json()][:24]
    assert plain == sorted(plain) and plain[0] == 64


def test_beside_winners_that_settle_maxima_the_best_that_do_not_race() -> None:
    work = race_again.work_of(options("--settling"), H200)
    assert work
    for _, candidates in work:
        assert not callable(candidates)
        assert {settles(candidate.config) for candidate in candidates} == {True, False}
        assert len(candidates) <= 6
    plain = next(found for problem, found in work if problem.label() == "n4096-d128-bf16-full")
    assert not callable(plain)
    # What a long search found best, where the winner's own tiles with running maxima are far behind.
    best = {"BLOCK_N": 128, "tiles": "chained", "pingpong": True, "intra_wg_overlap": 1, "maximum": "running"}
    assert any(best.items() <= candidate.config.as_dict().items() for candidate in plain)


def test_rows_whose_twin_is_far_behind_race_others_with_running_maxima_beside_their_winner() -> None:
    with Store.open(shipped_path(), writable=False) as store:
        winners = {result.problem: result.best for result in store.results() if result.gpu == "h200"}
    work = race_again.work_of(options("--twins"), H200)
    assert work
    for problem, candidates in work:
        assert not callable(candidates)
        best = winners[problem]
        assert best is not None and candidates[0].config == candidates[0].family.completed(best.config)
        assert [settles(candidate.config) for candidate in candidates].count(True) == 1 < len(candidates)


def test_what_ships_already_wins_over_what_is_hardly_faster_and_a_row_keeps_a_twin() -> None:
    kind = families()["flash_fwd_hopper"]
    new, other, old, run = (
        Candidate(family=kind, config=Config.of(maximum=maximum, section=section))
        for maximum, section in (("first", 1), ("first", 8), ("first", 32), ("running", 1))
    )

    def first(ranks: list[Candidate], times: dict[Candidate, float], ships: Callable[[Candidate], bool]) -> list[Candidate]:
        return race_twins.shipped_first(ranks, times, ships, d=64)

    times = {new: 100.0, old: 100.9, run: 101.5, other: 102.0}
    assert first([new, old, run, other], times, {old}.__contains__) == [old, new, run, other]
    assert first([new, old, run, other], times, {run, other}.__contains__) == [new, old, run, other]
    # Whatever ships, the one that no scores mislead.
    times[run] = 100.5
    for ships in (set(), {old}, {new, run, old}):
        assert first([new, run, old, other], times, ships.__contains__)[0] == run
    runs = [Candidate(family=kind, config=Config.of(maximum="running", section=section)) for section in (8, 32)]
    times |= {run: 110.0, runs[0]: 110.5, runs[1]: 112.0}
    assert first([new, run, *runs], times, set(runs).__contains__) == [new, runs[0], run, runs[1]]
    # Of winners that are as fast the one whose twin loses less where scores mislead it, and of twins, too, whatever ships.
    asking, plain = (Candidate(family=kind, config=Config.of(maximum="running", rescale=way)) for way in ("outgrown", "always"))
    grown = Candidate(family=kind, config=Config.of(maximum="first", rescale="grown"))
    of_kinds = {asking: 100.0, grown: 100.5, plain: 103.0}
    assert first([asking, grown, plain], of_kinds, {asking}.__contains__) == [grown, plain, asking]
    of_kinds[plain] = 112.0
    assert first([asking, grown, plain], of_kinds, {grown}.__contains__)[0] == asking
    # What counts peaked rows goes before what ships and doesn't.
    grown = replace(old, config=old.config.replace(rescale="grown"))
    times[grown] = 100.9
    assert first([new, old, grown, run], times, {old}.__contains__)[0] == grown
    assert kind.successor(old.config) == kind.successor(grown.config) == grown.config


def test_plain_and_masked_rows_race_with_all_ways_to_rescale_those_of_one_length_together() -> None:
    work = race_again.work_of(options("--rescale"), H200)
    plain = [problem.n_kv for problem, _ in work if problem.features != race_work.MASKED]
    assert plain == [problem.n_kv for problem, _ in work][: len(plain)] == sorted(plain, key=race_work.RESCALED_LENGTHS.index)
    assert {p.dtype for p, _ in work if p.features != race_work.MASKED} == {"bf16", "fp16"}
    assert len(work) > len(plain)
    for problem, candidates in work:
        assert not callable(candidates) and len(set(candidates)) == len(candidates) <= 8
        ways = {candidate.config["rescale"] for candidate in candidates}
        assert "outgrown" in ways and {c.family.successor(c.config) for c in candidates} <= {c.config for c in candidates}
        assert problem.features.as_json().keys() <= {"causal", "mask"}


def test_older_rows_race_with_both_ways_to_rescale_and_winners_of_near_rows() -> None:
    with Store.open(shipped_path(), writable=False) as store:
        latest = {result.problem: result for result in store.results() if result.gpu == "h200"}
    work = race_again.work_of(options("--older", "--only", "n1024-"), H200)
    for problem, candidates in work:
        assert not callable(candidates) and len(set(candidates)) == len(candidates) > 1
        assert not any("rescale" in outcome.config for outcome in latest[problem].outcomes if outcome.finalist)
        assert any(candidate.config["rescale"] == "grown" for candidate in candidates if "rescale" in candidate.config)


def test_head_sizes_that_a_unit_of_16_spares_columns_of_race_with_both_units() -> None:
    # Few of them are of rows of its own.
    target = H100
    work = race_again.work_of(options("--units", "--only", "^n(1024|4096)-"), target)
    found = {(problem.d, problem.direction) for problem, _ in work}
    assert {(40, "fwd"), (80, "fwd"), (40, "bwd"), (80, "bwd")} <= found
    assert not {64, 96, 128, 256} & {problem.d for problem, _ in work if problem.d == problem.d_v}
    for problem, candidates in work:
        assert not callable(candidates) and len(set(candidates)) == len(candidates)
        assert {c.config["column_unit"] for c in candidates if "column_unit" in c.config} == {16, 32}
        assert all(c.family.violated(c.config, problem.spec(), target) is None for c in candidates)


@pytest.mark.parametrize("target", [H200, H100], ids=["h200", "h100"])
def test_many_short_sequences_race_where_no_row_is_of_them(target: Target) -> None:
    with Store.open(shipped_path(), writable=False) as store:
        known = {result.problem.key(target.slug) for result in store.results() if result.gpu == target.slug}
    work = race_again.work_of(options("--brief"), target)
    assert work and not {problem.key(target.slug) for problem, _ in work} & known
    assert {problem.key(target.slug) for problem in race_shapes.brief_shapes()} - known == {p.key(target.slug) for p, _ in work}


def test_sums_that_are_a_programs_own_race_with_shared_ones() -> None:
    work = race_again.work_of(options("--own-sums"), H200)
    assert {problem.n_kv for problem, _ in work} >= {64, 77, 128, 512, 1024}
    for problem, candidates in work:
        assert not callable(candidates) and len(set(candidates)) == len(candidates)
        assert {c.config["dq_sums"] == "own" for c in candidates} == {True, False}
        assert all(c.family.violated(c.config, problem.spec(), H200) is None for c in candidates)


@pytest.mark.parametrize("shapes", ["--short", "--sparse"])
def test_drawn_shapes_race_with_twins_of_near_rows_and_rows_of_them_again(shapes: str) -> None:
    work = race_again.work_of(options(shapes, "--only", "n1024-d40-bf16-full$"), H200)
    ((problem, candidates),) = work
    assert callable(candidates)
    found = candidates()
    with Store.open(shipped_path(), writable=False) as store:
        best = next(result.best for result in store.results() if result.problem == problem)
    assert best is not None and found[0].config == found[0].family.completed(best.config)
    assert {settles(candidate.config) for candidate in found} == {True, False}
    near = race_work.found_near(problem, H200) if shapes == "--sparse" else []
    assert set(near) <= set(found) and len(near) in (0, race_work.FOUND_NEAR)
    assert 4 < len(found) <= 10 + len(near) and all(c.family.violated(c.config, problem.spec(), H200) is None for c in found)


def test_covering_shapes_have_no_row_and_race_what_would_be_served_first(tmp_path: Path) -> None:
    with Store.open(shipped_path(), writable=False) as store:
        known = {result.problem.key(result.gpu) for result in store.results()}
    assert not {problem.key("h200") for problem, _ in race_again.work_of(options("--covering"), H200)} & known
    # Whatever ships by now.
    with Store.open(tmp_path / "empty.sqlite", writable=True):
        pass
    work = race_again.work_of(options("--covering", "--rows", str(tmp_path / "empty.sqlite")), H200)
    problem, candidates = work[-1]
    assert callable(candidates)
    found, served = candidates(), choose(problem, H200, searches.shipped(), families(), framework_serves=False)
    assert (found[0].family, found[0].config) == (served.family, served.config)
    assert len(set(found)) == len(found) and all(c.family.violated(c.config, problem.spec(), H200) is None for c in found)


def test_models_attentions_without_a_row_race_what_a_search_would_try_first(monkeypatch: pytest.MonkeyPatch) -> None:
    # All models take a while.
    monkeypatch.setattr(race_work, "wanting", partial(tune.wanting, d=[72, 80, 160]))
    work = race_again.work_of(options("--models"), H200)
    with Store.open(shipped_path(), writable=False) as store:
        known = {result.problem.key(result.gpu) for result in store.results()}
    assert not {problem.key("h200") for problem, _ in work} & known
    short = [problem for problem, _ in work if problem.n_q > 1 and min(problem.n_q, problem.n_kv) < LONG]
    assert all(dispatch.explain_problem(problem, "h200").kind == "framework" for problem in short)
    assert all(callable(candidates) for _, candidates in work)


def test_other_head_sizes_race_full_and_causal_first_then_features_and_decoding(tmp_path: Path) -> None:
    with Store.open(shipped_path(), writable=False) as store:
        known = {result.problem.key(result.gpu) for result in store.results()}
    left = race_again.work_of(options("--sizes"), H200)
    assert not {problem.key("h200") for problem, _ in left} & known
    Store.open(tmp_path / "none.sqlite", writable=True).close()
    problems = [problem for problem, _ in race_again.work_of(options("--sizes", "--rows", str(tmp_path / "none.sqlite")), H200)]
    prefill = [problem.features.label() for problem in problems if problem.n_q > 1]
    assert list(dict.fromkeys(prefill)) == ["full", "causal", "causal+window1024", "full+mask"]
    assert all(problem.n_q == 1 for problem in problems[len(prefill) :])


def options(*words: str) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["race_again.py", *words])
        return race_again.arguments()
