"""Context that defers interruptions to its end."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

PATIENCE_S = 3.0
"""Seconds after a deferred interruption from which the next one takes effect at once."""


@contextmanager
def unbroken() -> Iterator[None]:
    """A context whose signals of interruption are raised at its end.

    An exception of a signal handler inside a transaction would leave it half done, and its locks taken as long as the traceback lives.
    It has no effect outside the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[tuple[int, float]] = []
    working = True

    def hold(number: int, frame: FrameType | None) -> None:
        if working and (not deferred or time.monotonic() - deferred[0][1] < PATIENCE_S):
            deferred.append((number, time.monotonic()))
        else:
            handlers[number](number, frame)

    # SIGALRM repeats an interruption that a finalizer swallowed (flashtune.cli.interrupts).
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)}
    handlers = {int(number): handler for number, handler in found.items() if callable(handler)}
    try:
        for number in handlers:
            signal.signal(number, hold)
        yield
    finally:
        working = False
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with ExitStack() as heard:
            # Each signal once, in order, even where an earlier handler raises.
            for number in reversed(dict.fromkeys(number for number, _ in deferred)):
                heard.callback(signal.raise_signal, number)
