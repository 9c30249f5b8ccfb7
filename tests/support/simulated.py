"""GPUs for tests on machines that have none: what a device's process would do, with times that the text alone decides.

`simulate` puts the stand-ins into a worker process of its own kind, so that everything but the kernels is real: pools, processes, pipes.
A file for each device, with a byte for each trial, is its logical clock: a device waits at the end of a trial until no other is more than
one behind, so that work is shared as by equal GPUs, however the machine's cores are shared. Who waits for too long goes on alone.
"""

import os
import time
import zlib
from pathlib import Path

from stand_ins import quick_compile

from flashtune.core.gpu.target import Target
from flashtune.core.problems.problem import Problem
from flashtune.core.records.results import Conditions, Measurement
from flashtune.tuner.children.tasks import Source
from flashtune.tuner.replies import Compiled, Failed, Ready, Rounds, Timed

ALONE_S = 60.0
"""So long a device waits for another to finish its trial before it goes on: far longer than a fair share of the slowest machine takes."""


def time_us(source: Source) -> float:
    """A kernel's time: between 100 and 200 us, by its text."""
    return 100.0 + zlib.crc32(source.text.encode()) % 1000 / 10


def ready(problem: Problem, target: Target, seed: int, *rest: object) -> Ready:
    """In place of inputs and oracles."""
    return Ready()


def timed(source: Source, incumbent: Source | None, problem: Problem, target: Target, *rest: object) -> Timed | Failed:
    """In place of a trial on the GPU of this process."""
    clock()
    beside = None if incumbent is None else Measurement.of([time_us(incumbent)])
    return Timed(time=Measurement.of([time_us(source)]), error=0.5, incumbent=beside)


def raced(sources: list[Source], problem: Problem, target: Target, *rest: object) -> Rounds:
    """In place of a race."""
    return Rounds(times=tuple((time_us(source),) * 9 for source in sources), backend=None, began=1.0, ended=2.0, pid=os.getpid())


def compiled(source: Source, problem: Problem, target: Target, *rest: object) -> Compiled | Failed:
    """In place of a compiler."""
    return quick_compile(source, problem, target)


def clock() -> None:
    """Count a trial of this device, and let the others come up to it."""
    folder, mine = Path(os.environ["FLASHTUNE_TEST_CLOCKS"]), os.environ.get("CUDA_VISIBLE_DEVICES", "alone")
    with (folder / mine).open("a") as file:
        file.write(".")
    begun = time.monotonic()
    others = [folder / name for name in os.environ["FLASHTUNE_TEST_DEVICES"].split(",") if name and name != mine]
    count = trials(folder / mine)
    while any(trials(other) < count - 1 for other in others) and not (folder / "end").exists():
        if time.monotonic() - begun > ALONE_S:
            (folder / "end").touch()
        time.sleep(0.005)


def trials(clock_file: Path) -> int:
    """Reading of a device's clock."""
    return clock_file.stat().st_size if clock_file.exists() else 0


class NoWatch:
    """A GPU that nobody watches."""

    def __init__(self, gpu: str) -> None:
        pass

    def __enter__(self) -> "NoWatch":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def between(self, start: float, end: float, own: int) -> Conditions | None:
        return None
