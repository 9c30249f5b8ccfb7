"""Ctrl-C and SIGTERM: both interrupt a command, and what follows in quick succession (`timeout` sends two) is the same interruption."""

import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

QUICK_S = 3.0
"""Within this time after an interruption no other one cuts short what it started: keeping what is known."""

AGAIN_S = 0.01
"""So soon an interruption is raised again that Python dropped because it was raised in a finalizer."""

INTERRUPTED = 130
"""The exit code."""


class Interrupts:
    """Whether this command was interrupted."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._hook = sys.unraisablehook

    @property
    def came(self) -> bool:
        """Also where an import that was interrupted made another error of it."""
        return self._last is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        now = time.monotonic()
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
def interruptible(interrupts: Interrupts) -> Iterator[None]:
    """Handle both signals meanwhile, but for one that whoever started the command has it ignore."""
    before, hook = {}, sys.unraisablehook
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, interrupts)
        before[signal.SIGALRM] = signal.signal(signal.SIGALRM, interrupts.again)
        sys.unraisablehook = interrupts.unheard
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if signal.SIGALRM in before:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
