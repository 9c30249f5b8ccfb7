"""Killable child processes: a bad candidate (a hang, a crash, a sticky GPU error) costs its own trial and nothing more."""

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import TimeoutError as Overdue
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from flashtune.core.problem import Problem
from flashtune.core.results import Fate
from flashtune.core.target import Target
from flashtune.tuner import tasks
from flashtune.tuner.replies import Answer, Failed, Ready

Crew = Literal["compile", "interpret", "device"]
"""Compilers run side by side; one process interprets; one alone holds the GPU, so that nothing disturbs its timings."""

_START: dict[Crew, Callable[[], None]] = {"compile": tasks.withdraw, "interpret": tasks.start_interpreter, "device": tasks.withdraw}


Found = TypeVar("Found", bound=Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds that one task may take before its process is killed."""

    compile_s: float = 120.0
    interpret_s: float = 120.0
    prepare_s: float = 180.0
    device_s: float = 10.0


class Pending(Generic[Found]):
    """A task that was handed to a child process."""

    def __init__(self, workers: "Workers", crew: Crew, future: "ProcessFuture[Found | Failed]", limit_s: float) -> None:
        self._workers, self._future, self._limit_s = workers, future, limit_s
        self._crew: Crew = crew

    def reply(self) -> Found | Failed:
        """Wait for the end of the task, whichever it is; a hang or a crash is a failure like any other."""
        try:
            reply: Found | Failed = self._future.result()
        except Overdue:
            reply = Failed(fate=Fate.TIMEOUT, reason=f"killed after {self._limit_s:g} s in stage {self._crew!r}")
        except ProcessExpired as crash:
            fate = Fate.COMPILE if self._crew == "compile" else Fate.RUNTIME
            reply = Failed(fate=fate, reason=f"its process died in stage {self._crew!r} (exit code {crash.exitcode})")
        if isinstance(reply, Failed) and reply.poisoned:
            self._workers.dismiss(self._crew)
        return reply


class Workers:
    """The pools of child processes of one search; a context manager that leaves no process behind."""

    def __init__(self, *, jobs: int, limits: Limits | None = None) -> None:
        self._jobs = jobs
        self.limits = limits or Limits()
        self._pools: dict[Crew, ProcessPool] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        crews: list[Crew] = list(self._pools)
        for crew in crews:
            self.dismiss(crew)

    def submit(self, crew: Crew, task: Callable[..., Found | Failed], *arguments: Any, limit_s: float) -> Pending[Found]:
        """Hand `task` to a process of `crew`, which is killed after `limit_s` seconds of running it."""
        if crew not in self._pools:
            count = self._jobs if crew == "compile" else 1
            # Spawned, not forked: a child must not inherit a started GPU or the parent's threads.
            context = multiprocessing.get_context("spawn")
            self._pools[crew] = ProcessPool(max_workers=count, context=context, initializer=_START[crew])
        # The pool's threads, and through them the children until they withdraw, take over what this thread holds back; the tracker of
        # resources, which unblocks these signals where it is started, is started before.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, tasks.HELD_BACK)
        try:
            future = self._pools[crew].schedule(task, args=arguments, timeout=limit_s)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return Pending(self, crew, future, limit_s)

    def prepare(self, problem: Problem, target: Target, seed: int) -> Ready | Failed:
        """Start the GPU's process, where there is none, and make the inputs and oracles of `problem` there.

        The reason of a failure is a whole sentence.
        """
        reply = self.submit("device", tasks.prepare_device, problem, target, seed, limit_s=self.limits.prepare_s).reply()
        if isinstance(reply, Ready):
            return reply
        reason = f"the GPU can't take {problem.label()} ({reply.reason}): free its memory, or take a smaller batch or fewer heads"
        return replace(reply, reason=reason)

    def dismiss(self, crew: Crew) -> None:
        """Kill the crew's processes; the next task starts fresh ones."""
        pool = self._pools.pop(crew, None)
        if pool is not None:
            pool.stop()  # type: ignore[no-untyped-call]
            pool.join()
