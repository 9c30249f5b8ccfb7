"""Conditions of a GPU during the closing races: clocks, power, temperature, throttling, and other processes.

They come from NVIDIA's `nvidia-smi` in a process beside the race, so that neither the launching process nor the one that waits for it is
delayed. Without that tool (other vendors' GPUs, a container without it) there are no conditions and the race goes on.
"""

import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from flashtune.core.records.results import POWER_CAP, Conditions
from flashtune.tuner.replies import Failed, Raced

RACES = 3
"""Most attempts at a race while each is disturbed."""

PAUSE_S = 0.5
"""Seconds of pause before another race: the GPU cools, or another process ends."""

_READINGS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_throttle_reasons.active")
_EVERY_MS = 20
_START_S = 10.0
"""Seconds to wait for the first reading: a driver that no process uses takes seconds to start."""

THROTTLES = {
    0x4: POWER_CAP,
    0x8: "HwSlowdown",
    0x20: "SwThermalSlowdown",
    0x40: "HwThermalSlowdown",
    0x80: "HwPowerBrakeSlowdown",
}
"""NVML's bits for reasons of lowered clocks (nvml.h, nvmlClocksEventReason...); an idle GPU and clocks set by a user are none of these."""


class _Loop:
    """Process of the tool, which writes a line for every reading until it is stopped."""

    def __init__(self, command: Sequence[str]) -> None:
        self.readings: list[tuple[float, str]] = []
        """Time of each line (seconds since the epoch), and the line."""
        self._first = threading.Event()
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, text=True)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.readings.append((time.time(), line.strip()))
            self._first.set()
        self._first.set()

    def wait(self, seconds: float) -> None:
        """Wait until the first reading, the end of the tool, or the end of the time."""
        self._first.wait(seconds)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()


class GpuWatch:
    """Context manager that reads a GPU's state while it is open. `gpu` is an index or a UUID, as nvidia-smi takes it."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._loops: list[_Loop] = []

    def __enter__(self) -> Self:
        tool = shutil.which("nvidia-smi")
        if tool is not None:
            common = [tool, f"--id={self._gpu}", "--format=csv,noheader,nounits", f"--loop-ms={_EVERY_MS}"]
            queries = (f"--query-gpu={','.join(_READINGS)}", "--query-compute-apps=pid")
            try:
                for query in queries:
                    self._loops.append(_Loop([*common, query]))
            except BaseException:
                self.__exit__(None, None, None)
                raise
            self._loops[0].wait(_START_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for loop in self._loops:
            loop.stop()
        self._loops = []

    def between(self, start: float, end: float, own: int) -> Conditions | None:
        """Conditions from `start` to `end` (seconds since the epoch) while our process `own` ran; None without readings."""
        if not self._loops:
            return None
        gpu, processes = ([text for at, text in list(loop.readings) if start <= at <= end] for loop in self._loops)
        return conditions_of(gpu, processes, own)


def conditions_of(gpu: Sequence[str], processes: Sequence[str], own: int) -> Conditions | None:
    """Conditions from the tool's lines; None where no line of `gpu` can be read. `processes` are lines of one process id each."""
    readings = [parts for line in gpu if len(parts := [part.strip() for part in line.split(",")]) == len(_READINGS)]
    if not readings:
        return None
    sm, memory, power, temperature = ([value for fields in readings if (value := _number(fields[place])) is not None] for place in range(4))
    masks = [int(fields[4], 16) for fields in readings if fields[4].startswith("0x")]
    reasons = [name for bit, name in THROTTLES.items() if any(mask & bit for mask in masks)]
    return Conditions(
        samples=len(readings),
        sm_clock_mhz=round(statistics.median(sm)) if sm else None,
        memory_clock_mhz=round(statistics.median(memory)) if memory else None,
        power_w=statistics.median(power) if power else None,
        temperature_c=round(statistics.median(temperature)) if temperature else None,
        throttled_by=", ".join(reasons) if masks else None,
        other_processes=_others({int(line) for line in processes if line.isdigit()}, own),
    )


def _others(seen: set[int], own: int) -> int | None:
    """Number of other processes on the GPU; None where the driver lists none at all, as inside some containers."""
    if not seen:
        return None
    # Inside a container the ids are the host's, so that ours can't be recognised: it is one of those.
    return len(seen) - 1 if own not in seen else len(seen - {own})


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def race_undisturbed(
    race: Callable[[], Raced | Failed], watch: GpuWatch, *, pause_s: float = PAUSE_S
) -> tuple[Raced | Failed, Conditions | None]:
    """Race, and repeat while heat, hardware or another process disturbed it, up to `RACES` times; returns the least disturbed reply, with
    its conditions.

    The power limit lowers clocks under any sustained load, and ratios within a round hold: it alone is no reason for another race.
    """
    best: tuple[Raced, Conditions | None] | None = None
    for attempt in range(RACES):
        if attempt:
            time.sleep(pause_s)
        reply = race()
        if isinstance(reply, Failed):
            return best or (reply, None)
        found = watch.between(reply.began, reply.ended, reply.pid)
        # A race too short for a reading can't be known to be undisturbed.
        if best is None or (found is not None and _disturbances(found) < _disturbances(best[1])):
            best = reply, found
        if not _disturbances(found):
            break
    assert best is not None, "there is at least one race"
    return best


def _disturbances(found: Conditions | None) -> int:
    """Number of doubts that running again may remove: the power limit's isn't one."""
    return 0 if found is None else len(found.doubts) - found.power_limited


def gpu_id() -> str:
    """UUID of this process's GPU, PyTorch's device 0, as nvidia-smi takes it."""
    import torch

    uuid = getattr(torch.cuda.get_device_properties(0), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else "0"
