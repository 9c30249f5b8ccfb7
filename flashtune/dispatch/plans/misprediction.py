"""Latch between a plan's kernel and its fallback kernel, driven by counts that the kernel keeps.

A kernel with a frozen row max is the fastest on most scores, and one of the slower ones where scores defeat the prediction (decision 0008).
It counts its launches and its mispredicting programs where the host can read them without waiting. Once many programs of the last launches
mispredicted, the fallback kernel, whose time doesn't depend on scores, serves such calls until the process ends.
"""

import ctypes
import threading
from collections.abc import Hashable

from flashtune.dispatch.launch import driver

WINDOW = 8
"""Launches whose programs are looked at (`count_launch` in flashtune/templates/hopper keeps as many counts). With SHARE two whole launches
have to mispredict, so that one odd launch changes nothing."""

SHARE = 4
"""The latch closes where 1 / SHARE of the programs mispredicted: such a program loses up to half of its speed, and the fallback kernel is
some 10 % slower than the others."""

_LOW = 2**32 - 1


class Misprediction:
    """Counts of a plan's launches and of their mispredicting programs, and the latch. Threads share it without a lock.

    `addresses` are those of the count in the GPU's memory and of its mirror in the host's. The mirror is a 64-bit word, with launches in
    the high half and mispredicting programs in the low one, then copies of it from the start of each of the last WINDOW launches, that of
    launch i at i % WINDOW.
    """

    __slots__ = ("_words", "addresses", "latched", "mispredicted", "programs", "seen")

    def __init__(self, counted: int, mirror: int) -> None:
        self.addresses = counted, mirror
        self._words = (ctypes.c_uint64 * (1 + WINDOW)).from_address(mirror)
        self.mispredicted = ctypes.c_uint32.from_address(mirror)
        """Mispredicting programs so far, modulo 2^32, in `value`; may lag behind."""
        self.seen = 0
        """Its value at the last `check`: where it is the same, nothing is to be checked."""
        self.programs = 1
        """Programs of a launch."""
        self.latched = False
        """True from when on the fallback kernel serves."""

    def check(self) -> bool:
        """True where the fallback kernel serves, by all counts so far."""
        if not self.latched:
            now = self._words[0]
            self.seen = now & _LOW
            mispredicted = (now - self._words[1 + (now >> 32) % WINDOW]) & _LOW
            self.latched = SHARE * mispredicted >= WINDOW * self.programs
        return self.latched


class Mispredictions:
    """Counts by key, so that a plan that is chosen again continues with its own, and its latch. They stay for as long as the process runs,
    since a captured graph may still write to them."""

    _ROOM = 128
    _CHUNK = 8192

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[tuple[int, Hashable], Misprediction] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}

    def of(self, device: int, key: Hashable) -> Misprediction:
        """Counts of this key on a GPU, 0 where they are new; raises DriverError."""
        with self._lock:
            if (device, key) not in self._found:
                free = self._free.setdefault(device, [])
                if not free:
                    counted, mirror = driver.resident(device, bytes(self._CHUNK)), driver.host_memory(device, self._CHUNK)
                    free += [(counted + place, mirror + place) for place in range(0, self._CHUNK, self._ROOM)]
                self._found[device, key] = Misprediction(*free.pop())
            return self._found[device, key]


MISPREDICTIONS = Mispredictions()
