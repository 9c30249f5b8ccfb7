"""Ctrl-C and SIGTERM as interruptions of a command; signals in quick succession (`timeout` sends two) count as one."""

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
"""Seconds after an interruption in which further ones are ignored, so that results are still saved."""

AGAIN_S = 0.01
"""Seconds until an interruption is raised again that Python dropped in a finalizer."""

DEAF_S = 1.2
"""Seconds until a signal that Python hasn't handled ends the process: its main thread is in C code that ignores signals."""

INTERRUPTED = 130
"""Exit code of an interrupted command."""

_HANDLED, _OVER = b"\xff", b"\0"
"""Markers beside signal numbers in the watch's pipe: signals were handled; the watch ends."""


class Interrupts:
    """Signal handlers of this command, and its state of interruption; `ending` is True for a process that ends with the command."""

    def __init__(self, *, ending: bool = False) -> None:
        self.ending = ending
        self._last: float | None = None
        self._hook = sys.unraisablehook
        self._watch: int | None = None

    @property
    def came(self) -> bool:
        """True if this command was interrupted, also where an interrupted import raised another error."""
        return self._last is not None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handler of SIGINT and SIGTERM."""
        now = time.monotonic()
        if self._watch is not None:
            os.write(self._watch, _HANDLED)
        if self._last is not None and now - self._last < QUICK_S:
            return
        self._last = now
        raise KeyboardInterrupt

    def again(self, number: int, frame: FrameType | None) -> None:
        """Handler of the alarm that `unheard` sets."""
        raise KeyboardInterrupt

    def unheard(self, dropped: "sys.UnraisableHookArgs") -> None:
        """Substitute of sys.unraisablehook, for interruptions raised in finalizers (`__del__`, callbacks of weak references)."""
        if issubclass(dropped.exc_type, KeyboardInterrupt):
            # Not at once: an exception raised here would be dropped, too.
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
        else:
            self._hook(dropped)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a thread that ends the process, as SIGKILL would, where a signal isn't handled for `DEAF_S`; saved results stay whole.

        Look-ups of hosts, waits for SQLite's locks and compilers in this process may take long, and children are started with signals
        blocked.
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
    """Handle both signals in the block, except one that the parent process set to be ignored."""
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
            # An interrupted process has said so, and only ends: a further signal would change its exit code.
            signal.signal(number, signal.SIG_IGN if interrupts.ending and interrupts.came else handler)
