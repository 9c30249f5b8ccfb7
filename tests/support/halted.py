"""Writers that are stopped between writing and renaming, in processes of their own, to be killed there or to go on."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def halted(write: Callable[..., object], folder: Path) -> Iterator[Callable[[], None]]:
    """A process that has written and not renamed yet; the function lets it go on to its end. It is killed with the block."""
    reached, go = os.pipe(), os.pipe()
    pid = os.fork()
    if not pid:
        try:
            rename = os.rename

            def pause(*paths: Any) -> None:
                os.write(reached[1], b"r")
                os.read(go[0], 1)
                if paths:
                    rename(*paths)

            os.replace = os.rename = pause
            write(folder, pause)
        finally:
            os._exit(0)
    # What the child alone holds ends with it, so that nobody waits for a dead one.
    os.close(reached[1])
    alive = True
    try:
        assert os.read(reached[0], 1) == b"r"

        def ended() -> None:
            nonlocal alive
            os.write(go[1], b"gggg")
            alive = os.waitpid(pid, 0)[0] != pid

        yield ended
    finally:
        if alive:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for end in (reached[0], *go):
            os.close(end)
