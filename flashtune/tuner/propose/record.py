"""Record of a study in an Optuna storage: the candidates' claims and outcomes, and the decision at the end.

Every trial begins as a claim: a waiting trial with the candidate's parameters and its worker id; it runs when its turn comes. Of two claims
of one candidate the one with the lower number holds, since a storage numbers the trials of a study under a lock; the other is withdrawn. So
any number of processes share a study and none tries what another is trying. A claim of a worker that has ended is void, and the candidate
free again.
"""

import json
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import optuna
from optuna.distributions import BaseDistribution
from optuna.trial import FrozenTrial, TrialState

from flashtune.core.errors import DatabaseError, FlashtuneError
from flashtune.core.secrets import mask_secrets
from flashtune.core.unbroken import unbroken
from flashtune.db.inspection import explain
from flashtune.tuner.propose import worker_id

T = TypeVar("T")

PATIENCE_S = 60.0
"""Seconds for which a storage may be locked or out of reach (its server restarts, say) before the search gives up."""
LEAVING_S = 5.0
"""Seconds for which releasing claims is retried; those of an ended process are void anyway."""
BEAT_S = 10.0
"""Seconds between a process's heartbeats."""
GRACE_S = 60.0
"""Seconds without a heartbeat after which a process on another machine counts as ended."""

