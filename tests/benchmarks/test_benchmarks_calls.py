"""The case `calls` without a GPU: a new process's first result stands beside torch's of the same sizes."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.cases import calls


def test_first_results_are_told_beside_torchs_of_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(command: list[str], **_: Any) -> Any:
        program = command[-1]
        compile(program, "first call", "exec")
        ran.append(program)
        ours, far = "if True:\n    from flashtune" in program, "4, 16, 900, 80" in program
        failed = ours and "if True:\n    # As where" in program
        return SimpleNamespace(returncode=int(failed), stdout=f"1.0 {0.02 * ours} {0.5 if far else 0.1}", stderr="no kernel")

    monkeypatch.setattr(calls, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))
    rows = list(calls.process_part())
    assert [row["process"] for row in rows if "failed" in row] == ["ours, no Triton, no compiler"]
    told = [row for row in rows if "failed" not in row]
    assert len(told) == 2 * (len(calls.WAYS) - 1) and len(set(ran)) == len(calls.WAYS)
    for row in told:
        assert row.get("beyond_torch_s") == (0.02 if row["process"].startswith("ours") else None)
