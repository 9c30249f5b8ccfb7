"""Child processes of tests/test_benchmarks_forward.py; apart, so that they import nothing else."""

import os
import time


def nothing() -> None:
    """Prepares a process."""


def answer(n: int, word: str) -> str:
    """Hangs, crashes, raises or answers, by `n`."""
    if n == 512:
        time.sleep(600)
    if n == 1024:
        os._exit(3)
    if n == 2048:
        raise ValueError("no")
    return word
