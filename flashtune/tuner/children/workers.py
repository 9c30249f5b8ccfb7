"""Killable child processes: a bad candidate (a hang, a crash, a sticky GPU error) costs its own trial and nothing more."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Overdue
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Generic, Literal, TypeVar

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Fate
from flashtune.core.system.errors import EnvironmentProblem
from flashtune.core.system.unbroken import unbroken
from flashtune.templates.mods.known import NAMED
from flashtune.tuner.children import start, tasks
from flashtune.tuner.children.start import serving
from flashtune.tuner.replies import Answer, Failed, Ready

Crew = Literal["compile", "interpret", "device"]
"""Kinds of child processes: several compilers, one interpreter, and one per GPU, which uses that alone, so that timings are undisturbed."""

_START: dict[Crew, Callable[[dict[str, str]], None]] = {
    "compile": start.withdraw,
    "interpret": start.start_interpreter,
    "device": start.start_device,
}

_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)

WITHOUT_LINES = {"TRITON_DISABLE_LINE_INFO": "1"}
"""Environment of all children; Triton's cache keys contain it, so that raced kernels can later be loaded from the cache."""

Found = TypeVar("Found", bound=Answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds that one task may take before its process is killed."""

    compile_s: float = 120.0
    interpret_s: float = 120.0
    prepare_s: float = 180.0
    device_s: float = 10.0


class Pending(Generic[Found]):
    """Task submitted to a child process."""

    def __init__(self, workers: "Workers", crew: Crew, device: int, future: "ProcessFuture[Found | Failed]", limit_s: float) -> None:
        self._workers, self._device, self._future, self._limit_s = workers, device, future, limit_s
        self._crew: Crew = crew
        self._takers, self._lock = 1, threading.Lock()

    def reply(self) -> Found | Failed:
        """Wait for the end of the task and return its reply; a hang or a crash becomes a `Failed`."""
        try:
            reply: Found | Failed = self._future.result()
        except Overdue:
            reply = Failed(fate=Fate.TIMEOUT, reason=f"killed after {self._limit_s:g} s in stage {self._crew!r}", inconclusive=True)
        except ProcessExpired as crash:
            fate = Fate.COMPILE if self._crew == "compile" else Fate.RUNTIME
            # A compiler that crashes does so at the kernel's text.
            inconclusive = self._crew != "compile" or -crash.exitcode not in _CRASHES
            died = f"its process died in stage {self._crew!r} (exit code {crash.exitcode})"
            reply = Failed(fate=fate, reason=died, inconclusive=inconclusive)
        except BrokenProcessPool:
            # All processes of the pool ended while none of them had a task.
            fate = Fate.COMPILE if self._crew == "compile" else Fate.RUNTIME
            reply = Failed(fate=fate, reason=f"its process died before stage {self._crew!r} began", inconclusive=True)
        if isinstance(reply, Failed) and reply.poisoned:
            self._workers.dismiss(self._crew, self._device)
        return reply

    def when_done(self, call: Callable[[], object]) -> None:
        """Have any thread call `call` once `reply` needn't wait; immediately where that is so."""
        self._future.add_done_callback(lambda _: call())

    @property
    def done(self) -> bool:
        """True once `reply` needn't wait."""
        return self._future.done()

    def shared(self) -> bool:
        """Add a taker of the reply and return True; False where the task was cancelled before it began."""
        with self._lock:
            if self._future.cancelled():
                return False
            self._takers += 1
            return True

    def forget(self) -> None:
        """Remove a taker of the reply; a task without takers isn't begun."""
        with self._lock:
            self._takers = max(0, self._takers - 1)
            # A running task is left to its end: stopping it would kill its process, and a new one is slow to start.
            if not self._takers and not self._future.running():
                self._future.cancel()  # type: ignore[no-untyped-call]


class Workers:
    """Pools of child processes of one search; a context manager that leaves no process behind. Any thread may submit tasks.

    `devices` are the GPUs, as CUDA_VISIBLE_DEVICES names them; without any, there is PyTorch's default one. Processes are started with
    their first task.
    """

    def __init__(self, *, jobs: int, limits: Limits | None = None, devices: Sequence[str] = ()) -> None:
        self._jobs, self._devices = jobs, tuple(devices)
        self.limits = limits or Limits()
        self._pools: dict[tuple[Crew, int], ProcessPool] = {}
        self._started: set[int] = set()
        self._compiling: list[ProcessFuture[Any]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # In parallel: a process with a GPU takes a while to end, and so do a dozen compilers.
        with ThreadPoolExecutor(max(1, len(self._pools))) as beside:
            list(beside.map(lambda pool: self.dismiss(*pool), list(self._pools)))

    def submit(self, crew: Crew, task: Callable[..., Found | Failed], *arguments: Any, limit_s: float, device: int = 0) -> Pending[Found]:
        """Submit `task` to a process of `crew`, which is killed after `limit_s` seconds of running it; `device` is the GPU's number."""
        with self._lock, serving():
            pool = self._pool(crew, device)
            # `active` starts a new pool, which may take a while.
            if not pool.active:
                raise EnvironmentProblem(f"the processes of stage {crew!r} end when they begin: free some memory")
            # An interruption between the two halves of waking the queue's reader would leave that, and who joins it, waiting for good.
            with unbroken():
                future = pool.schedule(task, args=arguments, timeout=limit_s)
            if crew == "compile":
                self._compiling = [*(one for one in self._compiling if not one.done()), future]
        return Pending(self, crew, device, future, limit_s)

    def free_compilers(self) -> int:
        """Number of idle compilers."""
        with self._lock:
            return max(0, self._jobs - sum(not one.done() for one in self._compiling))

    def _pool(self, crew: Crew, device: int) -> ProcessPool:
        """The crew's pool; a new one where there is none, or where its idle processes were killed."""
        if (known := self._pools.get((crew, device))) is not None and not known.active:
            _end(self._pools.pop((crew, device)))
        if (crew, device) not in self._pools:
            count = self._jobs if crew == "compile" else 1
            # A GPU's first process imports torch while the server does, and starts its driver meanwhile; later ones find the server ready.
            first = crew == "device" and device not in self._started
            self._started.add(device)
            context = multiprocessing.get_context("spawn" if first else "forkserver")
            arguments: tuple[Any, ...] = (os.environ | WITHOUT_LINES,)
            if crew == "device" and self._devices:
                arguments = (*arguments, self._devices[device])
            arguments = (tuple(dict.fromkeys(NAMED.values())), _START[crew], *arguments)
            self._pools[crew, device] = ProcessPool(
                max_workers=count, context=context, initializer=start.with_functions, initargs=arguments
            )
        return self._pools[crew, device]

    def prepare(self, problem: Problem, target: Target, seed: int, *, device: int = 0) -> Ready | Failed:
        """Start the GPU's process, where there is none, and make the inputs and oracles of `problem` there.

        The reason of a failure is a whole sentence.
        """
        return self.prepared(problem, self.preparing(problem, target, seed, device=device))

    def preparing(self, problem: Problem, target: Target, seed: int, *, device: int = 0) -> Pending[Ready]:
        """Begin to `prepare` without waiting: later tasks of this GPU's process wait for it there."""
        limit_s = self.limits.prepare_s
        return self.submit("device", tasks.prepare_device, problem, target, seed, limit_s=limit_s, device=device)

    def prepared(self, problem: Problem, pending: Pending[Ready]) -> Ready | Failed:
        """Result of `preparing`."""
        reply = pending.reply()
        if isinstance(reply, Ready):
            return reply
        reason = f"the GPU can't take {problem.label()} ({reply.reason}): free its memory, or take a smaller batch or fewer heads"
        return replace(reply, reason=reason)

    def dismiss(self, crew: Crew, device: int = 0) -> None:
        """Kill the crew's processes; the next task starts fresh ones."""
        with self._lock:
            pool = self._pools.pop((crew, device), None)
        if pool is not None:
            _end(pool)


def _end(pool: ProcessPool) -> None:
    """Kill a pool's processes."""
    pool.stop()  # type: ignore[no-untyped-call]
    pool.join()
