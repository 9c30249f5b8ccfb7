"""The case `check_compiles`: every family for every architecture, and a failure that shows."""

import sys

import pytest

from benchmarks.cases import check_compiles
from flashtune.core.target import find_target, targets
from flashtune.templates import families
from flashtune.tuner.children.tasks import Source


def test_every_architecture_and_family_is_compiled_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # Of all problems every fifth: each family serves some of them.
    some = list(check_compiles.every_problem())[::5]
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
