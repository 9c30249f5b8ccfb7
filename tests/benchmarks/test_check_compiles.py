"""The case `check_compiles`: every family for every architecture, and a failure that shows."""

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks.cases import check_compiles
from flashtune.core.gpu.target import find_target, targets
from flashtune.templates import families
from flashtune.tuner.children.tasks import Source
from tools import newest


def test_every_architecture_and_family_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of all problems every tenth: each family serves some of them.
    every = list(check_compiles.every_problem())
    some = [*every[::10], *(one for one in every if one.d > 256)]
    monkeypatch.setattr(check_compiles, "every_problem", lambda: iter(some))
    found = check_compiles.gpus()
    assert sorted(gpu.arch for gpu in found) == sorted({t.arch for t in targets().values() if t.compilable})
    kernels = [
        (target.slug, source.stem.rsplit("_", 1)[0]) for _, target, source in check_compiles.candidates(list(families().values()), found)
    ]
    assert {slug for slug, _ in kernels} == {gpu.slug for gpu in found}
    for name, family in families().items():
        served = sum(family.supports(problem.spec(), found[0]) is None for problem in some)
        assert 0 < served < kernels.count((check_compiles.THOROUGH, name)), "more than its default"


def test_a_kernel_that_doesnt_compile_is_a_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [problem, target, good] = next(check_compiles.candidates([families()["flash_fwd"]], [find_target("a100")]))
    bad = Source(text="def counts_needed(*a):\n    raise ValueError('tl.dot has been removed')\n", stem="bad")
    monkeypatch.setattr(check_compiles, "candidates", lambda *_: iter([(problem, target, bad), (problem, target, good)]))
    monkeypatch.setattr(sys, "argv", ["check_compiles.py", "--jobs", "1"])
    with pytest.raises(SystemExit) as left:
        check_compiles.main()
    assert left.value.code == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"a100 {problem.label()} bad: compile: ValueError: tl.dot has been removed"
    assert lines[1].endswith("1 compiled, 1 failed")


def test_a_sample_is_one_kernel_of_each_family_and_architecture() -> None:
    found, chosen = check_compiles.gpus(), list(families().values())
    kernels = [(target.slug, source.stem.rsplit("_", 1)[0]) for _, target, source in check_compiles.sample(chosen, found)]
    assert len(set(kernels)) == len(kernels)
    every = {
        (target.slug, family.name)
        for target in found
        for family in chosen
        if any(family.supports(problem.spec(), target) is None for problem in check_compiles.every_problem())
    }
    assert set(kernels) == every


def test_a_kernel_that_this_triton_has_no_way_to_compile_counts_as_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [problem, target, good] = next(check_compiles.candidates([families()["flash_fwd"]], [find_target("a100")]))
    known = replace(good, uncompilable="this version takes no such views")
    monkeypatch.setattr(check_compiles, "candidates", lambda *_: iter([(problem, target, known), (problem, target, good)]))
    monkeypatch.setattr(sys, "argv", ["check_compiles.py", "--jobs", "1"])
    check_compiles.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1 left out: this version takes no such views"
    assert lines[1].endswith("1 compiled, 0 failed")


def test_every_case_that_make_newest_runs_takes_its_arguments() -> None:
    [*case, option] = [*newest.PARTS["kernels"], "--sample"]
    found = subprocess.run([sys.executable, *case, option, "--help"], cwd=newest.ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and option in found.stdout, found.stderr
