"""Tasks of worker processes that sleep or end, which import nothing that a task doesn't need."""

import os
import time

from flashtune.tuner.replies import Checked, Ready


def nap(seconds: float) -> Checked:
    """Sleep, and say in which process."""
    time.sleep(seconds)
    return Checked(error=float(os.getpid()))


def die(number: int) -> Ready:
    """End by a signal."""
    os.kill(os.getpid(), number)
    return Ready()


def die_first(environment: dict[str, str]) -> None:
    """End before any task, as a process that can't be prepared."""
    os._exit(1)
