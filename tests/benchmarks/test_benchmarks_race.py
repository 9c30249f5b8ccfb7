"""The case `race` without a GPU: problems and candidates in their order, and the records that races become."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from children_here import Here
from simulated import NoWatch

from benchmarks.cases import race
from benchmarks.shared import cells, racing
from benchmarks.shared.searches import results_in
from flashtune.core.gpu.limits import least_us
from flashtune.core.gpu.target import Target, find_target
from flashtune.core.problems.config import Config, settles
from flashtune.core.problems.problem import DECODE_ROWS, Problem
from flashtune.core.records.results import Fate, Measurement, Provenance
from flashtune.db.library import shipped_path
from flashtune.db.store import Store
from flashtune.templates import families
from flashtune.tuner.propose.space import Candidate

H100, H200 = find_target("h100"), find_target("h200")


def check_problem(problem: Problem, candidates: race.Candidates, target: Target, seed: int) -> list[race.Checked]:
    if problem.n_kv == 1024:
        return []
    found = candidates() if callable(candidates) else candidates
    return [race.Checked(candidate=candidate, error=0.5, facts=None) for candidate in found]


def race_problem(problem: Problem, checked: list[race.Checked], *_: object) -> dict[str, Any]:
    """The last is the fastest; the framework takes twice as long."""
    slowest = 100.0 + 2.0 * least_us(problem, "h100")
    times = [Measurement.of([slowest * (1.0 - 0.01 * place)]) for place in range(len(checked))]
    calls, framework = [time.median_us for time in times], Measurement.of([2.0 * slowest])
    return {"times": [*times, framework], "calls": [*calls, framework.median_us], "backend": "cudnn", "began": 1.0, "ended": 2.0, "pid": 1}


def raced(monkeypatch: pytest.MonkeyPatch, target: Target, *words: str) -> list[str]:
    """Names of the jobs that a run with these words gave to child processes, on a machine with this GPU."""
    jobs: list[str] = []
    stand_ins: dict[str, Any] = {
        "Children": lambda **_: Here(jobs),
        "check_problem": check_problem,
        "race_problem": race_problem,
        "GpuWatch": NoWatch,
        "gpu_id": str,
        "local_gpu": lambda: None,
        "this_gpu": lambda: target,
        "provenance": lambda **_: Provenance(flashtune="0", torch="0", triton="0"),
    }
    for name, stand_in_for in stand_ins.items():
        monkeypatch.setattr(race, name, stand_in_for)
    monkeypatch.setattr(sys, "argv", ["run.py race", *words])
    race.main()
    return jobs


def options(*words: str) -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["run.py race", "--list", *words])
        return race.arguments()


def test_records_of_another_gpu_are_raced_on_this_one_the_plain_ones_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Store.open(tmp_path / "h200.sqlite", writable=True) as some:
        theirs = {
            result.problem: result
            for result in results_in(str(shipped_path()))
            if result.gpu == "h200" and result.problem.d == 64 and result.problem.n_kv < 2048
        }
        for result in theirs.values():
            some.save(result)
    words = "--records-of", "h200", "--records", str(tmp_path / "h200.sqlite"), "--db", str(tmp_path / "h100.sqlite")
    asked = raced(monkeypatch, H100, *words)
    with Store.open(tmp_path / "h100.sqlite", writable=False) as store:
        mine = list(store.results())
    assert asked[1:] == ["check_problem"] * len(theirs) + ["race_problem"] * len(mine)
    assert {result.gpu for result in mine} == {"h100"}
    assert {result.problem for result in mine} == {problem for problem in theirs if problem.n_kv != 1024}, "no record without a kernel"
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
    problems = sorted((result.problem for result in results_in(str(shipped_path())) if result.gpu == "h200"), key=racing.importance)
    kinds = [
        (p.dtype, p.direction, p.n_q <= DECODE_ROWS and p.n_q < p.n_kv, bool(p.features.as_json().keys() - {"causal"})) for p in problems
    ]
    seen = list(dict.fromkeys(kinds))
    assert seen[:3] == [("bf16", "fwd", False, False), ("fp16", "fwd", False, False), ("bf16", "fwd", True, False)]
    plain = [p.d for p in problems if p.direction == "fwd" and p.dtype == "bf16" and p.n_q == p.n_kv and not p.features.as_json()][:24]
    assert plain == sorted(plain) and plain[0] == 64


def test_a_fallback_races_beside_the_fast_softmax() -> None:
    work = race.work_of(options("--only", "n4096-d(64|128)-bf16-(full|causal)$"), H200)
    assert work
    for _, candidates in work:
        assert not callable(candidates) and len(set(candidates)) == len(candidates) <= 6
        if any(settles(candidate.config) for candidate in candidates):
            assert {settles(candidate.config) for candidate in candidates} == {True, False}


def test_every_value_of_the_varied_axes_races_where_it_is_valid() -> None:
    [(_, candidates)] = race.work_of(options("--only", "^n4096-d128-bf16-causal$", "--most", "9"), H200)
    assert not callable(candidates)
    maxima = {candidate.config["maximum"] for candidate in candidates if "maximum" in candidate.config}
    assert maxima == {"first", "running"}


def test_what_ships_already_wins_over_what_is_hardly_faster_and_a_row_keeps_a_twin() -> None:
    kind = families()["flash_fwd_hopper"]
    new, other, old, run = (
        Candidate(family=kind, config=Config.of(maximum=maximum, section=section))
        for maximum, section in (("first", 1), ("first", 8), ("first", 32), ("running", 1))
    )

    def first(ranks: list[Candidate], times: dict[Candidate, float], ships: Callable[[Candidate], bool]) -> list[Candidate]:
        return racing.shipped_first(ranks, times, ships, d=64)

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


def test_records_whose_kernel_has_changed_race_with_their_best_configs_alone(tmp_path: Path) -> None:
    known = {
        result.problem: result
        for result in results_in(str(shipped_path()))
        if result.gpu == "h200" and result.problem.d == 64 and result.problem.n_kv == 4096 and racing.is_current(result)
    }
    one, other, *_ = known.values()
    stale = replace(one, outcomes=tuple(replace(outcome, template_hash="0" * 64) for outcome in one.outcomes))
    assert racing.of_changed([other], H200, most=2) == []
    [(problem, candidates)] = racing.of_changed([stale, other], H200, most=2)
    assert not callable(candidates) and one.best is not None
    assert problem == one.problem and len(candidates) <= 2
    assert candidates[0].config == one.best.config


def test_models_attentions_without_a_record_race_the_first_candidates_of_a_search() -> None:
    work = race.work_of(options("--models"), H200)
    known = {result.problem.key(result.gpu) for result in results_in(str(shipped_path()))}
    keys = {problem.key("h200") for problem, _ in work}
    assert keys and not keys & known
    assert keys | known >= {cell.problem.key("h200") for cell in cells.cells(("models",))}
    [(problem, candidates), *_] = work
    assert callable(candidates)
    found = candidates()
    assert 1 < len(found) <= 10 and all(c.family.violated(c.config, problem.spec(), H200) is None for c in found)
