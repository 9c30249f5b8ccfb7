"""Child processes with limits of time: a job that hangs, crashes or raises costs itself alone, and none outlives its parent."""

import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as Overdue
from types import TracebackType
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from flashtune.tuner.children.tasks import one_line

NO_TIME = "left out: time was up"
"""Reason for a job that a run had no time for."""

Found = TypeVar("Found")

Job = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""

Answer = tuple[Any, str]
"""Result of a job, None where there is none, and then the reason."""


class Children:
    """Child processes, which `start` prepares and which are kept for further jobs; `count` jobs run at a time, each for at most `limit_s`
    seconds. A context manager, which leaves no process behind."""

    def __init__(self, *, start: Callable[[], None] | None = None, count: int = 1, limit_s: float) -> None:
        self._limit_s = limit_s
        self._pool = ProcessPool(max_workers=count, context=multiprocessing.get_context("spawn"), initializer=start)

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.stop()
        self._pool.join()

    def begin(self, job: Job) -> None:
        """Start the processes with a job whose answer is dropped."""
        self._begun([job])

    def each(self, jobs: Iterable[Job]) -> Iterator[Answer]:
        """The jobs' answers in their order; closing the iterator ends the rest."""
        futures = self._begun(jobs)
        try:
            for future in futures:
                yield self._answer(future)
        finally:
            self._end(futures)

    def by(self, deadline: float, jobs: Iterable[Job], *, late: str, enough: Callable[[int], bool] | None = None) -> list[Answer]:
        """The answers that there are by `deadline` (time.monotonic), in the order of the jobs, which may be made one after another. Jobs
        that run then, or when so many have ended that it is `enough`, are killed, with `late` for a reason."""
        futures = self._begun(jobs)
        going: set[Future[Any]] = set(futures)
        while going and time.monotonic() < deadline and not (enough is not None and enough(len(futures) - len(going))):
            left = None if deadline == math.inf else max(0.0, deadline - time.monotonic())
            going = wait(going, timeout=left, return_when=ALL_COMPLETED if enough is None else FIRST_COMPLETED).not_done
        ended = [future.done() for future in futures]
        self._end(futures)
        return [self._answer(future) if done else (None, late) for future, done in zip(futures, ended, strict=True)]

    def _begun(self, jobs: Iterable[Job]) -> "list[Future[Any]]":
        return [self._pool.schedule(task, args=words, timeout=self._limit_s) for task, words in jobs]

    def _end(self, futures: "Sequence[Future[Any]]") -> None:
        """A job that runs ends with its process."""
        for future in futures:
            future.cancel()

    def _answer(self, future: "Future[Any]") -> Answer:
        try:
            return future.result(), ""
        except Overdue:
            return None, f"killed after {self._limit_s:g} s"
        except ProcessExpired as crash:
            return None, f"its process died (exit code {crash.exitcode}), as after a CUDA error"
        except Exception as error:
            return None, one_line(error)


def in_children(jobs: Sequence[Job], *, start: Callable[[], None], count: int = 1, limit_s: float) -> Iterator[Answer]:
    """Each job's answer in their order, by children of its own (see `Children.each`)."""
    with Children(start=start, count=count, limit_s=limit_s) as children:
        yield from children.each(jobs)


def until(deadline: float, found: Iterable[Found]) -> Iterator[Found]:
    """Items of `found` up to the first that comes after the deadline (time.monotonic)."""
    for one in found:
        yield one
        if time.monotonic() > deadline:
            return
