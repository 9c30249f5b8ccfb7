"""Benchmarks in child processes: one that hangs, crashes or raises costs itself, and none outlives its parent."""

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as Overdue
from typing import Any

from pebble import ProcessExpired, ProcessPool

from flashtune.tuner.tasks import one_line

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


def in_children(jobs: Sequence[Job], *, start: Callable[[], None], count: int = 1, limit_s: float) -> Iterator[tuple[Any, str]]:
    """Each job's answer (None where there is none) and why there is none, in their order; `count` run at a time, and who stops asking
    ends the rest. `start` prepares a process."""
    pool = ProcessPool(max_workers=count, context=multiprocessing.get_context("spawn"), initializer=start)
    try:
        for future in [pool.schedule(task, args=words, timeout=limit_s) for task, words in jobs]:
            try:
                yield future.result(), ""
            except Overdue:
                yield None, f"killed after {limit_s:g} s"
            except ProcessExpired as crash:
                yield None, f"its process died (exit code {crash.exitcode}), as after a CUDA error"
            except Exception as error:
                yield None, one_line(error)
    finally:
        pool.stop()
        pool.join()
