"""Ctrl-C and SIGTERM: both interrupt a command, and what follows in quick succession (`timeout` sends two) is the same interruption."""

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

QUICK_S = 3.0
"""Within this time after an interruption no other one cuts short what it started: keeping what is known."""

AGAIN_S = 0.01
"""So soon an interruption is raised again that Python dropped because it was raised in a finalizer."""

DEAF_S = 1.2
"""A signal that Python hasn't handled by then ends the process: its main thread is within a call of C that knows no signals."""

INTERRUPTED = 130
"""The exit code."""

_HANDLED, _OVER = b"\xff", b"\0"
"""Among the numbers of signals in the pipe that the watch reads: Python has handled what came, and the watch is over."""


class Interrupts:
    """Whether this command was interrupted."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._hook = sys.unraisablehook
        self._watch: int | None = None

    @property
    def came(self) -> bool:
        """Also where an import that was interrupted made another error of it."""
        return self._last is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        now = time.monotonic()
        if self._watch is not None:
            os.write(self._watch, _HANDLED)
        if self._last is not None and now - self._last < QUICK_S:
            return
        self._last = now
        raise KeyboardInterrupt

    def again(self, number: int, frame: FrameType | None) -> None:
        """The handler of the alarm that `unheard` sets."""
        raise KeyboardInterrupt

    def unheard(self, dropped: "sys.UnraisableHookArgs") -> None:
        """In place of sys.unraisablehook: where an interruption ends that was raised in a finalizer (`__del__`, a weakref's callback)."""
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # Not at once: what is raised in here would be dropped as well.
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            self._hook(dropped)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Have a thread end the process where a signal goes unheard for `DEAF_S`, as SIGKILL would: what was saved stays whole.

        A look-up of a host, a wait for another's lock in SQLite and a compiler in this process take as long as they take, and children
        are begun with signals held back.
        """
        reading, self._watch = os.pipe()
        os.set_blocking(self._watch, False)
        before = signal.set_wakeup_fd(self._watch, warn_on_full_buffer=False)
        watch = threading.Thread(target=_watch, args=(reading,), name="signals", daemon=True)
        watch.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            writing, self._watch = self._watch, None
            os.write(writing, _OVER)
            watch.join()
            os.close(writing)
            os.close(reading)


def _watch(reading: int) -> None:
    waiting = False
    while True:
        if waiting and not select.select([reading], [], [], DEAF_S)[0]:
            os.write(2, b"flashtune: interrupted\n")
            os._exit(INTERRUPTED)
        said = os.read(reading, 4096)
        if _OVER in said:
            return
        for one in said:
            if one in (signal.SIGINT, signal.SIGTERM):
                waiting = True
            elif one == _HANDLED[0]:
                waiting = False


@contextmanager
def interruptible(interrupts: Interrupts) -> Iterator[None]:
    """Handle both signals meanwhile, but for one that whoever started the command has it ignore."""
    before, hook, watch = {}, sys.unraisablehook, ExitStack()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, interrupts)
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, interrupts.again)
        sys.unraisablehook = interrupts.unheard
        watch.enter_context(interrupts.watched())
    try:
        yield
    finally:
        watch.close()
        sys.unraisablehook = hook
        if signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
