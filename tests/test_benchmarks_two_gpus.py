"""benchmarks/two_gpus.py and helion_attention.py without a GPU: a run that meets its limit is told all the same, and as such."""

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import helion_attention
import lanes
import two_gpus

SEARCH = """#!{python} -SE
import os, signal, time
cache = os.environ["TRITON_CACHE_DIR"]
os.mkdir(cache)
if os.fork():
    time.sleep(60)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({told!r}, "w") as told:
    told.write(str(os.getpid()))
end = time.monotonic() + 20
while time.monotonic() < end:
    open(os.path.join(cache, str(time.monotonic_ns())), "w").close()
"""
"""A search whose compiler goes on writing when it is gone."""


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_that_meets_its_limit_is_told_and_leaves_no_process_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    search, told = tmp_path / "search", tmp_path / "told"
    search.write_text(SEARCH.format(python=sys.executable, told=str(told)))
    search.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(search))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = two_gpus.searched("all", [], tmp_path, gpus=1, first=0, limit_s=0.4)
    assert (found["rc"], found["problems"], found["cores"]) == (None, 0, len(os.sched_getaffinity(0)))
    if told.exists():
        pid = int(told.read_text())
        until = time.monotonic() + 15
        while runs(pid) and time.monotonic() < until:
            time.sleep(0.01)
        assert not runs(pid)


def test_runs_of_which_one_met_its_limit_are_compared_by_as_many_problems() -> None:
    one = {"rc": 0, "seconds": 40.0, "problems": 3, "done_at_s": {"a": 10.0, "b": 20.0, "c": 36.0}}
    every = {"rc": 0, "seconds": 20.0, "problems": 3, "done_at_s": {"c": 9.0, "a": 12.0, "b": 18.0}}
    assert two_gpus.compared(one, every) == {"problems": 3, "whole": True, "one_s": 40.0, "all_s": 20.0, "ratio": 2.0}
    cut = {"rc": None, "seconds": 15.0, "problems": 2, "done_at_s": {"c": 9.0, "a": 12.0}}
    assert two_gpus.compared(one, cut) == {"problems": 2, "whole": False, "one_s": 20.0, "all_s": 12.0, "ratio": 1.667}
    assert two_gpus.compared(one, cut | {"problems": 0, "done_at_s": {}})["ratio"] is None


def test_a_share_of_helions_time_says_whether_its_budget_ended_it() -> None:
    def share(helion: dict[str, float]) -> tuple[float, str]:
        found = helion_attention.share_of_time({"seconds": 20.0}, helion, 240.0)
        return found["share_of_time"], found["ended"]

    assert share({"seconds": 210.0}) == (0.095, "by itself")
    assert share({"seconds": 241.0}) == (0.083, "by its budget")
    # Killed where it didn't heed its budget.
    assert share({}) == (0.083, "by its budget")
    assert helion_attention.share_of_time({"failed": "killed"}, {"seconds": 1.0}, 240.0)["share_of_time"] is None


def test_a_simulated_gpu_takes_what_the_log_of_a_real_one_says() -> None:
    costs = lanes.costs_of(lanes.LOG.read_text())
    assert len(costs) == 24
    # 25 trials: check 1.30 s, time 0.93, load 0.50; rounds 0.54 in two races, oracles 0.64 (the small ones apart).
    assert costs["n512-d64-bf16-full"] == pytest.approx({"trial": 2.73 / 25, "race": 0.27, "oracles": 0.64})