_OUTCOME, _WORKER, _ROLE, _DECISION, _FINISHED = "outcome", "claimant", "role", "decision", "finished"
"""Attribute names: roles and finished plans are user attributes, which Optuna's tools show; the others are system attributes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """State of one candidate in the record: its outcome, or its claim, or neither (it is free)."""

    claim: int
    """Number of the trial that holds it."""
    params: Mapping[str, Any]
    outcome: str | None = None
    mine: bool = False
    taken: bool = False
    """True while a living process tries it."""

    @property
    def free(self) -> bool:
        """True where nobody tried it or is trying it."""
        return not self.taken and self.outcome is None


class Record:
    """One study in a storage.

    Raises DatabaseError where the storage stays locked or out of reach for `PATIENCE_S`, EnvironmentProblem where it is full or may not be
    written.
    """

    def __init__(self, storage: optuna.storages.BaseStorage, name: str) -> None:
        self._where = mask_secrets(str(getattr(storage, "url", "in memory")))
        self._storage = optuna.storages.get_storage(storage)
        self._me = worker_id.name()
        self._claims: dict[str, int] = {}
        self._beats: dict[str, tuple[object, float]] = {}
        self._stop_beating: threading.Event | None = None
        self._ended: dict[str, Entry] = {}
        self._read = 0
        self._study_id = self._patiently(lambda: self._opened(name))

    def _opened(self, name: str) -> int:
        study = optuna.create_study(storage=self._storage, study_name=name, direction="minimize", load_if_exists=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            if study.metric_names is None:
                study.set_metric_names(["median_us"])
        return self._storage.get_study_id_from_name(name)

    def entries(self) -> dict[str, Entry]:
        """Every candidate that was ever claimed, by `key_of` its parameters, in the order of first claims."""
        trials = self._trials()
        alive: dict[str, bool] = {}
        # Ended trials never change.
        while self._read < len(trials) and trials[self._read].state.is_finished():
            self._enter(self._ended, trials[self._read], alive)
            self._read += 1
        found = dict(self._ended)
        for trial in trials[self._read :]:
            self._enter(found, trial, alive)
        return found

    def _enter(self, found: dict[str, Entry], trial: FrozenTrial, alive: dict[str, bool]) -> None:
        if _ROLE in trial.user_attrs:
            return
        key = key_of(trial.params)
        taken = not trial.state.is_finished() and self._alive(trial, alive)
        before = found.get(key)
        if before is not None and (before.outcome is not None or before.taken):
            return
        outcome = trial.system_attrs.get(_OUTCOME)
        found[key] = Entry(
            claim=trial.number,
            params=trial.params,
            outcome=outcome,
            taken=taken and outcome is None,
            mine=taken and outcome is None and trial.system_attrs[_WORKER] == self._me,
        )

    def claim(self, params: Mapping[str, Any], distributions: Mapping[str, BaseDistribution]) -> None:
        """Claim a candidate for this process; `entries` then shows whether the claim was the first."""
        self._beat()
        self._claims[key_of(params)] = self._new(TrialState.WAITING, dict(params), dict(distributions), {})

    def begin(self, key: str) -> None:
        """Mark a claimed candidate as running, so that its duration shows in Optuna's tools."""
        start = partial(self._storage.set_trial_state_values, self._claims[key], TrialState.RUNNING)
        self._patiently(partial(self._unless_ended, start))

    def describe(self, facts: Mapping[str, object]) -> None:
        """Store facts about the study for Optuna's tools."""
        known = self._shown()
        for name, value in facts.items():
            if name not in known:
                self._patiently(partial(self._storage.set_study_user_attr, self._study_id, name, value))

    def settle(self, key: str, outcome: str, value: float | None, facts: Mapping[str, object]) -> None:
        """Store the outcome of a claimed candidate; without effect where this process counted as ended and another stored an outcome.

        `facts` are shown by Optuna's tools.
        """
        trial_id = self._claims.pop(key)
        for name, fact in facts.items():
            self._patiently(partial(self._unless_ended, partial(self._storage.set_trial_user_attr, trial_id, name, fact)))
        self._patiently(lambda: self._unless_ended(lambda: self._storage.set_trial_system_attr(trial_id, _OUTCOME, outcome)))
        state = TrialState.FAIL if value is None else TrialState.COMPLETE
        self._end(trial_id, state, value)

    def give_back(self, key: str) -> None:
        """Withdraw a claim: another process may try the candidate."""
        trial_id = self._claims.pop(key, None)
        if trial_id is not None:
            self._end(trial_id, TrialState.FAIL)

    def leave(self) -> None:
        """Withdraw all claims of this process that have no outcome."""
        self._fall_silent()
        claims, self._claims = list(self._claims.values()), {}
        with suppress(FlashtuneError):
            for trial_id in claims:
                self._end(trial_id, TrialState.FAIL, patience_s=LEAVING_S)

    def decision(self) -> dict[str, Any] | None:
        """Decision stored by `decide`, or None."""
        found: dict[str, Any] | None = self._attributes().get(_DECISION)
        return found

    def may_decide(self) -> bool:
        """Claim the decision; False where a living process has done so before."""
        self._beat()
        self._claims[_DECISION] = self._new(TrialState.RUNNING, {}, {}, {_ROLE: _DECISION})
        alive: dict[str, bool] = {}
        claims = [t for t in self._trials() if _ROLE in t.user_attrs and t.state is TrialState.RUNNING and self._alive(t, alive)]
        first = min(claims, key=lambda trial: trial.number)
        if first.system_attrs[_WORKER] == self._me and self.decision() is None:
            return True
        self._end(self._claims.pop(_DECISION), TrialState.FAIL)
        return False

    def decide(self, decision: dict[str, Any]) -> None:
        """Store the decision that ends the search of this study."""
        self._patiently(lambda: self._storage.set_study_system_attr(self._study_id, _DECISION, decision))
        self._end(self._claims.pop(_DECISION), TrialState.PRUNED)
        self._fall_silent()

    def finish(self) -> None:
        """Mark the study as one that no later run continues."""
        self._patiently(lambda: self._storage.set_study_user_attr(self._study_id, _FINISHED, True))

    @property
    def finished(self) -> bool:
        """True once `finish` was called."""
        return bool(self._shown().get(_FINISHED))

    def _trials(self) -> list[FrozenTrial]:
        return self._patiently(lambda: self._storage.get_all_trials(self._study_id, deepcopy=False))

    def _shown(self) -> dict[str, Any]:
        return self._patiently(lambda: self._storage.get_study_user_attrs(self._study_id))

    def _attributes(self) -> dict[str, Any]:
        return self._patiently(lambda: self._storage.get_study_system_attrs(self._study_id))

    def _new(
        self, state: TrialState, params: dict[str, Any], distributions: dict[str, BaseDistribution], attributes: dict[str, Any]
    ) -> int:
        trial = optuna.trial.create_trial(
            state=state,
            params=params,
            distributions=distributions,
            user_attrs=attributes,
            system_attrs={_WORKER: self._me},
        )
        return self._patiently(lambda: self._storage.create_new_trial(self._study_id, trial))

    def _end(self, trial_id: int, state: TrialState, value: float | None = None, *, patience_s: float | None = None) -> None:
        values = None if value is None else [value]
        end = partial(self._storage.set_trial_state_values, trial_id, state, values)
        self._patiently(lambda: self._unless_ended(end), patience_s)

    @staticmethod
    def _unless_ended(work: Callable[[], object]) -> None:
        # Ended by an earlier attempt whose answer was lost, or by another that took this process for ended.
        with suppress(optuna.exceptions.UpdateFinishedTrialError):
            work()

    def _alive(self, trial: FrozenTrial, known: dict[str, bool]) -> bool:
        """True while the worker of an unfinished trial lives; an ended one's trial is marked as failed."""
        who = str(trial.system_attrs.get(_WORKER))
        if who not in known:
            known[who] = who == self._me or self._lives(who)
        if not known[who]:
            self._end(self._storage.get_trial_id_from_study_id_trial_number(self._study_id, trial.number), TrialState.FAIL)
        return known[who]

    def _lives(self, who: str) -> bool:
        here = worker_id.lives_here(who)
        if here is not None:
            return here
        # Clocks of machines may differ, so a heartbeat counter is compared with its earlier value.
        count, now = self._attributes().get(_beat_of(who)), time.monotonic()
        seen, since = self._beats.get(who, (None, now))
        if count != seen or who not in self._beats:
            self._beats[who] = count, now
            return True
        return now - since < GRACE_S

    def _beat(self) -> None:
        """Start this process's heartbeat, for processes on other machines."""
        if self._stop_beating is None:
            self._stop_beating = threading.Event()
            threading.Thread(target=self._beat_on, args=(self._stop_beating,), daemon=True).start()

    def _fall_silent(self) -> None:
        if self._stop_beating is not None:
            self._stop_beating.set()
            self._stop_beating = None

    def _beat_on(self, stop: threading.Event) -> None:
        count = 0
        while not stop.is_set():
            # The search itself meets the same fault, and reports it.
            with suppress(Exception):
                self._storage.set_study_system_attr(self._study_id, _beat_of(self._me), count)
            count += 1
            stop.wait(BEAT_S)

    def _patiently(self, work: Callable[[], T], patience_s: float | None = None) -> T:
        """Result of `work`, retried while the storage is locked or out of reach; every operation here may be repeated safely."""
        deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        pause = 0.05
        while True:
            try:
                # An interrupted write would keep the file locked against this process's own clean-up.
                with unbroken():
                    return work()
            except Exception as error:
                # Optuna wraps most of SQLAlchemy's errors, and lets some through.
                wrapped = isinstance(error, optuna.exceptions.StorageInternalError)
                if not wrapped and not type(error).__module__.startswith("sqlalchemy."):
                    raise
                if time.monotonic() > deadline:
                    raise storage_fault(self._where, error) from error
                time.sleep(pause)
                pause = min(2.0, 2 * pause)


