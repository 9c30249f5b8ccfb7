"""Work that an interruption must not break off in the middle."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType

PATIENCE_S = 3.0
"""So long after one that is held back the next interruption breaks in: somebody doesn't want to wait."""


@contextmanager
def unbroken() -> Iterator[None]:
    """Interruptions that come meanwhile are heard at the end.

    Whatever a signal raises inside of a transaction leaves it half done, and its locks held for as long as the traceback lives. Of no
    effect in other threads than the main one, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, float]] = []
    working = True

    def hold(number: int, frame: FrameType | None) -> None:
        if working and (not held or time.monotonic() - held[0][1] < PATIENCE_S):
            held.append((number, time.monotonic()))
        else:
            handlers[number](number, frame)

    # The alarm is that of an interruption which a finalizer swallowed (flashtune.cli.interrupts).
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
            # Each once, the first one first, also where the handler of one before raises.
            for number in reversed(dict.fromkeys(number for number, _ in held)):
                heard.callback(signal.raise_signal, number)
