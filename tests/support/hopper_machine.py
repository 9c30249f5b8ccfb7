"""Part of both stand-ins for a Hopper GPU: roles as threads in an order of events that a seed draws, and barriers in shared memory.

`hopper_protocol` gives them names of blocks in place of numbers, `hopper_emulator` torch's tensors.
"""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from hopper_kernels import Truncate, functions_of, names_of

THREADS = ThreadPoolExecutor(1024)
"""Kept, since starting and ending one takes 2 ms where torch is; more than the roles that a machine has at a time."""


class Number(int):
    """An integer of the device."""

    def to(self, _dtype: Any) -> "Number":
        return self


def _integer(name: str) -> Callable[..., Any]:
    plain = getattr(int, name)

    def operate(*numbers: int) -> Any:
        found = plain(*numbers)
        return found if found is NotImplemented else Number(found)

    return operate


for _name in ("add", "sub", "mul", "and", "or", "xor", "rshift", "lshift"):
    setattr(Number, f"__{_name}__", _integer(f"__{_name}__"))
    setattr(Number, f"__r{_name}__", _integer(f"__r{_name}__"))
for _name in ("neg", "invert"):
    setattr(Number, f"__{_name}__", _integer(f"__{_name}__"))


def quotient(a: int, b: int) -> Number:
    """Integer division as Triton does it, towards zero."""
    return Number(abs(a) // b * (-1 if a < 0 else 1))


def remainder(a: int, b: int) -> Number:
    """The rest of `quotient`, of the sign of `a`."""
    return Number(abs(a) % b * (-1 if a < 0 else 1))


class Barrier:
    """A barrier in shared memory."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def advance(self) -> None:
        """Completes the phase where all have arrived and all bytes have landed."""
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count


def closed() -> threading.Lock:
    """Gate that one thread waits at until another one releases it, in fewer steps than a semaphore takes."""
    lock = threading.Lock()
    lock.acquire()
    return lock


class Role:
    """A warpgroup or a warp of one program: what it started, and waits for."""

    def __init__(
        self, machine: "Scheduler", program: int, work: Callable[..., None], arguments: tuple[Any, ...], threads: int = 128
    ) -> None:
        self.program, self.threads = program, threads
        self.name = f"{work.__name__}{arguments[-1] if isinstance(arguments[-1], int) else ''} of program {program}"
        self.ready: Callable[[], bool] = lambda: True
        self.products: list[Any] = []
        self.loads: list[Any] = []
        self.leaving: list[Any] = []
        self.done = False
        self.error: BaseException | None = None
        self.turn = closed()

        def run() -> None:
            self.turn.acquire()
            try:
                if machine.over:
                    return
                work(*arguments)
                machine.check_end(self)
                self.done = True
                following = machine.chosen()
            except SystemExit:
                return
            except BaseException as error:
                self.error, following = error, None
            (machine.ended if following is None else following.turn).release()

        self.run = run


class Scheduler:
    """Roles of which one runs at a time, copies that land at any time, and barriers between them; `seed` draws the order."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._programs = self._program = 0
        self.begin()

    def begin(self) -> None:
        """Forgets the roles and copies of what ran before."""
        self._roles: list[Role] = []
        self._copies: list[Callable[[], None]] = []
        self._running: Role | None = None
        self.ended, self.over = closed(), False

    def kernel_of(self, module: ModuleType, name: str, stand_ins: dict[str, Any]) -> Callable[..., None]:
        """A kernel of a rendered module as an ordinary function, with these names in place of the module's."""
        names = [one for one, value in names_of(module).items() if type(value).__name__ == "GluonJITFunction" and one not in stand_ins]
        found: Callable[..., None] = functions_of(module, tuple(names), stand_ins, Truncate)[name]
        return found

    @property
    def _role(self) -> Role:
        """The role that runs."""
        assert self._running is not None
        return self._running

    def play(self) -> None:
        """Runs all roles to their ends; raises AssertionError where one does what it must not, or all wait for one another."""
        threads = [THREADS.submit(role.run) for role in self._roles]
        try:
            if (first := self.chosen()) is not None:
                first.turn.release()
                self.ended.acquire()
            for role in self._roles:
                if role.error is not None:
                    raise role.error
        finally:
            self.over = True
            for role, thread in zip(self._roles, threads, strict=True):
                role.turn.release()
                thread.result()

    def chosen(self) -> Role | None:
        """The role that runs next, which each calls where it pauses, after copies that land before it; none where all have ended."""
        while (able := [role for role in self._roles if not role.done and role.ready()]) or not all(role.done for role in self._roles):
            assert able or self._copies, "all wait: " + ", ".join(role.name for role in self._roles if not role.done)
            place = self._random.randrange(len(able) + len(self._copies))
            if place < len(able):
                self._running = able[place]
                return able[place]
            self._copies.pop(place - len(able))()
        return None

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Lets others go first, and waits until `ready`."""
        role = self._role
        role.ready = ready
        following = self.chosen()
        if following is role:
            return
        assert following is not None
        following.turn.release()
        role.turn.acquire()
        if self.over:
            raise SystemExit

    def check_end(self, role: Role) -> None:
        """Raises AssertionError where a role ends too early."""

    def _wait(self, barrier: Barrier, phase: int, pred: bool = True) -> None:
        self.pause(lambda: not pred or barrier.phase % 2 != phase)

    def _arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        self.pause()
        if pred:
            barrier.pending -= count
            barrier.advance()

    def _expect(self, barrier: Barrier, nbytes: int) -> None:
        self.pause()
        barrier.bytes += nbytes
        barrier.pending -= 1
        barrier.advance()

    def _init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count
