"""Child processes with limits of time: a job that hangs, crashes or raises costs itself alone, and none outlives its parent."""

import math
import multiprocessing
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as Overdue
from types import TracebackType
from typing import Any, TypeVar

from pebble import ProcessExpired, ProcessPool

from flashtune.core.system.errors import first_line

NO_TIME = "left out: time was up"
"""Reason for a job that a run had no time for."""

CHECKING = 0.5
"""Share of a run's time after which no more cells are checked."""

Found = TypeVar("Found")
Cell = TypeVar("Cell", bound=Hashable)

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
            return None, first_line(error)


def in_children(jobs: Sequence[Job], *, start: Callable[[], None], count: int = 1, limit_s: float) -> Iterator[Answer]:
    """Each job's answer in their order, by children of its own (see `Children.each`)."""
    with Children(start=start, count=count, limit_s=limit_s) as children:
        yield from children.each(jobs)


def check_then_time(
    cells: Sequence[Cell],
    check: Callable[[Cell], Job],
    measure: Callable[[Cell], Job],
    *,
    start: Callable[[], None],
    count: int,
    limit_s: float,
    budget_s: float = math.inf,
    sound: Callable[[Cell, Any], bool] = lambda cell, checked: True,
) -> Iterator[tuple[Cell, Any, Any, str]]:
    """Each cell with the answers of its check and of its timing and the reason that there is none, as they come.

    All are checked first, `count` at a time and for CHECKING of the time; then those that are `sound` are timed, one alone at a time.
    """
    began, sounds, late = time.monotonic(), dict[Cell, Any](), dict.fromkeys(cells)
    checks = in_children([check(cell) for cell in cells], start=start, count=count, limit_s=limit_s)
    for cell, (checked, failed) in until(began + CHECKING * budget_s, zip(cells, checks, strict=True)):
        if not failed and sound(cell, checked):
            sounds[cell] = checked
        else:
            del late[cell]
            yield cell, checked, None, failed
    checks.close()
    times = in_children([measure(cell) for cell in sounds], start=start, limit_s=limit_s)
    for cell, (found, failed) in until(began + budget_s, zip(sounds, times, strict=True)):
        del late[cell]
        yield cell, sounds[cell], found, failed
    times.close()
    for cell in late:
        yield cell, sounds.get(cell), None, NO_TIME


def until(deadline: float, found: Iterable[Found]) -> Iterator[Found]:
    """Items of `found` up to the first that comes after the deadline (time.monotonic)."""
    for one in found:
        yield one
        if time.monotonic() > deadline:
            return
