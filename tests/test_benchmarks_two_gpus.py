"""benchmarks/two_gpus.py without a GPU: a run that meets its limit is told all the same."""

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

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
