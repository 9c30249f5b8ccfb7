"""The case `unseen`: where a cold search's time went, by its trace."""

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.cases import unseen
from flashtune.cli.tracing import trace_times
from flashtune.tuner.replies import Spent, logger


def test_seconds_by_purpose_are_those_of_the_trace(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FLASHTUNE_TRACE", "1")
    monkeypatch.setattr(logger, "handlers", [])
    here, device = Spent(), Spent()
    here.add({"wait for compilers": 2.671, "trials": 2.37})
    device.add({"wait for triton and pytorch": 0.33, "check": 0.875, "load": 0.001})
    trace_times()
    try:
        for _ in range(2):
            logger.debug("%s: %s; here: %s; on the GPU: %s", "n3001-d256-bf16-causal", "13 trials, 7.29 s", here, device)
    finally:
        logger.setLevel(logging.NOTSET)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert unseen.spent(said[:1]) == {
        "here": {"wait for compilers": 2.67, "trials": 2.37},
        "on the GPU": {"wait for triton and pytorch": 0.33, "check": 0.88},
    }
    assert unseen.spent(said)["here"]["trials"] == 4.74
