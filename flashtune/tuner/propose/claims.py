"""Claims of whole problems by the processes that share a plan, in a study of the plan's own.

A process takes a number (a running trial), waits until those with lower numbers have chosen, and then chooses a problem that nobody holds:
no claim is ever taken back for another's. Optuna's heartbeat of the trial says that its process still runs; of a process on the same
machine its worker id does, at once.
"""

import hashlib
import os
import secrets
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import optuna
from optuna.trial import FrozenTrial, TrialState, create_trial

from flashtune.core.system.errors import FlashtuneError
from flashtune.tuner.propose.storage import newest_unfinished

BEAT_S = 10
"""Seconds between two heartbeats of a claim."""
GRACE_S = 60
"""Seconds without a heartbeat after which a process on another machine counts as ended."""
LEAVING_S = 5.0
"""Seconds for which releasing claims is retried; those of an ended process are void anyway."""
_TURN_S = 0.02
"""Seconds between two looks at claims with lower numbers that have not chosen yet."""

_WORKER, _PROBLEM = "worker", "problem"


class Claims:
    """Claims of one run of a plan; any thread may use them. A problem is any text that names it in every process.

    The run is the newest unfinished one of a plan that `words` identify, or else a new one; `suffix` belongs into the names of its studies.
    A context manager that releases what this process still holds. Raises the errors of a `StoredStudy`.
    """

    def __init__(self, storage: optuna.storages.BaseStorage, words: Sequence[object]) -> None:
        plan = hashlib.sha256(repr(words).encode()).hexdigest()[:12]
        self._stored, run = newest_unfinished(storage, f"search-{plan}")
        self.suffix = f"{plan}-{run}"
        self._held: dict[str, int] = {}
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._beating = threading.Thread(target=self._beat_on, name="claims", daemon=True)

    def __enter__(self) -> "Claims":
        self._beating.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._beating.join(LEAVING_S)
        with suppress(FlashtuneError):
            for problem in list(self._held):
                self.release(problem)

    def decided(self) -> set[str]:
        """Problems that any process has decided."""
        return {row.user_attrs[_PROBLEM] for row in self._rows() if row.state is TrialState.COMPLETE}

    def take(self, wanted: Sequence[str]) -> str | None:
        """Claim the first of `wanted` that nobody holds or has decided; None where there is none."""
        with self._lock:
            if self._first_free(wanted, self._rows()) is None:
                return None
            trial_id = self._stored.add(create_trial(state=TrialState.RUNNING, user_attrs={_WORKER: worker_id()}))
            try:
                self._beat(trial_id)
                problem = self._first_free(wanted, self._rows_after_choices(trial_id))
                if problem is not None:
                    self._stored.patiently(lambda: self._stored.storage.set_trial_user_attr(trial_id, _PROBLEM, problem))
                    self._held[problem] = trial_id
            except BaseException:
                self._end(trial_id, TrialState.FAIL, patience_s=LEAVING_S)
                raise
            if problem is None:
                self._end(trial_id, TrialState.FAIL)
            return problem

    def holds(self, problem: str) -> bool:
        """True while this process holds the claim; False once others took it for ended (it was suspended, say)."""
        return problem in self._held

    def decide(self, problem: str, best_us: float) -> None:
        """Mark a held problem as decided, with the winner's time in microseconds (infinite where there is none)."""
        with self._lock:
            if (trial_id := self._held.pop(problem, None)) is not None:
                self._end(trial_id, TrialState.COMPLETE, best_us)

    def release(self, problem: str) -> None:
        """Give a claim back; any process may take the problem."""
        with self._lock:
            if (trial_id := self._held.pop(problem, None)) is not None:
                self._end(trial_id, TrialState.FAIL, patience_s=LEAVING_S)

    def finish(self) -> None:
        """Mark the run as finished: the same plan starts a new one from now on."""
        self._stored.set_attribute("finished", True)

    def _first_free(self, wanted: Sequence[str], rows: Sequence[FrozenTrial]) -> str | None:
        states = (TrialState.RUNNING, TrialState.COMPLETE)
        taken = {row.user_attrs.get(_PROBLEM) for row in rows if row.state in states}
        return next((problem for problem in wanted if problem not in taken), None)

    def _rows_after_choices(self, trial_id: int) -> list[FrozenTrial]:
        """Rows once each with a lower number has chosen, or has had `GRACE_S` to do so."""
        deadline = time.monotonic() + GRACE_S
        while True:
            rows = self._rows()
            number = next(row.number for row in rows if row._trial_id == trial_id)
            undecided = [row for row in rows[:number] if row.state is TrialState.RUNNING and _PROBLEM not in row.user_attrs]
            if not undecided:
                return rows
            if time.monotonic() > deadline:
                for row in undecided:
                    self._end(row._trial_id, TrialState.FAIL)
            time.sleep(_TURN_S)

    def _rows(self) -> list[FrozenTrial]:
        """All claims, in the order of their numbers; those of ended processes are marked as failed before."""
        with warnings.catch_warnings():
            # Without heartbeats (in memory) it does nothing; Optuna calls it experimental.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._stored.patiently(lambda: optuna.storages.fail_stale_trials(self._stored.study))
        rows = self._stored.trials()
        ended = [row for row in rows if row.state is TrialState.RUNNING and lives_here(row.user_attrs[_WORKER]) is False]
        for row in ended:
            self._end(row._trial_id, TrialState.FAIL)
        return self._stored.trials() if ended else rows

    def _end(self, trial_id: int, state: TrialState, value: float | None = None, patience_s: float | None = None) -> None:
        values = None if value is None else [value]

        def end() -> None:
            # Ended by an earlier attempt whose answer was lost, or by another that took this process for ended.
            with suppress(optuna.exceptions.UpdateFinishedTrialError):
                self._stored.storage.set_trial_state_values(trial_id, state, values)

        self._stored.patiently(end, patience_s)

    def _beat(self, trial_id: int) -> None:
        # Storages in memory, which no other process sees, have none.
        if (record := getattr(self._stored.storage, "record_heartbeat", None)) is not None:
            record(trial_id)

    def _beat_on(self) -> None:
        while not self._stop.wait(BEAT_S):
            for problem, trial_id in list(self._held.items()):
                # The search itself meets the same fault, and reports it.
                with suppress(Exception):
                    self._beat(trial_id)
                    if self._stored.storage.get_trial(trial_id).state is not TrialState.RUNNING:
                        self._held.pop(problem, None)


def worker_id() -> str:
    """Worker id of this process, with a token that makes it unique."""
    return "/".join((_machine(), str(os.getpid()), _started(os.getpid()) or "", secrets.token_hex(4)))


def lives_here(who: str) -> bool | None:
    """True while the worker's process is running; None where only its heartbeat can show that.

    None stands for a process on another machine (or in another container), and for another search of this very process.
    """
    machine, _, rest = who.partition("/")
    parts = rest.split("/")
    if machine != _machine() or not machine or len(parts) != 3 or not parts[0].isdigit():
        return None
    if int(parts[0]) == os.getpid() and parts[1] == _started(os.getpid()):
        return None
    return _started(int(parts[0])) == parts[1]


def _machine() -> str:
    """Id of this boot of this machine and its namespace of process ids; empty where the system provides none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}+{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str | None:
    """Start time of a process, in the kernel's ticks; None where there is none or it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # Fields 3 and 22 of proc(5); states Z and X have ended and wait to be collected.
    return None if fields[0] in "ZX" else fields[19]
