"""Counts of mispredicting programs of kernels with a frozen row maximum, and the latch to a fallback kernel (decision 0008)."""

import ctypes
import threading
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

import torch

from flashtune.core.pytorch.private import C
from flashtune.dispatch.plans import driver

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

_Serving = TypeVar("_Serving")


class Latch(Generic[_Serving]):
    """Switch from what serves calls to a fallback, once and for all, where the softmax was mispredicted."""

    __slots__ = ("_make", "other", "state")

    def __init__(self, state: Misprediction, make: Callable[..., _Serving | None]) -> None:
        """`make` makes the fallback at its first call; None where it can't serve."""
        self.state: Misprediction | None = state
        """Counts; None where the fallback can't serve."""
        self.other: _Serving | None = None
        self._make = make

    @property
    def suspect(self) -> bool:
        """True where the fallback may serve, so that a call has to look further, which hardly any has."""
        state = self.state
        return state is not None and (state.latched or state.mispredicted.value != state.seen)

    def serving(self, *given: Any) -> _Serving | None:
        """The fallback, where it serves this call, made with the arguments `given` where it isn't yet; None where it doesn't serve."""
        state = self.state
        if state is None or not self.suspect or torch.are_deterministic_algorithms_enabled():
            return None
        if C._cuda_isCurrentStreamCapturing():
            # A graph keeps the kernel of its capture, so that captured calls never switch.
            return self.other if state.latched else None
        if not state.check():
            return None
        if self.other is None:
            self.other = self._make(*given)
            if self.other is None:
                self.release()
        return self.other

    def release(self) -> None:
        """Leave all calls to what serves now: the fallback can't serve, and that is slower on these scores, but correct."""
        if self.state is not None:
            self.state.latched = False
        self.state = self.other = None