def storage_fault(shown: str, error: BaseException) -> FlashtuneError:
    """One-sentence error for a fault of the database behind the storage `shown`."""
    if isinstance(error, optuna.exceptions.StorageInternalError):
        error = error.__cause__ or error
    cause = getattr(error, "orig", None) or error
    if isinstance(cause, sqlite3.Error):
        return explain(cause, f"the study storage {shown}")
    message = mask_secrets(" ".join(str(cause).split()))[:300]
    return DatabaseError(f"the study storage {shown} can't be used ({message}): check the URL, its permissions and the server")


def newest_unfinished(storage: optuna.storages.BaseStorage, name: str) -> tuple[Record, int]:
    """Newest record called `name-NUMBER` and its number; the next one where that is finished."""
    prefix = f"{name}-"
    numbers = (study.removeprefix(prefix) for study in optuna.get_all_study_names(storage) if study.startswith(prefix))
    newest = max((int(number) for number in numbers if number.isdecimal()), default=1)
    record = Record(storage, f"{prefix}{newest}")
    return (Record(storage, f"{prefix}{newest + 1}"), newest + 1) if record.finished else (record, newest)


def key_of(params: Mapping[str, Any]) -> str:
    """Canonical text of parameters, equal for equal ones."""
    return json.dumps(params, sort_keys=True)


def _beat_of(who: str) -> str:
    return f"beat {who}"
